"""``fedcache report``: writes one HTML file about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcache.commands.options import Data, RunQuery, RunsDirectory, command, pairs, runs_directory
from fedcache.commands.output import CommandResult, TerminalObserver
from fedcache.config import Home
from fedcache.extract.planning.find_images import ImagePlaces
from fedcache.parsing import counted
from fedcache.process import seldom_collected
from fedcache.report.page import LISTED, write_figure, write_report


@command("report")
def report(
    observer: TerminalObserver,
    runs: RunQuery = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write; an existing report is replaced.")
    ] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "",
    embed: Annotated[
        str,
        typer.Option(help="Projection of features to two dimensions: pca | tsne | umap | none."),
    ] = "pca",
    score: Annotated[
        str | None,
        typer.Option(
            help="Accuracy of all runs: client-mean | pooled (over all test rows). Default: the primary metric if "
            "all methods have the same one, else client-mean.",
        ),
    ] = None,
    with_images: Annotated[
        bool,
        typer.Option("--with-images", help="Also show the images of the most confident mistakes."),
    ] = False,
    data: Data = None,
    root: RunsDirectory = None,
) -> CommandResult:
    """Write one self-contained HTML file of runs: tables, curves, clients, costs, grids, confusions, features.

    The page begins with the best run, how certain the ranking is and what the best run costs. The best run is chosen
    by validation accuracy if --validation was used, else by test accuracy; the page names the rule. Each combination
    of dataset and partition has its own section. Damaged and unfinished runs are listed with the command that fixes
    them. --with-images shows thumbnails of the images that each saved model misclassifies, if the dataset is
    available. A page with images of persons is personal data.

    Example: fedcache report -o report.html
    """
    places = None
    if with_images:
        places = ImagePlaces(Home.from_environment(), pairs(data, "--data"))
    root = runs_directory(root)
    with seldom_collected():
        made = write_report(
            runs or [],
            out,
            root,
            title=title,
            embed=embed,
            score=score,
            images=places,
            observer=observer,
        )
    runs_shown = counted(made.runs, "run")
    megabytes = made.bytes / 1e6
    lines = [f"{made.path}: {runs_shown}, {megabytes:.2f} MB."]
    if with_images:
        held = "no images of mistakes"
        if made.mistakes:
            held = f"{made.images} of {made.mistakes} images of mistakes"
        warning = "."
        if made.images:
            warning = ". Share it only with people who are allowed to see these images."
        lines.append(f"The page has {held}{warning}")
    if made.left_out:
        lines.append(
            f"Runs left out: {made.left_out}. The page gives the reason and the fix of each."
        )
    return CommandResult(made.to_dict(), lines)


# ``fedcache figure``: draws one figure of runs into a file, for a paper.


@command("figure")
def figure(
    observer: TerminalObserver,
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"{' | '.join(LISTED)}.")],
    runs: RunQuery = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write: .pdf, .svg or .png. Default: KIND.pdf in the working directory.",
        ),
    ] = None,
    columns: Annotated[
        int, typer.Option(help="Width of the figure in columns of a paper: 1 or 2.")
    ] = 1,
    score: Annotated[
        str | None,
        typer.Option(
            help="Accuracy of all runs: client-mean | pooled (over all test rows), as in `fedcache report`.",
        ),
    ] = None,
    embed: Annotated[
        str, typer.Option(help="Projection of the figure `features`: pca | tsne | umap.")
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
