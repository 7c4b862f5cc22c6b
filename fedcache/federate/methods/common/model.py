"""The model that the gradient methods share: by its switches, a projection P with a classifier Q, or one linear map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fedcache.errors import StoreError, UsageError
from fedcache.federate.engine.client_data import FEAT_POSTS, ClientData
from fedcache.federate.engine.context import Ctx
from fedcache.federate.engine.hyperparameters import Hp, HParam, Value, has_batchnorm
from fedcache.federate.engine.method import Defaults
from fedcache.heads import projection
from fedcache.heads.linear import Tree, affine, text_head
from fedcache.heads.losses import cross_entropy
from fedcache.heads.projection import Head, logits

FEAT_POST = HParam(
    "feat_post",
    "none",
    "choice",
    "transformation of features when they are loaded; the default depends on the backbone: l2 "
    "for CLIP towers, sign for FedPCL's ResNets with preset official (D-01), else none; center: "
    "l2, then the mean of all training rows is subtracted (each client sends one sum for it), then "
    "l2 again; a value that you set applies to every backbone",
    choices=FEAT_POSTS,
)

UNIT_FEATURES = replace(FEAT_POST, default="l2")
"""``feat_post`` with unit length as its default, for methods that compare features with class texts."""

TRAINING = (
    HParam("opt", "adam", "choice", "optimiser (D-16)", choices=("adam", "sgd")),
    HParam("lr", 1e-3, "float", "learning rate", low=0.0),
    HParam("wd", 1e-4, "float", "L2 weight decay, added to the gradient", low=0.0),
    HParam("momentum", 0.9, "float", "momentum of sgd; adam ignores it", low=0.0, high=1.0),
    HParam("batch", 32, "int", "rows of a batch", low=1),
    HParam("epochs", 1, "int", "local epochs of a round", low=0),
    HParam("reset_opt", True, "bool", "start every round with a new optimiser at every client"),
    HParam("drop_last", False, "bool", "leave out the shorter last batch (D-09)", official=True),
)

ADAM = (
    HParam("adam_beta1", 0.9, "float", "decay of adam's mean of gradients", low=0.0, high=0.999999),
    HParam(
        "adam_beta2",
        0.999,
        "float",
        "decay of adam's mean of squared gradients",
        low=0.0,
        high=0.999999,
    ),
    HParam("adam_eps", 1e-8, "float", "number that adam adds to its denominator", low=1e-16),
)
"""Adam's constants, for methods whose released code does not use torch's defaults."""

PROJECTION = (
    HParam("dim", 256, "int", "width of the projection", low=1),
    HParam(
        "z_norm",
        "none",
        "choice",
        "normalisation of the projection; the released code has l2 in all methods (D-02)",
        choices=("l2", "none"),
        official="l2",
    ),
    HParam(
        "bn",
        True,
        "bool",
        "BatchNorm after the projection's ReLU (D-02; table 7 of FedPCL)",
        official=False,
    ),
)
"""The layers of FedPCL's table 7: FC, ReLU, BatchNorm. Methods that contrast projections also need ``z_norm=l2``."""

BN_MODE = HParam(
    "bn_mode",
    "avg",
    "choice",
    "running statistics of BatchNorm; avg: the server averages them; local: each client keeps "
    "its own",
    choices=("avg", "local"),
)

LOGIT_HEAD = HParam(
    "logit_head",
    "plain",
    "choice",
    "relu_l2: ReLU and unit length on the logits, as in the released code; plain: neither (D-13)",
    choices=("plain", "relu_l2"),
    official="relu_l2",
)

MLP = HParam(
    "head",
    "mlp",
    "choice",
    "projection P and classifier Q; prototypes need a projection",
    choices=("mlp",),
)

LINEAR = HParam("head", "linear", "choice", "the head", choices=("linear",))

LOGIT_SCALE = HParam(
    "logit_scale",
    1.0,
    "float",
    "factor of all logits: of the model, first soft labels, students and teachers; CLIP has 100 "
    "(D-50, D-83)",
    low=1e-6,
)

TRAIN_VIEW = HParam(
    "train_view",
    "center",
    "choice",
    "training rows of an epoch; center: the plain images; aug: a random stored augmentation of "
    "each image (D-08); test rows are always plain",
    choices=("center", "aug"),
)

PROTO_VIEW = HParam(
    "proto_view",
    "center",
    "choice",
    "rows that prototypes are computed from; center: the plain images; aug: stored augmentations "
    "(D-08, D-20)",
    choices=("center", "aug"),
)

FEDPCL_SETTING = Defaults(rounds=100, participation=None, clients=5, scheme="label-shift")
"""The setting of FedPCL's tables, for methods that are compared there or have no setting of their own."""

MODEL = (
    HParam(
        "head",
        "mlp",
        "choice",
        "mlp: projection P and classifier Q; linear: one linear layer on the features",
        choices=("mlp", "linear"),
    ),
    *PROJECTION,
    BN_MODE,
    LOGIT_HEAD,
    TRAIN_VIEW,
)

PROTO_AGG = HParam(
    "proto_agg",
    "weighted",
    "choice",
    "how the server merges prototypes; weighted: by n_ij/N_j; mean: plain mean; eq6: equation 6 "
    "as printed (D-06)",
    choices=("weighted", "mean", "eq6"),
    official="mean",
)

PROTO_INIT = HParam(
    "init",
    "shared",
    "choice",
    "initial weights; shared: the same for all clients, from the broadcast seed; independent: "
    "different for each client (D-11)",
    choices=("shared", "independent"),
    official="independent",
)

INIT = HParam(
    "init",
    "auto",
    "choice",
    "initial weights; auto: text for a linear head on features with a text tower, else shared",
    choices=("auto", "shared", "text", "zero"),
)

SHARED_INIT = HParam(
    "init",
    "shared",
    "choice",
    "initial weights: the same for all clients, from the broadcast seed",
    choices=("shared",),
)

AGG = HParam(
    "agg",
    "weighted",
    "choice",
    "average of uploads; weighted: by n_i/N; uniform: equal weights (D-14, D-53)",
    choices=("weighted", "uniform"),
    official="uniform",
)


CLASSIFIER = ("Q.W", "Q.b")
"""Names of the tensors of Q."""


def declare(*groups: HParam | Iterable[HParam], **defaults: Value) -> tuple[HParam, ...]:
    """Join declarations. Those named in ``defaults`` get that default, in presets ``official`` and ``tuned`` too."""
    made: list[HParam] = []
    for group in groups:
        if isinstance(group, HParam):
            group = (group,)
        for param in group:
            if param.name in defaults:
                param = replace(param, default=defaults[param.name], official=None, tuned=None)
            made.append(param)
    return tuple(made)


def without(group: Iterable[HParam], *names: str) -> tuple[HParam, ...]:
    """A group of declarations without the switches of these names, which a method does not read."""
    return tuple(param for param in group if param.name not in names)


def with_official(group: Iterable[HParam], **values: Value) -> tuple[HParam, ...]:
    """A group of declarations, with these values in preset ``official``; the other declarations stay as they are."""
    return tuple(replace(param, official=values.get(param.name, param.official)) for param in group)


OWN_STEPS = (
    *declare(FEAT_POST, without(MODEL, "bn_mode"), INIT, AGG),
    *without(TRAINING, "opt", "lr", "wd", "momentum", "reset_opt"),
)
"""Hyperparameters of methods that do not use the common optimiser; their learning rates have names of their own."""


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


def names(hp: Hp, left_out: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the model's tensors that are not ``left_out``."""
    return tuple(name for name in head_of(hp).names() if name not in left_out)


def trained(hp: Hp) -> tuple[str, ...]:
    """Names of the model's tensors that a gradient moves."""
    return head_of(hp).trained()


def initial_weights(ctx: Ctx) -> str:
    """The initial weights by ``init``: shared, independent, text or zero; never ``auto``."""
    how = str(ctx.hp.get("init", "shared"))
    if how != "auto":
        return how
    if ctx.hp["head"] == "linear" and ctx.env.text is not None:
        return "text"
    return "shared"


def by_text(ctx: Ctx) -> Callable[[Tensor], Tensor]:
    """The zero-shot classifier: scores [N, C] of rows x [N, D] are their products with the class texts."""
    return lambda x: affine(x, ctx.text)


def zero_shot(ctx: Ctx) -> Callable[[Tensor], Tensor] | None:
    """The zero-shot classifier, if the head starts from it."""
    if initial_weights(ctx) == "text":
        return by_text(ctx)
    return None


def drawn(ctx: Ctx, *, independent: bool = False) -> Tree:
    """Random weights of the model: the same for all clients, or different ones for each client."""
    uniform = ctx.rng.uniform("init", independent=independent)
    return head_of(ctx.hp).init(uniform, ctx.env.width, ctx.env.classes)


def init(ctx: Ctx) -> Tree:
    """Initial weights by the ``head`` and ``init`` switches, leading axes full or 1."""
    how = initial_weights(ctx)
    if how not in ("text", "zero"):
        return drawn(ctx, independent=how == "independent")
    if how == "text":
        made = text_head(ctx.text)
    else:
        C = ctx.env.classes
        made = {"W": ctx.zeros(C, ctx.env.width), "b": ctx.zeros(C)}
    axes = (1,) * len(ctx.lead)
    return {k: t.reshape(axes + tuple(t.shape)) for k, t in made.items()}


def zeros_for(p: Tree, prefix: str, ctx: Ctx) -> Tree:
    """Zeros like each tensor of ``p`` that a gradient moves, under its name with a prefix."""
    return {prefix + name: torch.zeros_like(p[name]) for name in trained(ctx.hp)}


def predict(down: Tree, own: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """Logits [.., N, C] of features; tensors of ``own``, the personal part, replace those of that name in ``down``."""
    return logits(head_of(ctx.hp), {**down, **own}, x)[0]


def embed(down: Tree, own: Tree, x: Tensor, ctx: Ctx) -> Tensor:
    """Projections [.., N, dim] of features by P of ``predict``'s model; the features themselves for a linear head."""
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
            f"init={how} needs a classifier that reads the features directly, but head={head} projects them first.",
            f"Use --set head=linear --set init={how}, or --set init=shared.",
        )


def ce_loss(p: Tree, batch: Tree, _down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """Mean cross-entropy of the model's logits, one value per client, and BatchNorm's updates."""
    u, updates = logits(head_of(ctx.hp), p, batch["x"], batch["w"])
    return cross_entropy(u, batch["y"], batch["w"]), updates
