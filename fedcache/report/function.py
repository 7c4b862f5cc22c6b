"""``fc.report``: the page from Python."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fedcache.config import Home
from fedcache.report.find_runs import RunQuery, several
from fedcache.report.page import Report, write_report


def report(
    runs: RunQuery | Iterable[RunQuery] | None = None,
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
