"""The table of backbones: rows by name, rows of names with a prefix, and loading a row.

Rows are data, so looking one up imports no torch. The row of a library's model is made from its configuration once and
then remembered under ``<home>/recipes``. A name with a prefix of ``OWN`` is a model that the user brings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.errors import CorruptionError, StoreError, UsageError, shell_word, unknown
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
from fedcache.extract.backbones.hugging_face_folder import check_folder
from fedcache.extract.backbones.own import (
    Choice,
    content_sha256,
    output_of,
    read_row,
    remember,
    write_row,
)
from fedcache.extract.backbones.rows import BACKBONES
from fedcache.extract.recipe import VERSION, Recipe, slug
from fedcache.plugins import HUGGING_FACE, MODULE, ONNX, TFLITE, bare_name, offer, plugins
from fedcache.store.files import digest_of

if TYPE_CHECKING:
    import torch


offer("backbones", list(BACKBONES))

RANDOM = "random-projection:"
DERIVE: Mapping[str, Callable[[str], Backbone]] = {
    timm.PREFIX: timm.derive,
    open_clip.PREFIX: open_clip.derive,
    RANDOM: random.derive,
}
"""Prefix of a library's own names, up to the first colon -> the function that makes their rows."""


def _folder_row(name: str, choice: Choice) -> Backbone:
    """The row of a folder: of sounds if it has their sampling rate, of texts if it has a tokenizer, else of images."""
    folder = hugging_face.folder_of(name, choice)
    derive_row = hugging_face.derive
    if sound_encoder.rate_of(folder) is not None:
        derive_row = sound_encoder.derive
    elif text_encoder.reads_texts(folder):
        derive_row = text_encoder.derive
    bare = bare_name(name)
    check_folder(folder, bare)
    return derive_row(bare, folder, choice)


OWN: Mapping[str, Callable[[str, Choice], Backbone]] = {
    MODULE: own_module.derive,
    ONNX: onnx_file.derive,
    TFLITE: tflite_file.derive,
    HUGGING_FACE: _folder_row,
}
"""Prefix of a user's model, up to the first colon -> the function that makes its row."""

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
"""Provider -> the ``load`` of its module. So a remembered row cannot name another module to import."""


def declared(name: str) -> Backbone | None:
    """The row of a name that fedcache itself declares; None for models of libraries and of users.

    Raises UsageError for ``random-projection:`` followed by anything other than a width.
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
    """The row of a backbone: of the table, of a library (``timm:<name>``, ``open_clip:<arch>@<tag>``), or of the user.

    Rows of library names, and the paths of a user's models, are remembered under ``home``.

    Args:
        name: as the user writes it; ``lookup_recorded`` is for names in files.
        home: ``$FEDCACHE_HOME``.
        file: of ``--weights NAME=FILE``, for a user's model.
        output: of ``--recipe output=NAME``, for a user's model; None for its only output.
        size: of the recipe, for a user's model that takes any size; None for its own.
        options: the other keys of the recipe that are part of a user's row (``Backbone.row_options``).
        recorded: the recipe of a store or a model whose row is wanted.

    Raises:
        UsageError, with "did you mean", for an unknown name, and for a file that is not a model; MachineError for a
        missing file; StoreError for a ``module:`` that the user did not name in this process.
    """
    if name in BACKBONES:
        return BACKBONES[name]
    if ":" not in name:
        name = bare_name(name)
    word, colon, _ = name.partition(":")
    prefix = word + colon
    derive_own = OWN.get(prefix)
    if derive_own is not None:
        row = derive_own(name, Choice(home, file, output, size, options or {}, recorded))
        if home is not None and not row.here_only:
            remember(row, home)
        return row
    derive = DERIVE.get(prefix)
    if derive is None:
        own_names = [f"{prefix}..." for prefix in OWN]
        names = ", ".join(["timm:NAME", "open_clip:ARCH@TAG", *own_names])
        known = (*BACKBONES, *plugins("backbones"))
        raise unknown("backbone", name, known, hint=f"Known: {', '.join(known)}; or {names}")
    if home is None:
        return derive(name)
    path = home / "recipes" / f"{slug(name)}-{digest_of(name)[:8]}.json"
    identity = {"kind": "backbone", "name": name}
    remembered = read_row(path, identity)
    if remembered is not None:
        has_the_name = remembered.name == name == remembered.recipe.backbone
        # A row of another version of fedcache may have other preprocessing.
        if has_the_name and remembered.recipe.version == VERSION:
            return remembered
    row = derive(name)
    write_row(row, path, identity)
    return row


def lookup_recorded(
    recipe: Recipe, *, home: Path | None = None, file: Path | None = None
) -> Backbone:
    """The row of the backbone in a recipe that was read from a file of a model, a store or a run.

    A file from another person may contain any name. So code of a ``module:`` runs only as in ``lookup``, and a path is
    refused: recipes contain bare names, and a file must not choose which of the user's files is opened. Raises
    StoreError for a path and for an unknown backbone; other errors as ``lookup``.
    """
    name = recipe.backbone
    if bare_name(name) != name and ":" in name:
        raise StoreError(
            f"The recipe contains the path {name!r} instead of a file name.",
            "Get the file again from its author; fedcache never writes such a recipe.",
        )
    try:
        return lookup(
            name, home=home, file=file, output=output_of(recipe), size=recipe.size, recorded=recipe
        )
    except UsageError as error:
        if file is not None:  # the user's file is wrong, not the recipe
            raise
        raise StoreError(error.message, error.hint) from error


def load(
    backbone: Backbone,
    weights: Weights,
    recipe: Recipe,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
) -> FrozenEncoder:
    """Load a backbone for one recipe: an encoder in evaluation mode, which gives equal features for equal inputs.

    Args:
        backbone: from ``lookup``.
        weights: from ``locate``.
        recipe: the native one, or an override of it.
        device: where to run, already resolved.
        dtype: compute dtype, ``float32`` | ``bfloat16`` | ``float16``; features are float32 for each of them.

    Raises:
        UsageError, when the backbone cannot follow the recipe; MachineError, when the weights are refused
            or do not fit; CorruptionError, when their file is no longer the one that ``weights`` names.
    """
    backbone.accepts(recipe)
    path = weights.path
    if path is not None and weights.sha256 and content_sha256(path) != weights.sha256:
        # The cached digest is valid while the file's time and size are the same. A defect of the disk changes neither.
        raise CorruptionError(
            f"{path} has changed since fedcache computed its sha256 ({weights.sha256[:12]}...).",
            "If you changed the file, repeat the command with --rehash. Otherwise get the weights again from their "
            f"source, which this command shows:  fedcache backbones info {shell_word(backbone.name)}",
        )
    encoder: FrozenEncoder = LOADERS[backbone.provider](
        backbone, weights, recipe, device=str(device), dtype=dtype
    )
    return encoder
