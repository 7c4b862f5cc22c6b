"""One run's directory as the page shows it: what ``runs list`` knows of it, and how far it is where it is at work.

A run at work is read from what it keeps for itself: finished seeds, and the head of its last checkpoint, whose tensors
are left alone. So watching costs a training nothing. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedcache.errors import FedcacheError, shell_word
from fedcache.progress import VALIDATION_ACCURACY
from fedcache.report.describe_run import DAMAGED, FINISHED, entry_of, figures_of, settings_of
from fedcache.report.drawing import need_matplotlib
from fedcache.report.figures.runs import curves
from fedcache.report.find_runs import StoredRun, is_run, open_run, value_words
from fedcache.report.run_origin import command_of
from fedcache.runs.directory import WRITTEN, has_model, is_running, train_table
from fedcache.runs.origin import store_behind
from fedcache.runs.score import choice_value, score_of, validation_value
from fedcache.store.files import at_once, parse_signed, read_whole
from fedcache.store.sealed import LONGEST_HEADER, SEAL

LAST = 20
"""Rounds from whose duration the time left is taken."""

SEARCHED = ("name", "state", "method", "dataset", "backbones", "partition", "hold_out", "tags")
"""What of a run is searched for words, with its settings."""

RUNNING = "running"
STOPPED = "stopped"
"""What the page calls a run without a result: its process is there, or it is not."""

WRONG = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What reading raises of a file that holds something else than fedcache wrote."""


def read_run(path: Path) -> dict[str, Any] | None:
    """What a run's line in a table holds: ``entry_of`` and, of a finished run, ``figures_of``; None for no run.

    ``state`` is finished, running, stopped or damaged; a damaged one has ``problem`` and ``hint``. ``changed`` are
    seconds since 1970, and ``settings`` what was set, in words.
    """
    if not is_run(path):
        return None
    try:
        one = open_run(path)
        line = {**entry_of(one), "changed": _changed(path)}
        if isinstance(one, StoredRun):
            return {**line, **_finished(one)}
        if line["state"] == DAMAGED:
            return {**line, "problem": one.sentence, "hint": one.hint, "settings": {}}
        return {**line, **_unfinished(path)}
    except WRONG:
        return {
            "name": path.name,
            "state": DAMAGED,
            "changed": _changed(path),
            "settings": {},
            "problem": f"The files in {path} are not what a run writes.",
            "hint": f"Run its command again, or remove it: fedcache runs rm {shell_word(path.name)}",
        }


def read_details(path: Path) -> dict[str, Any]:
    """What the page of one run shows besides its line: a drawing, settings, its command, and the score of each seed.

    Raises FedcacheError for a damaged run, and where there is nothing to draw with.
    """
    need_matplotlib()
    one = open_run(path)
    if isinstance(one, StoredRun):
        scores = zip(one.result["seeds"], one.result["accuracy"]["per_seed"], strict=False)
        store = store_behind(path, one.result)
        name = "" if store is None else store.path.stem
        return {
            "drawing": _draw(one.rounds),
            "settings": settings_of(one),
            "command": command_of(one, name),
            "rows": f"--store {shell_word(name)} --split test" if name else "--dataset DATASET",
            "model": has_model(path),
            "seeds": list(scores),
        }
    table = train_table(path)
    if not table:
        raise FedcacheError(one.exit, one.sentence, one.hint)
    records = [{**r, "seed": seed} for seed, kept in _kept(path, table).items() for r in kept]
    return {
        "drawing": _draw(records),
        "settings": _words(table),
        "command": f"fedcache train --config {shell_word(path / 'config.toml')}",
        "seeds": [],
    }


def _finished(run: StoredRun) -> dict[str, Any]:
    facts = {k.removeprefix("set."): v for k, v in run.facts.items()}
    return {
        **figures_of(run),
        "state": FINISHED,
        "settings": {k: v for k, v in facts.items() if k not in ("method", "backbones")},
        "choice": choice_value(run.result),
        "protocol": run.result.get("protocol"),
        "client_mean": {
            "accuracy": score_of(run.result, "client-mean").mean,
            "validation": validation_value(run.result, "client-mean"),
            "choice": choice_value(run.result, "client-mean"),
            "std over seeds": None,
        },
    }


def _unfinished(path: Path) -> dict[str, Any]:
    """How far a run is, from the seeds that ended and the checkpoints of those under way."""
    table = train_table(path)
    records = [r for kept in _kept(path, table).values() for r in kept]
    scored = [r for r in records if r["accuracy"] is not None]
    times = [r["seconds"] for r in records if r.get("seconds") is not None][-LAST:]
    total = int(table["rounds"]) * len(_seeds(table))
    running = is_running(path)
    made = {
        "state": RUNNING if running else STOPPED,
        "rounds": int(table["rounds"]),
        "seeds": _seeds(table),
        "done": len(records),
        "total": total,
        "bytes up": sum(r["traffic"]["up_bytes"] for r in records),
        "bytes down": sum(r["traffic"]["down_bytes"] for r in records),
        "changed": max((_changed(file) for file in path.iterdir()), default=0.0),
        "begun": _changed(path / WRITTEN),
        "settings": _words(table),
    }
    if running and times:
        made["left"] = sum(times) / len(times) * (total - len(records))
    if scored:
        made["accuracy"] = scored[-1]["accuracy"]
        made["at_round"] = scored[-1]["round"]
        made["validation"] = _validation(scored[-1])
    return made


def _kept(path: Path, table: Mapping[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """The rounds of each seed of a run that is not finished, as far as they were kept."""
    found = {}
    for seed in _seeds(table):
        for file in (path / f"seed-{seed}.json", path / f"checkpoint-{seed}.safetensors"):
            try:
                found[seed] = _records(str(file), file.stat().st_mtime_ns)
                break
            except WRONG:  # none, or damaged: the run begins this seed again
                continue
    return found


@lru_cache(maxsize=1024)
def _records(file: str, _changed_at: int) -> list[dict[str, Any]]:
    """The rounds that a finished seed or a checkpoint holds."""
    if file.endswith(".json"):
        content = parse_signed(read_whole(Path(file)))["content"]
        times = content.get("measured", {}).get("rounds", [])
        kept: list[dict[str, Any]] = content["rounds"]
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


def _draw(records: Sequence[Mapping[str, Any]]) -> str:
    """The report's curves, a line for each seed and one for its rows to choose by; "" where no line has two rounds."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        scores = {"": record["accuracy"], ", validation": _validation(record)}
        for of, score in scores.items():
            if score is not None:
                line = lines.setdefault(f"seed {record['seed']}{of}", [])
                line.append({**record, "accuracy": score})
    # The figure asks a run for its rounds and a key, which a seed has too.
    seeds: list[tuple[str, Any]] = [
        (name, SimpleNamespace(rounds=line, key=name)) for name, line in lines.items()
    ]
    plot = curves("curve", seeds)
    if plot is None:
        return ""
    return plot.svg


def matches(run: Mapping[str, Any], words: str) -> bool:
    """Whether each of some words is part of what is known of a run: its name, method, data, state, settings."""
    said = [str(run.get(name)) for name in SEARCHED]
    said += [f"{key}={value}" for key, value in run["settings"].items()]
    text = "\n".join(said).lower()
    return all(word in text for word in words.lower().split())


def differing(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name of each run -> the settings, four at most, that are not the same in all runs of its method."""
    values: dict[object, set[str]] = defaultdict(set)
    for run in runs:
        for key, value in run["settings"].items():
            values[run.get("method"), key].add(value)
    return {
        run["name"]: " ".join(
            [
                f"{k}={v}"
                for k, v in run["settings"].items()
                if len(values[run.get("method"), k]) > 1
            ][:4]
        )
        for run in runs
    }


def _validation(record: Mapping[str, Any]) -> float | None:
    found: float | None = record.get("diagnostics", {}).get(VALIDATION_ACCURACY)
    return found


def _words(table: Mapping[str, Any]) -> dict[str, str]:
    """A configuration's settings in words, those of the method beside the others."""
    table = {**table, **table.get("set", {})}
    return {k: value_words(v) for k, v in table.items() if k != "set"}


def _seeds(table: Mapping[str, Any]) -> list[int]:
    """The seeds of a configuration that fedcache wrote. Raises ValueError for another's words."""
    seeds: dict[int, None] = {}
    for part in str(table.get("seeds", "0")).split(","):
        first, _, last = part.partition("-")
        end = min(int(last or first), int(first) + 10_000)
        seeds.update(dict.fromkeys(range(int(first), end + 1)))
    return list(seeds)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
