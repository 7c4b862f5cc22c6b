"""The points of a grid: which there are, which of them are one program, and what came of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fedcache.config import PartitionConfig
from fedcache.errors import Exit, UsageError
from fedcache.federate.methods import find_method
from fedcache.grids.sweeps import check_sweeps, split_key, values_of_place
from fedcache.notebooks import data_frame, html_table, percent
from fedcache.runs.run import Run, spread, values_of


@dataclass
class Point:
    """One combination: a method, the swept values, and its run over all seeds."""

    method: str
    sweep: dict[str, str]
    run: Run

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the point and its run."""
        return {"method": self.method, "sweep": self.sweep, **self.run.to_dict()}

    def __repr__(self) -> str:
        return f"Point({self.words}: {spread(self.run.result['accuracy'])}, {self.run.path})"

    @property
    def words(self) -> str:
        """Method and swept values: ``fedavg lr=0.1``."""
        return " ".join([self.method, *(f"{k}={v}" for k, v in self.sweep.items())])


@dataclass
class LostPoint:
    """A point without a result: its stored run is damaged, or its training failed. What was found, and what to do."""

    method: str
    sweep: dict[str, str]
    message: str
    hint: str


@dataclass
class Grid:
    """All points of a grid, in the order of the product; damaged and failed ones are apart."""

    points: list[Point]  # those with a result
    damaged: list[LostPoint] = field(default_factory=list)  # those whose stored run is damaged
    failed: list[LostPoint] = field(default_factory=list)  # those that could not be trained

    @property
    def code(self) -> Exit:
        """CorruptionError when a stored run is damaged, else FederatedRunError when a point failed, else OK."""
        return Exit.CORRUPT if self.damaged else Exit.FEDERATED if self.failed else Exit.OK

    @property
    def reused(self) -> int:
        """Points whose result was there already."""
        return sum(p.run.reused for p in self.points)

    def best(self) -> Point:
        """The point of the highest mean accuracy; the first of equals."""
        return max(self.points, key=lambda p: p.run.accuracy["mean"] or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """The ``data`` of the envelope."""
        best = self.best()
        return {
            "points": [p.to_dict() for p in self.points],
            "damaged": [asdict(d) for d in self.damaged],
            "failed": [asdict(f) for f in self.failed],
            "reused": self.reused,
            "best": {"method": best.method, "sweep": best.sweep, "digest": best.run.result["digest"]},
        }

    def frame(self) -> Any:
        """pandas columns, one row per point: method, every swept value, accuracy (mean and std over seeds), bytes.

        Raises MachineError without pandas.
        """
        swept = list(dict.fromkeys(k for p in self.points for k in p.sweep))
        results = [p.run.result for p in self.points]
        return data_frame(
            {
                "method": [p.method for p in self.points],
                **{k: values_of([p.sweep.get(k) for p in self.points]) for k in swept},
                "accuracy": [r["accuracy"]["mean"] for r in results],
                "accuracy_std": [r["accuracy"]["std"] for r in results],
                "worst10": [r["fairness"].get("worst10") for r in results],
                "bytes_up": [r["traffic"]["exact"]["up_bytes"] for r in results],
                "bytes_down": [r["traffic"]["exact"]["down_bytes"] for r in results],
                "seconds": [p.run.measured.get("seconds", {}).get("train") for p in self.points],
                "path": [str(p.run.path) for p in self.points],
            }
        )

    def __repr__(self) -> str:
        lost = len(self.damaged) + len(self.failed)
        without = f", {lost} without a result" if lost else ""
        if not self.points:
            return f"Grid(0 points{without})"
        best = self.best()
        many = f"{len(self.points)} point{'s' * (len(self.points) > 1)}"
        return f"Grid({many}{without}, best {best.words}: {spread(best.run.result['accuracy'])})"

    def _repr_html_(self) -> str:
        swept = list(dict.fromkeys(k for p in self.points for k in p.sweep))
        ranked = sorted(self.points, key=lambda p: -(p.run.result["accuracy"]["mean"] or 0))
        rows = [
            (
                p.method,
                *(p.sweep.get(k) for k in swept),
                percent(p.run.result["accuracy"]["mean"]),
                percent(p.run.result["accuracy"]["std"]),
                f"{p.run.traffic.bytes_up:,}",
            )
            for p in ranked
        ]
        lost = [
            (f.method, *(f.sweep.get(k) for k in swept), "no result", None, None) for f in self.damaged + self.failed
        ]
        return html_table(repr(self), ("method", *swept, "accuracy", "std", "bytes up"), [*rows, *lost])


def sampled(sampler: str, points: Sequence[tuple[str, dict[str, str]]]) -> list[tuple[str, dict[str, str]]]:
    """The points that are run: all of them (``grid``), or N of them drawn without repeats (``random:N[:SEED]``).

    Raises UsageError.
    """
    if sampler == "grid":
        return list(points)
    match = re.fullmatch(r"random:(\d{1,9})(?::(\d{1,9}))?", sampler)
    if match is None or int(match[1]) < 1:
        raise UsageError(f"--sampler {sampler} is neither grid nor random:N.", "For example --sampler random:20")
    count = min(int(match[1]), len(points))
    drawn = np.random.default_rng(int(match[2] or 0)).choice(len(points), count, replace=False)
    return [points[i] for i in sorted(drawn)]


def combinations(methods: Sequence[str], sweeps: Mapping[str, Sequence[str]]) -> list[tuple[str, dict[str, str]]]:
    """Every (method, swept values), checked before anything runs: names, values, repeats. Raises UsageError."""
    check_sweeps(list(dict.fromkeys(methods)), sweeps)
    names = list(dict.fromkeys(methods))
    return [
        (m, dict(zip(sweeps, values, strict=True))) for m in names for values in itertools.product(*sweeps.values())
    ]


def point_groups(todo: Sequence[tuple[str, dict[str, str]]]) -> list[list[int]]:
    """Numbers of the points, those that differ in floats alone together, in the order of the product."""
    groups: dict[Any, list[int]] = {}
    for number, (name, sweep) in enumerate(todo):
        floats = {h.name for h in find_method(name).hparams if h.kind == "float"}
        # A name that scheme and method both have is the scheme's unless it says otherwise: every point its own rows.
        free = {k for k in sweep if split_key(k)[0] == "set" and split_key(k)[1] in floats}
        rest: dict[str, str] = {k: v for k, v in sweep.items() if k not in free or v == "auto"}
        groups.setdefault((name, *sorted(rest.items())), []).append(number)
    return list(groups.values())


def partition_of_point(base: PartitionConfig, sweep: Mapping[str, str]) -> PartitionConfig:
    """The partition of a point: the base with the swept scheme, clients and arguments."""
    mine = values_of_place(sweep, "partition")
    options: dict[str, Any] = {**base.options, **{k: mine[k] for k in ("alpha", "shards", "shots") if k in mine}}
    clients = int(mine["clients"]) if "clients" in mine else base.clients
    return PartitionConfig(mine.get("scheme", base.scheme), clients, base.seed, options)
