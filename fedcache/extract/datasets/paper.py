"""Reads the data file of a paper's dataset (``papers/NAME.toml``), and searches the disk for the dataset.

A dataset may be on the disk in several layouts: as the papers' authors released it, or as its owners publish it. Each
layout names the files by which it is recognised; the first layout that is found is read.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from fedcache.errors import CorruptionError, FedcacheError, unknown
from fedcache.parsing import as_tuples
from fedcache.store.files import digest_of
from fedcache.tables.roles import ONE_DOMAIN

NAMES = (
    "digit5",
    "office10",
    "domainnet10",
    "cifar10",
    "cifar100",
    "cinic10",
    "tiny-imagenet",
    "imagenet100",
    "caltech101",
    "flowers102",
    "pets",
    "dtd",
    "eurosat",
    "cars",
    "ucf101",
)


@dataclass(frozen=True)
class PaperFile:
    """One file that a user must get."""

    name: str  # file name
    url: str  # its address, or, unless ``direct``, the address of a web page
    md5: str = ""  # of the file, if its owners or torchvision publish it
    sha256: str = ""  # of the file, if its owners or TensorFlow Datasets publish it
    megabytes: int = 0  # approximate size; 0 unknown
    gives: str = ""  # top entry of the unpacked archive; empty for a file that is not unpacked
    inner: tuple[str, ...] = ()  # archives inside the archive, unpacked in its place
    direct: bool = False  # the address is that of the file itself and is expected to last


@dataclass(frozen=True)
class PaperLayout:
    """One possible layout of the dataset on disk; the first whose files exist is read."""

    name: str  # for messages; it mentions a split that is not the paper's
    format: str  # reader of ``paper_index``
    at: tuple[str, ...]  # folders below the given path to look in, in this order
    needs: tuple[str, ...]  # paths that must exist for the layout to be recognised
    # expected rows by split, domain or both: ``train``, ``amazon``, ``mnist/train``
    counts: Mapping[str, int] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)  # lines expected in files of lists
    md5: Mapping[str, str] = field(default_factory=dict)  # published md5 of files of the layout
    options: Mapping[str, Any] = field(default_factory=dict)  # other options of the reader


@dataclass(frozen=True)
class Paper:
    """A dataset of the papers."""

    name: str  # as in ``paper:NAME``
    title: str  # name for messages
    about: str  # one line
    paper: str  # where the dataset was published
    licence: str  # terms of use
    protocol: str  # the papers and partitions that use it
    classes: tuple[str, ...]  # class names; their order is that of the labels
    steps: tuple[str, ...]  # what a user does to get the dataset
    layouts: tuple[PaperLayout, ...]  # possible layouts on the disk, the papers' own first
    folders: tuple[str, ...]  # the classes as folder names spell them, in the order of ``classes``
    domains: tuple[str, ...]  # domain names, in the papers' order
    files: tuple[PaperFile, ...]  # files that a user must get
    digest: str  # sha256 of the data file's content
    template: str | None = None  # CoOp's prompt, or None
    # the papers' preprocessing as a value of ``--recipe``; empty if it is the backbone's own
    recipe: str = ""
    mirror: bool = True  # whether a mirrored image keeps its class

    @cached_property
    def number_of(self) -> dict[str, int]:
        """Class number by folder."""
        return {folder: number for number, folder in enumerate(self.folders)}

    @property
    def pulls(self) -> bool:
        """Whether at least one of its files can be downloaded."""
        return any(file.direct for file in self.files)


@dataclass(frozen=True)
class FoundLayout:
    """A layout of a dataset that was found on the disk."""

    paper: Paper
    layout: PaperLayout
    root: Path  # the folder in which the dataset was looked for
    base: Path  # the folder with the files of the layout: ``root``, or a folder of ``layout.at`` below it
    # the folder that the files must be in, after resolving links; None for anywhere
    within: Path | None

    def path(self, name: str) -> Path:
        """The path of a file of the layout: below ``base``, or, for a JSON file, below ``root``."""
        return _below(self.base, self.root, name)


@cache
def read(name: str) -> Paper:
    """The dataset with this name. Raises UsageError for an unknown name, with the nearest known one."""
    if name not in NAMES:
        raise unknown("dataset of the papers", name, NAMES, hint=f"Known: {', '.join(NAMES)}")
    file = resources.files("fedcache.extract.datasets") / "papers" / f"{name}.toml"
    given = as_tuples(tomllib.loads(file.read_text(encoding="utf-8")))
    # The digest covers the whole file, so it is computed before the code below removes parts from ``given``.
    digest = digest_of(given)
    given.setdefault("folders", given["classes"])
    given.setdefault("domains", (ONE_DOMAIN,))
    files = tuple(PaperFile(**as_tuples(entry)) for entry in given.pop("files", ()))
    layouts = tuple(map(_layout, given.pop("layouts")))
    return Paper(name=name, files=files, layouts=layouts, digest=digest, **given)


def _layout(given: dict[str, Any]) -> PaperLayout:
    names = ("name", "format", "at", "needs", "counts", "lines", "md5")
    fields = {name: given.pop(name) for name in names if name in given}
    # All other keys are options of the reader.
    return PaperLayout(options=given, **as_tuples(fields))


def find(paper: Paper, root: Path) -> FoundLayout | None:
    """The first of the dataset's layouts that is recognised at ``root``."""
    for layout in paper.layouts:
        for at in layout.at:
            base = root / at
            if base.is_dir() and all(_below(base, root, need).exists() for need in layout.needs):
                return FoundLayout(paper, layout, root, base, root)
    return None


def nearest(paper: Paper, root: Path) -> tuple[PaperLayout, list[str], list[str]]:
    """The layout that has the most files on the disk, its existing files, and its missing files."""
    nearest_layout = paper.layouts[0]
    found: list[str] = []
    for layout in paper.layouts:
        for at in layout.at:
            present = [need for need in layout.needs if _below(root / at, root, need).exists()]
            if len(present) > len(found):
                nearest_layout = layout
                found = present
    missing = [need for need in nearest_layout.needs if need not in found]
    return nearest_layout, found, missing


def _below(base: Path, root: Path, name: str) -> Path:
    """See ``FoundLayout.path``. A JSON file may be next to the unpacked folder instead of inside it."""
    path = base / name
    if path.exists() or not name.endswith(".json"):
        return path
    return root / name


def damaged(path: Path, what: str) -> FedcacheError:
    """The error for a file with other content than its layout says."""
    return CorruptionError(
        f"{path} does not match the layout: {what}.",
        "Download or unpack it again; `fedcache datasets info` gives the address",
    )
