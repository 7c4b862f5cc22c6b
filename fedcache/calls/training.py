"""Runs and grids, for ``train`` and ``grid`` of the Python API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcache.calls.stores import keep_partition, opened
from fedcache.config import Home, SaveModels, TrainConfig, resolve
from fedcache.errors import Exit, FedcacheError, UsageError, shell_word
from fedcache.federate.engine.method import Method
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import Partition
from fedcache.grids import train_grid as grids
from fedcache.grids.hold_out import EACH, every_value
from fedcache.grids.result import Grid
from fedcache.grids.sampling import Sampling
from fedcache.grids.search import train_points
from fedcache.plugins import register
from fedcache.progress import Observer
from fedcache.runs.events import OnRound
from fedcache.runs.loop import train as run_training
from fedcache.runs.run import Run
from fedcache.runs.trackers.choose import tracking
from fedcache.store.store import Store

Methods = str | Method | Sequence[str | Method]
"""Names of methods, and the caller's own methods."""


def train_config(
    store: Store | str | Path | None,
    parts: Partition | str | None,
    seeds: int | Iterable[int],
    settings: Mapping[str, Any] | None,
    given: Mapping[str, Any],
) -> TrainConfig:
    """The configuration of ``train``.

    A partition that is not in the store is saved there; for a published store, it is saved in the home.
    """
    # Objects of Python become the texts of a configuration.
    if isinstance(seeds, int):
        seeds = (seeds,)
    chosen = tuple(seeds)
    if not chosen:
        raise UsageError("seeds is empty.", "For example seeds=range(3)")
    is_partition = hasattr(parts, "to_payload")
    if parts is not None and not isinstance(parts, str) and not is_partition:
        raise UsageError(
            f"parts is {parts!r}, expected a partition or the name of a saved one.",
            "fc.partition(store, 'iid')",
        )
    if settings is not None and not hasattr(settings, "items"):
        raise UsageError(
            f"settings is {settings!r}, expected names and values.",
            "For example settings={'lr': 0.1}",
        )
    flags: dict[str, Any] = {
        **given,
        "seeds": ",".join(map(str, chosen)),
        "set": dict(settings or {}),
    }
    if isinstance(store, str | Path):
        flags["store"] = str(store)
    elif store is not None:
        flags["store"] = store.place
    if isinstance(parts, str):
        flags["partition"] = parts
    elif parts is not None:
        # A partition in memory is saved under its name and digest, unless the store has it under its name.
        held = opened(store)
        name = parts.default_name()
        if name not in held.partitions or held.partition(name).get("digest") != parts.digest:
            digest = parts.digest[:8]
            name = f"{name}-{digest}"
            if held.address is None:
                held.put_partition(name, parts.to_file())
            else:
                name = str(keep_partition(Home.from_environment(), parts))
        flags["partition"] = name
    return resolve(TrainConfig, flags, {}, "train()")


def train(
    method: str | Method,
    store: Store | str | Path | None,
    parts: Partition | str | None,
    seeds: int | Iterable[int],
    settings: Mapping[str, Any] | None,
    given: Mapping[str, Any],
    save: SaveModels,
    *,
    observer: Observer | None,
    on_round: OnRound | None,
    track: str | Sequence[str] | None,
    fresh: bool,
) -> Run:
    """Train one run; ``given`` are fields of ``TrainConfig``, the other arguments are those of ``fedcache.train``."""
    if not isinstance(method, str) and not hasattr(method, "fit"):
        raise UsageError(
            f"method is {method!r}, expected the name of a method or a Method.",
            "fedcache methods list",
        )
    # A method of fedcache is used by its name; an object of the caller replaces the method of its name.
    own = None
    if isinstance(method, str):
        name = method
    else:
        name = method.name
        if METHODS.get(name) is not method:
            own = method
    config = train_config(store, parts, seeds, settings, {**given, "method": name})
    home = Home.from_environment()
    with tracking(track, home, None, observer) as hooks:
        every: list[OnRound] = [*hooks]
        if on_round is not None:
            every.append(on_round)
        return run_training(
            config, home, method=own, observer=observer, hooks=every, fresh=fresh, save=save
        )


def named(method: str | Method, jobs: int) -> str:
    """The name of a method; the caller's own method is registered under its name.

    Raises UsageError for an object that is no method, for an own method with the name of one of fedcache, and for an
    own method with ``jobs`` above 1.
    """
    if isinstance(method, str):
        return method
    if not isinstance(method, Method):
        raise UsageError(
            f"method is {method!r}, expected the name of a method or a Method.",
            "fedcache methods list",
        )
    if METHODS.get(method.name) is method:
        return method.name
    if jobs > 1:
        # Other processes import methods by name; an object of this process is not among them.
        raise UsageError(
            f"jobs={jobs} trains in other processes, which do not know the Method {method.name}.",
            f"Use jobs=1, or make the method a package:  fedcache new method {shell_word(method.name)}",
        )
    return register("method", method)


def grid(
    methods: Methods,
    config: TrainConfig,
    sweeps: Mapping[str, Any],
    *,
    observer: Observer | None,
    on_round: OnRound | None,
    track: str | Sequence[str] | None,
    jobs: int,
    sampling: tuple[str, int | None, str],
    **request: Any,
) -> Grid:
    """Train a grid, with arguments of ``Sampling`` and of ``request_grid``. Raises as ``fedcache.grid``."""
    given: list[Any] = [methods]
    if isinstance(methods, list | tuple):
        given = list(methods)
    names = tuple(named(method, jobs) for method in given)
    if not names:
        raise UsageError(
            "No method was given.", "For example fc.grid(['fedavg', 'fedproto'], store, parts)"
        )
    # Swept values are texts, which each setting parses.
    words = {}
    for key, values in sweeps.items():
        if not isinstance(values, list | tuple | range):
            values = [values]
        words[key] = tuple(map(str, values))
    home = Home.from_environment()
    if words.get("hold_out") == (EACH,):
        # Each value of a column is held out in turn; the values come from the data.
        words = {"by": ("domain",), **words}
        if len(words["by"]) != 1:
            raise UsageError(
                f"hold_out='each' takes one column, but by names {len(words['by'])} columns.",
                "by='domain'",
            )
        least = "1"
        if len(words.get("min_rows", ())) == 1:
            least = words["min_rows"][0]
        column = words["by"][0]
        words["hold_out"] = every_value(column, config, home, min_rows=least, observer=observer)
    with tracking(track, home, None, observer) as hooks:
        every: list[OnRound] = [*hooks]
        if on_round is not None:
            every.append(on_round)
        points = grids.request_grid(
            names, words, config, home, sampling=Sampling(*sampling), **request
        )
        done = train_points(points, jobs=jobs, observer=observer, hooks=every)
    # An error of some points is raised after all points have ended.
    if done.code is not Exit.OK:
        lost = [*done.damaged, *done.failed]
        messages = "\n".join(point.message for point in lost)
        raise FedcacheError(done.code, messages, lost[0].hint)
    return done
