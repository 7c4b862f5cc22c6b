"""Equal parts: ``iid``, which reads no labels, and ``shards`` (FST-CBDG, FedNTD), which deals pieces of classes."""

from __future__ import annotations

import numpy as np

from fedcache.federate.partition.dirichlet_shares import present
from fedcache.federate.partition.rows import Dealt, RowPool, Streams, need_rows
from fedcache.federate.partition.scheme import (
    DOMAIN,
    LARGEST_COUNT,
    SHARED_TESTS,
    Argument,
    InfeasibleError,
    Scheme,
    Value,
    Values,
    clients_argument,
    count_of,
)


def deal_iid(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """Shuffle all rows and deal floor(N / M) to each client, the remainder one by one."""
    need_rows(pool.train, "train", IID.name)
    clients, rows = count_of(args, "clients"), len(pool.train)
    if clients > rows:
        raise InfeasibleError(
            f"Scheme iid with {clients} clients: {rows} rows; the largest number of clients that works is {rows}.",
            IID.command({**args, "clients": rows}),
            {"clients": rows},
        )
    return Dealt(np.array_split(streams("rows").permutation(pool.train), clients))


def deal_shards(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """M s label shards, dealt s to each client, so that a client has at most s classes.

    Each of the C classes present is cut into M s / C shards; where that is no integer, the classes with most rows get
    one shard more. Shards of a class differ by at most one row. The shuffled list of shards is dealt in order.
    """
    need_rows(pool.train, "train", SHARDS.name)
    classes = present(pool, pool.train)
    sizes = np.array([len(rows) for rows in classes])
    clients, each = count_of(args, "clients"), count_of(args, "shards")
    # Fewer shards than classes would leave a class out; more than this and a shard of the smallest class is empty.
    fewest, most = len(sizes), int(len(sizes) * sizes.min() + (sizes > sizes.min()).sum())
    if not fewest <= clients * each <= most:
        raise _infeasible(args, sizes, fewest, most)
    rng = streams("rows")
    shards = [
        shard
        for rows, pieces in zip(classes, _pieces(sizes, clients * each), strict=True)
        for shard in np.array_split(rng.permutation(rows), pieces)
    ]
    order = streams("shards").permutation(len(shards)).reshape(clients, each)
    return Dealt([np.concatenate([shards[i] for i in of_client]) for of_client in order])


def _pieces(sizes: np.ndarray, shards: int) -> np.ndarray:
    """Shards of each class: equally many, and one more for the classes with most rows."""
    pieces = np.full(len(sizes), shards // len(sizes))
    pieces[np.argsort(-sizes, kind="stable")[: shards % len(sizes)]] += 1
    return pieces


def _infeasible(args: Values, sizes: np.ndarray, fewest: int, most: int) -> InfeasibleError:
    """What works instead: another number of shards for as many clients, else another number of clients."""
    clients, each = count_of(args, "clients"), count_of(args, "shards")
    asked = clients * each
    few = asked < fewest
    instead: dict[str, Value]
    if -(-fewest // clients) <= most // clients:
        s = -(-fewest // clients) if few else most // clients
        instead, works = {"shards": s}, f"the {'smallest' if few else 'largest'} s that works is {s}"
    elif -(-fewest // each) <= most // each:
        m = -(-fewest // each) if few else most // each
        instead, works = {"clients": m}, f"the {'smallest' if few else 'largest'} number of clients that works is {m}"
    else:
        instead, works = {"clients": 1, "shards": fewest}, f"1 client with s = {fewest} works"
    return InfeasibleError(
        f"Scheme shards with {clients} clients of s = {each}: {asked} shards, but the {fewest} classes, the smallest "
        f"with {sizes.min()} rows, can be cut into {fewest} to {most} shards; {works}.",
        SHARDS.command({**args, **instead}),
        instead,
    )


IID = Scheme(
    "iid",
    "equal parts at random, without reading labels",
    "FST-CBDG",
    (clients_argument(100), DOMAIN),
    deal_iid,
    needs_labels=False,
)
SHARDS = Scheme(
    "shards",
    "every class cut into shards, each client gets s of them and so at most s classes",
    "FST-CBDG; FedNTD, Lee et al. 2022, arXiv:2106.03097",
    (
        clients_argument(100),
        Argument("shards", "int", 2, "label shards of each client (s)", low=1, high=LARGEST_COUNT, tag="k", named=True),
        SHARED_TESTS,
        DOMAIN,
    ),
    deal_shards,
)
