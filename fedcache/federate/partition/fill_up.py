"""Clients that a draw left short get rows of the clients that have most: a way to deal to very many.

Waiting for a draw in which nobody is short (``dirichlet_shares``) ends well for hundreds of clients. Among a million
some are always short of one row, whatever is drawn.
"""

from __future__ import annotations

import numpy as np

from fedcache.federate.partition.row_lists import RowLists
from fedcache.federate.partition.scheme import Argument

FILL = Argument(
    "fill",
    "bool",
    False,
    "instead of new draws until nobody is short, clients that are short get rows of the clients that have most",
    tag="fill",
    later=True,
)


def fill_up(dealt: RowLists, least: int, rng: np.random.Generator) -> RowLists:
    """Move as few rows as will do so that every list has ``least``, one by one from the list that is then longest.

    Sizes 7, 5, 1, 0 with a least of 2: three rows are missing. The longest gives until it is as long as the next (two
    rows), then the first of those gives one: 4, 5, 2, 2. Rows are drawn at random from those of their list, and dealt
    at random to the lists that are short. There must be ``least`` rows for each list.
    """
    sizes = dealt.sizes
    lack = np.maximum(least - sizes, 0)
    if not lack.any():
        return dealt
    kept = lowered(sizes, int(lack.sum()), least)
    # The rows of every list that gives, in random order; of each the first ones go.
    owner = dealt.owner
    given = sizes - kept
    theirs = np.flatnonzero(given[owner] > 0)
    theirs = theirs[np.lexsort((rng.random(len(theirs)), owner[theirs]))]
    lengths = sizes[given > 0]
    rank = np.arange(len(theirs)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    moved = theirs[rank < given[owner[theirs]]]
    owner[rng.permutation(moved)] = np.repeat(np.arange(len(dealt)), lack)
    return RowLists.of_sizes(dealt.rows[np.argsort(owner, kind="stable")], kept + lack)


def lowered(sizes: np.ndarray, missing: int, least: int) -> np.ndarray:
    """int64 [M]: ``sizes`` after ``missing`` were taken one by one, each from the first of those that are largest."""
    low = least
    high = int(sizes.max())
    while low < high:  # the highest level above which there are enough
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high)
            if int(np.maximum(sizes - middle, 0).sum()) >= missing
            else (low, middle - 1)
        )
    kept: np.ndarray = np.minimum(sizes, low)
    above = np.flatnonzero(sizes > low)
    too_many = int((sizes - kept).sum()) - missing
    kept[above[len(above) - too_many :]] += 1  # the last of them keep one more
    return kept
