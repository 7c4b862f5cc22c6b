"""``compare``: the numbers are those of scipy, autorank and Demšar's paper; what cannot be compared is said."""

from itertools import combinations

import numpy as np
import pytest
from command import data_of, ok
from failing_command import must_fail
from heard import Heard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from refusal import refused
from results import result_of
from scipy import stats

import fedcache as fc
from fedcache.config import Home
from fedcache.report.comparison import (
    PairedBlocks,
    across,
    compared,
    complete,
    critical_difference,
    friedman,
    groups,
    holm,
    interval,
    mean_ranks,
    p_value,
    ranking,
    within,
)
from fedcache.report.find_runs import find_one, gather
from fedcache.runs.directory import read_result, write_result

NAMES = ("a", "b", "c", "d")


def rows_of(table):
    """A table that is written as text, a treatment a line."""
    return np.array([line.split() for line in table.strip().splitlines()], float)


FOUR = rows_of(
    """
    0.812 0.774 0.830 0.791 0.808 0.825 0.779 0.801
    0.798 0.781 0.811 0.780 0.795 0.812 0.770 0.801
    0.755 0.748 0.790 0.768 0.771 0.769 0.752 0.766
    0.760 0.741 0.774 0.768 0.750 0.741 0.758 0.749
    """
)
# What autorank 1.3.0 (scipy 1.17.1) gives for the columns a to d:
#   autorank(DataFrame, force_mode="nonparametric", alpha=0.05) for all four, and for two of them with
#   force_mode="parametric" (t-test) and "nonparametric" (Wilcoxon, one-sided there: half of the two-sided p).
AUTORANK_RANKS = (1.1875, 1.8125, 3.3125, 3.6875)
AUTORANK_P = 0.00010527618177149795
AUTORANK_CD = 1.6582924452770451  # its studentized range is an approximation, good to five digits
AUTORANK_GROUPS = ((0, 1), (1, 2), (2, 3))  # from the worst on there
AUTORANK_TTEST = {
    "ab": 0.01944065027751676,
    "ad": 0.00036705314002813833,
    "cd": 0.06557745286776755,
}
AUTORANK_WILCOXON = {"ab": 0.015625, "ad": 0.00390625, "cd": 0.0390625}

# Demšar, JMLR 7 (2006), table 6: AUC of C4.5, C4.5+m, C4.5+cf and C4.5+m+cf on 14 datasets. Printed are two 0.975 with
# the ranks 2 and 3; scipy's own tests write 0.9751 for the first, and have Friedman's 10.228 (with ties) of it.
DEMSAR = rows_of(
    """
    0.763 0.599 0.954 0.628 0.882 0.936 0.661 0.583 0.775 1.000 0.940 0.619 0.972 0.957
    0.768 0.591 0.971 0.661 0.888 0.931 0.668 0.583 0.838 1.000 0.962 0.666 0.981 0.978
    0.771 0.590 0.968 0.654 0.886 0.916 0.609 0.563 0.866 1.000 0.965 0.614 0.9751 0.946
    0.798 0.569 0.967 0.657 0.898 0.931 0.685 0.625 0.875 1.000 0.962 0.669 0.975 0.970
    """
)
TABLES = arrays(
    np.float64,
    st.tuples(st.integers(2, 5), st.integers(2, 9)),
    elements=st.integers(0, 50).map(lambda i: i / 50),
)


def table(values, names=None):
    chosen = tuple(names or (f"t{i}" for i in range(len(values))))
    return PairedBlocks("somewhere", chosen, tuple(map(str, range(values.shape[1]))), values)


def of_seeds(values, names=None, **options):
    """A comparison of treatments over seeds, or over what the options name."""
    return compared(table(values, names), **{"over": "seeds", "metric": "accuracy", **options})


def four(**options):
    return of_seeds(FOUR, NAMES, over="settings", **options)


# -- numbers -------------------------------------------------------------------------------------------------------


def test_ranks_friedman_and_critical_difference_are_those_of_autorank():
    found = ranking(FOUR, 0.95)
    assert found.ranks == pytest.approx(AUTORANK_RANKS, abs=1e-12)
    assert found.p == pytest.approx(AUTORANK_P, rel=1e-9)
    assert found.cd == pytest.approx(AUTORANK_CD, rel=1e-4)
    assert found.groups == AUTORANK_GROUPS


def test_p_of_pairs_is_that_of_autorank():
    for pair in AUTORANK_TTEST:
        one, other = (FOUR[NAMES.index(name)] for name in pair)
        assert p_value("ttest", one - other) == pytest.approx(AUTORANK_TTEST[pair], rel=1e-9)
        assert p_value("wilcoxon", one - other) == pytest.approx(
            2 * AUTORANK_WILCOXON[pair], rel=1e-12
        )


def test_ranks_and_critical_difference_are_those_of_demsars_paper():
    assert mean_ranks(DEMSAR) == pytest.approx([3.143, 2.000, 2.893, 1.964], abs=5e-4)
    assert friedman(DEMSAR) == pytest.approx((10.2283464566929, 0.0167215803284414))
    assert critical_difference(4, 14, 0.95) == pytest.approx(1.25, abs=5e-3)
    # table 5(a) of the paper: q at 0.05 for 2, 3, 5 and 10 classifiers; divided by the root, q is left
    for treatments, q in ((2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)):
        found = critical_difference(treatments, 1, 0.95) / np.sqrt(
            treatments * (treatments + 1) / 6
        )
        assert found == pytest.approx(q, abs=1e-3)


def test_intervals_of_few_values_are_students():
    rng = np.random.default_rng(0)
    for count in (3, 5, 9):
        drawn = rng.normal(size=count)
        found = stats.t.interval(0.95, count - 1, loc=drawn.mean(), scale=stats.sem(drawn))
        assert interval(drawn, 0.95) == pytest.approx(found, abs=1e-12)


def test_intervals_of_many_values_are_those_of_scipy_of_sorted_values():
    many = DEMSAR[:, :12]
    for values in (*many, many[0] - many[3]):
        for level in (0.9, 0.95):
            found = stats.bootstrap(
                (np.sort(values),),
                np.mean,
                n_resamples=9999,
                confidence_level=level,
                method="percentile",
                random_state=np.random.default_rng(0),
            ).confidence_interval
            assert interval(values, level) == (found.low, found.high)
    made = four(level=0.9)
    assert made.treatments[0].interval == interval(FOUR[0], 0.9)
    assert made.pairs[2].interval == interval(FOUR[3] - FOUR[0], 0.9)


def test_a_comparison_by_hand():
    # a: 0.5, 0.7 -> mean 0.6, std sqrt(0.02); b: 0.4, 0.8 -> mean 0.6, std sqrt(0.08); c: 0.1, 0.3
    made = of_seeds(np.array([[0.1, 0.3], [0.5, 0.7], [0.4, 0.8]]), "cab")
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


def test_holm_by_hand():
    # sorted .005 .01 .03 .04, times 4 3 2 1: .02 .03 .06 .04, and the last may not be below .06
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.01, None, 0.03]) == [pytest.approx(0.02), None, pytest.approx(0.03)]
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_groups_by_hand():
    assert groups([1.0, 2.0, 3.0, 4.5], 1.0) == ((0, 1), (1, 2))
    assert groups([4.5, 1.0, 3.0, 2.0], 2.0) == ((1, 3, 2), (2, 0))
    assert groups([1.0, 3.0], 1.0) == ()
    assert groups([2.0, 2.0, 2.0], 0.5) == ((0, 1, 2),)


def test_all_pairs_are_one_family_and_a_reference_takes_the_place_of_the_best():
    every = four(pairs="all", test="ttest")
    assert [(p.one, p.other) for p in every.pairs] == list(combinations("abcd", 2))
    assert [p.holm for p in every.pairs] == holm([p.p for p in every.pairs])
    against = four(against="c")
    assert {p.other for p in against.pairs} == {"c"}
    assert against.best == ("a",)
    assert against.alike == ("d",)  # two-sided Wilcoxon 0.078


def test_two_values_that_are_repeated_for_every_seed_have_no_ranks_and_no_test():
    still = np.array([[0.8] * 5, [0.7] * 5, [0.71, 0.74, 0.69, 0.73, 0.75]])
    found = of_seeds(still)
    assert found.ranking is None
    assert found.treatments[0].interval is None
    assert [p.p is None for p in found.pairs] == [
        p.other == "t0" and p.one == "t1" for p in found.pairs
    ]
    # Settings are not repetitions; of one value without a spread, and of two equal ones, no order is counted twice.
    for values, over in (
        (still, "settings"),
        (still[1:].repeat(2, 0)[:3], "seeds"),
        (np.flipud(FOUR[:3]), "seeds"),
    ):
        assert of_seeds(values, over=over).ranking is not None


@settings(max_examples=30)
@pytest.mark.cases(30)
@given(values=TABLES, test=st.sampled_from(["wilcoxon", "ttest"]))
def test_a_treatment_does_not_differ_from_itself(values, test):
    (pair,) = of_seeds(np.stack([values[0], values[0]]), test=test).pairs
    assert pair.p == 1.0
    assert pair.holm == 1.0
    assert pair.difference == 0.0
    assert pair.interval is None
    assert ranking(np.stack([values[0]] * 3), 0.95).p == 1.0


def test_of_one_block_nothing_is_tested():
    one = of_seeds(FOUR[:, :1])
    assert one.pairs[0].p is None
    assert one.treatments[0].std is None
    assert one.ranking is None


# -- runs ----------------------------------------------------------------------------------------------------------


def write(
    name, method, per_seed, *, dataset="shapes", partition="p0", per_client=(0.5, 0.6), **more
):
    """A stored result with what ``compare`` reads."""
    path = Home.from_environment().runs / name
    path.mkdir(parents=True)
    named = {"slug": dataset, "digest": f"{dataset}-digest"}
    result = result_of(method, per_seed, partition, dataset=named, digest=name)
    accuracy = result["accuracy"]
    accuracy |= {"per_client": list(per_client), "client_mean": accuracy["mean"]}
    result |= more
    write_result(path / "result.json", result)
    return path


@pytest.fixture
def three(own_home):
    write("aa01", "fedavg", FOUR[3][:6])
    write("bb02", "fedprox", FOUR[2][:6])
    write("cc03", "fed3r", FOUR[0][:6])
    return own_home / "runs"


def entries():
    """The entries of the runs of the home."""
    return gather([], Home.from_environment().runs).entries


def test_of_runs_of_equal_settings_the_newest_is_meant_and_others_are_listed(own_home):
    write("aa", "fedavg", [0.1])
    newest = write("bb", "fedavg", [0.2], seeds=[1])
    heard = Heard()
    assert find_one("method:fedavg", own_home / "runs", heard) == newest
    assert heard.notes == [
        "method:fedavg matches 2 runs with the same settings. fedcache uses the newest: bb."
    ]
    write("cc", "fedavg", [0.3], partition="p1")
    caught = refused(
        lambda: find_one("method:fedavg", own_home / "runs"),
        "matches 3 runs with different settings",
    )
    assert caught.message.splitlines()[1] == "  cc  fedavg on shapes, p1"


def test_seeds_are_paired_by_number():
    write("aa", "fedavg", [0.1, 0.2, 0.3, None])
    write("bb", "fedprox", [0.7, 0.6, 0.5, 0.9], seeds=[2, 1, 0, 3])
    write("cc", "fed3r", [0.4, 0.5, 0.6], seeds=[1, 2, 4])
    found = within(entries(), "here", "accuracy", "seeds")
    assert found.blocks == ("0", "1", "2", "3", "4")
    none = np.nan
    expected = [
        [0.1, 0.2, 0.3, none, none],
        [0.5, 0.6, 0.7, 0.9, none],
        [none, 0.4, 0.5, none, 0.6],
    ]
    np.testing.assert_array_equal(found.values, expected)
    made = compared(found, over="seeds", metric="accuracy")
    assert {p.one: p.blocks for p in made.pairs} == {"fedavg": ("0", "1", "2"), "fed3r": ("1", "2")}
    assert {t.name: t.mean for t in made.treatments} == pytest.approx(
        {"fedavg": 0.2, "fedprox": 0.675, "fed3r": 0.5}
    )


def test_clients_are_paired_by_name_and_unscored_ones_left_out():
    named = ["north", "south", "west"]
    other = ["south", "west", "north"]
    write("aa", "fedavg", [0.1], clients=named, per_client=[0.1, 0.2, None])
    write("bb", "fedprox", [0.1, 0.2], clients=other, per_client=[0.4, 0.5, 0.3])
    found = within(entries(), "here", "accuracy", "clients")
    assert found.blocks == ("north", "south")
    assert found.values.tolist() == [[0.1, 0.2], [0.3, 0.4]]


def test_clients_in_common_are_not_asked_for_with_seeds():
    for name, method, row in (("aa", "fedavg", [0.1, None]), ("bb", "fedprox", [None, 0.2])):
        write(name, method, [0.1], clients=["north", "south"], per_client=row)
    refused(lambda: fc.compare(over="clients"), "no client in common", "--over seeds")
    assert len(fc.compare(over="seeds").tables) == 1


def test_clients_of_one_order_are_paired_by_place():
    named = ["a", "b", "a", "c", "d"]
    write("aa", "fedavg", [0.1], clients=named, per_client=[0.1, 0.2, 0.3, None, None])
    write("bb", "fedprox", [0.1], clients=named, per_client=[0.4, None, 0.6, 0.7, None])
    write("dd", "solo", [0.1], clients=named, per_client=[None] * 5)
    found = within(entries(), "here", "accuracy", "clients")
    assert found.blocks == ("a", "a #2"), "the second of a name is another client"
    assert found.values.tolist() == [[0.1, 0.3], [0.4, 0.6]]


def test_settings_make_blocks_of_equal_runs_without_holes():
    for i, where in enumerate(("p0", "p1", "p2")):
        write(f"a{i}", "fedavg", [0.1 * i, 0.1 * i + 0.2], partition=where)
        write(f"b{i}", "fedprox", [0.5 + 0.1 * i], partition=where)
    # what it alone has in another way is in no name that is left
    write("c0", "fed3r", [0.9], rounds=7)
    write("d3", "fedavg", [0.9], dataset="other")
    found = across(entries(), "accuracy")
    assert found.names == ("fedavg", "fedprox")
    assert found.blocks == ("shapes, p0", "shapes, p1", "shapes, p2")
    assert found.values == pytest.approx(np.array([[0.1, 0.2, 0.3], [0.5, 0.6, 0.7]]))
    write("a9", "fedavg", [0.4], partition="p2")
    with pytest.raises(fc.FedcacheError, match=r"a2 .*a9"):
        across(entries(), "accuracy")


def test_the_complete_part_of_a_table_by_hand():
    # c lacks two of three settings, which is the most; then a lacks one of three, and p2 one of two methods: p2 goes
    cells = {
        "a": {"p0": 1.0, "p1": 1.0},
        "b": {"p0": 1.0, "p1": 1.0, "p2": 1.0},
        "c": {"p2": 1.0, "p1": None},
    }
    assert complete(cells, ["p0", "p1", "p2"]) == (["a", "b"], ["p0", "p1"])
    assert complete({"a": {}, "b": {}}, ["p0"]) == ([], ["p0"])


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_gives_the_numbers_of_scipy(three, tmp_path):
    (made,) = data_of(f"compare --plot {tmp_path}/ranks.svg")["comparisons"]
    assert (tmp_path / "ranks.svg").read_text().count("fed3r")
    assert [t["name"] for t in made["treatments"]] == ["fed3r", "fedprox", "fedavg"]
    assert made["treatments"][0]["mean"] == pytest.approx(FOUR[0][:6].mean())
    expected = stats.ttest_1samp(FOUR[2:, :6] - FOUR[0, :6], 0, axis=1).pvalue
    assert [p["p"] for p in made["pairs"]] == pytest.approx(expected)
    assert made["ranking"]["p"] == pytest.approx(
        stats.friedmanchisquare(*FOUR[[0, 2, 3], :6]).pvalue
    )
    (made,) = data_of("compare --test wilcoxon --against aa --score macro_f1")["comparisons"]
    expected = stats.wilcoxon(FOUR[[0, 2], :6] - FOUR[3, :6], axis=1).pvalue
    assert [p["p"] for p in made["pairs"]] == pytest.approx(expected)


def test_settings_are_never_averaged_unless_they_are_blocks(three):
    write("dd04", "fedavg", [0.2, 0.3], partition="p1")
    write("ee05", "fed3r", [0.4, 0.6], partition="p1")
    write("ff06", "fed3r", [0.4, 0.6], dataset="other")
    done = data_of("compare")
    assert [c["setting"] for c in done["comparisons"]] == ["shapes, p0", "shapes, p1"]
    assert "only one run, fed3r (ff06)" in done["sentences"][1]
    assert "so there is one table for each" in done["sentences"][0]
    (made,) = data_of("compare --over settings --score worst40")["comparisons"]
    assert made["blocks"] == ["shapes, p0", "shapes, p1"]
    means = {t["name"]: t["values"] for t in made["treatments"]}
    assert means["fed3r"] == pytest.approx([FOUR[0][:6].mean(), 0.5])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--score worst10", "only the mean of worst10 over seeds"),
        ("--score macro_f1 --over clients", "clients"),
        ("--against fedprox", "2 runs"),
        ("--level nan", "--level"),
        ("aa01 bb02 --plot ranks.png", "three"),
    ],
)
def test_wrong_words(three, words, said):
    write("dd04", "fedprox", FOUR[1][:6], hyperparameters={"lr": 0.5})
    must_fail(said, f"compare {words}")


# -- python --------------------------------------------------------------------------------------------------------


def test_validation_chooses_where_all_runs_have_rows_to_choose_by():
    for name, method, accuracy, validation in (
        ("aa", "fedavg", 0.7, 0.8),
        ("bb", "fedprox", 0.9, 0.6),
        ("cc", "fed3r", 0.75, 0.8),
    ):
        held = {"mean": validation, "per_seed": [validation] * 3, "std": None}
        write(name, method, [accuracy, accuracy - 0.01, accuracy + 0.02], validation=held)
    (made,) = fc.compare().tables
    assert (made.chosen, made.reference, made.best) == ("fed3r", "fed3r", ("fedprox",)), (
        "of equals the first by method"
    )
    assert {t.name: t.validation for t in made.treatments} == {
        "fedavg": 0.8,
        "fedprox": 0.6,
        "fed3r": 0.8,
    }
    write("dd", "fedntd", [0.5, 0.5, 0.6])
    (again,) = fc.compare().tables
    assert again.chosen is None
    assert again.reference == "fedprox"


# -- the diagram ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", ["accuracy", "method"])
def test_a_result_that_lacks_what_every_run_has_is_left_out(own_home, lacks):
    path = write("aa", "fedavg", [0.5])
    result = read_result(path / "result.json")
    del result[lacks]
    write_result(path / "result.json", result)
    (left,) = gather([], own_home / "runs").left_out
    assert "is not the result of a run" in left.why


def test_a_table_of_both_kinds_of_models_takes_one_score_and_says_which():
    for name, method, kind in (("aa", "fedavg", "global"), ("bb", "solo", "personalised")):
        path = write(name, method, [0.5, 0.5], protocol=kind, confusion=[[10, 10], [10, 10]])
        inside = dict(read_result(path / "result.json"))
        inside["accuracy"] |= {"client_mean_per_seed": [0.3, 0.4], "client_mean": 0.35}
        inside["accuracy"] |= {"pooled_per_seed": [0.5, 0.5], "pooled": 0.5}
        write_result(path / "result.json", inside)
    (usual,) = fc.compare().tables
    assert usual.metric == "client_mean"
    assert [t.mean for t in usual.treatments] == pytest.approx([0.35, 0.35])
    (pooled,) = fc.compare(metric="pooled").tables
    known = {t.name: t.test_rows for t in pooled.treatments}
    assert known["solo"] is None
    assert known["fedavg"][0] == 20


def test_one_run_no_common_seed_and_no_accuracy_cannot_be_compared():
    assert data_of("compare")["comparisons"] == []
    write("aa", "fedavg", [0.1, 0.2])
    write("bb", "fed3r", [0.3], seeds=[7])
    write("cc", "solo", [None, None])
    for words in (("aa",), ("aa", "bb"), ("aa", "cc"), ("--over", "settings")):
        must_fail("", "compare", *words)
    write("dd", "fedprox", [0.4, 0.1])
    ok("compare aa cc dd")
    write("ee", "fedavg", [0.3], dataset="digits")
    write("ff", "fed3r", [0.3], dataset="digits", seeds=[7])
    shown = ok("compare aa dd ee ff")
    assert len(shown.data["comparisons"]) == 1
    assert "digits" in next(line for line in shown.out.splitlines() if "not compared" in line)
