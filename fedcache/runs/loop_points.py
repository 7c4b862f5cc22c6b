"""Points of a grid that are one program: they differ in floats alone, and are trained together where that pays.

Each point is a run with a directory, checkpoints and a result of its own; a killed grid goes on from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.config import TrainConfig
from fedcache.errors import FedcacheError
from fedcache.extract.stop import Stop
from fedcache.progress import Observer, Silent
from fedcache.runs.checkpointing import Pace, Watch, stopped
from fedcache.runs.directory import DamagedRunError
from fedcache.runs.encoders import with_rounds
from fedcache.runs.events import Place, Teller, tell_stored
from fedcache.runs.loop import Opened, begin_run, finish_run, open_run, teller_of
from fedcache.runs.prepare import Setting, parse_participation, parse_seeds
from fedcache.runs.results import Seeded, seed_record
from fedcache.runs.run import Run
from fedcache.runs.trust import policy_from_config

if TYPE_CHECKING:
    from fedcache.federate.engine.outcome import Snapshot, TrainingOutput
    from fedcache.federate.execution.grid_cache import GridCache
    from fedcache.federate.execution.load import ExecutionPlan
    from fedcache.federate.execution.memory import Forecast

Told = Callable[[int, "Run | FedcacheError"], None]
"""(point, its run or the error that ended it), as each ends."""


def settings_of(setting: Setting, configs: Sequence[TrainConfig]) -> list[Setting]:
    """The setting of the first point, with the hyperparameters of each."""
    made = []
    for config in configs:
        method = setting.method
        hp = with_rounds(method.resolve(config.preset, config.set), config.rounds or method.defaults.rounds)
        kept = {"feat_post": setting.hp["feat_post"]} if "feat_post" in hp else {}
        made.append(replace(setting, hp={**hp, **kept}))
    return made


def foresee(setting: Setting, config: TrainConfig, points: int = 1) -> tuple[ExecutionPlan, Forecast]:
    """How that many points would be computed, and what they would need of memory.

    Raises:
        FedcacheError: USAGE for a forced lift that cannot serve; ENVIRONMENT when the peak does not fit into memory.
    """
    import torch

    from fedcache.federate.engine.run import plan
    from fedcache.federate.engine.training_run import TrainingRun
    from fedcache.federate.execution.load import free_memory
    from fedcache.federate.execution.memory import forecast, refuse_too_much

    check_round(setting, config)
    spec = TrainingRun(
        setting.method,
        setting.data,
        next(iter(setting.partitions.values())).clients,
        participation=_share(setting, config),
        dtype=getattr(torch, config.dtype),
        overrides=setting.own,
        execution=config.lift,
    )
    lift, load = plan(spec, setting.hp, points=points)
    stacked = "stack" in setting.method.pool(setting.hp).values()
    found = forecast(
        load, lift, opt=str(setting.hp.get("opt", "sgd")), stacked=stacked, closed=not setting.method.gradient
    )
    if setting.data.x.device.type == "cpu":
        refuse_too_much(found, load, lift, free_memory(), loaded=True)
    return lift, found


def dry_run(
    methods: Sequence[tuple[Setting, TrainConfig, int]],
) -> dict[str, Any]:
    """What each program would do: its lift, chunk, points at once and the peak of memory in bytes."""
    plans = []
    for setting, config, points in methods:
        lift, found = foresee(setting, config, points)
        plans.append(
            {
                "method": setting.method.name,
                "points": points,
                "lift": lift.name,
                "clients_at_once": lift.chunk,
                "points_at_once": lift.points if lift.name != "loop" else 1,
                "memory": found.to_dict(),
                "words": found.words(),
            }
        )
    return {"programs": plans}


def check_round(setting: Setting, config: TrainConfig) -> None:
    """Refuse a robust rule that a round's clients cannot carry.

    Raises:
        FedcacheError: USAGE.
    """
    from fedcache.federate.engine.run_state import sampled

    clients = len(next(iter(setting.partitions.values())).clients)
    policy_from_config(config, setting.method).check_round(sampled(_share(setting, config), clients))


def _share(setting: Setting, config: TrainConfig) -> int | float | None:
    from fedcache.runs.spec import resolved_config

    return parse_participation(str(resolved_config(setting, config)["participation"]))


def train_together(
    settings: Sequence[Setting],
    configs: Sequence[TrainConfig],
    runs: Path,
    *,
    shared: GridCache,
    fresh: bool,
    observer: Observer,
    stop: Stop,
    told: Told,
    places: Sequence[Place],
) -> None:
    """Train points that are one program and store each as a run.

    Args:
        settings: from ``settings_of``.
        configs: what was asked for each.
        runs: directory of all runs.
        shared: Gram matrices and features of other programs.
        fresh: train points although their results are there.
        observer: told the story once, and the rounds of all points.
        stop: honoured after a round; every point keeps its state.
        told: called with each point as it ends.
        places: of each in the grid.

    Raises:
        FedcacheError: what concerns all points; INTERRUPTED after a stop.
    """
    opened: dict[int, Opened] = {}
    for number, (setting, config) in enumerate(zip(settings, configs, strict=True)):
        try:
            alone = open_run(setting, config, runs, fresh=fresh, observer=Silent() if opened else observer)
            point = open_run(setting, config, runs, fresh=fresh, observer=Silent(), together=True)
        except DamagedRunError as error:
            told(number, error)
            continue
        if (stored := alone.stored or point.stored) is not None:
            tell_stored(observer, stored.path, stored.result, places[number])
            told(number, stored)
            continue
        begin_run(point, fresh=fresh)
        opened[number] = point
    if not opened:
        return
    first = next(iter(opened.values()))
    rounds, seeds = int(first.resolved["rounds"]), parse_seeds(first.config.seeds)
    tellers = {n: teller_of(point, observer, places[n]) for n, point in opened.items()}
    done: dict[int, list[Seeded]] = {n: [] for n in opened}
    failed: dict[int, FedcacheError] = {}
    observer.start(f"training {len(opened)} points of {first.setting.method.name}", len(seeds) * rounds * len(opened),
                   "rounds")  # fmt: skip
    try:
        for seed in seeds:
            todo: list[int] = []
            for n, point in opened.items():
                finished = point.directory.seed_result(seed)
                if finished is not None:
                    done[n].append(Seeded.from_dict(finished))
                    tellers[n].again(seed, done[n][-1].rounds)
                    observer.advance(rounds)
                elif n not in failed:
                    todo.append(n)
            for group in _by_round({n: opened[n] for n in todo}, seed):
                for n, out in _train(opened, group, seed, shared, tellers, stop).items():
                    if isinstance(out, FedcacheError):
                        failed[n] = out
                    else:
                        done[n].append(out)
    finally:
        observer.stop()
    for n, point in opened.items():
        told(n, failed[n] if n in failed else finish_run(point, done[n], observer))


def _by_round(points: dict[int, Opened], seed: int) -> list[list[tuple[int, Snapshot | None]]]:
    """Points with their checkpoints, those of the same round together: a kill may fall between two checkpoints."""
    from fedcache.federate.engine.outcome import Snapshot

    groups: dict[int, list[tuple[int, Snapshot | None]]] = {}
    for n, point in points.items():
        saved = point.directory.checkpoint(seed)
        state = Snapshot(*saved) if saved is not None else None
        groups.setdefault(0 if state is None else int(state.meta["round"]), []).append((n, state))
    return [groups[r] for r in sorted(groups)]


def _train(
    opened: dict[int, Opened],
    group: Sequence[tuple[int, Snapshot | None]],
    seed: int,
    shared: GridCache,
    tellers: Mapping[int, Teller],
    stop: Stop,
) -> dict[int, Seeded | FedcacheError]:
    """One seed of some points; each is kept as it ends."""
    import torch

    from fedcache.federate.engine.run import run_points
    from fedcache.federate.engine.training_run import RunCallbacks, TrainingRun

    numbers, states = [n for n, _ in group], [state for _, state in group]
    first = opened[numbers[0]]
    setting, resolved = first.setting, first.resolved
    rounds, began = int(resolved["rounds"]), time.perf_counter()
    pace = Pace()
    kept = 0 if states[0] is None else int(states[0].meta["round"])
    watch = Watch(stop, f"seed {seed} of {len(numbers)} points", kept)
    observer = tellers[numbers[0]].observer
    for n, state in group:
        if state is not None:
            tellers[n].again(seed, state.meta["records"])
            observer.advance(int(state.meta["round"]))
    keep: set[int] = set()
    due = False

    def on_round(
        point: int, number: int, metrics: dict[str, Any], traffic: dict[str, Any], snapshot: Callable[[], Snapshot]
    ) -> None:
        nonlocal due
        tellers[numbers[point]].measured(seed, number, metrics, traffic)
        observer.advance(1)
        if number == rounds:
            return
        if not keep:  # the first point of a round decides for all of them
            due = stop.requested or pace.due()
        keep.add(point)
        if due:
            with pace:
                taken = snapshot()
                opened[numbers[point]].directory.save_checkpoint(seed, taken.tensors, taken.meta)

    def after_round(number: int) -> None:
        keep.clear()
        if due:
            pace.over()
            watch.kept = number
        watch.done = number
        if due and stop.requested and number < rounds:
            raise stopped(f"after round {number} of seed {seed}; {len(numbers)} points keep their states")

    found: dict[int, Seeded | FedcacheError] = {}

    def on_done(start: int, ended: Sequence[TrainingOutput | FedcacheError]) -> None:
        nonlocal began
        seconds = (time.perf_counter() - began) / len(ended)
        for n, out in zip(numbers[start:], ended, strict=False):
            if isinstance(out, FedcacheError):
                found[n] = out
                continue
            made = found[n] = seed_record(out, setting, seconds)
            opened[n].directory.save_seed(seed, made.to_dict())
        watch.begin(kept)
        began = time.perf_counter()

    spec = TrainingRun(
        setting.method,
        setting.data,
        setting.partitions[seed].clients,
        rounds=rounds,
        participation=parse_participation(str(resolved["participation"])),
        seed=seed,
        dtype=getattr(torch, str(resolved["dtype"])),
        eval_every=int(resolved["eval_every"]),
        overrides=setting.own,
        trust=policy_from_config(opened[numbers[0]].config),
        execution=str(resolved["lift"]),
    )
    callbacks = RunCallbacks(watch, on_round, after_round, on_done)
    run_points(spec, [opened[n].setting.hp for n in numbers], states=states, callbacks=callbacks, cache=shared)
    return found
