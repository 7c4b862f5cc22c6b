"""Min-Local, FLESD's lower bound (table 1): every client trains its own SimCLR encoder and nothing travels.

Every client trains its own SimCLR encoder without labels, and sends nothing. A linear probe scores each encoder. The
reported accuracy is that of the worst client.

Each encoder is probed on all labelled rows and scored on all test rows; the number reported is the minimum over
clients, which is our interpretation of the name (the paper calls it the local lower bound and says no more).
"""

from __future__ import annotations

from dataclasses import replace

from fedcache.federate.methods.common import (
    ClientData,
    Ctx,
    MethodPage,
    Tree,
    declare,
    everywhere,
    sends_nothing,
    simclr,
    without,
)
from fedcache.federate.methods.fedavg_simclr import METHOD as FEDAVG_SIMCLR


def enter(down: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """The client's own encoder."""
    return {**simclr.init(ctx), **simclr.enter(down, data, ctx)}


METHOD = replace(
    FEDAVG_SIMCLR,
    name="min-local",
    summary="Every client trains its own SimCLR encoder; the worst encoder is reported.",
    hparams=declare(without(FEDAVG_SIMCLR.hparams, "agg"), epochs=200),
    defaults=replace(FEDAVG_SIMCLR.defaults, rounds=1),
    init=lambda _ctx: {},
    enter=enter,
    fit=simclr.fit_with(simclr.loss, send=False),
    uploads=sends_nothing,
    protocol=everywhere,
    headline="min",
    mixed=frozenset({"backbones", "hidden", "proj"}),
    received=lambda _down, _ctx: 0,
    paper_count=lambda *_: (0, 0),
    page=MethodPage(
        family="Training the encoder itself",
        formula=r"""
            \min_k\ \mathrm{accuracy}\big(\text{linear probe on } g_k\big),
                \qquad g_k \text{ by SimCLR on client } k\text{'s rows}
        """,
        terms="""
            $g_k$: the encoder of client $k$.
        """,
        when="""
            Use it as the lower bound in FLESD's tables, because clients exchange nothing.
        """,
        cite=("shi2022flesd",),
    ),
)
