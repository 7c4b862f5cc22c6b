"""What the tests of stores share."""

import pytest
from toy_store import in_memory


@pytest.fixture
def place():
    """A folder in memory where the system has one."""
    with in_memory() as path:
        yield path
