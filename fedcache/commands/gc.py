"""``fedcache gc``."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcache.commands.options import Json, split_list
from fedcache.commands.output import CommandResult, TerminalObserver, run_command, table
from fedcache.config import Home
from fedcache.errors import unknown
from fedcache.runs.garbage import DEFAULT, KINDS, find_garbage, remove


def gc(
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", help="leftovers | given-up | old-runs | old-stores, comma-separated; default leftovers,given-up."
        ),
    ] = None,
    days: Annotated[
        float, typer.Option("--days", min=0.0, help="Idle days after which a run without a result is given up.")
    ] = 7.0,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete what is listed; without it nothing changes.")
    ] = False,
    json: Json = False,
) -> None:
    """List what nothing will read again; --delete removes it.

    Leftovers are files of killed processes and files that no manifest knows; given-up runs have no result and are idle;
    old-runs are results of other code; old-stores hold what a dataset of the same name no longer is.

    Example: fedcache gc --kind leftovers,given-up,old-runs
    """

    def call(_observer: TerminalObserver) -> CommandResult:

        chosen = split_list(kind, "--kind") or DEFAULT
        for name in chosen:
            if name not in KINDS:
                raise unknown("--kind", name, KINDS)
        found = find_garbage(Home.from_environment(), chosen, idle_days=days)
        total = sum(g.bytes for g in found)
        data = {"garbage": [g.to_dict() for g in found], "bytes": total, "deleted": delete}
        shown = table(
            "",
            ("path", "kind", "why", "MB"),
            [(str(g.path), g.kind, g.why, f"{g.bytes / 1e6:,.1f}") for g in found],
            right=("MB",),
        )
        if not found:
            return CommandResult(data, [f"Nothing to delete among {', '.join(chosen)}."])
        if delete:
            remove(found)
            return CommandResult(data, [f"Deleted {len(found):,} things, {total / 1e6:,.1f} MB."], renderables=[shown])
        words = "" if tuple(chosen) == tuple(DEFAULT) else f" --kind {','.join(chosen)}"
        lines = [f"{len(found):,} things, {total / 1e6:,.1f} MB. Delete them:  fedcache gc{words} --delete"]
        return CommandResult(data, lines, renderables=[shown])

    run_command("gc", json, call)
