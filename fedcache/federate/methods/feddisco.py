"""FedDisco: clients whose classes are far from even weigh less in the average.

Clients train as in FedAvg. Each client also sends one number: how far its class frequencies are from uniform. The
server gives clients with uneven classes less weight in the average.

Ye et al., "FedDisco: federated learning with discrepancy-aware collaboration", ICML 2023. n_k is the client's share of
the round's rows. d_k is the distance of its class shares from even shares, which are 1/C each. The server sets
    w <- sum_k p_k w_k,    p_k = ReLU(n_k - a d_k + b) / sum_j ReLU(n_j - a d_j + b).
As released (MediaBrain-SJTU/FedDisco, ``disco.py``) d_k is KL(shares || even) divided by its sum over the round's
clients; a = 0.5 and b = 0.1 are chosen for this d_k. ``metric=l2`` is the Euclidean distance as it is, which the
released code offers too: it is near 1 for a client of one class, so the same a and b give most of such clients weight
0. A run warns of a round in which a client has weight 0. If all clients have weight 0, they are weighted by n_k. d_k,
one number that shows the server how uneven a client's classes are, travels with n_k in every round. The server holds
all models of a round at once.

The released FedPCL code has no FedDisco, so preset ``official`` uses that code's settings of its other baselines (D-09,
D-13; docs/readings.md).
Special cases: a = 0 with b = 0 is ``fedavg`` (to rounding); a = 0 with b -> infinity weighs all alike.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedcache.federate.methods import fedavg
from fedcache.federate.methods.common import (
    FEAT_POST,
    INIT,
    MODEL,
    TRAINING,
    ClientData,
    Ctx,
    Hp,
    HParam,
    MethodPage,
    Tree,
    Uploads,
    UploadTensor,
    declare,
    model,
    over,
)
from fedcache.federate.methods.fedncm import class_rows

ROWS = "n"
GAP = "discrepancy"
"""Names of the client's number of rows and of its distance, [1] each, in an upload."""
SMALLER = "Use a smaller a or a larger b, for example --set a=0.1"
"""Hint of ``notice``."""


def discrepancy(shares: Tensor, metric: str) -> Tensor:
    """Distance of class shares [.., C] from even ones, of one client: |shares - 1/C| or KL(shares || 1/C)."""
    C = shares.shape[-1]
    if metric == "l2":
        square = ((shares - 1.0 / C) ** 2).sum(-1)
        return torch.sqrt(square)
    return torch.xlogy(shares, shares * C).sum(-1)


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """FedAvg's local epochs, and how uneven the client's classes are."""
    kept, up = fedavg.METHOD.fit(down, state, data, ctx)
    lead = (*ctx.lead, 1)
    count = class_rows(data, ctx)
    n = count.sum(-1, keepdim=True)
    shares = count / n.clamp(min=1.0)
    gap = discrepancy(shares, str(ctx.hp["metric"])).unsqueeze(-1)
    return kept, {**up, ROWS: n.expand(lead), GAP: gap.expand(lead)}


def uploads(server: Tree, ctx: Ctx) -> Uploads:
    """The model, the number of rows, and the distance."""
    return {
        **fedavg.uploads(server, ctx),
        ROWS: UploadTensor((1,), torch.float64, counts_rows=True),
        GAP: UploadTensor((1,), torch.float64),
    }


def part_of_sum(t: Tensor, otherwise: float | Tensor) -> Tensor:
    """Each client's share [S, ..] of the sum over clients; ``otherwise`` where the sum is 0."""
    total = t.sum(0, keepdim=True)
    divisor = torch.where(total > 0, total, 1.0)
    return torch.where(total > 0, t / divisor, otherwise)


def over_clients(gap: Tensor, metric: str) -> Tensor:
    """d_k of a round from the distances [S, ..] of its clients: ``kl`` divides by their sum, ``l2`` keeps them."""
    if metric == "l2":
        return gap
    return part_of_sum(gap, 0.0)


def raw_weights(up: Tree, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """The clients' shares n_k of the round's rows, and the raw weights n_k - a d_k + b; [S, .., 1] each."""
    share = up[ROWS] / up[ROWS].sum(0, keepdim=True)
    gap = over_clients(up[GAP], str(ctx.hp["metric"]))
    return share, share - ctx.number("a") * gap + ctx.number("b")


def weights(up: Tree, ctx: Ctx) -> Tensor:
    """p_k [S, ..] of the uploads of a round."""
    share, raw = raw_weights(up, ctx)
    # No client may have a negative weight. If all weights are 0, clients are averaged by their rows.
    return part_of_sum(torch.relu(raw), share).squeeze(-1)


def notice(up: Tree, ctx: Ctx) -> str:
    """A sentence about the clients that have weight 0 in this round; empty if there are none."""
    _, raw = raw_weights(up, ctx)
    clients = len(raw)
    zero = int((raw <= 0).sum())
    if zero == 0:
        return ""
    if zero == clients:
        return (
            f"all {clients} clients have weight 0 in FedDisco's average, so they are "
            f"averaged as in fedavg. {SMALLER}"
        )
    return f"{zero} of {clients} clients have weight 0 in FedDisco's average, so their training is lost. {SMALLER}"


def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """The models' average by p_k, summed in float64."""
    p = weights(up, ctx)
    out = dict(server)
    for name, stack in up.items():
        if name not in (ROWS, GAP):
            weighted = over(p, stack) * stack.double()
            out[name] = weighted.sum(0).to(stack.dtype)
    return out


def paper_count(width: int, classes: int, _clients: int, hp: Hp) -> tuple[int, int]:
    """All weights both ways, and two numbers up."""
    n = model.head_of(hp).paper_weights(width, classes)
    return n + 2, n


METHOD = replace(
    fedavg.METHOD,
    name="feddisco",
    paper="Ye et al., ICML 2023",
    summary="FedAvg with less weight for clients whose class frequencies are far from uniform.",
    hparams=(
        *declare(FEAT_POST, MODEL, INIT, TRAINING),
        HParam(
            "a",
            0.5,
            "float",
            "weight of the distance of a client's class shares from even shares",
            low=0.0,
            fit=False,
        ),
        HParam("b", 0.1, "float", "number added to every client's weight", low=0.0, fit=False),
        HParam(
            "metric",
            "kl",
            "choice",
            "distance of class shares; kl: divided by its sum over the clients; l2: not divided",
            choices=("kl", "l2"),
        ),
    ),
    executions=("sequential", "batched"),
    fit=fit,
    uploads=uploads,
    pool=lambda _hp: {"": "stack"},
    aggregate=aggregate,
    notice=notice,
    paper_count=paper_count,
    uneven_rows="clients of uneven classes weigh less",
    upload_descriptions={
        GAP: (
            "distance of its class shares from even ones",
            "how uneven its classes are",
        ),
    },
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            w \leftarrow \sum_k p_k w_k,
                \qquad p_k = \frac{\mathrm{ReLU}(n_k - a\, d_k + b)}{\sum_j \mathrm{ReLU}(n_j - a\, d_j + b)}
        """,
        terms="""
            $w_k$: the model of client $k$; $n_k$: its share of the rows; $d_k$: the Kullback-Leibler divergence of its
            class frequencies from uniform ones, divided by the sum of these divergences over the clients in the round;
            $a$, $b$: constants.
        """,
        when="""
            Use it if some clients have all classes and others have one or two.
        """,
        cite=("ye2023feddisco",),
    ),
)
