"""When an accuracy is no better than a guess, against numbers worked out by hand."""

import pytest

from fedcache.runs.score import at_chance


def result(accuracy, per_class, *, seeds=1, **more):
    """Of test rows ``per_class`` in every seed, all of them taken for the first class."""
    counts = per_class and [[seeds * n, *[0] * (len(per_class) - 1)] for n in per_class]
    return {
        "accuracy": {"mean": accuracy},
        "classes": len(per_class or range(10)),
        "seeds": list(range(seeds)),
        "confusion": counts,
        "partition": {"test_rows": 1000},
        **more,
    }


@pytest.mark.parametrize(
    ("per_class", "level", "least"),
    [
        ([100] * 10, 0.1, 0.15),  # half as much again: 2 sqrt(.1 .9 / 1000) = .019 is less
        ([10] * 10, 0.1, 0.16),  # 2 sqrt(.1 .9 / 100) = .06
        (
            [50] * 20,
            0.05,
            0.075,
        ),  # half as much again is less than five points: 2 sqrt(.05 .95 / 1000) = .014
        ([500, 500], 0.5, 0.55),  # five points, not half as much again
        ([900, 100], 0.9, 0.95),  # the larger class, not 1 / C
        ([16, 9], 0.64, 0.832),  # 2 sqrt(.64 .36 / 25) = .192
        (None, 0.1, 0.15),  # too many classes for a confusion matrix: 1 / C of 1,000 rows
    ],
)
def test_a_guess_is_the_largest_class_and_better_is_more_than_luck(per_class, level, least):
    found = at_chance(result(least - 1e-6, per_class))
    assert found.level == pytest.approx(level)
    assert found.least == pytest.approx(least)
    assert found.rows == (1000 if per_class is None else sum(per_class))
    assert at_chance(result(least + 1e-6, per_class)) is None
    assert at_chance(result(0.0, per_class)) is not None


def test_seeds_do_not_make_test_rows_of_one_row():
    one, three = (at_chance(result(0.1, [10] * 10, seeds=seeds)) for seeds in (1, 3))
    assert one == three


def test_clients_that_are_tested_on_the_same_rows_make_no_more_rows():
    """Ten clients, each on the same 1,000 rows of ten classes."""
    assert at_chance(result(0.1, [1000] * 10)) == at_chance(result(0.1, [100] * 10))


def test_what_was_not_scored_or_has_one_class_is_not_judged():
    assert at_chance(result(None, [10, 10])) is None
    assert at_chance(result(1.0, [10, 0])) is None
    # better than chance would be above .9 + 2 sqrt(.9 .1 / 10) = 1.09
    assert at_chance(result(0.5, [9, 1])) is None
    assert at_chance(result(0.1, None, partition={})) is None
