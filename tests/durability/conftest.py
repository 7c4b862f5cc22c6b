"""How many cases are tried: a few for every change (``make durability``), all of them in ``make nightly``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from draws import FULL


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
