"""Scoring deployed models on test rows. Evaluation never stores what ``enter`` returned: that would change the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedcache.federate.engine.client_data import Data, stack_clients
from fedcache.federate.engine.deployed import DeployedModel
from fedcache.federate.engine.method import keep_down
from fedcache.federate.engine.outcome import Evaluation, macro_f1
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.partition.client_table import ClientRows, ClientTable
from fedcache.heads.linear import Tree

BLOCK = 4096
"""Rows scored at once: bounds the memory of logits and projections."""

Scores = Callable[[Tensor], Tensor]
"""Numbers of rows -> scores [.., R, C]."""


def predict_rows(scores: Scores, device: torch.device, rows: np.ndarray) -> np.ndarray:
    """The class of the highest score of each row; int64 [len(rows)].

    A model all of whose scores are NaN (a probe without a label to learn from) predicts nothing: -1.
    """
    out = np.empty(len(rows), np.int64)
    blind = True
    with torch.no_grad():
        for start in range(0, len(rows), BLOCK):
            index = torch.from_numpy(rows[start : start + BLOCK]).to(device)
            u = scores(index)
            out[start : start + BLOCK] = u.argmax(-1).cpu().numpy()
            blind = blind and bool(torch.isnan(u).all())
    return np.full_like(out, -1) if blind else out


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
    return Evaluation(accuracy, _mean(right), f1, _by_domain(data, rows, right), rows, predictions)


def evaluate_personal(
    model: Callable[[int], Scores | None],
    data: Data,
    clients: Sequence[ClientRows],
    *,
    everywhere: bool = False,
    headline: str = "mean",
) -> Evaluation:
    """Client i's model on client i's test rows, or on all clients'.

    Args:
        model: None for a client that has nothing to deploy.
        data: labels and domains.
        clients: their test rows.
        everywhere: score every model on the union of all test rows.
        headline: mean | min over clients.
    """
    union = np.unique(np.concatenate([np.asarray(c.test, np.int64) for c in clients]))
    y = data.y.cpu().numpy()
    accuracy = np.full(len(clients), np.nan)
    rows, predictions, f1 = [np.empty(0, np.int64)], [np.empty(0, np.int64)], []
    for i, client in enumerate(clients):
        test = union if everywhere else np.asarray(client.test, np.int64)
        scores = model(i) if len(test) else None
        if scores is None:
            continue
        predicted = predict_rows(scores, data.x.device, test)
        accuracy[i] = _mean(_right(predicted, y[test]))
        f1.append(macro_f1(predicted, y[test], data.classes))
        rows.append(test)
        predictions.append(predicted)
    flat, guess = np.concatenate(rows), np.concatenate(predictions)
    by_domain = _by_domain(data, flat, _right(guess, y[flat]))
    return Evaluation(accuracy, None, _mean(np.array(f1)), by_domain, flat, guess, headline)


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


def score_job(job: RunState) -> Evaluation:
    """Score what a run deploys now, on the test rows of its clients."""
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
        model, job.data, job.clients,
        everywhere=protocol == "everywhere", headline=job.method.headline,
    )  # fmt: skip


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
