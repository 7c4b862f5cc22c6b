"""FedYogi: FedAvg whose server takes Yogi's steps, in which the second moment falls slowly.

Clients train as in FedAvg. The server treats the average change of the weights as a gradient and applies Yogi to it.
Yogi resembles Adam, but its second moment falls slowly.

Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 2: as ``fedadam`` with
    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2).
So in a round v changes by (1 - beta2) Delta^2, up or down. Where Delta^2 is larger than v, v grows as Adam's v does
from 0. Special cases: those of ``fedadam``; from v = 0, Adam and Yogi give the same v.
"""

from __future__ import annotations

from torch import Tensor

from fedcache.federate.methods.common import MethodPage
from fedcache.federate.methods.fedadam import BETA2, server_optimiser


def yogi(v: Tensor, square: Tensor, new_share: float | Tensor) -> Tensor:
    """v - (1 - beta2) Delta^2 sign(v - Delta^2)."""
    return v - new_share * square * (v - square).sign()


METHOD = server_optimiser(
    "fedyogi",
    "FedAvg with Yogi as the server's optimiser.",
    yogi,
    BETA2,
    rate=0.03,
    beta1=0.9,
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            \begin{aligned}
            m &\leftarrow \beta_1 m + (1 - \beta_1)\, \Delta,
                \qquad v \leftarrow v - (1 - \beta_2)\, \Delta^2\, \mathrm{sign}(v - \Delta^2) \\
            w &\leftarrow w + \eta_g\, \frac{m}{\sqrt{v} + \tau}, \qquad \Delta = \sum_i \frac{n_i}{N}\, w_i - w
            \end{aligned}
        """,
        terms=r"""
            $w$: the global model; $w_i$: the model of client $i$ after local training; $n_i$: its training rows; $N$:
            the training rows of all clients in the round; $m$, $v$: first and second moment; $\beta_1$, $\beta_2$:
            their decay; $\eta_g$: `lr_g`; $\tau$: a small constant.
        """,
        when="""
            Use it like `fedadam` if some updates are much larger than others, because its second moment falls slowly.
        """,
        cite=("reddi2021adaptive",),
    ),
)
