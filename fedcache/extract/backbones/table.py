"""The table: every backbone with a name, the prefixes that open other names, and how a row is loaded.

Rows are data, so looking one up imports no torch; a library's name is derived from its configuration once and then
remembered under ``<home>/recipes``. A name with a prefix of ``OWN`` is a model that the user brings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.errors import (
    CorruptionError,
    FedcacheError,
    StoreError,
    UsageError,
    shell_word,
    unknown,
)
from fedcache.extract.backbones import (
    cnn,
    glyph_clip,
    hugging_face,
    metadataset,
    onnx_file,
    open_clip,
    own_module,
    packaged,
    pixels,
    random,
    sound_encoder,
    text_encoder,
    tflite_file,
    timm,
    torchvision,
    word_clip,
)
from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, Weights
from fedcache.extract.backbones.own import Choice, content_sha256, output_of, remember, row_of
from fedcache.extract.backbones.rows import BACKBONES
from fedcache.extract.recipe import VERSION, Recipe, slug
from fedcache.plugins import HUGGING_FACE, MODULE, ONNX, TFLITE, bare_name, offer, plugins
from fedcache.store.files import digest_of, make_private, read_sealed, write_sealed

if TYPE_CHECKING:
    import torch

offer("backbones", list(BACKBONES))

RANDOM = "random-projection:"
DERIVE: Mapping[str, Callable[[str], Backbone]] = {
    timm.PREFIX: timm.derive,
    open_clip.PREFIX: open_clip.derive,
    RANDOM: random.derive,
}
"""Prefix of a library's own names -> the function that makes their rows."""


def _folder_row(name: str, choice: Choice) -> Backbone:
    """The row of a folder: of sounds where it says their rate, of texts where it has a tokenizer, else of images."""
    folder = hugging_face.folder_of(name, choice)
    if sound_encoder.reads_sounds(folder):
        return sound_encoder.derive(name, choice)
    if text_encoder.reads_texts(folder):
        return text_encoder.derive(name, choice)
    return hugging_face.derive(name, choice)


OWN: Mapping[str, Callable[[str, Choice], Backbone]] = {
    MODULE: own_module.derive,
    ONNX: onnx_file.derive,
    TFLITE: tflite_file.derive,
    HUGGING_FACE: _folder_row,
}
"""Prefix of a user's model -> the function that makes its row."""

LOADERS: Mapping[str, Callable[..., Any]] = {
    provider.__name__.rpartition(".")[2]: provider.load
    for provider in (
        cnn,
        glyph_clip,
        hugging_face,
        metadataset,
        onnx_file,
        open_clip,
        own_module,
        packaged,
        pixels,
        random,
        sound_encoder,
        text_encoder,
        tflite_file,
        timm,
        torchvision,
        word_clip,
    )
}
"""Provider -> the module that loads its backbones. Modules that remembered rows name are never imported."""


def declared(name: str) -> Backbone | None:
    """The row of a name that fedcache itself declares; None for models of libraries and of users.

    Raises UsageError for a name that starts with a declared name and is not declared itself.
    """
    if name.startswith(RANDOM):
        return random.derive(name)
    return BACKBONES.get(name)


def lookup(
    name: str,
    *,
    home: Path | None = None,
    file: Path | None = None,
    output: str | None = None,
    size: int | None = None,
    options: Mapping[str, str] | None = None,
    recorded: Recipe | None = None,
) -> Backbone:
    """The row of a name of the table, of a library's (``timm:<name>``, ``open_clip:<arch>@<tag>``), or of a user's.

    Rows of library names, and where a user's models lie, are remembered under ``home``. UsageError, with "did you
    mean", for an unknown name, and for what is no model; MachineError for a file that is not there; StoreError for a
    ``module:`` that the user did not name in this process.

    Args:
        name: as the user writes it; ``lookup_recorded`` takes those that files hold.
        home: ``$FEDCACHE_HOME``.
        file: of ``--weights NAME=FILE``, for a user's model.
        output: of ``--recipe output=NAME``, likewise; None for its only one.
        size: of the recipe, likewise, where a model takes any; None for its own.
        options: the other keys of the recipe that are part of a user's row (``Backbone.row_options``).
        recorded: the recipe of a store or a model whose row is wanted.
    """
    if name in BACKBONES:
        return BACKBONES[name]
    if ":" not in name:
        name = bare_name(name)
    own = next((derive for prefix, derive in OWN.items() if name.startswith(prefix)), None)
    if own is not None:
        row = own(name, Choice(home, file, output, size, options or {}, recorded))
        if home is not None and not row.here_only:
            remember(row, home)
        return row
    derive = next((derive for prefix, derive in DERIVE.items() if name.startswith(prefix)), None)
    if derive is None:
        prefixes = ", ".join(
            ["timm:NAME", "open_clip:ARCH@TAG", *(f"{prefix}..." for prefix in OWN)]
        )
        known = (*BACKBONES, *plugins("backbones"))
        raise unknown("backbone", name, known, hint=f"Known: {', '.join(known)}; or {prefixes}")
    remembered = None
    if home is not None:
        remembered = home / "recipes" / f"{slug(name)}-{digest_of(name)[:8]}.json"
    found = None
    if remembered is not None:
        found = _recall(remembered, name)
    if found is not None:
        return found
    row = derive(name)
    if remembered is not None:
        make_private(remembered.parent)
        write_sealed(remembered, _what(name), {**asdict(row), "recipe": row.recipe.to_dict()})
    return row


def lookup_recorded(
    recipe: Recipe, *, home: Path | None = None, file: Path | None = None
) -> Backbone:
    """The row of the backbone that a recipe from a file names: of a model, a store or a run.

    A file of others may name anything. Code runs as ``lookup`` says, and a path is refused, because recipes hold bare
    names: a file must not choose which of the user's files is opened. Raises StoreError for one, and for an
    unknown backbone; as ``lookup``.
    """
    name = recipe.backbone
    if bare_name(name) != name and ":" in name:
        raise StoreError(
            f"The recipe contains the path {name!r}, but fedcache stores only names.",
            "Get the file again from its author; fedcache never writes such a recipe.",
        )
    try:
        return lookup(
            name, home=home, file=file, output=output_of(recipe), size=recipe.size, recorded=recipe
        )
    except UsageError as error:
        if file is not None:  # the file that the user gave is what does not fit
            raise
        raise StoreError(error.message, error.hint) from error


def _recall(path: Path, name: str) -> Backbone | None:
    """A remembered row; None when there is none, or it is damaged or of another version and must be derived again."""
    try:
        found = read_sealed(path, _what(name))
        row = None
        if found is not None:
            row = row_of(found.content)
    except (ValueError, KeyError, TypeError, FedcacheError):
        return None
    if row is None:
        return None
    # Preprocessing of another version of fedcache must not be passed off as this one's, nor the other way round.
    if row.name == name == row.recipe.backbone and row.recipe.version == VERSION:
        return row
    return None


def _what(name: str) -> dict[str, str]:
    return {"kind": "backbone", "name": name}


def load(
    backbone: Backbone,
    weights: Weights,
    recipe: Recipe,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
) -> FrozenEncoder:
    """Load a backbone for one recipe: the encoder, in evaluation mode; equal inputs give equal features.

    Args:
        backbone: from ``lookup``.
        weights: from ``locate``.
        recipe: the native one, or an override of it.
        device: where to run, already resolved.
        dtype: compute dtype, ``float32`` | ``bfloat16`` | ``float16``; weights and features stay float32.

    Raises:
        UsageError, when the backbone cannot follow the recipe; MachineError, when the weights are refused
            or do not fit; CorruptionError, when their file is no longer the one that ``weights`` names.
    """
    backbone.accepts(recipe)
    if (
        weights.path is not None
        and weights.sha256
        and content_sha256(weights.path) != weights.sha256
    ):
        # The digest is remembered by the file's time and size, and a disk that forgets a bit changes neither.
        raise CorruptionError(
            f"{weights.path} differs from the file whose sha256 is cached ({weights.sha256[:12]}).",
            "If you changed the file, repeat the command with --rehash. Otherwise get the weights again: "
            f"fedcache backbones info {shell_word(backbone.name)}",
        )
    encoder: FrozenEncoder = LOADERS[backbone.provider](
        backbone, weights, recipe, device=str(device), dtype=dtype
    )
    return encoder
