"""The rows a scheme may deal, the random streams it draws from, and how a client's test rows are chosen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedcache.errors import CorruptionError, UsageError, shell_word, unknown
from fedcache.store.files import canonical_json
from fedcache.tables.groups import Group

TRAIN, TEST, VALIDATION = 0, 1, 2
SPLITS = {TRAIN: "training", TEST: "test"}


@dataclass(frozen=True, eq=False)
class Columns:
    """What a partition may know of a dataset: one entry per row of the store, no features."""

    label: np.ndarray  # int [N], -1 unknown
    domain: np.ndarray  # int [N], index into ``domains``
    split: np.ndarray  # int [N], 0 train, 1 test, 2 validation
    ok: np.ndarray  # int or bool [N]; rows with 0 have no features and are never dealt
    uid: np.ndarray  # uint8 [N, 16], the identity of the image
    classes: tuple[str, ...]  # class names, C of them
    domains: tuple[str, ...]  # domain names
    digest: str  # of the dataset's content
    groups: Callable[[str], Group] | None = (
        None  # columns that came with the data, by name; raises for an unknown one
    )

    def sorted_by(self, name: str) -> Group:
        """A column as codes and words: a group, or ``domain`` or ``class``. Raises UsageError for an unknown one."""
        if name == "domain":
            return Group(self.domain.astype(np.int32), self.domains)
        if name == "class":
            return Group(self.label.astype(np.int32), self.classes)
        if self.groups is None:
            raise unknown("column", name, ("domain", "class"))
        return self.groups(name)

    def __post_init__(self) -> None:
        rows = len(self.label)
        for name, shape in (
            ("domain", (rows,)),
            ("split", (rows,)),
            ("ok", (rows,)),
            ("uid", (rows, 16)),
        ):
            found = getattr(self, name).shape
            if found != shape:
                raise CorruptionError(
                    f"Column {name} has shape {found}, column label has {rows} rows: expected {shape}.",
                    "Check the store: fedcache verify",
                )
        for name, column, low, names in (
            ("label", self.label, -1, self.classes),
            ("domain", self.domain, 0, self.domains),
        ):
            if rows and not (low <= int(column.min()) and int(column.max()) < len(names)):
                raise CorruptionError(
                    f"Column {name} holds {column.min()}..{column.max()}, expected {low}..{len(names) - 1}.",
                    "Check the store: fedcache verify",
                )


@dataclass(frozen=True)
class Streams:
    """Independent generators keyed by purpose, so that drawing more for one purpose moves no other draw."""

    seed: int
    scheme: str

    def __call__(self, purpose: str, *key: int) -> np.random.Generator:
        """The generator of (seed, partition, scheme, purpose, key)."""
        name = hashlib.sha256(
            canonical_json([self.seed, "partition", self.scheme, purpose, *key])
        ).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(name[:16], "little")))


@dataclass(frozen=True, eq=False)
class RowPool:
    """Rows with ok = 1 in the chosen domains, in stored order."""

    columns: Columns  # of the dataset
    domains: tuple[int, ...]  # codes of the chosen domains, in the user's order
    train: np.ndarray  # int64, rows of split train
    test: np.ndarray  # int64, rows of split test
    dealt: (
        np.ndarray
    )  # int64, rows of the split that is dealt, with those left out because their label is unknown
    notes: list[str] = field(default_factory=list)

    def by_class(self, rows: np.ndarray) -> list[np.ndarray]:
        """The rows of each class, C arrays (some may be empty), each in stored order."""
        label = self.columns.label[rows]
        return [rows[label == c] for c in range(len(self.columns.classes))]

    def of_domain(self, rows: np.ndarray, domain: int) -> np.ndarray:
        """Those of ``rows`` that belong to a domain."""
        held: np.ndarray = rows[self.columns.domain[rows] == domain]
        return held


FEWER = "fewer than"
"""In every note, and only in those, that says that clients got fewer rows than were asked for."""


@dataclass(frozen=True, eq=False)
class Dealt:
    """What a scheme returns."""

    train: Sequence[np.ndarray]  # training rows of each client, in any order
    # the clients' own test rows; None when the scheme leaves them to ``test_protocol``
    test: Sequence[np.ndarray] | None = None
    names: Sequence[str] | None = None  # names of the clients; None numbers them
    notes: Sequence[str] = ()  # what a reader of the partition should know
    common: np.ndarray | None = (
        None  # int64, ascending: the global test rows; None for the test split
    )
    pool: np.ndarray | None = (
        None  # int64: the rows that could have been dealt; None for those of the pool
    )
    # the most ``shots`` for which all classes have enough rows, 0 for none; None where no class has too few
    enough_shots: int | None = None


def make_pool(
    columns: Columns, domain: Sequence[str] | None, *, split: int, needs_labels: bool, scheme: str
) -> RowPool:
    """The pool of the chosen domains, all for None; validation rows and rows with ok = 0 are in no pool.

    Test rows without a label cannot be scored and are left out, unless no test row has one. With ``needs_labels`` rows
    without a label of the split that is dealt, ``TRAIN`` or ``TEST``, cannot be dealt. Raises UsageError, for an
    unknown or repeated domain, and for labels that a scheme needs and the dataset lacks.
    """
    names = tuple(columns.domains) if domain is None else tuple(domain)
    for name in names:
        if name not in columns.domains:
            raise unknown("domain", name, columns.domains)
        if names.count(name) > 1:
            raise UsageError(
                f"Domain {name!r} is given twice, expected distinct names.",
                f"--domain {shell_word(name)}",
            )
    codes = tuple(columns.domains.index(name) for name in names)
    chosen = np.isin(columns.domain, codes) & np.isin(columns.split, (TRAIN, TEST))
    ok = columns.ok.astype(bool)
    notes = []
    if bad := int((chosen & ~ok).sum()):
        notes.append(
            f"{bad} of {int(chosen.sum())} rows are unreadable or gone (ok = 0) and left out"
        )
    rows = {s: np.flatnonzero(chosen & ok & (columns.split == s)) for s in (TRAIN, TEST)}
    dealt = rows[split]
    for s, is_needed in ((TRAIN, needs_labels and split == TRAIN), (TEST, True)):
        known = columns.label[rows[s]] >= 0
        if needs_labels and s == split and len(known) and not known.any():
            raise UsageError(
                f"Scheme {scheme} deals rows by class, but none of the {len(known)} {SPLITS[s]} rows has a label.",
                "A scheme that reads no labels: fedcache partition --scheme iid",
            )
        if is_needed and known.any() and not known.all():
            notes.append(f"{int((~known).sum())} {SPLITS[s]} rows without a label are left out")
            rows[s] = rows[s][known]
    return RowPool(columns, codes, rows[TRAIN], rows[TEST], dealt, notes)


def need_rows(rows: np.ndarray, split: str, scheme: str) -> None:
    """Refuse an empty pool. Raises UsageError, naming the split."""
    if not len(rows):
        raise UsageError(
            f"Scheme {scheme} deals rows of split {split}, but the chosen domains have none with ok = 1.",
            "See the counts per split: fedcache inspect",
        )


class MatchedTests:
    """Test rows of each class in one random order, of which clients take the first ones in their own class shares.

    Args:
        candidates: int64 [T] test rows.
        label: [N] of all rows.
        rng: of the order; equal for all clients, so that equal clients have equal tests.
    """

    def __init__(self, candidates: np.ndarray, label: np.ndarray, rng: np.random.Generator) -> None:
        shuffled = rng.permutation(candidates)
        self._label = label
        self._rows = shuffled[np.argsort(label[shuffled], kind="stable")]
        self._classes, starts = np.unique(label[self._rows], return_index=True)
        self._ends = np.append(starts, len(shuffled))

    @property
    def by_class(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows [T] class by class, where each of K classes begins and the last ends [K + 1], and the classes."""
        return self._rows, self._ends, self._classes

    def of(self, train: np.ndarray) -> np.ndarray:
        """The largest set of test rows whose class shares are those of a client's training rows.

        With n_k training rows of class k and a_k candidates, class k gets ceil(n_k min_j(a_j / n_j)) rows over the
        owned classes j that have candidates, so the scarcest class is used up and every other one follows. Clients may
        share test rows. No row is returned when no owned class has a candidate.
        """
        owned, counts = np.unique(self._label[train], return_counts=True)
        places = np.searchsorted(self._classes, owned)
        known = [
            (int(self._ends[k]), int(self._ends[k + 1] - self._ends[k]), n)
            for c, k, n in zip(owned.tolist(), places.tolist(), counts.tolist(), strict=True)
            if k < len(self._classes) and self._classes[k] == c
        ]
        if not known:
            return np.empty(0, np.int64)
        # Integers, so that no rounding makes a class lose its last row: a_j / n_j is smallest at the scarcest class.
        _, have, own = min(known, key=lambda one: one[1] / one[2])
        return np.concatenate(
            [self._rows[start : start + -(-n * have // own)] for start, _, n in known]
        )


def first_per_class(pool: RowPool, rows: np.ndarray, count: int) -> np.ndarray:
    """The first ``count`` rows of each class, in stored order; a class that has fewer gives what it has."""
    return np.concatenate([rows[:0], *(r[:count] for r in pool.by_class(rows))])
