"""One run from its configuration to its result: inputs prepared, memory forecast, directory opened, seeds kept.

Where the rows come from is a ``RowSource``. What is left out of a configuration comes from rules, and each choice is
said aloud.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedcache.config import PartitionConfig, SaveModels, TrainConfig
from fedcache.errors import CorruptionError, InternalError, UsageError
from fedcache.federate.engine.method import Method, clients_per_round
from fedcache.federate.engine.outcome import Snapshot, TrainingOutput
from fedcache.federate.execution.state_table import check_table
from fedcache.federate.methods import METHODS, find_method
from fedcache.models.calibrate import temperature_of
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.runs.client_columns import check_recordable
from fedcache.runs.directory import DamagedRunError, RunDirectory, measured_of
from fedcache.runs.events import ALONE, GridPosition, RunEvents
from fedcache.runs.features import RunInputs
from fedcache.runs.forecast import training_run
from fedcache.runs.identity import Identity, code_of, code_with_plugins
from fedcache.runs.origin import check_text
from fedcache.runs.partitions import pinned_name
from fedcache.runs.privacy_ledger import (
    Release,
    describe_privacy,
    forget_told_rounds,
    keep_told_rounds,
    read_releases,
    record_release,
    told_rounds,
)
from fedcache.runs.results import (
    SeedResult,
    files_of_clients,
    partition_facts,
    partition_section,
    seed_result,
    summarise,
)
from fedcache.runs.row_sources import (
    Preparation,
    RowSource,
    ShardRows,
    StoreRows,
    on_device,
    training_device,
)
from fedcache.runs.run import Run
from fedcache.runs.run_models import KeptModels, drop, save_seed, seal, whole_seed
from fedcache.runs.running import owning
from fedcache.runs.score import values_held_out
from fedcache.runs.spec import (
    ResolvedRun,
    check_participation,
    hyperparameters,
    parse_seeds,
    seeds_text,
    setting_notes,
)
from fedcache.store.files import digest_of


def prepare_run(
    config: TrainConfig, source: RowSource, method: Method | None = None, ledger: Path | None = None
) -> RunInputs:
    """Resolve method, features and partitions.

    Raises UsageError, StoreError, CorruptionError, MachineError; as extraction, where one is run.

    Args:
        config: as asked.
        source: where the rows come from.
        method: one of the user's own, in the place of the one that is named.
        ledger: of the privacy that is spent.
    """
    method = method or named_method(config)
    settings = hyperparameters(method, config)
    seeds = parse_seeds(config.seeds)
    began = time.perf_counter()
    extracting = source.open(method, settings)
    arrays = source.arrays(method, settings)
    partitions, name = source.partitions(method, seeds)
    clients = len(next(iter(partitions.values())).clients)
    check_recordable(clients)
    check_participation(config, clients)  # before features are read
    feat_post = source.feat_post(method, settings, arrays)
    if "feat_post" in settings:
        settings = {**settings, "feat_post": feat_post}
    features = source.read(method, settings, arrays, feat_post)
    if features.data.text is not None and isinstance(source, StoreRows | ShardRows):
        check_text(
            source.store if isinstance(source, StoreRows) else source.stores[0], features.arrays[0]
        )
    domains, classes = source.names()
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
        seconds={"extract": extracting, "load": time.perf_counter() - began - extracting},
        ledger=ledger,
    )


def named_method(config: TrainConfig) -> Method:
    """The method that a configuration names. Raises UsageError, also when it names none."""
    if config.method is None:
        raise UsageError("No method was named.", f"--method {' | '.join(METHODS)}")
    return find_method(config.method)


def row_source(
    config: TrainConfig, partition: PartitionConfig, preparation: Preparation
) -> RowSource:
    """The stores of ``--clients-from``, each a client, else one store whose rows are dealt by index."""
    if config.clients_from is not None:
        return ShardRows(config, Path(config.clients_from), preparation)
    return StoreRows(config, partition, preparation)


@dataclass
class OpenRun:
    """A run whose directory is known."""

    inputs: RunInputs  # on the device that computes
    spec: ResolvedRun  # what determines the result
    identity: Identity  # digests of it
    directory: RunDirectory  # where it lies
    events: RunEvents  # tells of its rounds
    stored: Run | None = None  # its result, when that has all seeds of the command
    earlier: tuple[int, ...] = ()  # seeds of the stored result, also where some are missing
    done: dict[int, SeedResult] = field(default_factory=dict)  # its seeds that have ended
    fresh: bool = False  # whether what was computed of it before was to be forgotten
    # which models are saved
    kept: KeptModels = field(default_factory=lambda: KeptModels(SaveModels()))
    _saved: set[int] = field(default_factory=set)  # seeds of ``done`` whose files are written

    def find_stored(self) -> None:
        """Take the stored result if it has all seeds of this command, else the numbers of its seeds.

        Raises CorruptionError for a damaged result.
        """
        result = self.directory.stored()
        if result is None:
            return
        self.earlier = tuple(result["seeds"])
        if set(self.spec.seeds) <= set(self.earlier):
            measured = measured_of(self.directory.path, result) or {}
            self.stored = Run(
                self.directory.path, result, measured, reused=True, reused_seeds=self.earlier
            )

    def begin(self, *, fresh: bool) -> None:
        """Make the directory, with the configuration that runs it again and the partitions made for it.

        ``fresh`` trains every seed of this command again; other seeds of the run stay.
        """
        self.fresh = fresh
        kept = self.spec.seeds if self._made_here else ()
        partitions = {
            self.directory.partition_file(s).name: self.inputs.partitions[s].to_file() for s in kept
        }
        note = ""
        if self.spec.trust.protects:
            note = "Noise comes from the operating system: another run has another result, and spends privacy again."
        if fresh:
            self._forget_seeds()
        self.directory.begin(self._config_of(self.spec), partitions, note)

    @property
    def _made_here(self) -> bool:
        """Whether the partitions were made for this run, which then keeps them in its directory."""
        return self.inputs.partition_name is None and not self.spec.engine

    def _config_of(self, spec: ResolvedRun) -> dict[str, Any]:
        """The ``[train]`` section that runs these seeds again, on the same partition."""
        table = {**spec.to_config(), **self.inputs.choices}
        if len({p.digest for p in self.inputs.partitions.values()}) > 1:
            return table
        if self._made_here and "clients_from" not in table:
            files = [self.directory.partition_file(seed) for seed in spec.seeds]
            # Seeds that were trained on a saved partition have no file.
            file = next(filter(Path.is_file, files), files[0])
            table["partition"] = str(file.resolve())
        elif self.inputs.partition_name is not None:  # a name may be given to other rows later
            digest = self.inputs.partitions[self.spec.seeds[0]].digest
            table["partition"] = pinned_name(self.inputs.partition_name, digest)
        return table

    def _forget_seeds(self) -> None:
        """Forget checkpoints and models of the seeds of this command; a damaged run loses all of its models."""
        damaged = False
        try:
            self.directory.stored()
        except DamagedRunError:
            damaged = True
            (self.directory.path / "result.json").unlink(missing_ok=True)
        self.directory.restart(self.spec.seeds)
        drop(self.directory.path, None if damaged else self.spec.seeds)

    def round_drawn(self, seed: int, number: int, snapshot: Callable[[], Snapshot]) -> None:
        """Keep a round of a private run before it is told, and before the first write down that noise is drawn.

        Raises CorruptionError for a ledger that is damaged.
        """
        if number == 1:
            known = {(r.run, r.seed) for r in read_releases(self._ledger)}
            if not self.fresh and (self.directory.path.name, seed) in known:
                self.events.observer.warn(
                    f"Noise was drawn for seed {seed} of {self.directory.path.name} before, and no whole result or "
                    "state of it is left: the seed begins again, and spends privacy again."
                )
            self._record_release(seed)
            keep_told_rounds(self._ledger, self.directory.path.name, seed, 0)
        self.save_checkpoint(seed, snapshot())
        keep_told_rounds(self._ledger, self.directory.path.name, seed, number)

    def _check_told(self, seed: int, rounds: int) -> None:
        """Write down another release where rounds after ``rounds``, of which noise is drawn again, may have been told.

        So it is where the state is older than what was told, or nothing is known of that.
        """
        run = self.directory.path.name
        told = told_rounds(self._ledger, run, seed)
        released = any((r.run, r.seed) == (run, seed) for r in read_releases(self._ledger))
        if released and told is not None and told <= rounds:
            return
        if not released:
            later = "the ledger has no line of it"
        elif told is None:
            later = "how many were told is not known"
        else:
            later = f"round {told:,} was told"
        self.events.observer.warn(
            f"The state of seed {seed} of {run} is that after round {rounds:,}, and {later}: noise is drawn again, and "
            "spends privacy again."
        )
        self._record_release(seed)
        keep_told_rounds(self._ledger, run, seed, rounds)

    @property
    def _ledger(self) -> Path:
        if self.inputs.ledger is None:
            raise InternalError("A private run has no ledger to write to.", "Please report this.")
        return self.inputs.ledger

    def _record_release(self, seed: int) -> None:
        """Write down that noise was drawn for a seed, and what a release of that many rounds costs."""
        privacy = self.spec.trust.privacy
        inputs = self.inputs
        if privacy is None:
            raise InternalError("A run without noise spends no privacy.", "Please report this.")
        clients = len(inputs.clients)
        share = clients_per_round(self.spec.participation, clients) / clients
        release = Release(
            run=self.directory.path.name,
            method=self.spec.method,
            seed=seed,
            dataset=str(inputs.dataset["slug"]),
            dataset_digest=str(inputs.dataset["digest"]),
            partition=inputs.partitions[seed].digest,
            clients=clients,
            clip=privacy.bound,
            noise=privacy.noise,
            share=share if privacy.keeps_participants_secret else 1.0,
            rounds=self.spec.rounds,
            delta=privacy.delta,
            time=time.time(),
        )
        record_release(self._ledger, release)

    def restore_seed(self, seed: int) -> bool:
        """Take a seed that ended before; whether there is one. Nothing is taken of a run that is trained afresh."""
        if self.fresh:
            return False
        found = self.directory.seed_result(seed, self.events.observer.warn)
        if found is None:
            if seed in self.earlier:  # its model is written again, perhaps with other bits
                drop(self.directory.path, [seed])
            return False
        # A seed of a stored result is whole without its model, which may have been removed.
        if (
            found.get("model")
            and seed not in self.earlier
            and not whole_seed(self.directory.path, self.identity.digest, seed)
        ):
            self.events.observer.warn(
                f"The model of seed {seed} is missing or damaged. Seed {seed} begins again."
            )
            return False
        done = SeedResult.from_dict(found)
        if done.partition.get("digest") != self.inputs.partitions[seed].digest:
            return False
        self.done[seed] = done
        self._saved.add(seed)
        return True

    def checkpoint(self, seed: int) -> Snapshot | None:
        """The state of a seed that was stopped, or None."""
        saved = self.directory.checkpoint(seed, self.events.observer.warn)
        if saved is None:
            return None
        state = Snapshot(*saved)
        if state.meta.get("table") is not None:
            try:
                check_table(self.directory.states(seed), state)
            except CorruptionError as error:
                self.events.observer.warn(f"{error.message} Seed {seed} begins again.")
                self.directory.forget(seed)
                return None
        if self.spec.trust.protects:
            self._check_told(seed, int(state.meta["round"]))
        return state

    def save_checkpoint(self, seed: int, snapshot: Snapshot) -> None:
        """Replace the state of a seed."""
        self.directory.save_checkpoint(seed, snapshot.tensors, snapshot.meta)
        snapshot.kept()

    def keep_seed(self, outcome: TrainingOutput, seconds: float) -> None:
        """Keep a seed that has ended, so that a run that is stopped later does not train it again."""
        self.directory.save_seed(outcome.seed, self.end_seed(outcome, seconds).to_dict())
        self._saved.add(outcome.seed)
        if self.spec.trust.protects:
            forget_told_rounds(self._ledger, self.directory.path.name, outcome.seed)

    def end_seed(
        self, outcome: TrainingOutput, seconds: float, inputs: RunInputs | None = None
    ) -> SeedResult:
        """Keep what a seed gave until all have ended; ``inputs`` are others than the run's for a run over sites."""
        secret = self.spec.trust.secret_participants
        result = seed_result(outcome, inputs or self.inputs, seconds, secret=secret)
        held_out = values_held_out(
            {"partition": {"args": self.inputs.partitions[outcome.seed].args}}
        )
        seeds = len({*self.spec.seeds, *self.earlier})
        if self.kept.wants(self.spec.method, result.choice, seeds, held_out):
            temperature = None
            if inputs is None:
                temperature = temperature_of(
                    training_run(self.inputs, self.spec, outcome.seed), outcome
                )
            result.model, notes = save_seed(
                self.directory.path,
                self.inputs,
                self.spec,
                self.identity,
                outcome,
                self.kept,
                temperature,
            )
            for note in dict.fromkeys(notes):
                self.events.observer.note(note)
        self.done[outcome.seed] = result
        return result

    def finish(
        self,
        observer: Observer,
        *,
        result: Mapping[str, Any] | None = None,
        seconds: Mapping[str, float] | None = None,
        measured: Mapping[str, Any] | None = None,
    ) -> Run:
        """Store the result of all seeds in the directory, and give the warnings of those that this command asks for.

        ``result``, ``seconds`` and ``measured`` are added to what every run stores under these names.
        """
        for seed in self.done.keys() - self._saved:
            self.directory.save_seed(seed, self.done[seed].to_dict())
        with self.directory.writing_result():
            run = self._write_result(self._all_seeds(), result, seconds, measured)
        warned = [w for seed in self.spec.seeds for w in self.done[seed].warnings]
        for warning in dict.fromkeys(warned):
            observer.warn(warning)
        self.events.ended(run.result)
        return run

    def _all_seeds(self) -> list[SeedResult]:
        """The seeds of this command and all others in the directory, in rising order."""
        found = dict(self.done)
        for seed in self.directory.seeds():
            if seed not in found:
                kept = self.directory.seed_result(seed, self.events.observer.warn)
                if kept is not None:
                    found[seed] = SeedResult.from_dict(kept)
        lost = set(self.earlier) - found.keys()
        if lost:
            self.events.observer.warn(
                f"The files of seeds {seeds_text(lost)} of {self.directory.path.name} are missing or damaged, so its "
                f"result is without them. Train them again: --seeds {seeds_text(lost)}"
            )
        return [found[seed] for seed in sorted(found)]

    def _write_result(
        self,
        seeds: Sequence[SeedResult],
        result: Mapping[str, Any] | None,
        seconds: Mapping[str, float] | None,
        measured: Mapping[str, Any] | None,
    ) -> Run:
        """Write ``result.json`` and the files that it promises."""
        numbers = tuple(s.seed for s in seeds)
        spec = replace(self.spec, seeds=numbers)
        promised = {**summarise(self.inputs, spec, self.identity, seeds), **(result or {})}
        figures = {
            "seconds": {
                **self.inputs.seconds,
                "train": sum(s.seconds for s in seeds),
                **(seconds or {}),
            },
            "per_seed": {str(s.seed): s.measured for s in seeds},
            **(measured or {}),
            "time": time.time(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        whole = self.directory.finish(
            promised,
            [r for s in seeds for r in s.rounds],
            figures,
            before=lambda result: seal(
                self.directory.path, self.identity.digest, digest_of(result), numbers, self.kept
            ),
            files=files_of_clients(seeds),
            config=self._config_of(spec),
        )
        reused = tuple(seed for seed in numbers if seed in self.earlier and not self.fresh)
        return Run(self.directory.path, whole, figures, reused_seeds=reused)


def resolve_inputs(
    inputs: RunInputs, config: TrainConfig, observer: Observer
) -> tuple[RunInputs, ResolvedRun]:
    """Resolve what determines a run, say what was chosen, and move the inputs to the device that computes.

    Raises UsageError, also for more clients a round than there are; MachineError for ``cuda`` without a usable GPU.
    """
    spec = inputs.resolve(config)
    if cost := spec.privacy_cost(len(inputs.clients)):
        observer.note(describe_privacy(cost))  # before anything is trained
        if cost["noise"] and cost["delta"] * len(inputs.clients) >= 1:
            observer.warn(
                f"A delta of {cost['delta']:g} is also kept by telling everything of 1 of {len(inputs.clients):,} "
                f"clients: choose one far below {1 / len(inputs.clients):g} (--dp-delta)."
            )
    check_participation(config, len(inputs.clients))
    note_paper_choices(inputs, spec, observer)
    device = training_device(config.device, observer, live=inputs.data.towers is not None)
    return on_device(inputs, device), replace(spec, device=device)


def note_paper_choices(inputs: RunInputs, spec: ResolvedRun, observer: Observer) -> None:
    """Say what was not asked for and matters, as rounds and participation of the paper, and what changes nothing."""
    config = spec.requested
    method = inputs.method
    for note in setting_notes(method, config):
        observer.note(note)
    if method.one_shot and (config.rounds or 1) > 1:
        observer.warn(f"{method.name} takes one round; --rounds {config.rounds} changes nothing.")
    if (
        config.eval_clients is not None
        and spec.eval_clients is None
        and config.eval_clients != "all"
    ):
        observer.warn(
            f"{method.name} has one model for all, so --eval-clients {config.eval_clients} changes nothing."
        )
    if config.rounds is None and not method.one_shot:
        observer.note(
            f"Rounds {spec.rounds}: the setting of {method.name}'s paper (--rounds chooses)."
        )
    if config.participation is None and not method.central:
        share = spec.participation_text
        observer.note(
            f"Clients a round {share}: the setting of {method.name}'s paper (--participation chooses)."
        )


def open_run(
    inputs: RunInputs,
    spec: ResolvedRun,
    runs: Path,
    *,
    fresh: bool,
    observer: Observer,
    position: GridPosition = ALONE,
    kept: KeptModels | None = None,
    stop: Stop | None = None,
) -> OpenRun:
    """Find the directory of a run, and its result if it is there. Raises CorruptionError for a damaged result.

    ``fresh`` opens it as if there were no result; ``kept`` says which models are saved, by default all. ``stop`` ends
    the wait for another process that is replacing the result.
    """
    identity = Identity(
        _identity_of_config(spec),
        inputs.features.digests,
        str(inputs.dataset["digest"]),
        _identity_of_partition(inputs),
        code_with_plugins(code_of(inputs.method), spec.plugins),
    )
    for plugin in spec.plugins:
        observer.note(
            f"{plugin.kind.removesuffix('s').capitalize()} {plugin.name}: from {plugin.origin}."
        )
    directory = RunDirectory(runs, identity)
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
        "partition": partition_section(
            inputs.partition_name, [partition_facts(inputs.partitions[s]) for s in spec.seeds]
        ),
        "trust": {"privacy": spec.privacy_cost(len(inputs.clients))},
        "device": spec.device,
        "code": identity.code,
        "digest": identity.digest,
    }
    events = RunEvents(observer, directory.path, facts, position)
    opened = OpenRun(
        inputs, spec, identity, directory, events, kept=kept or KeptModels(SaveModels())
    )
    if fresh:
        return opened
    try:
        opened.find_stored()
    except DamagedRunError:
        # A process that makes the run again may be replacing its files: look when it has ended.
        with owning([directory.path], observer, stop or Stop(), private=spec.trust.protects):
            opened.find_stored()
    return opened


def _identity_of_config(spec: ResolvedRun) -> dict[str, Any]:
    """What was asked for, without the name of the preset, which stands for hyperparameters that are all in it.

    Simulated noise is keyed by the name too, so there it counts.
    """
    words = spec.to_identity()
    if spec.trust.privacy is None:
        del words["preset"]
    return words


def _identity_of_partition(inputs: RunInputs) -> str:
    """Digest of the partition that all seeds share, else of how every seed draws its own."""
    first = next(iter(inputs.partitions.values()))
    if not inputs.repartition:
        return first.digest
    return digest_of([first.scheme, partition_facts(first)["args"], "one partition for each seed"])


def note_earlier(run: OpenRun, observer: Observer) -> None:
    """Say which seeds of a run are stored already, where others are missing."""
    there = set(run.spec.seeds) & set(run.earlier)
    missing = set(run.spec.seeds) - there
    observer.note(
        f"{len(there)} of {len(run.spec.seeds)} seeds were there already in {run.directory.path.name}. Training seeds "
        f"{seeds_text(missing)}. The result is over seeds {seeds_text({*run.spec.seeds, *run.earlier})}."
    )


def note_stored(run: Run, observer: Observer) -> None:
    """Say that a result is there already, and what is missing of it."""
    again = "--fresh runs it again"
    cost = run.result.get("trust", {}).get("privacy", {})
    if cost.get("noise") and not cost.get("simulation"):
        again = (
            "to return it spends no more privacy, --fresh draws new noise and spends as much again"
        )
    observer.note(f"The same run is there already ({run.path.name}); {again}.")
    if not run.measured:
        observer.warn(
            f"{run.path / 'measured.json'} is missing or damaged: the result is whole, its times are lost "
            "(--fresh measures again)."
        )
