"""Checkpoints in the layouts they are published in, with random weights: the files a user would have."""

import numpy as np
import torch
from make_images import random_bytes


def resnet18_metadataset():
    """The tensors of a Meta-Dataset ResNet-18 with its cosine classifier, named as in the released files."""
    generator = torch.Generator().manual_seed(0)
    state = {}

    def conv(name, outs, ins, side):
        state[f"{name}.weight"] = (
            torch.randn(outs, ins, side, side, generator=generator) * (2 / (ins * side**2)) ** 0.5
        )

    def norm(name, width):
        state[f"{name}.weight"] = torch.rand(width, generator=generator) + 0.5
        state[f"{name}.bias"] = torch.randn(width, generator=generator) * 0.1
        state[f"{name}.running_mean"] = torch.randn(width, generator=generator) * 0.1
        state[f"{name}.running_var"] = torch.rand(width, generator=generator) + 0.5
        state[f"{name}.num_batches_tracked"] = torch.tensor(7)

    conv("conv1", 64, 3, 5)
    norm("bn1", 64)
    ins = 64
    for layer, outs in enumerate((64, 128, 256, 512), start=1):
        for block in (0, 1):
            name = f"layer{layer}.{block}"
            conv(f"{name}.conv1", outs, ins, 3)
            norm(f"{name}.bn1", outs)
            conv(f"{name}.conv2", outs, outs, 3)
            norm(f"{name}.bn2", outs)
            if ins != outs:
                conv(f"{name}.downsample.0", outs, ins, 1)
                norm(f"{name}.downsample.1", outs)
            ins = outs
    state["cls_fn.weight"] = torch.randn(512, 241, generator=generator)
    state["cls_fn.scale"] = torch.tensor([10.0])
    return state


def save_metadataset(path, state):
    """``<domain>-net/model_best.pth.tar``: a pickle with a ``state_dict`` and a numpy accuracy, and no tar."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"epoch": 40, "state_dict": state, "best_acc": np.float64(71.25), "args": {"lr": 0.01}},
        path,
    )
    return path


def random_like(module):
    """Random values in the names and shapes of a module; variances and norms stay positive."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, value in module.state_dict().items():
        if not value.is_floating_point():
            state[name] = value.clone()
        elif name.endswith(("running_var", "norm.weight")) or (
            value.ndim == 1 and name.endswith("weight")
        ):
            state[name] = torch.rand(value.shape, generator=generator) + 0.5
        else:
            state[name] = torch.randn(value.shape, generator=generator) * 0.05
    return state


def augreg_npz(path, *, width=192, blocks=12):
    """A ViT-Tiny/16 at 224 px in the names and layouts of the AugReg release."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32) * 0.05

    arrays = {
        "cls": draw(1, 1, width),
        "embedding/kernel": draw(16, 16, 3, width),
        "embedding/bias": draw(width),
        "Transformer/posembed_input/pos_embedding": draw(1, 197, width),
        "Transformer/encoder_norm/scale": draw(width) + 1,
        "Transformer/encoder_norm/bias": draw(width),
        "head/kernel": draw(width, 5),
        "head/bias": draw(5),
    }
    for i in range(blocks):
        block = f"Transformer/encoderblock_{i}"
        for number in (0, 2):
            arrays[f"{block}/LayerNorm_{number}/scale"] = draw(width) + 1
            arrays[f"{block}/LayerNorm_{number}/bias"] = draw(width)
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for part in ("query", "key", "value"):
            arrays[f"{attention}/{part}/kernel"] = draw(width, 3, width // 3)
            arrays[f"{attention}/{part}/bias"] = draw(3, width // 3)
        arrays[f"{attention}/out/kernel"] = draw(3, width // 3, width)
        arrays[f"{attention}/out/bias"] = draw(width)
        arrays[f"{block}/MlpBlock_3/Dense_0/kernel"] = draw(width, 4 * width)
        arrays[f"{block}/MlpBlock_3/Dense_0/bias"] = draw(4 * width)
        arrays[f"{block}/MlpBlock_3/Dense_1/kernel"] = draw(4 * width, width)
        arrays[f"{block}/MlpBlock_3/Dense_1/bias"] = draw(width)
    np.savez(path, **arrays)
    return path


def images(count, side, seed=0):
    """uint8 [count, side, side, 3]."""
    return torch.from_numpy(random_bytes(seed, count, side, side, 3))
