"""Scoring deployed models on test rows. Evaluation never stores what ``enter`` returned: that would change the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedcache.federate.engine.client_data import Data, stack_clients
from fedcache.federate.engine.deployed import DeployedModel
from fedcache.federate.engine.method import keep_down
from fedcache.federate.engine.outcome import MOST_CONFUSED, Evaluation, confusion, macro_f1
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.partition.client_table import ClientRows, ClientTable
from fedcache.heads.linear import Tree

BLOCK = 4096
"""Rows scored at once, over all models that are scored together: bounds the memory of logits and projections."""

TOGETHER = 4096
"""Scores of a row that are computed at once, of all models that are scored together."""

KEPT = 1 << 24
"""Predictions of personal models that an evaluation keeps, over all clients (256 MB with their rows)."""

Scores = Callable[[Tensor], Tensor]
"""Numbers of R rows -> scores [R, C], or [M, R, C] of several models."""


def predict_rows(scores: Scores, device: torch.device, rows: np.ndarray, models: int = 0) -> np.ndarray:
    """The class of the highest score of each row; int64 [len(rows)], of several models [models, len(rows)].

    A model all of whose scores are NaN (a probe without a label to learn from) predicts nothing: -1.
    """
    out = np.empty((models, len(rows)) if models else len(rows), np.int64)
    blind = np.ones(out.shape[:-1], bool)
    size = max(1, BLOCK // max(1, models))
    with torch.no_grad():
        for start in range(0, len(rows), size):
            index = torch.from_numpy(rows[start : start + size]).to(device)
            u = scores(index)
            out[..., start : start + size] = u.argmax(-1).cpu().numpy()
            if blind.any():
                blind &= torch.isnan(u).flatten(-2).all(-1).cpu().numpy()
    out[blind] = -1
    return out


def evaluate_global(scores: Scores, data: Data, clients: Sequence[ClientRows]) -> Evaluation:
    """One model on every client's test rows; a row that several clients hold is predicted once."""
    table = clients if isinstance(clients, ClientTable) else ClientTable.of(clients, np.empty(0, np.int64))
    rows = table.tested_by_clients
    predictions = predict_rows(scores, data.x.device, rows)
    truth = data.y.cpu().numpy()[rows]
    right = _right(predictions, truth)
    # Of the rows of each client, and of those that clients share once for all of them.
    accuracy = table.tests.shares_right(rows, right)
    if table.shares.any():
        accuracy[table.shares] = _mean(right[np.searchsorted(rows, table.common)])
    f1 = macro_f1(predictions, truth, data.classes)
    counts = confusion(truth, predictions, data.classes) if data.classes <= MOST_CONFUSED else None
    domains = _by_domain(data, rows, right)
    return Evaluation(accuracy, _mean(right), f1, domains, rows, predictions, counts=counts)


@dataclass(frozen=True)
class PersonalModels:
    """The models that clients deploy, as evaluation asks for them."""

    of: Callable[[int], Scores | None]
    """Of one client, by its number; None for a client that has nothing to deploy."""

    together: Callable[[Sequence[int]], Scores | None] = lambda _clients: None
    """Of several clients, with a leading axis [M, R, C]; None for models that cannot be stacked."""


def evaluate_personal(
    models: PersonalModels,
    data: Data,
    clients: Sequence[ClientRows],
    *,
    everywhere: bool = False,
    headline: str = "mean",
    chosen: Sequence[int] | None = None,
) -> Evaluation:
    """Client i's model on client i's test rows, or on all clients'.

    Neighbours that are tested on the same rows are scored together, by one product with all their models.

    Args:
        models: of the clients.
        data: labels and domains.
        clients: their test rows.
        everywhere: score every model on the union of all test rows.
        headline: mean | min over clients.
        chosen: numbers of the clients to score, ascending; None for all.
    """
    table = clients if isinstance(clients, ClientTable) else ClientTable.of(clients, np.empty(0, np.int64))
    union = table.tested_by_clients if everywhere else None
    tally = Tally(data, len(clients))
    several = max(1, TOGETHER // max(1, data.classes))
    for block in _same_tests(table, range(len(clients)) if chosen is None else chosen, everywhere, several):
        test = table.test_of(block[0]) if union is None else union
        if not len(test):
            continue
        scores = models.together(block) if len(block) > 1 else None
        if scores is not None:
            tally.add(block, test, predict_rows(scores, data.x.device, test, len(block)))
            continue
        for client in block:
            alone = models.of(client)
            if alone is not None:
                tally.add([client], test, predict_rows(alone, data.x.device, test)[None])
    return tally.evaluation(headline)


def _same_tests(table: ClientTable, chosen: Sequence[int], everywhere: bool, most: int) -> Iterator[list[int]]:
    """The chosen clients in their order, as blocks of at most ``most`` that are tested on the same rows."""
    block: list[int] = []
    for client in chosen:
        alike = everywhere or (table.shares[client] and bool(block) and table.shares[block[0]])
        if block and not (alike and len(block) < most):
            yield block
            block = []
        block.append(client)
    if block:
        yield block


class Tally:
    """What the models of single clients got right, added up client by client.

    Predictions are kept while they are no more than ``KEPT``; counts of (label, prediction) are kept of any number.
    """

    def __init__(self, data: Data, clients: int) -> None:
        self._y, self._classes = data.y.cpu().numpy(), data.classes
        self._domain = None if data.domain is None else data.domain.cpu().numpy()
        domains = 0 if self._domain is None else int(self._domain.max(initial=-1)) + 1
        self._accuracy = np.full(clients, np.nan)
        self._f1: list[float] = []
        self._kept: list[tuple[np.ndarray, np.ndarray]] | None = []
        self._size = 0
        self._hits, self._known = np.zeros(domains), np.zeros(domains, np.int64)
        small = data.classes <= MOST_CONFUSED
        self._confusion = np.zeros((data.classes, data.classes), np.int64) if small else None

    def add(self, clients: Sequence[int], rows: np.ndarray, predicted: np.ndarray) -> None:
        """Add predictions [M, R] of ``clients`` for the same test rows [R]."""
        y = self._y[rows]
        for client, guess in zip(clients, predicted, strict=True):
            right = _right(guess, y)
            self._accuracy[client] = _mean(right)
            self._f1.append(macro_f1(guess, y, self._classes))
            if self._confusion is not None:
                self._confusion += confusion(y, guess, self._classes)
            if self._domain is not None:
                known = ~np.isnan(right)
                of = self._domain[rows[known]]
                self._hits += np.bincount(of, right[known], len(self._hits))
                self._known += np.bincount(of, minlength=len(self._known))
            self._size += len(rows)
            if self._kept is not None:
                self._kept = [*self._kept, (rows, guess)] if self._size <= KEPT else None

    def evaluation(self, headline: str) -> Evaluation:
        """The scores of all that was added."""
        none = np.empty(0, np.int64)
        kept = [(none, none), *(self._kept or ())]
        scored = np.flatnonzero(self._known)
        return Evaluation(
            self._accuracy,
            None,
            _mean(np.array(self._f1)),
            {int(d): float(self._hits[d] / self._known[d]) for d in scored},
            np.concatenate([rows for rows, _ in kept]),
            np.concatenate([guess for _, guess in kept]),
            headline,
            self._confusion,
            self._kept is not None,
        )


def _right(predicted: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """1 where right, 0 where wrong, NaN where label or prediction is unknown (-1): such a row is not scored."""
    return np.where((labels >= 0) & (predicted >= 0), predicted == labels, np.nan)


def _mean(right: np.ndarray) -> float:
    scored = right[~np.isnan(right)]
    return float(scored.mean()) if len(scored) else float("nan")


def _by_domain(data: Data, rows: np.ndarray, right: np.ndarray) -> dict[int, float]:
    if data.domain is None:
        return {}
    domain = data.domain.cpu().numpy()[rows]
    means = {int(d): _mean(right[domain == d]) for d in np.unique(domain)}
    return {d: mean for d, mean in means.items() if not np.isnan(mean)}


def score_job(job: RunState, chosen: Sequence[int] | None = None) -> Evaluation:
    """Score what a run deploys now, on the test rows of its clients.

    ``chosen`` are the clients whose personal models are scored; None for all.
    """
    down, protocol = job.down(), job.method.protocol(job.hp)
    if protocol == "global":
        one = deployed_model(job, None, down)
        return evaluate_global(lambda rows: one.scores(job.data.x[rows, 0]), job.data, job.clients)

    def model(client: int) -> Scores | None:
        if not has_model(job, client):
            return None
        own = job.features(client)
        if client in job.states.kept and job.method.deploy is keep_down:
            data, ctx = job.rows([client], 0), job.ctx([client], 0)

            def scored(rows: Tensor) -> Tensor:
                state, x = job.states.scored(client, own, rows)
                return job.method.predict(down, state, data, cast(Tensor, x), ctx)

            return scored
        deployed = deployed_model(job, client, down)
        return lambda rows: deployed.scores(own[rows, 0])

    return evaluate_personal(
        PersonalModels(model, partial(models_together, job, down)), job.data, job.clients,
        everywhere=protocol == "everywhere", headline=job.method.headline, chosen=chosen,
    )  # fmt: skip


def models_together(job: RunState, down: Tree, clients: Sequence[int]) -> Scores | None:
    """The models of several clients as one, whose functions take a client axis; None where they cannot be stacked."""
    method = job.method
    alike = "batched" in method.executions and method.deploy is keep_down and not job.own
    if not alike or any(c in job.states.kept or not has_model(job, c) for c in clients):
        return None
    parts = [deployed_model(job, c, down).personal for c in clients]
    outline = {name: t.shape for name, t in parts[0].items()}
    if not outline or any({name: t.shape for name, t in part.items()} != outline for part in parts):
        return None
    personal = {name: torch.stack([part[name] for part in parts]) for name in outline}
    shared = {name: t.unsqueeze(0) for name, t in down.items()}
    data, ctx = job.rows(clients, 1, test=method.reads_test(job.hp)), job.ctx(clients, 1)
    return lambda rows: method.predict(shared, personal, data, job.data.x[rows, 0].unsqueeze(0), ctx)


def has_model(job: RunState, client: int) -> bool:
    """Whether a client ever had anything to deploy: the public set has not, nor has a client without training rows."""
    return bool(len(job.training_clients[client].train)) and client >= job.public


def deployed_model(job: RunState, client: int | None, down: Tree | None = None) -> DeployedModel:
    """What a run deploys now for one client with training rows, or (None) its one model.

    ``down`` is what the server sends now, where the caller has it already.
    """
    down, method = job.down() if down is None else down, job.method
    if client is None:
        train = np.asarray(job.training_clients[job.eligible[0]].train, np.int64)
        data = stack_clients(job.data.x, job.labels, [train], 0)
        return DeployedModel(method, _deploy(job, down, {}, None), {}, data, job.server_ctx())
    data, ctx = job.rows([client], 0), job.ctx([client], 0)
    with torch.no_grad():
        state = job.states.get(client) or method.enter(down, data, ctx)
    deployed = _deploy(job, down, state, client)
    shown = job.rows([client], 0, test=True) if method.reads_test(job.hp) else data
    return DeployedModel(method, deployed, method.personal_part(deployed, state, shown, ctx), shown, ctx)


def _deploy(job: RunState, down: Tree, state: Tree, client: int | None) -> Tree:
    """What is scored: the broadcast, or what evaluation trains on it (a probe on all labelled rows)."""
    if job.method.deploy is keep_down:
        return down
    ctx = job.server_ctx() if client is None else job.ctx([client], 0)
    return job.method.deploy(down, state, job.labelled(client), ctx)
