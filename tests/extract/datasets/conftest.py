"""What the tests of datasets share."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcache.extract.digests import DigestMemory


@pytest.fixture
def memory(tmp_path: Path) -> DigestMemory:
    """Digests of this test alone."""
    return DigestMemory(tmp_path / "digests")
