"""``fedcache inspect``, ``verify``, ``repair``, ``export`` and ``ingest``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.commands import options as o
from fedcache.commands.output import Answer, Story, answer, table
from fedcache.errors import Exit
from fedcache.extract.planning.find_store import need_path, need_store
from fedcache.extract.planning.ingest import describe_ingested, ingest_file
from fedcache.extract.planning.templates import quoted
from fedcache.runs.arrays import chosen_arrays
from fedcache.store import exchange, quarantine
from fedcache.store.store import Store
from fedcache.store.verify import repair as repair_store
from fedcache.store.verify import verify as verify_store

Where = Annotated[
    Path | None, typer.Argument(help="A store or its name; default the one last used.", show_default=False)
]


def inspect(store: Where = None, dataset: o.Dataset = None, json: o.Json = False) -> None:
    """Show what a store holds: dataset, recipes, how they were computed, unfinished arrays.

    Example: fedcache inspect
    """

    def call(story: Story) -> Answer:
        opened = need_store(o.home(), path=store, dataset=dataset, observer=story)
        samples = opened.samples
        codes = enumerate(("train", "test", "validation"))
        splits = {name: int(((samples.split == code) & (samples.ok == 1)).sum()) for code, name in codes}
        listed = opened.quarantined()
        bad = [entry for entry in listed if entry["reason"] != quarantine.VANISHED]
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
            *([f"unreadable  {len(bad):,}: {opened.path / quarantine.NAME}"] if bad else []),
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
        rows = []
        for a in arrays:
            r, how = a["recipe"], a["how"]
            side = r.get("size")
            prep = (
                f"{r.get('resize')} {side}, {r.get('interpolation')}, {r.get('activation')}"
                if side is not None
                else "as given"
            )
            computed = ", ".join(f"{k} {v}" for k, v in sorted(how.items()))
            rows.append(
                (a["name"], "x".join(map(str, a["shape"])), a["dtype"], prep, str(r.get("weights", ""))[:12], computed)
            )
        shown = (
            [table("", ("array", "shape", "dtype", "preprocessing", "weights", "how it was computed"), rows)]
            if rows
            else []
        )
        return Answer(data, lines, Exit.OK, shown)

    answer("inspect", json, call)


def text_of(store: Store) -> list[str]:
    """The text features of each backbone: the current templates, and how many others are stored."""
    lines = []
    for name, entries in sorted(store.texts.items()):
        current, others = quoted(entries[-1]["templates"]) or "from the file of embeddings", len(entries) - 1
        more = f"; {others} more stored" if others else ""
        chooses = " (fedcache extract --text chooses)" if entries[-1]["templates"] else ""
        lines.append(f"text        {name}: {current}{chooses}{more}")
    return lines


def verify(store: Where = None, dataset: o.Dataset = None, json: o.Json = False) -> None:
    """Read every byte of a store and compare it with the manifest.

    Example: fedcache verify
    """

    def call(story: Story) -> Answer:
        path = need_path(o.home(), path=store, dataset=dataset, observer=story)
        report = verify_store(path)
        data = report.to_dict()
        lines = report.lines()
        return Answer(data, lines, Exit.OK if report.ok else Exit.CORRUPT)

    answer("verify", json, call)


def repair(store: Where = None, dataset: o.Dataset = None, json: o.Json = False) -> None:
    """Drop what is damaged and can be made again; the extract command then computes only that.

    Example: fedcache repair
    """

    def call(story: Story) -> Answer:
        path = need_path(o.home(), path=store, dataset=dataset, observer=story)
        done = repair_store(path)
        report = verify_store(path)
        lines = [*(done or ["Nothing was repaired."]), *report.lines()]
        return Answer({"repaired": done, **report.to_dict()}, lines, Exit.OK if report.ok else Exit.CORRUPT)

    answer("repair", json, call)


def export(
    out: Annotated[Path, typer.Argument(help="File to write; its ending chooses npz, h5, parquet or safetensors.")],
    store: o.StoreDir = None,
    dataset: o.Dataset = None,
    backbones: o.Backbones = None,
    json: o.Json = False,
) -> None:
    """Write features, labels, domains and splits of readable rows to one file.

    Example: fedcache export features.parquet --backbones efficientnet-lite0
    """

    def call(story: Story) -> Answer:
        opened = need_store(o.home(), path=store, dataset=dataset, observer=story)
        keys = chosen_arrays(opened, o.listed(backbones))
        rows = exchange.export(opened, out, keys)
        return Answer({"path": str(out), "rows": rows, "arrays": keys}, [f"{rows:,} rows of {', '.join(keys)}: {out}"])

    answer("export", json, call)


def ingest(
    file: Annotated[Path, typer.Argument(help="npz, npy, h5, parquet or safetensors with features and labels.")],
    name: Annotated[str, typer.Option("--name", help="Name of the dataset, then --dataset NAME.")],
    store: o.StoreDir = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Drop other content stored under this name, with its partitions.")
    ] = False,
    json: o.Json = False,
) -> None:
    """Bring your own embeddings straight into a store.

    Keys read: features/<backbone> (or features, embeddings, X), labels (or y), and domain, split, name, classes,
    text/<backbone>. Without split, of each class the fifth with the smallest uids becomes the test set.

    Example: fedcache ingest embeddings.npz --name mine
    """

    def call(story: Story) -> Answer:
        home = o.home()
        made = ingest_file(home, file, name, store, replace=replace, observer=story)
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
        return Answer(data, [*lines, str(made.path), following])

    answer("ingest", json, call)
