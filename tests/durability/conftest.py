"""How many cases are tried: a few for every change (``make durability``), all of them in ``make nightly``."""

import pytest
from draws import FULL
from private_starts import ingested
from toy_store import in_memory


@pytest.fixture
def cases(record_property):
    """``cases(few, all)``: how many to try, noted for the page of trust."""

    def chosen(few, every):
        record_property("cases", every if FULL else few)
        return every if FULL else few

    return chosen


@pytest.fixture
def home(own_home):
    """A home of this test alone, as its processes are killed."""
    return own_home


@pytest.fixture
def place():
    with in_memory() as path:
        yield path


@pytest.fixture
def rows(tmp_path):
    """``rows(width)``: the path of a store of 200 rows of 5 classes that can be learnt, a quarter of them test rows."""

    return lambda width: str(ingested(tmp_path, width))
