"""Reads a folder of a Hugging Face model: the files that belong to the model, and the content of its configurations.

Only data is read: JSON, safetensors, and the tokenizer's files. A model that is published as a pickle, or that contains
its own code, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcache.errors import MachineError, UsageError
from fedcache.extract.backbones.backbone import Backbone, triple
from fedcache.extract.recipe import UNIT, Recipe
from fedcache.parsing import parse_json

PATTERNS = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
)
"""Files of a model's folder that are downloaded, read and digested. The model consists of these files only."""

PROMPTS = "config_sentence_transformers.json"
"""File of named prompts. It is downloaded but not digested, because a recipe contains the text of its prompt."""

PREPROCESSING = ("preprocessor_config.json", "processor_config.json")
WHOLE = (
    "A model's folder needs config.json, weights as *.safetensors, and preprocessor_config.json or a tokenizer. In "
    "transformers, call save_pretrained('FOLDER') of the model and of its processor or tokenizer."
)
LONGEST = 10_000_000
"""Limit in bytes for a configuration file."""
FILTERS = {2: "bilinear", 3: "bicubic"}


def model_files(folder: Path) -> list[Path]:
    """The files of the model, sorted; MachineError for a link out of the folder or its repository."""
    found: set[Path] = set()
    for pattern in PATTERNS:
        found.update(path for path in folder.glob(pattern) if path.is_file())
    root = folder.resolve()
    # In the Hugging Face cache the files of a snapshot are links to blobs of the same repository.
    if root.parent.name == "snapshots":
        root = root.parents[1]
    for path in sorted(found):
        if not path.resolve().is_relative_to(root):
            raise MachineError(
                f"{path} is a link to a file outside the model's folder.",
                "Copy the file itself into the folder.",
            )
    return sorted(found)


def check_folder(folder: Path, name: str) -> None:
    """Refuse a folder without a model that can be read as data; MachineError."""
    files = {path.name for path in model_files(folder)}
    if "config.json" not in files:
        raise MachineError(
            f"{folder} holds no config.json, so it is not a Hugging Face model.",
            WHOLE,
        )
    if "auto_map" in read_config(folder, "config.json"):
        raise MachineError(
            f"{name} contains its own code (auto_map in config.json), which fedcache never runs.",
            "Use a model that is part of transformers, or your own:  module:PACKAGE.MODULE:FACTORY",
        )
    if not any(file.endswith(".safetensors") for file in files):
        problem = "it holds no weights"
        pickles = sorted(folder.glob("*.bin"))
        if pickles:
            problem = f"its weights are a pickle ({pickles[0].name}), which may run code"
        raise MachineError(
            f"{folder} is not loaded: {problem}. fedcache loads only safetensors.",
            "Load it with transformers in a sandbox and write it again:  model.save_pretrained('FOLDER')",
        )


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """A configuration of the folder; {} for a missing file. MachineError for a file that is not a JSON object."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > LONGEST:
            raise ValueError(f"{path.stat().st_size:,} bytes")
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise MachineError(
            f"{path} cannot be read as JSON ({error}).", "Get the file again."
        ) from error
    if not isinstance(found, dict):
        raise MachineError(f"{path} holds no JSON object.", "Get the file again.")
    return found


def folder_row(folder: Path, provider: str, width: int, recipe: Recipe) -> Backbone:
    """The row of a model in a folder, without its kind of inputs and its text features."""
    # Names of the model's classes in transformers, if the file has them.
    classes = read_config(folder, "config.json").get("architectures") or []
    return Backbone(
        name=recipe.backbone,
        provider=provider,
        width=width,
        recipe=recipe,
        source=f"yours: {folder}",
        files=("config.json",),
        architecture=", ".join(map(str, classes)),
        own=True,
        place=str(folder),
    )


def read_preprocessing(folder: Path, name: str) -> Recipe:
    """The recipe of a model of images, with its preprocessing alone.

    Raises MachineError for a folder without a file of preprocessing, UsageError for preprocessing that a recipe cannot
    describe.
    """
    config = None
    for file in PREPROCESSING:
        found = read_config(folder, file)
        if found:
            config = found.get("image_processor", found)
            break
    if not isinstance(config, dict):
        raise MachineError(
            f"{name} has neither preprocessor_config.json (for images or sounds) nor a tokenizer (for texts).",
            WHOLE,
        )
    try:
        return _preprocessing(config, name)
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise UsageError(
            f"A recipe cannot describe the preprocessing of {name} ({error}).",
            "Choose another model, or import its features with `fedcache ingest`.",
        ) from error


def _preprocessing(config: Mapping[str, Any], name: str) -> Recipe:
    scale = float(config.get("rescale_factor", 1 / 255)) * 255
    if not config.get("do_resize", True) or abs(scale - 1) > 1e-6:
        raise ValueError("images are not resized, or not scaled to [0, 1]")
    if not config.get("do_rescale", True):
        raise ValueError("images are not scaled to [0, 1]")
    resample = config.get("resample", 3)
    if resample not in FILTERS:
        raise ValueError(f"resample {resample!r} is neither bilinear nor bicubic")
    mean, std = UNIT
    if config.get("do_normalize", True):
        mean = triple(config["image_mean"])
        std = triple(config["image_std"])
    if 0 in std:
        raise ValueError("image_std holds a zero")
    size, resize, share = _sides(config)
    if not 8 <= size <= 2048 or not 0.1 <= share <= 1:
        raise ValueError(
            f"images are resized to {size / share:.0f} pixels and cropped to {size}; expected a crop of 8 to 2048 "
            "pixels, and of a tenth to the whole of the resized side"
        )
    return Recipe(
        name,
        "",  # the weights, which are not located yet
        size=size,
        resize=resize,
        interpolation=FILTERS[resample],
        crop_pct=share,
        mean=mean,
        std=std,
    )


def _sides(config: Mapping[str, Any]) -> tuple[int, str, float]:
    """Side, resize and crop_pct.

    ``size`` as a number is the short edge if images are cropped to the centre, else both sides.
    """
    size = config["size"]
    is_cropped = bool(config.get("do_center_crop", False))
    short_edge = None
    if isinstance(size, dict):
        short_edge = size.get("shortest_edge")
    elif isinstance(size, int) and is_cropped:
        short_edge = size
    if short_edge is None:
        side = _square(size)
        if is_cropped and _square(config.get("crop_size", side)) != side:
            raise ValueError("images are squashed and then cropped")
        return side, "squash", 1.0
    if is_cropped:
        side = _square(config.get("crop_size", short_edge))
        return side, "crop", side / int(short_edge)
    # ConvNeXT crops images of less than 384 pixels and squashes larger ones.
    if "crop_pct" in config:
        if int(short_edge) < 384:
            return int(short_edge), "crop", float(config["crop_pct"])
        return int(short_edge), "squash", 1.0
    raise ValueError("the short edge is resized, but images are not cropped")


def _square(size: Any) -> int:
    """The side of a square that is given as a number, or as height and width. Raises ValueError if these differ."""
    if isinstance(size, int):
        return size
    height = size["height"]
    if height != size["width"]:
        raise ValueError(f"{height} x {size['width']} pixels")
    return int(height)
