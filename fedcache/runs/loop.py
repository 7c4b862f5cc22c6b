"""The steps of a run: it is prepared, opened, trained seed by seed, and finished.

The seed is the unit that is stored. A run trains the seeds of its command that are not stored yet. A seed whose
training was killed resumes from its last checkpoint. The result is made from all seeds in the directory of the run.

A run alone is one point. Points of a grid that differ only in floats may be trained together if that is faster. Each
point is a run with its own directory, checkpoints and result.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedcache.config import Home, PartitionConfig, SaveModels, TrainConfig
from fedcache.errors import (
    CorruptionError,
    FedcacheError,
    FederatedRunError,
    InternalError,
    MachineError,
    StoppedError,
    UsageError,
    unknown,
)
from fedcache.federate.engine.method import (
    Method,
    clients_per_round,
    keep_down,
    less_training_state,
)
from fedcache.federate.engine.outcome import Snapshot, TrainingOutput
from fedcache.federate.engine.run import RunCallbacks, TrainingRun, plan, run_points
from fedcache.federate.engine.run import run as train_part
from fedcache.federate.execution.grid_batch import GridCache
from fedcache.federate.execution.memory_estimate import (
    ExecutionPlan,
    Forecast,
    Load,
    forecast,
    free_memory_on,
    refuse_too_little_room,
    refuse_too_much,
)
from fedcache.federate.execution.state_table import check_table
from fedcache.federate.methods import METHODS, find_method
from fedcache.federate.partition.client_table import ClientTable, RowLists, names_of
from fedcache.federate.partition.partition import Partition
from fedcache.models.calibrate import scores_of_rows, temperature_of
from fedcache.models.client_prior import (
    ClientPrior,
    ClientPriors,
    add_offset,
    class_counts,
    estimate_log_prior,
)
from fedcache.models.saved_model import (
    MOST_BYTES,
    ModelFacts,
    SavedModel,
    chosen_clients,
    collect,
    computed_as,
)
from fedcache.parsing import Facts, Record, seeds_text
from fedcache.process import Stop
from fedcache.progress import Detail, Observer, Silent, piece_of_work
from fedcache.runs.base_to_new import (
    BaseClassRows,
    base_to_new,
    check_base_to_new,
    check_new_classes,
    predictions,
)
from fedcache.runs.directory import (
    INDEX,
    MODELS,
    DamagedRunError,
    Identity,
    RunDirectory,
    check_recordable,
    code_of,
    code_with_plugins,
    ends_one_run,
    has_model,
    header_of_models,
    is_private,
    measured_of,
    owning,
)
from fedcache.runs.events import ALONE, GridPosition, OnRound, RunEvents, replay_stored, with_hooks
from fedcache.runs.features import (
    OneStore,
    Preparation,
    RowSource,
    RunInputs,
    ShardRows,
    StoreRows,
    on_device,
    training_device,
)
from fedcache.runs.origin import check_text
from fedcache.runs.partitions import pinned_name
from fedcache.runs.predict_run import MOST_SCORED, model_file
from fedcache.runs.privacy_ledger import (
    LEDGER,
    Release,
    describe_privacy,
    forget_reported_rounds,
    keep_reported_rounds,
    read_releases,
    record_release,
    reported_rounds,
)
from fedcache.runs.results import (
    SeedResult,
    files_of_clients,
    partition_facts,
    partition_section,
    seed_result,
    summarise,
)
from fedcache.runs.run import Run
from fedcache.runs.score import DIGITS, Order, choice_value, order_of_run, values_held_out
from fedcache.runs.spec import (
    ResolvedRun,
    check_config,
    check_participation,
    hyperparameters,
    parse_seeds,
    setting_notes,
)
from fedcache.runs.transfer import digests_of_targets, open_targets, transfer
from fedcache.store.files import (
    digest_of,
    file_sha256,
    free_memory,
    make_private,
    read_sealed,
    write_sealed,
)

# Class-incremental scores: the classes arrive in stages, and each stage trains on the classes that have arrived.
#
# A method whose uploads are sums over rows adds the rows of new classes to the sums of the earlier ones, so after
# stage t it has the model of all rows of the first t groups of classes and keeps no row (Fani et al., "Accelerating
# heterogeneous federated learning with closed-form classifiers", ICML 2024; Guan et al., "STSA: Federated
# class-incremental learning via spatial-temporal statistics aggregation", arXiv:2506.01327). fedcache trains this
# model from these rows, which gives the same sums. Rows of a class that has not arrived are neither trained on nor
# tested, and the class is not predicted.


def stage_of_classes(classes: int, stages: int, seed: int) -> NDArray[np.int64]:
    """int64 [C]: the stage in which each class arrives, from 0; the order of the classes is drawn with the seed."""
    order = np.random.default_rng(seed).permutation(classes)
    stage_of = np.empty(classes, np.int64)
    for stage, group in enumerate(np.array_split(order, stages)):
        stage_of[group] = stage
    return stage_of


def stage_scores(
    spec: TrainingRun, out: TrainingOutput, partition: Partition, stages: int
) -> Facts:
    """Accuracies as fractions of pooled test rows, and the stage of each class.

    Let a_ts be the accuracy on the test rows of the classes of stage s after stage t, and A_t the accuracy on the test
    rows of all classes of the stages up to t. Then ``average`` is the mean of A_t, ``final`` is the last A_t, and
    ``forgetting`` is the mean over s < T of max_t<T a_ts - a_Ts (Chaudhry et al., ECCV 2018). ``after_each_stage`` has
    A_t, and ``by_stage`` has the lists of a_ts, s <= t. A stage without test rows has the accuracy None, and the means
    leave it out.

    Args:
        spec: the run.
        out: of the run, on all classes; it is the last stage.
        partition: of the run.
        stages: T, at most the number of classes.

    Raises FederatedRunError if the classes of the first stages have no training rows.
    """
    stage_of = stage_of_classes(spec.data.classes, stages, spec.seed)
    label = spec.data.y.cpu().numpy()
    # Class -1 of rows without a label takes the stage of the last class, so these rows are taken out.
    row_stage = np.where(label >= 0, stage_of[label], stages)
    train = partition.table.train
    test = partition.test
    after_each = []
    by_stage = []
    for stage in range(stages):
        outcome = out
        if stage < stages - 1:
            arrived = row_stage[train.rows] <= stage
            if not arrived.any():
                number = stage + 1
                raise FederatedRunError(
                    f"The classes of stage {number} have no training rows.",
                    "Use fewer stages, or leave --stages out.",
                )
            sizes = np.bincount(train.owner[arrived], minlength=len(train))
            lists = RowLists.of_sizes(train.rows[arrived], sizes)
            names = partition.table.names
            clients = ClientTable.dealt(names, lists, np.empty(0, np.int64), None)
            outcome = train_part(replace(spec, clients=clients, eval_every=0), out.hp)
        model = outcome.deployed(None)
        assert model is not None  # additive methods have one global model
        rows = test[row_stage[test] <= stage]
        predicted = predictions(model, spec, rows, torch.from_numpy(stage_of > stage))
        right = predicted == label[rows]
        after_each.append(_share(right))
        by_stage.append([_share(right[row_stage[rows] == s]) for s in range(stage + 1)])
    forgotten = []
    for s in range(stages - 1):
        earlier = [accuracies[s] for accuracies in by_stage[s : stages - 1]]
        last = by_stage[-1][s]
        if last is not None:
            forgotten.append(max(value for value in earlier if value is not None) - last)
    known = [accuracy for accuracy in after_each if accuracy is not None]
    average = None
    if known:
        average = float(np.mean(known))
    forgetting = None
    if forgotten:
        forgetting = float(np.mean(forgotten))
    return {
        "average": average,
        "final": after_each[-1],
        "forgetting": forgetting,
        "after_each_stage": after_each,
        "by_stage": by_stage,
        "stage_of_class": stage_of.tolist(),
    }


def _share(right: NDArray[np.bool_]) -> float | None:
    if not len(right):
        return None
    return float(right.mean())


# The trained models of a run: which are kept, written with each seed, sealed with the result, and read back.
#
#     RUN/models/seed-0.safetensors   the models of one seed (``models.saved_model``)
#     RUN/models/models.json          sealed: sha256 of each of these files, and of the result they belong to
#
# A seed's model is complete on disk before the seed counts as ended, and ``models.json`` is written just before
# ``result.json``. So a killed run has no result, or it has all of its models. The digests of a result do not depend
# on models: a result has the same bits with and without them, and removing models damages nothing.

KEPT = ("all", "best", "none")
COPIES = 4
"""Copies of clients' tensors during writing: rows, a stack, and twice bytes (measured with 500 and 1,000 MB)."""


class KeptModels:
    """Decides which models of the runs of one command are kept. Raises UsageError for an unknown choice."""

    def __init__(self, options: SaveModels, score: str | None = None) -> None:
        if options.which not in KEPT:
            raise unknown("--save-models", options.which, KEPT)
        self.which = options.which
        self.clients = options.clients
        self.score = score
        # The keys are method and held-out values, because models with different test rows are not compared.
        # highest value so far by which runs are selected
        self._seen: dict[tuple[str, ...], float] = {}
        # the best run that has ended: its sort key, its directory and its digest
        self._best: dict[tuple[str, ...], tuple[tuple[float, Order, str], Path, str]] = {}

    def check_clients(self, names: Sequence[str]) -> None:
        """Raise UsageError before training if a client to save is not in ``names``."""
        if self.clients is not None:
            chosen_clients(names, self.clients)

    def check_room(
        self, method: Method, load: Load, peak: Forecast, names: Sequence[str], free: int
    ) -> None:
        """Raise MachineError before training if the requested models of clients do not fit into memory to be written.

        The part of a client is assumed to be as large as its state between rounds. A probe or an adapted model is
        assumed to be as large as the model that the client trains.

        Args:
            method: of the run.
            load: sizes of the run.
            peak: memory of the training; the state of clients and server is still in memory at the end.
            names: of the clients.
            free: bytes of memory.
        """
        if self.which == "none" or self.clients in (None, "none"):
            return
        numbers = chosen_clients(names, self.clients)
        # A state may also hold tensors that only training reads and that are not saved; then the model is smaller.
        per_client = min(load.state_bytes, load.head_bytes)
        # an adapted model with its optimiser, or a cache of rows
        if method.personal_part is not less_training_state:
            per_client = 2 * load.head_bytes + int(load.rows.mean()) * load.width * load.itemsize
        # a probe that is trained for the model, in addition to the other tensors
        if method.deploy is not keep_down:
            per_client += load.head_bytes
        clients = len(numbers)
        size = per_client * clients
        in_use = peak.above - peak.working
        if in_use + COPIES * size > free:
            megabytes = size / 1e6
            free_megabytes = free / 1e6
            most = MOST_BYTES / 1e6
            raise MachineError(
                f"The models of {clients:,} clients take {megabytes:,.0f} MB. To write the models, fedcache needs "
                f"{COPIES} times as much memory, but only {free_megabytes:,.0f} MB are free.",
                "To save the models of only some clients: --save-clients NAME,NAME. Without --save-clients, fedcache "
                f"saves personal models only if they take at most {most:,.0f} MB.",
            )

    def note_on_stored(self, run: Path) -> str | None:
        """A note if a stored run keeps other models than this command requests; None otherwise."""
        if not has_model(run):
            if self.which == "all":
                return "The stored run has no saved model; --fresh trains the run again and saves a model."
            return None
        if self.which == "none":
            return "The stored run keeps its models. To list them:  fedcache gc --kind models"
        if self.clients is not None:
            return (
                "The stored run has only the models that were saved when it was trained. To save the models of "
                "--save-clients, add --fresh."
            )
        return None

    def wants(
        self, method: str, accuracy: float | None, seeds: int, held_out: Sequence[str]
    ) -> bool:
        """Whether to write the model of a seed that has just ended. With several seeds, all models are written.

        ``held_out`` are the values whose rows are the test set.
        """
        compared = self.which == "best" and seeds <= 1 and self.score is None
        if not compared:
            return self.which != "none"
        kind = (method, *held_out)
        seen = self._seen.get(kind, -1.0)
        if accuracy is None or round(accuracy, DIGITS) < round(seen, DIGITS):
            return False
        self._seen[kind] = max(accuracy, seen)
        return True  # also for an equal accuracy: the better run is known when this run ends

    def ended(self, path: Path, result: Record) -> None:
        """Compare a finished run with the best one so far, and remove the models of the worse run of the two."""
        if self.which != "best":
            return
        mean = choice_value(result, self.score or "own")
        digest = str(result["digest"])
        kind = (str(result["method"]), *values_held_out(result))
        best = self._best.get(kind)
        # Several points of a grid may have this run: a method of a single round ignores --rounds.
        if best is not None and path == best[1]:
            return
        # The same order as in ``Grid.ranked``.
        order = (-round(mean or 0.0, DIGITS), order_of_run(result), digest)
        is_worse = best is not None and order >= best[0]
        if mean is None or is_worse:
            drop_unless_requested(path, digest)
            return
        self._best[kind] = (order, path, digest)
        self._seen[kind] = max(mean, self._seen.get(kind, -1.0))
        if best is not None:
            _, old_path, old_digest = best
            drop_unless_requested(old_path, old_digest)


def facts_of_seed(
    inputs: RunInputs,
    spec: ResolvedRun,
    identity: Identity,
    out: TrainingOutput,
    temperature: float | None,
) -> ModelFacts:
    """The description of the models of a seed that has just ended; ``temperature`` is that of ``models.calibrate``."""
    data = inputs.data
    features = inputs.features
    # A model with live encoders reads images: its first backbone is the encoder.
    template = None
    encoder = None
    if data.towers is not None:
        template = data.towers.template
        encoder = 0
    return ModelFacts(
        run=identity.digest,
        seed=out.seed,
        dataset=str(inputs.dataset["slug"]),
        method=out.method,
        code=identity.code,
        hp=out.hp,
        protocol=out.protocol,
        rounds=len(out.records),
        dtype=spec.requested.dtype,
        classes=tuple(inputs.classes),
        keys=features.arrays,
        recipes=features.recipes,
        widths=data.widths or (data.x.shape[2],),
        views=data.x.shape[1],
        feat_post=features.feat_post,
        clients=len(out.clients),
        saved={},
        image=data.image,
        names=data.names,
        template=template,
        encoder=encoder,
        overrides=inputs.overrides,
        computed=computed_as(features.how),
        temperature=temperature,
    )


def save_seed(
    run: Path,
    inputs: RunInputs,
    spec: ResolvedRun,
    facts: ModelFacts,
    out: TrainingOutput,
    kept: KeptModels,
) -> tuple[bool, list[str]]:
    """Write the models of a seed that has just ended, whose description is ``facts``.

    Returns whether any model was written, and notes on models that were not. Raises UsageError for a client to save
    that the run does not have.
    """
    clients = kept.clients
    notes = []
    if spec.trust.protects and facts.personal:
        # A client's own part has no noise. An untrained part also reveals that its client was never drawn.
        clients = "none"
        notes.append(
            "Personal models are not saved, because epsilon does not cover personal models."
        )
    try:
        model = collect(out, facts, inputs.data, inputs.features.scaling, notes, clients)
    except UsageError as error:
        # A client that the user named must be saved; otherwise, a note is enough.
        if kept.clients not in (None, "all", "none"):
            raise
        return False, [f"No model is saved: {error.message} {error.hint}"]
    if model is None:
        return False, []
    make_private(run / MODELS)
    model.save(model_file(run, out.seed))
    return True, notes


def seal(run: Path, digest: str, result: str, seeds: Sequence[int], kept: KeptModels) -> None:
    """Write the list of the models of these seeds; nothing if no model was written.

    ``digest`` is that of the run, ``result`` that of its result.
    """
    index = run / MODELS / INDEX
    files = [model_file(run, seed) for seed in seeds]
    files = [file for file in files if file.is_file()]
    if not files:
        return
    which = kept.which
    with suppress(CorruptionError):
        before = read_sealed(index, header_of_models(digest))
        # Models that another command keeps stay, also if a grid that keeps the best model adds seeds.
        if before is not None and before.content["kept"] != "best":
            which = before.content["kept"]
    listed = {}
    for file in files:
        listed[file.name] = {"sha256": file_sha256(file), "bytes": file.stat().st_size}
    content = {"result": result, "files": listed, "kept": which}
    write_sealed(index, header_of_models(digest), content)


def whole_seed(run: Path, digest: str, seed: int) -> bool:
    """Whether the model of a seed of an unfinished run is stored and belongs to this run and seed."""
    try:
        facts = SavedModel.load(model_file(run, seed)).facts
    except FedcacheError:
        return False
    return (facts.run, facts.seed) == (digest, seed)


def drop(run: Path, seeds: Sequence[int] | None = None) -> None:
    """Remove the models of some seeds of a run, or of all; the other models are listed again with the next result.

    The list of models is removed first. So another process that reads the run finds no models, and not damaged ones.
    """
    (run / MODELS / INDEX).unlink(missing_ok=True)
    if seeds is None:
        shutil.rmtree(run / MODELS, ignore_errors=True)
        return
    for seed in seeds:
        model_file(run, seed).unlink(missing_ok=True)


def drop_unless_requested(run: Path, digest: str) -> None:
    """Remove the models of a grid's point that is not the best, unless another command keeps them."""
    try:
        found = read_sealed(run / MODELS / INDEX, header_of_models(digest))
    except CorruptionError:
        return
    if found is not None and found.content["kept"] == "best":
        drop(run)


def training_run(inputs: RunInputs, spec: ResolvedRun, seed: int) -> TrainingRun:
    """The engine's description of one seed of a run."""
    return TrainingRun(
        inputs.method,
        inputs.data,
        inputs.partitions[seed].clients,
        rounds=spec.rounds,
        participation=spec.participation,
        sampling=spec.sampling,
        timing=spec.timing,
        seed=seed,
        dtype=spec.dtype,
        eval_every=spec.requested.eval_every,
        eval_clients=spec.eval_clients,
        overrides=inputs.overrides,
        trust=spec.trust,
        identity=digest_of_data(inputs, spec, seed),
        execution=spec.execution,
    )


def digest_of_data(inputs: RunInputs, spec: ResolvedRun, seed: int) -> str:
    """Digest of one seed of a run without its hyperparameters and its execution. It is the key of simulated noise.

    So the noise of a run is the same for every execution, and the same as for this run as a point of a grid. It differs
    between runs whose clients send different values, or whose server uses them differently.
    """
    left_out = {"set", "execution", "together", "device", "engine"}
    settings = {name: value for name, value in spec.to_identity().items() if name not in left_out}
    partition = inputs.partitions[seed]
    parts = [settings, inputs.features.digests, inputs.dataset["digest"], partition.digest]
    return digest_of(parts)


def forecast_run(
    inputs: RunInputs,
    spec: ResolvedRun,
    points: int = 1,
    kept: KeptModels | None = None,
    place: Path | None = None,
) -> tuple[ExecutionPlan, Forecast]:
    """The execution and the memory of a run, or of ``points`` points of a grid together.

    Raises UsageError for a forced execution that is not possible, and for a robust rule that needs more clients in a
    round. Raises MachineError if the peak or the models that are ``kept`` do not fit into memory, or if the state of
    clients between rounds does not fit on the disk of ``place``.
    """
    spec.trust.check_round(clients_per_round(spec.participation, len(inputs.clients)))
    first_seed = training_run(inputs, spec, spec.seeds[0])
    execution, load = plan(first_seed, inputs.settings, points=points)
    peak = forecast(
        load,
        execution,
        opt=str(inputs.settings.get("opt", "sgd")),
        stacked="stack" in inputs.method.pool(inputs.settings).values(),
        closed=not inputs.method.gradient,
    )
    refuse_too_much(peak, load, execution, free_memory_on(load.device), loaded=True)
    personal = inputs.method.protocol(inputs.settings) != "global" and not spec.trust.protects
    if kept is not None and personal:
        kept.check_room(inputs.method, load, peak, names_of(inputs.clients), free_memory())
    if place is not None:
        refuse_too_little_room(load, execution, place)
    return execution, peak


CHECKPOINT_EVERY = 2.0
"""Seconds between checkpoints. A killed run loses at most this time, unless its states are slow to write."""

CHECKPOINT_SHARE = 0.05
"""Maximum share of a run's time that checkpoints take. States that are slow to write are written less often."""


@dataclass(frozen=True)
class TrainingOptions:
    """Options that all runs of a command share."""

    runs: Path  # directory of results
    observer: Observer  # receives notes, warnings and progress
    stop: Stop  # ends the training at a point where no finished round is lost
    fresh: bool = False  # whether to train again even if the result is stored
    # decides which models are saved
    kept: KeptModels = field(default_factory=lambda: KeptModels(SaveModels()))


def train(
    config: TrainConfig,
    home: Home,
    *,
    method: Method | None = None,
    partition: PartitionConfig | None = None,
    runs: Path | None = None,
    repartition: bool = False,
    extract: bool = True,
    fresh: bool = False,
    observer: Observer | None = None,
    hooks: Sequence[OnRound] = (),
    stop: Stop | None = None,
    save: SaveModels | None = None,
) -> Run:
    """Train a method on cached features, over seeds, and return the run of all seeds of this configuration.

    Seeds that are stored already are not trained again.

    Raises UsageError, StoreError, CorruptionError, FederatedRunError; StoppedError after a stop, and the same call then
    resumes the training.

    Args:
        config: what to train; None fields take the defaults of the method's paper.
        home: directory of stores and runs.
        method: a method of the user, instead of the one that ``config`` names.
        partition: how to assign rows, if ``config.partition`` names no saved partition.
        runs: directory of results instead of ``home.runs``.
        repartition: every seed draws its own partition (else all seeds share one).
        extract: whether to run a missing extraction.
        fresh: train again even if the result is stored.
        observer: receives notes, warnings and progress.
        hooks: each is called with every ``Round``, also those of a stored result. ``HookedObserver`` describes what
            happens if one fails.
        stop: set by a signal handler; training ends at a point where no finished round is lost.
        save: which models are kept; by default those of every seed.
    """
    observer = with_hooks(observer, hooks)
    stop = stop or Stop()
    partition = partition or PartitionConfig()
    check_config(config, partition)
    if method is not None:
        code_of(method)  # refused before anything is extracted
    preparation = Preparation(home, observer, stop, extract, repartition)
    source = row_source(config, partition, preparation)
    inputs = prepare_run(config, source, method, home.root / LEDGER)
    kept = KeptModels(save or SaveModels())
    return train_run(
        inputs, config, TrainingOptions(runs or home.runs, observer, stop, fresh, kept)
    )


def train_run(
    inputs: RunInputs, config: TrainConfig, options: TrainingOptions, position: GridPosition = ALONE
) -> Run:
    """Train every seed of a prepared run and store the result. Raises FedcacheError, as ``train``.

    ``position`` is that of the run in a grid.
    """
    inputs, spec = resolve_inputs(inputs, config, options.observer)
    run = open_run(inputs, spec, options, position)
    options.kept.check_clients(names_of(inputs.clients))
    if run.stored is not None:
        return _return_stored(run, run.stored)
    # Raises before anything is written if the run does not fit into memory or on the disk.
    forecast_run(inputs, spec, kept=options.kept, place=run.directory.path)
    return _train_opened(run)


def _train_opened(run: OpenRun) -> Run:
    """Train the missing seeds of one run, and store the result of all its seeds."""
    fresh = run.options.fresh
    with _owning_runs([run]):
        if not fresh:
            run.find_stored()  # another process may have finished it while this one waited
        if run.stored is not None:
            return _return_stored(run, run.stored)
        if run.earlier:
            note_earlier(run)
        run.begin(fresh=fresh)
        failed = train_seeds([run], None)
        if failed:
            raise failed[0]
        return run.finish()


def _return_stored(run: OpenRun, stored: Run) -> Run:
    """Return a result that is stored already; observers receive its rounds as if it were trained now."""
    observer = run.options.observer
    position = run.events.position
    note_stored(stored, observer)
    other_seeds = set(run.earlier) - set(run.spec.seeds)
    if other_seeds:
        seeds = len(run.earlier)
        observer.note(
            f"This run was also trained with seeds {seeds_text(other_seeds)}. The result covers all {seeds} "
            "seeds."
        )
    kept = run.options.kept
    note = kept.note_on_stored(stored.path)
    # In a grid every point would repeat the note, so there it is shown only if the user requested all models.
    if note is not None and (position is ALONE or kept.which == "all"):
        observer.note(note)
    replay_stored(observer, stored.path, stored.result, position)
    return stored


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


# Prepare: find the method, the features and the partitions, and fill in every default.


def prepare_run(
    config: TrainConfig, source: RowSource, method: Method | None = None, ledger: Path | None = None
) -> RunInputs:
    """Resolve method, features and partitions.

    Raises UsageError, StoreError, CorruptionError, MachineError; and the errors of an extraction, if one is run.

    Args:
        config: as the user requested it.
        source: of the rows.
        method: a method of the user, instead of the one that ``config`` names.
        ledger: file of the privacy that runs spend.
    """
    method = method or named_method(config)
    settings = hyperparameters(method, config)
    check_base_to_new(method, settings, config, one_store=isinstance(source, StoreRows))
    seeds = parse_seeds(config.seeds)
    began = time.perf_counter()
    extract_seconds = source.open(method, settings)
    arrays = source.arrays(method, settings)
    partitions, name = source.partitions(method, seeds)
    clients = len(next(iter(partitions.values())).clients)
    check_recordable(clients)
    check_participation(config, clients)  # before features are read
    feat_post = source.feat_post(method, settings, arrays)
    if "feat_post" in settings:
        settings = {**settings, "feat_post": feat_post}
    features = source.read(method, settings, arrays, feat_post)
    # Text features must come from the same weights as the image features.
    if features.data.text is not None and isinstance(source, OneStore):
        check_text(source.store, features.arrays[0])
    domains, classes = source.names()
    load_seconds = time.perf_counter() - began - extract_seconds
    return RunInputs(
        method=method,
        settings=settings,
        features=features,
        backbones=source.backbones(features.arrays),
        dataset=source.dataset(),
        domains=domains,
        classes=classes,
        partitions=partitions,
        partition_name=name,
        repartition=isinstance(source, StoreRows) and source.draws_for_each_seed,
        overrides=source.overrides(method, features, clients),
        choices=source.choices(features.arrays),
        seconds={"extract": extract_seconds, "load": load_seconds},
        ledger=ledger,
        targets=open_targets(config.transfer, method, settings, features),
    )


def named_method(config: TrainConfig) -> Method:
    """The method that a configuration names. Raises UsageError for an unknown or a missing name."""
    if config.method is None:
        names = " | ".join(METHODS)
        raise UsageError("No method was given.", f"--method {names}")
    return find_method(config.method)


def row_source(
    config: TrainConfig, partition: PartitionConfig, preparation: Preparation
) -> RowSource:
    """The row source: client stores of ``--clients-from``, or one store whose rows a partition assigns."""
    if config.clients_from is not None:
        return ShardRows(config, Path(config.clients_from), preparation)
    if config.base_classes is not None:
        return BaseClassRows(config, partition, preparation)
    return StoreRows(config, partition, preparation)


def resolve_inputs(
    inputs: RunInputs, config: TrainConfig, observer: Observer
) -> tuple[RunInputs, ResolvedRun]:
    """Resolve the settings that determine a run, note the chosen ones, and move the inputs to the device that computes.

    Raises UsageError, also if a round needs more clients than there are; MachineError for ``cuda`` without a usable
    GPU.
    """
    spec = inputs.resolve(config)
    clients = len(inputs.clients)
    cost = spec.privacy_cost(clients)
    if cost:
        observer.note(describe_privacy(cost))  # before anything is trained
        # Publishing all rows of one client drawn at random has a delta of 1 / clients.
        delta = cost["delta"]
        limit = 1 / clients
        if cost["noise"] and delta >= limit:
            observer.warn(
                f"A delta of {delta:g} would permit a release of all data of 1 of {clients:,} clients. Choose a "
                f"delta far below {limit:g} (--dp-delta)."
            )
    check_participation(config, clients)
    note_paper_choices(inputs, spec, observer)
    device = training_device(config.device, observer, live=inputs.data.towers is not None)
    return on_device(inputs, device), replace(spec, device=device)


def note_paper_choices(inputs: RunInputs, spec: ResolvedRun, observer: Observer) -> None:
    """Note settings that the paper decides, such as rounds and participation. Warn of settings that have no effect."""
    config = spec.requested
    method = inputs.method
    for note in setting_notes(method, config):
        observer.note(note)
    if method.one_shot and (config.rounds or 1) > 1:
        observer.warn(
            f"{method.name} needs only one round; --rounds {config.rounds} has no effect."
        )
    if config.eval_clients not in (None, "all") and spec.eval_clients is None:
        observer.warn(
            f"{method.name} has one global model, so --eval-clients {config.eval_clients} has no effect."
        )
    default_of = f"default of {method.name}'s paper"
    if config.rounds is None and not method.one_shot:
        observer.note(Detail(f"Rounds: {spec.rounds} ({default_of}; change with --rounds)."))
    if config.participation is None and not method.central:
        share = spec.participation_text
        observer.note(
            Detail(f"Clients per round: {share} ({default_of}; change with --participation).")
        )


# Open: find the directory of the run, and the seeds that are stored in it.


def open_run(
    inputs: RunInputs, spec: ResolvedRun, options: TrainingOptions, position: GridPosition = ALONE
) -> OpenRun:
    """Find the directory of a run, and its result if it is stored, unless every run is trained again.

    Raises CorruptionError for a damaged result.
    """
    identity = Identity(
        _identity_of_config(spec),
        (*inputs.features.digests, *digests_of_targets(inputs.targets)),
        str(inputs.dataset["digest"]),
        _identity_of_partition(inputs),
        code_with_plugins(code_of(inputs.method), spec.plugins),
    )
    for plugin in spec.plugins:
        kind = plugin.kind.removesuffix("s").capitalize()
        options.observer.note(f"{kind} {plugin.name}: from {plugin.origin}.")
    directory = RunDirectory(options.runs, identity)
    partitions = [partition_facts(inputs.partitions[seed]) for seed in spec.seeds]
    facts = {
        "method": spec.method,
        "preset": spec.requested.preset,
        "rounds": spec.rounds,
        "participation": spec.participation_text,
        "dtype": spec.requested.dtype,
        "seeds": spec.seeds,
        "dataset": inputs.dataset,
        "backbones": inputs.backbones,
        "hyperparameters": spec.hyperparameters,
        "partition": partition_section(inputs.partition_name, partitions),
        "trust": {"privacy": spec.privacy_cost(len(inputs.clients))},
        "device": spec.device,
        "code": identity.code,
        "digest": identity.digest,
    }
    events = RunEvents(options.observer, directory.path, facts, position)
    opened = OpenRun(inputs, spec, identity, directory, events, options)
    if options.fresh:
        return opened
    try:
        opened.find_stored()
    except DamagedRunError:
        # Another process that trains the run again may be replacing its files: look again when it has ended.
        with _owning_runs([opened]):
            opened.find_stored()
    return opened


def _identity_of_config(spec: ResolvedRun) -> Facts:
    """The settings of a configuration. The name of the preset is left out, because its hyperparameters are included.

    The name is kept for a run with noise, because it is a part of the key of simulated noise.
    """
    settings = spec.to_identity()
    if spec.trust.privacy is None:
        del settings["preset"]
    return settings


def _identity_of_partition(inputs: RunInputs) -> str:
    """Digest of the partition that all seeds share, else of the scheme by which every seed draws its own."""
    first = next(iter(inputs.partitions.values()))
    if not inputs.repartition:
        return first.digest
    args = partition_facts(first)["args"]
    return digest_of([first.scheme, args, "one partition for each seed"])


def note_earlier(run: OpenRun) -> None:
    """Note which seeds of a run are stored already, and which seeds are trained now."""
    missing = seeds_text(set(run.spec.seeds) - set(run.earlier))
    stored = seeds_text(run.earlier)
    every = seeds_text({*run.spec.seeds, *run.earlier})
    run.events.observer.note(
        f"{run.name} already has results of seeds {stored}. This command trains seeds {missing}; the new result "
        f"covers seeds {every}."
    )


def note_stored(run: Run, observer: Observer) -> None:
    """Note that a result is stored already. Warn if its measured times are lost."""
    again = "; --fresh trains it again"
    if is_private(run.result):
        again = (
            ". Returning the stored result spends no privacy. --fresh draws new noise and spends as much "
            "privacy again"
        )
    observer.note(f"The same run is stored already ({run.path.name}){again}.")
    if not run.measured:
        observer.warn(
            f"{run.path / 'measured.json'} is missing or damaged. The result is complete, but its measured times are "
            "lost (--fresh measures the times again)."
        )


def _add_scores(
    inputs: RunInputs,
    spec: ResolvedRun,
    outcome: TrainingOutput,
    result: SeedResult,
    *,
    calibrated: bool,
) -> float | None:
    """Add what ``--stages``, ``--base-classes`` and ``--client-prior`` score to the result of a seed.

    Returns the temperature of the model, which is fitted for a client prior and if ``calibrated`` is true; else None.
    """
    run = training_run(inputs, spec, outcome.seed)
    partition = inputs.partitions[outcome.seed]
    stages = spec.requested.stages
    if stages > 1:
        result.stages = stage_scores(run, outcome, partition, stages)
    new = inputs.features.new_classes
    if new is not None:
        result.base_to_new = base_to_new(run, outcome, new)
    kind = spec.requested.client_prior
    if kind == "none" and not calibrated:
        return None
    temperature = temperature_of(run, outcome)
    if kind != "none":
        scored, caution = prior_accuracy(run, outcome, partition, kind, temperature or 1.0)
        result.client_prior = scored
        if caution is not None:
            result.warnings.append(caution)
    return temperature


@dataclass
class OpenRun:
    """A run whose directory is known."""

    inputs: RunInputs  # on the device that computes
    spec: ResolvedRun  # settings that determine the result
    identity: Identity  # digests of everything that determines the result
    directory: RunDirectory  # its files
    events: RunEvents  # publishes its rounds
    options: TrainingOptions  # of the command
    stored: Run | None = None  # the stored result, if it has all seeds of the command
    # seeds of the stored result, even if it lacks some of the command
    earlier: tuple[int, ...] = ()
    done: dict[int, SeedResult] = field(default_factory=dict)  # results of seeds that have ended
    fresh: bool = False  # whether to train seeds again that are stored already
    _saved: set[int] = field(default_factory=set)  # seeds of ``done`` whose files are written

    @property
    def name(self) -> str:
        """The name of its directory: the first digits of its digest."""
        return self.directory.path.name

    def find_stored(self) -> None:
        """Set ``earlier`` to the seeds of the stored result, and ``stored`` if it has all seeds of this command.

        Raises CorruptionError for a damaged result.
        """
        result = self.directory.stored()
        if result is None:
            return
        self.earlier = tuple(result["seeds"])
        if set(self.spec.seeds) <= set(self.earlier):
            measured = measured_of(self.directory.path, result) or {}
            self.stored = Run(self.directory.path, result, measured, reused=True)

    def begin(self, *, fresh: bool) -> None:
        """Make the directory, with the configuration of the run and the partitions that were made for it.

        If ``fresh`` is true, every seed of this command is trained again; other seeds of the run stay.
        """
        self.fresh = fresh
        partitions = {}
        if self._made_here:
            for seed in self.spec.seeds:
                file = self.directory.partition_file(seed)
                partitions[file.name] = self.inputs.partitions[seed].to_file()
        note = ""
        if self.spec.trust.protects:
            note = (
                "The noise comes from the operating system. Therefore every new training of this run gives another "
                "result and spends privacy again."
            )
        if fresh:
            self._forget_seeds()
        self.directory.begin(self._config_of(self.spec), partitions, note)

    @property
    def _made_here(self) -> bool:
        """Whether the partitions were made for this run. They are then stored in its directory.

        A run over sites (``engine``) stores none: the rows of sites stay there.
        """
        return self.inputs.partition_name is None and not self.spec.engine

    def _config_of(self, spec: ResolvedRun) -> Facts:
        """The ``[train]`` section that runs these seeds again, on the same partition."""
        table = {**spec.to_config(), **self.inputs.choices}
        digests = {partition.digest for partition in self.inputs.partitions.values()}
        # Seeds with different partitions draw them again from the scheme.
        if len(digests) > 1:
            return table
        if self._made_here and "clients_from" not in table:
            files = [self.directory.partition_file(seed) for seed in spec.seeds]
            # Seeds that were trained on a saved partition have no file.
            file = next(filter(Path.is_file, files), files[0])
            table["partition"] = str(file.resolve())
        elif self.inputs.partition_name is not None:
            # The name may be given to other rows later, so the digest is stored too.
            digest = self.inputs.partitions[self.spec.seeds[0]].digest
            table["partition"] = pinned_name(self.inputs.partition_name, digest)
        return table

    def _forget_seeds(self) -> None:
        """Delete checkpoints and models of the seeds of this command, and all models of a damaged run."""
        seeds: Sequence[int] | None = self.spec.seeds
        try:
            self.directory.stored()
        except DamagedRunError:
            seeds = None  # the models of all seeds
            (self.directory.path / "result.json").unlink(missing_ok=True)
        self.directory.restart(self.spec.seeds)
        drop(self.directory.path, seeds)

    def round_drawn(self, seed: int, number: int, snapshot: Callable[[], Snapshot]) -> None:
        """Save a round of a private run before it is reported. Before the first round, record that noise is drawn.

        Raises CorruptionError for a damaged ledger.
        """
        if number == 1:
            released = self._is_released(seed)
            if released and not self.fresh:
                self.events.observer.warn(
                    f"Noise was drawn before for seed {seed} of {self.name}, but that training left no "
                    "complete result or state. The seed is trained again from the start and spends privacy "
                    "again."
                )
            self._record_release(seed)
            keep_reported_rounds(self._ledger, self.name, seed, 0)
        self.save_checkpoint(seed, snapshot())
        keep_reported_rounds(self._ledger, self.name, seed, number)

    def _is_released(self, seed: int) -> bool:
        """Whether the ledger has a release of a seed of this run."""
        releases = read_releases(self._ledger)
        return any((release.run, release.seed) == (self.name, seed) for release in releases)

    def _check_reported(self, seed: int, rounds: int) -> None:
        """Record another release if rounds after ``rounds`` may have been reported, because their noise is drawn again.

        This is the case if the state is older than the reported rounds, or if their number is unknown.
        """
        reported = reported_rounds(self._ledger, self.name, seed)
        released = self._is_released(seed)
        if released and reported is not None and reported <= rounds:
            return
        if not released:
            why = "the privacy ledger has no entry for this seed"
        elif reported is None:
            why = "the number of published rounds is unknown"
        else:
            why = f"round {reported:,} was published already"
        self.events.observer.warn(
            f"Seed {seed} of {self.name} resumes from its stored state after round {rounds:,}, but {why}. "
            "The later rounds draw new noise, which spends privacy again."
        )
        self._record_release(seed)
        keep_reported_rounds(self._ledger, self.name, seed, rounds)

    @property
    def _ledger(self) -> Path:
        if self.inputs.ledger is None:
            raise InternalError(
                "A run with differential privacy needs the path of the privacy ledger, but none was given.",
                "Please report this.",
            )
        return self.inputs.ledger

    def _record_release(self, seed: int) -> None:
        """Record in the ledger that noise was drawn for a seed, with the values that determine its cost."""
        privacy = self.spec.trust.privacy
        inputs = self.inputs
        assert privacy is not None  # a run without noise draws none
        clients = len(inputs.clients)
        # Sampling amplifies privacy only while the participants are secret.
        share = 1.0
        if privacy.keeps_participants_secret:
            share = clients_per_round(self.spec.participation, clients) / clients
        release = Release(
            run=self.name,
            method=self.spec.method,
            seed=seed,
            dataset=str(inputs.dataset["slug"]),
            dataset_digest=str(inputs.dataset["digest"]),
            partition=inputs.partitions[seed].digest,
            clients=clients,
            clip=privacy.bound,
            noise=privacy.noise,
            share=share,
            rounds=self.spec.rounds,
            delta=privacy.delta,
            time=time.time(),
        )
        record_release(self._ledger, release)

    def restore_seed(self, seed: int) -> bool:
        """Restore the result of a seed that ended before, and return whether there is one.

        Nothing is restored if the run is trained ``fresh``.
        """
        if self.fresh:
            return False
        path = self.directory.path
        stored = self.directory.seed_result(seed, self.events.observer.warn)
        if stored is None:
            if seed in self.earlier:  # its model is written again, perhaps with other bits
                drop(path, [seed])
            return False
        # A seed of a stored result needs no model, because models may be removed.
        needs_model = stored.get("model") and seed not in self.earlier
        if needs_model and not whole_seed(path, self.identity.digest, seed):
            self.events.observer.warn(
                f"The model of seed {seed} is missing or damaged. Seed {seed} is trained again from the "
                "start."
            )
            return False
        result = SeedResult.from_dict(stored)
        if result.partition.get("digest") != self.inputs.partitions[seed].digest:
            return False
        self.done[seed] = result
        self._saved.add(seed)
        return True

    def checkpoint(self, seed: int) -> Snapshot | None:
        """The last state of a seed whose training was stopped, or None."""
        saved = self.directory.checkpoint(seed, self.events.observer.warn)
        if saved is None:
            return None
        state = Snapshot(*saved)
        if state.meta.get("table") is not None:
            try:
                check_table(self.directory.states(seed), state)
            except CorruptionError as error:
                self.events.observer.warn(
                    f"{error.message} Seed {seed} is trained again from the start."
                )
                self.directory.forget(seed)
                return None
        if self.spec.trust.protects:
            self._check_reported(seed, int(state.meta["round"]))
        return state

    def save_checkpoint(self, seed: int, snapshot: Snapshot) -> None:
        """Replace the state of a seed."""
        self.directory.save_checkpoint(seed, snapshot.tensors, snapshot.meta)
        snapshot.on_written()

    def keep_seed(self, outcome: TrainingOutput, seconds: float) -> None:
        """Store a seed that has ended, so that a run that is stopped later does not train it again."""
        result = self.end_seed(outcome, seconds)
        self.directory.save_seed(outcome.seed, result.to_dict())
        self._saved.add(outcome.seed)
        if self.spec.trust.protects:
            forget_reported_rounds(self._ledger, self.name, outcome.seed)

    def end_seed(
        self, outcome: TrainingOutput, seconds: float, inputs: RunInputs | None = None
    ) -> SeedResult:
        """Add the result of a seed to ``done``, and save its model. A run over sites gives its own ``inputs``."""
        secret = self.spec.trust.secret_participants
        partition = self.inputs.partitions[outcome.seed]
        result = seed_result(outcome, inputs or self.inputs, seconds, secret=secret)
        # Whether the model is kept may depend on the validation accuracy of this seed.
        held_out = values_held_out({"partition": {"args": partition.args}})
        seeds = len({*self.spec.seeds, *self.earlier})
        kept = self.options.kept
        wanted = kept.wants(self.spec.method, result.choice, seeds, held_out)
        # The rows of sites stay there, so a run over sites has no rows to score again or to calibrate on.
        temperature = None
        if inputs is None:
            temperature = _add_scores(self.inputs, self.spec, outcome, result, calibrated=wanted)
        facts = facts_of_seed(self.inputs, self.spec, self.identity, outcome, temperature)
        if self.inputs.targets:
            result.transfer = transfer(outcome, facts, self.inputs.features, self.inputs.targets)
        if wanted:
            result.model, notes = save_seed(
                self.directory.path, self.inputs, self.spec, facts, outcome, kept
            )
            for note in dict.fromkeys(notes):
                self.events.observer.note(note)
        self.done[outcome.seed] = result
        return result

    def finish(
        self,
        *,
        result: Record | None = None,
        seconds: Mapping[str, float] | None = None,
        measured: Record | None = None,
    ) -> Run:
        """Store the result of all seeds, and warn of problems of the seeds that this command trained.

        ``result``, ``seconds`` and ``measured`` are added to the values that every run stores under these names.
        """
        for seed in self.done.keys() - self._saved:
            self.directory.save_seed(seed, self.done[seed].to_dict())
        with self.directory.writing_result():
            seeds = self._all_seeds()
            numbers = tuple(s.seed for s in seeds)
            spec = replace(self.spec, seeds=numbers)
            summary = {**summarise(self.inputs, spec, self.identity, seeds), **(result or {})}
            train_seconds = sum(s.seconds for s in seeds)
            # Times and versions are no part of the result, because they differ between equal runs.
            figures = {
                "seconds": {**self.inputs.seconds, "train": train_seconds, **(seconds or {})},
                "per_seed": {str(s.seed): s.measured for s in seeds},
                **(measured or {}),
                "time": time.time(),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
            # Models are sealed with the digest of this result, before the result itself is written.
            kept = self.options.kept
            complete = self.directory.finish(
                summary,
                list(chain.from_iterable(s.rounds for s in seeds)),
                figures,
                before=lambda result: seal(
                    self.directory.path, self.identity.digest, digest_of(result), numbers, kept
                ),
                files=files_of_clients(seeds),
                config=self._config_of(spec),
            )
        run = Run(self.directory.path, complete, figures)
        warnings = chain.from_iterable(self.done[seed].warnings for seed in self.spec.seeds)
        for warning in dict.fromkeys(warnings):
            self.events.observer.warn(warning)
        self.events.ended(run.result)
        return run

    def _all_seeds(self) -> list[SeedResult]:
        """The results of the seeds of this command and of all other seeds in the directory, in increasing order."""
        results = dict(self.done)
        for seed in self.directory.seeds():
            if seed not in results:
                stored = self.directory.seed_result(seed, self.events.observer.warn)
                if stored is not None:
                    results[seed] = SeedResult.from_dict(stored)
        lost = set(self.earlier) - results.keys()
        if lost:
            seeds = seeds_text(lost)
            self.events.observer.warn(
                f"The files of seeds {seeds} of {self.name} are missing or damaged, so the result does not "
                f"include these seeds. To train them again: --seeds {seeds}"
            )
        return [results[seed] for seed in sorted(results)]


# Train: train the missing seeds, from their checkpoints.


def _owning_runs(runs: Sequence[OpenRun]) -> AbstractContextManager[None]:
    """Own the directories of runs while the block runs; wait for another process that trains them."""
    folders = [run.directory.path for run in runs]
    options = runs[0].options
    private = runs[0].spec.trust.protects
    return owning(folders, options.observer, options.stop, private=private)


def _check_new_classes(runs: Sequence[OpenRun]) -> None:
    """Raise UsageError, before anything is trained, for names of new classes that a method cannot use."""
    for run in runs:
        inputs = run.inputs
        every = [target.new for target in inputs.targets]
        if inputs.features.new_classes is not None:
            every.append(inputs.features.new_classes)
        for new in every:
            training = training_run(inputs, run.spec, run.spec.seeds[0])
            check_new_classes(training, inputs.settings, new)


def train_seeds(
    runs: Sequence[OpenRun], cache: GridCache | None, grid_points: int = 1
) -> dict[int, FedcacheError]:
    """Train every seed of runs that have begun; seeds that ended before are restored.

    Raises FedcacheError for an error of all runs; StoppedError after a stop. ``cache`` holds values that the points of
    a grid share, None for a run alone. ``grid_points`` is the number of points with those that have ended before.

    Returns:
        the errors that ended single runs, by the place of the run in ``runs``; the other runs continue.
    """
    spec = runs[0].spec
    observer = runs[0].options.observer
    _check_new_classes(runs)
    failed = dict[int, FedcacheError]()
    configurations = ""
    if cache is not None:
        configurations = f"{len(runs)} configurations of "
    total = len(spec.seeds) * spec.rounds * len(runs)
    with piece_of_work(observer, f"training {configurations}{spec.method}", total, "rounds"):
        for seed in spec.seeds:
            waiting = []  # places of the runs that train this seed
            for place, run in enumerate(runs):
                if run.restore_seed(seed):
                    run.events.replay(seed, run.done[seed].rounds)
                    observer.advance(spec.rounds)
                elif place not in failed:
                    waiting.append(place)
            for group in _of_same_round(runs, waiting, seed):
                failed |= SeedTraining(runs, group, seed, cache, grid_points).train()
    return failed


def _of_same_round(
    runs: Sequence[OpenRun], waiting: Sequence[int], seed: int
) -> list[dict[int, Snapshot | None]]:
    """The checkpoints of waiting runs, grouped by round: place of the run -> checkpoint.

    Rounds may differ, because a kill may happen after some runs saved their checkpoint and before others did.
    """
    groups: dict[int, dict[int, Snapshot | None]] = {}
    for place in waiting:
        state = runs[place].checkpoint(seed)
        groups.setdefault(_round_of(state), {})[place] = state
    return [groups[round_] for round_ in sorted(groups)]


def _round_of(state: Snapshot | None) -> int:
    if state is None:
        return 0
    return int(state.meta["round"])


@dataclass(eq=False)
class CheckpointPolicy:
    """Decides when the states of a seed are written, and where a requested stop ends its training.

    States are written every ``CHECKPOINT_EVERY`` seconds, or less often if writing them would take more than
    ``CHECKPOINT_SHARE`` of the time. A stop ends a round early only if the state after the round before is written. If
    the last checkpoint is older, the round is finished and its state is written, so less than one round is lost.

    Args:
        stop: set by a signal handler.
        training: name of the training for messages, such as "seed 0".
        kept: number of the last round whose state is written.
    """

    stop: Stop
    training: str
    kept: int

    def __post_init__(self) -> None:
        self._last = time.monotonic()  # time of the last checkpoint
        self._writing = 0.0  # seconds to write the states of this round so far
        self._cost = 0.0  # seconds to write the states of the last checkpoint
        self.begin(self.kept)

    def begin(self, kept: int) -> None:
        """Start rounds after round ``kept``, whose state is written."""
        self.kept = kept
        self.done = kept
        # The answer of ``writes`` for this round; None until a run asks for it.
        self._writes: bool | None = None

    def check(self) -> None:
        """Raise StoppedError if a stop is requested and the training may end here, inside a round."""
        if self.stop.requested and self.kept == self.done:
            number = self.done + 1
            raise stopped(f"in round {number} of {self.training}; earlier rounds are kept")

    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        interval = max(CHECKPOINT_EVERY, self._cost / CHECKPOINT_SHARE)
        return time.monotonic() - self._last > interval

    def writes(self) -> bool:
        """Whether states are written after this round. The first run that ends the round decides for all runs."""
        if self._writes is None:
            self._writes = self.stop.requested or self.due()
        return self._writes

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Measure the seconds of the block, which writes a state."""
        began = time.monotonic()
        yield
        self._writing += time.monotonic() - began

    def round_written(self) -> None:
        """Note that the states of this round are written, even if no checkpoint was due."""
        self._writes = True

    def round_ended(self, number: int) -> bool:
        """Note that all runs have ended a round. Returns whether they stop here, with every state written."""
        written = bool(self._writes)
        self._writes = None
        self.done = number
        if written:
            self.kept = number
            self._last = time.monotonic()
            self._cost = self._writing
            self._writing = 0.0
        return written and self.stop.requested


def stopped(where: str) -> FedcacheError:
    """The error of a requested stop."""
    return StoppedError(f"Stopped on request {where}.", "Run the same command again to resume.")


class SeedTraining:
    """The training of one seed of some runs, which resume from checkpoints of the same round, with its callbacks.

    ``states`` has the checkpoint of each run that is trained, by its place in ``runs``. ``cache`` holds values that the
    points of a grid share, None for a run alone. ``grid_points`` is the number of points of the grid.
    """

    def __init__(
        self,
        runs: Sequence[OpenRun],
        states: Mapping[int, Snapshot | None],
        seed: int,
        cache: GridCache | None,
        grid_points: int,
    ) -> None:
        self.grid_points = grid_points
        self.runs = [runs[place] for place in states]
        self.places = list(states)
        self.states = list(states.values())
        self.seed = seed
        self.cache = cache
        first = self.runs[0]
        self.observer = first.options.observer
        self.spec = first.spec
        self.inputs = first.inputs
        self.kept = _round_of(self.states[0])
        of_points = ""
        if cache is not None:
            of_points = f" of {len(self.runs)} configurations"
        self.policy = CheckpointPolicy(first.options.stop, f"seed {seed}{of_points}", self.kept)
        self.failed: dict[int, FedcacheError] = {}

    def train(self) -> dict[int, FedcacheError]:
        """Train all remaining rounds. Returns the errors that ended runs, by their place."""
        for run, state in zip(self.runs, self.states, strict=True):
            if state is not None:
                run.events.replay(self.seed, state.meta["records"])
                if self.cache is None:
                    self.observer.note(f"Seed {self.seed}: resuming after round {self.kept}.")
                self.observer.advance(self.kept)
        self.began = time.perf_counter()
        training = training_run(self.inputs, self.spec, self.seed)
        callbacks = RunCallbacks(
            self.policy.check, self._on_round, self._after_round, self._on_done
        )
        run_points(
            replace(training, grid_points=self.grid_points),
            [run.inputs.settings for run in self.runs],
            states=self.states,
            callbacks=callbacks,
            cache=self.cache,
            tables=[run.directory.states(self.seed) for run in self.runs],
        )
        return self.failed

    def _on_round(
        self,
        point: int,
        number: int,
        metrics: Facts,
        traffic: Facts,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        """Publish a round that a run has ended, and write its state if a checkpoint is due."""
        run = self.runs[point]
        if self.spec.trust.protects:
            # A repeated round draws other noise. So its state is written before the round is published: otherwise two
            # releases of the round could be published.
            with self.policy.writing():
                run.round_drawn(self.seed, number, snapshot)
        published = time.perf_counter()
        run.events.round_ended(self.seed, number, metrics, traffic)
        self.observer.advance(1)
        # The time of observers, such as the start of a tracker, is no training time.
        self.began += time.perf_counter() - published
        if number == self.spec.rounds:
            return
        if self.spec.trust.protects:
            self.policy.round_written()
            return
        if self.policy.writes():
            with self.policy.writing():
                run.save_checkpoint(self.seed, snapshot())

    def _after_round(self, number: int) -> None:
        """End a round of all runs. Raise StoppedError if a stop was requested and every state is written."""
        # No state is written after the last round, because the seed ends then.
        if self.policy.round_ended(number):
            kept_states = "the state is kept"
            if self.cache is not None:
                kept_states = f"the states of {len(self.runs)} configurations are kept"
            raise stopped(f"after round {number} of seed {self.seed}; {kept_states}")

    def _on_done(self, first: int, ended: Sequence[TrainingOutput | FedcacheError]) -> None:
        """Store the results of runs that have ended the seed; ``first`` is the number of the first of them."""
        seconds = (time.perf_counter() - self.began) / len(ended)
        for place, run, out in zip(self.places[first:], self.runs[first:], ended, strict=False):
            if isinstance(out, FedcacheError):
                self.failed[place] = out
            else:
                run.keep_seed(out, seconds)
        self.policy.begin(self.kept)  # the next runs start from their checkpoints
        self.began = time.perf_counter()


# Several points of a grid at once.


@dataclass(frozen=True)
class PreparedPoint:
    """One point of a grid, ready to be trained."""

    inputs: RunInputs  # the inputs of all points, with the hyperparameters of this point
    config: TrainConfig  # the configuration that was requested
    position: GridPosition  # in the grid


def train_together(
    points: Sequence[PreparedPoint],
    options: TrainingOptions,
    *,
    cache: GridCache,
    on_end: Callable[[int, Run | FedcacheError], None],
) -> None:
    """Train points that differ only in floats together, and store each as a run.

    Raises FedcacheError for an error of all points; StoppedError after a stop.

    Args:
        points: of the grid.
        options: of the grid; the observer receives notes, warnings and progress once, and the rounds of all points.
        cache: Gram matrices and features of other points.
        on_end: called when a point ends, with its number and its run or the error that ended it.
    """
    observer = options.observer
    opened: dict[int, OpenRun] = {}
    for number, point in enumerate(points):
        # The notes on chosen settings are the same for all points, so only those of the first are shown.
        notes = observer
        if opened:
            notes = Silent()
        try:
            run = _open_point(point, options, notes)
        except DamagedRunError as error:
            on_end(number, error)
            continue
        if run.stored is not None:
            replay_stored(observer, run.stored.path, run.stored.result, point.position)
            on_end(number, run.stored)
            continue
        opened[number] = run
    # If a run was trained alone, its missing seeds are trained alone too, so that all its seeds are computed alike.
    alone = [number for number, run in opened.items() if run.earlier and not run.spec.together]
    for number in alone:
        run = opened.pop(number)
        try:
            on_end(number, _train_opened(run))
        except FedcacheError as error:
            if not ends_one_run(error):
                raise
            on_end(number, error)
    if not opened:
        return
    # Raises before anything is written if the models of --save-clients do not fit into memory.
    if options.kept.clients is not None:
        first = next(iter(opened.values()))
        forecast_run(first.inputs, first.spec, len(opened), options.kept, options.runs)
    # Other processes may have finished some of the points while this one waited for the directories.
    with _owning_runs(list(opened.values())):
        for number, run in list(opened.items()):
            # Every point is trained again, so no stored result is looked for.
            if options.fresh:
                break
            try:
                run.find_stored()
            except DamagedRunError as error:
                on_end(number, error)
                del opened[number]
                continue
            if run.stored is not None:
                replay_stored(observer, run.stored.path, run.stored.result, run.events.position)
                on_end(number, run.stored)
                del opened[number]
        if not opened:
            return
        for run in opened.values():
            if run.earlier:
                note_earlier(run)
            run.begin(fresh=options.fresh)
        failed = train_seeds(list(opened.values()), cache, grid_points=len(points))
        for place, (number, run) in enumerate(opened.items()):
            if place in failed:
                on_end(number, failed[place])
            else:
                on_end(number, run.finish())


def _open_point(point: PreparedPoint, options: TrainingOptions, notes: Observer) -> OpenRun:
    """The run of a point: the one trained alone if some of its seeds are stored, else the one trained with others.

    ``notes`` receives the notes on chosen settings.
    """
    inputs, spec = resolve_inputs(point.inputs, point.config, notes)
    alone = open_run(inputs, spec, options, point.position)
    options.kept.check_clients(names_of(inputs.clients))
    if alone.stored is not None:
        note_stored(alone.stored, notes)
    if alone.earlier:
        return alone
    return open_run(inputs, replace(spec, together=True), options, point.position)
