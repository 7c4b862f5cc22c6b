"""``hf:FOLDER`` and ``hf:ORG/NAME``: image models of the library transformers (extra ``hf``), from local files.

A name is looked up in the Hugging Face cache; only ``fedcache backbones pull`` downloads. Preprocessing is that of
``preprocessor_config.json``. The feature is the projected embedding of a CLIP-like model, else the class token of a
model that has one, else its pooled output; ``--recipe output=...`` chooses another. Encoders of texts are in
``text_encoder.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.errors import FedcacheError, MachineError, shell_word, unknown
from fedcache.extract.backbones.backbone import (
    Backbone,
    FrozenEncoder,
    ModuleEncoder,
    Weights,
    hub_snapshots,
    library_caches,
    one_row_each,
)
from fedcache.extract.backbones.hugging_face_folder import (
    PATTERNS,
    PROMPTS,
    check_folder,
    folder_row,
    read_preprocessing,
)
from fedcache.extract.backbones.own import (
    Choice,
    checked_encoder,
    facts_of,
    find_place,
    output_of,
    shape_of,
)
from fedcache.extract.recipe import Recipe
from fedcache.optional import needed_library, reason
from fedcache.plugins import HUGGING_FACE, bare_name

if TYPE_CHECKING:
    from torch import Tensor

OUTPUTS = ("image_projection", "cls", "pooler_output", "last_hidden_state")
PROCESSORS = {"tokenizer": "AutoTokenizer", "feature extractor": "AutoFeatureExtractor"}
"""Part that prepares a model's texts or sounds -> the class of transformers that loads the part."""


def folder_of(name: str, choice: Choice) -> Path:
    """The folder of a name. Raises MachineError for a missing folder, with the command that downloads it."""
    bare = bare_name(name)
    # ORG/NAME is looked up in the Hugging Face cache first.
    if choice.file is None and bare == name and "/" in name:
        for folder in hub_snapshots(name.removeprefix(HUGGING_FACE)):
            if (folder / "config.json").is_file():
                return folder
    try:
        return find_place(name, HUGGING_FACE, choice, folder=True)
    except MachineError as error:
        if "/" in bare:
            raise MachineError(
                error.message, f"fedcache backbones pull {shell_word(bare)}"
            ) from error
        raise


def derive(name: str, folder: Path, choice: Choice) -> Backbone:
    """The row of an image model in a folder.

    Raises MachineError for an unreadable folder, UsageError for a folder without an encoder.
    """
    recipe = read_preprocessing(folder, name)
    if choice.size:
        recipe = replace(recipe, size=choice.size)
    side = recipe.size

    def read() -> list[Any]:
        encoder, pooling, has_text = _encoder(
            name, folder, choice.output, recipe, device="cpu", dtype="float32"
        )
        width = shape_of(encoder, name, side)[1]
        return [pooling, width, has_text]

    words = ("hf", choice.output, str(side))
    pooling, width, has_text = facts_of(folder, words, choice, read)
    row = folder_row(folder, "hugging_face", width, replace(recipe, pooling=pooling))
    if has_text:
        row = replace(row, text_width=width)
    return row


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """The model in evaluation mode, with its text tower if it has one and a tokenizer."""
    folder = weights.file(backbone.name)
    encoder, _, _ = _encoder(
        backbone.name, folder, output_of(recipe), recipe, device=device, dtype=dtype
    )
    return checked_encoder(encoder, backbone, recipe, dtype)


def _encoder(
    name: str, folder: Path, requested: str | None, recipe: Recipe, *, device: str, dtype: str
) -> tuple[ModuleEncoder, str, bool]:
    """The encoder, the recipe's word for its feature, and whether it has text features."""
    model, missing = open_model(name, folder)
    clip = hasattr(model, "get_image_features") and hasattr(model, "get_text_features")
    known: tuple[str, ...] = OUTPUTS[1:]
    usual = "last_hidden_state"
    if clip:
        known = OUTPUTS[:1]
        usual = known[0]
    elif any("cls_token" in key or "class_embedding" in key for key in model.state_dict()):
        usual = "cls"
    elif not any("pooler" in key for key in missing):
        usual = "pooler_output"
    chosen = requested or usual
    if chosen not in known:
        raise unknown(f"output of {name}", chosen, known)
    # Missing tensors of the pooler matter only if its output is chosen.
    refuse_missing(
        name, folder, [key for key in missing if "pooler" not in key or chosen == "pooler_output"]
    )

    def image(x: Tensor) -> Tensor:
        if clip:
            return _tensor(model.get_image_features(pixel_values=x), "pooler_output")
        out = model(pixel_values=x)
        if chosen == "cls":
            features = _tensor(out, "last_hidden_state")[:, 0]
        else:
            features = _tensor(out, chosen)
        return one_row_each(features)

    def text(tokens: Tensor) -> Tensor:
        return _tensor(model.get_text_features(input_ids=tokens), "pooler_output")

    tokenize = None
    encode_tokens = None
    if clip:
        tokenize = _tokenizer(name, folder, model)
    if tokenize is not None:
        encode_tokens = text
    encoder = ModuleEncoder(
        name,
        model,
        recipe,
        device=device,
        dtype=dtype,
        image=image,
        text=encode_tokens,
        tokenize=tokenize,
    )
    # Maps and tokens are averaged, and the recipe records this.
    word = chosen
    if chosen == "last_hidden_state":
        word = f"avg({chosen})"
    return encoder, word, tokenize is not None


def refuse_missing(name: str, folder: Path, missing: list[str]) -> None:
    """Raise MachineError if a folder lacks tensors that the features depend on."""
    if missing:
        count = len(missing)
        raise MachineError(
            f"{folder} is not loaded: {count} tensors of {name} are missing, such as {missing[0]}.",
            "Get the folder again. `fedcache backbones verify` checks that it loads.",
        )


def _tensor(out: Any, name: str) -> Tensor:
    """The output of a model: a tensor, or an object with the tensor ``name``."""
    found: Tensor = out
    if not hasattr(out, "isfinite"):
        found = out[name]
    return found


def _tokenizer(name: str, folder: Path, model: Any) -> Any:
    """Prompts -> tokens [C, L], padded to the length of the text tower; None without files of a tokenizer."""
    files = ("tokenizer.json", "vocab.json", "spiece.model")
    if not any((folder / file).is_file() for file in files):
        return None
    tokenizer = open_processor(name, folder, "tokenizer")
    length = int(model.config.text_config.max_position_embeddings)

    def tokenize(prompts: list[str]) -> Tensor:
        made = tokenizer(
            prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        )
        ids: Tensor = made["input_ids"]
        return ids

    return tokenize


def open_model(name: str, folder: Path) -> tuple[Any, list[str]]:
    """A model of transformers in evaluation mode, and names of tensors that its files lack. Raises MachineError."""
    check_folder(folder, name)
    library = needed_library("transformers", name, "hf")
    with _quiet(library):
        try:
            model, loading = library.AutoModel.from_pretrained(
                folder,
                dtype="float32",  # as the store records; without it transformers takes the dtype of the checkpoint
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:
            # The files are untrusted, so any error means that they cannot be loaded.
            raise MachineError(
                f"{folder} is not loaded: transformers cannot load it ({reason(error)}).",
                "Get the folder again. If transformers is too old for its architecture:  pip install -U transformers",
            ) from error
    missing = set(map(str, loading["missing_keys"]))
    for key in loading["mismatched_keys"]:
        if isinstance(key, tuple):  # with both shapes
            key = key[0]
        missing.add(str(key))
    return model.eval(), sorted(missing)


def open_processor(name: str, folder: Path, kind: str) -> Any:
    """The tokenizer or feature extractor of a folder; ``kind`` is a key of ``PROCESSORS``. Raises MachineError."""
    library = needed_library("transformers", name, "hf")
    with _quiet(library):
        try:
            return getattr(library, PROCESSORS[kind]).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise MachineError(
                f"The {kind} of {name} cannot be read ({reason(error)}).",
                "Get the folder again.",
            ) from error


@lru_cache(maxsize=8)
def shared_processor(name: str, folder: Path, stamp: str, kind: str) -> tuple[Any, threading.Lock]:
    """The result of ``open_processor``, read once in a process for each ``stamp`` of the files, and a lock for it."""
    return open_processor(name, folder, kind), threading.Lock()


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Turn off the library's progress bars and warnings; fedcache reports missing tensors in one sentence."""
    logging = library.utils.logging
    before = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def fetch(name: str, *, offline: bool) -> Path:
    """Download a repository's model into the Hugging Face cache, on request of the user only; returns its folder.

    Raises MachineError if downloads are disabled, for a name that is not of a repository, and for a failed download.
    """
    repository = name.removeprefix(HUGGING_FACE)
    if offline:
        raise MachineError(
            f"{name} cannot be downloaded, because downloads are disabled.",
            "unset FEDCACHE_OFFLINE",
        )
    if repository.count("/") != 1:
        raise MachineError(
            f"{repository!r} is not the name of a repository.",
            f"fedcache backbones pull {HUGGING_FACE}ORG/NAME",
        )
    hub = needed_library("huggingface_hub", name, "hf")
    try:
        found = hub.snapshot_download(
            repository, allow_patterns=[*PATTERNS, PROMPTS], cache_dir=library_caches().huggingface
        )  # nosec B615
    except FedcacheError:
        raise
    except Exception as error:
        # The network library has its own errors, and each means that the download failed.
        raise MachineError(
            f"{name} could not be fetched from the Hugging Face repository {repository}: {reason(error)}",
            f"If you have the folder: --backbones {HUGGING_FACE}FOLDER",
        ) from error
    return Path(found)
