"""Between upload and aggregate: attack, gate, privacy and robust rule, in this order, on all uploads of a round.

    uploads --vectors--> V [m, d] --attack--> --gate--> --clip and noise--> --robust rule--> pooled upload

V holds what a method averages: updates (upload minus broadcast) where it pools means, statistics per row of data where
it pools sums, prototypes of each class where its server merges them by class (``Method.merges``). What comes out has
the form the method's ``aggregate`` expects, so no method knows of any of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engine.aggregate import Pool
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method, Pooling
from fedcache.federate.trust.policy import TrustPolicy
from fedcache.federate.trust.robust_rules import RobustRule
from fedcache.federate.trust.update_validation import UpdateValidation, is_count
from fedcache.federate.trust.upload_layout import UploadLayout
from fedcache.heads.linear import Tree
from fedcache.heads.ridge import gram, nearest_gram

WITHOUT_COUNTS = {"bias": "false", "class_weight": "none"}
"""Switches, and the values under which a method sends no counts."""


@dataclass(frozen=True)
class RejectedUpload:
    """An upload that did not reach ``aggregate``."""

    round: int
    client: int
    why: str


def _definite(pooled: Tree) -> Tree:
    """With the Gram matrix nearest to what noise, or a rule that takes coordinate by coordinate, has made of one.

    Where class sums and counts came too, the scatter within classes is what cannot be negative.
    """
    if "gram" not in pooled or pooled["gram"].dim() != 1:
        return pooled
    between = torch.zeros_like(pooled["gram"])
    if {"class_sum", "count"} <= pooled.keys():
        between = gram(pooled["class_sum"] / pooled["count"].clamp(min=1.0).sqrt().unsqueeze(-1))
    return {**pooled, "gram": nearest_gram(pooled["gram"] - between) + between}


class Guarded(Pool):
    """A pool that keeps every upload until the round's last one is there."""

    def __init__(
        self,
        trust: TrustPolicy,
        method: Method,
        hp: Hp,
        clients: int,
        down: Tree,
        *,
        round_: int,
        seed: int,
        liars: frozenset[int],
        names: Sequence[str],
        expected: float,
        total_rows: float,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(method.pool(hp), max(1, clients))
        self.trust, self.method, self.down = trust, method, down
        self.round, self.seed, self.liars, self.names = round_, seed, liars, names
        self.expected, self.total_rows, self.generator = expected, total_rows, generator
        self.ups: list[tuple[int, float, Tree]] = []
        self.rejected: list[RejectedUpload] = []
        self.unguarded = 0
        """Classes whose owners are so few that the rule expects no liar among them."""

    def rule(self, name: str) -> Pooling:
        """Every upload is kept by itself, so engines hand over each one."""
        return "stack"

    def own_rule(self, name: str) -> Pooling:
        """How the method pools that name."""
        return super().rule(name)

    def add(self, up: Tree, weight: float, client: int) -> None:
        """Keep a copy of a client's upload."""
        self.ups.append((client, weight, {k: t.clone() for k, t in up.items()}))

    def done(self) -> Tree:
        """What the method's own pool would have given, of what survives and as the rule sees it.

        Raises:
            FedcacheError: FEDERATED for a refused upload where that fails the run, and when all are refused.
        """
        self.ups.sort(key=lambda entry: entry[0])
        if not self.ups:
            return self._empty()
        like = self.ups[0][2]
        if not like:
            raise self.trust.refused(self.method, "its clients send nothing")
        layout = UploadLayout(like, self.down, {n: self.own_rule(n) for n in like})
        self._lie(layout)
        self._gate(UpdateValidation.shape_of(like), layout)
        if not self.ups:
            raise FedcacheError(
                Exit.FEDERATED,
                f"Round {self.round + 1}: all {len(self.rejected)} uploads were refused, so there is nothing to "
                f"aggregate; the first because {self.rejected[0].why}.",
                "Lower the learning rate, or look at the clients.",
            )
        if self.method.merges == "classes" and (self.trust.rule.text != "mean" or self.trust.privacy is not None):
            return self._classes()
        if self.trust.privacy is not None:
            return self._private(layout)
        return self._ruled(layout)

    def _empty(self) -> Tree:
        """A round in which nobody was drawn: the noise alone, on what was broadcast."""
        privacy = self.trust.privacy
        assert privacy is not None  # else somebody is always drawn
        if self.method.merges == "classes":
            bar = next(t for t in self.down.values() if t.is_floating_point())  # [C, P]
            C, width = bar.shape
            nobody = torch.zeros(1, C, width, dtype=torch.float64)
            made, owners = self._private_classes(nobody, torch.zeros(1, C, dtype=torch.float64))
            return {"proto": made.unsqueeze(0).to(bar.dtype), "count": owners.unsqueeze(0).to(bar.dtype)}
        rules = {n: self.own_rule(n) for n in self.down}
        layout = UploadLayout(self.down, self.down, rules)
        rows = sum(t.numel() for n, t in self.down.items() if n in layout.names)
        noise = privacy.noisy_sum(torch.zeros(1, rows, dtype=torch.float64), self.generator)
        return layout.tree(noise / self.expected, self.total_rows, {})

    def _lie(self, layout: UploadLayout) -> None:
        attack = self.trust.attack
        if attack is None or not layout.names:
            return
        lying = torch.tensor([c in self.liars for c, _, _ in self.ups])
        V = torch.stack([layout.vector(up, n) for _, n, up in self.ups])
        lies = attack(V, lying, self.seed, self.round)
        for i in lying.nonzero().flatten().tolist():
            c, n, up = self.ups[i]
            self.ups[i] = (c, n, layout.tree(lies[i], n, up))

    def _gate(self, like: Mapping[str, tuple[tuple[int, ...], torch.dtype]], layout: UploadLayout) -> None:
        gate, kept = UpdateValidation(like, self.round + 1), []
        for client, rows, up in self.ups:
            why = gate.problem(up, rows)
            if why is None and self.trust.max_norm is not None:
                norm = float(layout.vector(up, rows).norm())
                if norm > self.trust.max_norm:
                    why = f"its update has norm {norm:.4g}, above the {self.trust.max_norm:g} that are allowed"
            if why is None:
                kept.append((client, rows, up))
                continue
            if self.trust.on_bad == "fail":
                raise gate.refusal(client, self.names[client], why)
            self.rejected.append(RejectedUpload(self.round + 1, client, why))
        self.ups = kept

    def _ruled(self, layout: UploadLayout) -> Tree:
        """By the rule; names that hold no floats, and all of them for a plain mean, as the method pools them."""
        rule, own = self.trust.rule, Pool({n: layout.rules[n] for n in layout.rules}, len(self.ups))
        for client, rows, up in self.ups:
            own.add(up, rows, client)
        pooled = own.done()
        if rule.text == "mean":
            return pooled
        self._carried(rule, len(self.ups), self._liars_thought())
        total = sum(rows for _, rows, _ in self.ups)
        V = torch.stack([layout.vector(up, rows) for _, rows, up in self.ups])
        if rule.votes:
            made = layout.tree(rule(V, self._liars_thought()), total, pooled)
            made = _definite(made)
            return {n: made[n] for n in pooled}
        # A mean of changed rows keeps each name's own weights.
        rows_of = rule.rows(V, self._liars_thought())
        own = Pool({n: layout.rules[n] for n in layout.rules}, len(self.ups))
        for v, (client, rows, up) in zip(rows_of, self.ups, strict=True):
            own.add(layout.tree(v, rows, up), rows, client)
        return own.done()

    def _liars_thought(self) -> int:
        """f of this round: of all its clients, less those that the gate has caught."""
        return max(0, self.trust.liars_of(len(self.ups) + len(self.rejected)) - len(self.rejected))

    def _carried(self, rule: RobustRule, m: int, f: int, of: str = "") -> None:
        """Refuse a rule that what is left of a round cannot carry.

        Raises:
            FedcacheError: FEDERATED, with the round and who was rejected.
        """
        try:
            rule.check(m, f)
        except FedcacheError as error:
            if not self.rejected and not of:
                raise
            gone = ", ".join(repr(self.names[r.client]) for r in self.rejected[:5])
            lost = f" after {len(self.rejected)} were rejected ({gone})" if gone else ""
            said = f"Round {self.round + 1}{of}: {m} uploads are left{lost}. {error.message}"
            raise FedcacheError(Exit.FEDERATED, said, error.hint) from error

    def _private(self, layout: UploadLayout) -> Tree:
        """Clipped rows, their noisy sum over the expected number of clients; every client weighs the same."""
        privacy = self.trust.privacy
        assert privacy is not None
        counts = sorted(n for n in layout.like if n not in layout.names)
        if counts:
            switches = [f"--set {h.name}={w}" for h in self.method.hparams if (w := WITHOUT_COUNTS.get(h.name))]
            own = f"{' '.join(switches)}, or another method" if switches else "Another method"
            raise FedcacheError(
                Exit.USAGE,
                f"{self.method.name} sends {', '.join(counts)} beside what noise is added to.",
                f"{own}: fedavg, fedprox, fedproto, or fed3r without a bias.",
            )
        V = torch.stack([layout.vector(up, rows) for _, rows, up in self.ups])
        mean = privacy.noisy_sum(V, self.generator) / self.expected
        return _definite(layout.tree(mean, self.total_rows, {}))

    def _classes(self) -> Tree:
        """Prototypes merged class by class: one set that stands for all clients', so ``aggregate`` has no other."""
        count = next(n for n in self.ups[0][2] if is_count(n))
        proto = next(n for n in self.ups[0][2] if not is_count(n))
        P = torch.stack([up[proto].double() for _, _, up in self.ups])
        N = torch.stack([up[count].double() for _, _, up in self.ups])
        like = self.ups[0][2]
        if self.trust.privacy is not None:
            made, total = self._private_classes(P, (N > 0).double())
        else:
            made, total = self._voted_classes(P, N)
        return {proto: made.unsqueeze(0).to(like[proto].dtype), count: total.unsqueeze(0).to(like[count].dtype)}

    def _voted_classes(self, P: Tensor, N: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.zeros_like(P[0])
        for c in range(P.shape[1]):
            owners = (N[:, c] > 0).nonzero().flatten()
            if len(owners):
                f = self.trust.liars_of(len(owners))
                self.unguarded += self.trust.byzantine > 0 and f == 0
                self._carried(self.trust.rule, len(owners), f, f", class {c}")
                made[c] = self.trust.rule(P[owners, c], f, N[owners, c])
        return made, N.sum(0)

    def _private_classes(self, P: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of prototypes and of who owns a class, made noisy together; a class that too few own is left out."""
        privacy = self.trust.privacy
        assert privacy is not None
        m, C, width = P.shape
        V = torch.cat([(P * own.unsqueeze(-1)).reshape(m, -1), own], 1)
        total = privacy.noisy_sum(V, self.generator)
        sums, owners = total[: C * width].view(C, width), total[C * width :]
        known = owners > max(0.5, privacy.deviation)
        return torch.where(known.unsqueeze(-1), sums / owners.clamp(min=0.5).unsqueeze(-1), 0.0), owners * known
