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
    """Comparisons of runs; arguments as of ``fedcache.compare``. ``how`` are options of ``compare_entries``."""
    folder = Home.from_environment().runs
    if root is not None:
        folder = Path(root)
    entries = gather(several(runs), folder)
    return compare_entries(entries, **how)


def report(
    runs: Queries,
    out: str | Path,
    *,
    with_images: bool,
    data: Mapping[str, str] | None,
    **how: Any,
) -> Report:
    """The written report of runs; arguments as of ``fedcache.report``. ``how`` are options of ``write_report``."""
    home = Home.from_environment()
    images = None
    if with_images:
        images = ImagePlaces(home, data or {})
    return write_report(several(runs), Path(out), home.runs, images=images, **how)
