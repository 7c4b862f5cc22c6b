"""Test rows that hold what a training row holds are counted and said when a dataset is extracted."""

from __future__ import annotations

import numpy as np
import pytest
from heard import Heard
from PIL import Image

import fedcache as fc


def pictures(count: int) -> list[tuple[Image.Image, int]]:
    rng = np.random.default_rng(0)
    return [(Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)), i % 2) for i in range(count)]


@pytest.mark.parametrize(
    ("first", "said"), [(20, []), (18, ["2 test rows hold what a training row holds, byte for byte."])]
)
def test_rows_of_both_splits_are_said(first: int, said: list[str]) -> None:
    rows, heard = pictures(30), Heard()
    fc.extract({"train": rows[:20], "test": rows[first:]}, ["random-projection"], size=8, observer=heard)
    assert [w for w in heard.warnings if "byte for byte" in w] == said
