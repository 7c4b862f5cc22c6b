"""Labels as files have them: numbers, truth values or words, of one file or of several, numbered by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError
from fedcache.extract.datasets import dataset
from fedcache.tables.words import MISSING, signs_alone

READING = 2
"""Version of how labels and class names in columns are read, as ``dataset.READING`` is of everything; images that were
read stay known by their digests."""

UNKNOWN = int(np.iinfo(np.int64).min)
"""What readers put among integers where a row has no label: -1 may be a class."""


def coded_labels(values: Any, named: Sequence[str], where: str) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Labels int32 [N], -1 unknown, and the names of the classes that have a row.

    Args:
        values: [N] numbers (-1 or NaN is unknown, but -1 and 1 alone are two classes), booleans or words (one of
            ``MISSING`` is unknown).
        named: class names by number; a number is its own name where there are none.
        where: for messages.

    Raises:
        UsageError for floats that are not whole or beyond 2^53, other shapes, other negative numbers, and numbers
            without a name among names.
    """
    column = _flat(np.asarray(values))
    if column.ndim != 1:
        what = (
            "one column per class: labels.argmax(1) gives numbers" if column.ndim == 2 else "one number or word a row"
        )
        raise UsageError(f"The labels of {where} have the shape {list(column.shape)}.", f"Expected {what}")
    if column.dtype.kind == "b":
        named, column = named or ("False", "True"), column.astype(np.int64)
    if column.dtype.kind == "f":
        known = np.isfinite(column)
        if not (column[known] == np.rint(column[known])).all():
            raise UsageError(
                f"The labels of {where} are floats that are not whole, such as {column[known][0]}.",
                "Name another column: --label-key NAME",
            )
        if np.any(np.abs(column[known]) > 1 << 53):  # beyond it floats no longer tell whole numbers apart
            raise UsageError(
                f"The labels of {where} are floats beyond 2^53, such as {column[known].max():.0f}.",
                "Give integers or words.",
            )
        whole = np.full(len(column), UNKNOWN)
        whole[known] = column[known]
        column = whole
    if column.dtype.kind not in "iu" and not _large(column):
        words = ["" if value is None else str(value).strip() for value in column.tolist()]
        words = ["" if word.lower() in MISSING else word for word in words]
        known = np.array([bool(word) for word in words], dtype=bool)
        classes, index = dataset.index_of([word for word in words if word])
        label = np.full(len(words), -1, dtype=np.int32)
        label[known] = index
        return label, classes
    # In their own dtype: a uint64 of 2^63 and more, such as a hash, is no negative number.
    blank = column == UNKNOWN if column.dtype.kind in "iO" else np.zeros(len(column), bool)
    signs = len(named) == 0 and not blank.any() and signs_alone(column)
    known = np.ones(len(column), bool) if signs else column >= 0
    if np.any((wrong := column[~known & ~blank]) != -1):
        raise UsageError(
            f"The labels of {where} hold {int(wrong.min())}, and only -1 says that no label is known.",
            "Write -1 where no label is known; where negative numbers are classes, give them as words.",
        )
    used = np.unique(column[known])
    if len(named) and len(used) and int(used[-1]) >= len(named):
        raise UsageError(
            f"{where} has the label {int(used[-1])}, but {len(named)} class names.", "Give every class a name"
        )
    label = np.where(known, np.searchsorted(used, column), -1).astype(np.int32)
    return label, _distinct([named[i] if len(named) else str(i) for i in used.tolist()], used.tolist())


def _distinct(names: Sequence[str], numbers: Sequence[int]) -> tuple[str, ...]:
    """Class names, those that occur twice with their number."""
    repeated = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    return tuple(f"{n} #{i}" if n in repeated else str(n) for n, i in zip(names, numbers, strict=True))


def end_to_end(pieces: Sequence[Any]) -> NDArray[Any]:
    """Columns of several parts in one: numbers stay numbers where all of them are."""
    arrays = [np.asarray(piece) for piece in pieces]
    # int64 beside uint64 would become floats, which do not tell large numbers apart.
    if all(array.dtype.kind in "iub" for array in arrays) and np.result_type(*arrays).kind in "iub":
        return np.concatenate(arrays)
    return np.array([value for array in arrays for value in array.tolist()], dtype=object)


def joined_labels(given: Sequence[Any], lengths: Sequence[int]) -> Any:
    """The labels of all rows of several parts as the files have them.

    Args:
        given: [n] of each part, or None where it has none; those rows get what means unknown among the others'.
        lengths: rows of each part.
    """
    found = [None if labels is None else _signed(np.asarray(labels)) for labels in given]
    if len(found) == 1 and found[0] is not None:
        return _flat(found[0])
    kinds = [labels.dtype for labels in found if labels is not None]
    numbers = all(kind.kind in "iufb" for kind in kinds)
    blank: Any = "" if not numbers else np.nan if any(kind.kind == "f" for kind in kinds) else UNKNOWN
    flat = [
        np.full(count, blank) if labels is None else _flat(labels) for labels, count in zip(found, lengths, strict=True)
    ]
    exact = numbers and (any(kind.kind == "f" for kind in kinds) or np.result_type(*flat).kind != "f")
    return np.concatenate(flat) if exact else end_to_end(flat)


def _signed(labels: NDArray[Any]) -> NDArray[Any]:
    return labels.astype(np.int64) if labels.dtype == np.uint64 and labels.max(initial=0) < 1 << 63 else labels


def _large(column: NDArray[Any]) -> bool:
    """Whether these are Python integers of which some fit no int64, as ``end_to_end`` makes them."""
    values = column.tolist() if column.dtype == object else []
    return any(type(value) is int and value >= 1 << 63 for value in values) and all(type(v) is int for v in values)


def _flat(labels: NDArray[Any]) -> NDArray[Any]:
    return labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
