"""What grid points find of one another: the same values, never more than the budget, and never another's."""

import pytest
import torch
from federation import difference, federation, fitted, run, run_points
from hypothesis import given
from hypothesis import strategies as st

from fedcache.federate.engine.context import ClientRng, LruCache
from fedcache.federate.methods import METHODS


def draws(client="a", memo=None, *, seed=0, now=0, axes=0):
    return ClientRng(seed, now, (client,), axes, torch.float32, torch.device("cpu"), memo)


def test_the_longest_unused_goes_first_and_too_large_ones_never_stay():
    memo, made = LruCache(10), []

    def get(key, size):
        return memo.get(key, lambda: made.append(key) or key * 2, lambda _: size)

    assert [get("a", 4), get("b", 4), get("a", 4), get("c", 4)] == [
        "aa",
        "bb",
        "aa",
        "cc",
    ]  # c displaces b
    assert [get("a", 4), get("b", 4)] == ["aa", "bb"]
    assert made == ["a", "b", "c", "b"]
    assert [get("d", 11), get("d", 11)] == ["dd", "dd"]
    assert made[-2:] == ["d", "d"]
    assert memo.nbytes == 8


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.booleans(),
            st.lists(st.sampled_from([(2, 3), (3,), (5, 1)]), max_size=4),
        ),
        max_size=8,
    ),
    st.sampled_from([0, 40, 10_000]),
    st.sampled_from([0, 1, 2]),
)
def test_first_weights_are_those_of_a_run_alone_whatever_is_still_remembered(asked, budget, axes):
    memo = LruCache(budget)
    for client, independent, shapes in asked:
        alone = draws(client, axes=axes).uniform("init", independent=independent)
        found = draws(client, memo, axes=axes).uniform("init", independent=independent)
        for shape in shapes:
            assert torch.equal(found(shape), alone(shape))


@pytest.mark.parametrize("name", ["solo", "fedpcl", "fst-cbdg", "perfedavg"])
def test_points_one_by_one_have_the_bits_of_runs_alone(name):
    method, (data, clients) = METHODS[name], federation()
    data = fitted(method, data)
    rate = next(h.name for h in method.hparams if h.help.startswith("learning rate"))
    hps = [method.resolve("paper", {rate: lr}) for lr in (0.05, 0.01, 0.05)]
    how = {"rounds": 2, "participation": 5, "seed": 3, "execution": "sequential"}
    points = run_points(method, hps, data, clients, **how)
    assert difference(points[0], points[2]) == 0.0
    for hp, point in zip(hps, points, strict=True):
        assert difference(run(method, hp, data, clients, **how), point) == 0.0
