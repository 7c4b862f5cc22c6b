"""Reads a partition from JSON that anybody may have written.

``{"schema", "scheme", "args", "seed", "dataset", "clients": [{"name", "train", "test"}], "test", "pool", "dropped",
"notes", "digest"}``; row lists ascend; a client whose ``test`` is null is tested on the global ``test``, which keeps
the file of a hundred such clients small. A partition with rows to choose by has another schema, and ``validation``
beside ``test``: of every client, or of the whole where all clients have the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from fedcache.errors import CorruptionError, FedcacheError
from fedcache.federate.partition.scheme import LARGEST_SEED
from fedcache.parsing import parse_json

SCHEMA, WITH_VALIDATION = "fedcache.partition/1", "fedcache.partition/2"
SCHEMAS = SCHEMA, WITH_VALIDATION
LARGEST_FILE = 1 << 28  # bytes; ten million rows take a third of it
LARGEST_ROW = 2**48
_SCHEME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
Fields = dict[str, tuple[Callable[[object], bool], str]]
_DIGEST = re.compile(r"[0-9a-f]{64}")


def corrupt(origin: str, problem: str) -> FedcacheError:
    """The error for a file that is no partition, or no longer the one that was written."""
    return CorruptionError(
        f"{origin} is not a sound partition file: {problem}.",
        "Make it again: fedcache partition --help",
    )


def read_json(raw: memoryview, origin: str) -> object:
    """The JSON value in a file's bytes. Raises CorruptionError, when there are too many or they are not JSON."""
    if len(raw) > LARGEST_FILE:
        raise corrupt(
            origin, f"it has {len(raw):,} bytes, at most {LARGEST_FILE:,} are read as JSON"
        )
    try:
        return parse_json(bytes(raw))
    except ValueError as error:
        raise corrupt(
            origin, "it is neither a file of arrays nor JSON, or it ends too early"
        ) from error


def decode(payload: object, *, origin: str) -> dict[str, Any]:
    """The fields of a partition, with exact types; ``clients`` as (name, train, test) and ``digest`` as claimed.

    ``validation`` is None, the rows of all clients, or a list of each client's. ``payload`` is any JSON value, which
    messages call ``origin``. Raises CorruptionError, naming the field.
    """

    def need(is_right: bool, where: str, expected: str) -> None:
        if not is_right:
            raise corrupt(origin, f"{where} should be {expected}")

    def row_list(value: object, where: str) -> np.ndarray:
        if not isinstance(value, list):
            raise corrupt(origin, f"{where} should be a list of rows")
        for row in value:  # type() and not isinstance(): True is an int to Python
            if type(row) is not int or not 0 <= row < LARGEST_ROW:
                raise corrupt(
                    origin,
                    f"{where} holds {str(row)[:40]!r}, expected rows from 0 to {LARGEST_ROW - 1}",
                )
        return np.array(value, np.int64)

    shared = (
        isinstance(payload, dict)
        and payload.get("schema") == WITH_VALIDATION
        and "validation" in payload
    )
    payload = check_fields(payload, {**_WORDS, **_LISTS, **(_VALIDATION if shared else {})}, origin)
    test = row_list(payload["test"], "test")
    validation: Any = row_list(payload["validation"], "validation") if shared else None
    keys, expected = {"name", "train", "test"}, "name, train and test"
    if payload["schema"] == WITH_VALIDATION and not shared:
        validation, keys, expected = [], {*keys, "validation"}, "name, train, test and validation"
    clients = []
    for place, client in enumerate(payload["clients"]):
        where = f"client {place}"
        need(isinstance(client, dict) and client.keys() == keys, where, expected)
        need(is_name(client["name"]), f"{where} name", "text of 1 to 255 characters")
        own = test if client["test"] is None else row_list(client["test"], f"{where} test")
        clients.append((client["name"], row_list(client["train"], f"{where} train"), own))
        if "validation" in keys:
            validation.append(row_list(client["validation"], f"{where} validation"))
    return {**words_of(payload), "clients": clients, "test": test, "validation": validation}


def check_fields(payload: object, fields: Fields, origin: str) -> dict[str, Any]:
    """``payload``, when it is an object of exactly these fields. Raises CorruptionError, naming the field."""
    if not isinstance(payload, dict):
        raise corrupt(origin, f"it holds {type(payload).__name__}, expected an object")
    if (schema := payload.get("schema")) not in SCHEMAS:
        raise corrupt(origin, f"schema should be {SCHEMA!r}, found {str(schema)[:60]!r}")
    missing, extra = sorted(fields.keys() - payload.keys()), sorted(payload.keys() - fields.keys())
    if missing or extra:
        raise corrupt(
            origin,
            f"its fields should be those of {schema}: missing {missing[:3]}, unknown {extra[:3]}",
        )
    for name, (is_right, expected) in fields.items():
        if not is_right(payload[name]):
            raise corrupt(origin, f"{name} should be {expected}")
    return payload


def check_words(payload: object, origin: str) -> dict[str, Any]:
    """As ``check_fields`` with all that says of a partition which it is; ``clients`` is left to the caller."""
    return check_fields(payload, {**_WORDS, "clients": (lambda _: True, "")}, origin)


def words_of(payload: dict[str, Any]) -> dict[str, Any]:
    """The fields of a partition that are no rows, with exact types, and ``digest`` as claimed."""
    args = {k: tuple(v) if isinstance(v, list) else v for k, v in payload["args"].items()}
    plain = {
        name: payload[name] for name in ("scheme", "seed", "dataset", "pool", "dropped", "digest")
    }
    return {**plain, "args": args, "notes": tuple(payload["notes"])}


def is_name(value: object) -> bool:
    """Whether a client may be called so."""
    return _is_text(value)


def _is_text(value: object, longest: int = 255) -> bool:
    return isinstance(value, str) and 0 < len(value) <= longest and _is_unicode(value)


def _is_unicode(value: str) -> bool:
    """JSON can spell half a surrogate pair, which no file can be written in."""
    return not any("\ud800" <= c <= "\udfff" for c in value)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_ROW


def _is_value(value: object) -> bool:
    """A value an argument may have: a scalar or a list of names. NaN and infinities are no JSON."""
    if isinstance(value, list):
        return bool(value) and all(_is_text(name) for name in value)
    if isinstance(value, float):
        return value == value and abs(value) != float("inf")
    return (
        value is None
        or isinstance(value, bool)
        or _is_text(value)
        or (type(value) is int and abs(value) < 2**63)
    )


def _is_args(value: object) -> bool:
    return isinstance(value, dict) and all(
        _is_text(k, 64) and _is_value(v) for k, v in value.items()
    )


def _matches(pattern: re.Pattern[str]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


_WORDS: Fields = {
    "schema": (lambda value: value in SCHEMAS, " or ".join(SCHEMAS)),
    "scheme": (_matches(_SCHEME), "a name of lower-case letters, digits and hyphens"),
    "args": (_is_args, "an object of plain values"),
    "seed": (
        lambda value: type(value) is int and 0 <= value <= LARGEST_SEED,
        "an integer of 63 bits",
    ),
    "dataset": (lambda value: _is_text(value), "the digest of a dataset"),
    "pool": (_is_count, "a number of rows"),
    "dropped": (_is_count, "a number of rows"),
    "notes": (
        lambda value: isinstance(value, list) and all(_is_text(note, 10_000) for note in value),
        "a list of sentences",
    ),
    "digest": (_matches(_DIGEST), "64 hexadecimal digits"),
}
_LISTS: Fields = {
    "clients": (lambda value: isinstance(value, list), "a list"),
    "test": (lambda value: isinstance(value, list), "a list"),
}
_VALIDATION: Fields = {"validation": (lambda value: isinstance(value, list), "a list")}
