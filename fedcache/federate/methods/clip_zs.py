"""CLIP zero-shot: the class whose text feature is nearest; nothing is trained and no label is read.

Each image is assigned to the class whose text feature is most similar to the image feature. Nothing is trained and no
label is read. The server sends the text features to the clients once.

Radford et al., ICML 2021. The logits are s I T', with the unit features I of the images and T of the class texts.

The default is s = 1, because eq 2 of the ``fst-cbdg`` paper is a softmax of I T' without a scale. CLIP learned
s = exp(logit_scale) = 100, the value of preset ``official``. The argmax is the same for every s > 0 (T-Z1; see tests/).
"""

from __future__ import annotations

from torch import Tensor

from fedcache.federate.methods.common import (
    UNIT_FEATURES,
    ClientData,
    Ctx,
    Defaults,
    HParam,
    Method,
    MethodPage,
    Tree,
    affine,
    sends_nothing,
)


def predict(_down: Tree, _state: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """The logits s I T', [.., N, C]."""
    return ctx.number("scale") * affine(x, ctx.text)


METHOD = Method(
    name="clip-zs",
    paper="Radford et al., ICML 2021",
    summary="Zero-shot: each image gets the class whose text feature is nearest.",
    hparams=(
        UNIT_FEATURES,
        HParam(
            "scale",
            1.0,
            "float",
            "logit scale s; the prediction does not depend on it",
            low=1e-6,
            official=100.0,
        ),
    ),
    defaults=Defaults(rounds=1, participation=None, clients=100, scheme="iid"),
    init=lambda _ctx: {},
    fit=lambda _down, _state, _data, _ctx: ({}, {}),
    uploads=sends_nothing,
    predict=predict,
    scores_new_classes=lambda _hp: True,
    needs=frozenset({"text"}),
    gradient=False,
    one_shot=True,
    paper_count=lambda *_: (0, 0),
    depends_on_origin="logits are cosines with class texts",
    page=MethodPage(
        family="With class texts",
        formula=r"""
            \hat y = \mathrm{arg}\max_c\ s\, f \cdot t_c
        """,
        terms="""
            $f$: the unit feature of an image; $t_c$: the unit feature of the text of class $c$; $s$: the scale of the
            logits.
        """,
        when="""
            Run it before any other method: it needs no labels, no clients and no training. A trained method that is not
            more accurate is not worth its traffic. If a few classes are predicted too often, set `feat_post=center`.
            This subtracts the mean feature of all training images; each client sends one sum for the mean. The setting
            helps if all classes are about equally frequent, and lowers the accuracy if they are not.
        """,
        cite=("radford2021clip",),
    ),
)
