"""Secure aggregation without Flower: what the vectors of sites add up to, whom it fits, and what a site refuses."""

import dataclasses
from functools import partial

import pytest
import torch
from fake_grid import killed, planned, to_every
from hypothesis import given
from hypothesis import strategies as st
from methods_tried import tried
from refusal import refused, training_error
from small_sites import Heard, mean_accuracy, missed_by
from test_flower_parts import OVER_SITES, alone, changed, late, shards  # noqa: F401

from fedcache.federate.engine.method import UploadTensor
from fedcache.federate.engines.flower.masking import MODULUS, Masking, levels_for
from fedcache.federate.methods import METHODS


def fits(name):
    """Whether a method's uploads are only averaged or added."""
    method = METHODS[name]
    return "stack" not in method.pool(method.resolve()).values()


SUMMED = [name for name in OVER_SITES if fits(name)]


BOUNDS = {"lp-plus-plus": 1024.0}
"""Of methods whose uploads have larger numbers: its first multipliers are up to 250."""


SECURE = {"secure": True, "secure_bound": 64.0}


@pytest.mark.parametrize("method", tried(SUMMED))
def test_sums_alone_give_the_result_of_one_process(method, sites, tmp_path, federated):
    run = federated(method, secure=True, secure_bound=BOUNDS.get(method, 64.0))
    reference = alone(method, sites, tmp_path)
    assert mean_accuracy(run) == pytest.approx(mean_accuracy(reference), abs=1e-9)
    assert missed_by(run) == []
    assert run.result["digest"] != reference.result["digest"]


def test_what_looks_at_single_uploads_or_hides_nothing_is_refused():
    for words, said in (
        ({"aggregate": "median"}, "--aggregate"),
        ({"max_update_norm": 1.0}, "--max-update-norm"),
        ({"participation": "2"}, "3 sites"),
        ({"secure_bound": float("nan")}, "--secure-bound nan"),
    ):
        refused(partial(planned, "fedavg", **SECURE | words), said)
    for method in set(OVER_SITES) - set(SUMMED):
        refused(partial(planned, method, **SECURE), method)


def test_a_number_beyond_the_bound_is_not_sent_and_the_bound_that_works_is_named(federated):
    training_error(lambda: federated("fed3r", secure=True, secure_bound=1e-3), "too few sites")
    masking = masking_of(
        {"gram": UploadTensor((2,), torch.float32)}, {"gram": "sum"}, {}, bound=1.0
    )
    training_error(
        lambda: masking.vector({"gram": torch.tensor([0.0, 29.0])}, {}, 10.0), "--secure-bound 4"
    )
    training_error(
        lambda: masking.vector({"gram": torch.tensor([0.0, float("nan")])}, {}, 10.0), "at most"
    )


def test_a_site_that_is_lost_is_left_out_of_the_sum_aloud(grid, federated):
    heard = Heard()
    grid.meddle[100] = to_every("fit", killed, last=1)
    run = federated("fedavg", heard, **SECURE)
    assert [m["round"] for m in missed_by(run)] == [1]
    assert heard.said("round 1 continues without site")


def test_a_sum_with_an_answer_to_another_round_is_not_used(grid, federated):
    grid.meddle[101] = to_every("fit", lambda packed: changed(packed, late))
    training_error(lambda: federated("fedavg", **SECURE), "belongs to another round or job")


def masking_of(expected, rules, down, *, scale=10.0, bound=8.0):
    method = dataclasses.replace(METHODS["fedavg"], pool=lambda _hp: rules)
    return Masking.of(method, {}, expected, down, scale, bound)


@given(rows=st.lists(st.integers(1, 500), min_size=3, max_size=9), seed=st.integers(0, 99))
def test_the_sum_of_rounded_vectors_is_the_pooled_sum_to_the_rounding(rows, seed):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw).clamp(-2, 2)

    rules = {"W": "mean", "even": "uniform", "sum": "sum", "count": "sum"}
    down = {"W": 5 * normal(3, 2)}
    ups = [
        {
            "W": down["W"] + normal(3, 2),
            "even": normal(2),
            "sum": n * normal(4).double(),
            "count": torch.tensor([n // 2, n - n // 2, 0]),
        }
        for n in rows
    ]
    expected = {name: UploadTensor.like(t) for name, t in ups[0].items()}
    expected["count"] = dataclasses.replace(expected["count"], counts_rows=True)
    masking = masking_of(expected, rules, down, scale=float(max(rows)))
    assert Masking.from_words(masking.to_words()) == masking
    step = 2 * masking.bound / levels_for(len(rows))
    assert levels_for(len(rows)) * len(rows) < MODULUS
    vectors = [masking.vector(up, down, float(n)) for up, n in zip(ups, rows, strict=True)]
    total = sum((v / step).round() * step for v in vectors)
    found = masking.sums(total, down, [float(n) for n in rows])
    worst = len(rows) * step * max(rows)
    for name, weights, slack in (
        ("W", rows, worst + 1e-4 * max(rows)),  # and float32's own rounding
        ("even", [1] * len(rows), worst),
        ("sum", [1] * len(rows), worst),
    ):
        wanted = sum(n * up[name].double() for n, up in zip(weights, ups, strict=True))
        assert float((found[name][0] - wanted).abs().max()) <= slack
    assert torch.equal(found["count"][0].long(), sum(up["count"] for up in ups))


def test_sums_of_which_a_difference_is_one_upload_are_refused():
    for method, words in (("fedncm", {"participation": "3"}), ("fed3r", {"seeds": "0,1"})):
        refused(partial(planned, method, sites=4, **SECURE, **words))
