"""One run's directory as the page shows it: what ``runs list`` knows of it, and how far it is where it is at work.

A run at work is read from what it keeps for itself: finished seeds, and the head of its last checkpoint, whose tensors
are left alone. So watching costs a training nothing. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedcache.errors import CorruptionError, FedcacheError, shell_word
from fedcache.grids.record import read_record
from fedcache.progress import VALIDATION_ACCURACY
from fedcache.report.describe_run import DAMAGED, FINISHED, entry_of, figures_of, settings_of
from fedcache.report.drawing import need_matplotlib
from fedcache.report.figure_runs import curves
from fedcache.report.find_runs import (
    StoredRun,
    is_run,
    name_without_hold_out,
    open_run,
    value_words,
)
from fedcache.report.run_groups import group_key
from fedcache.report.run_origin import command_of
from fedcache.runs.directory import WRITTEN, has_model, is_running, train_table
from fedcache.runs.origin import store_behind
from fedcache.runs.score import choice_value, score_of, validation_value
from fedcache.store.files import LONGEST_HEADER, SEAL, at_once, parse_signed, read_whole
from fedcache.store.lock import still_runs

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
    """A run's line in a table: ``entry_of`` and, of a finished run, ``figures_of``; None if there is no run.

    ``state`` is finished, running, stopped or damaged; a damaged one has ``problem`` and ``hint``. ``changed`` are
    seconds since 1970, and ``settings`` what was set, in words.
    """
    if not is_run(path):
        return None
    # Whatever is in the directory, the list shows a line for it.
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
            "problem": f"The files in {path} were not written by a run.",
            "hint": f"Run its command again, or remove it: fedcache runs rm {shell_word(path.name)}",
        }


def read_details(path: Path) -> dict[str, Any]:
    """Details of a run's page: a drawing, settings, its command, and the score of each seed.

    Raises FedcacheError for a damaged run, and where there is nothing to draw with.
    """
    need_matplotlib()
    one = open_run(path)
    # A finished run is drawn from its result; of others, the rounds that ended seeds and checkpoints hold.
    if isinstance(one, StoredRun):
        scores = zip(one.result["seeds"], one.result["accuracy"]["per_seed"], strict=False)
        store = store_behind(path, one.result)
        name = ""
        rows = "--dataset DATASET"
        if store is not None:
            name = store.path.stem
            rows = f"--store {shell_word(name)} --split test"
        return {
            "drawing": _draw(one.rounds),
            "settings": settings_of(one),
            "command": command_of(one, name),
            "rows": rows,
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
        "partition": name_without_hold_out(run.result),
        "group": group_key(run),
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
    """Progress of a run, from the seeds that ended and the checkpoints of running ones."""
    table = train_table(path)
    records = [r for kept in _kept(path, table).values() for r in kept]
    # The last rounds say how fast it is now.
    scored = [r for r in records if r["accuracy"] is not None]
    times = [r["seconds"] for r in records if r.get("seconds") is not None][-LAST:]
    total = int(table["rounds"]) * len(_seeds(table))
    running = is_running(path)
    state = STOPPED
    if running:
        state = RUNNING
    made = {
        "state": state,
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
    # Rounds that are left, at the mean time of the last ones.
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
    """The report's curves, a line for each seed and one for its validation rows; "" where no line has two rounds."""
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
    texts = [str(run.get(name)) for name in SEARCHED]
    texts += [f"{key}={value}" for key, value in run["settings"].items()]
    text = "\n".join(texts).lower()
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
    """A configuration's settings in words, those of the method next to the others."""
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


BUDGET = 0.2
"""Seconds that a look spends on reading at most, once it has read one run; the next look continues."""
SHARE = 30
"""Looks in which every finished run is timed once."""
RECENT = 2_000_000_000
"""Nanoseconds within which a time may stand for several changes: the clocks of file systems are coarse."""


class RunIndex:
    """The runs of a folder.

    Args:
        root: the folder; it may come later.

    Attributes:
        version: grows by one with every change.
        reads: runs that were read so far.
        stats: times that were requested so far.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.version = 0
        self.reads = 0
        self.stats = 0
        # Name of a directory -> what was read, None where it is no run (yet), and the directory's time then.
        self._known: dict[str, tuple[dict[str, Any] | None, int]] = {}
        self._waiting: dict[str, None] = {}
        self._listed: int | None = None
        self._turn = 0
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Directories that are known by name and not read yet."""
        return len(self._waiting)

    def facts(self, name: str) -> dict[str, Any] | None:
        """The known facts of a run; None for a name that is no run."""
        return self._known.get(name, (None,))[0]

    def every(self) -> list[dict[str, Any]]:
        """All that were read."""
        with self._lock:
            return [facts for facts, _ in self._known.values() if facts is not None]

    def look(self) -> None:
        """Read what was written since the last look, as far as the budget goes."""
        with self._lock:
            self._list()
            self._turn += 1
            for number, (name, (facts, stamp)) in enumerate(self._known.items()):
                settled = facts is not None and facts["state"] == "finished"
                if settled and (number + self._turn) % SHARE:
                    continue
                now = self._stamp(self.root / name)
                # No file says that the process of a run was killed.
                killed = facts is not None and facts["state"] == RUNNING
                if now != stamp or _recent(now) or (killed and not is_running(self.root / name)):
                    self._waiting[name] = None
            end = time.monotonic() + BUDGET
            while self._waiting:
                name = next(iter(self._waiting))
                del self._waiting[name]
                self._read(name)
                if time.monotonic() > end:
                    break

    def _list(self) -> None:
        """Names that are new or gone, where the folder's time says that there may be some."""
        stamp = self._stamp(self.root)
        if stamp == self._listed and not _recent(stamp):
            return
        self._listed = stamp
        try:
            with os.scandir(self.root) as found:
                there = [e for e in found if not e.name.startswith(".") and e.is_dir()]
                times = {e.name: e.stat().st_mtime_ns for e in there}
        except OSError:
            times = {}
        for name in [n for n in (*self._known, *self._waiting) if n not in times]:
            self._waiting.pop(name, None)
            self._put(name, None)
            self._known.pop(name, None)
        # The newest first: what a person looks for.
        for name in sorted(times, key=lambda n: -times[n]):
            if name not in self._known:
                self._waiting[name] = None

    def _read(self, name: str) -> None:
        stamp = self._stamp(self.root / name)
        facts = read_run(self.root / name)
        self.reads += 1
        self._put(name, facts, stamp)

    def _put(self, name: str, facts: dict[str, Any] | None, stamp: int = 0) -> None:
        before = self.facts(name)
        if before == facts:
            facts = before  # the same object, by which a page tells that nothing changed
        else:
            self.version += 1
        self._known[name] = facts, stamp

    def _stamp(self, path: Path) -> int:
        self.stats += 1
        try:
            return path.stat().st_mtime_ns
        except OSError:
            return 0


def _recent(stamp: int) -> bool:
    return abs(time.time_ns() - stamp) < RECENT


LIVE = (
    "protocol",
    "client_mean",
    "accuracy",
    "std over seeds",
    "validation",
    "choice",
    "bytes up",
    "seconds",
    "done",
    "total",
    "left",
)
"""What a point shows of its run."""


NOTHING: dict[str, Any] = {"command": "", "runs": "", "points": [], "ends": {}, "ended": 0}
"""What is known of a grid whose record is damaged."""


class GridIndex:
    """The records of grids in a folder, each read again when its file changed.

    Args:
        folder: of the records; it may come later.
        runs: of the home.
    """

    def __init__(self, folder: Path, runs: RunIndex) -> None:
        self.folder = folder
        self.runs = runs
        self._records: dict[Path, tuple[object, dict[str, Any]]] = {}
        self._lines: dict[Path, tuple[object, dict[str, Any]]] = {}

    def lines(self) -> list[dict[str, Any]]:
        """Every grid with its points, the newest first; made again where its record or a run changed.

        A point is waiting, running, stopped, finished, failed, pruned, or gone where its run was removed since. Of a
        search, ``of`` counts the trials that are still to be drawn too.
        """
        found = []
        for path in self.folder.glob("*.jsonl"):
            with suppress(OSError):  # it may go while it is read
                found.append(self._line(path))
        return sorted(found, key=lambda g: -g["started"])

    def grid(self, name: str) -> dict[str, Any] | None:
        """A grid by its name; None for a name that is none."""
        return next((g for g in self.lines() if g["name"] == name), None)

    def _line(self, path: Path) -> dict[str, Any]:
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        # The record is read again only when its file changed.
        if self._records.get(path, (None,))[0] != stamp:
            try:
                record = {"damaged": "", **(read_record(path) or {})}
            except CorruptionError as error:
                damaged = f"{error.message} {error.hint}"
                record = {**NOTHING, "damaged": damaged, "started": stat.st_mtime}
            self._records[path] = stamp, record
        record = self._records[path][1]
        # A line also changes with the runs of its points, and when its process ends.
        at_work = "ended" not in record and still_runs(record["process"]) is not False
        key = (stamp, self.runs.version, at_work)
        if self._lines.get(path, (None,))[0] != key:
            self._lines[path] = key, {"name": path.stem, **self._grid(record, at_work)}
        return self._lines[path][1]

    def _grid(self, record: dict[str, Any], at_work: bool) -> dict[str, Any]:
        here = not record["runs"] or Path(record["runs"]).resolve() == self.runs.root.resolve()
        points = self._points(record, here)
        _score_alike(points)
        state = "running"
        if record["damaged"]:
            state = "damaged"
        elif not at_work:
            state = "finished"
            if "error" in record or "ended" not in record:
                state = "stopped"
        problem = record["damaged"] or record.get("error")
        if state == "stopped" and not problem:
            problem = (
                "The grid is not finished: its process ended, or the end of its record was lost."
            )
        # A search may still add points while it is running.
        total = len(points)
        if at_work:
            total = max(total, record.get("trials", 0))
        count = Counter(p["state"] for p in points)
        ended = count["finished"] + count["failed"] + count["pruned"]
        parts = [p["done"] / p["total"] for p in points if p["state"] == "running" and p["total"]]
        share = 1.0
        if total:
            share = (ended + sum(parts)) / total
        chosen = [p for p in points if p["choice"] is not None]
        return {
            "state": state,
            "command": record["command"],
            "started": record["started"],
            "problem": problem,
            "keys": list(dict.fromkeys(key for p in points for key in p["sweep"])),
            "methods": list(dict.fromkeys(p["method"] for p in points)),
            "points": points,
            "here": here,
            "of": total,
            "count": count,
            "done": count["finished"],
            "share": share,
            "best": max(chosen, key=lambda p: p["choice"], default=None),
            "left": _left(points, count["waiting"] + total - len(points)),
        }

    def _points(self, record: dict[str, Any], here: bool) -> list[dict[str, Any]]:
        """The points in their order, each with what is known of its run."""
        unfinished = [r for r in self.runs.every() if r["state"] in ("running", "stopped")]
        points = []
        # What the record says of a point comes first; a point that is being trained is found by its settings.
        for number, (method, sweep) in enumerate(record["points"]):
            end = record["ends"].get(number, {})
            run = None
            state = "waiting"
            if "error" in end:
                state = "failed"
            elif end.get("run"):
                run = None
                if here:
                    run = self.runs.facts(end["run"])
                state = "gone"
            elif here and "ended" not in record:
                run = _run_of(method, sweep, unfinished, record["started"])
            if run is not None:
                state = "pruned"
                if "pruned" not in end:
                    state = run["state"]
                unfinished = [other for other in unfinished if other is not run]
            # Points without a run still have all columns, empty.
            facts = dict.fromkeys(LIVE)
            ident = end.get("run")
            if run is not None:
                facts = {k: run.get(k) for k in LIVE}
                ident = run["name"]
            point = {
                **facts,
                "method": method,
                "sweep": sweep,
                "words": " ".join([method, *(f"{k}={v}" for k, v in sweep.items())]),
                "run": ident,
                "state": state,
                "problem": end.get("error"),
            }
            if state == "pruned":
                point |= {"choice": None, "problem": f"Pruned after round {end['pruned']}."}
            points.append(point)
        return points


def _score_alike(points: Sequence[dict[str, Any]]) -> None:
    """One score for all points: the mean over clients where some have one model for all and others one for each."""
    kinds = {p["protocol"] for p in points if p["protocol"] is not None}
    for point in points:
        alike = point["client_mean"]
        if alike is not None and len(kinds) > 1:
            point |= {
                key: value
                for key, value in alike.items()
                if key != "choice" or point["choice"] is not None
            }


def _left(points: Sequence[Mapping[str, Any]], waiting: int) -> float | None:
    """Seconds until the last point ends: those at work, which end together, and then the others one after another."""
    running = [p for p in points if p["state"] == "running" and p["left"] is not None]
    if not running:
        return None
    whole = [p["seconds"] for p in points if p["seconds"] is not None]
    whole = whole or [p["left"] * p["total"] / max(1, p["total"] - p["done"]) for p in running]
    return float(max(p["left"] for p in running) + waiting * sum(whole) / len(whole))


def _run_of(
    method: str, sweep: Mapping[str, str], runs: Sequence[dict[str, Any]], started: float
) -> dict[str, Any] | None:
    """The unfinished run of a point that has not ended: begun by this grid, with its method and swept values.

    What is swept of the partition is in no configuration, so among points that differ in it alone the first is taken.
    """
    for run in runs:
        if run["method"] == method and run["begun"] >= started - 1:
            given = run["settings"]
            matching = [
                (given[k], v)
                for key, v in sweep.items()
                if (k := key.rpartition(".")[2].replace("-", "_")) in given
            ]
            if all(_same(a, b) for a, b in matching):
                return run
    return None


def _same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other
