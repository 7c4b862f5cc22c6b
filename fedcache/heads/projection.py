"""Models of FedPCL's setting, as functions of features: a projection P with a classifier Q, or a plain linear head.

P = FC(D -> dim) + ReLU [+ BatchNorm] [+ L2], Q = FC(dim -> C). A ``Head`` says which of these blocks a run uses. Their
tensors are stored in flat dicts under the names ``P.*``, ``Q.*`` (mlp) or ``W``, ``b`` (linear).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedcache.heads.linear import Tree, Uniform, affine, init_linear

TRAINED = ("W", "b", "P.W", "P.b", "P.gain", "P.shift", "Q.W", "Q.b")
"""Names of the trained tensors of all kinds of heads."""

BN_MOMENTUM = 0.1
BN_EPS = 1e-5
"""Momentum and epsilon of BatchNorm, torch's defaults."""


def init_batchnorm(like: Tensor, prefix: str) -> Tree:
    """BatchNorm before training: gain 1 and shift 0, running mean 0 and variance 1, each of the shape of ``like``."""
    return {
        f"{prefix}gain": torch.ones_like(like),
        f"{prefix}shift": torch.zeros_like(like),
        f"{prefix}mean": torch.zeros_like(like),
        f"{prefix}var": torch.ones_like(like),
    }


@dataclass(frozen=True)
class Head:
    """Which blocks a model has.

    Attributes:
        kind: ``mlp`` (P and Q), ``projection`` (P alone) or ``linear`` (one map on the features).
        dim: width of the projection.
        bn: BatchNorm after the ReLU of P.
        z_norm: L2-normalise the projection.
        relu_l2: apply ReLU and L2 normalisation to the logits, as the released FedPCL code does (D-13).
        scale: factor of the final logits; a tensor has one value for each client, with leading axes only.
    """

    kind: str
    dim: int = 256
    bn: bool = False
    z_norm: bool = True
    relu_l2: bool = False
    scale: float | Tensor = 1.0

    def trained(self) -> tuple[str, ...]:
        """Names of the tensors that a gradient moves."""
        if self.kind == "linear":
            return ("W", "b")
        if self.kind == "mlp":
            return (*self.body(), "Q.W", "Q.b")
        return self.body()

    def body(self) -> tuple[str, ...]:
        """Names of the trained tensors of P."""
        if self.bn:
            return ("P.W", "P.b", "P.gain", "P.shift")
        return ("P.W", "P.b")

    def buffers(self) -> tuple[str, ...]:
        """Names of the running statistics, which no gradient moves."""
        if self.bn and self.kind != "linear":
            return ("P.mean", "P.var")
        return ()

    def names(self) -> tuple[str, ...]:
        """Names of all tensors of the model."""
        return self.trained() + self.buffers()

    def init(self, uniform: Uniform, width: int, classes: int) -> Tree:
        """Fresh weights for features of ``width`` numbers; shapes [out, in], [out]."""
        if self.kind == "linear":
            return init_linear(uniform, classes, width)
        p = init_linear(uniform, self.dim, width, "P.")
        if self.bn:
            p |= init_batchnorm(p["P.b"], "P.")
        if self.kind == "mlp":
            p |= init_linear(uniform, classes, self.dim, "Q.")
        return p

    def paper_weights(self, width: int, classes: int) -> int:
        """Weights only, no biases and no BatchNorm: the papers' "# comm params" of the whole model."""
        if self.kind == "linear":
            return classes * width + classes  # no paper prints this count; W and b are sent
        if self.kind == "mlp":
            return width * self.dim + self.dim * classes
        return width * self.dim


class _Unit(torch.autograd.Function):
    """``normalize`` over the last axis, with its gradient, (g - z (z . g)) / |x|, in four operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-12)
        z: Tensor = x / length
        ctx.save_for_backward(z, length)
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (g,) = grads
        z, length = ctx.saved_tensors
        along = (z * g).sum(-1, keepdim=True)
        return torch.addcmul(g, z, along, value=-1.0).div_(length)


def unit(x: Tensor) -> Tensor:
    """Rows of x [.., P] at length 1; a row of zeros stays."""
    if not x.requires_grad:
        return normalize(x, dim=-1)
    z: Tensor = _Unit.apply(x)
    return z


def embed(head: Head, p: Tree, x: Tensor, w: Tensor | None = None) -> tuple[Tensor, Tree]:
    """The projection z = P(x), and BatchNorm's running statistics after this batch.

    Args:
        head: the blocks of P.
        p: ``P.*`` with leading axes as ``x``, or none.
        x: [.., B, D] features.
        w: [.., B] batch weights in training, 1/b on the b real rows and 0 on padding; None in evaluation.

    Returns:
        z [.., B, dim] and the updated running statistics (empty unless ``bn`` and training).
    """
    z = torch.relu(affine(x, p["P.W"], p["P.b"]))
    updates = {}
    if head.bn:
        if w is None:
            # A client may send a false variance, and the average may then be negative.
            mean = p["P.mean"].unsqueeze(-2)
            var = p["P.var"].clamp_min(0.0).unsqueeze(-2)
        else:
            # Statistics of the batch's real rows: padding has weight 0.
            share = w.unsqueeze(-1)
            mean = (share * z).sum(-2, keepdim=True)
            var = (share * (z - mean) ** 2).sum(-2, keepdim=True)
            rows = 1.0 / w.amax(-1, keepdim=True)  # w is 1/b on real rows
            unbiased = var.squeeze(-2) * (rows / (rows - 1.0))
            # As in torch: the batch is normalised with the biased variance, and the running variance uses the unbiased.
            updates["P.mean"] = torch.lerp(p["P.mean"], mean.squeeze(-2), BN_MOMENTUM).detach()
            updates["P.var"] = torch.lerp(p["P.var"], unbiased, BN_MOMENTUM).detach()
        z = (z - mean) / torch.sqrt(var + BN_EPS)
        z = z * p["P.gain"].unsqueeze(-2) + p["P.shift"].unsqueeze(-2)
    if head.z_norm:
        z = unit(z)
    return z, updates


def classify(head: Head, p: Tree, z: Tensor) -> Tensor:
    """Logits [.., B, C] of projections z [.., B, dim]."""
    return finish(head, affine(z, p["Q.W"], p["Q.b"]))


def finish(head: Head, u: Tensor) -> Tensor:
    """Logits from the outputs [.., B, C] of the last linear map: ReLU and L2 if the head has them, then the scale."""
    if head.relu_l2:
        u = normalize(torch.relu(u), dim=-1)
    if isinstance(head.scale, Tensor):
        # One scale for each client, with axes appended for rows and classes.
        appended = (1,) * (u.dim() - head.scale.dim())
        return head.scale.reshape(head.scale.shape + appended) * u
    if head.scale == 1.0:
        return u
    return head.scale * u


def logits(head: Head, p: Tree, x: Tensor, w: Tensor | None = None) -> tuple[Tensor, Tree]:
    """Logits [.., B, C] of features x [.., B, D], and BatchNorm's updates; ``w`` as in ``embed``."""
    if head.kind == "linear":
        return finish(head, affine(x, p["W"], p["b"])), {}
    z, updates = embed(head, p, x, w)
    return classify(head, p, z), updates
