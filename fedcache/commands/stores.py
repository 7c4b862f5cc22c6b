"""``fedcache ls``, ``inspect``, ``verify``, ``repair``, ``export`` and ``ingest``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.commands import options as o
from fedcache.commands.output import Answer, Story, answer, table
from fedcache.errors import Exit, FedcacheError

Where = Annotated[Path | None, typer.Argument(help="A store; default the one last extracted.", show_default=False)]


def ls(json: o.Json = False) -> None:
    """List the stores and what they hold.

    Example: fedcache ls
    """

    def call(story: Story) -> Answer:
        from fedcache.store.store import Store

        home = o.home()
        entries: list[dict[str, Any]] = []
        for path in sorted(home.stores.glob("*.zarr")) if home.stores.is_dir() else []:
            try:
                store = Store.open(path)
            except FedcacheError as error:
                story.warn(f"{path.name}: {error.message}")
                entries.append({"name": path.name, "path": str(path), "problem": error.message})
                continue
            entries.append(
                {
                    "name": path.name,
                    "path": str(path),
                    "dataset": store.dataset["slug"],
                    "images": store.rows,
                    "ok": store.rows_ok,
                    "arrays": sorted(store.arrays),
                    "text": sorted(store.texts),
                    "partitions": sorted(store.partitions),
                    "bytes": sum(f.stat().st_size for f in path.rglob("*") if f.is_file()),
                }
            )
        rows = [
            (
                e["name"],
                f"{e['ok']:,} of {e['images']:,}",
                ", ".join(e["arrays"]),
                ", ".join(e["partitions"]),
                f"{e['bytes'] / 1e6:,.1f} MB",
            )
            if "dataset" in e
            else (e["name"], e["problem"], "", "", "")
            for e in entries
        ]
        lines = (
            []
            if rows
            else [
                f"No store under {home.stores} yet.",
                "fedcache extract --dataset digits --backbones efficientnet-lite0",
            ]
        )
        shown = (
            [table("", ("store", "images", "arrays", "partitions", "size"), rows, right=("images", "size"))]
            if rows
            else []
        )
        return Answer({"entries": entries}, lines, Exit.OK, shown)

    answer("ls", json, call)


def inspect(store: Where = None, json: o.Json = False) -> None:
    """Show what a store holds: dataset, recipes, how they were computed, unfinished arrays.

    Example: fedcache inspect
    """

    def call(story: Story) -> Answer:
        from fedcache.api.stores import need_store

        opened = need_store(o.home(), path=store, observer=story)
        samples = opened.samples
        splits = {name: int((samples.split == code).sum()) for code, name in enumerate(("train", "test", "validation"))}
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
            "images": opened.rows,
            "ok": opened.rows_ok,
            "classes": list(samples.classes),
            "domains": list(samples.domains),
            "splits": splits,
            "arrays": arrays,
            "unfinished": unfinished,
            "text": sorted(opened.texts),
            "partitions": sorted(opened.partitions),
        }
        more = " ..." if len(samples.classes) > 12 else ""
        lines = [
            f"{opened.path}",
            f"dataset     {opened.dataset['slug']}  {opened.dataset['digest']}",
            f"images      {opened.rows_ok:,} readable of {opened.rows:,}; "
            + ", ".join(f"{v:,} {k}" for k, v in splits.items() if v),
            f"classes     {len(samples.classes)}: {', '.join(samples.classes[:12])}{more}",
            f"domains     {', '.join(samples.domains)}",
            f"text        {', '.join(sorted(opened.texts)) or 'none'}",
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


def verify(store: Where = None, json: o.Json = False) -> None:
    """Read every byte of a store and compare it with the manifest.

    Example: fedcache verify
    """

    def call(story: Story) -> Answer:
        from fedcache.api.stores import need_store
        from fedcache.store.check import verify as check

        path = store if store is not None else need_store(o.home(), observer=story).path
        report = check(path)
        data = report.to_dict()
        lines = report.lines()
        return Answer(data, lines, Exit.OK if report.ok else Exit.CORRUPT)

    answer("verify", json, call)


def repair(store: Where = None, json: o.Json = False) -> None:
    """Drop what is damaged and can be made again; the extract command then computes only that.

    Example: fedcache repair
    """

    def call(story: Story) -> Answer:
        from fedcache.api.stores import need_store
        from fedcache.store.check import repair as mend
        from fedcache.store.check import verify as check

        path = store if store is not None else need_store(o.home(), observer=story).path
        done = mend(path)
        report = check(path)
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
        from fedcache.api.settings import chosen_arrays
        from fedcache.api.stores import need_store
        from fedcache.store.exchange import export as write

        opened = need_store(o.home(), path=store, dataset=dataset, observer=story)
        keys = chosen_arrays(opened, o.listed(backbones))
        rows = write(opened, out, keys)
        return Answer({"path": str(out), "rows": rows, "arrays": keys}, [f"{rows:,} rows of {', '.join(keys)}: {out}"])

    answer("export", json, call)


def ingest(
    file: Annotated[Path, typer.Argument(help="npz, npy, h5, parquet or safetensors with features and labels.")],
    name: Annotated[str, typer.Option("--name", help="Name of the dataset.")],
    store: o.StoreDir = None,
    json: o.Json = False,
) -> None:
    """Bring your own embeddings straight into a store.

    Keys read: features/<backbone> (or features, embeddings, X), labels (or y), and domain, split, name, classes.

    Example: fedcache ingest embeddings.npz --name mine
    """

    def call(story: Story) -> Answer:
        from fedcache.api.stores import ingest_file

        made = ingest_file(o.home(), file, name, store)
        data = {"path": str(made.path), "images": made.rows, "ok": made.rows_ok, "arrays": sorted(made.arrays)}
        return Answer(data, [f"{made.rows:,} rows, {', '.join(sorted(made.arrays))}", str(made.path)])

    answer("ingest", json, call)
