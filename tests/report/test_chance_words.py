"""What is said of a result that is no better than a guess."""

import pytest

from fedcache.federate.methods import METHODS
from fedcache.report.verdict import chance_lines, next_step


def result(method="fedavg", accuracy=0.1, rounds=50, **hp):
    resolved = METHODS[method].resolve("paper") | hp
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


def test_else_a_larger_rate_more_rounds_or_the_data():
    assert next_step(result(lr=0.02)) == "the same command with a larger rate, --set lr=0.2"
    assert "--rounds 200" in next_step(result(lr=0.5))
    assert "fedcache inspect" in next_step(result("fedncm", rounds=1))
