"""The two forms of a partition file, JSON and arrays, with one decoder for both; and the checks of its rows.

The JSON form, which anybody may have written:

``{"schema", "scheme", "args", "seed", "dataset", "clients": [{"name", "train", "test"}], "test", "pool", "dropped",
"notes", "digest"}``; row lists ascend; a client whose ``test`` is null is tested on the global ``test``, which keeps
the file of a hundred such clients small. A partition with rows to choose by has another schema, and ``validation``
beside ``test``: of every client, or of the whole where all clients have the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedcache.errors import CorruptionError, FedcacheError
from fedcache.federate.partition.client_table import ClientRows, ClientTable, Validation
from fedcache.federate.partition.matched_lists import MatchedLists, TestLists
from fedcache.federate.partition.row_lists import (
    NumberedNames,
    RowLists,
    in_decimal,
    is_among,
    sorted_once,
)
from fedcache.federate.partition.scheme import LARGEST_SEED
from fedcache.parsing import parse_json
from fedcache.store.array_file import unpack
from fedcache.store.files import canonical_json

SCHEMA = "fedcache.partition/1"
WITH_VALIDATION = "fedcache.partition/2"
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


Content = dict[str, Any]
"""The head of a partition file: all fields that are no rows."""

Arrays = Mapping[str, np.ndarray]


def read_payload(payload: object, origin: str) -> tuple[Content, Arrays]:
    """Head and arrays of a JSON value, as a file of arrays would hold them. Raises CorruptionError with the field."""
    lists: Fields = {"clients": _LIST, "test": _LIST}
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
            wanted = ", ".join(sorted(keys))
            raise corrupt(origin, f"{where} should have the fields {wanted}")
        train.append(_row_list(client["train"], f"{where} train", origin))
        tested = test
        if client["test"] is not None:
            tested = _row_list(client["test"], f"{where} test", origin)
        shares.append(np.array_equal(tested, test))
        if shares[-1]:
            tested = test[:0]  # rows that clients share are held once
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
        lists_of = RowLists.of(rows)
        arrays[name] = lists_of.rows
        arrays[f"{name}_sizes"] = lists_of.sizes
    return content, arrays


def _row_list(value: object, where: str, origin: str) -> np.ndarray:
    if not isinstance(value, list):
        raise corrupt(origin, f"{where} should be a list of rows")
    for row in value:  # type() and not isinstance(): True is an int to Python
        if type(row) is not int or not 0 <= row < LARGEST_ROW:
            raise _bad_row(origin, where, str(row)[:40])
    return np.array(value, np.int64)


def _bad_row(origin: str, where: str, row: object) -> FedcacheError:
    return corrupt(origin, f"{where} holds {row!r}, expected rows from 0 to {LARGEST_ROW - 1}")


def check_fields(payload: object, fields: Fields, origin: str) -> dict[str, Any]:
    """``payload``, when it is an object of exactly these fields. Raises CorruptionError, naming the field."""
    if not isinstance(payload, dict):
        raise corrupt(origin, f"it holds {type(payload).__name__}, expected an object")
    if (schema := payload.get("schema")) not in SCHEMAS:
        found = str(schema)[:60]
        raise corrupt(origin, f"schema should be {SCHEMA!r}, found {found!r}")
    missing = sorted(fields.keys() - payload.keys())[:3]
    extra = sorted(payload.keys() - fields.keys())[:3]
    if missing or extra:
        raise corrupt(
            origin, f"its fields should be those of {schema}: missing {missing}, unknown {extra}"
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


def _is_text(value: object, longest: int = 255) -> bool:
    # JSON can spell half a surrogate pair, which no file can be written in.
    return (
        isinstance(value, str)
        and 0 < len(value) <= longest
        and not any("\ud800" <= c <= "\udfff" for c in value)
    )


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
_LIST = (lambda value: isinstance(value, list), "a list")


# A partition as arrays in one sealed file (``store/array_file``), and what such a file must be to
# be one.
#
# The head holds the words of the partition and its digest, which is that of its JSON: the form is
# no part of it. Clients are ``{"count", "names"}``, with null for numbered names. Arrays are
# ``train`` (rows of all clients, one after the other) with ``train_sizes`` [M] and ``test`` (the
# global test rows). Where clients have test rows of their own, ``own`` with ``own_sizes`` [M] and
# ``shares`` [M], 1 for a client that is tested on the global ones; or the rule that chooses them:
# ``order``, ``starts``, ``classes`` with ``classes_sizes`` [M], and ``taken`` (``MatchedLists``).
# Where there are rows to choose by, ``validation``, with ``validation_sizes`` [M] where clients
# have their own.


_ALL_SHARE = {"train", "train_sizes", "test"}
_FORMS = (
    _ALL_SHARE,
    _ALL_SHARE | {"own", "own_sizes", "shares"},
    _ALL_SHARE | {"order", "starts", "classes", "classes_sizes", "taken"},
)
_VALIDATION_ARRAYS = {"validation", "validation_sizes"}


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
        return {
            **arrays,
            "own": tests.rows,
            "own_sizes": tests.sizes,
            "shares": table.shares.view(np.uint8),
        }
    rule = {"order": tests.order, "starts": tests.starts, "taken": tests.taken}
    return {**arrays, **rule, "classes": tests.classes.rows, "classes_sizes": tests.classes.sizes}


def clients_of(table: ClientTable) -> dict[str, Any]:
    """The entry ``clients`` of the head."""
    if isinstance(table.names, NumberedNames):
        return {"count": len(table), "names": None}
    return {"count": len(table), "names": list(table.names)}


def read_arrays(raw: memoryview, origin: str) -> tuple[Content, Arrays]:
    """Head and arrays of a file of arrays. Raises CorruptionError for anything that is no such file."""
    try:
        content, arrays = unpack(raw)
    except ValueError as error:
        raise corrupt(origin, f"it {error}") from error
    return check_words(content, origin), arrays


def decode(content: Content, arrays: Arrays, origin: str) -> dict[str, Any]:
    """The fields of a partition from head and arrays of either form of the file.

    ``clients`` is a table that holds its own copy of the rows, ``digest`` is as claimed. The rows are compared with one
    another elsewhere. Raises CorruptionError, naming the field.
    """
    clients = content["clients"]
    if not isinstance(clients, dict) or clients.keys() != {"count", "names"}:
        raise corrupt(origin, "clients should be count and names")
    count = clients["count"]
    names = clients["names"]
    if type(count) is not int:
        raise corrupt(origin, "the count of clients should be an integer")
    if names is not None and not (
        isinstance(names, list) and len(names) == count and all(map(_is_text, names))
    ):
        raise corrupt(origin, f"names should be {count} names of 1 to 255 characters")
    if (
        arrays.keys() - _VALIDATION_ARRAYS not in _FORMS
        or ("validation" in arrays) != (content["schema"] == WITH_VALIDATION)
        or ("validation_sizes" in arrays and "validation" not in arrays)
    ):
        found = ", ".join(sorted(arrays))[:80]
        raise corrupt(origin, f"its arrays are {found or 'none'}")
    called: Sequence[str] = NumberedNames(count)
    if names is not None:
        called = NumberedNames.recognise(names)
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
            raise corrupt(origin, f"shares should be {count} numbers, 0 for clients with own rows")
        table = ClientTable(called, train, test, shares, own, validation)
    else:
        rule = None
        if "order" in arrays:
            rule = _matched(arrays, count, origin)
        table = ClientTable.dealt(called, train, test, rule, validation)
    return {**words_of(content), "clients": table, "test": test}


def _matched(arrays: Mapping[str, np.ndarray], count: int, origin: str) -> MatchedLists:
    """The rule of test rows, when it gives every client a set of them."""
    order = _rows(arrays, "order", origin)
    classes = _lists(arrays, "classes", count, origin)
    starts, taken = (_rows(arrays, name, origin) for name in ("starts", "taken"))
    high = np.diff(starts)
    if not (len(starts) and starts[0] == 0 and starts[-1] == len(order) and (high >= 0).all()):
        raise corrupt(origin, f"starts should ascend from 0 to {len(order)}")
    again = np.diff(classes.rows) <= 0
    again[
        classes.ends[1:-1][(classes.ends[1:-1] > 0) & (classes.ends[1:-1] < len(classes.rows))] - 1
    ] = False
    if again.any() or (classes.rows >= len(high)).any():
        raise corrupt(origin, f"classes should ascend for each client and be below {len(high)}")
    if len(taken) != len(classes.rows) or (taken > high[classes.rows]).any():
        raise corrupt(
            origin,
            "taken should be a number of rows for each class of a client, no more than the class has",
        )
    if len(sorted_once(order)) < len(order):
        raise corrupt(origin, "order should hold each row once")
    return MatchedLists(order, starts, classes, taken)


def _rows(arrays: Mapping[str, np.ndarray], name: str, origin: str) -> np.ndarray:
    """int64 copy of an array of rows."""
    rows = arrays[name]
    if len(rows) and int(rows.max()) >= LARGEST_ROW:
        raise _bad_row(origin, name, int(rows.max()))
    return rows.astype(np.int64)


def _lists(arrays: Mapping[str, np.ndarray], name: str, count: int, origin: str) -> RowLists:
    """The rows of an array in lists of the sizes beside it."""
    rows = _rows(arrays, name, origin)
    sizes = arrays[f"{name}_sizes"]
    # Each below the sum before it is taken: what a file can hold is then too little to pass 2**63.
    if (
        len(sizes) != count
        or (sizes > len(rows)).any()
        or int(sizes.sum(dtype=np.int64)) != len(rows)
    ):
        raise corrupt(origin, f"{name}_sizes should be {count} numbers with the sum {len(rows)}")
    return RowLists.of_sizes(rows, sizes.astype(np.int64))


# The canonical JSON of a partition, of which its digest is taken, in parts of bounded size.


PART = 1 << 14
ROWS = 1 << 20
"""Clients (or rows of one list), and rows of all of them, that are written at once."""


def canonical_parts(words: Mapping[str, Any], table: ClientTable) -> Iterator[bytes]:
    """The JSON of an object of ``words``, ``clients`` and ``test``, with one spelling; of ``validation`` where all
    clients have the same.
    """
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
    yield b"["
    for start in range(0, len(rows), PART):
        yield (b"," if start else b"") + in_decimal(rows[start : start + PART])[0][:-1].encode()
    yield b"]"


def _blocks(table: ClientTable) -> Iterator[tuple[int, int]]:
    """Where blocks begin and end that have at most ``PART`` clients and ``ROWS`` rows, or one client."""
    held = table.validation
    sizes = table.train_sizes + table.tests.sizes
    if held is not None and held.own is not None:
        sizes = sizes + held.own.sizes
    rows = np.cumsum(sizes)
    start = 0
    while start < len(table):
        fits = int(np.searchsorted(rows, ROWS + rows[start] - sizes[start], "right"))
        stop = min(start + PART, max(start + 1, fits))
        yield start, stop
        start = stop


def _clients_json(table: ClientTable) -> Iterator[bytes]:
    """Canonical JSON of the list of clients: name, test rows or null for the common ones, training rows of each, and
    validation rows where clients have their own.
    """
    plain = isinstance(table.names, NumberedNames)  # nothing in them needs an escape
    yield b"["
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
        yield (b"," if start else b"") + ",".join(objects).encode()
    yield b"]"


# What makes clients and test rows no partition, in words.


def not_rows(clients: Sequence[ClientRows], test: np.ndarray) -> str | None:
    """What is no list of rows at all, in words; None when all are."""
    if not len(clients):
        return "it has no clients"
    lists = [("the global test rows", test)]
    if not isinstance(clients, ClientTable):  # a table holds int64 alone
        for c in clients:
            lists += [
                (f"training rows of {c.name!r}", c.train),
                (f"test rows of {c.name!r}", c.test),
            ]
    for what, rows in lists:
        if rows.dtype != np.int64 or rows.ndim != 1:
            return f"{what} are {rows.dtype} with {rows.ndim} axes, expected int64 with 1"
    return None


def problem_of(table: ClientTable, test: np.ndarray) -> str | None:
    """What makes these row lists no partition, in words; None when nothing does."""
    names = table.names
    if not isinstance(names, NumberedNames) and len(set(names)) < len(names):
        distinct = len(set(names))
        return f"{len(names)} clients have {distinct} names"
    sizes = np.stack([table.train_sizes, table.test_sizes], 1)
    if len(empty := np.flatnonzero((sizes == 0).any(1))):
        train, tested = sizes[empty[0]].tolist()
        name = names[int(empty[0])]
        return f"client {name!r} has {train} training and {tested} test rows"
    for what, lists in (("training rows of {!r}", table.train), ("test rows of {!r}", table.tests)):
        if isinstance(lists, RowLists) and (client := _out_of_order(lists)) is not None:
            named = what.format(names[client])
            return f"{named} are not ascending and non-negative"
    if _out_of_order(RowLists.of([test])) is not None:
        return "the global test rows are not ascending and non-negative"
    tested = table.tested
    both = tested[is_among(tested, table.train.rows)]
    if len(both):
        return f"row {both[0]} is trained and tested on"
    if table.validation is None:
        return None
    return _problem_of_validation(table, table.validation)


def _problem_of_validation(table: ClientTable, held: Validation) -> str | None:
    """As ``problem_of``, of the rows to choose by."""
    rows = held.rows
    own = held.own
    if not len(rows):
        return "there is no row among its validation rows"
    if own is not None and len(own) != len(table):
        return "clients and lists of validation rows differ in number"
    if own is not None and (client := _out_of_order(own)) is not None:
        return f"validation rows of {table.names[client]!r} are not ascending and non-negative"
    if _out_of_order(RowLists.of([rows])) is not None:
        return "the validation rows are not ascending and non-negative"
    for what, others in (("trained", table.train.rows), ("tested", table.tested)):
        if len(both := rows[is_among(rows, others)]):
            return f"row {both[0]} is {what} on and is a validation row"
    return None


def _held(tests: TestLists) -> np.ndarray:
    """The array that holds the rows of the lists; a rule gives ascending lists of what is in it."""
    if isinstance(tests, RowLists):
        return tests.rows
    return tests.order


def _out_of_order(lists: RowLists) -> int | None:
    """The first list that is not ascending and non-negative, by its number."""
    wrong = np.diff(lists.rows, prepend=-1) <= 0
    starts = lists.ends[:-1][lists.sizes > 0]
    wrong[starts] = lists.rows[starts] < 0  # the difference there is to the list before
    if wrong.any():
        return int(np.searchsorted(lists.ends, wrong.argmax(), "right")) - 1
    return None


def beyond(table: ClientTable, rows: int) -> str | None:
    """The first list that holds a row from ``rows`` on, and that row, in words; None when none does."""
    shared = {"test": table.common}
    if table.validation is not None:
        shared["validation"] = table.validation.rows
    for name, held in shared.items():
        last = held[-1:].tolist()
        if last and last[0] >= rows:
            return f"{name} holds {last[0]}"
    for lists in (table.train, table.tests):
        held = _held(lists)
        far = np.flatnonzero(held >= rows)
        if not len(far):
            continue
        if isinstance(lists, MatchedLists):
            return f"the clients' tests hold {held[far].max()}"
        client = table.names[int(np.searchsorted(lists.ends, far[0], "right")) - 1]
        row = held[far[0]]
        return f"client {client!r} holds {row}"
    return None
