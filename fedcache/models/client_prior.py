"""Client prior: the log-prior of classes that a client adds to its class scores, from its own class counts.

A client knows how many training rows of each class it has. If its test rows have the same class shares, a global model
predicts them better after the logarithms of these shares are added to its log-probabilities (logit adjustment; Menon
et al., "Long-tail learning via logit adjustment", ICLR 2021). Nothing is sent for ``classes`` and ``counts``. For
``fitted`` the server sums the class counts of all clients, and fits one number to them. ``em`` estimates the class
shares of a client's test rows from their scores, without labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcache.errors import UsageError
from fedcache.federate.engine.outcome import DeployedModel
from fedcache.federate.partition.client_table import RowLists
from fedcache.heads.losses import MASKED

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

NEVER = -1e20
"""A class with a score or log-probability below this is never predicted by the model, so its probability is 0. The
score of such a class is -1e30 (``heads.losses.MASKED``), which some methods multiply by a factor."""
LEAST = 1e-3
MOST = 1e6
"""Lowest and highest concentration that is tried."""
GRID = 55
"""Number of values that ``grid_minimum`` tries before it searches between two of them. For concentrations these are
about six per factor of ten."""
MASKED_SHARE = 0.05
"""A warning is given if a mask is expected to exclude the right class of at least this share of a client's rows."""
EM_STEPS = 1000
EM_CLOSE = 1e-6
"""EM ends after ``EM_STEPS`` steps, or when no class share changes by more than ``EM_CLOSE``."""


@dataclass(frozen=True)
class ClientPriors:
    """The prior of each of M clients over C classes. Memory holds M x C counts."""

    kind: str
    counts: Counts  # [M, C] training rows of each client and class
    shares: Floats  # [C] of all clients' training rows, pooled; they sum to 1
    concentration: float | None = None  # k of ``fitted``, in rows; None for the other kinds

    @classmethod
    def of(cls, kind: str, counts: Counts) -> ClientPriors:
        """The priors from class counts [M, C]. Raises UsageError if no client has a row of a known class."""
        total = counts.sum(0).astype(np.float64)
        if not total.any():
            raise UsageError(
                "A client prior needs labelled training rows, but no client has any.",
                "Leave --client-prior out.",
            )
        shares = total / total.sum()
        concentration = None
        if kind == "fitted":
            concentration = fit_concentration(counts, shares)
        return cls(kind, counts, shares, concentration)

    def caution(self) -> str | None:
        """A warning if a mask would probably exclude the right classes of many rows; None otherwise.

        The expected share of a client's future rows in classes without a training row follows from the fitted
        concentration k: k pi_c / (n_i + k), summed over these classes.
        """
        if self.kind not in ("classes", "counts"):
            return None
        k = fit_concentration(self.counts, self.shares)
        rows = self.counts.sum(1)
        masked = (self.counts == 0) @ self.shares
        excluded = k * masked / (rows + k)  # [M]
        lost = float(excluded[rows > 0].mean())
        if lost < MASKED_SHARE:
            return None
        return (
            f"--client-prior {self.kind} probably excludes the right class of {100 * lost:.1f} % of a client's rows, "
            f"because clients lack some classes only by chance (concentration k = {k:.4g}). --client-prior fitted "
            "excludes only classes that no client has."
        )

    def log_prior(self, client: int) -> Floats:
        """The log-prior [C] of a client, up to a constant: -inf for a masked class, 0 for ``none``.

        Under ``classes`` and ``counts`` it is 0 for a client without labelled training rows, because its class shares
        are unknown.
        """
        counts = self.counts[client].astype(np.float64)
        if self.concentration is not None:
            counts += self.concentration * self.shares
            counts /= counts.sum()
        elif self.kind == "none" or not counts.any():
            counts[:] = 1.0
        elif self.kind == "classes":
            counts = np.minimum(counts, 1.0)
        with np.errstate(divide="ignore"):
            log_prior: Floats = np.log(counts)
        return log_prior


def class_counts(train: Sequence[np.ndarray], label: Counts, classes: int) -> Counts:
    """int64 [M, C]: training rows of each client and class.

    Args:
        train: M lists of rows.
        label: [N] of all rows, numbers below ``classes``; rows with a negative label are not counted.
        classes: C.
    """
    lists = RowLists.of(train)
    labels = label[lists.rows]
    known = labels >= 0
    # Each pair of client and class has a number of its own, so one ``bincount`` counts all pairs.
    cells = lists.owner[known].astype(np.int64) * classes + labels[known]
    return np.bincount(cells, minlength=len(lists) * classes).reshape(-1, classes)


def fit_concentration(counts: Counts, shares: Floats) -> float:
    """The k in [``LEAST``, ``MOST``] for which Dirichlet(k shares) explains the clients' class counts best.

    Each client draws its class shares from that Dirichlet distribution, and its rows from these shares (maximum
    likelihood of the Dirichlet-multinomial distribution). A small k means that clients differ much.

    Args:
        counts: [M, C].
        shares: [C], above 0 for each class that has a row.
    """
    rows = counts.sum(1).astype(np.float64)
    # If a client has no rows of a class, the class adds nothing: Gamma(n + a) / Gamma(a) is 1 for n = 0.
    client, of_class = np.nonzero(counts)
    n = counts[client, of_class].astype(np.float64)
    share = shares[of_class]

    def loss(log_k: float) -> float:
        k = np.exp(log_k)
        by_class = scipy.special.gammaln(n + k * share) - scipy.special.gammaln(k * share)
        by_client = scipy.special.gammaln(rows + k) - scipy.special.gammaln(k)
        return float(by_client.sum() - by_class.sum())

    # A grid comes first, because the likelihood is flat at both ends.
    log_k, _loss = grid_minimum(loss, np.log(LEAST), np.log(MOST))
    return float(np.exp(log_k))


def grid_minimum(loss: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """The number between ``low`` and ``high`` with the lowest loss, and this loss.

    The lowest of ``GRID`` numbers is improved by a search between its neighbours.
    """
    grid = np.linspace(low, high, GRID)
    best = int(np.argmin([loss(value) for value in grid]))
    start = grid[max(0, best - 1)]
    end = grid[min(GRID - 1, best + 1)]
    minimum = scipy.optimize.minimize_scalar(
        loss, bounds=(start, end), method="bounded", options={"xatol": 1e-6}
    )
    return float(minimum.x), float(minimum.fun)


def estimate_log_prior(probabilities: Floats, shares: Floats) -> Floats:
    """log(class shares of unlabelled rows / class shares of the training rows), [C].

    Expectation maximisation of the likelihood (Saerens, Latinne and Decaestecker, "Adjusting the outputs of a
    classifier to new a priori probabilities", 2002): q_c <- mean_i of p_ic q_c / pi_c, normalised for each row.

    Args:
        probabilities: [n, C] of the model; rows of NaN are left out.
        shares: [C] class shares pi of the training rows; a class without training rows gets -inf.
    """
    p = probabilities * (shares > 0)
    p = p[p.sum(-1) > 0]
    trained = np.where(shares > 0, shares, 1.0)
    estimate = shares
    steps = EM_STEPS
    if not len(p):
        steps = 0  # without rows, the estimate stays at the class shares of the training rows
    for _ in range(steps):
        posterior = p * (estimate / trained)
        posterior /= posterior.sum(-1, keepdims=True)
        last = estimate
        estimate = posterior.mean(0)
        if np.abs(estimate - last).max() <= EM_CLOSE:
            break
    with np.errstate(divide="ignore"):
        return np.log(estimate / trained)


@dataclass(frozen=True)
class ClientPrior:
    """The prior of one client, in the form in which a model adds it to its scores."""

    client: str
    kind: str
    log_prior: Floats  # [C]

    @property
    def words(self) -> str:
        """Kind and client."""
        return f"{self.kind} of {self.client}"

    def offset(self, temperature: float) -> Tensor:
        """Numbers [C] to add to scores, so that the log-prior is added to the log-softmax at this temperature."""
        return torch.from_numpy(temperature * self.log_prior).clamp(min=MASKED)


@dataclass(frozen=True)
class ModelWithPrior(DeployedModel):
    """A deployed model with a client prior."""

    offset: Tensor  # [C]

    def scores(self, x: Tensor) -> Tensor:
        """The scores of the model, plus the offset."""
        return add_offset(super().scores(x), self.offset)


def add_offset(scores: Tensor, offset: Tensor) -> Tensor:
    """Scores [.., C] plus the offset [C] of a client prior. A row stays unchanged if the sum excludes every class."""
    adjusted = scores + offset.to(scores)
    excluded = adjusted.amax(-1, keepdim=True) < NEVER
    return torch.where(excluded, scores, adjusted)
