"""Class-incremental scores: the classes arrive in stages, and each stage trains on the classes that have arrived.

A method whose uploads are sums over rows adds the rows of new classes to the sums of the earlier ones, so after stage t
it has the model of all rows of the first t groups of classes and keeps no row (Fani et al., "Accelerating heterogeneous
federated learning with closed-form classifiers", ICML 2024; Guan et al., "STSA: Federated class-incremental learning
via spatial-temporal statistics aggregation", arXiv:2506.01327). fedcache trains this model from these rows, which gives
the same sums. Rows of a class that has not arrived are neither trained on nor tested, and the class is not predicted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcache.errors import FederatedRunError
from fedcache.federate.engine.evaluate import predict_rows
from fedcache.federate.engine.outcome import DeployedModel, TrainingOutput
from fedcache.federate.engine.run import TrainingRun, run
from fedcache.federate.partition.client_table import ClientTable, RowLists
from fedcache.federate.partition.partition import Partition


def stage_of_classes(classes: int, stages: int, seed: int) -> NDArray[np.int64]:
    """int64 [C]: the stage in which each class arrives, from 0; the order of the classes is drawn with the seed."""
    order = np.random.default_rng(seed).permutation(classes)
    stage_of = np.empty(classes, np.int64)
    for stage, group in enumerate(np.array_split(order, stages)):
        stage_of[group] = stage
    return stage_of


def stage_scores(
    spec: TrainingRun, out: TrainingOutput, partition: Partition, stages: int
) -> dict[str, Any]:
    """Accuracies as fractions of pooled test rows, and the stage of each class.

    Let a_ts be the accuracy on the test rows of the classes of stage s after stage t, and A_t the accuracy on the test
    rows of all classes of the stages up to t. Then ``average`` is the mean of A_t, ``final`` is the last A_t, and
    ``forgetting`` is the mean over s < T of max_t<T a_ts - a_Ts (Chaudhry et al., ECCV 2018). ``after_each_stage`` has
    A_t, and ``by_stage`` has the lists of a_ts, s <= t. A stage without test rows has the accuracy None, and the means
    leave it out.

    Args:
        spec: the run.
        out: of the run, on all classes; it is the last stage.
        partition: of the run.
        stages: T, at most the number of classes.

    Raises FederatedRunError if the classes of the first stages have no training rows.
    """
    stage_of = stage_of_classes(spec.data.classes, stages, spec.seed)
    label = spec.data.y.cpu().numpy()
    # Class -1 of rows without a label takes the stage of the last class, so these rows are taken out.
    row_stage = np.where(label >= 0, stage_of[label], stages)
    train = partition.table.train
    test = partition.test
    after_each = []
    by_stage = []
    for stage in range(stages):
        outcome = out
        if stage < stages - 1:
            arrived = row_stage[train.rows] <= stage
            if not arrived.any():
                number = stage + 1
                raise FederatedRunError(
                    f"The classes of stage {number} have no training rows.",
                    "Use fewer stages, or leave --stages out.",
                )
            sizes = np.bincount(train.owner[arrived], minlength=len(train))
            lists = RowLists.of_sizes(train.rows[arrived], sizes)
            names = partition.table.names
            clients = ClientTable.dealt(names, lists, np.empty(0, np.int64), None)
            outcome = run(replace(spec, clients=clients, eval_every=0), out.hp)
        model = outcome.deployed(None)
        assert model is not None  # additive methods have one global model
        rows = test[row_stage[test] <= stage]
        predicted = predictions(model, spec, rows, torch.from_numpy(stage_of > stage))
        right = predicted == label[rows]
        after_each.append(_share(right))
        by_stage.append([_share(right[row_stage[rows] == s]) for s in range(stage + 1)])
    forgotten = []
    for s in range(stages - 1):
        earlier = [accuracies[s] for accuracies in by_stage[s : stages - 1]]
        last = by_stage[-1][s]
        if last is not None:
            forgotten.append(max(value for value in earlier if value is not None) - last)
    known = [accuracy for accuracy in after_each if accuracy is not None]
    average = None
    if known:
        average = float(np.mean(known))
    forgetting = None
    if forgotten:
        forgetting = float(np.mean(forgotten))
    return {
        "average": average,
        "final": after_each[-1],
        "forgetting": forgetting,
        "after_each_stage": after_each,
        "by_stage": by_stage,
        "stage_of_class": stage_of.tolist(),
    }


def predictions(
    model: DeployedModel, spec: TrainingRun, rows: NDArray[np.int64], absent: Tensor
) -> NDArray[np.int64]:
    """int64 [n]: the predicted class of each row; never one of the ``absent`` classes, bool [C]."""
    x = spec.data.x
    absent = absent.to(x.device)

    def scores(numbers: Tensor) -> Tensor:
        features = x[numbers, 0]  # the first view of each row
        if features.is_floating_point():
            features = features.to(spec.dtype)
        return model.scores(features).masked_fill(absent, -torch.inf)

    return predict_rows(scores, x.device, rows)


def _share(right: NDArray[np.bool_]) -> float | None:
    if not len(right):
        return None
    return float(right.mean())
