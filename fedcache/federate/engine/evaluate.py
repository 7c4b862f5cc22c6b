"""Scoring deployed models on test rows. Evaluation never stores what ``enter`` returned: that would change the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedcache.federate.engine.client_data import Data, stack_clients
from fedcache.federate.engine.context import Ctx, LruCache
from fedcache.federate.engine.method import keep_down
from fedcache.federate.engine.outcome import (
    MOST_CONFUSED,
    DeployedModel,
    Evaluation,
    confusion,
    known_mean,
    macro_f1,
)
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.execution.gram_states import same_outline
from fedcache.federate.execution.grid_batch import stacked_trees
from fedcache.federate.partition.client_table import Client, ClientTable, RowLists
from fedcache.heads.linear import Tree

# Accuracy over all test rows of all clients together, one definition for all methods (D-89).


def with_pooled(
    evaluation: Evaluation, clients: ClientTable, data: Data, *, everywhere: bool = False
) -> Evaluation:
    """The evaluation, completed by the accuracy over all labelled test rows of all clients that were scored.

    A row that several clients are tested on counts once for each of them. ``everywhere`` means that every client was
    scored on the union of the test rows. The accuracy is NaN if no client was scored.
    """
    accuracy = evaluation.client_accuracy
    scored = ~np.isnan(accuracy)
    if not scored.any():
        return replace(evaluation, pooled=float("nan"))
    rows = np.ones(len(accuracy))  # equal numbers, as all clients are scored on the same rows
    if not everywhere:
        rows = _labelled_rows(clients, data)
    # The mean of accuracies, weighted by rows, is the share of right predictions among all rows (D-89).
    weights = rows[scored]
    weighted = accuracy[scored] @ weights / max(1.0, weights.sum())
    return replace(evaluation, pooled=float(weighted))


def _labelled_rows(table: ClientTable, data: Data) -> np.ndarray:
    """float64 [M]: test rows of each client whose label is known."""
    known = (data.y >= 0).cpu().numpy()
    tests = table.tests
    if isinstance(tests, RowLists):
        counts = np.bincount(tests.owner, known[tests.rows], minlength=len(table))
    else:
        counts = tests.sizes  # assigned by class, so all have a label
    rows = counts.astype(np.float64)
    # Clients that share test rows are all tested on ``common``.
    rows[table.shares] = known[table.common].sum()
    return rows


BLOCK = 4096
"""Maximum number of rows times models that are scored at once. It limits the memory of logits."""

TOGETHER = 4096
"""Maximum number of classes times models that are scored at once."""

CLIENTS = 256
"""Maximum number of clients in a block. Equal models of a block are found by comparison and scored once."""

KEPT = 1 << 24
"""Maximum number of personal models' predictions that an evaluation keeps, over all clients (256 MB with rows)."""

Scores = Callable[[Tensor], Tensor]
"""Row numbers [R] -> scores [R, C], or scores [M, R, C] of several models."""


def predict_rows(
    scores: Scores, device: torch.device, rows: np.ndarray, models: int = 0
) -> np.ndarray:
    """The class with the highest score of each row: int64 [len(rows)], or [models, len(rows)] for several models.

    A model with only NaN scores (a probe without a label to learn from) has the prediction -1 for every row.
    """
    lead: tuple[int, ...] = ()
    if models:
        lead = (models,)
    out = np.empty((*lead, len(rows)), np.int64)
    blind = np.ones(lead, bool)  # models that had only NaN scores so far
    # So many rows at once that the scores of all models fit into one block.
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


def evaluate_global(scores: Scores, data: Data, clients: Sequence[Client]) -> Evaluation:
    """One model on every client's test rows; a row that several clients hold is predicted once."""
    table = ClientTable.tests_only(clients)
    # Every row is predicted once; then each client's accuracy follows from the rows it is tested on.
    rows = table.tested_by_clients
    predictions = predict_rows(scores, data.x.device, rows)
    truth = data.y.cpu().numpy()[rows]
    right = _right(predictions, truth)
    accuracy = table.tests.shares_right(rows, right)
    # Clients that share test rows have the same accuracy, so it is computed once.
    if table.shares.any():
        shared = np.searchsorted(rows, table.common)
        accuracy[table.shares] = known_mean(right[shared])
    f1 = macro_f1(predictions, truth, data.classes)
    counts = None
    if data.classes <= MOST_CONFUSED:
        counts = confusion(truth, predictions, data.classes)
    domains = _by_domain(data, rows, right)
    evaluation = Evaluation(
        accuracy, known_mean(right), f1, domains, rows, predictions, counts=counts
    )
    return with_pooled(evaluation, table, data)


@dataclass(frozen=True)
class StackedModels:
    """The different models of some clients."""

    scores: Callable[[slice], Scores]  # of a range of models, with a leading axis: [U, R, C]
    which: np.ndarray  # int64 [M]: number of the model of each client
    trees: Sequence[Tree]  # tensors of each model
    fresh: int  # number of the model of clients that never took part; -1 if there is none


def evaluate_personal(
    model: Callable[[int], Scores | None],
    data: Data,
    clients: Sequence[Client],
    *,
    together: Callable[[Sequence[int]], StackedModels | None] = lambda _clients: None,
    everywhere: bool = False,
    headline: str = "mean",
    chosen: Sequence[int] | None = None,
) -> Evaluation:
    """Scores of client i's model on client i's test rows, or on the test rows of all clients.

    Consecutive clients with the same test rows are scored together, by one product with all their models. Equal models,
    such as those of clients that never took part, are scored once.

    Args:
        model: number of a client -> its model; None for a client that has nothing to deploy.
        data: labels and domains.
        clients: all clients, with their test rows.
        together: numbers of several clients -> their models; None for models that cannot be stacked.
        everywhere: score every model on the union of all test rows.
        headline: mean | min over clients.
        chosen: numbers of the clients to score, ascending; None for all.
    """
    table = ClientTable.tests_only(clients)
    union = None
    if everywhere:
        union = table.tested_by_clients
    if chosen is None:
        chosen = range(len(clients))
    tally = Tally(data, len(clients))
    fresh_before = FreshModel()
    for block in _same_tests(table, chosen, everywhere):
        test = union
        if test is None:
            test = table.test_of(block[0])
        if not len(test):
            continue
        # One matrix product scores all models of a block; models that cannot be stacked are scored one by one.
        stacked = None
        if len(block) > 1:
            stacked = together(block)
        if stacked is not None:
            predicted = predict_stacked(stacked, data, test, fresh_before)
            tally.add(block, test, predicted, stacked.which)
            continue
        for client in block:
            scores = model(client)
            if scores is not None:
                predicted = predict_rows(scores, data.x.device, test)
                # The only model of this call has number 0.
                tally.add([client], test, predicted[None], np.zeros(1, np.int64))
    return with_pooled(tally.evaluation(headline), table, data, everywhere=everywhere)


def _same_tests(table: ClientTable, chosen: Sequence[int], everywhere: bool) -> Iterator[list[int]]:
    """The chosen clients in their order, as blocks of at most ``CLIENTS`` that are tested on the same rows."""
    block: list[int] = []
    for client in chosen:
        if block:
            # Only test rows that clients share are known to be the same without comparing them.
            same = everywhere or (table.shares[client] and table.shares[block[0]])
            if not same or len(block) >= CLIENTS:
                yield block
                block = []
        block.append(client)
    if block:
        yield block


class FreshModel:
    """The model of clients that never took part, with its predictions; the next block often has the same model."""

    def __init__(self) -> None:
        self._tree: Tree = {}
        self._rows: np.ndarray | None = None
        self._predicted = np.empty(0, np.int64)

    def predicted(self, tree: Tree, rows: np.ndarray) -> np.ndarray | None:
        """The kept predictions [R] if ``tree`` and ``rows`` are the kept ones; else None."""
        if self._rows is rows and equal_trees(tree, self._tree):
            return self._predicted
        return None

    def keep(self, tree: Tree, rows: np.ndarray, predicted: np.ndarray) -> None:
        """Replace the model and its predictions."""
        self._tree = tree
        self._rows = rows
        self._predicted = predicted


def predict_stacked(
    stacked: StackedModels, data: Data, rows: np.ndarray, fresh_before: FreshModel
) -> np.ndarray:
    """int64 [U, R]: the predictions of each of the different models for the rows."""
    at_once = max(1, TOGETHER // max(1, data.classes))
    predictions = [fresh_before.predicted(tree, rows) for tree in stacked.trees]
    out = np.empty((len(predictions), len(rows)), np.int64)
    start = 0
    while start < len(predictions):
        known = predictions[start]
        if known is not None:
            out[start] = known
            start += 1
            continue
        # One matrix product scores consecutive models without known predictions.
        stop = start + 1
        limit = min(start + at_once, len(predictions))
        while stop < limit and predictions[stop] is None:
            stop += 1
        part = slice(start, stop)
        out[part] = predict_rows(stacked.scores(part), data.x.device, rows, stop - start)
        start = stop
    if stacked.fresh >= 0:
        fresh_before.keep(stacked.trees[stacked.fresh], rows, out[stacked.fresh])
    return out


def equal_trees(a: Tree, b: Tree) -> bool:
    """Whether two trees hold the same names and numbers."""
    if a.keys() != b.keys():
        return False
    return all(a[name].shape == b[name].shape and torch.equal(a[name], b[name]) for name in a)


class Tally:
    """The scores of personal models, collected client by client.

    Predictions are kept up to the limit ``KEPT``; counts of (label, prediction) are always kept.
    """

    def __init__(self, data: Data, clients: int) -> None:
        self._y = data.y.cpu().numpy()
        self._classes = data.classes
        self._domain = None
        domains = 0
        if data.domain is not None:
            self._domain = data.domain.cpu().numpy()
            domains = int(self._domain.max(initial=-1)) + 1
        self._accuracy = np.full(clients, np.nan)
        self._f1 = np.full(clients, np.nan)
        self._kept: list[tuple[np.ndarray, np.ndarray]] | None = []
        self._size = 0
        self._hits = np.zeros(domains)
        self._known = np.zeros(domains, np.int64)
        self._confusion = None
        if data.classes <= MOST_CONFUSED:
            self._confusion = np.zeros((data.classes, data.classes), np.int64)

    def add(
        self, clients: Sequence[int], rows: np.ndarray, predicted: np.ndarray, which: np.ndarray
    ) -> None:
        """Add predictions [U, R] of different models for the same test rows [R].

        Client ``clients[j]`` has model ``which[j]``.
        """
        y = self._y[rows]
        for model, guess in enumerate(predicted):
            # Clients with equal models and equal test rows have equal scores: computed once, counted for each.
            sharing = np.asarray(clients)[which == model]
            right = _right(guess, y)
            self._accuracy[sharing] = known_mean(right)
            self._f1[sharing] = macro_f1(guess, y, self._classes)
            if self._confusion is not None:
                self._confusion += len(sharing) * confusion(y, guess, self._classes)
            if self._domain is not None:
                known = ~np.isnan(right)
                domains = self._domain[rows[known]]
                hits = np.bincount(domains, right[known], len(self._hits))
                counts = np.bincount(domains, minlength=len(self._known))
                self._hits += len(sharing) * hits
                self._known += len(sharing) * counts
        # Above the limit all predictions are dropped, because a reader would take a part of them for all.
        self._size += len(clients) * len(rows)
        if self._size > KEPT:
            self._kept = None
        if self._kept is not None:
            self._kept += [(rows, predicted[model]) for model in which]

    def evaluation(self, headline: str) -> Evaluation:
        """The scores of all models that were added."""
        kept = self._kept or []
        rows = RowLists.of([tested for tested, _ in kept])
        predicted = RowLists.of([guess for _, guess in kept])
        by_domain = {}
        for d in np.flatnonzero(self._known):
            by_domain[int(d)] = float(self._hits[d] / self._known[d])
        return Evaluation(
            self._accuracy,
            None,  # the accuracy of a global model
            known_mean(self._f1),
            by_domain,
            rows.rows,
            predicted.rows,
            headline,
            self._confusion,
            self._kept is not None,  # whether all predictions were kept
            sizes=rows.sizes,
        )


def _right(predicted: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """1 for a right prediction, 0 for a wrong one, and NaN if label or prediction is unknown (-1) and not scored."""
    known = (labels >= 0) & (predicted >= 0)
    return np.where(known, predicted == labels, np.nan)


def _by_domain(data: Data, rows: np.ndarray, right: np.ndarray) -> dict[int, float]:
    if data.domain is None:
        return {}
    domain = data.domain.cpu().numpy()[rows]
    means = {int(d): known_mean(right[domain == d]) for d in np.unique(domain)}
    return {d: mean for d, mean in means.items() if not np.isnan(mean)}


def score_job(job: RunState, chosen: Sequence[int] | None = None) -> Evaluation:
    """Score the models that a run deploys now, on the test rows of its clients and on their validation rows, if any.

    ``chosen`` are the clients whose personal models are scored; None for all.
    """
    down = job.down()
    memo = job.memo
    global_model = None
    if job.method.protocol(job.hp) == "global":
        global_model = deployed_model(job, None, down)
    for_validation = None
    if isinstance(job.clients, ClientTable):
        for_validation = job.clients.scored_for_validation
    job.memo = memo or LruCache()  # clients that never took part share their first weights
    try:
        evaluation = _scored_on(job, down, global_model, job.clients, chosen)
        if for_validation is None:
            return evaluation
        return replace(
            evaluation, validation=_scored_on(job, down, global_model, for_validation, chosen)
        )
    finally:
        job.memo = memo


def _scored_on(
    job: RunState,
    down: Tree,
    global_model: DeployedModel | None,
    clients: Sequence[Client],
    chosen: Sequence[int] | None,
) -> Evaluation:
    """Scores of the global model, or of the clients' models, on the test rows of ``clients``."""
    if global_model is not None:
        scores = global_model.scores
        return evaluate_global(lambda rows: scores(job.data.x[rows, 0]), job.data, clients)

    def model(client: int) -> Scores | None:
        job.env.watch()
        if not has_model(job, client):
            return None
        features = job.features(client)
        # A map in Gram coordinates is scored in these coordinates; its weights are never computed.
        if client in job.states.kept and job.method.deploy is keep_down:
            data = job.rows([client], 0)
            ctx = job.ctx([client], 0)

            def scored(rows: Tensor) -> Tensor:
                state, x = job.states.scored(client, features, rows)
                return job.method.predict(down, state, data, cast(Tensor, x), ctx)

            return scored
        deployed = deployed_model(job, client, down, clients)
        return lambda rows: deployed.scores(features[rows, 0])

    return evaluate_personal(
        model,
        job.data,
        clients,
        together=lambda ids: models_together(job, down, ids, clients),
        everywhere=job.method.protocol(job.hp) == "everywhere",
        headline=job.method.headline,
        chosen=chosen,
    )


def models_together(
    job: RunState, down: Tree, clients: Sequence[int], tests: Sequence[Client]
) -> StackedModels | None:
    """The different models of several clients, with a client axis; None if they cannot be stacked.

    ``tests`` are the rows they will be scored on; some methods (``reads_test``) learn from them first.
    """
    job.env.watch()
    method = job.method
    alike = "batched" in method.executions and method.deploy is keep_down and not job.overrides
    if not alike or any(c in job.states.kept or not has_model(job, c) for c in clients):
        return None
    # The different models of these clients; clients that never took part usually share one.
    trees: list[Tree] = []
    first = []  # the first client with each model
    which = np.empty(len(clients), np.int64)
    fresh = -1  # number of the model of clients that never took part
    for i, client in enumerate(clients):
        tree = deployed_model(job, client, down, tests).personal
        new = client not in job.states
        if new and fresh >= 0 and equal_trees(tree, trees[fresh]):
            which[i] = fresh
            continue
        stackable = not trees or same_outline(tree, trees[0])
        if not tree or not stackable:
            return None
        which[i] = len(trees)
        if new:
            fresh = len(trees)
        trees.append(tree)
        first.append(client)
    shared = {name: t.unsqueeze(0) for name, t in down.items()}

    def scores(part: slice) -> Scores:
        # The client axis has one position for each model. The broadcast has length 1 on this axis; features are shared.
        ids = first[part]
        personal = stacked_trees(trees[part])
        shown = None
        if method.reads_test(job.hp):
            shown = tests
        data = job.rows(ids, 1, tests=shown)
        ctx = job.ctx(ids, 1)

        def scored(rows: Tensor) -> Tensor:
            x = job.data.x[rows, 0].unsqueeze(0)
            return method.predict(shared, personal, data, x, ctx)

        return scored

    return StackedModels(scores, which, trees, fresh)


def has_model(job: RunState, client: int) -> bool:
    """Whether a client has a model: the public set and clients without training rows have none."""
    return client >= job.public and bool(len(job.training_clients[client].train))


def deployed_model(
    job: RunState,
    client: int | None,
    down: Tree | None = None,
    tests: Sequence[Client] | None = None,
) -> DeployedModel:
    """The model that a run deploys now for one client with training rows, or its one global model (``client`` None).

    ``down`` is the current broadcast, if the caller has it already. ``tests`` are the rows that the model will be
    scored on, None for the test rows; some methods (``reads_test``) learn from them first.
    """
    if down is None:
        down = job.down()
    method = job.method
    if client is None:
        # The global model needs no client's rows; they are passed for users' methods that read some.
        train = job.train_rows(int(job.eligible[0]))
        data = stack_clients(job.data.x, job.labels, [train], 0)
        ctx = job.server_ctx()
        # {}: a global model has no state of a client, and no personal part.
        deployed = _deploy(job, down, {}, None, ctx)
        return DeployedModel(method, deployed, {}, data, ctx)
    data = job.rows([client], 0)
    ctx = job.ctx([client], 0)
    with torch.no_grad():
        state = job.states.get(client) or method.enter(down, data, ctx)
    deployed = _deploy(job, down, state, client, ctx)
    if method.reads_test(job.hp):
        data = job.rows([client], 0, tests=tests or job.training_clients)
    personal = method.personal_part(deployed, state, data, ctx)
    return DeployedModel(method, deployed, personal, data, ctx)


def _deploy(job: RunState, down: Tree, state: Tree, client: int | None, ctx: Ctx) -> Tree:
    """The tensors that are scored: the broadcast, or a probe that evaluation trains on all labelled rows."""
    if job.method.deploy is keep_down:
        return down
    return job.method.deploy(down, state, job.labelled(client), ctx)


# The accuracy without any training, for methods that start from class texts.


def zero_shot_accuracy(job: RunState, chosen: Sequence[int] | None) -> float | None:
    """Accuracy (a fraction) of the zero-shot classifier on the same rows on which the method is scored.

    For personal models that are scored on their own test rows it is the mean over clients. For other models it is the
    accuracy on all test rows.

    Args:
        job: the run; its method defines the zero-shot classifier.
        chosen: clients whose personal models are scored; None for all.

    Returns:
        None if the method does not start from class texts, or clients have different features.
    """
    if job.overrides:
        return None
    scores = job.method.zero_shot(job.server_ctx())
    if scores is None:
        return None
    evaluation = evaluate_global(lambda rows: scores(job.data.x[rows, 0]), job.data, job.clients)
    if job.method.protocol(job.hp) != "personalised":
        return evaluation.global_accuracy
    of_clients = evaluation.client_accuracy
    if chosen is not None:
        of_clients = of_clients[np.asarray(chosen, np.int64)]
    mean = known_mean(of_clients)
    if np.isnan(mean):
        return None
    return mean
