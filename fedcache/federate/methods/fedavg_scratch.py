"""FedAvg of a whole ResNet-18 from scratch, the row of FedPCL's table 1 that has no frozen backbone.

Clients train a whole ResNet-18 on images, from random weights. The server averages all weights. This is the baseline
without a frozen backbone.

w <- sum_i a_i w_i over trunk, classifier and BatchNorm's statistics; the local loss is the cross-entropy of Q(trunk(x))
on the images. The paper says "ResNet-18" and 11M parameters: this is the ResNet-18 of CIFAR papers (3 x 3 stem, no max
pool), which has 11,168,832 parameters without its classifier. The authors' ResNet may have the stem of ImageNet, so
``fidelity`` is approx. Images are not augmented unless ``augment`` is set. Special case: lr = 0 keeps w except
BatchNorm's statistics.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fedcache.federate.methods.common import (
    AGG,
    CLASSIFIER,
    TRAINING,
    Batch,
    ClientData,
    Ctx,
    Defaults,
    Hp,
    Method,
    MethodPage,
    Tree,
    affine,
    declare,
    select,
    server_tensors,
    simclr,
    train,
    without,
)
from fedcache.federate.methods.common.live_images import LIVE, ON_IMAGES, precision
from fedcache.heads.encoder import PROJECTION
from fedcache.heads.linear import init_linear
from fedcache.heads.losses import cross_entropy


def trained(hp: Hp) -> tuple[str, ...]:
    """Names of the trunk's tensors that a gradient moves, and of the classifier's."""
    return (*(name for name in simclr.trained(hp) if name not in PROJECTION), *CLASSIFIER)


def names(hp: Hp) -> tuple[str, ...]:
    """Names of the trained tensors, and of BatchNorm's running statistics."""
    return (*trained(hp), *simclr.encoder_of(hp).buffers())


def init(ctx: Ctx) -> Tree:
    """Fresh weights, the same for all clients."""
    uniform = ctx.rng.uniform("init")
    encoder = simclr.encoder_of(ctx.hp)
    p = encoder.init(uniform, ctx.env.width)
    p |= init_linear(uniform, ctx.env.classes, encoder.width, "Q.")
    return select(p, names(ctx.hp))


def loss(p: Tree, batch: Batch, _down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """Cross-entropy of a batch of images [B, 3, H, W], and BatchNorm's updates."""
    # Trunk and classifier may run in lower precision; the loss has the run's type.
    with precision(ctx):
        h, updates = simclr.encoder_of(ctx.hp).trunk(p, batch["x"], training=True)
        u = affine(h, p["Q.W"], p["Q.b"])
    return cross_entropy(u.to(ctx.env.dtype), batch["y"], batch["w"]), updates


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs; a batch of one row, which has no variance, joins another (``batch_sizes``)."""
    # The trunk always has BatchNorm, and ``batch_sizes`` reads this from ``bn``.
    ctx = ctx.with_hp(bn=True)
    batches = simclr.live(data, ctx, views=("x",))
    p = select({**down, **state}, names(ctx.hp))
    epochs = ctx.count("epochs")
    p = train(p, trained(ctx.hp), epochs, loss, down, data, ctx, batches=batches)
    return select(p, state), select(p, names(ctx.hp))


def predict(down: Tree, state: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """Logits [N, C] of images."""
    p = {**down, **state}
    return affine(embed(down, state, x, ctx), p["Q.W"], p["Q.b"])


def embed(down: Tree, state: Tree, x: Tensor, ctx: Ctx) -> Tensor:
    """The trunk's representations [N, h] of images."""
    return simclr.represent({**down, **state}, x, ctx, project=False)


trainable = partial(simclr.trainable, parts=("t.", "Q."))


METHOD = Method(
    name="fedavg-scratch",
    paper="baseline of FedPCL (Tan et al., NeurIPS 2022), table 1",
    summary="FedAvg of whole ResNets that are trained from scratch on images (--backbones pixels).",
    hparams=(
        ON_IMAGES,
        *declare(LIVE, augment="plain"),
        *without(TRAINING, "reset_opt"),
        AGG,
    ),
    defaults=Defaults(rounds=50, participation=None, clients=5, scheme="feature-shift"),
    init=init,
    fit=fit,
    uploads=server_tensors(names),
    predict=predict,
    embed=embed,
    check=simclr.check,
    needs=frozenset({"labels", "pixels"}),
    executions=("sequential",),
    trainable=trainable,
    fidelity=lambda _hp, _views: "approx",
    paper_count=None,
    uneven_rows="BatchNorm: a row's loss depends on the batch it is in",
    page=MethodPage(
        family="Training the encoder itself",
        formula=r"""
            w \leftarrow \sum_i \frac{n_i}{N}\, w_i, \qquad w = \text{all weights of a ResNet-18}
        """,
        terms="""
            $w$: the global model; $w_i$: the model of client $i$ after local training; $n_i$: its training rows; $N$:
            the training rows of all clients in the round.
        """,
        when="""
            Use it to measure what training without a frozen backbone costs. It is the first row of FedPCL's table 1.
        """,
        cite=("tan2022fedpcl", "mcmahan2017fedavg"),
    ),
)
