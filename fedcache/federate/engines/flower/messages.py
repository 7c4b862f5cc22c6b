"""Messages between server and sites: JSON for words, raw bytes for trees of tensors. Nothing is unpickled.

A message holds the trees of many points, and equal tensors are sent once. So the first broadcast of a grid is as small
as that of one run, and so is an upload that does not depend on the swept values. Rows of zero bits are not sent, for
example the prototypes of classes that a client does not have.

    words     {"round": .., "trees": [{"W": {"at": "0", "shape": [10, 128]}, ..}, ..]}
    arrays    "0" -> bytes, little endian;  "0/rows" -> int32 numbers of the rows that are not zero
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedcache.errors import Exit, FedcacheError
from fedcache.heads.linear import Tree
from fedcache.parsing import Facts

DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""Legal types of a tensor in a message."""

MOST_BYTES = (1 << 31) - 1
"""Limit in bytes for the tensors of an unpacked message: equal tensors and rows of zeros count too, although they are
not sent. Flower allows no larger message."""


SITE_EXITS = (Exit.USAGE, Exit.STORE, Exit.CORRUPT, Exit.ENVIRONMENT, Exit.FEDERATED)
"""Exit codes that a site may send with a refusal. Other codes mean a success, or a bug of the server."""


FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^/\s]+/)+")
"""The folders in an absolute path, which are removed from sentences."""


class MalformedError(ValueError):
    """A message that ``pack`` cannot have made; the text says what is wrong."""


@dataclass(frozen=True)
class RawTensor:
    """A tensor as bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class SiteMessage:
    """Content of a message."""

    words: Facts  # JSON values
    trees: Sequence[Tree] = ()  # one for each point and seed of the message


@dataclass(frozen=True)
class PackedMessage:
    """A message as text and bytes."""

    words: str
    arrays: Mapping[str, RawTensor]

    @property
    def bytes(self) -> int:
        """Its size, without the overhead of the transport."""
        tensors = sum(len(raw.data) for raw in self.arrays.values())
        return len(self.words.encode()) + tensors


def pack(message: SiteMessage) -> PackedMessage:
    """A message as text and bytes."""
    arrays = {}
    at_of_key: dict[bytes, str] = {}
    trees = []
    for tree in message.trees:
        entry: Facts = {}
        for name, t in tree.items():
            # ``ascontiguousarray`` turns a scalar into a vector of one number, hence the reshape.
            values = np.ascontiguousarray(t.detach().cpu().numpy())
            values = values.reshape(tuple(t.shape))
            outline = f"{values.dtype}{values.shape}"
            key = hashlib.sha256(outline.encode() + values.tobytes()).digest()
            if key not in at_of_key:
                at = str(len(at_of_key))
                at_of_key[key] = at
                for suffix, raw in _rows(values).items():
                    arrays[at + suffix] = raw
            entry[name] = {"at": at_of_key[key], "shape": list(values.shape)}
        trees.append(entry)
    return PackedMessage(json.dumps({**message.words, "trees": trees}), arrays)


def unpack(packed: PackedMessage) -> SiteMessage:
    """The inverse of ``pack``, for bytes from an untrusted sender. Raises MalformedError for any fault."""
    try:
        words: Facts = json.loads(packed.words)
        # Raises for JSON that is not an object, because only a dict can remove a key.
        entries = words.pop("trees")
        made = []
        total = 0
        for entry in entries:
            tree = {}
            for name, header in entry.items():
                at = header["at"]
                shape = tuple(header["shape"])
                if not all(type(n) is int and n >= 0 for n in shape):
                    raise MalformedError(f"{name} has no shape")
                raw = packed.arrays[at]
                rows = packed.arrays.get(f"{at}/rows")
                # Checked before anything is allocated: a short message can describe huge tensors of zeros.
                total += math.prod(shape) * _type(raw).itemsize
                if total > MOST_BYTES:
                    raise MalformedError(f"its tensors are more than {MOST_BYTES:,} bytes")
                tree[str(name)] = torch.from_numpy(_values(raw, rows, shape))
            made.append(tree)
    except MalformedError:
        raise
    except Exception as error:
        # The sender may have written anything, so the type of its fault is not known.
        raise MalformedError(f"{type(error).__name__}: {error}") from error
    return SiteMessage(words, tuple(made))


def _rows(values: np.ndarray) -> dict[str, RawTensor]:
    """An array as bytes. Rows along the last axis that are all zero bits are left out if that saves bytes."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    whole = {"": RawTensor(str(values.dtype), values.shape, little.tobytes())}
    if values.ndim < 2 or not values.size:
        return whole
    flat = little.reshape(-1, values.shape[-1])
    bits = flat.view(np.uint8).reshape(len(flat), -1)
    nonzero = np.flatnonzero(bits.any(1)).astype("<i4")
    saved = (len(flat) - len(nonzero)) * flat[0].nbytes
    # The number of a row that is sent takes 4 bytes.
    if 4 * len(nonzero) >= saved:
        return whole
    kept = flat[nonzero]
    return {
        "": RawTensor(str(values.dtype), kept.shape, kept.tobytes()),
        "/rows": RawTensor("int32", nonzero.shape, nonzero.tobytes()),
    }


def _type(raw: RawTensor) -> np.dtype[Any]:
    """The little-endian dtype of a tensor. Raises MalformedError for a type that is not legal."""
    if raw.dtype not in DTYPES:
        raise MalformedError(f"a tensor is of type {raw.dtype!r:.40}")
    return np.dtype(raw.dtype).newbyteorder("<")


def _array(raw: RawTensor) -> np.ndarray:
    """The bytes of a tensor as an array, after a check of their number."""
    kind = _type(raw)
    size = len(raw.data)
    is_shape = all(n >= 0 for n in raw.shape)
    if not is_shape or math.prod(raw.shape) * kind.itemsize != size:
        raise MalformedError(f"a tensor of shape {raw.shape} has {size} bytes")
    values = np.frombuffer(raw.data, kind).astype(np.dtype(raw.dtype))
    return values.reshape(raw.shape)


def _values(raw: RawTensor, rows: RawTensor | None, shape: tuple[int, ...]) -> np.ndarray:
    """The array of ``shape`` from the rows that were sent; ``rows`` are their numbers, None if all rows were sent."""
    values = _array(raw)
    if rows is None:
        if values.shape != shape:
            raise MalformedError(f"a tensor has shape {values.shape}, but its header says {shape}")
        return values
    sent = _array(rows)
    # Numbers of rows are possible only with two axes or more; ``pack`` sends other tensors whole.
    count = 0
    if len(shape) > 1:
        count = math.prod(shape[:-1])
    sound = sent.ndim == 1 and sent.dtype == np.int32
    sound = sound and values.shape == (len(sent), *shape[-1:])
    # Row numbers ascend, from 0 to the last row of the tensor.
    if sound and len(sent):
        sound = sent[0] >= 0 and sent[-1] < count and bool((np.diff(sent) > 0).all())
    if not sound:
        raise MalformedError(
            "the sent rows, or their row numbers, do not fit the shape of the tensor"
        )
    out = np.zeros((count, shape[-1]), values.dtype)
    out[sent] = values
    return out.reshape(shape)


def refused(error: FedcacheError) -> SiteMessage:
    """The answer of a site to a request that it refuses; paths are cut to the names of files."""
    words = error_words(error)
    for part in ("message", "hint"):
        words[part] = FOLDERS.sub("", words[part])
    return SiteMessage({"refused": words})


def error_words(error: FedcacheError) -> Facts:
    """An error as JSON values."""
    return {"code": int(error.code), "message": error.message, "hint": error.hint}


def refusal_of(answer: SiteMessage) -> FedcacheError | None:
    """The error in a site's answer, or None."""
    found = answer.words.get("refused")
    if not isinstance(found, dict):
        return None
    sent = found.get("code")
    code = Exit.FEDERATED
    if type(sent) is int and sent in SITE_EXITS:
        code = Exit(sent)
    message = str(found.get("message"))[:2000]
    hint = str(found.get("hint"))[:2000]
    return FedcacheError(code, message, hint)
