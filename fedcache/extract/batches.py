"""One batch of rows: decode each image once, make every recipe's input, run every backbone. Texts and rows are read.

The unit of work is an absolute batch, rows [kB, (k+1)B) of the dataset, the last one padded by repeating its last row
and cut: features change in the last bits with the batch size, so a batch is the same on every device and worker and
however often the run was interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError, shell_word
from fedcache.extract import backbones as registry
from fedcache.extract.backbones.backbone import text_features
from fedcache.extract.datasets import Source
from fedcache.extract.image_files import BadImage
from fedcache.extract.images import decode, resize, view
from fedcache.extract.inputs import ItemEncoder, Prepare, encode_items, read_items
from fedcache.extract.recipe import IMAGES, Recipe, reads_of

if TYPE_CHECKING:
    from fedcache.extract.backbones import Backbone, FrozenEncoder, Weights


@dataclass(frozen=True)
class FeatureJob:
    """One array of a run."""

    key: str  # of the array
    backbone: Backbone  # the model to load
    weights: Weights  # where its weights lie
    recipe: Recipe  # that its inputs follow
    mirror: bool = True  # whether a mirrored view keeps its class
    # ``how_record`` of the array, as the store keeps it
    how: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ComputeSettings:
    """How features are computed; recorded next to the recipe and constant while an array is unfinished."""

    device: str  # ``cpu`` | ``cuda``
    dtype: str  # compute dtype, ``float32`` | ``bfloat16`` | ``float16``
    batch: int  # rows of an absolute batch
    threads: int  # threads of the process that runs the model
    # numbers of the GPUs that share the batches; none for the one that torch takes, and on a CPU
    gpus: tuple[int, ...] = ()

    @property
    def device_names(self) -> list[str]:
        """The devices as torch names them."""
        if not self.gpus:
            return [self.device]
        return [f"{self.device}:{number}" for number in self.gpus]


@dataclass
class ComputedBatch:
    """The features of one batch."""

    features: dict[
        str, NDArray[Any]
    ]  # per key [rows, V, D] of the stored dtype; bad rows are NaN (0 for uint8)
    bad: dict[int, str]  # reason per bad row
    decoded: int  # images decoded
    decode_seconds: float  # reading, decoding and resizing
    forward_seconds: dict[str, float]  # per key
    # per key, texts of which the model reads a part
    cut: dict[str, int] = field(default_factory=dict)


def input_key(recipe: Recipe) -> tuple[Any, ...]:
    """Recipes with equal keys share their inputs; normalisation happens on the device and is not part of it."""
    r = recipe
    if reads_of(r) != IMAGES:
        return (r.decoder, r.backbone, r.weights, r.size, r.prompt)
    return (r.size, r.resize, r.interpolation, r.crop_pct, r.views, r.view_seed, r.augment)


def decode_batch(
    source: Source,
    rows: Sequence[int],
    uids: NDArray[np.uint8],
    recipes: Sequence[Recipe],
    mirror: bool,
    prepare: Mapping[tuple[Any, ...], Prepare] = MappingProxyType({}),
) -> tuple[dict[tuple[Any, ...], Any], dict[int, str], float]:
    """Decode each row once and make every recipe's views, in whichever process decodes.

    ``uids``, uint8 [B, 16] of the rows, are the key of the seeded views. Gives per input key uint8 [B, V, H, W, 3]
    (zeros where the image is bad), or texts or rows as ``read_items`` and then ``prepare`` of that key made them, the
    reason per bad row, and the seconds it took.
    """
    start = time.perf_counter()
    if (kind := reads_of(recipes[0])) != IMAGES:  # of all recipes alike: a dataset holds one kind
        items, lost, _ = read_items(source, rows, kind)
        given: dict[tuple[Any, ...], Any] = {}
        for key in dict.fromkeys(map(input_key, recipes)):
            given[key] = items
            if key in prepare:
                ready = prepare[key](cast("list[Any]", items))
                given[key] = ready
                lost |= {rows[at]: why for at, why in ready.bad.items() if rows[at] not in lost}
        return given, lost, time.perf_counter() - start
    distinct = {input_key(r): r for r in recipes}
    collected: dict[tuple[Any, ...], list[NDArray[np.uint8] | None]] = {k: [] for k in distinct}
    bad: dict[int, str] = {}
    for row, uid in zip(rows, uids, strict=True):
        made: dict[tuple[Any, ...], NDArray[np.uint8]] = {}
        try:
            image = decode(source.read(row))
            for key, recipe in distinct.items():
                first = resize(image, recipe)
                rest = [
                    view(image, recipe, uid.tobytes(), v, mirror=mirror)
                    for v in range(1, recipe.views)
                ]
                made[key] = np.stack([first, *rest])
        except BadImage as error:
            bad[row] = str(error)
            made = {}
        for key in distinct:
            collected[key].append(made.get(key))
    inputs = {key: _stacked(images, distinct[key]) for key, images in collected.items()}
    return inputs, bad, time.perf_counter() - start


def _stacked(images: list[NDArray[np.uint8] | None], recipe: Recipe) -> NDArray[np.uint8]:
    present = [image for image in images if image is not None]
    if present:
        shape = present[0].shape
    else:
        shape = (recipe.views, max(recipe.size, 1), max(recipe.size, 1), 3)
    stacked = np.zeros((len(images), *shape), np.uint8)
    for index, image in enumerate(images):
        if image is None:
            continue
        if image.shape != shape:
            raise UsageError(
                f"Images differ in size ({image.shape[1:3]} and {shape[1:3]}), but {recipe.backbone} does "
                "not resize them.",
                f"Give one size:  --recipe {shell_word(recipe.backbone)}:size=64  (or --size 64)",
            )
        stacked[index] = image
    return stacked


class BatchRunner:
    """The backbones of a run, loaded once in the process that computes."""

    def __init__(
        self,
        jobs: Sequence[FeatureJob],
        source: Source,
        uid: NDArray[np.uint8],
        rows: int,
        settings: ComputeSettings,
    ) -> None:
        import torch

        self.jobs = {job.key: job for job in jobs}
        self.source = source
        self.uid = uid
        self.rows = rows
        self.settings = settings
        self.device = torch.device(settings.device_names[0])
        self.encoders: dict[str, FrozenEncoder] = {
            job.key: registry.load(
                job.backbone, job.weights, job.recipe, device=str(self.device), dtype=settings.dtype
            )
            for job in jobs
        }

    def compute(self, batch: int, keys: Sequence[str]) -> ComputedBatch:
        """Decode absolute batch ``batch`` and run the backbones ``keys`` on it."""
        rows = self.rows_of(batch)
        inputs, bad, seconds = decode_batch(*self.decoding(batch, keys))
        return self.forward(rows, keys, inputs, bad, seconds)

    def rows_of(self, batch: int) -> range:
        """Rows of absolute batch ``batch``; the last batch may be short."""
        size = self.settings.batch
        return range(batch * size, min((batch + 1) * size, self.rows))

    def decoding(
        self, batch: int, keys: Sequence[str]
    ) -> tuple[Source, range, NDArray[np.uint8], list[Recipe], bool, dict[Any, Prepare]]:
        """The arguments of ``decode_batch`` for the inputs of the backbones ``keys``."""
        rows = self.rows_of(batch)
        jobs = [self.jobs[key] for key in keys]
        # Texts are prepared where they are read: in a decoder's process, not before the GPU.
        prepare = {
            input_key(job.recipe): self.encoders[job.key].prepare  # type: ignore[attr-defined]
            for job in jobs
            if hasattr(self.encoders[job.key], "prepare")
        }
        return (
            self.source,
            rows,
            self.uid[rows.start : rows.stop],
            [job.recipe for job in jobs],
            jobs[0].mirror,
            prepare,
        )

    def forward(
        self,
        rows: Sequence[int],
        keys: Sequence[str],
        inputs: Mapping[tuple[Any, ...], Any],
        bad: dict[int, str],
        decode_seconds: float,
    ) -> ComputedBatch:
        """Run the backbones ``keys`` on the decoded inputs of ``rows``: per input key uint8 [rows, V, H, W, 3].

        Of texts and rows what ``read_items`` gives.
        """
        features = {}
        seconds = {}
        cut = {}
        # Places in the batch of rows without an image: their features become NaN.
        blank = [index for index, row in enumerate(rows) if row in bad]
        for key in keys:
            start = time.perf_counter()
            job = self.jobs[key]
            given = inputs[input_key(job.recipe)]
            if job.backbone.reads == IMAGES:
                features[key] = self._encode(job, given, rows, blank)
            else:
                encoder = cast(ItemEncoder, self.encoders[key])
                features[key], cut[key] = encode_items(
                    encoder, given, self.settings.batch, blank, job.backbone.width
                )
            seconds[key] = time.perf_counter() - start
        return ComputedBatch(features, bad, len(rows), decode_seconds, seconds, cut)

    def _encode(
        self, job: FeatureJob, images: NDArray[np.uint8], rows: Sequence[int], blank: Sequence[int]
    ) -> NDArray[Any]:
        import torch

        # pixels: the feature is the input, and bad rows are zero already
        if job.recipe.dtype == "uint8":
            return images
        # The last batch is filled up with copies of its last row: a shorter one would have other last bits.
        short = self.settings.batch - len(rows)
        padded = images
        if short:
            padded = np.concatenate([images, np.repeat(images[-1:], short, axis=0)])
        parts = []
        for v in range(job.recipe.views):
            x = torch.from_numpy(np.ascontiguousarray(padded[:, v]))
            if self.device.type == "cuda":
                x = x.pin_memory().to(self.device, non_blocking=True)
            parts.append(self.encoders[job.key].image(x))
        out = (
            torch.stack(parts, dim=1)[: len(rows)].to("cpu").numpy().astype(np.float32, copy=False)
        )
        out[list(blank)] = np.nan
        return out

    def text(
        self, key: str, classes: Sequence[str], templates: Sequence[str]
    ) -> NDArray[np.float32]:
        """Text features [C, D] of the class names by the text tower of one backbone."""
        return text_features(self.encoders[key], classes, templates)

    def warm(self) -> dict[str, float]:
        """Seconds per image and backbone, on a few blank images, after one call that fills the caches.

        Of texts and rows on the first of them.
        """
        import torch

        few = min(8, self.settings.batch)
        rates: dict[str, float] = {}
        call: Callable[[], Any]
        for key, job in self.jobs.items():
            side = job.recipe.size or 32
            if job.backbone.reads == IMAGES:
                x = torch.zeros((few, side, side, 3), dtype=torch.uint8, device=self.device)
                call = partial(self.encoders[key].image, x)
            else:
                rows = range(min(few, self.rows))
                source, _, uid, recipes, mirror, prepare = self.decoding(0, [key])
                inputs, bad, _ = decode_batch(
                    source, rows, uid[: len(rows)], recipes, mirror, prepare
                )
                items = inputs[input_key(job.recipe)]
                if len(bad) == len(items):
                    rates[key] = 0.0
                    continue
                call = partial(cast(ItemEncoder, self.encoders[key]).items, items)
            for _ in range(2):
                start = time.perf_counter()
                call()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                rates[key] = (time.perf_counter() - start) / few * job.recipe.views
        return rates


def make_runner(
    jobs: Sequence[FeatureJob],
    source: Source,
    uid: NDArray[np.uint8],
    rows: int,
    settings: ComputeSettings,
) -> BatchRunner:
    """A runner with the process's thread count set as ``how`` records it."""
    import torch

    torch.set_num_threads(settings.threads)
    return BatchRunner(jobs, source, uid, rows, settings)
