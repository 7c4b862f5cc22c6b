"""Trainable encoders with a projection, for self-supervised methods: g(x) = projection(trunk(x)).

``mlp``: trunk FC(D -> hidden) + ReLU on cached features; any leading axes. ``conv``: the ResNet-18 of CIFAR papers (3 x
3 stem, no max pool; 11,168,832 parameters with 64 channels) on images; no leading axes. Both end in SimCLR's projection
FC(h -> h) + ReLU, FC(h -> proj); with h = 512 and proj = 128 the convolutional encoder has 11,497,152 parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, conv2d, normalize

from fedcache.heads.linear import Tree, Uniform, affine, init_linear
from fedcache.heads.projection import BN_EPS, BN_MOMENTUM

PROJECTION = ("p1.W", "p1.b", "p2.W", "p2.b")


@dataclass(frozen=True)
class Encoder:
    """Which encoder a run trains.

    Attributes:
        kind: mlp | conv.
        hidden: width of the ``mlp`` trunk; a ``conv`` trunk gives 8 x ``channels``.
        proj: width of the projection.
        channels: of the first convolution.
    """

    kind: str
    hidden: int = 512
    proj: int = 128
    channels: int = 64

    @property
    def width(self) -> int:
        """Numbers in a representation."""
        return self.hidden if self.kind == "mlp" else 8 * self.channels

    def trained(self) -> tuple[str, ...]:
        """Names of the tensors a gradient moves."""
        if self.kind == "mlp":
            return ("t.W", "t.b", *PROJECTION)
        return (*(f"{n}.{k}" for n in _convolutions(self.channels) for k in ("W", "gain", "shift")), *PROJECTION)

    def buffers(self) -> tuple[str, ...]:
        """Names of BatchNorm's running statistics."""
        if self.kind == "mlp":
            return ()
        return tuple(f"{n}.{k}" for n in _convolutions(self.channels) for k in ("mean", "var"))

    def names(self) -> tuple[str, ...]:
        """All tensors of the model."""
        return self.trained() + self.buffers()

    def init(self, uniform: Uniform, width: int) -> Tree:
        """Fresh weights; ``width`` is D, the features of a row, and unused by ``conv``.

        Linear layers are U(+-1/sqrt(fan_in)); convolutions are uniform with the variance 2 / fan_out of He et al.
        """
        if self.kind == "mlp":
            p, h = init_linear(uniform, self.hidden, width, "t."), self.hidden
        else:
            p, h = _init_conv(uniform, self.channels), 8 * self.channels
        return p | init_linear(uniform, h, h, "p1.") | init_linear(uniform, self.proj, h, "p2.")

    def trunk(self, p: Tree, x: Tensor, *, training: bool) -> tuple[Tensor, Tree]:
        """The representation a probe reads, and BatchNorm's updates.

        Args:
            p: tensors by name.
            x: [.., B, D] features, or normalised images [B, 3, H, W].
            training: BatchNorm uses and updates batch statistics.

        Returns:
            [.., B, hidden].
        """
        if self.kind == "mlp":
            return torch.relu(affine(x, p["t.W"], p["t.b"])), {}
        return _resnet(p, x, self.channels, training=training)

    def project(self, p: Tree, h: Tensor) -> Tensor:
        """Unit embeddings [.., B, proj] of representations [.., B, hidden]."""
        z = affine(torch.relu(affine(h, p["p1.W"], p["p1.b"])), p["p2.W"], p["p2.b"])
        return normalize(z, dim=-1)


def _blocks(channels: int) -> list[tuple[str, int, int, int]]:
    """(name, channels in, channels out, stride) of the eight basic blocks."""
    out, before = [], channels
    for stage in range(4):
        wide = channels << stage
        for block in range(2):
            out.append((f"t.{stage}.{block}", before, wide, 2 if stage and not block else 1))
            before = wide
    return out


def _convolutions(channels: int) -> dict[str, tuple[int, int, int]]:
    """Name -> (channels out, channels in, kernel) of every convolution; each has a BatchNorm after it."""
    found = {"t.stem": (channels, 3, 3)}
    for name, before, after, stride in _blocks(channels):
        found[f"{name}.a"] = (after, before, 3)
        found[f"{name}.b"] = (after, after, 3)
        if stride > 1 or before != after:
            found[f"{name}.skip"] = (after, before, 1)
    return found


def _init_conv(uniform: Uniform, channels: int) -> Tree:
    p: Tree = {}
    for name, (out, inside, kernel) in _convolutions(channels).items():
        p[f"{name}.W"] = math.sqrt(6.0 / (out * kernel * kernel)) * uniform((out, inside, kernel, kernel))
        like = p[f"{name}.W"][..., 0, 0, 0]
        p |= {f"{name}.gain": torch.ones_like(like), f"{name}.shift": torch.zeros_like(like)}
        p |= {f"{name}.mean": torch.zeros_like(like), f"{name}.var": torch.ones_like(like)}
    return p


def _resnet(p: Tree, x: Tensor, channels: int, *, training: bool) -> tuple[Tensor, Tree]:
    updates: Tree = {}

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        W = p[f"{name}.W"]
        if W.shape[-1] == 1:
            # A 1 x 1 kernel reads single pixels, so the ones between strides are left out first: half the time, and
            # oneDNN's strided 1 x 1 kernel (AVX2, fewer than 8 channels, channels last) writes past its buffers.
            x, stride = x[..., ::stride, ::stride], 1
        y = conv2d(x, W, stride=stride, padding=W.shape[-1] // 2)
        mean, var = p[f"{name}.mean"], p[f"{name}.var"]
        if training:  # batch_norm updates what it is given
            mean, var = mean.clone(), var.clone()
            updates.update({f"{name}.mean": mean, f"{name}.var": var})
        return batch_norm(y, mean, var, p[f"{name}.gain"], p[f"{name}.shift"], training, BN_MOMENTUM, BN_EPS)

    x = torch.relu(conv("t.stem", x))
    for name, _before, _after, stride in _blocks(channels):
        y = conv(f"{name}.b", torch.relu(conv(f"{name}.a", x, stride)))
        x = torch.relu(y + (conv(f"{name}.skip", x, stride) if f"{name}.skip.W" in p else x))
    return x.mean((-2, -1)), updates
