"""How many cases are tried: some in CI (``make durability``), all that reliability asks for on demand (``-full``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

FULL = os.environ.get("FEDCACHE_CASES") == "full"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is of the long suite."""
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.durability)
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture
def cases(record_property: Callable[[str, object], None]) -> Callable[[int, int], int]:
    """``cases(few, all)``: how many to try, noted for the page of trust."""

    def chosen(few: int, every: int) -> int:
        record_property("cases", every if FULL else few)
        return every if FULL else few

    return chosen
