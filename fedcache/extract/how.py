"""Conditions of feature computation: device, settings, versions of libraries, and fedcache's own code.

The record is kept next to the recipe of an array and is no part of its look-up. It must be equal while an unfinished
array is resumed, and where chunks of an earlier store are taken over: rows of two kinds would not be comparable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedcache.config import ExtractConfig
from fedcache.extract.backbones import Backbone
from fedcache.extract.batches import ComputeSettings, FeatureJob
from fedcache.extract.datasets import Dataset
from fedcache.extract.device import Device, resolve_device, resolve_dtype
from fedcache.extract.planning.plan import PlannedArray
from fedcache.store.files import digest_of_files

FOLDER = Path(__file__).parent

COMPUTES_FEATURES = (
    "batches.py",
    "augment.py",
    "images.py",
    "inputs.py",
    "backbones/checkpoints.py",
    "backbones/backbone.py",
)
"""Files of this folder that turn an encoded image into a feature, whichever backbone it is; a provider's comes on top.

Weights and preprocessing have digests of their own, in the recipe.
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
"""What several providers have in common, by provider."""


@cache
def features_code_digest(provider: str, folder: Path = FOLDER) -> str:
    """16 hex of a sha256 over fedcache's code that computes the features of a provider's backbones.

    A comment, a docstring and a file's place are no part of it; a constant is.
    """
    files = (*COMPUTES_FEATURES, *SHARED.get(provider, ()), f"backbones/{provider}.py")
    return digest_of_files(folder / name for name in files)[:16]


def how_record(
    device: Device, dtype: str, batch: int, threads: int, provider: str
) -> dict[str, str | int]:
    """What the values of features depend on besides their recipe, for an array of one provider's backbone.

    Of the array's own backbone alone, so that it can be completed without those it was begun with.
    """
    record: dict[str, str | int] = {
        "device": device.kind,
        "dtype": dtype,
        "batch": batch,
        "threads": threads,
    }
    record["code"] = features_code_digest(provider)
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
    for name in sorted(["torch", "pillow", "numpy", *libraries.get(provider, ())]):
        try:
            record[name] = version(name)
        except PackageNotFoundError:  # an editable or vendored install without metadata
            record[name] = "unknown"
    return record


BATCH = {"cpu": 32, "cuda": 256}
SORTED_BATCH = {"cpu": 256, "cuda": 4_096}
"""Rows of a batch by device, and of one whose encoder sorts them by length and computes them in groups."""


def resolve_compute(
    config: ExtractConfig, backbones: Iterable[Backbone] = ()
) -> tuple[Device, ComputeSettings]:
    """The device, and how features of the backbones are computed there.

    Raises UsageError or MachineError for a device not known or not here.
    """
    device = resolve_device(config.device)
    batch = config.batch or BATCH[device.kind]
    if config.batch is None and any(b.provider in SORTING for b in backbones):
        batch = SORTED_BATCH[device.kind]
    return device, ComputeSettings(
        device.kind, resolve_dtype(config.dtype, device.kind), batch, config.threads, device.gpus
    )


def resolve_compute_as(
    config: ExtractConfig, computed: Mapping[str, Any], backbones: Iterable[Backbone] = ()
) -> tuple[Device, ComputeSettings]:
    """``resolve_compute`` with the batch and dtype of features that there are, where they were computed on that device.

    A batch of another size has other last bits, and in float16 some of them change a value. What the configuration
    names goes first. ``computed`` holds device, dtype and batch, or nothing.
    """
    if computed.get("device") != resolve_device(config.device).kind:
        return resolve_compute(config, backbones)
    dtype = config.dtype
    if config.dtype == "auto":
        dtype = str(computed["dtype"])
    return resolve_compute(
        replace(config, batch=config.batch or int(computed["batch"]), dtype=dtype)
    )


def note_of_other_devices(device: Device, computed: Sequence[Mapping[str, Any]]) -> str | None:
    """A sentence where features that new ones are compared with were computed on another device; None elsewhere."""
    elsewhere = sorted(
        {str(c["device"]) for c in computed if c.get("device", device.kind) != device.kind}
    )
    if not elsewhere:
        return None
    return (
        f"The model's own features were computed on {' and '.join(elsewhere)}; so the features here may "
        "differ in the last bits."
    )


def jobs_of(
    planned: Sequence[PlannedArray], data: Dataset, device: Device, settings: ComputeSettings
) -> list[FeatureJob]:
    """The arrays of an extraction as they are handed to workers."""
    s = settings
    return [
        FeatureJob(
            p.recipe.key,
            p.backbone,
            p.weights,
            p.recipe,
            data.mirror,
            how_record(device, s.dtype, s.batch, s.threads, p.backbone.provider),
        )
        for p in planned
    ]
