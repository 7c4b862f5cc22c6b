"""What the first screen says, from runs written by hand: which, by how much, how sure, and at what cost."""

import math
import random
import sys
from pathlib import Path
from string import ascii_lowercase
from types import SimpleNamespace

import pytest
from results import result_of
from scipy import stats

from fedcache.report.compare import decisive_p
from fedcache.report.figure_runs import against_bytes
from fedcache.report.find_runs import StoredRun
from fedcache.report.verdict import lead, mean_uncertainty, ranked, sent_bytes, uncertainty, verdict

SEEDS = (3, 1, 12, 7)


def run(name, *per_seed, up=6000, down=600, seconds=3.0, **more):
    """A run of three clients; 0.8 of 100 test rows is 80 of them right.

    ``per_seed`` are the accuracies of seeds 3, 1, 12, 7. A result lists them from a place that its name decides, so
    runs list the same seeds in different orders, and what belongs together is found by seed.
    """
    seeds = len(per_seed)
    first = ord(name[0]) % seeds
    stored = [*range(first, seeds), *range(first)]
    result = result_of(
        name,
        [per_seed[i] for i in stored],
        seeds=[SEEDS[i] for i in stored],
        rounds=5,
        confusion=[[100 * seeds]],
        clients=["ward 9", "ward 10", "clinic"],
        traffic={"exact": {"up_bytes": up * seeds, "down_bytes": down * seeds}},
        **more,
    )
    return StoredRun(Path(f"{name:0<16}"), result, {"seconds": {"train": seconds * seeds}})


def told(*entries, score="own"):
    return verdict([(e.method, e) for e in entries], score)


def test_validation_chooses_though_another_is_higher_on_the_test_rows():
    chosen = run("chosen", 0.80, 0.82, 0.84, validation={"mean": 0.9})
    said = told(run("higher", 0.83, 0.85, 0.88, validation={"mean": 0.8}), chosen)
    assert said.label == "chosen"
    assert said.best == chosen
    assert said.accuracy == pytest.approx(0.82)
    assert said.certainty == "Contradicted"


def test_a_method_with_one_learning_rate_is_named_beside_other_methods():
    def with_rate(name, accuracy, rate):
        return run(name, accuracy, hyperparameters={"lr": rate})

    one_step = run("ridge", 0.9)
    rows = [one_step, with_rate("sgd", 0.8, 0.1)]
    assert "learning rate of sgd" in dict(told(*rows).lines)["Tuning"]
    assert "Tuning" not in dict(told(*rows, with_rate("sgd", 0.7, 0.01)).lines)
    assert "Tuning" not in dict(told(rows[1]).lines)


def test_without_validation_rows_it_says_that_it_is_by_test_rows():
    said = told(run("low", 0.5), run("high", 0.9))
    assert said.certainty == "Sure"
    assert "no validation split" in dict(said.lines)["Selected by"]


def test_a_lead_is_paired_over_seeds_and_else_over_test_rows():
    gap = lead(run("one", 0.80, 0.82, 0.87), run("two", 0.79, 0.80, 0.83), "own")
    found = stats.ttest_rel([0.80, 0.82, 0.87], [0.79, 0.80, 0.83]).confidence_interval(0.95)
    assert (gap.low, gap.high) == pytest.approx((found.low, found.high))
    assert gap.over == "3 seeds"
    fixed = run("fixed", 0.9, 0.9, 0.9)
    gap = lead(fixed, run("other", 0.8, 0.8, 0.8), "own")
    half = 1.959964 * math.sqrt((0.09 + 0.16) / 100)
    assert gap.value == pytest.approx(0.1)
    assert gap.low == pytest.approx(0.1 - half)
    assert gap.high == pytest.approx(0.1 + half)
    assert gap.over == "100 test rows"
    assert lead(fixed, run("alone", 0.7, protocol="personalised"), "own") is None


def test_a_lead_of_personal_models_is_paired_over_clients():
    def personal(name, *clients):
        mean = sum(clients) / len(clients)
        accuracy = {
            "mean": mean,
            "per_seed": [mean],
            "client_mean": mean,
            "client_mean_per_seed": [mean],
            "per_client": list(clients),
        }
        return run(name, mean, protocol="personalised", accuracy=accuracy)

    gap = lead(personal("a", 0.9, 0.8, 0.6), personal("b", 0.8, 0.75, 0.58), "own")
    found = stats.ttest_rel([0.9, 0.8, 0.6], [0.8, 0.75, 0.58]).confidence_interval(0.95)
    assert gap.low == pytest.approx(found.low)
    assert gap.high == pytest.approx(found.high)
    assert gap.over == "3 clients"


def test_what_does_not_vary_has_an_interval_over_test_rows_and_no_spread_of_zero():
    fixed = uncertainty(run("fixed", 0.9, 0.9, 0.9), "own")
    assert round(fixed.low, 4) == 0.8256
    assert round(fixed.high, 4) == 0.9448
    assert fixed.over == "100 test rows"
    assert uncertainty(run("varied", 0.8, 0.9, 0.85), "own").over == "3 seeds"
    assert uncertainty(run("two", 0.8, 0.9), "own") is None, "of two seeds there is none"


def test_rows_in_one_place_are_a_reference_and_not_what_to_take():
    central = run("central", 0.99, up=0, down=0)
    solo = run("solo", 0.7, up=0, down=0, protocol="personalised")
    assert [e.pooled_rows for e in (central, solo, run("a", 0.8))] == [True, False, False]
    assert told(central, run("a", 0.8), solo).label == "a"
    alone = told(central)
    assert alone.label == "central"
    assert alone.certainty == "Only one run"


def test_cost_is_of_one_client_and_one_seed_and_names_what_is_as_good_and_cheaper():
    dear = run("dear", 0.90, up=3_000_000, down=9000, seconds=300.0)
    assert sent_bytes(dear) == 1e6
    said = told(dear, run("cheap", 0.89, up=3000), run("poor", 0.2, up=3))
    assert "cheap" in dict(said.lines)["Cost"]
    assert said.certainty == "Not sure"


def test_a_lead_over_the_second_alone_is_no_certainty_among_many():
    """0.12 over 100 rows each has an interval above 0 alone and not among twenty."""
    best = run("best", 0.92)
    second = run("second", 0.82)
    assert told(best, second).certainty == "Sure"
    assert told(best, second, *(run(f"m{i:02}", 0.5) for i in range(19))).certainty == "Not sure"


def test_equals_are_taken_as_in_a_grid_and_what_is_not_scored_comes_last():
    none = run("none", 0.5)
    none.result["accuracy"].update(mean=None, per_seed=[None])
    runs = [none, run("b", 0.9), run("a", 0.9)]
    assert [e.method for e in ranked(runs, "own")] == ["a", "b", "none"]
    assert told(*runs).certainty == "Tied"


def test_of_few_seeds_a_typical_spread_is_taken_and_rivals_that_diverge_hide_nothing():
    best = run("best", 0.90, 0.91, 0.92)
    near = [run(f"near{i}", 0.85 + i / 1000, 0.86, 0.87 - i / 1000) for i in range(1, 20)]
    wild = [run(f"wild{i}", 0.1, 0.8, 0.4 + i / 100) for i in range(9)]
    assert told(best, *near).certainty == "Sure"
    assert told(best, *near, *wild).certainty == "Sure", "far below, however wildly"
    assert told(best, run("close", 0.895, 0.92, 0.915), *near).certainty == "Not sure"


@pytest.mark.parametrize("seed", range(20))
def test_every_point_of_costs_has_its_name_in_the_figure_or_below_it(seed):
    draw = random.Random(seed)
    count = draw.randint(2, 12)
    runs = [
        run(f"{letter}-method", draw.random(), up=int(3 * 10 ** draw.uniform(3, 8)))
        for letter in ascii_lowercase[:count]
    ]
    made = against_bytes("f", [(e.method, e) for e in runs])
    below = made.description.partition("overlap: ")[2]
    for entry in runs:
        # the name of a point is a text of its own
        assert f">{entry.method}<" in made.svg or entry.method in below or " more" in below
    if count < 5:
        assert not below


def test_a_mean_over_test_sets_has_the_interval_of_independent_estimates():
    runs = [run("a", 0.8, 0.8, 0.8), run("b", 0.6, 0.6, 0.6)]
    halves = [(each.high - each.low) / 2 for each in (uncertainty(e, "own") for e in runs)]
    made = mean_uncertainty(runs, "own")
    assert made.value == pytest.approx(0.7)
    assert (made.high - made.low) / 2 == pytest.approx(math.hypot(*halves) / 2)
    assert made.over == "all test rows"
    assert mean_uncertainty([*runs, run("c", 0.5, 0.6)], "own") is None


def test_a_lead_over_seeds_must_hold_over_their_test_rows_too(monkeypatch):
    best = run("best", 0.90, 0.91, 0.92)
    second = run("second", 0.87, 0.88, 0.90)
    assert told(best, second).certainty == "Sure"
    wide = SimpleNamespace(difference=0.08 / 3, interval=(-0.02, 0.07), rows=168)
    monkeypatch.setattr(sys.modules[lead.__module__], "row_difference", lambda *_: wide)
    assert lead(best, second, "own").over == "168 test rows"
    said = told(best, second)
    assert said.certainty == "Not sure"
    assert "168 test rows" in dict(said.lines)["How sure"]


@pytest.mark.parametrize(
    ("holm", "rows", "expected"),
    [(0.01, 0.2, 0.2), (0.2, 0.01, 0.2), (None, 0.3, 0.3), (0.1, None, 0.1), (None, None, None)],
)
def test_the_larger_p_decides(holm, rows, expected):
    of_rows = None if rows is None else SimpleNamespace(holm=rows)
    assert decisive_p(SimpleNamespace(holm=holm, rows=of_rows)) == expected
