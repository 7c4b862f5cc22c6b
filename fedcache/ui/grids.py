"""The grids of a home as they fill: their records, with what is known of the runs of their points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcache.errors import CorruptionError
from fedcache.grids.record import read_record
from fedcache.store.lock import still_runs
from fedcache.ui.run_index import RunIndex

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
        if self._records.get(path, (None,))[0] != stamp:
            try:
                told = {"damaged": "", **(read_record(path) or {})}
            except CorruptionError as error:
                damaged = f"{error.message} {error.hint}"
                told = {**NOTHING, "damaged": damaged, "started": stat.st_mtime}
            self._records[path] = stamp, told
        told = self._records[path][1]
        at_work = "ended" not in told and still_runs(told["process"]) is not False
        key = (stamp, self.runs.version, at_work)
        if self._lines.get(path, (None,))[0] != key:
            self._lines[path] = key, {"name": path.stem, **self._grid(told, at_work)}
        return self._lines[path][1]

    def _grid(self, told: dict[str, Any], at_work: bool) -> dict[str, Any]:
        here = not told["runs"] or Path(told["runs"]).resolve() == self.runs.root.resolve()
        points = self._points(told, here)
        _score_alike(points)
        state = "running"
        if told["damaged"]:
            state = "damaged"
        elif not at_work:
            state = "finished"
            if "error" in told or "ended" not in told:
                state = "stopped"
        total = max(len(points), told.get("trials", 0) if at_work else 0)
        count = Counter(p["state"] for p in points)
        ended = count["finished"] + count["failed"] + count["pruned"]
        parts = [p["done"] / p["total"] for p in points if p["state"] == "running" and p["total"]]
        chosen = [p for p in points if p["choice"] is not None]
        return {
            "state": state,
            "command": told["command"],
            "started": told["started"],
            "problem": told["damaged"] or told.get("error"),
            "keys": list(dict.fromkeys(key for p in points for key in p["sweep"])),
            "methods": list(dict.fromkeys(p["method"] for p in points)),
            "points": points,
            "here": here,
            "of": total,
            "count": count,
            "done": count["finished"],
            "share": (ended + sum(parts)) / total if total else 1.0,
            "best": max(chosen, key=lambda p: p["choice"], default=None),
            "left": _left(points, count["waiting"] + total - len(points)),
        }

    def _points(self, told: dict[str, Any], here: bool) -> list[dict[str, Any]]:
        """The points in their order, each with what is known of its run."""
        unfinished = [r for r in self.runs.every() if r["state"] in ("running", "stopped")]
        points = []
        for number, (method, sweep) in enumerate(told["points"]):
            end = told["ends"].get(number, {})
            run = None
            state = "waiting"
            if "error" in end:
                state = "failed"
            elif end.get("run"):
                run = None
                if here:
                    run = self.runs.facts(end["run"])
                state = "gone"
            elif here and "ended" not in told:
                run = _run_of(method, sweep, unfinished, told["started"])
            if run is not None:
                state = "pruned"
                if "pruned" not in end:
                    state = run["state"]
                unfinished = [other for other in unfinished if other is not run]
            facts = {k: None if run is None else run.get(k) for k in LIVE}
            point = {
                **facts,
                "method": method,
                "sweep": sweep,
                "words": " ".join([method, *(f"{k}={v}" for k, v in sweep.items())]),
                "run": end.get("run") if run is None else run["name"],
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
            told = [
                (given[k], v)
                for key, v in sweep.items()
                if (k := key.rpartition(".")[2].replace("-", "_")) in given
            ]
            if all(_same(a, b) for a, b in told):
                return run
    return None


def _same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other
