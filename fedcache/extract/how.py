"""How features were computed: device, settings, versions of libraries, and fedcache's own code.

The record is kept beside the recipe of an array and is no part of its look-up. It must be equal while an unfinished
array is resumed, and where chunks of an earlier store are taken over: rows of two kinds would not be comparable.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fedcache.extract.device import Device
from fedcache.store.code_digest import digest_of_files

FOLDER = Path(__file__).parent

COMPUTES_FEATURES = ("batches.py", "images.py", "views.py", "backbones/checkpoints.py", "backbones/encoder.py")
"""Files of this folder that turn an encoded image into a feature, whichever backbone it is; a provider's comes on top.

Weights and preprocessing have digests of their own, in the recipe.
"""


@cache
def features_code_digest(provider: str, folder: Path = FOLDER) -> str:
    """16 hex of a sha256 over fedcache's code that computes the features of a provider's backbones.

    A comment, a docstring and a file's place are no part of it; a constant is.
    """
    files = (*COMPUTES_FEATURES, f"backbones/{provider}.py")
    return digest_of_files(folder / name for name in files)[:16]


def how_record(device: Device, dtype: str, batch: int, threads: int, provider: str) -> dict[str, str | int]:
    """What the values of features depend on besides their recipe, for an array of one provider's backbone.

    Of the array's own backbone alone, so that it can be completed without those it was begun with.

    Args:
        device: resolved.
        dtype: of the computation.
        batch: rows of an absolute batch.
        threads: of a process that runs the model.
        provider: module under ``fedcache.extract.backbones`` that loads the backbone.
    """
    record: dict[str, str | int] = {"device": device.kind, "dtype": dtype, "batch": batch, "threads": threads}
    record["code"] = features_code_digest(provider)
    if device.kind == "cuda":
        record["gpu"] = device.name
    libraries = {"timm": "timm", "packaged": "timm", "open_clip": "open_clip_torch", "glyph_clip": "open_clip_torch"}
    for name in sorted({"torch", "pillow", "numpy", libraries.get(provider, "numpy")}):
        try:
            record[name] = version(name)
        except PackageNotFoundError:  # an editable or vendored install without metadata
            record[name] = "unknown"
    return record
