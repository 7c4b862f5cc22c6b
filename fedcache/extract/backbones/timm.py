"""Vision transformers of the AugReg release, and ``timm:<name>`` for anything timm has.

FedPCL used AugReg's ImageNet-1k weights (Steiner et al., arXiv:2106.10270). timm publishes them for small and base. For
tiny there is only the original npz, whose tensors ``from_augreg`` renames. The feature is the class token after the
last norm; the feature of a ``timm:`` model is its output without a classifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.errors import MachineError, UsageError, unknown
from fedcache.extract.backbones.backbone import (
    Backbone,
    FrozenEncoder,
    ModuleEncoder,
    Weights,
    triple,
)
from fedcache.extract.backbones.checkpoints import load_strict, read_state
from fedcache.extract.backbones.rows import TIMM_FILES, crop_of
from fedcache.extract.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "timm:"


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """The model without its classifier; position embeddings are resampled for another input size."""
    import timm

    path = weights.file(backbone.name)
    model: Any = timm.create_model(backbone.architecture, pretrained=False, num_classes=0)
    state = read_state(path, key=weights.key)
    if "embedding/kernel" in state:
        state = from_augreg(state, blocks=len(model.blocks), backbone=backbone.name, path=path)
    heads = model.pretrained_cfg.get("classifier") or ()
    if isinstance(heads, str):
        heads = (heads,)
    ignore = tuple(f"{head}." for head in heads)
    load_strict(model, state, backbone=backbone.name, path=path, ignore=ignore, taken=weights.taken)
    if recipe.size != backbone.recipe.size and hasattr(model, "set_input_size"):
        model.set_input_size(img_size=recipe.size)
    return ModuleEncoder(backbone.name, model, recipe, device=device, dtype=dtype)


def from_augreg(
    state: Mapping[str, Tensor], *, blocks: int, backbone: str, path: Path
) -> dict[str, Tensor]:
    """The tensors of an AugReg npz in timm's names and layouts.

    flax kernels are [in, out] and attention keeps heads apart ([D, heads, d] for query, key, value; [heads, d, D] for
    the output); torch weights are [out, in] with heads folded, query, key and value stacked. Raises MachineError naming
    tensors the file lacks.
    """
    import torch

    missing = []

    def take(name: str) -> Tensor:
        if name not in state:
            missing.append(name)
            return torch.empty(
                1, 1, 1, 1
            )  # never used: it only has enough axes for the steps below
        return state[name].float()

    out = {
        "cls_token": take("cls"),
        "pos_embed": take("Transformer/posembed_input/pos_embedding"),
        "patch_embed.proj.weight": take("embedding/kernel").permute(3, 2, 0, 1),
        "patch_embed.proj.bias": take("embedding/bias"),
        "norm.weight": take("Transformer/encoder_norm/scale"),
        "norm.bias": take("Transformer/encoder_norm/bias"),
    }
    for i in range(blocks):
        flax_block = f"Transformer/encoderblock_{i}"
        block = f"blocks.{i}"
        attention = f"{flax_block}/MultiHeadDotProductAttention_1"
        for number, norm in (("0", "norm1"), ("2", "norm2")):
            out[f"{block}.{norm}.weight"] = take(f"{flax_block}/LayerNorm_{number}/scale")
            out[f"{block}.{norm}.bias"] = take(f"{flax_block}/LayerNorm_{number}/bias")
        parts = [f"{attention}/{part}" for part in ("query", "key", "value")]
        kernels = [take(f"{part}/kernel").flatten(1).mT for part in parts]
        out[f"{block}.attn.qkv.weight"] = torch.cat(kernels)
        biases = [take(f"{part}/bias").flatten() for part in parts]
        out[f"{block}.attn.qkv.bias"] = torch.cat(biases)
        out[f"{block}.attn.proj.weight"] = take(f"{attention}/out/kernel").flatten(0, -2).mT
        out[f"{block}.attn.proj.bias"] = take(f"{attention}/out/bias")
        for number, dense in (("0", "fc1"), ("1", "fc2")):
            layer = f"{flax_block}/MlpBlock_3/Dense_{number}"
            out[f"{block}.mlp.{dense}.weight"] = take(f"{layer}/kernel").mT
            out[f"{block}.mlp.{dense}.bias"] = take(f"{layer}/bias")
    if missing:
        count = len(missing)
        raise MachineError(
            f"{path} is not loaded: {count} tensors of {backbone} are missing, such as {missing[0]}.",
            f"Give the weights of {backbone} itself.",
        )
    return out


def derive(name: str) -> Backbone:
    """The row of ``timm:<name>``, from timm's configuration and shapes.

    Raises UsageError for a name that timm does not know, or preprocessing that a recipe cannot describe.
    """
    import timm

    model_name = name.removeprefix(PREFIX)
    architecture = model_name.partition(".")[0]
    if not timm.is_model(architecture):
        raise unknown(
            "timm model",
            model_name,
            timm.list_models(),
            hint="timm.list_models() lists all models.",
        )
    known = timm.list_pretrained(f"{architecture}.*")
    if "." in model_name and model_name not in known:
        raise unknown("timm weights", model_name, known)
    model, width = _shape(model_name)
    settings: dict[str, Any] = model.pretrained_cfg
    mode = settings.get("crop_mode", "center")
    crop = {"center": "crop", "squash": "squash"}.get(mode)
    interpolation = settings.get("interpolation", "bilinear")
    if crop is None or interpolation not in ("bicubic", "bilinear"):
        raise UsageError(
            f"{name} expects crop mode {mode!r} and {interpolation!r} interpolation. A recipe can describe "
            "only crop mode center or squash, and bicubic or bilinear interpolation.",
            "Choose another model, or import its features with `fedcache ingest`.",
        )
    # ``global_pool`` is a word in vision transformers; in convolutional models it is a module that has the word.
    pool = getattr(model, "global_pool", "")
    pooling = str(getattr(pool, "pool_type", pool)) or "none"
    hub = settings.get("hf_hub_id")
    if not isinstance(hub, str):
        hub = None
    source = f"timm's {architecture}"
    tag = settings.get("tag")
    if tag:
        source += f" ({tag})"
    side = settings["input_size"][-1]
    return Backbone(
        name=name,
        provider="timm",
        width=width,
        recipe=Recipe(
            name,
            "",  # the weights, which are not located yet
            size=side,
            resize=crop,
            interpolation=interpolation,
            crop_pct=crop_of(side, float(settings["crop_pct"])),
            mean=triple(settings["mean"]),
            std=triple(settings["std"]),
            pooling=pooling,
        ),
        source=source,
        files=TIMM_FILES,
        architecture=model_name,
        hub=hub,
        fixed=bool(settings.get("fixed_input_size")) and not hasattr(model, "set_input_size"),
    )


def _shape(model_name: str) -> tuple[Any, int]:
    """The model and the width of its features, on the meta device, which takes no memory, or else on the CPU."""
    try:
        return _shape_on("meta", model_name)
    except RuntimeError:
        return _shape_on("cpu", model_name)


def _shape_on(device: str, model_name: str) -> tuple[Any, int]:
    import timm
    import torch

    with torch.device(device), torch.inference_mode():
        model: Any = timm.create_model(model_name, pretrained=False, num_classes=0).eval()
        side = model.pretrained_cfg["input_size"][-1]
        features = model(torch.zeros(1, 3, side, side))
        return model, int(features.shape[-1])
