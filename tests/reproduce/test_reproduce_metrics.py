"""Metrics of tables, each by hand from a stored run."""

import json

import pytest
from refusal import refused

from fedcache import Run
from fedcache.reproduce.metrics import (
    Measurement,
    compare,
    measure,
    over_seeds,
    show_measured,
    subtract,
    unit,
)
from fedcache.reproduce.planning import Printed

RESULT = {
    "clients": ["a", "b", "c"],
    "accuracy": {
        "mean": 0.5,
        "client_mean": 0.625,
        "per_client": [0.75, None, 0.25],
        "per_domain": {"real": 0.125, "clipart": 0.5},
    },
    "fairness": {"worst10": 0.25, "worst40": None, "best10": 1.0, "std_pp": 3.5},
    "macro_f1": {"mean": 0.375},
    "parameters": {"trainable": 1000, "fixed": 64},
    "traffic": {"paper": {"per_client_round": {"up": 2560, "down": 1}}},
    "hyperparameters": {"dim": 3},
    "widths": [4, 6],
    "classes": 5,
    "classes_owned": {"per_client": [5, 5, 5]},
}
MEASURED = {"per_seed": {"0": {"rounds": [1.0, 2.0]}, "1": {"rounds": [6.0]}}}


@pytest.fixture
def run(tmp_path):
    records = [
        {"round": i, "seed": 0, "accuracy": a, "diagnostics": {"entropy_bits": 3.0 - i}}
        for i, a in enumerate((0.2, 0.796, 0.8, 0.7), 1)
    ]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return Run(tmp_path, RESULT, MEASURED)


BY_HAND = [
    ("accuracy", 50.0),
    ("client_mean", 62.5),
    ("client_min", 25.0),
    ("client:0", 75.0),
    ("client:1", None),  # it has no test rows
    ("client:3", None),  # there are three clients
    ("domain:real", 12.5),
    ("domain:sketch", None),
    ("worst10", 25.0),
    ("worst20", None),
    ("worst40", None),
    ("best10", 100.0),
    ("std", 3.5),
    ("params", 2560.0),
    ("head_params", (4 + 6) * 3 + 3 * 5),  # P and Q, without biases
    ("fixed_params", 64.0),
    ("macro_f1", 37.5),
    ("seconds_per_round", 3.0),
    ("curve", [20.0, 79.6, 80.0, 70.0]),
    ("curve:entropy_bits", [2.0, 1.0, 0.0, -1.0]),
    ("curve:loss", None),
    ("near_best", 2.0),  # 79.6 is within half a point of 80
]


def test_metrics_by_hand(run):
    for metric, expected in BY_HAND:
        known = expected if expected is None else pytest.approx(expected)
        assert measure(metric, run) == known, metric
    refused(lambda: measure("acuracy", run), "Did you mean 'accuracy'")


def test_differences_by_hand():
    assert subtract(Measurement(5.0, 3.0, 4), Measurement(2.0, 4.0, 9)) == Measurement(3.0, 5.0, 4)
    assert subtract(Measurement(5.0, None, 4), Measurement(2.0, 4.0, 9)).std is None
    for got, same in (("a > b", True), ("b > a", False), (None, None)):
        assert compare(Printed(text="a > b"), 0, Measurement(text=got)).same is same
    # printed 45.22 (3.65) of 3, got 47.00 (1.00) of 4: sqrt(13.3225 / 3 + 1 / 4) = sqrt(4.690833) = 2.165833
    both = compare(Printed(45.22, 3.65), 3, Measurement(47.0, 1.0, 4))
    assert both.errors == pytest.approx(1.78 / 2.165833, rel=1e-6)
    for std, seeds, measured, errors, spread in (
        (None, 0, Measurement(5.0), None, ""),
        (3.0, 9, Measurement(5.0), 3.0, "printed"),
        (3.0, 0, Measurement(5.0, 4.0, 4), 1.5, "got"),
    ):
        found = compare(Printed(2.0, std), seeds, measured)
        assert found.difference == 3.0
        assert found.errors == errors
        assert found.spread == spread


def test_metrics_of_a_run_that_lacks_rows_rounds_or_times(run):
    whole = Run(run.path, {**RESULT, "hyperparameters": {"encoder": "conv"}}, {})
    assert measure("head_params", whole) == 1000.0, "all that is trained of an encoder counts"
    assert measure("seconds_per_round", whole) is None
    nobody = Run(run.path, {**RESULT, "clients": ["a"], "accuracy": {"per_client": [None]}}, {})
    assert measure("client_min", nobody) is None
    (run.path / "rounds.jsonl").write_text("")
    assert measure("curve", run) is measure("near_best", run) is None


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("client:3", "%"),
        ("std", "points"),
        ("seconds_per_round", "s"),
        ("curve", "%"),
        ("curve:loss", ""),
        ("entropy_bound", "bits"),
    ],
)
def test_units(metric, expected):
    assert unit(metric) == expected


def test_over_seeds_is_the_mean_and_the_sample_std():
    found = over_seeds([1.0, 2.0, 3.0])
    half = 4.302653 / 3**0.5  # 0.975 quantile of Student's t with 2 degrees of freedom
    assert found == Measurement(2.0, 1.0, 3, half=pytest.approx(half, abs=1e-6))
    assert show_measured(found, "accuracy") == "2.00 (1.00) ± 2.48"
    assert over_seeds([1.0, 3.0]) == Measurement(2.0, pytest.approx(2**0.5), 2)
    assert over_seeds([1.0]) == Measurement(1.0, None, 1)
    assert over_seeds([[1.0, 2.0], [3.0, 4.0]]).curve == (2.0, 3.0)
