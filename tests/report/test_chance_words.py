"""What is said of a result that is no better than a guess."""

from typing import Any

import pytest

from fedcache.federate.methods import METHODS
from fedcache.report.caution_words import chance_lines, next_step


def result(
    method: str = "fedavg", accuracy: float = 0.1, rounds: int = 50, **hp: Any
) -> dict[str, Any]:
    resolved = {**METHODS[method].resolve("paper"), **hp}
    return {
        "method": method,
        "preset": "paper",
        "hyperparameters": resolved,
        "accuracy": {"mean": accuracy},
        "classes": 10,
        "seeds": [0],
        "rounds": rounds,
        "confusion": [[20, *[0] * 9]] * 9 + [[40, *[0] * 9]],
        "partition": {"test_rows": 220},
    }


def test_a_result_that_is_no_better_than_a_guess_says_so_with_what_to_do():
    said, hint = chance_lines(result(accuracy=0.2))
    assert "18.18 % on these 220 test rows of 10 classes" in said
    assert hint.endswith("--set lr=0.01")
    assert chance_lines(result(accuracy=0.3)) == []


@pytest.mark.parametrize("method", ["pfedme", "perfedavg"])
def test_where_a_method_was_tuned_that_comes_first(method):
    assert METHODS[method].tuned
    assert next_step(result(method)).startswith("the same command with --preset tuned  (")
    tuned = {name: METHODS[method].resolve("tuned")[name] for name in METHODS[method].tuned}
    assert "--rounds 200" in next_step(result(method, **tuned))  # it is what ran


def test_where_nobody_sent_anything_a_rate_is_not_what_is_missing():
    heard = {
        **result(),
        "protocol": "global",
        "traffic": {"exact": {"up_bytes": 0, "down_bytes": 8}},
    }
    assert next_step(heard).startswith("no client sent anything")
    assert "rate" in next_step({**heard, "traffic": {"exact": {"up_bytes": 8, "down_bytes": 8}}})
    away = {
        **result(),
        "protocol": "global",
        "traffic": {"exact": {"up_bytes": 0, "down_bytes": 0}},
    }
    assert "rate" in next_step(away), "a method may send nothing by design"
    assert next_step({**away, "participants": {"availability": 0.1}}).startswith(
        "no client sent anything"
    )


def test_else_a_larger_rate_more_rounds_or_the_data():
    assert (
        next_step(result("fedavg", lr=0.02)) == "the same command with a larger rate, --set lr=0.2"
    )
    assert "--rounds 200" in next_step(result("fedavg", lr=0.5))
    assert "fedcache inspect" in next_step(result("fedncm", rounds=1))
