"""PromptFolio: the class features of a shared prompt, mixed with those of a prompt that each client keeps.

A shared prompt works for all clients, and a prompt of its own fits a client's rows. PromptFolio mixes the class
features of both prompts and trains both together. Only the shared prompt is averaged.

Pan, Huang & Shi, "Federated learning from vision-language foundation models: theoretical analysis and method", NeurIPS
2024. With the shared context vectors v and the client's own vectors v_i,
    t_c = (1 - theta) g(v, c) + theta g(v_i, c),   p(c | x) = softmax_c(100 x.t_c),   v <- sum_i a_i v_i;
both g are unit vectors, and t_c is not made unit again. Both prompts take every step; v_i never leaves the client.

We could read the abstract and the released code (PanBikang/PromptFolio), but not the paper. theta = 0.4 is the value
of the released code. There all own prompts begin with the same draw, which differs from that of the shared prompt,
and clients are averaged by rows. Both hold here too, except that with ``ctx_init=words`` all prompts begin with these
words. All other values are those of ``promptfl``; ``--preset official`` has the released ones: 8 vectors, SGD with
0.002 and decay 5e-4, batches of 16, five local epochs. One optimiser and one schedule of the learning rate serve all
clients there, so a client's steps depend on the clients before it; this is not offered.

Special cases: theta = 0 is ``promptfl``; with theta = 1 every client trains its own prompt alone.
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
    keep_optimiser,
    personal_model,
    prompts,
    with_official,
)

TRAINED = ("ctx", "own")
"""Names of the trained prompts: the shared one, and the client's own."""


def enter(down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """The client's own prompt, which begins with the same draw at every client."""
    own = {"own": prompts.init_context(ctx, "own")}
    return {**own, **keep_optimiser({**down, **own}, TRAINED, ctx)}


def mixed(p: Tree, names: prompts.Names, ctx: Ctx) -> Tensor:
    """(1 - theta) g(v, c) + theta g(v_i, c), [C, D]."""
    theta = ctx.number("theta")
    shared = prompts.text_features(p["ctx"], names, ctx)
    own = prompts.text_features(p["own"], names, ctx)
    return (1.0 - theta) * shared + theta * own


METHOD = replace(
    promptfl.METHOD,
    name="promptfolio",
    paper="Pan et al., PromptFolio, NeurIPS 2024",
    summary="Class features mixed from a shared prompt and a prompt of the client's own; only the "
    "shared prompt is sent.",
    hparams=(
        *with_official(
            promptfl.METHOD.hparams, agg="weighted", n_ctx=8, batch=16, lr=2e-3, wd=5e-4
        ),
        HParam(
            "theta",
            0.4,
            "float",
            "share of the client's own prompt in the class features; 0 is promptfl",
            low=0.0,
            high=1.0,
        ),
    ),
    enter=enter,
    fit=partial(promptfl.fit, features=mixed, trained=TRAINED),
    deploy=partial(promptfl.deploy, features=mixed),
    protocol=personal_model,
    trainable=count_of(*TRAINED),
    page=MethodPage(
        family="Prompts",
        formula=r"""
            t_c = (1 - \theta)\, g(v, c) + \theta\, g(v_i, c),
                \qquad v \leftarrow \sum_i \frac{n_i}{N}\, v^{(i)}
        """,
        terms=r"""
            $t_c$: the class features; $g$: the text encoder; $v$: the shared context vectors; $v^{(i)}$: these vectors
            after training at client $i$; $v_i$: the client's own context vectors; $\theta$: the share of the client's
            own prompt; $n_i$, $N$: rows of client $i$ and of all clients.
        """,
        when="""
            Use it instead of `promptfl` if clients have different classes or images, and each client needs a model for
            its own rows.
        """,
        cite=("pan2024promptfolio", "guo2022promptfl"),
    ),
)
