"""The grids of a home as they fill: their records, with what is known of the runs of their points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcache.errors import CorruptionError
from fedcache.grids.record import read_record
from fedcache.store.lock import still_runs
from fedcache.ui.run_index import RunIndex

LIVE = (
    "protocol",
    "client_mean",
    "state",
    "accuracy",
    "std",
    "validation",
    "choice",
    "sent",
    "received",
    "seconds",
    "done",
    "total",
    "left",
)
"""What a point shows of its run."""


class GridIndex:
    """The records of grids in a folder, each read again when its file changed.

    Args:
        folder: of the records; it may come later.
        runs: of the home.
    """

    def __init__(self, folder: Path, runs: RunIndex) -> None:
        self.folder, self.runs = folder, runs
        self._read: dict[str, tuple[tuple[int, int], dict[str, Any] | None]] = {}
        self._lines: dict[str, tuple[object, dict[str, Any]]] = {}

    def lines(self) -> list[dict[str, Any]]:
        """Every grid without its points, the newest first; made again where its record or a run changed."""
        found = []
        for name in self._names():
            told, stamp = self._record(name)
            if told is None:
                continue
            if "damaged" in told:
                found.append(_damaged_line(name, told))
                continue
            key = (stamp, self.runs.version, told["over"] or still_runs(told["process"]))
            if self._lines.get(name, (None,))[0] != key:
                self._lines[name] = key, _line(self._grid(name, told))
            found.append(self._lines[name][1])
        return sorted(found, key=lambda g: -g["started"])

    def grid(self, name: str) -> dict[str, Any] | None:
        """A grid with its points in their order; None for a name that is none.

        A point is waiting, running, stopped, finished, failed, pruned, or gone where its run was removed since. Of a
        search, ``of`` counts the trials that are still to be drawn too.
        """
        told = self._record(name)[0] if name in self._names() else None
        if told is None or "damaged" in told:
            return None if told is None else _damaged_line(name, told)
        return self._grid(name, told)

    def _grid(self, name: str, told: dict[str, Any]) -> dict[str, Any]:
        at_work = not told["over"] and still_runs(told["process"]) is not False
        here = not told["runs"] or Path(told["runs"]).resolve() == self.runs.root.resolve()
        open_runs = (
            [r for r in self.runs.every() if r["state"] in ("running", "stopped")]
            if here and not told["over"]
            else []
        )
        points = []
        for number, (method, sweep) in enumerate(told["points"]):
            end = told["ends"].get(number, {})
            point = {
                "number": number,
                "method": method,
                "sweep": sweep,
                "run": end.get("run"),
                "choice": None,
            }
            if "error" in end:
                point |= {"state": "failed", "problem": end["error"]}
            elif end.get("run"):
                facts = self.runs.facts(end["run"]) if here else None
                point |= (
                    {"state": "gone"}
                    if facts is None
                    else {k: facts[k] for k in LIVE if k in facts}
                )
                if facts is not None and "pruned" in end:
                    point |= {
                        "state": "pruned",
                        "choice": None,
                        "problem": f"Pruned after round {end['pruned']}.",
                    }
            else:
                point |= {"state": "waiting"}
                if (run := _run_of(method, sweep, open_runs, told["started"])) is not None:
                    open_runs.remove(run)
                    point |= {"run": run["name"], **{k: run[k] for k in LIVE if k in run}}
            points.append(point)
        _score_alike(points)
        state = (
            "running"
            if at_work
            else "stopped"
            if "error" in told or "ended" not in told
            else "finished"
        )
        keys = list(dict.fromkeys(key for _, sweep in told["points"] for key in sweep))
        methods = list(dict.fromkeys(method for method, _ in told["points"]))
        return {
            "name": name,
            "state": state,
            "command": told["command"],
            "started": told["started"],
            "ended": told.get("ended"),
            "problem": told.get("error"),
            "keys": keys,
            "methods": methods,
            "points": points,
            "here": here,
            "of": max(len(points), told.get("trials", 0) if at_work else 0),
        }

    def _names(self) -> list[str]:
        try:
            return sorted(
                p.name.removesuffix(".jsonl") for p in self.folder.iterdir() if p.suffix == ".jsonl"
            )
        except OSError:
            return []

    def _record(self, name: str) -> tuple[dict[str, Any] | None, tuple[int, int]]:
        """A record, and what tells it from a later one."""
        path = self.folder / f"{name}.jsonl"
        try:
            stat = path.stat()
        except OSError:
            return None, (0, 0)
        stamp = stat.st_mtime_ns, stat.st_size
        if name not in self._read or self._read[name][0] != stamp:
            try:
                told = read_record(path)
            except CorruptionError as error:
                told = {"damaged": f"{error.message} {error.hint}", "started": stat.st_mtime}
            self._read[name] = stamp, None if told is None else {**told, "over": "ended" in told}
        return self._read[name][1], stamp


def _damaged_line(name: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """A grid whose record is damaged: nothing of it is known but its name and the time of the file."""
    return {
        "name": name,
        "state": "damaged",
        "command": "",
        "started": told["started"],
        "ended": None,
        "problem": told["damaged"],
        "keys": [],
        "methods": [],
        "here": False,
        "of": 0,
        "done": 0,
        "failed": 0,
        "pruned": 0,
        "share": 0.0,
        "running": 0,
        "best": None,
        "left": None,
    }


def _score_alike(points: Sequence[dict[str, Any]]) -> None:
    """One score for all points: the mean over clients where some have one model for all and others one for each."""
    kinds = {p["protocol"] for p in points if p.get("protocol") is not None}
    for point in points:
        alike = point.pop("client_mean", None)
        if alike is not None and len(kinds) > 1:
            point |= {
                key: value
                for key, value in alike.items()
                if key != "choice" or point["choice"] is not None
            }


def _line(grid: dict[str, Any]) -> dict[str, Any]:
    points = grid.pop("points")
    count = {
        s: sum(p["state"] == s for p in points)
        for s in ("finished", "failed", "pruned", "running", "waiting")
    }
    count["waiting"] += grid["of"] - len(points)
    best = max(
        (p for p in points if p["choice"] is not None), key=lambda p: p["choice"], default=None
    )
    parts = [p["done"] / p["total"] for p in points if p["state"] == "running" and p.get("total")]
    ended = count["finished"] + count["failed"] + count["pruned"]
    share = (ended + sum(parts)) / grid["of"] if grid["of"] else 1.0
    return {
        **grid,
        "done": count["finished"],
        "failed": count["failed"],
        "pruned": count["pruned"],
        "share": share,
        "running": count["running"],
        "best": best,
        "left": _left(points, count["waiting"]),
    }


def _left(points: Sequence[Mapping[str, Any]], waiting: int) -> float | None:
    """Seconds until the last point ends: those at work, which end together, and then the others one after another."""
    running = [p for p in points if p["state"] == "running" and p.get("left") is not None]
    if not running:
        return None
    whole = [p["seconds"] for p in points if p.get("seconds") is not None]
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
            given = run["swept"]
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
