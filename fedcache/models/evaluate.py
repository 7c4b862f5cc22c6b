"""A saved model on labelled rows of a store or a file of embeddings: the figures of ``models.measures``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.stats import binomtest

from fedcache.errors import StoreError, unknown
from fedcache.federate.engine.outcome import macro_f1
from fedcache.models.file_features import FileFeatures, features_of_file
from fedcache.models.measures import (
    LEVEL,
    ClientSpread,
    Counts,
    Floats,
    LeftOutRows,
    Measures,
    RightRows,
    Temperature,
    bin_sums,
    calibration_error,
    class_measures,
    count_pairs,
    mean_bins,
)
from fedcache.models.predictor import Predictor
from fedcache.models.sources import rows_of_split
from fedcache.store.samples import SPLITS
from fedcache.store.store import Store
from fedcache.tables.embeddings import open_embeddings

MOST_KEPT = 64 << 20
"""Bytes of scores that are kept to fit a temperature; of more rows, every k-th counts."""
NEVER = -1e20
"""No class that a model may predict has a log-probability below it: scores in place of absent classes are -1e30 times
what a method multiplies scores by (``heads.losses.MASKED``), and their probability is 0."""
COLDEST, HOTTEST = 1e-6, 1e6
"""Temperatures between which the best is looked for."""


@dataclass(frozen=True)
class LabelledRows:
    """Rows of known classes, and where their features are."""

    name: str  # in words
    rows: NDArray[np.int64]  # [n] of the store, or of the file
    label: NDArray[np.int64]  # [n], by number of the model's class
    domain: NDArray[np.int64]  # [n], by number of ``domains``
    domains: tuple[str, ...]
    left_out: LeftOutRows
    source: Store | FileFeatures

    def scores(self, predictor: Predictor) -> Iterator[NDArray[np.float64]]:
        """Scores [E, k, C] of the rows in order, block by block. Raises as ``Predictor.over_store``."""
        if isinstance(self.source, Store):
            for _, found in predictor.over_store(self.source, self.rows):
                yield found
            return
        for arrays in self.source.of_rows(self.rows):
            yield predictor.scores(*arrays)


def rows_of_store(store: Store, split: str | None, classes: Sequence[str]) -> LabelledRows:
    """The labelled rows of a store's split, None for all, with labels as numbers among a model's ``classes``.

    Raises UsageError for an unknown split, StoreError where there is none, or none of a class that the model knows.
    """
    s, rows = store.samples, rows_of_split(store, split)
    name = f"{store.path.name}, " + (f"split {split}" if split is not None else "all rows")
    codes = (np.asarray(column, np.int64)[rows] for column in (s.label, s.domain))
    return matched(name, rows, (*codes,), s.ok[rows] == 1, (s.classes, s.domains), classes, store)


def rows_of_file(path: Path, split: str | None, predictor: Predictor) -> LabelledRows:
    """The labelled rows of a file of embeddings, as ``rows_of_store``.

    Raises UsageError for a file that cannot be read, StoreError for other features than the model's or without labels.
    """
    held = open_embeddings(path)
    features = features_of_file(predictor.members[0], held.features, path)
    rows = np.arange(len(held.names))
    if split is not None:
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        if held.splits is None or not (held.splits == SPLITS.index(split)).any():
            raise StoreError(f"{path} has no rows of split {split}.", "Leave --split out.")
        rows = np.flatnonzero(held.splits == SPLITS.index(split))
    name = f"{path.name}, " + (f"split {split}" if split is not None else "all rows")
    each = (
        np.logical_and.reduce([np.isfinite(a).all(-1) for a in arrays])
        for arrays in features.blocks()
    )
    readable = np.concatenate([*each])[rows]
    codes = (np.asarray(held.labels, np.int64)[rows], np.asarray(held.domains, np.int64)[rows])
    return matched(
        name, rows, codes, readable, (held.classes, held.domain_names), predictor.classes, features
    )


def matched(
    name: str,
    rows: NDArray[np.int64],
    codes: tuple[NDArray[np.int64], ...],
    readable: NDArray[np.bool_],
    names: tuple[Sequence[str], Sequence[str]],
    classes: Sequence[str],
    source: Store | FileFeatures,
) -> LabelledRows:
    """Rows whose class the model knows, found by its name; the others are counted.

    Raises StoreError, when there is none.

    Args:
        name: of the rows, in words.
        rows: [n].
        codes: labels [n], -1 unknown, and domains [n], as numbers among ``names``.
        readable: [n], whether a row has features.
        names: of classes and domains.
        classes: of the model.
        source: of the features.
    """
    label, domain = codes
    there, truth = readable & (label >= 0), model_labels(label, names[0], classes)
    lost = Counter(names[0][k] for k in label[there & (truth < 0)])
    left = LeftOutRows(
        int((readable & (label < 0)).sum()), int((~readable).sum()), dict(sorted(lost.items()))
    )
    known = there & (truth >= 0)
    if not there.any():
        said = f"{name}: no row that can be read has a label. " + " ".join(left.sentences())
        raise StoreError(
            said,
            "A file has them as labels, label or y; `fedcache predict` says the classes of rows without.",
        )
    if not known.any():
        own = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
        raise StoreError(
            f"{name}: no row has a label that the model knows; its classes are {own}. "
            + " ".join(left.sentences()),
            "Give data with classes of these names.",
        )
    return LabelledRows(
        name, rows[known], truth[known], domain[known], tuple(names[1]), left, source
    )


def model_labels(
    label: NDArray[np.int64], names: Sequence[str], classes: Sequence[str]
) -> NDArray[np.int64]:
    """Labels [n], numbers among ``names``, as numbers among a model's ``classes``; -1 for one that it does not know."""
    number = {c: i for i, c in enumerate(classes)}
    return np.array([number.get(c, -1) for c in names] + [-1], np.int64)[label]


def measure(
    predictor: Predictor,
    rows: LabelledRows,
    *,
    fit: bool = True,
    done: Callable[[int], None] | None = None,
) -> Measures:
    """What a model makes of labelled rows. Raises as ``Predictor.over_store``, and what ``done`` raises.

    Args:
        predictor: the model.
        rows: of which no more than a block's scores are held at once, and the sample that a temperature is fitted on.
        fit: whether to find a temperature.
        done: told how many more rows are scored.
    """
    n, C = len(rows.rows), len(predictor.classes)
    predicted, confidence, log_p = np.full(n, -1), np.zeros(n), np.zeros(n)
    step = max(1, -(-8 * n * C * len(predictor.members) // MOST_KEPT))
    kept: list[Floats] = []
    start = 0
    for scores in rows.scores(predictor):
        part = slice(start, start + scores.shape[1])
        start = part.stop
        predicted[part] = predictor.predicted(scores)
        told = np.where(predicted[part] < 0, 0, predicted[part])
        logs = log_probabilities(scores, predictor.softmax_temperature)
        confidence[part] = np.exp(np.take_along_axis(logs, told[:, None], 1)[:, 0])
        log_p[part] = np.take_along_axis(logs, rows.label[part, None], 1)[:, 0]
        if fit:
            kept.append(
                scores[:, -part.start % step :: step].copy()
            )  # a view would hold the whole block
        if done is not None:
            done(scores.shape[1])
    known = predicted >= 0
    label, right = rows.label[known], predicted[known] == rows.label[known]
    sums = bin_sums(confidence[known], right)
    pairs = count_pairs(label, predicted[known], C)
    domain = rows.domain[known]
    sample = known[::step]
    fitted = (
        fit_temperature(np.concatenate(kept, 1)[:, sample], rows.label[::step][sample])
        if fit
        else None
    )
    return Measures(
        all=right_rows(right),
        macro_f1=macro_f1(predicted[known], label, C),
        ece=calibration_error(sums),
        nll=float(-log_p[known].mean()) if known.any() else float("nan"),
        by_class=class_measures(pairs, predictor.classes),
        by_domain={rows.domains[d]: right_rows(right[domain == d]) for d in np.unique(domain)},
        confusion=named_pairs(pairs, predictor.classes),
        bins=mean_bins(sums),
        temperature=fitted,
        unscored=int((~known).sum()),
    )


def log_probabilities(scores: Floats, temperature: float) -> Floats:
    """[E, n, C] scores -> [n, C]: log of the mean over E of softmax(scores / temperature); NaN for a row of NaN.

    It is -inf for a class that a model never predicts.
    """
    each = torch.from_numpy(scores / temperature).log_softmax(-1)
    each.masked_fill_(each < NEVER, -torch.inf)
    found: Floats = (each[0] if len(each) == 1 else each.logsumexp(0) - np.log(len(each))).numpy()
    return found


def fit_temperature(scores: Floats, label: Counts) -> Temperature | None:
    """The temperature with the least NLL of labels [n] under scores [E, n, C] (Guo et al. 2017, section 4.2).

    None without rows, or where a label has probability 0 at every temperature.
    """
    if not len(label):
        return None

    def nll(log_temperature: float) -> float:
        logs = log_probabilities(scores, float(np.exp(log_temperature)))
        return float(-np.take_along_axis(logs, label[:, None], 1).mean())

    low, high = np.log(COLDEST), np.log(HOTTEST)
    if not np.isfinite(nll(0.0)):
        return None
    # A grid first: of an ensemble the NLL may have more than one valley, and at a cold end it is flat.
    grid = np.linspace(low, high, 55)
    best = int(np.argmin([nll(t) for t in grid]))
    ends = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    found = minimize_scalar(nll, bounds=ends, method="bounded", options={"xatol": 1e-6})
    value = float(found.x)
    return Temperature(
        float(np.exp(value)),
        float(found.fun),
        len(label),
        bool(min(value - low, high - value) < 1e-3),
    )


def right_rows(right: NDArray[np.bool_], *, alone: bool = True) -> RightRows:
    """Of [n] rows; the interval is Wilson's (1927), which ``alone`` says there is."""
    n, hits = len(right), int(right.sum())
    if not n or not alone:
        return RightRows(n, hits)
    found = binomtest(hits, n).proportion_ci(LEVEL, method="wilson")
    return RightRows(n, hits, (float(found.low), float(found.high)))


def named_pairs(pairs: Counts, classes: Sequence[str]) -> tuple[tuple[str, str, int], ...]:
    """Pairs [P, 3] with names."""
    return tuple((classes[i], classes[j], int(k)) for i, j, k in pairs)


def measure_clients(
    models: Iterable[tuple[str, Predictor]], rows: LabelledRows
) -> tuple[Measures, ClientSpread]:
    """Every client's model on all rows: counts of all together, means of the rest, and the spread of accuracies."""
    accuracy: dict[str, float] = {}
    whole: list[Measures] = []
    total: Measures | None = None
    for name, predictor in models:
        one = measure(predictor, rows, fit=False)
        accuracy[name] = float("nan") if one.all.accuracy is None else one.all.accuracy
        whole.append(replace(one, by_class=(), by_domain={}, confusion=(), bins=()))
        total = one if total is None else _added(total, one)
    if total is None:
        raise StoreError(
            "The run saved no client's model.", "Train again with --fresh --save-clients all"
        )
    f1, ece, nll = (
        float(np.nanmean([getattr(m, k) for m in whole])) for k in ("macro_f1", "ece", "nll")
    )
    together = replace(total, all=replace(total.all, interval=None), macro_f1=f1, ece=ece, nll=nll)
    return together, ClientSpread(accuracy)


def _added(a: Measures, b: Measures) -> Measures:
    """Counts of both."""
    classes = {c.name: c for c in a.by_class}
    for c in b.by_class:
        old = classes.get(c.name, replace(c, rows=0, predicted=0, right=0))
        classes[c.name] = replace(
            c,
            rows=old.rows + c.rows,
            predicted=old.predicted + c.predicted,
            right=old.right + c.right,
        )
    domains = dict(a.by_domain)
    for name, d in b.by_domain.items():
        domains[name] = _sum(domains.get(name, RightRows(0, 0)), d)
    pairs = Counter({(i, j): n for i, j, n in a.confusion})
    pairs.update({(i, j): n for i, j, n in b.confusion})
    bins = tuple(
        (n + m, (n * c + m * d) / max(1, n + m), (n * r + m * s) / max(1, n + m))
        for (n, c, r), (m, d, s) in zip(a.bins, b.bins, strict=True)
    )
    return replace(
        a,
        all=_sum(a.all, b.all),
        by_class=tuple(classes.values()),
        by_domain=domains,
        confusion=tuple((i, j, n) for (i, j), n in pairs.items()),
        bins=bins,
        unscored=a.unscored + b.unscored,
    )


def _sum(a: RightRows, b: RightRows) -> RightRows:
    return RightRows(a.rows + b.rows, a.right + b.right)
