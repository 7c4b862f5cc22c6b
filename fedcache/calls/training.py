"""Runs and grids, as ``train`` and ``grid`` of the Python API start them."""

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
"""Names of methods, and methods of the caller's own."""


def train_config(
    store: Store | str | Path | None,
    parts: Partition | str | None,
    seeds: int | Iterable[int],
    settings: Mapping[str, Any] | None,
    given: Mapping[str, Any],
) -> TrainConfig:
    """The configuration of ``train``.

    A partition that the store does not hold is saved in it, or in the home where the store is published.
    """
    # Objects of Python become the words of a configuration, as the command line has them.
    if isinstance(seeds, int):
        seeds = (seeds,)
    chosen = tuple(seeds)
    if not chosen:
        raise UsageError("seeds is empty.", "For example seeds=range(3)")
    if not (parts is None or isinstance(parts, str) or hasattr(parts, "to_payload")):
        raise UsageError(
            f"parts is {parts!r}, expected a partition or the name of a saved one.",
            "fc.partition(store, 'iid')",
        )
    if not (settings is None or hasattr(settings, "items")):
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
        # A partition in memory is saved under its own name, with its digest where another one has that name.
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
    """One run; ``given`` are fields of ``TrainConfig``, the other arguments as of ``fedcache.train``."""
    if not isinstance(method, str) and not hasattr(method, "fit"):
        raise UsageError(
            f"method is {method!r}, expected the name of a method or a Method.",
            "fedcache methods list",
        )
    # A method that comes along is meant by its name; any other object takes the place of the one that is named.
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
    """The name of a method; one of the caller's own is registered under its name.

    Raises UsageError for what is no method, a name of fedcache's own, and processes that would not know it.
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
            f"jobs=1; or make it a package:  fedcache new method {shell_word(method.name)}",
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
    """A trained grid; ``sampling`` as of ``Sampling``, ``request`` of ``request_grid``. Raises as ``fedcache.grid``."""
    given: list[Any] = [methods]
    if isinstance(methods, list | tuple):
        given = list(methods)
    names = tuple(named(method, jobs) for method in given)
    if not names:
        raise UsageError(
            "No method was given.", "For example fc.grid(['fedavg', 'fedproto'], store, parts)"
        )
    # Swept values are words, which each setting parses.
    words = {}
    for key, values in sweeps.items():
        if not isinstance(values, list | tuple | range):
            values = [values]
        words[key] = tuple(map(str, values))
    home = Home.from_environment()
    if words.get("hold_out") == (EACH,):
        # Each value of a column is held out in turn: the values are read from the data.
        words = {"by": ("domain",), **words}
        if len(words["by"]) != 1:
            raise UsageError(
                f"hold_out='each' takes one column, but by names {len(words['by'])}.", "by='domain'"
            )
        least = "1"
        if len(words.get("min_rows", ())) == 1:
            least = words["min_rows"][0]
        words["hold_out"] = every_value(
            words["by"][0], config, home, min_rows=least, observer=observer
        )
    with tracking(track, home, None, observer) as hooks:
        every: list[OnRound] = [*hooks]
        if on_round is not None:
            every.append(on_round)
        points = grids.request_grid(
            names, words, config, home, sampler=Sampling(*sampling), **request
        )
        done = train_points(points, jobs=jobs, observer=observer, hooks=every)
    # Points that failed do not hide the others: the error comes after all have ended.
    lost = [*done.damaged, *done.failed]
    if done.code is not Exit.OK:
        raise FedcacheError(done.code, "\n".join(p.message for p in lost), lost[0].hint)
    return done
