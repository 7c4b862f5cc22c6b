"""``train``: a setting to a stored result, seed by seed, from wherever a killed run stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.config import Home, PartitionConfig, TrainConfig, to_table
from fedcache.errors import Exit, FedcacheError
from fedcache.extract.stop import Stop
from fedcache.progress import Observer
from fedcache.runs.checkpointing import Pace, Watch, stopped
from fedcache.runs.directory import RunDirectory
from fedcache.runs.events import OnRound, Place, Teller, hooked, tell_stored
from fedcache.runs.identity import Identity
from fedcache.runs.plugin_code import code_of
from fedcache.runs.prepare import Setting, parse_participation, parse_seeds, prepare_run
from fedcache.runs.results import Seeded, seed_record, summarise
from fedcache.runs.run import Run
from fedcache.runs.spec import (
    check_values,
    on_device,
    refuse_contradictions,
    resolved_config,
    training_device,
)
from fedcache.runs.trust import describe_privacy, policy_from_config, privacy_cost

if TYPE_CHECKING:
    from fedcache.federate.engine.method import Method


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
) -> Run:
    """Train a method on cached features, over seeds; a finished run of the same configuration is returned as it is.

    Args:
        config: what to train; None fields take the defaults of the method's paper.
        home: where stores and runs are.
        method: one of the user's own, in the place of the one that ``config`` names.
        partition: how to deal rows, when ``config.partition`` names no saved one.
        runs: directory of results instead of ``home.runs``.
        repartition: every seed draws its own partition (else all seeds share one).
        extract: whether to run the extraction that is missing.
        fresh: run again although the result is there.
        observer: told the story.
        hooks: each called with every ``Round``, also those of a stored result; see ``Hooked`` for what one costs that
            fails.
        stop: set by a signal handler; honoured where no finished round is lost.

    Raises:
        FedcacheError: USAGE, STORE, CORRUPT, FEDERATED; INTERRUPTED after a stop, resumable.
    """
    observer, stop = hooked(observer, hooks), stop or Stop()
    refuse_contradictions(config, partition or PartitionConfig())
    check_values(config)
    if method is not None:
        code_of(method)  # refused before anything is extracted
    if config.clients_from is not None:
        from fedcache.runs.prepare_shards import prepare_from_shards

        setting = prepare_from_shards(config, home, observer, method)
    else:
        setting, _ = prepare_run(
            config,
            partition or PartitionConfig(),
            home,
            repartition=repartition,
            extract=extract,
            observer=observer,
            stop=stop,
            method=method,
        )
    return train_setting(setting, config, runs or home.runs, fresh=fresh, observer=observer, stop=stop)


@dataclass
class Opened:
    """A run whose directory is known.

    Attributes:
        setting: on the device that computes.
        config: as asked.
        resolved: what determines the result.
        identity: digests of it.
        directory: where it lies.
        stored: its result, when it is there already.
    """

    setting: Setting
    config: TrainConfig
    resolved: dict[str, Any]
    identity: Identity
    directory: RunDirectory
    stored: Run | None


def train_setting(
    setting: Setting,
    config: TrainConfig,
    runs: Path,
    *,
    fresh: bool,
    observer: Observer,
    stop: Stop,
    place: Place | None = None,
) -> Run:
    """Run every seed of a resolved setting and store the result; ``place`` is that of a grid's point."""
    import torch

    opened = open_run(setting, config, runs, fresh=fresh, observer=observer)
    if opened.stored is not None:
        tell_stored(observer, opened.stored.path, opened.stored.result, place)
        return opened.stored
    from fedcache.runs.loop_points import foresee

    foresee(opened.setting, config)  # refuses what does not fit, before anything is written
    begin_run(opened, fresh=fresh)
    resolved, directory, seeds = opened.resolved, opened.directory, parse_seeds(config.seeds)
    teller = teller_of(opened, observer, place)
    done: list[Seeded] = []
    observer.start(f"training {setting.method.name}", len(seeds) * int(resolved["rounds"]), "rounds")
    try:
        for seed in seeds:
            finished = directory.seed_result(seed)
            if finished is not None:
                done.append(Seeded.from_dict(finished))
                teller.again(seed, done[-1].rounds)
                observer.advance(int(resolved["rounds"]))
                continue
            dtype = getattr(torch, config.dtype)
            made = _one_seed(opened.setting, config, resolved, seed, directory, teller, stop, dtype)
            directory.save_seed(seed, made.to_dict())
            done.append(made)
    finally:
        observer.stop()
    return finish_run(opened, done, observer)


def open_run(
    setting: Setting,
    config: TrainConfig,
    runs: Path,
    *,
    fresh: bool,
    observer: Observer,
    together: bool = False,
) -> Opened:
    """Resolve what determines a run, say what was chosen, and look whether it is there.

    Args:
        setting: from ``prepare_run``.
        config: as asked.
        runs: directory of all runs.
        fresh: as if it were not there.
        observer: told the choices.
        together: whether it is a point that a grid computes together with others. That is equal to the run alone up to
            rounding, so it has a digest of its own.

    Raises:
        FedcacheError: USAGE; CORRUPT for a damaged result.
    """
    resolved = resolved_config(setting, config)
    policy_from_config(config, setting.method)
    if cost := privacy_cost(resolved, len(next(iter(setting.partitions.values())).clients)):
        observer.note(describe_privacy(cost))  # before anything is trained
    seeds = parse_seeds(config.seeds)
    check_participation(config, len(next(iter(setting.partitions.values())).clients))
    tell_chosen(setting.method, config, resolved, observer)
    resolved["device"] = device = training_device(config.device, observer, live=setting.data.towers is not None)
    setting = on_device(setting, device)
    identity = Identity(
        {**resolved, "together": True} if together else resolved,
        setting.features,
        setting.dataset["digest"],
        [setting.partitions[s].digest for s in seeds],
        code_of(setting.method),
    )
    directory = RunDirectory(runs, identity)
    stored = None if fresh else directory.stored()
    run = None
    if stored is not None:
        observer.note(f"The same run is there already ({directory.path.name}); --fresh runs it again.")
        known = directory.measured()
        if known is None:
            observer.warn(
                f"{directory.path / 'measured.json'} is missing or damaged: the result is whole, its times are lost "
                "(--fresh measures again)."
            )
        run = Run(directory.path, stored, known or {}, reused=True)
    return Opened(setting, config, resolved, identity, directory, run)


def check_participation(config: TrainConfig, clients: int) -> None:
    """Refuse to ask more clients than there are.

    Raises:
        FedcacheError: USAGE.
    """
    asked = parse_participation(config.participation)
    if isinstance(asked, int) and asked > clients:
        raise FedcacheError(
            Exit.USAGE, f"--participation {asked}, but there are {clients} clients.", "For example --participation all"
        )


def tell_chosen(method: Method, config: TrainConfig, resolved: Mapping[str, Any], observer: Observer) -> None:
    """Say what was not asked for and matters: rounds and participation of the method's paper."""
    if method.one_shot and (config.rounds or 1) > 1:
        observer.warn(f"{method.name} takes one round; --rounds {config.rounds} changes nothing.")
    if config.rounds is None and not method.one_shot:
        observer.note(f"Rounds {resolved['rounds']}: the setting of {method.name}'s paper (--rounds chooses).")
    if config.participation is None and not method.central:
        share = resolved["participation"]
        observer.note(f"Clients a round {share}: the setting of {method.name}'s paper (--participation chooses).")


def teller_of(opened: Opened, observer: Observer, place: Place | None = None) -> Teller:
    """Who tells of the rounds of an opened run."""
    setting, resolved = opened.setting, opened.resolved
    facts = {
        **resolved,
        "seeds": parse_seeds(opened.config.seeds),
        "dataset": setting.dataset,
        "backbones": setting.backbones,
        "hyperparameters": resolved["set"],
    }
    return Teller(observer, opened.directory.path, facts, place)


def begin_run(opened: Opened, *, fresh: bool) -> None:
    """Make the directory of a run with the configuration that runs it again."""
    setting, config, resolved, directory = opened.setting, opened.config, opened.resolved, opened.directory
    seeds = parse_seeds(config.seeds)
    own = {f"partition-{s}": setting.partitions[s].to_payload() for s in seeds} if setting.named is None else {}
    table = to_table(
        replace(config, rounds=resolved["rounds"], participation=resolved["participation"], set=resolved["set"])
    )
    if (
        setting.named is None
        and len({p.digest for p in setting.partitions.values()}) == 1
        and config.clients_from is None
    ):
        table["partition"] = str(directory.path.resolve() / f"partition-{seeds[0]}.json")
    directory.begin(table, own)
    if fresh:
        directory.restart()


def finish_run(opened: Opened, done: Sequence[Seeded], observer: Observer) -> Run:
    """Store the result of all seeds."""
    import torch

    setting = opened.setting
    result = summarise(setting, opened.resolved, opened.identity, done)
    seconds = {**setting.seconds, "train": sum(d.seconds for d in done)}
    measured = {
        "seconds": seconds,
        "per_seed": {str(d.seed): d.measured for d in done},
        "time": time.time(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    result = opened.directory.finish(result, [r for d in done for r in d.rounds], measured)
    for warning in dict.fromkeys(w for d in done for w in d.warnings):
        observer.warn(warning)
    return Run(opened.directory.path, result, measured)


def _one_seed(
    setting: Setting,
    config: TrainConfig,
    resolved: Mapping[str, Any],
    seed: int,
    directory: RunDirectory,
    teller: Teller,
    stop: Stop,
    dtype: Any,
) -> Seeded:
    """One seed, from its checkpoint when there is one."""
    from fedcache.federate.engine.outcome import Snapshot
    from fedcache.federate.engine.run import run
    from fedcache.federate.engine.training_run import RunCallbacks, TrainingRun

    began = time.perf_counter()
    saved = directory.checkpoint(seed)
    state = Snapshot(*saved) if saved is not None else None
    observer = teller.observer
    if state is not None:
        teller.again(seed, state.meta["records"])
        observer.note(f"Seed {seed}: going on after round {state.meta['round']}.")
        observer.advance(int(state.meta["round"]))
    pace = Pace()
    watch = Watch(stop, f"seed {seed}", 0 if state is None else int(state.meta["round"]))
    partition = setting.partitions[seed]

    def on_round(
        _point: int, number: int, metrics: dict[str, Any], traffic: dict[str, Any], snapshot: Callable[[], Snapshot]
    ) -> None:
        teller.measured(seed, number, metrics, traffic)
        observer.advance(1)
        watch.done = number
        if number == resolved["rounds"]:
            return
        if stop.requested or pace.due():
            with pace:
                taken = snapshot()
                directory.save_checkpoint(seed, taken.tensors, taken.meta)
            pace.over()
            watch.kept = number
        if stop.requested:
            raise stopped(f"after round {number} of seed {seed}; the state is kept")

    spec = TrainingRun(
        setting.method,
        setting.data,
        partition.clients,
        rounds=int(resolved["rounds"]),
        participation=parse_participation(str(resolved["participation"])),
        seed=seed,
        dtype=dtype,
        eval_every=int(resolved["eval_every"]),
        overrides=setting.own,
        trust=policy_from_config(config),
        execution=str(resolved["lift"]),
    )
    outcome = run(spec, setting.hp, state=state, callbacks=RunCallbacks(before_step=watch, on_round=on_round))
    return seed_record(outcome, setting, time.perf_counter() - began)
