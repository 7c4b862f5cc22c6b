"""``fedcache inspect``, ``verify``, ``repair``, ``export`` and ``ingest``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.commands.options import Backbones, Dataset, Json, StoreDir, split_list
from fedcache.commands.output import CommandResult, TerminalObserver, run_command, table
from fedcache.config import Home
from fedcache.errors import Exit
from fedcache.extract.planning.find_store import need_path, need_store
from fedcache.extract.planning.ingest import describe_ingested, ingest_file
from fedcache.extract.planning.plan import quoted
from fedcache.runs.arrays import chosen_arrays
from fedcache.store.export import export as write_file
from fedcache.store.sidecars import QUARANTINE, VANISHED
from fedcache.store.store import Store
from fedcache.store.verify import repair as repair_store
from fedcache.store.verify import verify as verify_store

Where = Annotated[
    Path | None, typer.Argument(help="A store or its name; default the one last used.", show_default=False)
]


def inspect(store: Where = None, dataset: Dataset = None, json: Json = False) -> None:
    """Show what a store holds: dataset, recipes, how they were computed, unfinished arrays.

    Example: fedcache inspect
    """

    def call(observer: TerminalObserver) -> CommandResult:
        opened = need_store(Home.from_environment(), path=store, dataset=dataset, observer=observer)
        samples = opened.samples
        codes = enumerate(("train", "test", "validation"))
        splits = {name: int(((samples.split == code) & (samples.ok == 1)).sum()) for code, name in codes}
        listed = opened.quarantined()
        bad = [entry for entry in listed if entry["reason"] != VANISHED]
        vanished = len(listed) - len(bad)
        arrays: list[dict[str, Any]] = [
            {
                "name": key,
                "backbone": info.recipe.get("backbone"),
                "shape": list(info.shape),
                "dtype": info.dtype,
                "chunk_rows": info.chunk_rows,
                "chunks": len(info.chunks),
                "recipe": info.recipe,
                "how": info.how,
            }
            for key, info in sorted(opened.arrays.items())
        ]
        unfinished = opened.unfinished()
        data = {
            "path": str(opened.path),
            "dataset": opened.dataset,
            "images": opened.rows - vanished,
            "ok": opened.rows_ok,
            "vanished": vanished,
            "classes": list(samples.classes),
            "domains": list(samples.domains),
            "splits": splits,
            "bad": bad,
            "arrays": arrays,
            "unfinished": unfinished,
            "text": sorted(opened.texts),
            "text_templates": {name: opened.templates(name) for name in sorted(opened.texts)},
            "partitions": sorted(opened.partitions),
        }
        more = " ..." if len(samples.classes) > 12 else ""
        lines = [
            f"{opened.path}",
            f"dataset     {opened.dataset['slug']}  {opened.dataset['digest']}",
            f"images      {opened.rows_ok:,} readable of {opened.rows - vanished:,}; "
            + ", ".join(f"{v:,} {k}" for k, v in splits.items() if v),
            *([f"unreadable  {len(bad):,}: {opened.path / QUARANTINE}"] if bad else []),
            *([f"vanished    {vanished:,} rows of images that are no longer in the dataset"] if vanished else []),
            *([f"test set    {opened.dataset['held_out']}"] if "held_out" in opened.dataset else []),
            f"classes     {len(samples.classes)}: {', '.join(samples.classes[:12])}{more}",
            f"domains     {', '.join(samples.domains)}",
            *(text_of(opened) or ["text        none"]),
            f"partitions  {', '.join(sorted(opened.partitions)) or 'none'}",
        ]
        lines += [
            f"unfinished  {u['name']}: {u['kept']} of {u['chunks']} chunks; the same extract command goes on"
            for u in unfinished
        ]
        shown = [table_of_arrays(arrays)] if arrays else []
        return CommandResult(data, lines, Exit.OK, shown)

    run_command("inspect", json, call)


def table_of_arrays(arrays: Sequence[Mapping[str, Any]]) -> Any:
    """A table of a store's arrays: what they are, and how they were computed."""
    rows = []
    for a in arrays:
        recipe, side = a["recipe"], a["recipe"].get("size")
        prepared = f"{recipe.get('resize')} {side}, {recipe.get('interpolation')}, {recipe.get('activation')}"
        computed = ", ".join(f"{k} {v}" for k, v in sorted(a["how"].items()))
        shape, weights = "x".join(map(str, a["shape"])), str(recipe.get("weights", ""))[:12]
        rows.append((a["name"], shape, a["dtype"], "as given" if side is None else prepared, weights, computed))
    return table("", ("array", "shape", "dtype", "preprocessing", "weights", "how it was computed"), rows)


def text_of(store: Store) -> list[str]:
    """The text features of each backbone: the current templates, and how many others are stored."""
    lines = []
    for name, entries in sorted(store.texts.items()):
        current, others = quoted(entries[-1]["templates"]) or "from the file of embeddings", len(entries) - 1
        more = f"; {others} more stored" if others else ""
        chooses = " (fedcache extract --text chooses)" if entries[-1]["templates"] else ""
        lines.append(f"text        {name}: {current}{chooses}{more}")
    return lines


def verify(store: Where = None, dataset: Dataset = None, json: Json = False) -> None:
    """Read every byte of a store and compare it with the manifest.

    Example: fedcache verify
    """

    def call(observer: TerminalObserver) -> CommandResult:
        path = need_path(Home.from_environment(), path=store, dataset=dataset, observer=observer)
        report = verify_store(path)
        data = report.to_dict()
        lines = report.lines()
        return CommandResult(data, lines, Exit.OK if report.ok else Exit.CORRUPT)

    run_command("verify", json, call)


def repair(store: Where = None, dataset: Dataset = None, json: Json = False) -> None:
    """Drop what is damaged and can be made again; the extract command then computes only that.

    Example: fedcache repair
    """

    def call(observer: TerminalObserver) -> CommandResult:
        path = need_path(Home.from_environment(), path=store, dataset=dataset, observer=observer)
        done = repair_store(path)
        report = verify_store(path)
        lines = [*(done or ["Nothing was repaired."]), *report.lines()]
        return CommandResult({"repaired": done, **report.to_dict()}, lines, Exit.OK if report.ok else Exit.CORRUPT)

    run_command("repair", json, call)


def export(
    out: Annotated[Path, typer.Argument(help="File to write; its ending chooses npz, h5, parquet or safetensors.")],
    store: StoreDir = None,
    dataset: Dataset = None,
    backbones: Backbones = None,
    json: Json = False,
) -> None:
    """Write features, labels, domains and splits of readable rows to one file.

    Example: fedcache export features.parquet --backbones efficientnet-lite0
    """

    def call(observer: TerminalObserver) -> CommandResult:
        opened = need_store(Home.from_environment(), path=store, dataset=dataset, observer=observer)
        keys = chosen_arrays(opened, split_list(backbones))
        rows = write_file(opened, out, keys)
        return CommandResult(
            {"path": str(out), "rows": rows, "arrays": keys}, [f"{rows:,} rows of {', '.join(keys)}: {out}"]
        )

    run_command("export", json, call)


def ingest(
    file: Annotated[Path, typer.Argument(help="npz, npy, h5, parquet or safetensors with features and labels.")],
    name: Annotated[str, typer.Option("--name", help="Name of the dataset, then --dataset NAME.")],
    store: StoreDir = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Drop other content stored under this name, with its partitions.")
    ] = False,
    json: Json = False,
) -> None:
    """Bring your own embeddings straight into a store.

    Keys read: features/<backbone> (or features, embeddings, X), labels (or y), and domain, split, name, classes,
    text/<backbone>. Without split, of each class the fifth with the smallest uids becomes the test set.

    Example: fedcache ingest embeddings.npz --name mine
    """

    def call(observer: TerminalObserver) -> CommandResult:
        home = Home.from_environment()
        made = ingest_file(home, file, name, store, replace=replace, observer=observer)
        lines, following = describe_ingested(made, home, name)
        data = {
            "path": str(made.path),
            "dataset": made.dataset,
            "images": made.rows,
            "ok": made.rows_ok,
            "arrays": sorted(made.arrays),
            "notes": lines,
            "next": following,
        }
        return CommandResult(data, [*lines, str(made.path), following])

    run_command("ingest", json, call)
