"""Simulated time: durations of clients, and the updates in each step of an asynchronous server.

The server follows FedBuff (Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022,
arXiv:2106.06639, algorithm 1): free clients are sampled and begin with the current model; an arriving update goes into
a buffer; when the buffer holds K updates, the server takes a step and empties it. ``docs/design/asynchronous.md``
separates the paper's rules from our choices. Time has no unit and is not measured: it is a sum of drawn or given
durations, so it is equal on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedcache.errors import UsageError
from fedcache.federate.engine.context import generators
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method, clients_per_round, replace_names, sends_nothing
from fedcache.federate.engine.outcome import RoundTraffic
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engine.sampling import (
    ClientSampler,
    Participation,
    numbers_of,
    refuse_lacking,
    values_of_clients,
)
from fedcache.federate.trust.pipeline import UploadPool
from fedcache.heads.linear import Tree

HALF_NORMAL = "half-normal"
EQUAL = "equal"
DURATIONS = (HALF_NORMAL, EQUAL, "rows")
"""Rules of durations: |N(0, 1)|, drawn each time a client begins, as in the paper; always 1; proportional to rows."""

COLUMNS = ("client", "duration")

Durations = Callable[[Sequence[int], int], list[float]]
"""(clients, round in which they begin, from 0) -> duration of each client's training, above 0."""


@dataclass(frozen=True, eq=False)
class TimingRule:
    """Durations of clients, and whether the server waits for them."""

    # A word of ``DURATIONS``, or ``sha256:`` and the digest of the file.
    durations: str = HALF_NORMAL
    named: tuple[str, ...] = ()  # clients of the file
    given: tuple[float, ...] = ()  # duration of each named client
    # K, the number of updates in a step of the server; None if it waits for all clients.
    buffer: int | None = None
    step: float = 1.0  # eta_g, on the mean of the buffer
    power: float = 0.5  # a in (1 + t)^-a, the factor of an update that is t steps old

    def words(self) -> dict[str, str | float]:
        """The rule in the form of a run's identity and result."""
        words: dict[str, str | float] = {}
        if self.buffer is not None:
            words["asynchronous"] = self.buffer
            words["server_step"] = self.step
            words["staleness_power"] = self.power
        words["client_durations"] = self.durations
        return words

    def of_clients(self, names: Sequence[str], rows: np.ndarray, seed: int) -> Durations:
        """The durations of a run.

        Args:
            names: of all M clients.
            rows: float64 [M], training rows.
            seed: of the run.

        Raises UsageError for a file that names an unknown client, or lacks a client that can train.
        """
        if self.durations == HALF_NORMAL:

            def drawn(clients: Sequence[int], round_: int) -> list[float]:
                keys = [(seed, "duration", round_, names[c]) for c in clients]
                return [abs(stream.standard_normal()) for stream in generators(keys)]

            return drawn
        mean = rows.sum() / max(1, np.count_nonzero(rows))
        fixed = rows / mean
        if self.durations == EQUAL:
            fixed = np.ones(len(names))
        if self.named:
            fixed = np.zeros(len(names))
            fixed[numbers_of(self.named, names, "--client-durations")] = self.given
        lacking = np.flatnonzero((fixed == 0) & (rows > 0))
        example = "client,duration  and then  client-0,1.5"
        refuse_lacking(lacking, names, "--client-durations", example)
        return lambda clients, _round: fixed[list(clients)].tolist()


def parse_timing(
    asynchronous: int | None, server_step: float, staleness_power: float, durations: str | None
) -> TimingRule:
    """The rule of four options. Raises UsageError for illegal values, and for a file without durations."""
    if asynchronous is not None and asynchronous < 1:
        raise UsageError(
            f"--asynchronous {asynchronous}: expected at least 1 update.", "For example 10"
        )
    if not 0.0 < server_step < np.inf:
        raise UsageError(
            f"--server-step {server_step:g}: expected a number above 0.", "For example 1"
        )
    if not 0.0 <= staleness_power < np.inf:
        raise UsageError(
            f"--staleness-power {staleness_power:g}: expected 0 or more.", "For example 0.5"
        )
    rule = TimingRule(buffer=asynchronous, step=server_step, power=staleness_power)
    if durations is None:
        return rule
    if durations in DURATIONS:
        return replace(rule, durations=durations)
    return _read_durations(Path(durations), rule)


def _read_durations(path: Path, rule: TimingRule) -> TimingRule:
    """The rule with the durations of a CSV file with the columns ``client`` and ``duration``."""
    example = (
        f"{', '.join(DURATIONS)}, or a file with a line for every client:  client,duration  and then  "
        "client-0,1.5"
    )
    clients, durations, digest = values_of_clients(
        path, "--client-durations", COLUMNS, example, _duration
    )
    return replace(rule, durations=f"sha256:{digest}", named=tuple(clients), given=tuple(durations))


def _duration(words: Sequence[str]) -> float:
    try:
        (value,) = map(float, words)
    except ValueError:
        raise ValueError("does not contain a client name and a number") from None
    if not 0.0 < value < np.inf:
        raise ValueError("does not contain a duration above 0")
    return value


def why_not_asynchronous(method: Method, hp: Hp) -> str | None:
    """The reason why a server cannot mix updates of models of different ages; None if it can."""
    if method.central:
        return "it trains on the rows of all clients together, so nothing is sent"
    if method.one_shot:
        return "it needs only one round"
    if method.uploads is sends_nothing:
        return "its clients send nothing"
    only_means = set(method.pool(hp).values()) <= {"mean", "uniform"}
    if not only_means or method.aggregate is not replace_names:
        return "its server does not only average the uploads"
    return None


class Underway(NamedTuple):
    """A client in training; clients are sorted by end, then by start."""

    end: float  # simulated time
    order: int  # number of clients that began before it
    client: int
    version: int  # steps of the server before it began
    drops: bool  # whether it sends nothing


class Schedule:
    """Simulated time of one run, and the clients in training.

    It depends only on the seed, so it is equal for every execution and for all points of a grid.

    Args:
        rule: durations and buffer.
        sampler: draws the clients that begin.
        concurrency: number of clients that train at the same time.
        durations: of the clients.
    """

    def __init__(
        self, rule: TimingRule, sampler: ClientSampler, concurrency: int, durations: Durations
    ) -> None:
        self.rule = rule
        self.sampler = sampler
        self.concurrency = concurrency
        self.durations = durations
        self.clock = 0.0
        self._heap: list[Underway] = []
        self._begun = 0

    def wait(self, clients: Sequence[int], round_: int) -> None:
        """Let time pass until the slowest client of a round has finished, including clients that drop out."""
        self.clock += max(self.durations(clients, round_), default=0.0)

    def fill_buffer(self, round_: int) -> tuple[dict[int, int], list[int]]:
        """Let time pass until K updates have arrived since the last step.

        Updates that arrive at the same time are taken in the order in which their clients began, and before new clients
        begin. A client begins again only after the step with its last update. So a buffer has at most one update of a
        client, and a client begins at most once with one model. If no client is left that could send an update, the
        step is taken with fewer updates.

        Args:
            round_: number of steps that the server has taken.

        Returns:
            client -> version of the model that it began with, for the updates in the buffer; and the clients that have
            begun since the last step.
        """
        arrived: dict[int, int] = {}
        began = []
        draws = 0
        while len(arrived) < (self.rule.buffer or 0):
            # First finished clients send their updates, then new clients begin, and then time passes.
            if self._heap and self._heap[0].end <= self.clock:
                finished = heapq.heappop(self._heap)
                if not finished.drops:
                    arrived[finished.client] = finished.version
                continue
            free = self.concurrency - len(self._heap)
            if free:
                busy = [one.client for one in self._heap] + list(arrived)
                drawn = self.sampler.begin(round_, draws, free, busy)
                began += self._begin(drawn, round_)
                draws += 1
            if not self._heap:
                break
            self.clock = self._heap[0].end
        return arrived, began

    def _begin(self, drawn: Sequence[tuple[int, bool]], round_: int) -> list[int]:
        clients = [c for c, _ in drawn]
        durations = self.durations(clients, round_)
        for (client, drops), duration in zip(drawn, durations, strict=True):
            one = Underway(self.clock + duration, self._begun, client, round_, drops)
            heapq.heappush(self._heap, one)
            self._begun += 1
        return clients

    @property
    def versions(self) -> set[int]:
        """Versions of the models from which clients in training started."""
        return {one.version for one in self._heap}

    def to_json(self) -> dict[str, Any]:
        """The state from which a run resumes."""
        return {
            "clock": self.clock,
            "begun": self._begun,
            "underway": [list(one) for one in sorted(self._heap)],
        }

    def take_up(self, saved: dict[str, Any]) -> None:
        """Resume from the state of ``to_json``."""
        self.clock = float(saved["clock"])
        self._begun = int(saved["begun"])
        # A sorted list is a heap.
        self._heap = [Underway(*one) for one in saved["underway"]]


# A run with simulated time: the models from which clients in training started, and the steps of an
# asynchronous server.
#
# A client's update is computed when it arrives, from the model with which the client started and
# with the draws of the round in which it started. This is equivalent to computing it earlier,
# because a client trains once at a time. So an execution gets groups of clients with one broadcast,
# as in any round, and the pooled upload of each group is kept until the step.


STATISTICS = (".mean", ".var")
"""Endings of the names of BatchNorm's running statistics."""

NOT_YET = RoundTraffic(0, 0, 0, 0, 0, 0, 0)
"""Placeholder for the traffic of one group of clients. The server's step counts the traffic of all its groups."""


@dataclass
class _Group:
    """Clients that began with one model, and their pooled uploads."""

    version: int  # of the model
    ids: Sequence[int]  # numbers of the clients
    pooled: Tree
    sent: Sequence[tuple[int, int]]  # (scalars, bytes of one) that each client sent


class TimedRun(RunState):
    """State of a run with simulated time."""

    rule: TimingRule
    schedule: Schedule

    def time_by(self, rule: TimingRule, participation: Participation) -> None:
        """Simulate time by a rule; ``participation`` clients train at the same time.

        Raises UsageError for durations that do not fit the clients.
        """
        self.rule = rule
        durations = rule.of_clients(self.client_names, self.client_rows, self.seed)
        concurrency = clients_per_round(participation, len(self.client_names))
        self.schedule = Schedule(rule, self.sampler, concurrency, durations)
        self.versions: dict[int, Tree] = {}  # steps of the server -> its broadcast after them
        self.staleness: list[int] = []  # of the updates of the last step
        self._groups: list[_Group] | None = None  # of a step that is being computed

    def start(self, rounds: int = 1) -> None:
        """Make the server's first tensors. Raises UsageError if updates of models of different ages cannot be mixed."""
        super().start(rounds)
        if self.rule.buffer is None:
            return
        down = self.down()
        for name, sent in self.expected_uploads().items():
            why = None
            same_shape = name in down and tuple(down[name].shape) == sent.shape
            if not same_shape or not sent.dtype.is_floating_point:
                why = (
                    f"does not support --asynchronous: its upload {name} is not an update of the model that "
                    "clients receive"
                )
            elif name.endswith(STATISTICS) and self.rule.step > 1.0:
                why = f"does not support --server-step above 1, which can make a variance negative ({name})"
            if why is not None:
                raise UsageError(f"{self.method.name} {why}.", "Leave the option out.")

    def begin_step(self) -> dict[int, list[int]]:
        """Let time pass until the buffer is full. Returns version of the model -> clients in the buffer."""
        arrived, began = self.schedule.fill_buffer(self.round)
        # Clients that began with the same model are computed together.
        groups: dict[int, list[int]] = {}
        for client, version in sorted(arrived.items()):
            groups.setdefault(version, []).append(client)
        self.staleness = [self.round - version for version in arrived.values()]
        self.lost = sorted(set(began) - arrived.keys())
        self.early = frozenset(arrived.keys() - set(began))
        self.join_step(self)  # keeps the broadcast of this step, as for every other point
        return dict(sorted(groups.items()))

    def join_step(self, first: TimedRun) -> None:
        """Take part in a step; points of a grid share time and clients with the first point."""
        self.staleness = first.staleness
        self.lost = first.lost
        self.early = first.early
        self.versions[self.round] = self.down()
        self._groups = []

    @property
    def steps_at_once(self) -> bool:
        """False during a step, which combines several groups of clients."""
        return self._groups is None

    def finish(
        self, ids: Sequence[int], down: Tree, pooled: Tree, ups: Sequence[tuple[int, int]]
    ) -> RoundTraffic:
        """The end of a round; during a step, the group of clients is kept until ``end_step``."""
        if self._groups is None:
            return super().finish(ids, down, pooled, ups)
        # ``timed_round`` sets ``round`` to the version of the model from which this group started.
        self._groups.append(_Group(self.round, ids, pooled, ups))
        return NOT_YET

    def end_step(self) -> RoundTraffic:
        """The server's step with all groups of the buffer; advances ``round`` and ``server``."""
        groups = self._groups or []
        self._groups = None
        down = self.versions[self.round]
        if not groups:
            traffic = self.nobody_sends(down)
        else:
            sent: dict[int, tuple[int, int]] = {}
            for group in groups:
                sent.update(zip(group.ids, group.sent, strict=True))
            ids = sorted(sent)
            stepped = self._stepped(down, groups)
            traffic = super().finish(ids, down, stepped, [sent[c] for c in ids])
        # Older models are kept only while a client still trains from them.
        needed = self.schedule.versions
        self.versions = {v: tree for v, tree in self.versions.items() if v in needed}
        return traffic

    def _stepped(self, down: Tree, groups: Sequence[_Group]) -> Tree:
        """w + eta_g sum_i a_i s(t_i) (y_i - w_(r - t_i)), where a_i are the weights of the method's mean.

        w is the current broadcast, y_i the upload of a client that began t_i steps ago, and s(t) = (1 + t)^-a. The
        weights sum to 1 over the buffer before they are multiplied by s, so stale updates make the step smaller.
        Statistics of BatchNorm are measured and not trained. For them w replaces w_(r - t_i), so that no variance
        becomes negative.
        """
        versions = [group.version for group in groups]
        if self.rule.step == 1.0 and versions == [self.round]:
            return groups[0].pooled  # bit-identical to a round without simulated time
        rule = UploadPool(self.method.pool(self.hp), 1).rule
        made = {}
        for name, t in groups[0].pooled.items():
            # The weight of each group in the method's mean: the number of its clients, or of their rows.
            weights = [float(len(g.ids)) for g in groups]
            if rule(name) != "uniform":
                weights = [float(self.client_rows[list(g.ids)].sum()) for g in groups]
            total = torch.zeros(t.shape, dtype=torch.float64, device=t.device)
            for group, weight in zip(groups, weights, strict=True):
                base = self.versions[group.version]
                if name.endswith(STATISTICS):
                    base = down
                # The group's mean update in float64, reduced by its age in steps of the server.
                update = group.pooled[name].double() - base[name].double()
                stale = (1.0 + self.round - group.version) ** -self.rule.power
                factor = self.rule.step * stale * weight / sum(weights)
                total.add_(update, alpha=factor)
            made[name] = (down[name].double() + total).to(t.dtype)
        return made

    def timing(self) -> dict[str, float]:
        """Diagnostics of the last round: the simulated time at its end, and the age of the updates in its step."""
        found = {"simulated_time": self.schedule.clock}
        if self.staleness:
            found["staleness_mean"] = float(np.mean(self.staleness))
            found["staleness_max"] = float(max(self.staleness))
        return found

    def keep(self) -> tuple[Tree, dict[str, Any]]:
        """Tensors and JSON that a snapshot needs in addition to those of a run without simulated time."""
        tensors = {}
        for version, tree in self.versions.items():
            for name, t in tree.items():
                tensors[f"version/{version}/{name}"] = t
        return tensors, {"timing": self.schedule.to_json()}

    def take_up(self, tensors: Tree, meta: dict[str, Any]) -> None:
        """Resume from the result of ``keep``."""
        self.schedule.take_up(meta["timing"])
        for key, t in tensors.items():
            if key.startswith("version/"):
                _, version, name = key.split("/", 2)
                tree = self.versions.setdefault(int(version), {})
                tree[name] = t.to(self.env.device, copy=True)
