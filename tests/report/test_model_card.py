"""What the card of an exported model says of its accuracy."""

import pytest

from fedcache.report.model_card import accuracy_lines


def result(protocol, values, confusion):
    known = [v for v in values if v is not None]
    mean = sum(known) / len(known) if known else None
    return {
        "protocol": protocol,
        "seeds": list(range(len(values))),
        "confusion": confusion,
        "accuracy": {"per_seed": values, "mean": mean, "std": 0.125 if len(known) > 1 else None},
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (result("personalised", [0.75], [[3, 1], [0, 0]]), [("75.00 %", "own test rows")]),
        # three quarters of four rows are three of them, and of five they are no count
        (result("global", [0.75], [[3, 1], [0, 0]]), [("75.00 %", "30.06 to 95.44 %")]),
        (result("global", [0.75], [[3, 1], [0, 1]]), [("75.00 %", "one model")]),
        (
            result("global", [0.5, None, 0.75], None),
            [("Seed 0", "50.00"), ("Seed 2", "75.00"), ("62.50", "12.50")],
        ),
    ],
    ids=["own rows", "interval", "no whole number", "several seeds"],
)
def test_the_accuracy_of_each_seed_has_an_interval_where_its_rows_are_counted(given, said):
    for line, words in zip(accuracy_lines(given), said, strict=True):
        assert all(word in line for word in words), line
        assert ("Wilson" in line) == ("30.06 to 95.44 %" in words)
