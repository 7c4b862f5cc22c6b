"""Server of the page. It answers only GET and HEAD requests, of its own pages, with a token, for loopback host names.

The token is part of the path, so relative links keep it and no cookie is needed. Requests without the token learn
nothing, not even which paths exist. Another host name that resolves to this machine (DNS rebinding) is refused by the
``Host`` header. Response headers forbid the browser to load anything from elsewhere, to send a referrer and to cache.
"""

from __future__ import annotations

import asyncio
import html
import itertools
import json
import os
import secrets
import shlex
import socket
import threading
import time
import webbrowser
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
from jinja2 import PackageLoader
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedcache.config import Home, option_words
from fedcache.errors import (
    CorruptionError,
    Exit,
    FedcacheError,
    MachineError,
    UsageError,
    shell_word,
)
from fedcache.extract.planning.find_images import ImagePlaces, read_images
from fedcache.extract.planning.find_store import dataset_of_store
from fedcache.extract.recipe import IMAGES, held_by
from fedcache.grids.record import FOLDER, read_record
from fedcache.parsing import Facts, size
from fedcache.progress import VALIDATION_ACCURACY, percent
from fedcache.report.compare import compare_entries
from fedcache.report.comparison_output import caption, sentences, sheets
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
    gather,
    group_key,
    is_run,
    name_without_hold_out,
    open_run,
    value_words,
)
from fedcache.report.page import answer_of_runs, overview_of, write_report
from fedcache.report.render import Section, html_environment, thumbnail_uri
from fedcache.report.run_origin import command_of
from fedcache.report.store_card import rows_of_classes, rows_of_splits
from fedcache.runs.directory import WRITTEN, command_again, has_model, is_running, train_table
from fedcache.runs.origin import store_behind
from fedcache.runs.score import choice_value, validation_value
from fedcache.store.catalog import is_ingested, size_of
from fedcache.store.files import LONGEST_HEADER, SEAL, at_once, digest_of, parse_signed, read_whole
from fedcache.store.lock import still_runs
from fedcache.store.manifest import VANISHED
from fedcache.store.store import Store
from fedcache.tables.splits import SPLIT_NAMES
from fedcache.tables.words import some_names

# Runs and grids as the page shows them: the facts of ``fedcache runs list``, and the progress of running ones.
#
# The progress of a run is read from files that it writes anyway: its finished seeds and the header of its last
# checkpoint, without the tensors. So watching does not slow down training. Nothing here imports torch.

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
        "command": command_again(path),
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


# Stores as the page shows them, and thumbnails of their images, which are made on request.

PAGE = 24
"""Number of thumbnails on one page."""


class StoreIndex:
    """The stores of a home; a store is opened again when its manifest or a journal has changed.

    Args:
        home: the home with the stores; it also remembers where the files of their datasets are.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        # Name of a store -> its stamp when it was opened, and its line.
        self._lines: dict[str, tuple[tuple[int, ...], Facts]] = {}
        self._places = ImagePlaces(home)

    def lines(self) -> list[Facts]:
        """A line for every store with the facts of ``fedcache ls``; a damaged store has a ``problem``."""
        paths = self._paths()
        for name, path in paths.items():
            stamp = _stamp(path)
            if self._lines.get(name, (None,))[0] != stamp:
                self._lines[name] = stamp, _line(name, path)
        return [self._lines[name][1] for name in paths]

    def details(self, name: str) -> Facts | None:
        """Facts of a store as ``fedcache inspect`` has them, and commands; None for an unknown name.

        Raises FedcacheError for a damaged store.
        """
        path = self._paths().get(name)
        if path is None:
            return None
        store = Store.open(path)
        groups = []
        for column in store.groups:
            count = len(store.group(column).words)
            groups.append(f"{column} ({count})")
        return {
            **_line(name, path),
            "holds": held_by(a.recipe for a in store.arrays.values()),
            "lost": store.quarantined(),
            "splits": rows_of_splits(store.samples),
            "classes": rows_of_classes(store.samples),
            "groups": groups,
            "command": extract_command(store, self.home),
        }

    def images(self, name: str, start: int) -> Facts | None:
        """Thumbnails of ``PAGE`` readable images of a store, from number ``start`` on; None for an unknown name.

        Raises StoreError if the images are not available, UsageError for rows that are no images.
        """
        path = self._paths().get(name)
        if path is None:
            return None
        store = Store.open(path)
        samples = store.samples
        readable = np.flatnonzero(samples.ok == 1)
        rows = [int(row) for row in readable[start : start + PAGE]]
        found = read_images(store, rows, self._places)
        shown = [(row, thumbnail_uri(found[row])) for row in rows if row in found]
        return {"samples": samples, "start": start, "of": len(readable), "shown": shown}

    def _paths(self) -> dict[str, Path]:
        """Name -> directory of every store; only these names are ever opened."""
        found = sorted(self.home.stores.glob("*.zarr"))
        return {p.stem: p for p in found if p.is_dir()}


def _stamp(path: Path) -> tuple[int, ...]:
    """Modification times that show a change of a store: of its directory, its manifest and its journals."""
    stamps = []
    for place in (path, path / "manifest.json", *sorted(path.glob("journal-*.jsonl"))):
        try:
            stamps.append(place.stat().st_mtime_ns)
        except OSError:
            stamps.append(0)
    return tuple(stamps)


def _line(name: str, path: Path) -> Facts:
    """A store's line: the opened store, its unfinished arrays and its size, or the problem of a damaged one."""
    try:
        store = Store.open(path)
        return {
            "name": name,
            "problem": "",
            "store": store,
            "unfinished": store.unfinished(),
            "bytes": size_of(path),
        }
    except (FedcacheError, OSError) as error:
        return {"name": name, "problem": str(error)}


def extract_command(store: Store, home: Home) -> str:
    """The command that makes or resumes a store; "" if it is not known."""
    if is_ingested(store):
        return ""
    known = dataset_of_store(store, home)
    recipes = [a.recipe for a in store.arrays.values()]
    if known is not None:
        words = option_words(known)
    elif held_by(recipes) == IMAGES:
        words = ["--dataset", str(store.dataset["slug"])]
    else:
        return ""
    backbones = dict.fromkeys(str(r["backbone"]) for r in recipes if "backbone" in r)
    if backbones:
        words = [*words, "--backbones", ",".join(backbones)]
    return shlex.join(["fedcache", "extract", *words])


HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Host names, with any port, that a browser may use on this machine or at the end of an ssh tunnel."""
MOST_ANSWERED = 200
"""Maximum number of runs whose results the overview shows; these are the newest."""
OFTEN = 0.3
"""Minimum number of seconds between two looks at the home, however many windows are open."""

OWN_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'; sandbox allow-scripts allow-downloads"
)
"""Content security policies: of the server's own pages, and of a report.

A report may have inline scripts here, because the report's own policy allows only one script, by its digest. A report
cannot send requests to this server.
"""
HEADERS = {
    "content-security-policy": OWN_POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of responses that set no others."""

PAGES = (
    "overview",
    "runs",
    "run",
    "grids",
    "grid",
    "stores",
    "store",
    "images",
    "compare",
    "report",
)
"""Pages, each with a template of the same name; the first is the start page."""


class Guard:
    """Application that passes on requests of its own pages that have the token, and refuses all other requests.

    Args:
        app: receives the request, with the path after the token.
        token: token of the address.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # websockets and lifespan events are ignored
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = {name.encode(): value.encode() for name, value in HEADERS.items()}
                # Headers that the response sets itself take precedence.
                headers |= dict(message["headers"])
                message = {**message, "headers": list(headers.items())}
            await send(message)

        path = scope["path"].removeprefix(f"/{self.token}")
        inside = {**scope, "path": path, "raw_path": path.encode()}
        answer = self._refused(scope) or self.app
        await answer(inside, receive, with_headers)

    def _refused(self, scope: Scope) -> Response | None:
        """The response to a request that is refused; None for one that is passed on."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        name, _, port = host.rpartition(":")
        # A host without a port may contain colons, such as ``[::1]``.
        if not port.isdigit():
            name = host
        if name.lower() not in HOSTS:
            return PlainTextResponse("Open this page in a browser on this machine.\n", 403)
        # The path of `OPTIONS *` has no slash.
        first = scope["path"].lstrip("/").partition("/")[0]
        if not secrets.compare_digest(first.encode(), self.token.encode()):
            words = "The address needs the token that `fedcache ui` prints.\n"
            return PlainTextResponse(words, 403)
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            return PlainTextResponse("This request came from another page.\n", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page is read-only.\n", 405)
        return None


class Pages:
    """The pages of the server, and the functions that their templates call.

    Args:
        home: the home that is shown; nothing in it is changed.
        folder: folder for the reports that are requested.

    Attributes:
        version: grows by one when a look at the home finds a change.
        ended: whether the server is about to end; streams of events then end too.
    """

    def __init__(self, home: Home, folder: Path) -> None:
        self.home = home
        self.runs = RunIndex(home.runs)
        self.stores = StoreIndex(home)
        self.grids = GridIndex(home.root / FOLDER, self.runs)
        self.reports = ReportShelf(home.runs, folder)
        self.version = 0
        self.ended: Callable[[], bool] = lambda: False
        # The state of the home at the last look; a different state makes a new version.
        self._state: object = None
        self._looked = 0.0  # time of the last look
        self._looking = threading.Lock()
        # The facts and the details of the run that was shown last.
        self._details: tuple[object, Facts] = (None, {})
        self._answers: dict[str, tuple[object, Section | None]] = {}  # group -> its runs and answer
        self._templates = html_environment(PackageLoader("fedcache.ui", "pages"))
        self._templates.filters |= {
            "percent": percent,
            "shell": shell_word,
            "size": _size,
            "time": _time,
            "when": _when,
        }
        self._templates.globals |= {
            "home": self,
            "need": _need,
            "comparison": comparison,
            "overview_of": overview_of,
            "caption": caption,
            "sheets": sheets,
            "sentences": sentences,
            "VANISHED": VANISHED,
            "SPLITS": SPLIT_NAMES,
            "PAGE": PAGE,
        }

    def app(self, token: str) -> ASGIApp:
        """The application behind the guard."""
        first, *others = PAGES
        routes = [
            Route("/", partial(self.page, first)),
            *(Route(f"/{name}", partial(self.page, name)) for name in others),
            Route("/events", self.events),
            Route("/report/{ident}.html", self.report_file),
            Mount("/static", StaticFiles(packages=[("fedcache.ui", "static")])),
        ]
        return Guard(Starlette(routes=routes), token)

    def look(self) -> None:
        """Read the home, unless it was read less than ``OFTEN`` seconds ago and no run is waiting to be read."""
        with self._looking:
            just_read = time.monotonic() - self._looked < OFTEN
            if just_read and not self.runs.waiting:
                return
            self.runs.look()
            state = (
                self.runs.version,
                self.runs.waiting,
                self.stores.lines(),
                self.grids.lines(),
                self.reports.ready,
            )
            if state != self._state:
                self._state = state
                self.version += 1
            self._looked = time.monotonic()

    def page(self, name: str, request: Request) -> Response:
        """A page of the home as it is now, or a page that describes the problem."""
        self.look()
        every = sorted(self.runs.every(), key=lambda r: r["changed"], reverse=True)
        # All facts that a page may show; its template uses some of them.
        facts = {
            "page": name,
            "words": dict(request.query_params),
            "runs": every,
            "states": Counter(r["state"] for r in every),
            "apart": differing(every),
            "grids": self.grids.lines(),
            "stores": self.stores.lines(),
        }
        code = 200
        # For damaged files and names that no longer exist, a page shows the problem and a hint.
        try:
            text = self._templates.get_template(f"{name}.html.j2").render(facts)
        except (FedcacheError, OSError) as error:
            if isinstance(error, UsageError):
                code = 404
            problem = getattr(error, "message", str(error))
            facts |= {"problem": problem, "hint": getattr(error, "hint", "")}
            text = self._templates.get_template("problem.html.j2").render(facts)
        return Response(text, code, media_type="text/html; charset=utf-8")

    def events(self, request: Request) -> Response:
        """Events with the version of the home: one at once, and one after every change while the page is open."""

        async def versions() -> AsyncIterator[str]:
            sent = 0
            while not self.ended() and not await request.is_disconnected():
                await run_in_threadpool(self.look)
                if sent != self.version:
                    sent = self.version
                    yield f"data: {sent}\n\n"
                pause = 0.5
                if self.runs.waiting:
                    pause = 0.1
                await asyncio.sleep(pause)

        return StreamingResponse(versions(), media_type="text/event-stream")

    def report_file(self, request: Request) -> Response:
        """The file of a finished report."""
        path = self.reports.file(request.path_params["ident"])
        if path is None:
            return PlainTextResponse("There is no such report.\n", 404)
        return FileResponse(path, headers={"content-security-policy": REPORT_POLICY})

    def answers(self, finished: Sequence[Facts]) -> list[Section]:
        """The results of the benchmark settings that were trained last, the newest first.

        Args:
            finished: runs, the newest first.
        """
        groups: dict[str, list[tuple[str, float]]] = {}
        for run in finished:
            groups.setdefault(run["group"], []).append((run["name"], run["changed"]))
        found: list[Section] = []
        count = 0
        for group, runs in groups.items():
            count += len(runs)
            if found and count > MOST_ANSWERED:
                break
            # An answer is made again when a run was added or written again.
            newest = runs[:MOST_ANSWERED]
            if self._answers.get(group, (None,))[0] != newest:
                paths = [self.runs.root / name for name, _ in newest]
                self._answers[group] = newest, answer_of_runs(paths)
            answer = self._answers[group][1]
            if answer is not None:
                found.append(answer)
        return found

    def find(self, words: Mapping[str, str]) -> list[Facts]:
        """The runs that match the words of ``filter`` and the ``state``, sorted by ``sort`` with ``order`` up or down.

        Raises UsageError for facts that have no order.
        """
        key = words["sort"]
        found = [r for r in self.runs.every() if matches(r, words["filter"])]
        if words["state"]:
            found = [r for r in found if r["state"] == words["state"]]
        known = [r for r in found if r.get(key) is not None]
        try:
            known.sort(key=lambda r: r[key], reverse=words["order"] == "down")
        except TypeError:
            raise UsageError(f"Runs cannot be sorted by {key}.", "") from None
        return known + [r for r in found if r.get(key) is None]

    def run(self, name: str) -> tuple[Facts, Facts] | None:
        """The facts and details of a run. Raises FedcacheError for a damaged one."""
        facts = self.runs.facts(name)
        if facts is None:
            return None
        if "problem" in facts:
            raise FedcacheError(Exit.CORRUPT, facts["problem"], facts["hint"])
        if self._details[0] is not facts:
            self._details = facts, read_details(self.runs.root / name)
        return facts, self._details[1]

    def chosen(self, words: str) -> list[Path]:
        """The directories of runs, from their names with commas between. Raises UsageError for unknown names."""
        names = words.split(",")
        lost = [name for name in names if self.runs.facts(name) is None]
        if lost:
            names_of_lost = some_names(lost, 5) or "This choice"
            problem = f"{names_of_lost} is no longer a run of this fedcache home."
            raise UsageError(problem, "Choose again.")
        return [self.runs.root / name for name in names]


def _need(facts: Any) -> Any:
    """The facts of a run, grid or store; UsageError (404) for None, which means an unknown name."""
    if facts is None:
        raise UsageError("There is no page of that name.", "")
    return facts


def _size(count: float | None) -> str:
    if count is None:
        return ""
    return f"{size(count)}B"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


LOOPBACK = "127.0.0.1"


def open_socket(port: int) -> socket.socket:
    """A socket bound to a port of loopback; port 0 takes a free one. Raises MachineError if the port cannot be used."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((LOOPBACK, port))
    except OSError as error:
        made.close()
        raise MachineError(
            f"Port {port} of {LOOPBACK} cannot be used: {error.strerror}.",
            "--port 0 uses a free port.",
        ) from error
    return made


def serve(home: Home, port: int, *, show: bool, say: Callable[[str], None]) -> str:
    """Serve the page of a home until SIGINT or SIGTERM.

    Args:
        home: the home that is shown.
        port: port of loopback; 0 takes a free one.
        show: whether to open the page in the browser of this machine.
        say: receives the address, once it can be opened.

    Returns:
        The address of the page.
    """
    with open_socket(port) as sock, TemporaryDirectory(prefix="fedcache-ui-") as folder:
        token = secrets.token_urlsafe(24)
        pages = Pages(home, Path(folder))
        number = sock.getsockname()[1]
        address = f"http://{LOOPBACK}:{number}/{token}/"
        sock.listen(128)
        config = uvicorn.Config(
            pages.app(token),
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=5,
            proxy_headers=False,
            ws="none",
        )
        server = uvicorn.Server(config)
        pages.ended = lambda: server.should_exit
        say(address)
        if show:
            open_in_browser(address, Path(folder))
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has ended
            server.run(sockets=[sock])
    return address


def open_in_browser(address: str, folder: Path) -> bool:
    """Open an address in the browser, and return whether a browser was started.

    The browser gets a file that only this user can read and that redirects to the address. Every user of the machine
    can read the arguments of a process, so the address with its token must not be one.
    """
    page = folder / "open.html"
    page.touch(mode=0o600)
    page.write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0;url={html.escape(address)}">',
        "utf-8",
    )
    try:
        return webbrowser.open(page.as_uri())
    except webbrowser.Error:
        return False


def comparison(paths: Sequence[Path], over: str, metric: str) -> Facts:
    """The comparison of some runs (``made``) with its command; if it fails, the ``trouble`` and a ``hint``."""
    score = metric.replace("_", "-")
    names = [path.name for path in paths]
    command = shlex.join(["fedcache", "compare", *names, "--over", over, "--score", score])
    try:
        made = compare_entries(gather(list(paths), Path()), over=over, metric=metric)
        return {"made": made, "command": command}
    except FedcacheError as error:
        return {"made": None, "command": command, "trouble": error.message, "hint": error.hint}


class ReportShelf:
    """Reports of chosen runs, written one at a time by threads of the server.

    Args:
        root: directory of the runs.
        folder: directory of the reports.

    Attributes:
        ready: number of reports that were written or failed.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder
        self.ready = 0
        self._reports: dict[str, Facts] = {}
        self._writing = threading.Lock()  # only one report is written at a time
        self._lock = threading.Lock()  # held while ``_reports`` is changed

    def request(self, paths: Sequence[Path]) -> Facts:
        """The report of these runs; the first call starts to write it.

        ``path`` is the file of the report once it is written. A failed report has ``problem`` and ``hint``. If one of
        the runs has been written again since the last call, a new report is written.
        """
        ident = digest_of([[p.name, p.stat().st_mtime_ns] for p in paths])[:16]
        names = [path.name for path in paths]
        command = shlex.join(["fedcache", "report", *names, "-o", "report.html"])
        with self._lock:
            if ident not in self._reports:
                self._reports[ident] = {"id": ident, "command": command}
                writer = threading.Thread(
                    target=self._write, args=(ident, list(paths)), daemon=True
                )
                writer.start()
            return self._reports[ident]

    def file(self, ident: str) -> str | None:
        """The path of a finished report; None for any other name."""
        path: str | None = self._reports.get(ident, {}).get("path")
        return path

    def _write(self, ident: str, paths: list[Path]) -> None:
        try:
            with self._writing:
                made = write_report(paths, self.folder / f"{ident}.html", self.root)
            found = made.to_dict()
        except FedcacheError as error:
            found = {"problem": error.message, "hint": error.hint}
        except Exception as error:  # an error that ends the thread would leave the page waiting
            problem = f"This is a bug in fedcache: {type(error).__name__}: {error}"
            hint = "Please report it, with the output of `fedcache report` for the same runs."
            found = {"problem": problem, "hint": hint}
        with self._lock:
            self._reports[ident] = {**self._reports[ident], **found}
            self.ready += 1
