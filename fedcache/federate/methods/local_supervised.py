"""Local supervised ResNet-18 of every client: the comparison in FLESD's figure 2.

Every client trains a ResNet-18 on its own labelled images, and sends nothing. Each model is scored on all test rows, by
its own classifier or (``score=probe``) by a linear probe on its trunk, which is trained on the rows of all clients. The
reported accuracy is the mean over clients.

Shi et al., "Towards communication-efficient and privacy-preserving federated representation learning" (FLESD), section
3: supervised training on skewed clients loses more than SimCLR does. ``fedavg-scratch`` with a single client trains one
such model on all rows. The paper does not describe the augmentation. Preset ``paper`` has none. Preset ``official``
augments as the released code does (D-91): a random crop and a random flip; images of up to 32 pixels are padded by 4
pixels before they are cropped. ``fidelity`` is approx, as for ``fedavg-scratch``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedcache.federate.methods import fedavg_scratch as scratch
from fedcache.federate.methods.common import (
    ClientData,
    Ctx,
    Defaults,
    HParam,
    MethodPage,
    Tree,
    declare,
    everywhere,
    sends_nothing,
    simclr,
    with_official,
    without,
)


def enter(_down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """The client's own model; all start from the same draw."""
    return scratch.init(ctx)


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """Local epochs from the client's last model; nothing is sent."""
    # ``scratch.fit`` returns as state the trained values of the tensors in ``state``. Here these are the whole model
    # (``enter``).
    return scratch.fit(down, state, data, ctx)[0], {}


def deploy(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The model, with a linear probe if ``score=probe``."""
    if ctx.hp["score"] == "probe":
        return simclr.probe(down, state, data, ctx)
    return {**down, **state}


def predict(down: Tree, state: Tree, data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """Logits [N, C] of the classifier or the probe."""
    if ctx.hp["score"] == "probe":
        return simclr.predict(down, state, data, x, ctx)
    return scratch.predict(down, state, data, x, ctx)


TRAINING_HPARAMS = declare(
    without(scratch.METHOD.hparams, "agg"), wd=1e-6, batch=1024, epochs=100, drop_last=False
)


METHOD = replace(
    scratch.METHOD,
    name="local-supervised",
    paper="reference of FLESD (Shi et al., 2022), figure 2",
    summary="Every client trains its own ResNet with labels; its classifier or a linear probe is "
    "scored.",
    hparams=(
        *with_official(TRAINING_HPARAMS, augment="supervised"),
        HParam(
            "score",
            "classifier",
            "choice",
            "what is scored on the trained ResNet; classifier: its own classifier; probe: a "
            "linear probe",
            choices=("classifier", "probe"),
        ),
        *simclr.PROBE,
    ),
    defaults=Defaults(rounds=1, participation=None, clients=6, scheme="flesd"),
    init=lambda _ctx: {},
    enter=enter,
    fit=fit,
    uploads=sends_nothing,
    deploy=deploy,
    predict=predict,
    protocol=everywhere,
    paper_count=lambda *_: (0, 0),
    page=MethodPage(
        family="Training the encoder itself",
        formula=r"""
            w_i = \mathrm{arg}\min_w\ -\frac{1}{n_i} \sum_{(x, y) \in D_i} \log
                \mathrm{softmax}_y\big(Q(\mathrm{trunk}(x))\big)
        """,
        terms="""
            $w_i$: all weights of client $i$; $Q$: the classifier; $D_i$: the client's $n_i$ rows.
        """,
        when="""
            Use it as the supervised reference of FLESD (figure 2).
        """,
        cite=("shi2022flesd",),
    ),
)
