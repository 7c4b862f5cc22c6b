"""Data file of a paper's dataset (``papers/NAME.toml``), and the search for its layout on the disk.

A dataset may be there in several layouts: as the papers' authors released it, or as its owners publish it. Each layout
names the files by which it is recognised; the first one found is read.
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
from fedcache.extract.datasets.dataset import ONE_DOMAIN
from fedcache.store.files import digest_of

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
    """One file to get."""

    name: str  # file name
    url: str  # where it is; a page for people unless ``direct``
    md5: str = ""  # of the file, where its owners or torchvision publish it
    sha256: str = ""  # of the file, where its owners or TensorFlow Datasets publish it
    megabytes: int = 0  # about how large it is; 0 unknown
    gives: str = ""  # what unpacking it leaves at the top; empty for a file that is used as it is
    inner: tuple[str, ...] = ()  # archives inside the archive, unpacked in its place
    direct: bool = False  # the address is the file and can be expected to last


@dataclass(frozen=True)
class PaperLayout:
    """One possible layout of the dataset on disk; the first whose files exist is read."""

    name: str  # for people; says so when the split is not the paper's
    format: str  # which reader of ``paper_index``
    at: tuple[str, ...]  # folders below the given path to look in, in this order
    needs: tuple[str, ...]  # paths that must be there for the layout to be recognised
    # rows expected of ``train``, ``amazon``, ``mnist/train``
    counts: Mapping[str, int] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)  # lines expected in files of lists
    md5: Mapping[str, str] = field(default_factory=dict)  # published md5 of files of the layout
    options: Mapping[str, Any] = field(default_factory=dict)  # what the reader needs besides


@dataclass(frozen=True)
class Paper:
    """A dataset of the papers."""

    name: str  # as in ``paper:NAME``
    title: str
    about: str
    paper: str
    licence: str
    protocol: str  # which partitions of which papers use it
    classes: tuple[str, ...]  # class names; their order is that of the labels
    steps: tuple[str, ...]  # how to get it
    layouts: tuple[PaperLayout, ...]  # ways it may be on the disk, the papers' own first
    folders: tuple[str, ...]  # the classes as the disk spells them, in the same order
    domains: tuple[str, ...]  # domain names, in the papers' order
    files: tuple[PaperFile, ...]  # what has to be got
    digest: str  # sha256 of the data file's content
    template: str | None = None  # CoOp's prompt, or None
    recipe: str = (
        ""  # the papers' input as ``--recipe`` takes it, or empty where it is the backbone's own
    )
    mirror: bool = True

    @cached_property
    def number_of(self) -> dict[str, int]:
        """Class number by folder."""
        return {folder: number for number, folder in enumerate(self.folders)}

    @property
    def pulls(self) -> bool:
        """Whether something of it can be downloaded."""
        return any(file.direct for file in self.files)


@dataclass(frozen=True)
class FoundLayout:
    """A layout of ``paper`` that was found at ``base``: the given ``root``, or one of the layout's folders below it."""

    paper: Paper
    layout: PaperLayout
    root: Path
    base: Path
    follow_links: bool = False  # whether links that lead out of ``root`` are read

    @property
    def within(self) -> Path | None:
        """The folder that the files must be in, after resolving links; None for anywhere."""
        if self.follow_links:
            return None
        return self.root

    def path(self, name: str) -> Path:
        """``name`` below ``base``. A JSON file may also be next to the unpacked folder."""
        return _below(self.base, self.root, name)


@cache
def read(name: str) -> Paper:
    """The dataset of a name; UsageError, with the nearest name, for an unknown one."""
    if name not in NAMES:
        raise unknown("dataset of the papers", name, NAMES, hint=f"Known: {', '.join(NAMES)}")
    file = resources.files("fedcache.extract.datasets") / "papers" / f"{name}.toml"
    given = tomllib.loads(file.read_text(encoding="utf-8"))
    # The digest is of the whole file, before its parts are taken out.
    digest = digest_of(given)
    classes = tuple(given.pop("classes"))
    files = []
    for one in given.pop("files", ()):
        inner = tuple(one.pop("inner", ()))
        files.append(PaperFile(**one, inner=inner))
    return Paper(
        name=name,
        classes=classes,
        folders=tuple(given.pop("folders", classes)),
        domains=tuple(given.pop("domains", (ONE_DOMAIN,))),
        steps=tuple(given.pop("steps")),
        layouts=tuple(_layout(one) for one in given.pop("layouts")),
        files=tuple(files),
        digest=digest,
        **given,
    )


def _layout(given: dict[str, Any]) -> PaperLayout:
    names = ("name", "format", "counts", "lines", "md5")
    fields = {name: given.pop(name) for name in names if name in given}
    at = tuple(given.pop("at"))
    needs = tuple(given.pop("needs"))
    # All other keys are options of the reader.
    return PaperLayout(at=at, needs=needs, options=given, **fields)


def find(paper: Paper, root: Path) -> FoundLayout | None:
    """The first of the dataset's layouts that is recognised at ``root``."""
    for layout in paper.layouts:
        for at in layout.at:
            base = root / at
            if base.is_dir() and all(_below(base, root, need).exists() for need in layout.needs):
                return FoundLayout(paper, layout, root, base)
    return None


def nearest(paper: Paper, root: Path) -> tuple[PaperLayout, list[str], list[str]]:
    """The unrecognised layout with most files: itself, its files that exist, and its missing files."""
    nearest_layout = paper.layouts[0]
    found: list[str] = []
    for layout in paper.layouts:
        for at in layout.at:
            there = [need for need in layout.needs if _below(root / at, root, need).exists()]
            if len(there) > len(found):
                nearest_layout = layout
                found = there
    missing = [need for need in nearest_layout.needs if need not in found]
    return nearest_layout, found, missing


def _below(base: Path, root: Path, name: str) -> Path:
    path = base / name
    if path.exists() or not name.endswith(".json"):
        return path
    return root / name


def damaged(path: Path, what: str) -> FedcacheError:
    """The error for a file that does not hold what its layout says."""
    return CorruptionError(
        f"{path} does not match the layout: {what}.",
        "Download or unpack it again; `fedcache datasets info` gives the address",
    )
