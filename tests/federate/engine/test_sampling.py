"""Who takes part in a round, and whose model is scored, as laws of the draws."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from draws import examples
from federation import federation, go
from hypothesis import given
from hypothesis import strategies as st

from fedcache.federate.engine import sampling
from fedcache.federate.engine.context import generator
from fedcache.federate.engine.sampling import ClientSampler, without_replacement
from fedcache.federate.partition.row_lists import NumberedNames


@examples(60, 600)
@given(st.integers(1, 300), st.integers(0, 5), st.data())
def test_a_sample_is_ascending_different_and_among_those_that_can_train(clients, round_, draw):
    eligible = np.array(sorted(draw.draw(st.sets(st.integers(0, clients - 1), min_size=1))))
    sampler = ClientSampler(NumberedNames(clients), eligible, 7)
    count = draw.draw(st.integers(1, clients))
    sampled = sampler.sample(round_, count)
    assert sampled == sorted(set(sampled))
    assert set(sampled) <= set(eligible.tolist())
    assert len(sampled) == min(count, len(eligible))
    assert sampler.sample(round_, count) == sampled
    assert ClientSampler(NumberedNames(clients), eligible, 7).sample(round_, count) == sampled


@examples(30, 300)
@given(st.permutations(list("abcdefgh")), st.integers(1, 8))
def test_names_are_drawn_whatever_the_order_of_clients(names, count):
    found = [names[c] for c in ClientSampler(names, np.arange(8), 3).sample(2, count)]
    known = ClientSampler(sorted(names), np.arange(8), 3).sample(2, count)
    assert sorted(found) == [sorted(names)[c] for c in known]


@pytest.mark.parametrize("population", [10, sampling.MANY])
def test_every_client_is_as_likely_as_every_other(population):
    """600 draws of half of them: a client is in 300, give or take 5 standard deviations of 12.2."""
    taken = Counter[int]()
    for round_ in range(600):
        drawn = without_replacement(generator(0, "sampling", round_), population, population // 2)
        assert len(np.unique(drawn)) == population // 2
        taken.update(drawn[drawn < 10].tolist())
    assert all(abs(taken[c] - 300) < 62 for c in range(10))


def test_a_round_of_many_clients_does_not_draw_all_of_them():
    """A permutation of 10^7 clients would take 80 MB; the draw of 100 of them takes none of that."""
    drawn = without_replacement(generator(0, "sampling", 0), 10**15, 100)
    assert len(np.unique(drawn)) == 100


def test_only_the_drawn_clients_are_scored_and_the_same_in_every_round():
    data, clients = federation()
    everybody = go("fedrep", {}, data, clients, eval_every=1).client_accuracy
    rounds = [go("fedrep", {}, data, clients, rounds=r, eval_clients=4).client_accuracy for r in (1, 2, 3)]
    scored = [np.flatnonzero(~np.isnan(r)).tolist() for r in rounds]
    assert scored[0] == scored[1] == scored[2]
    assert len(scored[0]) == 4
    assert np.array_equal(rounds[2][scored[0]], everybody[scored[0]])
    out = go("fedrep", {}, data, clients, eval_clients=0.5)
    assert np.isfinite(out.client_accuracy).sum() == 4  # round(0.5 x 9)
    assert out.accuracy == np.nanmean(out.client_accuracy)
    assert np.isfinite(go("fedavg", {}, data, clients, eval_clients=2).client_accuracy).all()  # one model for all
