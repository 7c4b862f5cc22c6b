"""Partitions that a user brings: a dict, the client of each row, a function, a CSV."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import fedcache, ok

import fedcache as fc
from fedcache.errors import Exit, FedcacheError, UsageError
from fedcache.federate.partition.partition import Partition
from fedcache.runs.partitions import load_partition

ROWS = 40


@pytest.fixture
def store(tmp_path: Path) -> fc.Store:
    rng = np.random.default_rng(0)
    names = [f"{i:02d}.png" for i in range(ROWS)]
    split = ["test" if i % 5 == 4 else "train" for i in range(ROWS)]
    x = rng.normal(size=(ROWS, 4)).astype("f4")
    return fc.Store.from_arrays(
        {"mine": x}, labels=np.arange(ROWS) % 2, names=names, splits=split, path=tmp_path / "s.zarr"
    )


def held(made: Partition) -> dict[str, tuple[list[int], list[int]]]:
    return {c.name: (c.train.tolist(), c.test.tolist()) for c in made.clients}


def test_a_dict_gives_rows_and_clients_without_test_rows_share_the_test_split(store: fc.Store) -> None:
    made = fc.partition(store, {"north": [0, 3, 1], "south": {"train": [10, 11]}}, name="mine")
    common = list(range(4, ROWS, 5))
    assert held(made) == {"north": ([0, 1, 3], common), "south": ([10, 11], common)}
    assert store.partitions == [] or "mine" in fc.Store.open(store.path).partitions
    assert made.dropped == ROWS - 5 - len(common)


def test_a_dict_may_give_every_client_its_own_test_rows(store: fc.Store) -> None:
    made = fc.partition(store, {"north": ([0, 1], [2]), "south": {"train": [3], "test": [5, 4]}})
    assert held(made) == {"north": ([0, 1], [2]), "south": ([3], [4, 5])}
    assert made.test.tolist() == [2, 4, 5]
    assert fc.Store.open(store.path).partitions == [made.default_name()]


def test_a_name_of_other_rows_is_refused_unless_that_is_said(store: fc.Store) -> None:
    first = fc.partition(store, {"north": [0, 1], "south": [2, 3]}, name="mine")
    assert fc.partition(store, {"north": [0, 1], "south": [2, 3]}, name="mine").digest == first.digest
    with pytest.raises(FedcacheError, match=r"s\.zarr has a partition 'mine' with other rows") as caught:
        fc.partition(store, {"north": [0, 1], "south": [2, 5]}, name="mine")
    assert caught.value.code is Exit.USAGE
    assert load_partition(store, "mine").digest == first.digest
    other = fc.partition(store, {"north": [0, 1], "south": [2, 5]}, name="mine", replace=True)
    assert load_partition(store, "mine").digest == other.digest != first.digest


def test_rows_to_choose_by_may_be_given_or_taken(store: fc.Store) -> None:
    given = {"north": {"train": [0, 1], "validation": [4, 2]}, "south": {"train": [3, 5], "validation": []}}
    made = fc.partition(store, given)
    assert [c.validation.tolist() for c in made.clients if c.validation is not None] == [[2, 4], []]
    assert made.test.tolist() == list(range(9, ROWS, 5)), "row 4 is of the test split, and is to choose by"
    plain = fc.partition(store, {"north": list(range(4)), "south": list(range(5, 9))})
    taken = fc.partition(store, {"north": list(range(4)), "south": list(range(5, 9))}, validation=0.5)
    assert [len(c.validation) for c in taken.clients if c.validation is not None] == [2, 2]
    assert taken.args == {"validation": 0.5}
    assert taken.without_validation().digest == plain.digest
    assert fc.Partition.from_file(memoryview(b"".join(taken.to_file()))).digest == taken.digest
    ids = fc.partition(store, ["a" if i % 2 else "b" for i in range(ROWS)], validation=0.25)
    assert ids.validation is not None
    for wrong, said in (({"a": {"train": [0, 1], "validation": [1]}}, "row 1 is trained on and is a validation row"),
                        ({"a": {"train": [0], "validation": [ROWS]}}, f"is given row {ROWS}")):  # fmt: skip
        with pytest.raises(FedcacheError, match=said):
            fc.partition(store, wrong)
    with pytest.raises(FedcacheError, match="a share or split to take them from too"):
        fc.partition(store, given, validation=0.2)
    with pytest.raises(FedcacheError, match="no row of split validation"):
        fc.partition(store, {"a": [0, 1]}, validation="split")


def test_rows_of_the_test_split_that_are_trained_on_are_counted(store: fc.Store) -> None:
    assert "2 rows of the test split are trained on, as given" in fc.partition(store, {"a": [4, 9, 1], "b": [2]}).notes
    assert "1 row of the test split is trained on, as given" in fc.partition(store, {"a": [4, 1], "b": [2]}).notes
    assert not any("test split" in note for note in fc.partition(store, {"a": [0, 1], "b": [2]}).notes)


def test_clients_without_a_name_get_one_that_is_free(store: fc.Store) -> None:
    first = fc.partition(store, ["a", "b"] * 20)
    other = fc.partition(store, ["a", "b", "c", "d"] * 10)
    assert fc.partition(store, ["a", "b"] * 20).digest == first.digest
    saved = fc.Store.open(store.path).partitions
    assert sorted(saved) == ["natural-by-client-s0", f"natural-by-client-s0-{other.digest[:8]}"]
    assert load_partition(fc.Store.open(store.path), f"natural-by-client-s0-{other.digest[:8]}").digest == other.digest
    with pytest.raises(FedcacheError, match="with other rows"):
        fc.partition(store, ["a", "b", "b", "d"] * 10, name="natural-by-client-s0")


def test_clients_are_in_the_order_of_names_or_named_by_an_index(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    names = [f"n{i:02d}" for i in reversed(range(20))]  # as given; the store sorts them
    x = np.arange(20, dtype="f4")[:, None]
    store = fc.Store.from_arrays({"x": x}, labels=[0, 1] * 10, names=names, path=tmp_path / "n.zarr")
    clients = ["late"] * 10 + ["early"] * 10
    made = fc.partition(store, clients)
    assert "clients are given in the order of the rows by name: the first is 'n00'" in made.notes
    named = fc.partition(store, pd.Series(clients, index=names))
    assert not any("order" in note for note in named.notes)
    rows = {c.name: sorted([*c.train.tolist(), *c.test.tolist()]) for c in named.clients}
    assert rows == {"early": list(range(10)), "late": list(range(10, 20))}
    assert {c.name: sorted([*c.train.tolist(), *c.test.tolist()]) for c in made.clients}["late"] == list(range(10))
    some = fc.partition(store, pd.Series(clients[:8], index=names[:8]), name="some")
    assert sorted([*some.clients[0].train.tolist(), *some.clients[0].test.tolist()]) == list(range(12, 20))
    assert len(some.clients) == 1
    for index, said in ((["n99", *names[1:]], "'n99', which no row"), ([names[1], *names[1:]], "'n18', twice")):
        with pytest.raises(FedcacheError, match=said):
            fc.partition(store, pd.Series(clients, index=index))
    plain = fc.Store.from_arrays({"x": x}, labels=[0, 1] * 10, path=tmp_path / "p.zarr")
    assert not any("order" in note for note in fc.partition(plain, pd.Series(clients)).notes)


def test_masks_are_rows(store: fc.Store) -> None:
    mask = np.arange(ROWS) < 4
    assert held(fc.partition(store, {"a": mask}))["a"][0] == [0, 1, 2, 3]


def test_an_array_of_clients_is_a_column_of_the_data(store: fc.Store) -> None:
    ids = ["a" if i % 2 else "b" for i in range(ROWS)]
    ids[0] = ""
    made = fc.partition(store, ids)
    assert [c.name for c in made.clients] == ["a", "b"]
    assert all(ids[row] == c.name for c in made.clients for row in (*c.train, *c.test))
    assert 0 not in made.table.train.rows
    assert made.default_name() == "natural-by-client-s0"
    by_function = fc.partition(store, lambda s: [ids[int(name[:2])] for name in s.samples.name])
    assert by_function.digest == made.digest
    few = fc.partition(store, ids, max_clients=1, tests="global")
    assert len(few.clients) == 1


def test_a_client_called_minus_one_is_said_to_be_one(store: fc.Store) -> None:
    made = fc.partition(store, np.where(np.arange(ROWS) < 10, -1, 7))
    assert [c.name for c in made.clients] == ["-1", "7"]
    assert "-1 is the client of 10 rows, as any other value; None marks a row that nobody holds" in made.notes
    plain = fc.partition(store, np.where(np.arange(ROWS) < 10, 3, 7), name="plain")
    assert not any("-1" in note for note in plain.notes)


def test_clients_that_are_given_may_be_divided_again(store: fc.Store) -> None:
    ids = ["n" if row % 2 else "s" for row in range(store.rows)]
    made = fc.partition(store, ids, inside="iid", clients=2)
    assert [c.name for c in made.clients] == ["n/client-0", "n/client-1", "s/client-0", "s/client-1"]


def test_a_csv_names_rows_and_clients_in_any_order(store: fc.Store, tmp_path: Path) -> None:
    lines = [f"{i:02d}.png,{'a' if i < 20 else 'b'}" for i in reversed(range(ROWS))]
    (tmp_path / "who.csv").write_text("name,client\n" + "\n".join(lines) + "\n")
    made = ok("partition", "--from", tmp_path / "who.csv", "--store", store.path)
    assert [(c["name"], c["train"], c["test"]) for c in made.data["clients"]] == [("a", 16, 4), ("b", 16, 4)]
    trained = ok("train", "--method", "fed3r", "--partition", made.data["name"], "--store", store.path)
    assert trained.data["partition"]["digest"] == made.data["digest"]


def test_a_csv_may_say_the_split(store: fc.Store, tmp_path: Path) -> None:
    lines = ["00.png,a,train", "01.png,a,Test", "04.png,b,train", "09.png,b,test"]
    (tmp_path / "who.csv").write_text("name,client,split\n" + "\n".join(lines))
    made = fc.partition(store, tmp_path / "who.csv")
    assert held(made) == {"a": ([0], [1]), "b": ([4], [9])}
    assert made.scheme == "given"
    more = [f"{i:02d}.png,{'a' if i < 12 else 'b'},val" for i in (11, 12, 13)]
    (tmp_path / "who.csv").write_text("name,client,split\n" + "\n".join([*lines, *more]))
    chosen_by = fc.partition(store, tmp_path / "who.csv", name="more")
    assert held(chosen_by) == held(made)
    assert [c.validation.tolist() for c in chosen_by.clients if c.validation is not None] == [[11], [12, 13]]


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        ({}, "No client is given"),
        ({"a": [0, 1], "b": [1, 2]}, "Row 1 is given to 'a' and 'b'"),
        ({"a": [0, 0]}, "given a row twice"),
        ({"a": [-1]}, "is given row -1"),
        ({"a": [ROWS]}, f"is given row {ROWS}"),
        ({"a": []}, "Client 'a' is given no rows."),
        ({"a": np.zeros((1, 2), int)}, "are int64 with shape (1, 2)"),
        ({"a": [0.5]}, "are float64"),
        ({"a": ([0], [0])}, "trained and tested on"),
        ({"a": {"rows": [0]}}, 'Expected "train"'),
        (["a"] * 3, "3 clients are given for the 40 rows"),
        ([0.5] * ROWS, "Floats that are not whole"),
    ],
)
def test_what_is_no_partition_is_one_sentence(store: fc.Store, clients: object, said: str) -> None:
    with pytest.raises(FedcacheError) as caught:
        fc.partition(store, clients)
    assert caught.value.code is Exit.USAGE
    assert said in f"{caught.value.message}\n{caught.value.hint}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name,site\n00.png,a\n", "has the columns name, site"),
        ("name,client\n", "no line after its first"),
        ("name,client\n99.png,a\n", "no row of s.zarr is called '99.png'"),
        ("name,client\n00.png,a\n00.png,b\n", "names '00.png' again"),
        ("name,client,split\n00.png,a,tset\n", "Did you mean 'test'"),
        ("name,client,split\n00.png,a,train\n", "1 rows to train and 0 to test on"),
        ("name,client\n00.png\n", "has 1 fields"),
        ("\x00\n", "has the columns"),
    ],
)
def test_a_wrong_csv_is_refused_with_its_line(store: fc.Store, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "who.csv").write_text(text)
    done = fedcache("partition", "--from", tmp_path / "who.csv", "--store", store.path)
    assert done.code == Exit.USAGE
    assert said in done.err


def test_both_ways_at_once_are_refused(store: fc.Store, tmp_path: Path) -> None:
    (tmp_path / "who.csv").write_text("name,client\n00.png,a\n")
    words = ("partition", "--from", tmp_path / "who.csv", "--store", store.path)
    assert "--from and --scheme are both given" in fedcache(*words, "--scheme", "iid").err
    assert "A column (by) and the clients themselves" in fedcache(*words, "--by", "domain").err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"^There is no .*who\.csv\."),
        (
            "name,client\n",
            r"has no line after its first, name,client\.\nAdd a line for each row .* for example \S+,north$",
        ),
        ("name,client,split\n", r"for example \S+,north,train$"),
        ("", r"has the columns \(none\)\.\nIts first line"),
    ],
)
def test_a_list_of_clients_that_is_not_there_or_empty_is_said_to_be_that(
    store: fc.Store, tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "who.csv").write_text(text)
    with pytest.raises(UsageError) as caught:
        fc.partition(store, tmp_path / "who.csv")
    assert re.search(said, str(caught.value).replace(str(tmp_path), ""))


@pytest.mark.parametrize("returned", ["x", None, 3])
def test_a_function_that_returns_no_clients_is_told_what_it_returned(store: fc.Store, returned: Any) -> None:
    with pytest.raises(UsageError, match=rf"The function of the store returned {returned!r}\.\nIt returns the rows"):
        fc.partition(store, lambda _: returned)


def test_what_is_held_out_without_a_column_names_the_column_that_holds_it(store: fc.Store) -> None:
    held = str(store.samples.classes[0])
    with pytest.raises(UsageError, match=rf"Unknown value of domain '{held}'[^\n]*\nWithout by, .*by class$"):
        fc.partition(store, hold_out=(held,))
    with pytest.raises(UsageError, match="by COLUMN names another column"):
        fc.partition(store, hold_out=("nowhere",))
