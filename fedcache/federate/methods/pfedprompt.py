"""pFedPrompt: one prompt for all, trained as in PromptFL, and on each client an attention over its own stored features.

All clients learn one text prompt together, as in ``promptfl``. When a client predicts, it adds scores from its own
stored training features: rows that resemble the image vote for their labels. Only the prompt travels.

Guo et al., "pFedPrompt: learning personalized prompt for vision-language models in federated learning", WWW 2023. Its
abstract: users agree in the space of texts, where clients learn a prompt together. They differ in the space of images,
to which each client adapts without parameters. Neither equations nor code were available; other papers call the second
part an attention on the client. The first part is ``promptfl`` with all its switches. The second is our interpretation
(D-107): a prediction attends to the client's own training rows F_n of unit length, n = 1 .. N_k, and to nothing else,
    w_n = softmax_n(b x.F_n),
    ``values=labels``:    logits = s x.T' + a sum_n w_n onehot(y_n)
    ``values=features``:  logits = s z.T',  z = x + a sum_n w_n F_n, made unit.
``values=labels`` is kernel regression of the labels, added to the prompt's logits as ``tip-local`` adds its cache. The
weights w_n sum to 1, so a client with many rows is no more confident than one with few. a is in units of logits: with s
= 100, a = 30 is worth a cosine of 0.3. Both a and b are ours, chosen on validation rows of digits (glyph-clip,
Dirichlet 0.1).

Nothing but the prompt's vectors travels. A client's model holds its training features and their labels.

Special cases: a = 0 is ``promptfl`` to the bit, scored client by client; b = 0 adds the shares of the client's classes
to every row alike; b -> infinity adds the nearest row's label.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from fedcache.federate.methods import promptfl, tip_local
from fedcache.federate.methods.common import (
    ClientData,
    Ctx,
    HParam,
    MethodPage,
    Tree,
    affine,
    is_zero,
    personal_model,
    prompts,
)


def attended(x: Tensor, keys: Tensor, values: Tensor, b: float | Tensor) -> Tensor:
    """sum_n softmax_n(b x.F_n) v_n, [N, V].

    Args:
        x: [N, D] unit rows.
        keys: [n, D] unit rows F_n.
        values: [n, V] their values.
        b: sharpness.
    """
    key_blocks = torch.split(keys, tip_local.KEYS)
    value_blocks = torch.split(values, tip_local.KEYS)
    # Similarities are taken relative to the largest, so that no exponential overflows.
    nearest = torch.stack([(x @ F.mT).amax(-1) for F in key_blocks]).amax(0)
    total = x.new_zeros(())
    mass = x.new_zeros(())
    for F, v in zip(key_blocks, value_blocks, strict=True):
        weight = torch.exp(b * (x @ F.mT - nearest.unsqueeze(-1)))
        total = total + weight @ v
        mass = mass + weight.sum(-1, keepdim=True)
    return total / mass


def predict(down: Tree, own: Tree, data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """Logits [N, C]; without a personal part, only those of the prompt."""
    a = ctx.number("a")
    if not own or is_zero(a) or not len(own["keys"]):
        return promptfl.predict(down, {}, data, x, ctx)
    b = ctx.number("b")
    unit = normalize(x, dim=-1)
    if ctx.hp["values"] == "features":
        moved = unit + a * attended(unit, own["keys"], own["keys"], b)
        z = normalize(moved, dim=-1)
        return prompts.scale(ctx) * affine(z, down["T"])
    onehot = one_hot(own["label"], ctx.env.classes).to(x.dtype)
    votes = attended(unit, own["keys"], onehot, b)
    return promptfl.predict(down, {}, data, x, ctx) + a * votes


METHOD = replace(
    promptfl.METHOD,
    name="pfedprompt",
    paper="after Guo et al., pFedPrompt, WWW 2023",
    summary="A shared prompt, plus attention of each client to its own labelled features.",
    hparams=(
        *promptfl.METHOD.hparams,
        HParam(
            "a", 30.0, "float", "weight of the attention; 0 is promptfl (D-107)", low=0.0, fit=False
        ),
        HParam("b", 30.0, "float", "sharpness of the attention (D-107)", low=0.0, fit=False),
        HParam(
            "values",
            "labels",
            "choice",
            "values of the attention; labels: the labels of the client's rows; features: the "
            "rows themselves (D-107)",
            choices=("labels", "features"),
            fit=False,
        ),
    ),
    personal_part=tip_local.personal_part,
    predict=predict,
    protocol=personal_model,
    page=MethodPage(
        family="Prompts",
        formula=r"""
            \ell = s\, f T^\top + a \sum_n w_n\, \mathrm{onehot}(y_n),
                \qquad w_n = \mathrm{softmax}_n(b\, f \cdot F_n)
        """,
        terms="""
            $f$: the unit feature of an image; $T$: the class texts with the learned prompt; $s$: the scale of the
            logits; $F_n$, $y_n$: the client's own labelled features; $a$, $b$: weight and sharpness of the votes.
        """,
        when="""
            Use it if one prompt fits all clients, but their images differ. The model of a client contains the features
            of its rows.
        """,
        cite=("guo2023pfedprompt",),
    ),
)
