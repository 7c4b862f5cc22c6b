"""TOFA: personal class prototypes from a Bayesian hierarchy, texts weighed by all clients, both fused row by row.

Each client gets Gaussian class prototypes that combine its own rows with the summed statistics of all clients. Several
texts describe each class, and the clients' rows decide how much each text counts. The two predictions are combined row
by row, and the more certain one counts more.

Zhang et al., "TOFA: training-free one-shot federated adaptation for vision-language models", AAAI 2026
(arXiv:2511.16423). The sources are its abstract and a published note that prints its formulas; neither the whole paper
nor code was available. One round without training, on unit image features z and class texts t.

Prototypes. Classes are Gaussians N(w_c, Sigma) under an uninformative prior. In client k's posterior the rows D of all
clients count by a power,
    q(theta^k) ~ L(D^k | theta^k) L(D | theta)^power prior(theta),
which has a closed form (normal, inverse Wishart). With counts N_c, sums S_c and second moments G of all rows, and n_c,
s_c, g of the client's own rows, it is the posterior of rows with counts n_c + power N_c, sums s_c + power S_c and
moments g + power G. The upload is that of ``fedcgs``. With the means w_c of these rows, their scatter S within classes
and their number n,
    f_V = z P w_c - w_c' P w_c / 2 + log pi_c,    P = n (S + tr(S) / n I)^-1.

Texts. t^0 is the backbone's own template, t^1 .. t^(M-1) are others. Clients score every text of every class, the
server averages the scores over the K clients and weighs the texts by them,
    r(t_c^m) = 1/K sum_k u^k(t_c^0) log( u^k(t_c^m) / u^k(t_c^0) ),
    T_c = sum_m softmax_m(r / tau) t_c^m, made unit,    f_T = s z T'.
In the paper a language model writes the texts on the clients. fedcache works offline, so here the texts are fixed
templates (``TEMPLATES``), which the server encodes and sends. A store keeps only one text of each class, so the text
tower is needed.

Fusion, for each row:  f = eta f_V + (1 - eta) f_T,  eta = sigmoid(log(max softmax f_V / max softmax f_T)).

Interpretations of what the note leaves open: power, M, tau and s are ours (D-101). u^k(t_c^m) is the mean of two
values: the mean probability of class c on its rows, and the mean of 1 minus this probability on the other rows. In this
probability, t_c^m competes with the t^0 of the other classes (D-102). P has the ridge of ``gda``, but not its factor
D (D-103). pi_c is proportional to n_c + power N_c; in ``gda`` all classes have the same prior (D-104). A class without
rows is never predicted (D-105). ``tuned`` has the power and the scale that ``fedcache grid --ready tuned-tofa`` chose
on validation rows of digits, Dirichlet 0.1. On these data the client's own rows are best weighted most, and with a
scale of 100 the texts of glyph-clip are overconfident.

Special cases: for a client without rows f_V is that of all clients' rows; power = 0 is a discriminant of the client's
own rows alone; ``fusion=text`` with ``texts=1`` is ``clip-zs``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from fedcache.federate.engine.method import as_pooled, send_all
from fedcache.federate.methods import fedcgs, fedncm
from fedcache.federate.methods.common import (
    UNIT_FEATURES,
    ClientData,
    Ctx,
    Defaults,
    HParam,
    MethodPage,
    Tree,
    Uploads,
    UploadTensor,
    affine,
    personal_model,
    prompts,
    select,
)
from fedcache.heads.losses import mask_logits
from fedcache.heads.ridge import solve, unpack

TEMPLATES = (
    "a picture of {}.",
    "an image showing {}.",
    "a close-up of {}.",
    "a small photo of {}.",
    "a drawing of {}.",
    "a blurred view of {}.",
    "one {} seen from the front.",
)
"""Texts in addition to the backbone's own template."""

SUMS = ("gram", "class_sum", "count")
"""Names of G, S_c and N_c."""


def init(ctx: Ctx) -> Tree:
    """The class texts [M, C, D], of unit length."""
    # The first text is the backbone's own template; the scores of the others are relative to it.
    templates = (ctx.towers.template, *TEMPLATES[: ctx.count("texts") - 1])
    made = [prompts.template_features(template, ctx) for template in templates]
    return {"texts": torch.stack(made)}


def confidence(z: Tensor, texts: Tensor, scale: float) -> Tensor:
    """Probabilities [R, M, C] of class c for rows z [R, D], with text t_c^m for c and t^0 for other classes (D-102)."""
    u = scale * torch.einsum("rd,mcd->rmc", z, texts)
    none = u.new_full((*u.shape[:1], 1), -torch.inf)
    # The log of the sum of exp u_j with t^0, over j < c and over j > c. Subtracting c from a sum over all classes would
    # lose all digits if c outweighs the others.
    first = u[:, 0]
    below = first[:, :-1].logcumsumexp(-1)
    above = first.flip(-1)[:, :-1].logcumsumexp(-1).flip(-1)
    before = torch.cat([none, below], -1)
    after = torch.cat([above, none], -1)
    others = torch.logaddexp(before, after).unsqueeze(1)
    return torch.sigmoid(u - others)


def fit(down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """G, S_c and N_c of the client, and its part of the texts' scores."""
    # ``fedcgs.fit`` reads neither the broadcast nor a state.
    _, sums = fedcgs.fit({}, {}, data, ctx)
    texts = down["texts"].double()
    if len(texts) == 1:
        return {}, sums

    def beliefs(block: ClientData) -> Tree:
        z = block.full()[0].double()
        y = block.labels()
        p = confidence(normalize(z, dim=-1), texts, float(prompts.scale(ctx)))
        # A text is good where it is probable on its own class and improbable on the others.
        own = one_hot(y, ctx.env.classes).double().unsqueeze(1)
        other = (1.0 - own) * (1.0 - p)
        return {"own": (own * p).sum(0), "other": other.sum(0)}

    made = fedncm.add_up(data, ctx, ctx.env.width * len(texts), beliefs)
    n = sums["count"]
    other_rows = n.sum() - n
    # u is the mean of the two values, on rows of the class and on other rows; if one does not exist, it is the other.
    parts = (n > 0).double() + (other_rows > 0).double()
    u = made["own"] / n.clamp(min=1.0) + made["other"] / other_rows.clamp(min=1.0)
    tiny = torch.finfo(torch.float64).tiny
    u = (u / parts.clamp(min=1.0)).clamp(min=tiny)
    return {}, {**sums, "score": u[0] * (u / u[0]).log()}


def uploads(server: Tree, ctx: Ctx) -> Uploads:
    """The sums of ``fedcgs``, and scores [M, C] where there are texts to weigh."""
    M, C, _ = server["texts"].shape
    declared = fedcgs.uploads(server, ctx)
    if M > 1:
        return {**declared, "score": UploadTensor((M, C), torch.float64)}
    return declared


def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """The sums of all clients, and T."""
    texts = server["texts"].double()
    T = server["texts"][0]
    if len(texts) > 1:
        weight = (up["score"] / ctx.scalar("tau")).softmax(0)
        mean = (weight.unsqueeze(-1) * texts).sum(0)
        T = normalize(mean, dim=-1).to(ctx.env.dtype)
    return {**server, **select(up, SUMS), "T": T}


def posterior(sums: Tree, own: Tree | None, ctx: Ctx) -> Tree:
    """The discriminants W [C, D] and b [C] from one client's rows and, with weight ``power``, those of all clients.

    Args:
        sums: G, S_c and N_c of all clients.
        own: the same of the client; None to use only the rows of all clients, with weight 1.
        ctx: reads ``power`` and ``prior``.
    """
    seen = select(sums, SUMS)
    if own is not None:
        power = ctx.scalar("power")
        seen = {k: power * t + own[k] for k, t in seen.items()}
    count = seen["count"]
    n = count.sum()
    known = count > 0
    # Class means, and the scatter within classes, which is the moments minus those of the means.
    divisor = torch.where(known, count, 1.0).unsqueeze(-1)
    mean = torch.where(known.unsqueeze(-1), seen["class_sum"] / divisor, 0.0)
    rows = mean * count.sqrt().unsqueeze(-1)
    moments = unpack(seen["gram"], mean.shape[-1])
    scatter = moments - rows.mT @ rows
    # If every class has one row, the scatter is rounding error only, and so would be the ridge.
    eps = torch.finfo(scatter.dtype).eps
    least = max(mean.shape[-1] * eps * float(moments.trace()), 1e-30)
    ridge = max(float(scatter.trace() / n.clamp(min=1.0)), least)
    W = n * solve(scatter, mean.mT, ridge).mT
    b = -0.5 * (W * mean).sum(-1)
    if ctx.hp["prior"] == "counts":
        b = b + (count / n.clamp(min=1.0)).log()
    return {
        "W": W.to(ctx.env.dtype),
        "b": mask_logits(b, known).to(ctx.env.dtype),
    }


def personal_part(down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The client's discriminants."""
    _, own = fedcgs.fit({}, {}, data, ctx)
    return posterior(down, own, ctx)


def predict(down: Tree, own: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """f [.., N, C]; without a personal part, f_V uses the rows of all clients alone."""
    text = prompts.scale(ctx) * affine(x, down["T"])
    if ctx.hp["fusion"] == "text":
        return text
    p = own or posterior(down, None, ctx)
    vision = affine(x, p["W"], p["b"])
    if ctx.hp["fusion"] == "vision":
        return vision
    if ctx.hp["fusion"] == "half":
        return 0.5 * (vision + text)
    # eta is the weight of ``vision``: the more certain of the two predictions has the larger weight.
    certainty = vision.log_softmax(-1).amax(-1, keepdim=True)
    certainty_of_text = text.log_softmax(-1).amax(-1, keepdim=True)
    eta = (certainty - certainty_of_text).sigmoid()
    return text + eta * (vision - text)


METHOD = replace(
    fedcgs.METHOD,
    name="tofa",
    paper="after Zhang et al., TOFA, AAAI 2026",
    summary="Combines each client's Gaussian class means with class texts that all clients weigh "
    "together; one round.",
    hparams=(
        UNIT_FEATURES,
        HParam(
            "power",
            0.1,
            "float",
            "weight of all clients' rows relative to the client's own (D-101)",
            low=0.0,
            fit=False,
            tuned=0.0003,
        ),
        HParam(
            "prior",
            "counts",
            "choice",
            "class probabilities; counts: from the weighted counts; equal: equal for all classes "
            "(D-104)",
            choices=("counts", "equal"),
            fit=False,
        ),
        HParam(
            "texts",
            len(TEMPLATES) + 1,
            "int",
            "number of texts of each class; 1 is the backbone's own template (D-101)",
            low=1,
            high=len(TEMPLATES) + 1,
        ),
        HParam(
            "tau", 0.1, "float", "temperature of the texts' weights (D-101)", low=1e-6, fit=False
        ),
        HParam(
            "fusion",
            "adaptive",
            "choice",
            "weight eta of vision against text; adaptive: by confidence; half: 1/2; vision or "
            "text: only that part",
            choices=("adaptive", "half", "vision", "text"),
            fit=False,
        ),
        replace(prompts.SCALE, tuned=6.0),
    ),
    defaults=Defaults(rounds=1, participation=None, clients=10, scheme="few-shot"),
    init=init,
    fit=fit,
    uploads=uploads,
    pool=lambda _hp: {"": "sum", "score": "uniform"},
    aggregate=aggregate,
    broadcast=send_all,
    prepare=as_pooled,
    additive=lambda _hp: False,
    personal_part=personal_part,
    predict=predict,
    protocol=personal_model,
    needs=frozenset({"labels", "text tower"}),
    executions=("sequential",),
    zero_shot=prompts.zero_shot,
    paper_count=None,
    depends_on_origin="logits are cosines with class texts",
    upload_descriptions={
        "score": (
            "scores of the class texts",
            "how well its rows fit the texts of its classes",
        ),
    },
    page=MethodPage(
        family="With class texts",
        formula=r"""
            \begin{aligned}
            f_V &= z P w_c - \tfrac{1}{2}\, w_c^\top P w_c + \log \pi_c,
                \qquad P = n \Big(S + \frac{\mathrm{tr}\, S}{n}\, I\Big)^{-1} \\
            T_c &\propto \sum_m \mathrm{softmax}_m(r_{cm} / \tau)\, t_c^m,
                \qquad r_{cm} = \frac{1}{K} \sum_k u^k(t_c^0) \log \frac{u^k(t_c^m)}{u^k(t_c^0)} \\
            f &= \eta f_V + (1 - \eta)\, s\, z T^\top,
                \qquad \eta = \sigma\Big(\log \frac{\max \mathrm{softmax} f_V}{\max \mathrm{softmax} f_T}\Big)
            \end{aligned}
        """,
        terms=r"""
            $z$: the feature of an image; $w_c$, $S$, $\pi_c$, $n$: class mean, scatter, class frequency and number of
            rows, from the client's rows and, with a weight, those of all clients; $t_c^m$: text $m$ of class $c$;
            $u^k$: how well a text fits the rows of client $k$ of $K$; $s$: the scale of the logits.
        """,
        when="""
            Use it if only one round is possible, and each client needs a model that combines its own rows with those of
            all clients. It needs class texts.
        """,
        cite=("zhang2026tofa",),
    ),
)
