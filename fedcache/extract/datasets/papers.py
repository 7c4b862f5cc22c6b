"""``paper:NAME``: the datasets of the papers, with their classes, domains, splits and orders.

``papers/NAME.toml`` says what there is to know of each; ``paper_index`` reads it; nothing is downloaded except by
``pull``. Rows keep the order the protocols mean by "the first n": that of the published lists and files.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import FedcacheError, MachineError, UsageError, shell_word
from fedcache.extract.datasets import dataset, paper, tree
from fedcache.extract.datasets.dataset import SPLIT_WORDS, TEST, Context, Dataset
from fedcache.extract.datasets.download import md5_of
from fedcache.extract.datasets.paper import FoundLayout, Paper
from fedcache.extract.datasets.paper_index import PaperIndex, files_of, read_index
from fedcache.extract.datasets.tree import FilesSource
from fedcache.store.files import digest_of
from fedcache.store.samples import HELD_OUT, held_out
from fedcache.tables.splits import SPLIT_WORDS as SPLITS


def full_spec(name: str) -> str:
    """``paper:NAME`` for the bare NAME of a dataset of the papers; any other text as it is."""
    if name in paper.NAMES:
        return f"paper:{name}"
    return name


def ready(name: str, context: Context) -> bool:
    """Whether one of its layouts is recognised where it would be."""
    return _look_for(name, context)[1] is not None


def _look_for(name: str, context: Context) -> tuple[Path | None, FoundLayout | None]:
    """The folder where the dataset is looked for, and the layout found there."""
    held = paper.read(name)
    root = context.root_of("paper", name)
    if root is None:
        return None, None
    return root, paper.find(held, root)


def key(rest: str, context: Context) -> list[Any]:
    """The data file, and the stat of every file the rows come from; no image is read."""
    place = _require(rest, context)
    stats: list[list[Any]] = []
    for path in files_of(place):
        if path.is_dir():
            stats.append([str(path), tree.listing_digest(path, place.within)])
        else:
            stats.append([str(path), tree.stat_numbers(path)])
    return [
        "paper",
        rest,
        place.paper.digest,
        place.layout.name,
        str(place.base.resolve()),
        digest_of(stats),
    ]


def load(rest: str, context: Context) -> Dataset:
    """The dataset ``paper:NAME``; MachineError when it is not there or not whole, CorruptionError if damaged."""
    place = _require(rest, context)
    facts = key(rest, context)  # before anything is read: a change in between must not go unnoticed
    rows = read_index(place)
    uid, unreadable = dataset.read_uids(rows.source, rows.names, facts, context)
    label = np.array(rows.label, dtype=np.int32)
    domain = np.array(rows.domain, dtype=np.int16)
    split = np.array(rows.split, dtype=np.uint8)
    held = place.paper
    differs = [*rows.notes]
    differs += [
        f"{what} {found:,}, published {expected:,}"
        for what, expected, found in miscounted(place, rows)
    ]
    notes = differs[:3]
    if len(differs) > 3:
        command = shlex.join(["fedcache", "datasets", "check", rest, str(place.root)])
        notes.append(f"{len(differs) - 3} more such differences: {command}")
    if not np.any(split == TEST):
        split[held_out(label, domain, uid, split != TEST)] = TEST
        notes.append(f"no split given: {HELD_OUT} is the test set")
    if unreadable:
        notes.append(f"{unreadable:,} cannot be read and will be skipped and listed")
    counts = dataset.counts(split, held.classes, held.domains)
    return Dataset(
        spec=f"paper:{rest}",
        slug=rest,
        classes=held.classes,
        domains=held.domains,
        names=tuple(rows.names),
        label=label,
        domain=domain,
        split=split,
        uid=uid,
        template=held.template,
        reading="; ".join([place.layout.name, counts, *notes]),
        source=rows.source,
        mirror=held.mirror,
    )


def miscounted(place: FoundLayout, rows: PaperIndex) -> list[tuple[str, int, int]]:
    """(what, published number, number found) of every count that differs: a split, a domain, or ``domain/split``."""
    found: Counter[str] = Counter()
    for domain, split in zip(rows.domain, rows.split, strict=True):
        place_of = place.paper.domains[domain]
        word = SPLIT_WORDS[split]
        found.update((word, place_of, f"{place_of}/{word}"))
    return [(what, n, found[what]) for what, n in place.layout.counts.items() if found[what] != n]


def info(name: str, context: Context) -> dict[str, Any]:
    """The content of the data file, and whether the dataset is available."""
    held = paper.read(name)
    root, place = _look_for(name, context)
    counted = {what.split("/")[-1] for layout in held.layouts for what in layout.counts}
    recipe = "as published by the backbone"
    if held.recipe:
        recipe = f"--recipe {shell_word(held.recipe)}"
    found = ""
    if place is not None:
        found = place.layout.name
    return {
        "title": held.title,
        "paper": held.paper,
        "licence": held.licence,
        "protocol": held.protocol,
        "classes": list(held.classes),
        "domains": list(held.domains),
        "splits": [word for word in SPLITS if word in counted],
        "template": held.template or "as published by the backbone",
        "recipe": recipe,
        "layouts": [
            {"name": x.name, "needs": list(x.needs), "counts": dict(x.counts)} for x in held.layouts
        ],
        "files": [
            {
                "name": f.name,
                "url": f.url,
                "md5": f.md5,
                "sha256": f.sha256,
                "megabytes": f.megabytes,
            }
            for f in held.files
        ],
        "steps": steps(held),
        "looked_in": "" if root is None else str(root),
        "found": found,
    }


def steps(held: Paper) -> list[str]:
    """Steps to get a dataset, line by line."""
    addresses = []
    for file in held.files:
        if file.direct:
            continue
        address = f"{file.name}: {file.url}"
        if file.sha256:
            address += f"  sha256 {file.sha256}"
        addresses.append(address)
    name = shell_word(held.name)
    return [
        *held.steps,
        *addresses,
        f"Then --data {name}=DIR, or keep it in $FEDCACHE_HOME/data/{held.name}.",
    ]


def _require(name: str, context: Context) -> FoundLayout:
    held = paper.read(name)
    root, place = _look_for(name, context)
    if place is not None:
        return replace(place, follow_links=context.follow_links)
    looked = "nowhere, because --data was not given"
    layout = held.layouts[0]
    found = ""
    if root is not None:
        looked = str(root)
        layout, there, missing = paper.nearest(held, root)
        if there:
            lacking = ", ".join(missing)
            found = f"; {', '.join(there)} is there, but {lacking} is missing"
    needs = ", ".join(layout.needs)
    raise MachineError(
        f"{held.title} was not found (looked in {looked}); expected {layout.name}: {needs}{found}.",
        "\n".join(steps(held)),
    )


def check(name: str, root: Path) -> dict[str, Any]:
    """``fedcache datasets check``: what is missing or wrong in a copy of a dataset; no image is decoded.

    Returns ``{"name", "path", "layout", "missing", "wrong", "counts"}``: ``missing`` and ``wrong`` are sentences, none
    for a whole copy; ``counts`` is ``{"train": 50000, ...}`` as found. UsageError for a path that is no folder.
    """
    held = paper.read(name)
    root = root.expanduser()
    if not root.is_dir():
        raise UsageError(
            f"{root} is not a folder; expected the one into which {held.title} was unpacked.",
            f"fedcache datasets info {shell_word(name)}   lists the files that belong there",
        )
    report: dict[str, Any] = {
        "name": name,
        "path": str(root),
        "layout": "",
        "missing": [],
        "wrong": [],
        "counts": {},
    }
    place = paper.find(held, root)
    if place is None:
        layout, there, missing = paper.nearest(held, root)
        beside = ""
        if there:
            beside = f" (in addition to {', '.join(there)})"
        report["missing"] = [f"{what}{beside}, for the layout {layout.name!r}" for what in missing]
        return report
    report["layout"] = place.layout.name
    for what, md5 in place.layout.md5.items():
        if place.path(what).is_file() and md5_of(place.path(what)) != md5:
            report["wrong"].append(f"{what} has an md5 that differs from the published {md5}")
    try:
        rows = read_index(place)
    except MachineError as error:
        report["missing"].append(error.message)
        return report
    except FedcacheError as error:
        report["wrong"].append(error.message)
        return report
    report["counts"] = {SPLIT_WORDS[code]: n for code, n in sorted(Counter(rows.split).items())}
    report["wrong"] += rows.notes
    report["wrong"] += [
        f"{what}: {n:,} images, published {known:,}" for what, known, n in miscounted(place, rows)
    ]
    classes = len(held.classes)
    absent = sorted({held.classes[i] for i in set(range(classes)) - set(rows.label)})
    if absent:
        first = absent[0]
        report["wrong"].append(
            f"{len(absent)} of {classes} classes have no image, such as {first!r}"
        )
    if isinstance(rows.source, FilesSource):
        lost = [
            path
            for path in rows.source.paths
            if not os.path.isfile(f"{rows.source.root}/{path}")  # noqa: PTH113
        ]
        if lost:
            listed = f"{len(lost):,} of {len(rows.names):,} images"
            report["missing"].append(f"{listed} are listed but missing: {lost[0]}")
    return report
