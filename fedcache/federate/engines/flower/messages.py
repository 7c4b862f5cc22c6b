"""Messages between server and sites: JSON for words, raw bytes for trees of tensors. Nothing is unpickled.

A message holds the trees of many points. Equal tensors travel once however many points share them, so the first
broadcast of a grid is as small as that of one run, and so is an upload that the swept numbers do not change. Rows that
are all zero bits do not travel either: the prototype of a class that a client lacks is absent, and not a row of zeros.

    words     {"round": .., "trees": [{"W": {"at": "0", "shape": [10, 128]}, ..}, ..]}
    arrays    "0" -> bytes, little endian;  "0/rows" -> int32 numbers of the rows that are not zero
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedcache.errors import Exit, FedcacheError
from fedcache.heads.linear import Tree

DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""Types of a tensor that may travel."""

MOST_BYTES = (1 << 31) - 1
"""Of a message, unfolded or not: what one message of Flower may hold."""


SITE_EXITS = (Exit.USAGE, Exit.STORE, Exit.CORRUPT, Exit.ENVIRONMENT, Exit.FEDERATED)
"""Exit codes that a site's refusal may have; it cannot say that the server succeeded, or has a bug."""


FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^/\s]+/)+")
"""The folders of an absolute path in a sentence."""


class MalformedError(ValueError):
    """A message that is not what ``pack`` makes; the text says what is wrong with it."""


@dataclass(frozen=True)
class RawTensor:
    """A tensor on the wire."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class SiteMessage:
    """A message's content."""

    words: dict[str, Any]  # JSON values
    # one for each point and seed that the message is about
    trees: Sequence[Tree] = field(default=())


@dataclass(frozen=True)
class PackedMessage:
    """A message on the wire."""

    words: str
    arrays: Mapping[str, RawTensor]

    @property
    def bytes(self) -> int:
        """What travels, without what the transport adds."""
        return len(self.words.encode()) + sum(len(a.data) for a in self.arrays.values())


def pack(message: SiteMessage) -> PackedMessage:
    """A message as bytes."""
    arrays: dict[str, RawTensor] = {}
    known: dict[bytes, str] = {}
    trees = []
    for tree in message.trees:
        entry: dict[str, Any] = {}
        for name, t in tree.items():
            # which makes 0-d 1-d
            values = np.ascontiguousarray(t.detach().cpu().numpy()).reshape(tuple(t.shape))
            key = hashlib.sha256(
                f"{values.dtype}{values.shape}".encode() + values.tobytes()
            ).digest()
            if key not in known:
                known[key] = at = str(len(known))
                arrays |= {f"{at}{suffix}": raw for suffix, raw in _rows(values).items()}
            entry[name] = {"at": known[key], "shape": list(values.shape)}
        trees.append(entry)
    return PackedMessage(json.dumps({**message.words, "trees": trees}), arrays)


def unpack(packed: PackedMessage) -> SiteMessage:
    """The inverse of ``pack``, of bytes that anybody may have sent. Raises MalformedError, whatever is wrong."""
    try:
        words = json.loads(packed.words)
        entries = words.pop("trees")
        made = []
        total = 0
        for entry in entries:
            tree: Tree = {}
            for name, told in entry.items():
                shape = tuple(told["shape"])
                if not all(type(n) is int and n >= 0 for n in shape):
                    raise MalformedError(f"{name} has no shape")
                raw = packed.arrays[told["at"]]
                rows = packed.arrays.get(f"{told['at']}/rows")
                total += math.prod(shape) * _type(raw).itemsize
                if total > MOST_BYTES:
                    raise MalformedError(f"its tensors are more than {MOST_BYTES:,} bytes")
                tree[str(name)] = torch.from_numpy(_values(raw, rows, shape))
            made.append(tree)
    except MalformedError:
        raise
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
    ) as error:
        raise MalformedError(f"{type(error).__name__}: {error}") from error
    if not isinstance(words, dict):
        raise MalformedError("its words are no table")
    return SiteMessage(words, tuple(made))


def _rows(values: np.ndarray) -> dict[str, RawTensor]:
    """An array as bytes, without the rows of its last axis that are all zero bits, where that saves any."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    whole = {"": RawTensor(str(values.dtype), values.shape, little.tobytes())}
    if values.ndim < 2 or not values.size:
        return whole
    flat = little.reshape(-1, values.shape[-1])
    there = np.flatnonzero(flat.view(np.uint8).reshape(len(flat), -1).any(1)).astype("<i4")
    if 4 * len(there) >= (len(flat) - len(there)) * flat[0].nbytes:
        return whole
    kept = flat[there]
    return {
        "": RawTensor(str(values.dtype), kept.shape, kept.tobytes()),
        "/rows": RawTensor("int32", there.shape, there.tobytes()),
    }


def _type(raw: RawTensor) -> np.dtype[Any]:
    if raw.dtype not in DTYPES:
        raise MalformedError(f"a tensor is of type {raw.dtype!r:.40}")
    return np.dtype(raw.dtype).newbyteorder("<")


def _array(raw: RawTensor) -> np.ndarray:
    """The bytes of a tensor as an array; its size is checked before anything is made of it."""
    kind = _type(raw)
    if math.prod(raw.shape) * kind.itemsize != len(raw.data) or any(n < 0 for n in raw.shape):
        raise MalformedError(f"a tensor of shape {raw.shape} has {len(raw.data)} bytes")
    return np.frombuffer(raw.data, kind).astype(np.dtype(raw.dtype)).reshape(raw.shape)


def _values(raw: RawTensor, rows: RawTensor | None, shape: tuple[int, ...]) -> np.ndarray:
    values = _array(raw)
    if rows is None:
        if values.shape != shape:
            raise MalformedError(f"a tensor has shape {values.shape}, and is said to have {shape}")
        return values
    there = _array(rows)
    count = 0
    if len(shape) > 1:
        count = math.prod(shape[:-1])
    fits = values.shape == (len(there), *shape[-1:]) and there.ndim == 1 and there.dtype == np.int32
    if not fits or (
        len(there) and (there[0] < 0 or there[-1] >= count or (np.diff(there) <= 0).any())
    ):
        raise MalformedError("the rows that travel are not among those of the tensor")
    out = np.zeros((count, shape[-1]), values.dtype)
    out[there] = values
    return out.reshape(shape)


def refused(error: FedcacheError) -> SiteMessage:
    """The answer of a site that cannot do what it was asked; where its files lie is left out, their names stay."""
    words = error_words(error)
    return SiteMessage(
        {"refused": {k: FOLDERS.sub("", v) if isinstance(v, str) else v for k, v in words.items()}}
    )


def error_words(error: FedcacheError) -> dict[str, Any]:
    """An error as JSON values."""
    return {"code": int(error.code), "message": error.message, "hint": error.hint}


def refusal_of(answer: SiteMessage) -> FedcacheError | None:
    """The error that a site answers with, or None."""
    found = answer.words.get("refused")
    if not isinstance(found, dict):
        return None
    code = found.get("code")
    known = next((Exit(c) for c in SITE_EXITS if type(code) is int and code == c), Exit.FEDERATED)
    return FedcacheError(known, str(found.get("message"))[:2000], str(found.get("hint"))[:2000])
