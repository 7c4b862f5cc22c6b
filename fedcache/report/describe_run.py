"""Stored runs in a few facts, for ``fedcache runs``: the list, one run, and what differs between several."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fedcache.config import TrainConfig
from fedcache.errors import Exit, FedcacheError, UsageError, unknown
from fedcache.parsing import Facts, Record
from fedcache.report.find_runs import (
    Gathered,
    HeldOutGroup,
    LeftOut,
    Result,
    StoredRun,
    every_run,
    held_out_groups,
    labels,
    merge_seeds,
    setting_name,
    value_words,
)
from fedcache.report.verdict import drawn_clients
from fedcache.runs.directory import (
    PLACES,
    bytes_of_models,
    is_running,
    tags_of,
    train_table,
    usual_preset,
    usual_run,
    usual_settings,
)
from fedcache.runs.run import sites_words
from fedcache.runs.score import SCORES, values_held_out

FINISHED = "finished"
RUNNING = "running"
UNFINISHED = "unfinished"
DAMAGED = "damaged"
STATES = (FINISHED, RUNNING, UNFINISHED, DAMAGED)
NO_SETTING = {*PLACES, "method", "set", "backbones", "device"}
"""Names in ``config.toml`` that are not listed as settings: they are shown elsewhere, or do not affect results."""


@dataclass(frozen=True)
class RunFilter:
    """Filter of the runs that are listed; empty fields take all. Methods and datasets may be patterns: ``fed*``."""

    methods: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    states: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for state in self.states:
            if state not in STATES:
                raise unknown("--state", state, STATES)

    def takes(self, entry: Record) -> bool:
        """Whether the filter keeps an entry of ``entry_of``."""
        if self.tags and not {*self.tags} & {*entry["tags"]}:
            return False
        if self.states and entry["state"] not in self.states:
            return False
        return _fits(entry["method"], self.methods) and _fits(entry["dataset"], self.datasets)


@dataclass(frozen=True)
class RunsListed:
    """List of runs.

    Attributes:
        entries: ``entry_of`` of every run, in the order in which the runs were begun, oldest first.
        problems: the runs that ended without a result, with the reason.
        groups: groups of leave-one-out runs.
        tags_lost: for every damaged tags.json, what is wrong and what to do.
    """

    entries: list[Facts]
    problems: list[LeftOut]
    groups: list[HeldOutGroup]
    tags_lost: list[str]


def listed(names: Sequence[str], root: Path, condition: RunFilter) -> RunsListed:
    """The named runs, or all of ``root`` if none is named, as plain JSON values.

    Raises UsageError for a name that is no run.
    """
    found = every_run(names, root)
    entries = []
    problems = []
    finished = []
    entries_of_finished = []
    for run in found:
        entry = entry_of(run)
        if not condition.takes(entry):
            continue
        entries.append(entry)
        if isinstance(run, StoredRun):
            finished.append(run)
            entries_of_finished.append(entry)
        elif entry["state"] != RUNNING:
            problems.append(run)
    # Labels say only what differs between the finished runs; the method has a column of its own.
    for label, one, entry in zip(labels(finished), finished, entries_of_finished, strict=True):
        digest = f"({one.digest[:8]})"
        entry["differs"] = label.removeprefix(one.method).removesuffix(digest).strip()
    # Tags that cannot be read are reported, and the runs are listed all the same.
    lost = []
    for run in found:
        try:
            tags_of(run.path)
        except FedcacheError as error:
            lost.append(f"{error.message} {error.hint}")
    # Runs that hold out one value each are summarised by their mean, after seeds of equal settings are merged.
    joined = merge_seeds(Gathered(finished)).entries
    return RunsListed(entries, problems, held_out_groups(joined), lost)


def state_of(one: StoredRun | LeftOut) -> str:
    """One of ``STATES``."""
    if is_running(one.path):
        return RUNNING
    if isinstance(one, StoredRun):
        return FINISHED
    if one.exit is Exit.CORRUPT:
        return DAMAGED
    return UNFINISHED


def entry_of(one: StoredRun | LeftOut) -> Facts:
    """A run in a list, as plain JSON values."""
    common = {
        "name": one.path.name,
        "path": str(one.path),
        "state": state_of(one),
        "tags": _tags(one.path),
    }
    if isinstance(one, LeftOut):
        # Of a run without a result only its configuration is known.
        config = train_table(one.path)
        backbones = list(config.get("backbones", ()))
        dataset = config.get("dataset", "")
        # The directory of a store has the name of the dataset, a hyphen and a digest.
        if config.get("store"):
            dataset = Path(str(config["store"])).name.rpartition("-")[0]
        return {
            **common,
            "method": config.get("method", ""),
            "dataset": dataset,
            "backbones": backbones,
            **dict.fromkeys(("partition", "rounds", "accuracy", "model_bytes")),
            "seeds": [],
            "claimed": False,
            "sites": None,
            "differs": "",
            "hold_out": [],
        }
    r = one.result
    sites = None
    if "federation" in r:
        sites = sites_words(r)
    return {
        **common,
        "method": one.method,
        "dataset": r["dataset"]["slug"],
        "backbones": r["backbones"],
        "partition": r["partition"]["name"] or r["partition"]["scheme"],
        "hold_out": list(values_held_out(r)),
        "rounds": r["rounds"],
        "seeds": one.seeds,
        "accuracy": r["accuracy"]["mean"],
        "claimed": one.claimed,
        "sites": sites,
        "model_bytes": bytes_of_models(one.path),
        "differs": "",
    }


def finished_run(name: str, root: Path) -> StoredRun:
    """The one finished run of a name.

    Raises UsageError if the name has no run or several, and the run's own error if the run is not whole.
    """
    found = every_run([name], root)
    if len(found) != 1:
        raise UsageError(
            f"{name} matches {len(found)} runs, expected one.",
            "Give one run of `fedcache runs list`.",
        )
    if isinstance(found[0], LeftOut):
        raise FedcacheError(found[0].exit, found[0].sentence, found[0].hint)
    return found[0]


def set_apart(entry: StoredRun) -> list[dict[str, str]]:
    """The settings of a run that differ from its method's preset or the defaults: name, value, default."""
    method = entry.method
    preset = entry.result["preset"]
    # (name, value, default) of every setting.
    settings = [("preset", preset, usual_preset(method))]
    try:
        usual = usual_settings(method, preset)
        usual_options = usual_run(method)
    except FedcacheError:
        # The method is the user's own and is not installed here, so its preset is not known.
        usual = {}
        usual_options = {}
    config = train_table(entry.path)
    for item in fields(TrainConfig):
        name = item.name
        if name in config and name != "preset" and name not in NO_SETTING:
            settings.append((name, config[name], usual_options.get(name, item.default)))
    for key, value in entry.result["hyperparameters"].items():
        settings.append((f"set.{key}", value, usual.get(key, "?")))
    rows = []
    for name, value, default in settings:
        row = {"setting": name, "value": _shown(value), "default": _shown(default)}
        if row["value"] != row["default"]:
            rows.append(row)
    return rows


def figures_of(entry: StoredRun) -> dict[str, float | None]:
    """Figures of a run by name: fractions, bytes of all clients, rounds and seeds, and seconds of training."""
    r = entry.result
    exact = r["traffic"]["exact"]
    scores = {name: entry.accuracy(name) for name in SCORES}
    return {
        "accuracy": r["accuracy"]["mean"],
        "std over seeds": r["accuracy"]["std"],
        "standard error of drawn clients": _largest_error(r),
        **scores,
        "validation": r.get("validation", {}).get("mean"),
        "zero-shot": r["accuracy"].get("zero_shot"),
        "macro-F1": r["macro_f1"]["mean"],
        "worst 10 %": r["fairness"].get("worst10"),
        "bytes up": exact["up_bytes"],
        "bytes down": exact["down_bytes"],
        "parameters": r["parameters"]["trainable"],
        "seconds": entry.seconds,
    }


def _largest_error(result: Result) -> float | None:
    """The standard error of the mean over drawn clients (``--eval-clients``), the largest of all seeds."""
    drawn = drawn_clients(result)
    if drawn is None:
        return None
    return max(drawn[1], default=None)


def settings_of(entry: StoredRun) -> dict[str, str]:
    """All settings of a run in words."""
    r = entry.result
    config = train_table(entry.path)
    dataset = r["dataset"]
    # The name of a setting is the dataset, a comma and the partition.
    partition = setting_name(entry).partition(", ")[2]
    slug = dataset["slug"]
    # Two datasets or partitions may have the same name; their digests differ.
    dataset_digest = dataset["digest"][:8]
    partition_digest = r["partition"]["digest"][:8]
    made = {
        "dataset": f"{slug} {dataset_digest}",
        "features": " ".join(r["arrays"]),
        "partition": f"{partition} {partition_digest}",
    }
    for key, value in config.items():
        if key not in NO_SETTING:
            made[key] = _shown(value)
    made["seeds"] = " ".join(map(str, r["seeds"]))
    made |= entry.facts
    made["code"] = str(r.get("code"))[:8]
    return made


def different(runs: Sequence[Record]) -> dict[str, list[Any]]:
    """Entries that differ between mappings: name -> the value in each mapping, None where it is missing."""
    found = {}
    for name in dict.fromkeys(itertools.chain(*runs)):
        values = [one.get(name) for one in runs]
        if any(value != values[0] for value in values):
            found[name] = values
    return found


def files_of(folder: Path) -> list[tuple[str, int]]:
    """Every file of a run, its name below the directory and its bytes."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(folder))
            found.append((name, path.stat().st_size))
    return found


def begun(folder: Path) -> str:
    """When a run was begun, in the time of this machine; "" where that is not known."""
    config = folder / "config.toml"
    if not config.exists():
        return ""
    time = datetime.fromtimestamp(config.stat().st_mtime)
    return time.astimezone().strftime("%Y-%m-%d %H:%M")


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _tags(folder: Path) -> list[str]:
    try:
        return list(tags_of(folder))
    except FedcacheError:
        return []


def _shown(value: object) -> str:
    """A setting in words, also one with several values."""
    if isinstance(value, list | tuple):
        return ",".join(map(_shown, value))
    if isinstance(value, Mapping):
        return " ".join(f"{k}={_shown(v)}" for k, v in value.items())
    return value_words(value)
