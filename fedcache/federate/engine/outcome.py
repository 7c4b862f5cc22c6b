"""Outcome of a run: metrics over clients, predictions, traffic, records, and the state to resume from.

Traffic is scalars and bytes up and down. ``exact`` counts the tensors that uploads and broadcasts really hold;
``paper`` counts weights only (no biases, no BatchNorm), as the papers' tables do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from fedcache.errors import UsageError
from fedcache.federate.engine.client_data import ClientData
from fedcache.federate.engine.context import Ctx
from fedcache.federate.engine.method import Method
from fedcache.federate.partition.client_table import (
    Client,
    all_train_rows,
    blocks_within,
    sorted_once,
    train_sizes,
)
from fedcache.heads.class_balance import deficits, votes
from fedcache.heads.linear import Tree
from fedcache.progress import VALIDATION_ACCURACY


@dataclass(frozen=True)
class DeployedModel:
    """The model that a run deploys for one client, or its one global model."""

    method: Method
    down: Tree  # the broadcast, or a probe that evaluation trained from the broadcast
    personal: Tree  # the client's own part; {} for a global model
    data: ClientData  # rows of the client, for users' methods that read them to predict
    ctx: Ctx  # without leading axes

    def scores(self, x: Tensor) -> Tensor:
        """Features [R, D] (or images uint8 [R, H W 3]) -> scores [R, C]."""
        return self.method.predict(self.down, self.personal, self.data, x, self.ctx)

    def embed(self, x: Tensor) -> Tensor:
        """The same rows -> [R, d], the input of the classifier in ``scores``."""
        return self.method.embed(self.down, self.personal, x, self.ctx)


def no_training_rows(method: str) -> ClientData:
    """The data of a model that was taken out of its run: reading any attribute raises UsageError."""
    return missing_rows(
        f"predict of {method} reads the client's training rows, but a saved model does not contain them.",
        "Change personal_part of the method so that it returns the data that predict needs.",
    )


def missing_rows(message: str, hint: str) -> ClientData:
    """Stand-in for missing rows: reading any attribute raises UsageError with this message."""
    return cast(ClientData, _MissingRows(message, hint))


class _MissingRows:
    def __init__(self, *words: str) -> None:
        self._words = words

    def __getattr__(self, name: str) -> Any:
        raise UsageError(*self._words)


MOST_CONFUSED = 100
"""Number of classes up to which a result contains the confusion matrix; for 100 classes it has 10,000 numbers."""


def fairness(accuracy: np.ndarray) -> dict[str, float]:
    """The distribution of accuracy over clients.

    Args:
        accuracy: [m] fractions; NaN for clients that were not scored, which are left out.

    Returns:
        ``mean`` (fraction), ``std_pp`` (population standard deviation in percentage points), ``var_pp2`` (its square,
        the q-FFL convention), ``worst10``, ``worst20``, ``worst40`` (means of the floor(q m) lowest) and ``best10``;
        NaN where floor(q m) is 0.
    """
    a = np.sort(np.asarray(accuracy, np.float64))
    a = a[~np.isnan(a)]
    figures = dict.fromkeys(("mean", "std_pp", "var_pp2"), math.nan)
    if len(a):
        std = float(a.std() * 100.0)
        figures = {"mean": float(a.mean()), "std_pp": std, "var_pp2": std**2}
    # Means of the floor(q m) lowest, and of the highest tenth.
    tails = {f"worst{q}": a[: len(a) * q // 100] for q in (10, 20, 40)}
    tails["best10"] = a[len(a) - len(a) // 10 :]
    for name, tail in tails.items():
        figures[name] = math.nan
        if len(tail):
            figures[name] = float(tail.mean())
    return figures


def known_mean(values: np.ndarray) -> float:
    """Mean of the numbers that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    if len(known):
        return float(known.mean())
    return math.nan


def entropy_bits(q: Tensor) -> Tensor:
    """Entropy in bits of each row of q [.., C] (FST-CBDG fig 2: base 2, D-54); returns [..]."""
    nats: Tensor = -torch.special.xlogy(q, q).sum(-1)
    return nats / math.log(2.0)


def macro_f1(predicted: np.ndarray, label: np.ndarray, classes: int) -> float:
    """Unweighted mean over the classes present in ``label`` of the F1 score of [N] predictions.

    A class that is predicted but not present lowers the scores of the true classes, and has no score itself. This is
    scikit-learn's ``f1_score(label, predicted, average="macro", labels=np.unique(label))``. Rows with an unknown label
    or prediction (-1) are left out.
    """
    known = (label >= 0) & (predicted >= 0)
    label = label[known]
    predicted = predicted[known]
    # F1 of a class is 2 TP / (rows with this label + rows with this prediction).
    right = np.bincount(label[label == predicted], minlength=classes)
    truth = np.bincount(label, minlength=classes)
    guess = np.bincount(predicted, minlength=classes)
    present = truth > 0
    if not present.any():
        return math.nan
    f1 = 2.0 * right[present] / (truth + guess)[present]
    return float(np.mean(f1))


def confusion(label: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """int64 [C, C]: number of rows by (label, predicted class); rows where one of the two is unknown are left out."""
    known = (label >= 0) & (predicted >= 0)
    # One number for each pair of label and prediction, counted at once.
    pairs = label[known] * classes + predicted[known]
    cells = np.bincount(pairs, minlength=classes * classes)
    counts: np.ndarray = cells.reshape(classes, classes)
    return counts


def classes_owned(label: np.ndarray) -> int:
    """Distinct known classes among the labels [n] of a client's training rows."""
    return len(np.unique(label[label >= 0]))


ROWS_AT_ONCE = 1 << 18
"""Approximate number of rows whose classes are counted in one call."""


def classes_of_clients(label: np.ndarray, clients: Sequence[Client]) -> np.ndarray:
    """int64 [M]: ``classes_owned`` of every client; ``label`` [N] has the labels of all rows."""
    rows = all_train_rows(clients)
    sizes = train_sizes(clients)
    ends = np.cumsum(sizes)
    classes = int(label.max(initial=0)) + 1
    owned = np.zeros(len(clients), np.int64)
    # Clients ``first`` to ``last`` - 1 together have about ``ROWS_AT_ONCE`` rows.
    for first, last in blocks_within(sizes, ROWS_AT_ONCE):
        start = ends[first] - sizes[first]
        labels = label[rows[start : ends[last - 1]]]
        owner = np.repeat(np.arange(last - first), sizes[first:last])
        known = labels >= 0
        pairs = owner[known] * classes + labels[known].astype(np.int64)
        distinct = sorted_once(pairs)  # each class of each client once
        owned[first:last] = np.bincount(distinct // classes, minlength=last - first)
    return owned


TOGETHER = 64
"""Number of clients whose soft labels are processed in one call; single calls would mostly be torch's overhead."""


def self_training(
    server: Tree, states: Mapping[int, Tree], labels: Mapping[int, Tensor], ctx: Ctx
) -> dict[str, float]:
    """Diagnostics of FST-CBDG, over the clients that took part so far.

    Args:
        server: W [C, D].
        states: ``rows/q`` [n, C] per client.
        labels: [n] true classes per client, for evaluation only.
        ctx: text features and switches.

    Returns:
        ``pseudo_accuracy`` of argmax q; ``entropy_bits``, mean over rows; ``synthetic``, mean number of rows that
        would balance a client's classes (eq 7); ``drift``, the Frobenius norm of W - T.
    """
    equal = ctx.hp["sampling"] == "equal"
    gamma = ctx.number("gamma")
    right = 0
    bits = 0.0
    rows = 0
    synthetic = 0
    order = sorted(states)
    for start in range(0, len(order), TOGETHER):
        clients = order[start : start + TOGETHER]
        # Means over rows read the rows of all clients one after another. ``votes`` reads padded rows of each client;
        # ``real`` is 1 on rows and 0 on padding.
        of_clients = [states[client]["rows/q"] for client in clients]
        q = torch.cat(of_clients)
        truth = torch.cat([labels[client] for client in clients])
        right += int((q.argmax(-1) == truth).sum())
        bits += float(entropy_bits(q.double()).sum())
        rows += len(q)
        ones = [torch.ones(len(client_q), device=q.device) for client_q in of_clients]
        real = pad_sequence(ones, batch_first=True)
        padded = pad_sequence(of_clients, batch_first=True)
        lacking = deficits(votes(padded, real), gamma, equal=equal)
        synthetic += int(lacking.sum())
    drift = float(torch.linalg.matrix_norm(server["W"] - ctx.text))
    if not rows:
        return {"drift": drift}
    return {
        "pseudo_accuracy": right / rows,
        "entropy_bits": bits / rows,
        "synthetic": synthetic / len(states),
        "drift": drift,
    }


@dataclass(frozen=True)
class RoundTraffic:
    """Totals of one round over its clients, in scalars (``*_bytes`` in bytes)."""

    clients: int  # that sent
    up: int
    down: int
    up_bytes: int
    down_bytes: int
    paper_up: int
    paper_down: int
    receivers: int | None = None  # clients that got the broadcast; None if it equals ``clients``

    def to_dict(self) -> dict[str, int]:
        """Plain JSON values, without fields that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def itemsize(tree: Tree) -> int:
    """Bytes of one scalar of a tree (0 when it holds none)."""
    return max((t.element_size() for t in tree.values() if t.is_floating_point()), default=0)


@dataclass(eq=False)
class Traffic:
    """Counter of the traffic of a run."""

    up: np.ndarray  # int64 [M], exact scalars uploaded by each client so far
    down: np.ndarray  # int64 [M], exact scalars sent to each client so far
    rounds: list[RoundTraffic] = field(default_factory=list)  # totals per round

    @classmethod
    def none_of(cls, clients: int) -> Traffic:
        """The counter of a run that begins."""
        return cls(np.zeros(clients, np.int64), np.zeros(clients, np.int64))

    def __eq__(self, other: object) -> bool:
        """Whether another counter has the same counts."""
        if not isinstance(other, Traffic) or len(self.up) != len(other.up):
            return False
        return self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def totals(self) -> dict[str, int]:
        """Sums over rounds and clients."""
        keys = ("up", "down", "up_bytes", "down_bytes", "paper_up", "paper_down")
        return {k: sum(getattr(r, k) for r in self.rounds) for k in keys}

    def per_client_round(self) -> dict[str, float]:
        """Totals per client and round: up per client that sent, down per client that got the broadcast."""
        senders = 0
        receivers = 0
        for r in self.rounds:
            senders += r.clients
            if r.receivers is None:
                receivers += r.clients
            else:
                receivers += r.receivers
        means = {}
        for key, total in self.totals().items():
            count = receivers
            # "up", "up_bytes" and "paper_up"; the other keys contain "down".
            if "up" in key:
                count = senders
            means[key] = total / max(1, count)
        return means

    def idle_rounds(self) -> list[str]:
        """A warning about the rounds in which no client sent anything; [] if there are none."""
        idle = [number for number, r in enumerate(self.rounds, 1) if not r.clients]
        if not idle:
            return []
        count = len(idle)
        total = len(self.rounds)
        which = f"{count:,} of {total:,} rounds (the first: round {idle[0]:,})"
        if count == total:
            which = f"all {count:,} rounds"
        if total == 1:
            which = "the only round"
        return [
            f"In {which} the server received no upload: no client was drawn or available, or all drawn clients "
            "dropped out."
        ]

    def to_json(self) -> dict[str, Any]:
        """All counts as JSON; clients that neither sent nor received anything are left out."""
        met = np.flatnonzero(self.up | self.down)
        return {
            "clients": met.tolist(),
            "up": self.up[met].tolist(),
            "down": self.down[met].tolist(),
            "rounds": [r.to_dict() for r in self.rounds],
            "totals": self.totals(),
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any], clients: int) -> Traffic:
        """The counter that ``to_json`` wrote in a run with so many clients; earlier releases wrote every client."""
        made = cls.none_of(clients)
        met = saved.get("clients", range(clients))
        made.up[met] = saved["up"]
        made.down[met] = saved["down"]
        made.rounds += [RoundTraffic(**r) for r in saved["rounds"]]
        return made


@dataclass(frozen=True)
class RoundRecord:
    """One round: its 1-based number, the clients that took part, its time and traffic, and the accuracy if measured.

    ``accuracy`` is a fraction: on the global test rows for a global model, the mean over clients for personal models.
    ``diagnostics`` are the method's own numbers, computed in rounds in which accuracy is measured.
    """

    round: int
    clients: tuple[int, ...]
    seconds: float
    accuracy: float | None
    traffic: RoundTraffic
    diagnostics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> RoundRecord:
        """The record that ``dataclasses.asdict`` turned into JSON."""
        values = dict(saved)
        values["clients"] = tuple(saved["clients"])
        values["traffic"] = RoundTraffic(**saved["traffic"])
        return cls(**values)


class Snapshot(NamedTuple):
    """The state between rounds: ``server/<name>`` and ``client/<number>/<name>`` tensors, and JSON.

    Names do not change during a run, every tensor owns its memory, and nothing else is needed to continue. If clients
    are in a file (``table`` in ``meta``), the snapshot has the file's index instead of their tensors.
    """

    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    # To be called after the snapshot is written, because the previous snapshot is needed until then.
    on_written: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Evaluation:
    """Scores of the deployed models."""

    # [M] fractions; NaN for a client without test rows or without a deployed model.
    client_accuracy: np.ndarray
    # Accuracy of a global model on the union of all test rows; None for personal models.
    global_accuracy: float | None
    # F1 of a global model on the union of all test rows, or the unweighted mean over personal models.
    macro_f1: float
    # Domain number -> accuracy over its test rows, if domains are known.
    by_domain: dict[int, float]
    # int64 store rows of ``predictions``: the union of the test rows, or the test rows of one client after another.
    rows: np.ndarray
    predictions: np.ndarray  # int64 predicted classes of ``rows``
    headline: str = "mean"  # mean | min: how accuracies of personal models become one number
    # int64 [C, C], number of rows by (label, predicted class); None above ``MOST_CONFUSED`` classes.
    counts: np.ndarray | None = None
    # False if there are too many predictions to keep; then ``rows`` and ``predictions`` are empty.
    whole: bool = True
    # Scores of the same models on the validation rows, if there are any.
    validation: Evaluation | None = None
    # int64: for personal models, the number of ``rows`` of each scored client, in order; None for a global model.
    sizes: np.ndarray | None = None
    # Accuracy over all rows of all clients, each scored by its client's model; None if not computed.
    pooled: float | None = None

    @property
    def diagnostics(self) -> dict[str, float]:
        """Numbers of a round in addition to its accuracy."""
        if self.validation is None:
            return {}
        return {VALIDATION_ACCURACY: self.validation.accuracy}

    @property
    def mean_accuracy(self) -> float:
        """Unweighted mean over the scored clients; NaN when there are none."""
        return known_mean(self.client_accuracy)

    @property
    def accuracy(self) -> float:
        """The primary metric: ``global_accuracy`` of a global model, the mean or minimum over personal models."""
        if self.global_accuracy is not None:
            return self.global_accuracy
        known = self.client_accuracy[~np.isnan(self.client_accuracy)]
        if self.headline == "min" and len(known):
            return float(known.min())
        return self.mean_accuracy


@dataclass(frozen=True)
class TrainingOutput:
    """The result of a run."""

    method: str  # its name
    hp: dict[str, Any]  # resolved hyperparameters
    seed: int  # of every stream
    protocol: str  # global | personalised | everywhere
    evaluation: Evaluation  # at the last round
    records: tuple[RoundRecord, ...]  # one per round
    traffic: Traffic  # exact and paper counts
    fidelity: str  # exact | cached_views | approx
    execution: str  # sequential | batched | gram, or one that is registered
    chunk: int  # clients at once
    points: int  # of a grid that were computed together, this point included
    threads: int  # of torch, in this process
    dtype: torch.dtype  # of the computation
    clients: Sequence[str]  # their names
    # Number of classes among each client's training rows.
    classes_owned: Sequence[int] | np.ndarray
    trainable: int  # number of trained scalars in the deployed model
    server: Tree  # the final server tensors
    # Client number -> its tensors; weights that are kept as Gram coordinates are computed when they are read.
    states: Mapping[int, Tree]
    warnings: tuple[str, ...]  # sentences
    attackers: tuple[str, ...]  # names of the malicious clients
    # x [N, V, D] or [N, D] -> int64 [N]: the classes the global model predicts.
    predict: Callable[[Tensor], Tensor]
    # Number of a client, or None for the global model -> the model; None if there is no such model.
    deployed: Callable[[int | None], DeployedModel | None]
    # The broadcast after the last round: the tensors that all clients' models share.
    broadcast: Callable[[], Tree]
    # Accuracy of the method's initial class texts on the same test rows, without training. None for a method without
    # class texts, and for real sites.
    zero_shot: float | None = None

    @property
    def accuracy(self) -> float:
        """The primary metric of the last round, a fraction."""
        return self.evaluation.accuracy

    @property
    def client_accuracy(self) -> np.ndarray:
        """[M] fractions of the last round."""
        return self.evaluation.client_accuracy

    @property
    def fairness(self) -> dict[str, float]:
        """The distribution of accuracy over clients."""
        return fairness(self.evaluation.client_accuracy)


# Figures that explain a result: a generalisation bound, the cost of an exchange, the certainty of
# zero-shot labels, and the share of each backbone. They are pure functions of arrays, and training
# reads none of them.


@dataclass(frozen=True)
class Bound:
    """Theorem 4.1 of FedPCL: upper bound of the expected loss minus the measured loss."""

    printed: float  # sqrt((N/2) ln((m+1)C / delta)) + ``capacity``; it grows with N
    corrected: float  # sqrt(ln((m+1)C / delta) / (2N)) + ``capacity``
    capacity: float  # sqrt((d/N) ln(e N / d)), a term of both


def generalisation_bound(
    rows: int, clients: int, classes: int, dimension: int, delta: float = 0.05
) -> Bound:
    """The bound of FedPCL (A theorem 4.1, eq 11), as printed and corrected.

    The printed first term uses McDiarmid's constants c_i = 1. But a change of one of N rows changes a mean by at most
    1/N; with c_i = 1/N the term falls with N, as a bound should. Raises FedcacheError, exit 2 for counts below 1, a
    delta outside (0, 1), or d >= e N, for which the theorem does not hold.

    Args:
        rows: N, training rows of all clients.
        clients: m.
        classes: C.
        dimension: d, the VC dimension of the head; D + 1 for a linear one on D features.
        delta: probability with which the bound may fail.
    """
    counts = {"rows": rows, "clients": clients, "classes": classes, "dimension": dimension}
    _check_counts(counts, 1)
    if not 0.0 < delta < 1.0:
        raise UsageError(
            f"delta is {delta}, expected a probability between 0 and 1.", "For example delta=0.05."
        )
    limit = math.e * rows
    if dimension >= limit:
        needed = math.floor(dimension / math.e) + 1
        raise UsageError(
            f"The generalisation bound needs d < e N, with d = {dimension} (VC dimension of the head), N = {rows} "
            f"(training rows) and e = 2.718. Here e N is {limit:.1f}.",
            f"Use at least {needed} rows, or a head of fewer dimensions.",
        )
    capacity = math.sqrt(dimension / rows * math.log(math.e * rows / dimension))
    chance = math.log((clients + 1) * classes / delta)
    return Bound(
        printed=math.sqrt(rows / 2 * chance) + capacity,
        corrected=math.sqrt(chance / (2 * rows)) + capacity,
        capacity=capacity,
    )


def _check_counts(counts: Mapping[str, int], least: int) -> None:
    for name, value in counts.items():
        if value < least:
            raise UsageError(
                f"{name} is {value}, expected at least {least}.",
                "Give the number from the result of the run.",
            )


@dataclass(frozen=True)
class Exchange:
    """Scalars that one client sends in a whole run, for two kinds of uploads; downloads are not counted."""

    representations: int  # N_pub d numbers per round: FLESD's features of the public set
    weights: int  # |w| per round: weight averaging

    @property
    def cheaper(self) -> bool:
        """FLESD's inequality (C eq 11): whether representations are fewer scalars than weights."""
        return self.representations < self.weights


def flesd_exchange(
    public: int, width: int, weights: int, rounds: int, average_rounds: int | None = None
) -> Exchange:
    """Scalars that a client sends with FLESD and with weight averaging (C eq 11; uploads only).

    Raises FedcacheError, exit 2 for a negative number.

    Args:
        public: N_pub, rows of the public set.
        width: d of a representation.
        weights: |w|, scalars of the model.
        rounds: of FLESD.
        average_rounds: of weight averaging; None for ``rounds``.
    """
    if average_rounds is None:
        average_rounds = rounds
    counts = {
        "public": public,
        "width": width,
        "weights": weights,
        "rounds": rounds,
        "average_rounds": average_rounds,
    }
    _check_counts(counts, 0)
    return Exchange(public * width * rounds, weights * average_rounds)


def fusion_similarity(single: Tensor, fused: Tensor, owned: Tensor) -> Tensor:
    """Similarity of each backbone's prototypes to the prototypes of all backbones together (A figure 3).

    s_ki is the mean of <C_i^(j) from backbone k alone, C_i^(j) from all> over the classes j that client i owns, with
    unit prototypes. It compares coordinates, so it is meaningful only if the projections start from one basis;
    ``report.figure_data.linear_cka`` does not need that. Every client's column is divided by its sum, because the
    paper says only "normalized".

    Args:
        single: [K, M, C, P] prototypes of models on one backbone each.
        fused: [M, C, P] of the model on all of them.
        owned: bool [M, C].

    Returns:
        [K, M]; NaN for a client that owns no class, and for a column with a sum of 0 or less.
    """
    # [K, M, C] cosines of unit prototypes, averaged over the classes that each client owns.
    cosine = (normalize(single, dim=-1) * normalize(fused, dim=-1)).sum(-1)
    weight = owned.to(cosine.dtype)
    s = (cosine * weight).sum(-1) / weight.sum(-1)
    total = s.sum(0)
    return torch.where(total > 0, s / total, s.new_full((), math.nan))
