"""Writing files of embeddings: npz, h5, parquet and safetensors, as ``embedding_files`` reads them.

Each format's library is imported by the function that needs it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError
from fedcache.tables.groups import Group
from fedcache.tables.roles import GROUP, has_a_meaning
from fedcache.tables.splits import SPLIT_NAMES

MOST_TEXT = 32 << 20
"""Bytes of text features that the head of a parquet file is given; readers refuse one much larger."""

SAFETENSORS_TYPES = {
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
"""What safetensors calls the types of numbers."""


@dataclass(frozen=True)
class Exported:
    """What is written: N rows, and what all of them share."""

    columns: Mapping[str, NDArray[Any]]  # features, labels, domains and splits of the rows
    names: Sequence[str]  # of the rows
    groups: Mapping[str, Group]  # of the rows
    texts: Mapping[str, NDArray[np.float32]]  # [C, D] by array
    meta: Mapping[str, Any]  # names of classes and domains, and of the dataset

    @property
    def group_columns(self) -> dict[str, Group]:
        """Groups by the names of their columns, which begin with ``group/`` where they would mean something else."""
        return {
            f"{GROUP}{name}" if has_a_meaning(name) else name: group
            for name, group in self.groups.items()
        }

    @property
    def text_columns(self) -> dict[str, NDArray[np.float32]]:
        """Text features by the names of their columns."""
        return {f"text/{name}": matrix for name, matrix in self.texts.items()}


def _words(group: Group) -> list[str]:
    return [word or "" for word in group.values()]


def _write_npz(file: BinaryIO, rows: Exported) -> None:
    words = {name: _words(group) for name, group in rows.group_columns.items()}
    words |= {
        "name": [*rows.names],
        "classes": rows.meta["classes"],
        "domains": rows.meta["domains"],
    }
    everything: dict[str, Any] = {**rows.columns, **rows.text_columns}
    everything |= {name: np.array(values, np.str_) for name, values in words.items()}
    np.savez(file, **everything)


def _write_h5(file: BinaryIO, rows: Exported) -> None:
    import h5py

    words = {name: _words(group) for name, group in rows.group_columns.items()}
    words |= {
        "name": [*rows.names],
        "classes": rows.meta["classes"],
        "domains": rows.meta["domains"],
    }
    with h5py.File(file, "w") as made:
        for name, values in {**rows.columns, **rows.text_columns}.items():
            made.create_dataset(name, data=values)
        for name, column in words.items():
            made.create_dataset(name, data=column, dtype=h5py.string_dtype())


def _dictionary(codes: NDArray[Any], words: Sequence[str]) -> Any:
    """A column of pyarrow: for each row a word, or null where the code is negative."""
    import pyarrow as pa

    indices = pa.array(codes.astype(np.int32), mask=codes < 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(words, pa.string()))


def _write_parquet(file: BinaryIO, rows: Exported) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields: dict[str, Any] = {"name": pa.array(rows.names)}
    shapes = {}
    # pandas and polars show words, and nothing where a row has no label.
    words_of = {
        "labels": rows.meta["classes"],
        "domain": rows.meta["domains"],
        "split": SPLIT_NAMES,
    }
    for name, values in rows.columns.items():
        if name in words_of:
            fields[name] = _dictionary(values, words_of[name])
            continue
        shapes[name] = list(values.shape[1:])
        flat = np.ascontiguousarray(values.reshape(len(values), -1))
        inner = pa.array(flat.reshape(-1))
        fields[name] = pa.FixedSizeListArray.from_arrays(inner, flat.shape[1])
    for name, group in rows.group_columns.items():
        fields[name] = _dictionary(group.codes, group.words)
    size = sum(matrix.nbytes for matrix in rows.texts.values())
    if size > MOST_TEXT:
        raise UsageError(
            f"A parquet file holds {MOST_TEXT >> 20} MiB of text features at most, and these are {size >> 20} MiB.",
            "fedcache export FILE.safetensors",
        )
    # A table has no columns of another length: text features are in its head.
    text = {
        name: {
            "shape": list(m.shape),
            "float32": base64.b64encode(np.ascontiguousarray(m, "<f4").tobytes()).decode(),
        }
        for name, m in rows.texts.items()
    }
    head = {**rows.meta, "shapes": shapes, "text": text}
    table = pa.table(fields).replace_schema_metadata({"fedcache": json.dumps(head)})
    pq.write_table(table, file)


def _write_safetensors(file: BinaryIO, rows: Exported) -> None:
    groups = rows.group_columns
    arrays = {
        **rows.columns,
        **rows.text_columns,
        **{name: group.codes for name, group in groups.items()},
    }
    tensors = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    words = {name: list(group.words) for name, group in groups.items()}
    head = {**rows.meta, "names": [*rows.names], "groups": words}
    # Written array by array: safetensors makes one block of bytes of all arrays for a file that is open already.
    header: dict[str, Any] = {"__metadata__": {"fedcache": json.dumps(head)}}
    end = 0
    # Wide numbers first, so that every array begins where readers that map the file may read its numbers.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    for name, values in ordered:
        start = end
        end = start + values.nbytes
        kind = SAFETENSORS_TYPES[values.dtype.name]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little"))
    file.write(raw)
    for _, values in ordered:
        file.write(values.data)


WRITERS: dict[str, Callable[[BinaryIO, Exported], None]] = {
    ".npz": _write_npz,
    ".h5": _write_h5,
    ".hdf5": _write_h5,
    ".parquet": _write_parquet,
    ".safetensors": _write_safetensors,
}
