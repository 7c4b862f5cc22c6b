"""FedAdagrad: FedAvg whose server divides by all it has moved so far.

Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 2: as ``fedadam`` with v <- v + Delta^2 and no
first moment (beta1 = 0), so steps shorten round by round. Limits: those of ``fedadam``; no step is longer than lr_g.
"""

from __future__ import annotations

from torch import Tensor

from fedcache.federate.methods.common import MethodPage
from fedcache.federate.methods.fedadam import server_optimiser


def adagrad(v: Tensor, square: Tensor, _rest: float | Tensor) -> Tensor:
    """v + Delta^2."""
    return v + square


METHOD = server_optimiser(
    "fedadagrad",
    "FedAvg whose server divides by all it has moved so far.",
    adagrad,
    0.01,
    0.0,
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            v \leftarrow v + \Delta^2, \qquad w \leftarrow w + \eta_g\, \frac{\Delta}{\sqrt{v} + \tau},
                \qquad \Delta = \sum_i \frac{n_i}{N}\, w_i - w
        """,
        when="Like `fedadam`, with steps that shrink in every round: for short trainings that should converge.",
        cite=("reddi2021adaptive",),
    ),
)
