"""The way of every upload into the aggregate, in every execution and engine.

    uploads -> update validation -> attack simulation -> clipping and noise, or robust rule -> pooled upload

With the default policy an upload is validated and added to a running float64 sum as it comes, so memory is that of one
upload whatever the number of clients; that is this file. A policy that compares uploads with one another keeps those of
a round until the last is there (``BufferedUploads``). What comes out has the form that ``Method.aggregate`` expects;
uploads may carry a leading axis of grid points, and stacked ones are put in client order whatever the order in
which they came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import FederatedRunError, InternalError
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method, Pooling, Uploads
from fedcache.federate.trust.noise import Noise
from fedcache.federate.trust.policy import TrustPolicy
from fedcache.federate.trust.update_validation import UpdateValidation, is_bounded, not_finite
from fedcache.heads.linear import Tree


class UploadPool:
    """A running aggregate of uploads.

    Args:
        rules: name prefix -> mean (weights n_i) | uniform | sum | stack; the longest matching prefix decides.
        clients: how many uploads will come; what is stacked has its memory from the beginning.
    """

    def __init__(self, rules: Mapping[str, Pooling], clients: int) -> None:
        self._clients = clients
        self._rules = sorted(rules.items(), key=lambda item: -len(item[0]))
        self._sums: dict[str, Tensor] = {}
        self._stacks: dict[str, tuple[list[int], Tensor]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._weight = 0.0
        self._count = 0

    def rule(self, name: str) -> Pooling:
        """How the upload of that name is pooled."""
        for prefix, rule in self._rules:
            if name.startswith(prefix):
                return rule
        raise InternalError(
            f"No pooling rule covers the upload {name!r}.", "Add its prefix to the method's pool."
        )

    def add(self, up: Tree, weight: float, client: int, scale: float = 1.0) -> None:
        """Add a client's upload with its weight n_i (not yet divided by N); ``scale`` is of what is summed."""
        self._weight += weight
        self._count += 1
        for name, t in up.items():
            if (first := self._shapes.setdefault(name, t.shape)) != t.shape:
                raise FederatedRunError(
                    f"Client {client} uploads {name} of shape {tuple(t.shape)}, and another {tuple(first)}.",
                    "Uploads that are taken together have one shape: pad them and send a mask.",
                )
            self._dtypes[name] = t.dtype
            if self.rule(name) == "stack":
                if name not in self._stacks:
                    self._stacks[name] = ([], t.new_empty((self._clients, *t.shape)))
                order, stack = self._stacks[name]
                stack[len(order)] = t
                order.append(client)
            else:
                self._accumulate(name, t, self.factor(name, weight, scale))

    def factor(self, name: str, weight: float, scale: float = 1.0) -> float:
        """What multiplies the upload of a client of that weight, of whose sums ``scale`` counts."""
        return {"mean": weight, "sum": scale}.get(self.rule(name), 1.0)

    def weigh(self, weights: Sequence[float]) -> None:
        """Count clients whose uploads come as sums alone."""
        self._weight += sum(weights)
        self._count += len(weights)

    def add_sum(self, name: str, total: Tensor, dtype: torch.dtype) -> None:
        """Add what is already the sum over some clients, each times its ``factor``.

        Clients are counted by ``add`` or ``weigh``.
        """
        self._dtypes[name] = dtype
        self._accumulate(name, total, 1.0)

    def _accumulate(self, name: str, t: Tensor, weight: float) -> None:
        total = self._sums.get(name)
        if total is None:
            total = self._sums[name] = torch.zeros(t.shape, dtype=torch.float64, device=t.device)
        total.add_(t, alpha=weight)

    def done(self) -> Tree:
        """Means and sums in the dtype of the uploads, stacks [k, ..] in client order."""
        out: Tree = {}
        for name, (order, stack) in self._stacks.items():
            place = torch.tensor(
                sorted(range(len(order)), key=order.__getitem__), device=stack.device
            )
            out[name] = stack[: len(order)] if order == sorted(order) else stack[place]
        for name, total in self._sums.items():
            scale = {"mean": self._weight, "uniform": float(self._count), "sum": 1.0}[
                self.rule(name)
            ]
            out[name] = (total / scale).to(self._dtypes[name])
        return out


@dataclass(frozen=True)
class RejectedUpload:
    """An upload that did not reach ``aggregate``; ``round`` counts from 1."""

    round: int
    client: int
    why: str


@dataclass(frozen=True)
class UploadRound:
    """What is known of a round before its uploads come."""

    method: Method  # whose uploads they are
    hp: Hp  # its hyperparameters
    policy: TrustPolicy  # what is done with uploads
    expected: Uploads  # what the method declares of an upload
    broadcast: Tree  # what the clients were sent
    number: int  # of the round, from 1
    seed: int  # of the run
    names: Sequence[str]  # of all clients of the run
    rows: Sequence[float] | np.ndarray  # n_i of all clients of the run
    weights: Mapping[
        int, float
    ]  # of the round's clients whose rows do not weigh in full (``--max-share``)
    clients: int  # how many take part
    expected_clients: float  # how many take part on average, which noise is accounted for
    expected_rows: float  # the training rows of all clients that may take part
    attackers: frozenset[int]  # clients that lie
    noise: Noise  # that privacy adds to a sum
    longest: float | None  # length that no training row exceeds; None where nobody knows


class UploadPipeline:
    """Takes the uploads of one round, one client at a time, in batches of clients, or as sums over some clients.

    Attributes:
        rejected: uploads that were left out, under ``--on-bad-update reject``.
        unprotected_classes: classes whose owners are so few that the rule expects no liar among them.
    """

    def __init__(self, round_: UploadRound) -> None:
        self.round = round_
        self.policy, self.method, self.expected = round_.policy, round_.method, round_.expected
        self.validation = UpdateValidation(round_.expected, round_.number, round_.longest)
        self._pool = UploadPool(self.method.pool(round_.hp), max(1, round_.clients))
        self.rejected: list[RejectedUpload] = []
        self.unprotected_classes = 0

    def rule(self, name: str) -> Pooling:
        """How an engine hands over the uploads of that name: one by one where they are kept or stacked."""
        return self._pool.rule(name)

    def factors(self, name: str, clients: Sequence[int]) -> list[float]:
        """What multiplies the uploads of some clients in a sum."""
        return [self._pool.factor(name, w := self.weight(c), self._scale(c, w)) for c in clients]

    def weight(self, client: int) -> float:
        """What a client's upload weighs in a mean: its rows, or as much of them as ``--max-share`` leaves it."""
        return self.round.weights.get(client, self.round.rows[client])

    def _scale(self, client: int, weight: float) -> float:
        rows = self.round.rows[client]
        return weight / rows if weight != rows else 1.0

    def _add(self, pool: UploadPool, up: Tree, client: int, weight: float) -> None:
        """Add an upload to a pool; counts that the server weighs stacked uploads by are as small as the weight."""
        scale = self._scale(client, weight)
        if scale != 1.0:
            counts = {
                n for n, t in self.expected.items() if t.counts_rows and pool.rule(n) == "stack"
            }
            up = {n: t * scale if n in counts else t for n, t in up.items()}
        pool.add(up, weight, client, scale)

    def accepts_batch(
        self,
        up: object,
        clients: Sequence[int],
        lead: tuple[int, ...],
        coordinates: Mapping[str, tuple[int, ...]] | None = None,
    ) -> bool:
        """Validate names, shapes, types and counts of a batch of clients at once, before it is taken apart.

        Raises FederatedRunError, naming the round and the first client that is concerned.

        Args:
            up: what ``fit`` returned.
            clients: on the axis of clients, in this order.
            lead: the leading axes, (M,) or (G, M).
            coordinates: name -> shape of the tensors that are written in other coordinates than they are declared in.

        Returns:
            False when all of them are rejected, and there is nothing to ``add``.
        """
        why = self.validation.structure_problem(up, lead, coordinates)
        if (
            why is not None
        ):  # a batch comes from one call of ``fit``, so all its clients have the same names and shapes
            self.rejected += [self._rejection(client, why) for client in sorted(clients)]
            return False
        self._check_counts(up, clients)
        return True

    def _check_counts(self, up: object, clients: Sequence[int]) -> None:
        assert isinstance(up, dict)
        wrong = self.validation.count_problems(up, [self.round.rows[c] for c in clients])
        for client, why in sorted((clients[place], why) for place, why in wrong.items()):
            raise self.validation.refusal(client, self.round.names[client], why)

    def add(self, up: Tree, client: int, *, validated: bool = False) -> None:
        """Take the upload of one client, perhaps with a leading axis of the points of a grid.

        Raises FederatedRunError for a malformed upload, naming client and round; under a policy that keeps uploads it
        is raised by ``pooled``. ``validated`` says that it is known to be sound.
        """
        rows = self.round.rows[client]
        if not validated and not self.validation.is_sound(up, rows):
            name = self.round.names[client]
            if why := self.validation.malformed(up, rows):
                raise self.validation.refusal(client, name, why)
            for tensor, t in up.items():
                if t.is_floating_point() and not is_bounded(t):
                    raise not_finite(
                        tensor, t, self.round.number, (client, name), self.method, self.round.hp
                    )
        self._add(self._pool, up, client, self.weight(client))

    def add_weights(self, clients: Sequence[int]) -> None:
        """Count clients whose uploads come as sums alone."""
        self._pool.weigh([self.weight(c) for c in clients])

    def add_together(self, up: Tree, clients: Sequence[int]) -> bool:
        """Take what some clients send in sum, of a method whose uploads add up, for a policy that only sums.

        Whatever is wrong with the upload of one of them is wrong with the sum: a number that is not finite stays so,
        and counts of rows add up to the rows of all. Then nothing is taken and False is returned: added one by one, the
        client that is concerned is found by its name.
        """
        if self.round.weights or not self.validation.is_sound(
            up, sum(self.round.rows[c] for c in clients)
        ):
            return False
        for name, t in up.items():
            self.add_sum(name, t, t.dtype)
        self.add_weights(clients)
        return True

    def add_sum(self, name: str, total: Tensor, dtype: torch.dtype) -> None:
        """Add what is already the sum over some clients, each times its ``factor``, for a policy that only sums.

        Raises FederatedRunError, when it is not the sum of what the method declares.
        """
        expected = self.expected[name]
        core = tuple(total.shape[total.dim() - len(expected.shape) :])
        if core != expected.shape or dtype != expected.dtype:
            why = f"sums of {name} have shape {core} and {dtype}, expected {expected.shape} and {expected.dtype}"
            raise FederatedRunError(f"Round {self.round.number}: {why}.", "Please report this.")
        self._pool.add_sum(name, total, dtype)

    def pooled(self) -> Tree:
        """What the method's own pool gives of the uploads that survive, as the policy sees them.

        Raises FederatedRunError for a refused upload where that fails the run, and when all are refused.
        """
        return self._pool.done()

    def warnings(self, named: int, unprotected: int) -> list[str]:
        """What a person is told of the uploads that were rejected, and of classes that the rule does not protect.

        Args:
            named: rejected uploads of earlier rounds; the first of a run are named, and the records count all.
            unprotected: unprotected classes of earlier rounds; the first round that has some is told.
        """
        return []

    def _rejection(self, client: int, why: str) -> RejectedUpload:
        """The record of a malformed upload; raises where the policy does not leave such uploads out."""
        if self.policy.on_bad == "fail":
            raise self.validation.refusal(client, self.round.names[client], why)
        return RejectedUpload(self.round.number, client, why)
