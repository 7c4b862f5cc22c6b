"""FedClassifier: a federated method as a scikit-learn classifier of features in memory, without a store or a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from fedcache.config import PRESETS
from fedcache.errors import UsageError, unknown
from fedcache.federate.engine.client_data import Data, prepare_features
from fedcache.federate.engine.hyperparameters import with_schedule_rounds
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import TrainingOutput
from fedcache.federate.engine.run import TrainingRun, run
from fedcache.federate.methods import METHODS, find_method
from fedcache.federate.partition.client_table import Client
from fedcache.federate.partition.partition import SCHEMES, Columns
from fedcache.federate.partition.scheme import Streams, make_pool
from fedcache.models.calibrate import temperature_of
from fedcache.models.predictor import Predictor, check_temperature
from fedcache.models.saved_model import ModelFacts, SavedModel, collect, in_double
from fedcache.parsing import Record
from fedcache.process import usual_torch_state

Labels = NDArray[Any]
DTYPES = ("float32", "float64")
CLIENTS = 10
LEAST_ROWS = 20
"""Default number of clients. It is reduced if clients would have fewer than ``LEAST_ROWS`` rows."""
MISSING = ("None", "nan", "NaT", "<NA>")
"""Texts that stand for missing values in Python, numpy and pandas."""


class FedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A federated method that is trained on rows of features, which are assigned to simulated clients.

    It works wherever a scikit-learn classifier does (``Pipeline``, ``cross_val_score``, ``GridSearchCV``). Steps of a
    pipeline such as ``StandardScaler`` see the rows of all clients, which is impossible in a real federation. Use
    ``feat_post`` in ``settings`` for transformations that each client can compute by itself.

    >>> from sklearn.datasets import load_digits
    >>> from sklearn.model_selection import train_test_split
    >>> X, y = load_digits(return_X_y=True)
    >>> parts = train_test_split(X, y, test_size=0.3, random_state=0)
    >>> round(FedClassifier().fit(parts[0], parts[2]).score(parts[1], parts[3]), 2)
    0.92
    >>> kernel = FedClassifier(settings={"feat_post": "l2", "rff_dim": 1000})
    >>> round(kernel.fit(parts[0], parts[2]).score(parts[1], parts[3]), 2)
    0.99

    Args:
        method: a name of ``fedcache methods list``, or a ``Method``. Methods that read text, images, stored views or a
            public set are refused.
        settings: hyperparameters that replace those of ``preset``.
        rounds: number of rounds; None for the number in the method's paper.
        participation: clients per round: a number, a share, or None for all.
        clients: number of clients, at most one for each row; ignored if ``fit`` gets groups. None for 10, or for
            fewer if 10 would have less than 20 rows each.
        scheme: how rows are assigned to clients: iid, shards, dirichlet, lda, ...; ``scheme_options`` holds its
            arguments.
        preset: ``default``, ``paper``, ``official`` or ``tuned``.
        temperature: scores are divided by it before the softmax of ``predict_proba``. With None, ``fit`` finds it: it
            trains a method in closed form a second time on four fifths of the rows, and calibrates on the others.
            Methods that take gradient steps or train a model for each client keep 1, and are not calibrated.
        dtype: precision of the training, ``float32`` or ``float64``. The model scores in float64, so that the scores of
            a row do not depend on the other rows.
        random_state: seed of every draw: a number, a ``RandomState``, or None for a new seed at every ``fit``.

    Attributes:
        classes_: [C] labels, sorted.
        n_features_in_: D.
        clients_: names of the clients: groups as text, or ``client-0``, ...
        model_: the ``SavedModel`` that predicts; ``fedcache.load_model`` reads the file that its ``save`` writes.
    """

    def __init__(
        self,
        method: str | Method = "fed3r",
        settings: Record | None = None,
        rounds: int | None = None,
        participation: int | float | None = None,
        clients: int | None = None,
        scheme: str = "iid",
        scheme_options: Record | None = None,
        preset: str = PRESETS[0],
        temperature: float | None = None,
        dtype: str = "float32",
        random_state: Any = 0,
    ) -> None:
        self.method = method
        self.settings = settings
        self.rounds = rounds
        self.participation = participation
        self.clients = clients
        self.scheme = scheme
        self.scheme_options = scheme_options
        self.preset = preset
        self.temperature = temperature
        self.dtype = dtype
        self.random_state = random_state

    @usual_torch_state()
    def fit(self, X: Any, y: Any, groups: Any = None) -> FedClassifier:
        """Train on features X [N, D] with labels y [N].

        ``groups`` [N] names the client of each row; with None, ``scheme`` assigns the rows. Raises UsageError for a
        method that reads more than features, and as the engine; ValueError as any scikit-learn classifier.
        """
        # scikit-learn expects arguments to be checked here and not in ``__init__``.
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has only one class, {self.classes_[0]!r}; a classifier needs at least 2."
            )
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        if self.temperature is not None:
            check_temperature(self.temperature)
        arguments = {"settings": self.settings, "scheme_options": self.scheme_options}
        for name, given in arguments.items():
            if given is not None and not isinstance(given, Mapping):
                raise UsageError(
                    f"{name} is a {type(given).__name__}, expected a dict.",
                    f'{name}={{"name": value}}',
                )
        method = self._method()
        rounds = self.rounds or method.defaults.rounds
        hp = with_schedule_rounds(method.resolve(self.preset, self.settings), rounds)
        # Norms and counts of rows can be computed from the features; nothing else is available.
        unavailable = method.reads(hp) - {"labels", "row norms", "row counts"}
        if unavailable:
            listed = ", ".join(sorted(unavailable))
            raise UsageError(
                f"{method.name} also needs {listed}, but FedClassifier passes only features and labels.",
                f"fedcache.train({method.name!r}, store)   trains on a store, which can have {listed}.",
            )
        seed = self.random_state
        # As in scikit-learn, ``random_state`` may also be None or a generator, from which the seed is drawn.
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31 - 1)
        if groups is None:
            clients = self._assigned_clients(codes, int(seed))
        else:
            clients = _grouped(groups, X)
        self.clients_ = [client.name for client in clients]
        feat_post = str(hp.get("feat_post", "none"))
        # One backbone with one view of each row; all rows are training rows.
        x, scaling = prepare_features([X.astype(np.float32)[:, None]], feat_post, np.arange(len(X)))
        y = torch.from_numpy(codes.astype(np.int64))
        data = Data(x, y, len(self.classes_), widths=(X.shape[1],))
        spec = TrainingRun(
            method,
            data,
            clients,
            rounds,
            self.participation,
            int(seed),
            getattr(torch, self.dtype),
        )
        out = run(spec, hp)
        facts = self._facts(out, feat_post, X.shape[1])
        if self.temperature is None:
            facts = replace(facts, temperature=temperature_of(spec, out))
        model = collect(out, facts, data, scaling, [], "all")  # all clients' models
        if model is None:
            raise UsageError(
                f"{method.name} trained no model that can predict.", "fedcache methods list"
            )
        # predict_proba computes in float64, so the tensors are converted once.
        facts = replace(model.facts, dtype="float64")
        self.model_ = SavedModel(facts, in_double(model.tensors))
        return self

    def decision_function(self, X: Any, groups: Any = None) -> NDArray[np.float64]:
        """Scores [N, C], the highest for the predicted class; for two classes [N], above 0 for the second.

        ``groups`` [N] names the client whose model scores each row, for a method that trains a model for each client.
        """
        scores = self._scores(X, groups)
        if len(self.classes_) == 2:
            return scores[:, 1] - scores[:, 0]
        return scores

    @usual_torch_state()
    def predict_proba(self, X: Any, groups: Any = None) -> NDArray[np.float64]:
        """Softmax [N, C] of scores / temperature; ``groups`` as in ``decision_function``.

        They are calibrated if ``temperature`` was given or ``model_.facts.temperature`` was fitted. Otherwise they are
        scores that add up to 1.
        """
        scores = self._scores(X, groups)
        predictor = Predictor((self.model_,), temperature=self.temperature)
        return predictor.mean_probability(scores[np.newaxis])

    def predict(self, X: Any, groups: Any = None) -> Labels:
        """Labels [N] of the highest scores; ``groups`` as in ``decision_function``."""
        scores = self._scores(X, groups)
        best = np.where(np.isnan(scores), -np.inf, scores).argmax(1)
        return np.asarray(self.classes_[best])

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """Accuracy, a fraction; ``groups`` as in ``decision_function``."""
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))

    def _method(self) -> Method:
        if isinstance(self.method, str):
            return find_method(self.method)
        return self.method

    def _assigned_clients(self, codes: NDArray[np.int64], seed: int) -> list[Client]:
        """Assign rows to clients by the scheme. Raises UsageError if it cannot partition these rows."""
        if self.scheme not in SCHEMES:
            raise unknown("partition scheme", self.scheme, SCHEMES)
        how = SCHEMES[self.scheme]
        N = len(codes)
        count = self.clients
        if count is None:
            count = max(1, min(CLIENTS, N // LEAST_ROWS))
        values = how.resolve({"clients": min(count, N), **(self.scheme_options or {})})
        # All rows are readable training rows of one domain; only the labels differ.
        zeros = np.zeros(N, np.int64)
        columns = Columns(
            label=codes,
            domain=zeros,
            split=zeros,
            ok=np.ones(N, np.uint8),
            uid=np.zeros((N, 16), np.uint8),
            classes=tuple(map(str, range(len(self.classes_)))),
            domains=("all",),
            digest="",
        )
        pool = make_pool(columns, None, split=0, needs_labels=how.needs_labels, scheme=self.scheme)
        assigned = how.deal(pool, values, Streams(seed, self.scheme))
        names = assigned.names or [f"client-{i}" for i in range(len(assigned.train))]
        return [_client(name, rows) for name, rows in zip(names, assigned.train, strict=True)]

    def _facts(self, out: TrainingOutput, feat_post: str, width: int) -> ModelFacts:
        # There is no stored run, and ``collect`` fills ``saved``.
        return ModelFacts(
            run="",
            seed=out.seed,
            dataset="in memory",
            method=out.method,
            code="",
            hp=out.hp,
            protocol=out.protocol,
            rounds=len(out.records),
            dtype=self.dtype,
            classes=tuple(map(str, self.classes_)),
            keys=("features",),
            recipes=(),
            widths=(width,),
            views=1,
            feat_post=feat_post,
            clients=len(out.clients),
            saved={},
        )

    def _scores(self, X: Any, groups: Any) -> NDArray[np.float64]:
        """Scores [N, C] of rows, each by the model of its client."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        rows = X.astype(np.float32)
        model = self.model_
        if not model.facts.personal:
            return np.asarray(self._predictor(None).scores(rows)[0])
        if groups is None:
            raise UsageError(
                f"{model.facts.method} trains one model per client, but the client of each row is unknown.",
                "Give the client of each row: predict(X, groups=...). Or use a method with one model, for "
                "example fedavg.",
            )
        names = _names(groups, X)
        out = np.empty((len(rows), len(self.classes_)))
        for name in np.unique(names):
            mine = names == name
            out[mine] = self._predictor(str(name)).scores(rows[mine])[0]
        return out

    def _predictor(self, client: str | None) -> Predictor:
        method = self._method()
        custom = None
        if METHODS.get(method.name) is not method:
            custom = method
        return Predictor((self.model_,), client, method=custom)


def _client(name: str, rows: NDArray[np.int64]) -> Client:
    """A client without test rows, because scikit-learn scores the model."""
    return Client(name, np.sort(rows), np.empty(0, np.int64))


def _names(groups: Any, X: NDArray[np.float64]) -> NDArray[Any]:
    """The client of each row, [N] words. Raises UsageError for a row whose client is a missing value."""
    check_consistent_length(X, groups)
    words = []
    for row, group in enumerate(groups):
        word = str(group)
        if word in MISSING and not isinstance(group, str):
            raise UsageError(
                f"groups has no client for row {row} ({word}).",
                "Leave such rows out of X, y and groups.",
            )
        words.append(word)
    return np.array(words)


def _grouped(groups: Any, X: NDArray[np.float64]) -> list[Client]:
    """One client for each group, in the order of their names."""
    names, codes = np.unique(_names(groups, X), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(names)))
    parts = np.split(order, ends[:-1])
    return [_client(str(name), rows) for name, rows in zip(names, parts, strict=True)]
