"""What an extraction counts, by hand."""

import numpy as np
from refusal import corruption

from fedcache.extract.batches import ComputedBatch
from fedcache.extract.workers.local import ExtractionStats
from fedcache.store.manifest import VANISHED


def test_batches_and_tasks_are_added_up():
    stats = ExtractionStats()
    assert stats.rate == 0.0
    assert stats.busy(4) == 0.0
    x = np.zeros((4, 1, 2))
    stats.add(ComputedBatch({"a": x, "b": x}, {2: "torn"}, 4, 0.5, {"a": 1.0, "b": 2.0}))
    stats.add(ComputedBatch({"a": x}, {5: VANISHED, 6: "odd"}, 4, 0.25, {"a": 1.0}, {"a": 2}))
    # 4 images, then 3 that are there; 3 rows of the first batch through both models, 2 of the second through one
    counted = ExtractionStats(
        7, {"a": 2, "b": 1}, 3 + 3 + 2, {}, {2: "torn", 6: "odd"}, 0.0, 0.75, 4.0, cut={"a": 2}
    )
    assert stats == counted
    stats.merge(
        ExtractionStats(
            5, {"b": 3, "c": 1}, 9, {}, {8: "cut"}, 99.0, 1.0, 2.0, cut={"a": 3, "b": 1}
        )
    )
    stats.seconds = 2.0
    every = {2: "torn", 6: "odd", 8: "cut"}
    assert stats == ExtractionStats(
        12, {"a": 2, "b": 4, "c": 1}, 17, {}, every, 2.0, 1.75, 6.0, cut={"a": 5, "b": 1}
    )
    assert stats.rate == 6.0
    assert stats.busy(2) == 7.75 / (2.0 * 2)


def test_too_many_bad_images_name_the_last_of_those_found_last():
    names = [f"photo-{row}.jpg" for row in range(9)]
    stats = ExtractionStats(bad={2: "torn", 6: "odd", 8: "cut"}, names=names)
    stats.check_bad({}, 3)
    corruption(
        lambda: stats.check_bad({6: "odd", 2: "torn"}, 2), "--max-bad 2", "photo-6.jpg, row 6"
    )
    corruption(lambda: stats.check_bad({}, 2), "row 8: cut")
