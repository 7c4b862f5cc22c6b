"""What the columns of a file of embeddings mean: features, labels, splits, names, domains, and groups.

A column is found by its name, as in most tables, or by the name that the user gives. Every other one that has a word or
whole number for each row is a group. What was taken for what, and what is not used, is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, UsageError, unknown
from fedcache.tables.equal_strings import numbered
from fedcache.tables.file_rows import FEATURES, FileRows, stem_of
from fedcache.tables.groups import Group, usable_group_name
from fedcache.tables.words import MISSING, NO_VALUE, Unread, Words, signs_alone

LABELS = ("labels", "label", "y", "target", "targets", "class", "category")
SPLITS = ("split", "splits", "subset")
OF_TRAIN, OF_TEST = ("is_train", "train"), ("is_test", "test")  # columns of truth values
TEXTS = ("text", "texts", "sentence", "sentences", "review", "content", "body", "document")
NAMES = ("sample_id", "id", "filename", "file_name", "path")
DOMAINS = ("domain",)
GROUP = "group/"
"""What a column's name begins with that is a group whatever it is called."""

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "tr"), 0),
    **dict.fromkeys(("test", "testing", "te"), 1),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), 2),
}
"""Codes of splits by what they are called, in small letters."""

MOST_LETTERS = 1 << 26
"""Of all words of a group together: its file holds them."""


@dataclass(frozen=True)
class ColumnChoice:
    """Columns that the user names; the others are found by their names."""

    features: tuple[str, ...] = ()
    label: str | None = None
    split: str | None = None
    name: str | None = None
    domain: str | None = None
    groups: tuple[str, ...] | None = None  # only these; None is every column that can be one

    def options(self) -> list[str]:
        """The same as options of ``ingest``."""
        one_each = {"--label-key": self.label, "--split-key": self.split, "--name-key": self.name}
        one_each |= {"--domain-key": self.domain, "--features-key": ",".join(self.features) or None}
        one_each["--group-key"] = None if self.groups is None else ",".join(self.groups)
        return [word for key, name in one_each.items() if name is not None for word in (key, name)]


def has_a_meaning(name: str) -> bool:
    """Whether a column of this name is taken for something, and no group."""
    usual = (*FEATURES, *LABELS, *SPLITS, *OF_TRAIN, *OF_TEST, *NAMES, *DOMAINS, "name", "names", "classes", "domains")
    return name.lower() in (*usual, "text", "shapes")


def told(column: Any) -> str:
    """A column for messages: ``int64 with shape (3, 2)``."""
    kind = "words" if isinstance(column, Words) else column.kind if isinstance(column, Unread) else str(column.dtype)
    return f"{kind} with shape {column.shape}"


def find_column(path: Path, raw: Mapping[str, Any], asked: str | None, usual: Sequence[str], what: str) -> str | None:
    """The column that is asked for, else the first of a usual name, in capitals or not; None where there is none.

    ``what`` is the option that asks. Raises UsageError for one that is asked for and not there.
    """
    if asked is not None:
        if asked not in raw:
            hint = f"{path.name} has the columns {', '.join(raw)}."
            raise UsageError(unknown("column", asked, raw, hint=hint).message + f" It was given with {what}.", hint)
        return asked
    lowered = {key.lower(): key for key in reversed([*raw])}
    return next((lowered[name] for name in usual if name in lowered), None)


# Features


def features_of(path: Path, raw: Mapping[str, Any], asked: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """Features [N, V, D] by backbone, and the columns they are. Raises UsageError for none, and for what are no floats.

    ``asked`` are those that the user names: columns, or what the names of a wide table's columns begin with.
    """
    wide = [key for key, values in raw.items() if isinstance(values, FileRows) and values.columns]
    keys: dict[str, str] = {}
    for word in asked:
        key = word if word in raw or not wide else wide[0]
        find_column(path, raw, key, (), "--features-key")
        keys[key] = _backbone(path, key)
    if not asked:
        keys = {key: _backbone(path, key) for key in raw if key.startswith("features/") or _is_matrix(key, raw)}
    # One number for each row is no feature, whatever it is called; where there is nothing else it is said to be wrong.
    keys = keys or {key: _backbone(path, key) for key in raw if key.lower() in FEATURES}
    found: dict[str, Any] = {}
    for key, name in keys.items():
        values = raw[key]
        floats = not isinstance(values, Words | Unread) and values.dtype.kind == "f"
        if not floats or len(values.shape) not in (2, 3) or not all(values.shape[1:]):
            raise UsageError(
                f"{path}: {key} is {told(values)}.",
                "Features are floats [N, D] or [N, V, D], D at least 1; numpy: .astype('float32').",
            )
        if name in found:
            raise UsageError(
                f"{path}: {key} and another column are both features of {name!r}.",
                f"Name each features/<backbone>, or say which one is meant: --features-key {key}",
            )
        if isinstance(values, FileRows):
            found[name] = values.with_views()
        else:
            found[name] = values[:, None] if values.ndim == 2 else values
    if not found and (texts := [k for k, v in raw.items() if k.lower() in TEXTS and isinstance(v, Words | Unread)]):
        raise UsageError(
            f"{path} has no features; its column {texts[0]} holds texts, which a sentence encoder reads.",
            f"fedcache extract --dataset texts:{path} --backbones hf:FOLDER",
        )
    if not found:
        raise UsageError(
            f"{path} has no features; it has {', '.join(sorted(raw)) or 'nothing'}.",
            "Name them features/<backbone>, or features, embeddings or X, or say which they are: --features-key NAME. "
            "In a table they are one column of lists, or columns f0, f1, f2, ..",
        )
    return found, set(keys)


def _backbone(path: Path, key: str) -> str:
    if key.startswith("features/"):
        return key.removeprefix("features/")
    return stem_of(path) if key.lower() in FEATURES else key


def _is_matrix(key: str, raw: Mapping[str, Any]) -> bool:
    return key.lower() in FEATURES and len(raw[key].shape) > 1


def wide_sentence(features: Mapping[str, Any]) -> list[str]:
    """Which columns of a wide table the features are."""
    wide = (v.columns for v in features.values() if isinstance(v, FileRows) and v.columns)
    return [f"{len(names):,} columns {names[0]} .. {names[-1]} are the features." for names in wide]


# Labels and domains


def codes_of(
    path: Path, key: str, values: Any, named: Sequence[str], names_key: str, count: int, *, unknown_code: int
) -> tuple[NDArray[np.int32], tuple[str, ...], dict[str, int]]:
    """A column of integers or words as codes, the names of the codes, and rows without a value by what stands there.

    Raises UsageError for another shape, for floats that are not whole and for what ``named`` does not list.
    """
    if isinstance(values, Words) and values.shape == (count,):
        return _codes_of_words(path, key, values, named, names_key, unknown_code)
    hint = "Give one per row; numpy: .astype(int), or .argmax(1) of one-hot rows."
    wrong = UsageError(f"{path}: {key} is {told(values)}, expected {count} integers or words.", hint)
    if isinstance(values, Unread | FileRows | Words) or values.shape != (count,) or values.dtype.kind not in "iufb":
        raise wrong
    gone = np.isnan(values) if values.dtype.kind == "f" else np.zeros(count, bool)
    if gone.any() and unknown_code >= 0:
        raise _without(path, key, int(gone.sum()), count)
    if values.dtype.kind == "f":
        whole = np.where(gone, 0, values)
        if not ((np.abs(whole) < 1 << 53) & (whole == np.rint(whole))).all():
            raise wrong
        values = whole
    if values.dtype.kind == "b" and not named:
        words = Words(values.astype(np.int32), ("False", "True"))
        return _codes_of_words(path, key, words, named, names_key, unknown_code)
    if unknown_code == -1 and not named and not gone.any() and signs_alone(values):
        return (values > 0).astype(np.int32), ("-1", "1"), {}
    codes = np.where(gone, unknown_code, values.astype(np.int64))
    top = int(codes.max())
    if int(codes.min()) < min(0, unknown_code) or (named and top >= len(named)) or top > 10**6:
        raise UsageError(
            f"{path}: {key} runs from {codes.min()} to {top}" + (f" with {len(named)} {names_key}." if named else "."),
            f"Codes run from {unknown_code} upwards, one name each.",
        )
    lost = {k: int(n) for k, n in (("empty", gone.sum()), ("with -1", (codes[~gone] == -1).sum())) if n}
    return codes.astype(np.int32), tuple(named) or tuple(str(i) for i in range(top + 1)), lost


def _codes_of_words(
    path: Path, key: str, column: Words, named: Sequence[str], names_key: str, unknown_code: int
) -> tuple[NDArray[np.int32], tuple[str, ...], dict[str, int]]:
    counts = column.counts()
    clean = {word: word.strip() for word in column.words}
    # A class that is called "none" is one, if the file names its classes.
    missing = NO_VALUE if unknown_code >= 0 else MISSING
    lost = {
        w: n
        for w, n in counts.items()
        if {clean.get(w, ""), clean.get(w, "").lower()} & missing and clean.get(w) not in named
    }
    found = sorted({clean[w] for w in counts if w not in lost})
    order = {name: i for i, name in enumerate(named or found)}
    if strange := [w for w in found if w not in order]:
        raise UsageError(f"{path}: {key} {strange[0]!r} is not in {names_key}.", "Add its name.")
    if lost and unknown_code >= 0:
        raise _without(path, key, sum(lost.values()), len(column.codes))
    to = np.array([*(order.get(clean[w], unknown_code) for w in column.words), unknown_code], np.int32)
    said: dict[str, int] = {}
    for word, n in lost.items():
        said["empty" if not word.strip() else repr(word.strip())] = n + said.get("empty", 0) * (not word.strip())
    return to[column.codes], tuple(order), said


def _without(path: Path, key: str, rows: int, count: int) -> FedcacheError:
    return UsageError(f"{path}: {rows:,} of {count:,} rows have no {key}.", "Give every row a value.")


def unlabelled_sentence(lost: Mapping[str, int], count: int) -> list[str]:
    """How many rows have no label, and what stands in its place."""
    if not lost:
        return []
    parts = ", ".join(f"{n:,} {word}" for word, n in sorted(lost.items(), key=lambda one: -one[1]))
    return [f"{sum(lost.values()):,} of {count:,} rows are unlabelled: {parts}."]


# Splits


def find_splits(
    path: Path, raw: Mapping[str, Any], asked: str | None, count: int
) -> tuple[str | None, NDArray[np.uint8] | None, list[str]]:
    """The column that says the split, the split of each row, and what should be said of it; None where none does.

    Raises UsageError for words that are no split.
    """
    key = find_column(path, raw, asked, SPLITS, "--split-key")
    if key is not None:
        yes = _truth(raw[key], count, numbers=asked is not None and key.lower() in (*OF_TRAIN, *OF_TEST))
        return key, *(_splits_of(path, key, raw[key], count) if yes is None else _two_splits(key, yes))
    for key in [key for key in raw if key.lower() in (*OF_TRAIN, *OF_TEST)]:
        # One that only sounds like a split and holds something else is none.
        if (yes := _truth(raw[key], count, numbers=True)) is not None:
            return key, *_two_splits(key, yes)
    return None, None, []


def _truth(values: Any, count: int, *, numbers: bool) -> NDArray[np.bool_] | None:
    """A column of truth values, also as the words true and false, or 0 and 1 where ``numbers`` may be; else None."""
    if values.shape != (count,) or isinstance(values, Unread | FileRows):
        return None
    if isinstance(values, Words):
        said = np.array([w.strip().lower() == "true" for w in values.words] or [False])
        words = {w.strip().lower() for w in values.counts()}
        return said[values.codes] if words <= {"true", "false"} else None
    if values.dtype.kind == "b" or (numbers and set(np.unique(values).tolist()) <= {0, 1}):
        return np.asarray(values, bool)
    return None


def _two_splits(key: str, yes: NDArray[np.bool_]) -> tuple[NDArray[np.uint8], list[str]]:
    """Splits by truth values: true is train where the column is called so, and test elsewhere."""
    train = key.lower() in OF_TRAIN
    said = (
        f"{key} is true for {int(yes.sum()):,} of {len(yes):,} rows: those are the {'train' if train else 'test'} rows."
    )
    return (yes != train).astype(np.uint8), [said]


def _splits_of(path: Path, key: str, values: Any, count: int) -> tuple[NDArray[np.uint8], list[str]]:
    if isinstance(values, Words) and values.shape == (count,):
        rows, codes = values.counts(), [SPLIT_WORDS.get(w.strip().lower(), 255) for w in values.words]
        if strange := [w for w in rows if w.strip().lower() not in SPLIT_WORDS]:
            first = int(np.argmax(values.codes == values.words.index(strange[0])))
            raise UsageError(
                f"{path}: {rows[strange[0]]:,} rows have the {key} {strange[0]!r}, the first is row {first:,}.",
                f"The words are {', '.join(SPLIT_WORDS)}. --split-key NAME takes another column; without one a fifth "
                "is held out.",
            )
        return np.array(codes, np.uint8)[values.codes], []
    number = not isinstance(values, Words | Unread | FileRows) and values.shape == (count,)
    if number and set(np.unique(values).tolist()) <= {0, 1, 2}:
        return values.astype(np.uint8), []
    seen = f", holding {', '.join(map(str, np.unique(values)[:4]))}" if number else ""
    raise UsageError(
        f"{path}: {key} is {told(values)}{seen}.",
        f"Expected {count} of 0 train, 1 test, 2 validation, or of those words; without split a fifth is held out.",
    )


# Names


def find_names(
    path: Path, raw: Mapping[str, Any], asked: str | None, count: int
) -> tuple[str | None, Sequence[str], list[str]]:
    """The column that names the rows, their names, and what should be said; without a column rows are numbered.

    A column that only sounds like names, and repeats or has empty rows, is none. Integers are filled up with zeros, so
    that rows stay in their order. Raises UsageError for names of another shape.
    """
    key = find_column(path, raw, asked, ("name",), "--name-key")
    if key is not None:
        values = raw[key]
        if isinstance(values, Unread | FileRows) or values.shape != (count,):
            raise UsageError(
                f"{path}: {key} has shape {values.shape} for {count} rows.", "Give one name per row, or none."
            )
        return key, _names(values), []
    said: list[str] = []
    for key in (key for name in NAMES for key in raw if key.lower() == name):
        values = raw[key]
        if isinstance(values, Unread | FileRows) or values.shape != (count,):
            continue
        names = _names(values) if isinstance(values, Words) or values.dtype.kind in "iu" else ()
        if "" not in names and len(set(names)) == count:
            return key, names, said
        said.append(f"{key} repeats or is empty, so it names no rows.")
    return None, numbered(count), said


def _names(values: Any) -> tuple[str, ...]:
    if isinstance(values, Words):
        return tuple(values.every())
    if values.dtype.kind not in "iu":
        return tuple(map(str, values.tolist()))
    width = max(len(str(values.min())), len(str(values.max())))
    return tuple(map(f"{{:0{width}d}}".format, values.tolist()))


# Groups


def groups_of(
    path: Path, raw: Mapping[str, Any], taken: Mapping[str, str], count: int, asked: Sequence[str] | None
) -> tuple[dict[str, Group], dict[str, str]]:
    """Groups by name, and why each column that is nothing else is none.

    ``taken`` are columns with another meaning, and the meaning. Raises UsageError for one that the user asks for, or
    that begins with ``group/``, and that cannot be a group.
    """
    for name in asked or ():
        find_column(path, raw, name, (), "--group-key")
        if taken.get(name) in ("class", "domain"):
            hint = f"--by {taken[name]} makes a client of each."
            raise UsageError(f"{path}: {name} is the {taken[name]} of each row, which every store has.", hint)
    found: dict[str, Group] = {}
    left: dict[str, str] = {}
    for key, values in raw.items():
        if (key in taken and key not in (asked or ())) or (asked is not None and key not in asked):
            continue
        try:
            name = usable_group_name(key.removeprefix(GROUP))
            if name in found:
                raise UsageError(f"The group {name!r} is there twice.", "Give every column a name of its own.")
            found[name] = _group(values, count)
        except FedcacheError as error:
            if asked is not None or key.startswith(GROUP):
                raise UsageError(f"{path}: {key} cannot be a group: {error.message}", error.hint) from error
            left[key] = _short(error.message)
    return found, left


def _group(values: Any, count: int) -> Group:
    if isinstance(values, Unread):
        raise UsageError(f"{values.why}.", "Groups are words or whole numbers.")
    if len(values.shape) != 1:
        raise UsageError(f"a matrix {' x '.join(map(str, values.shape))}.", "Groups are words or whole numbers.")
    if values.shape != (count,):
        raise UsageError(f"{values.shape[0]:,} values for {count:,} rows.", "Groups have a value for each row.")
    made = Group.of(values)
    if not made.words:
        raise UsageError("no row has a value.", "Groups have values.")
    if sum(map(len, made.words)) > MOST_LETTERS:
        raise UsageError(f"its {len(made.words):,} values are too long.", "Groups have short values.")
    return made


def _short(message: str) -> str:
    return re.sub(r" sort no rows\.$|\.$", "", message[:1].lower() + message[1:])


def groups_sentence(groups: Mapping[str, Group], left: Mapping[str, str]) -> list[str]:
    """Which columns are groups, with their numbers of values, and why the others are not used."""
    lines = []
    if groups:
        parts = []
        for name, group in groups.items():
            none = int((group.codes < 0).sum())
            more = f", {none:,} rows without" if none else ""
            parts.append(f"{name} ({len(group.words):,} value{'' if len(group.words) == 1 else 's'}{more})")
        lines.append(f"Groups: {', '.join(parts)}.")
    if left:
        lines.append(f"Not used: {', '.join(f'{name or repr(name)} ({why})' for name, why in left.items())}.")
    return lines
