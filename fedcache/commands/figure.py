"""``fedcache figure``: draws one figure of runs into a file, for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcache.commands.options import RunQuery, RunsDirectory, command, runs_directory
from fedcache.commands.output import CommandResult, TerminalObserver
from fedcache.report.figure_file import LISTED, write_figure


@command("figure")
def figure(
    observer: TerminalObserver,
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help=f"{' | '.join(LISTED)}.", show_default=False)
    ],
    runs: RunQuery = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write: .pdf, .svg or .png. Default: KIND.pdf in the working directory.",
            show_default=False,
        ),
    ] = None,
    columns: Annotated[
        int,
        typer.Option("--columns", help="Width of the figure in columns of a paper: 1 or 2."),
    ] = 1,
    score: Annotated[
        str | None,
        typer.Option(
            "--score",
            help="Accuracy of all runs: client-mean | pooled (over all test rows), as in `fedcache report`.",
            show_default=False,
        ),
    ] = None,
    embed: Annotated[
        str, typer.Option("--embed", help="Projection of the figure `features`: pca | tsne | umap.")
    ] = "pca",
    root: RunsDirectory = None,
) -> CommandResult:
    """Draw one figure of runs for a paper, with embedded fonts.

    The figure shows the same data as the report. All runs must share a dataset and a partition, except for the
    figure `settings`. One column is 3.4 inches wide, two columns are 7.0 inches; letters have 8 points.
    fedcache orders the runs by validation accuracy, or by test accuracy if a run has no validation rows. The figure has
    no title, because the caption has it.

    Example: fedcache figure curves -o curves.pdf
    """
    path = out or Path(f"{kind}.pdf")
    made = write_figure(
        kind, runs or [], path, runs_directory(root), columns=columns, score=score, embed=embed
    )
    observer.note(made.description)
    rows = len(made.rows)
    data = {
        "path": str(path),
        "kind": kind,
        "title": made.title,
        "says": made.description,
        "rows": rows,
    }
    return CommandResult(data, [f"{path}: {made.title}, {rows} rows of data."])
