"""What the card of an exported model says of its accuracy."""

from __future__ import annotations

from typing import Any

import pytest

from fedcache.report.model_card import accuracy_lines


def result(protocol: str, values: list[float | None], confusion: list[list[int]] | None) -> dict[str, Any]:
    known = [v for v in values if v is not None]
    mean = sum(known) / len(known) if known else None
    return {
        "protocol": protocol, "seeds": list(range(len(values))), "confusion": confusion,
        "accuracy": {"per_seed": values, "mean": mean, "std": 0.125 if len(known) > 1 else None},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        (result("personalised", [0.75], [[3, 1], [0, 0]]),
         ["Seed 0: 75.00 %, each client's model on its own test rows."]),
        (result("everywhere", [0.75], [[3, 1], [0, 0]]), ["Seed 0: 75.00 %, each client's model on all test rows."]),
        # three quarters of four rows are three of them, and of five they are no count
        (result("global", [0.75], [[3, 1], [0, 0]]),
         ["Seed 0: 75.00 %, one model on the global test rows (4); 95 % Wilson interval 30.06 to 95.44 %."]),
        (result("global", [0.75], [[3, 1], [0, 1]]), ["Seed 0: 75.00 %, one model on the global test rows."]),
        (result("global", [0.5, None, 0.75], None),
         ["Seed 0: 50.00 %, one model on the global test rows.", "Seed 2: 75.00 %, one model on the global test rows.",
          "Mean of 3 seeds: 62.50 %, standard deviation 12.50 points."]),
        (result("global", [None], None), ["No row was scored."]),
    ],
    ids=["own rows", "all rows", "interval", "no whole number", "several seeds", "nothing scored"],
)  # fmt: skip
def test_the_accuracy_of_each_seed_has_an_interval_where_its_rows_are_counted(given: Any, lines: list[str]) -> None:
    assert accuracy_lines(given) == lines
