"""Clients that a draw left short are filled up: nobody is short, no row is lost, and little else changes."""

import numpy as np
import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from partition_rows import even_columns
from refusal import refused

from fedcache.federate.partition.client_table import RowLists
from fedcache.federate.partition.domain_shift import fill_up, lowered
from fedcache.federate.partition.partition import Partition, make

COLUMNS = even_columns(50, 10, 4)


def test_the_longest_give_one_by_one():
    # 7, 5, 1, 0 with a least of 2 lack 3 rows: 7 -> 6 -> 5, then the first of two 5s -> 4
    dealt = RowLists.of_sizes(np.arange(13), np.array([7, 5, 1, 0]))
    filled = fill_up(dealt, 2, np.random.default_rng(0))
    assert filled.sizes.tolist() == [4, 5, 2, 2]
    assert set(filled[0]) < set(range(7))
    assert filled[1].tolist() == [7, 8, 9, 10, 11]
    assert 12 in filled[2]
    assert {*filled[2], *filled[3]} - {12} == set(range(7)) - set(filled[0])


def one_by_one(sizes, missing):
    sizes = list(sizes)
    for _ in range(missing):
        sizes[sizes.index(max(sizes))] -= 1
    return sizes


@examples(100, 1000)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8), missing=st.integers(0, 60))
def test_what_is_taken_is_taken_from_the_largest(sizes, missing):
    missing = min(missing, sum(sizes))
    assert lowered(np.array(sizes), missing, 0).tolist() == one_by_one(sizes, missing)


@examples(100, 1000)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    least=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_no_row_is_lost_nobody_is_short_and_as_few_as_will_do_are_moved(sizes, least, seed):
    sizes[0] += max(0, least * len(sizes) - sum(sizes))
    dealt = RowLists.of_sizes(np.random.default_rng(seed).permutation(sum(sizes)), np.array(sizes))
    filled = fill_up(dealt, least, np.random.default_rng(seed))
    assert sorted(filled.rows) == list(range(sum(sizes)))
    assert filled.sizes.min() >= least
    lack = sum(max(0, least - size) for size in sizes)
    assert sum(len(set(new) - set(old)) for new, old in zip(filled, dealt, strict=True)) == lack
    for new, old in zip(filled, dealt, strict=True):
        assert set(new) >= set(old) if len(old) < least else set(new) <= set(old)


@pytest.mark.parametrize("scheme", ["dirichlet", "lda", "label-shift"])
def test_a_partition_that_could_not_be_drawn_is_filled(scheme):
    args = {"clients": 40, "alpha": 0.05} | ({"min_size": 2} if scheme == "lda" else {})
    args |= {"ratio": 2.0, "shots": 1} if scheme == "label-shift" else {}
    refused(lambda: make(scheme, COLUMNS, **args), "fill=true")
    made = make(scheme, COLUMNS, **args, fill=True)
    least = {"dirichlet": 1, "lda": 2, "label-shift": 1}[scheme]
    assert made.table.train_sizes.min() == least
    assert made.args["fill"] is True
    assert "-fill1-" in made.default_name()
    assert Partition.from_file(memoryview(b"".join(made.to_file()))).digest == made.digest
    if scheme != "label-shift":
        assert sorted(made.table.train.rows) == np.flatnonzero(COLUMNS.split == 0).tolist()
    assert make(scheme, COLUMNS, **args, fill=True).digest == made.digest
    assert make(scheme, COLUMNS, **args, fill=True, seed=1).digest != made.digest


@pytest.mark.parametrize("scheme", ["dirichlet", "lda", "label-shift"])
def test_a_first_draw_that_is_sound_is_not_changed(scheme):
    plain, off, filled = (
        make(scheme, COLUMNS, clients=4, alpha=50.0, **more)
        for more in ({}, {"fill": False}, {"fill": True})
    )
    assert [c.train.tolist() for c in plain.clients] == [c.train.tolist() for c in filled.clients]
    # the argument is part of a partition where it is on
    assert filled.digest != plain.digest == off.digest


def test_so_many_that_a_draw_takes_seconds_are_refused_without_one(monkeypatch):
    monkeypatch.setattr("fedcache.federate.partition.domain_shift.TRIAL_SHARES", 100)
    monkeypatch.setattr(
        "fedcache.federate.partition.domain_shift.search",
        lambda *_, **__: pytest.fail("drew shares"),
    )
    error = refused(lambda: make("dirichlet", COLUMNS, clients=300, alpha=0.3), "200 clients")
    monkeypatch.undo()
    assert len(make("dirichlet", COLUMNS, **error.instead, alpha=0.3).clients) == 200
