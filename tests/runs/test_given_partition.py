"""Partitions that a user brings: a dict, the client of each row, a function, a CSV."""

import json

import numpy as np
import pytest
from arrays import normals
from command import data_of
from refusal import refused
from text_tables import rows_of

import fedcache as fc
from fedcache.errors import FedcacheError, UsageError
from fedcache.runs.partitions import load_partition

ROWS = 40


@pytest.fixture
def store(tmp_path):
    names = [f"{i:02d}.png" for i in range(ROWS)]
    split = ["test" if i % 5 == 4 else "train" for i in range(ROWS)]
    x = normals(0, ROWS, 4)
    return fc.Store.from_arrays(
        {"mine": x}, labels=np.arange(ROWS) % 2, names=names, splits=split, path=tmp_path / "s.zarr"
    )


def held(made):
    return {c.name: (c.train.tolist(), c.test.tolist()) for c in made.clients}


def test_a_dict_gives_rows_and_clients_without_test_rows_share_the_test_split(store):
    mask = np.isin(np.arange(ROWS), (20, 21))
    made = fc.partition(store, {"north": [0, 3, 1], "west": mask}, name="mine")
    common = list(range(4, ROWS, 5))
    assert held(made) == {"north": ([0, 1, 3], common), "west": ([20, 21], common)}
    assert "mine" in fc.Store.open(store.path).partitions
    assert made.dropped == ROWS - 5 - len(common)


def test_a_dict_may_give_every_client_its_own_test_rows(store):
    made = fc.partition(store, {"north": ([0, 4, 9], [2]), "south": {"train": [3], "test": [6, 5]}})
    assert held(made) == {"north": ([0, 4, 9], [2]), "south": ([3], [5, 6])}
    assert made.test.tolist() == [2, 5, 6]


def test_rows_to_choose_by_may_be_given_or_taken(store):
    made = fc.partition(store, {"north": {"train": [0, 1], "validation": [4, 2]}, "south": [3, 5]})
    assert [c.validation.tolist() for c in made.clients] == [[2, 4], []]
    assert made.test.tolist() == list(range(9, ROWS, 5)), (
        "row 4 is of the test split, and is to choose by"
    )
    whole = {"north": list(range(4)), "south": list(range(5, 9))}
    taken = fc.partition(store, whole, validation=0.5)
    assert [len(c.validation) for c in taken.clients] == [2, 2]
    assert taken.without_validation().digest == fc.partition(store, whole).digest


def test_clients_without_a_name_get_one_that_is_free(store):
    fc.partition(store, ["a", "b"] * 20)
    other = fc.partition(store, ["a", "b", "c", "d"] * 10)
    free = f"natural-by-client-s0-{other.digest[:8]}"
    assert sorted(fc.Store.open(store.path).partitions) == ["natural-by-client-s0", free]
    assert load_partition(store, free).digest == other.digest


def rows_of_first_client(made):
    return sorted([*made.clients[0].train, *made.clients[0].test])


def test_clients_are_in_the_order_of_names_or_named_by_an_index(tmp_path):
    pd = pytest.importorskip("pandas")
    names = [f"n{i:02d}" for i in reversed(range(20))]  # as given; the store sorts them
    x = np.arange(20, dtype="f4")[:, None]
    store = fc.Store.from_arrays(
        {"x": x}, labels=[0, 1] * 10, names=names, path=tmp_path / "n.zarr"
    )
    clients = ["late"] * 10 + ["early"] * 10
    by_position = fc.partition(store, clients)
    assert rows_of_first_client(by_position) == list(range(10, 20))
    by_name = fc.partition(store, pd.Series(clients, index=names))
    assert rows_of_first_client(by_name) == list(range(10))
    assert fc.partition(store, pd.Series(clients)).digest == by_position.digest
    twice = "'n18', which occurs more than once"
    for index, said in ((["n99", *names[1:]], "'n99'"), ([names[1], *names[1:]], twice)):
        with pytest.raises(FedcacheError, match=said):
            fc.partition(store, pd.Series(clients, index=index))


def test_an_array_of_clients_is_a_column_of_the_data(store):
    ids = ["", "a", *["b", "a"] * 19]
    made = fc.partition(store, ids)
    assert [c.name for c in made.clients] == ["a", "b"]
    assert all(ids[row] == c.name for c in made.clients for row in (*c.train, *c.test))
    assert 0 not in made.table.train.rows
    by_function = fc.partition(store, lambda s: [ids[int(name[:2])] for name in s.samples.name])
    assert by_function.digest == made.digest


def test_clients_that_are_given_may_be_divided_again(store):
    made = fc.partition(store, ["s", "n"] * 20, inside="iid", clients=2)
    names = " ".join(client.name for client in made.clients)
    assert names == "n/client-0 n/client-1 s/client-0 s/client-1"


def test_a_csv_names_rows_and_clients_in_any_order(store, tmp_path):
    lines = ["name,client", *(f"{i:02d}.png,{'ab'[i // 20]}" for i in reversed(range(ROWS)))]
    (tmp_path / "who.csv").write_text("\n".join(lines))
    made = data_of(f"partition --from {tmp_path}/who.csv --store {store.path}")
    assert [(c["name"], c["train"], c["test"]) for c in made["clients"]] == [
        ("a", 16, 4),
        ("b", 16, 4),
    ]


def test_a_csv_may_say_the_split(store, tmp_path):
    lines = ["00.png,a,train", "01.png,a,Test", "04.png,b,train", "09.png,b,test"]
    (tmp_path / "who.csv").write_text("name,client,split\n" + "\n".join(lines))
    made = fc.partition(store, tmp_path / "who.csv")
    assert held(made) == {"a": ([0], [1]), "b": ([4], [9])}
    assert made.scheme == "given"
    lines += ["11.png,a,val", "12.png,b,val", "13.png,b,val"]
    (tmp_path / "who.csv").write_text("name,client,split\n" + "\n".join(lines))
    chosen_by = fc.partition(store, tmp_path / "who.csv", name="more")
    assert held(chosen_by) == held(made)
    assert [c.validation.tolist() for c in chosen_by.clients] == [[11], [12, 13]]


@pytest.mark.parametrize(
    ("clients", "validation", "said"),
    [
        *(
            (json.loads(clients), json.loads(validation), said)
            for clients, validation, said in rows_of(
                """
                {"a": [0, 1], "b": [1, 2]}                  | null    | Row 1 is assigned to 'a' and 'b'
                {"a": [0.5]}                                | null    | float64
                {"a": {"train": [0, 1], "validation": [1]}} | null    | row 1
                {"a": {"train": [0], "validation": [40]}}   | null    | row 40
                {"a": {"train": [0], "validation": [1]}}    | 0.2     | split
                {"a": [0, 1]}                               | "split" | no validation row
                """
            )
        ),
        ({"a": np.zeros((1, 2), int)}, None, "(1, 2)"),
        ({"a": ([0], [0])}, None, "a training row and also a test row"),
        (lambda _store: 3, None, "3"),
        ([0.5] * ROWS, None, "Numbers with decimals"),
    ],
)
def test_what_is_no_partition_is_refused(store, clients, validation, said):
    refused(lambda: fc.partition(store, clients, validation=validation), said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"who\.csv"),
        ("name,client\n", r"\S+,north$"),
        ("name,client\n99.png,a\n", r"'99\.png'"),
        ("name,client\n00.png,a\n00.png,b\n", r"repeats the row '00\.png'"),
        ("name,client,split\n00.png,a,tset\n", "'test'"),
        ("name,client,split\n00.png,a,train\n", "0 test rows"),
    ],
)
def test_a_wrong_csv_is_refused_with_its_line(store, tmp_path, text, said):
    if text is not None:
        (tmp_path / "who.csv").write_text(text)
    with pytest.raises(UsageError, match=said):
        fc.partition(store, tmp_path / "who.csv")
