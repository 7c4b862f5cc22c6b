"""Scores the clients of a run on their own test rows, without and with a client prior.

For this, the module finds the run of a model and the rows of that run, for ``evaluate_sets`` too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcache.config import CLIENT_PRIORS, Home
from fedcache.errors import FedcacheError, StoppedError, StoreError, UsageError, shell_word, unknown
from fedcache.federate.engine.outcome import TrainingOutput
from fedcache.federate.engine.run import TrainingRun
from fedcache.federate.partition.partition import Partition
from fedcache.models.calibrate import scores_of_rows
from fedcache.models.client_prior import (
    ClientPrior,
    ClientPriors,
    add_offset,
    class_counts,
    estimate_log_prior,
)
from fedcache.models.evaluate import (
    LabelledRows,
    PriorAccuracy,
    measure_prior,
    model_labels,
)
from fedcache.models.predictor import Predictor
from fedcache.models.saved_model import ModelOptions
from fedcache.process import Stop
from fedcache.progress import Observer, piece_of_work
from fedcache.runs.directory import result_of, run_folder, train_table
from fedcache.runs.origin import store_behind
from fedcache.runs.partitions import load_partition
from fedcache.runs.result_files import is_private
from fedcache.store.store import Store

MOST_SCORED = 1_000_000
"""Limit for test rows of clients, each row counted once per client. Above it, only every k-th client is scored."""
MOST_ESTIMATED = 1 << 20
"""Limit for probabilities from which ``em`` estimates a client's class shares. Above it, ``em`` uses every k-th row."""


def with_client_prior(
    predictor: Predictor, place: Path, options: ModelOptions, home: Home, observer: Observer
) -> Predictor:
    """The model with the prior of the client that ``options`` name; the same model for the prior ``none``.

    Raises UsageError without a client, and for ``em``, which needs all rows at once; other errors as ``PriorTests.of``.
    """
    kind = options.client_prior
    name = options.client
    if kind == "none":
        return predictor
    if kind == "em":
        raise UsageError(
            "--client-prior em estimates class shares from test rows, so only `fedcache evaluate` "
            "accepts it.",
            "--client-prior counts",
        )
    if name is None:
        raise UsageError(
            "--client-prior adds the class prior of one client, but no client was given.",
            "--client NAME",
        )
    # The source None stands for the run's own store.
    tests = PriorTests.of(place, predictor, None, kind, home, [name], observer)
    number = tests.own.partition.table.names.index(name)
    # ``priors`` has one row for each scored client. ``numbers`` has their numbers, sorted.
    row_in_priors = int(np.searchsorted(tests.numbers, number))
    log_prior = tests.priors.log_prior(row_in_priors)
    return replace(predictor, prior=ClientPrior(name, kind, log_prior))


def find_run(place: Path, digest: str, home: Home) -> tuple[Path, dict[str, Any]] | None:
    """The directory and result of a model's run, searched next to the model and in the home; None if it is gone."""
    for folder in (run_folder(place), home.runs / digest[:16]):
        with suppress(FedcacheError):  # a damaged run
            found = result_of(folder, digest)
            if found is not None:
                return folder, found
    return None


def partition_of_seed(
    folder: Path, result: Mapping[str, Any], seed: int, store: Store | None
) -> Partition | None:
    """The partition that a seed of a run was trained on; None if it is gone or has other rows now.

    Raises StoreError; CorruptionError for a partition that was changed.

    Args:
        folder: the run's directory, which has the partitions that were made for the run.
        result: of the run.
        seed: of the run.
        store: of the dataset, which has the saved partitions; None if the store is gone.
    """
    file = folder / f"partition-{seed}.partition"
    if file.is_file():
        partition = Partition.load(file, dataset=str(result["dataset"]["digest"]))
    elif store is not None:
        name = train_table(folder).get("partition") or result["partition"]["name"]
        try:
            partition = load_partition(store, str(name))
        except UsageError:  # no such file or saved partition
            return None
    else:
        return None
    if partition.digest not in result["partition"]["digests"]:
        return None
    return partition


def no_test_rows() -> StoreError:
    """The error if no client is tested on a row that is evaluated."""
    return StoreError(
        "No client has a test row among the rows that are evaluated.",
        "Leave --split out, or use --split test.",
    )


@dataclass(frozen=True)
class OwnRows:
    """The rows that a model's run was trained and tested on."""

    store: Store
    partition: Partition  # of the model's seeds
    label: NDArray[np.int64]  # [N], number of the model's class; -1 if it is unknown
    private: bool  # whether the run has differential privacy

    @classmethod
    def of(
        cls, place: Path, first: Predictor, source: object | None, home: Home, option: str
    ) -> OwnRows:
        """The rows of a model's run, for an option that needs the test rows and class scores of its clients.

        Args:
            place: the directory of a run, or a model file.
            first: the model, or that of the first client.
            source: of the rows that are evaluated. It must be the run's own store; None means this store.
            home: with the run.
            option: its name.

        Raises UsageError for a method or data that ``option`` cannot use, StoreError for a run whose partition is gone.
        """
        facts = first.members[0].facts
        run = facts.run[:12]
        found = find_run(place, facts.run, home)
        if found is None:
            raise StoreError(
                f"The run {run} no longer exists, but {option} needs its partition.",
                "fedcache runs list",
            )
        folder, result = found
        if source is None:
            source = store_behind(folder, result)
        if not isinstance(source, Store) or source.dataset["digest"] != result["dataset"]["digest"]:
            own_store = store_behind(folder, result)
            hint = "fedcache ls"
            if own_store is not None:
                hint = f"--store {shell_word(own_store.path)}"
            raise UsageError(
                f"{option} needs the store that the run was trained on, because no other store has "
                "the clients' rows.",
                hint,
            )
        store = source
        if first.deployed[0].method.by_similarity(facts.hp):
            raise UsageError(
                f"{facts.method} predicts by similarity to prototypes, but {option} needs class "
                "scores.",
                f"Leave {option} out.",
            )
        partitions = []
        # A run of --clients-from has no partition of one store, so the check below refuses it.
        if not train_table(folder).get("clients_from"):
            for member in first.members:
                of_seed = partition_of_seed(folder, result, member.facts.seed, store)
                if of_seed is not None:
                    partitions.append(of_seed)
        if len(partitions) < len(first.members):
            raise StoreError(
                f"The partition of the run {run} is not available, and {option} needs it.",
                f"Leave {option} out.",
            )
        partition = partitions[0]
        if any(other.digest != partition.digest for other in partitions):
            raise UsageError(
                f"{option} needs a single seed, because each seed has its own partition.",
                f"--seed {facts.seed}",
            )
        samples = store.samples
        label = model_labels(np.asarray(samples.label, np.int64), samples.classes, first.classes)
        label = np.where(samples.ok == 1, label, -1)
        return cls(store, partition, label, is_private(result))


@dataclass(frozen=True)
class PriorTests:
    """The clients of a run, with their test rows and priors."""

    own: OwnRows
    priors: ClientPriors
    # [K], sorted: for each scored client, thus for each row of ``priors``, its number in the partition
    numbers: NDArray[np.int64]
    # names of clients that are scored by their own models; None if one model scores all
    own_models: frozenset[str] | None

    @classmethod
    def of(
        cls,
        place: Path,
        first: Predictor,
        source: object | None,
        kind: str,
        home: Home,
        clients: Sequence[str] | None,
        observer: Observer,
    ) -> PriorTests:
        """The clients of a model's run.

        Args:
            place, first, source, home: as of ``OwnRows.of``.
            kind: of the prior.
            clients: names of the clients that are scored, each by its own model; None to score all by one model.
            observer: receives a warning if the class counts do not fit the prior.

        Raises UsageError for a method without client priors; other errors as ``OwnRows.of``.
        """
        if kind not in CLIENT_PRIORS:
            raise unknown("client prior", kind, CLIENT_PRIORS)
        own = OwnRows.of(place, first, source, home, "--client-prior")
        facts = first.members[0].facts
        if "labels" not in first.deployed[0].method.reads(facts.hp):
            raise UsageError(
                f"{facts.method} trains without labels, but a client prior needs class counts.",
                "Leave --client-prior out.",
            )
        if kind in ("fitted", "em") and own.private:
            raise UsageError(
                f"The run has differential privacy. --client-prior {kind} reads the class counts of all clients, and "
                "epsilon does not cover these counts.",
                "--client-prior counts",
            )
        table = own.partition.table
        # A row counts once for each client that is tested on it.
        test_rows = int(table.test_sizes.sum())
        step = max(1, -(-test_rows // MOST_SCORED))
        numbers = np.arange(0, len(table), step)
        own_models = None
        if clients is not None:
            # ``clients`` are all clients of the model or the requested one, which is always scored.
            if clients[0] not in table.names:
                raise unknown("client", clients[0], table.names)
            numbers = np.union1d(numbers, table.names.index(clients[0]))
            own_models = frozenset(clients)
        counts = class_counts(table.train.take(numbers), own.label, len(first.classes))
        priors = ClientPriors.of(kind, counts)
        # The warning names a concentration, which a private run does not disclose.
        caution = None
        if not own.private:
            caution = priors.caution()
        if caution is not None:
            observer.warn(caution)
        return cls(own, priors, numbers, own_models)

    def measured(
        self, first: Predictor, rows: LabelledRows, observer: Observer, stop: Stop
    ) -> PriorAccuracy:
        """The accuracy on ``rows`` of the store, without and with the prior.

        Raises StoreError without a test row, StoppedError after a stop.
        """
        wanted = np.zeros(self.own.store.rows, bool)
        wanted[rows.rows] = True
        with piece_of_work(observer, "client priors", len(self.numbers), "clients"):
            tests = self._tests(first, wanted, observer, stop)
            by_client = measure_prior(self.own.store, tests, self.own.label)
        if not by_client:
            raise no_test_rows()
        return PriorAccuracy(
            self.priors.kind, self.priors.concentration, self.own.partition.test_protocol, by_client
        )

    def _tests(
        self, first: Predictor, wanted: NDArray[np.bool_], observer: Observer, stop: Stop
    ) -> Iterator[tuple[ClientPrior, Predictor, NDArray[np.int64]]]:
        """Yield the prior, the model and the test rows of each client."""
        table = self.own.partition.table
        for row_in_priors, number in enumerate(self.numbers.tolist()):
            if stop.requested:
                raise StoppedError(
                    "Stopped before every client was evaluated.", "Run the same command again."
                )
            observer.advance(1)
            name = table.names[number]
            predictor = first
            if self.own_models is not None:
                if name not in self.own_models:
                    continue
                predictor = replace(first, client=name)
            test = np.asarray(table.test_of(number), np.int64)
            test = test[wanted[test]]
            if self.priors.kind == "em":
                log_prior = self._estimated(predictor, test, row_in_priors)
            else:
                log_prior = self.priors.log_prior(row_in_priors)
            yield ClientPrior(name, self.priors.kind, log_prior), predictor, test

    def _estimated(
        self, predictor: Predictor, test: NDArray[np.int64], row_in_priors: int
    ) -> NDArray[np.float64]:
        """The log-prior [C] of ``em``, from a sample of a client's test rows that limits the memory."""
        shares = self.priors.shares
        if self.own_models is not None:
            # The client's own model has learned the class shares of its client.
            counts = self.priors.counts[row_in_priors]
            shares = counts / max(1, counts.sum())
        classes = len(shares)
        step = max(1, -(-len(test) * classes // MOST_ESTIMATED))
        # The empty array gives ``concatenate`` something to work on if there are no test rows.
        probabilities = [np.empty((0, classes))]
        for _, scores in predictor.over_store(self.own.store, test[::step]):
            probabilities.append(predictor.mean_probability(scores))
        return estimate_log_prior(np.concatenate(probabilities), shares)


PRIOR_FIGURES = ("own_rows", "own_rows_with_prior", "all_rows", "all_rows_with_prior")


def prior_accuracy(
    spec: TrainingRun, out: TrainingOutput, partition: Partition, kind: str, temperature: float
) -> tuple[dict[str, float] | None, str | None]:
    """Accuracy of one model without and with the prior of each client, and a caution if the prior may be wrong.

    The accuracies are means over tested clients, as fractions: on the client's own test rows, and on all test rows.
    They are None without a labelled test row.
    """
    model = out.deployed(None)
    assert model is not None
    label = spec.data.y.cpu().numpy()
    table = partition.table
    priors = ClientPriors.of(kind, class_counts(table.train, label, spec.data.classes))
    rows = partition.test[label[partition.test] >= 0]
    if not len(rows):
        return None, priors.caution()
    truth = label[rows]
    scores = torch.from_numpy(scores_of_rows(model, spec, rows))
    plain = scores.argmax(-1).numpy() == truth
    figures = []
    # All test rows are scored with the prior of each client.
    step = max(1, len(table) * len(rows) // MOST_SCORED)
    for number in range(0, len(table), step):
        own_rows = np.flatnonzero(np.isin(rows, table.test_of(number)))
        if not len(own_rows):
            continue
        if kind == "em":
            probabilities = (scores[own_rows] / temperature).softmax(-1).numpy()
            log_prior = estimate_log_prior(probabilities, priors.shares)
        else:
            log_prior = priors.log_prior(number)  # here ``priors`` has a row for every client
        offset = ClientPrior(table.names[number], kind, log_prior).offset(temperature)
        right = add_offset(scores, offset).argmax(-1).numpy() == truth
        figures.append((plain[own_rows].mean(), right[own_rows].mean(), plain.mean(), right.mean()))
    if not figures:
        return None, priors.caution()
    means = np.mean(figures, 0).tolist()
    return dict(zip(PRIOR_FIGURES, means, strict=True)), priors.caution()
