"""A few images of every class: ``few-shot`` (ATPFL, TPFL, PromptFL)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedcache.federate.partition.dirichlet_shares import Rule, counts_or_error, deal_rows, present
from fedcache.federate.partition.rows import FEWER, Dealt, RowPool, Streams, fewer_shots, need_rows
from fedcache.federate.partition.scheme import (
    DOMAIN,
    SHARED_TESTS,
    Argument,
    InfeasibleError,
    Scheme,
    Value,
    Values,
    alpha_argument,
    clients_argument,
    count_of,
    number_of,
    shots_argument,
)


def deal_few_shot(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """``shots`` images of a class, by the kind of skew.

    disjoint: the shuffled classes are dealt round(C / M) to each client, the last takes the rest (never so many that
    a client goes without); a client has ``shots`` images of each of its classes. iid: every client has ``shots``
    images of every class. dirichlet: M ``shots`` images of each class in floored Dirichlet shares.
    """
    need_rows(pool.train, "train", FEW_SHOT.name)
    classes = present(pool, pool.train)
    match args["skew"]:
        case "disjoint":
            return _disjoint(classes, args, streams)
        case "iid":
            return _iid(classes, args, streams)
        case _:
            return _dirichlet(classes, args, streams)


def _disjoint(classes: list[np.ndarray], args: Values, streams: Streams) -> Dealt:
    clients, shots, count = count_of(args, "clients"), count_of(args, "shots"), len(classes)
    if clients > count:
        raise _infeasible(args, f"{count} classes cannot be dealt without leaving a client out", {"clients": count})
    shuffled = streams("classes").permutation(count)
    rng = streams("rows")
    drawn = [rng.permutation(rows)[:shots] for rows in classes]
    train = []
    for of_client in np.split(shuffled, np.cumsum(classes_per_client(count, clients))[:-1]):
        train.append(np.concatenate([drawn[c] for c in of_client]))
    return Dealt(train, notes=_short(classes, shots, 1))


def _short(classes: list[np.ndarray], shots: int, times: int) -> list[str]:
    """A note where classes have fewer than ``times`` x ``shots`` rows, with the shots that all of them have."""
    sizes = [len(rows) for rows in classes]
    short, least = sum(size < times * shots for size in sizes), min(sizes)
    if not short:
        return []
    asked = f"{FEWER} the {times * shots} rows asked for (least {least})"
    return [f"{short} of {len(classes)} classes have {asked}; {fewer_shots(least // times, ' or fewer --clients')}"]


def classes_per_client(classes: int, clients: int) -> list[int]:
    """round(C / M) classes for each client, the rest for the last, one at least left for each that is still to come."""
    usual, left, shares = int(classes / clients + 0.5), classes, []
    for waiting in range(clients - 1, 0, -1):
        shares.append(max(1, min(usual, left - waiting)))
        left -= shares[-1]
    return [*shares, left]


def _iid(classes: list[np.ndarray], args: Values, streams: Streams) -> Dealt:
    clients, shots = count_of(args, "clients"), count_of(args, "shots")
    smallest = min(len(rows) for rows in classes)
    if args["sharing"]:
        if shots > smallest:
            raise _infeasible(args, f"a class has {smallest} rows", {"shots": smallest})
        train = []
        for client in range(clients):
            rng = streams("rows", client)
            train.append(np.concatenate([rng.permutation(rows)[:shots] for rows in classes]))
        return Dealt(train, notes=["clients may hold the same image (sharing)"])
    if shots * clients > smallest:
        change: dict[str, Value]
        if smallest >= clients:
            change = {"shots": smallest // clients}
        elif smallest >= shots:
            change = {"clients": smallest // shots}
        else:
            change = {"clients": 1, "shots": smallest}
        raise _infeasible(args, f"a class has {smallest} rows, {clients} x {shots} are needed", change)
    return Dealt(deal_rows(classes, np.full((len(classes), clients), shots), streams("rows")))


def _dirichlet(classes: list[np.ndarray], args: Values, streams: Streams) -> Dealt:
    def rule_of(args: Values) -> Rule:
        clients = count_of(args, "clients")
        quota = np.array([min(clients * count_of(args, "shots"), len(rows)) for rows in classes], np.int64)
        return Rule(quota, clients, number_of(args, "alpha"), exact=False)

    counts = counts_or_error(FEW_SHOT, args, rule_of(args), streams, rule_of)
    notes = _short(classes, count_of(args, "shots"), count_of(args, "clients"))
    return Dealt(deal_rows(classes, counts, streams("rows")), notes=notes)


def _infeasible(args: Values, why: str, instead: dict[str, Value]) -> InfeasibleError:
    largest = " and ".join(f"{name} = {value}" for name, value in instead.items())
    return InfeasibleError(
        f"Scheme few-shot ({args['skew']}) with {args['clients']} clients of {args['shots']} shots: {why}; the largest "
        f"that works is {largest}.",
        FEW_SHOT.command({**args, **instead}),
        instead,
    )


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
            "disjoint: every class belongs to one client; iid: every client has every class; dirichlet: classes in "
            "Dirichlet shares",
            choices=("disjoint", "iid", "dirichlet"),
            tag="k",
        ),
        replace(alpha_argument(0.5), help="concentration of the Dirichlet draws of skew dirichlet", named=False),
        Argument(
            "sharing",
            "bool",
            False,
            "with skew iid each client draws its images from all of them, as PromptFL's code does, so that clients may "
            "share some",
            tag="w",
        ),
        SHARED_TESTS,
        DOMAIN,
    ),
    deal_few_shot,
)
