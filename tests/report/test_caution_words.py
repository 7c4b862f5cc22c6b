"""What is said before an accuracy is believed."""

from __future__ import annotations

from typing import Any

import pytest

from fedcache.report.caution_words import caution_lines


def result(zero_shot: float | None = None, protocol: str = "global", tests: str = "balanced", **owned: Any) -> Any:
    return {"method": "tofa", "protocol": protocol, "accuracy": {"mean": 0.75, "zero_shot": zero_shot}, "classes": 10,
            "seeds": [0], "rounds": 1, "hyperparameters": {}, "classes_owned": owned,
            "partition": {"test_rows": 220, "args": {"test_protocol": tests}}}  # fmt: skip


@pytest.mark.parametrize("untrained", [None, 0.6, 0.75, 0.7549])
def test_a_model_as_good_as_its_class_texts_says_nothing(untrained: float | None) -> None:
    assert caution_lines(result(untrained)) == []


def test_a_model_below_its_class_texts_says_by_how_much() -> None:
    (line,) = caution_lines(result(0.85))
    assert line.startswith("BELOW ZERO-SHOT: training has cost 10.00 points of the 85.00 % that the class texts alone")


@pytest.mark.parametrize(
    ("owned", "typical"),
    [({"per_client": [2.0, 2.0, 3.0, 10.0]}, "2.5"), ({"mean": 4.8, "least": 1.0, "most": 9.0}, "4.8")],
)
def test_clients_models_that_are_scored_on_classes_they_have_not_seen_say_so(owned: Any, typical: str) -> None:
    (line,) = caution_lines(result(protocol="personalised", **owned))
    assert line.startswith("ON UNSEEN CLASSES: every client's own model is tested on all 10 classes")
    assert f"has training rows of {typical}. " in line
    assert line.endswith("--option test_protocol=matched")


def test_a_global_model_matched_tests_and_clients_with_most_classes_say_nothing_of_unseen_ones() -> None:
    few, most = {"per_client": [2.0, 2.0]}, {"per_client": [9.0, 10.0, 2.0]}
    assert caution_lines(result(**few)) == []
    assert caution_lines(result(protocol="personalised", tests="matched", **few)) == []
    assert caution_lines(result(protocol="personalised", **most)) == []
    assert caution_lines(result(protocol="everywhere", **few)) == []  # on all rows is what that protocol asks
