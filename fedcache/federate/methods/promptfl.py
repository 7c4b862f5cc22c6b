"""PromptFL: clients learn the words around the class names of a frozen CLIP; the server averages those vectors.

The text prompt of CLIP is a fixed sentence around the class name. Here clients learn the vectors of its context words
instead, through the frozen text encoder. The server averages these vectors.

Guo et al., "PromptFL", arXiv:2208.11625, 2022; the prompt is CoOp's (Zhou et al., IJCV 2022):
    t_c = g([START, v_1 .. v_n, name_c, END]),  p(c | x) = softmax_c(100 cos(f(x), t_c)),  v <- sum_i a_i v_i.
Image features are the cached ones: only the text tower needs a gradient, so this is exact.

Interpretations: eq 2 of ATPFL indexes its denominator by c_i instead of c_j (D-60). a_i = n_i / N; the released code
averages uniformly (D-64, ``agg=uniform``), and by mistake keeps the last client's vectors (D-65), which is not offered
here. Optimiser, rate and schedule are those of ATPFL's comparison. Its "epoch=20" is read as 20 local epochs in each of
20 rounds, over which the rate follows a cosine (D-81). The other interpretation is one local epoch (``epochs=1``). The
released code has SGD, five local epochs and a warm-up (D-66).

Special cases: if the context vectors are the embedded words of a template and no step is taken, it is clip-zs with that
template; one client with every row is CoOp. ``local_prompt`` and ``tpfl`` add prompts on images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedcache.federate.methods.common import (
    AGG,
    TRAIN_VIEW,
    UNIT_FEATURES,
    Batch,
    ClientData,
    Ctx,
    Defaults,
    Method,
    MethodPage,
    Tree,
    affine,
    count_of,
    keep_whole_optimiser,
    prompts,
    select,
    train,
    whole_server,
    with_official,
)
from fedcache.federate.methods.common.prompts import CONTEXT, PROMPT_TRAINING, SCALE, Names
from fedcache.heads.losses import cross_entropy

NAMES = ("ctx",)
"""Names of the tensors that are trained, sent and averaged."""

ClassFeatures = Callable[[Tree, Names, Ctx], Tensor]
"""Function of prompts, the tokens of the class names and the context that returns class features [C, D]."""


def shared_features(p: Tree, names: Names, ctx: Ctx) -> Tensor:
    """Class features t_c [C, D] of the prompt that all clients share."""
    return prompts.text_features(p["ctx"], names, ctx)


def fit(
    down: Tree,
    state: Tree,
    data: ClientData,
    ctx: Ctx,
    penalty: Callable[[Tensor, Tree], Tensor] | None = None,
    features: ClassFeatures = shared_features,
    trained: Sequence[str] = NAMES,
) -> tuple[Tree, Tree]:
    """Cross-entropy of 100 cos(x, t_c) on the client's rows; each step runs every class's prompt through the tower.

    Args:
        down: the shared prompt, which is the upload after training.
        state: the client's own prompts, if the method has any, and the state of its optimiser.
        data: of the client.
        ctx: of the client.
        penalty: function of the class features [C, D] and the prompts; its result is added to the loss.
        features: function that makes the class features of the shared prompt and the client's own.
        trained: names of the trained prompts.
    """
    names = prompts.class_names(ctx, down["ctx"].shape[-2])
    now = prompts.scheduled(ctx)

    def loss(p: Tree, batch: Batch, _down: Tree, batch_ctx: Ctx) -> Tensor:
        T = features(p, names, batch_ctx)
        u = prompts.scale(batch_ctx) * affine(batch["x"], T)
        value = cross_entropy(u, batch["y"], batch["w"])
        if penalty is None:
            return value
        return value + penalty(T, p)

    # {} instead of the broadcast, because the loss reads only the trained prompts.
    p = train({**down, **state}, trained, ctx.count("epochs"), loss, {}, data, now)
    return select(p, state), select(p, NAMES)


def deploy(
    down: Tree,
    state: Tree,
    _data: ClientData,
    ctx: Ctx,
    features: ClassFeatures = shared_features,
) -> Tree:
    """The class features of the prompts, made once per scored model and not once per block of rows."""
    names = prompts.class_names(ctx, down["ctx"].shape[-2])
    with torch.no_grad():
        return {"T": features({**down, **state}, names, ctx)}


def predict(down: Tree, _state: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """Logits [N, C]."""
    return prompts.scale(ctx) * affine(x, down["T"])


METHOD = Method(
    name="promptfl",
    paper="Guo et al., PromptFL, arXiv:2208.11625, 2022",
    summary="Clients learn the context vectors of CLIP's prompts; the server averages them.",
    hparams=(
        UNIT_FEATURES,
        AGG,
        *CONTEXT,
        SCALE,
        # Values of the released code (D-66) for a ViT; it has ten epochs for RN50.
        *with_official(PROMPT_TRAINING, opt="sgd", epochs=5, warm_rounds=1),
        replace(
            TRAIN_VIEW,
            help="center: the image without augmentation; aug: stored augmentations (D-66)",
        ),
    ),
    defaults=Defaults(rounds=20, participation=None, clients=10, scheme="few-shot"),
    init=lambda ctx: {"ctx": prompts.init_context(ctx)},
    enter=keep_whole_optimiser,
    fit=fit,
    uploads=whole_server,
    deploy=deploy,
    predict=predict,
    needs=frozenset({"labels", "text tower"}),
    executions=("sequential",),
    check=prompts.check,
    trainable=count_of(*NAMES),
    zero_shot=prompts.zero_shot,
    scores_new_classes=lambda hp: not hp["csc"],
    diagnose=prompts.moved,
    paper_count=None,
    page=MethodPage(
        family="Prompts",
        formula=r"""
            t_c = g\big([v_1 \ldots v_n, \mathrm{name}_c]\big),
                \qquad p(c \mid x) = \mathrm{softmax}_c\big(100 \cos(f(x), t_c)\big),
                \qquad v \leftarrow \sum_i \frac{n_i}{N}\, v_i
        """,
        terms="""
            $f(x)$: the feature of an image; $g$: the text encoder; $v$: the context vectors; $t_c$: the text feature of
            class $c$; $n_i$, $N$: rows of client $i$ and of all clients.
        """,
        when="""
            Use it if uploads must be small, or if prompts must also work for new classes. It trains on cached image
            features, without an approximation.
        """,
        cite=("guo2022promptfl", "zhou2022coop"),
    ),
)
