"""What the tests of stores share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_store import in_memory


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory where the system has one."""
    with in_memory() as path:
        yield path
