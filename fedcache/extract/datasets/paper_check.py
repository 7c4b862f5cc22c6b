"""``fedcache datasets check``: what is missing or wrong in a copy of a paper's dataset."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.datasets import paper, papers
from fedcache.extract.datasets.download import md5_of
from fedcache.extract.datasets.paper_formats import FORMATS
from fedcache.extract.datasets.papers import WORDS
from fedcache.extract.datasets.tree import FilesSource


def check(name: str, root: Path) -> dict[str, Any]:
    """What is missing or wrong in a copy of a dataset; no image is decoded.

    Returns:
        ``{"name", "path", "layout", "missing", "wrong", "counts"}``: ``missing`` and ``wrong`` are sentences, none for
        a whole copy; ``counts`` is ``{"train": 50000, ...}`` as found.

    Raises:
        FedcacheError: USAGE for an unknown name or a path that is no folder.
    """
    held = paper.read(name)
    root = root.expanduser()
    if not root.is_dir():
        raise FedcacheError(
            Exit.USAGE,
            f"{root} is not a folder; expected the one into which {held.title} was unpacked.",
            f"fedcache datasets info {name}   says what to put there",
        )
    report: dict[str, Any] = {"name": name, "path": str(root), "layout": "", "missing": [], "wrong": [], "counts": {}}
    place = paper.find(held, root)
    if place is None:
        layout, there, missing = paper.nearest(held, root)
        beside = f" (beside {', '.join(there)})" if there else ""
        report["missing"] = [f"{what}{beside}, for the layout {layout.name!r}" for what in missing]
        return report
    report["layout"] = place.layout.name
    for what, md5 in place.layout.md5.items():
        if place.path(what).is_file() and md5_of(place.path(what)) != md5:
            report["wrong"].append(f"{what} has another md5 than the published {md5}")
    try:
        rows = FORMATS[place.layout.format].rows(place)
    except FedcacheError as error:
        report["missing" if error.code is Exit.ENVIRONMENT else "wrong"].append(error.message)
        return report
    report["counts"] = {WORDS[code]: n for code, n in sorted(Counter(rows.split).items())}
    report["wrong"] += rows.notes
    report["wrong"] += [
        f"{what}: {n:,} images, published {expected:,}" for what, expected, n in papers.miscounted(place, rows)
    ]
    absent = sorted({held.classes[i] for i in set(range(len(held.classes))) - set(rows.label)})
    if absent:
        report["wrong"].append(f"{len(absent)} of {len(held.classes)} classes have no image, such as {absent[0]!r}")
    if isinstance(rows.source, FilesSource):
        lost = [path for path in rows.source.paths if not os.path.isfile(f"{rows.source.root}/{path}")]  # noqa: PTH113
        if lost:
            report["missing"].append(f"{len(lost):,} of {len(rows.names):,} images are listed and not there: {lost[0]}")
    return report
