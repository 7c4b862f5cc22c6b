"""Arranges embeddings as a store holds them (order of rows, dtypes, recipes, digests), before they are written.

Features are read twice, block by block: first for the digests that name the store and its arrays, then to be written.
So the ingestion of a file needs the memory of one block only, unless the names of its rows are not sorted.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.config import Home
from fedcache.errors import CorruptionError, UsageError, shell_word
from fedcache.parsing import SAFE, slug_of
from fedcache.progress import Observer, Silent
from fedcache.store.chunks import array_bytes, checksum, encode, to_stored_dtype
from fedcache.store.files import digest_of, make_private, sha256_hex
from fedcache.store.samples import HELD_OUT, INGESTED, Samples, complete_split
from fedcache.store.writer import ArrayWriter
from fedcache.tables.embeddings import Embeddings, assemble
from fedcache.tables.groups import Group
from fedcache.tables.roles import GROUP, ColumnChoice
from fedcache.tables.words import Column, EqualStrings, Rows, as_column, blocks_of

NOT_FINITE = "features are not finite"
"""Reason of a row that ``drop_nan`` leaves out."""

NOT_FINITE_HINT = "Fix these rows, or leave them out: drop_nan=True."


@dataclass(frozen=True)
class ContentArray:
    """Features of one backbone in the order of the rows of a store, read block by block in the stored dtype."""

    source: Rows  # [N, V, D], any float dtype
    dtype: str  # stored
    chunk_rows: int  # rows per chunk file
    name: str  # of the backbone; part of the recipe and of the key, and shown in messages
    digest: str = ""  # sha256 of all values, known after the first reading
    crcs: tuple[int, ...] = ()  # crc32c of every chunk, known after the first reading
    drop: bool = False  # a row that is not finite becomes all NaN, instead of an error

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, V, D)."""
        return self.source.shape

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe. Ingested values have no weights, so the digest of the values takes the place of theirs."""
        return {
            "backbone": self.name,
            "weights": self.digest,
            "source": INGESTED,
            "dtype": self.dtype,
            "views": self.shape[1],
        }

    @property
    def key(self) -> str:
        """Name of the array in the store."""
        digest = digest_of(self.recipe)[:8]
        return f"{slug_of(self.name)}-{digest}"

    def blocks(self) -> Iterator[NDArray[Any]]:
        """The rows of every chunk in the stored dtype; raises CorruptionError for values not finite in this dtype."""
        size = self.chunk_rows
        for number, rows in enumerate(blocks_of(self.source, size)):
            try:
                values, lost = self._with_nan_rows(rows)
                yield to_stored_dtype(values, self.dtype, lost, number * size, self.name)
            except CorruptionError as error:
                error.hint = NOT_FINITE_HINT
                raise

    def _with_nan_rows(self, rows: NDArray[Any]) -> tuple[NDArray[Any], list[int]]:
        """Replace each row that is not finite in the stored dtype by NaN. Returns all rows, and the replaced places.

        Without ``drop``, the rows are returned unchanged, with no places.
        """
        if not self.drop:
            return rows, []
        with np.errstate(over="ignore"):
            cast = rows.astype(self.dtype, copy=False)
        lost = ~np.isfinite(cast).all(axis=(1, 2))
        values = np.where(lost[:, None, None], np.asarray(np.nan, rows.dtype), rows)
        return values, np.flatnonzero(lost).tolist()

    def blocks_again(self) -> Iterator[NDArray[Any]]:
        """``blocks`` of the second reading. Raises UsageError for a file that has changed since the first reading."""
        for number, rows in enumerate(self.blocks()):
            if self.chunk_crc(rows) != self.crcs[number]:
                first = number * self.chunk_rows
                last = first + len(rows) - 1
                raise UsageError(
                    f"The features {self.name} changed while they were read: rows {first} to {last}.",
                    "Ingest the file when no other program is writing it.",
                )
            yield rows

    def write_missing(self, writer: ArrayWriter, observer: Observer) -> None:
        """Write the chunks that a writer lacks, each while the next one is read; errors as ``ArrayWriter.write``."""
        observer.start(f"Writing {self.name}", self.shape[0], "rows")
        missing = set(writer.missing())
        blocks: Iterator[NDArray[Any]] = iter(())
        if missing:
            blocks = self.blocks_again()
        with ThreadPoolExecutor(1) as pool:  # its thread waits for the disk
            writing: Future[None] | None = None
            for chunk, rows in enumerate(blocks):
                if writing is not None:
                    writing.result()
                lost = chunk * self.chunk_rows + lost_rows(rows)
                bad = dict.fromkeys(lost.tolist(), NOT_FINITE)
                writing = None
                if chunk in missing:
                    writing = pool.submit(writer.write, chunk, rows, bad)
                observer.advance(len(rows))
            if writing is not None:
                writing.result()
        observer.stop()

    def chunk_crc(self, rows: NDArray[Any]) -> int:
        """crc32c of the chunk file that holds these rows; the last chunk is padded to full size."""
        chunk = encode(rows, self.chunk_rows, self.dtype)
        return checksum(chunk.reshape(-1).view(np.uint8))


def lost_rows(rows: NDArray[Any]) -> NDArray[np.int64]:
    """The places of stored rows [n, V, D] that were left out: these are all NaN, and no other value is NaN."""
    # So the first value of a row decides.
    return np.flatnonzero(np.isnan(rows[:, 0, 0]))


CHUNK_ROWS = 512
"""Rows of a chunk file, for arrays of at most ``LARGE`` bytes."""

LARGE = 64 << 20
"""Size in bytes above which an array has chunk files of up to ``CHUNK_BYTES``."""

CHUNK_BYTES = 32 << 20
"""Maximum size in bytes of a chunk file of such an array."""

WHERE = Path("from_arrays()")
"""Text that messages show instead of a file name."""


@dataclass
class Content:
    """Embeddings in the order and the types of a store, not yet on disk."""

    samples: Samples  # the rows, sorted by name
    arrays: dict[str, ContentArray]  # per key of the store
    texts: dict[str, NDArray[np.float32]]  # [C, D] per backbone name, unit rows
    # description of the dataset for the manifest; ``held_out``, if any, is the rule that chose the test rows
    dataset: dict[str, Any]
    groups: dict[str, Group] = field(default_factory=dict)  # columns that group the rows, by name

    @property
    def reasons(self) -> dict[int, str]:
        """The reason per row that is not ok."""
        lost = np.flatnonzero(self.samples.ok == 0)
        return dict.fromkeys(lost.tolist(), NOT_FINITE)

    @property
    def values(self) -> set[tuple[str, int]]:
        """(digest of the values, views) of every array, independent of its name."""
        return {value_id(array.recipe) for array in self.arrays.values()}


MAX_NAME = 100
"""Characters in the name of a dataset."""


def usable_name(name: str) -> str:
    """The name of a dataset as part of a file name.

    Raises UsageError for a name that is too long, has no letter or digit, or has characters that are not allowed.
    """
    slug = slug_of(name)
    example = "For example --name mine"
    if len(slug) > MAX_NAME:
        raise UsageError(
            f"The name {slug!r} has {len(slug)} characters, but at most {MAX_NAME} are allowed.",
            example,
        )
    if not slug.strip("._-"):
        raise UsageError(f"The name {name!r} has no letter or digit.", example)
    if not re.fullmatch(r"(?!\.)[\w .-]+", name):
        raise UsageError(
            f"The name {name!r} is not valid. A name has letters, digits, spaces, '.', '_' and '-', and does not "
            "begin with a dot.",
            f"For example --name {shell_word(slug.strip('._-'))}",
        )
    return slug


def arrange(
    embeddings: Embeddings, name: str, *, drop_nan: bool = False, observer: Observer | None = None
) -> Content:
    """Embeddings as a store holds them. Rows are sorted by name; the digest of the values is part of the recipe.

    Without a test set, ``complete_split`` chooses one, as for folders. With ``drop_nan``, rows with features that are
    not finite are kept as rows that cannot be read. Raises UsageError for repeated names or no training rows;
    CorruptionError for non-finite features, with row numbers.
    """
    observer = observer or Silent()
    count = len(embeddings.names)
    names = embeddings.names
    features: dict[str, Rows] = {**embeddings.features}
    for key in features:
        _check_feature_name(key)
    order: Any = slice(None)
    if isinstance(names, EqualStrings):
        in_order = names.increasing
    else:
        in_order = all(a < b for a, b in pairwise(names))
    if not in_order:
        repeated = [name for name, times in Counter(names).items() if times > 1]
        if repeated:
            first = repeated[0]
            raise UsageError(
                f"{len(repeated)} of {count} names are repeated, for example {first!r}.",
                "Names must be unique; leave name out to number the rows.",
            )
        order = np.array(sorted(range(count), key=names.__getitem__))
        names = tuple(names[i] for i in order)
        for key, values in features.items():
            # Checked before the rows are sorted, so that messages have the row numbers of the file.
            features[key] = _storable(key, values, drop_nan)[order]
    arrays, uid, ok = _read_once(features, drop_nan, observer)
    if not ok.any():
        raise CorruptionError(
            f"Every row of {name} has a feature that is NaN or infinite.",
            "Compute the features again.",
        )
    label = embeddings.labels[order]
    domain = embeddings.domains[order]
    given = embeddings.splits
    if given is not None:
        given = given[order]
    split, note = complete_split(given, label, domain, uid, ok, name, "rows")
    samples = Samples(
        uid=uid,
        name=names,
        label=label,
        domain=domain,
        split=split,
        ok=ok.astype(np.uint8),
        classes=embeddings.classes,
        domains=embeddings.domain_names,
    ).checked()
    dataset = {
        "slug": slug_of(name),
        "digest": _content_digest(samples, embeddings.texts),
        "template": None,
        "source": INGESTED,
    }
    # The note says what ``complete_split`` did, in words. If it chose the test rows by the standard rule, the manifest
    # gets this rule; any other note is shown to the user.
    if HELD_OUT in note:
        dataset["held_out"] = HELD_OUT
    elif note:
        observer.note(f"{note[:1].upper()}{note[1:]}.")
    groups = {}
    for key, group in embeddings.groups.items():
        groups[key] = replace(group, codes=group.codes[order])
    arrays_by_key = {array.key: array for array in arrays}
    return Content(samples, arrays_by_key, embeddings.texts, dataset, groups)


def _content_digest(samples: Samples, texts: Mapping[str, NDArray[np.float32]]) -> str:
    """Digest of the rows of a dataset and of its text features."""
    columns = (samples.uid, samples.label, samples.domain, samples.split)
    column_digests = [sha256_hex(np.ascontiguousarray(column).tobytes()) for column in columns]
    words = [list(samples.name), list(samples.classes), list(samples.domains)]
    text_digests = [sha256_hex(texts[key].tobytes()) for key in sorted(texts)]
    return digest_of([column_digests, *words, *text_digests])


def _read_once(
    features: Mapping[str, Rows], drop: bool, observer: Observer
) -> tuple[list[ContentArray], NDArray[np.uint8], NDArray[np.bool_]]:
    """Read all features once, for their digests.

    Returns:
        the arrays with their digests; the uid of every row, [N, 16], from its values in the order of the backbones; and
        whether each row is finite, [N].
    """
    dtypes = {key: _stored_dtype(values.dtype) for key, values in features.items()}
    (count,) = {len(values) for values in features.values()}
    # All arrays get the same rows per chunk, because their blocks are read together.
    widest = max(array_bytes(values.shape[1:], dtypes[key]) for key, values in features.items())
    size = chunk_rows_for(count, widest)
    arrays = {}
    for key, values in features.items():
        arrays[key] = ContentArray(values, dtypes[key], size, key, drop=drop)
    in_order = sorted(arrays)
    digests = {key: hashlib.sha256() for key in arrays}
    crcs = {key: list[int]() for key in arrays}
    uid = np.empty((count, 16), np.uint8)
    ok = np.ones(count, bool)
    blocks_of_all = zip(*(arrays[key].blocks() for key in in_order), strict=True)

    def read_next() -> tuple[NDArray[Any], ...]:
        """The next block of every array, which also goes into its digests; () after the last block."""
        blocks = next(blocks_of_all, ())
        # Not strict, because ``blocks`` is empty after the last block.
        for key, rows in zip(in_order, blocks, strict=False):
            digests[key].update(_bytes_of(rows).data)
            crcs[key].append(arrays[key].chunk_crc(rows))
        return blocks

    observer.start("Reading features", count, "rows")
    # Reading files and hashing whole blocks release the interpreter lock, so rows are hashed at the same time.
    with ThreadPoolExecutor(1) as pool:
        start = 0
        ahead = pool.submit(read_next)
        while blocks := ahead.result():
            ahead = pool.submit(read_next)
            for rows in blocks:
                ok[start + lost_rows(rows)] = False
            # A row's uid is the digest of its bytes in all arrays.
            raw = [_bytes_of(rows) for rows in blocks]
            stop = start + len(raw[0])
            joined = raw[0]
            if len(raw) > 1:
                joined = np.concatenate(raw, axis=1)
            uid[start:stop] = _digests(joined)
            observer.advance(stop - start)
            start = stop
    observer.stop()
    made = []
    for key, array in arrays.items():
        digest = digests[key].hexdigest()
        made.append(replace(array, digest=digest, crcs=tuple(crcs[key])))
    return made, uid, ok


def _bytes_of(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """[n, ..] values as [n, bytes]."""
    return np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)


def row_digests(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """The first half of the sha256 of every row's bytes: [n, ..] -> [n, 16]."""
    return _digests(_bytes_of(rows))


def _digests(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The first half of the sha256 of every row: [n, bytes] -> [n, 16]."""
    width = rows.shape[1]
    raw = rows.reshape(-1).data
    starts = range(0, rows.size, width)
    digests = b"".join([hashlib.sha256(raw[at : at + width]).digest() for at in starts])
    return np.frombuffer(digests, np.uint8).reshape(-1, 32)[:, :16]


def chunk_rows_for(rows: int, row_bytes: int) -> int:
    """Rows per chunk file of an array: 512, or for a large array the largest 512 x 2^j with at most 32 MiB."""
    size = CHUNK_ROWS
    # The first condition is that of a large array; it does not change in the loop.
    while rows * row_bytes > LARGE and 2 * size * row_bytes <= CHUNK_BYTES:
        size *= 2
    return size


def value_id(recipe: dict[str, Any]) -> tuple[str, int]:
    """(digest of the values, views) of an ingested array."""
    return str(recipe["weights"]), int(recipe["views"])


def _check_feature_name(name: str) -> None:
    """Refuse a feature name that cannot become a folder name. Raises UsageError."""
    # The folder of an array also has 8 characters of its recipe's digest in its name.
    if not SAFE.fullmatch(f"{slug_of(name)}-00000000"):
        raise UsageError(
            f"{name!r} is not a valid name of features.",
            "A name begins with a letter or digit and has at most 119 characters.",
        )


def _stored_dtype(dtype: np.dtype[Any]) -> str:
    """The dtype in which floats are stored: float16 stays, others become float32."""
    if dtype == np.float16:
        return "float16"
    return "float32"


def _storable(key: str, values: Rows, drop: bool) -> NDArray[Any]:
    """All values in memory, in their stored dtype. Raises CorruptionError for those that are not finite there."""
    dtype = _stored_dtype(values.dtype)
    (block,) = ContentArray(values, dtype, len(values), key, drop=drop).blocks()
    return block


def arrange_arrays(
    features: object,
    text: Mapping[str, Any],
    columns: Mapping[str, Any],
    name: str | None,
    path: str | Path | None,
    drop_nan: bool,
) -> tuple[Content, Path]:
    """The arguments of ``Store.from_arrays`` as the content of a store, and the path of the store.

    Args:
        features: by backbone.
        text: by backbone.
        columns: by the names that a file uses; None for a column that was not given. ``groups`` has a column per name.
        name: of the dataset; the backbones' names when None.
        path: of the store; under FEDCACHE_HOME when None, where missing folders are made.
        drop_nan: as of ``arrange``.

    Raises:
        UsageError, for shapes or values that do not fit; CorruptionError, for values that are not finite.
    """
    if not isinstance(features, Mapping):
        raise UsageError(
            f"from_arrays() needs a dictionary of features by backbone, not {type(features).__name__}.",
            'Give {"mine": X}',
        )
    if not features:
        raise UsageError(
            "from_arrays() needs at least one feature array, but the dictionary is empty.",
            'For example {"mine": X}',
        )
    raw = {f"features/{key}": _array(values) for key, values in features.items()}
    raw |= {f"text/{key}": _array(values) for key, values in text.items()}
    given = {key: values for key, values in columns.items() if values is not None}
    groups = given.pop("groups", {})
    if not isinstance(groups, Mapping):
        raise UsageError(
            f"groups is {type(groups).__name__}, expected a dictionary of columns by name.",
            'Give {"hospital": [..]}',
        )
    raw |= {key: _array(values) for key, values in given.items()}
    raw |= {f"{GROUP}{key}": _array(values) for key, values in groups.items()}
    if name is None:
        name = "-".join(map(slug_of, features))[:MAX_NAME]
    slug = usable_name(name)
    row_name = None
    if "name" in raw:
        row_name = "name"
    choice = ColumnChoice(no_label=_no_label(raw.get("labels")), row_name=row_name)
    content = arrange(assemble(WHERE, raw, choice), name, drop_nan=drop_nan)
    if path is not None:
        return content, Path(path).expanduser()
    home = Home.from_environment()
    make_private(home.root)
    make_private(home.stores)
    return content, home.store(slug, content.dataset["digest"])


def _no_label(labels: Any) -> tuple[str, ...]:
    """Labels that mean "unknown", as ``Store.from_arrays`` documents: -1, unless -1 and 1 are the two classes."""
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "if":
        return ()
    if np.array_equal(np.unique(labels), [-1, 1]):
        return ()
    return ("-1",)


def _array(values: Any) -> Column:
    """A column as of a file, from a list, a numpy array or a column of pandas."""
    return as_column(np.asarray(values))
