"""Runs the three stages of a GPU, each on its own stream: images are copied in, models run, features are copied out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import MachineError
from fedcache.extract.backbones.backbone import deterministic
from fedcache.extract.batches import BatchRunner
from fedcache.extract.recipe import IMAGES

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class LoadedBatch:
    """Images on the device, and the event after which they are copied completely."""

    images: Tensor  # uint8 [B, V, H, W, 3]
    copied: torch.cuda.Event


@dataclass
class StartedBatch:
    """Features on their way back: a page-locked tensor [B, V, D], and the events of the model and of the copy."""

    features: Tensor
    begun: torch.cuda.Event
    computed: torch.cuda.Event
    copied: torch.cuda.Event


def _event(*, timing: bool = False) -> torch.cuda.Event:
    """An event of a stream, with the time at which it happened if ``timing``."""
    import torch

    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


def _stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of a device."""
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class StagingBuffers:
    """Page-locked memory, from which a GPU copies without the processor: two buffers per shape, used alternately."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, ...], list[tuple[Tensor, torch.cuda.Event]]] = {}

    def next(self, shape: tuple[int, ...]) -> tuple[Tensor, torch.cuda.Event]:
        """A uint8 buffer whose last copy has ended, and the event to record after the next copy."""
        import torch

        pair = self.buffers.get(shape)
        if pair is None:
            pair = []
            for _ in range(2):
                buffer = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
                pair.append((buffer, _event()))
            self.buffers[shape] = pair
        # The last buffer of the pair is used. Reversing the pair puts the one that was used longer ago there.
        pair.reverse()
        buffer, buffer_free = pair[-1]
        buffer_free.synchronize()
        return buffer, buffer_free


class CapturedModel:
    """A model whose kernels for one shape of images were recorded as a CUDA graph: one call starts them all.

    Raises RuntimeError if the model cannot be recorded, or if its graph gives other features.
    """

    def __init__(
        self, compute: Callable[[Tensor], Tensor], images: Tensor, stream: torch.cuda.Stream
    ) -> None:
        import torch

        self.images = images.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.features = compute(self.images)
        # A graph repeats the branches that Python took while it was recorded. Random images check that no branch
        # depends on the images.
        noise = torch.randint_like(images, 256)
        if not torch.equal(self(noise), compute(noise)):
            raise RuntimeError("with CUDA graphs it gives different features")

    def __call__(self, images: Tensor) -> Tensor:
        self.images.copy_(images)
        self.graph.replay()
        return self.features.clone()


class CudaStages:
    """The models of a runner on its GPU; see ``gpu.DeviceStages``."""

    def __init__(self, runner: BatchRunner) -> None:
        self.runner = runner
        self.device = runner.device
        self.incoming = _stream(self.device)
        self.computing = _stream(self.device)
        self.outgoing = _stream(self.device)
        self.staging = StagingBuffers()
        self.captured: dict[str, CapturedModel] = {}
        self.notes: list[str] = []
        # ``deterministic`` changes global settings. Encoders set and reset them in every call, so one of two threads
        # could reset them while the other computes. Here they stay set until ``close``.
        self.settings = ExitStack()
        self.settings.enter_context(deterministic())

    def warm(self) -> dict[str, float]:
        """See ``DeviceStages.warm``; MachineError if a batch does not fit into the GPU's memory."""
        import torch

        batch = self.runner.settings.batch
        seconds_per_image = {}
        for key, job in self.runner.jobs.items():
            side = job.recipe.size
            if job.backbone.reads != IMAGES or not side:
                continue
            shape = (batch, job.recipe.views, side, side, 3)
            images = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            with self._explains_out_of_memory(key), torch.cuda.stream(self.computing):
                # The first pass loads kernels; the time of the second counts.
                for _ in range(2):
                    start = time.perf_counter()
                    self._features(key, images)
                    self.computing.synchronize()
                    seconds_per_image[key] = (time.perf_counter() - start) / batch
                self._capture(key, images)
        return seconds_per_image

    def _capture(self, key: str, images: Tensor) -> None:
        """Record the model for batches of this shape; if that does not work, add a note."""
        try:
            compute = partial(self._eager, key)
            self.captured[key] = CapturedModel(compute, images, self.computing)
        except RuntimeError as error:
            name = self.runner.jobs[key].recipe.label
            why = str(error).splitlines()[0]
            self.notes.append(f"{name} runs without CUDA graphs: {why}")

    def load(self, images: NDArray[np.uint8]) -> LoadedBatch:
        """See ``DeviceStages.load``."""
        import torch

        buffer, buffer_free = self.staging.next(images.shape)
        buffer.copy_(torch.from_numpy(images))
        with torch.cuda.stream(self.incoming):
            on_device = buffer.to(self.device, non_blocking=True)
            # Two events at the same point: a later batch in this buffer records the first one again.
            buffer_free.record()
            copied = _event()
            copied.record()
        return LoadedBatch(on_device, copied)

    def run(self, key: str, loaded: LoadedBatch) -> StartedBatch:
        """See ``DeviceStages.run``."""
        import torch

        begun = _event(timing=True)
        computed = _event(timing=True)
        copied = _event()
        with self._explains_out_of_memory(key), torch.cuda.stream(self.computing):
            loaded.copied.wait()
            # torch must not reuse the memory before this stream has read it.
            loaded.images.record_stream(self.computing)
            begun.record()
            features = self._features(key, loaded.images)
            computed.record()
        with torch.cuda.stream(self.outgoing):
            computed.wait()
            features.record_stream(self.outgoing)
            on_host = torch.empty(features.shape, dtype=features.dtype, pin_memory=True)
            on_host.copy_(features, non_blocking=True)
            copied.record()
        return StartedBatch(on_host, begun, computed, copied)

    def fetch(self, started: StartedBatch) -> tuple[NDArray[np.float32], float]:
        """See ``DeviceStages.fetch``."""
        started.copied.synchronize()
        seconds = started.begun.elapsed_time(started.computed) / 1e3
        return started.features.numpy(), seconds

    def close(self) -> None:
        """See ``DeviceStages.close``."""
        self.settings.close()

    def _features(self, key: str, images: Tensor) -> Tensor:
        """Features float32 [B, V, D] of images uint8 [B, V, H, W, 3], by the encoder of ``key``."""
        captured = self.captured.get(key)
        if captured is not None and captured.images.shape == images.shape:
            return captured(images)
        return self._eager(key, images)

    def _eager(self, key: str, images: Tensor) -> Tensor:
        """As ``_features``, without a recorded model."""
        import torch

        encoder = self.runner.encoders[key]
        views = [encoder.image(images[:, view]) for view in range(images.shape[1])]
        return torch.stack(views, dim=1).float()

    @contextmanager
    def _explains_out_of_memory(self, key: str) -> Iterator[None]:
        """Turn an out-of-memory error of the GPU into a MachineError, whose hint has a smaller batch."""
        import torch

        try:
            yield
        except torch.OutOfMemoryError as error:
            batch = self.runner.settings.batch
            smaller = max(1, batch // 2)
            name = self.runner.jobs[key].recipe.label
            raise MachineError(
                f"The GPU's memory is too small for a batch of {batch} images of {name}.",
                f"--batch {smaller}; add --fresh if an extraction with --batch {batch} was begun.",
            ) from error
