"""Trainable encoders with a projection, for self-supervised methods: g(x) = projection(trunk(x)).

``mlp``: trunk FC(D -> hidden) + ReLU on cached features; any leading axes. On images, without leading axes: ``conv``,
a ResNet-18 of basic blocks, and ``resnet50``, of bottleneck blocks whose 3 x 3 convolution has the stride (He et al.,
CVPR 2016, as torchvision builds them). Their stem is that of CIFAR papers (3 x 3, no max pool) or ImageNet's (7 x 7 of
stride 2, then a max pool). All end in SimCLR's projection FC(h -> h) + ReLU, FC(h -> proj). With 64 channels and the
CIFAR stem the trunks have 11,168,832 and 23,500,352 parameters; with ImageNet's 11,176,512 and 23,508,032.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, conv2d, max_pool2d, normalize

from fedcache.heads.linear import Tree, Uniform, affine, init_linear
from fedcache.heads.projection import BN_EPS, BN_MOMENTUM, init_batchnorm

PROJECTION = ("p1.W", "p1.b", "p2.W", "p2.b")
"""Names of the projection's tensors."""


@dataclass(frozen=True)
class Architecture:
    """Blocks of a residual network."""

    stages: tuple[int, int, int, int]  # number of blocks in each stage
    # Output channels of a block, divided by the channels of its 3 x 3 convolution; 1: basic blocks; else bottlenecks.
    expansion: int = 1


RESNETS = {"conv": Architecture((2, 2, 2, 2)), "resnet50": Architecture((3, 4, 6, 3), expansion=4)}
STEMS = ("cifar", "imagenet")


@dataclass(frozen=True)
class Encoder:
    """Which encoder a run trains.

    Attributes:
        kind: mlp | conv | resnet50.
        hidden: width of the ``mlp`` trunk. The width of a ``conv`` trunk is 8 x ``channels``, of ``resnet50`` 32 x.
        proj: width of the projection.
        channels: output channels of the first convolution.
        stem: cifar | imagenet: the first layers of a residual network.
    """

    kind: str
    hidden: int = 512
    proj: int = 128
    channels: int = 64
    stem: str = "cifar"

    @property
    def width(self) -> int:
        """Length of a representation."""
        if self.kind == "mlp":
            return self.hidden
        return 8 * self.channels * RESNETS[self.kind].expansion

    def trained(self) -> tuple[str, ...]:
        """Names of the tensors that a gradient moves."""
        if self.kind == "mlp":
            return ("t.W", "t.b", *PROJECTION)
        return _tensors(self, "W", "gain", "shift") + PROJECTION

    def buffers(self) -> tuple[str, ...]:
        """Names of BatchNorm's running statistics."""
        if self.kind == "mlp":
            return ()
        return _tensors(self, "mean", "var")

    def names(self) -> tuple[str, ...]:
        """Names of all tensors of the model."""
        return self.trained() + self.buffers()

    def init(self, uniform: Uniform, width: int) -> Tree:
        """Fresh weights; ``width`` is D, the features of a row, and unused on images.

        Linear layers are U(+-1/sqrt(fan_in)); convolutions are uniform with the variance 2 / fan_out of He et al.
        """
        h = self.width
        if self.kind == "mlp":
            p = init_linear(uniform, h, width, "t.")
        else:
            p = _init_conv(uniform, self)
        p |= init_linear(uniform, h, h, "p1.")
        p |= init_linear(uniform, self.proj, h, "p2.")
        return p

    def trunk(self, p: Tree, x: Tensor, *, training: bool) -> tuple[Tensor, Tree]:
        """The representation that a linear probe reads, and BatchNorm's updates.

        Args:
            p: tensors by name.
            x: [.., B, D] features, or normalised images [B, 3, H, W].
            training: whether BatchNorm normalises by the statistics of the batch, and updates its running statistics;
                otherwise it normalises by the running statistics.

        Returns:
            the representation [.., B, hidden], and the new running statistics by name.
        """
        if self.kind == "mlp":
            return torch.relu(affine(x, p["t.W"], p["t.b"])), {}
        return _resnet(p, x, self, training=training)

    def project(self, p: Tree, h: Tensor) -> Tensor:
        """Unit embeddings [.., B, proj] of representations [.., B, hidden]."""
        hidden = torch.relu(affine(h, p["p1.W"], p["p1.b"]))
        z = affine(hidden, p["p2.W"], p["p2.b"])
        return normalize(z, dim=-1)


def _blocks(encoder: Encoder) -> list[tuple[str, int, int, int]]:
    """(name, channels in, channels of its 3 x 3 convolution, stride) of every block."""
    out = []
    before = encoder.channels  # channels in
    kind = RESNETS[encoder.kind]
    for stage, count in enumerate(kind.stages):
        # Each stage has twice the channels of the one before.
        wide = encoder.channels << stage
        for block in range(count):
            # Every stage but the first halves the image in its first block.
            stride = 1
            if stage and not block:
                stride = 2
            out.append((f"t.{stage}.{block}", before, wide, stride))
            before = wide * kind.expansion
    return out


def _convolutions(encoder: Encoder) -> dict[str, tuple[int, int, int]]:
    """Name -> (channels out, channels in, kernel) of every convolution; each has a BatchNorm after it."""
    expansion = RESNETS[encoder.kind].expansion
    kernel = 3
    if encoder.stem == "imagenet":
        kernel = 7
    shapes = {"t.stem": (encoder.channels, 3, kernel)}
    for name, before, wide, stride in _blocks(encoder):
        after = wide * expansion  # channels out
        # A basic block is 3 x 3, 3 x 3; a bottleneck is 1 x 1, 3 x 3, 1 x 1.
        shapes[f"{name}.a"] = (wide, before, 3)
        shapes[f"{name}.b"] = (wide, wide, 3)
        if expansion > 1:
            shapes[f"{name}.a"] = (wide, before, 1)
            shapes[f"{name}.c"] = (after, wide, 1)
        if stride > 1 or before != after:
            shapes[f"{name}.skip"] = (after, before, 1)
    return shapes


def _tensors(encoder: Encoder, *parts: str) -> tuple[str, ...]:
    """Names of these parts of every convolution and its BatchNorm."""
    names = []
    for convolution in _convolutions(encoder):
        names += [f"{convolution}.{part}" for part in parts]
    return tuple(names)


def _init_conv(uniform: Uniform, encoder: Encoder) -> Tree:
    p = {}
    for name, (out, channels_in, kernel) in _convolutions(encoder).items():
        # U(-a, a) has variance a^2 / 3; fan_out is out * kernel^2, so a^2 = 6 / fan_out.
        a = math.sqrt(6.0 / (out * kernel * kernel))
        W = a * uniform((out, channels_in, kernel, kernel))
        p[f"{name}.W"] = W
        # BatchNorm has one number for each output channel. Only shape, dtype and device of this slice are read.
        p |= init_batchnorm(W[..., 0, 0, 0], f"{name}.")
    return p


def _resnet(p: Tree, x: Tensor, encoder: Encoder, *, training: bool) -> tuple[Tensor, Tree]:
    updates = {}

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        W = p[f"{name}.W"]
        if W.shape[-1] == 1:
            # A 1 x 1 kernel reads single pixels, so the pixels between strides can be left out first. That takes half
            # the time, and avoids oneDNN's strided 1 x 1 kernel, which writes past its buffers (AVX2, fewer than 8
            # channels, channels last).
            x = x[..., ::stride, ::stride]
            stride = 1
        y = conv2d(x, W, stride=stride, padding=W.shape[-1] // 2)
        mean = p[f"{name}.mean"]
        var = p[f"{name}.var"]
        if training:  # batch_norm changes these tensors in place
            mean = mean.clone()
            var = var.clone()
            updates.update({f"{name}.mean": mean, f"{name}.var": var})
        return batch_norm(
            y, mean, var, p[f"{name}.gain"], p[f"{name}.shift"], training, BN_MOMENTUM, BN_EPS
        )

    def block(name: str, x: Tensor, stride: int) -> Tensor:
        if RESNETS[encoder.kind].expansion == 1:
            inside = torch.relu(conv(f"{name}.a", x, stride))
            return conv(f"{name}.b", inside)
        inside = torch.relu(conv(f"{name}.a", x))
        inside = torch.relu(conv(f"{name}.b", inside, stride))
        return conv(f"{name}.c", inside)

    if encoder.stem == "imagenet":
        x = torch.relu(conv("t.stem", x, 2))
        x = max_pool2d(x, 3, stride=2, padding=1)
    else:
        x = torch.relu(conv("t.stem", x, 1))
    for name, _before, _wide, stride in _blocks(encoder):
        y = block(name, x, stride)
        # The shortcut is a 1 x 1 convolution where the block changes the shape.
        if f"{name}.skip.W" in p:
            x = conv(f"{name}.skip", x, stride)
        x = torch.relu(y + x)
    return x.mean((-2, -1)), updates
