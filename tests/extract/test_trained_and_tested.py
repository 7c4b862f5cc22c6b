"""Test rows that hold what a training row holds are counted and said when a dataset is extracted."""

import numpy as np
from heard import Heard
from PIL import Image

import fedcache as fc


def pictures(count):
    rng = np.random.default_rng(0)
    return [
        (Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)), i % 2)
        for i in range(count)
    ]


def test_rows_of_both_splits_are_said():
    rows = pictures(30)
    for first, said in ((20, 0), (18, 1)):
        heard = Heard()
        fc.extract(
            {"train": rows[:20], "test": rows[first:]},
            ["random-projection"],
            size=8,
            observer=heard,
        )
        assert len([warning for warning in heard.warnings if "2 test rows" in warning]) == said
