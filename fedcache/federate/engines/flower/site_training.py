"""What a site does with a message: fit its own rows, or score its own test rows. It sends uploads and counts.

The streams of a client are keyed by its name, and everything else it computes with comes in the message, so a site
draws what the in-process engine draws for the client of that name, and sends the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import FederatedRunError
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.evaluate import score_job
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import Evaluation
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engines.flower.messages import SiteMessage
from fedcache.federate.execution.load import shares_uploads
from fedcache.federate.partition.partition import Client
from fedcache.federate.trust.policy import TrustPolicy
from fedcache.heads.linear import Tree

NOBODY = Client("", np.empty(0, np.int64), np.empty(0, np.int64))
"""Another client, of whom a site knows nothing."""


class ClientMemory(Protocol):
    """Where a site keeps what its client holds between rounds, one tree per job and round."""

    def load(self, job: str, round_: int) -> Tree | None:
        """What the client held after that round; None when it is not there."""

    def save(self, job: str, round_: int, tree: Tree, since: int) -> None:
        """Keep what it holds after a round; what is older than ``since`` is not asked for again."""


@dataclass(frozen=True)
class SiteJob:
    """One point and seed of a message.

    Attributes:
        id: names it among all runs.
        hp: resolved hyperparameters.
        seed: of every stream.
        round: 1-based, the one to fit, or the last that was fitted.
        since: the last round in which the server has an upload of this site; 0 for none.
    """

    id: str
    hp: dict[str, Value]
    seed: int
    round: int
    since: int

    @classmethod
    def from_words(cls, words: Mapping[str, Any]) -> SiteJob:
        """A job as a message tells it."""
        return cls(str(words["id"]), dict(words["hp"]), int(words["seed"]), int(words["round"]), int(words["since"]))

    def to_words(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"id": self.id, "hp": dict(self.hp), "seed": self.seed, "round": self.round, "since": self.since}


class _Alone(RunState):
    """A run as one site sees it: every client but its own is ``NOBODY``."""

    def _eligible(self) -> list[int]:
        """Itself, also to be scored without a row to train on."""
        return [next(i for i, client in enumerate(self.training_clients) if client is not NOBODY)]


@dataclass(frozen=True)
class Site:
    """A client on its own machine.

    Attributes:
        method: of the run.
        data: its own rows.
        client: its name, and which of the rows train and test.
        memory: what it keeps between rounds.
        domains: how many the site's rows may have.
    """

    method: Method
    data: Data
    client: Client
    memory: ClientMemory
    domains: int = 1

    def answer(self, kind: str, message: SiteMessage) -> SiteMessage:
        """What is sent back: ``fit`` -> uploads, ``score`` -> counts.

        Raises:
            FederatedRunError, when the site has lost what it held.
        """
        jobs = [SiteJob.from_words(words) for words in message.words["jobs"]]
        where, dtype = (int(message.words["clients"]), int(message.words["client"])), str(message.words["dtype"])
        trees: list[Tree] = []
        told: list[dict[str, Any]] = []
        seen: dict[Any, Tree] = {}
        for job, down in zip(jobs, message.trees, strict=True):
            run = self._run(job, *where, getattr(torch, dtype))
            if kind == "score":
                run.round = job.round
                trees.append({"counts": counts_of(self._scored(run, down), self.data, self.domains)})
                told.append({"id": job.id, "round": job.round})
                continue
            run.round = job.round - 1
            read = sorted((h.name, str(job.hp[h.name])) for h in self.method.hparams if h.fit)
            key = (job.seed, *read) if shares_uploads(self.method) else job.id
            if key not in seen:
                seen[key] = run.fit_one(down, where[1])
            kept = dict(run.states.get(where[1]) or {})
            self.memory.save(job.id, job.round, kept, job.since)
            trees.append(seen[key])
            outline = {name: list(t.shape) for name, t in kept.items()}
            told.append({"id": job.id, "round": job.round, "outline": outline})
        return SiteMessage({"jobs": told}, trees)

    def _run(self, job: SiteJob, clients: int, number: int, dtype: torch.dtype) -> RunState:
        """The run of a job, with what this client holds since it last took part."""
        everybody: Sequence[Client] = [self.client if i == number else NOBODY for i in range(clients)]
        # An upload that is not finite is the server's to refuse, with the round and this client named.
        trust = TrustPolicy(on_bad="reject")
        run = _Alone(self.method, job.hp, self.data, everybody, job.seed, dtype, trust=trust)
        if job.since:
            held = self.memory.load(job.id, job.since)
            if held is None:
                raise FederatedRunError(
                    f"Site {self.client.name!r} has lost what it held after round {job.since}.",
                    "Restore its state directory, or start the run again with --fresh.",
                )
            if held:
                run.states[number] = held
        return run

    def _scored(self, run: RunState, down: Tree) -> Evaluation:
        run.down = lambda: down  # type: ignore[method-assign]  # the server's tree is not here
        return score_job(run)


def counts_of(evaluation: Evaluation, data: Data, domains: int) -> Tensor:
    """Labelled test rows by (domain, label, predicted class); the last class stands for no prediction. int64."""
    C = data.classes
    label = data.y.cpu().numpy()[evaluation.rows]
    domain = np.zeros(len(label), np.int64) if data.domain is None else data.domain.cpu().numpy()[evaluation.rows]
    known = label >= 0
    guess = np.where(evaluation.predictions < 0, C, evaluation.predictions)[known]
    flat = (domain[known] * C + label[known]) * (C + 1) + guess
    return torch.from_numpy(np.bincount(flat, minlength=domains * C * (C + 1)).reshape(domains, C, C + 1))
