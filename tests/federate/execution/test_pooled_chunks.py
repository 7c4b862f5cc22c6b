"""What a chunk of clients uploads on a CPU: small uploads in one sum, large ones client by client."""

from __future__ import annotations

import pytest
from federation import PER_ROUND, ROUNDS, difference, go

from fedcache.federate.execution import batched
from fedcache.federate.execution.grid_batch import GridBatch
from fedcache.federate.trust.pipeline import UploadPipeline


@pytest.fixture
def called(monkeypatch):
    """Which of the two ways was taken, how often."""
    calls = []
    for owner, name in ((GridBatch, "weighted_sum"), (UploadPipeline, "add")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *a, real=real, name=name, **k: [calls.append(name), real(*a, **k)][1],
        )
    return calls


def test_the_size_of_uploads_decides_and_both_ways_give_one_result(called, monkeypatch):
    settings = {"head": "linear", "epochs": 1, "batch": 16}
    summed = go("fedavg", settings, execution="batched")
    assert set(called) == {"weighted_sum"}
    called.clear()
    monkeypatch.setattr(batched, "SMALL_HEAD", 6 * 11 * 8)  # W alone in float64: b comes on top
    apart = go("fedavg", settings, execution="batched")
    assert called == ["add"] * PER_ROUND * ROUNDS
    assert difference(summed, apart) < 1e-12
    assert summed.traffic == apart.traffic


def test_what_a_client_keeps_stacked_is_added_client_by_client(called):
    go("fedpcl", {"dim": 5, "batch": 16, "epochs": 1}, execution="batched")
    assert called == ["add"] * PER_ROUND * ROUNDS
