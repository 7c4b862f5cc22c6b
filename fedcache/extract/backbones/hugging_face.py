"""``hf:FOLDER`` and ``hf:ORG/NAME``: models of images of transformers (extra ``hf``), from local files.

A name is looked for in the Hugging Face cache; ``fedcache backbones pull`` alone fetches. Preprocessing is that of
``preprocessor_config.json``. The feature is the projected embedding of a CLIP-like model, else the class token of a
model that has one, else what it pools; ``--recipe output=...`` chooses. Encoders of texts are in ``text_encoder.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
    architectures_of,
    check_folder,
    read_preprocessing,
)
from fedcache.extract.backbones.own import (
    Choice,
    content_sha256,
    facts_of,
    find_place,
    output_of,
    shape_of,
    tried,
)
from fedcache.extract.recipe import Recipe
from fedcache.optional import needed_library, reason
from fedcache.plugins import HUGGING_FACE, bare_name

if TYPE_CHECKING:
    from torch import Tensor

OUTPUTS = ("image_projection", "cls", "pooler_output", "last_hidden_state")


def folder_of(name: str, choice: Choice) -> Path:
    """The folder that a name means; MachineError where there is none, with the command that fetches it."""
    bare = bare_name(name)
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


def derive(name: str, choice: Choice) -> Backbone:
    """The row of ``hf:...``; MachineError for what is not here or cannot be read, UsageError for what is no encoder."""
    folder = folder_of(name, choice)
    bare = bare_name(name)
    check_folder(folder, bare)
    native = read_preprocessing(folder, bare)
    side = choice.size or native.size
    recipe = Recipe(
        bare,
        "",
        size=side,
        resize=native.resize,
        interpolation=native.interpolation,
        crop_pct=native.crop_pct,
        mean=native.mean,
        std=native.std,
    )

    def read() -> list[Any]:
        encoder, pooling, text = _encoder(
            bare, folder, choice.output, recipe, device="cpu", dtype="float32"
        )
        return [pooling, shape_of(encoder, bare, side)[1], text]

    pooling, width, text = facts_of(
        folder, ("hf", choice.output, str(side)), choice, read, identity=content_sha256(folder)
    )
    text_width = None
    if text:
        text_width = width
    return Backbone(
        name=bare,
        provider="hugging_face",
        width=width,
        text_width=text_width,
        recipe=replace(recipe, pooling=pooling),
        source=f"yours: {folder}",
        files=("config.json",),
        architecture=architectures_of(folder),
        own=True,
        place=str(folder),
    )


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """The model in evaluation mode, with its text tower where it has one and a tokenizer."""
    folder = weights.file(backbone.name)
    encoder, _, _ = _encoder(
        backbone.name, folder, output_of(recipe), recipe, device=device, dtype=dtype
    )
    return tried(encoder, backbone, recipe, dtype)


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
    lost = [key for key in missing if "pooler" not in key or chosen == "pooler_output"]
    if lost:
        count = len(lost)
        raise MachineError(
            f"{folder} is not loaded: {count} tensors of {name} are missing, such as {lost[0]}.",
            "Get the folder again; `fedcache backbones verify` tries it.",
        )
    ranks: list[int] = []

    def image(x: Tensor) -> Tensor:
        if clip:
            return _tensor(model.get_image_features(pixel_values=x), "pooler_output")
        out = model(pixel_values=x)
        if chosen == "cls":
            features = _tensor(out, "last_hidden_state")[:, 0]
        else:
            features = _tensor(out, chosen)
        ranks.append(features.ndim)
        return one_row_each(features)

    def text(tokens: Tensor) -> Tensor:
        return _tensor(model.get_text_features(input_ids=tokens), "pooler_output")

    tokenize = None
    if clip:
        tokenize = _tokenizer(name, folder, model)
    encoder = ModuleEncoder(
        name,
        model,
        recipe,
        device=device,
        dtype=dtype,
        image=image,
        text=text if tokenize else None,
        tokenize=tokenize,
    )
    # Maps and tokens are averaged, which the recipe notes.
    word = chosen
    if chosen == "last_hidden_state":
        word = f"avg({chosen})"
    return encoder, word, tokenize is not None


def _tensor(out: Any, name: str) -> Tensor:
    """The tensor of an answer, which is one itself or holds one by name."""
    found: Tensor
    if hasattr(out, "isfinite"):
        found = out
    else:
        found = out[name]
    return found


def _tokenizer(name: str, folder: Path, model: Any) -> Any:
    """Prompts -> numbers [C, L] of a text tower, all of its length; None without files of a tokenizer."""
    if not any(
        (folder / file).is_file() for file in ("tokenizer.json", "vocab.json", "spiece.model")
    ):
        return None
    tokenizer = open_tokenizer(name, folder)
    length = int(model.config.text_config.max_position_embeddings)

    def tokenize(prompts: list[str]) -> Tensor:
        made = tokenizer(
            prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        )
        ids: Tensor = made["input_ids"]
        return ids

    return tokenize


def open_model(name: str, folder: Path) -> tuple[Any, list[str]]:
    """A model of transformers in evaluation mode, and the tensors that its file lacks; MachineError where it fails."""
    check_folder(folder, name)
    library = needed_library("transformers", name, "hf")
    with quiet(library):
        try:
            model, loading = library.AutoModel.from_pretrained(
                folder,
                dtype="float32",  # as the store records; without it transformers takes the dtype of the checkpoint
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # untrusted files: whatever it raises means the same
            raise MachineError(
                f"{folder} is not loaded: transformers cannot load it ({reason(error)}).",
                "Get the folder again; `pip install -U transformers` if its architecture is newer.",
            ) from error
    wrong = [str(key[0] if isinstance(key, tuple) else key) for key in loading["mismatched_keys"]]
    return model.eval(), sorted({*map(str, loading["missing_keys"]), *wrong})


def open_tokenizer(name: str, folder: Path) -> Any:
    """The tokenizer of a folder; MachineError where it fails."""
    library = needed_library("transformers", name, "hf")
    with quiet(library):
        try:
            return library.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise MachineError(
                f"The tokenizer of {name} cannot be read ({reason(error)}).",
                "Get the folder again.",
            ) from error


@contextmanager
def quiet(library: Any) -> Iterator[None]:
    """Without the library's progress bars and warnings; fedcache reports missing tensors in one sentence."""
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
    """Download a repository's model into the Hugging Face cache: its folder. Only ever when it is requested.

    Raises MachineError offline, for a name that is no repository, and when the network refuses.
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
        # the network library has its own family of errors, and all mean the same here
        raise MachineError(
            f"{name} could not be fetched from the Hugging Face repository {repository}: {reason(error)}",
            f"If you have the folder: --backbones {HUGGING_FACE}FOLDER",
        ) from error
    return Path(found)
