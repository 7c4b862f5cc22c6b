"""Non-FL, FLESD's upper reference (table 1): one SimCLR encoder on the union of all clients' rows; nothing travels.

One SimCLR encoder is trained without labels on the images of all clients together. This is not federated: it is the
upper reference for ``flesd``.
"""

from __future__ import annotations

from dataclasses import replace

from fedcache.federate.methods.common import MethodPage, declare, without
from fedcache.federate.methods.fedavg_simclr import METHOD as FEDAVG_SIMCLR

METHOD = replace(
    FEDAVG_SIMCLR,
    name="non-fl",
    summary="One SimCLR encoder on all clients' rows; not federated.",
    hparams=declare(without(FEDAVG_SIMCLR.hparams, "agg"), epochs=200),
    defaults=replace(FEDAVG_SIMCLR.defaults, rounds=1),
    one_shot=True,
    central=True,
    paper_count=lambda *_: (0, 0),
    depends_on_origin="trained by gradient steps",
    page=MethodPage(
        family="Training the encoder itself",
        formula=r"""
            g = \mathrm{arg}\min\ \mathrm{mean}_i\, \ell_i \quad \text{over the rows of all clients together}
        """,
        terms=r"""
            $g$: the encoder; $\ell_i$: the SimCLR loss of image $i$, as in [fedavg-simclr](fedavg-simclr.md).
        """,
        when="""
            Use it as the central reference in FLESD's tables: it trains on the rows of all clients.
        """,
        cite=("shi2022flesd", "chen2020simclr"),
    ),
)
