"""Dirichlet shares of classes over clients, redrawn until every client has enough, with a proof of effort.

Only counts are drawn and tested; rows are shuffled once, after a draw is accepted. The search always ends: by a cap on
draws, by a cap on work, or as soon as the draws themselves show that waiting is hopeless. The error that follows names
the largest smallest client seen and arguments that do work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedcache.federate.partition.fill_up import fill_up
from fedcache.federate.partition.row_lists import RowLists
from fedcache.federate.partition.scheme import (
    LARGEST_COUNT,
    InfeasibleError,
    RowPool,
    Scheme,
    Streams,
    Value,
    Values,
    count_of,
    number_of,
)

DRAWS = 1_000_000  # hard cap on redraws
SHARES = 250_000_000  # and on numbers drawn: 250,000 draws of 100 clients and 10 classes, 12 to 20 CPU seconds
LEAST_DRAWS = 8  # however large one draw is
BLOCK = 1 << 20  # numbers drawn at once: 8 MiB
TRIAL_DRAWS = 5_000  # for each candidate, when looking for arguments that work
TRIAL_SHARES = 5_000_000
LARGEST_ALPHA = 1_000.0
HOPELESS = 1.0  # acceptances expected within the cap, below which drawing stops
SEEN = 20_000  # clients drawn before their shortness is trusted
STICKS = (
    0.05  # below this alpha a row of gammas can underflow to 0 / 0; numpy's stick breaking cannot
)


@dataclass(frozen=True, eq=False)
class Rule:
    """How shares become counts, and which counts are accepted."""

    quota: np.ndarray  # int64 [C], rows of each class to deal
    clients: int  # M
    alpha: float  # Dirichlet concentration, the same for every client
    minimum: int = 1  # smallest number of rows of an accepted client
    # cut the quota at floor(cumulative share x quota), so that every row is dealt; otherwise every client gets
    # floor(share x quota) and the rest stays
    exact: bool = True
    # a client that already holds this many rows gets none of the next class; None for no gate
    gate: float | None = None
    limit: np.ndarray | None = None  # int64 [C, M], rows that exist for a client; None for no limit
    least_share: float = 0.0  # a client's shares summed over classes must exceed this

    def counts(self, shares: Iterable[np.ndarray], draws: int) -> Counts:
        """Rows of every class and client of ``draws`` draws, whose shares [B, M] come class by class."""
        # Half the memory of int64: a hundred classes of a million clients are 0.4 GB.
        dtype = np.int32 if self.quota.max(initial=0) < 2**31 else np.int64
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


@dataclass(frozen=True, eq=False)
class Counts:
    """B draws of rows for M clients."""

    rows: np.ndarray  # int32 (int64 beyond 2**31 rows of a class) [B, C, M]
    size: np.ndarray  # int64 [B, M], their sum over classes
    share: np.ndarray  # float64 [B, M], the sum of a client's shares


def gated(share: np.ndarray, is_open: np.ndarray) -> np.ndarray:
    """Shares [B, M] of the open clients, renormalised; equal among them when all their mass was lost."""
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
    """The outcome of drawing."""

    counts: np.ndarray | None  # [C, M] of the accepted draw, or None
    draws: int  # how many were tried
    largest: int  # largest smallest client seen
    hopeless: bool = (
        False  # drawing stopped early because no acceptance was to be expected within the cap
    )


def draw(
    rng: np.random.Generator, alpha: float, draws: int, classes: int, clients: int
) -> np.ndarray:
    """Independent Dir(alpha 1_M) shares, [draws, C, M]. One draw after the other, whatever the block size."""
    if alpha < STICKS:
        return rng.dirichlet(np.full(clients, alpha), size=(draws, classes))
    gamma = rng.standard_gamma(alpha, size=(draws, classes, clients))
    gamma /= gamma.sum(axis=-1, keepdims=True)
    return gamma


def draw_by_class(
    rng: np.random.Generator, alpha: float, draws: int, classes: int, clients: int
) -> Iterator[np.ndarray]:
    """The numbers of ``draw`` as the shares [draws, M] of each class; of one draw only a class at a time is held."""
    if draws == 1:
        for _ in range(classes):
            yield draw(rng, alpha, 1, 1, clients)[:, 0]
    else:
        yield from draw(rng, alpha, draws, classes, clients).swapaxes(0, 1)


def search(
    rng: np.random.Generator, rule: Rule, *, draws: int = DRAWS, shares: int = SHARES
) -> Search:
    """Draw until the rule accepts, at most ``draws`` draws and (but for the first ``LEAST_DRAWS``) ``shares`` numbers.

    Clients compete for the same rows, so that one being short makes the others less likely to be: with s the share of
    short clients seen, P(nobody short) <= (1 - s)^M up to the error of s. When that bound allows less than
    ``HOPELESS`` acceptances within the cap, drawing on is a waste, and the search ends.
    """
    classes = len(rule.quota)
    clients = rule.clients
    cap = min(draws, max(LEAST_DRAWS, shares // (classes * clients)))
    done = short = 0
    largest = -1
    for block in _blocks(cap, max(1, BLOCK // (classes * clients))):
        counts = rule.counts(draw_by_class(rng, rule.alpha, block, classes, clients), block)
        size = counts.size
        is_short = size < rule.minimum
        if rule.least_share > 0.0:
            is_short |= counts.share <= rule.least_share
        accepted = np.flatnonzero(~is_short.any(axis=-1))
        if len(accepted):
            first = int(accepted[0])
            return Search(counts.rows[first], done + first + 1, int(size[first].min()))
        done += block
        short += int(is_short.sum())
        largest = max(largest, int(size.min(axis=-1).max()))
        if done * clients >= SEEN and cap * (1.0 - short / (done * clients)) ** clients < HOPELESS:
            return Search(None, done, largest, hopeless=True)
    return Search(None, done, largest)


def _blocks(cap: int, largest: int) -> Iterator[int]:
    """Block sizes 1, 4, 16, ... that sum to ``cap``: most searches end at the first draw."""
    done = 0
    size = 1
    while done < cap:
        block = min(size, largest, cap - done)
        yield block
        done += block
        size *= 4


def counts_or_error(
    scheme: Scheme, args: Values, streams: Streams, rule_of: Callable[[Values], Rule]
) -> np.ndarray:
    """The accepted counts, [C, M] int32, or int64 for classes beyond 2**31 rows.

    Args:
        scheme: for the message.
        args: resolved arguments; must hold ``alpha``.
        streams: the search draws from ``shares``.
        rule_of: the rule of these arguments, and of others, to look for some that work.

    Raises:
        InfeasibleError: naming the largest smallest client seen and the smallest alpha (or, where no alpha works, the
            number of clients) found to work with the same seed, and how to fill clients up where the scheme can. No
            hint where neither was found.
    """
    rule = rule_of(args)
    wanted = f"{rule.minimum} rows" if rule.minimum > 1 else "1 row"
    who = f"Scheme {scheme.name} with alpha {rule.alpha:g} and {rule.clients} clients"
    rows = int(rule.quota.sum())
    can_fill = any(argument.name == "fill" for argument in scheme.arguments)
    # One draw of so many numbers takes seconds: what else works is then only said where it is known without drawing.
    tries = not (can_fill and rule.clients * len(rule.quota) > TRIAL_SHARES)
    instead: dict[str, Value] = {}
    filled: dict[str, Value] = {"fill": True}
    if not _has_rows(rule):
        most = rows // rule.minimum
        message = f"{who} needs {rule.clients} x {wanted}, but {rows} rows can be dealt: enough for {most} clients."
        filled["clients"] = most
        if tries and not args.get("fill"):
            instead = _fewer_clients(scheme, args, streams, rule_of, at_most=most)
        can_fill = can_fill and most > 0 and _has_rows(rule_of({**args, "clients": most}))
    else:
        if args.get("fill"):  # the first draw, whoever is short in it
            first = draw_by_class(streams("shares"), rule.alpha, 1, len(rule.quota), rule.clients)
            counts: np.ndarray = rule.counts(first, 1).rows[0]
            return counts
        found = search(streams("shares"), rule)
        if found.counts is not None:
            return found.counts
        if rule.least_share > 0.0:
            wanted += f" and {rule.least_share:.3g} of a class in shares"
        stop = "more draws would not help" if found.hopeless else "that is the cap"
        message = (
            f"{who}: none of {found.draws:,} draws gave every client {wanted} ({stop}); "
            f"the largest smallest client seen had {found.largest} rows."
        )
        if tries:
            instead = _larger_alpha(args, streams, rule_of) or _fewer_clients(
                scheme, args, streams, rule_of
            )
    hints = []
    if instead:
        what = f"smallest alpha found to work is {instead.get('alpha')}"
        if "clients" in instead:
            what = f"largest number of clients found to work is {instead['clients']}"
        instead = _as_tried(scheme, args, instead)
        hints.append(
            f"With this seed the {what}:  {scheme.command({**args, **instead})} --partition-seed {streams.seed}"
        )
    if can_fill:
        filled = _as_tried(scheme, args, filled)
        hints.append(
            "Who is short gets rows of the largest clients with:  "
            f"{scheme.command({**args, **filled})} --partition-seed {streams.seed}"
        )
    raise InfeasibleError(message, "\n".join(hints), instead or (filled if can_fill else {}))


def _as_tried(scheme: Scheme, args: Values, instead: dict[str, Value]) -> dict[str, Value]:
    """``instead`` with the derived arguments at the values they were tried at, where others would follow from it."""
    derived = scheme.rederived({**args, **instead})
    kept = {
        a.name: args[a.name]
        for a in scheme.arguments
        if a.name in derived and a.default is None and a.kind != "names"
    }
    return instead | {name: value for name, value in kept.items() if value != derived[name]}


def _has_rows(rule: Rule) -> bool:
    """Whether every client could have its least number of rows."""
    return int(rule.quota.sum()) >= rule.clients * rule.minimum


def _works(streams: Streams, rule: Rule) -> bool:
    if not _has_rows(rule):
        return False
    return (
        search(streams("shares"), rule, draws=TRIAL_DRAWS, shares=TRIAL_SHARES).counts is not None
    )


def _larger_alpha(
    args: Values, streams: Streams, rule_of: Callable[[Values], Rule]
) -> dict[str, Value]:
    """The smallest larger alpha that works with this seed; empty when none does."""
    alphas = alphas_above(number_of(args, "alpha"))
    place = _first(len(alphas), lambda i: _works(streams, rule_of({**args, "alpha": alphas[i]})))
    if place is None:
        return {}
    return {"alpha": alphas[place]}


def _fewer_clients(
    scheme: Scheme,
    args: Values,
    streams: Streams,
    rule_of: Callable[[Values], Rule],
    *,
    at_most: int = LARGEST_COUNT,
) -> dict[str, Value]:
    """The most clients, fewer than asked for, that work with this seed; empty when the scheme has no such argument."""
    if not any(argument.name == "clients" for argument in scheme.arguments):
        return {}
    most = min(count_of(args, "clients") - 1, at_most)
    place = _first(most, lambda i: _works(streams, rule_of({**args, "clients": most - i})))
    if place is None:
        return {}
    return {"clients": most - place}


def alphas_above(alpha: float) -> list[float]:
    """Values of two digits above ``alpha`` up to 1,000, about 10 % apart."""
    mantissas = [*range(10, 20), *range(20, 50, 2), *range(50, 100, 5)]
    values = [float(f"{m}e{e}") for e in range(-9, 3) for m in mantissas]
    return [value for value in values if alpha < value <= LARGEST_ALPHA]


def _first(count: int, works: Callable[[int], bool]) -> int | None:
    """The first place below ``count`` that works, by bisection: later is easier. The place returned was tried."""
    if count < 1 or not works(count - 1):
        return None
    low = 0
    high = count - 1
    while low < high:
        middle = (low + high) // 2
        if works(middle):
            high = middle
        else:
            low = middle + 1
    return high


def deal_by_rule(
    scheme: Scheme,
    args: Values,
    streams: Streams,
    rule_of: Callable[[Values], Rule],
    rows: Sequence[np.ndarray],
) -> RowLists:
    """The ``rows`` of each of C classes dealt in drawn shares: the rows of each of M clients.

    Raises as ``counts_or_error``; so are the other arguments.
    """
    dealt = deal_rows(rows, counts_or_error(scheme, args, streams, rule_of), streams("rows"))
    if args.get("fill"):
        return fill_up(dealt, rule_of(args).minimum, streams("fill"))
    return dealt


def deal_rows(rows: Sequence[np.ndarray], counts: np.ndarray, rng: np.random.Generator) -> RowLists:
    """Shuffle the rows of each of C classes and hand out consecutive pieces: the rows of each of M clients.

    ``counts`` are int64 [C, M]; a class's counts may sum to less than it has.
    """
    sizes = counts.sum(0)
    dealt = RowLists.of_sizes(np.empty(int(sizes.sum()), np.int64), sizes)
    start = dealt.ends[:-1].copy()  # where each client's next piece begins
    for of_class, count in zip(rows, counts, strict=True):
        shuffled = rng.permutation(of_class)[: int(count.sum())]
        before = np.cumsum(count) - count
        dealt.rows[np.repeat(start - before, count) + np.arange(len(shuffled))] = shuffled
        start += count
    return dealt


def present(pool: RowPool, rows: np.ndarray) -> list[np.ndarray]:
    """The rows of each class that has any: an empty class takes no draw."""
    return [r for r in pool.by_class(rows) if len(r)]
