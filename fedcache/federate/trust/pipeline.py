"""The way of every upload into the aggregate, in every execution and engine.

    uploads -> update validation -> attack simulation -> clipping and noise, or robust rule -> pooled upload

With the default policy an upload is validated and added to a running float64 sum as it comes, so memory is that of one
upload whatever the number of clients; that is this file. A policy that compares uploads with one another keeps those of
a round until the last is there (``BufferedUploads``). What comes out has the form that ``Method.aggregate`` expects;
uploads may carry a leading axis of grid points, and stacked ones are put in client order whatever the order in
which they came.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import FedcacheError, FederatedRunError, InternalError
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method, Pooling, StatisticKind, Uploads
from fedcache.federate.trust.policy import TrustPolicy
from fedcache.federate.trust.privacy import Noise
from fedcache.federate.trust.robust_rules import RobustRule
from fedcache.federate.trust.update_validation import (
    UpdateValidation,
    is_bounded,
    largest_number,
    largest_to_train_from,
    not_finite,
)
from fedcache.heads.linear import Tree
from fedcache.heads.ridge import gram, nearest_gram


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
            out[name] = stack[: len(order)]
            # Uploads that came in another order are put in client order, which costs a copy.
            if order != sorted(order):
                out[name] = stack[np.argsort(order, kind="stable")]
        scales = {"mean": self._weight, "uniform": float(self._count), "sum": 1.0}
        for name, total in self._sums.items():
            out[name] = (total / scales[self.rule(name)]).to(self._dtypes[name])
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
        self.policy = round_.policy
        self.method = round_.method
        self.expected = round_.expected
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
        if weight != rows:
            return weight / rows
        return 1.0

    def _add(self, pool: UploadPool, up: Tree, client: int, weight: float) -> None:
        """Add an upload to a pool; counts that the server weighs stacked uploads by are as small as the weight."""
        scale = self._scale(client, weight)
        if scale != 1.0:
            up = dict(up)
            for name, declared in self.expected.items():
                if declared.counts_rows and pool.rule(name) == "stack":
                    up[name] = up[name] * scale
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
        # a batch comes from one call of ``fit``, so all its clients have the same names and shapes
        if why is not None:
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


# How much a client weighs where its number of rows counts: a bound on the number, a cap on the
# share.
#
# A number of rows is measured in a simulation and claimed in a federation, and a mean by rows
# gives whoever claims enough of them all of it. So a claim far above the others is told or
# refused, and no client need have more than a given share.


FAR_OUT = 10
"""Times the median of all clients' rows, above which a number is far out.

Sizes of honest clients spread over about one order of magnitude: of a log-normal law with sigma 1, as wide as the
federated benchmarks have it, 1 % of the clients lie above. Below three clients no number is far out, as nobody can say
which of two is wrong.
"""

ROUNDING = 1e-12
"""Relative, of shares."""

NAMED = 3
"""Clients that are warned of one by one, the largest first."""

FEWEST = 3
"""Clients from which on there is a median to compare with."""


def far_out_limit(rows: Sequence[float] | np.ndarray) -> float | None:
    """The number of rows above which a client's is far out: ``FAR_OUT`` times the median of those that have any.

    The lower median, so that it takes more than half of the clients to raise it. None for fewer than ``FEWEST``.
    """
    known = np.asarray(rows, np.float64)
    known = known[known > 0]
    if len(known) < FEWEST:
        return None
    middle = (len(known) - 1) // 2
    return FAR_OUT * float(np.partition(known, middle)[middle])


def capped_weights(rows: Sequence[float], share: float) -> list[float]:
    """min(n_i, t), with the largest t for which no weight is more than ``share`` of their sum.

    Args:
        rows: n_i of the clients of a round, each at least 0.
        share: S in (0, 1]. Where S m <= 1 for the m clients that have rows, these all weigh the same.
    """
    n = np.asarray(rows, np.float64)
    rising = np.sort(n[n > 0])
    if share * len(rising) <= 1.0:
        return [float(w) for w in np.minimum(n, rising[0] if len(rising) else 0.0)]
    # With the k largest cut to t, and the others' sum b_k:  t = S (k t + b_k). The first k that leaves no one above t.
    k = 0
    largest = rising[::-1]
    below = np.cumsum(rising)[::-1]
    while largest[k] * (1.0 - k * share) > share * below[k] * (1.0 + ROUNDING):
        k += 1
    if not k:
        return list(rows)
    cap = share * below[k] / (1.0 - k * share)
    return [float(w) for w in np.minimum(n, cap)]


def reduced_weights(rows: Mapping[int, float], share: float | None) -> dict[int, float]:
    """Client -> its capped weight, for the clients of a round whose rows do not weigh in full."""
    if share is None:
        return {}
    weights = capped_weights(list(rows.values()), share)
    return {c: w for (c, n), w in zip(rows.items(), weights, strict=True) if w != n}


def weight_warnings(
    names: Mapping[int, str] | Sequence[str],
    clients: np.ndarray,
    rows: np.ndarray,
    share: float | None,
) -> list[str]:
    """What a person is told of the largest clients, where uploads are averaged or added by rows.

    Args:
        names: of all clients, by number.
        clients: int64 [k], numbers of those that may take part.
        rows: float64 [k], n_i of these.
        share: the cap on a client's share, None for none.
    """
    whole = float(rows.sum())
    limit = far_out_limit(rows)
    if share is not None:
        found = rows > share * whole
    elif limit is not None:
        found = (rows > limit) | (rows > whole / 2)
    else:
        found = np.zeros(len(rows), bool)
    warnings = []
    places = np.flatnonzero(found)
    for place in places[np.argsort(-rows[places], kind="stable")][:NAMED].tolist():
        c = int(clients[place])
        n = float(rows[place])
        has = f"client {c} ({names[c]!r}) has {n:,.0f} rows, {n / whole:.0%} of all"
        if share is None:
            warnings.append(
                f"{has}: more than half of them, or than {FAR_OUT} times the median, and uploads weigh by rows "
                "(--max-share 0.2 caps its weight, --aggregate median gives every client one vote)"
            )
        else:
            warnings.append(f"{has}: --max-share {share:g} caps its weight in every round")
    return warnings


# Uploads that a policy compares with one another: attack simulation, clipping and noise, robust
# rules.
#
# A rule, an attack, noise, rejection, or a bound on norms keeps the uploads of a round until the
# last is there and works on rows V [m, d] of them: updates (upload minus broadcast) where the
# method pools means, statistics per row of data where it pools sums, prototypes of each class
# where its server merges them by class (``Method.merges``).


SECOND_MOMENTS: frozenset[StatisticKind] = frozenset(
    {"gram", "class grams", "squares", "class squares"}
)
"""Kinds of statistics that are bounded by the sums of the same rows."""

FAR_FROM_OTHERS = 1e3
"""Times the median of the other uploads, above which what a client sends or changes may be rejected.

Clients that differ in rows, steps and learning rates change a model by amounts within about two orders of magnitude.
"""

COMPARABLE = 3
"""Fewest uploads of a round that are compared: of two nobody can say which one is wrong."""

NAMED_REJECTIONS = 5
"""Rejected uploads that a run's warnings name one by one; the records count all of them."""


class UploadLayout:
    """Which numbers of an upload stand in a row of V, and where: all floats but counts, tensor by tensor by name.

    Args:
        expected: what the method declares.
        broadcast: what clients were sent; a tensor that is averaged stands in V as its difference from this.
        rules: name -> how the method pools it; what is summed stands in V per row of the client's data.
        counts: whether summed counts of rows stand in V too, so that they are voted on like the sums they belong to.
    """

    def __init__(
        self,
        expected: Uploads,
        broadcast: Tree,
        rules: Mapping[str, Pooling],
        *,
        counts: bool = False,
    ) -> None:
        self.rules = rules
        self.expected = expected
        self.names = []
        self.base = {}
        for name, declared in sorted(expected.items()):
            # Counts say how much an upload weighs; they are voted on only beside the sums they belong to.
            left_out = declared.counts_rows and not (counts and rules[name] == "sum")
            if left_out or not declared.dtype.is_floating_point:
                continue
            self.names.append(name)
            sent = broadcast.get(name)
            replaces = rules[name] in ("mean", "uniform") and not declared.is_step
            if replaces and sent is not None and tuple(sent.shape) == declared.shape:
                self.base[name] = sent.double()

    def vector(self, up: Tree, rows: float) -> Tensor:
        """[d] float64 of an upload by a client with that many rows."""
        parts = []
        for name in self.names:
            t = self.change(name, up[name].double())
            if self.rules[name] == "sum":
                t = t / rows
            parts.append(t.flatten())
        if parts:
            return torch.cat(parts)
        return torch.zeros(0, dtype=torch.float64)

    def tree(self, v: Tensor, rows: float, rest: Tree) -> Tree:
        """The upload that ``vector`` makes ``v`` of; counts and integers are those of ``rest``."""
        out = dict(rest)
        start = 0
        for name in self.names:
            shape = self.expected[name].shape
            size = math.prod(shape)
            t = v[start : start + size].view(shape)
            start += size
            if self.rules[name] == "sum":
                t = t * rows
            if name in self.base:
                t = t + self.base[name]
            out[name] = t.to(self.expected[name].dtype)
        return out

    def change(self, name: str, t: Tensor) -> Tensor:
        """A tensor of an upload, as its difference from the broadcast where the server puts it in that one's place."""
        if name in self.base:
            return t.double() - self.base[name]
        return t

    @property
    def size(self) -> int:
        """d, numbers in a row."""
        return sum(math.prod(self.expected[name].shape) for name in self.names)


@dataclass
class _KeptUpload:
    """An upload that waits for the last one of its round."""

    client: int
    rows: float
    tree: Tree
    validated: bool = False


class BufferedUploads(UploadPipeline):
    """The pipeline of a policy that is not plain."""

    def __init__(self, round_: UploadRound) -> None:
        super().__init__(round_)
        self._kept: list[_KeptUpload] = []

    def rule(self, name: str) -> Pooling:
        """Kept one by one."""
        return "stack"

    def _check_counts(self, up: object, clients: Sequence[int]) -> None:
        """Each upload is validated by itself when all are there, as one may be rejected alone."""

    def add(self, up: Tree, client: int, *, validated: bool = False) -> None:
        """Keep the upload of one client; what is wrong with it is found by ``pooled``."""
        # A copy: an executor may write the next client's upload to the same memory.
        own = up
        if isinstance(up, dict):
            own = {k: t.clone() if isinstance(t, Tensor) else t for k, t in up.items()}
        self._kept.append(_KeptUpload(client, self.round.rows[client], own, validated))

    def pooled(self) -> Tree:
        """What the policy makes of the uploads that survive it."""
        self._kept.sort(key=lambda kept: kept.client)
        if not self._kept and not self.rejected:
            return self._noise_alone()
        if not self.expected:
            raise self.policy.refused(self.method, "its clients send nothing")
        layout = self._layout()
        self._reject(lambda kept: self.validation.malformed(kept.tree, kept.rows))
        if self.policy.attack is not None:
            self._simulate_attack(layout)
        self._reject(self._problem)
        self._reject(lambda kept: self._too_long(layout, kept))
        self._reject_far_out(layout)
        self.rejected.sort(key=lambda rejected: rejected.client)
        if not self._kept:
            raise FederatedRunError(
                f"Round {self.round.number}: all {len(self.rejected)} uploads were refused, so there is nothing to "
                f"aggregate; the first because {self.rejected[0].why}.",
                "Lower the learning rate, or look at the clients.",
            )
        return self._combined()

    def _combined(self) -> Tree:
        """What the policy makes of the uploads that are kept."""
        changed = self.policy.rule.text != "mean" or self.policy.privacy is not None
        if self.method.merges == "classes" and changed:
            return self._merged_classes()
        if self.policy.privacy is not None:
            return self._private(self._layout())
        return self._aggregated()

    def suspects(self) -> list[int]:
        """The clients whose uploads are kept, the one whose upload is farthest from the median of all first.

        Empty where an upload cannot be left out: under noise, which is drawn once for a round.
        """
        if self.policy.privacy is not None or len(self._kept) < 2:
            return []
        V = self._rows(self._layout())
        far = torch.zeros(len(V))
        # The median of no numbers is an error: an upload may hold counts alone.
        if V.shape[1]:
            far = (V - V.median(0).values).norm(dim=1)
        order = far.argsort(descending=True, stable=True).tolist()
        return [self._kept[i].client for i in order]

    def without(self, client: int, why: str) -> tuple[BufferedUploads, Tree]:
        """The same round with that client's upload rejected, and what it pools.

        Raises FederatedRunError or UsageError, where the other uploads do not suffice for the rule.
        """
        rest = copy.copy(self)
        rest._kept = [kept for kept in self._kept if kept.client != client]
        rest.rejected = [*self.rejected, RejectedUpload(self.round.number, client, why)]
        rest.rejected.sort(key=lambda rejected: rejected.client)
        rest.unprotected_classes = 0
        return rest, rest._combined()

    def _problem(self, kept: _KeptUpload) -> str | None:
        """What is wrong with the numbers of an upload, in words.

        The statistics of a liar of a simulated attack are not checked. Those of a private run are clipped instead:
        epsilon does not cover who is rejected.
        """
        if kept.validated:
            return None
        statistics = not self._lies_on_purpose(kept) and self.policy.privacy is None
        return self.validation.problem(kept.tree, kept.rows, statistics=statistics)

    def warnings(self, named: int, unprotected: int) -> list[str]:
        """The first rejected uploads of a run, and the first round with unprotected classes."""
        warnings = []
        if self.unprotected_classes and not unprotected:
            warnings.append(
                f"round {self.round.number}: {self.unprotected_classes} classes have so few owners that --aggregate "
                f"{self.policy.rule.text} expects no liar among them: their prototypes are not protected"
            )
        for r in self.rejected[: max(0, NAMED_REJECTIONS - named)]:
            name = self.round.names[r.client]
            warnings.append(
                f"round {r.round}: the upload of client {r.client} ({name!r}) is rejected: {r.why}"
            )
        return warnings

    def _layout(self, *, counts: bool = False) -> UploadLayout:
        rules = {name: self._pool.rule(name) for name in self.expected}
        return UploadLayout(self.expected, self.round.broadcast, rules, counts=counts)

    def _reject(self, problem: Callable[[_KeptUpload], str | None]) -> None:
        sound = []
        for kept in self._kept:
            why = problem(kept)
            if why is None:
                sound.append(kept)
            else:
                self.rejected.append(self._rejection(kept.client, why))
        self._kept = sound

    def _too_long(self, layout: UploadLayout, kept: _KeptUpload) -> str | None:
        """Whether the norm of an update is above the bound of the policy, in words."""
        bound = self.policy.max_norm
        if bound is None or (norm := float(layout.vector(kept.tree, kept.rows).norm())) <= bound:
            return None
        return f"its update has norm {norm:.4g}, above the {bound:g} that are allowed"

    def _reject_far_out(self, layout: UploadLayout) -> None:
        """Reject uploads that would make the model one from which no honest client can train.

        Such an upload has a tensor whose change (``UploadLayout.change``) exceeds ``largest_to_train_from``, and
        ``FAR_FROM_OTHERS`` times the median of the other uploads. Statistics have checks of their own, and clipping
        bounds the uploads of a private run.
        """
        # the rule withstands such uploads
        robust = self.policy.rule.text != "mean" and self.policy.on_bad == "fail"
        if len(self._kept) < COMPARABLE or self.policy.privacy is not None or robust:
            return
        reasons: dict[int, str] = {}
        for name in layout.names:
            if self.expected[name].statistic is not None:
                continue
            sizes = [largest_number(layout.change(name, kept.tree[name])) for kept in self._kept]
            safe = largest_to_train_from(self.expected[name].dtype)
            for place, size in enumerate(sizes):
                others = sorted(sizes[:place] + sizes[place + 1 :])
                # The upper median, so that a client which sends next to nothing makes no other one far out.
                usual = others[len(others) // 2]
                if size > max(safe, FAR_FROM_OTHERS * usual):
                    why = f"{name} changes by {size:.2g}, and by a median of {usual:.2g} in the other uploads"
                    reasons.setdefault(self._kept[place].client, why)
        self._reject(lambda kept: None if self._lies_on_purpose(kept) else reasons.get(kept.client))

    def _lies_on_purpose(self, kept: _KeptUpload) -> bool:
        """Whether this is the upload of a liar of a simulated attack, which shows what a rule withstands."""
        return self.policy.attack is not None and kept.client in self.round.attackers

    def _rows(self, layout: UploadLayout) -> Tensor:
        """V [m, d] of the kept uploads."""
        return torch.stack([layout.vector(kept.tree, kept.rows) for kept in self._kept])

    def _simulate_attack(self, layout: UploadLayout) -> None:
        """Replace what attackers send; they know what all clients of the round would send."""
        attack = self.policy.attack
        if attack is None or not layout.names or not self._kept:
            return
        lying = torch.tensor([kept.client in self.round.attackers for kept in self._kept])
        lies = attack(self._rows(layout), lying, self.round.seed, self.round.number - 1)
        for i in lying.nonzero().flatten().tolist():
            kept = self._kept[i]
            self._kept[i] = _KeptUpload(
                kept.client, kept.rows, layout.tree(lies[i], kept.rows, kept.tree)
            )

    def _aggregated(self) -> Tree:
        """By the robust rule; names that hold no floats, and all of them for a plain mean, as the method pools them."""
        rule = self.policy.rule
        pool = UploadPool(self.method.pool(self.round.hp), len(self._kept))
        weights = [kept.rows for kept in self._kept]
        if self.policy.max_share is not None:  # of those that are left
            weights = capped_weights(weights, self.policy.max_share)
        for kept, weight in zip(self._kept, weights, strict=True):
            self._add(pool, kept.tree, kept.client, weight)
        pooled = pool.done()
        if rule.text == "mean":
            return pooled
        # Of the liars that the policy expects among all clients, some may be rejected already.
        rejected = len(self.rejected)
        liars = max(0, self.policy.liars_of(len(self._kept) + rejected) - rejected)
        self._check_rule(rule, len(self._kept), liars)
        layout = self._layout(counts=True)
        # Sums are those of m clients of the middle one's size: the sum of all rows is as large as a liar says.
        total = len(self._kept) * statistics.median(kept.rows for kept in self._kept)
        kinds = {t.statistic.kind for t in self.expected.values() if t.statistic}
        # Second moments fit the sums beside them, so a rule must take both from the same uploads.
        voted = rule.of_moments if kinds & SECOND_MOMENTS else rule
        made = _with_definite_gram(layout.tree(voted(self._rows(layout), liars), total, pooled))
        return {name: made[name] for name in pooled}

    def _check_rule(self, rule: RobustRule, m: int, f: int, of: str = "") -> None:
        """Refuse a rule that what is left of a round cannot carry.

        Raises FederatedRunError, with the round and who was rejected. m uploads are left, f liars are expected among
        them; ``of`` says of which class.
        """
        try:
            rule.check(m, f)
        except FedcacheError as error:
            if not self.rejected and not of:
                raise
            gone = ", ".join(repr(self.round.names[r.client]) for r in self.rejected[:5])
            lost = ""
            if gone:
                lost = f" after {len(self.rejected)} were rejected ({gone})"
            left = f"Round {self.round.number}{of}: {m} uploads are left{lost}."
            raise FederatedRunError(f"{left} {error.message}", error.hint) from error

    def _private(self, layout: UploadLayout) -> Tree:
        """Clipped rows, their noisy sum over the expected number of clients; every client weighs the same."""
        privacy = self.policy.privacy
        assert privacy is not None
        mean = privacy.noisy_sum(self._rows(layout), self.round.noise) / self.round.expected_clients
        return _with_definite_gram(layout.tree(mean, self.round.expected_rows, {}))

    def _noise_alone(self) -> Tree:
        """A round in which nobody was drawn: the noise, on what was broadcast."""
        privacy = self.policy.privacy
        assert privacy is not None  # else somebody is always drawn
        if self.method.merges == "classes":
            proto, count = self._prototype_names()
            (C, width), dtype = self.expected[proto].shape, self.expected[proto].dtype
            nobody = torch.zeros(1, C, width, dtype=torch.float64)
            means, owners = self._private_classes(nobody, torch.zeros(1, C, dtype=torch.float64))
            return {proto: means.unsqueeze(0).to(dtype), count: owners.unsqueeze(0).to(dtype)}
        layout = self._layout()
        noise = privacy.noisy_sum(
            torch.zeros(1, layout.size, dtype=torch.float64), self.round.noise
        )
        return layout.tree(noise / self.round.expected_clients, self.round.expected_rows, {})

    def _prototype_names(self) -> tuple[str, str]:
        """Names of the prototypes and of their counts, where the server merges by class."""
        counts = [name for name, t in self.expected.items() if t.counts_rows]
        prototypes = [name for name in self.expected if name not in counts]
        return prototypes[0], counts[0]

    def _merged_classes(self) -> Tree:
        """Prototypes merged class by class: one set that stands for all clients', so ``aggregate`` has no other."""
        proto, count = self._prototype_names()
        P = torch.stack([kept.tree[proto].double() for kept in self._kept])  # [m, C, P]
        N = torch.stack([kept.tree[count].double() for kept in self._kept])  # [m, C]
        if self.policy.privacy is not None:
            means, total = self._private_classes(P, (N > 0).double())
        else:
            means, total = self._robust_classes(P, N)
        expected = self.expected
        return {
            proto: means.unsqueeze(0).to(expected[proto].dtype),
            count: total.unsqueeze(0).to(expected[count].dtype),
        }

    def _robust_classes(self, P: Tensor, N: Tensor) -> tuple[Tensor, Tensor]:
        """The rule on the owners of each class: prototypes [C, P] and rows [C] of all of them."""
        means = torch.zeros_like(P[0])
        for c in range(P.shape[1]):
            owners = (N[:, c] > 0).nonzero().flatten()
            if len(owners):
                f = self.policy.liars_of(len(owners))
                self.unprotected_classes += self.policy.byzantine > 0 and f == 0
                self._check_rule(self.policy.rule, len(owners), f, f", class {c}")
                means[c] = self.policy.rule(P[owners, c], f)
        return means, N.sum(0)

    def _private_classes(self, P: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of prototypes and of who owns a class, made noisy together; a class that too few own is left out."""
        privacy = self.policy.privacy
        assert privacy is not None
        m, C, width = P.shape
        V = torch.cat([(P * own.unsqueeze(-1)).reshape(m, -1), own], 1)
        total = privacy.noisy_sum(V, self.round.noise)
        sums = total[: C * width].view(C, width)
        owners = total[C * width :]
        # Noise alone makes up to about one deviation of owners; half a client is nobody.
        known = owners > max(0.5, privacy.deviation)
        means = sums / owners.clamp(min=0.5).unsqueeze(-1)
        return torch.where(known.unsqueeze(-1), means, 0.0), owners * known


def _with_definite_gram(pooled: Tree) -> Tree:
    """With the Gram matrix nearest to what noise, or a rule that takes coordinate by coordinate, has made of one.

    Where class sums and counts came too, the scatter within classes is what cannot be negative.
    """
    if "gram" not in pooled or pooled["gram"].dim() != 1:
        return pooled
    between = torch.zeros_like(pooled["gram"])
    if {"class_sum", "count"} <= pooled.keys():
        between = gram(pooled["class_sum"] / pooled["count"].clamp(min=1.0).sqrt().unsqueeze(-1))
    return {**pooled, "gram": nearest_gram(pooled["gram"] - between) + between}
