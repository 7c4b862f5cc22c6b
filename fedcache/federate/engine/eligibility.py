"""Which clients of a run can train, and what a person is told of the others and of those that weigh the most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from fedcache.errors import FederatedRunError
from fedcache.federate.engine.hyperparameters import Hp, has_batchnorm
from fedcache.federate.engine.local_training import batch_sizes
from fedcache.federate.engine.method import Method
from fedcache.federate.partition.client_table import ClientRows, names_of, train_sizes
from fedcache.federate.partition.row_lists import sorted_once
from fedcache.federate.trust.policy import TrustPolicy
from fedcache.federate.trust.weights import weight_warnings


def eligible_clients(
    method: Method, hp: Hp, clients: Sequence[ClientRows], public: int, trust: TrustPolicy
) -> tuple[np.ndarray, list[str]]:
    """Numbers (int64, ascending) of the clients with something to train on, and no more than is allowed; and warnings.

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
    names, rows = names_of(clients), train_sizes(clients)
    asked = np.arange(len(clients)) >= public
    empty = asked & (rows == 0)
    large = asked & ~empty & (rows > (np.inf if trust.max_rows is None else trust.max_rows))
    short = asked & ~empty & ~large & np.isin(rows, _too_few(method, hp, rows))
    kept = np.flatnonzero(asked & ~empty & ~large & ~short)
    few, normalised = "have too few rows for one batch", has_batchnorm(hp)
    if normalised:
        few += " (BatchNorm needs two of them, bn=false one)"
    said = []
    for skipped, why in (
        (empty, "have no training rows"),
        (short, few),
        (large, f"have more rows than --max-rows-per-client {trust.max_rows}"),
    ):
        count = int(skipped.sum())
        if count and trust.protects:  # who has how many rows is nothing that noise was added to
            said.append(
                f"clients that {why} are skipped; who they are is not told, as this run is private"
            )
        elif count:
            listed = ", ".join(names[i] for i in np.flatnonzero(skipped)[:5].tolist()) + (
                " .." if count > 5 else ""
            )
            said.append(f"{count} of {len(clients)} clients {why} and are skipped: {listed}")
    if not len(kept):
        raise FederatedRunError(
            f"None of the {len(clients)} clients can train: {'; '.join(said)}.",
            f"Use fewer clients, more rows, or a smaller --set batch={'; or --set bn=false' * normalised}.",
        )
    if trust.weighs_by_rows(method, hp):
        said += weight_warnings(names, kept, rows[kept].astype(np.float64), trust.max_share)
    return kept, said


def _too_few(method: Method, hp: Hp, rows: np.ndarray) -> list[int]:
    """The numbers of rows, of those that occur, that make no batch."""
    if not method.gradient or "batch" not in hp:
        return []
    few = sorted_once(
        rows[rows <= 2 * cast(int, hp["batch"])]
    ).tolist()  # above there is a whole batch
    return [n for n in few if not batch_sizes(n, hp)]
