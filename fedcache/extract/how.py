"""Record of the conditions of feature computation: device, settings, versions of libraries, and fedcache's own code.

The record is stored next to the recipe of an array; a finished array is found by its recipe alone. The record must be
equal if an unfinished array is resumed, or if chunks of an earlier store are reused. Otherwise the rows of one array
would not be comparable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedcache.config import ExtractConfig
from fedcache.errors import MachineError
from fedcache.extract.backbones import Backbone
from fedcache.extract.batches import ComputeSettings, FeatureJob
from fedcache.extract.datasets import Dataset
from fedcache.extract.device import Device, resolve_device, resolve_dtype
from fedcache.extract.planning.plan import PlannedArray
from fedcache.extract.recipe import IMAGES
from fedcache.progress import Observer
from fedcache.store.files import digest_of_files, free_memory

FOLDER = Path(__file__).parent

COMPUTES_FEATURES = (
    "batches.py",
    "augment.py",
    "images.py",
    "inputs.py",
    "backbones/checkpoints.py",
    "backbones/backbone.py",
)
"""Files of this folder that compute features from encoded images for every backbone. Each provider has further files.

Weights and preprocessing have their own digests, in the recipe.
"""


SORTING = ("text_encoder",)
"""Providers whose encoders sort the rows of a batch by length."""

SHARED = {
    "text_encoder": ("backbones/hugging_face.py",),
    "sound_encoder": ("backbones/hugging_face.py", "sounds.py"),
    "own_module": ("backbones/own_inputs.py",),
    "onnx_file": ("backbones/own_files.py",),
    "tflite_file": ("backbones/own_files.py",),
}
"""Provider -> files that it shares with other providers; the digest of the code of its backbones covers them too."""


@cache
def features_code_digest(provider: str, folder: Path = FOLDER) -> str:
    """16 hex digits of a sha256 over fedcache's code that computes the features of a provider's backbones.

    It covers code and constants, but no comments, docstrings and paths of files.
    """
    files = (*COMPUTES_FEATURES, *SHARED.get(provider, ()), f"backbones/{provider}.py")
    return digest_of_files(folder / name for name in files)[:16]


def how_record(
    device: Device, settings: ComputeSettings, backbone: Backbone
) -> dict[str, str | int]:
    """The conditions on which the features of a backbone depend, besides their recipe.

    Other backbones of the same extraction are no part of it, so that an array can be completed without them.
    """
    record: dict[str, str | int] = {
        "device": device.kind,
        "dtype": settings.dtype,
        "batch": settings.batch,
        "threads": settings.threads,
        "code": features_code_digest(backbone.provider),
    }
    if settings.compiled and backbone.is_torch_model:
        record["torch-compile"] = "on"
    if device.kind == "cuda":
        record["gpu"] = device.name
    libraries = {
        "timm": ["timm"],
        "packaged": ["timm"],
        "open_clip": ["open_clip_torch"],
        "glyph_clip": ["open_clip_torch"],
        "onnx_file": ["onnxruntime"],
        "tflite_file": ["ai-edge-litert"],
        "hugging_face": ["transformers"],
        "text_encoder": ["transformers", "tokenizers"],
        "sound_encoder": ["transformers", "soundfile", "scipy"],
    }
    for name in sorted(["torch", "pillow", "numpy", *libraries.get(backbone.provider, ())]):
        try:
            record[name] = version(name)
        except PackageNotFoundError:  # an editable or vendored install without metadata
            record[name] = "unknown"
    return record


BATCH = {"cpu": 32, "cuda": 256}
SORTED_BATCH = {"cpu": 256, "cuda": 4_096}
"""Rows of a batch by device. ``SORTED_BATCH`` is for encoders that sort rows by length and compute them in groups."""


def resolve_compute(
    config: ExtractConfig, backbones: Iterable[Backbone] = ()
) -> tuple[Device, ComputeSettings]:
    """The device, and how features of the backbones are computed there.

    Raises UsageError for an unknown device, MachineError for one that is not available.
    """
    device = resolve_device(config.device)
    batch = config.batch or BATCH[device.kind]
    if config.batch is None and any(backbone.provider in SORTING for backbone in backbones):
        batch = SORTED_BATCH[device.kind]
    dtype = resolve_dtype(config.dtype, device.kind)
    return device, ComputeSettings(
        device.kind, dtype, batch, config.threads, device.gpus, config.torch_compile
    )


def resolve_compute_as(
    config: ExtractConfig, computed: Mapping[str, Any], backbones: Iterable[Backbone] = ()
) -> tuple[Device, ComputeSettings]:
    """``resolve_compute`` with the batch and dtype of existing features, if they were computed on the same device.

    With another batch size, features are computed with other last bits, so a few of them are rounded to another float16
    when they are stored. Options of the configuration take precedence. ``computed`` holds device, dtype and batch, or
    nothing.
    """
    if computed.get("device") != resolve_device(config.device).kind:
        return resolve_compute(config, backbones)
    dtype = config.dtype
    if dtype == "auto":
        dtype = str(computed["dtype"])
    # The backbones only matter for the default batch, and here the batch is known.
    batch = config.batch or int(computed["batch"])
    return resolve_compute(replace(config, batch=batch, dtype=dtype))


def note_other_devices(
    device: Device, computed: Iterable[Mapping[str, Any]], observer: Observer
) -> None:
    """Report if the features of a model were computed on another device than ``device``."""
    kinds = {str(conditions.get("device", device.kind)) for conditions in computed}
    elsewhere = " and ".join(sorted(kinds - {device.kind}))
    if elsewhere:
        observer.note(
            f"The model was trained on features that were computed on {elsewhere}. Features that are computed here "
            "may differ in the last bits."
        )


def jobs_of(
    planned: Sequence[PlannedArray], data: Dataset, device: Device, settings: ComputeSettings
) -> list[FeatureJob]:
    """The arrays of an extraction as jobs for workers. Raises MachineError for a batch that memory cannot hold."""
    jobs = []
    for item in planned:
        backbone = item.backbone
        how = how_record(device, settings, backbone)
        job = FeatureJob(item.recipe.key, backbone, item.weights, item.recipe, data.mirror, how)
        jobs.append(job)
    refuse_large_batch(jobs, settings.batch, free_memory())
    return jobs


def refuse_large_batch(jobs: Sequence[FeatureJob], batch: int, free: int) -> None:
    """Raise MachineError if one batch does not fit into ``free`` bytes. A short dataset is filled up to a whole batch.

    A row counts with its features as float32, and an image also with its pixels as uint8 and as float32. What a model
    needs besides is not known here.
    """
    row = 0
    for job in jobs:
        recipe = job.recipe
        row += 4 * recipe.views * job.backbone.width
        if job.backbone.reads == IMAGES:
            row += 5 * recipe.views * 3 * recipe.size**2
    needed = batch * row
    if needed > free:
        # An eighth of the memory leaves room for the model and for other batches under way.
        fits = max(1, free // (8 * row))
        power_of_two = 1 << (fits.bit_length() - 1)
        raise MachineError(
            f"A batch of {batch:,} rows takes at least {needed / 1e6:,.0f} MB of memory, but {free / 1e6:,.0f} MB are "
            "free.",
            f"--batch {power_of_two}",
        )
