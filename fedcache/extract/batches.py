"""One batch of rows: decode each image once, make every recipe's input, run every backbone.

Texts and rows of numbers are read instead of decoded.

The unit of work is an absolute batch: rows [kB, (k+1)B) of the dataset. The last batch is filled up by repeating its
last row, because features change in the last bits with the batch size. So a batch has the same features on every
worker, and no matter how often the run was interrupted.
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

from fedcache.errors import FedcacheError, UsageError
from fedcache.extract import backbones as registry
from fedcache.extract.backbones.backbone import ModuleEncoder, text_features
from fedcache.extract.datasets import Source
from fedcache.extract.image_files import BadImage
from fedcache.extract.images import decode, view
from fedcache.extract.inputs import ItemEncoder, Prepare, encode_items, read_items
from fedcache.extract.recipe import IMAGES, Recipe, reads_of
from fedcache.optional import reason

if TYPE_CHECKING:
    from fedcache.extract.backbones import Backbone, FrozenEncoder, Weights


@dataclass(frozen=True)
class FeatureJob:
    """One array of a run."""

    key: str  # of the array
    backbone: Backbone  # the model to load
    weights: Weights  # its weights file
    recipe: Recipe  # of its inputs
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
    # numbers of the GPUs that share the batches; empty for torch's current GPU, and on a CPU
    gpus: tuple[int, ...] = ()
    compiled: bool = False  # whether torch.compile compiles the models of images


@dataclass
class ComputedBatch:
    """The features of one batch."""

    # per key [rows, V, D] of the stored dtype; bad rows are NaN (0 for uint8)
    features: dict[str, NDArray[Any]]
    bad: dict[int, str]  # reason per bad row
    decoded: int  # images decoded
    decode_seconds: float  # reading, decoding and resizing
    forward_seconds: dict[str, float]  # per key
    # per key, texts that the model reads only in part
    cut: dict[str, int] = field(default_factory=dict)


def input_key(recipe: Recipe) -> tuple[Any, ...]:
    """Recipes with equal keys share their inputs. Normalisation is no part of the key: it happens on the device."""
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
    """Decode each row once and make the views of every recipe, in the process that decodes.

    ``uids``, uint8 [B, 16], are those of the rows; they seed the random views. Returns the inputs by input key, the
    reason per bad row, and the seconds it took. Inputs are uint8 [B, V, H, W, 3], zeros where the image is bad. For
    texts and rows they are the items that ``read_items`` and then ``prepare`` of that key returned.
    """
    start = time.perf_counter()
    kind = reads_of(recipes[0])  # all recipes read the same kind, because a dataset holds one kind
    distinct = {input_key(recipe): recipe for recipe in recipes}
    if kind != IMAGES:
        items, unread = read_items(source, rows, kind)
        items_of: dict[tuple[Any, ...], Any] = dict.fromkeys(distinct, items)
        for key in distinct:
            if key in prepare:
                prepared = prepare[key](cast("list[Any]", items))
                items_of[key] = prepared
                for place, why in prepared.bad.items():
                    unread.setdefault(rows[place], why)
        return items_of, unread, time.perf_counter() - start
    collected: dict[tuple[Any, ...], list[NDArray[np.uint8] | None]] = {key: [] for key in distinct}
    bad: dict[int, str] = {}
    for row, uid in zip(rows, uids, strict=True):
        made: dict[tuple[Any, ...], NDArray[np.uint8]] = {}
        try:
            image = decode(source.read(row))
            for key, recipe in distinct.items():
                views = [
                    view(image, recipe, uid.tobytes(), number, mirror=mirror)
                    for number in range(recipe.views)
                ]
                made[key] = np.stack(views)
        except BadImage as error:
            bad[row] = str(error)
            # If one view fails, the row is bad for every recipe.
            made = {}
        for key in distinct:
            collected[key].append(made.get(key))
    inputs = {key: _stacked(images, distinct[key]) for key, images in collected.items()}
    return inputs, bad, time.perf_counter() - start


def _stacked(images: list[NDArray[np.uint8] | None], recipe: Recipe) -> NDArray[np.uint8]:
    """The views of B images as uint8 [B, V, H, W, 3], zeros for None. Raises UsageError if sizes differ."""
    # A recipe of size 0 keeps the size of the images. Without a good image this size is unknown, and 1 x 1 is used.
    side = max(recipe.size, 1)
    shape: tuple[int, ...] = (recipe.views, side, side, 3)
    present = [image for image in images if image is not None]
    if present:
        shape = present[0].shape
    stacked = np.zeros((len(images), *shape), np.uint8)
    for index, image in enumerate(images):
        if image is None:
            continue
        if image.shape != shape:
            raise sizes_differ(image.shape, shape)
        stacked[index] = image
    return stacked


def sizes_differ(one: tuple[int, ...], other: tuple[int, ...]) -> UsageError:
    """The error for images whose views have different shapes [V, H, W, 3] in a recipe of size 0."""
    # Only the recipes of this backbone may have size 0.
    return UsageError(
        f"Images differ in size ({one[1:3]} and {other[1:3]}), but pixels does not resize them.",
        "Give one size:  --recipe pixels:size=64  (or --size 64)",
    )


def filled_up(rows: NDArray[Any], batch: int) -> NDArray[Any]:
    """The rows of a batch [n, ...], with copies of the last row up to [batch, ...].

    A model computes all batches at one size: features of a shorter batch would differ in their last bits.
    """
    short = batch - len(rows)
    if not short:
        return rows
    return np.concatenate([rows, np.repeat(rows[-1:], short, axis=0)])


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
        # With workers, each GPU has its own runner, whose settings list only this GPU. Without workers, the first GPU
        # runs all batches.
        name = settings.device
        if settings.gpus:
            name = f"{name}:{settings.gpus[0]}"
        self.device = torch.device(name)
        self.encoders: dict[str, FrozenEncoder] = {
            job.key: registry.load(
                job.backbone, job.weights, job.recipe, device=str(self.device), dtype=settings.dtype
            )
            for job in jobs
        }
        if settings.compiled:
            for job in jobs:
                if job.backbone.is_torch_model:
                    encoder = cast(ModuleEncoder, self.encoders[job.key])
                    encoder.compile_image_model(settings.batch, job.recipe.size)

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
        uid = self.uid[rows.start : rows.stop]
        jobs = [self.jobs[key] for key in keys]
        recipes = [job.recipe for job in jobs]
        # Texts are prepared in the process that reads them, not in the one that feeds the GPU. The ``mirror`` of the
        # first job is that of all jobs, because it belongs to their dataset.
        prepare = {}
        for job in jobs:
            encoder: Any = self.encoders[job.key]
            if hasattr(encoder, "prepare"):
                prepare[input_key(job.recipe)] = encoder.prepare
        return self.source, rows, uid, recipes, jobs[0].mirror, prepare

    def forward(
        self,
        rows: Sequence[int],
        keys: Sequence[str],
        inputs: Mapping[tuple[Any, ...], Any],
        bad: dict[int, str],
        decode_seconds: float,
    ) -> ComputedBatch:
        """Run the backbones ``keys`` on the inputs of ``rows``, as ``decode_batch`` returns them by input key."""
        features = {}
        seconds = {}
        cut = {}
        # Places in the batch of rows that could not be read. Their features become NaN.
        blank = [index for index, row in enumerate(rows) if row in bad]
        for key in keys:
            start = time.perf_counter()
            job = self.jobs[key]
            given = inputs[input_key(job.recipe)]
            try:
                if job.backbone.reads == IMAGES:
                    features[key] = self._encode(job, given, rows, blank)
                else:
                    features[key], cut[key] = self.encode_items(key, given, blank)
            except Exception as error:
                # The user's code may raise any error, which becomes a message.
                if isinstance(error, FedcacheError) or job.backbone.provider != "own_module":
                    raise
                first = rows[0]
                why = reason(error)
                raise UsageError(
                    f"{job.backbone.name} fails on the batch that begins with row {first}: {why}",
                    "Fix the module, or leave it out of --backbones.",
                ) from error
            seconds[key] = time.perf_counter() - start
        return ComputedBatch(features, bad, len(rows), decode_seconds, seconds, cut)

    def encode_items(
        self, key: str, items: Any, blank: Sequence[int]
    ) -> tuple[NDArray[np.float32], int]:
        """``inputs.encode_items`` with the backbone ``key``."""
        encoder = cast(ItemEncoder, self.encoders[key])
        width = self.jobs[key].backbone.width
        return encode_items(encoder, items, self.settings.batch, blank, width)

    def _encode(
        self, job: FeatureJob, images: NDArray[np.uint8], rows: Sequence[int], blank: Sequence[int]
    ) -> NDArray[Any]:
        """Features [n, V, D] of the images uint8 [n, V, H, W, 3] of n rows; NaN at the places in ``blank``."""
        import torch

        # The feature of ``pixels`` is the input, and bad rows are zero already.
        if job.recipe.dtype == "uint8":
            return images
        padded = filled_up(images, self.settings.batch)
        parts = []
        for v in range(job.recipe.views):
            x = torch.from_numpy(np.ascontiguousarray(padded[:, v]))
            if self.device.type == "cuda":
                x = x.pin_memory().to(self.device, non_blocking=True)
            parts.append(self.encoders[job.key].image(x))
        features = torch.stack(parts, dim=1)[: len(rows)]
        out = features.to("cpu").numpy().astype(np.float32, copy=False)
        out[list(blank)] = np.nan
        return out

    def text(
        self, key: str, classes: Sequence[str], templates: Sequence[str]
    ) -> NDArray[np.float32]:
        """Text features [C, D] of the class names by the text tower of one backbone."""
        return text_features(self.encoders[key], classes, templates)

    def warm(self) -> dict[str, float]:
        """Seconds per image and backbone, measured on a few blank images after one call that fills the caches.

        Models of texts and rows are measured on the first items of the dataset.
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
                few_uids = uid[: len(rows)]
                inputs, bad, _ = decode_batch(source, rows, few_uids, recipes, mirror, prepare)
                items = inputs[input_key(job.recipe)]
                # Without a readable item, nothing can be measured.
                if len(bad) == len(items):
                    rates[key] = 0.0
                    continue
                encoder = cast(ItemEncoder, self.encoders[key])
                call = partial(encoder.items, items)
            # The second call is the one that counts.
            for _ in range(2):
                start = time.perf_counter()
                call()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                seconds = time.perf_counter() - start
                rates[key] = seconds / few * job.recipe.views
        return rates


def make_runner(
    jobs: Sequence[FeatureJob],
    source: Source,
    uid: NDArray[np.uint8],
    rows: int,
    settings: ComputeSettings,
) -> BatchRunner:
    """A runner. First sets the number of threads of this process to ``settings.threads``, which ``how`` records."""
    import torch

    torch.set_num_threads(settings.threads)
    return BatchRunner(jobs, source, uid, rows, settings)
