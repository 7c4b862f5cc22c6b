"""What the tests of stores share."""

import pytest
from toy_store import content, create, in_memory, whole


@pytest.fixture
def place():
    """A folder in memory where the system has one."""
    with in_memory() as path:
        yield path


@pytest.fixture
def store(place):
    """A new store, without an array."""
    return create(place / "s.zarr")


@pytest.fixture
def finished(place):
    """A store with everything that it can hold."""
    return whole(place / "s.zarr")


@pytest.fixture
def expected(place):
    """The files of a store that is made without a disturbance."""
    return content(whole(place / "whole.zarr").path)
