"""One batch of rows: decode each image once, make every recipe's input, run every backbone.

The unit of work is an absolute batch, rows [kB, (k+1)B) of the dataset, the last one padded by repeating its last row
and cut: features change in the last bits with the batch size, so a batch is the same whoever computes it and however
often the run was interrupted.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.allocator import keep_freed_memory
from fedcache.errors import Exit, FedcacheError
from fedcache.extract import backbones as registry
from fedcache.extract.datasets import Source
from fedcache.extract.images import BadImage, decode, resize
from fedcache.extract.recipe import Recipe
from fedcache.extract.views import view

if TYPE_CHECKING:
    from fedcache.extract.backbones import FrozenEncoder, Weights


@dataclass(frozen=True)
class Job:
    """One backbone of a run: what to load, the recipe its inputs follow, and whether its views may be mirrored."""

    key: str
    backbone: str
    weights: Weights
    recipe: Recipe
    mirror: bool = True


@dataclass(frozen=True)
class How:
    """How features are computed. Recorded beside the recipe, constant while an array is unfinished.

    Attributes:
        device: ``cpu`` | ``cuda``.
        dtype: compute dtype, ``float32`` | ``bfloat16`` | ``float16``.
        batch: rows of an absolute batch.
        threads: threads of the process that runs the model.
    """

    device: str
    dtype: str
    batch: int
    threads: int


@dataclass
class Computed:
    """One batch, computed.

    Attributes:
        features: per key [rows, V, D] of the stored dtype; rows that are bad are NaN (0 for uint8).
        bad: reason per bad row.
        decoded: images decoded.
        decode_seconds: reading, decoding and resizing.
        forward_seconds: per key.
    """

    features: dict[str, NDArray[Any]]
    bad: dict[int, str]
    decoded: int
    decode_seconds: float
    forward_seconds: dict[str, float]


def input_key(recipe: Recipe) -> tuple[Any, ...]:
    """Recipes with equal keys share their inputs; normalisation happens on the device and is not part of it."""
    return (recipe.size, recipe.resize, recipe.interpolation, recipe.crop_pct, recipe.views, recipe.view_seed)


def load_inputs(
    source: Source, rows: Sequence[int], uids: NDArray[np.uint8], recipes: Sequence[Recipe], *, mirror: bool
) -> tuple[dict[tuple[Any, ...], NDArray[np.uint8]], dict[int, str]]:
    """Decode each row once and make every recipe's views.

    Args:
        source: where the encoded images are.
        rows: B row numbers.
        uids: uint8 [B, 16] of those rows, the key of the seeded views.
        recipes: of the backbones that want this batch.
        mirror: a mirrored image keeps its class.

    Returns:
        per input key uint8 [B, V, H, W, 3] (zeros where the image is bad), and the reason per bad row.
    """
    distinct = {input_key(r): r for r in recipes}
    collected: dict[tuple[Any, ...], list[NDArray[np.uint8] | None]] = {k: [] for k in distinct}
    bad: dict[int, str] = {}
    for row, uid in zip(rows, uids, strict=True):
        made: dict[tuple[Any, ...], NDArray[np.uint8]] = {}
        try:
            image = decode(source.read(row))
            for key, recipe in distinct.items():
                first = resize(image, recipe)
                rest = [view(image, recipe, uid.tobytes(), v, mirror=mirror) for v in range(1, recipe.views)]
                made[key] = np.stack([first, *rest])
        except BadImage as error:
            bad[row] = str(error)
            made = {}
        for key in distinct:
            collected[key].append(made.get(key))
    return {key: _stacked(images, distinct[key]) for key, images in collected.items()}, bad


def _stacked(images: list[NDArray[np.uint8] | None], recipe: Recipe) -> NDArray[np.uint8]:
    present = [image for image in images if image is not None]
    shape = present[0].shape if present else (recipe.views, max(recipe.size, 1), max(recipe.size, 1), 3)
    stacked = np.zeros((len(images), *shape), np.uint8)
    for index, image in enumerate(images):
        if image is None:
            continue
        if image.shape != shape:
            raise FedcacheError(
                Exit.USAGE,
                f"Images differ in size ({image.shape[1:3]} and {shape[1:3]}), and {recipe.backbone} keeps it.",
                f"Give one size:  --recipe {recipe.backbone}:size=64  (or --size 64)",
            )
        stacked[index] = image
    return stacked


class Runner:
    """The backbones of a run, loaded once in the process that computes."""

    def __init__(self, jobs: Sequence[Job], source: Source, uid: NDArray[np.uint8], rows: int, how: How) -> None:
        import torch

        self.jobs = {job.key: job for job in jobs}
        self.source, self.uid, self.rows, self.how = source, uid, rows, how
        self.device = torch.device(how.device)
        self.encoders: dict[str, FrozenEncoder] = {
            job.key: registry.load(
                registry.lookup(job.backbone), job.weights, job.recipe, device=how.device, dtype=how.dtype
            )
            for job in jobs
        }

    def compute(self, batch: int, keys: Sequence[str]) -> Computed:
        """Decode absolute batch ``batch`` and run the backbones ``keys`` on it."""
        start = time.perf_counter()
        rows = list(range(batch * self.how.batch, min((batch + 1) * self.how.batch, self.rows)))
        uids = self.uid[rows[0] : rows[-1] + 1]
        mirror = self.jobs[keys[0]].mirror
        inputs, bad = load_inputs(self.source, rows, uids, [self.jobs[k].recipe for k in keys], mirror=mirror)
        decode_seconds = time.perf_counter() - start
        return self.forward(rows, keys, inputs, bad, decode_seconds)

    def forward(
        self,
        rows: Sequence[int],
        keys: Sequence[str],
        inputs: Mapping[tuple[Any, ...], NDArray[np.uint8]],
        bad: dict[int, str],
        decode_seconds: float,
    ) -> Computed:
        """Run the backbones ``keys`` on decoded inputs."""
        features, seconds = {}, {}
        for key in keys:
            start = time.perf_counter()
            features[key] = self._encode(self.jobs[key], inputs[input_key(self.jobs[key].recipe)], rows, bad)
            seconds[key] = time.perf_counter() - start
        return Computed(features, bad, len(rows), decode_seconds, seconds)

    def _encode(self, job: Job, images: NDArray[np.uint8], rows: Sequence[int], bad: Mapping[int, str]) -> NDArray[Any]:
        import torch

        blank = [index for index, row in enumerate(rows) if row in bad]
        if job.recipe.dtype == "uint8":  # pixels: the feature is the input, and bad rows are zero already
            return images
        short = self.how.batch - len(rows)
        padded = np.concatenate([images, np.repeat(images[-1:], short, axis=0)]) if short else images
        parts = []
        for v in range(job.recipe.views):
            x = torch.from_numpy(np.ascontiguousarray(padded[:, v]))
            if self.how.device == "cuda":
                x = x.pin_memory().to(self.device, non_blocking=True)
            parts.append(self.encoders[job.key].image(x))
        out = torch.stack(parts, dim=1)[: len(rows)].to("cpu").numpy().astype(np.float32, copy=False)
        out[blank] = np.nan
        return out

    def text(self, key: str, classes: Sequence[str], templates: Sequence[str]) -> NDArray[np.float32]:
        """Text features [C, D] of the class names by the text tower of one backbone."""
        from fedcache.extract.text import text_features

        return text_features(self.encoders[key], classes, templates)

    def warm(self) -> dict[str, float]:
        """Seconds per image and backbone, on a few blank images, after one call that fills the caches."""
        import torch

        few = min(8, self.how.batch)
        rates = {}
        for key, job in self.jobs.items():
            side = job.recipe.size or 32
            x = torch.zeros((few, side, side, 3), dtype=torch.uint8, device=self.device)
            for _ in range(2):
                start = time.perf_counter()
                self.encoders[key].image(x)
                if self.how.device == "cuda":
                    torch.cuda.synchronize()
                rates[key] = (time.perf_counter() - start) / few * job.recipe.views
        return rates


_runner: Runner | None = None


def die_with_parent() -> None:
    """End this process when its parent ends, however that happens: an orphan would hold memory for ever."""
    parent = parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def enter_worker(jobs: Sequence[Job], source: Source, uid: NDArray[np.uint8], rows: int, how: How) -> None:
    """Initialise a worker process: signals are the parent's business, threads are fixed, backbones are loaded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    keep_freed_memory()
    global _runner
    _runner = make_runner(jobs, source, uid, rows, how)


def make_runner(jobs: Sequence[Job], source: Source, uid: NDArray[np.uint8], rows: int, how: How) -> Runner:
    """A runner with the process's thread count set as ``how`` records it."""
    import torch

    torch.set_num_threads(how.threads)
    return Runner(jobs, source, uid, rows, how)


def worker_warm() -> dict[str, float]:
    """``Runner.warm`` in a worker."""
    assert _runner is not None
    return _runner.warm()


def worker_compute(batch: int, keys: Sequence[str]) -> Computed:
    """``Runner.compute`` in a worker."""
    assert _runner is not None
    return _runner.compute(batch, keys)


def worker_text(key: str, classes: Sequence[str], templates: Sequence[str]) -> NDArray[np.float32]:
    """``Runner.text`` in a worker."""
    assert _runner is not None
    return _runner.text(key, classes, templates)


def enter_decoder() -> None:
    """Initialise a worker that only decodes (the model runs elsewhere)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()


def decode_batch(
    source: Source, rows: Sequence[int], uids: NDArray[np.uint8], recipes: Sequence[Recipe], mirror: bool
) -> tuple[dict[tuple[Any, ...], NDArray[np.uint8]], dict[int, str], float]:
    """``load_inputs`` with its seconds, for a decoding worker."""
    start = time.perf_counter()
    inputs, bad = load_inputs(source, rows, uids, recipes, mirror=mirror)
    return inputs, bad, time.perf_counter() - start
