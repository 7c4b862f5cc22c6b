"""One dataset dealt by Dirichlet shares: ``dirichlet``, ``lda`` (FST-CBDG, FedNTD) and ``flesd`` (FLESD).

All three draw p_c ~ Dir(alpha 1_M) for every class c. They differ in what a draw must satisfy and in how shares are
rounded: ``dirichlet`` and ``lda`` cut the shuffled class at floor(cumsum(p_c) N_c), so that every row is dealt;
``flesd`` gives floor(p_ic N_c) and leaves the rest out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedcache.federate.partition.dirichlet_shares import Rule, counts_or_error, deal_rows, present
from fedcache.federate.partition.rows import Dealt, RowPool, Streams, need_rows
from fedcache.federate.partition.scheme import (
    DOMAIN,
    SHARED_TESTS,
    Argument,
    Scheme,
    Value,
    Values,
    alpha_argument,
    clients_argument,
    count_of,
    number_of,
)


def _deal(scheme: Scheme, pool: RowPool, args: Values, streams: Streams, rule_of: Callable[[Values], Rule]) -> Dealt:
    need_rows(pool.train, "train", scheme.name)
    counts = counts_or_error(scheme, args, rule_of(args), streams, rule_of)
    return Dealt(deal_rows(present(pool, pool.train), counts, streams("rows")))


def _quota(pool: RowPool) -> np.ndarray:
    return np.array([len(rows) for rows in present(pool, pool.train)], np.int64)


def deal_dirichlet(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """Every row dealt; the only condition is that no client is empty."""
    quota = _quota(pool)

    def rule_of(args: Values) -> Rule:
        return Rule(quota, count_of(args, "clients"), number_of(args, "alpha"))

    return _deal(DIRICHLET, pool, args, streams, rule_of)


def deal_lda(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """Latent Dirichlet allocation as FedNTD's code does it: a balance gate, and redraws until min_size is reached.

    With the gate, a client that already holds N / M rows gets nothing of the next class, and the shares of the others
    are renormalised. Without it this is the plain draw of the papers' text.
    """
    quota = _quota(pool)

    def rule_of(args: Values) -> Rule:
        clients = count_of(args, "clients")
        gate = float(quota.sum()) / clients if args["gate"] else None
        return Rule(quota, clients, number_of(args, "alpha"), minimum=count_of(args, "min_size"), gate=gate)

    return _deal(LDA, pool, args, streams, rule_of)


def deal_flesd(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """FLESD: redraw until min_i sum_c p_ic > 0.5 / M; counts are rounded down, what remains is left out."""
    quota = _quota(pool)

    def rule_of(args: Values) -> Rule:
        clients = count_of(args, "clients")
        return Rule(quota, clients, number_of(args, "alpha"), exact=False, least_share=0.5 / clients)

    return _deal(FLESD, pool, args, streams, rule_of)


def _min_size(args: Values) -> Values:
    derived: dict[str, Value] = dict(args)
    if derived["min_size"] is None:
        derived["min_size"] = 10 if derived["gate"] else 1
    return derived


DIRICHLET = Scheme(
    "dirichlet",
    "each class in Dirichlet shares over the clients; every row is dealt and no client is empty",
    "Li et al. 2022, arXiv:2102.02079",
    (clients_argument(100), alpha_argument(0.1), SHARED_TESTS, DOMAIN),
    deal_dirichlet,
)
LDA = Scheme(
    "lda",
    "Dirichlet shares with FedNTD's balance gate, redrawn until every client has min_size rows",
    "FST-CBDG; FedNTD, Lee et al. 2022, arXiv:2106.03097",
    (
        clients_argument(100),
        alpha_argument(0.1),
        Argument("gate", "bool", True, "a client that holds its even share gets none of the next class", tag="g"),
        Argument(
            "min_size",
            "int",
            None,
            "redraw until every client has this many rows (default 10 with the gate, 1 without)",
            low=1,
            high=1_000_000,
            tag="min",
        ),
        SHARED_TESTS,
        DOMAIN,
    ),
    deal_lda,
    derive=_min_size,
)
FLESD = Scheme(
    "flesd",
    "Dirichlet shares rounded down, redrawn until every client has enough in shares; the remainder is left out",
    "FLESD, Towards Communication-Efficient and Privacy-Preserving Federated Representation Learning",
    (clients_argument(6), alpha_argument(1.0), SHARED_TESTS, DOMAIN),
    deal_flesd,
)
