"""What grids and comparisons draw: importance by hand, lines of points, differences, ranks, and names that differ."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from results import point

from fedcache.report.comparison import Pair
from fedcache.report.figure_runs import (
    confusion_difference,
    differences,
    hyperparameters,
    importance,
    importances,
    levels_of,
    sweeps,
    swept_points,
)
from fedcache.report.find_runs import StoredRun


def grid(**validation):
    """lr is worth 0.2 a step, wd 0.01, momentum nothing; validation prefers the lowest of the test."""
    made = []
    for lr, wd, momentum in itertools.product((0, 1, 2), (0, 1), (0, 1)):
        mean = 0.3 + 0.2 * lr + 0.01 * wd
        made.append(point(mean, 1 - mean if validation else None, lr=lr, wd=wd, momentum=momentum))
    return made


def test_importance_is_the_share_of_the_variance_of_marginal_means_corrected_for_chance():
    scores = np.array([1.0, 2.0, 4.0, 5.0])
    # means 1.5 and 4.5 about 3: between 9, within 1, total 10; one degree of freedom at 1 / 2 a piece
    assert importance(["a", "a", "b", "b"], scores) == pytest.approx((10 - 1 - 1 * 1 / 2) / 10)
    assert importance(["a", "b", "a", "b"], scores) == 0.0, "means 2.5 and 3.5 are within chance"
    assert importance(["a", "b", "c", "d"], scores) == 0.0, "nothing repeats"
    assert importance(["a", "a", "b", "b"], np.ones(4)) == 0.0
    points = swept_points(grid())
    assert points is not None
    found = dict(importances(points))
    assert list(found) == ["lr", "wd", "momentum"]
    assert found["lr"] > 0.99
    assert found["momentum"] == 0.0


def test_numbers_of_many_values_stand_in_quarters_and_words_alone():
    many = [str(i / 10) for i in range(20)]
    assert [levels_of(many).count(f"quarter {q}") for q in (1, 2, 3, 4)] == [5, 5, 5, 5]
    assert levels_of(many[:8]) == many[:8]
    words = [*many, "auto"]
    assert levels_of(words) == words


def test_a_grid_is_bars_and_lines_that_carry_their_runs():
    entries = grid()
    bars, lines = hyperparameters("g", entries)
    assert bars.rows[0][0] == "lr"
    assert len(lines.rows) == 12
    for entry in entries:
        assert lines.svg.count(f'data-run="{entry.key}"') == 1
    assert hyperparameters("g", entries[:7]) == [], "seven points are too few"
    assert hyperparameters("g", [point(0.1 * i, lr=i) for i in range(9)]) == [], (
        "one setting is a line of its own"
    )


def test_frames_and_rings_mark_what_validation_chose():
    (chosen,) = sweeps("g", [point(0.5, 0.8, lr=1), point(0.9, 0.6, lr=2)])
    assert chosen.columns == ["lr", "validation accuracy"]
    points = swept_points(grid(held=True))
    assert points.values[int(points.scores.argmax())][points.names.index("lr")] == "0", (
        "the lowest of the test"
    )


def test_a_difference_of_confusions_is_in_points_of_the_true_class():
    def seen(*rows):
        return StoredRun(Path("x"), {"confusion": list(rows), "class_names": ["cat", "dog"]}, {})

    drawn = confusion_difference("c", ("one", seen([8, 2], [1, 9])), ("two", seen([6, 4], [1, 9])))
    assert drawn.rows == [["cat", "cat", pytest.approx(20)], ["cat", "dog", pytest.approx(-20)]]
    same = seen([8, 2], [1, 9])
    assert confusion_difference("c", ("one", same), ("two", StoredRun(Path("x"), {}, {}))) is None


def test_of_intervals_over_seeds_and_over_rows_the_wider_one_is_drawn():
    """A run that varies over seeds must not look as certain as one that does not."""
    rows = SimpleNamespace(interval=(-0.06, -0.04), holm=0.01)
    varying = Pair("varying", "best", -0.1, (-0.2, 0.0), 0.06, 0.06, rows, ("0", "1", "2"))
    constant = Pair("constant", "best", -0.05, None, None, None, rows, ("0", "1", "2"))
    runs = SimpleNamespace(
        pairs=(varying, constant),
        reference="best",
        blocks=("0", "1", "2"),
        over="seeds",
        treatments=(),
        level=0.95,
        alpha=0.05,
    )
    drawn = differences("d", runs, [])
    assert [row[2:4] for row in drawn.rows] == [[-0.2, 0.0], [-0.06, -0.04]]
