"""One run's directory as the page shows it: its figures where it is finished, how far it is where it is not.

A run at work is read from what it keeps for itself: finished seeds, and the head of its last checkpoint, whose tensors
are left alone. So watching costs a training nothing. Nothing here imports torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedcache.errors import FedcacheError, shell_word
from fedcache.progress import VALIDATION_ACCURACY
from fedcache.report.find_runs import StoredRun, value_words
from fedcache.report.run_names import setting_name
from fedcache.report.run_origin import command_of
from fedcache.runs.directory import (
    WRITTEN,
    check_files,
    has_model,
    measured_of,
    read_result,
    rounds_of,
    train_table,
)
from fedcache.runs.row_sources import store_behind
from fedcache.runs.run import is_claimed
from fedcache.runs.running import is_running
from fedcache.runs.score import choice_value, score_of, validation_value, values_held_out
from fedcache.store.files import at_once, parse_signed, read_whole
from fedcache.store.manifest import PARTITION_SUFFIXES
from fedcache.store.sealed import LONGEST_HEADER, SEAL

LAST = 20
"""Rounds from whose duration the time left is taken."""

Curve = list[tuple[int, float]]
"""(round, accuracy) of the rounds of a seed that were scored."""


def read_run(path: Path) -> dict[str, Any] | None:
    """What a run's line in a table holds; None for a folder that is no run.

    ``state`` is finished, running, stopped or damaged; a damaged one has ``problem`` and ``hint``. What is not known is
    None. Accuracies are fractions, sizes bytes, ``seconds`` of training over all seeds, ``changed`` seconds since 1970.
    """
    base = {"name": path.name, "changed": _changed(path)}
    if (path / "result.json").exists():
        try:
            return {**base, **_finished(path)}
        except FedcacheError as error:
            return {**base, "state": "damaged", "problem": error.message, "hint": error.hint}
        except (KeyError, TypeError, AttributeError):
            problem = f"{path / 'result.json'} lacks what a result holds."
            return {
                **base,
                "state": "damaged",
                "problem": problem,
                "hint": f"Remove {path}, and train it again.",
            }
    if not ((path / "config.toml").exists() or (path / WRITTEN).exists()):
        return None
    try:
        return {**base, **_unfinished(path)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        problem, hint = (
            "The run is not finished, and its config.toml cannot be read.",
            "Run its command again.",
        )
        return {**base, "state": "damaged", "problem": problem, "hint": hint}


def read_details(path: Path) -> dict[str, Any]:
    """What the page of one run shows besides its line: curves, settings, the commands, seeds, and what is wrong."""
    if not (path / "result.json").exists():
        table = train_table(path)
        curves = (
            {str(seed): curve for seed, curve in _state(path, table)["curves"].items()}
            if table
            else {}
        )
        config = path / "config.toml"
        again = (
            [["Go on with it", f"fedcache train --config {shell_word(config)}"]] if table else []
        )
        options = {k: v for k, v in table.items() if k != "set"}
        return {
            "curves": curves,
            "settings": _flat(table.get("set", {})),
            "options": _flat(options),
            "commands": again,
        }
    try:
        result = read_result(path / "result.json")
        check_files(path, result)
        curves, validation = _curves(path)
        run = StoredRun(path, result, measured_of(path, result) or {})
        store = store_behind(path, result)
        command = command_of(run, store.path.stem if store is not None else "")
    except (FedcacheError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = (
            (error.message, error.hint)
            if isinstance(error, FedcacheError)
            else (f"{path} cannot be read.", "")
        )
        return {"curves": {}, "settings": {}, "commands": [], "problem": said[0], "hint": said[1]}
    name = path.name
    commands = [["Train it again", command]] if command else []
    commands += [["Report of it", f"fedcache report {shell_word(name)} -o report.html"]]
    if has_model(path):
        rows = (
            "--dataset DATASET"
            if store is None
            else f"--store {shell_word(store.path.stem)} --split test"
        )
        commands += [
            ["Predict with it", f"fedcache predict {shell_word(name)} IMAGES"],
            ["Measure it", f"fedcache evaluate {shell_word(name)} {rows}"],
        ]
    return {
        "curves": curves,
        "validation_curves": validation,
        "settings": _flat(result["hyperparameters"]),
        "commands": commands,
        "per_seed": [
            [s, a] for s, a in zip(result["seeds"], result["accuracy"]["per_seed"], strict=False)
        ],
        "fairness": result.get("fairness", {}),
        "macro_f1": result.get("macro_f1", {}).get("mean"),
        "setting_name": setting_name(run),
        "options": _flat({k: v for k, v in train_table(path).items() if k != "set"}),
    }


def _finished(path: Path) -> dict[str, Any]:
    result = read_result(path / "result.json")
    measured = measured_of(path, result) or {}
    accuracy, traffic, partition = (
        result["accuracy"],
        result["traffic"]["exact"],
        result["partition"],
    )
    seeds, rounds = list(result["seeds"]), int(result["rounds"])
    return {
        "state": "finished",
        "method": str(result["method"]),
        "dataset": result["dataset"]["slug"],
        "backbones": " + ".join(map(str, result["backbones"])),
        "partition": partition["name"] or partition["scheme"],
        "hold_out": ", ".join(values_held_out(result)),
        "clients": partition.get("clients"),
        "rounds": rounds,
        "seeds": len(seeds),
        "done": rounds * len(seeds),
        "total": rounds * len(seeds),
        "accuracy": accuracy["mean"],
        "std": accuracy.get("std"),
        "validation": result["validation"]["mean"] if "validation" in result else None,
        "choice": choice_value(result),
        "protocol": result.get("protocol"),
        "client_mean": {
            "accuracy": score_of(result, "client-mean").mean,
            "validation": validation_value(result, "client-mean"),
            "choice": choice_value(result, "client-mean"),
            "std": None,
        },
        "claimed": is_claimed(result),
        "sent": traffic["up_bytes"],
        "received": traffic["down_bytes"],
        "seconds": measured.get("seconds", {}).get("train"),
        "changed": measured.get("time") or _changed(path),
        "set": _flat(result["hyperparameters"]),
    }


def _unfinished(path: Path) -> dict[str, Any]:
    table = train_table(path)
    if not table:
        raise ValueError("no table")
    now = _state(path, table)
    latest = max((_changed(file) for file in path.iterdir()), default=0.0)
    running = is_running(path)
    left = (
        now["pace"] * (now["total"] - now["done"]) if running and now["pace"] is not None else None
    )
    return {
        "state": "running" if running else "stopped",
        "method": str(table["method"]),
        "dataset": table.get("dataset") or _store_name(table),
        "backbones": " + ".join(map(str, table.get("backbones", []))),
        "partition": _partition_name(table),
        "rounds": int(table["rounds"]),
        "seeds": len(_seeds(table)),
        "accuracy": now["accuracy"],
        "at_round": now["at_round"],
        "validation": now["validation"],
        "sent": now["sent"],
        "received": now["received"],
        "done": now["done"],
        "total": now["total"],
        "left": left,
        "changed": latest,
        "begun": _changed(path / WRITTEN),
        "set": _flat(table.get("set", {})),
        "swept": _flat(table),
    }


def _state(path: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """How far a run is, from the seeds that ended and the checkpoints of those under way."""
    rounds = int(table["rounds"])
    seeds = _seeds(table)
    records = {}
    for seed in seeds:
        for file in (path / f"seed-{seed}.json", path / f"checkpoint-{seed}.safetensors"):
            if (found := _kept(file)) is not None:
                records[seed] = found
                break
    scored = [
        (seed, r) for seed, every in records.items() for r in every if r["accuracy"] is not None
    ]
    last = scored[-1][1] if scored else None
    timed = [
        r["seconds"] for every in records.values() for r in every if r.get("seconds") is not None
    ][-LAST:]
    return {
        "done": sum(len(every) for every in records.values()),
        "total": rounds * len(seeds),
        "accuracy": last["accuracy"] if last else None,
        "at_round": last["round"] if last else None,
        "validation": last.get("diagnostics", {}).get(VALIDATION_ACCURACY) if last else None,
        "sent": sum(r["traffic"]["up_bytes"] for every in records.values() for r in every),
        "received": sum(r["traffic"]["down_bytes"] for every in records.values() for r in every),
        "pace": sum(timed) / len(timed) if timed else None,
        "curves": {
            s: [(r["round"], r["accuracy"]) for r in every if r["accuracy"] is not None]
            for s, every in records.items()
        },
    }


def _kept(file: Path) -> list[dict[str, Any]] | None:
    """The rounds that a finished seed or a checkpoint holds; None where there is none, or it is damaged."""
    try:
        return _kept_at(str(file), file.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@lru_cache(maxsize=1024)
def _kept_at(file: str, _changed_at: int) -> list[dict[str, Any]]:
    if file.endswith(".json"):
        content = parse_signed(read_whole(Path(file)))["content"]
        kept: list[dict[str, Any]] = content["rounds"]
        times = content.get("measured", {}).get("rounds", [])
        return [{**r, "seconds": times[i] if i < len(times) else None} for i, r in enumerate(kept)]
    with open(file, "rb", opener=at_once) as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError("no header")
        seal = json.loads(opened.read(length))["__metadata__"][SEAL]
    found: list[dict[str, Any]] = json.loads(parse_signed(seal.encode())["content"])["records"]
    return [
        {**r, "accuracy": None if r["accuracy"] != r["accuracy"] else r["accuracy"]} for r in found
    ]


def _curves(path: Path) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Accuracy, and accuracy on the rows to choose by, of every seed."""
    made: tuple[dict[str, Curve], dict[str, Curve]] = ({}, {})
    for record in rounds_of(path):
        figures = record["accuracy"], record.get("diagnostics", {}).get(VALIDATION_ACCURACY)
        for curves, figure in zip(made, figures, strict=True):
            if figure is not None:
                curves.setdefault(str(record["seed"]), []).append(
                    (int(record["round"]), float(figure))
                )
    return made


def _seeds(table: Mapping[str, Any]) -> list[int]:
    """The seeds of a configuration that fedcache wrote. Raises ValueError for another's words."""
    seeds: dict[int, None] = {}
    for part in str(table.get("seeds", "0")).split(","):
        first, _, last = part.partition("-")
        seeds.update(
            dict.fromkeys(range(int(first), min(int(last or first), int(first) + 10_000) + 1))
        )
    return list(seeds)


def _store_name(table: Mapping[str, Any]) -> str:
    return re.sub(
        "-[0-9a-f]{8}$", "", Path(str(table.get("store") or "")).name.removesuffix(".zarr")
    )


def _partition_name(table: Mapping[str, Any]) -> str:
    """As the configuration of a run that is not finished names it; the one in its own directory has no name."""
    if table.get("clients_from"):
        return f"the stores of {Path(str(table['clients_from'])).name}"
    name = str(table.get("partition") or "")
    return "dealt for it" if not name or name.endswith(PARTITION_SUFFIXES) else name


def _flat(table: Mapping[str, Any]) -> dict[str, str]:
    """Settings as words; those of the method stand beside the others."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value)
        else:
            flat[str(key)] = (
                ", ".join(map(value_words, value))
                if isinstance(value, list)
                else value_words(value)
            )
    return flat


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
