"""How many cases are tried: a few for every change (``make durability``), all of them in ``make nightly``."""

from collections.abc import Callable

import pytest
from draws import FULL


@pytest.fixture
def cases(record_property: Callable[[str, object], None]) -> Callable[[int, int], int]:
    """``cases(few, all)``: how many to try, noted for the page of trust."""

    def chosen(few: int, every: int) -> int:
        record_property("cases", every if FULL else few)
        return every if FULL else few

    return chosen
