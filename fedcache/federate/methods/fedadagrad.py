"""FedAdagrad: FedAvg whose server takes Adagrad's steps, which shorten as changes add up.

Clients train as in FedAvg. The server does not take their average directly: it divides the change of each weight by the
square root of all its squared changes so far. The steps therefore become shorter with every round.

Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 2: as ``fedadam`` with v <- v + Delta^2 and no
first moment (beta1 = 0), so steps shorten round by round. Special cases: those of ``fedadam``; no step is longer than
lr_g.
"""

from __future__ import annotations

from torch import Tensor

from fedcache.federate.methods.common import MethodPage
from fedcache.federate.methods.fedadam import server_optimiser


def adagrad(v: Tensor, square: Tensor, _new_share: float | Tensor) -> Tensor:
    """v + Delta^2."""
    return v + square


METHOD = server_optimiser(
    "fedadagrad",
    "FedAvg with Adagrad as the server's optimiser.",
    adagrad,
    rate=0.01,
    beta1=0.0,
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            v \leftarrow v + \Delta^2, \qquad w \leftarrow w + \eta_g\, \frac{\Delta}{\sqrt{v} + \tau},
                \qquad \Delta = \sum_i \frac{n_i}{N}\, w_i - w
        """,
        terms=r"""
            $w$: the global model; $w_i$: the model of client $i$ after local training; $n_i$: its training rows; $N$:
            the training rows of all clients in the round; $v$: the sum of squared changes; $\eta_g$: `lr_g`; $\tau$: a
            small constant.
        """,
        when="""
            Use it like `fedadam` for short trainings that should converge, because its steps shrink in every round.
        """,
        cite=("reddi2021adaptive",),
    ),
)
