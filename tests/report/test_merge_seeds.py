"""Runs of equal settings and different seeds are one run, and differences say the seeds that they are over."""

from pathlib import Path

import numpy as np
import pytest
from federation import trial_of_case
from results import result_of
from scipy import stats

from fedcache.federate.methods import METHODS, NAMES
from fedcache.report.comparison import common_seeds, compared, depends_on_seed, paired_seeds, within
from fedcache.report.find_runs import Gathered, StoredRun, merge_seeds
from fedcache.report.verdict import lead
from fedcache.runs.directory import TestRows, draws_nothing

# Accuracy of each of 100 test rows is the share of rows below this number that are right.
BY_SEED = {0: 0.84, 1: 0.79, 2: 0.76, 3: 0.81, 4: 0.74}


def run(name, by_seed, method="fedavg", **more):
    """A run of three clients on 100 test rows, whose clients are as far apart as their numbers."""
    seeds = list(by_seed)
    values = list(by_seed.values())
    mean = float(np.mean(values))
    right = round(100 * sum(values))
    result = result_of(
        method,
        values,
        preset="paper",
        seeds=seeds,
        rounds=5,
        participation="all",
        hyperparameters={"lr": 0.1},
        fairness={"worst10": mean - 0.1},
        confusion=[[right, 100 * len(seeds) - right]],
        clients=["zebra", "ant", "10"],
        traffic={
            "exact": {
                "up_bytes": 600 * len(seeds),
                "down_bytes": 60 * len(seeds),
                "per_client_round": {"up": 40, "down": 4},
            }
        },
        code="c",
    )
    result["accuracy"] |= {
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        "per_client": [mean - 0.1, mean, mean + 0.1],
        "client_mean": mean,
        "client_mean_per_seed": values,
        "pooled": mean,
        "pooled_per_seed": values,
    }
    result |= more
    made = StoredRun(Path(f"{name:0<16}"), result, {"seconds": {"train": 2.0 * len(seeds)}})
    made.__dict__["test_rows"] = {seed: rows_of(value) for seed, value in by_seed.items()}
    made.__dict__["rounds"] = [
        {"seed": seed, "round": 4, "accuracy": value} for seed, value in by_seed.items()
    ]
    return made


def rows_of(accuracy):
    right = (np.arange(100) < round(100 * accuracy)).astype(np.int64)
    return TestRows(np.arange(100), right, np.ones(100, np.int64), right / 100, np.full(100, 0.01))


def some(*seeds):
    return {seed: BY_SEED[seed] for seed in seeds}


def fixed(*seeds):
    """A method without a random step, for these seeds."""
    settings = METHODS["fed3r"].resolve("paper")
    return run("fixed", dict.fromkeys(seeds, 0.89), "fed3r", rounds=1, hyperparameters=settings)


def one_run(*runs):
    (made,) = merge_seeds(Gathered(list(runs))).entries
    return made


SPLITS = {"disjoint": [(3, 1), (0, 2, 4)], "one contains the other": [(0, 1, 2), (4, 3, 2, 1, 0)]}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_runs_of_equal_settings_are_the_run_of_all_their_seeds(split):
    made = one_run(*[run(f"r{i}", some(*seeds)) for i, seeds in enumerate(split)])
    whole = run("whole", BY_SEED)
    assert (
        dict(zip(made.result["seeds"], made.result["accuracy"]["per_seed"], strict=True)) == BY_SEED
    )
    for part, name in (("accuracy", "mean"), ("macro_f1", "mean"), ("fairness", "worst10")):
        assert made.result[part][name] == pytest.approx(whole.result[part][name]), part
    assert made.result["accuracy"]["std"] == pytest.approx(whole.result["accuracy"]["std"])
    assert made.result["traffic"]["exact"] == whole.result["traffic"]["exact"]
    assert made.clients.accuracy == pytest.approx(whole.clients.accuracy)
    assert {seed: int(found.right.sum()) for seed, found in made.test_rows.items()} == {
        seed: round(100 * value) for seed, value in BY_SEED.items()
    }
    assert {(r["seed"], r["accuracy"]) for r in made.rounds} == set(BY_SEED.items())


@pytest.mark.parametrize(
    "other",
    [
        {"hyperparameters": {"lr": 0.2}},
        {"rounds": 6},
        {"code": "later"},
        {
            "partition": {
                "scheme": "iid",
                "args": {},
                "name": "q",
                "seed": 1,
                "clients": 3,
                "digests": ["q", "q"],
            }
        },
        {"participants": {"client_sampling": "weighted"}},
        {"trust": {"dp_noise": 1.0, "privacy": {"noise": 1.0, "simulation": True}}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_settings_are_another_run(other):
    runs = [run("a", some(3, 1), **other), run("b", some(0, 2))]
    assert len(merge_seeds(Gathered(runs)).entries) == 2


def test_a_preset_of_the_same_hyperparameters_is_the_same_run():
    tuned = run("a", some(3, 1), preset="tuned")
    assert one_run(tuned, run("b", some(0, 2, 4))).result["seeds"] == [0, 2, 4, 3, 1]


# -- pairs of seeds ------------------------------------------------------------------------------------------------


def test_seeds_are_paired_by_number_and_a_run_without_draws_with_every_seed():
    one = run("a", some(3, 1, 0))
    assert paired_seeds(one, run("b", some(0, 2, 3), "fedprox")) == [(3, 3), (0, 0)]
    assert paired_seeds(fixed(0), one) == [(0, 0), (0, 3), (0, 1)]
    assert paired_seeds(one, fixed(7)) == [(3, 7), (1, 7), (0, 7)]
    assert common_seeds(one, fixed(7)) == [3, 1, 0]


@pytest.mark.parametrize(
    "more",
    [
        {"participation": "2"},
        {"trust": {"attack": "ipm:0.2"}},
        {"participants": {"client_dropout": 0.1}},
        {"timing": {"simulated_time": 1.0}},
        {"method": "fedavg", "hyperparameters": METHODS["fedavg"].resolve("paper")},
        {"hyperparameters": METHODS["fed3r"].resolve("paper", {"rff_dim": 16})},
        {"method": "nobody-knows-it"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_run_of_one_seed_that_draws_something_depends_on_it(more):
    entry = fixed(0)
    assert not depends_on_seed(entry)
    entry.result.update(more)
    assert depends_on_seed(entry)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if draws_nothing(n, METHODS[n].resolve("paper"))]
)
def test_a_method_that_draws_nothing_gives_the_same_for_every_seed(name):
    """What the report takes for granted of a run of one seed."""
    tried = trial_of_case((name, {}), "sequential")
    outs = [tried.run(tried.federation(), seed=seed, participation=None) for seed in (3, 1)]
    assert np.array_equal(outs[0].evaluation.predictions, outs[1].evaluation.predictions)


# -- what is shown -------------------------------------------------------------------------------------------------


def comparison(*entries):
    return compared(
        within(list(entries), "here", "accuracy", "seeds"), over="seeds", metric="accuracy"
    )


def test_a_run_of_one_seed_without_draws_is_compared_over_all_seeds_of_the_other():
    """79.67 of three seeds stays, and the difference is 89 - 79.67, not 89 minus the one seed that both have."""
    other = run("a", some(3, 1, 0))
    mean = np.mean([BY_SEED[seed] for seed in (3, 1, 0)])
    for made in (comparison(fixed(0), other), comparison(fixed(7), other)):
        assert {t.name: t.mean for t in made.treatments} == pytest.approx(
            {"fed3r": 0.89, "fedavg": mean}
        )
        (pair,) = made.pairs
        assert pair.difference == pytest.approx(mean - 0.89)
        assert pair.blocks == ("3", "1", "0")
        expected = stats.ttest_1samp([BY_SEED[seed] - 0.89 for seed in (3, 1, 0)], 0.0)
        assert pair.p == pytest.approx(float(expected.pvalue))
        assert pair.rows.difference == pytest.approx(pair.difference)
    gap = lead(fixed(0), other, "own")
    assert gap.value == pytest.approx(0.89 - mean)
    assert gap.over == "3 seeds"


def test_a_difference_over_some_seeds_says_which_and_the_table_has_the_full_means():
    made = comparison(run("a", some(3, 1, 0, 4)), run("b", {0: 0.7, 2: 0.6, 3: 0.65}, "fedprox"))
    means = {"fedavg": np.mean([BY_SEED[s] for s in (3, 1, 0, 4)]), "fedprox": 0.65}
    assert {t.name: t.mean for t in made.treatments} == pytest.approx(means)
    (pair,) = made.pairs
    assert pair.blocks == ("3", "0")
    assert pair.difference == pytest.approx(np.mean([0.65 - 0.81, 0.7 - 0.84]))


# -- the commands --------------------------------------------------------------------------------------------------


def test_a_run_that_two_runs_share_seeds_with_is_no_exact_mean():
    shared = one_run(run("a", some(0, 1, 2)), run("b", some(2, 3)))
    separate = one_run(run("a", some(0, 1, 2)), run("b", some(3)))
    assert shared.exact is False
    assert separate.exact is True
    assert sorted(shared.result["seeds"]) == [0, 1, 2, 3]
    assert shared.result["accuracy"]["mean"] == pytest.approx(
        np.mean([BY_SEED[i] for i in range(4)])
    )
