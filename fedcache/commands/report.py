"""``fedcache report``: runs to one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcache.commands.options import command, runs_directory
from fedcache.commands.output import CommandResult, TerminalObserver
from fedcache.errors import Exit
from fedcache.report.page import write_report

RunQuery = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN",
        help="Directories of runs, or the first letters of their names (`fedcache ls --runs`); default all runs.",
        show_default=False,
    ),
]
Root = Annotated[
    Path | None, typer.Option("--runs", help="Directory of results, instead of the one under FEDCACHE_HOME.")
]


@command("report")
def report(
    observer: TerminalObserver,
    runs: RunQuery = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file; an earlier one is replaced.")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option("--title", help="Heading of the page.", show_default=False)] = "",
    embed: Annotated[
        str, typer.Option("--embed", help="pca | tsne | umap | none: how features come to two dimensions.")
    ] = "pca",
    root: Root = None,
) -> CommandResult:
    """Write one self-contained HTML file of runs: tables, curves, clients, costs, grids, confusions, features.

    It loads nothing from any network and is one file to send. Runs of different datasets or partitions are different
    sections; damaged and unfinished ones are named with the command that helps.

    Example: fedcache report -o report.html
    """
    made = write_report(runs or [], out, runs_directory(root), title=title, embed=embed, observer=observer)
    lines = [f"{made.path}: {made.runs} runs, {made.bytes / 1e6:.2f} MB."]
    if made.left_out:
        lines.append(f"{made.left_out} left out: the page says why and what helps.")
    if not made.runs:
        lines.append("There is no finished run yet:  fedcache train --method fed3r")
    return CommandResult(made.to_dict(), lines, Exit.OK)
