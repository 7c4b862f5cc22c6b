"""TPFL: a prompt among the words and a prompt on the pixels, both trained by clients and averaged.

Clients learn two prompts through CLIP's frozen encoders: vectors among the words of the class texts, and a frame or
patch on the images. The server averages both.

Zhao et al., UbiComp/ISWC 2023 companion ("Inclusive data representation in federated learning: a novel approach
integrating textual and visual prompt"), eqs 2 and 3:
    z_v = f(x + v),  t_c = g(ctx, c),  p(c | x) = softmax_c(100 cos(z_v, t_c)),  (ctx, v) <- sum_i a_i (ctx_i, v_i),
with v added after CLIP's normalisation, a_i = n_i / N, Adam 1e-3 and a cosine over T_g = 20 rounds. It needs the images
and a gradient through both frozen towers; ``tpfl-feat`` is the approximation on cached features.

The paper prints "epoch=20" without saying of what. We take 20 local epochs of a round, and 20 rounds (D-81). With the
other interpretation, ``epochs=1``, prompts hardly move. The paper does not print the sizes of the prompts and the
number of clients (D-62). Templates of v are those of Bahng et al.: a border, a fixed patch, or a patch that moves with
every forward pass, at test time too. Their code draws the first v from N(0, 1) (``vp_init=randn``).

Special cases: ``vp_size=0`` has no visual prompt and is ``promptfl`` on live features, bit for bit; a border of zeros
leaves the logits as they are.
"""

from __future__ import annotations

from torch import Tensor

from fedcache.federate.methods.common import (
    AGG,
    Batch,
    ClientData,
    Ctx,
    Defaults,
    Method,
    MethodPage,
    Tree,
    affine,
    count_of,
    declare,
    keep_whole_optimiser,
    prompts,
    select,
    whole_server,
)
from fedcache.federate.methods.common.prompts import CONTEXT, PROMPT_TRAINING, SCALE, VISUAL
from fedcache.heads.losses import cross_entropy


def init(ctx: Ctx) -> Tree:
    """Both prompts."""
    made = {"ctx": prompts.init_context(ctx)}
    if ctx.hp["vp_size"] != 0:
        made["v"] = prompts.init_visual(ctx)
    return made


def forward(p: Tree, batch: Batch, names: prompts.Names, ctx: Ctx) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of a batch (eq 2), its unit image features z_v [B, D], and the class features [C, D]."""
    painted = None
    if "at" in batch:
        painted = prompts.paint(p, ctx, batch["at"].tolist())
    z = prompts.image_features(batch["x"], painted, ctx)
    t = prompts.text_features(p["ctx"], names, ctx)
    u = prompts.scale(ctx) * affine(z, t)
    return cross_entropy(u, batch["y"], batch["w"]), z, t


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """``epochs`` of eq 2 on both prompts."""
    names = prompts.class_names(ctx, down["ctx"].shape[-2])

    def loss(p: Tree, batch: Batch, _down: Tree, batch_ctx: Ctx) -> Tensor:
        return forward(p, batch, names, batch_ctx)[0]

    p = prompts.train_prompts(loss, {**down, **state}, data, ctx)
    return select(p, state), select(p, down)


def deploy(down: Tree, _state: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """The class features of the prompt, made once per scored model."""
    return {**down, "T": prompts.class_features(down["ctx"], ctx)}


def predict(down: Tree, _state: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """Logits [N, C] of images uint8 [N, H W 3]."""
    z = embed(down, {}, x, ctx)
    return prompts.scale(ctx) * affine(z, down["T"])


def embed(down: Tree, _own: Tree, x: Tensor, ctx: Ctx) -> Tensor:
    """Unit features [N, D] of images under the visual prompt."""
    return prompts.encode_images(x, down, ctx)


METHOD = Method(
    name="tpfl",
    paper="Zhao et al., TPFL/ATPFL, UbiComp companion 2023",
    summary="Clients learn a text prompt and a visual prompt through both frozen encoders; needs images.",
    hparams=(*declare(AGG, agg="weighted"), *CONTEXT, *VISUAL, SCALE, *PROMPT_TRAINING),
    defaults=Defaults(rounds=20, participation=None, clients=10, scheme="few-shot"),
    init=init,
    enter=keep_whole_optimiser,
    fit=fit,
    uploads=whole_server,
    deploy=deploy,
    predict=predict,
    embed=embed,
    needs=frozenset({"labels", "pixels", "text tower", "image tower"}),
    executions=("sequential",),
    check=prompts.check,
    trainable=count_of("ctx", "v"),
    zero_shot=prompts.zero_shot,
    diagnose=prompts.moved,
    paper_count=None,
    page=MethodPage(
        family="Prompts",
        formula=r"""
            \begin{aligned}
            &z = f(x + v), \qquad t_c = g(\mathrm{ctx}, c),
                \qquad p(c \mid x) = \mathrm{softmax}_c\big(100 \cos(z, t_c)\big) \\
            &(\mathrm{ctx}, v) \leftarrow \sum_i \frac{n_i}{N}\, (\mathrm{ctx}_i, v_i)
            \end{aligned}
        """,
        terms=r"""
            $f$: the image encoder; $g$: the text encoder; $v$: the frame or patch on the pixels;
            $\mathrm{ctx}$: the vectors of the words; $n_i$, $N$: rows of client $i$ and of all clients.
        """,
        when="""
            Use it to reproduce its paper, or if the images themselves must be adapted. Try `tpfl-feat` first: it takes
            seconds.
        """,
        cite=("zhao2023tpfl",),
    ),
)
