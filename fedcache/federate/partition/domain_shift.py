"""The three settings of FedPCL (arXiv:2209.10083): feature shift, label shift, and both.

Feature shift: a client is a domain and has the same number of rows of every class. Label shift: one domain, classes in
Dirichlet shares. Both: a client is a domain and its classes come in Dirichlet shares.

Test sets differ (the paper does not say so, its released code does it): with label shift a client is tested on the
held-out part of its own draw, so with its own class shares; otherwise on a class-balanced set of its domain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedcache.federate.partition.dirichlet_shares import (
    Rule,
    counts_or_error,
    deal_by_rule,
    present,
)
from fedcache.federate.partition.fill_up import FILL
from fedcache.federate.partition.scheme import (
    DOMAIN,
    FEWER,
    Argument,
    Dealt,
    InfeasibleError,
    MatchedTests,
    RowPool,
    Scheme,
    Streams,
    Values,
    alpha_argument,
    clients_argument,
    count_of,
    first_per_class,
    need_rows,
    number_of,
    shots_argument,
    test_protocol_argument,
    tests_argument,
)


def deal_feature_shift(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """The first (or random) ``shots`` training rows of each class in each domain; the first ``tests`` test rows."""
    shots = count_of(args, "shots")
    train = []
    short = []
    least = shots
    for client, domain in enumerate(_domains(FEATURE_SHIFT, pool)):
        rows = pool.of_domain(pool.train, domain)
        if args["order"] == "random":
            rows = streams("rows", client).permutation(rows)
        train.append(first_per_class(pool, rows, shots))
        short += [f"{pool.columns.domains[domain]}/{name}" for name in _short(pool, rows, shots)]
        least = min(least, *map(len, pool.by_class(rows)))
    notes = [f"{FEWER} {shots} training rows: {_some(short)}"] if short else []
    return Dealt(
        train,
        _balanced_tests(pool, args),
        _names(pool),
        notes,
        enough_shots=least if short else None,
    )


def deal_feature_label_shift(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """Per class p ~ Dir(alpha 1_M) over the M domains; client i gets the first floor(p_i M shots) rows of its own.

    Without a domain running out of rows, between M shots C - M C (exclusive) and M shots C rows are dealt in all.
    """
    domains = _domains(FEATURE_LABEL_SHIFT, pool)
    classes = [pool.by_class(pool.of_domain(pool.train, domain)) for domain in domains]
    limit = np.array([[len(rows) for rows in of_domain] for of_domain in classes], np.int64).T

    def rule_of(args: Values) -> Rule:
        quota = np.full(len(limit), len(domains) * count_of(args, "shots"), np.int64)
        return Rule(quota, len(domains), number_of(args, "alpha"), exact=False, limit=limit)

    counts = counts_or_error(FEATURE_LABEL_SHIFT, args, streams, rule_of)
    train = [
        np.concatenate([rows[:n] for rows, n in zip(of_domain, count, strict=True)])
        for of_domain, count in zip(classes, counts.T, strict=True)
    ]
    if args["test_protocol"] == "balanced":
        test = _balanced_tests(pool, args)
    else:
        test = [
            MatchedTests(pool.of_domain(pool.test, domain), pool.columns.label, streams("test")).of(
                rows
            )
            for rows, domain in zip(train, domains, strict=True)
        ]
    return Dealt(train, test, _names(pool), [])


def deal_label_shift(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """Per class: the first q = shots ratio M rows, shuffled, cut at floor(cumsum(p) q) with p ~ Dir(alpha 1_M).

    A client that already holds N / M rows, N being the whole pool, gets nothing of the next class (practically never
    so). Each client shuffles its n_i rows: the first floor(n_i / ratio) are for training, the others for testing.
    A class with fewer rows than q gives what it has; ratio and M are kept, so the training sets shrink.
    """
    source = pool.train if args["pool"] == "train" else pool.test
    need_rows(source, str(args["pool"]), LABEL_SHIFT.name)
    classes = present(pool, source)
    ratio = number_of(args, "ratio")

    def quota_of(args: Values) -> np.ndarray:
        asked = round(count_of(args, "shots") * ratio * count_of(args, "clients"))
        return np.array([min(asked, len(rows)) for rows in classes], np.int64)

    def rule_of(args: Values) -> Rule:
        clients = count_of(args, "clients")
        # ceil(ratio) rows are one training row and, as ratio > 1, at least one test row.
        least = math.ceil(ratio)
        gate = len(source) / clients
        return Rule(quota_of(args), clients, number_of(args, "alpha"), minimum=least, gate=gate)

    quota = quota_of(args)
    held = deal_by_rule(
        LABEL_SHIFT,
        args,
        streams,
        rule_of,
        [rows[:q] for rows, q in zip(classes, quota, strict=True)],
    )
    shuffled = [streams("holdout", client).permutation(rows) for client, rows in enumerate(held)]
    cuts = [math.floor(len(rows) / ratio) for rows in shuffled]
    train = [rows[:cut] for rows, cut in zip(shuffled, cuts, strict=True)]
    if args["test_protocol"] == "matched":
        test = [rows[cut:] for rows, cut in zip(shuffled, cuts, strict=True)]
    else:
        rest = np.setdiff1d(pool.test, np.concatenate(held))
        test = [first_per_class(pool, rest, count_of(args, "tests"))] * len(train)
    asked = round(count_of(args, "shots") * ratio * count_of(args, "clients"))
    enough = _enough_shots(args, int(quota.min())) if (quota < asked).any() else None
    return Dealt(
        train, test, notes=_label_shift_notes(pool, args, quota, train), enough_shots=enough
    )


def _label_shift_notes(
    pool: RowPool, args: Values, quota: np.ndarray, train: Sequence[np.ndarray]
) -> list[str]:
    """What differs from the paper's setting: a mixed pool, or classes that ran out."""
    notes = []
    if len(pool.domains) > 1:
        notes.append(
            f"the pool mixes {len(pool.domains)} domains; in the paper label shift is within one (--domain)"
        )
    asked = round(count_of(args, "shots") * number_of(args, "ratio") * count_of(args, "clients"))
    if (quota < asked).any():
        mean = float(np.mean([len(rows) for rows in train]))
        notes.append(
            f"{int((quota < asked).sum())} of {len(quota)} classes have {FEWER} the {asked} rows asked for (least "
            f"{int(quota.min())}): {mean:.1f} training rows a client instead of "
            f"{count_of(args, 'shots') * len(quota)}"
        )
    return notes


def _enough_shots(args: Values, least: int) -> int:
    """The most shots for which a class of ``least`` rows has enough."""
    rows_per_shot = number_of(args, "ratio") * count_of(args, "clients")
    shots = count_of(args, "shots") - 1
    while shots and round(shots * rows_per_shot) > least:
        shots -= 1
    return shots


def _domains(scheme: Scheme, pool: RowPool) -> tuple[int, ...]:
    """The chosen domains. Raises InfeasibleError, unless they are two or more, each with training and test rows."""
    names = _names(pool)
    if len(names) < 2:
        raise InfeasibleError(
            f"Scheme {scheme.name} makes each domain a client: found {len(names)} ({', '.join(names)}), expected at "
            "least 2.",
            "",
        )
    for split, rows in (("train", pool.train), ("test", pool.test)):
        empty = [
            name
            for name, code in zip(names, pool.domains, strict=True)
            if not len(pool.of_domain(rows, code))
        ]
        if empty:
            others = tuple(name for name in names if name not in empty)
            why = f"Scheme {scheme.name}: no {split} rows with ok = 1 in {', '.join(empty)}."
            raise InfeasibleError(why, "", {"domain": others} if len(others) > 1 else {})
    return pool.domains


def _balanced_tests(pool: RowPool, args: Values) -> list[np.ndarray]:
    """The first ``tests`` test rows of each class, for every domain."""
    tests = count_of(args, "tests")
    return [
        first_per_class(pool, pool.of_domain(pool.test, domain), tests) for domain in pool.domains
    ]


def _names(pool: RowPool) -> list[str]:
    return [pool.columns.domains[domain] for domain in pool.domains]


def _short(pool: RowPool, rows: np.ndarray, shots: int) -> list[str]:
    """Classes with fewer rows than asked for."""
    held = zip(pool.columns.classes, pool.by_class(rows), strict=True)
    return [f"{name} ({len(r)})" for name, r in held if len(r) < shots]


def _some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _ratio(args: Values) -> Values:
    """The released ratios of pool to training rows, which fall as the clients grow so that the pool suffices."""
    if args["ratio"] is not None:
        return args
    clients = count_of(args, "clients")
    return {
        **args,
        "ratio": 11.0 if clients <= 10 else 5.5 if clients <= 20 else 3.0 if clients <= 40 else 1.5,
    }


_PER_CLASS = "training rows of each class a client has on average"
FEATURE_SHIFT = Scheme(
    "feature-shift",
    "a client is a domain, with the same number of rows of every class",
    "FedPCL, arXiv:2209.10083",
    (
        shots_argument(10, "training rows of each class"),
        Argument(
            "order",
            "choice",
            "stored",
            "the first rows as stored (equal for every seed) or random ones",
            choices=("stored", "random"),
            tag="o",
        ),
        tests_argument(200),
        DOMAIN,
    ),
    deal_feature_shift,
)
LABEL_SHIFT = Scheme(
    "label-shift",
    "one domain, classes in Dirichlet shares, each client tested on the held-out part of its own draw",
    "FedPCL, arXiv:2209.10083",
    (
        clients_argument(5),
        alpha_argument(1.0),
        shots_argument(10, _PER_CLASS),
        Argument(
            "ratio",
            "float",
            None,
            "rows drawn for each training row; the others are for testing (default 11 for up to 10 clients, 5.5 up to "
            "20, 3 up to 40, then 1.5)",
            low=1.0,
            high=1e6,
            above=True,
            tag="r",
        ),
        Argument(
            "pool", "choice", "train", "the split that is dealt", choices=("train", "test"), tag="p"
        ),
        FILL,
        test_protocol_argument(
            "matched",
            "matched: the held-out part of the client's own draw; balanced: the same class-balanced test rows for all",
        ),
        tests_argument(100),
        DOMAIN,
    ),
    deal_label_shift,
    derive=_ratio,
)
FEATURE_LABEL_SHIFT = Scheme(
    "feature-label-shift",
    "a client is a domain, its classes come in Dirichlet shares",
    "FedPCL, arXiv:2209.10083",
    (
        alpha_argument(1.0),
        shots_argument(10, _PER_CLASS),
        test_protocol_argument(
            "balanced",
            "balanced: class-balanced test rows of the client's domain; matched: test rows of its domain in the class "
            "shares of its training rows",
        ),
        tests_argument(100),
        DOMAIN,
    ),
    deal_feature_label_shift,
)
