"""Chunk files and array metadata, byte for byte as FORMAT.md says; any Zarr v3 reader opens them.

A chunk file is the raw little-endian rows followed by the four bytes of their crc32c, little-endian. There is no
compression (embeddings do not compress), so a chunk can be mapped into memory. The last chunk of an array is a
full-size file too: rows beyond N are the fill value.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from fedcache.errors import Exit, FedcacheError
from fedcache.store.files import canonical_json, write_atomic

CRC_BYTES = 4
DTYPES = ("float16", "float32", "uint8", "int16", "int32", "int64")


def fill_of(dtype: str) -> Any:
    """Fill value of an array: NaN for floats, 0 for uint8, -1 for signed integers."""
    return float("nan") if dtype.startswith("float") else 0 if dtype == "uint8" else -1


def array_metadata(shape: Sequence[int], dtype: str, chunk_rows: int, attributes: dict[str, Any]) -> bytes:
    """``zarr.json`` of an array of numbers, or of strings (dtype ``string``), chunked along its first axis."""
    strings = dtype == "string"
    serializer: dict[str, Any] = {"name": "vlen-utf8"} if strings else {"name": "bytes"}
    if not strings and np.dtype(dtype).itemsize > 1:
        serializer["configuration"] = {"endian": "little"}
    fill = "" if strings else "NaN" if dtype.startswith("float") else fill_of(dtype)
    return canonical_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(shape),
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk_rows, *shape[1:]]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
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


def checksum(data: bytes) -> int:
    """crc32c of a buffer."""
    return int(google_crc32c.value(data))


def encode(rows: NDArray[Any], chunk_rows: int, dtype: str) -> bytes:
    """Rows [n, ...] as the bytes of a whole chunk, padded with the fill value."""
    target = np.dtype(dtype).newbyteorder("<")
    whole = np.full((chunk_rows, *rows.shape[1:]), fill_of(dtype), target)
    whole[: len(rows)] = rows
    return whole.tobytes()


def write_chunk_file(path: Path, rows: NDArray[Any], chunk_rows: int, dtype: str) -> int:
    """Write one chunk, whole or not at all; returns its crc32c. Needs no lock: two writers write the same bytes."""
    raw = encode(rows, chunk_rows, dtype)
    crc = checksum(raw)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, raw, struct.pack("<I", crc))
    return crc


def encode_strings(values: Sequence[str]) -> bytes:
    """vlen-utf8: count, then length and bytes of each value, all lengths 4 bytes little-endian."""
    parts = [struct.pack("<I", len(values))]
    for value in values:
        raw = value.encode("utf-8")
        parts += [struct.pack("<I", len(raw)), raw]
    return b"".join(parts)


def decode_strings(raw: bytes) -> tuple[str, ...]:
    """The inverse of ``encode_strings``."""
    (count,) = struct.unpack_from("<I", raw, 0)
    at, out = 4, []
    for _ in range(count):
        (length,) = struct.unpack_from("<I", raw, at)
        out.append(raw[at + 4 : at + 4 + length].decode("utf-8"))
        at += 4 + length
    return tuple(out)


def read_checked(path: Path, crc: int | None, what: str) -> bytes:
    """A chunk file's payload, its own checksum and the manifest's verified.

    Raises:
        FedcacheError: CORRUPT, naming the file.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise damaged(what, path, "is missing or unreadable") from error
    payload, tail = raw[:-CRC_BYTES], raw[-CRC_BYTES:]
    if len(raw) < CRC_BYTES or struct.unpack("<I", tail)[0] != checksum(payload):
        raise damaged(what, path, "does not match its own checksum")
    if crc is not None and checksum(payload) != crc:
        raise damaged(what, path, "is whole but not the file the manifest lists at this place")
    return payload


def damaged(what: str, path: Path, why: str) -> FedcacheError:
    """A corruption error for one file of a store."""
    store = next((p for p in path.parents if p.suffix == ".zarr"), path.parent)
    return FedcacheError(
        Exit.CORRUPT,
        f"{what}: {path} {why}.",
        f"fedcache verify {store} shows the extent; remove the damaged array's folder and extract again to mend it.",
    )


def map_chunk(path: Path, shape: Sequence[int], dtype: str, crc: int, what: str) -> NDArray[Any]:
    """A chunk mapped read-only, its size and checksums verified first."""
    wanted = int(np.prod(shape)) * np.dtype(dtype).itemsize + CRC_BYTES
    try:
        size = path.stat().st_size
        if size != wanted:
            raise damaged(what, path, f"has {size:,} bytes, expected {wanted:,}")
        mapped = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise damaged(what, path, "is missing or unreadable") from error
    payload = mapped[:-CRC_BYTES]
    found = int(google_crc32c.value(payload))
    if found != struct.unpack("<I", mapped[-CRC_BYTES:].tobytes())[0]:
        raise damaged(what, path, "does not match its own checksum")
    if found != crc:
        raise damaged(what, path, "is whole but not the chunk the manifest lists at this place")
    return payload.view(np.dtype(dtype).newbyteorder("<")).reshape(shape)
