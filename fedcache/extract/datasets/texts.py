"""``texts:FILE``: texts in a column of a CSV or TSV (.gz too), parquet or feather file, with labels beside them.

The column of texts is called ``text``, ``texts``, ``sentence``, ``sentences``, ``review``, ``content``, ``body`` or
``document``, in any case, or named by ``--images-key``. Labels, splits, names, domains and groups are found as
``fedcache ingest`` finds them in a table: by usual names, or as
``texts:FILE?text=A&label=B&split=C&name=D&domain=E&group=F,G`` says. Every other column that sorts the rows is a group,
and one that is not used is named. A row without a text is quarantined, as an image that cannot be read is.

A text is known by its bytes (UTF-8) alone: a renamed file costs no forward pass, and one changed text those of a chunk.
Each process holds the column in memory, once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import MachineError, UsageError, unknown
from fedcache.extract.datasets import columns, dataset
from fedcache.extract.datasets.columns import Asked
from fedcache.extract.datasets.dataset import ONE_DOMAIN, Context, Dataset
from fedcache.extract.digests import stat_key
from fedcache.extract.image_files import BadImage
from fedcache.extract.inputs import TEXTS
from fedcache.extract.recipe import slug as safe
from fedcache.tables.file_rows import ending_of, explain_damage, stem_of
from fedcache.tables.roles import (
    DOMAINS,
    LABELS,
    codes_of,
    find_column,
    find_names,
    find_splits,
    groups_of,
    groups_sentence,
    unlabelled_sentence,
)
from fedcache.tables.roles import TEXTS as USUAL_TEXTS
from fedcache.tables.table_files import TABLES, Table, are_words, arrow
from fedcache.tables.table_readers import BATCH, read_others

HOLDS = TEXTS
MOST = 4 << 30
"""Bytes of all texts of a file together, which each process holds."""


def key(rest: str, context: Context) -> list[Any]:
    """The columns that the spec names, and the stat of the file."""
    asked = columns.parse_rest(rest, columns.TEXT_KEYS)
    return ["texts", [list(pair) for pair in sorted(asked.said.items())], *stat_key(_locate(asked.place))]


def load(rest: str, context: Context) -> Dataset:
    """The dataset of ``texts:FILE``.

    Raises UsageError for a missing or damaged file, and for columns that make no sense.
    """
    asked, facts = columns.parse_rest(rest, columns.TEXT_KEYS), key(rest, context)
    path = _locate(asked.place)
    raw, column, source = _read(path, asked.said.get("text"))
    return _assembled(f"texts:{rest}", path, raw, column, source, asked, facts, context)


def open_texts(path: Path) -> tuple[list[str], TextSource]:
    """The names and the texts of a file, for a model to read; UsageError as of ``load``."""
    if not path.is_file():
        raise UsageError(f"There is no file {path}.", "A table with a column of texts: .csv, .tsv, .parquet, .feather.")
    raw, _, source = _read(path, None)
    return list(find_names(path, raw, None, len(source))[1]), source


def _read(path: Path, asked: str | None) -> tuple[dict[str, Any], str, TextSource]:
    """The other columns of a table, the name of that of texts, and the texts."""
    column, table = _opened(path, asked)
    source = TextSource(path.absolute(), (path.stat().st_size, path.stat().st_mtime_ns), column)
    if not len(source):
        raise UsageError(f"{path} has 0 rows.", "At least 1 is needed.")
    others = [name for name in table.types if name != column]
    with _explained(path):
        return (read_others(table, others)[0] if others else {}), column, source


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Damage as a UsageError, with what a table of texts should be."""
    try:
        with explain_damage(path):
            yield
    except UsageError as error:
        if error.__cause__ is None:
            raise
        hint = "Write it again as UTF-8; a text with commas or line breaks stands in quotes."
        raise UsageError(error.message, hint) from error


def _assembled(
    spec: str,
    path: Path,
    raw: dict[str, Any],
    column: str,
    source: TextSource,
    asked: Asked,
    facts: list[Any],
    context: Context,
) -> Dataset:
    """The dataset of the columns of a table, its rows in the order of their names."""
    said, count = asked.said, len(source)
    label_key = find_column(path, raw, said.get("label"), LABELS, "--label-key")
    label: NDArray[np.int32] = np.full(count, -1, np.int32)
    classes: tuple[str, ...] = ()
    lost: dict[str, int] = {}
    if label_key is not None:
        label, classes, lost = codes_of(path, label_key, raw[label_key], (), "classes", count, unknown_code=-1)
    domain_key = find_column(path, raw, said.get("domain"), DOMAINS, "?domain")
    domain: NDArray[np.int32] = np.zeros(count, np.int32)
    domains: tuple[str, ...] = (ONE_DOMAIN,)
    if domain_key is not None:
        domain, domains, _ = codes_of(path, domain_key, raw[domain_key], (), "domains", count, unknown_code=0)
    split_key, given, told = find_splits(path, raw, said.get("split"), count)
    name_key, names, more = find_names(path, raw, said.get("name"), count)
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise UsageError(f"{path}: the name {twice[0]!r} is there twice.", "Name another column: ?name=COLUMN")
    meanings = {label_key: "class", domain_key: "domain", split_key: "split", name_key: "name"}
    taken = {name: what for name, what in meanings.items() if name is not None}
    groups, left = groups_of(path, raw, taken, count, asked.groups)
    order = np.array(sorted(range(count), key=names.__getitem__), dtype=np.int64)
    ordered = dataset.RowsSource(source, order)
    sorted_names = [names[row] for row in order.tolist()]
    uid, unreadable = dataset.read_uids(ordered, sorted_names, facts, context)
    # Classes are those that have a row, as of images: codes that no row has are not among them.
    label, classes = _used(label[order], classes)
    domain_codes = dataset.domain_column(domain[order].astype(np.int64), domains)
    split, note = columns.complete_split(
        None if given is None else given[order], label, domain_codes, uid, path, holds=TEXTS
    )
    notes = [
        f"{path.name}: texts from {column}" + (f", labels from {label_key}" if label_key else ", no labels"),
        dataset.counts(split, classes, domains, TEXTS),
        note,
        f"{unreadable:,} without a text, which will be quarantined" if unreadable else "",
        *(line.rstrip(".") for line in (*told, *more, *unlabelled_sentence(lost, count))),
        *(line.rstrip(".") for line in groups_sentence(groups, left)),
    ]
    return Dataset(
        spec=spec,
        slug=safe(stem_of(path))[:64].lstrip(".") or "texts",
        classes=classes,
        domains=domains,
        names=tuple(sorted_names),
        label=label,
        domain=domain_codes,
        split=split,
        uid=uid,
        template=None,
        reading="; ".join(note for note in notes if note),
        source=ordered,
        groups={name: group.take(order) for name, group in groups.items()},
        holds=TEXTS,
    )


def _used(label: NDArray[np.int32], classes: Sequence[str]) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Labels and classes without classes that no row has."""
    used = np.unique(label[label >= 0])
    coded = np.where(label >= 0, np.searchsorted(used, label), -1).astype(np.int32)
    return coded, tuple(classes[code] for code in used.tolist())


def _locate(place: str) -> Path:
    path = Path(place).expanduser()
    if not place or not path.is_file():
        raise UsageError(
            f"There is no file {str(path) if place else 'of texts'!r} (seen from {Path.cwd()}).",
            "Give the table of the texts: --dataset texts:FILE.csv",
        )
    if ending_of(path) not in TABLES:
        raise unknown("file ending", ending_of(path), TABLES, hint=f"texts:FILE takes {', '.join(TABLES)}")
    return path


def _opened(path: Path, asked: str | None) -> tuple[str, Table]:
    """The column of texts and the table. Raises UsageError for none, for one that holds no words, and for damage."""
    with _explained(path):
        table = TABLES[ending_of(path)](path)
    name = find_column(path, table.types, asked, USUAL_TEXTS, "--images-key")
    if name is None:
        raise UsageError(
            f"{path} has no column of texts; it has {', '.join(table.types)}.",
            f"--images-key NAME says which one it is; else one of {', '.join(USUAL_TEXTS)} is taken.",
        )
    kind = table.types[name]
    value = kind.value_type if arrow().types.is_dictionary(kind) else kind
    # Of a CSV the type is that of its first rows: a column of numbers may hold words further down.
    if not table.is_text and not are_words(value):
        raise UsageError(f"{path}: {name} holds {kind}, expected texts.", "--images-key NAME names another column.")
    return name, table


@dataclass(frozen=True)
class _Held:
    """All texts of a column: one after another, and where each ends."""

    raw: bytes
    ends: NDArray[np.int64]  # [N + 1], the first is 0


class TextSource:
    """The texts of a column as UTF-8 bytes, read when the first one is asked for. Picklable without them.

    ``stamp`` are the size and mtime_ns of the file when it was listed.
    """

    def __init__(self, path: Path, stamp: tuple[int, int], column: str) -> None:
        self.path, self.stamp, self.column = path, stamp, column
        self._held: _Held | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._all().ends) - 1

    def read(self, row: int) -> bytes:
        """The text of a row; raises ``BadImage`` where there is none, MachineError when the file has changed."""
        held = self._all()
        text = held.raw[held.ends[row] : held.ends[row + 1]]
        if not text.strip():
            raise BadImage("there is no text")
        return text

    def _all(self) -> _Held:
        with self._lock:
            if self._held is None:
                self._held = _read_texts(self.path, self.stamp, self.column)
            return self._held

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "stamp": self.stamp, "column": self.column}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _read_texts(path: Path, stamp: tuple[int, int], column: str) -> _Held:
    try:
        found = path.stat()
    except OSError as error:
        raise MachineError(f"{path} cannot be read ({error.strerror}).", "Put it back, and repeat.") from error
    if (found.st_size, found.st_mtime_ns) != stamp:
        raise MachineError(f"{path} has changed since it was listed.", "Run the same command again.")
    pieces: list[bytes] = []
    lengths: list[NDArray[np.int64]] = []
    size = 0
    with _explained(path):
        for batch in TABLES[ending_of(path)](path).batches([column], BATCH, floats=False):
            raw, these = _bytes_of(batch.column(0))
            size += len(raw)
            if size > MOST:
                break
            pieces.append(raw)
            lengths.append(these)
    if size > MOST:
        raise UsageError(f"{path} holds more than {MOST:,} bytes of texts.", "Cut it into several files.")
    ends = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
    return _Held(b"".join(pieces), ends)


def _bytes_of(column: Any) -> tuple[bytes, NDArray[np.int64]]:
    """The bytes of a column of words one after another, and the length of each; no word has none."""
    pa = arrow()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    plain = column.cast(pa.large_binary()).fill_null(b"")
    _, ends, raw = plain.buffers()
    if not len(plain):
        return b"", np.zeros(0, np.int64)
    at = np.frombuffer(ends, np.int64)[plain.offset : plain.offset + len(plain) + 1]
    return (raw.slice(int(at[0]), int(at[-1] - at[0])).to_pybytes() if raw is not None else b""), np.diff(at)
