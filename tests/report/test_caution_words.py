"""What is said before an accuracy is believed."""

import pytest

from fedcache.report.verdict import caution_lines, drawn_clients


def result(zero_shot=None, protocol="global", tests="balanced", **owned):
    return {
        "protocol": protocol,
        "accuracy": {"mean": 0.75, "zero_shot": zero_shot},
        "classes": 10,
        "classes_owned": owned,
        "partition": {"test_rows": 220, "args": {"test_protocol": tests}},
    }


@pytest.mark.parametrize("untrained", [None, 0.6, 0.75, 0.7549])
def test_a_model_as_good_as_its_class_texts_says_nothing(untrained):
    assert caution_lines(result(untrained)) == []


def test_a_model_below_its_class_texts_says_by_how_much():
    (line,) = caution_lines(result(0.85))
    assert "10.00 points below the 85.00 %" in line


@pytest.mark.parametrize(
    ("owned", "typical"),
    [
        ({"per_client": [2.0, 2.0, 3.0, 10.0]}, "2.5"),
        ({"mean": 4.8, "least": 1.0, "most": 9.0}, "4.8"),
    ],
)
def test_clients_models_that_are_scored_on_classes_they_have_not_seen_say_so(owned, typical):
    (line,) = caution_lines(result(protocol="personalised", **owned))
    assert f" {typical} classes. " in line


def test_a_global_model_matched_tests_and_clients_with_most_classes_say_nothing_of_unseen_ones():
    few = {"per_client": [2.0, 2.0]}
    for fine in (
        result(**few),
        result(protocol="personalised", tests="matched", **few),
        result(protocol="personalised", per_client=[9.0, 10.0, 2.0]),
        result(protocol="everywhere", **few),  # on all rows is what that protocol asks
    ):
        assert caution_lines(fine) == []


def drawn(*errors, **more):
    each = [{"scored": 500, "standard_error": e, **more} for e in errors]
    return {"accuracy": {"mean": 0.5, "eval_clients": each}, "partition": {"clients": 100_000}}


def test_of_how_many_clients_an_accuracy_is_and_its_standard_error():
    who, errors = drawn_clients(drawn(0.004, 0.006))
    assert who.startswith("500 of 100,000 clients")
    assert errors == [0.004, 0.006]
    for trained in (500, None):  # who took part may be secret
        assert drawn_clients(drawn(0.004, trained=trained)) == (who, [0.004])
    assert drawn_clients({"accuracy": {"mean": 0.5}}) is None
