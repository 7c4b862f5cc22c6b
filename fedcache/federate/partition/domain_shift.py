"""Domain shift: the three settings of FedPCL (arXiv:2209.10083), feature shift, label shift, and both.

Feature shift: a client is a domain and has the same number of rows of every class. Label shift: one domain, classes in
Dirichlet shares. Both: a client is a domain and its classes come in Dirichlet shares.

Test sets follow the released code, as the paper does not describe them. With label shift a client is tested on the
held-out part of its own draw, so with its own class shares; otherwise on a class-balanced set of its domain.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedcache.federate.partition.client_table import MatchedLists, RowLists, ranges
from fedcache.federate.partition.scheme import (
    DOMAIN,
    FEWER,
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
    first_per_class,
    need_rows,
    number_of,
    shots_argument,
    test_protocol_argument,
    tests_argument,
)

# Filling up: clients with too few rows get rows of the clients with most rows.
#
# Drawing again until every client has enough rows (``deal_by_rule``) works for hundreds of clients.
# Among a million clients, some have too few rows in every draw.


FILL = Argument(
    "fill",
    "bool",
    False,
    "instead of drawing again until every client has enough rows, move rows from the largest clients to "
    "clients with too few",
    tag="fill",
    later=True,
)


def fill_up(dealt: RowLists, least: int, rng: np.random.Generator) -> RowLists:
    """Move as few rows as possible so that every list has ``least`` rows.

    Each moved row comes from the list that is the longest at this time.

    Example: sizes 7, 5, 1, 0 with a least of 2 lack three rows. The longest list gives two rows, until it is as long as
    the next one. Then the first of these two gives one row, which leaves 4, 5, 2, 2. The moved rows are drawn at random
    from their list, and assigned at random to the short lists. In all there must be ``least`` rows for each list.
    """
    sizes = dealt.sizes
    lack = np.maximum(least - sizes, 0)
    if not lack.any():
        return dealt
    kept = lowered(sizes, int(lack.sum()), least)
    # The rows of every list that gives rows, in random order; the first rows of each list are moved.
    owner = dealt.owner
    given = sizes - kept
    theirs = np.flatnonzero(given[owner] > 0)
    shuffled = np.lexsort((rng.random(len(theirs)), owner[theirs]))
    theirs = theirs[shuffled]
    lengths = sizes[given > 0]
    rank = ranges(np.zeros_like(lengths), lengths)
    moved = theirs[rank < given[owner[theirs]]]
    receivers = np.repeat(np.arange(len(dealt)), lack)
    owner[rng.permutation(moved)] = receivers
    return RowLists.by_owner(dealt.rows, owner, len(dealt))


def lowered(sizes: np.ndarray, missing: int, least: int) -> np.ndarray:
    """int64 [M]: ``sizes`` after ``missing`` were taken one by one, each from the first of the largest sizes."""
    low = least
    high = int(sizes.max())
    # Bisection for the highest level above which there are enough rows.
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.maximum(sizes - middle, 0).sum()) >= missing:
            low = middle
        else:
            high = middle - 1
    kept: np.ndarray = np.minimum(sizes, low)
    above = np.flatnonzero(sizes > low)
    too_many = int((sizes - kept).sum()) - missing
    # Too many rows were taken, so the last of these sizes keep one row more.
    kept[above[len(above) - too_many :]] += 1
    return kept


# Dirichlet shares of classes over clients, redrawn until every client has enough rows.
#
# Only counts are drawn and tested; rows are shuffled once, after a draw is accepted. The search
# ends at a cap on draws, at a cap on work, or when the draws show that no draw will be accepted.
# The error then names the best draw seen, and arguments that work.


DRAWS = 1_000_000
"""Maximum number of draws of a search."""
SHARES = 250_000_000
"""Maximum number of shares of a search: 250,000 draws of 100 clients and 10 classes take 12 to 20 CPU seconds."""
LEAST_DRAWS = 8
"""Number of draws that a search makes even if their numbers exceed ``SHARES``."""
BLOCK = 1 << 20
"""How many numbers are drawn at once (8 MiB)."""
TRIAL_DRAWS = 5_000
"""Maximum number of draws of a trial, which tests other arguments that may work."""
TRIAL_SHARES = 5_000_000
"""Maximum number of shares of a trial."""
LARGEST_ALPHA = 1_000.0
"""Largest alpha that is tried."""
NAMED = 8
"""Maximum number of classes that a note lists."""
HOPELESS = 1.0
"""Expected number of accepted draws within the limits, below which a search stops."""
SEEN = 20_000
"""Number of clients that must be drawn before a search estimates the share of clients with too few rows."""
STICKS = 0.05
"""Alpha below which shares come from numpy's stick breaking, because gamma draws can underflow to 0 / 0."""


@dataclass(frozen=True, eq=False)
class Rule:
    """Conversion of shares into counts, and the condition for accepting them."""

    quota: np.ndarray  # int64 [C], rows of each class to assign
    clients: int  # M
    alpha: float  # Dirichlet concentration, the same for every client
    minimum: int = 1  # smallest number of rows of an accepted client
    # cut the quota at floor(cumulative share x quota), so that every row is assigned; otherwise every client gets
    # floor(share x quota) rows, and the remaining rows are not assigned
    exact: bool = True
    # a client that already holds this many rows gets none of the next class; None for no gate
    gate: float | None = None
    limit: np.ndarray | None = None  # int64 [C, M], rows that exist for a client; None for no limit
    least_share: float = 0.0  # a client's shares summed over classes must exceed this

    def counts(self, shares: Iterable[np.ndarray], draws: int) -> Counts:
        """Rows of every class and client of ``draws`` draws, whose shares [B, M] come class by class."""
        # Half the memory of int64: a hundred classes of a million clients are 0.4 GB.
        dtype: np.dtype[Any] = np.dtype(np.int64)
        if self.quota.max(initial=0) < 2**31:
            dtype = np.dtype(np.int32)
        counts = np.empty((draws, len(self.quota), self.clients), dtype)
        size = np.zeros((draws, self.clients), np.int64)
        total = np.zeros((draws, self.clients))
        for c, drawn in enumerate(shares):
            share = drawn
            quota = self.quota[c]
            total += drawn
            if self.gate is not None:
                share = gated(share, size < self.gate)
            if self.exact:
                cut = np.floor(np.cumsum(share, axis=-1) * quota).astype(np.int64)
                np.minimum(cut, quota, out=cut)  # a cumulative sum may exceed 1 by an ulp
                cut[:, -1] = quota
                counts[:, c] = np.diff(cut, axis=-1, prepend=0)
            else:
                counts[:, c] = np.floor(share * quota)
            if self.limit is not None:
                np.minimum(counts[:, c], self.limit[c], out=counts[:, c])
            size += counts[:, c]
        return Counts(counts, size, total)


RuleOf = Callable[[Values], Rule]
"""Function from arguments to their rule."""


@dataclass(frozen=True, eq=False)
class Counts:
    """B draws of rows for M clients."""

    rows: np.ndarray  # int32 (int64 beyond 2**31 rows of a class) [B, C, M]
    size: np.ndarray  # int64 [B, M], their sum over classes
    share: np.ndarray  # float64 [B, M], the sum of a client's shares


def gated(share: np.ndarray, is_open: np.ndarray) -> np.ndarray:
    """Shares [B, M] of the open clients, renormalised; equal shares if the shares of all open clients are 0."""
    kept = share * is_open
    total = kept.sum(axis=-1, keepdims=True)
    lost = total[:, 0] <= 0.0
    if lost.any():
        kept[lost] = is_open[lost]
        total[lost] = is_open[lost].sum(axis=-1, keepdims=True)
    result: np.ndarray = kept / total
    return result


@dataclass(frozen=True, eq=False)
class Search:
    """Result of a search."""

    counts: np.ndarray | None  # [C, M] of the accepted draw, or None
    draws: int  # number of draws
    best_minimum: int  # size of the smallest client in the best draw
    hopeless: bool = False  # whether it stopped early because no draw was likely to be accepted


def draw(
    rng: np.random.Generator, alpha: float, draws: int, classes: int, clients: int
) -> np.ndarray:
    """Independent Dir(alpha 1_M) shares, [draws, C, M]. The size of a block does not change the draws."""
    if alpha < STICKS:
        return rng.dirichlet(np.full(clients, alpha), size=(draws, classes))
    gamma = rng.standard_gamma(alpha, size=(draws, classes, clients))
    gamma /= gamma.sum(axis=-1, keepdims=True)
    return gamma


def draw_by_class(
    rng: np.random.Generator, alpha: float, draws: int, classes: int, clients: int
) -> Iterator[np.ndarray]:
    """The numbers of ``draw``, class by class: shares [draws, M]. A single draw holds one class in memory at a time."""
    if draws == 1:
        for _ in range(classes):
            yield draw(rng, alpha, 1, 1, clients)[:, 0]  # one draw of one class
    else:
        yield from draw(rng, alpha, draws, classes, clients).swapaxes(0, 1)


def search(
    rng: np.random.Generator, rule: Rule, *, draws: int = DRAWS, shares: int = SHARES
) -> Search:
    """Draw until the rule accepts, at most ``draws`` draws and, after ``LEAST_DRAWS``, at most ``shares`` numbers.

    Clients compete for the same rows, so a short client, which has too few rows, makes other short clients less likely.
    If s is the share of short clients so far, P(no short client) <= (1 - s)^M up to the error of s. The search stops
    when this bound gives less than ``HOPELESS`` accepted draws within the cap.
    """
    classes = len(rule.quota)
    clients = rule.clients
    numbers = classes * clients  # of one draw
    cap = min(draws, max(LEAST_DRAWS, shares // numbers))
    done = 0
    short = 0
    best_minimum = -1
    for block in _blocks(cap, max(1, BLOCK // numbers)):
        counts = rule.counts(draw_by_class(rng, rule.alpha, block, classes, clients), block)
        size = counts.size
        is_short = size < rule.minimum
        if rule.least_share > 0.0:
            is_short |= counts.share <= rule.least_share
        accepted = np.flatnonzero(~is_short.any(axis=-1))
        if len(accepted):
            first = int(accepted[0])
            smallest = int(size[first].min())
            return Search(counts.rows[first], done + first + 1, smallest)
        done += block
        short += int(is_short.sum())
        best_minimum = max(best_minimum, int(size.min(axis=-1).max()))
        seen = done * clients
        expected = cap * (1.0 - short / seen) ** clients
        if seen >= SEEN and expected < HOPELESS:
            return Search(None, done, best_minimum, hopeless=True)
    return Search(None, done, best_minimum)


def _blocks(cap: int, largest: int) -> Iterator[int]:
    """Block sizes 1, 4, 16, ... that sum to ``cap``. They start small, because most searches end at the first draw."""
    done = 0
    size = 1
    while done < cap:
        block = min(size, largest, cap - done)
        yield block
        done += block
        size *= 4


def counts_or_error(scheme: Scheme, args: Values, streams: Streams, rule_of: RuleOf) -> np.ndarray:
    """The accepted counts, [C, M] int32, or int64 for classes beyond 2**31 rows.

    Args:
        scheme: for the message.
        args: resolved arguments; must hold ``alpha``.
        streams: the search draws from ``shares``.
        rule_of: gives the rule of these arguments, and of others in the search for arguments that work.

    Raises:
        InfeasibleError: naming the size of the smallest client in the best draw, and arguments that work with the same
            seed: the smallest alpha, or else the number of clients, and ``fill`` if the scheme has it. It has no hint
            if none was found.
    """
    rule = rule_of(args)
    least = f"{rule.minimum} row(s)"
    clients = rule.clients
    who = f"Scheme {scheme.name} with alpha {rule.alpha:g} and {clients} clients"
    rows = int(rule.quota.sum())
    most = rows // rule.minimum  # clients for which the rows are enough
    can_fill = scheme.has("fill")
    # If one draw takes seconds and the scheme can fill clients up, no other arguments are tried.
    tries = not (can_fill and clients * len(rule.quota) > TRIAL_SHARES)
    instead: dict[str, Value] = {}  # arguments that work without ``fill``
    filled: dict[str, Value] = {"fill": True}  # arguments that work with it
    if not _has_rows(rule):
        message = (
            f"{who} needs {least} for each of {clients} clients, but the {rows} rows that can be assigned are enough "
            f"for only {most} clients."
        )
        filled["clients"] = most
        if tries and not args.get("fill"):
            instead = _fewer_clients(scheme, args, streams, rule_of, most)
        # With fewer clients there may also be fewer rows to assign.
        can_fill = can_fill and most > 0 and _has_rows(rule_of({**args, "clients": most}))
    else:
        if args.get("fill"):
            # The first draw is taken, because short clients are filled up later.
            first = draw_by_class(streams("shares"), rule.alpha, 1, len(rule.quota), clients)
            counts: np.ndarray = rule.counts(first, 1).rows[0]
            return counts
        found = search(streams("shares"), rule)
        if found.counts is not None:
            return found.counts
        if rule.least_share > 0.0:
            least += f" and {rule.least_share:.3g} of a class in shares"
        stop = "fedcache makes no more draws"
        if found.hopeless:
            stop = "more draws would not help"
        message = f"{who}: in none of {found.draws:,} draws did every client get {least} ({stop}); "
        message += f"in the best draw, the smallest client had {found.best_minimum} rows."
        if tries:
            alphas = alphas_above(rule.alpha)
            instead = _first_that_works("alpha", alphas, args, streams, rule_of)
            instead = instead or _fewer_clients(scheme, args, streams, rule_of, most)
    hints = []
    if instead:
        working = f"smallest alpha found to work is {instead.get('alpha')}"
        if "clients" in instead:
            working = f"largest number of clients found to work is {instead['clients']}"
        instead = _with_derived(scheme, args, instead)
        command = scheme.command({**args, **instead}, streams.seed)
        hints.append(f"With this seed the {working}:  {command}")
    if can_fill:
        filled = _with_derived(scheme, args, filled)
        command = scheme.command({**args, **filled}, streams.seed)
        hints.append(f"To move rows from the largest clients to clients with too few:  {command}")
        instead = instead or filled
    raise InfeasibleError(message, "\n".join(hints), instead)


def _with_derived(scheme: Scheme, args: Values, instead: dict[str, Value]) -> dict[str, Value]:
    """``instead``, and those derived arguments that would otherwise get other values than in the trial."""
    derived = scheme.rederived({**args, **instead})
    complete = dict(instead)
    for argument in scheme.arguments:
        name = argument.name
        # A ``names`` argument without a default, such as ``domain``, is not derived.
        is_derived = argument.default is None and argument.kind != "names"
        if is_derived and name in derived and args[name] != derived[name]:
            complete[name] = args[name]
    return complete


def _has_rows(rule: Rule) -> bool:
    """Whether every client could have its least number of rows."""
    return int(rule.quota.sum()) >= rule.clients * rule.minimum


def _fewer_clients(
    scheme: Scheme, args: Values, streams: Streams, rule_of: RuleOf, most: int
) -> dict[str, Value]:
    """The largest smaller number of clients, at most ``most``, that works with this seed; empty if none does."""
    if not scheme.has("clients"):
        return {}
    largest = min(count_of(args, "clients") - 1, most)
    return _first_that_works("clients", range(largest, 0, -1), args, streams, rule_of)


def alphas_above(alpha: float) -> list[float]:
    """Values of two digits above ``alpha`` up to 1,000, about 10 % apart."""
    mantissas = [*range(10, 20), *range(20, 50, 2), *range(50, 100, 5)]
    values = []
    for exponent in range(-9, 3):
        values += [float(f"{mantissa}e{exponent}") for mantissa in mantissas]
    return [value for value in values if alpha < value <= LARGEST_ALPHA]


def _first_that_works(
    name: str, values: Sequence[float], args: Values, streams: Streams, rule_of: RuleOf
) -> dict[str, Value]:
    """The first of the ``values`` of an argument with which a short search finds a draw; empty if none does.

    It is found by bisection, because draws are easier to accept with later values.
    """

    def works(value: float) -> bool:
        rule = rule_of({**args, name: value})
        if not _has_rows(rule):
            return False
        found = search(streams("shares"), rule, draws=TRIAL_DRAWS, shares=TRIAL_SHARES)
        return found.counts is not None

    if not values or not works(values[-1]):
        return {}
    place = bisect_left(values, True, hi=len(values) - 1, key=works)
    return {name: values[place]}


def deal_by_rule(
    scheme: Scheme,
    args: Values,
    streams: Streams,
    rule_of: RuleOf,
    rows: Sequence[np.ndarray],
) -> RowLists:
    """The ``rows`` of each of C classes in drawn shares, as the rows of each of M clients.

    Other arguments and errors as ``counts_or_error``.
    """
    counts = counts_or_error(scheme, args, streams, rule_of)
    dealt = deal_rows(rows, counts, streams("rows"))
    if args.get("fill"):
        return fill_up(dealt, rule_of(args).minimum, streams("fill"))
    return dealt


def deal_rows(rows: Sequence[np.ndarray], counts: np.ndarray, rng: np.random.Generator) -> RowLists:
    """The rows of each of M clients: consecutive pieces of the shuffled rows of each of C classes.

    ``counts`` are int64 [C, M]; they may sum to less than the rows of a class.
    """
    sizes = counts.sum(0)
    dealt = RowLists.of_sizes(np.empty(int(sizes.sum()), np.int64), sizes)
    start = dealt.ends[:-1].copy()  # begin of each client's next piece
    for of_class, count in zip(rows, counts, strict=True):
        # Each client's next piece holds its rows of this class.
        dealt.rows[ranges(start, count)] = rng.permutation(of_class)[: int(count.sum())]
        start += count
    return dealt


def present(pool: RowPool, rows: np.ndarray) -> list[np.ndarray]:
    """The rows of each class that has any; an empty class takes no random numbers."""
    return [r for r in pool.by_class(rows) if len(r)]


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
        domain_name = pool.columns.domains[domain]
        short += [f"{domain_name}/{name}" for name in _scarce_classes(pool, rows, shots)]
        least = min(least, *map(len, pool.by_class(rows)))
    made = Dealt(train, _balanced_tests(pool, args), _domain_names(pool))
    if not short:
        return made
    return replace(
        made, notes=[f"{FEWER} {shots} training rows: {_first_names(short)}"], enough_shots=least
    )


def deal_feature_label_shift(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """Per class p ~ Dir(alpha 1_M) over the M domains; client i gets the first floor(p_i M shots) rows of its domain.

    If no domain runs out of rows, more than M shots C - M C and at most M shots C rows are assigned.
    """
    domains = _domains(FEATURE_LABEL_SHIFT, pool)
    classes = [pool.by_class(pool.of_domain(pool.train, domain)) for domain in domains]
    sizes = [[len(rows) for rows in of_domain] for of_domain in classes]
    limit = np.array(sizes, np.int64).T

    def rule_of(args: Values) -> Rule:
        rows_of_class = len(domains) * count_of(args, "shots")
        quota = np.full(len(limit), rows_of_class, np.int64)
        return Rule(quota, len(domains), number_of(args, "alpha"), exact=False, limit=limit)

    counts = counts_or_error(FEATURE_LABEL_SHIFT, args, streams, rule_of)
    train = []
    for of_domain, count in zip(classes, counts.T, strict=True):
        taken = [rows[:n] for rows, n in zip(of_domain, count, strict=True)]
        train.append(np.concatenate(taken))
    test = []
    if args["test_protocol"] == "balanced":
        test = _balanced_tests(pool, args)
    else:
        for rows, domain in zip(train, domains, strict=True):
            candidates = pool.of_domain(pool.test, domain)
            alone = RowLists.of([rows])
            matched = MatchedLists.of(candidates, pool.columns.label, streams("test"), alone)
            test.append(matched.at(0))
    return Dealt(train, test, _domain_names(pool), [])


def deal_label_shift(pool: RowPool, args: Values, streams: Streams) -> Dealt:
    """Per class: the first q = shots ratio M rows, shuffled, cut at floor(cumsum(p) q) with p ~ Dir(alpha 1_M).

    A client that already holds N / M rows, with N the rows of the whole pool, gets none of the next class, which hardly
    ever happens. Each client shuffles its n_i rows: the first floor(n_i / ratio) are for training, the others for
    testing. A class with fewer rows than q gives all of them; ratio and M are kept, so the training sets shrink.
    """
    source = pool.train
    if args["pool"] == "test":
        source = pool.test
    need_rows(source, str(args["pool"]), LABEL_SHIFT.name)
    classes = present(pool, source)
    ratio = number_of(args, "ratio")

    def quota_of(args: Values) -> np.ndarray:
        most = _rows_of_class(args)
        sizes = [min(most, len(rows)) for rows in classes]
        return np.array(sizes, np.int64)

    def rule_of(args: Values) -> Rule:
        clients = count_of(args, "clients")
        # One of ceil(ratio) rows is for training. As ratio > 1, at least one other is for testing.
        least = math.ceil(ratio)
        gate = len(source) / clients
        return Rule(quota_of(args), clients, number_of(args, "alpha"), minimum=least, gate=gate)

    quota = quota_of(args)
    first = [rows[:q] for rows, q in zip(classes, quota, strict=True)]
    drawn = deal_by_rule(LABEL_SHIFT, args, streams, rule_of, first)
    shuffled = [streams("holdout", client).permutation(rows) for client, rows in enumerate(drawn)]
    cuts = [math.floor(len(rows) / ratio) for rows in shuffled]
    train = [rows[:cut] for rows, cut in zip(shuffled, cuts, strict=True)]
    if args["test_protocol"] == "matched":
        test = [rows[cut:] for rows, cut in zip(shuffled, cuts, strict=True)]
    else:
        unused = np.setdiff1d(pool.test, np.concatenate(drawn))
        shared = first_per_class(pool, unused, count_of(args, "tests"))
        test = [shared] * len(train)
    notes = _label_shift_notes(pool, args, quota, train)
    enough = None
    if (quota < _rows_of_class(args)).any():
        enough = _enough_shots(args, int(quota.min()))
    return Dealt(train, test, notes=notes, enough_shots=enough)


def _rows_of_class(args: Values) -> int:
    """Rows that label shift draws of each class: shots for every client, times the ratio."""
    return round(count_of(args, "shots") * number_of(args, "ratio") * count_of(args, "clients"))


def _label_shift_notes(
    pool: RowPool, args: Values, quota: np.ndarray, train: Sequence[np.ndarray]
) -> list[str]:
    """Notes on differences from the paper's setting: a pool of several domains, or classes with too few rows."""
    notes = []
    if len(pool.domains) > 1:
        notes.append(
            f"the rows come from {len(pool.domains)} domains, but the label shift of the paper is within "
            "one domain (--domain)"
        )
    planned = _rows_of_class(args)
    short = int((quota < planned).sum())
    if short:
        least = quota.min()
        mean = float(np.mean([len(rows) for rows in train]))
        usual = count_of(args, "shots") * len(quota)
        many = f"{short} of {len(quota)} classes"
        what = f"{many} have {FEWER} the {planned} requested rows (least {least})"
        notes.append(f"{what}: {mean:.1f} training rows per client instead of {usual}")
    return notes


def _enough_shots(args: Values, least: int) -> int:
    """The largest number of shots for which ``least`` rows of a class are enough."""
    rows_per_shot = number_of(args, "ratio") * count_of(args, "clients")
    shots = count_of(args, "shots") - 1
    while shots and round(shots * rows_per_shot) > least:
        shots -= 1
    return shots


def _domains(scheme: Scheme, pool: RowPool) -> tuple[int, ...]:
    """The chosen domains. Raises InfeasibleError for fewer than two, and for a domain without training or test rows.

    The errors have no hint, because ``partition.make`` looks for other arguments.
    """
    names = _domain_names(pool)
    if len(names) < 2:
        found = ", ".join(names) or "none"
        why = f"Scheme {scheme.name} makes one client per domain and needs at least 2 domains, found {found}."
        raise InfeasibleError(why, "")
    for split, rows in (("train", pool.train), ("test", pool.test)):
        empty = []
        for name, code in zip(names, pool.domains, strict=True):
            if not len(pool.of_domain(rows, code)):
                empty.append(name)
        if empty:
            others = tuple(name for name in names if name not in empty)
            instead: Values = {}
            if len(others) > 1:
                instead = {"domain": others}
            where = ", ".join(empty)
            why = f"Scheme {scheme.name}: {where} has no readable {split} rows."
            raise InfeasibleError(why, "", instead)
    return pool.domains


def _balanced_tests(pool: RowPool, args: Values) -> list[np.ndarray]:
    """The first ``tests`` test rows of each class, for every domain."""
    tests = count_of(args, "tests")
    of_domains = [pool.of_domain(pool.test, domain) for domain in pool.domains]
    return [first_per_class(pool, rows, tests) for rows in of_domains]


def _domain_names(pool: RowPool) -> list[str]:
    return [pool.columns.domains[domain] for domain in pool.domains]


def _scarce_classes(pool: RowPool, rows: np.ndarray, shots: int) -> list[str]:
    """Classes with fewer rows than ``shots``, each with its number of rows."""
    held = zip(pool.columns.classes, pool.by_class(rows), strict=True)
    return [f"{name} ({len(r)})" for name, r in held if len(r) < shots]


def _first_names(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    text = ", ".join(names[:NAMED])
    more = len(names) - NAMED
    if more > 0:
        return f"{text} and {more} more"
    return text


def _with_ratio(args: Values) -> Values:
    """The arguments with ``ratio``, drawn rows to training rows, as in the released code: smaller for more clients."""
    if args["ratio"] is not None:
        return args
    clients = count_of(args, "clients")
    ratio = 1.5
    for most, larger in ((40, 3.0), (20, 5.5), (10, 11.0)):
        if clients <= most:
            ratio = larger
    return {**args, "ratio": ratio}


_PER_CLASS = "training rows of each class that a client has on average"
FEATURE_SHIFT = Scheme(
    "feature-shift",
    "each domain is a client, with the same number of rows of every class",
    "FedPCL, arXiv:2209.10083",
    (
        shots_argument(10, "training rows of each class"),
        Argument(
            "order",
            "choice",
            "stored",
            "`stored`: the first rows as stored, equal for every seed; `random`: random rows",
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
    "one domain; each client gets Dirichlet shares of the classes and is tested on a held-out part of its own draw",
    "FedPCL, arXiv:2209.10083",
    (
        clients_argument(5),
        alpha_argument(1.0),
        shots_argument(10, _PER_CLASS),
        Argument(
            "ratio",
            "float",
            None,
            "number of rows drawn for each training row; the other drawn rows are test rows (default 11 for up to 10 "
            "clients, 5.5 up to 20, 3 up to 40, then 1.5)",
            low=1.0,
            high=1e6,
            above=True,
            tag="r",
        ),
        Argument(
            "pool",
            "choice",
            "train",
            "the split whose rows are assigned",
            choices=("train", "test"),
            tag="p",
        ),
        FILL,
        test_protocol_argument(
            "matched",
            "`matched`: the held-out part of the client's own draw; `balanced`: the same class-balanced rows for all",
        ),
        tests_argument(100),
        DOMAIN,
    ),
    deal_label_shift,
    derive=_with_ratio,
)
FEATURE_LABEL_SHIFT = Scheme(
    "feature-label-shift",
    "each domain is a client and gets Dirichlet shares of the classes",
    "FedPCL, arXiv:2209.10083",
    (
        alpha_argument(1.0),
        shots_argument(10, _PER_CLASS),
        test_protocol_argument(
            "balanced",
            "`balanced`: class-balanced test rows of the client's domain; `matched`: test rows of this domain in the "
            "class shares of the client's training rows",
        ),
        tests_argument(100),
        DOMAIN,
    ),
    deal_feature_label_shift,
)
