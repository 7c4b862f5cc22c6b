"""The partition file of arrays: what is written is read back by its digest, and nothing that was changed is."""

import json
import math
import struct
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from partition_rows import even_columns
from refusal import corruption, refused

from fedcache.federate.partition.client_table import Client, MatchedLists, RowLists
from fedcache.federate.partition.partition import Partition, make
from fedcache.store.chunks import MAGIC, pack, unpack
from fedcache.store.files import parse_signed, to_signed

SMALL = even_columns(4, 2, 3, domains=2)
OWN = make("label-shift", SMALL, clients=2, ratio=2, alpha=5.0, domain=["domain 0", "domain 1"])
MATCHED = make("dirichlet", even_columns(30, 9, 3), clients=4, alpha=0.5, test_protocol="matched")
SHARED = make("iid", SMALL, clients=3)
VALIDATED = make("iid", SMALL, clients=3, validation=0.3)
SPLIT = make("iid", replace(SMALL, split=np.arange(36) % 3), clients=3, validation="split")
LARGE = 2**40 + np.arange(6)
ODD = Partition(
    "mine",
    {"alpha": 0.3, "domain": ("a", "b"), "x": None},
    2**63 - 1,
    [Client('ä "b"', LARGE[:1], LARGE[3:4]), Client("client-1", LARGE[1:3], LARGE[4:])],
    LARGE[4:],
    "d" * 64,
    60,
    3,
    ("ä note",),
)


def whole(partition):
    return b"".join(partition.to_file())


def read(raw, **how):
    return Partition.from_file(memoryview(raw), origin="p.partition", **how)


KINDS = pytest.mark.parametrize("partition", [OWN, MATCHED, SHARED, VALIDATED])


@pytest.mark.parametrize("partition", [OWN, MATCHED, SHARED, VALIDATED, SPLIT, ODD])
def test_a_partition_is_read_back_from_both_forms(partition, tmp_path):
    for name in ("p.partition", "p.json"):
        partition.save(tmp_path / name)
        again = Partition.load(tmp_path / name)
        assert again.to_payload() == partition.to_payload()
        assert again.args == partition.args
        assert again.table.tested.tolist() == partition.table.tested.tolist()
        # one file for one partition, from every form; JSON has no rule of matched tests
        assert whole(again) == whole(partition) or partition is MATCHED


@KINDS
@pytest.mark.parametrize("vouched", [False, True])
def test_a_flipped_bit_anywhere_is_found(partition, vouched):
    raw = bytearray(whole(partition))
    for place in range(len(raw)):
        raw[place] ^= 1 << place % 8
        corruption(lambda: read(bytes(raw), vouched=vouched))
        raw[place] ^= 1 << place % 8
    assert read(bytes(raw), vouched=vouched).digest == partition.digest


@KINDS
def test_a_file_that_ends_early_or_late_is_refused(partition):
    raw = whole(partition)
    for size in range(len(raw)):
        corruption(lambda size=size: read(raw[:size]))
    corruption(lambda: read(raw + bytes(8)))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"PK\x03\x04 an archive",
        MAGIC,
        MAGIC + struct.pack("<Q", 2**60),
        MAGIC + struct.pack("<Q", 8) + b"[1, 2,3]",
    ],
)
def test_a_foreign_file_is_refused(raw):
    corruption(lambda: read(raw), "p.partition")


def rewritten(partition, change):
    """The file with another head, sealed anew, as somebody who forges one would."""
    raw = memoryview(whole(partition))
    length = int.from_bytes(raw[8:16], "little")
    head = parse_signed(bytes(raw[16 : 16 + length]))
    change(head)
    sealed = to_signed(head)
    return (
        MAGIC
        + struct.pack("<Q", len(sealed))
        + sealed
        + bytes(-len(sealed) % 8)
        + raw[16 + length + -length % 8 :]
    )


def setter(value, *keys):
    """A change of the head at ``keys``."""

    def change(head):
        for key in keys[:-1]:
            head = head[key]
        head[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        setter(2**47, "arrays", "train", "length"),
        setter(True, "arrays", "train", "length"),
        setter(8, "arrays", "train", "offset"),
        setter("x" * 64, "content", "digest"),
        setter("0" * 64, "content", "digest"),
        setter({"count": 10**12, "names": None}, "content", "clients"),
        setter({"count": 3, "names": ["a", "b", "b"]}, "content", "clients"),
        setter("../x", "content", "scheme"),
        setter(1, "content", "more"),
        lambda head: head["arrays"].pop("test"),
    ],
)
def test_a_forged_head_is_refused(change):
    corruption(lambda: read(rewritten(SHARED, change)))


def forged(partition, **arrays):
    """The file of other arrays, with checksums that fit."""
    content, held = unpack(memoryview(whole(partition)))
    return b"".join(pack(content, held | {k: np.array(v, np.int64) for k, v in arrays.items()}))


@pytest.mark.parametrize(
    ("partition", "arrays", "why"),
    [
        (SHARED, {"train_sizes": [9, 9, 9]}, "train_sizes"),
        (SHARED, {"train_sizes": [2**62, 2**62, 24]}, "train_sizes"),
        (SHARED, {"test": [2**50]}, "test contains"),
        (SHARED, {"train": [7] * 24}, "not ascending"),
        (OWN, {"shares": [0]}, "shares"),
        (MATCHED, {"order": [1, 2]}, "starts"),
        (MATCHED, {"starts": [0, 20, 18, 27]}, "starts"),
        (MATCHED, {"classes": [0, 0] * 6}, "classes"),
        (MATCHED, {"taken": [99] * len(MATCHED.table.tests.taken)}, "taken"),
        (MATCHED, {"order": [MATCHED.table.tests.order[1]] * 27}, "order"),
        (MATCHED, {"classes": [99] * len(MATCHED.table.tests.classes.rows)}, "classes"),
    ],
)
def test_forged_arrays_are_refused(partition, arrays, why):
    corruption(lambda: read(forged(partition, **arrays)), why)


def test_the_file_is_the_documented_one():
    raw = whole(SHARED)
    length = int.from_bytes(raw[8:16], "little")
    head = json.loads(raw[16 : 16 + length])
    assert raw[:8] == b"\x89FCARR1\n"
    assert head["content"]["clients"] == {"count": 3, "names": None}
    start = 16 + length + -length % 8
    entry = head["arrays"]["train"]
    rows = np.frombuffer(raw, "<u1", entry["length"], start + entry["offset"])
    assert rows.tolist() == [r for c in SHARED.clients for r in c.train]


def test_names_too_long_for_a_file_are_refused_before_it_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr("fedcache.store.chunks.LARGEST_HEAD", 100)
    refused(lambda: SHARED.save(tmp_path / "p.partition"))
    assert not list(tmp_path.iterdir())


LABELS = st.lists(st.integers(0, 4), min_size=8, max_size=60)


def matched_alone(shuffled, label, train):
    """The test rows of one client, ascending: ceil(n_k min_j(a_j / n_j)) of each class, the first of ``shuffled``."""
    owned = label[train].tolist()
    known = {c: shuffled[label[shuffled] == c].tolist() for c in owned}
    share = min(
        (Fraction(len(rows), owned.count(c)) for c, rows in known.items() if rows), default=0
    )
    return sorted(row for c in known for row in known[c][: math.ceil(owned.count(c) * share)])


def test_matched_tests_follow_the_training_shares():
    # 4 and 1 training rows, 10 candidates of each class: class 0 is scarcest (10 / 4 < 10 / 1), so all 10 of it and
    # ceil(1 x 10 / 4) = 3 of class 1; class 2 is not owned.
    label = np.r_[[0] * 4, [1], [0] * 10, [1] * 10, [2] * 10]
    train = RowLists.of([np.arange(5)])
    (rows,) = MatchedLists.of(np.arange(5, 35), label, np.random.default_rng(0), train)
    assert np.bincount(label[rows]).tolist() == [10, 3]


@examples(60, 400)
@given(
    train=LABELS,
    test=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    clients=st.integers(1, 6),
)
def test_matched_lists_are_those_of_each_client_alone(train, test, clients):
    label = np.array([*train, *test])
    rows = np.random.default_rng(len(train)).permutation(len(train))
    dealt = RowLists.of(np.array_split(rows, clients))
    candidates = np.arange(len(train), len(label))
    lists = MatchedLists.of(candidates, label, np.random.default_rng(1), dealt)
    shuffled = np.random.default_rng(1).permutation(candidates)
    expected = [matched_alone(shuffled, label, r) for r in dealt]
    assert (
        [r.tolist() for r in lists] == [r.tolist() for r in lists.together(0, clients)] == expected
    )
    assert lists.sizes.tolist() == [len(r) for r in expected]
    assert lists.distinct.tolist() == sorted({r for rows in expected for r in rows})
    assert lists.words(0, clients) == [",".join(map(str, r)) for r in expected]
    # scored by the rule as by the lists
    scored = lists.distinct
    right = np.random.default_rng(2).choice([0.0, 1.0, np.nan], len(scored))
    held = RowLists.of([np.array(r, np.int64) for r in expected])
    assert np.array_equal(
        lists.shares_right(scored, right), held.shares_right(scored, right), equal_nan=True
    )


@pytest.mark.slow
def test_matched_tests_cost_classes_and_not_rows():
    columns = even_columns(2000, 2000, 4)
    made = make("dirichlet", columns, clients=200, alpha=50.0, test_protocol="matched")
    assert made.table.test_sizes.sum() > 500_000
    # three arrays of rows, and a few numbers of each client
    assert len(whole(made)) < 3 * 2 * 8000 + 5000
    again = read(whole(made))
    assert isinstance(again.table.tests, MatchedLists)
    assert again.digest == made.digest
    assert again.clients[3].test.tolist() == made.clients[3].test.tolist()


def test_more_matched_tests_than_a_digest_can_list_are_refused_with_a_number_that_fits(monkeypatch):
    monkeypatch.setattr("fedcache.federate.partition.partition.MOST_TESTED", 100)
    columns = even_columns(30, 9, 3)  # 27 test rows: 3 clients have 81 at most
    error = refused(
        lambda: make("dirichlet", columns, clients=20, alpha=5.0, test_protocol="matched"),
        "3 clients",
    )
    assert make("dirichlet", columns, **error.instead, alpha=5.0, test_protocol="matched")


def test_the_same_test_rows_of_every_client_are_held_once():
    columns = even_columns(400, 30, 3)
    made = make(
        "label-shift", columns, clients=60, alpha=5.0, ratio=2.0, test_protocol="balanced", tests=20
    )
    assert made.table.test_sizes.tolist() == [60] * 60
    assert not made.table.shares.any()  # the global test rows are more
    assert len(unpack(memoryview(whole(made)))[1]["order"]) == 60
    assert read(whole(made), rows=len(columns.label)).to_payload() == made.to_payload()
    _, held = unpack(memoryview(whole(made)))
    corruption(
        lambda: read(
            forged(made, order=[*held["order"][1:], 2**30]), rows=len(columns.label), vouched=True
        ),
        "1073741824",
    )
