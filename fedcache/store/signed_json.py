"""JSON that ends with its own digest: the manifest, and every line of a journal and of the history.

The digest covers the bytes, not the parsed value, so a flipped bit that parses to the same value (``1e5``, ``1E5``) is
found as well. Nothing is parsed before the digest agrees.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedcache.store.files import canonical_json, sha256_hex

_BEFORE, _AFTER = b',"sha256":"', b'"}'
_TAIL = len(_BEFORE) + 64 + len(_AFTER)


def to_signed(body: Mapping[str, Any]) -> bytes:
    """Canonical JSON of a non-empty object, closed by one more key: ``sha256``, over the JSON without it."""
    raw = canonical_json(dict(body))
    return raw[:-1] + _BEFORE + sha256_hex(raw).encode() + _AFTER


def parse_signed(raw: bytes) -> dict[str, Any]:
    """The object of signed JSON, without its digest.

    Raises:
        ValueError: for anything ``to_signed`` does not write, in words that follow a file's name.
    """
    body = raw[:-_TAIL] + b"}"
    if raw[-_TAIL:] != _BEFORE + sha256_hex(body).encode() + _AFTER:
        raise ValueError("does not have the digest it ends with")
    try:
        value = json.loads(body)
        canonical = canonical_json(value)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not the JSON fedcache writes") from error
    if type(value) is not dict or canonical != body:
        raise ValueError("is not the JSON fedcache writes")
    return value
