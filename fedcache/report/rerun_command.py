"""The command that makes a stored run again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedcache.config import TrainConfig
from fedcache.errors import FedcacheError
from fedcache.federate.methods import find_method
from fedcache.report.find_runs import StoredRun
from fedcache.report.run_stores import config_of

_OWN = ("method", "set", "store", "dataset", "partition", "clients_from", "seeds", "rounds", "client_set", "preset")
_DEFAULTS = {f.name: f.default for f in fields(TrainConfig)}


def command_of(entry: StoredRun, store: str) -> str:
    """One line for a shell: every choice that differs from the defaults; stores and partitions by name, not by path.

    Args:
        entry: the run.
        store: the name of its dataset's store, "" where there is none any more.
    """
    table = config_of(entry)
    if not table:
        return ""
    words = ["fedcache", "train", "--method", entry.method]
    if table.get("preset", "paper") != "paper":
        words += ["--preset", str(table["preset"])]
    if table.get("clients_from"):
        words += ["--clients-from", str(table["clients_from"])]
    else:
        words += (
            ["--store", store] if store else ["--dataset", str(table.get("dataset") or entry.result["dataset"]["slug"])]
        )
        words += _partition(entry, str(table.get("partition") or ""))
    one_shot = entry.result["rounds"] == 1 and "rounds" not in table
    words += [] if one_shot else ["--rounds", str(entry.result["rounds"])]
    words += ["--seeds", ",".join(map(str, entry.result["seeds"]))]
    for name, value in table.items():
        if name in _OWN or value == _DEFAULTS.get(name) or name not in _DEFAULTS:
            continue
        words += [f"--{name.replace('_', '-')}", _word(value)]
    for name, value in _changed(entry, table).items():
        words += ["--set", f"{name}={_word(value)}"]
    for name, value in table.get("client_set", {}).items():
        words += ["--client-set", f"{name}={_word(value)}"]
    return shlex.join(words)


def _partition(entry: StoredRun, name: str) -> list[str]:
    """By name where it is saved; by its scheme where it was dealt for the run."""
    made = entry.result["partition"]
    if name and not name.endswith(".json"):
        return ["--partition", name]
    words = ["--scheme", str(made["scheme"])]
    args = {k: v for k, v in made["args"].items() if v is not None}
    if "clients" in args:
        words += ["--clients", str(args.pop("clients"))]
    for key, value in args.items():
        words += ["--option", f"{key}={_word(value)}"]
    words += ["--seed", str(made["seed"])] if made["seed"] else []
    return [*words, "--repartition"] if len(set(made["digests"])) > 1 else words


def _changed(entry: StoredRun, table: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters that are not those of the preset; all of them for a method that is not there any more."""
    hp = entry.result["hyperparameters"]
    try:
        usual = find_method(entry.method).resolve(str(table.get("preset", "paper")))
    except FedcacheError:
        return dict(hp)
    said = {k: ("auto" if v is None else v) for k, v in usual.items()}
    return {k: v for k, v in hp.items() if k not in said or said[k] != v}


def _word(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
