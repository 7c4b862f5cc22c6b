"""How many cases are tried: a few for every change (``make durability``), all of them in ``make nightly``."""

import pytest
from draws import FULL


@pytest.fixture
def cases(record_property):
    """``cases(few, all)``: how many to try, noted for the page of trust."""

    def chosen(few, every):
        record_property("cases", every if FULL else few)
        return every if FULL else few

    return chosen
