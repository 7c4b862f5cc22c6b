"""``fedcache report``: writes one HTML file about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcache.commands.options import (
    Data,
    RunQuery,
    RunsDirectory,
    command,
    pairs,
    runs_directory,
)
from fedcache.commands.output import CommandResult, TerminalObserver
from fedcache.config import Home
from fedcache.extract.planning.find_images import ImagePlaces
from fedcache.parsing import counted
from fedcache.process import seldom_collected
from fedcache.report.page import write_report


@command("report")
def report(
    observer: TerminalObserver,
    runs: RunQuery = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write; an existing report is replaced.")
    ] = Path("report.html"),
    title: Annotated[
        str, typer.Option("--title", help="Title of the page.", show_default=False)
    ] = "",
    embed: Annotated[
        str,
        typer.Option(
            "--embed", help="Projection of features to two dimensions: pca | tsne | umap | none."
        ),
    ] = "pca",
    score: Annotated[
        str | None,
        typer.Option(
            "--score",
            help="Accuracy of all runs: client-mean | pooled (over all test rows). Default: the primary metric if "
            "all methods have the same one, else client-mean.",
            show_default=False,
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
