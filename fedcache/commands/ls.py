"""``fedcache ls``: the stores, or the results, under ``FEDCACHE_HOME``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fedcache.commands.options import Dataset, Json
from fedcache.commands.output import CommandResult, TerminalObserver, run_command, table
from fedcache.config import Home
from fedcache.errors import Exit, FedcacheError, UsageError
from fedcache.extract.planning.find_store import need_path
from fedcache.report.find_runs import gather
from fedcache.store.store import Store


def ls(
    dataset: Dataset = None,
    runs: Annotated[bool, typer.Option("--runs", help="List the results instead of the stores.")] = False,
    json: Json = False,
) -> None:
    """List the stores and what they hold; with --dataset only that one, with --runs the results.

    Example: fedcache ls --runs
    """

    def call(observer: TerminalObserver) -> CommandResult:
        if runs:
            return list_runs(observer, dataset)
        home = Home.from_environment()
        entries: list[dict[str, Any]] = []
        listed = sorted(home.stores.glob("*.zarr")) if home.stores.is_dir() else []
        for path in listed if dataset is None else [need_path(home, dataset=dataset)]:
            try:
                store = Store.open(path)
            except FedcacheError as error:
                observer.warn(f"{path.name}: {error.message}")
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
        return CommandResult({"entries": entries}, lines, Exit.OK, shown)

    run_command("ls", json, call)


def list_runs(observer: TerminalObserver, dataset: str | None) -> CommandResult:
    """The results of ``ls --runs``."""
    if dataset is not None:
        raise UsageError("ls --runs takes no --dataset.", "fedcache ls --runs")
    root = Home.from_environment().runs
    found = gather([], root)
    entries = [
        {
            "name": e.digest,
            "path": str(e.path),
            "method": e.method,
            "dataset": e.result["dataset"]["slug"],
            "backbones": list(e.result["backbones"]),
            "partition": e.result["partition"]["name"] or e.result["partition"]["scheme"],
            "rounds": e.result["rounds"],
            "seeds": list(e.result["seeds"]),
            "accuracy": e.result["accuracy"]["mean"],
        }
        for e in found.entries
    ]
    for left in found.left_out:
        observer.warn(f"{left.path.name} {left.why.lstrip('/')} {left.hint}")
    rows = [
        (
            e["name"],
            e["method"],
            e["dataset"],
            " + ".join(e["backbones"]),
            str(e["partition"]),
            str(e["rounds"]),
            str(len(e["seeds"])),
            "-" if e["accuracy"] is None else f"{100 * e['accuracy']:.2f}",
        )
        for e in entries
    ]
    left_out = [{"path": str(e.path), "why": e.why, "hint": e.hint} for e in found.left_out]
    names = ("run", "method", "dataset", "backbones", "partition", "rounds", "seeds", "accuracy %")
    shown = [table("", names, rows, right=("rounds", "seeds", "accuracy %"))] if rows else []
    lines = [] if rows else [f"No result under {root} yet.", "fedcache train --method fed3r"]
    return CommandResult({"entries": entries, "left_out": left_out}, lines, Exit.OK, shown)
