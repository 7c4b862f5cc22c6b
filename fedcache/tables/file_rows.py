"""Rows of features that stay in their file, to be read block by block as often as they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, UsageError

Held = TypeVar("Held")

FEATURES = (
    "features",
    "embeddings",
    "x",
    "feature",
    "embedding",
    "emb",
    "embs",
    "feat",
    "feats",
    "vector",
    "vectors",
)
"""Columns that are features without being told, in small letters; and ``features/NAME``."""


DATA = "data"
"""A column that is features where none of ``FEATURES`` is there."""


def last_level(name: str) -> str:
    """The last level of a column's name, in small letters: of ``train/Labels`` in an HDF5 file ``labels``."""
    name = name.strip().lower()
    if name.startswith(("features/", "text/", "group/")):
        return name
    return name.rpartition("/")[2]


def without_blanks(where: Path | str, columns: Mapping[str, Held]) -> dict[str, Held]:
    """Columns by their names without blanks around them, as after the commas of a CSV.

    Raises UsageError for two columns that are then called the same.
    """
    found: dict[str, Held] = {}
    for name, column in columns.items():
        if name.strip() in found:
            raise named_twice(where, name.strip())
        found[name.strip()] = column
    return found


def named_twice(where: Path | str, name: str) -> FedcacheError:
    """The error of a table with two columns of one name."""
    return UsageError(
        f"{where}: the column {name!r} is there twice.", "Give every column a name of its own."
    )


def is_feature(name: str) -> bool:
    """Whether a column of this name is features, if it has the shape."""
    return last_level(name) in FEATURES or name.startswith("features/")


def ending_of(path: Path) -> str:
    """The ending that says the format, in small letters: .npz, .csv, also .csv.gz."""
    ending = path.suffix.lower()
    if ending == ".gz":
        return f"{Path(path.stem).suffix.lower()}{ending}"
    return ending


def stem_of(path: Path) -> str:
    """The name of a file without its ending."""
    if ending_of(path):
        return path.name[: -len(ending_of(path))]
    return path.name


def some_names(names: Iterable[str], most: int = 20) -> str:
    """The first names of columns, and how many more there are.

    >>> some_names(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    every = list(names)
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


Parts = Callable[[int], Iterator[NDArray[Any]]]
"""Rows of a column in order, in pieces of about that many."""


def refuse_empty(path: Path) -> None:
    """Raise UsageError for a file without a byte."""
    if path.is_file() and not path.stat().st_size:
        raise UsageError(f"{path} is empty.", "Write it again.")


@contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Turn what the formats' libraries raise for damaged files, each its own kinds, into a UsageError."""
    try:
        yield
    except FedcacheError:
        raise
    except Exception as error:
        refuse_empty(path)
        said = " ".join(str(error).split())[:160]
        raise UsageError(
            f"{path} could not be read as {ending_of(path)}: {type(error).__name__}: {said}",
            "Object arrays and pickles are never read; write plain numbers."
            if "allow_pickle" in said
            else f"Write it again, whole and as {ending_of(path)}.",
        ) from error


def blocks_of(rows: FileRows | NDArray[Any], size: int) -> Iterator[NDArray[Any]]:
    """All rows in order, ``size`` at a time and the rest, of a file or of memory; errors as ``FileRows.blocks``."""
    if isinstance(rows, FileRows):
        return rows.blocks(size)
    return (rows[start : start + size] for start in range(0, len(rows), size))


@dataclass(frozen=True)
class FileRows:
    """A column of numbers that stays in its file.

    >>> rows = FileRows(Path("x.npy"), (3, 2), np.dtype("f4"), lambda n: iter(np.ones((1, 3, 2), "f4")))
    >>> [block.shape for block in rows.with_views().blocks(2)]
    [(2, 1, 2), (1, 1, 2)]
    """

    path: Path  # for messages
    shape: tuple[int, ...]  # (N, D) or (N, V, D)
    dtype: np.dtype[Any]
    parts: Parts
    columns: tuple[str, ...] = ()  # of a table with one column per dimension

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def with_views(self) -> FileRows:
        """The same as [N, V, D]; a matrix has one view."""
        if self.ndim == 3:
            return self
        return replace(self, shape=(self.shape[0], 1, self.shape[1]))

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        """All rows in order, ``rows`` at a time and the rest; raises UsageError for a damaged file."""
        with explain_damage(self.path):
            found = 0
            rest = np.empty((0, *self.shape[1:]), self.dtype)
            for part in self.parts(rows):
                part = part.reshape(len(part), *self.shape[1:])
                rest = np.concatenate([rest, part]) if len(rest) else part
                while len(rest) >= rows:
                    found += rows
                    yield rest[:rows]
                    rest = rest[rows:]
            if found + len(rest) != len(self):
                raise ValueError(f"{found + len(rest):,} rows are there of {len(self):,}")
            if len(rest):
                yield rest

    def whole(self) -> NDArray[Any]:
        """All rows in memory."""
        out = np.empty(self.shape, self.dtype)
        start = 0
        for block in self.blocks(1 << 16):
            out[start : start + len(block)] = block
            start += len(block)
        return out


def joined_rows(path: Path, name: str, parts: Sequence[FileRows | NDArray[Any]]) -> FileRows:
    """Matrices of several splits, one after another, which stay in their file.

    Raises UsageError for rows of different shapes.
    """
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        told = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise UsageError(
            f"{path}: the rows of {name} have the shapes {told}.",
            "All splits need the same features.",
        )
    count = sum(len(part) for part in parts)

    def rows(size: int) -> Iterator[NDArray[Any]]:
        for part in parts:
            yield from blocks_of(part, size)

    dtype = np.result_type(*(part.dtype for part in parts))
    return FileRows(path, (count, *shapes.pop()), dtype, rows)
