"""FedProx of SimCLR encoders, a baseline of FLESD (table 1): eq 3 plus (mu/2) |w - w_g|^2.

Clients train SimCLR encoders without labels, as in ``fedavg-simclr``. A penalty keeps each encoder near the received
one. The server averages the encoders.

The released code leaves out the factor 1/2 (D-31, ``prox_half=false``). Its README has mu = 1e-4; the values that the
paper tries are not legible. Special case: mu = 0 is ``fedavg-simclr`` bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedcache.federate.methods.common import Ctx, HParam, MethodPage, Tree, simclr
from fedcache.federate.methods.fedavg_simclr import METHOD as FEDAVG_SIMCLR
from fedcache.federate.methods.fedprox import PROX_HALF, pulled


def loss(p: Tree, batch: Tree, down: Tree, ctx: Ctx) -> tuple[Tensor, Tree]:
    """SimCLR's loss plus (mu/2) |w - w_g|^2."""
    value, updates = simclr.loss(p, batch, down, ctx)
    return pulled(value, p, down, simclr.trained(ctx.hp), ctx), updates


METHOD = replace(
    FEDAVG_SIMCLR,
    name="fedprox-simclr",
    summary="FedAvg of SimCLR encoders with the penalty of FedProx.",
    hparams=(
        *FEDAVG_SIMCLR.hparams,
        HParam(
            "mu",
            1e-4,
            "float",
            "strength of the pull towards the received encoder; 0 is fedavg-simclr",
            low=0.0,
        ),
        PROX_HALF,
    ),
    fit=simclr.fit_with(loss, send=True),
    page=MethodPage(
        family="Training the encoder itself",
        formula=r"""
            L = \mathrm{mean}_i\, \ell_i + \frac{\mu}{2} \lVert w - w_g \rVert^2,
                \qquad \ell_i = -\log \frac{e^{z_i \cdot z_i' / \tau}}{\sum_{a \neq i} e^{z_i \cdot z_a / \tau}}
        """,
        terms=r"""
            $z_i$, $z_i'$: the embeddings of two augmentations of image $i$; $\tau$: the temperature; $w$: the client's
            weights; $w_g$: the received weights; $\mu$: `mu`.
        """,
        when="""
            Use it like `fedavg-simclr`, if clients drift apart.
        """,
        cite=("shi2022flesd", "li2020fedprox"),
    ),
)
