"""Dirichlet shares of classes over clients, redrawn until every client has enough, with a proof of effort.

Only counts are drawn and tested; rows are shuffled once, after a draw is accepted. The search always ends: by a cap on
draws, by a cap on work, or as soon as the draws themselves show that waiting is hopeless. The error that follows names
the largest smallest client seen and arguments that do work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedcache.federate.partition.row_lists import RowLists
from fedcache.federate.partition.rows import RowPool, Streams
from fedcache.federate.partition.scheme import (
    LARGEST_COUNT,
    InfeasibleError,
    Scheme,
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
STICKS = 0.05  # below this alpha a row of gammas can underflow to 0 / 0; numpy's stick breaking cannot


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

    def counts(self, shares: np.ndarray) -> np.ndarray:
        """Rows of every class and client, int64 [B, C, M], of shares [B, C, M]."""
        draws, classes, clients = shares.shape
        counts = np.empty(shares.shape, np.int64)
        size = np.zeros((draws, clients), np.int64)
        for c in range(classes):
            share, quota = shares[:, c], self.quota[c]
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
        return counts


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

    counts: np.ndarray | None  # int64 [C, M] of the accepted draw, or None
    draws: int  # how many were tried
    largest: int  # largest smallest client seen
    hopeless: bool = False  # drawing stopped early because no acceptance was to be expected within the cap


def draw(rng: np.random.Generator, alpha: float, draws: int, classes: int, clients: int) -> np.ndarray:
    """Independent Dir(alpha 1_M) shares, [draws, C, M]. One draw after the other, whatever the block size."""
    if alpha < STICKS:
        return rng.dirichlet(np.full(clients, alpha), size=(draws, classes))
    gamma = rng.standard_gamma(alpha, size=(draws, classes, clients))
    gamma /= gamma.sum(axis=-1, keepdims=True)
    return gamma


def search(rng: np.random.Generator, rule: Rule, *, draws: int = DRAWS, shares: int = SHARES) -> Search:
    """Draw until the rule accepts, at most ``draws`` draws and (but for the first ``LEAST_DRAWS``) ``shares`` numbers.

    Clients compete for the same rows, so that one being short makes the others less likely to be: with s the share of
    short clients seen, P(nobody short) <= (1 - s)^M up to the error of s. When that bound allows less than
    ``HOPELESS`` acceptances within the cap, drawing on is a waste, and the search ends.
    """
    classes, clients = len(rule.quota), rule.clients
    cap = min(draws, max(LEAST_DRAWS, shares // (classes * clients)))
    done = short = 0
    largest = -1
    for block in _blocks(cap, max(1, BLOCK // (classes * clients))):
        share = draw(rng, rule.alpha, block, classes, clients)
        counts = rule.counts(share)
        size = counts.sum(axis=1)
        is_short = size < rule.minimum
        if rule.least_share > 0.0:
            is_short |= share.sum(axis=1) <= rule.least_share
        accepted = np.flatnonzero(~is_short.any(axis=-1))
        if len(accepted):
            first = int(accepted[0])
            return Search(counts[first], done + first + 1, int(size[first].min()))
        done += block
        short += int(is_short.sum())
        largest = max(largest, int(size.min(axis=-1).max()))
        if done * clients >= SEEN and cap * (1.0 - short / (done * clients)) ** clients < HOPELESS:
            return Search(None, done, largest, hopeless=True)
    return Search(None, done, largest)


def _blocks(cap: int, largest: int) -> Iterator[int]:
    """Block sizes 1, 4, 16, ... that sum to ``cap``: most searches end at the first draw."""
    done, size = 0, 1
    while done < cap:
        block = min(size, largest, cap - done)
        yield block
        done += block
        size *= 4


def counts_or_error(scheme: Scheme, args: Values, streams: Streams, rule_of: Callable[[Values], Rule]) -> np.ndarray:
    """The accepted counts, int64 [C, M].

    Args:
        scheme: for the message.
        args: resolved arguments; must hold ``alpha``.
        streams: the search draws from ``shares``.
        rule_of: the rule of these arguments, and of others, to look for some that work.

    Raises:
        InfeasibleError: naming the largest smallest client seen and the smallest alpha (or, where no alpha works, the
            number of clients) found to work with the same seed.
    """
    rule = rule_of(args)
    wanted = f"{rule.minimum} rows" if rule.minimum > 1 else "1 row"
    who = f"Scheme {scheme.name} with alpha {rule.alpha:g} and {rule.clients} clients"
    rows = int(rule.quota.sum())
    if rows < rule.clients * rule.minimum:
        message = f"{who} needs {rule.clients} x {wanted}, but {rows} rows can be dealt."
        instead = _fewer_clients(scheme, args, streams, rule_of, at_most=rows // rule.minimum)
    else:
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
        instead = _larger_alpha(args, streams, rule_of) or _fewer_clients(scheme, args, streams, rule_of)
    if not instead:
        even = min(rule.clients, rows)
        raise InfeasibleError(
            message, f"Deal the rows evenly instead: fedcache partition --scheme iid --clients {even}"
        )
    what = f"smallest alpha found to work is {instead.get('alpha')}"
    if "clients" in instead:
        what = f"largest number of clients found to work is {instead['clients']}"
    # A derived argument was tried at the value it has; with other clients it would be derived anew.
    derived = scheme.rederived({**args, **instead})
    kept = {a.name: args[a.name] for a in scheme.arguments if a.default is None and a.kind != "names"}
    instead |= {name: value for name, value in kept.items() if value != derived[name]}
    raise InfeasibleError(
        message, f"With this seed the {what}:  {scheme.command({**args, **instead})} --seed {streams.seed}", instead
    )


def _works(streams: Streams, rule: Rule) -> bool:
    if int(rule.quota.sum()) < rule.clients * rule.minimum:
        return False
    return search(streams("shares"), rule, draws=TRIAL_DRAWS, shares=TRIAL_SHARES).counts is not None


def _larger_alpha(args: Values, streams: Streams, rule_of: Callable[[Values], Rule]) -> dict[str, Value]:
    """The smallest larger alpha that works with this seed; empty when none does."""
    alphas = alphas_above(number_of(args, "alpha"))
    place = _first(len(alphas), lambda i: _works(streams, rule_of({**args, "alpha": alphas[i]})))
    return {} if place is None else {"alpha": alphas[place]}


def _fewer_clients(
    scheme: Scheme, args: Values, streams: Streams, rule_of: Callable[[Values], Rule], *, at_most: int = LARGEST_COUNT
) -> dict[str, Value]:
    """The most clients, fewer than asked for, that work with this seed; empty when the scheme has no such argument."""
    if not any(argument.name == "clients" for argument in scheme.arguments):
        return {}
    most = min(count_of(args, "clients") - 1, at_most)
    place = _first(most, lambda i: _works(streams, rule_of({**args, "clients": most - i})))
    return {} if place is None else {"clients": most - place}


def alphas_above(alpha: float) -> list[float]:
    """Values of two digits above ``alpha`` up to 1,000, about 10 % apart."""
    mantissas = [*range(10, 20), *range(20, 50, 2), *range(50, 100, 5)]
    values = [float(f"{m}e{e}") for e in range(-9, 3) for m in mantissas]
    return [value for value in values if alpha < value <= LARGEST_ALPHA]


def _first(count: int, works: Callable[[int], bool]) -> int | None:
    """The first place below ``count`` that works, by bisection: later is easier. The place returned was tried."""
    if count < 1 or not works(count - 1):
        return None
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if works(middle):
            high = middle
        else:
            low = middle + 1
    return high


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
