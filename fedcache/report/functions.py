"""``fc.report``: the page from Python."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedcache.api.points import Grid, Point
from fedcache.api.run import Run
from fedcache.config import Home
from fedcache.errors import Exit, FedcacheError
from fedcache.report.gather import Asked
from fedcache.report.page import Report, write_report


def several(runs: object) -> list[Asked]:
    """What a call was given, one by one; [] for None, which means all.

    Raises:
        FedcacheError: USAGE for an empty list, which means none.
    """
    if runs is None:
        return []
    one = isinstance(runs, str | Path | Run | Grid | Point)
    asked: list[Any] = list(runs) if isinstance(runs, Iterable) and not one else [runs]
    if not asked:
        raise FedcacheError(Exit.USAGE, "There is no run in what was given.", "None takes all runs of FEDCACHE_HOME.")
    return [one.run if isinstance(one, Point) else one for one in asked]


def report(
    runs: Run | Grid | Point | str | os.PathLike[str] | Iterable[object] | None = None,
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
    return write_report(several(runs), Path(out), Home.from_environment().runs, title=title, embed=embed)
