"""Clients of one run that differ: other backbones, other head sizes (FLESD; prototypes of equal width)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedcache.errors import UsageError
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import Method


@dataclass(frozen=True)
class ClientOverrides:
    """In what one client differs from the run's configuration.

    Attributes:
        columns: ranges [start, stop) of the concatenated features it has, in order; () for all.
        hp: its own values of some hyperparameters.
    """

    columns: tuple[tuple[int, int], ...] = ()
    hp: Mapping[str, Value] = field(default_factory=dict)


class FeatureColumns:
    """A feature matrix cut to the columns some clients have; each cut is made once, since clients gather from it."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._cuts: dict[tuple[tuple[int, int], ...], Tensor] = {(): x}

    def cut(self, ranges: tuple[tuple[int, int], ...]) -> Tensor:
        """[N, V, D] -> [N, V, d] with the columns of ``ranges``, contiguous."""
        if ranges not in self._cuts:
            self._cuts[ranges] = torch.cat([self._x[..., a:b] for a, b in ranges], -1)
        return self._cuts[ranges]


def check_mixed(method: Method, own: Mapping[int, ClientOverrides], width: int, clients: int) -> None:
    """Refuse differences the method cannot bear, and columns or clients that do not exist.

    Raises:
        FedcacheError: exit 2.
    """
    wanted = {"backbones"} if any(o.columns for o in own.values()) else set()
    wanted |= {name for o in own.values() for name in o.hp}
    refused = sorted(wanted - method.mixed)
    if refused:
        allowed = ", ".join(sorted(method.mixed)) or "nothing"
        raise UsageError(
            f"Clients of {method.name} may differ in {allowed}, not in {', '.join(refused)}.",
            "Give every client the same, or choose a method that exchanges no weights, for example flesd-head.",
        )
    for client, o in own.items():
        if not 0 <= client < clients or any(not 0 <= a < b <= width for a, b in o.columns):
            raise UsageError(
                f"Client {client} is given columns {o.columns}, but there are {clients} clients and {width} columns.",
                "Ranges are [start, stop) within the concatenated features.",
            )
