"""CLIP models built by open_clip: ``clip-rn50``, ``clip-vit-b-16``, ``clip-vit-b-32`` and ``open_clip:<arch>@<tag>``.

OpenAI's weights were trained with QuickGELU. With GELU the same file can be loaded, but the features differ by 0.15 on
average, so the activation is part of the recipe. The feature is the projected image embedding before normalisation
(``feat_post=l2`` gives the unit rows that CLIP compares); text features are unit rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedcache.errors import MachineError, UsageError, unknown
from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, Weights, clip_encoder
from fedcache.extract.backbones.checkpoints import after, load_strict, read_state, weights_in
from fedcache.extract.backbones.rows import OPEN_CLIP_FILES
from fedcache.extract.recipe import Recipe
from fedcache.optional import reason

if TYPE_CHECKING:
    from torch import Tensor, nn

PREFIX = "open_clip:"
EXTRA = (
    "input_resolution",
    "context_length",
    "vocab_size",
    "logit_bias",
    "text.transformer.embeddings.position_ids",
)
"""Entries of some published files that carry no weight of the two towers."""


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """The image tower and the text tower, with the weights of a file.

    Position embeddings are resampled if the recipe has another input size. For some architectures, open_clip downloads
    the configuration of the text tower.
    """
    path = weights.file(backbone.name)
    model, tokenizer = _build(backbone, recipe)
    state = read_state(path, hub=backbone.hub, key=weights.key)
    # In the file, names of tensors may begin with a prefix such as ``module.``, which ``after`` removes. The prefix is
    # noted in ``weights.taken``, for a message to the user.
    found = weights_in(state, model, backbone=backbone.name, path=path, ignore=EXTRA)
    weights.taken.append(found)
    fitted = _fit(after(found.prefix, state), model)
    load_strict(model, fitted, backbone=backbone.name, path=path, ignore=EXTRA)
    return clip_encoder(backbone.name, model, tokenizer, recipe, device=device, dtype=dtype)


def _build(backbone: Backbone, recipe: Recipe) -> tuple[Any, Any]:
    """The model with random weights, and its tokenizer."""
    import logging

    import open_clip

    size = None  # the architecture's own
    if recipe.size != backbone.recipe.size:
        size = recipe.size
    # open_clip warns that the weights are random, but the strict load replaces them.
    before = logging.root.manager.disable  # the level that is disabled now, to be restored
    logging.disable(logging.WARNING)
    try:
        model = open_clip.create_model(
            backbone.architecture,
            pretrained=None,
            force_quick_gelu=recipe.activation == "quickgelu",
            force_image_size=size,
            pretrained_text=False,
            pretrained_image=False,
        )
        return model, open_clip.get_tokenizer(backbone.architecture)
    except Exception as error:
        # Architectures with a Hugging Face text tower fetch its configuration from the network.
        raise MachineError(
            f"open_clip could not build {backbone.architecture}: {reason(error)}",
            "Choose another architecture. The text tower of this architecture may need the package transformers and "
            "files from the network.",
        ) from error
    finally:
        logging.disable(before)


def _fit(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a published file in the layout of the model; only position embeddings may get other values."""
    from open_clip import factory

    # Apple publishes MobileCLIP with other names.
    state = factory.convert_state_dict(model, state)
    # Some models have the text tower as a module of its own; older files have its tensors at the top.
    if "positional_embedding" in state and not hasattr(model, "positional_embedding"):
        state = factory.convert_to_custom_text_state_dict(state)
    # ``logit_scale`` is one number, which the file may have in the shape [] and the model in the shape [1], or the
    # reverse.
    scale = getattr(model, "logit_scale", None)
    stored_scale = state.get("logit_scale")
    if scale is not None and stored_scale is not None and stored_scale.numel() == scale.numel():
        state["logit_scale"] = stored_scale.reshape(scale.shape)
    factory.resize_pos_embed(state, model)
    return state


def derive(name: str) -> Backbone:
    """The backbone ``open_clip:<arch>@<tag>``, described from open_clip's configuration.

    Raises UsageError for a name that open_clip does not know, or preprocessing that a recipe cannot describe.
    """
    import open_clip

    architecture, _, tag = name.removeprefix(PREFIX).partition("@")
    config = None
    if architecture in open_clip.list_models():
        config = open_clip.get_model_config(architecture)
    if config is None:
        raise unknown("open_clip architecture", architecture, open_clip.list_models())
    published = None
    # Without a tag, or with an unknown one, the error lists the tags.
    if tag:
        published = open_clip.get_pretrained_cfg(architecture, tag)
    if not published:
        tags = open_clip.list_pretrained_tags_by_model(architecture)
        raise unknown(
            f"tag of {architecture}",
            tag,
            tags,
            hint=f"Write {PREFIX}{architecture}@TAG; tags: {', '.join(tags)}",
        )
    resize_mode = published["resize_mode"]
    # The recipe's word for a resize mode; None if it has none.
    resize = {"shortest": "crop", "squash": "squash"}.get(resize_mode)
    size = published.get("size") or config["vision_cfg"]["image_size"]
    interpolation = published["interpolation"]
    is_known = interpolation in ("bicubic", "bilinear")
    if resize is None or not is_known or not isinstance(size, int):
        raise UsageError(
            f"{name} expects {size} px, resize mode {resize_mode!r} and "
            f"{interpolation!r} interpolation. A recipe can describe only one side length, resize mode "
            "shortest or squash, and bicubic or bilinear interpolation.",
            "Choose another model, or import its features with `fedcache ingest`.",
        )
    activation = "native"
    if published.get("quick_gelu") or config.get("quick_gelu"):
        activation = "quickgelu"
    # ``hf_hub`` is OWNER/NAME/ if the file has one of the usual names, else OWNER/NAME/FILE. It may be missing.
    parts = [part for part in str(published.get("hf_hub") or "").split("/") if part]
    hub = None
    if len(parts) >= 2:
        hub = "/".join(parts[:2])
    files: tuple[str, ...] = OPEN_CLIP_FILES
    if len(parts) > 2:
        files = ("/".join(parts[2:]),)
    return Backbone(
        name=name,
        provider="open_clip",
        width=int(config["embed_dim"]),
        text_width=int(config["embed_dim"]),
        recipe=Recipe(
            name,
            "",  # the weights, which are not located yet
            size=size,
            resize=resize,
            interpolation=interpolation,
            mean=tuple(published["mean"]),
            std=tuple(published["std"]),
            pooling="image_projection",
            activation=activation,
        ),
        source=f"open_clip's {architecture} ({tag})",
        files=files,
        architecture=architecture,
        hub=hub,
        # A list of layers describes a ResNet, which takes one input size only.
        fixed=isinstance(config["vision_cfg"].get("layers"), list),
    )
