"""The canonical JSON of a partition, of which its digest is taken, in parts of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedcache.federate.partition.client_table import ClientTable
from fedcache.federate.partition.row_lists import NumberedNames, in_decimal
from fedcache.store.files import canonical_json

PART, ROWS = 1 << 14, 1 << 20
"""Clients (or rows of one list), and rows of all of them, that are written at once."""


def canonical_parts(words: Mapping[str, Any], table: ClientTable) -> Iterator[bytes]:
    """The JSON of an object of ``words``, ``clients`` and ``test``, with one spelling; of ``validation`` where all
    clients have the same.
    """
    held = table.validation
    shared = ["validation"] if held is not None and held.own is None else []
    for place, name in enumerate(sorted([*words, "clients", "test", *shared])):
        yield f'{"," if place else "{"}"{name}":'.encode()
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
    own = 0 if held is None or held.own is None else held.own.sizes
    rows = np.cumsum(table.train_sizes + table.tests.sizes + own)
    start = 0
    while start < len(table):
        fits = int(np.searchsorted(rows, ROWS + (rows[start - 1] if start else 0), "right"))
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
        said = []
        train, test = (lists.words(start, stop) for lists in (table.train, table.tests))
        shares = table.shares[start:stop].tolist()
        ends = ["}"] * len(train)
        if table.validation is not None and table.validation.own is not None:
            ends = [f',"validation":[{rows}]}}' for rows in table.validation.own.words(start, stop)]
        for name, rows, shared, own, end in zip(
            table.names[start:stop], train, shares, test, ends, strict=True
        ):
            quoted = f'"{name}"' if plain else canonical_json(name).decode()
            said.append(
                f'{{"name":{quoted},"test":{"null" if shared else f"[{own}]"},"train":[{rows}]{end}'
            )
        yield (b"," if start else b"") + ",".join(said).encode()
    yield b"]"
