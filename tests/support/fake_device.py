"""A device whose streams sleep: the stages of a GPU over models on the CPU, each stream a thread of its own."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch


class SleepingDevice:
    """See ``DeviceStages``. ``seconds`` are those of a copy in, of a model and of a copy out.

    ``before_fetch`` is called with the number of the batch before its features are waited for.
    """

    def __init__(self, runner, seconds=(0.0, 0.0, 0.0), before_fetch=lambda _: None):
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

    def warm(self):
        return dict.fromkeys(self.runner.jobs, 0.5)

    def load(self, images):
        with self.lock:
            self.loaded += 1
            self.most_held = max(self.most_held, self.loaded - self.fetched)
        mine = images.copy()  # as a staging buffer: what is given is overwritten
        return self.streams[0].submit(self._slept, 0, lambda: mine)

    def run(self, key, loaded):
        def compute():
            images = torch.from_numpy(loaded.result())
            encoder = self.runner.encoders[key]
            views = [encoder.image(images[:, view]) for view in range(images.shape[1])]
            return torch.stack(views, dim=1).numpy()

        started = self.streams[1].submit(self._slept, 1, compute)
        return self.streams[2].submit(self._slept, 2, started.result)

    def fetch(self, started):
        self.before_fetch(self.fetched)
        features = started.result()
        with self.lock:
            self.fetched += 1
        return features, self.seconds[1]

    def _slept(self, stream, call):
        found = call()
        time.sleep(self.seconds[stream])
        return found

    def close(self):
        for stream in self.streams:
            stream.shutdown()
