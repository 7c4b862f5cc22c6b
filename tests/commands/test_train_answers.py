"""What ``train`` and ``grid`` answer a person, from results worked out by hand."""

import math
from pathlib import Path

import pytest
from command import data_of, fedcache
from failing_command import must_fail
from refusal import refused

from fedcache import Run
from fedcache.commands.train import grid_answer, list_ready_grids, swept_values
from fedcache.errors import Exit
from fedcache.grids.presets import find_preset, preset_names
from fedcache.grids.result import Grid, LostPoint, Point


def point(lr, mean, *, reused=False, seconds=2.0, worst=None):
    """A point of two seeds."""
    result = {
        "rounds": 20,
        "seeds": [0, 1],
        "digest": "d" * 64,
        "accuracy": {"mean": mean, "std": 0.01, "per_seed": [mean, 0.123]},
        "fairness": {"worst10": worst},
        "traffic": {
            "exact": {"per_client_round": {"up": 5130.0}, "up_bytes": 4096, "down_bytes": 8192}
        },
    }
    measured = {} if seconds is None else {"seconds": {"train": seconds}}
    return Point("fedavg", {"lr": lr}, Run(Path("/runs") / lr, result, measured, reused=reused))


def test_a_grid_is_a_table_of_all_points_the_best_first():
    points = [
        point("0.1", 0.5, worst=0.25),
        point("1", 0.75, reused=True, seconds=None),
        point("2", None),
    ]
    done = Grid(
        points,
        damaged=[
            LostPoint(
                "fedavg", {"lr": "3"}, "result.json was changed after fedcache wrote it.", "--fresh"
            )
        ],
        failed=[
            LostPoint(
                "fedavg", {"lr": "9"}, "The loss is not a number.", "Lower the learning rate."
            )
        ],
    )
    made = grid_answer(done, ["lr"])
    (table,) = made.renderables
    assert [tuple(row) for row in table.rows] == [
        ("fedavg", "1", "75.00", "1.00", "-", "5,130", "-"),
        ("fedavg", "0.1", "50.00", "1.00", "25.00", "5,130", "2.00"),
        ("fedavg", "2", "-", "1.00", "-", "5,130", "2.00"),
        ("fedavg", "9", "failed", "", "", "", ""),
    ]
    assert made.code is Exit.CORRUPT
    assert made.data["best"]["method"] == "fedavg"
    assert made.data["best"]["sweep"] == {"lr": "1"}
    assert made.data["reused"] == 1
    assert len(made.data["points"]) == 3


def validated(lr, mean, validation):
    made = point(lr, mean, worst=0.5)
    held = {"mean": validation, "std": None, "pooled": validation, "rows": 7}
    return Point(
        made.method,
        made.sweep,
        Run(made.run.path, {**made.run.result, "validation": held}, made.run.measured),
    )


def test_a_grid_chooses_by_validation_where_test_accuracy_would_choose_another():
    done = Grid(
        [
            validated("1", 0.9, 0.4),
            validated("2", 0.6, 0.7),
            validated("3", 0.7, 0.7),
            validated("4", 0.8, None),
        ]
    )
    assert done.best().sweep == {"lr": "2"}, "the first of equals"
    made = grid_answer(done, ["lr"])
    (table,) = made.renderables
    assert [tuple(row)[1:4] for row in table.rows] == [
        ("2", "70.00", "60.00"),
        ("3", "70.00", "70.00"),
        ("1", "40.00", "90.00"),
        ("4", "-", "80.00"),
    ]
    assert made.data["best"]["sweep"] == {"lr": "2"}
    assert done.frame()["validation"].tolist()[:3] == [0.4, 0.7, 0.7]
    some = Grid([*done.points, point("5", 0.8, worst=0.5)])
    assert some.best().sweep == {"lr": "1"}, "one without such rows, and none is chosen by them"


@pytest.mark.parametrize("order", [("10", "9", "auto", "0.5"), ("0.5", "auto", "9", "10")])
def test_a_tie_is_named_and_broken_alike_however_the_sweep_is_written(order):
    figures = {"10": 0.7, "9": 0.7 + 1e-16, "auto": 0.7, "0.5": 0.4}
    done = Grid([validated(lr, 0.6, figures[lr]) for lr in order])
    assert [p.sweep["lr"] for p in done.ranked()] == ["9", "10", "auto", "0.5"]
    made = grid_answer(done, ["lr"])
    assert made.last[2] == made.data["best"]["tie"] == done.tie
    assert [p.sweep for p in done.chosen()] == [{"lr": "9"}]
    assert Grid([validated("1", 0.6, 0.7), validated("2", 0.6, 0.4)]).tie is None


def test_sweeps_take_the_place_of_those_of_a_ready_grid():
    preset = next(p for p in map(find_preset, preset_names()) if p.sweep)
    key = next(iter(preset.sweep))
    given = {"set": ["lr=0.1"]}
    assert swept_values(["mu = 1, 2 ,,3", "tau=4"], given, None) == {
        "mu": ("1", "2", "3"),
        "tau": ("4",),
    }
    assert swept_values(None, given, preset) == dict(preset.sweep)
    assert swept_values([f"{key}=9"], given, preset) == {**preset.sweep, key: ("9",)}
    for word in ("lr=1,2", "set.lr=1,2"):
        refused(
            lambda word=word: swept_values([word], given, None), "lr is in --set and in --sweep."
        )


def test_a_method_that_is_not_there_is_refused_before_its_sweeps_are_read():
    must_fail("'fedavg'", "grid --method fedavgg --sweep nothing=1")
    assert fedcache("grid --sweep lr=1 --json").code == Exit.USAGE


def test_the_ready_grids_are_listed_with_their_points():
    grids = {g["name"]: g for g in data_of("grid --ready list")["grids"]}
    (table,) = list_ready_grids().renderables
    assert [row[0] for row in table.rows] == list(grids)
    for name, grid in grids.items():
        points = math.prod([len(grid["methods"]), *map(len, grid["sweep"].values())])
        assert grid["points"] == points
        assert grid["command"] == f"fedcache grid --ready {name}"
