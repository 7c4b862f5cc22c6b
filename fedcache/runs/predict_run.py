"""The model of a run: opened for predictions, applied to rows, and personalised for a new client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedcache.config import CLIENT_PRIORS, ExtractConfig, Home
from fedcache.errors import (
    CorruptionError,
    FedcacheError,
    StoppedError,
    StoreError,
    UsageError,
    shell_word,
    unknown,
)
from fedcache.extract.device import resolve_device
from fedcache.extract.planning.find_store import need_store
from fedcache.extract.planning.plan import paths_of
from fedcache.federate.engine.client_data import FrozenEncoders, prepare_features
from fedcache.federate.engine.evaluate import BLOCK
from fedcache.federate.engine.method import Method
from fedcache.federate.methods import NAMES
from fedcache.federate.partition.partition import Partition
from fedcache.models.client_prior import ClientPrior, ClientPriors, class_counts, estimate_log_prior
from fedcache.models.evaluate import (
    LabelledRows,
    Measures,
    PriorAccuracy,
    measure,
    measure_prior,
    model_labels,
    rows_of_store,
)
from fedcache.models.model import Model
from fedcache.models.predictor import (
    Prediction,
    Predictor,
    array_keys,
    encoders_of,
    find_inputs,
    predict_embeddings,
    predict_images,
    predict_store,
    rows_of_split,
)
from fedcache.models.saved_model import (
    ModelFacts,
    ModelOptions,
    NewClient,
    PersonaliseOptions,
    PredictOptions,
    SavedModel,
    personalise,
    settled,
    trains,
)
from fedcache.models.saved_model import check_place as check_output
from fedcache.notebooks import percent
from fedcache.parsing import Facts, Record
from fedcache.process import Stop, usual_torch_state
from fedcache.progress import Observer, Silent, piece_of_work
from fedcache.runs.directory import (
    INDEX,
    MODELS,
    check_place,
    client_columns,
    code_digest,
    command_again,
    command_saving,
    header_of_models,
    is_private,
    read_result,
    result_of,
    run_folder,
    train_table,
)
from fedcache.runs.origin import store_behind
from fedcache.runs.partitions import load_partition
from fedcache.store.files import digest_of, file_sha256, read_sealed
from fedcache.store.store import Store
from fedcache.tables.embeddings import open_embeddings
from fedcache.tables.splits import SPLIT_NAMES
from fedcache.tables.words import some_names

# Scores the clients of a run on their own test rows, without and with a client prior.
#
# For this, the module finds the run of a model and the rows of that run, for ``evaluate_run`` too.

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


def find_run(place: Path, digest: str, home: Home) -> tuple[Path, Facts] | None:
    """The directory and result of a model's run, searched next to the model and in the home; None if it is gone."""
    for folder in (run_folder(place), home.runs / digest[:16]):
        with suppress(FedcacheError):  # a damaged run
            found = result_of(folder, digest)
            if found is not None:
                return folder, found
    return None


def partition_of_seed(
    folder: Path, result: Record, seed: int, store: Store | None
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
                f"--client-prior {kind} cannot be used for a run with differential privacy. --client-prior {kind} "
                "reads the class counts of all clients, and the privacy guarantee of the run (epsilon) does not cover "
                "these counts.",
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


def model_file(run: Path, seed: int) -> Path:
    """The path of the models of a seed."""
    return run / MODELS / f"seed-{seed}.safetensors"


def seeds_of(run: Path, word: str | None) -> list[int]:
    """The seeds of a run that ``word`` requests: a number, ``all``, or None for the first seed with a model.

    Raises StoreError for a run without a result, UsageError for another word; for None, errors as of ``load_seed``.
    """
    result = finished_result(run)
    seeds = [int(seed) for seed in result["seeds"]]
    if word is None:
        # A listed model whose file is missing is not passed over: ``load_seed`` refuses it.
        listed = _index_of(run, result)
        with_model = [seed for seed in seeds if model_file(run, seed).name in listed["files"]]
        return (with_model or seeds)[:1]
    if word == "all":
        return seeds
    try:
        return [int(word)]
    except ValueError:
        numbers = ", ".join(map(str, seeds))
        raise UsageError(
            f"--seed {word!r} is not a seed of the run.", f"Use --seed with {numbers} or all."
        ) from None


def finished_result(run: Path) -> Facts:
    """The result in a directory. Raises StoreError for a run without one, DamagedRunError for one that was changed."""
    if not (run / "result.json").exists():
        raise StoreError(
            f"{run} is not a finished run.", "fedcache runs list   lists the finished runs."
        )
    result = read_result(run / "result.json")
    check_place(run, result)
    return result


def _index_of(run: Path, result: Record) -> Facts:
    """The content of the list of a run's models; errors as of ``load_seed``."""
    hint = train_again(run, result)
    try:
        found = read_sealed(run / MODELS / INDEX, header_of_models(str(result["digest"])))
    except CorruptionError as error:
        raise CorruptionError(error.message, hint) from error
    if found is None:
        raise StoreError(f"The run {run.name} has no saved model.", hint)
    content: Facts = found.content
    return content


def load_seed(run: Path, seed: int | None = None) -> SavedModel:
    """The models of one seed of a finished run; None is the first seed with a model.

    Raises StoreError for a run without models, UsageError for a seed that the run does not have, CorruptionError for
    files that were changed or belong to another result.
    """
    result = finished_result(run)
    hint = train_again(run, result)
    index = _index_of(run, result)
    seeds = [int(number) for number in result["seeds"]]
    if seed is None:
        seed = seeds_of(run, None)[0]
    elif seed not in seeds:
        numbers = ", ".join(map(str, seeds))
        raise UsageError(f"The run has no seed {seed}.", f"The run has the seeds {numbers}.")
    path = model_file(run, seed)
    listed = index["files"].get(path.name)
    if listed is None:
        raise StoreError(f"The run has no model of seed {seed}.", hint)
    if index["result"] != digest_of(result):
        raise CorruptionError(
            f"The models in {run / MODELS} and the result in {run / 'result.json'} are from different trainings.",
            hint,
        )
    if not path.is_file() or file_sha256(path) != listed["sha256"]:
        raise CorruptionError(f"{path} is missing or was changed.", hint)
    return SavedModel.load(path)


def train_again(run: Path, result: Record) -> str:
    """A hint: the command that trains the models of a finished run again, and its cost."""
    command = command_again(run, "--fresh")
    own_name = str(result["digest"])[:16]
    if run.name != own_name:  # moved or copied; the command makes it under its own name
        return f"To train the run again, in the directory {own_name} of your runs:  {command}"
    if is_private(result):
        return (
            "The run is private. A new training draws new noise, spends as much privacy again (fedcache ls "
            f"--privacy) and replaces the result.  {command}"
        )
    return f"To train the run again and save a model:  {command}"


MOST_SCORED = 1_000_000
"""Limit for test rows of clients, each row counted once per client. Above it, only every k-th client is scored."""


def open_predictor(
    place: Path,
    options: ModelOptions,
    home: Home,
    observer: Observer,
    device: str = "auto",
    method: Method | None = None,
) -> Predictor:
    """The requested model, ready to score; ``auto`` is the CPU, where light heads are fast.

    Args:
        place: the directory of a run, or a model file.
        options: client, seed and temperature.
        home: with the weights of live encoders.
        observer: receives a warning if other code made the model.
        device: auto, cpu or cuda, which is never replaced by another device.
        method: the user's own method, if the run was trained with one.

    Raises UsageError, StoreError, CorruptionError, as ``run_models.load_seed``; MachineError for missing weights of
    live encoders.
    """
    members = open_members(place, options, observer)
    check_saved(place, members[0], options)
    check_weights(options, [members[0].facts.backbones])
    predictor = predictor_of(members, options, home, device, method)
    return with_client_prior(predictor, place, options, home, observer)


def open_members(place: Path, options: ModelOptions, observer: Observer) -> tuple[SavedModel, ...]:
    """The models of the requested seeds; arguments and errors as ``open_predictor``."""
    if options.one_for_all and options.client is not None:
        raise UsageError(
            "--client and --global are both given, but they select different models.",
            "Leave one of them out.",
        )
    if place.suffix == ".safetensors":
        members: tuple[SavedModel, ...] = (SavedModel.load(place),)
        seed = members[0].facts.seed
        if options.seed not in (None, str(seed)):
            raise UsageError(
                f"The file contains the model of seed {seed}, not of seed {options.seed}.",
                "Leave --seed out, or give the run instead of the file.",
            )
    else:
        members = tuple(load_seed(place, number) for number in seeds_of(place, options.seed))
    if options.client is not None:
        check_saved(place, members[0], options)
    warn_of_other_code(members[0].facts, observer)
    return members


def check_saved(place: Path, model: SavedModel, options: ModelOptions) -> None:
    """Refuse a client whose personal model was not saved, with the command that saves it.

    Raises UsageError, StoreError. If some personal models are saved, ``SavedModel.number_of`` refuses names of no
    client. It also refuses clients of a model file without its run.
    """
    facts = model.facts
    client = options.client
    if options.one_for_all or not facts.personal:
        return
    any_client = client is None and bool(facts.saved)
    if client in facts.saved or any_client:
        return
    result = result_of(place, facts.run)
    if result is None:
        return
    folder = run_folder(place)
    names: Sequence[str] = []
    if client is not None:
        names = client_columns(result, folder).names
    if client is not None and client not in names:
        if facts.saved:
            return
        raise unknown("client", client, names)
    if is_private(result) and not facts.saved:
        raise StoreError(
            "A run with differential privacy saves no personal models, because its privacy guarantee (epsilon) does "
            "not cover these models.",
            "To use the model of the server: --global",
        )
    if not facts.saved:
        message = f"The run has no saved personal models ({facts.clients:,} clients)."
        raise StoreError(message, command_saving(folder, client or "all"))
    names_to_save = ",".join([*model.clients, str(client)])
    raise UsageError(
        f"The model of client {client!r} was not saved.", command_saving(folder, names_to_save)
    )


def warn_of_other_code(facts: ModelFacts, observer: Observer) -> None:
    """Warn if another version of a built-in method trained the model. The model is used nevertheless.

    A model is used long after a release. Most changes of the code do not change its predictions, but a digest does not
    show which changes do. There is no warning for a user's own method, because the user chooses its code.
    """
    if facts.method not in NAMES or not facts.code:
        return
    installed_code = code_digest(facts.method)
    if facts.code == installed_code:
        return
    made_by = facts.code[:8]
    installed = installed_code[:8]
    observer.warn(
        f"The model was trained by another version of {facts.method} ({made_by}) than the installed one "
        f"({installed}), so its predictions may differ from those that the run scored. To check:  "
        "fedcache evaluate RUN --store STORE --split test"
    )


def predictor_of(
    members: tuple[SavedModel, ...],
    options: ModelOptions,
    home: Home,
    device: str,
    method: Method | None = None,
) -> Predictor:
    """A predictor of opened models; arguments and errors as ``open_predictor``."""
    where, encoders = _encoders_on(device, members[0], options, home)
    client = options.client
    if options.client_prior != "none" and not members[0].facts.personal:
        client = None  # the client only selects the prior
    return Predictor(
        members,
        client,
        options.temperature,
        device=where,
        method=method,
        encoders=encoders,
        one_for_all=options.one_for_all,
    ).checked()


def _encoders_on(
    device: str, model: SavedModel, options: ModelOptions, home: Home
) -> tuple[str, FrozenEncoders | None]:
    """The device that computes, where ``auto`` is the CPU, and the live encoders of a model on it."""
    where = "cpu"
    if device != "auto":
        where = resolve_device(device).kind
    encoders = encoders_of(model, home, paths_of(options.weights))
    if encoders is not None:
        encoders = encoders.to(where)
    return where, encoders


@usual_torch_state()
def load_model(
    place: str | Path,
    client: str | None,
    seed: int | str | None,
    method: Method | None,
    *,
    one_for_all: bool = False,
    client_prior: str = "none",
) -> Model:
    """The model of a run's directory or of a model file; arguments and errors as of ``fedcache.load_model``."""
    home = Home.from_environment()
    seed_word = None
    if seed is not None:
        seed_word = str(seed)
    options = ModelOptions(client, one_for_all, seed_word, client_prior=client_prior)
    return Model(open_predictor(Path(place), options, home, Silent(), method=method), home)


def check_weights(options: ModelOptions, read: Iterable[Sequence[str]]) -> None:
    """Raise UsageError for weights and backbones that no model reads; ``read`` are the backbones of each model."""
    known = list(dict.fromkeys(chain.from_iterable(read)))
    for option, named in (("--weights", options.weights), ("--backbone", options.backbone)):
        unread = [name for name in named if name not in known]
        if unread:
            listed = ", ".join(unread)
            used = ", ".join(known)
            raise UsageError(
                f"{option} contains {listed}, but the model does not use this backbone.",
                f"The model uses {used}.",
            )


def predict_rows(
    predictor: Predictor,
    images: Sequence[Path],
    options: ModelOptions,
    rows: PredictOptions,
    config: ExtractConfig,
    home: Home,
    observer: Observer,
    stop: Stop,
) -> Iterator[Prediction]:
    """Predictions for images, or for the rows that ``rows`` names, block by block.

    ``config`` is that of the extraction from images. Raises as ``models.predictor``, also while the rows are iterated;
    StoppedError after a stop.
    """
    predictor.check_top(rows.top)
    if images:
        named = find_inputs(predictor.members[0], images, follow_links=config.follow_links)
        weights = paths_of(options.weights)
        return predict_images(
            predictor, named, config, home, observer, stop, top=rows.top, weights=weights
        )
    if rows.store is not None:
        store = need_store(home, path=rows.store)
        numbers = rows_of_split(store, rows.split)
        predictions = predict_store(predictor, store, store.samples.name, numbers, rows.top)
        return each_counted(predictions, len(numbers), observer, stop)
    path = Path(str(rows.embeddings))
    embeddings = open_embeddings(path)
    predictions = predict_embeddings(predictor, embeddings, path, top=rows.top)
    return each_counted(predictions, len(embeddings.names), observer, stop)


def each_counted(
    rows: Iterable[Prediction], total: int, observer: Observer, stop: Stop
) -> Iterator[Prediction]:
    """Yield rows unchanged, and report their progress. Raises StoppedError after a stop."""
    with counted(observer, stop, "classifying", total) as done:
        for number, row in enumerate(rows, 1):
            yield row
            if not number % BLOCK:
                done(BLOCK)


@contextmanager
def counted(
    observer: Observer, stop: Stop, title: str, total: int
) -> Iterator[Callable[[int], None]]:
    """A context with a function that counts finished rows; the function raises StoppedError after a stop."""
    so_far = 0

    def done(rows: int) -> None:
        nonlocal so_far
        so_far += rows
        observer.advance(rows)
        if stop.requested and so_far < total:
            raise StoppedError(
                f"Stopped after {so_far:,} of {total:,} rows; no partial output is kept.",
                "Run the same command again to start over.",
            )

    with piece_of_work(observer, title, total, "rows"):
        yield done


# The personal model of a new client of a finished run. Its store is read as the run read its own store.


LONGEST_NAME = 200
"""Maximum number of characters in a client's name for which the name is also used for the client's file."""


@dataclass(frozen=True, repr=False)
class Personalised:
    """A model of a new client that was written."""

    client: str
    method: str
    path: Path  # of the file
    rows: int  # training rows
    rounds: int  # of training; 0 for a method that needs none
    measures: Measures | None  # on the store's test rows; None without labelled test rows

    def model(self) -> Model:
        """The model, ready to classify images or features. Raises as ``fedcache.load_model``."""
        return load_model(self.path, client=None, seed=None, method=None)

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the store's test rows, a fraction; None without labelled test rows."""
        if self.measures is None:
            return None
        return self.measures.all.accuracy

    def __repr__(self) -> str:
        shown = percent(self.accuracy) or "not measured"
        model = f"{self.method} from {self.rows:,} rows"
        return f"Personalised({self.client}, {model}: {shown}, {self.path})"

    def to_dict(self) -> Facts:
        """The ``data`` of the JSON output."""
        measures = None
        if self.measures is not None:
            measures = self.measures.to_dict()
        return {**self.__dict__, "path": str(self.path), "measures": measures}


def personalise_run(
    place: Path,
    options: ModelOptions,
    request: PersonaliseOptions,
    device: str,
    home: Home,
    observer: Observer,
    stop: Stop,
) -> Personalised:
    """Train, measure and write the model of a new client.

    Raises UsageError for a file that exists already and for several seeds, StoreError for a store without the model's
    features or labelled training rows, StoppedError after a stop; other errors as ``saved_model.personalise`` and
    ``open_members``.

    Args:
        place: the directory of a run, or a model file.
        options: seed and weights of the run's model.
        request: store, name, settings, rounds and file.
        device: auto, cpu or cuda, which is never replaced by another device; auto is the CPU.
        home: with stores and weights.
        observer: receives the rounds.
        stop: checked before each round.
    """
    store = need_store(home, path=request.store)
    shard = store.dataset.get("shard", {})
    name = request.name or str(shard.get("client", store.path.stem))
    is_file_name = Path(name).name == name and len(name) <= LONGEST_NAME
    if request.out is None and not is_file_name:
        raise UsageError(
            f"--name {name[:40]!r} cannot be a file name.",
            "Give the file to write: -o FILE.safetensors",
        )
    path = Path(request.out or f"{name}.safetensors")
    check_output(path)
    if path.exists():
        raise UsageError(
            f"{path} exists already.",
            "Choose another file, -o another.safetensors, or remove this file.",
        )
    members = open_members(place, options, observer)
    check_weights(options, [members[0].facts.backbones])
    if len(members) > 1:
        seed = members[0].facts.seed
        raise UsageError("A personal model needs one seed.", f"--seed {seed}")
    (model,) = members
    method = model.find_method()
    hp = settled(model, method, request.set)
    if name in model.facts.saved:
        observer.note(
            f"{name} has the name of a client of the run, so its training uses the random numbers of that "
            "client."
        )
    client = client_of_store(model, store, name, method.reads(hp), home)
    left_out = rows_of_unknown_classes(store, model.facts.classes)
    if left_out is not None:
        observer.warn(left_out)
    where, encoders = _encoders_on(device, model, options, home)
    # A method that computes its personal part without training needs no rounds.
    rounds = 0
    if trains(method):
        rounds = model.facts.rounds
        if request.rounds is not None:
            rounds = request.rounds

    def each_round() -> None:
        if stop.requested:
            raise StoppedError(
                "Stopped before the model was trained.", "Run the same command again."
            )
        observer.advance(1)

    with piece_of_work(observer, f"training {name}", rounds, "rounds"):
        personal = personalise(
            model,
            client,
            settings=request.set,
            rounds=rounds,
            encoders=encoders,
            device=where,
            each_round=each_round,
        )
    try:
        test = rows_of_store(store, "test", model.facts.classes)
    except StoreError as error:
        observer.note(f"The model is not evaluated: {error.message}")
        figures = None
    else:
        predictor = Predictor((personal,), name, device=where, encoders=encoders)
        figures = measure(predictor, test)
    personal.save(path)
    return Personalised(name, model.facts.method, path, len(client.train), rounds, figures)


def rows_of_unknown_classes(store: Store, classes: Sequence[str]) -> str | None:
    """A sentence on labelled rows of classes that the model does not know; None if there are none."""
    s = store.samples
    label = np.asarray(s.label, np.int64)
    labelled = (label >= 0) & (s.ok == 1)
    left_out = labelled & (model_labels(label, s.classes, classes) < 0)
    if not left_out.any():
        return None
    names = [s.classes[number] for number in np.unique(label[left_out])]
    few = some_names(names, 5)
    total = int(labelled.sum())
    count = int(left_out.sum())
    return (
        f"{count:,} of {total:,} labelled rows of {store.path.name} are left out, because the model does not have "
        f"their classes ({few})."
    )


def client_of_store(
    model: SavedModel, store: Store, name: str, reads: Sequence[str] | frozenset[str], home: Home
) -> NewClient:
    """A store as a client of the model's run.

    Raises StoreError for a store without the model's arrays, without views that the method reads, or without training
    rows of classes that the model knows.

    Args:
        model: of the run.
        store: with the client's rows.
        name: of the client.
        reads: inputs that clients of the method read.
        home: its scratch folder holds features that do not fit into memory.
    """
    facts = model.facts
    s = store.samples
    readers = [store.reader(key) for key in array_keys(model, store)]
    views = min(facts.views, *(reader.shape[1] for reader in readers))
    if "views" in reads and views < facts.views:
        stored = f"{store.path.name} has {views} view(s) of each image"
        backbones = shell_word(",".join(facts.backbones))
        raise StoreError(
            f"{stored}, but {facts.method} was trained on {facts.views} views.",
            f"fedcache extract --views {shell_word(facts.views)} --backbones {backbones}",
        )
    if facts.image is not None:
        images = readers[-1].all()[:, 0]
        if images.shape[1:3] != facts.image:
            height, width = facts.image
            size = " x ".join(map(str, images.shape[1:3]))
            raise StoreError(
                f"The model reads images of {height} x {width}, but {store.path.name} contains {size}.",
                f"fedcache extract --backbones pixels --size {shell_word(height)}",
            )
        x = torch.from_numpy(np.ascontiguousarray(images)).view(len(images), 1, -1)
    else:
        scratch = home.root / "scratch"
        x, _ = prepare_features(
            readers, facts.feat_post, scaling=model.scaling, views=views, scratch=scratch
        )
        x = x.to(getattr(torch, facts.dtype))
    label = model_labels(np.asarray(s.label, np.int64), s.classes, facts.classes)
    train = (s.split == SPLIT_NAMES.index("train")) & (s.ok == 1)
    if "labels" in reads:
        train &= label >= 0
    if not train.any():
        known = some_names(facts.classes, 5)
        raise StoreError(
            f"{store.path.name} has no training rows with classes of the model.",
            f"The classes of the model are {known}.",
        )
    return NewClient(name, x, torch.from_numpy(label), np.flatnonzero(train))
