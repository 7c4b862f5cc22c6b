"""Partition schemes by name: those of one dataset, and FedPCL's three (``domain_shift``).

``dirichlet``, ``lda`` and ``flesd`` draw p_c ~ Dir(alpha 1_M) for every class c. They differ in the condition for
accepting a draw and in the rounding of shares. ``dirichlet`` and ``lda`` cut the shuffled class at floor(cumsum(p_c)
N_c), so every row is assigned; ``flesd`` gives floor(p_ic N_c) rows and leaves the others out. ``iid`` reads no labels,
``shards`` assigns pieces of classes, and ``few-shot`` a few images of every class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fedcache.federate.partition.client_table import RowLists
from fedcache.federate.partition.domain_shift import (
    FEATURE_LABEL_SHIFT,
    FEATURE_SHIFT,
    FILL,
    LABEL_SHIFT,
    Rule,
    counts_or_error,
    deal_by_rule,
    deal_rows,
    present,
)
from fedcache.federate.partition.scheme import (
    DOMAIN,
    FEWER,
    LARGEST_COUNT,
    LONG_TAIL,
    SHARED_TESTS,
    Argument,
    Dealt,
    InfeasibleError,
    RowPool,
    Scheme,
    Streams,
    Value,
    Values,
    alpha_argument,
    clients_argument,
    count_of,
    need_rows,
    number_of,
    shots_argument,
)


def deal_by_shares(
    scheme: str,
    rule_of: Callable[[np.ndarray, Values], Rule],
    pool: RowPool,
    args: Values,
    streams: Streams,
) -> Dealt:
    """Dirichlet shares of every class; ``rule_of`` (rows of each class, arguments) gives rounding and condition."""
    need_rows(pool.train, "train", scheme)
    classes = present(pool, pool.train)
    quota = np.array([len(rows) for rows in classes], np.int64)
    rule = partial(rule_of, quota)
    return Dealt(deal_by_rule(SCHEMES[scheme], args, streams, rule, classes))


def dirichlet_rule(quota: np.ndarray, args: Values) -> Rule:
    """Every row is assigned; the only condition is that no client is empty."""
    return Rule(quota, count_of(args, "clients"), number_of(args, "alpha"))


def lda_rule(quota: np.ndarray, args: Values) -> Rule:
    """Latent Dirichlet allocation as in FedNTD's code: a balance gate, and new draws until min_size is reached.

    With the gate, a client that already holds N / M rows gets none of the next class, and the shares of the others are
    renormalised. Without it, this is the plain draw of the papers' text.
    """
    clients = count_of(args, "clients")
    gate = None
    if args["gate"]:
        gate = float(quota.sum()) / clients
    return Rule(
        quota, clients, number_of(args, "alpha"), minimum=count_of(args, "min_size"), gate=gate
    )


def flesd_rule(quota: np.ndarray, args: Values) -> Rule:
    """FLESD: new draws until min_i sum_c p_ic > 0.5 / M; counts are rounded down, and other rows are left out."""
    clients = count_of(args, "clients")
    return Rule(quota, clients, number_of(args, "alpha"), exact=False, least_share=0.5 / clients)


def _with_min_size(args: Values) -> Values:
    """The arguments with ``min_size``: 10 with the gate, 1 without it."""
    if args["min_size"] is not None:
        return args
    if args["gate"]:
        return {**args, "min_size": 10}
    return {**args, "min_size": 1}


DIRICHLET = Scheme(
    "dirichlet",
    "the rows of each class are divided by Dirichlet shares among the clients; every row is assigned and no client "
    "is empty",
    "Li et al. 2022, arXiv:2102.02079",
    (clients_argument(100), alpha_argument(0.1), FILL, SHARED_TESTS, LONG_TAIL, DOMAIN),
    partial(deal_by_shares, "dirichlet", dirichlet_rule),
)
LDA = Scheme(
    "lda",
    "Dirichlet shares with FedNTD's balance gate, redrawn until every client has min_size rows",
    "FST-CBDG; FedNTD, Lee et al. 2022, arXiv:2106.03097",
    (
        clients_argument(100),
        alpha_argument(0.1),
        Argument(
            "gate",
            "bool",
            True,
            "a client that already has its even share gets no rows of the next class",
            tag="g",
        ),
        Argument(
            "min_size",
            "int",
            None,
            "redraw until every client has this many rows (default 10 with the gate, 1 without)",
            low=1,
            high=1_000_000,
            tag="min",
        ),
        FILL,
        SHARED_TESTS,
        LONG_TAIL,
        DOMAIN,
    ),
    partial(deal_by_shares, "lda", lda_rule),
    derive=_with_min_size,
)
FLESD = Scheme(
    "flesd",
    "Dirichlet shares rounded down, redrawn until the shares of every client are large enough; the remaining rows "
    "are left out",
    "FLESD, Towards Communication-Efficient and Privacy-Preserving Federated Representation Learning",
    (clients_argument(6), alpha_argument(1.0), SHARED_TESTS, DOMAIN),
    partial(deal_by_shares, "flesd", flesd_rule),
)


def deal_iid(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """Shuffled rows, floor(N / M) for each client, and one of the remaining rows for each of the first clients."""
    need_rows(pool.train, "train", IID.name)
    clients = count_of(args, "clients")
    rows = len(pool.train)
    if clients > rows:
        why = f"Scheme iid cannot assign {rows} rows to {clients} clients; at most {rows} clients are possible."
        raise IID.infeasible(args, why, {"clients": rows})
    return Dealt(even_pieces(streams("rows").permutation(pool.train), clients))


def even_pieces(rows: np.ndarray, pieces: int) -> RowLists:
    """Consecutive pieces whose sizes differ by at most one, the larger first."""
    sizes = np.full(pieces, len(rows) // pieces)
    sizes[: len(rows) % pieces] += 1
    return RowLists.of_sizes(rows, sizes)


def deal_shards(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """M s label shards, s for each client, so that a client has at most s classes.

    Each of the C classes present is cut into M s / C shards; if that is no integer, the classes with most rows get one
    shard more. Shards of a class differ by at most one row. The shards are shuffled and assigned in that order.
    """
    need_rows(pool.train, "train", SHARDS.name)
    classes = present(pool, pool.train)
    sizes = np.array([len(rows) for rows in classes])
    clients = count_of(args, "clients")
    each = count_of(args, "shards")
    # The fewest shards are one for each class. With more than ``most``, a shard of the smallest class would be empty.
    fewest = len(sizes)
    smallest = sizes.min()
    most = int(len(sizes) * smallest + (sizes > smallest).sum())
    count = clients * each
    if not fewest <= count <= most:
        raise _shards_infeasible(args, sizes, fewest, most)
    pieces_of = np.full(fewest, count // fewest)
    largest = np.argsort(-sizes, kind="stable")
    pieces_of[largest[: count % fewest]] += 1
    rng = streams("rows")
    cut = [
        even_pieces(rng.permutation(rows), int(pieces))
        for rows, pieces in zip(classes, pieces_of, strict=True)
    ]
    sizes = np.concatenate([lists.sizes for lists in cut])
    rows = np.concatenate([lists.rows for lists in cut])
    order = streams("shards").permutation(len(sizes))
    shards = RowLists.of_sizes(rows, sizes).take(order)
    return Dealt(shards.joined(each))


def _shards_infeasible(args: Values, sizes: np.ndarray, fewest: int, most: int) -> InfeasibleError:
    """The error with arguments that work: another number of shards, or else another number of clients."""
    given = {name: count_of(args, name) for name in ("clients", "shards")}
    shards = given["clients"] * given["shards"]
    instead: dict[str, Value] = {"clients": 1, "shards": fewest}
    # Another number of shards comes last, so it replaces another number of clients if both work.
    for change, kept in (("clients", "shards"), ("shards", "clients")):
        # The least and the largest number whose product with the other one is a possible number of shards.
        least = -(-fewest // given[kept])
        largest = most // given[kept]
        if least <= largest and shards < fewest:
            instead = {change: least}
        elif least <= largest:
            instead = {change: largest}
    works = _words(instead)
    tried = _words(given)
    smallest = sizes.min()
    why = (
        f"Scheme shards with {tried} needs {shards} shards. There are {fewest} classes, the smallest with {smallest} "
        f"rows, so from {fewest} to {most} shards are possible; {works} works."
    )
    return SHARDS.infeasible(args, why, instead)


def _words(arguments: Values) -> str:
    return " and ".join(f"{name} = {value}" for name, value in arguments.items())


IID = Scheme(
    "iid",
    "equal parts at random, without reading labels",
    "FST-CBDG",
    (clients_argument(100), LONG_TAIL, DOMAIN),
    deal_iid,
    needs_labels=False,
)
SHARDS = Scheme(
    "shards",
    "every class is cut into shards; each client gets s shards, and therefore at most s classes",
    "FST-CBDG; FedNTD, Lee et al. 2022, arXiv:2106.03097",
    (
        clients_argument(100),
        Argument(
            "shards",
            "int",
            2,
            "label shards of each client (s)",
            low=1,
            high=LARGEST_COUNT,
            tag="k",
            named=True,
        ),
        SHARED_TESTS,
        LONG_TAIL,
        DOMAIN,
    ),
    deal_shards,
)


def deal_few_shot(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """``shots`` images of a class, by the kind of skew.

    disjoint: each client gets round(C / M) of the shuffled classes, the last client gets the rest, and every client
    gets at least one; a client has ``shots`` images of each of its classes. iid: every client has ``shots`` images of
    every class. dirichlet: M ``shots`` images of each class in Dirichlet shares, rounded down.
    """
    need_rows(pool.train, "train", FEW_SHOT.name)
    classes = present(pool, pool.train)
    match args["skew"]:
        case "disjoint":
            return _few_shot_disjoint(classes, args, streams)
        case "iid":
            return _few_shot_iid(classes, args, streams)
        case _:
            return _few_shot_dirichlet(classes, args, streams)


def _few_shot_disjoint(classes: list[np.ndarray], args: Values, streams: Streams) -> Dealt:
    clients = count_of(args, "clients")
    shots = count_of(args, "shots")
    count = len(classes)
    if clients > count:
        raise _few_shot_infeasible(
            args,
            f"{count} classes are too few: a client would get no class",
            {"clients": count},
        )
    shuffled = streams("classes").permutation(count)
    rng = streams("rows")
    drawn = [rng.permutation(rows)[:shots] for rows in classes]
    train = []
    ends = np.cumsum(classes_per_client(count, clients))
    for of_client in np.split(shuffled, ends[:-1]):
        train.append(np.concatenate([drawn[c] for c in of_client]))
    return _few_shot(train, classes, shots, 1)  # each class belongs to one client


def _few_shot(
    train: Sequence[np.ndarray], classes: list[np.ndarray], shots: int, times: int
) -> Dealt:
    """The clients, with a note if some classes have fewer than ``shots`` rows for each of ``times`` clients."""
    sizes = [len(rows) for rows in classes]
    short = sum(size < times * shots for size in sizes)
    least = min(sizes)
    if not short:
        return Dealt(train)
    lacking = f"{FEWER} the {times * shots} requested rows (least {least})"
    note = f"{short} of {len(classes)} classes have {lacking}"
    return Dealt(train, notes=[note], enough_shots=least // times)


def classes_per_client(classes: int, clients: int) -> list[int]:
    """round(C / M) classes for each client and the others for the last one; at least one for every client."""
    usual = int(classes / clients + 0.5)
    left = classes
    shares = []
    for waiting in range(clients - 1, 0, -1):
        shares.append(max(1, min(usual, left - waiting)))
        left -= shares[-1]
    return [*shares, left]


def _few_shot_iid(classes: list[np.ndarray], args: Values, streams: Streams) -> Dealt:
    clients = count_of(args, "clients")
    shots = count_of(args, "shots")
    smallest = min(len(rows) for rows in classes)
    if args["sharing"]:
        if shots > smallest:
            raise _few_shot_infeasible(args, f"a class has {smallest} rows", {"shots": smallest})
        train = []
        for client in range(clients):
            rng = streams("rows", client)
            train.append(np.concatenate([rng.permutation(rows)[:shots] for rows in classes]))
        return Dealt(train, notes=["clients may have the same image (sharing)"])
    if shots * clients > smallest:
        change: dict[str, Value]
        if smallest >= clients:
            change = {"shots": smallest // clients}
        elif smallest >= shots:
            change = {"clients": smallest // shots}
        else:
            change = {"clients": 1, "shots": smallest}
        raise _few_shot_infeasible(
            args, f"a class has {smallest} rows, {clients} x {shots} are needed", change
        )
    counts = np.full((len(classes), clients), shots)
    return Dealt(deal_rows(classes, counts, streams("rows")))


def _few_shot_dirichlet(classes: list[np.ndarray], args: Values, streams: Streams) -> Dealt:
    def rule_of(args: Values) -> Rule:
        clients = count_of(args, "clients")
        most = clients * count_of(args, "shots")
        quota = np.array([min(most, len(rows)) for rows in classes], np.int64)
        return Rule(quota, clients, number_of(args, "alpha"), exact=False)

    counts = counts_or_error(FEW_SHOT, args, streams, rule_of)
    train = deal_rows(classes, counts, streams("rows"))
    return _few_shot(train, classes, count_of(args, "shots"), count_of(args, "clients"))


def _few_shot_infeasible(args: Values, why: str, instead: dict[str, Value]) -> InfeasibleError:
    given = _words({name: args[name] for name in ("skew", "clients", "shots")})
    problem = f"Scheme few-shot with {given}: {why}; the largest that works is {_words(instead)}."
    return FEW_SHOT.infeasible(args, problem, instead)


FEW_SHOT = Scheme(
    "few-shot",
    "a few images of every class of a client",
    "ATPFL and TPFL (UbiComp 2023); PromptFL, arXiv:2208.11625",
    (
        clients_argument(10),
        shots_argument(4, "images of each class"),
        Argument(
            "skew",
            "choice",
            "disjoint",
            "`disjoint`: every class belongs to one client; `iid`: every client has every class; `dirichlet`: classes "
            "in Dirichlet shares",
            choices=("disjoint", "iid", "dirichlet"),
            tag="k",
        ),
        replace(
            alpha_argument(0.5),
            help="concentration of the Dirichlet draws, with skew `dirichlet`",
            named=False,
        ),
        Argument(
            "sharing",
            "bool",
            False,
            "with skew `iid`, each client draws from all images, as PromptFL's code does, so that clients may share "
            "images",
            tag="w",
        ),
        SHARED_TESTS,
        DOMAIN,
    ),
    deal_few_shot,
)


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        FEATURE_SHIFT,
        LABEL_SHIFT,
        FEATURE_LABEL_SHIFT,
        SHARDS,
        LDA,
        FLESD,
        IID,
        FEW_SHOT,
        DIRICHLET,
    )
}
