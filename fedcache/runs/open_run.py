"""One run and its directory: choices said, a stored result found, seeds kept as they end, the result written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedcache.config import TrainConfig
from fedcache.extract.device import resolve_device
from fedcache.federate.engine.outcome import Snapshot, TrainingOutput
from fedcache.progress import Observer
from fedcache.runs.directory import RunDirectory
from fedcache.runs.events import ALONE, GridPosition, RunEvents
from fedcache.runs.identity import Identity
from fedcache.runs.plugin_code import code_of
from fedcache.runs.prepare import RunInputs
from fedcache.runs.results import SeedResult, seed_result, summarise
from fedcache.runs.run import Run
from fedcache.runs.spec import ResolvedRun, check_participation
from fedcache.runs.trust import describe_privacy


@dataclass
class OpenRun:
    """A run whose directory is known.

    Attributes:
        inputs: on the device that computes.
        spec: what determines the result.
        identity: digests of it.
        directory: where it lies.
        events: tells of its rounds.
        stored: its result, when it is there already.
        done: its seeds that have ended.
    """

    inputs: RunInputs
    spec: ResolvedRun
    identity: Identity
    directory: RunDirectory
    events: RunEvents
    stored: Run | None = None
    done: dict[int, SeedResult] = field(default_factory=dict)

    def begin(self, *, fresh: bool) -> None:
        """Make the directory, with the configuration that runs it again and the partitions made for it.

        ``fresh`` forgets what was computed of it.
        """
        made_here = self.inputs.partition_name is None and not self.spec.engine
        partitions = {f"partition-{s}": self.inputs.partitions[s].to_payload() for s in self.spec.seeds}
        table = self.spec.to_config()
        same_for_all = len({p.digest for p in self.inputs.partitions.values()}) == 1
        if made_here and same_for_all and "clients_from" not in table:
            table["partition"] = str(self.directory.path.resolve() / f"partition-{self.spec.seeds[0]}.json")
        self.directory.begin(table, partitions if made_here else {})
        if fresh:
            self.directory.restart()

    def restore_seed(self, seed: int) -> bool:
        """Take a seed that ended before the run was stopped; whether there is one."""
        found = self.directory.seed_result(seed)
        if found is not None:
            self.done[seed] = SeedResult.from_dict(found)
        return found is not None

    def checkpoint(self, seed: int) -> Snapshot | None:
        """The state of a seed that was stopped, or None."""
        saved = self.directory.checkpoint(seed)
        return None if saved is None else Snapshot(*saved)

    def save_checkpoint(self, seed: int, snapshot: Snapshot) -> None:
        """Replace the state of a seed."""
        self.directory.save_checkpoint(seed, snapshot.tensors, snapshot.meta)

    def end_seed(self, outcome: TrainingOutput, seconds: float, inputs: RunInputs | None = None) -> SeedResult:
        """Keep what a seed gave until all have ended; ``inputs`` are others than the run's for a run over sites."""
        result = self.done[outcome.seed] = seed_result(outcome, inputs or self.inputs, seconds)
        return result

    def finish(
        self,
        observer: Observer,
        *,
        result: Mapping[str, Any] | None = None,
        seconds: Mapping[str, float] | None = None,
        measured: Mapping[str, Any] | None = None,
    ) -> Run:
        """Store the result of all seeds, and give their warnings.

        Args:
            observer: told the warnings.
            result: more of it.
            seconds: more that was measured in seconds.
            measured: more that was measured.
        """
        seeds = [self.done[seed] for seed in self.spec.seeds]
        promised = {**summarise(self.inputs, self.spec, self.identity, seeds), **(result or {})}
        figures = {
            "seconds": {**self.inputs.seconds, "train": sum(s.seconds for s in seeds), **(seconds or {})},
            "per_seed": {str(s.seed): s.measured for s in seeds},
            **(measured or {}),
            "time": time.time(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        whole = self.directory.finish(promised, [r for s in seeds for r in s.rounds], figures)
        for warning in dict.fromkeys(w for s in seeds for w in s.warnings):
            observer.warn(warning)
        return Run(self.directory.path, whole, figures)


def resolve_inputs(inputs: RunInputs, config: TrainConfig, observer: Observer) -> tuple[RunInputs, ResolvedRun]:
    """Resolve what determines a run, say what was chosen, and move the inputs to the device that computes.

    Raises:
        UsageError, also for more clients a round than there are; MachineError for ``cuda`` without a usable
            GPU.
    """
    spec = inputs.resolve(config)
    if cost := spec.privacy_cost(len(inputs.clients)):
        observer.note(describe_privacy(cost))  # before anything is trained
    check_participation(config, len(inputs.clients))
    note_paper_choices(inputs, spec, observer)
    device = training_device(config.device, observer, live=inputs.data.towers is not None)
    return on_device(inputs, device), replace(spec, device=device)


def note_paper_choices(inputs: RunInputs, spec: ResolvedRun, observer: Observer) -> None:
    """Say what was not asked for and matters: rounds and participation of the method's paper."""
    config, method = spec.requested, inputs.method
    if method.one_shot and (config.rounds or 1) > 1:
        observer.warn(f"{method.name} takes one round; --rounds {config.rounds} changes nothing.")
    if config.rounds is None and not method.one_shot:
        observer.note(f"Rounds {spec.rounds}: the setting of {method.name}'s paper (--rounds chooses).")
    if config.participation is None and not method.central:
        share = spec.participation_text
        observer.note(f"Clients a round {share}: the setting of {method.name}'s paper (--participation chooses).")


def training_device(requested: str, observer: Observer, *, live: bool = False) -> str:
    """``auto`` is the CPU, where light heads are fast and the docs were measured; ``cuda`` never falls back.

    With ``live`` encoders ``auto`` takes a GPU when torch can use one.

    Raises:
        UsageError for an unknown device, MachineError for ``cuda`` without a usable GPU.
    """
    if requested == "auto" and not live:
        if torch.cuda.is_available():
            observer.note(
                "Training on the CPU, although there is a GPU: heads are light (--device cuda moves it there)."
            )
        return "cpu"
    return resolve_device(requested).kind


def on_device(inputs: RunInputs, device: str) -> RunInputs:
    """Inputs with their tensors where they are computed on."""
    if device == "cpu":
        return inputs
    d = inputs.data
    return inputs.with_data(
        replace(
            d,
            x=d.x.to(device),
            y=d.y.to(device),
            text=None if d.text is None else d.text.to(device),
            domain=None if d.domain is None else d.domain.to(device),
            towers=None if d.towers is None else d.towers.to(device),
        )
    )


def open_run(
    inputs: RunInputs, spec: ResolvedRun, runs: Path, *, fresh: bool, observer: Observer, position: GridPosition = ALONE
) -> OpenRun:
    """Find the directory of a run, and its result if it is there.

    Args:
        inputs: what it reads.
        spec: what determines the result.
        runs: directory of all runs.
        fresh: as if there were no result.
        observer: told of the rounds.
        position: in a grid.

    Raises:
        CorruptionError for a damaged result.
    """
    identity = Identity(
        spec.to_identity(),
        inputs.features.digests,
        str(inputs.dataset["digest"]),
        [inputs.partitions[seed].digest for seed in spec.seeds],
        code_of(inputs.method),
    )
    directory = RunDirectory(runs, identity)
    facts = {
        "method": spec.method,
        "preset": spec.preset,
        "rounds": spec.rounds,
        "participation": spec.participation_text,
        "dtype": spec.requested.dtype,
        "seeds": spec.seeds,
        "dataset": inputs.dataset,
        "backbones": inputs.backbones,
        "hyperparameters": spec.hyperparameters,
    }
    opened = OpenRun(inputs, spec, identity, directory, RunEvents(observer, directory.path, facts, position))
    result = None if fresh else directory.stored()
    if result is not None:
        opened.stored = Run(directory.path, result, directory.measured() or {}, reused=True)
    return opened


def note_stored(run: Run, observer: Observer) -> None:
    """Say that a result is there already, and what is missing of it."""
    observer.note(f"The same run is there already ({run.path.name}); --fresh runs it again.")
    if not run.measured:
        observer.warn(
            f"{run.path / 'measured.json'} is missing or damaged: the result is whole, its times are lost "
            "(--fresh measures again)."
        )
