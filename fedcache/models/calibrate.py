"""Calibration: the temperature of a model's probabilities, fitted when its training ends.

Scores of ridge regression are between 0 and 1, and those of a nearest mean are distances, so their plain softmax is
not the probability that a prediction is right. The fitted temperature makes the mean probability of the predicted
classes equal to their accuracy (Clarte et al., "Expectation consistency for calibration of neural networks", UAI 2023).
The temperature with the lowest NLL, which ``evaluate`` finds, is not robust. Single rows with extreme scores, which
variances near 0 cause, can raise it until the probabilities of all other rows are nearly equal.

The temperature is fitted on rows on which the model was not trained:

- the validation rows of the partition, for every method with a global model;
- if there are no validation rows: a fifth of every client's training rows, for methods whose clients take no gradient
  steps. The method is trained again without this fifth, and the first model gets the temperature of the second one. For
  other methods this would double the time of the run, so they have no temperature.

Only simulated runs have a temperature, because fitting needs the rows of all clients in one place.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from fedcache.errors import FederatedRunError, UsageError
from fedcache.federate.engine.evaluate import BLOCK
from fedcache.federate.engine.outcome import DeployedModel, TrainingOutput
from fedcache.federate.engine.run import TrainingRun, run
from fedcache.federate.partition.client_table import ClientTable, RowLists, names_of
from fedcache.federate.partition.validation import hold_out
from fedcache.models.evaluate import COLDEST, HOTTEST, sample_step

SHARE = 0.2
"""Share of every client's training rows that the second training leaves out to fit the temperature."""
LEAST_ROWS = 20
"""Minimum number of rows to fit a temperature."""
DIGITS = 4
"""Significant digits of a temperature; further digits differ between processors."""


def temperature_of(spec: TrainingRun, out: TrainingOutput) -> float | None:
    """The temperature of a model that has just been trained, or None.

    None for personal models, for private runs (their epsilon does not cover the fit), and for runs without enough rows.
    """
    if out.protocol != "global" or spec.trust.privacy is not None:
        return None
    validation = None
    if isinstance(spec.clients, ClientTable):
        validation = spec.clients.validation
    if validation is not None:
        return _fitted(spec, out, validation.rows)
    if spec.method.gradient or "labels" not in spec.method.needs:
        return None
    try:
        train, rows = _without_a_share(spec)
        # The second training has no test rows: without own tests (None), all clients share an empty list.
        clients = ClientTable.dealt(names_of(spec.clients), train, np.empty(0, np.int64), None)
        second = run(replace(spec, clients=clients, eval_every=0), out.hp)
        return _fitted(spec, second, rows)
    except (UsageError, FederatedRunError):  # too few rows, or a method that fails with so few
        return None


def _without_a_share(spec: TrainingRun) -> tuple[RowLists, NDArray[np.int64]]:
    """Remove a share of each class from every client's training rows; returns the remaining and the removed rows.

    Raises UsageError if clients share rows and one of them would keep none.
    """
    train = RowLists.of([client.train for client in spec.clients])
    label = spec.data.y.cpu().numpy()
    # Every row gets 16 random bytes, and ``hold_out`` removes the rows with the smallest ones. A random choice is
    # needed, because neighbouring rows of a store may be similar. The bytes are the same for all seeds of a run.
    drawn = np.random.default_rng(0).bytes(16 * len(label))
    order = np.frombuffer(drawn, np.uint8).reshape(-1, 16)
    remaining, removed = hold_out(train, label, order, SHARE)
    return remaining, removed.distinct


def _fitted(spec: TrainingRun, out: TrainingOutput, rows: NDArray[np.int64]) -> float | None:
    """The temperature of the global model of ``out`` on labelled rows on which it was not trained."""
    model = out.deployed(None)
    label = spec.data.y.cpu().numpy()
    rows = rows[label[rows] >= 0]
    rows = rows[:: sample_step(len(rows) * spec.data.classes)]
    if model is None or len(rows) < LEAST_ROWS:
        return None
    scores = scores_of_rows(model, spec, rows)
    known = np.isfinite(scores.max(-1))
    if known.sum() < LEAST_ROWS:
        return None
    value = consistent_temperature(scores[known], label[rows[known]])
    if value is None:
        return None
    return float(f"{value:.{DIGITS}g}")


def consistent_temperature(scores: NDArray[np.float64], label: NDArray[np.int64]) -> float | None:
    """The temperature at which the mean probability of the predicted classes equals their accuracy.

    The accuracy is estimated as (right + 1) / (n + 2), so that it is below 1 and the temperature above 0 if all rows
    are right. Returns ``HOTTEST`` if the probabilities are too high even at that temperature, and None if they are too
    low at ``COLDEST``.

    Args:
        scores: [n, C]; the highest score of each row is finite.
        label: [n].
    """
    right = int((scores.argmax(-1) == label).sum())
    accuracy = (right + 1) / (len(label) + 2)

    def excess(log_temperature: float) -> float:
        p = torch.from_numpy(scores / np.exp(log_temperature)).softmax(-1)
        return float(p.amax(-1).mean()) - accuracy

    low = np.log(COLDEST)
    high = np.log(HOTTEST)
    if excess(low) < 0:
        return None
    if excess(high) > 0:
        return HOTTEST
    return float(np.exp(scipy.optimize.brentq(excess, low, high, xtol=1e-6)))


def scores_of_rows(
    model: DeployedModel, spec: TrainingRun, rows: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Scores float64 [n, C] of rows of the run."""
    parts = []
    numbers = torch.from_numpy(rows).to(spec.data.x.device)
    for block in torch.split(numbers, BLOCK):
        x = spec.data.x[block, 0]  # the first view of each row
        if x.is_floating_point():
            x = x.to(spec.dtype)
        with torch.no_grad():
            parts.append(model.scores(x).double().cpu().numpy())
    return np.concatenate(parts)
