"""What the tests of extraction share."""

import sys

import own_encoders
import pytest
from pictures import folder


@pytest.fixture
def encoders(here, monkeypatch):
    """The name of a module of own encoders in the working directory."""
    name = own_encoders.write(here, f"my_encoders_{abs(hash(str(here)))}")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def images(tmp_path):
    """Images of 3 classes, 12 to train and 4 to test: 48 rows, 6 chunks of 8."""
    return folder(tmp_path / "shapes")
