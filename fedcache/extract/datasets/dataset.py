"""Dataset, part of a dataset, and join of datasets as domains, with the digests and uids that every reader needs.

Rows are numbered before anything is decoded, in the order of their sorted names, and an image that cannot be read
keeps its row. The digest covers the content (names, uids, labels, domains, splits). So the same tree as a directory, a
zip and a tar is one dataset, and its path does not matter.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError
from fedcache.extract.digests import DigestMemory
from fedcache.extract.image_files import BadImage
from fedcache.extract.recipe import IMAGES, one_of
from fedcache.extract.recipe import slug as safe
from fedcache.parsing import counted
from fedcache.store.files import canonical_json
from fedcache.store.manifest import VANISHED
from fedcache.store.samples import Samples
from fedcache.tables.groups import Group, joined
from fedcache.tables.splits import SPLIT_NAMES, TEST, TRAIN
from fedcache.tables.words import Coded, some_names

READING = 1
"""Version of the readers. It is raised when the same files give other names, labels, splits or pixels. Remembered facts
of another version are not used."""

Progress = Callable[[int, int], None]


class Source(Protocol):
    """Source of images. Picklable and cheap to unpickle (worker processes); threads may call ``read``."""

    def read(self, row: int) -> bytes | NDArray[Any]:
        """The encoded image of a row, or its pixels as uint8 [H, W] or [H, W, 3]; raises ``BadImage``.

        For texts, the UTF-8 bytes; for rows, the unchanged numbers.
        """


@dataclass(frozen=True)
class RowsSource:
    """Reads some rows of another source."""

    source: Source  # the other source
    rows: NDArray[np.int64]  # int64 [N] row of ``source``, -1 for an image that is no longer there

    def read(self, row: int) -> bytes | NDArray[Any]:
        """The image of a row; raises ``BadImage``."""
        if self.rows[row] < 0:
            raise BadImage(VANISHED)
        return self.source.read(int(self.rows[row]))


@dataclass(frozen=True)
class UnchangedSource:
    """Reads another source, and refuses encoded images and texts that have changed since the dataset was read."""

    source: Source  # the other source
    uid: NDArray[np.uint8]  # [N, 16] of the rows, as in ``Dataset``

    def read(self, row: int) -> bytes | NDArray[Any]:
        """The image of a row; raises ``BadImage``."""
        raw = self.source.read(row)
        if isinstance(raw, bytes) and uid_of(raw) != self.uid[row].tobytes():
            raise BadImage("changed since the extraction began")
        return raw


@dataclass(frozen=True, eq=False)
class Dataset:
    """Dataset of N labelled images, texts or rows of numbers from one or more domains.

    ``uid`` is the first 16 bytes of the sha256 of the encoded image or of the raw array row, or of ``b"unreadable\\0"``
    and the name for a row that cannot be read.
    """

    spec: str  # as the user wrote it
    slug: str  # names the store
    classes: tuple[str, ...]  # class names; ``label`` indexes them
    domains: tuple[str, ...]  # domain names; ``domain`` indexes them
    # [N] path inside the dataset, sorted by code point; this is the order of the rows
    names: tuple[str, ...]
    label: NDArray[np.int32]  # [N], -1 unknown
    domain: NDArray[np.int16]  # [N]
    split: NDArray[np.uint8]  # [N]: 0 train, 1 test, 2 validation
    uid: NDArray[np.uint8]  # [N, 16]
    template: str | None  # prompt template, if the dataset has one
    reading: str  # how it was read, with counts
    source: Source  # where the images are; row numbers are those of ``names``
    # whether a mirrored image keeps its class; false for digits and letters (``images.view``)
    mirror: bool = True
    # columns that divide the rows (client, hospital), by name; not part of the digest
    groups: Mapping[str, Group] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)  # columns that are not used, and why
    # if no column holds labels: each column that may hold them, and the number of its values
    may_be_labels: Mapping[str, int] = field(default_factory=dict)
    links_left_out: int = 0  # links that lead out of the dataset's folder, which were not followed
    holds: str = IMAGES  # images, texts or rows (``inputs``)
    # sha256 over the names, uids, labels, domains and splits of the rows, and the names of classes and domains
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        if any(a >= b for a, b in pairwise(self.names)):
            raise ValueError("names must be sorted and distinct")
        object.__setattr__(self, "digest", content_digest(self))

    def __len__(self) -> int:
        return len(self.names)

    def part(self, limit: int) -> Dataset:
        """Dataset of ``limit`` evenly spaced rows; the dataset itself if it has no more rows.

        Rows are evenly spaced over the sorted names, so that each large split, domain and class keeps its share. If one
        of them should have a row and would get none, because classes alternate for example, the rows are evenly spaced
        over the order by class, domain and split instead.
        """
        if limit >= len(self):
            return self
        # Row i of the part is row floor(i N / limit) of the whole.
        rows = np.arange(limit, dtype=np.int64) * len(self) // limit
        # ``lexsort`` sorts by its last key first, so the label is the first criterion.
        columns = (self.split, self.domain, self.label)
        if any(_loses_a_value(codes, rows) for codes in columns):
            by_class = np.lexsort(columns)
            rows = np.sort(by_class[rows])
        return replace(
            self,
            slug=f"{self.slug}-{limit}",
            names=tuple(self.names[r] for r in rows),
            label=self.label[rows],
            domain=self.domain[rows],
            split=self.split[rows],
            uid=self.uid[rows],
            reading=f"{self.reading}; {limit:,} rows of it, evenly spaced",
            source=RowsSource(self.source, rows),
            groups={name: group.take(rows) for name, group in self.groups.items()},
        )


def samples_of(data: Dataset, ok: NDArray[np.uint8]) -> Samples:
    """The rows of a dataset as a store keeps them; ``ok`` [N] is 0 where an image has vanished."""
    return Samples(
        uid=data.uid,
        name=data.names,
        label=data.label,
        domain=data.domain,
        split=data.split,
        ok=ok,
        classes=data.classes,
        domains=data.domains,
    )


def _loses_a_value(codes: np.ndarray, rows: np.ndarray) -> bool:
    """Whether a value of ``codes`` that is frequent enough to have one of the ``rows`` has none."""
    values, index, counts = np.unique(codes, return_inverse=True, return_counts=True)
    chosen_counts = np.bincount(index[rows], minlength=len(values))
    # A value should have a row if its share of ``rows`` is at least one.
    should_have_one = counts * len(rows) >= len(codes)
    return bool(((chosen_counts == 0) & should_have_one).any())


@dataclass(frozen=True)
class Context:
    """Context of a reader: everything it may use besides the spec."""

    memory: DigestMemory  # remembered digests
    roots: Mapping[str, Path] = field(default_factory=dict)  # ``--data NAME=PATH``
    data: Path | None = None  # ``$FEDCACHE_HOME/data``; datasets found by name are in ``data/NAME``
    layout: str | None = None  # ``--layout``, for folders
    # ``--follow-links``: read files to which links lead, even outside of the dataset's folder
    follow_links: bool = False
    progress: Progress | None = None  # called with (images read, images in all)
    limit: int | None = None  # rows to take, evenly spaced (``Dataset.part``)

    def within(self, folder: Path) -> Path | None:
        """The folder that the files of a dataset must be in, after resolving links; None for anywhere."""
        if self.follow_links:
            return None
        return folder

    def root_of(self, kind: str, name: str) -> Path | None:
        """The folder of ``kind:NAME``: ``--data NAME=PATH``, otherwise ``data/NAME``; None if neither is known."""
        for given in (name, f"{kind}:{name}"):
            if given in self.roots:
                return self.roots[given].expanduser()
        if self.data is None:
            return None
        return self.data / name


def content_digest(dataset: Dataset) -> str:
    """sha256 over the names, columns, classes and domains."""
    head = {"classes": dataset.classes, "domains": dataset.domains, "names": dataset.names}
    digest = hashlib.sha256(canonical_json(head))
    columns = (
        (dataset.label, "<i4"),
        (dataset.domain, "<i2"),
        (dataset.split, "u1"),
        (dataset.uid, "u1"),
    )
    for values, dtype in columns:
        digest.update(np.ascontiguousarray(values, dtype=dtype).tobytes())
    return digest.hexdigest()


def uid_of(raw: bytes | NDArray[Any]) -> bytes:
    """The 16 bytes that identify an image, a text or a row by content."""
    if not isinstance(raw, bytes):
        raw = raw.tobytes()
    return hashlib.sha256(raw).digest()[:16]


def uid_rows(raw: bytes | bytearray) -> NDArray[np.uint8]:
    """Uids that follow one another, 16 bytes each, as uint8 [N, 16]."""
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, 16).copy()


def read_uids(
    source: Source, names: Sequence[str], key: Sequence[Any], context: Context
) -> tuple[NDArray[np.uint8], int]:
    """The uids of all rows, uint8 [N, 16], and how many rows cannot be read.

    Remembered under ``key``: reading every byte of a large dataset takes minutes.
    """
    fact_key = ["uids", READING, *key]
    fact = context.memory.recall(fact_key)
    if isinstance(fact, dict):
        raw = base64.b64decode(fact["uid"])
        if len(raw) == 16 * len(names):
            return uid_rows(raw), int(fact["unreadable"])
    uid, unreadable = contents(source, names, context)
    encoded = base64.b64encode(uid.tobytes()).decode()
    context.memory.remember(fact_key, {"uid": encoded, "unreadable": unreadable})
    return uid, unreadable


def contents(
    source: Source, names: Sequence[str], context: Context
) -> tuple[NDArray[np.uint8], int]:
    """The uids of all rows, uint8 [N, 16], and how many rows cannot be read; every row is read."""
    uids = bytearray()
    unreadable = 0
    for row, name in enumerate(names):
        try:
            uids += uid_of(source.read(row))
        except BadImage:
            unreadable += 1
            uids += uid_of(b"unreadable\0" + name.encode())
        if context.progress is not None:
            context.progress(row + 1, len(names))
    return uid_rows(uids), unreadable


def trained_and_tested(dataset: Dataset) -> int:
    """The number of test rows whose content is that of a training row.

    Uids are compared by their first half, and in full where the halves are equal.
    """
    train = np.flatnonzero(dataset.split == TRAIN)
    test = np.flatnonzero(dataset.split == TEST)
    # Two halves agree by chance in almost no dataset, so few uids are compared in full.
    half = np.ascontiguousarray(dataset.uid[:, :8]).view(np.uint64)[:, 0]
    common = np.intersect1d(half[train], half[test])
    if not len(common):
        return 0
    alike_in_training = train[np.isin(half[train], common)]
    alike_in_test = test[np.isin(half[test], common)]
    known = {dataset.uid[row].tobytes() for row in alike_in_training}
    return sum(dataset.uid[row].tobytes() in known for row in alike_in_test)


def order_of_names(names: Sequence[str]) -> NDArray[np.int64]:
    """The numbers of the rows in the order of their names, int64 [N]."""
    return np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64)


def index_of(values: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """(sorted distinct values, [N] index of each value among them)."""
    distinct = tuple(sorted(set(values)))
    index = {value: i for i, value in enumerate(distinct)}
    return distinct, np.array([index[value] for value in values], dtype=np.int64)


def domain_column(index: NDArray[np.integer[Any]], domains: Sequence[str]) -> NDArray[np.int16]:
    """The domain column as int16. Raises UsageError for too many domains: a wrong layout may make each folder one."""
    if len(domains) > np.iinfo(np.int16).max:
        first = domains[0]
        raise UsageError(
            f"The dataset has {len(domains):,} domains, but at most 32,767 are supported. The first is {first!r}.",
            "If folders were wrongly read as domains, give the meaning of the folder levels: --layout class, "
            "--layout domain/class or --layout 'class/*'",
        )
    return index.astype(np.int16)


def counts(
    split: NDArray[np.uint8], classes: Sequence[str], domains: Sequence[str], holds: str = IMAGES
) -> str:
    """``60,000 images (50,000 train, 10,000 test), 10 classes, 1 domain``."""
    numbers = np.bincount(split, minlength=3).tolist()
    numbers_by_name = zip(SPLIT_NAMES, numbers, strict=True)
    parts = ", ".join(f"{n:,} {word}" for word, n in numbers_by_name if n)
    row_count = counted(len(split), one_of(holds))
    class_count = counted(len(classes), "class")
    domain_count = counted(len(domains), "domain")
    return f"{row_count} ({parts}), {class_count}, {domain_count}"


@dataclass(frozen=True)
class JoinedSource:
    """Reads each row from the source it came from."""

    sources: list[Source]
    which: NDArray[np.uint8] | NDArray[np.int64]  # [N] index into ``sources``
    row: NDArray[np.int64]  # [N] row in that source

    def read(self, row: int) -> bytes | NDArray[Any]:
        """The image of a row; raises ``BadImage``."""
        return self.sources[int(self.which[row])].read(int(self.row[row]))


def joined_source(parts: Sequence[tuple[Source, int]]) -> JoinedSource:
    """One source that reads several sources, one after another; each is given with the number of its rows."""
    counts = [count for _, count in parts]
    # For each row of all sources: the number of its source, and its row there.
    which = np.repeat(np.arange(len(parts)), counts)
    first_rows = np.cumsum([0, *counts[:-1]])
    row = np.arange(sum(counts)) - np.repeat(first_rows, counts)
    return JoinedSource([source for source, _ in parts], which, row)


def join(spec: str, members: Mapping[str, Dataset]) -> Dataset:
    """One dataset whose domains are the members, with names prefixed by the domain.

    A member with several domains makes a domain ``NAME/domain`` of each. All members must have the same set of class
    names; their order is that of the first member. Rows are in the order of the prefixed names. Raises UsageError with
    the differences, when the class names do not agree.
    """
    # ``which`` below has one byte for the number of a member.
    if len(members) > 255:
        raise UsageError(
            f"{len(members)} datasets are given as domains, but at most 255 are supported.",
            "Use fewer datasets",
        )
    first_name, first = next(iter(members.items()))
    for name, member in members.items():
        if member.holds != first.holds:
            contents_of_both = f"{first_name} holds {first.holds} and {name} holds {member.holds}"
            raise UsageError(
                f"{contents_of_both}, but all domains of a dataset must hold the same kind of data.",
                "Extract them as separate datasets",
            )
        _check_classes(first_name, first, name, member)
    domains: list[str] = []
    names = []
    labels = []
    domain_codes = []
    readings = []
    unused = {}
    may_be_labels = {}
    for name, member in members.items():
        readings.append(f"  {name} = {member.reading}")
        for column, why in member.unused.items():
            unused[f"{name}/{column}"] = why
        for column, values in member.may_be_labels.items():
            may_be_labels[f"{name}/{column}"] = values
        labels.append(Coded(member.label, member.classes).recoded(first.classes))
        domain_codes.append(member.domain.astype(np.int64) + len(domains))
        if len(member.domains) == 1:
            domains.append(name)
        else:
            domains += [f"{name}/{domain}" for domain in member.domains]
        names += [f"{name}/{n}" for n in member.names]
    # Rows are sorted by their names, as in every dataset.
    parts = list(members.values())
    lengths = [len(part) for part in parts]
    order = order_of_names(names)
    split = np.concatenate([part.split for part in parts])[order]
    which = np.repeat(np.arange(len(parts), dtype=np.uint8), lengths)
    row = np.concatenate([np.arange(length) for length in lengths])
    template = None
    templates = {part.template for part in parts}
    if len(templates) == 1:
        (template,) = templates
    reading = counts(split, first.classes, domains, first.holds)
    groups = joined([part.groups for part in parts], lengths)
    return Dataset(
        spec=spec,
        slug=safe("-".join(members))[:64],
        classes=first.classes,
        domains=tuple(domains),
        names=tuple(names[i] for i in order),
        label=np.concatenate(labels)[order],
        domain=domain_column(np.concatenate(domain_codes)[order], domains),
        split=split,
        uid=np.concatenate([part.uid for part in parts])[order],
        template=template,
        reading="\n".join([reading, *readings]),
        source=JoinedSource([part.source for part in parts], which[order], row[order]),
        mirror=all(part.mirror for part in parts),
        groups={name: group.take(order) for name, group in groups.items()},
        unused=unused,
        may_be_labels=may_be_labels,
        links_left_out=sum(part.links_left_out for part in parts),
        holds=first.holds,
    )


def _check_classes(first_name: str, first: Dataset, name: str, member: Dataset) -> None:
    """Raise UsageError unless both datasets have the same class names, in any order."""
    missing = sorted(set(first.classes) - set(member.classes))
    extra = sorted(set(member.classes) - set(first.classes))
    if not missing and not extra:
        return
    parts = []
    for owner, classes in ((first_name, missing), (name, extra)):
        if classes:
            words = some_names(map(repr, classes), 5)
            parts.append(f"only {owner} has {words}")
    count = len(first.classes)
    count_of_other = len(member.classes)
    differences = "; ".join(parts)
    raise UsageError(
        f"The classes of {first_name} ({count}) and {name} ({count_of_other}) differ: {differences}.",
        "All domains of a dataset need the same class names: rename the folders, or list the images in a CSV file",
    )
