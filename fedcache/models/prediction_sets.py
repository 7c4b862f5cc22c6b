"""Prediction sets: the classes that a model cannot exclude for a row, with a guaranteed coverage.

Federated conformal prediction (Lu, Yu, Karimireddy, Jordan, Raskar, "Federated conformal predictors for distributed
uncertainty quantification", ICML 2023). Let p be the probabilities of the model. The nonconformity score of a row is
1 - p(true class). Each of K clients has n_k calibration rows, on which the model was not trained, and together they
have N. The threshold q is the ceil((N + K) c)-th smallest of the N scores, and infinity if there are fewer scores. The
set of a row has all classes with 1 - p(class) <= q.

With partial exchangeability, the set of a test row has its true class with a probability of at least c. That means: the
test row is of client k with probability (n_k + 1) / (N + K), and it is exchangeable with the calibration rows of this
client. Rows of different clients may have different distributions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fedcache.notebooks import percent


def threshold(scores: NDArray[np.float64], clients: int, coverage: float) -> float:
    """The threshold q of the nonconformity scores; infinity if too few scores guarantee the coverage.

    Args:
        scores: [N] of the calibration rows of all clients.
        clients: K, that have these rows.
        coverage: c, above 0 and below 1.
    """
    # In float64, 0.07 * 100 is slightly above 7, which would give the rank 8.
    rank = math.ceil((len(scores) + clients) * Fraction(str(coverage)))
    if rank > len(scores):
        return math.inf
    return float(np.sort(scores)[rank - 1])


@dataclass(frozen=True)
class SetCounts:
    """The prediction sets of one client's own test rows."""

    rows: int  # that have a label and a prediction
    covered: int  # sets that have the true class
    classes: int  # sum over the sets
    single: int  # sets of one class
    empty: int


@dataclass(frozen=True)
class PredictionSets:
    """Prediction sets of a model on the own test rows of each client."""

    target: float  # coverage that is guaranteed, a fraction
    threshold: float  # q; inf if every set has all classes
    calibration_rows: int
    calibration_clients: int  # clients with calibration rows
    test_protocol: str  # of the partition: class shares of the clients' test rows
    clients: Mapping[str, SetCounts]  # clients with test rows
    without_rows: int  # clients without test rows, which have no coverage

    @property
    def total(self) -> SetCounts:
        """Sums over clients: a row counts once for every client that is tested on it."""
        counts = [list(asdict(client).values()) for client in self.clients.values()]
        return SetCounts(*np.sum(counts, 0).tolist())

    def figures(self) -> dict[str, float]:
        """Coverages and shares as fractions, the mean number of classes of a set, and a number of clients."""
        total = self.total
        each = [client.covered / client.rows for client in self.clients.values()]
        return {
            "client_mean": float(np.mean(each)),
            "lowest": min(each),
            "clients_below": sum(value < self.target for value in each),
            "pooled": total.covered / total.rows,
            "mean_size": total.classes / total.rows,
            "single_share": total.single / total.rows,
            "empty_share": total.empty / total.rows,
        }

    def sentences(self) -> list[str]:
        """All figures in words."""
        found = self.figures()
        target = f"{100 * self.target:g} %"
        limit = self.threshold
        rows = self.calibration_rows
        calibrating = self.calibration_clients
        size = found["mean_size"]
        single = percent(found["single_share"])
        empty = percent(found["empty_share"])
        notes = [
            f"Prediction sets for a coverage of {target}: the threshold is {limit:.4g}, from {rows:,} validation "
            f"rows of {calibrating:,} clients. A set has {size:.2f} classes on average; {single} of the sets have "
            f"one class and {empty} have no class."
        ]
        if limit == math.inf:
            c = Fraction(str(self.target))
            needed = math.ceil(calibrating * c / (1 - c))
            notes.append(
                f"Every set has all classes, because this coverage needs {needed:,} validation rows."
            )
        mean = percent(found["client_mean"])
        lowest = percent(found["lowest"])
        pooled = percent(found["pooled"])
        below = found["clients_below"]
        tested = len(self.clients)
        protocol = self.test_protocol
        notes.append(
            f"On each client's own test rows (test protocol of the partition: {protocol}), {tested:,} clients: the "
            f"mean coverage over clients is {mean} and the lowest is {lowest} (clients below {target}: {below:,}); "
            f"the coverage over all rows is {pooled}."
        )
        if self.without_rows:
            notes.append(f"Clients without test rows, left out: {self.without_rows:,}.")
        return notes

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {**asdict(self), "rows": self.total.rows, **self.figures()}
