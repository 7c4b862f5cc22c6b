"""Which column ``ingest`` suggests as that of the clients."""

import numpy as np
from arrays import normals

import fedcache as fc
from fedcache.extract.planning.ingest import column_of_clients
from fedcache.store.store import put_groups
from fedcache.tables.groups import Group

ROWS = 80
NUMBERS = [str(i % 9) for i in range(ROWS)]
WORDS = [("north", "south")[i % 2] for i in range(ROWS)]
SITES = [f"s{i % 5}" for i in range(ROWS)]
ALONE = [f"row {i}" for i in range(ROWS)]


SUGGESTED = [
    ({"age": NUMBERS, "hospital_id": NUMBERS}, "hospital_id"),
    ({"age": NUMBERS, "region": WORDS}, "region"),
    ({"region": WORDS, "Site": SITES}, "Site"),
    ({"site": ALONE, "age": NUMBERS}, "age"),
    ({"site": ALONE}, None),
    ({}, None),
]


def test_holders_come_before_words_and_words_before_numbers(tmp_path):
    x = normals(0, ROWS, 4)
    for number, (columns, suggested) in enumerate(SUGGESTED):
        store = fc.Store.from_arrays(
            {"mine": x}, labels=np.arange(ROWS) % 2, path=tmp_path / f"{number}.zarr"
        )
        put_groups(store, {name: Group.of(values) for name, values in columns.items()})
        assert column_of_clients(store) == suggested
