"""What grid points find of one another: the same values, never more than the budget, and never another's."""

import pytest
from federation import difference, federation, fitted, run, run_points

from fedcache.federate.engine.context import LruCache
from fedcache.federate.methods import METHODS


def test_the_longest_unused_goes_first_and_too_large_ones_never_stay():
    memo = LruCache(10)
    made = []

    def get(key, size):
        return memo.get(key, lambda: made.append(key) or key * 2, lambda _: size)

    assert get("a", 4) == "aa"
    assert get("b", 4) == "bb"
    assert get("a", 4) == "aa"
    assert get("c", 4) == "cc"  # c displaces b
    assert get("a", 4) == "aa"
    assert get("b", 4) == "bb"
    assert made == ["a", "b", "c", "b"]
    assert get("d", 11) == "dd"
    assert get("d", 11) == "dd"
    assert made[-2:] == ["d", "d"]
    assert memo.nbytes == 8


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
