"""Chunk files and array metadata, byte for byte as specified in FORMAT.md; any Zarr v3 reader opens them.

A chunk file is the raw little-endian rows followed by the four bytes of their crc32c, little-endian. There is no
compression (embeddings do not compress), so a chunk can be mapped into memory. The last chunk of an array is a
full-size file too: rows beyond N are the fill value.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import struct
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, FedcacheError, InternalError, shell_word
from fedcache.store.files import (
    Buffer,
    at_once,
    canonical_json,
    fsync_directory,
    parse_signed,
    read_whole,
    to_signed,
    write_atomic,
)
from fedcache.tables.words import EqualStrings

# Arrays of unsigned integers under a sealed head, in one file that is mapped when it is read.
#
#    magic, 8 bytes | length of the head, 8 bytes | head, sealed JSON | arrays
#
# The head holds ``content``, a JSON object, and the dtype, length, offset and sha256 of each array.
# Head and arrays begin at multiples of 8, with zeros in between; numbers are little-endian, and
# offsets count from the end of the head. Every part of a file is used only after its digest was
# verified, and every length only after it was compared with the size of the file.

MAGIC = b"\x89FCARR1\n"
"""First bytes of a file. The first one shows that it is not text, the last one is lost if line ends are converted."""

LARGEST_HEAD = 1 << 28
"""Most bytes of a head. The names of a million clients take a tenth of it."""

_START = len(MAGIC) + 8  # where the head begins
_ALIGNMENT = 8
_DTYPES = ("uint8", "uint16", "uint32", "uint64")


def pack(content: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[Buffer]:
    """The parts of a file, to be written one after another.

    Args:
        content: JSON object.
        arrays: [n] of non-negative integers; kept in the smallest unsigned dtype that holds them.

    Raises:
        ValueError: the head would be larger than ``LARGEST_HEAD``.
    """
    parts: list[Buffer] = []
    entries = {}
    offset = 0
    for name, values in arrays.items():
        if len(values):
            dtype = np.min_scalar_type(int(values.max()))
        else:
            dtype = np.dtype(np.uint8)
        small = np.ascontiguousarray(values, dtype.newbyteorder("<"))
        raw = small.view(np.uint8).data
        entries[name] = {
            "dtype": dtype.name,
            "length": len(small),
            "offset": offset,
            "sha256": hashlib.sha256(raw).hexdigest(),
        }
        padding = bytes(_gap(len(raw)))
        parts += [raw, padding]
        offset += len(raw) + len(padding)
    head = to_signed({"content": dict(content), "arrays": entries})
    if len(head) > LARGEST_HEAD:
        raise ValueError(
            f"names and notes take {len(head):,} bytes, but at most {LARGEST_HEAD:,} can be stored"
        )
    return [MAGIC, struct.pack("<Q", len(head)), head, bytes(_gap(len(head))), *parts]


def unpack(raw: memoryview) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Content and arrays of a file; the arrays are views of ``raw``.

    Raises ValueError for bytes that ``pack`` does not write. Its message continues a sentence that begins with the
    name of the file.
    """
    content, entries, first = _head(raw)
    arrays = {}
    start = first  # where the next array must begin: arrays and their padding follow each other without a gap
    # In the order of the file; canonical JSON has sorted the entries by name. An empty array has the offset of the next
    # array, and comes first by its length.
    in_order = sorted(entries, key=lambda name: (entries[name]["offset"], entries[name]["length"]))
    for name in in_order:
        entry = entries[name]
        dtype = np.dtype(entry["dtype"]).newbyteorder("<")
        size = entry["length"] * dtype.itemsize
        stop = start + size
        end = stop + _gap(size)
        # Offsets count from the first array.
        if first + entry["offset"] != start or end > len(raw):
            raise ValueError(
                f"has only {len(raw):,} bytes, too few for the array {name!r} that its header describes"
            )
        payload = raw[start:stop]
        padding = raw[stop:end]
        if hashlib.sha256(payload).hexdigest() != entry["sha256"] or any(padding):
            raise ValueError(f"has an array {name!r} that does not match its sha256 in the header")
        arrays[name] = np.frombuffer(payload, dtype)
        start = end
    if start != len(raw):
        raise ValueError(f"has {len(raw):,} bytes, but {start:,} bytes according to its header")
    return content, arrays


def read_content(raw: memoryview) -> dict[str, Any]:
    """The content alone, without reading an array. Raises ValueError as ``unpack``."""
    return _head(raw)[0]


def is_array_file(raw: memoryview) -> bool:
    """Whether the first bytes are those of such a file."""
    return bytes(raw[: len(MAGIC)]) == MAGIC


def mapped(path: Path) -> memoryview:
    """The bytes of a file, mapped; no bytes for a pipe. Raises OSError if the file is missing or unreadable."""
    with open(path, "rb", buffering=0, opener=at_once) as file:
        try:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError:  # an empty file cannot be mapped
            return memoryview(b"")


def _head(raw: memoryview) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Content, entries of the arrays, and the place of the first array in the file."""
    if not is_array_file(raw):
        raise ValueError("does not begin like an array file")
    length = int.from_bytes(raw[len(MAGIC) : _START], "little")
    end = _START + length
    start = end + _gap(length)
    if length > LARGEST_HEAD or start > len(raw):
        raise ValueError(f"has {len(raw):,} bytes, but says that its header has {length:,} bytes")
    head = parse_signed(bytes(raw[_START:end]))
    # The digest of the head is right, but another program may have written it.
    unexpected = ValueError("has a header that fedcache does not write")
    if any(raw[end:start]) or head.keys() != {"content", "arrays"}:
        raise unexpected
    content = head["content"]
    entries = head["arrays"]
    if type(content) is not dict or type(entries) is not dict:
        raise unexpected
    if not all(_is_entry(entry) for entry in entries.values()):
        raise unexpected
    return content, entries, start


def _is_entry(entry: object) -> bool:
    """Whether this is an entry of an array in a head.

    Lengths and offsets must be below 2^48: no file is that large.
    """
    if type(entry) is not dict or entry.keys() != {"dtype", "length", "offset", "sha256"}:
        return False
    numbers = (entry["length"], entry["offset"])
    return entry["dtype"] in _DTYPES and all(type(n) is int and 0 <= n < 1 << 48 for n in numbers)


def _gap(size: int) -> int:
    """Number of bytes from ``size`` to the next multiple of ``_ALIGNMENT``."""
    return -size % _ALIGNMENT


# Chunk files and the metadata of arrays.

CRC_BYTES = 4
CACHE_LINE = 64
"""Bytes of a cache line of the processor."""

DTYPES = ("float16", "float32", "uint8", "int16", "int32", "int64")


def fill_of(dtype: str) -> Any:
    """Fill value of an array: NaN for floats, 0 for uint8, -1 for signed integers."""
    if dtype.startswith("float"):
        return float("nan")
    if dtype == "uint8":
        return 0
    return -1


def array_metadata(
    shape: Sequence[int],
    dtype: str,
    chunk_rows: int,
    attributes: dict[str, Any],
    dimensions: Sequence[str],
) -> bytes:
    """``zarr.json`` of an array of numbers, or of strings (dtype ``string``), chunked along its first axis.

    ``dimensions`` names the axes for xarray. Axes of one name must have the same length in all arrays of a group.
    """
    serializer: dict[str, Any] = {"name": "bytes"}
    if dtype == "string":
        serializer["name"] = "vlen-utf8"
        fill: Any = ""
    else:
        fill = fill_of(dtype)
        if dtype.startswith("float"):
            fill = "NaN"  # Zarr's word for it, because JSON has no such number
        if np.dtype(dtype).itemsize > 1:
            serializer["configuration"] = {"endian": "little"}
    return canonical_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(shape),
            "data_type": dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [chunk_rows, *shape[1:]]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "dimension_names": list(dimensions),
            "fill_value": fill,
            "codecs": [serializer, {"name": "crc32c"}],
            "attributes": attributes,
            "storage_transformers": [],
        }
    )


def group_metadata(attributes: dict[str, Any]) -> bytes:
    """``zarr.json`` of a group."""
    return canonical_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def chunk_path(array: Path, chunk: int, axes: int) -> Path:
    """File of chunk ``chunk`` of an array with ``axes`` axes: ``c/<chunk>/0/0``."""
    return array.joinpath("c", str(chunk), *["0"] * (axes - 1))


def checksum(data: bytes | memoryview | NDArray[np.uint8]) -> int:
    """crc32c of a buffer."""
    if isinstance(data, memoryview):
        data = np.frombuffer(data, np.uint8)
    return int(google_crc32c.value(data))


def has_checksum(raw: bytes, crc: int) -> bool:
    """Whether a chunk file ends with the checksum ``crc``, and its other bytes have this checksum."""
    return (
        raw[-CRC_BYTES:] == crc.to_bytes(CRC_BYTES, "little") and checksum(raw[:-CRC_BYTES]) == crc
    )


def encode(rows: NDArray[Any], chunk_rows: int, dtype: str) -> NDArray[Any]:
    """Rows [n, ...] as a whole chunk [chunk_rows, ...], little-endian, padded with the fill value."""
    target = np.dtype(dtype).newbyteorder("<")
    if len(rows) == chunk_rows:
        return np.ascontiguousarray(rows, target)
    whole = np.full((chunk_rows, *rows.shape[1:]), fill_of(dtype), target)
    whole[: len(rows)] = rows
    return whole


def to_stored_dtype(
    rows: NDArray[Any], dtype: str, bad: Collection[int], first: int, what: str
) -> NDArray[Any]:
    """Rows in their stored dtype, after a check that every value may be stored.

    Args:
        rows: [n, ...] of any float dtype for a float array, else of ``dtype`` itself.
        dtype: stored dtype.
        bad: positions below n of rows without a value; they must be NaN (0 for integers).
        first: row of the store at position 0, for messages.
        what: the array, for messages.

    Returns:
        [n, ...] of ``dtype``; the NaNs of bad rows all have the same bits.

    Raises:
        CorruptionError, for a non-finite value in another row, before or after the cast, with row numbers;
        InternalError, for a dtype that would be cast, or a bad row that has a value.
    """
    floating = dtype.startswith("float")
    if floating:
        fits = rows.dtype.kind == "f"
    else:
        fits = rows.dtype == dtype
    if not fits:
        raise InternalError(
            f"{what}: the rows are {rows.dtype}, but the array is {dtype}.",
            "Convert them before writing.",
        )
    # The usual case, checked without looking at single rows: every row has a value, and all are finite. float16
    # overflows silently, so the values are checked before and after the cast.
    if floating and not len(bad):
        with np.errstate(over="ignore"):
            cast = rows.astype(dtype, copy=False)
        if all_finite(rows) and (cast is rows or all_finite(cast)):
            return cast
    # Every other case row by row, so that an error can name the rows.
    flat = rows.reshape(len(rows), -1)
    lost = np.zeros(len(rows), bool)  # whether a row is bad
    lost[list(bad)] = True
    wrong = np.flatnonzero(lost & ~are_empty(rows))
    if len(wrong):
        numbers = list_rows(wrong + first)
        raise InternalError(
            f"{what}: rows {numbers} are marked bad but contain values.",
            "A bad row must be NaN, or 0 in an array of integers.",
        )
    if not floating:
        return rows
    with np.errstate(over="ignore"):
        cast = rows.astype(dtype)
    # Two checks for rows that are not finite: the values to look at, and the words and the hint of the error.
    before = (
        flat,
        "is not finite",
        "The weights contain NaN, or numbers overflow in the dtype of the computation. Try --dtype float32.",
    )
    after = (
        cast.reshape(len(rows), -1),
        f"does not fit {dtype}",
        "Store these features with --recipe dtype=float32.",
    )
    for values, why, hint in (before, after):
        finite = np.isfinite(values).all(axis=1)
        wrong = np.flatnonzero(~lost & ~finite)
        if len(wrong):
            numbers = list_rows(wrong + first)
            raise CorruptionError(
                f"{what}: the feature {why} in {len(wrong)} rows: row {numbers}.", hint
            )
    cast[lost] = fill_of(dtype)
    return cast


def are_empty(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """bool [n], the rows of [n, ...] without a value: all NaN, or all 0 in an array of integers."""
    # Different from 0 (True for floats) where there is a value.
    held = rows.reshape(len(rows), -1)
    if rows.dtype.kind == "f":
        held = ~np.isnan(held)
    return np.asarray(~held.any(axis=1))


def all_finite(values: NDArray[Any]) -> bool:
    """Whether every value is finite.

    >>> all_finite(np.array([65504.0, -0.0], np.float16)), all_finite(np.array([1.0, np.nan], np.float16))
    (True, False)
    """
    if values.dtype == np.float16:
        # Ten times as fast as isfinite: only inf and NaN have an exponent whose bits are all 1.
        exponents = values.view(np.uint16) & 0x7C00
        return not (exponents == 0x7C00).any()
    return bool(np.isfinite(values).all())


def list_rows(rows: NDArray[Any]) -> str:
    """The first ten row numbers, for a message."""
    shown = ", ".join(map(str, rows[:10]))
    if len(rows) > 10:
        shown += " ..."
    return shown


def write_chunk_file(path: Path, rows: NDArray[Any], chunk_rows: int, dtype: str) -> int:
    """Write one chunk, whole or not at all; returns its crc32c.

    Needs no lock, because two writers of a chunk write the same bytes. So workers in other processes may call it.
    """
    raw = encode(rows, chunk_rows, dtype)
    # An array without elements, such as rows of width 0.
    if not raw.size:
        return write_payload(path, b"")
    return write_payload(path, raw.reshape(-1).view(np.uint8).data)


def write_payload(path: Path, payload: bytes | memoryview) -> int:
    """Write a chunk file of these bytes and their checksum; returns the checksum."""
    crc = checksum(payload)
    make_directories(path.parent)
    write_atomic(path, payload, struct.pack("<I", crc))
    return crc


def make_directories(path: Path) -> None:
    """Make a directory and its parents. The name of each is safely on the disk before anything is made in it."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for place in reversed(missing):
        place.mkdir(exist_ok=True)
        fsync_directory(place.parent)


def encode_strings(values: Sequence[str]) -> bytes:
    """vlen-utf8: count, then length and bytes of each value, all lengths 4 bytes little-endian."""
    count = struct.pack("<I", len(values))
    # Strings of the same number of characters are joined. They also have the same number of bytes if all are ASCII.
    if not isinstance(values, EqualStrings):
        widths = set(map(len, values))
        if len(widths) == 1 and widths != {0}:
            values = EqualStrings("".join(values), widths.pop())
    if isinstance(values, EqualStrings) and values.text.isascii():
        # Such strings, for example the names of numbered rows, are the rows of one table: four bytes of length, and the
        # string.
        width = values.length
        table = np.empty((len(values), 4 + width), np.uint8)
        table[:, :4] = np.frombuffer(struct.pack("<I", width), np.uint8)
        shape = (len(values), width)
        table[:, 4:] = np.frombuffer(values.text.encode("ascii"), np.uint8).reshape(shape)
        return count + table.tobytes()
    raw = [value.encode("utf-8") for value in values]
    # Lengths repeat, so each different one is packed once.
    packed = {length: struct.pack("<I", length) for length in set(map(len, raw))}
    lengths = map(packed.__getitem__, map(len, raw))
    pairs = zip(lengths, raw, strict=True)
    return count + b"".join(chain.from_iterable(pairs))


def decode_strings(raw: bytes) -> Sequence[str]:
    """The inverse of ``encode_strings``. Raises ValueError for bytes that ``encode_strings`` does not write."""
    found = _decode_equal(raw)
    if found is not None:
        return found
    # unpack_from raises struct.error if four bytes do not fit.
    try:
        (count,) = struct.unpack_from("<I", raw, 0)
        at = 4
        out = []
        for _ in range(count):
            (length,) = struct.unpack_from("<I", raw, at)
            start = at + 4
            at = start + length
            if at > len(raw):
                raise ValueError("a string ends beyond the chunk")
            out.append(raw[start:at].decode("utf-8"))
    except struct.error as error:
        raise ValueError("a string begins beyond the chunk") from error
    if at != len(raw):
        raise ValueError(f"{len(raw) - at} bytes follow the last string")
    return tuple(out)


def _decode_equal(raw: bytes) -> EqualStrings | None:
    """The strings if all are ASCII and of one length, such as the names of numbered rows; else None."""
    if len(raw) < 8:
        return None
    count, length = struct.unpack_from("<II", raw, 0)
    # Strings that all have the length of the first fill exactly this many bytes.
    if not length or len(raw) != 4 + count * (4 + length):
        return None
    table = np.frombuffer(raw, np.uint8, offset=4).reshape(count, 4 + length)
    lengths = table[:, :4]
    letters = table[:, 4:]
    if (lengths != lengths[0]).any() or (letters > 127).any():
        return None
    return EqualStrings(letters.tobytes().decode("ascii"), length)


def read_checked(path: Path, crc: int | None, what: str, *, size: int | None = None) -> bytes:
    """The payload of a chunk file, after its size, the checksum in the file and ``crc`` were verified.

    A ``size`` or ``crc`` of None is not verified. Raises CorruptionError, naming the file.
    """
    try:
        if size is not None:
            check_size(path.stat().st_size, size, path, what)
        raw = read_whole(path)
    except OSError as error:
        raise damaged(what, path, "is missing or unreadable") from error
    payload = raw[:-CRC_BYTES]
    verify_payload(payload, raw[-CRC_BYTES:], crc, path, what)
    return payload


def check_size(found: int, size: int, path: Path, what: str) -> None:
    """Raise CorruptionError unless the ``found`` bytes of a chunk file are a payload of ``size`` and a checksum."""
    if found != size + CRC_BYTES:
        raise damaged(what, path, f"has {found:,} bytes, expected {size + CRC_BYTES:,}")


def array_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of an array; Python integers, because those of numpy overflow."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def damaged(what: str, path: Path, why: str) -> FedcacheError:
    """A corruption error for one file of a store."""
    # The store is the nearest folder above the file whose name ends in .zarr.
    store = next((p for p in path.parents if p.suffix == ".zarr"), path.parent)
    place = shell_word(store)
    hint = (
        f"fedcache verify {place}   lists the damage;  fedcache repair {place}   removes damaged files; "
        "the extract command then recomputes only those."
    )
    if (store / "origin.json").exists():
        hint = (
            "This store is a copy of a published store. Remove the copy, then run the same command again:  rm -r "
            f"{place}"
        )
    return CorruptionError(f"{what}: {path} {why}.", hint)


def map_file(path: Path, size: int, what: str) -> NDArray[np.uint8]:
    """A chunk file, ``size`` bytes and then a checksum, mapped read-only. Raises CorruptionError for another size."""
    try:
        with open(path, "rb", buffering=0, opener=at_once) as file:
            check_size(os.fstat(file.fileno()).st_size, size, path, what)
            # Not np.memmap, which first resolves the path: one system call for each part of the path.
            content = mmap.mmap(file.fileno(), size + CRC_BYTES, access=mmap.ACCESS_READ)
            return np.frombuffer(content, np.uint8)
    except (OSError, ValueError) as error:
        raise damaged(what, path, "is missing or unreadable") from error


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array to read files into, which begins at a cache line.

    A large array of numpy begins 16 bytes after the start of a page. Some processors (AMD's Zen) copy from the kernel
    to such a place at a third of the speed.
    """
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + CACHE_LINE, np.uint8)
    # Bytes from the beginning of ``raw`` to the next cache line.
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + size].view(dtype).reshape(shape)


def read_file(path: Path, out: NDArray[np.uint8], size: int, what: str) -> bytes:
    """Fill ``out`` with the first bytes of a chunk file, without verifying them.

    ``size`` is that of the file without its checksum. Returns the remaining bytes of the file: rows beyond the end of
    the array, and the checksum. Raises CorruptionError for a missing file or a wrong size.
    """
    try:
        with open(path, "rb", buffering=0, opener=at_once) as file:
            check_size(os.fstat(file.fileno()).st_size, size, path, what)
            at = 0
            view = out.data
            while at < len(out):
                got = file.readinto(view[at:])
                if not got:
                    raise damaged(what, path, "ends while it is read")
                at += got
            return file.read()
    except OSError as error:
        raise damaged(what, path, "is missing or unreadable") from error


def verify_payload(
    payload: bytes | NDArray[np.uint8], rest: bytes, crc: int | None, path: Path, what: str
) -> None:
    """Compare the checksum of a chunk file with the one at its end, and with ``crc`` unless it is None.

    The file is ``payload`` followed by ``rest``. The last four bytes of ``rest`` are the checksum of all bytes before
    them, which may include rows beyond the end of the array. Raises CorruptionError, naming ``what``.
    """
    found = checksum(payload)
    # Bytes between the payload and the stored checksum.
    if len(rest) > CRC_BYTES:
        found = int(google_crc32c.extend(found, rest[:-CRC_BYTES]))
    stored = int.from_bytes(rest[-CRC_BYTES:], "little")
    if len(rest) < CRC_BYTES or found != stored:
        raise damaged(what, path, "does not match its own checksum")
    if crc is not None and found != crc:
        raise damaged(what, path, "is a valid file, but the manifest lists another file here")
