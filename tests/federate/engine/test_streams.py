"""Streams seeded together are numpy's, bit for bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcache.federate.engine.context import MANY, generator, generators, key_hash, seed_states


@given(
    st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), min_size=1, max_size=20)
)
@settings(max_examples=60)
def test_states_are_those_of_numpys_seed_sequence(words):
    found = seed_states(np.array(words, np.uint32).T)
    for state, w in zip(found, words, strict=True):
        entropy = sum(word << 32 * i for i, word in enumerate(w))
        assert (
            state.tolist() == np.random.SeedSequence(entropy).generate_state(4, np.uint64).tolist()
        )


def test_a_seed_means_the_same_draws_in_every_process():
    # Two runs in one process cannot see a stream keyed by hash(), which every process salts anew.
    assert generator(0, "batch", 1, "client-0", 2).permutation(8).tolist() == [
        2,
        3,
        6,
        5,
        1,
        0,
        7,
        4,
    ]


def test_many_streams_are_the_single_ones():
    for count in (1, MANY - 1, MANY, 50):
        keys = [(3, "batch", 7, f"client-{i}", 0) for i in range(count)]
        for key, g in zip(keys, generators(keys), strict=True):
            alone = generator(*key)
            assert np.array_equal(g.permutation(40), alone.permutation(40))
            assert np.array_equal(g.standard_normal(5), alone.standard_normal(5))


def test_keys_do_not_run_together():
    assert key_hash(1, "a", 23) != key_hash(12, "a", 3)
    assert key_hash(0, "ab") != key_hash(0, "a", "b")
