"""The model that the gradient methods share, as their switches describe it: P and Q, or one linear map."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from fedcache.errors import StoreError, UsageError
from fedcache.federate.engine.context import Ctx
from fedcache.federate.engine.hyperparameters import Hp, has_batchnorm
from fedcache.heads import projection
from fedcache.heads.linear import Tree, affine, text_head, zero_head
from fedcache.heads.losses import cross_entropy
from fedcache.heads.projection import Head, logits


def head_of(hp: Hp, kind: str | None = None) -> Head:
    """The blocks that the switches describe."""
    return Head(
        kind or str(hp["head"]),
        dim=cast(int, hp.get("dim", 0)),
        bn=has_batchnorm(hp),
        z_norm=hp.get("z_norm") == "l2",
        relu_l2=hp.get("logit_head") == "relu_l2",
        scale=cast(float | Tensor, hp.get("logit_scale", 1.0)),
    )


def names(hp: Hp) -> tuple[str, ...]:
    """Every tensor of the model."""
    return head_of(hp).names()


def trained(hp: Hp) -> tuple[str, ...]:
    """The tensors of the model that a gradient moves."""
    return head_of(hp).trained()


def begins(ctx: Ctx) -> str:
    """How weights begin, ``auto`` resolved: shared, independent, text or zero."""
    how = str(ctx.hp.get("init", "shared"))
    if how != "auto":
        return how
    if ctx.hp["head"] == "linear" and ctx.env.text is not None:
        return "text"
    return "shared"


def by_text(ctx: Ctx) -> Callable[[Tensor], Tensor]:
    """The zero-shot classifier: scores [N, C] of rows x [N, D] are I.T'."""
    return lambda x: affine(x, ctx.text)


def zero_shot(ctx: Ctx) -> Callable[[Tensor], Tensor] | None:
    """The zero-shot classifier, for a head that begins as it."""
    if begins(ctx) == "text":
        return by_text(ctx)
    return None


def init(ctx: Ctx) -> Tree:
    """Initial weights by the ``head`` and ``init`` switches, leading axes full or 1."""
    head = head_of(ctx.hp)
    env = ctx.env
    how = begins(ctx)
    if how in ("text", "zero"):
        if how == "text":
            made = text_head(ctx.text)
        else:
            made = zero_head(
                env.classes, env.width, torch.empty(0, dtype=env.dtype, device=env.device)
            )
        return {k: t.reshape((1,) * len(ctx.lead) + tuple(t.shape)) for k, t in made.items()}
    return head.init(
        ctx.rng.uniform("init", independent=how == "independent"), env.width, env.classes
    )


def embed(down: Tree, own: Tree, x: Tensor, ctx: Ctx) -> Tensor:
    """What P makes of features, [.., N, dim]; the features themselves where the head is one linear map."""
    head = head_of(ctx.hp)
    if head.kind == "linear":
        return x
    return projection.embed(head, {**down, **own}, x)[0]


def check(hp: Hp, ctx: Ctx) -> None:
    """Refuse an ``init`` that the head or the features cannot serve."""
    how = hp["init"]
    head = hp["head"]
    if how == "text" and ctx.env.text is None:
        raise StoreError(
            "init=text starts from class text features, but these features have none.",
            "Use a backbone with a text tower, for example --backbones glyph-clip, or --set init=zero.",
        )
    if how in ("text", "zero") and head != "linear":
        raise UsageError(
            f"init={how} sets the classifier on the features, but head={head} has a projection before it.",
            f"Use --set head=linear --set init={how}, or --set init=shared.",
        )


def ce_loss(p: Tree, batch: Tree, _down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """Mean cross-entropy of the model's logits, one value per client, and BatchNorm's updates."""
    u, updates = logits(head_of(ctx.hp), p, batch["x"], batch["w"])
    return cross_entropy(u, batch["y"], batch["w"]), updates
