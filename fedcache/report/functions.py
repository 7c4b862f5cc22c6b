"""``fc.report``: the page from Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedcache.api.points import Grid, Point
from fedcache.api.run import Run
from fedcache.config import Home
from fedcache.report.gather import Asked
from fedcache.report.page import Report, write_report


def report(
    runs: Run | Grid | Point | str | os.PathLike[str] | Sequence[object] | None = None,
    out: str | os.PathLike[str] = "report.html",
    *,
    title: str = "",
    embed: str = "pca",
) -> Report:
    """Write one self-contained HTML file of runs.

    Args:
        runs: runs, grids, points of grids, directories or first letters of digests, one or several; None for all
            results of ``FEDCACHE_HOME``.
        out: the file.
        title: its heading.
        embed: pca | tsne | umap | none, how features come to two dimensions.

    Raises:
        FedcacheError: USAGE, ENVIRONMENT.
    """
    several = [] if runs is None else list(runs) if isinstance(runs, list | tuple) else [runs]
    asked: list[Asked] = [one.run if isinstance(one, Point) else one for one in several]  # type: ignore[misc]
    return write_report(asked, Path(out), Home.from_environment().runs, title=title, embed=embed)
