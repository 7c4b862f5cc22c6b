"""What tests of federations over sites share."""

import shutil

import pytest


@pytest.fixture
def sites(request, once, tmp_path):
    """The shards that the test's file makes, in a folder of its own."""
    return shutil.copytree(once(request.module.shards), tmp_path / "sites")
