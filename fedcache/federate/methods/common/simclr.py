"""Shared code of the self-supervised methods: pairs of views, SimCLR's loss, and the linear probe.

Chen et al., "A simple framework for contrastive learning of visual representations", ICML 2020; FLESD eq 3. On images
the two views are made live, by the same steps as in torchvision (``heads.augment``), so ``fidelity`` is exact. On
features each row shows two of its stored augmentations; ``fidelity`` is then cached_views, and at least four stored
views are recommended. With only one stored view, each row shows this view under two dropout masks (approx).
The linear probe freezes the encoder, drops the projection and trains one linear layer on all labelled rows. Its test
accuracy is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from fedcache.federate.engine.context import drawn_views, narrow_clients
from fedcache.federate.engine.method import Fit
from fedcache.federate.methods.common import (
    FEAT_POST,
    TRAINING,
    Batch,
    Batches,
    ClientData,
    Ctx,
    Hp,
    HParam,
    Loss,
    Tree,
    affine,
    declare,
    minibatches,
    over,
    select,
    train,
)
from fedcache.federate.methods.common.live_images import LIVE, precision, unit_range, view
from fedcache.federate.methods.common.live_images import check as check
from fedcache.federate.methods.common.live_images import encoder_of as encoder_of
from fedcache.federate.methods.common.live_images import on_images as on_images
from fedcache.heads.augment import DRAWS
from fedcache.heads.encoder import RESNETS
from fedcache.heads.losses import cross_entropy
from fedcache.heads.simclr import nt_xent, one_way

ENCODER = HParam(
    "encoder",
    "mlp",
    "choice",
    "mlp: a head on cached views; conv: a ResNet-18 on images (--backbones pixels); resnet50: a "
    "ResNet-50 on images",
    choices=("mlp", *RESNETS),
)

SIMCLR = (
    *declare(FEAT_POST, TRAINING, wd=1e-6, batch=1024, epochs=200, drop_last=False),
    HParam("hidden", 512, "int", "width of the mlp trunk", low=1),
    HParam("proj", 128, "int", "width of the projection", low=1),
    HParam("tau", 0.4, "float", "temperature of the contrast", low=1e-6),
    HParam(
        "simclr",
        "nt_xent",
        "choice",
        "contrastive loss; nt_xent: NT-Xent, with both views as candidates; one_way: one "
        "direction only (D-30)",
        choices=("nt_xent", "one_way"),
        official="one_way",
    ),
    HParam(
        "dropout",
        0.2,
        "float",
        "share of the features that each view drops, if only one view is stored",
        low=0.0,
        high=0.99,
    ),
    HParam(
        "bn_views",
        "joint",
        "choice",
        "BatchNorm over the two views of a batch; joint: over both at once; separate: over each "
        "view (D-92)",
        choices=("joint", "separate"),
        official="separate",
    ),
    *LIVE,
)

PROBE = (
    HParam(
        "probe_epochs",
        60,
        "int",
        "epochs of the linear probe; the learning rate falls to a tenth after 1/2 and 5/6 of them",
        low=1,
    ),
    HParam(
        "probe_lr",
        0.03,
        "float",
        "SGD learning rate of the linear probe, with momentum 0.9",
        low=0.0,
    ),
    HParam("probe_batch", 256, "int", "batch of the linear probe", low=1),
)

BLOCK = 512
"""Images encoded at once in evaluation."""


def names(hp: Hp) -> tuple[str, ...]:
    """Names of all tensors of the encoder."""
    return encoder_of(hp).names()


def trained(hp: Hp) -> tuple[str, ...]:
    """Names of the encoder's tensors that a gradient moves."""
    return encoder_of(hp).trained()


def needs(hp: Hp) -> frozenset[str]:
    """Images for a convolution, stored views for a head; never labels."""
    if on_images(hp):
        return frozenset({"pixels"})
    return frozenset({"views"})


def init(ctx: Ctx) -> Tree:
    """Fresh weights, the same for all clients."""
    uniform = ctx.rng.uniform("init")
    return encoder_of(ctx.hp).init(uniform, ctx.env.width)


def enter(_down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """``loss`` [.., 4]: sum of the steps' losses and number of steps, of a round's first epoch and of its last."""
    return {"loss": ctx.zeros(*ctx.lead, 4)}


def watch(_server: Tree, states: Mapping[int, Tree], *_: object) -> dict[str, float]:
    """The training loss in the first and the last epoch of the last round (FLESD figure 5), mean over clients."""
    # Sorted, because a resumed run holds the clients in another order, and the order of a sum changes its last bits.
    losses = [states[c]["loss"] for c in sorted(states)]
    of_trained = [t for t in losses if float(t[1]) > 0]
    if not of_trained:
        return {}
    first = torch.stack([t[0] / t[1] for t in of_trained]).mean()
    last = torch.stack([t[2] / t[3] for t in of_trained]).mean()
    return {"loss_first": float(first), "loss": float(last)}


def normal(x: Tensor, ctx: Ctx) -> Tensor:
    """Stored rows as the encoder reads them: features as they are, bytes [.., H*W*3] as [.., 3, H, W] in [-1, 1].

    One normalisation for training and inference, where the released code has two (D-37).
    """
    if ctx.env.image:
        return 2.0 * unit_range(x, ctx) - 1.0
    return x


def live(data: ClientData, ctx: Ctx, *, views: tuple[str, ...]) -> Callable[[Tree, int], Batches]:
    """Batches of images as the encoder reads them, augmented again in every epoch: one view for each of ``views``."""

    def batches(_p: Tree, epoch: int) -> Batches:
        u = ctx.rng.each("augment", lambda g, i: g.random((data.n[i], len(views), DRAWS)), epoch)
        for k, batch in minibatches(data, ctx, epoch):
            drawn = u[batch["i"]]
            seen = {name: view(batch["x"], drawn[:, j], ctx) for j, name in enumerate(views)}
            yield k, {**batch, **seen}

    return batches


def pairs(data: ClientData, ctx: Ctx) -> Callable[[Tree, int], Batches]:
    """Batches in which ``x`` and ``x2`` are two views of each row, as the encoder reads them."""

    def stored(_p: Tree, epoch: int) -> Batches:
        yield from minibatches(data, ctx, epoch, views=drawn_views(data, ctx, epoch, 2))

    def dropped(_p: Tree, epoch: int) -> Batches:
        rate = ctx.number("dropout")
        width = data.x.shape[-1]
        u = ctx.rng.each("dropout", lambda g, i: g.random((data.n[i], 2, width)), epoch)
        for k, batch in minibatches(data, ctx, epoch):
            x = batch["x"]
            rows = batch["i"]
            index = rows[..., None, None].expand(*rows.shape, *u.shape[-2:])
            keep = narrow_clients(u, k, ctx).gather(-3, index)
            # Inverted dropout: what is kept grows by 1 / (1 - rate), so the mean of a feature stays.
            share = over(rate, x)
            first, second = (
                (drawn >= share).to(x.dtype) / (1.0 - share) for drawn in keep.unbind(-2)
            )
            yield k, {**batch, "x": x * first, "x2": x * second}

    if ctx.env.image:
        return live(data, ctx, views=("x", "x2"))
    if data.x.shape[1] > 1:
        return stored
    return dropped


def loss(p: Tree, batch: Tree, _down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """SimCLR's loss of a batch of pairs, one value per client."""
    encoder = encoder_of(ctx.hp)
    with precision(ctx):
        if ctx.hp["bn_views"] == "joint":
            axis = -2
            if ctx.env.image:
                axis = 0
            x = torch.cat([batch["x"], batch["x2"]], axis)
            h, updates = encoder.trunk(p, x, training=True)
            both = encoder.project(p, h).chunk(2, -2)
        else:
            h1, first = encoder.trunk(p, batch["x"], training=True)
            h2, updates = encoder.trunk({**p, **first}, batch["x2"], training=True)
            both = encoder.project(p, h1), encoder.project(p, h2)
    z1, z2 = (z.to(ctx.env.dtype) for z in both)
    contrast = one_way
    if ctx.hp["simclr"] == "nt_xent":
        contrast = nt_xent
    value = contrast(z1, z2, batch["w"], over(ctx.number("tau"), z1))
    return value, updates


def fit_with(loss: Loss, *, send: bool) -> Fit:
    """Local epochs of a loss on pairs of views; the encoder is sent, or stays."""

    def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
        # If each view is normalised by itself, a batch of one image has no variance. With ``bn``, ``batch_sizes`` joins
        # it to another batch.
        separate = on_images(ctx.hp) and ctx.hp["bn_views"] == "separate"
        ctx = ctx.with_hp(bn=separate)
        epochs = ctx.count("epochs")
        make_batches = pairs(data, ctx)
        p = select({**down, **state}, names(ctx.hp))
        p["loss"] = torch.zeros_like(state["loss"])
        # [2, 4], for each step of an epoch. Row 0 has the factors with which the loss of the step is added to ``loss``;
        # row 1 has the numbers that are added, so that ``loss`` counts the steps.
        counted = state["loss"].new_zeros(2, 4)

        def batches(carry: Tree, epoch: int) -> Batches:
            first = epoch == 0
            last = epoch == epochs - 1
            counted.copy_(counted.new_tensor([[first, 0, last, 0], [0, first, 0, last]]))
            return make_batches(carry, epoch)

        def watched(q: Tree, batch: Batch, broadcast: Tree, now: Ctx) -> tuple[Tensor, Tree]:
            value, updates = cast(tuple[Tensor, Tree], loss(q, batch, broadcast, now))
            total = q["loss"] + value.detach().unsqueeze(-1) * counted[0] + counted[1]
            return value, {**updates, "loss": total}

        p = train(p, trained(ctx.hp), epochs, watched, down, data, ctx, batches=batches)
        up: Tree = {}
        if send:
            up = select(p, names(ctx.hp))
        return select(p, state), up

    return fit


def represent(p: Tree, x: Tensor, ctx: Ctx, *, project: bool) -> Tensor:
    """Representations [.., N, h] (or unit embeddings [.., N, proj]) of stored rows x [.., N, D], in evaluation mode."""
    encoder = encoder_of(ctx.hp)
    parts = []
    with torch.no_grad():
        blocks: tuple[Tensor, ...] = (x,)
        # An exported program must read any number of rows, so it cannot have a loop over blocks.
        if ctx.env.image and not torch.compiler.is_exporting():
            blocks = torch.split(x, BLOCK, -2)
        for block in blocks:
            h, _ = encoder.trunk(p, normal(block, ctx), training=False)
            if project:
                h = encoder.project(p, h)
            parts.append(h)
    return torch.cat(parts, -2)


def probe(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The model with a linear probe under ``probe.W`` and ``probe.b``.

    It starts from W ~ N(0, .01^2) and b = 0, and is trained by SGD on all labelled rows.
    """
    p = {**down, **state}
    width = encoder_of(ctx.hp).width
    x = data.full()[0]
    if not len(x):
        # Without labelled rows no probe can be trained, so its weights and its scores are NaN.
        nan = ctx.zeros(ctx.env.classes).fill_(torch.nan)
        return {**p, "probe.W": nan.unsqueeze(-1).expand(-1, width), "probe.b": nan}
    h = represent(p, x, ctx, project=False)
    # The encoder is frozen, so its representations are computed once and trained on as features.
    frozen = ClientData(
        h.unsqueeze(-2),
        data.labels(),
        torch.arange(len(h), device=h.device),
        data.n,
    )
    shape = (ctx.env.classes, h.shape[-1])
    start = ctx.rng.shared("probe", lambda g: 0.01 * g.standard_normal(shape))
    head = {"W": start, "b": start.new_zeros(len(start))}
    epochs = ctx.count("probe_epochs")
    rate = ctx.scalar("probe_lr")
    cuts = [0, epochs // 2, epochs * 5 // 6, epochs]
    batch = ctx.hp["probe_batch"]
    sgd = ctx.with_hp(opt="sgd", wd=0.0, momentum=0.9, batch=batch, drop_last=False)

    def probe_loss(q: Tree, batch: Tree, _down: Tree, _ctx: Ctx) -> Tensor:
        return cross_entropy(affine(batch["x"], q["W"], q["b"]), batch["y"], batch["w"])

    # Each phase has a tenth of the rate of the phase before.
    for phase, (begin, end) in enumerate(pairwise(cuts)):
        now = sgd.with_hp(lr=rate * 0.1**phase)
        purpose = f"probe{phase}"
        head = train(head, ("W", "b"), end - begin, probe_loss, {}, frozen, now, purpose=purpose)
    return {**down, **state, "probe.W": head["W"], "probe.b": head["b"]}


def predict(down: Tree, _state: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """The probe's logits [N, C] of stored rows."""
    return affine(embed(down, {}, x, ctx), down["probe.W"], down["probe.b"])


def embed(down: Tree, _own: Tree, x: Tensor, ctx: Ctx) -> Tensor:
    """The trunk's representations [N, h] of stored rows."""
    return represent(down, x, ctx, project=False)


def fidelity(hp: Hp, views: int) -> str:
    """Live augmentation of images is exact. From three stored views on, a row shows two different augmentations."""
    if on_images(hp):
        return "exact"
    if views > 2:
        return "cached_views"
    return "approx"


def trainable(server: Tree, state: Tree, parts: tuple[str, ...] = ("t.", "p1", "p2")) -> int:
    """Scalars of one encoder that a gradient moves: not BatchNorm's running statistics, and not the probe.

    ``parts`` are the beginnings of the names that count; by default those of the trunk and the projection.
    """
    return sum(
        t.numel()
        for name, t in {**server, **state}.items()
        if name.startswith(parts) and not name.endswith((".mean", ".var"))
    )


def parameters(down: Tree, ctx: Ctx) -> int:
    """Scalars of the encoder that travel."""
    return sum(down[n].numel() for n in names(ctx.hp))
