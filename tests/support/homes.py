"""Homes that are made one time, with a copy for each test: the type of the fixture ``once``, and fixtures."""

from collections.abc import Callable
from pathlib import Path

import pytest

Once = Callable[[Callable[[Path], Path]], Path]


def made_once(make):
    """The fixture that is a copy of what ``make`` makes one time."""

    @pytest.fixture
    def copied(once):
        return once(make)

    return copied
