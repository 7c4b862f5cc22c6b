"""Embeddings arranged as a store holds them: rows in order, dtypes of the format, recipes and digests; not on disk.

Features are read twice, block by block: once for the digests that name the store and its arrays, and once to be
written. So a file is ingested in the memory of one block, unless its rows have names that are not in order.
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
from fedcache.errors import FedcacheError, UsageError
from fedcache.store.chunks import array_bytes, checksum, encode, to_stored_dtype
from fedcache.store.embedding_files import Embeddings, assemble
from fedcache.store.embedding_readers import FileRows
from fedcache.store.files import digest_of, make_private, sha256_hex
from fedcache.store.groups import Group
from fedcache.store.manifest import SAFE
from fedcache.store.samples import HELD_OUT, INGESTED, Samples, held_out
from fedcache.store.text_features import slug_of
from fedcache.store.writer import ArrayWriter

CHUNK_ROWS = 512
"""Rows of a chunk file of an array up to ``LARGE``."""

LARGE = 64 << 20
"""Bytes of an array from which on its chunk files are as large as ``CHUNK_BYTES`` allow."""

CHUNK_BYTES = 32 << 20

WHERE = Path("from_arrays()")
"""What messages name in the place of a file."""


@dataclass(frozen=True)
class ContentArray:
    """Features of one backbone in the order of the rows of a store."""

    source: NDArray[Any] | FileRows  # [N, V, D], any float dtype
    dtype: str  # stored
    chunk_rows: int  # rows per chunk file
    name: str  # of the backbone, for messages
    digest: str = ""  # sha256 of all values, known after the first reading
    crcs: tuple[int, ...] = ()  # crc32c of every chunk, likewise

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, V, D)."""
        return self.source.shape

    @property
    def recipe(self) -> dict[str, Any]:
        """What determines the values: the values themselves."""
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
        return f"{slug_of(self.name)}-{digest_of(self.recipe)[:8]}"

    def blocks(self) -> Iterator[NDArray[Any]]:
        """The rows of every chunk in its stored dtype; raises CorruptionError for values that are not finite there."""
        size, source = self.chunk_rows, self.source
        if isinstance(source, FileRows):
            blocks = source.blocks(size)
        else:
            blocks = (source[first : first + size] for first in range(0, len(source), size))
        for number, rows in enumerate(blocks):
            try:
                yield to_stored_dtype(rows, self.dtype, (), number * size, self.name)
            except FedcacheError as error:
                hint = "Mend these rows of the file or leave them out."
                raise FedcacheError(error.code, error.message, hint) from error

    def blocks_again(self) -> Iterator[NDArray[Any]]:
        """The same as at the first reading. Raises UsageError for a file that has changed since."""
        for number, rows in enumerate(self.blocks()):
            if self.chunk_crc(rows) != self.crcs[number]:
                raise UsageError(
                    f"The features {self.name} changed while they were read: rows {number * self.chunk_rows} to "
                    f"{number * self.chunk_rows + len(rows) - 1}.",
                    "Ingest a file that nobody writes.",
                )
            yield rows

    def write_missing(self, writer: ArrayWriter) -> None:
        """Write the chunks that a writer lacks, each while the next one is read; errors as ``ArrayWriter.write``."""
        missing = set(writer.missing())
        with ThreadPoolExecutor(1) as pool:  # which waits for the disk
            written: Future[None] | None = None
            for chunk, rows in enumerate(self.blocks_again() if missing else ()):
                if written is not None:
                    written.result()
                written = pool.submit(writer.write, chunk, rows) if chunk in missing else None
            if written is not None:
                written.result()

    def chunk_crc(self, rows: NDArray[Any]) -> int:
        """crc32c of the chunk file that holds these rows, the last one filled up."""
        return checksum(encode(rows, self.chunk_rows, self.dtype).reshape(-1).view(np.uint8))


@dataclass
class Content:
    """Embeddings in the order and the types of a store, not yet on disk."""

    samples: Samples  # the rows, sorted by name
    arrays: dict[str, ContentArray]  # per key of the store
    texts: dict[str, NDArray[np.float32]]  # [C, D] per backbone name, unit rows
    # what the manifest says of the dataset; ``held_out`` names the rule where the file brought no split
    dataset: dict[str, Any]
    groups: dict[str, Group] = field(default_factory=dict)  # columns that sort the rows, by name

    @property
    def values(self) -> set[tuple[str, int]]:
        """(digest of the values, views) of every array, whatever it is called."""
        return {value_id(array.recipe) for array in self.arrays.values()}


def usable_name(name: str) -> str:
    """The name of a dataset as part of a file name.

    Raises UsageError, for one without a letter or digit, too long, or with signs that a command would split at.
    """
    slug = slug_of(name)
    if not slug.strip("._-") or len(slug) > 100:
        why = "has no letter or digit" if len(slug) <= 100 else f"has {len(slug)} characters, at most 100 are kept"
        raise UsageError(f"The name {name!r} {why}.", "For example --name mine")
    if not re.fullmatch(r"(?!\.)[\w .-]+", name):
        raise UsageError(
            f"The name {name!r} is not usable: letters, digits, spaces, '.', '_' and '-', not beginning with a dot.",
            f"For example --name {slug.strip('._-')}",
        )
    return slug


def arrange(embeddings: Embeddings, name: str) -> Content:
    """Embeddings as a store holds them. Rows are sorted by name; the values are the recipe.

    Without a split, of each (domain, class) the fifth with the smallest uids becomes the test set, as for folders.
    Raises UsageError for names that repeat; CorruptionError for non-finite features, with row numbers.
    """
    count, names = len(embeddings.names), embeddings.names
    features = {key: _named(key, values) for key, values in embeddings.features.items()}
    order: Any = slice(None)
    if not all(a < b for a, b in pairwise(names)):
        repeated = [name for name, times in Counter(names).items() if times > 1]
        if repeated:
            raise UsageError(
                f"{len(repeated)} of {count} names repeat, the first {repeated[0]!r}.",
                "Names must be unique; leave name out to number the rows.",
            )
        order = np.array(sorted(range(count), key=names.__getitem__))
        names = tuple(names[i] for i in order)
        # Checked before the rows are sorted: the numbers of bad ones are those of the file.
        features = {key: _storable(key, values)[order] for key, values in features.items()}
    arrays, uid = _read_once(features)
    label, domain = embeddings.labels[order], embeddings.domains[order]
    if embeddings.splits is None:
        split = held_out(label, domain, uid, np.ones(count, bool)).astype(np.uint8)
    else:
        split = embeddings.splits[order]
    samples = Samples(
        uid=uid,
        name=names,
        label=label,
        domain=domain,
        split=split,
        ok=np.ones(count, np.uint8),
        classes=embeddings.classes,
        domains=embeddings.domain_names,
    ).checked()
    columns = (samples.uid, samples.label, samples.domain, samples.split)
    content = [sha256_hex(np.ascontiguousarray(column).tobytes()) for column in columns]
    texts = [sha256_hex(embeddings.texts[key].tobytes()) for key in sorted(embeddings.texts)]
    whole = digest_of([content, list(samples.name), list(samples.classes), list(samples.domains), *texts])
    dataset = {"slug": slug_of(name), "digest": whole, "template": None, "source": INGESTED}
    if embeddings.splits is None:
        dataset["held_out"] = HELD_OUT
    groups = {key: replace(group, codes=group.codes[order]) for key, group in embeddings.groups.items()}
    return Content(samples, {array.key: array for array in arrays}, embeddings.texts, dataset, groups)


def _read_once(features: Mapping[str, NDArray[Any] | FileRows]) -> tuple[list[ContentArray], NDArray[np.uint8]]:
    """The arrays with their digests, and the uid of every row, [N, 16]: of its values in the order of the backbones."""
    dtypes = {key: _stored_dtype(values.dtype) for key, values in features.items()}
    (count,) = {len(values) for values in features.values()}
    widest = max(array_bytes(values.shape[1:], dtypes[key]) for key, values in features.items())
    size = chunk_rows_for(count, widest)
    arrays = {key: ContentArray(values, dtypes[key], size, key) for key, values in features.items()}
    digests, crcs = {key: hashlib.sha256() for key in arrays}, {key: list[int]() for key in arrays}
    uid = np.empty((count, 16), np.uint8)
    for number, blocks in enumerate(zip(*(arrays[key].blocks() for key in sorted(arrays)), strict=True)):
        for key, rows in zip(sorted(arrays), blocks, strict=True):
            digests[key].update(_bytes_of(rows).data)
            crcs[key].append(arrays[key].chunk_crc(rows))
        start = number * size
        uid[start : start + len(blocks[0])] = _digests(np.concatenate([_bytes_of(rows) for rows in blocks], axis=1))
    made = [replace(array, digest=digests[key].hexdigest(), crcs=tuple(crcs[key])) for key, array in arrays.items()]
    return made, uid


def _bytes_of(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """[n, ..] values as [n, bytes]."""
    return np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)


def row_digests(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """The first half of the sha256 of every row's bytes: [n, ..] -> [n, 16]."""
    return _digests(_bytes_of(rows))


def _digests(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same of [n, bytes]."""
    width, raw, sha256 = rows.shape[1], rows.reshape(-1).data, hashlib.sha256
    digests = b"".join([sha256(raw[at : at + width]).digest() for at in range(0, rows.size, width)])
    return np.frombuffer(digests, np.uint8).reshape(-1, 32)[:, :16]


def chunk_rows_for(rows: int, row_bytes: int) -> int:
    """Rows per chunk file of an array: 512, and of a large one 512 x 2^j, the largest with at most 32 MiB."""
    size = CHUNK_ROWS
    while rows * row_bytes > LARGE and 2 * size * row_bytes <= CHUNK_BYTES:
        size *= 2
    return size


def value_id(recipe: dict[str, Any]) -> tuple[str, int]:
    """(digest of the values, views) of an ingested array."""
    return str(recipe["weights"]), int(recipe["views"])


def _named(key: str, values: Any) -> Any:
    """Features under a name that a folder can have."""
    if not SAFE.fullmatch(f"{slug_of(key)}-{'0' * 8}"):  # what an array is called: with its recipe's digest
        raise UsageError(
            f"Features are named {key!r}.", "A name begins with a letter or digit and has at most 119 characters."
        )
    return values


def _stored_dtype(dtype: np.dtype[Any]) -> str:
    """float16 stays, other floats become float32."""
    return "float16" if dtype == np.float16 else "float32"


def _storable(key: str, values: NDArray[Any] | FileRows) -> NDArray[Any]:
    """All values in memory, in their stored dtype. Raises CorruptionError for those that are not finite there."""
    whole = values.whole() if isinstance(values, FileRows) else values
    (block,) = ContentArray(whole, _stored_dtype(whole.dtype), len(whole), key).blocks()
    return block


def arrange_arrays(
    features: object, text: Mapping[str, Any], columns: Mapping[str, Any], name: str | None, path: str | Path | None
) -> tuple[Content, Path]:
    """The arguments of ``Store.from_arrays`` as the content of a store, and where it goes.

    Args:
        features: by backbone.
        text: by backbone.
        columns: called as in a file, and None where they were not given.
        name: of the dataset; the backbones' names when None.
        path: of the store; under FEDCACHE_HOME when None, in folders that are made.

    Raises:
        UsageError, for shapes or values that do not fit; CorruptionError, for values that are not finite.
    """
    if not isinstance(features, Mapping):
        raise UsageError(
            f"from_arrays() takes features by backbone, not {type(features).__name__}.", 'Give {"mine": X}'
        )
    if not features:
        raise UsageError("from_arrays() was given no features.", 'For example {"mine": X}')
    raw = {f"features/{key}": _array(values) for key, values in features.items()}
    raw |= {f"text/{key}": _array(values) for key, values in text.items()}
    raw |= {key: _array(values) for key, values in columns.items() if values is not None}
    name = name or "-".join(features)
    slug = usable_name(name)
    content = arrange(assemble(WHERE, raw), name)
    if path is not None:
        return content, Path(path).expanduser()
    home = Home.from_environment()
    make_private(home.root)
    make_private(home.stores)
    return content, home.store(slug, content.dataset["digest"])


def _array(values: Any) -> Any:
    """As numpy has it; words that came as objects (pandas) are words, and numbers that did stay refused."""
    made = np.asarray(values)
    if made.dtype.kind in "OT" and made.size and all(isinstance(v, str) for v in made.ravel()):
        return made.astype(np.str_)
    return made
