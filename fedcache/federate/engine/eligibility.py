"""Which clients of a run can train, and what a person is told of the others and of those that weigh the most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from fedcache.errors import FederatedRunError
from fedcache.federate.engine.client_data import ClientRows
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.local_training import batch_sizes
from fedcache.federate.engine.method import Method
from fedcache.federate.trust.policy import TrustPolicy
from fedcache.federate.trust.weights import weight_warnings


def eligible_clients(
    method: Method, hp: Hp, clients: Sequence[ClientRows], public: int, trust: TrustPolicy
) -> tuple[list[int], list[str]]:
    """Numbers of the clients with something to train on and no more than is allowed, and warnings.

    The warnings of a private run name nobody.

    Raises FederatedRunError, when no client is left, or the public set has no row.

    Args:
        method: what they train.
        hp: its hyperparameters.
        clients: all of them.
        public: how many of the first hold what everybody reads, and rest.
        trust: how many rows a client may have, and how much it may weigh.
    """
    if public and not len(clients[0].train):
        raise FederatedRunError(
            f"{method.name} reads client 0 as the public set, and it has no training rows.",
            "Deal rows to it, for example --scheme flesd.",
        )
    kept, empty, short, large = [], [], [], []
    for i, c in enumerate(clients):
        if i < public:
            continue
        n = len(c.train)
        if n == 0:
            empty.append(c.name)
        elif trust.max_rows is not None and n > trust.max_rows:
            large.append(c.name)
        elif method.gradient and "batch" in hp and not batch_sizes(min(n, 2 * cast(int, hp["batch"])), hp):
            short.append(c.name)
        else:
            kept.append(i)
    said = []
    for names, why in (
        (empty, "have no training rows"),
        (short, "have too few rows for one batch"),
        (large, f"have more rows than --max-rows-per-client {trust.max_rows}"),
    ):
        if names and trust.protects:  # who has how many rows is nothing that noise was added to
            said.append(f"clients that {why} are skipped; who they are is not told, as this run is private")
        elif names:
            listed = ", ".join(names[:5]) + (" .." if len(names) > 5 else "")
            said.append(f"{len(names)} of {len(clients)} clients {why} and are skipped: {listed}")
    if not kept:
        raise FederatedRunError(
            f"None of the {len(clients)} clients can train: {'; '.join(said)}.",
            "Use fewer clients, more rows, or a smaller --set batch=.",
        )
    if trust.weighs_by_rows(method, hp):
        rows = {c: float(len(clients[c].train)) for c in kept}
        said += weight_warnings({c: clients[c].name for c in kept}, rows, trust.max_share)
    return kept, said
