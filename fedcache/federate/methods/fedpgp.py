"""FedPGP: each client adds a low-rank matrix of its own to a shared prompt, which stays near CLIP's own knowledge.

The shared prompt is averaged, and a small matrix adapts it to each client. A contrastive loss pulls the shared prompt's
class features towards those of the template. It pushes them away from those of the adapted prompt.

Cui, Li, Wang & Shi, "Harmonizing generalization and personalization in federated prompt learning", ICML 2024. With the
shared context vectors v [n, E] and the client's own U_i [n, r] and V_i [r, E],
    p_i = v + U_i V_i,   p(c | x) = softmax_c(100 cos(f(x), g(p_i, c))),   v <- sum_i a_i v_i,
    L = L_ce + mu (1 / C) sum_c -log( e^(s_c / tau) / (e^(s_c / tau) + e^(d_c / tau)) ),
    s_c = cos(g(v, c), t_c^clip),   d_c = cos(g(v, c), g(p_i, c)).
v, U_i and V_i take every step together, and both terms move all three; only t_c^clip is constant.

We could read the abstract and the released code (TianyuCuiOvO/FedPGP), but not the paper. mu = 1, tau = 0.5 and r = 4
are the values of the released program; its script has mu = 0.5 and r = 8. U and V begin as draws of N(0, 0.02^2), which
are the same for all clients. t_c^clip is the class feature of the template. The released code has the text "X X .. X
name." with n letters X instead, although its abstract has the knowledge of CLIP. All other values are those of
``promptfl``; ``--preset official`` has the released ones: SGD with a constant 0.001 and decay 5e-4, two local epochs,
and clients averaged by rows. One optimiser serves all clients there, so its momentum passes from client to client; this
is not offered. With ``csc``, U_i V_i is added to the vectors of every class.

Special cases: mu = 0 is ``promptfl`` with a low-rank matrix of each client's own, and no contrastive loss.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from fedcache.federate.methods import promptfl
from fedcache.federate.methods.common import (
    ClientData,
    Ctx,
    HParam,
    MethodPage,
    Tree,
    count_of,
    is_zero,
    keep_optimiser,
    personal_model,
    prompts,
    with_official,
)
from fedcache.heads.prompt import l_aug

TRAINED = ("ctx", "U", "V")
"""Names of the trained tensors: the shared prompt, and the factors of the client's own matrix."""


def enter(down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """The client's factors U [n, r] and V [r, E], which begin with the same draws at every client."""
    n, E = down["ctx"].shape[-2:]
    r = ctx.count("rank")
    own = {
        "U": 0.02 * ctx.rng.shared("U", lambda g: g.standard_normal((n, r))),
        "V": 0.02 * ctx.rng.shared("V", lambda g: g.standard_normal((r, E))),
    }
    return {**own, **keep_optimiser({**down, **own}, TRAINED, ctx)}


def adapted(p: Tree, names: prompts.Names, ctx: Ctx) -> Tensor:
    """g(v + U V, c), [C, D]."""
    return prompts.text_features(p["ctx"] + p["U"] @ p["V"], names, ctx)


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """The training of ``promptfl`` on the shared prompt and the client's matrix, with the contrastive loss."""
    names = prompts.class_names(ctx, down["ctx"].shape[-2])
    fixed = prompts.template_features(ctx.towers.template, ctx)
    mu = ctx.number("mu")

    def contrast(T: Tensor, p: Tree) -> Tensor:
        shared = promptfl.shared_features(p, names, ctx)
        return mu * l_aug(shared, fixed, T, ctx.number("tau")).mean()

    if is_zero(mu):
        # Without the cost of the shared prompt's features.
        return promptfl.fit(down, state, data, ctx, None, adapted, TRAINED)
    return promptfl.fit(down, state, data, ctx, contrast, adapted, TRAINED)


METHOD = replace(
    promptfl.METHOD,
    name="fedpgp",
    paper="Cui et al., FedPGP, ICML 2024",
    summary="A shared prompt that stays near the template, plus a low-rank matrix of the client's "
    "own; only the shared prompt is sent.",
    hparams=(
        *with_official(
            promptfl.METHOD.hparams,
            agg="weighted",
            lr=1e-3,
            wd=5e-4,
            epochs=2,
            sched_unit="none",
            warm_rounds=0,
        ),
        HParam("rank", 4, "int", "r, rank of the client's own matrix", low=1),
        HParam("mu", 1.0, "float", "weight of the contrastive loss", low=0.0),
        HParam("tau", 0.5, "float", "temperature of the contrastive loss", low=1e-6),
    ),
    enter=enter,
    fit=fit,
    deploy=partial(promptfl.deploy, features=adapted),
    protocol=personal_model,
    trainable=count_of(*TRAINED),
    page=MethodPage(
        family="Prompts",
        formula=r"""
            \begin{aligned}
            t_c &= g(v + U_i V_i, c), \qquad z_c = g(v, c), \qquad v \leftarrow \sum_i \frac{n_i}{N}\, v^{(i)} \\
            L &= L_{\mathrm{ce}} + \frac{\mu}{C} \sum_c \log\big(1 + e^{(\cos(z_c, t_c)
                - \cos(z_c, t_c^{\mathrm{clip}})) / \tau}\big)
            \end{aligned}
        """,
        terms=r"""
            $v$: the shared context vectors; $v^{(i)}$: these vectors after training at client $i$; $U_i$, $V_i$: the
            client's own factors, of rank `rank`; $g$: the text encoder; $t_c$: the class features with which the client
            predicts; $z_c$: those of the shared prompt; $t_c^{\mathrm{clip}}$: those of the template; $\mu$, $\tau$:
            weight and temperature of the contrastive loss; $n_i$, $N$: rows of client $i$ and of all clients.
        """,
        when="""
            Use it instead of `promptfolio` if the client's own part must stay small, and the shared prompt near the
            template. Scores are those of the clients' own models, not of the shared prompt alone.
        """,
        cite=("cui2024fedpgp", "guo2022promptfl"),
    ),
)
