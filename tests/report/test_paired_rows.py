"""Differences over test rows: McNemar's test, hand-worked and as simulated; what is not paired is not tested."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from arrays import ingested
from command import data_of, ok
from made_path import place_of
from scipy import stats

from fedcache.report.comparison import MOST_EXACT, row_difference, rows_of_run, sign_test
from fedcache.report.find_runs import StoredRun
from fedcache.runs.directory import TestRows


def run(seeds, protocol="global"):
    made = StoredRun(Path("none"), {"protocol": protocol, "seeds": list(seeds or {})}, {})
    made.__dict__["test_rows"] = seeds  # what the property would read
    return made


def of_one(right, rows=None):
    """One model, each row tested by one of as many clients with one row each."""
    r = np.array(right)
    n = len(right)
    return TestRows(
        np.arange(n) if rows is None else np.array(rows),
        r,
        np.ones(n, np.int64),
        r / n,
        np.full(n, 1 / n),
    )


def test_mcnemar_by_hand():
    one = of_one([1, 1, 1, 1, 1, 0, 0, 1])
    other = of_one([0, 0, 0, 0, 1, 0, 1, 1])
    found = row_difference(run({0: one}), run({0: other}), "accuracy", 0.95)
    assert found.rows == 8
    assert found.gained == 4
    assert found.lost == 1
    assert found.test == "mcnemar"
    assert found.difference == pytest.approx(3 / 8)
    # two-sided binomial of 4 or more, or 1 or fewer, among 5
    assert found.p == pytest.approx(2 * (5 + 1) / 32)
    e = np.array([1, 1, 1, 1, 0, 0, -1, 0]) / 8 - 3 / 64
    half = 1.959963984540054 * np.sqrt(8 / 7 * (e**2).sum())
    assert found.interval == pytest.approx((3 / 8 - half, 3 / 8 + half))


@pytest.mark.parametrize("throws", [0, 7, MOST_EXACT, MOST_EXACT + 1, 50_000])
def test_the_sign_test_is_scipy_s_binomial_test_on_both_sides_of_where_it_is_added_up(throws):
    for gained in sorted({0, 1, throws // 3, throws // 2, throws - throws // 2, throws}):
        if gained <= throws:
            # scipy's underflows to 0 where 2^-n does
            expected = stats.binomtest(gained, throws).pvalue if throws else 1.0
            assert sign_test(gained, throws - gained) == pytest.approx(
                expected, rel=1e-10, abs=1e-300
            )
            assert sign_test(throws - gained, gained) == sign_test(gained, throws - gained)


def test_repeated_seeds_are_no_evidence_and_an_image_of_two_seeds_is_one_image():
    one = of_one([1, 1, 1, 0, 1, 0])
    other = of_one([0, 1, 0, 0, 1, 1])
    once = row_difference(run({0: one}), run({0: other}), "pooled", 0.95)
    thrice = row_difference(
        run(dict.fromkeys(range(3), one)), run(dict.fromkeys(range(3), other)), "pooled", 0.95
    )
    assert thrice.rows == 6
    assert thrice.p == once.p
    assert thrice.test == "mcnemar"
    assert thrice.interval == pytest.approx(once.interval)


@pytest.mark.parametrize(
    ("other", "metric"),
    [
        (run({0: of_one([0, 0], [3, 4])}), "accuracy"),
        (run({0: replace(of_one([0, 0]), scored=np.array([2, 1]))}), "accuracy"),
        (run(None), "accuracy"),
        (run({0: of_one([0, 0])}, "personalised"), "accuracy"),
    ],
    ids=["rows", "how often scored", "none", "kinds"],
)
def test_what_is_not_paired_is_not_tested(other, metric):
    assert row_difference(run({0: of_one([1, 0])}), other, metric, 0.95) is None


@pytest.mark.slow
def test_intervals_cover_and_the_test_keeps_its_level():
    """1,000 draws of 300 rows, each in the tests of 1 to 4 clients, where two models differ by 4 points or by none."""
    rng = np.random.default_rng(0)
    covered = rejected = alone = 0
    for _ in range(1000):
        scored = rng.integers(1, 5, 300)
        weight = scored / scored.sum()
        first = rng.binomial(scored, 0.8)
        second = rng.binomial(scored, 0.76)
        third = rng.binomial(scored, 0.8)
        a, b, c = (
            TestRows(np.arange(300), r, scored, r / scored.sum(), weight)
            for r in (first, second, third)
        )
        runs = [run({0: rows}, "personalised") for rows in (a, b, c)]
        found = row_difference(runs[0], runs[1], "client_mean", 0.95)
        same = row_difference(runs[0], runs[2], "client_mean", 0.95)
        own = rows_of_run(runs[0], "accuracy", 0.95)
        covered += found.interval[0] <= 0.04 <= found.interval[1]
        rejected += same.p < 0.05
        alone += own[1] <= 0.8 <= own[2]
    low, high = stats.binom.ppf([0.0005, 0.9995], 1000, 0.95)
    assert low <= covered <= high
    assert low <= alone <= high
    assert 1000 - high <= rejected <= 1000 - low


def test_a_comparison_has_both_spreads(tmp_path):
    ingested(tmp_path)
    ok("grid --method fed3r,fedncm,fedrep --scheme iid --clients 4 --rounds 2 --seeds 0")
    (table,) = data_of("compare --against fed3r")["comparisons"]
    by = {pair["one"].split()[0]: pair["rows"] for pair in table["pairs"]}
    assert by["fedncm"]["test"] == "mcnemar"
    assert by["fedrep"]["test"] == "z"
    for pair in table["pairs"]:
        assert pair["rows"]["difference"] == pytest.approx(pair["difference"])
        assert pair["rows"]["holm"] >= pair["rows"]["p"]
    personal = next(t for t in table["treatments"] if t["name"].startswith("fedrep"))
    assert personal["test_rows"][1] < personal["mean"] < personal["test_rows"][2]


def test_an_interval_is_of_the_seeds_that_are_compared():
    both = run({0: of_one([1, 1, 1, 0]), 1: of_one([0, 0, 1, 0])}, "personalised")
    first = rows_of_run(both, "accuracy", 0.95, [0])
    assert first == rows_of_run(run({0: of_one([1, 1, 1, 0])}, "personalised"), "accuracy", 0.95)
    assert first != rows_of_run(both, "accuracy", 0.95)


def test_a_comparison_of_a_run_with_drawn_clients_says_so(tmp_path):
    ingested(tmp_path)
    paths = [
        place_of("train --scheme iid --clients 4 --rounds 1 --method fedrep", *more)
        for more in ((), ("--eval-clients", 2))
    ]
    assert (
        "Runs are scored on different numbers of clients."
        in ok("compare", *paths, "--over", "seeds").out
    )
