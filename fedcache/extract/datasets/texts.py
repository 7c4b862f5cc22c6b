"""``texts:FILE``: texts in a column of a CSV or TSV (.gz too), parquet or feather file, with labels in other columns.

The column of texts is called ``text``, ``texts``, ``sentence``, ``sentences``, ``review``, ``content``, ``body`` or
``document`` (in upper or lower case), or ``--images-key`` names it. Labels, splits, names, domains and groups are
found by the rules of ``fedcache ingest`` for tables: by usual names, or as
``texts:FILE?text=A&label=B&split=C&name=D&domain=E&group=F,G`` names them. Every other column with repeated values is a
group, and fedcache lists the columns that it does not use. A row without a text is quarantined like an unreadable
image.

A text is identified only by its bytes (UTF-8). If you rename the file, nothing is computed again. If one text changes,
only the texts of its chunk are computed again. Each process holds the column in memory once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError
from fedcache.extract.datasets import columns
from fedcache.extract.datasets.archives import Reopened, open_as_listed, stamp_of
from fedcache.extract.datasets.dataset import Context, Dataset
from fedcache.extract.digests import stat_key
from fedcache.extract.image_files import BadImage
from fedcache.extract.recipe import TEXTS
from fedcache.tables.roles import TEXTS as USUAL_TEXTS
from fedcache.tables.roles import find_column, find_names, read_roles
from fedcache.tables.table_files import TABLES, Table, are_words, arrow
from fedcache.tables.table_readers import BATCH, read_others
from fedcache.tables.words import ending_of, explain_damage

HOLDS = TEXTS
MOST = 4 << 30
"""Limit in bytes for all texts of a file together, because each process holds them in memory."""


def key(rest: str, context: Context) -> list[Any]:
    """The columns that the spec names, and the stat of the file."""
    request = columns.parse_rest(rest, "texts")
    return ["texts", request.facts, *stat_key(_locate(request.place))]


def load(rest: str, context: Context) -> Dataset:
    """The dataset of ``texts:FILE``.

    Raises UsageError for a missing or damaged file, and for columns that make no sense.
    """
    request = columns.parse_rest(rest, "texts")
    facts = key(rest, context)
    path = _locate(request.place)
    raw, column, source = _read(path, request.content or None)
    roles = read_roles(path, raw, len(source), request.choice)
    how = f"texts from {column}"
    return columns.dataset_of_rows(
        f"texts:{rest}", path, source, roles, how=how, facts=facts, context=context, holds=TEXTS
    )


def open_texts(path: Path) -> tuple[list[str], TextSource]:
    """The names and the texts of the rows of a file, for ``embed_images``; UsageError as of ``load``."""
    if not path.is_file():
        raise UsageError(
            f"There is no file {path}.",
            "Give a table with a column of texts: .csv, .tsv, .parquet or .feather.",
        )
    raw, _, source = _read(path, None)
    # None: the user names no column of row names.
    _, names, _ = find_names(path, raw, None, len(source))
    return list(names), source


def _read(path: Path, request: str | None) -> tuple[dict[str, Any], str, TextSource]:
    """The other columns of a table of texts, the name of its column of texts, and the texts.

    ``request`` is the column of texts that the user names, or None.
    """
    column, table = _opened(path, request)
    source = TextSource(path.absolute(), stamp_of(path), column)
    if not len(source):
        raise UsageError(f"{path} has 0 rows.", "It needs at least 1 row.")
    others = [name for name in table.types if name != column]
    columns: dict[str, Any] = {}
    if others:
        with _explained(path):
            columns, _ = read_others(table, others)
    return columns, column, source


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """The same as ``explain_damage``, but with a hint for tables of texts."""
    try:
        with explain_damage(path):
            yield
    except UsageError as error:
        # ``explain_damage`` sets a cause. An error without a cause has a better hint already.
        if error.__cause__ is None:
            raise
        hint = "Write it again as UTF-8; put texts with commas or line breaks in quotes."
        raise UsageError(error.message, hint) from error


def _locate(place: str) -> Path:
    path = Path(place).expanduser()
    if not place or not path.is_file():
        raise UsageError(
            f"There is no file of texts {place!r} (current directory: {Path.cwd()}).",
            "Give the table of the texts: --dataset texts:FILE.csv",
        )
    if ending_of(path) not in TABLES:
        raise UsageError(
            f"Unknown file ending {ending_of(path)!r}.", f"texts:FILE reads {', '.join(TABLES)}"
        )
    return path


def _opened(path: Path, request: str | None) -> tuple[str, Table]:
    """The name of the column of texts, and the table.

    Raises UsageError for a damaged table, and if no column of texts is found or it holds no words.
    """
    with _explained(path):
        table = TABLES[ending_of(path)](path)
    name = find_column(path, table.types, request, USUAL_TEXTS, "--images-key")
    if name is None:
        found = ", ".join(table.types)
        usual = ", ".join(USUAL_TEXTS)
        raise UsageError(
            f"{path} has no column of texts; it has {found}.",
            f"Choose the column with --images-key NAME. By default, fedcache looks for the names {usual}.",
        )
    kind = table.types[name]
    value_kind = kind
    if arrow().types.is_dictionary(kind):
        value_kind = kind.value_type
    # The types of a CSV are those of its first rows, so a column of numbers may still hold words below.
    if not table.is_text and not are_words(value_kind):
        raise UsageError(
            f"{path}: {name} holds {kind}, expected texts.",
            "Choose another column with --images-key NAME.",
        )
    return name, table


@dataclass(frozen=True)
class _JoinedTexts:
    """All texts of a column, one after another, with the position at which each text ends."""

    raw: bytes
    ends: NDArray[np.int64]  # [N + 1]: 0, and then the end of each text


@dataclass(eq=False)
class TextSource(Reopened):
    """The texts of a column as UTF-8 bytes, read when the first one is requested. Pickles do not contain the texts.

    ``stamp`` has the size and mtime_ns of the file when it was listed.
    """

    path: Path
    stamp: tuple[int, int]
    column: str

    def __post_init__(self) -> None:
        self._texts: _JoinedTexts | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._all().ends) - 1

    def read(self, row: int) -> bytes:
        """The text of a row; raises ``BadImage`` where there is none, MachineError when the file has changed."""
        texts = self._all()
        text = texts.raw[texts.ends[row] : texts.ends[row + 1]]
        if not text.strip():
            raise BadImage("the text is empty")
        return text

    def _all(self) -> _JoinedTexts:
        with self._lock:
            if self._texts is None:
                self._texts = _read_texts(self.path, self.stamp, self.column)
            return self._texts


def _read_texts(path: Path, stamp: tuple[int, int], column: str) -> _JoinedTexts:
    """All texts of a column. Raises MachineError if the file has changed or gone, UsageError if texts are too large."""
    os.close(open_as_listed(path, stamp))  # raises when it has changed or gone
    pieces = []
    lengths = []
    size = 0
    with _explained(path):
        table = TABLES[ending_of(path)](path)
        for batch in table.batches([column], BATCH, floats=False):
            raw, lengths_of_batch = _bytes_of(batch.column(0))
            size += len(raw)
            if size > MOST:
                break
            pieces.append(raw)
            lengths.append(lengths_of_batch)
    if size > MOST:
        raise UsageError(
            f"{path} holds more than {MOST:,} bytes of texts.", "Split it into several files."
        )
    ends = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
    return _JoinedTexts(b"".join(pieces), ends)


def _bytes_of(column: Any) -> tuple[bytes, NDArray[np.int64]]:
    """The bytes of a column's words, one after another, and the number of bytes of each word; 0 for a missing word."""
    pa = arrow()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    plain = column.cast(pa.large_binary()).fill_null(b"")
    _, ends, raw = plain.buffers()
    if not len(plain):
        return b"", np.zeros(0, np.int64)
    # Arrow keeps the ends of all words of the whole column; ``plain`` may be a slice of it that begins at ``offset``.
    start = plain.offset
    bounds = np.frombuffer(ends, np.int64)[start : start + len(plain) + 1]
    words = b""
    if raw is not None:
        first = int(bounds[0])
        words = raw.slice(first, int(bounds[-1]) - first).to_pybytes()
    return words, np.diff(bounds)
