"""TPFL on cached features, an approximation: both prompts become vectors added to the features.

This approximates ``tpfl`` on cached features. Clients train one vector that is added to the image features, and another
that is added to the class texts. The server averages both; no encoder runs.

This method is not from the paper. ``tpfl`` needs images and a gradient through both towers. Here, to first order in the
visual prompt,
    z_v = norm(f(x) + u)              u stands for J_x v, taken the same for every image,
    t'_c = norm(t_c + a rho_c)        a residual on the class text features (TaskRes, Yu et al., CVPR 2023),
    p(c | x) = softmax_c(100 cos(z_v, t'_c)),
with u and rho averaged by n_i / N as the prompts are; rho is one vector for all classes, or with ``csc`` one for each.
A client sends 2 D numbers (D + C D with ``csc``), which says nothing about what ``tpfl`` sends.

Special cases: u = rho = 0 is clip-zs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedcache.federate.methods.common import (
    AGG,
    FEAT_POST,
    Batch,
    ClientData,
    Ctx,
    Defaults,
    Hp,
    HParam,
    Method,
    MethodPage,
    Tree,
    affine,
    count_of,
    declare,
    keep_whole_optimiser,
    local,
    model,
    over,
    server_tensors,
)
from fedcache.federate.methods.common.prompts import PROMPT_TRAINING, scheduled
from fedcache.heads.losses import cross_entropy

NAMES = ("u", "rho")
"""Names of the two trained vectors."""


def names(_hp: Hp) -> tuple[str, ...]:
    """Names of the tensors that are trained, sent and averaged."""
    return NAMES


def init(ctx: Ctx) -> Tree:
    """u [D] and rho [1, D] or [C, D], both 0."""
    rows = 1
    if ctx.hp["csc"]:
        rows = ctx.env.classes
    return {"u": ctx.zeros(ctx.env.width), "rho": ctx.zeros(rows, ctx.env.width)}


def images(u: Tensor, x: Tensor) -> Tensor:
    """norm(x + u), [.., N, D], for features x [.., N, D] and u [.., D]."""
    return normalize(x + u.unsqueeze(-2), dim=-1)


def texts(rho: Tensor, ctx: Ctx) -> Tensor:
    """norm(T + a rho), [.., C, D], for rho [.., 1, D] or [.., C, D]."""
    return normalize(ctx.text + over(ctx.number("a"), rho) * rho, dim=-1)


def forward(p: Tree, batch: Batch, ctx: Ctx) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of a batch per client, its unit features [.., B, D] and the class features [.., C, D]."""
    z = images(p["u"], batch["x"])
    # Both vectors act before the features are brought to unit length.
    t = texts(p["rho"], ctx)
    u = affine(z, t)
    u = over(ctx.number("scale"), u) * u
    return cross_entropy(u, batch["y"], batch["w"]), z, t


def loss(p: Tree, batch: Batch, _down: Tree, ctx: Ctx) -> Tensor:
    """Cross-entropy of 100 cos(norm(x + u), norm(T + a rho))."""
    return forward(p, batch, ctx)[0]


learn = local(loss, names, names, names)


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs at this round's learning rate."""
    return learn(down, state, data, scheduled(ctx))


def predict(down: Tree, _state: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """Logits [.., N, C]."""
    z = embed(down, {}, x, ctx)
    u = affine(z, texts(down["rho"], ctx))
    return over(ctx.number("scale"), u) * u


def embed(down: Tree, _own: Tree, x: Tensor, _ctx: Ctx) -> Tensor:
    """Unit features [.., N, D] moved by the trained vector."""
    return images(down["u"], x)


def moved(server: Tree, *_: object) -> dict[str, float]:
    """Euclidean norms of both vectors, which begin at 0: ``context_moved`` of rho and ``visual_moved`` of u."""
    norm = torch.linalg.vector_norm
    return {
        "context_moved": float(norm(server["rho"].double())),
        "visual_moved": float(norm(server["u"].double())),
    }


METHOD = Method(
    name="tpfl-feat",
    paper="after Zhao et al., UbiComp companion 2023; an approximation of tpfl",
    summary="Approximates TPFL on cached features, by vectors that are added to image features "
    "and class texts.",
    hparams=(
        *declare(FEAT_POST, AGG, feat_post="l2", agg="weighted"),
        HParam("csc", False, "bool", "each class has a separate residual"),
        HParam("a", 0.5, "float", "factor of the text residual", low=0.0),
        HParam("scale", 100.0, "float", "factor of the cosines", low=1e-6),
        *PROMPT_TRAINING,
    ),
    defaults=Defaults(rounds=20, participation=None, clients=10, scheme="few-shot"),
    init=init,
    enter=keep_whole_optimiser,
    fit=fit,
    uploads=server_tensors(names),
    predict=predict,
    embed=embed,
    needs=frozenset({"labels", "text"}),
    fidelity=lambda _hp, _views: "approx",
    trainable=count_of(*NAMES),
    zero_shot=model.by_text,
    diagnose=moved,
    paper_count=None,
    upload_descriptions={
        "u": (
            "trained shift of image features",
            "after one step on one row, that row's gradient",
        ),
        "rho": (
            "trained shift of text features",
            "after one step on one row, that row's gradient",
        ),
    },
    page=MethodPage(
        family="Prompts",
        formula=r"""
            z = \frac{f(x) + u}{\lVert f(x) + u \rVert},
                \qquad t'_c = \frac{t_c + a \rho_c}{\lVert t_c + a \rho_c \rVert},
                \qquad p(c \mid x) = \mathrm{softmax}_c\big(100 \cos(z, t'_c)\big)
        """,
        terms=r"""
            $f(x)$: the feature of an image; $t_c$: the text feature of class $c$; $u$, $\rho_c$: the trained vectors;
            $a$: the weight of $\rho_c$.
        """,
        when="""
            Use it to estimate in seconds how accurate TPFL is on your data. It does not estimate the traffic of `tpfl`.
        """,
        cite=("zhao2023tpfl",),
    ),
)
