"""What an extraction is expected to take, before it is begun."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from fedcache.config import ExtractConfig
from fedcache.extract.batches import ComputedBatch, ComputeSettings
from fedcache.extract.device import Device
from fedcache.extract.planning import cost


@pytest.mark.parametrize(
    ("kind", "workers", "cores", "decoding", "rate"),
    [  # a batch of four images takes 2 s of forward passes, and so many of decoding
        ("cpu", 3, 8, 1.0, 4.0),  # three processes, each 1/2 s + 1/4 s for an image
        ("cpu", None, 6, 1.0, 8.0),
        ("cuda", None, 8, 1.0, 2.0),  # 1/2 s on the GPU; seven cores decode an image every 1/28 s
        ("cuda", None, 5, 16.0, 1.0),  # four cores decode an image of 4 s every second
        ("cuda", None, 1, 16.0, 0.25),  # nobody else is there to decode
    ],
)
def test_the_rate_is_that_of_one_batch_after_the_models_are_warm(
    monkeypatch: pytest.MonkeyPatch, kind: str, workers: int | None, cores: int, decoding: float, rate: float
) -> None:
    done: list[object] = []

    class Timed:
        """Workers that know how long a batch took."""

        def __init__(self, jobs: Any, data: Any, settings: ComputeSettings) -> None:
            done.append(settings.batch)

        def warm(self) -> None:
            done.append("warm")

        def submit(self, batch: int, keys: Any) -> Future[ComputedBatch]:
            done.append((batch, list(keys)))
            future: Future[ComputedBatch] = Future()
            future.set_result(ComputedBatch({}, {}, 4, decoding, {"a": 1.5, "b": 0.5}))
            return future

        def close(self) -> None:
            done.append("closed")

    settings = ComputeSettings(kind, "float32", 32, 1)
    monkeypatch.setattr(cost, "InProcess", Timed)
    monkeypatch.setattr(cost, "cores", lambda: cores)
    monkeypatch.setattr(cost, "resolve_compute", lambda _: (Device(kind, "", ""), settings))
    monkeypatch.setattr(cost, "jobs_of", lambda *_: [SimpleNamespace(key="a"), SimpleNamespace(key="b")])
    data: Any = SimpleNamespace(names=["one", "two", "three"])
    found = cost.measured_rate(data, [], ExtractConfig(dataset="x", workers=workers))
    assert found == pytest.approx(rate)
    assert done == [3, "warm", (0, ["a", "b"]), "closed"], "a batch is not larger than the dataset"
