"""Rows to choose by: which they are, that nobody trains or is tested on them, and the files that hold them."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from draws import examples
from federation import rows_trained
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from partition_rows import any_columns, attempt, columns_from, drawn_arguments, even_columns
from refusal import corruption, refused

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.partition.client_table import RowLists
from fedcache.federate.partition.partition import SCHEMES, Partition, from_payload, make
from fedcache.federate.partition.validation import hold_out
from fedcache.store.chunks import pack, unpack
from fedcache.store.files import digest_of
from fedcache.tables.groups import Group

PLAIN = make("dirichlet", even_columns(30, 9, 3), clients=4, alpha=0.5)
OWN = make("dirichlet", even_columns(30, 9, 3), clients=4, alpha=0.5, validation=0.2)
WITH_SPLIT = columns_from([0, 1] * 12, [0] * 24, [0, 0, 1, 2] * 6, [1] * 23 + [0], 2, 1)
SPLIT = make("iid", WITH_SPLIT, clients=3, validation="split")


def one_by_one(train, label, uid, share):
    """The rule once more, row by row: lists of rows that are taken."""
    taken = []
    for rows in train:
        given = {}
        before = 0
        classes = {
            c: sorted((r for r in rows if label[r] == c), key=lambda r: (uid[r].tobytes(), r))
            for c in sorted({int(label[r]) for r in rows})
        }
        for c, own in classes.items():
            up_to = math.floor(share * (before + len(own)) + 1e-9)
            given[c] = min(up_to - math.floor(share * before + 1e-9), len(own) - 1)
            before += len(own)
        if not any(given.values()) and len(rows) > 1:
            given[max(classes, key=lambda c: len(classes[c]))] = 1  # the first of equals
        taken.append(sorted(r for c, own in classes.items() for r in own[: given[c]]))
    return taken


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    classes=st.integers(1, 4),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 99),
)
def test_of_each_class_the_rows_with_the_smallest_uids_are_taken_up_to_the_share(
    sizes, classes, share, seed
):
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    label = rng.integers(-1, classes, n)
    uid = np.zeros((n, 16), np.uint8)
    uid[:, [0, 15]] = rng.integers(0, 3, (n, 2))  # many are equal, or but for their end
    dealt = RowLists.of_sizes(rng.permutation(n), np.array(sizes)).ascending()
    left, taken = hold_out(dealt, label, uid, share)
    assert [rows.tolist() for rows in taken] == one_by_one(
        [r.tolist() for r in dealt], label, uid, share
    )
    for own, kept, gone in zip(dealt, left, taken, strict=True):
        assert sorted([*kept, *gone]) == own.tolist()
        assert len(kept) or not len(own)


def test_a_share_of_a_client_worked_by_hand():
    # One client: 5 rows of class 0, 3 of class 1, 2 of class 2, which is 10 rows; a share of 0.3 is 3.
    # Class 0: floor(0.3 * 5) = 1. Up to class 1: floor(0.3 * 8) = 2, one more. Up to class 2: floor(0.3 * 10) = 3.
    label = np.array([0, 0, 0, 0, 0, 1, 1, 1, 2, 2])
    uid = np.zeros((10, 16), np.uint8)
    uid[:, 0] = [
        9,
        8,
        1,
        7,
        6,
        5,
        4,
        3,
        2,
        0,
    ]  # smallest of class 0 is row 2, of class 1 row 7, of class 2 row 9
    left, taken = hold_out(RowLists.of([np.arange(10)]), label, uid, 0.3)
    assert taken[0].tolist() == [2, 7, 9]
    assert left[0].tolist() == [0, 1, 3, 4, 5, 6, 8]


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@examples(15, 200)
@given(
    data=st.data(),
    columns=any_columns(),
    seed=st.integers(0, 99),
    how=st.sampled_from(["split", 0.2, 0.5, 0.9]),
)
def test_nobody_trains_on_validation_rows_and_given_back_the_partition_is_that_without(
    scheme, data, columns, seed, how
):
    args = drawn_arguments(data.draw, scheme)
    plain = attempt(scheme.name, columns, seed=seed, **args)
    made = attempt(scheme.name, columns, seed=seed, **args, validation=how)
    if isinstance(made, FedcacheError):
        assert made.code == Exit.USAGE
        assume(scheme.name != "natural")  # as many of its partitions are tried as of the others
        return
    rows = made.validation
    trained = rows_trained(made.clients)
    tested = np.concatenate([made.test, *(c.test for c in made.clients)])
    assert len(rows)
    assert not np.intersect1d(rows, trained).size
    assert not np.intersect1d(rows, tested).size
    assert (columns.ok[rows] == 1).all()
    assert (columns.split[rows] == 2).all() == (how == "split")
    assert np.array_equal(np.unique(np.concatenate([c.validation for c in made.clients])), rows)
    for one, before in zip(made.clients, plain.clients, strict=True):
        assert one.name == before.name
        assert np.array_equal(one.test, before.test)
        own = one.train if how == "split" else np.concatenate([one.train, one.validation])
        assert np.array_equal(np.sort(own), before.train)
    assert made.notes == plain.notes
    assert made.without_validation().digest == plain.digest != made.digest
    assert make(scheme.name, columns, seed=seed, **args, validation=how).digest == made.digest


def test_own_rows_of_the_split_are_everybodys():
    # Rows 3, 7, 11, .. are of split validation; the last, 23, is unreadable.
    assert SPLIT.validation.tolist() == [3, 7, 11, 15, 19]
    assert SPLIT.table.for_validation.shares.all()
    assert SPLIT.clients[2].validation.tolist() == [3, 7, 11, 15, 19]
    assert "5 validation rows" in SPLIT.summary()


WARDS = ["n", "n", "n", "s", "s", "s", "e", "e", "e", "n", "s", "e"]


def wards(**args):
    """Three wards with two training rows, a test row, and a validation row each."""
    split = [0, 0, 1] * 3 + [2, 2, 2]
    plain = columns_from([0, 1, 0] * 4, [0] * 12, split, [1] * 12, 2, 1)
    columns = replace(plain, groups=lambda _: Group.of(WARDS))
    return make("natural", columns, **{"by": "ward", "validation": "split"} | args)


def test_a_value_of_a_column_is_scored_on_its_own_validation_rows_and_none_that_is_held_out_counts():
    assert {c.name: c.validation.tolist() for c in wards().clients} == {
        "n": [9],
        "s": [10],
        "e": [11],
    }
    assert wards(tests="global").validation.tolist() == [9, 10, 11]
    assert wards(tests="global").table.validation.own is None
    assert wards(hold_out="e").validation.tolist() == [9, 10]
    assert wards().without_validation().digest == wards(validation=None).digest


def test_a_partition_without_validation_rows_is_the_file_that_it_always_was():
    payload = PLAIN.to_payload()
    assert payload["schema"] == "fedcache.partition/1"
    assert "validation" not in payload["args"]
    assert payload["clients"][0].keys() == {"name", "train", "test"}
    assert PLAIN.digest == "f6cef950aca3c46c8c18595f38b66c16eb3fcaebb21f23ab45a0b78199e5c630"


def forged(made, change):
    """The payload after a change, signed anew."""
    payload = made.to_payload()
    change(payload)
    return {**payload, "digest": digest_of({k: v for k, v in payload.items() if k != "digest"})}


def of_client(**fields):
    """A change of the first client."""
    return lambda payload: payload["clients"][0].update(fields)


FORGERIES = {
    "trained on": (OWN, of_client(validation=OWN.clients[1].train[:1].tolist()), "trained on"),
    "tested on": (OWN, of_client(validation=OWN.test[:1].tolist()), "tested on"),
    "no list": (OWN, of_client(validation=7), "client 0 validation"),
    "falling": (
        OWN,
        lambda p: max(p["clients"], key=lambda c: len(c["validation"]))["validation"].reverse(),
        "ascend",
    ),
    "none at all": (OWN, lambda p: [c.update(validation=[]) for c in p["clients"]], "empty"),
    "of schema 1": (OWN, lambda p: p.update(schema="fedcache.partition/1"), "client 0"),
    "both": (OWN, lambda p: p.update(validation=[1]), "client 0"),
    "split, falling": (SPLIT, lambda p: p["validation"].reverse(), "ascend"),
}


@pytest.mark.parametrize(("made", "change", "message"), FORGERIES.values(), ids=FORGERIES)
def test_a_forged_list_is_refused(made, change, message):
    corruption(lambda: from_payload(forged(made, change)), message)


def test_rows_beyond_the_store_are_refused():
    beyond = forged(SPLIT, lambda p: p["validation"].append(100))
    corruption(lambda: from_payload(beyond, rows=24), "100")


@pytest.mark.parametrize("lost", ["validation", "validation_sizes", None])
def test_an_array_that_is_missing_or_does_not_fit_is_refused(lost):
    content, arrays = unpack(memoryview(b"".join(OWN.to_file())))
    if lost is None:
        arrays["validation_sizes"] = arrays["validation_sizes"] * 2
    else:
        del arrays[lost]
    corruption(lambda: Partition.from_file(memoryview(b"".join(pack(content, arrays)))))


@pytest.mark.parametrize("wrong", [0, 1, True, "half", "1.5", "nan", (0.2,)])
def test_what_is_no_share_is_refused(wrong):
    refused(lambda: make("iid", even_columns(30, 9, 3), validation=wrong), "validation")


def test_nothing_to_take_is_refused_with_what_can_be_done():
    refused(lambda: make("iid", even_columns(2, 2, 3), clients=6, validation=0.2), "--clients")
    refused(
        lambda: make("iid", even_columns(2, 2, 3), clients=2, validation="split"),
        "no validation row",
        "--validation 0.2",
    )


def test_clients_that_hold_the_same_rows_give_them_up_together_or_are_refused():
    shared = even_columns(6, 2, 2)
    made = make("few-shot", shared, clients=5, shots=3, sharing=True, skew="iid", validation=0.2)
    for a, b in itertools.permutations(made.clients, 2):
        assert not np.intersect1d(a.train, b.validation).size
    uid = np.zeros((2, 16), np.uint8)
    uid[1] = 1
    # the first gives row 0, which is all of the other
    refused(
        lambda: hold_out(
            RowLists.of([np.array([0, 1]), np.array([0])]), np.array([0, 0]), uid, 0.5
        ),
        "would have no training rows",
    )
