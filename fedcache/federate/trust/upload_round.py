"""What is known of a round before its uploads come, and the record of an upload that is left out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.uploads import Uploads
from fedcache.federate.trust.policy import TrustPolicy
from fedcache.heads.linear import Tree


@dataclass(frozen=True)
class RejectedUpload:
    """An upload that did not reach ``aggregate``; ``round`` counts from 1."""

    round: int
    client: int
    why: str


@dataclass(frozen=True)
class UploadRound:
    """What is known of a round before its uploads come.

    Attributes:
        method: whose uploads they are.
        hp: its hyperparameters.
        policy: what is done with uploads.
        expected: what the method declares of an upload.
        broadcast: what the clients were sent.
        number: of the round, from 1.
        seed: of the run.
        names: of all clients of the run.
        rows: n_i of all clients of the run.
        clients: how many take part.
        expected_clients: how many take part on average, which noise is accounted for.
        expected_rows: the training rows of all clients that may take part.
        attackers: clients that lie.
        noise: the generator of privacy noise.
    """

    method: Method
    hp: Hp
    policy: TrustPolicy
    expected: Uploads
    broadcast: Tree
    number: int
    seed: int
    names: Sequence[str]
    rows: Sequence[float]
    clients: int
    expected_clients: float
    expected_rows: float
    attackers: frozenset[int]
    noise: torch.Generator | None
