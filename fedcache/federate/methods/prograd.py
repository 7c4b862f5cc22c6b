"""ProGrad: PromptFL whose steps never go against what the hand-written prompt knows.

Few rows pull learned context vectors away from the knowledge of CLIP. ProGrad compares the gradient of the loss on the
rows with the gradient towards the predictions of the template. If the two point in opposite directions, the part of the
first that goes against the second is removed.

Zhu, Niu, Han, Wu & Zhang, "Prompt-aligned Gradient for Prompt Tuning", ICCV 2023, eqs 4 to 6, with g_d the gradient of
the cross-entropy, and g_g that of KL(p_template || p) for the model's predictions p:
    g = g_d                                  if g_d . g_g >= 0,
    g = g_d - lambda (g_d . g_g) g_g / |g_g|^2   otherwise,   lambda = 1;
the vectors of all clients are averaged as in ``promptfl``.

The released code has a temperature for both predictions, which is 1 by default (``kl_tau``). It takes gradients of the
soft cross-entropy instead of the divergence, which are the same.

Special cases: prograd_weight=0 is ``promptfl``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedcache.federate.engine.local_training import ClosedForm
from fedcache.federate.methods import promptfl
from fedcache.federate.methods.common import (
    Batch,
    ClientData,
    Ctx,
    HParam,
    MethodPage,
    Tree,
    affine,
    prompts,
    select,
    train,
)
from fedcache.federate.methods.promptfl import NAMES
from fedcache.heads.losses import cross_entropy, log_softmax, softmax


def aligned(of_rows: Tensor, general: Tensor, weight: float | Tensor) -> Tensor:
    """The gradient of the rows without the part against the general one, all [.., E], as one vector each."""
    inner = (of_rows * general).sum()
    size = general.square().sum()
    # With the template as the first prompt, the general gradient is 0 but for rounding errors, which have no direction.
    rounding = torch.finfo(inner.dtype).eps * of_rows.square().sum()
    against = torch.where(size > rounding, inner.clamp(max=0.0) / size, 0.0)
    return of_rows - weight * against * general


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """The training of ``promptfl`` with aligned gradients."""
    names = prompts.class_names(ctx, down["ctx"].shape[-2])
    now = prompts.scheduled(ctx)
    fixed = prompts.template_features(ctx.towers.template, ctx)

    def gradients(p: Tree, batch: Batch, _down: Tree, batch_ctx: Ctx) -> list[Tensor]:
        vectors = p["ctx"].detach().requires_grad_()
        factor = prompts.scale(batch_ctx)
        tau = batch_ctx.number("kl_tau")
        u = factor * affine(batch["x"], prompts.text_features(vectors, names, batch_ctx))
        template = softmax(factor * affine(batch["x"], fixed) / tau)
        soft = -(template * log_softmax(u / tau)).sum(-1)
        general = tau**2 * (batch["w"] * soft).sum(-1)
        of_rows = cross_entropy(u, batch["y"], batch["w"])
        (g,) = torch.autograd.grad(of_rows, vectors, retain_graph=True)
        (g_general,) = torch.autograd.grad(general, vectors)
        return [aligned(g, g_general, batch_ctx.number("prograd_weight"))]

    # {} instead of the broadcast, because the gradients read only the trained prompt.
    p = train({**down, **state}, NAMES, ctx.count("epochs"), ClosedForm(gradients), {}, data, now)
    return select(p, state), select(p, NAMES)


METHOD = replace(
    promptfl.METHOD,
    name="prograd",
    paper="Zhu et al., ProGrad, ICCV 2023",
    summary="promptfl whose gradients lose the part that goes against the predictions of the template.",
    hparams=(
        *promptfl.METHOD.hparams,
        HParam(
            "prograd_weight",
            1.0,
            "float",
            "lambda, share of the opposing part that is removed; 0 is promptfl",
            low=0.0,
        ),
        HParam("kl_tau", 1.0, "float", "temperature of the two predictions", low=1e-6),
    ),
    fit=fit,
    page=MethodPage(
        family="Prompts",
        formula=r"""
            g = g_d - \lambda\, \frac{\min(0,\ g_d \cdot g_g)}{\lVert g_g \rVert^2}\, g_g,
                \qquad v \leftarrow \sum_i \frac{n_i}{N}\, v_i
        """,
        terms="""
            $v$: the context vectors; $g_d$: gradient of the cross-entropy on the rows; $g_g$: gradient of the
            divergence (Kullback-Leibler) of the model's predictions from those of the template; $n_i$, $N$: rows of
            client $i$ and of all clients.
        """,
        when="""
            Use it instead of `promptfl` if clients have few rows, so that the learned prompt would become worse than
            the template on other rows.
        """,
        cite=("zhu2023prograd", "guo2022promptfl"),
    ),
)
