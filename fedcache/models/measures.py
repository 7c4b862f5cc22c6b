"""How right a model is about labelled rows, and how well its probabilities say so: plain figures, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.notebooks import html_facts, percent

BINS = 15
"""Equal-width bins of confidence: bin b of 1..15 holds ((b - 1) / 15, b / 15]."""
LEVEL = 0.95
"""Of the intervals."""

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RightRows:
    """A share of right rows. The interval is Wilson's; None where rows were predicted by several models."""

    rows: int  # that have a label and a prediction
    right: int
    interval: tuple[float, float] | None = None

    @property
    def accuracy(self) -> float | None:
        """A fraction; None without rows."""
        return self.right / self.rows if self.rows else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "accuracy": self.accuracy}


@dataclass(frozen=True)
class ClassMeasures:
    """One class among the labels; None for the precision of a class that is never predicted."""

    name: str
    rows: int  # with this label
    predicted: int  # rows that it is predicted for
    right: int

    @property
    def recall(self) -> float | None:
        """Share of its rows that are right: the accuracy of the class."""
        return self.right / self.rows if self.rows else None

    @property
    def precision(self) -> float | None:
        """Share of its predictions that are right."""
        return self.right / self.predicted if self.predicted else None

    @property
    def f1(self) -> float:
        """Harmonic mean of recall and precision."""
        return 2 * self.right / (self.rows + self.predicted)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "recall": self.recall, "precision": self.precision, "f1": self.f1}


@dataclass(frozen=True)
class Temperature:
    """The temperature that minimises the NLL of the rows it was fitted on."""

    value: float  # scores are divided by it
    nll: float  # nats per row at that temperature, over the rows it was fitted on
    rows: int  # it was fitted on
    at_limit: bool  # whether it is the lowest or highest that was tried


@dataclass(frozen=True)
class Measures:
    """What one model, or several on the same rows, made of labelled rows."""

    all: RightRows
    macro_f1: float  # a fraction
    ece: float  # a fraction
    nll: float  # nats per row; inf where a label has probability 0
    by_class: tuple[ClassMeasures, ...]  # of the classes among the labels
    by_domain: Mapping[str, RightRows]
    confusion: tuple[
        tuple[str, str, int], ...
    ]  # (label, prediction, rows), of the pairs that occur
    bins: tuple[
        tuple[int, float, float], ...
    ]  # rows, mean confidence and accuracy of each of ``BINS``; 0 without rows
    temperature: Temperature | None  # None for several models, and where no temperature helps
    unscored: int = 0  # rows without scores

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = {k: getattr(self, k) for k in ("macro_f1", "ece", "nll", "unscored")}
        return {
            **self.all.to_dict(),
            **plain,
            "by_class": [c.to_dict() for c in self.by_class],
            "by_domain": {name: d.to_dict() for name, d in self.by_domain.items()},
            "confusion": [list(pair) for pair in self.confusion],
            "reliability": [{"rows": n, "confidence": c, "accuracy": a} for n, c, a in self.bins],
            "temperature": None if self.temperature is None else asdict(self.temperature),
        }


@dataclass(frozen=True)
class ClientSpread:
    """Accuracy of the clients' own models, each on all rows; fractions."""

    clients: Mapping[str, float]  # of each; NaN without a scored row

    @property
    def mean(self) -> float:
        """Unweighted, over clients."""
        return float(np.nanmean(list(self.clients.values())))

    @property
    def std(self) -> float | None:
        """With ddof 1; None for one client."""
        known = [v for v in self.clients.values() if v == v]
        return float(np.std(known, ddof=1)) if len(known) > 1 else None

    @property
    def least(self) -> tuple[str, float]:
        """The client whose model is right least often."""
        return min(((k, v) for k, v in self.clients.items() if v == v), key=lambda item: item[1])

    @property
    def most(self) -> tuple[str, float]:
        """The client whose model is right most often."""
        return max(((k, v) for k, v in self.clients.items() if v == v), key=lambda item: item[1])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "mean": self.mean,
            "std": self.std,
            "least": list(self.least),
            "most": list(self.most),
            "clients": dict(self.clients),
        }


@dataclass(frozen=True)
class LeftOutRows:
    """Rows that no score is counted of."""

    unlabelled: int = 0
    unreadable: int = 0  # without features
    unknown: Mapping[str, int] = field(
        default_factory=dict
    )  # rows of each class that the model does not know

    def sentences(self) -> list[str]:
        """For a person."""
        said = []
        if self.unknown:
            few = [f"{name} ({rows:,})" for name, rows in list(self.unknown.items())[:8]]
            more = f" and {len(self.unknown) - 8} more" if len(self.unknown) > 8 else ""
            said.append(
                _not_scored(sum(self.unknown.values()), "of classes that the model does not know")
                + f": {', '.join(few)}{more}."
            )
        if self.unlabelled:
            said.append(_not_scored(self.unlabelled, "without a label") + ".")
        if self.unreadable:
            said.append(_not_scored(self.unreadable, "without features that can be read") + ".")
        return said


def _not_scored(rows: int, which: str) -> str:
    return f"1 row {which} is not scored" if rows == 1 else f"{rows:,} rows {which} are not scored"


@dataclass(frozen=True)
class Mistake:
    """A row that a model takes for another class."""

    row: int  # of the store
    name: str  # of the image in its dataset
    truth: str  # its class
    predicted: str
    probability: float  # of the predicted class
    client: str | None  # whose model


@dataclass(frozen=True)
class Mistakes:
    """The most confident mistakes of a run's models on rows of a store."""

    store: Path
    most: tuple[Mistake, ...]  # the most confident first
    wrong: int  # rows that were mistaken, each counted for every model that scored it
    rows: int  # labelled rows that were scored, likewise
    clients: int  # whose own models were asked; 0 for one model for all


@dataclass(frozen=True, repr=False)
class RunEvaluation:
    """The model of a run on rows."""

    run: str  # name of its directory, or of the model's file, after its directory's where it lies in one
    digest: str
    method: str
    model: str  # which of its models, in words
    trained_on: str  # name of the dataset
    backbones: tuple[str, ...]
    seeds: tuple[int, ...]
    softmax_temperature: float  # scores were divided by it
    rows: str  # what was evaluated on, in words
    left_out: LeftOutRows
    measures: Measures
    clients: ClientSpread | None = None  # of models of several clients
    mistakes: Mistakes | None = None  # the most confident ones, where they were asked for

    @property
    def short_run(self) -> str:
        """``run`` without the ending of a file, and of a name that is the digest the first letters."""
        words = self.run.removesuffix(".safetensors").split("/")
        return "/".join(word[:8] if self.digest.startswith(word) else word for word in words)

    @property
    def label(self) -> str:
        """For tables and figures."""
        return f"{self.method} {self.short_run}"

    @property
    def accuracy(self) -> float | None:
        """A fraction; of several clients' models their mean. None without rows."""
        return self.measures.all.accuracy if self.clients is None else self.clients.mean

    def __repr__(self) -> str:
        shown = percent(self.accuracy) or "not scored"
        return f"RunEvaluation({self.label}, {self.model}: {shown} of {self.measures.all.rows:,} rows, {self.rows})"

    def _repr_html_(self) -> str:
        m = self.measures
        interval = (
            None if m.all.interval is None else " to ".join(str(percent(v)) for v in m.all.interval)
        )
        facts = {
            "rows": f"{m.all.rows:,}",
            "accuracy": percent(self.accuracy),
            "95 % interval": interval,
            "macro-F1": percent(m.macro_f1),
            "ECE": percent(m.ece),
            "NLL": f"{m.nll:.4f}",
            "best temperature": None if m.temperature is None else f"{m.temperature.value:.4g}",
        }
        return html_facts(f"{self.label}, {self.model}, on {self.rows}", facts)

    def sentences(self) -> list[str]:
        """What the figures do not say by themselves, for a person."""
        said, m = self.left_out.sentences(), self.measures
        if m.unscored:
            said.append(f"{m.unscored:,} rows got no score and are not counted.")
        if self.clients is not None:
            (low, least), (high, most) = self.clients.least, self.clients.most
            said.append(
                f"Figures are means over clients' models; the lowest accuracy is {100 * least:.2f} % ({low}), the "
                f"highest {100 * most:.2f} % ({high})."
            )
        if m.nll == float("inf"):
            said.append(
                "NLL is inf: some of these rows are of classes to which a model gives the probability 0."
            )
        t = m.temperature
        if t is not None:
            limit = ", the last that was tried" if t.at_limit else ""
            said.append(
                f"--temperature {t.value:.4g} minimises the NLL ({t.nll:.4f}){limit}; it was fitted on these "
                f"{t.rows:,} rows, and is to be judged on others."
            )
        return said

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = ("run", "digest", "method", "model", "trained_on", "softmax_temperature", "rows")
        return {
            **{k: getattr(self, k) for k in plain},
            "backbones": list(self.backbones),
            "seeds": list(self.seeds),
            "left_out": asdict(self.left_out),
            "clients": None if self.clients is None else self.clients.to_dict(),
            "measures": self.measures.to_dict(),
        }


def calibration_error(bins: NDArray[Any]) -> float:
    """ECE: sum_b n_b / n |acc_b - conf_b| (Guo et al. 2017, eq 3) of [BINS, 3] sums: rows, confidence, right."""
    n, confidence, right = bins.T
    return float(np.abs(right - confidence).sum() / n.sum()) if n.sum() else float("nan")


def bin_sums(confidence: Floats, right: NDArray[np.bool_]) -> Floats:
    """[BINS, 3]: rows, summed confidence and right rows of each bin, of n rows' confidence in [0, 1] and right."""
    place = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    columns = (None, confidence, right.astype(np.float64))
    return np.stack(
        [np.bincount(place, weights, BINS).astype(np.float64) for weights in columns], 1
    )


def mean_bins(sums: Floats) -> tuple[tuple[int, float, float], ...]:
    """Rows, mean confidence and accuracy of each bin."""
    return tuple(
        (int(n), float(c / n) if n else 0.0, float(r / n) if n else 0.0) for n, c, r in sums
    )


def class_measures(pairs: Counts, classes: Sequence[str]) -> tuple[ClassMeasures, ...]:
    """Of each class among the labels; ``pairs`` is [P, 3]: label, prediction, rows."""
    C = len(classes)
    rows, predicted = (
        np.bincount(pairs[:, side], pairs[:, 2], C).astype(np.int64) for side in (0, 1)
    )
    hit = pairs[pairs[:, 0] == pairs[:, 1]]
    right = np.bincount(hit[:, 0], hit[:, 2], C).astype(np.int64)
    return tuple(
        ClassMeasures(classes[c], int(rows[c]), int(predicted[c]), int(right[c]))
        for c in map(int, np.flatnonzero(rows))
    )


def count_pairs(label: Counts, predicted: Counts, classes: int) -> Counts:
    """[P, 3]: label, prediction and rows of the pairs that occur."""
    found, rows = np.unique(label.astype(np.int64) * classes + predicted, return_counts=True)
    return np.stack([found // classes, found % classes, rows], 1)
