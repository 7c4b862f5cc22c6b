"""Evaluate a saved model on labelled rows of a store or a file of embeddings: measures and mistakes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from fedcache.errors import StoreError, unknown
from fedcache.federate.engine.outcome import macro_f1
from fedcache.models.client_prior import NEVER, ClientPrior, add_offset, grid_minimum
from fedcache.models.predictor import FileFeatures, Predictor, features_of_file, rows_of_split
from fedcache.notebooks import html_facts, percent
from fedcache.parsing import Facts, counted
from fedcache.progress import percent_range
from fedcache.store.store import Store
from fedcache.tables.embeddings import open_embeddings
from fedcache.tables.splits import SPLIT_NAMES
from fedcache.tables.words import some_names

# Prediction sets: the classes that a model cannot exclude for a row, with a guaranteed coverage.
#
# Federated conformal prediction (Lu, Yu, Karimireddy, Jordan, Raskar, "Federated conformal predictors for distributed
# uncertainty quantification", ICML 2023). Let p be the probabilities of the model. The nonconformity score of a row
# is 1 - p(true class). Each of K clients has n_k calibration rows, on which the model was not trained, and together
# they have N. The threshold q is the ceil((N + K) c)-th smallest of the N scores, and infinity if there are fewer
# scores. The set of a row has all classes with 1 - p(class) <= q.
#
# With partial exchangeability, the set of a test row has its true class with a probability of at least c. That means:
# the test row is of client k with probability (n_k + 1) / (N + K), and it is exchangeable with the calibration rows of
# this client. Rows of different clients may have different distributions.


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


# Accuracy and calibration of a model on labelled rows.


BINS = 15
"""Number of bins of confidence, of equal width: bin b of 1..15 is ((b - 1) / 15, b / 15]."""
LEVEL = 0.95
"""Confidence level of all intervals of an evaluation."""

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RightRows:
    """Number of rows with a right prediction, and Wilson's interval of the accuracy."""

    rows: int  # that have a label and a prediction
    right: int  # rows whose prediction is their label
    # None without rows, or if several models predict the rows
    interval: tuple[float, float] | None = None

    @property
    def accuracy(self) -> float | None:
        """A fraction; None without rows."""
        if self.rows:
            return self.right / self.rows
        return None

    def to_dict(self) -> Facts:
        """Plain JSON values."""
        return {**asdict(self), "accuracy": self.accuracy}


@dataclass(frozen=True)
class ClassMeasures:
    """Measures of one class among the labels."""

    name: str
    rows: int  # with this label
    predicted: int  # rows with this prediction
    right: int  # rows with this label and this prediction

    @property
    def recall(self) -> float | None:
        """Share of its rows that are right: the accuracy of the class."""
        if self.rows:
            return self.right / self.rows
        return None

    @property
    def precision(self) -> float | None:
        """Share of its predictions that are right; None for a class that is never predicted."""
        if self.predicted:
            return self.right / self.predicted
        return None

    @property
    def f1(self) -> float:
        """Harmonic mean of recall and precision."""
        return 2 * self.right / (self.rows + self.predicted)

    def to_dict(self) -> Facts:
        """Plain JSON values."""
        return {**asdict(self), "recall": self.recall, "precision": self.precision, "f1": self.f1}


@dataclass(frozen=True)
class Temperature:
    """The temperature that minimises the NLL of the rows on which it was fitted."""

    value: float  # scores are divided by it
    nll: float  # nats per row at that temperature, over the rows of the fit
    rows: int  # of the fit
    at_limit: bool  # whether it is the lowest or highest temperature that was tried


@dataclass(frozen=True)
class Measures:
    """Measures of one model, or of several models on the same rows."""

    all: RightRows
    macro_f1: float  # a fraction
    ece: float  # a fraction
    nll: float  # nats per row; inf if a label has probability 0
    by_class: tuple[ClassMeasures, ...]  # of the classes among the labels
    by_domain: Mapping[str, RightRows]
    # (label, prediction, rows) of every pair that occurs.
    confusion: tuple[tuple[str, str, int], ...]
    # Rows, mean confidence and accuracy of each of ``BINS``; 0 without rows.
    bins: tuple[tuple[int, float, float], ...]
    temperature: Temperature | None  # None for several models, and if no temperature helps
    unscored: int = 0  # rows without scores

    def to_dict(self) -> Facts:
        """Plain JSON values."""
        plain = {k: getattr(self, k) for k in ("macro_f1", "ece", "nll", "unscored")}
        temperature = None
        if self.temperature is not None:
            temperature = asdict(self.temperature)
        return {
            **self.all.to_dict(),
            **plain,
            "by_class": [c.to_dict() for c in self.by_class],
            "by_domain": {name: d.to_dict() for name, d in self.by_domain.items()},
            "confusion": [list(pair) for pair in self.confusion],
            "reliability": [{"rows": n, "confidence": c, "accuracy": a} for n, c, a in self.bins],
            "temperature": temperature,
        }


@dataclass(frozen=True)
class ClientSpread:
    """Accuracy of the clients' own models, each on all rows; fractions."""

    clients: Mapping[str, float]  # name -> accuracy; NaN without a scored row

    @property
    def mean(self) -> float:
        """The unweighted mean over clients."""
        return float(np.nanmean(list(self.clients.values())))

    @property
    def std(self) -> float | None:
        """The standard deviation over clients, with ddof 1; None for one client."""
        known = list(self._known.values())
        if len(known) > 1:
            return float(np.std(known, ddof=1))
        return None

    @property
    def least(self) -> tuple[str, float]:
        """The client whose model has the lowest accuracy, and that accuracy."""
        return min(self._known.items(), key=lambda item: item[1])

    @property
    def most(self) -> tuple[str, float]:
        """The client whose model has the highest accuracy, and that accuracy."""
        return max(self._known.items(), key=lambda item: item[1])

    @property
    def _known(self) -> dict[str, float]:
        """The accuracies that are not NaN."""
        return {name: value for name, value in self.clients.items() if value == value}

    def to_dict(self) -> Facts:
        """Plain JSON values."""
        return {
            "mean": self.mean,
            "std": self.std,
            "least": list(self.least),
            "most": list(self.most),
            "clients": dict(self.clients),
        }


@dataclass(frozen=True)
class PriorHits:
    """Right predictions of one client's own test rows."""

    rows: int  # that have a label and a prediction
    right: int  # without the prior
    right_with_prior: int


@dataclass(frozen=True)
class PriorAccuracy:
    """Accuracy without and with the client prior, on each client's own test rows; fractions."""

    kind: str  # one of ``CLIENT_PRIORS``
    concentration: float | None  # of ``fitted``
    test_protocol: str  # of the partition: class shares of the clients' test rows
    clients: Mapping[str, PriorHits]  # clients with scored rows

    @property
    def rows(self) -> int:
        """Scored rows, each counted for every client that is tested on it."""
        return sum(c.rows for c in self.clients.values())

    @property
    def without(self) -> dict[str, float]:
        """Accuracies without the prior: ``client_mean``, unweighted over clients, and ``pooled``, over all rows."""
        return self._accuracy([c.right for c in self.clients.values()])

    @property
    def with_prior(self) -> dict[str, float]:
        """The same accuracies with the prior."""
        return self._accuracy([c.right_with_prior for c in self.clients.values()])

    def _accuracy(self, right: Sequence[int]) -> dict[str, float]:
        rows = [client.rows for client in self.clients.values()]
        each = [hits / n for hits, n in zip(right, rows, strict=True)]
        return {"client_mean": float(np.mean(each)), "pooled": sum(right) / sum(rows)}

    def sentence(self) -> str:
        """All accuracies in words."""
        kind = self.kind
        if self.concentration is not None:
            kind += f" (concentration {self.concentration:.4g})"
        clients = len(self.clients)
        before = {name: percent(accuracy) for name, accuracy in self.without.items()}
        after = {name: percent(accuracy) for name, accuracy in self.with_prior.items()}
        return (
            f"Client prior {kind}, on each client's own test rows (test protocol of the partition: "
            f"{self.test_protocol}), {clients:,} clients: the mean accuracy over clients is {before['client_mean']} "
            f"without and {after['client_mean']} with the prior; the accuracy over all {self.rows:,} rows is "
            f"{before['pooled']} without and {after['pooled']} with the prior."
        )

    def to_dict(self) -> Facts:
        """Plain JSON values."""
        return {
            "kind": self.kind,
            "concentration": self.concentration,
            "test_protocol": self.test_protocol,
            "rows": self.rows,
            "accuracy_without_prior": self.without,
            "accuracy_with_prior": self.with_prior,
            "clients": {name: asdict(c) for name, c in self.clients.items()},
        }


@dataclass(frozen=True)
class Adaptation:
    """Accuracy of a model without and with test-time adaptation, on the same rows in the same order."""

    name: str  # one of ``ADAPTATIONS``
    settings: Mapping[str, Any]
    fidelity: str  # exact, or approx for an approximation of the paper
    sorted_by_class: (
        bool  # whether neighbours have the same class much more often than in random order
    )
    plain: RightRows
    adapted: RightRows

    def sentence(self) -> str:
        """Both accuracies in words."""
        name = self.name
        if self.fidelity != "exact":
            name += " (an approximation of its paper)"
        batch = self.settings.get("batch", 1)
        order = f"{self.settings['order']} order"
        if self.sorted_by_class:
            order += " (sorted by class)"
        before = percent(self.plain.accuracy)
        after = percent(self.adapted.accuracy)
        rows = counted(self.adapted.rows, "row")
        return (
            f"Test-time adaptation {name}: the accuracy is {before} without and {after} with it, over {rows} in "
            f"{order}, {batch:,} at a time."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **vars(self),
            "settings": dict(self.settings),
            "plain": self.plain.to_dict(),
            "adapted": self.adapted.to_dict(),
        }


@dataclass(frozen=True)
class LeftOutRows:
    """Counts of rows that are not scored, by reason."""

    unlabelled: int = 0
    unreadable: int = 0  # without features
    # Class that the model does not know -> rows.
    unknown: Mapping[str, int] = field(default_factory=dict)

    def sentences(self) -> list[str]:
        """One sentence for each reason that occurs."""
        reasons = []
        if self.unknown:
            listed = [f"{name} ({rows:,})" for name, rows in self.unknown.items()]
            names = some_names(listed, 8)
            rows = sum(self.unknown.values())
            reasons.append(
                _not_scored(rows, "of classes that the model does not have", f": {names}")
            )
        if self.unlabelled:
            reasons.append(_not_scored(self.unlabelled, "without a label"))
        if self.unreadable:
            reasons.append(_not_scored(self.unreadable, "without readable features"))
        return reasons


def _not_scored(rows: int, which: str, names: str = "") -> str:
    return f"Not scored: {counted(rows, 'row')} {which}{names}."


@dataclass(frozen=True)
class Mistake:
    """A row that a model assigns to a wrong class."""

    row: int  # of the store
    name: str  # of the image in its dataset
    truth: str  # its class
    predicted: str
    probability: float  # of the predicted class
    client: str | None  # owner of the model; None for a global model


@dataclass(frozen=True)
class Mistakes:
    """The most confident mistakes of a run's models on rows of a store."""

    store: Path
    most: tuple[Mistake, ...]  # the most confident first
    wrong: int  # rows with a wrong prediction, each counted for every model that scored it
    rows: int  # labelled rows that were scored, each counted for every model that scored it
    clients: int  # clients whose personal models scored rows; 0 for a global model


@dataclass(frozen=True, repr=False)
class RunEvaluation:
    """Measures of a run's model on labelled rows."""

    run: str  # name of its directory, or of the model file with its directory in front
    digest: str
    method: str
    model: str  # the evaluated model, in words
    trained_on: str  # name of the dataset
    backbones: tuple[str, ...]
    seeds: tuple[int, ...]
    softmax_temperature: float  # scores were divided by it
    rows: str  # the evaluated rows, in words
    left_out: LeftOutRows
    measures: Measures
    clients: ClientSpread | None = None  # None if one model was evaluated
    mistakes: Mistakes | None = None  # the most confident mistakes; None if they were not requested
    client_prior: PriorAccuracy | None = None  # None for ``--client-prior none``
    prediction_sets: PredictionSets | None = None  # None without ``--coverage``
    adaptation: Adaptation | None = None  # None without ``--adapt``

    @property
    def short_run(self) -> str:
        """``run`` without the suffix of a file; a digest in it is shortened to eight letters."""
        words = self.run.removesuffix(".safetensors").split("/")
        for place, word in enumerate(words):
            if self.digest.startswith(word):
                words[place] = word[:8]
        return "/".join(words)

    @property
    def label(self) -> str:
        """Label of the model in tables and figures."""
        return f"{self.method} {self.short_run}"

    @property
    def accuracy(self) -> float | None:
        """A fraction; the mean over several clients' models. None without rows."""
        if self.clients is None:
            return self.measures.all.accuracy
        return self.clients.mean

    def __repr__(self) -> str:
        shown = percent(self.accuracy) or "not scored"
        rows = f"{self.measures.all.rows:,} rows, {self.rows}"
        return f"RunEvaluation({self._title}: {shown} of {rows})"

    @property
    def _title(self) -> str:
        return f"{self.label}, {self.model}"

    def _repr_html_(self) -> str:
        m = self.measures
        temperature = None
        if m.temperature is not None:
            temperature = f"{m.temperature.value:.4g}"
        facts = {
            "rows": f"{m.all.rows:,}",
            "accuracy": percent(self.accuracy),
            "95 % interval": percent_range(m.all.interval) or None,
            "macro-F1": percent(m.macro_f1),
            "ECE": percent(m.ece),
            "NLL": f"{m.nll:.4f}",
            "best temperature": temperature,
        }
        return html_facts(f"{self._title}, on {self.rows}", facts)

    def sentences(self) -> list[str]:
        """Remarks on the measures, one sentence each."""
        notes = self.left_out.sentences()
        m = self.measures
        if m.unscored:
            notes.append(f"{m.unscored:,} rows could not be scored and do not count.")
        if self.clients is not None:
            lowest = _named_accuracy(*self.clients.least)
            highest = _named_accuracy(*self.clients.most)
            notes.append(
                f"All numbers are means over the models of the clients; the lowest accuracy is {lowest}, the highest "
                f"{highest}."
            )
        if self.client_prior is not None:
            notes.append(self.client_prior.sentence())
        if self.prediction_sets is not None:
            notes += self.prediction_sets.sentences()
        if self.adaptation is not None:
            notes.append(self.adaptation.sentence())
        if m.nll == float("inf"):
            notes.append(
                "NLL is inf, because the model gives probability 0 to the true class of some rows."
            )
        t = m.temperature
        if t is not None:
            nll = f"the NLL ({t.nll:.4f})"
            if t.at_limit:
                nll += ", and is the largest temperature that was tried"
            notes.append(
                f"--temperature {t.value:.4g} minimises {nll}. It was fitted on these {t.rows:,} rows, so evaluate "
                "it on other rows."
            )
        return notes

    def to_dict(self) -> Facts:
        """Plain JSON values."""
        names = ("run", "digest", "method", "model", "trained_on", "softmax_temperature", "rows")
        plain = {name: getattr(self, name) for name in names}
        parts = {}
        for name in ("clients", "measures", "client_prior", "prediction_sets", "adaptation"):
            part = getattr(self, name)
            if part is not None:
                part = part.to_dict()
            parts[name] = part
        return {
            **plain,
            "backbones": list(self.backbones),
            "seeds": list(self.seeds),
            "left_out": asdict(self.left_out),
            **parts,
        }


def _named_accuracy(name: str, accuracy: float) -> str:
    return f"{100 * accuracy:.2f} % ({name})"


def calibration_error(bins: NDArray[Any]) -> float:
    """ECE: sum_b n_b / n |acc_b - conf_b| (Guo et al. 2017, eq 3), from the result of ``bin_sums``."""
    n, confidence, right = bins.T
    total = n.sum()
    if total:
        return float(np.abs(right - confidence).sum() / total)
    return float("nan")


def bin_sums(confidence: Floats, right: NDArray[np.bool_]) -> Floats:
    """Sums [BINS, 3] over the rows of each bin: rows, confidence, right rows; confidence [n] is in [0, 1]."""
    number = np.ceil(confidence * BINS).astype(np.int64) - 1
    bin_of_row = np.clip(number, 0, BINS - 1)
    rows = np.bincount(bin_of_row, minlength=BINS)
    confidences = np.bincount(bin_of_row, confidence, BINS)
    hits = np.bincount(bin_of_row, right, BINS)
    return np.stack([rows, confidences, hits], 1)


def mean_bins(sums: Floats) -> tuple[tuple[int, float, float], ...]:
    """Rows, mean confidence and accuracy of each bin; 0 in a bin without rows."""
    rows, confidence, right = sums.T
    divisor = np.maximum(rows, 1)
    bins = zip(rows, confidence / divisor, right / divisor, strict=True)
    return tuple((int(n), float(c), float(r)) for n, c, r in bins)


def class_measures(pairs: Counts, classes: Sequence[str]) -> tuple[ClassMeasures, ...]:
    """Measures of each class among the labels; ``pairs`` is [P, 3]: label, prediction, rows."""
    C = len(classes)
    label, prediction, count = pairs.T
    rows = np.bincount(label, count, C)
    predicted = np.bincount(prediction, count, C)
    right = np.bincount(label, count * (label == prediction), C)
    measures = [
        ClassMeasures(classes[c], int(rows[c]), int(predicted[c]), int(right[c]))
        for c in np.flatnonzero(rows).tolist()
    ]
    return tuple(measures)


def count_pairs(label: Counts, predicted: Counts, classes: int) -> Counts:
    """[P, 3]: label, prediction and rows of the pairs that occur."""
    pairs = label.astype(np.int64) * classes + predicted
    distinct, rows = np.unique(pairs, return_counts=True)
    return np.stack([distinct // classes, distinct % classes, rows], 1)


MOST_KEPT = 64 << 20
"""Limit in bytes for scores that are kept to fit a temperature. If all rows need more, every k-th row is used."""
COLDEST = 1e-6
HOTTEST = 1e6
"""Lowest and highest temperature that is tried."""


def sample_step(scores: int) -> int:
    """The smallest k such that every k-th row fits in ``MOST_KEPT`` bytes, if all rows have ``scores`` float64."""
    return max(1, math.ceil(8 * scores / MOST_KEPT))


@dataclass(frozen=True)
class LabelledRows:
    """Rows of known classes, and the source of their features."""

    name: str  # in words
    rows: NDArray[np.int64]  # [n] of the store, or of the file
    label: NDArray[np.int64]  # [n], by number of the model's class
    domain: NDArray[np.int64]  # [n], by number of ``domains``
    domains: tuple[str, ...]
    left_out: LeftOutRows
    source: Store | FileFeatures

    def scores(self, predictor: Predictor) -> Iterator[NDArray[np.float64]]:
        """Scores [E, k, C] of the rows in order, block by block. Raises as ``Predictor.over_store``."""
        for arrays in self.arrays(predictor):
            yield predictor.scores(*arrays)

    def arrays(self, predictor: Predictor) -> Iterator[list[NDArray[Any]]]:
        """Features [k, d] of each backbone of a model, of the rows in order; as ``scores``."""
        if isinstance(self.source, Store):
            for _, arrays in predictor.read_store(self.source, self.rows):
                yield arrays
            return
        yield from self.source.of_rows(self.rows)


def rows_of_store(store: Store, split: str, classes: Sequence[str]) -> LabelledRows:
    """The labelled rows of a store's split (``all`` for every row); labels are indices into a model's ``classes``.

    Raises UsageError for an unknown split, StoreError for a split without rows of a class that the model knows.
    """
    s = store.samples
    rows = rows_of_split(store, split)
    return matched(
        name=_rows_words(store.path, split),
        rows=rows,
        codes=(s.label, s.domain),
        readable=s.ok[rows] == 1,
        names=(s.classes, s.domains),
        classes=classes,
        source=store,
    )


def _rows_words(path: Path, split: str) -> str:
    if split == "all":
        return f"{path.name}, all rows"
    return f"{path.name}, split {split}"


def rows_of_file(path: Path, split: str, predictor: Predictor) -> LabelledRows:
    """The labelled rows of a file of embeddings, as ``rows_of_store``.

    Raises UsageError for a file that cannot be read, StoreError if it lacks features of the model or has no labels.
    """
    table = open_embeddings(path)
    features = features_of_file(predictor.members[0], table.features, path)
    rows = np.arange(len(table.names))
    if split != "all":
        if split not in SPLIT_NAMES:
            raise unknown("split", split, SPLIT_NAMES)
        if table.splits is not None:
            rows = np.flatnonzero(table.splits == SPLIT_NAMES.index(split))
        if table.splits is None or not len(rows):
            raise StoreError(f"{path} has no rows of the split {split}.", "Leave --split out.")
    # A row has features if all of its arrays are finite.
    finite = []
    for arrays in features.blocks():
        of_each = [np.isfinite(array).all(-1) for array in arrays]
        finite.append(np.logical_and.reduce(of_each))
    return matched(
        name=_rows_words(path, split),
        rows=rows,
        codes=(table.labels, table.domains),
        readable=np.concatenate(finite)[rows],
        names=(table.classes, table.domain_names),
        classes=predictor.classes,
        source=features,
    )


def matched(
    name: str,
    rows: NDArray[np.int64],
    codes: tuple[np.ndarray, np.ndarray],
    readable: NDArray[np.bool_],
    names: tuple[Sequence[str], Sequence[str]],
    classes: Sequence[str],
    source: Store | FileFeatures,
) -> LabelledRows:
    """The rows with a class that the model has under the same name; the other rows are counted by reason.

    Raises StoreError if no row is left.

    Args:
        name: of the rows, in words.
        rows: [n].
        codes: labels (-1 if unknown) and domains of all rows, as indices into ``names``.
        readable: [n], whether a row has features.
        names: of classes and domains.
        classes: of the model.
        source: of the features.
    """
    label = np.asarray(codes[0], np.int64)[rows]
    domain = np.asarray(codes[1], np.int64)[rows]
    # A row drops out for the first reason that applies: no features, no label, a class unknown to the model.
    labelled = readable & (label >= 0)
    truth = model_labels(label, names[0], classes)
    known = labelled & (truth >= 0)
    lost = Counter(names[0][k] for k in label[labelled & ~known])
    unlabelled = int((readable & ~labelled).sum())
    left = LeftOutRows(unlabelled, int((~readable).sum()), dict(sorted(lost.items())))
    reasons = " ".join(left.sentences())
    if not labelled.any():
        raise StoreError(
            f"{name}: no readable row has a label. {reasons}",
            "Labels are read from a column called labels, label or y. To classify rows without labels: fedcache "
            "predict",
        )
    if not known.any():
        listed = some_names(classes, 5)
        raise StoreError(
            f"{name}: no row has a label that is a class of the model. The model's classes are {listed}. {reasons}",
            "Give data with classes of these names.",
        )
    domains = tuple(names[1])
    return LabelledRows(name, rows[known], truth[known], domain[known], domains, left, source)


def model_labels(
    label: NDArray[Any], names: Sequence[str], classes: Sequence[str]
) -> NDArray[np.int64]:
    """Labels [n], indices into ``names``, as indices into a model's ``classes``; -1 for an unknown class."""
    index = {c: i for i, c in enumerate(classes)}
    # The last entry is for the label -1 of unlabelled rows.
    numbers = [index.get(c, -1) for c in names] + [-1]
    codes: NDArray[np.int64] = np.array(numbers, np.int64)[label]
    return codes


def measure(
    predictor: Predictor,
    rows: LabelledRows,
    *,
    fit: bool = True,
    done: Callable[[int], None] | None = None,
) -> Measures:
    """The measures of a model on labelled rows. Raises as ``Predictor.over_store``, and as ``done``.

    Memory holds the scores of one block of rows, and those of the sample for the fit of the temperature.

    Args:
        predictor: the model.
        rows: the labelled rows.
        fit: whether to fit a temperature.
        done: called after every block with the number of its rows.
    """
    n = len(rows.rows)
    classes = predictor.classes
    C = len(classes)
    predicted = np.full(n, -1)
    confidence = np.zeros(n)
    log_p = np.zeros(n)
    step = sample_step(n * C * len(predictor.members))
    sampled = []
    start = 0
    for scores in rows.scores(predictor):
        part = slice(start, start + scores.shape[1])
        start = part.stop
        predicted[part] = predictor.predicted(scores)
        logs = log_probabilities(scores, predictor.softmax_temperature)
        # Rows without a prediction (-1) get an arbitrary confidence here; they are dropped below.
        chosen = np.maximum(predicted[part], 0)
        log_confidence = np.take_along_axis(logs, chosen[:, None], 1)[:, 0]
        confidence[part] = np.exp(log_confidence)
        log_p[part] = np.take_along_axis(logs, rows.label[part, None], 1)[:, 0]
        if fit:
            # The first row of the sample in this block. A copy, because a view would keep the whole block in memory.
            first = -part.start % step
            sampled.append(scores[:, first::step].copy())
        if done is not None:
            done(scores.shape[1])
    known = predicted >= 0
    label = rows.label[known]
    right = predicted[known] == label
    sums = bin_sums(confidence[known], right)
    pairs = count_pairs(label, predicted[known], C)
    domain = rows.domain[known]
    by_domain = {rows.domains[d]: right_rows(right[domain == d]) for d in np.unique(domain)}
    fitted = None
    if fit:
        sample = known[::step]
        sampled_scores = np.concatenate(sampled, 1)[:, sample]
        fitted = fit_temperature(sampled_scores, rows.label[::step][sample])
    nll = float("nan")
    if known.any():
        nll = float(-log_p[known].mean())
    return Measures(
        all=right_rows(right),
        macro_f1=macro_f1(predicted[known], label, C),
        ece=calibration_error(sums),
        nll=nll,
        by_class=class_measures(pairs, classes),
        by_domain=by_domain,
        confusion=tuple((classes[i], classes[j], int(k)) for i, j, k in pairs),
        bins=mean_bins(sums),
        temperature=fitted,
        unscored=int((~known).sum()),
    )


def log_probabilities(scores: Floats, temperature: float) -> Floats:
    """Scores [E, n, C] -> [n, C]: log of the mean over E of softmax(scores / temperature); NaN for a row of NaN.

    The result is -inf for a class that no member of the ensemble ever predicts.
    """
    each = torch.from_numpy(scores / temperature).log_softmax(-1)
    each.masked_fill_(each < NEVER, -torch.inf)
    mean = each[0]
    if len(each) > 1:
        mean = each.logsumexp(0) - np.log(len(each))
    return mean.numpy()


def fit_temperature(scores: Floats, label: Counts) -> Temperature | None:
    """The temperature with the lowest NLL of labels [n] under scores [E, n, C] (Guo et al. 2017, section 4.2).

    None without rows, or if a label has probability 0 at every temperature.
    """
    if not len(label):
        return None

    def nll(log_temperature: float) -> float:
        logs = log_probabilities(scores, float(np.exp(log_temperature)))
        return float(-np.take_along_axis(logs, label[:, None], 1).mean())

    low = np.log(COLDEST)
    high = np.log(HOTTEST)
    if not np.isfinite(nll(0.0)):
        return None
    # A grid comes first, because an ensemble's NLL may have several minima and is flat at low temperatures.
    value, least = grid_minimum(nll, low, high)
    at_limit = bool(min(value - low, high - value) < 1e-3)
    return Temperature(float(np.exp(value)), least, len(label), at_limit)


def right_rows(right: NDArray[np.bool_]) -> RightRows:
    """The counts of ``right`` [n], with Wilson's interval (1927)."""
    n = len(right)
    hits = int(right.sum())
    if not n:
        return RightRows(n, hits)
    interval = scipy.stats.binomtest(hits, n).proportion_ci(LEVEL, method="wilson")
    return RightRows(n, hits, (float(interval.low), float(interval.high)))


def measure_clients(
    models: Iterable[tuple[str, Predictor]], rows: LabelledRows
) -> tuple[Measures, ClientSpread]:
    """Measure every client's model on all rows.

    Returns the counts summed over models with the means of the other measures, and the accuracy of each client's model.
    """
    accuracy = {}
    means = []
    total = None
    for name, predictor in models:
        one = measure(predictor, rows, fit=False)
        accuracy[name] = float("nan")
        if one.all.accuracy is not None:
            accuracy[name] = one.all.accuracy
        means.append((one.macro_f1, one.ece, one.nll))
        if total is None:
            total = one
        else:
            total = _added(total, one)
    if total is None:
        raise StoreError(
            "The run has no saved personal models.", "Train again with --fresh --save-clients all"
        )
    f1, ece, nll = (float(np.nanmean(column)) for column in zip(*means, strict=True))
    # All models of a run have the same classes.
    index = {name: i for i, name in enumerate(predictor.classes)}
    pairs = [(index[label], index[predicted], n) for label, predicted, n in total.confusion]
    together = replace(
        total,
        # Predictions of several models for one row are not independent, so there is no interval.
        all=replace(total.all, interval=None),
        macro_f1=f1,
        ece=ece,
        nll=nll,
        by_class=class_measures(np.array(pairs, np.int64).reshape(-1, 3), predictor.classes),
    )
    return together, ClientSpread(accuracy)


def measure_prior(
    store: Store, tests: Iterable[tuple[ClientPrior, Predictor, NDArray[np.int64]]], label: Counts
) -> dict[str, PriorHits]:
    """Right predictions of each client without and with its prior; clients without a scored row are left out.

    Memory holds the scores of one block of rows. Raises as ``Predictor.over_store``.

    Args:
        store: that has the model's features.
        tests: for each client its prior, its model, and its test rows.
        label: [N] of all rows of the store, by number of the model's class.
    """
    by_client = {}
    for prior, predictor, test_rows in tests:
        offset = prior.offset(predictor.softmax_temperature)
        rows = 0
        right = 0
        right_with_prior = 0
        for part, scores in predictor.over_store(store, test_rows):
            predicted = predictor.predicted(scores)
            shifted = add_offset(torch.from_numpy(scores), offset).numpy()
            with_prior = predictor.predicted(shifted)
            rows += int((predicted >= 0).sum())
            right += int((predicted == label[part]).sum())
            right_with_prior += int((with_prior == label[part]).sum())
        if rows:
            by_client[prior.client] = PriorHits(rows, right, right_with_prior)
    return by_client


def _added(a: Measures, b: Measures) -> Measures:
    """Sum the counts of two models on the same rows. ``by_class`` and all other measures are taken from ``a``."""
    # A domain that is missing in one of the two counts as 0 rows.
    domains = dict(a.by_domain)
    for name, d in b.by_domain.items():
        before = domains.get(name, RightRows(0, 0))
        domains[name] = _sum(before, d)
    pairs = Counter({(i, j): n for i, j, n in a.confusion})
    pairs.update({(i, j): n for i, j, n in b.confusion})
    # Means of a bin are weighted by its rows in ``a`` and ``b``.
    bins = []
    for (n, p, r), (m, q, s) in zip(a.bins, b.bins, strict=True):
        rows = max(1, n + m)
        confidence = (n * p + m * q) / rows
        accuracy = (n * r + m * s) / rows
        bins.append((n + m, confidence, accuracy))
    return replace(
        a,
        all=_sum(a.all, b.all),
        by_domain=domains,
        confusion=tuple((i, j, n) for (i, j), n in pairs.items()),
        bins=tuple(bins),
        unscored=a.unscored + b.unscored,
    )


def _sum(a: RightRows, b: RightRows) -> RightRows:
    return RightRows(a.rows + b.rows, a.right + b.right)


# The most confident mistakes of a run on rows of a store.


MOST = 24
"""Number of most confident mistakes that are kept."""

ScoredRows = tuple[str | None, Predictor, NDArray[np.int64]]
"""A client (None for a global model), its model, and the rows that the model scores."""


def find_mistakes(store: Store, models: Iterable[ScoredRows]) -> Mistakes:
    """The most confident mistakes of the models of one run, by falling probability, then by row.

    Unreadable rows, and rows without a score or a label that the model knows, are left out. Raises StoreError for a
    store without the features of the models.
    """
    s = store.samples
    best = list[Mistake]()
    rows_scored = 0
    wrong_rows = 0
    clients = 0
    label = np.empty(0, np.int64)
    for client, predictor, rows_of_model in models:
        clients += client is not None
        names = predictor.classes
        # All models of a run have the same classes.
        if not len(label):
            known = model_labels(s.label, s.classes, names)
            label = np.where(s.ok == 1, known, -1)
        rows = np.asarray(rows_of_model, np.int64)
        rows = rows[label[rows] >= 0]
        for part, scores in predictor.over_store(store, rows):
            predicted = predictor.predicted(scores)
            # A row without a prediction (-1) gets an arbitrary confidence here; ``scored`` leaves it out.
            confidence = predictor.mean_probability(scores)[np.arange(len(part)), predicted]
            scored = predicted >= 0
            wrong = np.flatnonzero(scored & (predicted != label[part]))
            rows_scored += int(scored.sum())
            wrong_rows += len(wrong)
            by_confidence = np.argsort(-confidence[wrong], kind="stable")
            for i in wrong[by_confidence[:MOST]]:
                row = int(part[i])
                truth = names[label[row]]
                guess = names[predicted[i]]
                best.append(Mistake(row, s.name[row], truth, guess, float(confidence[i]), client))
            best = sorted(best, key=lambda m: (-m.probability, m.row))[:MOST]
    return Mistakes(store.path, tuple(best), wrong_rows, rows_scored, clients)
