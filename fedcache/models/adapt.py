"""Test-time adaptation: a linear head adapts to the unlabelled rows that it classifies, one batch after another.

The logits of a row x [D] are s = (W x + b) / T, with the head's W [C, D] and b [C] and the temperature T of the model.
Rows have the form that the head reads, so they are features of a frozen backbone after ``feat_post``. H is the entropy
of softmax(s) in nats. Labels are never read. Results depend on the order of the rows.

``t3a`` (Iwasawa and Matsuo, "Test-time classifier adjustment module for model-agnostic domain generalization", NeurIPS
2021). The supports of class c begin with W_c, whose entropy is that of the head on W_c. Every row becomes a support of
the class that the head predicts. Each class keeps its M supports with the lowest entropy. With unit supports z, the
prediction is argmax_c x . m_c, where m_c is the sum of z over the supports of class c, divided by its length. This is
the released code (github.com/matsuolab/T3A), with two differences. There, W_c is a support of the class that the head
predicts for W_c, which is c unless biases are large. And M is selected from 1, 5, 20, 50, 100 and infinity on
validation rows; the default of 100 is an arbitrary value of this list.

``tent`` (Wang et al., "Tent: fully test-time adaptation by entropy minimization", ICLR 2021), an approximation. Tent
adapts the scale and the shift of the batch-norm layers of a network, and normalises by the statistics of each batch. A
frozen backbone cannot be adapted, so fedcache puts one layer before the head: s = (W (g * x + r h) + b) / T, with a
scale g [D] = 1 and a shift h [D] = 0 at first. There are no batch statistics. The inputs of a batch norm have variance
1, so r is the root mean square of the numbers of the first batch. A step of Adam on the mean entropy of a batch
updates g and h after the predictions of this batch, as in the released code (github.com/DequanWang/tent), whose
``cfgs/tent.yaml`` has the defaults.

``tda`` (Karmanov et al., "Efficient test-time adaptation of vision-language models", CVPR 2024), for logits that are
cosines with class texts. Each row enters the positive cache of its predicted class, which keeps the k rows with the
lowest entropy. If H / log2(C) is between two limits, it also enters the negative cache of that class, whose values are
the classes with a probability between two limits. For unit rows x and keys f,

    s+ = alpha+ sum_f exp(-beta+ (1 - x . f)) onehot(f),    s- = alpha- sum_f exp(-beta- (1 - x . f)) value(f),

and the prediction is argmax of s + s+ - s-. Rows enter the caches before they are predicted. All defaults are those of
ImageNet in the released code (github.com/kdiAAA/TDA), which has other alpha+ and beta+ for other datasets. The 64
augmented views, which this code uses for variants of ImageNet, do not exist here.

The papers of T3A and TDA could not be opened; this file follows their released code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from fedcache.errors import UsageError, shell_word, unknown
from fedcache.federate.engine.hyperparameters import HParam, Value
from fedcache.heads.losses import MASKED
from fedcache.models.evaluate import Adaptation, LabelledRows, RightRows, right_rows
from fedcache.models.linear_head import linear_head
from fedcache.models.predictor import Predictor

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Settings = Mapping[str, Value]
Adapt = Callable[["ScaledHead", Iterator[Floats], Settings], Iterator[Counts]]
"""(head, batches [k, D], settings) -> the predicted classes [k] of each batch."""

ORDER = HParam(
    "order",
    "stored",
    "choice",
    "order of the rows: as stored, or shuffled with seed 0, which needs the memory for all rows",
    choices=("stored", "shuffled"),
)
SETTINGS: Mapping[str, tuple[HParam, ...]] = {
    "t3a": (
        HParam("batch", 32, "int", "rows of a batch", low=1),
        HParam("supports", 100, "int", "M, supports of a class", low=1, auto="all"),
        ORDER,
    ),
    "tent": (
        HParam("batch", 200, "int", "rows of a batch", low=1),
        HParam("lr", 1e-3, "float", "learning rate of Adam", low=0.0),
        ORDER,
    ),
    "tda": (
        HParam("positive_size", 3, "int", "rows of a class in the positive cache", low=1),
        HParam("positive_alpha", 2.0, "float", "weight of the positive cache", low=0.0),
        HParam("positive_beta", 5.0, "float", "sharpness of the positive cache", low=0.0),
        HParam("negative_size", 2, "int", "rows of a class in the negative cache", low=1),
        HParam("negative_alpha", 0.117, "float", "weight of the negative cache", low=0.0),
        HParam("negative_beta", 1.0, "float", "sharpness of the negative cache", low=0.0),
        HParam("entropy_low", 0.2, "float", "lower limit of H / log2(C)", low=0.0),
        HParam("entropy_high", 0.5, "float", "upper limit of H / log2(C)", low=0.0),
        HParam("mask_low", 0.03, "float", "lower limit of a negative probability", low=0.0),
        HParam("mask_high", 1.0, "float", "upper limit of a negative probability", low=0.0),
        ORDER,
    ),
}
"""Settings of each adaptation; ``tda`` takes one row at a time, so it has no batches."""
UNIT_ROWS = 1e-2
"""Largest accepted difference of a row's length from 1; float16 features differ by about 1e-3."""
UNIT_TEXTS = 1e-3
"""Largest accepted relative difference between the lengths of the head's rows, if they are unit class texts."""
READ = 4096
"""Number of rows that are passed at once to an adaptation without batches."""


def resolve(name: str, given: Mapping[str, Value]) -> dict[str, Value]:
    """All settings of an adaptation. Raises UsageError for an unknown adaptation or key, and for an illegal value."""
    if name not in SETTINGS:
        raise unknown("adaptation", name, list(SETTINGS))
    declared = {h.name: h for h in SETTINGS[name]}
    for key in given:
        if key not in declared:
            raise unknown(f"setting of {name}", key, list(declared))
    return {key: h.parse(given.get(key, h.default)) for key, h in declared.items()}


@dataclass(frozen=True)
class ScaledHead:
    """A linear head in float64, divided by the temperature of its model."""

    W: Floats  # [C, D]
    b: Floats  # [C]
    live: NDArray[np.bool_]  # [C], False for a class that the model never predicts
    temperature: float = 1.0  # by which W and b are divided

    def logits(self, x: Floats) -> Floats:
        """Rows [n, D] -> [n, C]."""
        return x @ self.W.T + self.b


def entropy(logits: Floats) -> Floats:
    """Entropy in nats of the softmax of each row of [n, C]; [n]."""
    log_p = scipy.special.log_softmax(logits, -1)
    nats: Floats = -(np.exp(log_p) * log_p).sum(-1)
    return nats


def unit(x: Floats) -> Floats:
    """Rows divided by their length; rows of zeros stay."""
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    rows: Floats = x / np.maximum(length, 1e-12)
    return rows


def t3a(head: ScaledHead, batches: Iterator[Floats], settings: Settings) -> Iterator[Counts]:
    """Predictions by the mean supports of each class. Memory holds M supports of each class and one batch."""
    most = settings["supports"]
    assert most is None or isinstance(most, int)
    supports = list(unit(head.W)[:, None])
    # A row of weights, as a feature, is not divided by the temperature.
    entropies = list(entropy(head.logits(head.temperature * head.W))[:, None])
    # A class that is never predicted gets the score -inf below, so its support does not matter.
    means = unit(head.W)
    for x in batches:
        logits = head.logits(x)
        label = logits.argmax(-1)
        nats = entropy(logits)
        rows = unit(x)
        for c in np.unique(label).tolist():
            of_class = label == c
            together = np.concatenate([entropies[c], nats[of_class]])
            kept = together.argsort(kind="stable")[:most]
            entropies[c] = together[kept]
            supports[c] = np.concatenate([supports[c], rows[of_class]])[kept]
            means[c] = unit(supports[c].sum(0))
        scores = x @ means.T
        yield np.where(head.live, scores, -np.inf).argmax(-1)


def tent(head: ScaledHead, batches: Iterator[Floats], settings: Settings) -> Iterator[Counts]:
    """Predictions with an adapted scale and shift of each feature; one step of Adam after each batch."""
    W = torch.from_numpy(head.W)
    b = torch.from_numpy(head.b)
    scale = torch.ones_like(W[0]).requires_grad_()
    shift = torch.zeros_like(W[0]).requires_grad_()
    adam = torch.optim.Adam([scale, shift], lr=float(str(settings["lr"])))
    size = None
    for x in batches:
        if size is None:
            size = float(np.sqrt(np.mean(x**2)))
        with torch.enable_grad():
            logits = (torch.from_numpy(x) * scale + size * shift) @ W.T + b
            log_p = logits.log_softmax(-1)
            loss = -(log_p.exp() * log_p).sum(-1).mean()
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        # The logits are those before the step.
        yield logits.detach().numpy().argmax(-1)


class Cache:
    """The rows of each class with the lowest entropy."""

    def __init__(self, head: ScaledHead, size: int) -> None:
        C, D = head.W.shape
        self.keys = np.zeros((C, size, D))
        self.entropy = np.full((C, size), np.inf)  # infinite for a free place

    def add(self, label: int, x: Floats, nats: float) -> int | None:
        """Add a row [D] to a class: to a free place, or instead of the highest entropy if that is higher; its place."""
        place = int(self.entropy[label].argmax())
        if not nats < self.entropy[label, place]:
            return None
        self.keys[label, place] = x
        self.entropy[label, place] = nats
        return place

    def weights(self, x: Floats, alpha: float, beta: float) -> Floats:
        """alpha exp(-beta (1 - x . key)) of each place for a row [D], [C, size]; 0 for a free place."""
        # One product of a matrix and a vector is many times faster than one for each class.
        cosine = self.keys.reshape(-1, len(x)) @ x
        weights = alpha * np.exp(-beta * (1.0 - cosine.reshape(self.entropy.shape)))
        weights[np.isinf(self.entropy)] = 0.0
        return weights


def tda(head: ScaledHead, batches: Iterator[Floats], settings: Settings) -> Iterator[Counts]:
    """Predictions with a positive and a negative cache, row by row. Memory holds C x (C + D) numbers for each place."""
    number = {key: float(str(value)) for key, value in settings.items() if key != "order"}
    classes = len(head.b)
    positive = Cache(head, int(number["positive_size"]))
    negative = Cache(head, int(number["negative_size"]))
    # The classes that each row of the negative cache speaks against.
    against = np.zeros((*negative.entropy.shape, classes))
    # One class has the entropy 0, and log2(1) would divide by 0.
    most = np.log2(max(classes, 2))
    for x in batches:
        logits = head.logits(x)
        nats = entropy(logits)
        probability = scipy.special.softmax(logits, -1)
        likely = (number["mask_low"] < probability) & (probability < number["mask_high"])
        for i, row in enumerate(unit(x)):
            label = int(logits[i].argmax())
            positive.add(label, row, nats[i])
            if number["entropy_low"] < nats[i] / most < number["entropy_high"]:
                place = negative.add(label, row, nats[i])
                if place is not None:
                    against[label, place] = likely[i]
            for_classes = positive.weights(
                row, number["positive_alpha"], number["positive_beta"]
            ).sum(-1)
            weights = negative.weights(row, number["negative_alpha"], number["negative_beta"])
            logits[i] += for_classes - weights.ravel() @ against.reshape(-1, classes)
        yield logits.argmax(-1)


ADAPTATIONS: Mapping[str, Adapt] = {"t3a": t3a, "tent": tent, "tda": tda}
FIDELITY = {"t3a": "exact", "tent": "approx", "tda": "exact"}
"""Whether an adaptation is that of its paper (``exact``) or an approximation (``approx``)."""


@dataclass(frozen=True)
class Adapter:
    """A head, and the adaptation that was requested for it."""

    name: str  # of the adaptation
    settings: dict[str, Value]
    predictor: Predictor
    head: ScaledHead

    @classmethod
    def of(cls, predictor: Predictor, name: str, given: Mapping[str, Value]) -> Adapter:
        """The adaptation of one global or personal model.

        Raises UsageError for settings as ``resolve``, for several seeds, for a head that is not linear, for
        similarities to prototypes, and under ``tda`` for scores that are not cosines with unit class texts.
        """
        settings = resolve(name, given)
        facts = predictor.members[0].facts
        if len(predictor.members) > 1:
            raise UsageError(
                "--adapt needs the model of a single seed, but this run has several seeds.",
                f"--seed {facts.seed}",
            )
        if predictor.deployed[0].method.by_similarity(facts.hp):
            raise UsageError(
                f"{facts.method} predicts by similarity to prototypes, but --adapt needs class scores.",
                "Leave --adapt out.",
            )
        try:
            linear = linear_head(predictor)
        except UsageError as error:
            raise UsageError(
                f"--adapt needs a head that is linear in stored features. {error.message}",
                "Leave --adapt out.",
            ) from error
        temperature = predictor.softmax_temperature
        head = ScaledHead(
            linear.coef / temperature,
            linear.intercept / temperature,
            linear.intercept > MASKED / 2,
            temperature,
        )
        if name == "tda":
            length = np.linalg.norm(head.W, axis=-1)
            unequal = np.ptp(length) > UNIT_TEXTS * length.max()
            if unequal or bool(head.b.any()) or not length.all():
                raise UsageError(
                    f"--adapt tda needs scores that are cosines with class texts. {facts.method} has other scores, "
                    "because its head has a bias or rows of different lengths.",
                    "--adapt t3a",
                )
        return cls(name, settings, predictor, head)

    def measured(
        self, rows: LabelledRows, plain: RightRows, done: Callable[[int], None]
    ) -> Adaptation:
        """The accuracy on labelled rows with the adaptation.

        Rows without features are neither counted nor adapted to. Memory holds one block of rows, or all rows if they
        are shuffled. Raises UsageError under ``tda`` for rows that are not unit vectors; errors of reading, as
        ``Predictor.over_store``; and as ``done``.

        Args:
            rows: that are evaluated.
            plain: the accuracy without adaptation.
            done: called with the number of rows after every batch.
        """
        label = rows.label
        blocks = self._blocks(rows)
        if self.settings["order"] == "shuffled":
            order = np.random.default_rng(0).permutation(len(label))
            label = label[order]
            blocks = iter([np.concatenate(list(blocks))[order]])
        known = []

        def readable() -> Iterator[Floats]:
            for x in blocks:
                finite = np.isfinite(x).all(-1)
                known.append(finite)
                yield x[finite]

        batches = batches_of(readable(), int(str(self.settings.get("batch", READ))))
        predicted = [np.empty(0, np.int64)]
        for part in ADAPTATIONS[self.name](self.head, batches, self.settings):
            predicted.append(part)
            done(len(part))
        label = label[np.concatenate(known)]
        # In random order, two neighbours differ with probability 1 - the sum of the squared class shares.
        shares = np.bincount(label) / max(1, len(label))
        expected = (len(label) - 1) * (1 - float((shares**2).sum()))
        changes = int(np.count_nonzero(np.diff(label)))
        return Adaptation(
            name=self.name,
            settings=self.settings,
            fidelity=FIDELITY[self.name],
            sorted_by_class=2 * changes < expected,
            plain=plain,
            adapted=right_rows(np.concatenate(predicted) == label),
        )

    def _blocks(self, rows: LabelledRows) -> Iterator[Floats]:
        """The rows as the head reads them, [n, D] in order; a row without a feature has NaN."""
        model = self.predictor.members[0]
        for arrays in rows.arrays(self.predictor):
            x = model.read(arrays, self.predictor.client).double().numpy()
            length = np.linalg.norm(x, axis=-1)
            far = np.abs(length - 1.0) > UNIT_ROWS
            if self.name == "tda" and far.any():
                raise UsageError(
                    f"--adapt tda compares unit vectors, but a row has the length {length[far][0]:.3g}.",
                    f"fedcache train {shell_word(model.facts.method)} --set feat_post=l2   trains on unit "
                    "vectors.",
                )
            yield x


def batches_of(blocks: Iterator[Floats], size: int) -> Iterator[Floats]:
    """The rows of blocks [n, D] in batches of ``size``; the last batch may be smaller.

    >>> [len(batch) for batch in batches_of(iter([np.ones((3, 1)), np.ones((4, 1))]), 2)]
    [2, 2, 2, 1]
    """
    parts = []
    waiting = 0
    for block in blocks:
        parts.append(block)
        waiting += len(block)
        if waiting < size:
            continue
        together = np.concatenate(parts)
        whole = waiting - waiting % size
        for start in range(0, whole, size):
            yield together[start : start + size]
        parts = [together[whole:]]
        waiting -= whole
    if waiting:
        yield np.concatenate(parts)
