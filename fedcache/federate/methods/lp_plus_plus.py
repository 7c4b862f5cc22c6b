"""LP++: a linear probe with a learnable multiplier of each class text, averaged over clients.

A linear classifier is combined with the class texts: the weights of a class are trained weights plus a trained multiple
of the class text. All step sizes follow from the features, so there is no learning rate. The server averages the
clients' results.

Huang et al., "LP++: a surprisingly strong linear probe for few-shot CLIP", CVPR 2024. With unit features f_i of N
images and unit class texts t_k,
    logits_ik = f_i.(w_k + alpha_k t_k),
trained by cross-entropy on all rows at once, without a rate to search: the step sizes come from Lipschitz constants of
the gradient, and the first values from the rows,
    w:      step 4 N / lambda_max(F'F) in every iteration,    first w_k = sum of the rows of class k
    alpha:  step N / (4 max_k sum_i (f_i.t_k)^2) in every ``alpha_every``-th,
            first alpha = ``alpha_init`` times the mean over classes of the mean of f.t_k over the rows of class k.

The paper has no clients. Here (ours) each client computes steps and first values from its own rows, begins with its own
first values in the first round and with the average afterwards, and makes ``epochs`` such iterations a round; uploads
are averaged by n_i / N. One client and one round are the paper's method. A class without rows at the client begins with
w_k = 0.

The released code (preset ``official``) differs: it has momentum 0.9 on w, and a bias, which begins with random numbers
there and with 0 here. Its alpha moves by the sum of all gradients so far, because nothing sets them to zero
(``alpha_grad=sum``). Checked against this code (FereshteShakeri/FewShot-CLIP-Strong-Baseline,
``methods/linear_probe_p2.py`` and ``utils.py``), which also uses the iterate that is best on validation rows, and half
precision. Its step of alpha is a sixteenth of 4 N / max_k sum_i (f_i.t_k)^2, the step that would correspond to that of
w.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedcache.federate.methods.common import (
    AGG,
    FEAT_POST,
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
    model,
    over,
    select,
    server_tensors,
)
from fedcache.heads.losses import softmax


def names(hp: Hp) -> tuple[str, ...]:
    """Names of the tensors that are trained, sent and averaged."""
    if hp["bias"]:
        return ("W", "alpha", "b")
    return ("W", "alpha")


def init(ctx: Ctx) -> Tree:
    """W [C, D], alpha [C] and b [C] before any row is seen: 0."""
    C = ctx.env.classes
    made = {"W": ctx.zeros(C, ctx.env.width), "alpha": ctx.zeros(C), "b": ctx.zeros(C)}
    return select(made, names(ctx.hp))


def first_values(x: Tensor, t: Tensor, Y: Tensor, ctx: Ctx) -> Tree:
    """Where a client begins in the first round.

    Args:
        x: [.., R, D] rows.
        t: [.., R, C] their products with the class texts.
        Y: [.., R, C] one-hot labels, 0 on padding.
        ctx: reads ``alpha_init``.
    """
    # The level is the mean over the client's classes, so that no class has its own first multiplier.
    count = Y.sum(-2)
    mean = (Y * t).sum(-2) / count.clamp(min=1.0)  # of f.t_k over the rows of class k
    classes = (count > 0).sum(-1, keepdim=True)
    level = mean.sum(-1, keepdim=True) / classes.clamp(min=1)
    alpha = over(ctx.number("alpha_init"), level) * level
    zeros = torch.zeros_like(count)
    # ``alpha + zeros`` is the same number for each class, [.., C].
    return {"W": Y.mT @ x, "alpha": alpha + zeros, "b": zeros}


def step_sizes(x: Tensor, t: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Steps of w and alpha, [..] each, from rows x [.., R, D] and products t [.., R, C], 0 on padding; n [..] rows."""
    # Both products have the same eigenvalues except zeros, so the smaller one is taken.
    if x.shape[-2] < x.shape[-1]:
        small = x @ x.mT
    else:
        small = x.mT @ x
    largest = torch.linalg.eigvalsh(small)[..., -1]
    tiny = torch.finfo(x.dtype).tiny
    step_w = 4.0 * n / largest.clamp(min=tiny)
    steepest = 4.0 * (t**2).sum(-2).amax(-1)
    return step_w, n / steepest.clamp(min=tiny)


def fit(down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """``epochs`` iterations on all rows of the client."""
    x, mask = data.full()
    real = mask.unsqueeze(-1)
    x = x * real  # padding becomes a row of zeros, and has no weight
    n = mask.sum(-1)
    Y = one_hot(data.labels(), ctx.env.classes).to(x.dtype) * real
    t = affine(x, ctx.text)
    p = down
    if ctx.round == 0:
        p = first_values(x, t, Y, ctx)
    # Copies for each client, which the steps below change in place.
    axes = len(ctx.lead)
    p = {name: p[name].expand(*ctx.lead, *p[name].shape[axes:]).clone() for name in names(ctx.hp)}
    step_w, step_alpha = step_sizes(x, t, n)
    velocity = {name: torch.zeros_like(v) for name, v in p.items() if name != "alpha"}
    summed = torch.zeros_like(p["alpha"])
    for iteration in range(1, ctx.count("epochs") + 1):
        ctx.env.watch()
        u = affine(x, p["W"], p.get("b")) + p["alpha"].unsqueeze(-2) * t
        weight = mask / n.unsqueeze(-1)  # of each row in the mean loss
        error = (softmax(u) - Y) * weight.unsqueeze(-1)
        gradients = {"W": error.mT @ x, "b": error.sum(-2)}
        alpha_gradient = (error * t).sum(-2)
        if ctx.hp["alpha_grad"] == "sum":
            summed = summed + alpha_gradient
        else:
            summed = alpha_gradient
        for name, v in velocity.items():
            v.mul_(over(ctx.number("momentum"), v)).add_(gradients[name])
            p[name].sub_(over(step_w, v) * v)
        if iteration % ctx.count("alpha_every") == 0:
            p["alpha"].sub_(over(step_alpha, summed) * summed)
    return {}, p


def predict(down: Tree, _state: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """Logits [.., N, C]."""
    W = down["W"] + down["alpha"].unsqueeze(-1) * ctx.text
    return affine(x, W, down.get("b"))


METHOD = Method(
    name="lp-plus-plus",
    paper="after Huang et al. (LP++), CVPR 2024; averaged over clients",
    summary="A linear probe plus a trained multiplier of each class text, without a learning "
    "rate; the server averages both.",
    hparams=(
        *declare(FEAT_POST, AGG, feat_post="l2", agg="weighted"),
        HParam("epochs", 30, "int", "iterations per round, each on all rows of the client", low=0),
        HParam(
            "alpha_every",
            10,
            "int",
            "number of iterations between two steps of the multipliers",
            low=1,
        ),
        HParam(
            "alpha_init",
            250.0,
            "float",
            "initial multipliers, in units of the mean product of a row and its class text",
            low=0.0,
        ),
        HParam(
            "alpha_grad",
            "last",
            "choice",
            "step of the multipliers; last: by their last gradient; sum: by the sum of all "
            "gradients so far",
            choices=("last", "sum"),
            official="sum",
        ),
        HParam(
            "momentum", 0.0, "float", "momentum of the weights", low=0.0, high=1.0, official=0.9
        ),
        HParam("bias", False, "bool", "train a bias for each class", official=True),
    ),
    defaults=Defaults(rounds=10, participation=None, clients=10, scheme="few-shot"),
    init=init,
    fit=fit,
    uploads=server_tensors(names),
    predict=predict,
    zero_shot=model.by_text,
    needs=frozenset({"labels", "text"}),
    trainable=count_of("W", "alpha", "b"),
    paper_count=None,
    upload_descriptions={
        "alpha": (
            "trained multipliers of the class texts",
            "how well its rows fit the texts of its classes",
        ),
    },
    page=MethodPage(
        family="With class texts",
        formula=r"""
            \ell_{ik} = f_i \cdot (w_k + \alpha_k t_k), \qquad \eta_w = \frac{4 N}{\lambda_{\max}(F^\top F)},
                \qquad \eta_\alpha = \frac{N}{4 \max_k \sum_i (f_i \cdot t_k)^2}
        """,
        terms=r"""
            $f_i$: the feature of image $i$ of $N$; $F$: the features of all images; $t_k$: the text feature of class
            $k$; $w_k$, $\alpha_k$: the trained weights and multiplier; $\eta_w$, $\eta_\alpha$: their step sizes.
        """,
        when="""
            Use it for a trained classifier without tuned settings. Its paper is not federated; fedcache adds the
            averaging.
        """,
        cite=("huang2024lppp",),
    ),
)
