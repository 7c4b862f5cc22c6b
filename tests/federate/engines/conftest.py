"""What tests of federations over sites share."""

import shutil

import pytest
from fake_grid import grid_of, planned, together


@pytest.fixture
def sites(request, once, tmp_path):
    """The shards that the test's file makes, in a folder of its own."""
    return shutil.copytree(once(request.module.shards), tmp_path / "sites")


@pytest.fixture
def grid(sites, tmp_path):
    """Those shards as sites in this process, whose states lie in the folder ``state``."""
    return grid_of(sites, tmp_path / "state")


@pytest.fixture
def federated(grid, tmp_path):
    """``federated(method, heard, **words)``: the one run of a plan over those sites."""

    def run(method, heard=None, **words):
        (made,) = together(planned(method, **words), grid, tmp_path, heard)
        return made

    return run
