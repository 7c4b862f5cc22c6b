"""The test rows of each client, as the scheme or the protocol chooses them, and what is to be said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedcache.federate.partition.matched_lists import MatchedLists
from fedcache.federate.partition.row_lists import RowLists, is_among
from fedcache.federate.partition.scheme import Columns, Dealt, MatchedTests, Scheme, Streams, Value

MOST_TESTED = 10**10
"""Test rows of all clients together, of which a digest can be taken in minutes."""


def tests_of_clients(
    how: Scheme,
    dealt: Dealt,
    test: np.ndarray,
    train: RowLists,
    columns: Columns,
    streams: Streams,
    values: Mapping[str, Value],
) -> Sequence[np.ndarray] | None:
    """The clients' test rows: those the scheme chose, or by ``test_protocol`` from the global ones; None for these."""
    if dealt.test is not None and any(rows is not dealt.test[0] for rows in dealt.test):
        return RowLists.of(dealt.test).ascending()
    if dealt.test is not None:
        chosen = MatchedLists.alike(dealt.test[0], len(train))
    elif values.get("test_protocol") == "matched":
        chosen = MatchedLists.of(
            MatchedTests(test, columns.label, streams("test")), train, columns.label
        )
    else:
        return None
    if (total := int(chosen.sizes.sum())) > MOST_TESTED:
        fit = MOST_TESTED // len(chosen.order)
        raise how.infeasible(
            values,
            f"Scheme {how.name} with {values.get('test_protocol')} tests: {len(train):,} clients have {total:,} test "
            f"rows in all, at most {MOST_TESTED:,} are listed for the digest; {fit:,} clients never have more.",
            {"clients": fit},
        )
    return chosen


def leaks(columns: Columns, trained: np.ndarray, tested: np.ndarray) -> list[str]:
    """A note when an image is both trained and tested on under two names.

    Identities are compared by their first half, and in full where that agrees.
    """
    half = np.ascontiguousarray(columns.uid[:, :8]).view(np.uint64)[:, 0]
    alike = is_among(half[tested], half[trained])
    if not alike.any():
        return []
    near = {
        uid.tobytes() for uid in columns.uid[trained[is_among(half[trained], half[tested[alike]])]]
    }
    twice = sum(uid.tobytes() in near for uid in columns.uid[tested[alike]])
    if twice:
        return [
            f"{twice} of {len(tested)} test rows are the same image as a training row (equal bytes)"
        ]
    return []
