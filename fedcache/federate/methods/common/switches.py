"""The model and training switches that the gradient methods share, declared once, and what is built from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fedcache.federate.engine.client_data import FEAT_POSTS
from fedcache.federate.engine.hyperparameters import HParam, Value

FEAT_POST = HParam(
    "feat_post",
    "none",
    "choice",
    "what is done to features when they are loaded; none, or what the backbone wants: l2 for CLIP towers, and with "
    "preset official sign for FedPCL's ResNets (D-01); a value that is set holds for every backbone",
    choices=FEAT_POSTS,
)

TRAINING = (
    HParam("opt", "adam", "choice", "optimiser (D-16)", choices=("adam", "sgd")),
    HParam("lr", 1e-3, "float", "learning rate", low=0.0),
    HParam("wd", 1e-4, "float", "L2 weight decay, added to the gradient", low=0.0),
    HParam("momentum", 0.9, "float", "momentum of sgd; adam ignores it", low=0.0, high=1.0),
    HParam("batch", 32, "int", "rows of a batch", low=1),
    HParam("epochs", 1, "int", "local epochs of a round", low=0),
    HParam("reset_opt", True, "bool", "a fresh optimiser every round on every client"),
    HParam("drop_last", False, "bool", "leave the short last batch out (D-09)", official=True),
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
    HParam("adam_eps", 1e-8, "float", "what adam adds to its denominator", low=1e-16),
)
"""Adam's constants, for methods whose code has others than torch."""

PROJECTION = (
    HParam("dim", 256, "int", "width of the projection", low=1),
    HParam(
        "z_norm",
        "none",
        "choice",
        "normalisation of the projection; l2 in all methods of the released code (D-02)",
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
"""Table 7 of FedPCL layer by layer: FC, ReLU, BatchNorm; the methods that contrast projections need unit length too."""

BN_MODE = HParam(
    "bn_mode",
    "avg",
    "choice",
    "running statistics are averaged, or stay with the client",
    choices=("avg", "local"),
)

LOGIT_HEAD = HParam(
    "logit_head",
    "plain",
    "choice",
    "the released classifier has ReLU and L2 on its logits (D-13)",
    choices=("plain", "relu_l2"),
    official="relu_l2",
)

MLP = HParam("head", "mlp", "choice", "P and Q: prototypes need a projection", choices=("mlp",))

LOGIT_SCALE = HParam(
    "logit_scale",
    1.0,
    "float",
    "factor of the logits everywhere, of first soft labels, students and teachers alike; CLIP's is 100 (D-50, D-83)",
    low=1e-6,
)

TRAIN_VIEW = HParam(
    "train_view",
    "center",
    "choice",
    "rows of an epoch: the plain image, or a stored augmentation drawn for each (D-08); tests are always plain",
    choices=("center", "aug"),
)

PROTO_VIEW = HParam(
    "proto_view",
    "center",
    "choice",
    "rows of the prototypes: the plain image, or a stored augmentation (D-08, D-20)",
    choices=("center", "aug"),
)

MODEL = (
    HParam(
        "head",
        "mlp",
        "choice",
        "mlp: P and Q; linear: one map on the features",
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
    "merge prototypes by n_ij/N_j, by plain mean, or eq 6 as printed (D-06)",
    choices=("weighted", "mean", "eq6"),
    official="mean",
)

PROTO_INIT = HParam(
    "init",
    "shared",
    "choice",
    "initial weights from the broadcast seed, or each client's own (D-11)",
    choices=("shared", "independent"),
    official="independent",
)

SHARED_INIT = HParam(
    "init", "shared", "choice", "initial weights from the broadcast seed", choices=("shared",)
)

AGG = HParam(
    "agg",
    "weighted",
    "choice",
    "average uploads by n_i/N, or uniformly (D-14, D-53)",
    choices=("weighted", "uniform"),
    official="uniform",
)


def init_param(*, independent: bool) -> HParam:
    """The ``init`` switch; only methods whose clients keep their model may start each from its own draw (D-11)."""
    return HParam(
        "init",
        "auto",
        "choice",
        "initial weights; auto: text for a linear head on features with a text tower, else shared",
        choices=("auto", "shared", *(("independent",) if independent else ()), "text", "zero"),
        official="independent" if independent else None,
    )


def declare(*groups: HParam | Iterable[HParam], **defaults: Value) -> tuple[HParam, ...]:
    """Join declarations; ``defaults`` replace the default (and so also what other presets have) of some."""
    flat = [h for g in groups for h in ((g,) if isinstance(g, HParam) else g)]
    return tuple(
        replace(h, default=defaults[h.name], official=None, tuned=None) if h.name in defaults else h
        for h in flat
    )


def without(group: Iterable[HParam], *names: str) -> tuple[HParam, ...]:
    """A group of declarations less the switches that a method does not read."""
    return tuple(h for h in group if h.name not in names)
