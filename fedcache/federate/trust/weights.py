"""How much a client weighs where its number of rows counts: a bound on the number, a cap on the share.

A number of rows is measured in a simulation and claimed in a federation, and a mean by rows gives whoever claims enough
of them all of it. So a claim far above the others is told or refused, and no client need have more than a given share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

FAR_OUT = 10
"""Times the median of all clients' rows, above which a number is far out.

Sizes of honest clients spread over about one order of magnitude: of a log-normal law with sigma 1, as wide as the
federated benchmarks have it, 1 % of the clients lie above. Below three clients no number is far out, as nobody can say
which of two is wrong.
"""

ROUNDING = 1e-12
"""Relative, of shares."""

NAMED = 3
"""Clients that are warned of one by one, the largest first."""

FEWEST = 3
"""Clients from which on there is a median to compare with."""


def far_out_limit(rows: Sequence[float] | np.ndarray) -> float | None:
    """The number of rows above which a client's is far out: ``FAR_OUT`` times the median of those that have any.

    The lower median, so that it takes more than half of the clients to raise it. None for fewer than ``FEWEST``.
    """
    known = np.asarray(rows, np.float64)
    known = known[known > 0]
    if len(known) < FEWEST:
        return None
    middle = (len(known) - 1) // 2
    return FAR_OUT * float(np.partition(known, middle)[middle])


def capped_weights(rows: Sequence[float], share: float) -> list[float]:
    """min(n_i, t), with the largest t for which no weight is more than ``share`` of their sum.

    Args:
        rows: n_i of the clients of a round, each at least 0.
        share: S in (0, 1]. Where S m <= 1 for the m clients that have rows, these all weigh the same.
    """
    n = np.asarray(rows, np.float64)
    rising = np.sort(n[n > 0])
    if share * len(rising) <= 1.0:
        return [float(w) for w in np.minimum(n, rising[0] if len(rising) else 0.0)]
    # With the k largest cut to t, and the others' sum b_k:  t = S (k t + b_k). The first k that leaves no one above t.
    k, largest, below = 0, rising[::-1], np.cumsum(rising)[::-1]
    while largest[k] * (1.0 - k * share) > share * below[k] * (1.0 + ROUNDING):
        k += 1
    return (
        [float(w) for w in np.minimum(n, share * below[k] / (1.0 - k * share))] if k else list(rows)
    )


def reduced_weights(rows: Mapping[int, float], share: float | None) -> dict[int, float]:
    """Client -> its capped weight, for the clients of a round whose rows do not weigh in full."""
    if share is None:
        return {}
    weights = capped_weights(list(rows.values()), share)
    return {c: w for (c, n), w in zip(rows.items(), weights, strict=True) if w != n}


def weight_warnings(
    names: Mapping[int, str] | Sequence[str],
    clients: np.ndarray,
    rows: np.ndarray,
    share: float | None,
) -> list[str]:
    """What a person is told of the largest clients, where uploads are averaged or added by rows.

    Args:
        names: of all clients, by number.
        clients: int64 [k], numbers of those that may take part.
        rows: float64 [k], n_i of these.
        share: the cap on a client's share, None for none.
    """
    whole, limit = float(rows.sum()), far_out_limit(rows)
    if share is not None:
        found = rows > share * whole
    else:
        found = (
            (rows > limit) | (rows > whole / 2) if limit is not None else np.zeros(len(rows), bool)
        )
    said = []
    places = np.flatnonzero(found)
    for place in places[np.argsort(-rows[places], kind="stable")][:NAMED].tolist():
        c, n = int(clients[place]), float(rows[place])
        has = f"client {c} ({names[c]!r}) has {n:,.0f} rows, {n / whole:.0%} of all"
        if share is None:
            said.append(
                f"{has}: more than half of them, or than {FAR_OUT} times the median, and uploads weigh by rows "
                "(--max-share 0.2 caps its weight, --aggregate median gives every client one vote)"
            )
        else:
            said.append(f"{has}: --max-share {share:g} caps its weight in every round")
    return said
