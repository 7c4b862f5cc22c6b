"""Files of embeddings, as what their columns mean.

One layout for npz, npy, h5, parquet and safetensors: ``features/<name>`` [N, D] (or [N, V, D]) per backbone,
``labels``, ``domain``, ``split`` [N], and ``name`` where the format has strings, with the class and domain names, a
column for each group, and class text features, ``text/<name>`` [C, D]. What ``export`` writes, ``ingest`` reads; it
also reads tables as other programs write them (``table_readers``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, UsageError, unknown
from fedcache.tables.file_rows import FileRows, ending_of
from fedcache.tables.groups import Group
from fedcache.tables.read import ENDINGS, read_columns
from fedcache.tables.roles import (
    DOMAINS,
    LABELS,
    ColumnChoice,
    codes_of,
    features_of,
    find_column,
    find_names,
    find_splits,
    groups_of,
    groups_sentence,
    told,
    unlabelled_sentence,
    wide_sentence,
)
from fedcache.tables.words import Unread, Words


@dataclass
class Embeddings:
    """What a file holds."""

    features: dict[str, Any]  # [N, V, D] per backbone name: arrays, or ``FileRows`` that stay in the file
    labels: NDArray[np.int32]  # int [N], -1 unknown
    domains: NDArray[np.int16]  # int [N]
    splits: NDArray[np.uint8] | None  # int [N], 0 train, 1 test, 2 validation; None when the file does not say
    names: Sequence[str]  # N names
    classes: tuple[str, ...]  # class names
    domain_names: tuple[str, ...]  # domain names
    # [C, D] per backbone name, features of the class names
    texts: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)  # columns that sort the rows, by name
    left_out: dict[str, str] = field(default_factory=dict)  # columns that are not used, and why
    notes: list[str] = field(default_factory=list)  # what a user should hear of how columns were understood


def open_embeddings(path: Path, choice: ColumnChoice | None = None) -> Embeddings:
    """A file of embeddings whose features stay in it, to be read by block.

    Columns are found as ``embedding_columns`` says, unless ``choice`` names them; without labels every row is -1.
    Raises UsageError, for a missing file, an unknown ending, features that are a pickle, or columns that do not fit.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file.", f"fedcache ingest FILE --name NAME   takes {', '.join(ENDINGS)}")
    if ending_of(path) not in ENDINGS:
        raise unknown("file ending", ending_of(path), ENDINGS)
    choice = choice or ColumnChoice()
    return assemble(path, read_columns(path, choice.features), choice)


def assemble(path: Path, raw: dict[str, Any], choice: ColumnChoice | None = None) -> Embeddings:
    """What columns mean; ``path`` is for messages. Raises UsageError, for columns that do not fit."""
    choice = choice or ColumnChoice()
    features, keys = features_of(path, raw, choice.features)
    rows = {len(v) for v in features.values()}
    (count,) = rows if len(rows) == 1 else (0,)
    if not count:
        raise UsageError(
            f"{path} has features of {' and '.join(map(str, sorted(rows)))} rows.", "All need the same, at least 1."
        )
    taken = dict.fromkeys(keys, "features") | dict.fromkeys(raw.keys() & {"classes", "domains"}, "names")
    label_key = find_column(path, raw, choice.label, LABELS, "--label-key")
    labels, classes, lost = _codes(path, raw, label_key, "classes", count, unknown_code=-1)
    if twice := sorted({c for c, n in Counter(classes).items() if n > 1}):
        raise UsageError(f"{path}: the class name {twice[0]!r} is there twice.", "Give every class a name of its own.")
    with_domains = _with_domains(path, raw, count)
    domain_key = find_column(path, with_domains, choice.domain, DOMAINS, "--domain-key")
    domains, domain_names, _ = _codes(path, with_domains, domain_key, "domains", count, unknown_code=0)
    if twice := sorted({d for d, n in Counter(domain_names).items() if n > 1}):
        raise UsageError(
            f"{path}: the domain name {twice[0]!r} is there twice.", "Give every domain a name of its own."
        )
    split_key, splits, said = find_splits(path, raw, choice.split, count)
    name_key, names, more = find_names(path, raw, choice.name, count)
    for key, what in ((label_key, "class"), (domain_key, "domain"), (split_key, "split"), (name_key, "name")):
        taken |= {key: what} if key is not None else {}
    taken |= {key: "text" for key in raw if key == "text" or key.startswith("text/")}
    texts = _texts(path, raw, features)
    for name, matrix in texts.items():
        if "classes" not in raw and all(c.isdigit() for c in classes) and len(classes) < len(matrix):
            classes = tuple(str(i) for i in range(len(matrix)))  # labels are codes, or absent: the text says how many
        if len(matrix) != len(classes):
            raise UsageError(
                f"{path}: text/{name} has {len(matrix)} rows for {len(classes)} classes.",
                "Give one row per class, in the order of classes.",
            )
    groups, left = groups_of(path, raw, taken, count, choice.groups)
    notes = [*wide_sentence(features), *said, *more, *unlabelled_sentence(lost, count), *groups_sentence(groups, left)]
    return Embeddings(
        features, labels, domains, splits, names, classes, domain_names or ("all",), texts, groups, left, notes
    )


def _codes(
    path: Path, raw: Mapping[str, Any], key: str | None, names_key: str, count: int, *, unknown_code: int
) -> tuple[Any, tuple[str, ...], dict[str, int]]:
    """As ``codes_of``, with the names that the file gives; without a column every row has the unknown code."""
    named = tuple(_listed(raw[names_key])) if names_key in raw else ()
    if key is None:
        return np.full(count, unknown_code, np.int32), named, {}
    return codes_of(path, key, raw[key], named, names_key, count, unknown_code=unknown_code)


def _listed(values: Any) -> list[str]:
    """The words of a column one after another, whatever its shape was."""
    return values.every() if isinstance(values, Words) else list(map(str, np.asarray(values).ravel().tolist()))


def _with_domains(path: Path, raw: dict[str, Any], count: int) -> dict[str, Any]:
    """The columns, with one that says which domain each row is of where ``domains`` does that and not name them.

    Raises UsageError for names of several domains that no column tells apart.
    """
    named = raw.get("domains")
    if named is None or "domain" in raw or named.shape in ((), (0,), (1,)):
        return raw
    if named.shape == (count,):
        return {**{key: values for key, values in raw.items() if key != "domains"}, "domain": named}
    raise UsageError(
        f"{path}: domains names {len(_listed(named)):,} domains, and no column says which row is of which.",
        f"Add domain, one integer or word for each of the {count:,} rows.",
    )


def _texts(path: Path, raw: dict[str, Any], features: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """``text/<name>`` of backbones of the file, or ``text`` of its only one, as unit rows."""
    found: dict[str, NDArray[np.float32]] = {}
    for key, values in raw.items():
        if key != "text" and not key.startswith("text/"):
            continue
        name = key.removeprefix("text/") if key != "text" else next(iter(features))
        if name not in features or (key == "text" and len(features) > 1):
            raise UsageError(
                f"{path}: {key} belongs to none of the features {', '.join(features)}.",
                f"Name it text/{next(iter(features))}.",
            )
        width = features[name].shape[2]
        values = values.whole() if isinstance(values, FileRows) else values
        if (
            isinstance(values, Words | Unread)
            or values.dtype.kind != "f"
            or values.ndim != 2
            or values.shape[1] != width
        ):
            raise UsageError(
                f"{path}: {key} is {told(values)}, expected floats [classes, {width}].",
                "Text features are as wide as the features they go with.",
            )
        norm = np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True)
        if not np.all(np.isfinite(norm) & (norm > 0)):
            row = int(np.flatnonzero(~(np.isfinite(norm) & (norm > 0)))[0])
            raise CorruptionError(
                f"{path}: row {row} of {key} is zero or not finite.", "Compute these text features again."
            )
        found[name] = (values / norm).astype(np.float32)
    return found
