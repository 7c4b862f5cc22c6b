"""``compare``: the numbers are those of scipy, autorank and Demšar's paper; what cannot be compared is said."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command import apart, fedcache, ok
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

import fedcache as fc
from fedcache.errors import FedcacheError, UsageError
from fedcache.report import compare
from fedcache.report import comparison_output as cd_diagram
from fedcache.report.comparison_output import latex, markdown
from fedcache.report.find_runs import gather
from fedcache.report.paired_blocks import PairedBlocks, across, complete, within
from fedcache.report.paired_tests import Comparison, _p, compared
from fedcache.report.statistics import (
    critical_difference,
    friedman,
    groups,
    holm,
    interval,
    interval_words,
    mean_ranks,
    p_value,
    ranking,
)
from fedcache.runs.directory import read_result, write_result

NAMES = ("a", "b", "c", "d")
FOUR = np.array(
    [
        [0.812, 0.774, 0.830, 0.791, 0.808, 0.825, 0.779, 0.801],
        [0.798, 0.781, 0.811, 0.780, 0.795, 0.812, 0.770, 0.801],
        [0.755, 0.748, 0.790, 0.768, 0.771, 0.769, 0.752, 0.766],
        [0.760, 0.741, 0.774, 0.768, 0.750, 0.741, 0.758, 0.749],
    ]
)
# What autorank 1.3.0 (scipy 1.17.1) gives for the columns a to d:
#   autorank(DataFrame, force_mode="nonparametric", alpha=0.05) for all four, and for two of them with
#   force_mode="parametric" (t-test) and "nonparametric" (Wilcoxon, one-sided there: half of the two-sided p).
AUTORANK_RANKS = (1.1875, 1.8125, 3.3125, 3.6875)
AUTORANK_P = 0.00010527618177149795
AUTORANK_CD = 1.6582924452770451  # its studentized range is an approximation, good to five digits
AUTORANK_GROUPS = ((0, 1), (1, 2), (2, 3))  # from the worst on there
AUTORANK_TTEST = {"ab": 0.01944065027751676, "ad": 0.00036705314002813833, "cd": 0.06557745286776755}
AUTORANK_WILCOXON = {"ab": 0.015625, "ad": 0.00390625, "cd": 0.0390625}

# Demšar, JMLR 7 (2006), table 6: AUC of C4.5, C4.5+m, C4.5+cf and C4.5+m+cf on 14 datasets. Printed are two 0.975 with
# the ranks 2 and 3; scipy's own tests write 0.9751 for the first, and have Friedman's 10.228 (with ties) of it.
DEMSAR = np.array(
    [
        [0.763, 0.599, 0.954, 0.628, 0.882, 0.936, 0.661, 0.583, 0.775, 1.000, 0.940, 0.619, 0.972, 0.957],
        [0.768, 0.591, 0.971, 0.661, 0.888, 0.931, 0.668, 0.583, 0.838, 1.000, 0.962, 0.666, 0.981, 0.978],
        [0.771, 0.590, 0.968, 0.654, 0.886, 0.916, 0.609, 0.563, 0.866, 1.000, 0.965, 0.614, 0.9751, 0.946],
        [0.798, 0.569, 0.967, 0.657, 0.898, 0.931, 0.685, 0.625, 0.875, 1.000, 0.962, 0.669, 0.975, 0.970],
    ]
)
TABLES = arrays(
    np.float64, st.tuples(st.integers(2, 5), st.integers(2, 9)), elements=st.integers(0, 50).map(lambda i: i / 50)
)


def table(values: np.ndarray, names: Sequence[str] | None = None) -> PairedBlocks:
    chosen = tuple(names or (f"t{i}" for i in range(len(values))))
    return PairedBlocks("somewhere", chosen, tuple(map(str, range(values.shape[1]))), values)


def four(**options: Any) -> Comparison:
    return compared(table(FOUR, NAMES), **{"over": "settings", "metric": "accuracy", **options})


# -- numbers -------------------------------------------------------------------------------------------------------


def test_ranks_friedman_and_critical_difference_are_those_of_autorank() -> None:
    found = ranking(FOUR, 0.95)
    assert found is not None
    assert found.ranks == pytest.approx(AUTORANK_RANKS, abs=1e-12)
    assert found.p == pytest.approx(AUTORANK_P, rel=1e-9)
    assert found.cd == pytest.approx(AUTORANK_CD, rel=1e-4)
    assert found.groups == AUTORANK_GROUPS


@pytest.mark.parametrize("pair", ["ab", "ad", "cd"])
def test_p_of_pairs_is_that_of_autorank(pair: str) -> None:
    one, other = (FOUR[NAMES.index(name)] for name in pair)
    assert p_value("ttest", one - other) == pytest.approx(AUTORANK_TTEST[pair], rel=1e-9)
    assert p_value("wilcoxon", one - other) == pytest.approx(2 * AUTORANK_WILCOXON[pair], rel=1e-12)


def test_ranks_and_critical_difference_are_those_of_demsars_paper() -> None:
    assert mean_ranks(DEMSAR) == pytest.approx([3.143, 2.000, 2.893, 1.964], abs=5e-4)
    assert friedman(DEMSAR) == pytest.approx((10.2283464566929, 0.0167215803284414))
    assert critical_difference(4, 14, 0.95) == pytest.approx(1.25, abs=5e-3)
    # table 5(a) of the paper: q at 0.05 for 2, 3, 5 and 10 classifiers; divided by the root, q is left
    for treatments, q in ((2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)):
        found = critical_difference(treatments, 1, 0.95) / np.sqrt(treatments * (treatments + 1) / 6)
        assert found == pytest.approx(q, abs=1e-3)


def test_intervals_of_few_values_are_students_and_cover_what_they_say() -> None:
    rng = np.random.default_rng(0)
    for count in (3, 5, 9):
        drawn = rng.normal(size=(2000, count))
        found = stats.t.interval(0.95, count - 1, loc=drawn[0].mean(), scale=stats.sem(drawn[0]))
        assert interval(drawn[0], 0.95) == pytest.approx(found, abs=1e-12)
        reach = [interval(values, 0.95) for values in drawn]
        assert np.mean([r is not None and r[0] < 0 < r[1] for r in reach]) == pytest.approx(0.95, abs=0.015)
    assert interval_words(9) == "Student's t intervals"
    assert interval_words(10) == "percentile bootstrap intervals"


def test_intervals_of_many_values_are_those_of_scipy_of_sorted_values() -> None:
    many = DEMSAR[:, :12]
    for values in (*many, many[0] - many[3]):
        for level in (0.9, 0.95):
            found = stats.bootstrap(
                (np.sort(values),), np.mean, n_resamples=9999, confidence_level=level, method="percentile",
                random_state=np.random.default_rng(0),
            ).confidence_interval  # fmt: skip
            assert interval(values, level) == (found.low, found.high)
    made = four(level=0.9)
    assert made.treatments[0].interval == interval(FOUR[0], 0.9)
    assert made.pairs[2].interval == interval(FOUR[3] - FOUR[0], 0.9)


def test_a_comparison_by_hand() -> None:
    # a: 0.5, 0.7 -> mean 0.6, std sqrt(0.02); b: 0.4, 0.8 -> mean 0.6, std sqrt(0.08); c: 0.1, 0.3
    made = compared(table(np.array([[0.1, 0.3], [0.5, 0.7], [0.4, 0.8]]), "cab"), over="seeds", metric="accuracy")
    assert [t.name for t in made.treatments] == ["a", "b", "c"]
    assert made.best == ("a", "b")
    assert [t.mean for t in made.treatments] == pytest.approx([0.6, 0.6, 0.2])
    assert [t.std for t in made.treatments] == pytest.approx([0.02**0.5, 0.08**0.5, 0.02**0.5])
    # ranks in two blocks: a 1, 2; b 2, 1; c 3, 3
    assert [t.rank for t in made.treatments] == [1.5, 1.5, 3.0]
    assert [t.interval for t in made.treatments] == [None] * 3
    assert [(p.one, p.other) for p in made.pairs] == [("b", "a"), ("c", "a")]
    assert [p.difference for p in made.pairs] == pytest.approx([0.0, -0.4])
    # b - a is -0.1, 0.1: t = 0. c - a is -0.4 twice: no spread, no t.
    assert [p.p for p in made.pairs] == [pytest.approx(1.0), None]
    assert made.alike == ("b",)
    assert any("a" in n and "no interval" in n for n in made.notes)
    assert any("c and a not tested" in n for n in made.notes)


def test_holm_by_hand() -> None:
    # sorted .005 .01 .03 .04, times 4 3 2 1: .02 .03 .06 .04, and the last may not be below .06
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.01, None, 0.03]) == [pytest.approx(0.02), None, pytest.approx(0.03)]
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_groups_by_hand() -> None:
    assert groups([1.0, 2.0, 3.0, 4.5], 1.0) == ((0, 1), (1, 2))
    assert groups([4.5, 1.0, 3.0, 2.0], 2.0) == ((1, 3, 2), (2, 0))
    assert groups([1.0, 3.0], 1.0) == ()
    assert groups([2.0, 2.0, 2.0], 0.5) == ((0, 1, 2),)


def test_all_pairs_are_one_family_and_a_reference_takes_the_place_of_the_best() -> None:
    every = four(pairs="all", test="ttest")
    assert [(p.one, p.other) for p in every.pairs] == [
        ("a", "b"),
        ("a", "c"),
        ("a", "d"),
        ("b", "c"),
        ("b", "d"),
        ("c", "d"),
    ]
    assert [p.holm for p in every.pairs] == holm([p.p for p in every.pairs])
    against = four(against="c")
    assert {p.other for p in against.pairs} == {"c"}
    assert against.best == ("a",)
    assert against.alike == ("d",)  # two-sided Wilcoxon 0.078
    assert not any("flatters" in n for n in against.notes)
    assert any("flatters" in n for n in four().notes)


def test_a_constant_is_no_evidence_however_often_it_is_repeated() -> None:
    made = compared(
        table(np.array([[0.5] * 8, [0.4] * 8, [0.1, 0.2, 0.3, 0.2, 0.1, 0.3, 0.2, 0.2]])),
        over="seeds", metric="accuracy", test="wilcoxon",
    )  # fmt: skip
    assert [p.p is None for p in made.pairs] == [True, False]
    assert made.pairs[1].holm == made.pairs[1].p  # a family of one
    assert made.treatments[0].interval is None
    assert any("t1 and t0 not tested: neither of the two varies" in n for n in made.notes)


@pytest.mark.slow
@settings(max_examples=30)
@pytest.mark.cases(30)
@given(values=TABLES, seed=st.integers(0, 99), test=st.sampled_from(["wilcoxon", "ttest"]))
def test_the_order_of_the_blocks_changes_nothing(values: np.ndarray, seed: int, test: str) -> None:
    order = np.random.default_rng(seed).permutation(values.shape[1])
    one, two = (compared(table(v), over="clients", metric="accuracy", test=test) for v in (values, values[:, order]))
    assert [t.name for t in one.treatments] == [t.name for t in two.treatments]
    for a, b in zip((*one.treatments, *one.pairs), (*two.treatments, *two.pairs), strict=True):
        x, y = ({k: v for k, v in vars(t).items() if k not in ("values", "blocks")} for t in (a, b))
        assert (
            x == pytest.approx(y, nan_ok=False)
            if x["interval"] is None
            else x["interval"] == pytest.approx(y["interval"])
        )
    if one.ranking and two.ranking:
        assert one.ranking.p == pytest.approx(two.ranking.p)


def test_two_values_that_are_repeated_for_every_seed_have_no_ranks_and_no_test() -> None:
    still = np.array([[0.8] * 5, [0.7] * 5, [0.71, 0.74, 0.69, 0.73, 0.75]])
    for over in ("seeds", "clients"):
        found = compared(table(still), over=over, metric="accuracy")
        assert found.ranking is None
        assert sum("No test of ranks" in note for note in found.notes) == 1
        assert [p.p is None for p in found.pairs] == [p.other == "t0" and p.one == "t1" for p in found.pairs]
    # Settings are not repetitions; of one value without a spread, and of two equal ones, no order is counted twice.
    for values, over in ((still, "settings"), (still[1:].repeat(2, 0)[:3], "seeds"), (np.flipud(FOUR[:3]), "seeds")):
        found = compared(table(values), over=over, metric="accuracy")
        assert found.ranking is not None
        assert not any("No test of ranks" in note for note in found.notes)


@settings(max_examples=30)
@pytest.mark.cases(30)
@given(values=TABLES, test=st.sampled_from(["wilcoxon", "ttest"]))
def test_a_treatment_does_not_differ_from_itself(values: np.ndarray, test: str) -> None:
    both = np.stack([values[0], values[0]])
    (pair,) = compared(table(both), over="seeds", metric="accuracy", test=test).pairs
    assert (pair.p, pair.holm, pair.difference, pair.interval) == (1.0, 1.0, 0.0, None)
    assert ranking(np.stack([values[0]] * 3), 0.95).p == 1.0  # type: ignore[union-attr]


@pytest.mark.slow
@settings(max_examples=50)
@pytest.mark.cases(50)
@given(treatments=st.integers(2, 30), blocks=st.integers(2, 50), p=st.lists(st.floats(0.0, 1.0), max_size=8))
def test_differences_grow_with_treatments_and_corrections_only_raise(
    treatments: int, blocks: int, p: list[float]
) -> None:
    here = critical_difference(treatments, blocks, 0.95)
    assert here < critical_difference(treatments + 1, blocks, 0.95)
    assert here > critical_difference(treatments, blocks + 1, 0.95)
    assert here < critical_difference(treatments, blocks, 0.99)
    corrected = holm(list(p))
    assert all(q is not None and a <= q <= 1.0 for a, q in zip(p, corrected, strict=True))


def test_few_blocks_are_called_few() -> None:
    one = compared(table(FOUR[:, :1]), over="seeds", metric="accuracy")
    assert one.pairs[0].p is None
    assert one.treatments[0].std is None
    assert one.ranking is None
    assert any("--seeds 0-4" in n and "--over clients" in n for n in one.notes)
    two, three, ten = (
        compared(table(np.arange(2 * n).reshape(n, 2).T / 100), over="seeds", metric="accuracy") for n in (2, 3, 10)
    )
    assert two.notes[0] == "Two seeds: no interval, which takes three."
    assert not any("interval" in n for n in three.notes)
    assert not any("interval" in n for n in ten.notes)
    five = compared(table(FOUR[:, :5]), over="seeds", metric="accuracy", test="wilcoxon")
    assert any("never below 0.0625, 3 times" in n for n in five.notes)
    assert min(p.p for p in five.pairs if p.p is not None) == 0.0625
    assert not any("never below" in n for n in four().notes)


# -- runs ----------------------------------------------------------------------------------------------------------


def write(name: str, method: str, per_seed: Sequence[float | None], **more: Any) -> Path:
    """A stored result with what ``compare`` reads."""
    seeds = more.pop("seeds", list(range(len(per_seed))))
    known = [v for v in per_seed if v is not None]
    mean = float(np.mean(known)) if len(known) == len(per_seed) else None
    clients = more.pop("clients", {"north": 0.5, "south": 0.6})
    dataset, partition = more.pop("dataset", "shapes"), more.pop("partition", "p0")
    path = Path(os.environ["FEDCACHE_HOME"]) / "runs" / name
    path.mkdir(parents=True)
    result = {
        "method": method,
        "backbones": ["random-projection"],
        "features": ["f" * 64],
        "hyperparameters": more.pop("hyperparameters", {}),
        "dataset": {"slug": dataset, "digest": f"{dataset}-digest"},
        "partition": {"scheme": "iid", "name": partition, "args": {}, "seed": 0, "digests": [partition] * len(seeds)},
        "seeds": seeds,
        "clients": more.pop("names", list(clients)),
        "accuracy": {
            "mean": mean,
            "per_seed": list(per_seed),
            "per_client": more.pop("per_client", list(clients.values())),
            "client_mean": mean,
        },
        "macro_f1": {"mean": mean, "per_seed": list(per_seed)},
        "fairness": {"worst10": mean, "worst20": None, "worst40": mean, "best10": mean},
        "protocol": "global",
        "fidelity": "exact",
        "digest": name,
        **more,
    }
    write_result(path / "result.json", result)
    return path


@pytest.fixture
def three(own_home: Path) -> Path:
    write("aa01", "fedavg", FOUR[3][:6])
    write("bb02", "fedprox", FOUR[2][:6])
    write("cc03", "fed3r", FOUR[0][:6])
    return own_home / "runs"


def entries(root: Path) -> list[Any]:
    return gather([], root).entries


def test_seeds_are_paired_by_number(own_home: Path) -> None:
    write("aa", "fedavg", [0.1, 0.2, 0.3, None], seeds=[0, 1, 2, 3])
    write("bb", "fedprox", [0.7, 0.6, 0.5, 0.9], seeds=[2, 1, 0, 3])
    write("cc", "fed3r", [0.4, 0.5, 0.6], seeds=[1, 2, 4])
    found = within(entries(own_home / "runs"), "here", "accuracy", "seeds")
    assert found.blocks == ("0", "1", "2", "3", "4")
    none = np.nan
    expected = [[0.1, 0.2, 0.3, none, none], [0.5, 0.6, 0.7, 0.9, none], [none, 0.4, 0.5, none, 0.6]]
    np.testing.assert_array_equal(found.values, expected)
    made = compared(found, over="seeds", metric="accuracy")
    assert {p.one: p.blocks for p in made.pairs} == {"fedavg": ("0", "1", "2"), "fed3r": ("1", "2")}
    assert {t.name: t.mean for t in made.treatments} == pytest.approx({"fedavg": 0.2, "fedprox": 0.675, "fed3r": 0.5})
    assert made.ranking is not None
    assert made.ranking.blocks == 2
    assert "Ranks are over the 2 seeds that all runs have." in made.notes


def test_clients_are_paired_by_name_and_unscored_ones_left_out(own_home: Path) -> None:
    write("aa", "fedavg", [0.1], clients={"north": 0.1, "south": 0.2, "west": None})
    write("bb", "fedprox", [0.1, 0.2], clients={"south": 0.4, "west": 0.5, "north": 0.3})
    found = within(entries(own_home / "runs"), "here", "accuracy", "clients")
    assert found.blocks == ("north", "south")
    assert found.values.tolist() == [[0.1, 0.2], [0.3, 0.4]]
    assert any("west, without a value in fedavg" in n for n in found.notes)
    assert any("seeds that differ between runs (1 to 2" in n for n in found.notes)


def test_clients_of_one_order_are_paired_by_place(own_home: Path) -> None:
    named = ["a", "b", "a", "c", "d", "e"]
    for ident, method, values in (
        ("aa", "fedavg", [0.1, 0.2, 0.3, None, None, None]),
        ("bb", "fedprox", [0.4, None, 0.6, 0.7, None, None]),
        ("cc", "fed3r", [0.8, 0.9, 1.0, 0.1, None, 0.5]),
        ("dd", "solo", [None] * 6),
    ):
        write(ident, method, [0.1], names=named, per_client=values)
    found = within(entries(own_home / "runs"), "here", "accuracy", "clients")
    assert found.blocks == ("a", "a #2"), "the second of a name is another client"
    assert found.values.tolist() == [[0.1, 0.3], [0.4, 0.6], [0.8, 1.0]]
    assert [n for n in found.notes if n.startswith("Left out")] == [
        "Left out, because nothing of it could be scored: solo.",
        "Left out of the clients: b, without a value in fedprox.",
        "Left out of the clients: c, without a value in fedavg.",
        "Left out of the clients: d, without a value in fedavg, fedprox, fed3r.",
        "Left out of the clients: e, without a value in fedavg, fedprox.",
    ]


def test_runs_that_are_named_alike_are_told_apart_and_scoring_is_said(own_home: Path) -> None:
    write("aa00000001", "fedavg", [0.1, 0.2])
    write("bb00000002", "fedavg", [0.1, 0.2, 0.3])
    write("cc00000003", "solo", [0.1, 0.2], protocol="personalised", fidelity="approx")
    found = within(entries(own_home / "runs"), "here", "accuracy", "seeds")
    assert found.names == ("fedavg (aa000000)", "fedavg (bb000000)", "solo")
    assert any("solo: each client's model on its own test rows" in n for n in found.notes)
    assert any("Approximations of their method: solo." in n for n in found.notes)


def test_settings_make_blocks_of_equal_runs_without_holes(own_home: Path) -> None:
    for i, where in enumerate(("p0", "p1", "p2")):
        write(f"a{i}", "fedavg", [0.1 * i, 0.1 * i + 0.2], partition=where)
        write(f"b{i}", "fedprox", [0.5 + 0.1 * i], partition=where)
    write("c0", "fed3r", [0.9], partition="p0", rounds=7)  # what it alone has in another way is in no name that is left
    write("d3", "fedavg", [0.9], dataset="other")
    found = across(entries(own_home / "runs"), "accuracy")
    assert found.names == ("fedavg", "fedprox")
    assert found.blocks == ("shapes, p0", "shapes, p1", "shapes, p2")
    assert found.values == pytest.approx(np.array([[0.1, 0.2, 0.3], [0.5, 0.6, 0.7]]))
    assert any("other, p0" in n and "fed3r" in n and "Left out" in n for n in found.notes)
    assert any("3 settings of 1 dataset are not independent" in n for n in found.notes)
    assert "Values are means over seeds that differ between runs (1 to 2 of them)." in found.notes
    write("a9", "fedavg", [0.4], partition="p2")
    with pytest.raises(FedcacheError, match=r"fedavg is there twice on shapes, p2: a2 .*and a9 \(seeds 0\)"):
        across(entries(own_home / "runs"), "accuracy")


def test_the_complete_part_of_a_table_by_hand() -> None:
    # c lacks two of three settings, which is the most; then a lacks one of three, and p2 one of two methods: p2 goes
    cells = {"a": {"p0": 1.0, "p1": 1.0}, "b": {"p0": 1.0, "p1": 1.0, "p2": 1.0}, "c": {"p2": 1.0, "p1": None}}
    assert complete(cells, ["p0", "p1", "p2"]) == (["a", "b"], ["p0", "p1"])
    assert complete({"a": {}, "b": {}}, ["p0"]) == ([], ["p0"])


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_gives_the_numbers_of_scipy(three: Path, tmp_path: Path) -> None:
    (made,) = ok("compare").data["comparisons"]
    assert [t["name"] for t in made["treatments"]] == ["fed3r", "fedprox", "fedavg"]
    assert made["treatments"][0]["mean"] == pytest.approx(FOUR[0][:6].mean())
    assert made["treatments"][0]["std"] == pytest.approx(FOUR[0][:6].std(ddof=1))
    expected = [float(stats.ttest_rel(FOUR[0][:6], row).pvalue) for row in (FOUR[2][:6], FOUR[3][:6])]
    assert [p["p"] for p in made["pairs"]] == pytest.approx(expected)
    assert made["ranking"]["p"] == pytest.approx(stats.friedmanchisquare(*FOUR[[0, 2, 3], :6]).pvalue)
    assert made["best"] == ["fed3r"]
    assert made["setting"] == "shapes, p0"
    (made,) = ok("compare", "--test", "wilcoxon", "--against", "aa", "--metric", "macro_f1").data["comparisons"]
    assert made["reference"] == "fedavg"
    assert made["metric"] == "macro_f1"
    expected = [float(stats.wilcoxon(FOUR[3][:6], row).pvalue) for row in (FOUR[0][:6], FOUR[2][:6])]
    assert [p["p"] for p in made["pairs"]] == pytest.approx(expected)
    shown = fedcache("compare")
    assert shown.code == 0
    assert "critical difference" in shown.out
    assert re.search(r"fed3r +80\.67 ± 2\.11 .*highest", shown.out)
    assert max(map(len, shown.out.split("accuracy in %", 1)[0].splitlines())) <= 80
    one, two = (tmp_path / f"{n}.svg" for n in "ab")
    assert ok("compare", "--plot", one).data["files"] == [str(one)]
    ok("compare", "cc", "bb", "aa", "--plot", two)
    assert one.read_bytes() == two.read_bytes()


def test_documents_have_the_best_in_bold_and_escape_names(own_home: Path, tmp_path: Path) -> None:
    for name, method, row in (("aa", "fedavg", 3), ("bb", "fed3r", 2), ("cc", "solo", 0)):
        write(name, method, FOUR[row][:6], dataset="a|b_c&50%", hyperparameters={"lr": 0.1})
    write("dd", "fedavg", FOUR[2][:6] + 0.001, dataset="a|b_c&50%", hyperparameters={"lr": "1_0|"})
    pages = {}
    for ending in ("md", "tex"):
        done = fedcache("compare", "-o", tmp_path / f"t.{ending}")
        assert done.code == 0, done.err
        pages[ending] = (tmp_path / f"t.{ending}").read_text()
    assert "### a\\|b\\_c&amp;50%" in pages["md"]
    rows = [line for line in pages["md"].splitlines() if line.startswith("|")]
    cells = {len(re.split(r"(?<!\\)\|", line)) for line in rows}
    assert len(cells) == 1, rows
    assert sum("**" in line for line in rows) == 1
    assert "| solo | **80.67 ± 2.11** |" in pages["md"]
    assert r"\textbf{80.67 $\pm$ 2.11}" in pages["tex"]
    assert r"a\textbar{}b\_c\&50\%" in pages["tex"]
    assert r"lr=1\_0\textbar{}" in pages["tex"]
    body = "\n".join(line for line in pages["tex"].splitlines() if not line.startswith("%"))
    assert not re.findall(r"(?<!\\)[%_#]", body)
    assert body.count("{") == body.count("}")
    assert fedcache("compare", "--format", "latex").out.strip() == pages["tex"].strip()
    assert fedcache("compare", "--format", "markdown").out.strip() == pages["md"].strip()


def test_daggers_mark_what_is_not_told_from_the_reference() -> None:
    made = four(test="wilcoxon", pairs="best", against="c")
    assert "| d | 75.51 ± 1.21 † |" in markdown(made)
    assert r"75.51 $\pm$ 1.21 $^{\dagger}$ &" in latex(made)
    assert "| c | 76.49 ± 1.33 |" in markdown(made)
    assert markdown(made).count("†") == 2  # the row and the caption


def test_settings_are_never_averaged_unless_they_are_blocks(three: Path) -> None:
    write("dd04", "fedavg", [0.2, 0.3], partition="p1")
    write("ee05", "fed3r", [0.4, 0.6], partition="p1")
    write("ff06", "fed3r", [0.4, 0.6], dataset="other")
    done = ok("compare").data
    assert [c["setting"] for c in done["comparisons"]] == ["shapes, p0", "shapes, p1"]
    assert "not averaged" in done["said"][0]
    assert "other, p0: fed3r (ff06) alone" in done["said"][1]
    (made,) = ok("compare", "--over", "settings", "--metric", "worst40").data["comparisons"]
    assert made["blocks"] == ["shapes, p0", "shapes, p1"]
    means = {t["name"]: t["values"] for t in made["treatments"]}
    assert means["fed3r"] == pytest.approx([FOUR[0][:6].mean(), 0.5])
    refused = fedcache("compare", "--plot", "x.svg")
    assert refused.code == 2
    assert "one diagram" in refused.err
    assert not Path("x.svg").exists()


def test_what_cannot_be_read_is_a_warning_with_the_way_out(three: Path) -> None:
    (three / "aa01" / "result.json").write_text("{}")
    (three / "gg07").mkdir()
    (three / "gg07" / "config.toml").write_text("[train]\n")
    done = ok("compare")
    warned = " ".join(done.envelope["warnings"])
    assert "aa01" in warned
    assert "--fresh" in warned
    assert "gg07 is not finished" in warned
    assert "fedcache train --config" in warned
    assert [t["name"] for t in done.data["comparisons"][0]["treatments"]] == ["fed3r", "fedprox"]
    assert len(done.data["left_out"]) == 2
    alone = fedcache("compare", "bb02", "gg07", "--json")
    assert alone.code == 2
    assert "there is one (fedprox, bb02); 1 could not be read" in alone.envelope["error"]["message"]


def test_nothing_one_run_no_common_seed_and_no_accuracy_are_sentences(own_home: Path) -> None:
    empty = ok("compare")
    assert empty.data["comparisons"] == []
    assert "No result under" in empty.data["said"][0]
    assert "fedcache grid" in fedcache("compare").out
    write("aa", "fedavg", [0.1, 0.2])
    one = fedcache("compare")
    assert one.code == 2
    assert "takes two finished runs, and there is one (fedavg, aa)" in one.err
    write("bb", "fed3r", [0.3], seeds=[7])
    none = fedcache("compare")
    assert none.code == 2
    assert "no seed in common (fedavg: 0, 1; fed3r: 7)" in none.err
    write("cc", "solo", [None, None])
    unscored = fedcache("compare", "aa", "cc")
    assert unscored.code == 2
    assert "one run has values of accuracy" in unscored.err
    write("dd", "fedprox", [0.4, 0.1])
    some = ok("compare", "aa", "cc", "dd").data["comparisons"][0]
    assert any("nothing of it could be scored: solo" in n for n in some["notes"])
    write("ee", "fedprox", [0.4], seeds=[7])
    single = ok("compare", "bb", "ee").data["comparisons"][0]
    assert single["treatments"][0]["interval"] is None
    assert any("One seed only (7)" in n for n in single["notes"])
    apart_ones = fedcache("compare", "--over", "settings")
    assert apart_ones.code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nobody",), "There is no run 'nobody'"),
        (("--over", "sites"), "--over"),
        (("--metric", "acuracy"), "Did you mean 'accuracy'"),
        (("--metric", "worst10"), "a result holds its mean over seeds"),
        (("--metric", "macro_f1", "--over", "clients"), "cannot be compared over clients"),
        (("--metric", "worst20", "--over", "settings"), "no two have worst20"),
        (("--test", "anova"), "--test"),
        (("--pairs", "some"), "--pairs"),
        (("--pairs", "all", "--against", "fedavg"), "All pairs need no reference"),
        (("--against", "fedov"), "Unknown --against 'fedov'"),
        (("--level", "95"), "--level 95 is not from 0.5"),
        (("--level", "nan"), "--level nan"),
        (("--format", "html"), "--format"),
        (("--format", "latex", "--json"), "stdout is one of them"),
        (("-o", "table.html"), "expected .md or .tex"),
        (("-o", "nowhere/table.md"), "does not exist"),
        (("--plot", "ranks.jpg"), "expected .png, .svg or .pdf"),
        (("aa01", "bb02", "--plot", "ranks.png"), "takes three runs"),
        (("--runs", "nowhere"), "There is no directory nowhere"),
    ],
)
def test_wrong_words(three: Path, words: tuple[str, ...], said: str) -> None:
    done = fedcache("compare", *words)
    assert done.code == 2, done.out
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_wrong_word_over_several_settings_is_one_sentence(three: Path) -> None:
    write("dd04", "fedavg", [0.2, 0.3], partition="p1")
    write("ee05", "fedprox", [0.2, 0.3], partition="p1")
    done = fedcache("compare", "--against", "fedov", "--json")
    assert done.code == 2
    assert done.envelope["error"]["message"] == "Unknown --against 'fedov'. Did you mean 'fedavg'?"


@pytest.mark.slow
def test_the_command_runs_as_a_process(three: Path) -> None:
    done = apart("compare", "aa01", "cc03", "--over", "clients", home=three.parent)
    assert done.code == 0, done.err
    assert "accuracy" in done.out


# -- python --------------------------------------------------------------------------------------------------------


def test_validation_chooses_where_all_runs_have_rows_to_choose_by(own_home: Path) -> None:
    for name, method, accuracy, validation in (("aa", "fedavg", 0.7, 0.8), ("bb", "fedprox", 0.9, 0.6),
                                               ("cc", "fed3r", 0.75, 0.8)):  # fmt: skip
        held = {"mean": validation, "per_seed": [validation] * 3, "std": None}
        write(name, method, [accuracy, accuracy - 0.01, accuracy + 0.02], seeds=[0, 1, 2], validation=held)
    (made,) = fc.compare().tables
    assert (made.chosen, made.reference, made.best) == ("fed3r", "fed3r", ("fedprox",)), "of equals the first by method"
    tie = "2 runs tie at a validation accuracy of 80.00 %; fed3r is taken, the first by method and settings"
    assert any(note.startswith(tie) for note in made.notes)
    assert made.chosen_by == "chosen by validation accuracy"
    assert {p.other for p in made.pairs} == {"fed3r"}
    assert not any("flatters" in note for note in made.notes)
    assert {t.name: t.validation for t in made.treatments} == {"fedavg": 0.8, "fedprox": 0.6, "fed3r": 0.8}
    assert "**75.33 ± 1.53**" in markdown(made)
    assert "**90.33" not in markdown(made)
    assert "Bold: chosen by validation accuracy." in markdown(made)
    assert made.to_dict()["chosen"] == "fed3r"
    assert repr(made).endswith("chosen by validation accuracy: fed3r 0.7533)")
    shown = fedcache("compare").out
    assert re.search(r"fed3r +75\.33 ± 1\.53 .* 80\.00 +chosen", shown)
    assert "Chosen by validation accuracy: fed3r." in " ".join(shown.split())
    write("dd", "fedntd", [0.5, 0.5, 0.6], seeds=[0, 1, 2])
    (again,) = fc.compare().tables
    assert (again.chosen, again.reference) == (None, "fedprox")
    assert all(t.validation is None for t in again.treatments)


def test_from_python(three: Path, tmp_path: Path) -> None:
    made = fc.compare()
    assert repr(made).startswith(
        "Comparisons(Comparison(shapes, p0: 3 treatments over 6 seeds, highest test accuracy (not a choice): fed3r 0.80"
    )
    assert "\n" not in repr(made)
    assert made.to_dict()["comparisons"][0]["best"] == ["fed3r"]
    assert "**80.67 ± 2.11**" in made.markdown()
    assert "booktabs" in made.latex()
    assert "<b>80.67 ± 2.11</b>" in made._repr_html_()
    made.plot(tmp_path / "ranks.pdf")
    assert (tmp_path / "ranks.pdf").read_bytes().startswith(b"%PDF")
    two = fc.compare([three / "aa01", "bb"], over="clients", root=three)
    assert [t.name for t in two.tables[0].treatments] == ["fedavg", "fedprox"]
    with pytest.raises(FedcacheError, match="takes two"):
        fc.compare("aa01")


# -- the diagram ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_equal_comparisons_are_equal_diagrams(kind: str, tmp_path: Path) -> None:
    for place in "ab":
        cd_diagram.draw_ranks(four(), tmp_path / f"{place}.{kind}")
    assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def test_the_diagram_has_a_bar_for_each_group_and_no_two_bars_touch(tmp_path: Path) -> None:
    cd_diagram.draw_ranks(four(), tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text().count('<g id="group"') == 3
    # (1, 2) and (2, 3) meet; (3.5, 4) has the first line to itself again
    assert cd_diagram.stacked([(1, 2), (2, 3), (3.5, 4)]) == [(1, 2, 0), (2, 3, 1), (3.5, 4, 0)]


@pytest.mark.slow
def test_names_are_drawn_as_they_are_and_many_stay_a_figure(tmp_path: Path) -> None:
    names = ["$\\frac{$", "<script>", "数" * 60, *(f"method {i}" for i in range(40))]
    values = np.random.default_rng(0).random((len(names), 6))
    cd_diagram.draw_ranks(compared(table(values, names), over="seeds", metric="accuracy"), tmp_path / "p.svg")
    assert "<script>" not in (tmp_path / "p.svg").read_text()
    cd_diagram.draw_ranks(compared(table(values, names), over="seeds", metric="accuracy"), tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size < 1_000_000


@pytest.mark.parametrize("lacks", ["accuracy", "method"])
def test_a_result_that_lacks_what_every_run_has_is_left_out(own_home: Path, lacks: str) -> None:
    path = write("aa", "fedavg", [0.5])
    result = read_result(path / "result.json")
    del result[lacks]
    write_result(path / "result.json", result)
    (left,) = gather([], own_home / "runs").left_out
    assert "is no result of a run" in left.why


def blocks_of(**methods: str) -> Any:
    """Three treatments as ``--against`` looks for them: name -> method."""
    runs = {
        name: [SimpleNamespace(method=method, digest=f"{name}-digest", path=Path(f"runs/{name}"))]
        for name, method in methods.items()
    }
    return SimpleNamespace(names=list(runs), runs=runs)


def test_the_reference_is_a_name_a_method_a_directory_or_first_letters() -> None:
    blocks = blocks_of(one="fedavg", two="fedavg", three="fedrep")
    for said, name in (("one", "one"), ("fedrep", "three"), ("two-d", "two"), ("runs/two", "two")):
        assert compare._reference(said, blocks) == name
    with pytest.raises(UsageError) as caught:
        compare._reference("fedavg", blocks)
    assert caught.value.message == "--against fedavg fits 2 runs: one, two."
    with pytest.raises(FedcacheError, match="Unknown --against 'thrxe'"):
        compare._reference("thrxe", blocks)


@pytest.mark.parametrize("test", ["t", "wilcoxon"])
def test_one_block_has_no_p_and_two_have(test: str) -> None:
    one, other = np.array([0.5, 0.7]), np.array([0.4, 0.5])
    assert _p(test, one[:1], other[:1], "settings") is None
    found = _p(test, one, other, "settings")
    assert found is not None
    assert 0.0 < found <= 1.0


def test_a_table_of_both_kinds_of_models_takes_one_score_and_says_which(own_home: Path) -> None:
    for name, method, kind in (("aa", "fedavg", "global"), ("bb", "solo", "personalised")):
        path = write(name, method, [0.5, 0.5], protocol=kind, confusion=[[10, 10], [10, 10]])
        inside = dict(read_result(path / "result.json"))
        inside["accuracy"] |= {"client_mean_per_seed": [0.3, 0.4], "client_mean": 0.35}
        inside["accuracy"] |= {"pooled_per_seed": [0.5, 0.5], "pooled": 0.5}
        write_result(path / "result.json", inside)
    (usual,) = compare.compare_entries(gather([], own_home / "runs")).tables
    assert usual.metric == "client_mean"
    assert [t.mean for t in usual.treatments] == pytest.approx([0.35, 0.35])
    (pooled,) = compare.compare_entries(gather([], own_home / "runs"), metric="pooled").tables
    assert "pooled: over all test rows of all clients together" in markdown(pooled)
    assert "±" not in markdown(pooled).split("pooled: over")[0]
    known = {t.name: t.test_rows for t in pooled.treatments}
    assert known["solo"] is None
    assert known["fedavg"] is not None
    assert known["fedavg"][0] == 20
