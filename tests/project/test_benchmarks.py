"""The benchmarks' runner, on rows that nothing measured."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import measure, runner
from benchmarks.table import LINES


def fake(name, *, met=True, **extra):
    return {
        "name": name,
        "target": ">= 1",
        "measured": 2.0,
        "quartiles": [1.0, 2.0, 3.0],
        "met": met,
        "hardware": "none",
        **extra,
    }


def full(family):
    return [fake(line.name) for line in LINES if line.family == family]


def go(tmp_path, run):
    out = tmp_path / "results.json"
    return runner.bench((), run, out), json.loads(out.read_text())


def test_rows_are_in_the_order_of_the_table_and_a_missing_one_is_named(tmp_path):
    code, found = go(tmp_path, lambda family: full(family)[::-1])
    assert code == 0
    assert [r["name"] for r in found["rows"]] == [line.name for line in LINES]
    assert all(set(r) == set(runner.FIELDS) for r in found["rows"])
    lost = next(line.name for line in LINES if line.family == "grids")
    code, found = go(
        tmp_path, lambda family: full(family)[1:] if family == "grids" else full(family)
    )
    assert code == 1
    assert found["missing"] == [lost]


def test_a_missed_row_fails_unless_its_roofline_says_why(tmp_path):
    def run(family, **extra):
        rows = full(family)
        return (
            [fake(rows[0]["name"], met=False, **extra), *rows[1:]] if family == "closed" else rows
        )

    assert go(tmp_path, run)[0] == 1
    assert go(tmp_path, lambda f: run(f, roofline=""))[0] == 1
    assert go(tmp_path, lambda f: run(f, roofline="12 GB at 15 GB/s"))[0] == 0


def test_a_family_that_fails_leaves_its_rows_and_the_others(tmp_path):
    code, found = go(tmp_path, lambda family: 1 / 0 if family == "closed" else full(family))
    assert code == 1
    assert [r["name"] for r in found["rows"]] == [line.name for line in LINES]
    failed = [r["name"] for r in found["rows"] if "error" in r]
    assert failed == [line.name for line in LINES if line.family == "closed"]


def test_ratios_are_of_the_best_times_and_quartiles_of_the_pairs():
    seconds = {"sequential": [4.0, 6.0, 9.0], "ours": [2.0, 2.0, 3.0]}
    assert measure.best(seconds, "sequential", "ours") == 2.0
    assert measure.pairs(seconds, "sequential", "ours") == [2.0, 3.0, 3.0]
    assert measure.quartiles([2.0, 3.0, 3.0]) == [2.5, 3.0, 3.0]
