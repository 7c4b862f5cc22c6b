"""Tip-Adapter on each client: zero-shot logits and a cache of the client's own labelled features; nothing is sent.

Each client stores the features of its labelled rows. A prediction adds two scores: the zero-shot score of CLIP, and the
labels of stored rows that resemble the image. Nothing is trained or sent.

Zhang et al., "Tip-Adapter: training-free adaption of CLIP for few-shot classification", ECCV 2022:
    logits = s I.T + a sum_n onehot(y_n) exp(-b (1 - I.F_n))
with unit features I of the image, T of the class texts and F_n of the cached rows: all training rows of the client.

Special cases: a = 0 is ``clip-zs``; b = 0 adds a times the number of cached rows of the class to every row alike.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from fedcache.federate.methods import clip_zs
from fedcache.federate.methods.common import (
    UNIT_FEATURES,
    ClientData,
    Ctx,
    Defaults,
    HParam,
    MethodPage,
    Tree,
    affine,
    model,
    over,
    personal_model,
)

KEYS = 1024
"""Cached rows that are compared at once, which limits the memory of similarities."""

CACHE = (
    UNIT_FEATURES,
    HParam("a", 1.0, "float", "weight of the cache; 0 is clip-zs, 0.1 to 5 are usual", low=0.0),
    HParam("b", 5.5, "float", "sharpness of the cache; 0.1 to 12 are usual", low=0.0),
    HParam("scale", 100.0, "float", "logit scale s of the zero-shot term", low=1e-6),
)


def cached_logits(x: Tensor, keys: Tensor, value: Tensor, ctx: Ctx) -> Tensor:
    """s I.T + a sum_n value_n exp(-b (1 - I.F_n)), [.., N, C].

    Args:
        x: [.., N, D] features; brought to unit length.
        keys: [.., n, D] unit rows F_n.
        value: [.., n, C] one-hot rows, zero for padding.
        ctx: text features, ``a``, ``b``, ``scale``.
    """
    unit = normalize(x, dim=-1)
    text = affine(unit, ctx.text)
    logits = over(ctx.number("scale"), text) * text
    key_blocks = torch.split(keys, KEYS, -2)
    value_blocks = torch.split(value, KEYS, -2)
    for F, onehot in zip(key_blocks, value_blocks, strict=True):
        distance = 1.0 - unit @ F.mT
        weight = torch.exp(-over(ctx.number("b"), distance) * distance)
        logits = logits + over(ctx.number("a"), logits) * (weight @ onehot)
    return logits


def personal_part(_down: Tree, _state: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The cache: unit features F_n [.., n, D] of the client's training rows, and their labels [.., n] (-1: padding)."""
    rows, mask = data.full()
    return {
        "keys": normalize(rows, dim=-1),
        "label": torch.where(mask > 0, data.labels(), -1),
    }


def predict(_down: Tree, cache: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """The logits with the client's own training rows as the cache."""
    label = cache["label"]
    real = (label >= 0).unsqueeze(-1)
    value = one_hot(label.clamp(min=0), ctx.env.classes) * real
    return cached_logits(x, cache["keys"], value.to(x.dtype), ctx)


METHOD = replace(
    clip_zs.METHOD,
    name="tip-local",
    paper="Zhang et al., ECCV 2022",
    summary="Zero-shot scores plus a cache of the client's own labelled features; no traffic.",
    hparams=CACHE,
    defaults=Defaults(rounds=1, participation=None, clients=10, scheme="few-shot"),
    personal_part=personal_part,
    predict=predict,
    protocol=personal_model,
    needs=frozenset({"labels", "text"}),
    zero_shot=model.by_text,
    depends_on_origin="a cache of cosines",
    page=MethodPage(
        family="With class texts",
        formula=r"""
            \ell = s\, f T^\top + a \sum_n \mathrm{onehot}(y_n)\, e^{-b\, (1 - f \cdot F_n)}
        """,
        terms="""
            $f$: the unit feature of an image; $T$: the unit features of the class texts; $s$: the scale of the logits;
            $F_n$, $y_n$: the client's own labelled features; $a$, $b$: weight and sharpness of the cache.
        """,
        when="""
            Use it if a client has few labelled rows and must not send anything. Its model contains the features of its
            rows.
        """,
        cite=("zhang2022tip",),
    ),
)
