"""Runs and grids as the page shows them: the facts of ``fedcache runs list``, and the progress of running ones.

The progress of a run is read from files that it writes anyway: its finished seeds and the header of its last
checkpoint, without the tensors. So watching does not slow down training. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
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
from fedcache.report.describe_run import (
    DAMAGED,
    FINISHED,
    RUNNING,
    entry_of,
    figures_of,
    settings_of,
)
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
from fedcache.runs.score import choice_value, validation_value
from fedcache.store.files import LONGEST_HEADER, SEAL, at_once, parse_signed, read_whole
from fedcache.store.lock import still_runs

Facts = dict[str, Any]
"""Facts by name, about a run, a round, a grid or a configuration."""

LAST = 20
"""Number of latest rounds whose mean duration gives the remaining time."""

SEARCHED = ("name", "state", "method", "dataset", "backbones", "partition", "hold_out", "tags")
"""Facts of a run that a search looks through, in addition to its settings."""

STOPPED = "stopped"
"""State of a run that has no result and whose process has ended."""

WRONG = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Errors that reading a file can raise if fedcache did not write the file."""


def read_run(path: Path) -> Facts | None:
    """A run's line in a table, or None if the directory holds no run.

    It holds ``entry_of`` and, if the run is finished, ``figures_of``. ``state`` is finished, running, stopped or
    damaged; a damaged run has ``problem`` and ``hint``. ``changed`` is in seconds since 1970. ``settings`` are the
    run's settings in words.
    """
    if not is_run(path):
        return None
    # A directory with files that no run wrote gets a line too: the errors that reading them raises are caught.
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


def read_details(path: Path) -> Facts:
    """Details for a run's page: a drawing, the settings, a command, and the score of each seed.

    Raises FedcacheError for a damaged run, and if matplotlib is missing.
    """
    need_matplotlib()
    one = open_run(path)
    # A finished run is drawn from its result, an unfinished run from its finished seeds and checkpoints.
    if isinstance(one, StoredRun):
        scores = zip(one.seeds, one.result["accuracy"]["per_seed"], strict=False)
        store = store_behind(path, one.result)
        name = ""
        # Options that name the rows in the command ``fedcache evaluate``.
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
    records = []
    for seed, kept in _kept(path, table).items():
        records += [{**record, "seed": seed} for record in kept]
    return {
        "drawing": _draw(records),
        "settings": _words(table),
        "command": f"fedcache train --config {shell_word(path / 'config.toml')}",
        "seeds": [],
    }


def _finished(run: StoredRun) -> Facts:
    """Settings and scores of a finished run."""
    settings = {k.removeprefix("set."): v for k, v in run.facts.items()}
    settings.pop("method", None)
    settings.pop("backbones", None)
    return {
        **figures_of(run),
        "state": FINISHED,
        "partition": name_without_hold_out(run.result),
        "group": group_key(run),
        "settings": settings,
        "choice": choice_value(run.result),
        "protocol": run.result.get("protocol"),
        "client_mean": {
            "accuracy": run.accuracy("client-mean"),
            "validation": validation_value(run.result, "client-mean"),
            "choice": choice_value(run.result, "client-mean"),
            "std over seeds": None,
        },
    }


def _unfinished(path: Path) -> Facts:
    """Progress of a run, from its finished seeds and the checkpoints of its other seeds."""
    table = train_table(path)
    seeds = _seeds(table)
    records = list(itertools.chain.from_iterable(_kept(path, table).values()))
    scored = [r for r in records if r["accuracy"] is not None]
    # The last rounds say how fast the run is now.
    timed = [r["seconds"] for r in records if r.get("seconds") is not None]
    times = timed[-LAST:]
    total = int(table["rounds"]) * len(seeds)
    running = is_running(path)
    state = STOPPED
    if running:
        state = RUNNING
    made = {
        "state": state,
        "rounds": int(table["rounds"]),
        "seeds": seeds,
        "done": len(records),
        "total": total,
        "bytes up": sum(r["traffic"]["up_bytes"] for r in records),
        "bytes down": sum(r["traffic"]["down_bytes"] for r in records),
        "changed": max((_changed(file) for file in path.iterdir()), default=0.0),
        "begun": _changed(path / WRITTEN),
        "settings": _words(table),
    }
    # Seconds of the remaining rounds, at the mean time of the last ones.
    if running and times:
        made["left"] = sum(times) / len(times) * (total - len(records))
    if scored:
        last = scored[-1]
        made["accuracy"] = last["accuracy"]
        made["at_round"] = last["round"]
        made["validation"] = _validation(last)
    return made


def _kept(path: Path, table: Facts) -> dict[int, list[Facts]]:
    """The stored rounds of each seed of a run that is not finished."""
    found = {}
    for seed in _seeds(table):
        for file in (path / f"seed-{seed}.json", path / f"checkpoint-{seed}.safetensors"):
            try:
                found[seed] = _records(str(file), file.stat().st_mtime_ns)
                break
            # If a file is missing or damaged, the next is tried. Without a good file, the run begins this seed again.
            except WRONG:
                continue
    return found


@lru_cache(maxsize=1024)
def _records(file: str, _changed_at: int) -> list[Facts]:
    """The rounds in the file of a finished seed, or in a checkpoint; they are cached until the file changes."""
    records: list[Facts] = []
    if file.endswith(".json"):
        content = parse_signed(read_whole(Path(file)))["content"]
        times = content.get("measured", {}).get("rounds", [])
        for i, record in enumerate(content["rounds"]):
            seconds = None
            if i < len(times):
                seconds = times[i]
            records.append({**record, "seconds": seconds})
        return records
    with open(file, "rb", opener=at_once) as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError("no header")
        seal = json.loads(opened.read(length))["__metadata__"][SEAL]
    content = json.loads(parse_signed(seal.encode())["content"])
    for record in content["records"]:
        accuracy = record["accuracy"]
        if accuracy != accuracy:  # NaN stands for a round that was not scored
            accuracy = None
        records.append({**record, "accuracy": accuracy})
    return records


def _draw(records: Sequence[Facts]) -> str:
    """The report's curves as SVG: a line for each seed and its validation rows; "" where no line has two rounds."""
    lines: dict[str, list[Facts]] = {}
    for record in records:
        scores = {"": record["accuracy"], ", validation": _validation(record)}
        for rows, score in scores.items():
            if score is not None:
                line = lines.setdefault(f"seed {record['seed']}{rows}", [])
                line.append({**record, "accuracy": score})
    # The figure reads only ``rounds`` and ``key`` of a run, so an object with these two can stand for a run.
    seeds: list[tuple[str, Any]] = []
    for name, line in lines.items():
        seeds.append((name, SimpleNamespace(rounds=line, key=name)))
    plot = curves("curve", seeds)
    if plot is None:
        return ""
    return plot.svg


def matches(run: Facts, words: str) -> bool:
    """Whether every word is part of a fact of a run: its name, method, data, state or settings."""
    texts = [str(run.get(name)) for name in SEARCHED]
    texts += [f"{key}={value}" for key, value in run["settings"].items()]
    text = "\n".join(texts).lower()
    return all(word in text for word in words.lower().split())


def differing(runs: Sequence[Facts]) -> dict[str, str]:
    """Name of each run -> in words, at most four settings that differ between the runs of its method."""
    values: dict[object, set[str]] = defaultdict(set)
    for run in runs:
        for key, value in run["settings"].items():
            values[run.get("method"), key].add(value)
    found = {}
    for run in runs:
        words = []
        for key, value in run["settings"].items():
            if len(values[run.get("method"), key]) > 1:
                words.append(f"{key}={value}")
        found[run["name"]] = " ".join(words[:4])
    return found


def _validation(record: Facts) -> float | None:
    found: float | None = record.get("diagnostics", {}).get(VALIDATION_ACCURACY)
    return found


def _words(table: Facts) -> dict[str, str]:
    """A configuration's settings in words, with the method's own settings at the same level."""
    table = {**table, **table.get("set", {})}
    return {k: value_words(v) for k, v in table.items() if k != "set"}


def _seeds(table: Facts) -> list[int]:
    """The seeds of a configuration that fedcache wrote. Raises ValueError for any other text."""
    seeds: dict[int, None] = {}
    for part in str(table.get("seeds", "0")).split(","):
        first, _, last = part.partition("-")
        # The limit keeps a damaged file from filling the memory.
        end = min(int(last or first), int(first) + 10_000)
        seeds.update(dict.fromkeys(range(int(first), end + 1)))
    return list(seeds)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


BUDGET = 0.2
"""Seconds that a look may spend on reading runs; the next look continues."""
SHARE = 30
"""Number of looks in which the modification time of every finished run is checked once."""
RECENT = 2_000_000_000
"""Nanoseconds in which a file may change without a new modification time, because clocks of file systems are coarse."""


class RunIndex:
    """The runs of a folder.

    Args:
        root: the folder; it may be created later.

    Attributes:
        version: grows by one with every change.
        reads: number of runs that were read so far.
        stats: number of modification times that were requested so far.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.version = 0
        self.reads = 0
        self.stats = 0
        # Name of a directory -> the facts of its run, None if it holds none (yet), and its modification time then.
        self._known: dict[str, tuple[Facts | None, int]] = {}
        self._waiting: dict[str, None] = {}  # names of directories to read, in order
        self._listed: int | None = None  # modification time of the folder when it was listed last
        self._turn = 0  # number of looks so far
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of directories that are known by name and not read yet."""
        return len(self._waiting)

    def facts(self, name: str) -> Facts | None:
        """The known facts of a run; None for a name that is no run."""
        return self._known.get(name, (None,))[0]

    def every(self) -> list[Facts]:
        """The facts of all runs that were read."""
        with self._lock:
            return [facts for facts, _ in self._known.values() if facts is not None]

    def look(self) -> None:
        """Read runs that were written since the last look, until ``BUDGET`` is spent."""
        with self._lock:
            self._list()
            self._turn += 1
            for number, (name, (facts, stamp)) in enumerate(self._known.items()):
                state = (facts or {}).get("state")
                # Finished runs rarely change, so one look checks only a part of them.
                if state == FINISHED and (number + self._turn) % SHARE:
                    continue
                now = self._stamp(self.root / name)
                changed = now != stamp or _recent(now)
                # A process that is killed changes no file, so its run is checked separately.
                killed = not changed and state == RUNNING and not is_running(self.root / name)
                if changed or killed:
                    self._waiting[name] = None
            end = time.monotonic() + BUDGET
            while self._waiting:
                name = next(iter(self._waiting))
                del self._waiting[name]
                self._read(name)
                if time.monotonic() > end:
                    break

    def _list(self) -> None:
        """Add new names and remove deleted ones, if the folder's modification time says that it changed."""
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
        gone = [name for name in (*self._known, *self._waiting) if name not in times]
        for name in gone:
            self._waiting.pop(name, None)
            self._put(name, None)  # only to count the change
            self._known.pop(name, None)
        # The newest runs are read first.
        for name in sorted(times, key=lambda n: -times[n]):
            if name not in self._known:
                self._waiting[name] = None

    def _read(self, name: str) -> None:
        stamp = self._stamp(self.root / name)
        facts = read_run(self.root / name)
        self.reads += 1
        self._put(name, facts, stamp)

    def _put(self, name: str, facts: Facts | None, stamp: int = 0) -> None:
        before = self.facts(name)
        if before == facts:
            facts = before  # a page recognises unchanged facts by the same object
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
"""Facts of a run that its configuration in a grid also shows."""


NOTHING: Facts = {"command": "", "runs": "", "points": [], "ends": {}, "ended": 0}
"""Substitute for a damaged record of a grid."""


class GridIndex:
    """The records of grids in a folder; a record is read again when its file has changed.

    Args:
        folder: folder of the records; it may be created later.
        runs: the runs of the home.
    """

    def __init__(self, folder: Path, runs: RunIndex) -> None:
        self.folder = folder
        self.runs = runs
        # File -> its stamp when it was read, and its record.
        self._records: dict[Path, tuple[object, Facts]] = {}
        # File -> everything on which its line depends, and the line.
        self._lines: dict[Path, tuple[object, Facts]] = {}

    def lines(self) -> list[Facts]:
        """A line for every grid with its points, the newest first.

        A line is made again when its record or a run has changed.

        A point is waiting, running, stopped, finished, failed, pruned, or gone if its run was removed since. ``of`` is
        the number of points; for a search it includes trials that are still to be drawn.
        """
        found = []
        for path in self.folder.glob("*.jsonl"):
            with suppress(OSError):  # the file may be removed while it is read
                found.append(self._line(path))
        return sorted(found, key=lambda g: -g["started"])

    def grid(self, name: str) -> Facts | None:
        """A grid by its name; None for an unknown name."""
        return next((g for g in self.lines() if g["name"] == name), None)

    def _line(self, path: Path) -> Facts:
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
        # A line also changes with the runs of its points, and when the process of the grid ends.
        at_work = "ended" not in record and still_runs(record["process"]) is not False
        key = (stamp, self.runs.version, at_work)
        if self._lines.get(path, (None,))[0] != key:
            self._lines[path] = key, {"name": path.stem, **self._grid(record, at_work)}
        return self._lines[path][1]

    def _grid(self, record: Facts, at_work: bool) -> Facts:
        """State, points and progress of a grid."""
        folder = record["runs"]
        here = not folder or Path(folder).resolve() == self.runs.root.resolve()
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
        running = [p for p in points if p["state"] == "running" and p["total"]]
        parts = [p["done"] / p["total"] for p in running]
        share = 1.0
        if total:
            share = (ended + sum(parts)) / total
        comparable = [p for p in points if p["choice"] is not None]
        keys = dict.fromkeys(itertools.chain(*(p["sweep"] for p in points)))
        return {
            "state": state,
            "command": record["command"],
            "started": record["started"],
            "problem": problem,
            "keys": list(keys),
            "methods": list(dict.fromkeys(p["method"] for p in points)),
            "points": points,
            "here": here,
            "of": total,
            "count": count,
            "done": count["finished"],
            "share": share,
            "best": max(comparable, key=lambda p: p["choice"], default=None),
            "left": _left(points, count["waiting"] + total - len(points)),
        }

    def _points(self, record: Facts, here: bool) -> list[Facts]:
        """The points in their order, each with the facts of its run."""
        unfinished = [r for r in self.runs.every() if r["state"] in (RUNNING, STOPPED)]
        points = []
        # The record names the runs of points that have ended. The run of any other point is found by its settings.
        for number, (method, sweep) in enumerate(record["points"]):
            end = record["ends"].get(number, {})
            run = None
            state = "waiting"
            if "error" in end:
                state = "failed"
            elif end.get("run"):
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
            # A point without a run gets the same facts, with None as their values.
            of_run = run or {}
            settings = [f"{key}={value}" for key, value in sweep.items()]
            point = {
                **{key: of_run.get(key) for key in LIVE},
                "method": method,
                "sweep": sweep,
                "words": " ".join([method, *settings]),
                "run": of_run.get("name", end.get("run")),
                "state": state,
                "problem": end.get("error"),
            }
            if state == "pruned":
                point |= {"choice": None, "problem": f"Pruned after round {end['pruned']}."}
            points.append(point)
        return points


def _score_alike(points: Sequence[Facts]) -> None:
    """Score all points by the mean over clients if some have one model for all clients and others one for each."""
    kinds = {p["protocol"] for p in points if p["protocol"] is not None}
    if len(kinds) < 2:
        return
    for point in points:
        for key, value in (point["client_mean"] or {}).items():
            # A point without a choice, such as a pruned one, gets none.
            if key != "choice" or point["choice"] is not None:
                point[key] = value


def _left(points: Sequence[Facts], waiting: int) -> float | None:
    """Estimated seconds until the last point ends.

    The waiting points are assumed to start, one after another, when the slowest running point has ended.
    """
    running = [p for p in points if p["state"] == "running" and p["left"] is not None]
    if not running:
        return None
    # Seconds of whole points: those of finished points, or an estimate from the running points if none is finished.
    seconds = [p["seconds"] for p in points if p["seconds"] is not None]
    if not seconds:
        for point in running:
            rounds_left = max(1, point["total"] - point["done"])
            seconds.append(point["left"] * point["total"] / rounds_left)
    slowest = max(p["left"] for p in running)
    return float(slowest + waiting * sum(seconds) / len(seconds))


def _run_of(
    method: str, sweep: Mapping[str, str], runs: Sequence[Facts], started: float
) -> Facts | None:
    """The unfinished run of a point that has not ended: begun by this grid, with its method and swept values.

    Configurations do not hold settings of the partition. For points that differ only in these, the first run is taken.
    """
    for run in runs:
        # The margin of a second allows for the clock of the file system, which can be behind.
        may_be_of_grid = run["method"] == method and run["begun"] >= started - 1
        if may_be_of_grid and _agrees(run["settings"], sweep):
            return run
    return None


def _agrees(settings: Mapping[str, str], sweep: Mapping[str, str]) -> bool:
    """Whether settings have the swept values; names that are no setting are ignored."""
    for key, value in sweep.items():
        name = key.rpartition(".")[2].replace("-", "_")
        if name in settings and not _same(settings[name], value):
            return False
    return True


def _same(one: str, other: str) -> bool:
    """Whether two words are the same number or the same text."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other
