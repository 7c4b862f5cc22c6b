"""DP-FPL: a shared prompt plus the client's own, whose gradient has low rank; both gradients are clipped and get noise.

Each client adds vectors of its own to a shared prompt. Every step splits these vectors into two small factors and a
rest, and only the gradients of the factors, clipped and with noise, move them. The shared prompt is averaged.

Tran, Sun, Patterson & Milanova, "Privacy-preserving personalized federated prompt learning for multimodal large
language models", ICLR 2025. With the shared context vectors v and the client's own w_i = U V + (w_i - U V), both
[n, E], the prompt is v + w_i, and G is the gradient of its cross-entropy on a batch. A step takes
    of v:    clip(G) + e / sqrt(M),
    of w_i:  (A V + U B + U U' A V) / 10,   A = clip(G V') + e [n, r],   B = clip(U' G) + e [r, E],
where clip(.) has a norm of at most c, each e is noise N(0, (sigma c / b)^2) of its own, b is the batch size and M the
number of clients. U and V are orthonormal: U spans w_i Q for a random Q [E, r], and V' spans w_i' U.

We could read the abstract and the released code (linhhtran/DP-FPL), but not the paper. The equations are those of the
code, with its factor 1/10. The code takes sigma = sqrt(rounds log(1 / 1e-5)) / epsilon, so ``noise=84.8`` is its
epsilon 0.4 with 100 rounds. There the server averages clip(G) in every step and adds noise e / M. With one batch a
round and all clients, the average here has the same distribution; with more batches, clients average once a round.

**The noise gives no proven privacy.** The code clips the gradient of a batch, and takes c / b as the influence of one
row. This would hold only if the gradient of each row were clipped. ``--dp-noise`` has a guarantee for the upload.

Special cases: noise = 0 neither clips nor adds noise. With r = n, U U' is the identity.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedcache.federate.engine.local_training import ClosedForm
from fedcache.federate.methods import promptfl
from fedcache.federate.methods.common import (
    Batch,
    Batches,
    ClientData,
    Ctx,
    Defaults,
    Hp,
    HParam,
    MethodPage,
    Tree,
    affine,
    count_of,
    declare,
    is_zero,
    keep_optimiser,
    minibatches,
    personal_model,
    prompts,
    select,
    train,
)
from fedcache.heads.losses import cross_entropy

TRAINED = ("ctx", "own")
"""Names of the trained vectors: the shared vectors and the client's own."""

OWN_SHARE = 0.1
"""Factor of the gradient of the client's own vectors in the released code, which does not explain it."""


def enter(down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """The client's own vectors N(0, 0.02^2), which begin with the same draw at every client."""
    shape = tuple(down["ctx"].shape)
    own = {"own": 0.02 * ctx.rng.shared("own", lambda g: g.standard_normal(shape))}
    return {**own, **keep_optimiser({**down, **own}, TRAINED, ctx)}


def summed(p: Tree, names: prompts.Names, ctx: Ctx) -> Tensor:
    """g(v + w_i, c), [C, D]."""
    return prompts.text_features(p["ctx"] + p["own"], names, ctx)


def orthonormal(columns: Tensor) -> Tensor:
    """The columns [.., m, r] orthonormalised as by Gram and Schmidt; the QR of a library has signs of its own."""
    found: tuple[Tensor, Tensor] = torch.linalg.qr(columns)
    Q, R = found
    return Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def factors(own: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal U [.., n, r] and V [.., r, E] of vectors [.., n, E]: one power iteration from ``start`` [E, r]."""
    U = orthonormal(own @ start)
    V = orthonormal(own.mT @ U)
    return U, V.mT


def noisy(g: Tensor, purpose: str, share: float, key: list[int], ctx: Ctx) -> Tensor:
    """The clipped gradient with noise of ``share`` times the standard deviation sigma c / b; ``key`` is the step."""
    sigma = ctx.number("noise")
    if is_zero(sigma):
        return g
    c = ctx.number("clip")
    norm: Tensor = torch.linalg.vector_norm(g)
    clipped = g * (c / norm).clamp(max=1.0)
    shape = tuple(g.shape)
    e = ctx.rng.each(purpose, lambda source, _client: source.standard_normal(shape), *key)
    return clipped + share * sigma * c / ctx.count("batch") * e


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Steps on the shared vectors and the client's own, with the gradients of the module's docstring."""
    n, E = down["ctx"].shape[-2:]
    names = prompts.class_names(ctx, n)
    now = prompts.scheduled(ctx)
    size = (E, min(ctx.count("rank"), n, E))

    def batches(_p: Tree, epoch: int) -> Batches:
        for t, (k, batch) in enumerate(minibatches(data, now, epoch)):
            batch["step"] = torch.tensor([epoch, t])
            yield k, batch

    def gradients(p: Tree, batch: Batch, _down: Tree, batch_ctx: Ctx) -> list[Tensor]:
        key = batch["step"].tolist()
        shared = p["ctx"].detach().requires_grad_()
        T = summed({**p, "ctx": shared}, names, batch_ctx)
        u = prompts.scale(batch_ctx) * affine(batch["x"], T)
        (G,) = torch.autograd.grad(cross_entropy(u, batch["y"], batch["w"]), shared)
        start = batch_ctx.rng.each("factors", lambda g, _client: g.standard_normal(size), *key)
        U, V = factors(p["own"], start)
        A = noisy(G @ V.mT, "noise of U", 1.0, key, batch_ctx)
        B = noisy(U.mT @ G, "noise of V", 1.0, key, batch_ctx)
        of_own = A @ V + U @ B + U @ (U.mT @ (A @ V))
        # The noise of the average of M clients is then e / M, as the server of the released code adds it.
        share = 1.0 / math.sqrt(batch_ctx.env.clients)
        return [noisy(G, "noise of v", share, key, batch_ctx), OWN_SHARE * of_own]

    steps = ClosedForm(gradients)
    epochs = ctx.count("epochs")
    # {} instead of the broadcast, because the gradients read only the trained prompts.
    p = train({**down, **state}, TRAINED, epochs, steps, {}, data, now, batches=batches)
    return select(p, state), select(p, promptfl.NAMES)


def caution(hp: Hp) -> tuple[str, ...]:
    """A warning that the noise has no guarantee."""
    if is_zero(hp["noise"]):
        return ()
    return (
        "dp-fpl clips the gradient of a batch and not of each row, as its released code does, so its noise gives no "
        "proven privacy. --dp-noise has a guarantee for uploads",
    )


METHOD = replace(
    promptfl.METHOD,
    name="dp-fpl",
    paper="Tran et al., DP-FPL, ICLR 2025",
    summary="A shared prompt plus low-rank steps on vectors of the client's own, with noise in both; "
    "only the shared prompt is sent.",
    hparams=(
        *declare(
            promptfl.METHOD.hparams,
            agg="uniform",
            opt="sgd",
            lr=1e-3,
            wd=5e-4,
            epochs=1,
            reset_opt=False,
            sched_unit="none",
            warm_rounds=0,
        ),
        HParam("rank", 8, "int", "r, rank of the factors; at most the number of vectors", low=1),
        HParam(
            "noise",
            84.8,
            "float",
            "sigma, standard deviation of the noise in units of clip/batch; 0: neither noise nor clipping",
            low=0.0,
        ),
        HParam("clip", 10.0, "float", "c, largest norm of a gradient", low=1e-9),
    ),
    defaults=Defaults(rounds=100, participation=None, clients=10, scheme="few-shot"),
    enter=enter,
    fit=fit,
    deploy=partial(promptfl.deploy, features=summed),
    protocol=personal_model,
    trainable=count_of(*TRAINED),
    caution=caution,
    uneven_rows="each client clips its gradients and adds noise of its own",
    page=MethodPage(
        family="Prompts",
        formula=r"""
            \begin{aligned}
            t_c &= g(v + w_i, c), \qquad A = \mathrm{clip}(G V^\top) + e, \qquad B = \mathrm{clip}(U^\top G) + e \\
            w_i &\leftarrow w_i - \eta\, \frac{A V + U B + U U^\top A V}{10},
                \qquad v \leftarrow \mathrm{mean}_i\Big(v - \eta\, \big(\mathrm{clip}(G) + \frac{e}{\sqrt{M}}\big)\Big)
            \end{aligned}
        """,
        terms=r"""
            $v$: the shared context vectors; $w_i$: the vectors that client $i$ adds; $g$: the text encoder; $t_c$: the
            class features; $G$: the gradient of the cross-entropy with respect to the prompt; $U$, $V$: orthonormal
            factors of $w_i$; $e$: noise, with another draw at each place; $\eta$: the learning rate; $M$: the number of
            clients.
        """,
        when="""
            Use it to compare with its paper. Its noise has no proven guarantee; for privacy use `promptfl` with
            `--dp-noise`.
        """,
        cite=("tran2025dpfpl", "guo2022promptfl"),
    ),
)
