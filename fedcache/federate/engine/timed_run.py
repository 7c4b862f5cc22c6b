"""A run with simulated time: the models that clients in training began with, and the steps of an asynchronous server.

A client's update is computed when it arrives, from the model that it began with and with the draws of the round in
which it began: nothing that happens meanwhile can change it, as a client has one training at a time. So executions
see groups of clients with one broadcast, as in any round, and what they pool of each group is kept until the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedcache.errors import UsageError
from fedcache.federate.engine.method import clients_per_round
from fedcache.federate.engine.outcome import RoundTraffic
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engine.sampling import Participation
from fedcache.federate.engine.simulated_time import Schedule, TimingRule
from fedcache.federate.trust.pipeline import UploadPool
from fedcache.heads.linear import Tree

STATISTICS = (".mean", ".var")
"""How the names of BatchNorm's running statistics end."""

NOT_YET = RoundTraffic(0, 0, 0, 0, 0, 0, 0)
"""The traffic of a group of clients, which is counted with the step that their updates are part of."""


@dataclass
class _Group:
    """Clients that began with one model, and what their uploads gave."""

    version: int
    ids: Sequence[int]
    pooled: Tree
    sent: Sequence[tuple[int, int]]


class TimedRun(RunState):
    """One run between rounds, with the time it would take."""

    rule: TimingRule
    schedule: Schedule

    def time_by(self, rule: TimingRule, participation: Participation) -> None:
        """Simulate time by a rule, where so many clients train at once.

        Raises UsageError for durations that do not fit the clients.
        """
        self.rule = rule
        durations = rule.of_clients(self.client_names, self.client_rows, self.seed)
        concurrency = clients_per_round(participation, len(self.client_names))
        self.schedule = Schedule(rule, self.sampler, concurrency, durations)
        self.versions: dict[int, Tree] = {}  # steps of the server -> what it sent then
        self.staleness: list[int] = []  # of the updates of the last step
        self._groups: list[_Group] | None = None  # of a step that is being computed

    def start(self) -> None:
        """The server's first tensors.

        Raises UsageError, where updates of models of different ages cannot be mixed.
        """
        super().start()
        if self.rule.buffer is None:
            return
        down = self.down()
        for name, sent in self.expected_uploads().items():
            why = None
            if (
                name not in down
                or tuple(down[name].shape) != sent.shape
                or not sent.dtype.is_floating_point
            ):
                why = f"takes no --asynchronous: its upload {name} is no update of what clients are sent"
            elif name.endswith(STATISTICS) and self.rule.step > 1.0:
                why = f"takes no --server-step above 1, which can make a variance negative ({name})"
            if why is not None:
                raise UsageError(f"{self.method.name} {why}.", "Leave it out.")

    def begin_step(self) -> dict[int, list[int]]:
        """Let time pass until the buffer is full: version of the model -> clients whose updates are in it."""
        arrived, began = self.schedule.fill_buffer(self.round)
        groups: dict[int, list[int]] = {}
        for client, version in sorted(arrived.items()):
            groups.setdefault(version, []).append(client)
        self.staleness = [self.round - version for version in arrived.values()]
        self.lost = sorted(set(began) - arrived.keys())
        self.early = frozenset(arrived.keys() - set(began))
        self.join_step(self)
        return dict(sorted(groups.items()))

    def join_step(self, first: TimedRun) -> None:
        """Take part in a step; points of a grid share time and clients with the first of them."""
        self.staleness, self.lost, self.early = first.staleness, first.lost, first.early
        self.versions[self.round], self._groups = self.down(), []

    @property
    def steps_at_once(self) -> bool:
        """Not where a step is made of several groups."""
        return self._groups is None

    def finish(
        self, ids: Sequence[int], down: Tree, pooled: Tree, ups: Sequence[tuple[int, int]]
    ) -> RoundTraffic:
        """The end of a round, or of one group of clients of a step: then it is kept until ``end_step``."""
        if self._groups is None:
            return super().finish(ids, down, pooled, ups)
        self._groups.append(_Group(self.round, ids, pooled, ups))
        return NOT_YET

    def end_step(self) -> RoundTraffic:
        """The server's step with all groups of the buffer; advances ``round`` and ``server``."""
        groups, self._groups = self._groups or [], None
        down = self.versions[self.round]
        if not groups:
            traffic = self.nobody_sends(down)
        else:
            sent = sorted(
                pair for group in groups for pair in zip(group.ids, group.sent, strict=True)
            )
            stepped = self._stepped(down, groups)
            traffic = super().finish([c for c, _ in sent], down, stepped, [up for _, up in sent])
        needed = self.schedule.versions
        self.versions = {
            version: tree for version, tree in self.versions.items() if version in needed
        }
        return traffic

    def _stepped(self, down: Tree, groups: Sequence[_Group]) -> Tree:
        """w + eta_g sum_i a_i s(t_i) (y_i - w_(r - t_i)), where a_i are the weights of the method's mean.

        w is what the server sends now, y_i the upload of a client that began t_i steps ago, s(t) = (1 + t)^-a. Weights
        are those of the buffer and add up to 1 before s, so stale updates make the step smaller. Statistics of
        BatchNorm are measured and not trained: w goes towards them, with w in the place of w_(r - t_i), so that no
        variance becomes negative.
        """
        if self.rule.step == 1.0 and [group.version for group in groups] == [self.round]:
            return groups[0].pooled  # the same to the bit as in a round
        rule, made = UploadPool(self.method.pool(self.hp), 1).rule, {}
        for name, t in groups[0].pooled.items():
            weights = [
                float(
                    len(g.ids) if rule(name) == "uniform" else self.client_rows[list(g.ids)].sum()
                )
                for g in groups
            ]
            total = torch.zeros(t.shape, dtype=torch.float64, device=t.device)
            for group, weight in zip(groups, weights, strict=True):
                base = down if name.endswith(STATISTICS) else self.versions[group.version]
                update = group.pooled[name].double() - base[name].double()
                stale = (1.0 + self.round - group.version) ** -self.rule.power
                total.add_(update, alpha=self.rule.step * stale * weight / sum(weights))
            made[name] = (down[name].double() + total).to(t.dtype)
        return made

    def timing(self) -> dict[str, float]:
        """What is recorded of the last round: its end, and how old the updates of its step were."""
        ages = np.array(self.staleness)
        stale = (
            {"staleness_mean": float(ages.mean()), "staleness_max": float(ages.max())}
            if len(ages)
            else {}
        )
        return {"simulated_time": self.schedule.clock, **stale}

    def keep(self) -> tuple[Tree, dict[str, Any]]:
        """Tensors and JSON that a snapshot has beside those of a run without time."""
        tensors = {
            f"version/{v}/{name}": t
            for v, tree in self.versions.items()
            for name, t in tree.items()
        }
        return tensors, {"timing": self.schedule.to_json()}

    def take_up(self, tensors: Tree, meta: dict[str, Any]) -> None:
        """Go on from what ``keep`` gave."""
        self.schedule.take_up(meta["timing"])
        for key, t in tensors.items():
            if key.startswith("version/"):
                _, version, name = key.split("/", 2)
                self.versions.setdefault(int(version), {})[name] = t.to(self.env.device, copy=True)
