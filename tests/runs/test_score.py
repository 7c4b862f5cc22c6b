"""The one accuracy of a table, and over test rows."""

import pytest
from scipy import stats

from fedcache.runs.score import Score, rows_interval, score_for, score_of, unlike_tests, wilson

OWN = {"mean": 0.5, "std": 0.1, "per_seed": [0.4, 0.6], "client_mean": 0.5}
NEW = {
    **OWN,
    "client_mean": 0.3,
    "client_mean_per_seed": [0.2, 0.4],
    "pooled": 0.7,
    "pooled_per_seed": [0.6, 0.8],
}


def result(accuracy, protocol="global", **more):
    partition = {"digests": ["p", "p"]}
    return {"accuracy": accuracy, "protocol": protocol, "partition": partition, **more}


def test_results_hold_both_scores_of_every_method():
    for protocol in ("global", "personalised"):
        assert score_of(result(NEW, protocol), "client-mean") == Score((0.2, 0.4), 0.3)
        assert score_of(result(NEW, protocol), "pooled") == Score((0.6, 0.8), 0.7)
        assert score_of(result(NEW, protocol), "own") == Score((0.4, 0.6), 0.5)
    assert score_of(result(NEW), "pooled").std == pytest.approx(0.2 / 2**0.5)


def test_a_table_of_both_kinds_is_scored_by_the_mean_over_clients_where_all_have_it():
    assert score_for([result(NEW), result(NEW)]) == "own"
    assert score_for([result(NEW), result(NEW, "personalised")]) == "client-mean"
    unscored = {**NEW, "client_mean_per_seed": [0.2, None]}
    assert score_for([result(unscored), result(NEW, "personalised")]) == "own"


@pytest.mark.parametrize(("hits", "rows"), [(71, 100), (0, 7), (7, 7), (99_999, 100_000)])
def test_wilson_is_what_scipy_computes(hits, rows):
    for level in (0.9, 0.95):
        found = stats.binomtest(hits, rows).proportion_ci(level, method="wilson")
        assert wilson(hits / rows, rows, level) == pytest.approx((found.low, found.high), abs=1e-12)
    assert wilson(0.715, 100) is None  # no count of rows


def test_what_does_not_vary_over_seeds_has_an_interval_over_test_rows_and_no_deviation():
    same = {"mean": 0.75, "std": 0.0, "per_seed": [0.75, 0.75], "client_mean": 0.75}
    told = result(same, confusion=[[30, 10], [10, 30]])
    assert rows_interval(told) == (40, *(wilson(0.75, 40) or ()))
    assert rows_interval(result(OWN, confusion=[[30, 10], [10, 30]])) is None
    assert rows_interval({**told, "partition": {"digests": ["p", "q"]}}) is None
    assert rows_interval({**told, "protocol": "personalised"}) is None


def test_a_table_says_when_only_personal_models_know_the_class_shares_of_the_tests():
    matched = {"partition": {"args": {"test_protocol": "matched"}}, "accuracy": {}}
    personal = {**matched, "protocol": "personalised"}
    plain = {**matched, "protocol": "global"}
    with_prior = {**plain, "accuracy": {"client_prior": {"own_rows": 0.5}}}
    assert "--client-prior fitted" in unlike_tests([personal, plain])
    assert unlike_tests([personal, with_prior]) is None
    assert unlike_tests([plain, plain]) is None
    balanced = {"partition": {"args": {"test_protocol": "balanced"}}}
    assert unlike_tests([personal | balanced, plain | balanced]) is None


@pytest.mark.parametrize(
    ("classes", "rows", "protocol", "args", "told"),
    [
        (102, 1400, "personalised", {}, True),  # 70 rows a client: at most 70 classes
        (10, 1400, "personalised", {}, False),
        (102, 1400, "global", {}, False),
        (102, 1400, "personalised", {"test_protocol": "matched"}, False),
        # All clients share the test rows, and therefore the validation rows, too.
        (102, 1400, "personalised", {"scheme": "shards"}, False),
        (102, None, "personalised", {}, False),
        # A client's rows have two classes.
        (10, 1400, "personalised", {"owned": 2, "scheme": "feature-shift"}, True),
    ],
)
def test_validation_rows_with_few_classes_are_told_of(classes, rows, protocol, args, told):
    result = {
        "protocol": protocol,
        "classes": classes,
        "classes_owned": {"per_client": [args.pop("owned", classes)] * 20},
        "partition": {
            "clients": 20,
            "scheme": args.pop("scheme", "feature-label-shift"),
            "args": args,
        },
        "accuracy": {},
    }
    if rows is not None:
        result["validation"] = {"rows": rows}
    assert (unlike_tests([result, result]) is not None) == told
    assert (unlike_tests([result, result | {"protocol": "local"}]) is not None) == told
    assert unlike_tests([result]) is None
    result.pop("validation", None)
    assert unlike_tests([result, result]) is None
