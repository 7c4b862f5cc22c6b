"""The laws that every aggregation rule must keep: a rule that combines uploads of clients, each with one vote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcache.federate.trust.robust_rules import parse_rule
from fedcache.plugins import forget, register
from fedcache.testing.law import by_name, require

CLIENTS = 9
NUMBERS = 4
LIARS = 2
NAME = "rule-on-trial"


@dataclass(frozen=True)
class Vote:
    """A rule: a text of ``--aggregate``, or a function V [m, d] -> [d] that may take ``f`` and ``number`` by name."""

    rule: str | Callable[..., Tensor]

    def __call__(self, V: Tensor) -> Tensor:
        """Combine the rows of V, assuming two liars. Raises UsageError unless the result is [d] and finite."""
        if isinstance(self.rule, str):
            return parse_rule(self.rule)(V, LIARS)
        # A function is tried as a plug-in, as users would name it; the plug-in is removed afterwards.
        register("aggregator", self.rule, NAME)
        try:
            return parse_rule(NAME)(V, LIARS)
        finally:
            forget("aggregators", NAME)


def uploads() -> Tensor:
    """Uploads of nine clients, [9, 4] float64."""
    g = torch.Generator().manual_seed(3)
    return torch.randn(CLIENTS, NUMBERS, dtype=torch.float64, generator=g)


def agreement_is_returned(vote: Vote) -> None:
    """If all clients send the same upload, the result is this upload."""
    V = uploads()[:1].expand(CLIENTS, NUMBERS).clone()
    sent = V[0]
    result = vote(V)
    same = torch.allclose(result, sent, rtol=0.0, atol=1e-9)
    require(same, f"the result is {result.tolist()} for the uploads {sent.tolist()}")


def clients_have_no_order(vote: Vote) -> None:
    """The order of the clients does not change the result."""
    V = uploads()
    shuffled = V[torch.tensor([4, 0, 8, 1, 7, 3, 2, 6, 5])]
    # Sums in another order may differ in their last bits.
    apart = float((vote(V) - vote(shuffled)).abs().max())
    require(apart < 1e-9, f"in another order the result differs by {apart:.1e}")


def a_shift_moves_the_result(vote: Vote) -> None:
    """Adding the same numbers to every upload adds them to the result.

    Declare this law as an exception for a rule with a fixed origin, such as a bound on norms.
    """
    V = uploads()
    shift = torch.tensor([3.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    apart = float((vote(V + shift) - vote(V) - shift).abs().max())
    require(apart < 1e-6, f"the result misses the shift by {apart:.1e}")


def uploads_are_left_as_they_are(vote: Vote) -> None:
    """The rule does not write into the uploads."""
    V = uploads()
    vote(V)
    require(torch.equal(V, uploads()), "the uploads were changed")


def the_result_is_repeated(vote: Vote) -> None:
    """Two calls on the same uploads give the same bits: the rule draws no random numbers."""
    same = torch.equal(vote(uploads()), vote(uploads()))
    require(same, "two calls on the same uploads give two results")


AGGREGATOR_LAWS = by_name(
    agreement_is_returned,
    clients_have_no_order,
    a_shift_moves_the_result,
    uploads_are_left_as_they_are,
    the_result_is_repeated,
)
"""All laws of aggregators by name."""
