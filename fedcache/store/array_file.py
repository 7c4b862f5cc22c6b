"""Arrays of unsigned integers under a sealed head, in one file that is mapped when it is read.

    magic, 8 bytes | length of the head, 8 bytes | head, sealed JSON | arrays

The head holds ``content``, any JSON value, and says of each array its dtype, length, offset and sha256. Head and arrays
begin at multiples of 8, with zeros in between; numbers are little-endian, and offsets count from the end of the head.
Nothing of a file is believed before the digest over it agrees, and no length that the file is too short for.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.store.files import Buffer, at_once, parse_signed, to_signed

MAGIC = b"\x89FCARR1\n"
"""The first byte is no text in any encoding, the last one is lost where line ends are converted."""

LARGEST_HEAD = 1 << 28
"""Bytes; names of a million clients take a tenth of it."""

_START = len(MAGIC) + 8
_LINE = 8
_DTYPES = ("uint8", "uint16", "uint32", "uint64")


def pack(content: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[Buffer]:
    """The parts of a file, which follow one another.

    Args:
        content: JSON object.
        arrays: [n] of non-negative integers; kept in the smallest unsigned dtype that holds them.

    Raises:
        ValueError: the content is larger than any that is read.
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
        parts += [raw, bytes(_gap(len(raw)))]
        offset += len(raw) + _gap(len(raw))
    head = to_signed({"content": dict(content), "arrays": entries})
    if len(head) > LARGEST_HEAD:
        raise ValueError(
            f"names and notes take {len(head):,} bytes, at most {LARGEST_HEAD:,} are kept"
        )
    return [MAGIC, struct.pack("<Q", len(head)), head, bytes(_gap(len(head))), *parts]


def unpack(raw: memoryview) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Content and arrays of a file; the arrays are views of ``raw``.

    Raises ValueError, in words that follow a file's name, for all that is not what ``pack`` made.
    """
    content, entries, start = _head(raw)
    arrays = {}
    offset = 0
    # Sorted by place: the head is canonical JSON, which sorts by name.
    for name, entry in sorted(
        entries.items(), key=lambda one: (one[1]["offset"], one[1]["length"])
    ):
        dtype = np.dtype(entry["dtype"]).newbyteorder("<")
        size = entry["length"] * dtype.itemsize
        end = offset + size + _gap(size)
        if entry["offset"] != offset or start + end > len(raw):
            raise ValueError(
                f"has {len(raw):,} bytes, too few for what its head says of array {name!r}"
            )
        held = raw[start + offset : start + offset + size]
        if hashlib.sha256(held).hexdigest() != entry["sha256"] or any(
            raw[start + offset + size : start + end]
        ):
            raise ValueError(f"holds an array {name!r} without the sha256 that its head says")
        arrays[name] = np.frombuffer(held, dtype)
        offset = end
    if start + offset != len(raw):
        raise ValueError(f"has {len(raw):,} bytes, {start + offset:,} are what its head says")
    return content, arrays


def read_content(raw: memoryview) -> dict[str, Any]:
    """The content alone; no array is looked at. Raises ValueError as ``unpack``."""
    return _head(raw)[0]


def is_array_file(raw: memoryview) -> bool:
    """Whether the first bytes are those of such a file."""
    return bytes(raw[: len(MAGIC)]) == MAGIC


def mapped(path: Path) -> memoryview:
    """The bytes of a file, mapped; nothing of a pipe. Raises OSError, when it is missing or unreadable."""
    with open(path, "rb", buffering=0, opener=at_once) as file:
        try:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError:  # an empty file cannot be mapped
            return memoryview(b"")


def _head(raw: memoryview) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Content, entries of the arrays, and where the first of them begins."""
    if not is_array_file(raw):
        raise ValueError("does not begin as a file of arrays does")
    length = int.from_bytes(raw[len(MAGIC) : _START], "little")
    start = _START + length + _gap(length)
    if length > LARGEST_HEAD or start > len(raw):
        raise ValueError(f"has {len(raw):,} bytes, and its head should have {length:,}")
    head = parse_signed(bytes(raw[_START : _START + length]))
    if (
        any(raw[_START + length : start])
        or head.keys() != {"content", "arrays"}
        or type(head["content"]) is not dict
    ):
        raise ValueError("has a head that fedcache does not write")
    entries = head["arrays"]
    if type(entries) is not dict or not all(_is_entry(entry) for entry in entries.values()):
        raise ValueError("has a head that fedcache does not write")
    return head["content"], entries, start


def _is_entry(entry: object) -> bool:
    """Whether this is what a head says of an array, with numbers that a file can have."""
    if type(entry) is not dict or entry.keys() != {"dtype", "length", "offset", "sha256"}:
        return False
    numbers = (entry["length"], entry["offset"])
    return entry["dtype"] in _DTYPES and all(type(n) is int and 0 <= n < 1 << 48 for n in numbers)


def _gap(size: int) -> int:
    """Zeros from ``size`` to the next multiple of ``_LINE``."""
    return -size % _LINE
