"""The trained models of a run: which are kept, written with each seed, sealed with the result, and read back.

    RUN/models/seed-0.safetensors   the models of one seed (``models.saved_model``)
    RUN/models/models.json          sealed: sha256 of each of these files, and of the result they belong to

A seed's model is complete on disk before the seed counts as ended, and ``models.json`` is written just before
``result.json``. So a killed run has no result, or it has all of its models. The digests of a result do not depend on
models: a result has the same bits with and without them, and removing models damages nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcache.config import SaveModels
from fedcache.errors import (
    CorruptionError,
    FedcacheError,
    MachineError,
    StoreError,
    UsageError,
    unknown,
)
from fedcache.federate.engine.method import (
    Method,
    clients_per_round,
    keep_down,
    less_training_state,
)
from fedcache.federate.engine.outcome import TrainingOutput
from fedcache.federate.engine.run import TrainingRun, plan
from fedcache.federate.execution.memory_estimate import (
    ExecutionPlan,
    Forecast,
    Load,
    forecast,
    free_memory_on,
    refuse_too_little_room,
    refuse_too_much,
)
from fedcache.federate.partition.client_table import names_of
from fedcache.models.saved_model import (
    MOST_BYTES,
    ModelFacts,
    SavedModel,
    chosen_clients,
    collect,
    computed_as,
)
from fedcache.runs.directory import (
    INDEX,
    MODELS,
    check_place,
    command_again,
    has_model,
    header_of_models,
    read_result,
)
from fedcache.runs.features import RunInputs
from fedcache.runs.identity import Identity
from fedcache.runs.result_files import is_private
from fedcache.runs.score import DIGITS, Order, choice_value, order_of_run, values_held_out
from fedcache.runs.spec import ResolvedRun
from fedcache.store.files import (
    digest_of,
    file_sha256,
    free_memory,
    make_private,
    read_sealed,
    write_sealed,
)

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

    def ended(self, path: Path, result: Mapping[str, Any]) -> None:
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


def model_file(run: Path, seed: int) -> Path:
    """The path of the models of a seed."""
    return run / MODELS / f"seed-{seed}.safetensors"


def save_seed(
    run: Path,
    inputs: RunInputs,
    spec: ResolvedRun,
    identity: Identity,
    out: TrainingOutput,
    kept: KeptModels,
    temperature: float | None,
) -> tuple[bool, list[str]]:
    """Write the models of a seed that has just ended.

    Returns whether any model was written, and notes on models that were not. ``temperature`` is that of
    ``models.calibrate``. Raises UsageError for a client to save that the run does not have.
    """
    data = inputs.data
    features = inputs.features
    # A model with live encoders reads images: its first backbone is the encoder.
    template = None
    encoder = None
    if data.towers is not None:
        template = data.towers.template
        encoder = 0
    facts = ModelFacts(
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
    clients = kept.clients
    notes = []
    if spec.trust.protects and facts.personal:
        # A client's own part has no noise. An untrained part also reveals that its client was never drawn.
        clients = "none"
        notes.append(
            "Personal models are not saved, because epsilon does not cover personal models."
        )
    try:
        collected = collect(out, facts, data, features.scaling, clients)
    except UsageError as error:
        # A client that the user named must be saved; otherwise, a note is enough.
        if kept.clients not in (None, "all", "none"):
            raise
        return False, [f"No model is saved: {error.message} {error.hint}"]
    if collected is None:
        return False, []
    make_private(run / MODELS)
    collected.model.save(model_file(run, out.seed))
    return True, [*notes, *collected.notes]


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


def finished_result(run: Path) -> dict[str, Any]:
    """The result in a directory. Raises StoreError for a run without one, DamagedRunError for one that was changed."""
    if not (run / "result.json").exists():
        raise StoreError(
            f"{run} is not a finished run.", "fedcache runs list   lists the finished runs."
        )
    result = read_result(run / "result.json")
    check_place(run, result)
    return result


def _index_of(run: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the list of a run's models; errors as of ``load_seed``."""
    hint = train_again(run, result)
    try:
        found = read_sealed(run / MODELS / INDEX, header_of_models(str(result["digest"])))
    except CorruptionError as error:
        raise CorruptionError(error.message, hint) from error
    if found is None:
        raise StoreError(f"The run {run.name} has no saved model.", hint)
    content: dict[str, Any] = found.content
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


def train_again(run: Path, result: Mapping[str, Any]) -> str:
    """A hint: the command that trains the models of a finished run again, and its cost."""
    command = command_again(run)
    own_name = str(result["digest"])[:16]
    if run.name != own_name:  # moved or copied; the command makes it under its own name
        return f"To train the run again, in the directory {own_name} of your runs:  {command}"
    if is_private(result):
        return (
            "The run is private. A new training draws new noise, spends as much privacy again (fedcache ls "
            f"--privacy) and replaces the result.  {command}"
        )
    return f"To train the run again and save a model:  {command}"


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
