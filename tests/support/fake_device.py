"""A device whose streams sleep: the stages of a GPU over models on the CPU, each stream a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcache.extract.batches import BatchRunner


class SleepingDevice:
    """See ``DeviceStages``. ``seconds`` are those of a copy in, of a model and of a copy out.

    ``before_fetch`` is called with the number of the batch before its features are waited for.
    """

    def __init__(
        self,
        runner: BatchRunner,
        seconds: tuple[float, float, float] = (0.0, 0.0, 0.0),
        before_fetch: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.runner = runner
        self.seconds = seconds
        self.before_fetch = before_fetch
        self.streams = [ThreadPoolExecutor(1) for _ in range(3)]
        self.notes = ["the fake device records no graphs"]
        self.lock = threading.Lock()
        self.loaded = 0
        self.fetched = 0
        self.most_held = 0
        """Most batches between the begin of their copy in and the end of their copy out."""

    def warm(self) -> dict[str, float]:
        return dict.fromkeys(self.runner.jobs, 0.5)

    def load(self, images: NDArray[np.uint8]) -> Future[Any]:
        with self.lock:
            self.loaded += 1
            self.most_held = max(self.most_held, self.loaded - self.fetched)
        mine = images.copy()  # as a staging buffer: what is given is overwritten
        return self.streams[0].submit(self._slept, 0, lambda: mine)

    def run(self, key: str, loaded: Future[Any]) -> Future[Any]:
        def compute() -> NDArray[np.float32]:
            images = torch.from_numpy(loaded.result())
            encoder = self.runner.encoders[key]
            views = [encoder.image(images[:, view]) for view in range(images.shape[1])]
            return torch.stack(views, dim=1).numpy()

        started = self.streams[1].submit(self._slept, 1, compute)
        return self.streams[2].submit(self._slept, 2, started.result)

    def fetch(self, started: Future[Any]) -> tuple[NDArray[np.float32], float]:
        self.before_fetch(self.fetched)
        features = started.result()
        with self.lock:
            self.fetched += 1
        return features, self.seconds[1]

    def _slept(self, stream: int, call: Callable[[], Any]) -> Any:
        found = call()
        time.sleep(self.seconds[stream])
        return found

    def close(self) -> None:
        for stream in self.streams:
            stream.shutdown()
