"""Partition file: its two forms, JSON and arrays, with one decoder for both; and the checks of its rows.

The JSON form, which may come from an untrusted source:

``{"schema", "scheme", "args", "seed", "dataset", "clients": [{"name", "train", "test"}], "test", "pool", "dropped",
"notes", "digest"}``. Row lists ascend. A client whose ``test`` is null is tested on the global ``test``, which keeps
the file of a hundred such clients small. A partition with validation rows has another schema, and ``validation`` next
to ``test``: in every client, or once in the file if all clients share these rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedcache.errors import CorruptionError, FedcacheError
from fedcache.federate.partition.client_table import (
    Client,
    ClientTable,
    MatchedLists,
    NumberedNames,
    RowLists,
    Validation,
    blocks_within,
    in_decimal,
    is_among,
    sorted_once,
)
from fedcache.federate.partition.scheme import LARGEST_SEED
from fedcache.parsing import as_tuples, parse_json
from fedcache.store.chunks import unpack
from fedcache.store.files import canonical_json

SCHEMA = "fedcache.partition/1"
WITH_VALIDATION = "fedcache.partition/2"
SCHEMAS = SCHEMA, WITH_VALIDATION
LARGEST_FILE = 1 << 28  # bytes; ten million rows take a third of it
LARGEST_ROW = 2**48  # every row number is smaller

Fields = dict[str, tuple[Callable[[object], bool], str]]
"""Name of a field -> the check of its value, and the expected value in words."""


def corrupt(origin: str, problem: str) -> FedcacheError:
    """The error for a file that is no partition, or that is damaged."""
    return CorruptionError(
        f"{origin} is not a valid partition file: {problem}.",
        "Make it again: fedcache partition --help",
    )


def read_json(raw: memoryview, origin: str) -> object:
    """The JSON value in a file's bytes. Raises CorruptionError for too many bytes, and for other text than JSON."""
    size = len(raw)
    if size > LARGEST_FILE:
        raise corrupt(origin, f"it has {size:,} bytes; the limit for JSON is {LARGEST_FILE:,}")
    try:
        return parse_json(bytes(raw))
    except ValueError as error:
        raise corrupt(origin, "it is not an array file or JSON, or it is incomplete") from error


Content = dict[str, Any]
"""The head of a partition file: all of its fields except the arrays of rows."""

Arrays = Mapping[str, np.ndarray]


def read_payload(payload: object, origin: str) -> tuple[Content, Arrays]:
    """Head and arrays of a JSON value, as a file of arrays would hold them. Raises CorruptionError with the field."""
    lists: Fields = {"clients": _LIST, "test": _LIST}
    # Validation rows that all clients share are one list of the file.
    per_client = isinstance(payload, dict) and "validation" not in payload
    if not per_client:
        lists["validation"] = _LIST
    payload = check_fields(payload, {**_WORDS, **lists}, origin)
    keys = {"name", "train", "test"}
    if payload["schema"] == WITH_VALIDATION and per_client:
        keys.add("validation")
    test = _row_list(payload["test"], "test", origin)
    train = []
    own = []
    shares = []
    validation = []
    for place, client in enumerate(payload["clients"]):
        where = f"client {place}"
        if not isinstance(client, dict) or client.keys() != keys:
            expected = ", ".join(sorted(keys))
            raise corrupt(origin, f"{where} should have the fields {expected}")
        train.append(_row_list(client["train"], f"{where} train", origin))
        tested = test
        if client["test"] is not None:
            tested = _row_list(client["test"], f"{where} test", origin)
        # A client that is tested on the global rows has no list of its own.
        shares.append(np.array_equal(tested, test))
        if shares[-1]:
            tested = test[:0]
        own.append(tested)
        if "validation" in keys:
            validation.append(_row_list(client["validation"], f"{where} validation", origin))
    arrays = {"test": test, "shares": np.array(shares, np.uint8)}
    names = [client["name"] for client in payload["clients"]]
    content = {**payload, "clients": {"count": len(names), "names": names}}
    held = {"train": train, "own": own}
    if "validation" in keys:
        held["validation"] = validation
    elif not per_client:
        arrays["validation"] = _row_list(payload["validation"], "validation", origin)
    for name, rows in held.items():
        joined = RowLists.of(rows)
        arrays[name] = joined.rows
        arrays[f"{name}_sizes"] = joined.sizes
    return content, arrays


def _row_list(value: object, where: str, origin: str) -> np.ndarray:
    """A JSON list of rows as int64. Raises CorruptionError, naming ``where`` it is in the file."""
    if not isinstance(value, list):
        raise corrupt(origin, f"{where} should be a list of rows")
    for row in value:  # type() and not isinstance(): True is an int to Python
        if type(row) is not int or not 0 <= row < LARGEST_ROW:
            raise _bad_row(origin, where, str(row)[:40])
    return np.array(value, np.int64)


def _bad_row(origin: str, where: str, row: object) -> FedcacheError:
    return corrupt(
        origin, f"{where} contains the row {row!r}, expected numbers from 0 to {LARGEST_ROW - 1}"
    )


def check_fields(payload: object, fields: Fields, origin: str) -> dict[str, Any]:
    """``payload``, if it is an object with exactly these fields. Raises CorruptionError, naming the field."""
    if not isinstance(payload, dict):
        raise corrupt(origin, f"it contains {type(payload).__name__}, expected a JSON object")
    schema = payload.get("schema")
    if schema not in SCHEMAS:
        found = str(schema)[:60]
        raise corrupt(origin, f"schema should be {SCHEMA!r}, found {found!r}")
    missing = sorted(fields.keys() - payload.keys())[:3]
    extra = sorted(payload.keys() - fields.keys())[:3]
    if missing or extra:
        raise corrupt(
            origin, f"its fields are not those of {schema}: missing {missing}, unknown {extra}"
        )
    for name, (is_right, expected) in fields.items():
        if not is_right(payload[name]):
            raise corrupt(origin, f"{name} should be {expected}")
    return payload


def check_words(payload: object, origin: str) -> dict[str, Any]:
    """``check_fields`` for the head of a partition; the caller checks ``clients``."""
    return check_fields(payload, {**_WORDS, "clients": (lambda _: True, "")}, origin)


def words_of(payload: dict[str, Any]) -> dict[str, Any]:
    """The fields of a partition without rows, with exact types; ``digest`` is the one in the file."""
    names = ("scheme", "seed", "dataset", "pool", "dropped", "digest")
    plain = {name: payload[name] for name in names}
    return {**plain, "args": as_tuples(payload["args"]), "notes": tuple(payload["notes"])}


def _is_text(value: object, longest: int = 255) -> bool:
    # JSON can contain half of a surrogate pair, which cannot be written to a file.
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        return False
    return not any("\ud800" <= c <= "\udfff" for c in value)


def _is_count(value: object, most: int = LARGEST_ROW) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_value(value: object) -> bool:
    """A value an argument may have: a scalar or a list of names. NaN and infinities are no JSON."""
    if isinstance(value, list):
        return bool(value) and all(_is_text(name) for name in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if value is None or isinstance(value, bool):
        return True
    return _is_text(value) or (type(value) is int and abs(value) < 2**63)


def _is_args(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return all(_is_text(k, 64) and _is_value(v) for k, v in value.items())


def _has_form(pattern: str, value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


_WORDS: Fields = {
    "schema": (lambda value: value in SCHEMAS, " or ".join(SCHEMAS)),
    "scheme": (
        partial(_has_form, "[a-z0-9][a-z0-9-]{0,63}"),
        "a name of lower-case letters, digits and hyphens",
    ),
    "args": (_is_args, "an object of plain values"),
    "seed": (partial(_is_count, most=LARGEST_SEED), "an integer of 63 bits"),
    "dataset": (_is_text, "the digest of a dataset"),
    "pool": (_is_count, "a number of rows"),
    "dropped": (_is_count, "a number of rows"),
    "notes": (
        lambda value: isinstance(value, list) and all(_is_text(note, 10_000) for note in value),
        "a list of sentences",
    ),
    "digest": (partial(_has_form, "[0-9a-f]{64}"), "64 hexadecimal digits"),
}
_LIST = (lambda value: isinstance(value, list), "a list")


# The form of arrays in one sealed file (``store/chunks``), and its checks.
#
# The head holds the fields of the partition and its digest, which is that of its JSON form. Clients
# are ``{"count", "names"}``, with null for numbered names. The arrays are
#
#     train, train_sizes [M]    training rows of all clients, one client after another
#     test                      global test rows
#
# If clients have test rows of their own, the file has one of these two groups:
#
#     own, own_sizes [M]        these rows; shares [M] is 1 for a client tested on the global ones
#     order, starts, taken      the rule that chooses them (``MatchedLists``), with classes and
#                               classes_sizes [M]
#
# If there are validation rows, it has ``validation``, and ``validation_sizes`` [M] if they belong to clients.


_ALL_SHARE = {"train", "train_sizes", "test"}
_FORMS = (
    _ALL_SHARE,
    _ALL_SHARE | {"own", "own_sizes", "shares"},
    _ALL_SHARE | {"order", "starts", "classes", "classes_sizes", "taken"},
)
_VALIDATION_ARRAYS = {"validation", "validation_sizes"}
_VALIDATION_FORMS: dict[str, tuple[set[str], ...]] = {
    SCHEMA: (set(),),
    WITH_VALIDATION: ({"validation"}, _VALIDATION_ARRAYS),
}
"""Schema -> the arrays of validation rows that a file may have."""


def arrays_of(table: ClientTable) -> dict[str, np.ndarray]:
    """The arrays of a file, by name."""
    arrays = {"train": table.train.rows, "train_sizes": table.train_sizes, "test": table.common}
    tests = table.tests
    held = table.validation
    if held is not None and held.own is not None:
        arrays |= {"validation": held.own.rows, "validation_sizes": held.own.sizes}
    elif held is not None:
        arrays["validation"] = held.rows
    if table.shares.all():
        return arrays
    if isinstance(tests, RowLists):
        arrays |= {"own": tests.rows, "own_sizes": tests.sizes}
        arrays["shares"] = table.shares.view(np.uint8)
    else:
        arrays |= {"order": tests.order, "starts": tests.starts, "taken": tests.taken}
        arrays |= {"classes": tests.classes.rows, "classes_sizes": tests.classes.sizes}
    return arrays


def clients_of(table: ClientTable) -> dict[str, Any]:
    """The entry ``clients`` of the head."""
    if isinstance(table.names, NumberedNames):
        return {"count": len(table), "names": None}
    return {"count": len(table), "names": list(table.names)}


def read_arrays(raw: memoryview, origin: str) -> tuple[Content, Arrays]:
    """Head and arrays of a file of arrays. Raises CorruptionError for any other file."""
    try:
        content, arrays = unpack(raw)
    except ValueError as error:
        raise corrupt(origin, f"it {error}") from error
    return check_words(content, origin), arrays


def decode(content: Content, arrays: Arrays, origin: str) -> dict[str, Any]:
    """The fields of a partition from head and arrays of either form of the file.

    ``clients`` is a table with its own copy of the rows; ``digest`` is the one in the file. ``problem_of`` compares the
    rows with one another. Raises CorruptionError, naming the field.
    """
    clients = content["clients"]
    if not isinstance(clients, dict) or clients.keys() != {"count", "names"}:
        raise corrupt(origin, "clients should have exactly the keys count and names")
    count = clients["count"]
    names = clients["names"]
    if type(count) is not int:
        raise corrupt(origin, "the count of clients should be an integer")
    is_named = isinstance(names, list) and len(names) == count and all(map(_is_text, names))
    if names is not None and not is_named:
        raise corrupt(origin, f"names should be {count} names of 1 to 255 characters")
    of_validation = arrays.keys() & _VALIDATION_ARRAYS
    is_complete = of_validation in _VALIDATION_FORMS[content["schema"]]
    if not is_complete or arrays.keys() - of_validation not in _FORMS:
        found = ", ".join(sorted(arrays))[:80]
        raise corrupt(origin, f"its arrays are {found or 'none'}")
    client_names: Sequence[str] = NumberedNames(count)
    if names is not None:
        client_names = NumberedNames.recognise(names)
    train = _lists(arrays, "train", count, origin)
    test = _rows(arrays, "test", origin)
    validation = None
    if "validation_sizes" in arrays:
        validation = Validation.of_clients(_lists(arrays, "validation", count, origin))
    elif "validation" in arrays:
        validation = Validation(_rows(arrays, "validation", origin), None)
    if "own" in arrays:
        own = _lists(arrays, "own", count, origin)
        shares = arrays["shares"].astype(bool)
        if len(shares) != count or own.sizes[shares].any():
            raise corrupt(
                origin,
                f"shares should have {count} numbers, with 0 for each client that has rows of its own",
            )
        table = ClientTable(client_names, train, test, shares, own, validation)
    else:
        rule = None
        if "order" in arrays:
            rule = _matched(arrays, count, origin)
        table = ClientTable.dealt(client_names, train, test, rule, validation)
    return {**words_of(content), "clients": table, "test": test}


def _matched(arrays: Arrays, count: int, origin: str) -> MatchedLists:
    """The rule of test rows. Raises CorruptionError for one that does not give every client a set of rows."""
    order = _rows(arrays, "order", origin)
    classes = _lists(arrays, "classes", count, origin)
    starts = _rows(arrays, "starts", origin)
    taken = _rows(arrays, "taken", origin)
    sizes = np.diff(starts)
    spans_order = len(starts) and starts[0] == 0 and starts[-1] == len(order)
    if not spans_order or (sizes < 0).any():
        raise corrupt(origin, f"starts should ascend from 0 to {len(order)}")
    falls = np.diff(classes.rows) <= 0
    # Between the lists of two clients the numbers may fall.
    borders = classes.ends[1:-1]
    borders = borders[(borders > 0) & (borders < len(classes.rows))]
    falls[borders - 1] = False
    if falls.any() or (classes.rows >= len(sizes)).any():
        raise corrupt(origin, f"classes should ascend for each client and be below {len(sizes)}")
    if len(taken) != len(classes.rows) or (taken > sizes[classes.rows]).any():
        raise corrupt(
            origin,
            "taken should hold one number for each class of each client, at most the number of rows of this class",
        )
    if len(sorted_once(order)) < len(order):
        raise corrupt(origin, "order should hold each row once")
    return MatchedLists(order, starts, classes, taken)


def _rows(arrays: Arrays, name: str, origin: str) -> np.ndarray:
    """int64 copy of an array of rows."""
    rows = arrays[name]
    largest = int(rows.max(initial=0))
    if largest >= LARGEST_ROW:
        raise _bad_row(origin, name, largest)
    return rows.astype(np.int64)


def _lists(arrays: Arrays, name: str, count: int, origin: str) -> RowLists:
    """The rows of an array in lists of the sizes in the array ``NAME_sizes``."""
    rows = _rows(arrays, name, origin)
    sizes = arrays[f"{name}_sizes"]
    # Each size is limited before the sum is taken, so that the sum cannot overflow.
    is_limited = len(sizes) == count and not (sizes > len(rows)).any()
    if not is_limited or int(sizes.sum(dtype=np.int64)) != len(rows):
        raise corrupt(origin, f"{name}_sizes should be {count} numbers with the sum {len(rows)}")
    return RowLists.of_sizes(rows, sizes.astype(np.int64))


# The canonical JSON of a partition, in parts of bounded size. The digest is the sha256 of this JSON.


PART = 1 << 14
"""Maximum number of clients, or of rows of one list, that are written at once."""
ROWS = 1 << 20
"""Maximum number of rows of several clients that are written at once."""


def canonical_parts(words: Mapping[str, Any], table: ClientTable) -> Iterator[bytes]:
    """Canonical JSON of an object with ``words``, ``clients``, ``test``, and ``validation`` if all clients share it."""
    held = table.validation
    names = [*words, "clients", "test"]
    if held is not None and held.own is None:
        names.append("validation")
    before = "{"
    for name in sorted(names):
        yield f'{before}"{name}":'.encode()
        before = ","
        if name == "clients":
            yield from _clients_json(table)
        elif name == "test":
            yield from _rows_json(table.common)
        elif name == "validation" and held is not None:
            yield from _rows_json(held.rows)
        else:
            yield canonical_json(words[name])
    yield b"}"


def _rows_json(rows: np.ndarray) -> Iterator[bytes]:
    """Canonical JSON of one list of rows, in parts."""
    before = b"["
    for start in range(0, len(rows), PART):
        text, _ = in_decimal(rows[start : start + PART])
        yield before + text.removesuffix(",").encode()
        before = b","
    if not len(rows):
        yield before
    yield b"]"


def _blocks(table: ClientTable) -> Iterator[tuple[int, int]]:
    """Begin and end of blocks with at most ``PART`` clients and ``ROWS`` rows, or with one client."""
    held = table.validation
    sizes = table.train_sizes + table.tests.sizes
    if held is not None and held.own is not None:
        sizes = sizes + held.own.sizes
    return blocks_within(sizes, ROWS, PART)


def _clients_json(table: ClientTable) -> Iterator[bytes]:
    """Canonical JSON of the list of clients.

    Each has a name, test rows (null for the global ones), training rows, and validation rows if they belong to clients.
    """
    plain = isinstance(table.names, NumberedNames)  # such names need no escape
    before = b"["
    for start, stop in _blocks(table):
        train = table.train.words(start, stop)
        test = table.tests.words(start, stop)
        shares = table.shares[start:stop].tolist()
        ends = [""] * len(train)
        if table.validation is not None and table.validation.own is not None:
            ends = [f',"validation":[{rows}]' for rows in table.validation.own.words(start, stop)]
        objects = []
        for name, rows, shared, own, end in zip(
            table.names[start:stop], train, shares, test, ends, strict=True
        ):
            if plain:
                quoted = f'"{name}"'
            else:
                quoted = canonical_json(name).decode()
            if shared:
                tested = "null"
            else:
                tested = f"[{own}]"
            objects.append(f'{{"name":{quoted},"test":{tested},"train":[{rows}]{end}}}')
        yield before + ",".join(objects).encode()
        before = b","
    yield b"]"


# Faults of row lists, in words.


def not_rows(clients: Sequence[Client], test: np.ndarray) -> str | None:
    """In words, the first array that is not a list of rows; None if all are lists of rows."""
    if not len(clients):
        return "it has no clients"
    lists = [("the global test rows", test)]
    if not isinstance(clients, ClientTable):  # a table has int64 lists only
        for c in clients:
            lists.append((f"training rows of {c.name!r}", c.train))
            lists.append((f"test rows of {c.name!r}", c.test))
    for what, rows in lists:
        if rows.dtype != np.int64 or rows.ndim != 1:
            return f"{what} are an array of {rows.dtype} with {rows.ndim} axes, expected int64 and one axis"
    return None


def problem_of(table: ClientTable) -> str | None:
    """The first reason why these row lists are no partition, in words; None if they are one."""
    names = table.names
    if not isinstance(names, NumberedNames):
        distinct = len(set(names))
        if distinct < len(names):
            return f"{len(names)} clients have only {distinct} different names"
    sizes = np.stack([table.train_sizes, table.test_sizes], 1)
    empty = np.flatnonzero((sizes == 0).any(1))
    if len(empty):
        train, tested = sizes[empty[0]].tolist()
        name = names[int(empty[0])]
        return f"client {name!r} has {train} training and {tested} test rows"
    for what, lists in (("training", table.train), ("test", table.tests)):
        if isinstance(lists, RowLists):
            client = _out_of_order(lists)
            if client is not None:
                return f"{what} rows of {names[client]!r} are not ascending and non-negative"
    if _out_of_order(RowLists.of([table.common])) is not None:
        return "the global test rows are not ascending and non-negative"
    tested = table.tested
    both = tested[is_among(tested, table.train.rows)]
    if len(both):
        return f"row {both[0]} is a training row and also a test row"
    if table.validation is None:
        return None
    return _problem_of_validation(table, table.validation)


def _problem_of_validation(table: ClientTable, held: Validation) -> str | None:
    """``problem_of`` for validation rows."""
    rows = held.rows
    own = held.own
    if not len(rows):
        return "its lists of validation rows are all empty"
    if own is not None:
        if len(own) != len(table):
            return "clients and lists of validation rows differ in number"
        client = _out_of_order(own)
        if client is not None:
            return f"validation rows of {table.names[client]!r} are not ascending and non-negative"
    if _out_of_order(RowLists.of([rows])) is not None:
        return "the validation rows are not ascending and non-negative"
    for what, others in (("trained", table.train.rows), ("tested", table.tested)):
        both = rows[is_among(rows, others)]
        if len(both):
            return f"row {both[0]} is {what} on, but it is also a validation row"
    return None


def _out_of_order(lists: RowLists) -> int | None:
    """The number of the first list that is not ascending and non-negative; None if all are."""
    wrong = np.diff(lists.rows, prepend=-1) <= 0
    # The first row of a list has no row before it to compare with.
    starts = lists.ends[:-1][lists.sizes > 0]
    wrong[starts] = lists.rows[starts] < 0
    if wrong.any():
        return int(np.searchsorted(lists.ends, wrong.argmax(), "right")) - 1
    return None


def beyond(table: ClientTable, rows: int) -> str | None:
    """The first list with a row number of at least ``rows``, and that number, in words; None without one."""
    shared = {"test": table.common}
    if table.validation is not None:
        shared["validation"] = table.validation.rows
    for name, held in shared.items():
        last = held[-1:].tolist()
        if last and last[0] >= rows:
            return f"{name} contains row {last[0]}"
    for lists in (table.train, table.tests):
        if isinstance(lists, MatchedLists):
            row = lists.order.max(initial=-1)
            if row >= rows:
                return f"the test rows of the clients contain row {row}"
            continue
        far = np.flatnonzero(lists.rows >= rows)
        if len(far):
            place = int(np.searchsorted(lists.ends, far[0], "right")) - 1
            row = lists.rows[far[0]]
            return f"client {table.names[place]!r} has row {row}"
    return None
