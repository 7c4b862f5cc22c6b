"""Finished runs, for ``compare`` and ``report`` of the Python API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from fedcache.config import Home
from fedcache.extract.planning.find_images import ImagePlaces
from fedcache.report.compare import Comparisons, compare_entries
from fedcache.report.find_runs import RunQuery, gather, several
from fedcache.report.page import Report, write_report

Queries: TypeAlias = "RunQuery | Iterable[RunQuery] | None"


def compare(runs: Queries, root: str | Path | None, **how: Any) -> Comparisons:
    """Comparisons of runs in ``root``, or in the home for None; ``how`` are options of ``compare_entries``."""
    folder = Home.from_environment().runs
    if root is not None:
        folder = Path(root)
    found = gather(several(runs), folder)
    return compare_entries(found, **how)


def report(
    runs: Queries,
    out: str | Path,
    title: str,
    embed: str,
    score: str | None,
    data: Mapping[str, str] | None,
) -> Report:
    """The written report of runs, with images where ``data`` (dataset -> folder) is given."""
    home = Home.from_environment()
    places = None
    if data is not None:
        places = ImagePlaces(home, data)
    return write_report(
        several(runs), Path(out), home.runs, title=title, embed=embed, score=score, images=places
    )
