"""FedTPG: clients train a small network that makes the context words of CLIP's prompts from the class names.

A small network reads the class names and produces the context words of CLIP's prompts. Clients train this network on
their own classes. The server averages the network, which can also make prompts for new class names.

Qiu et al., "Federated text-driven prompt generation for vision-language models", ICLR 2024. The names of the
available classes are encoded as they are, T [C, D] of unit length, and read by m learned queries Q [m, E],
    x = MHA(LN(Q), LN(T), LN(T)),    v = x + FF(x),    FF(x) = B (a * gelu(g)) + b,  (a, g) = A LN(x) + a_0,
after which come ``depth`` blocks of self-attention, x = v + MHA(LN(v)), v = x + FF(x). The v are the context vectors of
every class's prompt, [START, v_1 .. v_m, name, END], and the classifier is that of PromptFL. The network travels.

With ``names=own`` clients know only the names of their own classes: T has these names, and cross-entropy is over these
classes. Scoring uses all names. ``names=all`` (ours) also trains with all names.

Checked against the released code (boschresearch/FedTPG, ``model/prompt_net.py``, ``federated``): m = 4 queries of
N(0, 0.02^2), 4 heads, a hidden layer of 4 E, no blocks, no residual around the first attention, torch's first weights;
SGD with 0.003 and momentum 0.9, decay 1e-5, batches of 200, one epoch in each of 500 rounds, a cosine over them,
momentum that a client keeps, and clients averaged with equal weights. The released code computes in half precision. A
text has D numbers and a token has E; the attention maps D to E (D-106).

Training begins with the prompts of a random network. On digits (glyph-clip, 10 clients, Dirichlet 0.1), zero-shot has
an accuracy of 85 %. After 20 rounds FedTPG has 73 % with lr=0.003 and 79 % with lr=0.03; after the 500 rounds of the
default it has 56 %. So set ``--rounds``.

Special cases: v depends neither on the order of the names nor on how often all of them are repeated. If B, b and the
weights of the attention's output map are 0, v is the bias of this map for all names, like a prompt of PromptFL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from fedcache.errors import UsageError
from fedcache.federate.methods import promptfl
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
    declare,
    keep_whole_optimiser,
    prompts,
    select,
    train,
    whole_server,
    without,
)
from fedcache.federate.methods.common.prompts import CONTEXT, PROMPT_TRAINING, SCALE, Names
from fedcache.heads.linear import Uniform, init_linear
from fedcache.heads.losses import cross_entropy

WIDER = 4
"""Width of the hidden layer of a feed-forward block, as a multiple of its input's."""


def init_block(uniform: Uniform, E: int, D: int, name: str) -> Tree:
    """Initial weights of an attention with its norms, and of a feed-forward block, drawn from torch's distributions.

    The attention has queries [m, E] and keys [c, D].
    """
    # Only the dtype and the device of this draw are used. Without it, all later draws would change.
    ones = uniform((1,)).new_ones
    made: Tree = {}
    for part, width in (("query", E), ("key", D), ("wide", E)):
        made[f"{name}.{part}.gain"] = ones(width)
        made[f"{name}.{part}.shift"] = ones(width) * 0.0
    for part, width in (("Q", E), ("K", D), ("V", D)):
        fans = E + width
        if E == D:
            # torch draws the three maps as one matrix [3 E, E] if their widths are equal.
            fans = 4 * E
        bound = math.sqrt(6.0 / fans)
        made[f"{name}.{part}.W"] = bound * uniform((E, width))
        made[f"{name}.{part}.b"] = ones(E) * 0.0
    made |= init_linear(uniform, E, E, f"{name}.O.")
    made[f"{name}.O.b"] = ones(E) * 0.0
    made |= init_linear(uniform, 2 * WIDER * E, E, f"{name}.A.")
    made |= init_linear(uniform, E, WIDER * E, f"{name}.B.")
    return made


def init(ctx: Ctx) -> Tree:
    """The queries [m, E], the block that reads texts, and ``depth`` blocks of self-attention."""
    E = ctx.towers.text.width
    uniform = ctx.rng.uniform("init")
    shape = (ctx.count("n_ctx"), E)
    queries = 0.02 * ctx.rng.shared("queries", lambda g: g.standard_normal(shape))
    p = {"queries": queries, **init_block(uniform, E, ctx.env.width, "cross")}
    for i in range(ctx.count("depth")):
        block = init_block(uniform, E, E, f"self{i}")
        # In self-attention queries and keys are the same rows, so there is no norm of keys.
        p |= {k: t for k, t in block.items() if ".key." not in k}
    return p


def norm(x: Tensor, p: Tree, name: str) -> Tensor:
    """Rows of mean 0 and variance 1, scaled and shifted."""
    return layer_norm(x, x.shape[-1:], p[f"{name}.gain"], p[f"{name}.shift"])


def dense(x: Tensor, p: Tree, name: str) -> Tensor:
    """The linear layer of that name."""
    return affine(x, p[f"{name}.W"], p[f"{name}.b"])


def attention(q: Tensor, kv: Tensor, p: Tree, name: str, heads: int) -> Tensor:
    """MHA(q, kv, kv) [m, E] of queries [m, E] over rows [c, D]."""

    def by_head(rows: Tensor, part: str) -> Tensor:
        mapped = dense(rows, p, f"{name}.{part}")
        return mapped.view(len(rows), heads, -1).transpose(0, 1)

    Q = by_head(q, "Q")
    K = by_head(kv, "K")
    V = by_head(kv, "V")
    # Scaled dot products of each query with all keys.
    weight = (Q @ K.mT / math.sqrt(Q.shape[-1])).softmax(-1)
    joined = (weight @ V).transpose(0, 1).flatten(-2)
    return dense(joined, p, f"{name}.O")


def feed_forward(x: Tensor, p: Tree, name: str) -> Tensor:
    """FF(x), [m, E]."""
    hidden = dense(norm(x, p, f"{name}.wide"), p, f"{name}.A")
    a, gate = hidden.chunk(2, -1)
    return dense(a * gelu(gate), p, f"{name}.B")


def context(p: Tree, texts: Tensor, ctx: Ctx) -> Tensor:
    """The context vectors v [m, E] that the network makes of the texts [c, D] of some classes."""
    heads = ctx.count("heads")
    queries = norm(p["queries"], p, "cross.query")
    keys = norm(texts, p, "cross.key")
    x = attention(queries, keys, p, "cross", heads)
    v = x + feed_forward(x, p, "cross")
    for i in range(ctx.count("depth")):
        rows = norm(v, p, f"self{i}.query")
        x = v + attention(rows, rows, p, f"self{i}", heads)
        v = x + feed_forward(x, p, f"self{i}")
    return v


def texts_of_names(ctx: Ctx) -> Tensor:
    """Unit features T [C, D] of the class names as they are."""
    return prompts.template_features("{}", ctx)


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Cross-entropy over the classes whose names the client knows."""
    names = prompts.class_names(ctx, ctx.count("n_ctx"))
    now = prompts.scheduled(ctx)
    texts = texts_of_names(ctx)
    place = torch.arange(ctx.env.classes, device=texts.device)
    if ctx.hp["names"] == "own":
        # A label becomes the place of its class among the known ones, because only their texts are scored.
        known = torch.unique(data.labels())
        place = place.new_zeros(ctx.env.classes).index_copy(0, known, place[: len(known)])
        texts = texts[known]
        names = Names(names.tokens[known], names.index[known], names.end[known])

    def loss(p: Tree, batch: Batch, _down: Tree, batch_ctx: Ctx) -> Tensor:
        vectors = context(p, texts, batch_ctx)
        T = prompts.text_features(vectors, names, batch_ctx)
        u = prompts.scale(batch_ctx) * affine(batch["x"], T)
        return cross_entropy(u, place[batch["y"]], batch["w"])

    trained = tuple(down)
    # {} instead of the broadcast, because the loss reads only the trained network.
    p = train({**down, **state}, trained, ctx.count("epochs"), loss, {}, data, now)
    return select(p, state), select(p, trained)


def deploy(down: Tree, _state: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """The class features of the prompts that the network makes of all names."""
    with torch.no_grad():
        vectors = context(down, texts_of_names(ctx), ctx)
    return {"T": prompts.class_features(vectors, ctx)}


def moved(
    server: Tree, _states: Mapping[int, Tree], _labels: Mapping[int, Tensor], ctx: Ctx
) -> dict[str, float]:
    """How far the context vectors of all names are from the first ones, as a Euclidean norm."""
    with torch.no_grad():
        texts = texts_of_names(ctx)
        now = context(server, texts, ctx)
        first = context(init(ctx), texts, ctx)
    return {"context_moved": prompts.distance(now, first)}


def check(hp: Hp, ctx: Ctx) -> None:
    """Refuse heads that do not divide the width of a token, and prompts that do not fit the text tower.

    Raises:
        UsageError.
    """
    E = ctx.towers.text.width
    heads = ctx.count("heads")
    if E % heads:
        raise UsageError(
            f"heads={heads} does not divide the {E} numbers of a token of {ctx.towers.name}.",
            f"--set heads={math.gcd(E, 4)}",
        )
    prompts.class_names(ctx, ctx.count("n_ctx"))


METHOD = Method(
    name="fedtpg",
    paper="Qiu et al., FedTPG, ICLR 2024",
    summary="A shared network that computes the prompts for CLIP from the class names.",
    hparams=(
        *declare(FEAT_POST, AGG, feat_post="l2", agg="uniform"),
        *declare(without(CONTEXT, "csc", "ctx_init"), n_ctx=4),
        HParam(
            "depth", 0, "int", "number of self-attention blocks after the first attention", low=0
        ),
        HParam("heads", 4, "int", "number of attention heads", low=1),
        HParam(
            "names",
            "own",
            "choice",
            "class names that a client trains with; own: those of its own classes; all: those of "
            "all classes",
            choices=("own", "all"),
        ),
        SCALE,
        *declare(
            PROMPT_TRAINING, opt="sgd", lr=3e-3, wd=1e-5, batch=200, epochs=1, reset_opt=False
        ),
    ),
    defaults=Defaults(rounds=500, participation=None, clients=10, scheme="few-shot"),
    init=init,
    enter=keep_whole_optimiser,
    fit=fit,
    uploads=whole_server,
    deploy=deploy,
    predict=promptfl.predict,
    needs=frozenset({"labels", "text tower"}),
    executions=("sequential",),
    check=check,
    zero_shot=prompts.zero_shot,
    scores_new_classes=lambda _hp: True,
    diagnose=moved,
    trainable=lambda server, _state: sum(t.numel() for t in server.values()),
    paper_count=None,
    uneven_rows="clients are averaged with equal weights, and tell apart their own classes alone",
    upload_descriptions={
        "queries": (
            "trained queries of the prompt network",
            "an attacker can guess which rows were used for training",
        ),
    },
    page=MethodPage(
        family="Prompts",
        formula=r"""
            \begin{aligned}
            x &= \mathrm{MHA}\big(\mathrm{LN}(Q), \mathrm{LN}(T), \mathrm{LN}(T)\big),
                \qquad v = x + \mathrm{FF}(x) \\
            t_c &= g\big([v_1 \ldots v_m, \mathrm{name}_c]\big),
                \qquad p(c \mid x) = \mathrm{softmax}_c\big(100 \cos(f(x), t_c)\big)
            \end{aligned}
        """,
        terms="""
            $f(x)$: the feature of an image; $g$: the text encoder; $T$: the encoded class names; $Q$: learned queries;
            MHA, LN, FF: attention, layer norm and feed-forward layer; $v$: the context vectors; $t_c$: the text feature
            of class $c$.
        """,
        when="""
            Use it if the classes at test time differ from those in training: the prompts are computed from class names.
        """,
        cite=("qiu2024fedtpg",),
    ),
)
