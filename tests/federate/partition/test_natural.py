"""Clients that the data brings: one for each value of a column, and values that are held out."""

from dataclasses import replace

import numpy as np
import pytest
from partition_rows import columns_from
from refusal import refused
from setting_lines import set_to
from text_tables import rows_of

from fedcache.federate.partition.given import of_rows
from fedcache.federate.partition.partition import make
from fedcache.tables.groups import Group

WARDS = ("north", "south", "east")


def columns(ward, *, split=None, label=None):
    """Rows with a ward each; half of them of the one domain, half of the other."""
    rows = np.arange(len(ward))
    label = rows % 2 if label is None else label
    split = 0 * rows if split is None else split
    plain = columns_from(label, rows % 2, split, 0 * rows + 1, 3, 2)
    groups = {"ward": Group.of(ward)}
    return replace(plain, domains=("photo", "sketch"), groups=groups.__getitem__)


def held(partition):
    return {c.name: (c.train.tolist(), c.test.tolist()) for c in partition.clients}


def test_a_client_is_a_value_with_its_rows_of_both_splits():
    made = make(
        "natural", columns(["n", "s", "n", "s", "n", ""], split=[0, 0, 1, 1, 0, 0]), by="ward"
    )
    assert held(made) == {"n": ([0, 4], [2]), "s": ([1], [3])}
    assert made.test.tolist() == [2, 3]
    assert made.notes == ("1 of 4 rows have no value of ward and are left out",)
    assert made.pool == 4
    assert made.dropped == 1
    assert made.default_name() == "natural-by-ward-s0"


def test_test_rows_that_only_one_client_brings_are_in_use():
    data = columns(["n"] * 6, split=[0, 0, 0, 0, 1, 1])
    made = of_rows(data, {"a": (np.array([0, 1]), np.array([2])), "b": np.array([3])})
    assert held(made) == {"a": ([0, 1], [2]), "b": ([3], [4, 5])}
    assert made.dropped == 0


def test_a_client_without_test_rows_holds_a_fifth_of_each_class_out_and_a_single_row_is_nobody():
    data = columns(["n"] * 20 + ["s"], label=[0] * 10 + [1] * 10 + [0])
    made = make("natural", data, by="ward")
    (train, test) = held(made)["n"]
    assert len(made.clients) == 1
    assert sorted(train + test) == list(range(20))
    by_uid = sorted(range(10), key=lambda r: data.uid[r].tobytes())[:2]
    assert [r for r in test if r < 10] == sorted(by_uid)
    assert [int(data.label[r]) for r in test].count(1) == 2
    assert "1 of 2 clients" in made.notes[1]


def test_years_and_numbers_of_sites_name_values_as_their_words_do():
    data = columns([2009, 2010, 2011] * 4)
    by_word, by_number = (
        make("natural", data, by="ward", hold_out=year) for year in ("2011", 2011)
    )
    assert by_number.digest == by_word.digest


def test_rows_without_a_label_are_kept_or_left_out():
    data = columns(["n"] * 8 + ["s"] * 4, split=[0, 0, 0, 1] * 3, label=[0, -1, 1, 0] * 3)
    made = make("natural", data, by="ward")
    assert held(made) == {"n": ([0, 1, 2, 4, 5, 6], [3, 7]), "s": ([8, 9, 10], [11])}
    made = make("natural", data, by="ward", unlabelled="drop")
    assert held(made) == {"n": ([0, 2, 4, 6], [3, 7]), "s": ([8, 10], [11])}
    assert made.notes == ("3 rows without a label are left out",)


def test_leave_one_domain_out_trains_on_all_rows_of_the_others_and_tests_on_all_of_it():
    data = columns(["n"] * 8, split=[0, 0, 1, 1, 0, 0, 1, 1])
    made = make("natural", data, by="domain", hold_out=("sketch",))
    assert held(made) == {"photo": ([0, 2, 4, 6], [1, 3, 5, 7])}
    assert made.test.tolist() == [1, 3, 5, 7]
    split = make("natural", data, by="domain", hold_out=("sketch",), rows="train")
    assert held(split) == {"photo": ([0, 4], [1, 3, 5, 7])}
    assert made.default_name() == "natural-by-domain-without-sketch-s0"


def test_held_out_clients_are_the_test_set_of_all_others():
    ward = [f"w{i % 10}" for i in range(100)]
    made = make(
        "natural", columns(ward), by="ward", tests="held-out-clients", held_out_share=0.3, seed=4
    )
    assert len(made.clients) == 7
    away = {f"w{i}" for i in range(10)} - {c.name for c in made.clients}
    assert made.test.tolist() == [i for i in range(100) if ward[i] in away]
    assert all(np.array_equal(c.test, made.test) for c in made.clients)
    other = make(
        "natural", columns(ward), by="ward", tests="held-out-clients", held_out_share=0.3, seed=5
    )
    assert {c.name for c in other.clients} != {c.name for c in made.clients}


def test_small_clients_are_left_out_and_many_are_drawn():
    data = columns([f"w{i:02d}" for i in range(20) for _ in range(2 * (i + 1))])
    made = make("natural", data, by="ward", min_rows=21, max_clients=3)
    sizes = [len(c.train) + len(c.test) for c in made.clients]
    assert len(sizes) == 3
    assert min(sizes) >= 21
    assert made.notes[1].startswith("10 of 20 clients")
    error = refused(lambda: make("natural", data, by="ward", min_rows=41), "40")
    assert error.instead == {"min_rows": 40}


def test_another_scheme_deals_the_rows_of_every_value():
    ward = [WARDS[i % 3] for i in range(120)]
    split = [1 if i % 4 == 3 else 0 for i in range(120)]
    made = make("natural", columns(ward, split=split), by="ward", inside="iid", clients=2)
    assert [c.name for c in made.clients] == [
        f"{w}/client-{i}" for w in sorted(WARDS) for i in (0, 1)
    ]
    for client in made.clients:
        assert {ward[r] for r in (*client.train, *client.test)} == {client.name.split("/")[0]}
    alone = columns([w if w == "south" else "" for w in ward], split=split)
    fewer = make("natural", alone, by="ward", inside="iid", clients=2)
    for name, rows in held(fewer).items():  # one more value moves no other draw
        assert held(made)[name] == rows


@pytest.mark.parametrize(
    ("given", "said"),
    rows_of(
        """
        by=domain hold_out=scketch                    | 'sketch'
        by=domain hold_out=["sketch","photo"]         | no client is left to train
        by=domain hold_out=sketch tests=global        | hold_out and tests global
        by=domain clients=3                           | clients
        by=domain clients=30 inside=iid               | 5 rows
        by=domain tests=held-out-clients domain=photo | 1 client
        by=ward min_rows=13                           | 12
        """
    ),
)
def test_what_cannot_be_is_refused_by_name(given, said):
    refused(lambda: make("natural", columns(["n"] * 12), **set_to(given)), said)
    refused(lambda: make("natural", columns(["n", "s"]), by="ward"), "no value of ward")


def test_a_scheme_that_reads_labels_needs_some_inside_every_value():
    data = columns(["n"] * 6 + ["s"] * 6, label=[0, 1] * 3 + [-1] * 6)
    words = {"by": "ward", "inside": "shards", "clients": 1}
    refused(lambda: make("natural", data, **words), "shards", "s has a label", "unlabelled=drop")
    made = make("natural", data, unlabelled="drop", **words)
    assert [client.name for client in made.clients] == ["n/client-0"]
