"""Many lists in one array: each is what a list of its own would be, and the canonical JSON in parts is that of one."""

import hashlib
import json

import numpy as np
import pytest
from draws import examples
from federation import difference, federation, go, rows_tested
from hypothesis import given
from hypothesis import strategies as st
from refusal import refused

from fedcache.federate.partition import client_table, json_file
from fedcache.federate.partition.client_table import (
    Client,
    ClientTable,
    MatchedLists,
    NumberedNames,
    RowLists,
    all_train_rows,
    is_among,
    names_of,
    sorted_once,
    train_sizes,
)
from fedcache.federate.partition.partition import Partition

ROWS = st.integers(0, 60) | st.sampled_from([99, 100, 999, 10**15, 2**48 - 1])
LISTS = st.lists(st.lists(ROWS, max_size=6), max_size=7)


def arrays(lists):
    return [np.array(rows, np.int64) for rows in lists]


@given(LISTS, st.randoms(), st.sampled_from([1, 2, 7, client_table.BLOCK]))
@examples(30, 300)
def test_lists_are_what_lists_of_their_own_would_be(lists, draw, block):
    held = RowLists.of(arrays(lists))
    assert [rows.tolist() for rows in held] == [held[i].tolist() for i in range(len(held))] == lists
    assert held.sizes.tolist() == [len(rows) for rows in lists]
    assert held.owner.tolist() == [i for i, rows in enumerate(lists) for _ in rows]
    assert [rows.tolist() for rows in held.ascending()] == [sorted(rows) for rows in lists]
    order = draw.sample(range(len(lists)), len(lists))
    assert [rows.tolist() for rows in held.take(np.array(order, np.int64))] == [
        lists[i] for i in order
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_table, "BLOCK", block)
        assert held.words(0, len(held)) == [",".join(map(str, rows)) for rows in lists]
    assert [rows.tolist() for rows in held[1:3]] == lists[1:3]
    assert [rows.tolist() for rows in held.first(2)] == lists[:2]
    assert len(held.first(None)) == len(lists)
    with pytest.raises(IndexError):
        held[len(lists)]
    if len(lists) % 2 == 0:
        assert [rows.tolist() for rows in held.joined(2)] == [
            a + b for a, b in zip(*[iter(lists)] * 2, strict=True)
        ]


def test_rows_too_large_for_one_key_are_sorted_all_the_same():
    held = RowLists.of(arrays([[2**48 - 1, 5], [2**48 - 2, 0]] * 20_000))
    assert int(held[0].max()) * len(held) > 2**62
    assert held.ascending()[-1].tolist() == [0, 2**48 - 2]
    assert held.ascending()[0].tolist() == [5, 2**48 - 1]


NUMBERS = st.integers(-9, 9) | st.integers(-9, 9).map(lambda n: n * 10**6)


@given(st.lists(NUMBERS, max_size=20), st.lists(NUMBERS, max_size=20))
@examples(60, 600)
def test_sorting_and_looking_up_are_those_of_sets(values, others):
    assert sorted_once(np.array(values, np.int64)).tolist() == sorted(set(values))
    assert is_among(np.array(values, np.int64), np.array(others, np.int64)).tolist() == [
        v in others for v in values
    ]


@pytest.mark.parametrize("count", [1, 10, 11, 1000])
def test_numbered_names_are_made_when_they_are_asked_for(count):
    names = [f"client-{i:0{len(str(count - 1))}d}" for i in range(count)]
    made = NumberedNames(count)
    assert list(made) == made[:] == names
    assert made[-1] == names[-1]
    assert isinstance(NumberedNames.recognise(names), NumberedNames)
    assert NumberedNames.recognise([*names[:-1], "north"]) == (*names[:-1], "north")
    with pytest.raises(IndexError):
        made[count]


COMMON = np.array([50, 51, 52])
CLIENTS = (
    Client("a", np.array([0, 3]), COMMON),
    Client("b", np.array([1]), COMMON.copy()),
    Client("c", np.array([2, 4, 5]), np.array([50, 60])),
)


def test_a_table_is_its_clients_and_holds_common_test_rows_once():
    table = ClientTable.of(CLIENTS, COMMON)
    for made, given_ in zip(table, CLIENTS, strict=True):
        assert made.name == given_.name
        assert made.train.tolist() == given_.train.tolist()
        assert made.test.tolist() == given_.test.tolist()
    assert table.shares.tolist() == [True, True, False]
    assert table[0].test is table[1].test is COMMON
    assert table.tested.tolist() == [50, 51, 52, 60]
    assert table.test_sizes.tolist() == [3, 3, 2]
    assert [c.name for c in table[1:]] == ["b", "c"]
    assert ClientTable.of(table, COMMON) is table
    for clients in (CLIENTS, table):
        assert train_sizes(clients).tolist() == [2, 1, 3]
        assert list(names_of(clients)) == ["a", "b", "c"]
        assert all_train_rows(clients).tolist() == [0, 3, 1, 2, 4, 5]


@pytest.mark.parametrize("part", [1, 2, 3, 1 << 14])
def test_the_digest_in_parts_is_that_of_the_whole(part, monkeypatch):
    monkeypatch.setattr(json_file, "PART", part)
    clients = (*CLIENTS, Client('ä "quoted"\n', np.array([7]), COMMON))
    made = Partition(
        "mine", {"b": (1, 2), "a": None}, 3, clients, COMMON, "d" * 64, 9, 2, ("a note",)
    )
    payload = made.to_payload()
    claimed = payload.pop("digest")
    whole = json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert claimed == hashlib.sha256(whole.encode()).hexdigest()


def client(name, train, test=None):
    return Client(name, np.array(train, np.int64), COMMON if test is None else np.array(test))


@pytest.mark.parametrize(
    ("clients", "why"),
    [
        ([client("z", [6, 6])], "training rows of 'z'"),
        ([client("z", [6], [9, 8])], "test rows of 'z'"),
        ([client("z", [])], "client 'z' has 0 training"),
        ([client("b", [6])], "2 clients have only 1 different"),
        ([client("z", [51])], "row 51"),
        ([client("z", [7], [1, 2])], "row 1"),
        (None, "no clients"),
    ],
)
def test_what_is_no_partition_is_refused_by_client(clients, why):
    every = () if clients is None else (CLIENTS[1], *clients)
    refused(
        lambda: Partition("mine", {}, 0, every, COMMON, "d" * 64, 9, 0), "Not a partition: ", why
    )


def same_runs(data, clients, table):
    """Runs on clients, each with lists of its own, are those on the table of them."""
    for method in ("fed3r", "fedavg", "fedrep", "solo"):
        one = go(method, {}, data, clients)
        other = go(method, {}, data, table)
        assert difference(one, other) == 0.0
        assert one.evaluation.rows.tolist() == other.evaluation.rows.tolist()
        per_client = one.evaluation.client_accuracy, other.evaluation.client_accuracy
        assert np.array_equal(*per_client, equal_nan=True)
        assert one.evaluation.accuracy == other.evaluation.accuracy
        assert np.array_equal(one.classes_owned, other.classes_owned)
        assert list(one.clients) == list(other.clients)
        assert one.warnings == other.warnings


@pytest.mark.parametrize("protocol", ["balanced", "matched", "mixed"])
def test_a_run_on_a_table_is_the_run_on_its_clients(protocol):
    """Also where no client is tested on the common rows, or some are: those that nobody is tested on are not scored."""
    data, clients = federation()
    common = np.unique(rows_tested(clients))
    on_common = {"balanced": clients, "matched": [], "mixed": clients[1::2]}[protocol]
    names = {c.name for c in on_common}
    own = [Client(c.name, c.train, common if c.name in names else c.test[:3]) for c in clients]
    table = ClientTable.of(own, common)
    assert table.shares.sum() == len(on_common)
    same_runs(data, own, table)
    scored = go("fed3r", {}, data, table).evaluation.rows.tolist()
    assert scored == sorted({row for c in own for row in c.test.tolist()})


def test_a_run_on_matched_tests_by_rule_is_the_run_on_their_lists():
    data, clients = federation()
    common = np.unique(rows_tested(clients))
    y = data.y.numpy()
    train = RowLists.of([c.train for c in clients])
    lists = MatchedLists.of(common, y, np.random.default_rng(0), train)
    table = ClientTable.dealt([c.name for c in clients], train, common, lists)
    own = [Client(c.name, c.train, c.test) for c in table]
    assert len({len(c.test) for c in own}) > 1
    same_runs(data, own, table)
