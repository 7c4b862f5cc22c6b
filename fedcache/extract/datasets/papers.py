"""``paper:NAME``: the datasets of the papers, with their classes, domains, splits and orders.

``papers/NAME.toml`` describes each dataset, and ``paper_index`` reads its rows. Only ``download.pull`` downloads
anything. Rows are in the order of the published lists and files: protocols that take "the first n" mean this order.
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
from fedcache.extract.datasets.dataset import Context, Dataset
from fedcache.extract.datasets.download import checksum
from fedcache.extract.datasets.paper import FoundLayout, Paper
from fedcache.extract.datasets.paper_index import PaperIndex, files_of, read_index
from fedcache.extract.datasets.tree import FilesSource
from fedcache.store.files import digest_of
from fedcache.store.samples import HELD_OUT, held_out
from fedcache.tables.splits import SPLIT_NAMES, SPLIT_WORDS, TEST


def full_spec(name: str) -> str:
    """``paper:NAME`` for the bare NAME of a dataset of the papers; any other text as it is."""
    if name in paper.NAMES:
        return f"paper:{name}"
    return name


def ready(name: str, context: Context) -> bool:
    """Whether one of its layouts is recognised in the folder of the dataset."""
    _, place = _look_for(name, context)
    return place is not None


def _look_for(name: str, context: Context) -> tuple[Path | None, FoundLayout | None]:
    """The folder where the dataset is looked for, and the layout found there."""
    entry = paper.read(name)
    root = context.root_of("paper", name)
    if root is None:
        return None, None
    return root, paper.find(entry, root)


def key(rest: str, context: Context) -> list[Any]:
    """The digest of the data file, and the state of all files and folders that determine the rows; reads no image."""
    place = _require(rest, context)
    stats = []
    for path in files_of(place):
        state: Any = tree.stat_numbers(path)
        if path.is_dir():
            state = tree.listing_digest(path, place.within)
        stats.append([str(path), state])
    return [
        "paper",
        rest,
        place.paper.digest,
        place.layout.name,
        str(place.base.resolve()),
        digest_of(stats),
    ]


def load(rest: str, context: Context) -> Dataset:
    """The dataset ``paper:NAME``; MachineError if it is missing or incomplete, CorruptionError if it is damaged."""
    place = _require(rest, context)
    # The facts come before the rows are read, so that a change in between is noticed.
    facts = key(rest, context)
    rows = read_index(place)
    uid, unreadable = dataset.read_uids(rows.source, rows.names, facts, context)
    label = np.array(rows.label, dtype=np.int32)
    domain = np.array(rows.domain, dtype=np.int16)
    split = np.array(rows.split, dtype=np.uint8)
    entry = place.paper
    differences = [*rows.notes]
    for what, expected, found in miscounted(place, rows):
        differences.append(f"{what} {found:,} (published: {expected:,})")
    notes = differences[:3]
    if len(differences) > 3:
        more = len(differences) - 3
        command = shlex.join(["fedcache", "datasets", "check", rest, str(place.root)])
        notes.append(f"{more} more such differences, listed by: {command}")
    if not np.any(split == TEST):
        # Any row may become a test row; the mask is true for all of them.
        split[held_out(label, domain, uid, split != TEST)] = TEST
        notes.append(f"no split given: {HELD_OUT} is the test set")
    if unreadable:
        notes.append(f"{unreadable:,} cannot be read and will be skipped and listed")
    counts = dataset.counts(split, entry.classes, entry.domains)
    return Dataset(
        spec=f"paper:{rest}",
        slug=rest,
        classes=entry.classes,
        domains=entry.domains,
        names=tuple(rows.names),
        label=label,
        domain=domain,
        split=split,
        uid=uid,
        template=entry.template,
        reading="; ".join([place.layout.name, counts, *notes]),
        source=rows.source,
        mirror=entry.mirror,
    )


def miscounted(place: FoundLayout, rows: PaperIndex) -> list[tuple[str, int, int]]:
    """(what, published number, number found) of counts that differ; ``what`` is a split, domain or ``domain/split``."""
    found = Counter[str]()
    for number, split in zip(rows.domain, rows.split, strict=True):
        domain = place.paper.domains[number]
        word = SPLIT_NAMES[split]
        found.update((word, domain, f"{domain}/{word}"))
    published = place.layout.counts.items()
    return [(what, n, found[what]) for what, n in published if found[what] != n]


def info(name: str, context: Context) -> dict[str, Any]:
    """The content of the data file, where the dataset was looked for, and the layout found there; "" for none."""
    entry = paper.read(name)
    root, place = _look_for(name, context)
    recipe = "as published by the backbone"
    if entry.recipe:
        recipe = f"--recipe {shell_word(entry.recipe)}"
    looked_in = ""
    if root is not None:
        looked_in = str(root)
    found = ""
    if place is not None:
        found = place.layout.name
    counted = set()
    layouts = []
    for layout in entry.layouts:
        counted |= {what.split("/")[-1] for what in layout.counts}
        layouts.append(
            {"name": layout.name, "needs": list(layout.needs), "counts": dict(layout.counts)}
        )
    columns = ("name", "url", "md5", "sha256", "megabytes")
    files = [{column: getattr(file, column) for column in columns} for file in entry.files]
    return {
        "title": entry.title,
        "paper": entry.paper,
        "licence": entry.licence,
        "protocol": entry.protocol,
        "classes": list(entry.classes),
        "domains": list(entry.domains),
        "splits": [word for word in SPLIT_WORDS if word in counted],
        "template": entry.template or "as published by the backbone",
        "recipe": recipe,
        "layouts": layouts,
        "files": files,
        "steps": steps(entry),
        "looked_in": looked_in,
        "found": found,
    }


def steps(entry: Paper) -> list[str]:
    """Steps to get a dataset, line by line."""
    addresses = []
    for file in entry.files:
        if file.direct:
            continue
        address = f"{file.name}: {file.url}"
        if file.sha256:
            address += f"  sha256 {file.sha256}"
        addresses.append(address)
    name = shell_word(entry.name)
    return [
        *entry.steps,
        *addresses,
        f"Then use --data {name}=DIR, or keep the files in $FEDCACHE_HOME/data/{entry.name}.",
    ]


def _require(name: str, context: Context) -> FoundLayout:
    """The layout of a dataset. Raises MachineError, with the steps to get it, if none is found."""
    entry = paper.read(name)
    root, place = _look_for(name, context)
    if place is not None:
        return replace(place, within=context.within(place.root))
    looked_in = "no folder, because --data was not given"
    layout = entry.layouts[0]
    found = ""
    if root is not None:
        looked_in = str(root)
        layout, present, missing = paper.nearest(entry, root)
        if present:
            existing = ", ".join(present)
            lacking = ", ".join(missing)
            found = f"; found {existing}, but not {lacking}"
    needs = ", ".join(layout.needs)
    raise MachineError(
        f"{entry.title} was not found (looked in {looked_in}); expected {layout.name}: {needs}{found}.",
        "\n".join(steps(entry)),
    )


def check(name: str, root: Path) -> dict[str, Any]:
    """Report for ``fedcache datasets check``: what is missing or wrong in a copy of a dataset. No image is decoded.

    Returns ``{"name", "path", "layout", "missing", "wrong", "counts"}``. ``missing`` and ``wrong`` are lists of
    sentences, empty for a complete copy; ``counts`` is ``{"train": 50000, ...}`` as found. Raises UsageError for a path
    that is no folder.
    """
    entry = paper.read(name)
    root = root.expanduser()
    if not root.is_dir():
        raise UsageError(
            f"{root} is not a folder. Expected: the folder into which {entry.title} was unpacked.",
            f"fedcache datasets info {shell_word(name)}   lists the files of this folder",
        )
    missing: list[str] = []
    wrong: list[str] = []
    report = {
        "name": name,
        "path": str(root),
        "layout": "",
        "missing": missing,
        "wrong": wrong,
        "counts": {},
    }
    place = paper.find(entry, root)
    if place is None:
        layout, present, lacking = paper.nearest(entry, root)
        found = ""
        if present:
            existing = ", ".join(present)
            found = f" (found: {existing})"
        missing += [f"{need}{found}, for the layout {layout.name!r}" for need in lacking]
        return report
    report["layout"] = place.layout.name
    for name_of_file, md5 in place.layout.md5.items():
        file = place.path(name_of_file)
        if file.is_file() and checksum(file, "md5") != md5:
            wrong.append(f"{name_of_file} has an md5 that differs from the published {md5}")
    try:
        rows = read_index(place)
    except MachineError as error:
        missing.append(error.message)
        return report
    except FedcacheError as error:
        wrong.append(error.message)
        return report
    numbers = sorted(Counter(rows.split).items())
    report["counts"] = {SPLIT_NAMES[code]: number for code, number in numbers}
    wrong += rows.notes
    for what, published, number in miscounted(place, rows):
        wrong.append(f"{what}: {number:,} images (published: {published:,})")
    classes = len(entry.classes)
    labels_without_rows = set(range(classes)) - set(rows.label)
    absent = sorted({entry.classes[label] for label in labels_without_rows})
    if absent:
        first = absent[0]
        wrong.append(f"{len(absent)} of {classes} classes have no image, such as {first!r}")
    if isinstance(rows.source, FilesSource):
        lost = []
        for path in rows.source.paths:
            if not os.path.isfile(f"{rows.source.root}/{path}"):  # noqa: PTH113
                lost.append(path)
        if lost:
            listed = f"{len(lost):,} of {len(rows.names):,} images"
            missing.append(f"{listed} are listed but missing: {lost[0]}")
    return report
