"""Runs and grids, for ``train`` and ``grid`` of the Python API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcache.calls.keywords import fields_of
from fedcache.calls.models import path_of
from fedcache.calls.stores import opened
from fedcache.config import Home, SaveModels, TrainConfig, resolve
from fedcache.errors import Exit, UsageError, shell_word
from fedcache.federate.engine.method import Method
from fedcache.federate.methods import METHODS
from fedcache.grids import train_grid as grids
from fedcache.grids.hold_out import EACH, every_value
from fedcache.grids.result import Grid
from fedcache.grids.sampling import Sampling
from fedcache.grids.train_grid import train_points
from fedcache.plugins import register
from fedcache.runs.events import OnRound
from fedcache.runs.loop import train as run_training
from fedcache.runs.partitions import keep_partition
from fedcache.runs.run import Run
from fedcache.runs.trackers import tracking

Methods = str | Method | Sequence[str | Method]
"""Names of methods, or the user's own ``Method`` objects."""


def train_config(given: Mapping[str, Any], fields: Mapping[str, Any]) -> TrainConfig:
    """The configuration of ``train``.

    A partition that is not in the store is saved there; for a published store, it is saved in the home.

    Args:
        given: store, parts, seeds and settings, as in ``fedcache.train``.
        fields: other fields of the configuration.
    """
    store = given["store"]
    parts = given["parts"]
    settings = given["settings"]
    # Objects of Python become the texts of a configuration.
    seeds = given["seeds"]
    if isinstance(seeds, int):
        seeds = (seeds,)
    words_of_seeds = ",".join(map(str, seeds))
    if not words_of_seeds:
        raise UsageError(
            "seeds= must have at least one seed, but is empty.", "For example seeds=range(3)"
        )
    is_partition = hasattr(parts, "to_payload")
    if parts is not None and not isinstance(parts, str) and not is_partition:
        raise UsageError(
            f"parts= must be a partition or the name of a saved partition, but got {parts!r}.",
            "fc.partition(store, 'iid')",
        )
    if settings is not None and not hasattr(settings, "items"):
        raise UsageError(
            f"settings= must be names and values, but got {settings!r}.",
            "For example settings={'lr': 0.1}",
        )
    flags = {**fields, "seeds": words_of_seeds, "set": dict(settings or {})}
    if isinstance(store, str | Path):
        flags["store"] = str(store)
    elif store is not None:
        flags["store"] = store.place
    if given.get("transfer"):
        flags["transfer"] = tuple(path_of(one) for one in given["transfer"])
    if isinstance(parts, str):
        flags["partition"] = parts
    elif parts is not None:
        flags["partition"] = keep_partition(opened(store), parts, Home.from_environment())
    return resolve(TrainConfig, flags, {}, "train()")


def train(given: Mapping[str, Any]) -> Run:
    """Train one run; ``given`` are the arguments of ``fedcache.train``."""
    method = given["method"]
    if not isinstance(method, str) and not hasattr(method, "fit"):
        raise UsageError(
            f"method is {method!r}, expected a method name or a Method object.",
            "fedcache methods list",
        )
    # A method of fedcache is used by its name. The caller's own object replaces a method of fedcache of the same name.
    own_method = None
    name = method
    if not isinstance(method, str):
        name = method.name
        if METHODS.get(name) is not method:
            own_method = method
    # Arguments of ``fedcache.train`` have the names of the configuration.
    fields = {**fields_of(TrainConfig, given), "method": name}
    config = train_config(given, fields)
    models = "none"
    if given["save_model"]:
        models = "all"
    home = Home.from_environment()
    observer = given["observer"]
    # None means the directory of runs in the fedcache home.
    with tracking(given["track"], home, None, observer) as hooks:
        return run_training(
            config,
            home,
            method=own_method,
            observer=observer,
            hooks=with_own_hook(hooks, given["on_round"]),
            fresh=given["fresh"],
            save=SaveModels(models, given["save_clients"]),
        )


def with_own_hook(hooks: Sequence[OnRound], on_round: OnRound | None) -> list[OnRound]:
    """The hooks of trackers, and the caller's own hook if there is one."""
    if on_round is None:
        return [*hooks]
    return [*hooks, on_round]


def name_of_method(method: str | Method, jobs: int) -> str:
    """The name of a method; the caller's own method is registered under its name.

    Raises UsageError for an object that is no method, for an own method that has the name of a method of fedcache, and
    for an own method with ``jobs`` above 1.
    """
    if isinstance(method, str):
        return method
    if not isinstance(method, Method):
        raise UsageError(
            f"method is {method!r}, expected a method name or a Method object.",
            "fedcache methods list",
        )
    if METHODS.get(method.name) is method:
        return method.name
    if jobs > 1:
        # Other processes import methods by name; an object of this process is not among them.
        raise UsageError(
            f"jobs={jobs} trains in other processes, and these cannot load the Method {method.name}.",
            f"Use jobs=1, or make the method a package:  fedcache new method {shell_word(method.name)}",
        )
    return register("method", method)


def grid(given: Mapping[str, Any]) -> Grid:
    """Train a grid; ``given`` are the arguments of ``fedcache.grid``. Raises as ``fedcache.grid``."""
    config = train_config(given, given["options"] or {})
    jobs = given["jobs"]
    observer = given["observer"]
    methods = given["methods"]
    if not isinstance(methods, list | tuple):
        methods = [methods]
    names = tuple(name_of_method(method, jobs) for method in methods)
    if not names:
        raise UsageError(
            "No method was given.", "For example fc.grid(['fedavg', 'fedproto'], store, parts)"
        )
    # Swept values are texts, which each setting parses.
    sweeps = {}
    for key, values in given["sweeps"].items():
        if not isinstance(values, list | tuple | range):
            values = [values]
        sweeps[key] = tuple(map(str, values))
    home = Home.from_environment()
    if sweeps.get("hold_out") == (EACH,):
        # Each value of a column is held out in turn; the values come from the data.
        sweeps = {"by": ("domain",), **sweeps}
        if len(sweeps["by"]) != 1:
            raise UsageError(
                f"hold_out='each' takes one column, but {len(sweeps['by'])} columns are given with by=.",
                "by='domain'",
            )
        min_rows = "1"
        if len(sweeps.get("min_rows", ())) == 1:
            min_rows = sweeps["min_rows"][0]
        column = sweeps["by"][0]
        sweeps["hold_out"] = every_value(column, config, home, min_rows=min_rows, observer=observer)
    with tracking(given["track"], home, None, observer) as hooks:
        points = grids.request_grid(
            names,
            sweeps,
            config,
            home,
            sampling=Sampling(given["sampler"], given["trials"], given["pruner"]),
            fresh=given["fresh"],
            exact=given["exact"],
            save=SaveModels(given["save_models"], given["save_clients"]),
            retrain=given["retrain"],
            score=given["score"],
        )
        all_hooks = with_own_hook(hooks, given["on_round"])
        done = train_points(points, jobs=jobs, observer=observer, hooks=all_hooks)
    # An error of some points is raised after all points have ended.
    if done.code is not Exit.OK:
        done.raise_lost()
    return done
