"""KgCoOp: PromptFL with a penalty that keeps the class features near those of the hand-written prompt.

Learned context vectors fit the classes of the clients, and lose accuracy on other classes. A penalty on the distance
between the class features of the learned prompt and those of the fixed template keeps what CLIP knows.

Yao, Zhang & Xu, "Visual-Language Prompt Tuning with Knowledge-guided Context Optimization", CVPR 2023, eqs 5 and 6:
    L = L_ce + lambda (1 / C) sum_c |t_c - t_c^clip|^2,   lambda = 8;
the vectors of all clients are averaged as in ``promptfl``.

Interpretations: the released code has 1 - cos instead of |t_c - t_c^clip|^2 = 2 (1 - cos), with the same factor 8, so
``--preset official`` has kg_weight=4. It begins with the words of a template (``ctx_init=words``).

Special cases: kg_weight=0 is ``promptfl``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedcache.federate.methods import promptfl
from fedcache.federate.methods.common import (
    ClientData,
    Ctx,
    HParam,
    MethodPage,
    Tree,
    prompts,
    with_official,
)


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """The training of ``promptfl`` with the penalty on the class features [C, D]."""
    fixed = prompts.template_features(ctx.towers.template, ctx)

    def penalty(T: Tensor, _p: Tree) -> Tensor:
        return ctx.number("kg_weight") * (T - fixed).square().sum(-1).mean()

    return promptfl.fit(down, state, data, ctx, penalty)


METHOD = replace(
    promptfl.METHOD,
    name="kgcoop",
    paper="Yao et al., KgCoOp, CVPR 2023",
    summary="promptfl with a penalty on the distance of the class features from those of the template.",
    hparams=(
        *with_official(promptfl.METHOD.hparams, ctx_init="words"),
        HParam(
            "kg_weight",
            8.0,
            "float",
            "lambda, weight of the penalty; 0 is promptfl",
            low=0.0,
            official=4.0,
        ),
    ),
    fit=fit,
    page=MethodPage(
        family="Prompts",
        formula=r"""
            L = L_{\mathrm{ce}} + \frac{\lambda}{C} \sum_c \lVert t_c - t_c^{\mathrm{clip}} \rVert^2,
                \qquad v \leftarrow \sum_i \frac{n_i}{N}\, v_i
        """,
        terms=r"""
            $v$: the context vectors; $t_c$: the text feature of class $c$ with these vectors; $t_c^{\mathrm{clip}}$:
            with the template; $n_i$, $N$: rows of client $i$ and of all clients.
        """,
        when="""
            Use it instead of `promptfl` if the prompt must also work for classes that no client has.
        """,
        cite=("yao2023kgcoop", "guo2022promptfl"),
    ),
)
