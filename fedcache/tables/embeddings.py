"""Opens files of embeddings, and finds out what their columns mean.

Files that ``export`` writes have one layout in npz, npy, h5, parquet and safetensors: ``features/<name>`` [N, D] (or
[N, V, D]) per backbone; ``labels``, ``domain`` and ``split`` [N]; ``name`` [N] if the format has strings; the class
names and domain names; a column for each group; and the text features of the classes, ``text/<name>`` [C, D].
``ingest`` reads these files, and also tables as other programs write them (``table_readers``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, UsageError
from fedcache.tables.foreign_files import REFUSED, refused_file
from fedcache.tables.read import ENDINGS, read_columns
from fedcache.tables.roles import (
    CLASS_NAMES,
    ColumnChoice,
    Roles,
    features_of,
    read_roles,
    unused_sentence,
    wide_sentence,
)
from fedcache.tables.splits import NO_SPLIT, by_split, refuse_one_split
from fedcache.tables.table_files import TABLES
from fedcache.tables.words import (
    DATA,
    FileRows,
    Unread,
    Words,
    ending_of,
    is_feature,
    is_matrix,
    joined_columns,
    joined_rows,
    last_level,
    shape_of,
    vector,
    without_blanks,
)


@dataclass(frozen=True)
class Embeddings(Roles):
    """Content of a file of embeddings: features and the roles of its other columns."""

    # backbone name -> features [N, V, D], as an array or as ``FileRows`` that stay in the file
    features: dict[str, Any]
    texts: dict[str, NDArray[np.float32]]  # backbone name -> features [C, D] of the class names


def open_embeddings(path: Path, choice: ColumnChoice | None = None) -> Embeddings:
    """A file of embeddings. Its features stay in the file and are read block by block.

    Columns are found as the module ``roles`` describes, unless ``choice`` names them. If there are no labels, each row
    has label -1.
    Raises UsageError for a missing file, an unknown ending, features that are a pickle, or columns that do not fit.
    """
    hint = f"fedcache ingest FILE --name NAME   reads {', '.join(ENDINGS)}"
    if not path.exists():
        raise UsageError(f"There is no file {path}.", hint)
    if ending_of(path) in REFUSED and path.is_file():
        raise refused_file(path, ending_of(path))
    if ending_of(path) not in ENDINGS and not path.is_dir():
        raise UsageError(f"Unknown file ending {ending_of(path)!r}.", hint)
    choice = choice or ColumnChoice()
    return assemble(path, read_columns(path, choice.features), choice)


def assemble(path: Path, raw: dict[str, Any], choice: ColumnChoice) -> Embeddings:
    """Embeddings from columns; ``path`` is for messages. Raises UsageError for columns that do not fit."""
    raw = without_blanks(path, raw)
    raw, splits, unused = _joined_splits(path, raw, choice)
    features, keys = features_of(path, raw, choice.features)
    rows = sorted({len(values) for values in features.values()})
    count = rows[0]
    if len(rows) > 1 or not count:
        found = " and ".join(map(str, rows))
        raise UsageError(
            f"The feature arrays of {path} have {found} rows.",
            "Give all features the same number of rows, at least 1.",
        )
    known_roles = dict.fromkeys(keys, "features")
    texts = {}
    for key, values in raw.items():
        if _is_text_features(key, values):
            known_roles[key] = "text features"
            name, matrix = _text_of(path, key, values, features)
            texts[name] = matrix
    # Labels that are integers index the text features, which have one row for each class.
    class_count = None
    if texts:
        class_count = len(next(iter(texts.values())))
    roles = read_roles(
        path,
        raw,
        count,
        choice,
        known_roles=known_roles,
        splits=splits,
        class_count=class_count,
        left_out=unused,
    )
    classes = len(roles.classes)
    for name, matrix in texts.items():
        if len(matrix) != classes:
            raise UsageError(
                f"{path}: text/{name} has {len(matrix)} rows for {classes} classes.",
                "Give one row per class, in the order of classes.",
            )
    notes = [*wide_sentence(features), *roles.notes, *unused_sentence(roles.unused)]
    fields = {**vars(roles), "domains": roles.domains.astype(np.int16), "notes": notes}
    # A file with text features can be used without labels, so the user need not name a column of labels.
    if texts:
        fields["may_be_labels"] = {}
    return Embeddings(**fields, features=features, texts=texts)


def _joined_splits(
    path: Path, raw: dict[str, Any], choice: ColumnChoice
) -> tuple[dict[str, Any], NDArray[np.uint8] | None, dict[str, Unread]]:
    """The columns of all rows, the split code of each row, and the columns that belong to no rows.

    If the names of columns give the split, ``X_train``, ``y_train``, ``X_test`` and ``y_test`` become X and y, with the
    test rows first. Otherwise, and for files of ``TABLES``, the columns stay as they are and the split codes are None.
    Raises UsageError for features of different widths.
    """

    def has_rows(table: Mapping[str, Any]) -> bool:
        chosen = [key for key in choice.features if key in table]
        usual = [key for key in table if is_feature(key) or last_level(key) == DATA]
        return any(len(table[key].shape) > 1 for key in chosen or usual)

    if ending_of(path) in TABLES:
        return raw, None, {}
    named = [key for key in choice.features if key in raw]
    with_rows = [key for key, values in raw.items() if len(values.shape) > 1]
    for key in named:
        refuse_one_split(key, with_rows, str(path), "--features-key")
    if named:
        return raw, None, {}
    hint = "Choose the features: --features-key NAME"
    tables = by_split(raw, has_rows, str(path), hint)
    if len(tables) == 1:
        return raw, None, {}
    # The last table has the columns without a split.
    *of_splits, (_, without_split) = tables
    # The number of rows of a split is that of its features; its other columns must have as many.
    lengths = []
    for _, table in of_splits:
        keys = features_of(path, table, choice.features)[1]
        lengths.append(len(table[min(keys)]))
    # Names of the columns of all splits, in the order of the file.
    names: dict[str, None] = {}
    for _, table in of_splits:
        names |= dict.fromkeys(table)
    joined: dict[str, Any] = {}
    for name in names:
        parts: list[Any] = [table.get(name) for _, table in of_splits]
        if all(part is not None and is_matrix(part) for part in parts):
            joined[name] = joined_rows(path, name, parts)
        else:
            parts = [part if part is None else vector(part) for part in parts]
            joined[name] = joined_columns(parts, lengths)
    unused = {}
    # Lists of class or domain names, and text features of the classes, belong to no rows, but are used.
    for name, values in without_split.items():
        lists_names = last_level(name) in (*CLASS_NAMES, "domains")
        if lists_names or name == "text" or name.startswith("text/"):
            joined[name] = values
        else:
            unused[name] = Unread(values.shape, "", NO_SPLIT)
    codes = np.array([split for split, _ in of_splits], np.uint8)
    return joined, np.repeat(codes, lengths), unused


def _is_text_features(key: str, values: Any) -> bool:
    """Whether a column holds text features of the classes; a column called ``text`` that holds words does not."""
    if key != "text":
        return key.startswith("text/")
    return is_matrix(values)


def _text_of(
    path: Path, key: str, values: Any, features: Mapping[str, Any]
) -> tuple[str, NDArray[np.float32]]:
    """The backbone's name, and the rows [C, D], scaled to norm 1, of a column ``text/<backbone>``.

    In a file with one backbone, the column may be called ``text``. Raises UsageError for a column that does not fit,
    and CorruptionError for a row that is zero or not finite.
    """
    first = next(iter(features))
    ambiguous = key == "text" and len(features) > 1
    name = first
    if key != "text":
        name = key.removeprefix("text/")
    if name not in features or ambiguous:
        listed = ", ".join(features)
        raise UsageError(
            f"{path}: the text features {key} match none of the features {listed}.",
            f"Rename the column, for example to text/{first}.",
        )
    width = features[name].shape[2]
    if isinstance(values, FileRows):
        values = values.whole()
    are_floats = not isinstance(values, Words | Unread) and values.dtype.kind == "f"
    if not are_floats or values.ndim != 2 or values.shape[1] != width:
        raise UsageError(
            f"{path}: {key} is {shape_of(values)}, expected floats [classes, {width}].",
            "Text features need the same width as their features.",
        )
    norm = np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True)
    usable = np.isfinite(norm) & (norm > 0)
    if not np.all(usable):
        row = int(np.flatnonzero(~usable)[0])
        raise CorruptionError(
            f"{path}: row {row} of {key} has only zeros, or numbers that are not finite.",
            "Compute these text features again.",
        )
    return name, (values / norm).astype(np.float32)
