"""The way of every upload into the aggregate, in every execution and engine.

    uploads -> update validation -> attack simulation -> clipping and noise, or robust rule -> pooled upload

With the default policy an upload is validated and added to a running sum as it comes, so memory is that of one upload
whatever the number of clients. A policy that compares uploads with one another (a rule, an attack, noise, rejection, a
bound on norms) keeps those of a round until the last is there and works on rows V [m, d] of them: updates (upload minus
broadcast) where the method pools means, statistics per row of data where it pools sums, prototypes of each class where
its server merges them by class (``Method.merges``). What comes out has the form that ``Method.aggregate`` expects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcache.errors import FedcacheError, FederatedRunError, UsageError
from fedcache.federate.engine.aggregate import UploadPool
from fedcache.federate.engine.method import Pooling
from fedcache.federate.trust.robust_rules import RobustRule
from fedcache.federate.trust.update_validation import UpdateValidation, is_finite, not_finite
from fedcache.federate.trust.upload_layout import UploadLayout
from fedcache.federate.trust.upload_round import RejectedUpload, UploadRound
from fedcache.heads.linear import Tree
from fedcache.heads.ridge import gram, nearest_gram

WITHOUT_COUNTS = {"bias": "false", "class_weight": "none"}
"""Switches, and the values under which a method sends no counts."""

NAMED_REJECTIONS = 5
"""Rejected uploads that a run's warnings name one by one; the records count all of them."""


@dataclass
class _KeptUpload:
    """An upload that waits for the last one of its round."""

    client: int
    rows: float
    tree: Tree


class UploadPipeline:
    """Takes the uploads of one round, one client at a time, in batches of clients, or as sums over some clients.

    Attributes:
        rejected: uploads that were left out, under ``--on-bad-update reject``.
        unprotected_classes: classes whose owners are so few that the rule expects no liar among them.
    """

    def __init__(self, round_: UploadRound) -> None:
        self.round = round_
        self.policy, self.method, self.expected = round_.policy, round_.method, round_.expected
        self.validation = UpdateValidation(round_.expected, round_.number)
        self._pooling = self.method.pool(round_.hp)
        self._pool = UploadPool(self._pooling, max(1, round_.clients))
        self._kept: list[_KeptUpload] = []
        self.rejected: list[RejectedUpload] = []
        self.unprotected_classes = 0

    def rule(self, name: str) -> Pooling:
        """How an engine hands over the uploads of that name: one by one where they are kept or stacked."""
        return self._pool.rule(name) if self.policy.plain else "stack"

    def factor(self, name: str, weight: float) -> float:
        """What multiplies the upload of a client of that weight in a sum."""
        return self._pool.factor(name, weight)

    def accepts_batch(
        self,
        up: object,
        clients: Sequence[int],
        lead: tuple[int, ...],
        coordinates: Mapping[str, tuple[int, ...]] | None = None,
    ) -> bool:
        """Validate names, shapes, types and counts of a batch of clients at once, before it is taken apart.

        Args:
            up: what ``fit`` returned.
            clients: on the axis of clients, in this order.
            lead: the leading axes, (M,) or (G, M).
            coordinates: name -> shape of the tensors that are written in other coordinates than they are declared in.

        Returns:
            False when all of them are rejected, and there is nothing to ``add``.

        Raises:
            FederatedRunError, naming the round and the first client that is concerned.
        """
        why = self.validation.structure_problem(up, lead, coordinates)
        if why is not None:  # a batch comes from one call of ``fit``, so all its clients have the same names and shapes
            self.rejected += [self._rejection(client, why) for client in sorted(clients)]
            return False
        if self.policy.plain:
            assert isinstance(up, dict)
            wrong = self.validation.count_problems(up, [self.round.rows[c] for c in clients])
            for client, why in sorted((clients[place], why) for place, why in wrong.items()):
                raise self.validation.refusal(client, self.round.names[client], why)
        return True  # a policy that keeps uploads validates each by itself, as one may be rejected alone

    def add(self, up: Tree, client: int, *, validated: bool = False) -> None:
        """Take the upload of one client, perhaps with a leading axis of the points of a grid.

        Args:
            up: what it sends.
            client: its number.
            validated: whether it is known to be sound.

        Raises:
            FederatedRunError for a malformed upload, naming client and round; under a policy that keeps uploads
                it is raised by ``pooled``.
        """
        rows = self.round.rows[client]
        if not self.policy.plain:
            # A copy: an executor may write the next client's upload to the same memory.
            copy = {k: t.clone() if isinstance(t, Tensor) else t for k, t in up.items()} if isinstance(up, dict) else up
            self._kept.append(_KeptUpload(client, rows, copy))
            return
        if not validated and not self.validation.is_sound(up, rows):
            name = self.round.names[client]
            if why := self.validation.problem(up, rows, finite=True):
                raise self.validation.refusal(client, name, why)
            for tensor, t in up.items():
                if t.is_floating_point() and not is_finite(t):
                    raise not_finite(tensor, t, self.round.number, (client, name), self.method, self.round.hp)
        self._pool.add(up, rows, client)

    def add_weights(self, clients: Sequence[int]) -> None:
        """Count clients whose uploads come as sums alone."""
        self._pool.weigh([self.round.rows[c] for c in clients])

    def add_sum(self, name: str, total: Tensor, dtype: torch.dtype) -> None:
        """Add what is already the sum over some clients, each times its ``factor``, for a policy that only sums.

        Args:
            name: of the uploads.
            total: their sum, perhaps with a leading axis of points.
            dtype: of the uploads.

        Raises:
            FederatedRunError, when it is not the sum of what the method declares.
        """
        expected = self.expected[name]
        core = tuple(total.shape[total.dim() - len(expected.shape) :])
        if core != expected.shape or dtype != expected.dtype:
            why = f"sums of {name} have shape {core} and {dtype}, expected {expected.shape} and {expected.dtype}"
            raise FederatedRunError(f"Round {self.round.number}: {why}.", "Please report this.")
        self._pool.add_sum(name, total, dtype)

    def pooled(self) -> Tree:
        """What the method's own pool gives of the uploads that survive, as the policy sees them.

        Raises:
            FederatedRunError for a refused upload where that fails the run, and when all are refused.
        """
        if self.policy.plain:
            return self._pool.done()
        self._kept.sort(key=lambda kept: kept.client)
        if not self._kept and not self.rejected:
            return self._noise_alone()
        if not self.expected:
            raise self.policy.refused(self.method, "its clients send nothing")
        layout = self._layout()
        self._reject(lambda kept: self.validation.problem(kept.tree, kept.rows, finite=True))
        if self.policy.attack is not None:
            self._simulate_attack(layout)
        self._reject(lambda kept: self.validation.problem(kept.tree, kept.rows) or self._too_long(layout, kept))
        self.rejected.sort(key=lambda rejected: rejected.client)
        if not self._kept:
            raise FederatedRunError(
                f"Round {self.round.number}: all {len(self.rejected)} uploads were refused, so there is nothing to "
                f"aggregate; the first because {self.rejected[0].why}.",
                "Lower the learning rate, or look at the clients.",
            )
        changed = self.policy.rule.text != "mean" or self.policy.privacy is not None
        if self.method.merges == "classes" and changed:
            return self._merged_classes()
        if self.policy.privacy is not None:
            return self._private(layout)
        return self._aggregated(layout)

    def warnings(self, named: int, unprotected: int) -> list[str]:
        """What a person is told of the uploads that were rejected, and of classes that the rule does not protect.

        Args:
            named: rejected uploads of earlier rounds; the first of a run are named, and the records count all.
            unprotected: unprotected classes of earlier rounds; the first round that has some is told.
        """
        said = []
        if self.unprotected_classes and not unprotected:
            said.append(
                f"round {self.round.number}: {self.unprotected_classes} classes have so few owners that --aggregate "
                f"{self.policy.rule.text} expects no liar among them: their prototypes are not protected"
            )
        for r in self.rejected[: max(0, NAMED_REJECTIONS - named)]:
            name = self.round.names[r.client]
            said.append(f"round {r.round}: the upload of client {r.client} ({name!r}) is rejected: {r.why}")
        return said

    def _layout(self) -> UploadLayout:
        rules = {name: self._pool.rule(name) for name in self.expected}
        return UploadLayout(self.expected, self.round.broadcast, rules)

    def _rejection(self, client: int, why: str) -> RejectedUpload:
        """The record of a malformed upload; raises where the policy does not leave such uploads out."""
        if self.policy.on_bad == "fail":
            raise self.validation.refusal(client, self.round.names[client], why)
        return RejectedUpload(self.round.number, client, why)

    def _reject(self, problem: Callable[[_KeptUpload], str | None]) -> None:
        """Leave out the kept uploads that have a problem."""
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
            self._kept[i] = _KeptUpload(kept.client, kept.rows, layout.tree(lies[i], kept.rows, kept.tree))

    def _aggregated(self, layout: UploadLayout) -> Tree:
        """By the robust rule; names that hold no floats, and all of them for a plain mean, as the method pools them."""
        rule, pool = self.policy.rule, UploadPool(self._pooling, len(self._kept))
        for kept in self._kept:
            pool.add(kept.tree, kept.rows, kept.client)
        pooled = pool.done()
        if rule.text == "mean":
            return pooled
        liars = self._expected_liars()
        self._check_rule(rule, len(self._kept), liars)
        V = self._rows(layout)
        if rule.votes:
            total = sum(kept.rows for kept in self._kept)
            made = _with_definite_gram(layout.tree(rule(V, liars), total, pooled))
            return {name: made[name] for name in pooled}
        # A mean of changed rows keeps each name's own weights.
        pool = UploadPool(self._pooling, len(self._kept))
        for v, kept in zip(rule.rows(V, liars), self._kept, strict=True):
            pool.add(layout.tree(v, kept.rows, kept.tree), kept.rows, kept.client)
        return pool.done()

    def _expected_liars(self) -> int:
        """f of this round: of all its clients, less those that are rejected already."""
        return max(0, self.policy.liars_of(len(self._kept) + len(self.rejected)) - len(self.rejected))

    def _check_rule(self, rule: RobustRule, m: int, f: int, of: str = "") -> None:
        """Refuse a rule that what is left of a round cannot carry.

        Args:
            rule: of the policy.
            m: uploads that are left.
            f: liars that are expected among them.
            of: of which class, in words.

        Raises:
            FederatedRunError, with the round and who was rejected.
        """
        try:
            rule.check(m, f)
        except FedcacheError as error:
            if not self.rejected and not of:
                raise
            gone = ", ".join(repr(self.round.names[r.client]) for r in self.rejected[:5])
            lost = f" after {len(self.rejected)} were rejected ({gone})" if gone else ""
            said = f"Round {self.round.number}{of}: {m} uploads are left{lost}. {error.message}"
            raise FederatedRunError(said, error.hint) from error

    def _private(self, layout: UploadLayout) -> Tree:
        """Clipped rows, their noisy sum over the expected number of clients; every client weighs the same."""
        privacy = self.policy.privacy
        assert privacy is not None
        counts = sorted(n for n in self.expected if n not in layout.names)
        if counts:
            switches = [f"--set {h.name}={w}" for h in self.method.hparams if (w := WITHOUT_COUNTS.get(h.name))]
            own = f"{' '.join(switches)}, or another method" if switches else "Another method"
            raise UsageError(
                f"{self.method.name} sends {', '.join(counts)} beside what noise is added to.",
                f"{own}: fedavg, fedprox, fedproto, or fed3r without a bias.",
            )
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
        noise = privacy.noisy_sum(torch.zeros(1, layout.size, dtype=torch.float64), self.round.noise)
        return layout.tree(noise / self.round.expected_clients, self.round.expected_rows, {})

    def _prototype_names(self) -> tuple[str, str]:
        """Names of the prototypes and of their counts, where the server merges by class."""
        tensors = self.expected.items()
        return next(n for n, t in tensors if not t.counts_rows), next(n for n, t in tensors if t.counts_rows)

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
                means[c] = self.policy.rule(P[owners, c], f, N[owners, c])
        return means, N.sum(0)

    def _private_classes(self, P: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of prototypes and of who owns a class, made noisy together; a class that too few own is left out."""
        privacy = self.policy.privacy
        assert privacy is not None
        m, C, width = P.shape
        V = torch.cat([(P * own.unsqueeze(-1)).reshape(m, -1), own], 1)
        total = privacy.noisy_sum(V, self.round.noise)
        sums, owners = total[: C * width].view(C, width), total[C * width :]
        known = owners > max(0.5, privacy.deviation)
        return torch.where(known.unsqueeze(-1), sums / owners.clamp(min=0.5).unsqueeze(-1), 0.0), owners * known


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
