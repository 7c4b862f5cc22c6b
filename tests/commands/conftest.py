"""Packages that ``fedcache new`` wrote, installed for a test."""

import importlib
import sys

import pytest
from command import data_of
from own_package import lay

from fedcache import plugins


@pytest.fixture
def forget():
    """Forget what was imported of installed packages; also when the test ends."""

    def forgotten():
        for name in list(sys.modules):
            if name.partition(".")[0] in ("half_step", "own_lines", "my_format"):
                del sys.modules[name]
        plugins._installed.cache_clear()
        importlib.invalidate_caches()

    yield forgotten
    forgotten()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of ``sys.path`` for packages."""
    monkeypatch.syspath_prepend(f"{tmp_path}/site-packages")
    return tmp_path / "site-packages"


@pytest.fixture
def installed(tmp_path, site, forget):
    """``installed(kind, name)``: write a new package and install it; returns the folder where it was written."""

    def installed(kind, name):
        folder = tmp_path / f"work/{name}"
        assert data_of(f"new {kind} {name} --out {folder}")["kind"] == kind
        lay(folder, site)
        forget()
        return folder

    return installed
