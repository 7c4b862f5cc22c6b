"""What the tests of extraction share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import own_encoders
import pytest


@pytest.fixture
def encoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module of own encoders in the working directory."""
    name = own_encoders.write(tmp_path, f"my_encoders_{abs(hash(str(tmp_path)))}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield name
    sys.modules.pop(name, None)
