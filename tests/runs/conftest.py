"""Homes that several files here begin with: each is made once per worker, and a test works on a copy of it."""

from pathlib import Path

import numpy as np
import pytest
from command import ok
from pictures import folder


def extracted(place):
    """A store of 36 training and 12 test images of three classes, with features of one backbone."""
    images = folder(place / "shapes", train=12, test=4)
    done = ok(
        f"extract --dataset folder:{images} --backbones random-projection --workers 0",
    )
    return Path(done.data["path"])


def ingested(place):
    """A store of 200 rows of five classes that can be told apart, every fourth a test row."""
    y = np.tile(np.arange(5), 40)
    x = (np.random.default_rng(0).normal(size=(200, 8)) + 2 * np.eye(5, 8)[y]).astype(np.float32)
    np.savez(place / "rows.npz", features=x, labels=y, split=(np.arange(200) % 4 == 0).astype(int))
    return Path(ok(f"ingest {place}/rows.npz --name rows").data["path"])


@pytest.fixture
def shapes(once):
    return once(extracted)


@pytest.fixture
def rows(once):
    return once(ingested)
