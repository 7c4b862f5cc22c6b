"""FLESD-cc: FLESD with one exchange after all local epochs (table 1, "constant communication").

This is ``flesd`` with a single exchange. Clients first finish all their local epochs, and then send the similarities of
the public images once. The server trains the student from them.
"""

from __future__ import annotations

from dataclasses import replace

from fedcache.federate.methods.common import Hp, MethodPage, declare, simclr, without
from fedcache.federate.methods.flesd_head import METHOD as HEAD


def needs(hp: Hp) -> frozenset[str]:
    """The inputs of ``flesd`` for an encoder on images, and of ``flesd-head`` for one on features."""
    return simclr.needs(hp) | {"public"}


METHOD = replace(
    HEAD,
    name="flesd-cc",
    summary="FLESD with one exchange after 200 local epochs.",
    hparams=(
        simclr.ENCODER,
        *declare(without(HEAD.hparams, "encoder"), epochs=200),
    ),
    defaults=replace(HEAD.defaults, rounds=1),
    one_shot=True,
    needs_for=needs,
    depends_on_origin="trained by gradient steps",
    page=MethodPage(
        family="Training the encoder itself",
        formula=r"""
            M = \frac{1}{K} \sum_k \exp\big(R_k R_k^\top / \tau_T\big) \quad \text{once, after all local epochs}
        """,
        terms=r"""
            $R_k$: the encodings of the public images by client $k$; $K$: the number of clients; $\tau_T$: the
            temperature. The student is trained as in [flesd](flesd.md).
        """,
        when="""
            Use it like `flesd` if only one exchange is possible. The traffic does not depend on the number of local
            epochs.
        """,
        cite=("shi2022flesd",),
    ),
)
