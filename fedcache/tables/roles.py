"""Roles: finds out what the columns of a table mean, for every command that reads a table.

A column is found by a usual name, or by the name that the user gives. Every other column that has a word or whole
number for each row is a group. Notes for the user say which column has which role, and list the columns without a role.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.config import DATA, option, option_name
from fedcache.errors import FedcacheError, UsageError, shell_word, unknown
from fedcache.parsing import counted, in_a_list
from fedcache.tables.groups import Group, as_a_part, differs_in_every_row, usable_group_name
from fedcache.tables.labels import (
    distinct_names,
    read_domains,
    read_labels,
    with_names,
)
from fedcache.tables.splits import (
    SPLITS,
    find_splits,
    sounds_like_a_split,
    split_of_name,
    unused_flags,
)
from fedcache.tables.words import DATA as DATA_COLUMN
from fedcache.tables.words import (
    FEATURES,
    FileRows,
    Unread,
    Words,
    as_words,
    is_feature,
    last_level,
    numbered,
    shape_of,
    some_names,
    sorted_words,
    stem_of,
    vector,
    without_blanks,
)

# The usual names of columns, by role. They are compared without case, and the first name that a file has is used.
LABELS = (
    "labels",
    "label",
    "y",
    "target",
    "targets",
    "class",
    "cls",
    "category",
    "fine_label",
    "fine_labels",
    "label_name",
    "label_id",
)
TEXTS = ("text", "texts", "sentence", "sentences", "review", "content", "body", "document")
NAMES = ("name", "sample_id", "id", "filename", "file_name", "path")
LIKE_LABELS = re.compile(r"(?i).*(label|class|target|diagnos|outcome|grade)|(y|diag|dx)(_|$)")
"""Pattern of names that columns of labels have more often than other columns."""

LIKE_GROUPS = re.compile(
    r"(.*_)?(?i:site|hospital|cent(er|re)|patient|subject|sex|gender|age)(?![a-z])"
)
"""Pattern of names of columns that give the origin of a row, which is seldom its label."""

DOMAINS = ("domain", "domains")
CLASS_NAMES = ("classes", "class_names", "label_names")
"""Usual names of a column that lists the class names."""

NAMES_SAY_IT = "the names of the files or columns give the split"
"""Reason why a column of splits is not used."""

GROUP = "group/"
"""Prefix of the name of a column that must become a group."""

ONE_DOMAIN = "all"
"""Name of the domain of rows without a domain. It is not the dataset's name, which depends on where its files are."""

MOST_LETTERS = 1 << 26
"""Maximum total number of characters of a group's distinct words, because the file of the group holds all of them."""


@dataclass(frozen=True)
class ColumnChoice:
    """Columns that the user names; all others are found by their usual names."""

    features: tuple[str, ...] = option(
        (),
        "Column of the features. If each dimension has its own column, give the common beginning of their names.",
        DATA,
        name="--features-key",
        default_text="detected by name, e.g. features, embeddings or X",
        common=True,
    )
    label: str | None = option(
        None,
        "Column of the labels.",
        DATA,
        name="--label-key",
        default_text="detected by name, e.g. label, y, target or class",
        common=True,
    )
    split: str | None = option(
        None,
        "Column that assigns rows to train, test and validation.",
        DATA,
        name="--split-key",
        default_text="detected by name",
        common=True,
    )
    row_name: str | None = option(
        None,
        "Column of the row names.",
        DATA,
        name="--name-key",
        default_text="detected by name, e.g. name, id or path",
    )
    domain: str | None = option(
        None,
        "Column of the domains.",
        DATA,
        name="--domain-key",
        default_text="detected by name: domain or domains",
        common=True,
    )
    groups: tuple[str, ...] | None = option(
        None,
        "Columns to keep as groups; all others are ignored.",
        DATA,
        name="--group-key",
        default_text="every column that can be a group",
        common=True,
    )
    no_label: tuple[str, ...] = option(
        (),
        'Values of the label column that mean "no label", e.g. -1 or NA,?.',
        DATA,
        default_text="empty values",
    )
    unlabelled: bool = option(
        False, "Treat the file as unlabelled, even if a column looks like labels.", DATA
    )

    def options(self) -> list[str]:
        """This choice as command-line options of ``ingest``."""
        words = []
        for item in fields(self):
            value = getattr(self, item.name)
            if value == item.default:
                continue
            words.append(option_name(item))
            if isinstance(value, tuple):
                value = in_a_list(value)
            if value is not True:  # a flag has no value
                words.append(value)
        return words


@dataclass(frozen=True)
class Roles:
    """Roles of the columns of N rows."""

    labels: NDArray[np.int32]  # [N], index into ``classes``; -1 where no label is known
    classes: tuple[str, ...]
    domains: NDArray[np.int32]  # [N], index into ``domain_names``
    domain_names: tuple[str, ...]
    # [N]: 0 train, 1 test, 2 validation; None if nothing gives the split
    splits: NDArray[np.uint8] | None
    names: Sequence[str]  # [N]
    groups: dict[str, Group]  # columns that divide the rows, by name
    unused: dict[str, str]  # columns without a role, each with the reason
    label_key: str | None  # the column of labels
    # number of values of each column that may be the labels, if there is no column of labels
    may_be_labels: dict[str, int]
    notes: list[str]  # sentences for the user that say which column has which role


def has_a_meaning(name: str) -> bool:
    """Whether a column of this name has a role other than that of a group."""
    usual = (*FEATURES, *LABELS, *NAMES, *DOMAINS, *CLASS_NAMES, "names", "text", "shapes")
    return name.lower() in usual or sounds_like_a_split(name)


def read_roles(
    where: Path | str,
    raw: Mapping[str, Any],
    count: int,
    choice: ColumnChoice,
    *,
    known_roles: Mapping[str, str] | None = None,
    splits: NDArray[np.uint8] | None = None,
    names: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    class_count: int | None = None,
    left_out: Mapping[str, Unread] | None = None,
) -> Roles:
    """The role of each column of a table with ``count`` rows, and the labels, domains, splits and groups of the rows.

    Args:
        where: the file, for messages.
        raw: columns by name: numbers, ``Words``, ``FileRows`` of matrices, or ``Unread``.
        count: number of rows.
        choice: the columns that the user names.
        known_roles: the role of each column that has one already.
        splits: [N] split code of each row, if the names of files or columns give it. It is used if it has several
            values and the user names no column of splits.
        names: [N] name of each row, if no column gives it.
        classes: class names, if they are not listed in a column of the file.
        class_count: number of classes of the text features; labels that are integers index these classes.
        left_out: columns whose values cannot be assigned to rows, with the reason.

    Raises UsageError for columns that make no sense.
    """
    roles = dict(known_roles or {})
    raw = without_blanks(where, raw)
    columns = {key: values for key, values in raw.items() if key not in roles}
    left_out = left_out or {}
    chosen_groups = choice.groups or ()
    _refuse_named(where, left_out, raw, choice)
    label_key = _label_column(where, columns, choice, count)
    lacks_labels = label_key is None and not choice.unlabelled
    if lacks_labels:
        _refuse_lost_labels(where, left_out, count)
    # A column called domain is chosen even if it holds, for example, measurements, so that it is refused.
    called_domain = {
        key: values
        for key, values in columns.items()
        if values.shape == (count,) and last_level(key) == "domain"
    }
    candidates = (_of_rows(columns, count), called_domain)
    domain_key = _choose(where, columns, choice.domain, DOMAINS, candidates, "--domain-key")
    # Class names come from the caller or from a column that lists them; else they are the indices of text features.
    class_key = _class_names_column(columns, label_key, count)
    if class_key is not None:
        roles[class_key] = "class names"
        if classes is None:
            classes = words_in(columns[class_key])
    if classes is None and class_count is not None:
        labels = columns.get(label_key or "")
        if _index_classes(labels, class_count):
            classes = [str(index) for index in range(class_count)]
    coded, label_notes = _labels(where, columns, label_key, classes, count, choice)
    domains, domain_names, sentences = _domains(where, columns, domain_key, count)
    for key in columns:
        if key.lower() == "domains" and key != domain_key:
            roles[key] = "domain names"
    # The split is given by a column, or by the names of files or columns.
    split_key = find_column(where, columns, choice.split, SPLITS, "--split-key")
    split_keys: tuple[str, ...] = ()
    # A column of splits is searched in three cases: names of files or columns give no split; they give the same split
    # for all rows; or the user names a column.
    one_split = splits is not None and bool((splits == splits[0]).all())
    if splits is None or one_split or choice.split is not None:
        other_roles = {label_key, domain_key} - {choice.split}
        possible = {key: values for key, values in columns.items() if key not in other_roles}
        found = find_splits(str(where), possible, choice.split, split_key, chosen_groups, count)
        split_keys = found.keys
        splits = found.codes
        sentences += found.notes
    elif split_key is not None:
        # ``Unread``: the column is listed as not used, and becomes no group.
        raw = {**raw, split_key: Unread((count,), "", NAMES_SAY_IT)}
    if splits is not None:
        # The same for columns such as is_test.
        reason = NAMES_SAY_IT
        if split_keys:
            reason = f"{split_keys[0]} gives the split"
        used = (*split_keys, *chosen_groups)
        flags = {key: values for key, values in columns.items() if key not in used}
        raw = {**raw, **unused_flags(flags, splits, reason, count)}
    name_key: str | None = None
    if names is None:
        name_key, names, name_notes = find_names(where, columns, choice.row_name, count)
        sentences += name_notes
    for column, role in ((label_key, "class"), (domain_key, "domain"), (name_key, "name")):
        if column is not None:
            roles[column] = role
    roles |= dict.fromkeys(split_keys, "split")
    # All other columns of words and whole numbers are groups.
    groups, unused, possible_groups = groups_of(where, raw, roles, count, choice.groups)
    if choice.groups is None:
        unused |= {name: column.why for name, column in left_out.items()}
    may_be_labels = {}
    if lacks_labels:
        marked_groups = [key for key in raw if key.startswith(GROUP)]
        declared = [*chosen_groups, *marked_groups]
        may_be_labels = _may_be_labels(possible_groups, declared, len(coded.words))
    return Roles(
        labels=coded.codes,
        classes=coded.words,
        domains=domains,
        domain_names=domain_names,
        splits=splits,
        names=names,
        groups=groups,
        unused=unused,
        label_key=label_key,
        may_be_labels=may_be_labels,
        notes=[
            *sentences,
            *_chosen_labels(columns, label_key),
            *label_notes,
            *groups_sentence(groups),
            *_renamed(possible_groups, groups),
        ],
    )


def find_column(
    where: Path | str, raw: Mapping[str, Any], chosen: str | None, usual: Sequence[str], option: str
) -> str | None:
    """The column ``chosen`` by the user, else the first with a usual name, without regard to case; None if none fits.

    Names in an HDF5 file have levels: only the last level is compared. If several columns have the same usual name, the
    one that is spelled exactly like the usual name is taken. Raises UsageError if the file lacks the column that
    ``option`` requested, and if several columns have the same usual name but none is spelled exactly like it.
    """
    if chosen is not None:
        if chosen not in raw and chosen.strip() in raw:
            return chosen.strip()
        if chosen not in raw:
            columns = some_names(raw)
            hint = f"{Path(where).name} has these columns: {columns}."
            error = unknown("column", chosen, raw, hint=hint)
            raise UsageError(f"{error.message} The name was given with {option}.", hint)
        return chosen
    # Last level of a name, in small letters -> the columns that have it.
    keys_of: dict[str, list[str]] = {}
    for key in raw:
        keys_of.setdefault(last_level(key), []).append(key)
    name = next((name for name in usual if name in keys_of), None)
    if name is None:
        return None
    keys = keys_of[name]
    if name in keys:
        return name
    if len(keys) > 1:
        listed = " and ".join(keys)
        hint = "Rename one of them."
        if option:
            hint = f"Choose one: {option} NAME"
        raise UsageError(f"{where}: each of {listed} could be the column {name}.", hint)
    return keys[0]


def _choose(
    where: Path | str,
    columns: Mapping[str, Any],
    chosen: str | None,
    usual: Sequence[str],
    candidates: Sequence[Mapping[str, Any]],
    option: str,
) -> str | None:
    """The column that the user names, else the first column of a usual name; earlier ``candidates`` come first."""
    # (): only the column that the user names. None: only columns of a usual name.
    key = find_column(where, columns, chosen, (), option)
    for possible in candidates:
        key = key or find_column(where, possible, None, usual, option)
    return key


def need_labels(
    where: Path | str, may_be_labels: Mapping[str, int], spec: str = ""
) -> FedcacheError:
    """The error for a table without a column of labels, some of whose columns ``may_be_labels``.

    The hint names the first of these columns. ``spec``, if given, is a dataset spec that selects this column; the hint
    shows it too.
    """
    likely = next(iter(may_be_labels))
    or_spec = ""
    if spec:
        or_spec = f", in a spec {shell_word(spec)}"
    *usual, last = LABELS[:8]  # enough names for a sentence
    names = ", ".join(usual)
    candidates = candidates_sentence(may_be_labels)
    return UsageError(
        f"{where} has no column called {names} or {last}; {candidates}.",
        f"Name the column of labels: --label-key {shell_word(likely)}{or_spec}. If there are no labels: --unlabelled",
    )


def candidates_sentence(may_be_labels: Mapping[str, int]) -> str:
    """The columns that may be the labels, with their numbers of values."""
    parts = [f"{name} has {counted(count)}" for name, count in may_be_labels.items()]
    return some_names(parts, 6)


# Labels and domains


def _of_rows(columns: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The columns that have the shape [N] or [N, 1] and at least one value."""
    found = {}
    for key, values in columns.items():
        column = vector(values)
        if isinstance(column, Unread) or column.shape != (count,):
            continue
        if isinstance(column, Words):
            is_empty = not Group.of(column).words
        else:
            is_empty = column.dtype.kind == "f" and bool(np.isnan(column).all())
        if not is_empty:
            found[key] = values
    return found


def _label_column(
    where: Path | str, columns: Mapping[str, Any], choice: ColumnChoice, count: int
) -> str | None:
    """The column of labels: the requested one, or the first of a usual name with a value for each row.

    Columns whose class names are listed in the file come first. If no column fits, one with a usual name and another
    shape is returned, so that its shape is refused. If no column has a usual name, the only one with class names is the
    column of labels.
    """
    if choice.unlabelled:
        return None
    with_class_names = {
        key: values
        for key, values in columns.items()
        if isinstance(values, Words) and values.declared
    }
    candidates = (with_class_names, _of_rows(columns, count), columns)
    key = _choose(where, columns, choice.label, LABELS, candidates, "--label-key")
    if key is None and len(with_class_names) > 1:
        listed = ", ".join(with_class_names)
        raise UsageError(
            f"{where} has several columns that could be the labels: {listed}.",
            "Choose one: --label-key NAME",
        )
    return key or next(iter(with_class_names), None)


def _refuse_named(
    where: Path | str, left_out: Mapping[str, Unread], raw: Mapping[str, Any], choice: ColumnChoice
) -> None:
    """Raise UsageError if a column that the user names belongs to no rows."""
    named = [choice.label, choice.split, choice.domain, choice.row_name, *(choice.groups or ())]
    for name in named:
        if name is not None and name in left_out and name not in raw:
            why = left_out[name].why
            raise UsageError(
                f"{where}: the column {name} cannot be used, because it has {why}.",
                f"Give each split a column of its own: {name}_train and {name}_test.",
            )


def _refuse_lost_labels(where: Path | str, left_out: Mapping[str, Unread], count: int) -> None:
    """Raise UsageError, for a table without labels, if a column that may hold the labels belongs to no rows."""
    for name, column in left_out.items():
        may_be = column.shape in ((count,), (count, 1)) and not has_a_meaning(name)
        if may_be or last_level(name) in LABELS:
            raise UsageError(
                f"{where}: the column {name} could be the labels, but it has {column.why}, so its values cannot be "
                "assigned to rows.",
                f"Give each split its own column of labels: {name}_train and {name}_test. If there are no "
                "labels: --unlabelled",
            )


def _chosen_labels(columns: Mapping[str, Any], label_key: str | None) -> list[str]:
    """A note that names the column of labels, if several columns have usual names of labels."""
    others = [key for key in columns if key != label_key and last_level(key) in LABELS]
    if label_key is None or not others:
        return []
    return [f"The labels are in {label_key}, not in {', '.join(others)}."]


def _class_names_column(
    columns: Mapping[str, Any], label_key: str | None, count: int
) -> str | None:
    """The column that lists the class names, with one word for each class instead of each row."""
    for usual in CLASS_NAMES:
        for key, values in columns.items():
            # Class names in an attribute of an HDF5 column belong only to this column.
            owner = key.rpartition("/")[0]
            of_other_column = owner in columns and owner != label_key
            if key == label_key or last_level(key) != usual or of_other_column:
                continue
            column = vector(values)
            if len(column.shape) != 1 or isinstance(column, Unread | FileRows):
                continue
            if column.shape != (count,) or _fits_as_names(column, columns.get(label_key or "")):
                return key
    return None


def _fits_as_names(names: Any, labels: Any) -> bool:
    """Whether a column with a word for each row lists class names: its words are distinct, and labels index them.

    If there are no labels that are numbers, it lists class names only if the table has a single row.
    """
    words = words_in(names)
    if len(set(words)) < len(words):
        return False
    if labels is None or isinstance(vector(labels), Words | Unread):
        return len(words) == 1
    return _index_classes(labels, len(words))


def _index_classes(labels: Any, class_count: int) -> bool:
    """Whether labels are absent, or integers that index ``class_count`` classes."""
    if labels is None:
        return True
    column = vector(labels)
    are_numbers = not isinstance(column, Words | Unread) and column.dtype.kind in "iuf"
    if not are_numbers or not len(column):
        return False
    return bool(np.nanmin(column) >= -1 and np.nanmax(column) < class_count)


def words_in(values: Any) -> list[str]:
    """The word of each row of a column; "" for a row without a value."""
    if not isinstance(values, Words):
        values = np.asarray(values).ravel()
    return [word or "" for word in as_words(values)]


def _labels(
    where: Path | str,
    columns: Mapping[str, Any],
    key: str | None,
    classes: Sequence[str] | None,
    count: int,
    choice: ColumnChoice,
) -> tuple[Group, list[str]]:
    """The class of each row, and notes for the user."""
    if key is None:
        no_labels = np.full(count, -1, np.int32)
        return Group(no_labels, distinct_names(classes or ())), []
    column = vector(columns[key])
    # File and column, for messages.
    place = f"{where}: {key}"
    if classes is not None and column.shape == (count,) and not isinstance(column, Unread):
        column = with_names(column, classes, place)
    return read_labels(place, column, count, choice.no_label)


def _domains(
    where: Path | str, columns: Mapping[str, Any], key: str | None, count: int
) -> tuple[NDArray[np.int32], tuple[str, ...], list[str]]:
    """The domain of each row, the names of the domains, and notes for the user.

    Raises UsageError if the file names several domains and no column assigns rows to them.
    """
    names_key = next((name for name in columns if name.lower() == "domains" and name != key), None)
    names = None
    if names_key is not None:
        names = words_in(columns[names_key])
    if key is None:
        if names is not None and len(names) > 1:
            raise UsageError(
                f"{where}: {names_key} contains the names of {len(names):,} domains, but no column assigns rows to "
                "the domains.",
                f"Add a column domain with one integer or word for each of the {count:,} rows.",
            )
        return np.zeros(count, np.int32), tuple(names or (ONE_DOMAIN,)), []
    column = columns[key]
    if names is not None:
        for repeated, times in Counter(names).most_common(1):
            if times > 1:
                raise UsageError(
                    f"{where}: the domain name {repeated!r} occurs {times} times.",
                    "Give every domain a name of its own.",
                )
        column = with_names(vector(column), names, f"{where}: {key}")
    coded = read_domains(f"{where}: {key}", column, count)
    is_without = coded.codes < 0
    if not is_without.any():
        return coded.codes, coded.words, []
    words = sorted_words([*coded.words, ONE_DOMAIN])
    codes = coded.recoded(words)
    codes[is_without] = words.index(ONE_DOMAIN)
    rows = int(is_without.sum())
    note = f"{rows:,} rows have no {key}. They are assigned to the domain {ONE_DOMAIN}."
    return codes, tuple(words), [note]


def _may_be_labels(
    groups: Mapping[str, Group], declared: Sequence[str], class_count: int
) -> dict[str, int]:
    """Number of values of each column that may be the labels, the likeliest column first.

    Columns with ``class_count`` values come first, then columns called like labels (``LIKE_LABELS``), then columns that
    are not called like the origin of a row (``LIKE_GROUPS``). Words come before numbers, and few values before many.
    Columns in ``declared`` are groups and never labels.
    """
    rank: dict[str, tuple[object, ...]] = {}
    for name, group in groups.items():
        words = group.words
        if name in declared or len(words) < 2:
            continue
        # False is sorted before True.
        rank[name] = (
            len(words) != class_count,
            LIKE_LABELS.match(name) is None,
            LIKE_GROUPS.match(name) is not None,
            all(word.lstrip("-").isdigit() for word in words),
            len(words),
            name,
        )
    likeliest_first = sorted(rank, key=rank.__getitem__)
    return {name: len(groups[name].words) for name in likeliest_first}


# Features


def features_of(
    path: Path, raw: Mapping[str, Any], chosen: Sequence[str]
) -> tuple[dict[str, Any], set[str]]:
    """Features [N, V, D] by backbone name, and the names of their columns.

    ``chosen`` are the columns that the user names. For a table with one column per dimension, the user may also give
    the common beginning of the names of these columns. Raises UsageError if there are no features, or if they are not
    floats.
    """
    keys = _feature_keys(path, raw, chosen)
    found = {}
    for key in dict.fromkeys(keys):
        name = _backbone(path, key)
        values = raw[key]
        are_floats = not isinstance(values, Words | Unread) and values.dtype.kind == "f"
        has_shape = len(values.shape) in (2, 3) and all(values.shape[1:])
        if not are_floats or not has_shape:
            raise UsageError(
                f"{path}: {key} cannot be used as features, because it is {shape_of(values)}.",
                "Features are floats with the shape [rows, D] or [rows, views, D], D at least 1. To make floats in "
                "numpy: .astype('float32')",
            )
        if name in found:
            raise UsageError(
                f"{path}: {key} and another column both hold features of {name!r}.",
                f"Name each column features/<backbone>, or choose one: --features-key {shell_word(key)}",
            )
        if isinstance(values, FileRows):
            values = values.with_views()
        elif values.ndim == 2:
            values = values[:, None]
        found[name] = values
    if not found:
        raise _no_features(path, raw)
    return found, set(keys)


def _feature_keys(path: Path, raw: Mapping[str, Any], chosen: Sequence[str]) -> list[str]:
    """The columns of features: those that the user names, else those with a usual name."""
    if chosen:
        keys = []
        # The features of a table with one column per dimension.
        wide = [k for k, values in raw.items() if isinstance(values, FileRows) and values.columns]
        for key in chosen:
            # The user gave the common beginning of the names of these columns.
            if key not in raw and wide:
                key = wide[0]
            find_column(path, raw, key, (), "--features-key")  # refuses a name that is no column
            keys.append(key)
        return keys
    matrices = [key for key, values in raw.items() if len(values.shape) > 1]
    usual = {key for key in matrices if is_feature(key)}
    keys = [key for key in raw if key in usual or key.startswith("features/")]
    keys = keys or [key for key in matrices if last_level(key) == DATA_COLUMN]
    # A column with one number per row is never a feature. If nothing else is found, it is returned and refused later.
    return keys or [key for key in raw if is_feature(key)]


def _no_features(path: Path, raw: Mapping[str, Any]) -> FedcacheError:
    """The error for a file without features; the hint depends on its columns."""
    texts = [
        key
        for key, values in raw.items()
        if key.lower() in TEXTS and isinstance(values, Words | Unread)
    ]
    if texts:
        return UsageError(
            f"{path} has no features; its column {texts[0]} holds texts, which a sentence encoder reads.",
            f"fedcache extract --dataset texts:{shell_word(path)} --backbones hf:FOLDER",
        )
    listed_columns = some_names(sorted(raw)) or "nothing"
    hint = (
        "Name the columns of features features/<backbone>, features, embeddings or X, or choose them: "
        "--features-key NAME. In a table, features are one column of lists, or columns f0, f1, f2, .."
    )
    likely = _likely_features(raw)
    if likely is not None:
        listed = in_a_list([likely])
        hint = f"Choose the columns of features: --features-key {shell_word(listed)}"
    return UsageError(f"{path} has no features; it has {listed_columns}.", hint)


def _likely_features(raw: Mapping[str, Any]) -> str | None:
    """The only matrix of floats, or the name that the matrices of all splits have in common; None if there are more."""
    matrices = [
        name for name, values in raw.items() if isinstance(values, FileRows) and values.ndim == 2
    ]
    if len(matrices) == 1:
        return matrices[0]
    names = {split_of_name(name)[0] for name in matrices}
    if len(names) == 1:
        return names.pop()
    return None


def _backbone(path: Path, key: str) -> str:
    """The name of the backbone whose features are in a column: NAME for ``features/NAME``."""
    if key.startswith("features/"):
        return key.removeprefix("features/")
    if is_feature(key) or last_level(key) == DATA_COLUMN:
        return stem_of(path)
    return key


def wide_sentence(features: Mapping[str, Any]) -> list[str]:
    """A note on the columns that are the features, for a table with one column per dimension."""
    lines = []
    for values in features.values():
        if isinstance(values, FileRows) and values.columns:
            first, *_, last = values.columns
            count = len(values.columns)
            lines.append(f"{count:,} columns {first} .. {last} are the features.")
    return lines


# Names


def find_names(
    where: Path | str, raw: Mapping[str, Any], chosen: str | None, count: int
) -> tuple[str | None, Sequence[str], list[str]]:
    """The column of row names or None, the name of each row, and notes; rows are numbered if there is no such column.

    A column with a usual name is not used if its values repeat or are empty. Integers are padded with zeros, so that
    rows stay in their order. Raises UsageError if the column that the user names does not have one value for each row.
    """
    # (): at this point, no usual names.
    key = find_column(where, raw, chosen, (), "--name-key")
    if key is not None:
        values = vector(raw[key])
        if isinstance(values, Unread | FileRows) or values.shape != (count,):
            raise UsageError(
                f"{where}: {key} is {shape_of(values)}, expected one name for each of {count} rows.",
                "Give one name for each row, or leave out the names.",
            )
        return key, _names(values), []
    sentences: list[str] = []
    usual = [key for key in raw if last_level(key) in NAMES]
    for key in sorted(usual, key=lambda key: NAMES.index(last_level(key))):
        values = vector(raw[key])
        if isinstance(values, Unread | FileRows) or values.shape != (count,):
            continue
        # Only words and integers are names. For other values, () fails the test below.
        if isinstance(values, Words) or values.dtype.kind in "iu":
            names = _names(values)
        else:
            names = ()
        if "" not in names and len(set(names)) == count:
            return key, names, [*sentences, f"Row names are in {key}."]
        sentences.append(f"{key} is not used as row names, because values repeat or are empty.")
    return None, numbered(count), sentences


def _names(values: Any) -> tuple[str, ...]:
    if isinstance(values, Words):
        return tuple(words_in(values))
    if values.dtype.kind not in "iu":
        return tuple(map(str, values.tolist()))
    width = max(len(str(values.min())), len(str(values.max())))
    with_zeros = f"0{width}d"
    return tuple(format(value, with_zeros) for value in values.tolist())


# Groups


def groups_of(
    where: Path | str,
    raw: Mapping[str, Any],
    known_roles: Mapping[str, str],
    count: int,
    chosen: Sequence[str] | None,
) -> tuple[dict[str, Group], dict[str, str], dict[str, Group]]:
    """Groups by name, the reason for each column that is not used, and the possible groups by column.

    Possible groups are all columns whose values can divide the rows, even if the name of a column cannot be a group's.
    ``known_roles`` has the role of each column that has one already. Raises UsageError for a column that cannot be a
    group, if the user names it or if its name begins with ``group/``.
    """
    for name in chosen or ():
        find_column(where, raw, name, (), "--group-key")
        if known_roles.get(name) in ("class", "domain"):
            hint = f"--by {shell_word(known_roles[name])} makes one client of each value."
            raise UsageError(
                f"{where}: {name} cannot be a group, because it is already read as the {known_roles[name]} of each "
                "row.",
                hint,
            )
    groups = {}
    unused = {}
    possible_groups = {}
    for key, values in raw.items():
        if chosen is None:
            skip = key in known_roles
        else:
            skip = key not in chosen
        if skip:
            continue
        requested = chosen is not None or key.startswith(GROUP)
        try:
            group = _group(vector(values), count)
            # Sentences, paths and times do not divide the rows, and may reveal whose row it is.
            mostly_distinct = not requested and differs_in_every_row(group)
            if not mostly_distinct:
                possible_groups[key] = group
            name = usable_group_name(key.removeprefix(GROUP))
            if mostly_distinct:
                listed = in_a_list([key])
                reason = f"{len(group.words):,} different values in {count:,} rows"
                unused[key] = f"{reason}; --group-key {shell_word(listed)} keeps the column"
                continue
            # This column cannot be the group ``name`` if another column has exactly this name and is a group itself.
            other_column = name != key and name in raw
            other_group = other_column and name not in known_roles and name in (chosen or raw)
            if name in groups or other_group:
                raise UsageError(
                    f"Another column is already the group {name}.",
                    "Give every column a name of its own.",
                )
            groups[name] = group
        except FedcacheError as error:
            why = as_a_part(error.message)
            if requested:
                raise UsageError(f"{where}: {key} cannot be a group: {why}.", error.hint) from error
            unused[key] = why
    return groups, unused, possible_groups


def _renamed(possible_groups: Mapping[str, Group], groups: Mapping[str, Group]) -> list[str]:
    """Notes on groups whose names differ from the names of their columns."""
    lines = []
    for key, group in possible_groups.items():
        column = key.removeprefix(GROUP)
        name = next((name for name, used in groups.items() if used is group), None)
        if name is not None and column not in groups:
            lines.append(
                f"The column {column} is stored as the group {name}, because names of groups have only the "
                "characters a-z, A-Z, 0-9, '.', '_', '-'."
            )
    return lines


def _group(values: Any, count: int) -> Group:
    """A column as a group. The message of a UsageError is only a reason, which ``groups_of`` completes."""
    if isinstance(values, Unread):
        raise UsageError(f"{values.why}.", "Groups are words or whole numbers.")
    if len(values.shape) != 1:
        sizes = " x ".join(map(str, values.shape))
        raise UsageError(f"a matrix {sizes}.", "Groups are words or whole numbers.")
    if values.shape != (count,):
        raise UsageError(
            f"{values.shape[0]:,} values for {count:,} rows.", "Groups have a value for each row."
        )
    group = Group.of(values)
    if not group.words:
        raise UsageError("no row has a value.", "Groups have values.")
    if sum(map(len, group.words)) > MOST_LETTERS:
        raise UsageError(
            f"its {len(group.words):,} values are too long.", "Groups have short values."
        )
    return group


def groups_sentence(groups: Mapping[str, Group]) -> list[str]:
    """A note on the groups and their numbers of values."""
    parts = []
    for name, group in groups.items():
        part = counted(len(group.words))
        without = int((group.codes < 0).sum())
        if without:
            rows = counted(without, "row")
            part += f", {rows} without"
        parts.append(f"{name} ({part})")
    if not parts:
        return []
    listed = ", ".join(parts)
    return [f"Groups: {listed}."]


def unused_sentence(unused: Mapping[str, str]) -> list[str]:
    """A note on unused columns, with reasons."""
    if not unused:
        return []
    listed = ", ".join(f"{name or repr(name)} ({why})" for name, why in unused.items())
    return [f"Not used: {listed}."]
