"""Result of a grid: its points with their runs, the best of them, and the lost ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.trust.accounting import Spent, counted_share, epsilons
from fedcache.notebooks import data_frame, html_table, percent
from fedcache.runs.directory import DamagedRunError
from fedcache.runs.run import Run, spread, values_of
from fedcache.runs.score import (
    BY_VALIDATION,
    DIGITS,
    NOT_A_CHOICE,
    Order,
    Score,
    choice_value,
    has_validation,
    order_of_run,
    order_of_settings,
    score_for,
    score_of,
    tie_sentence,
)


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


def ends_one_point(error: FedcacheError) -> bool:
    """Whether an error ends one point and not the grid."""
    return isinstance(error, DamagedRunError) or error.code is Exit.FEDERATED


def without_hold_out(sweep: Mapping[str, str]) -> dict[str, str]:
    """The swept values of a point but for the value that is held out."""
    return {key: value for key, value in sweep.items() if key != "hold_out"}


def _mean(figures: Sequence[float | None], count: int) -> float | None:
    """The mean of that many figures; None where one is missing."""
    known = [f for f in figures if f is not None]
    if known and len(known) == count:
        return sum(known) / len(known)
    return None


@dataclass
class HeldOut:
    """One row of a table of held-out values: a setting, its accuracy on each value in turn, and their mean."""

    method: str
    sweep: dict[str, str]  # without ``hold_out``
    accuracy: dict[str, float | None]  # by the value that was held out; mean over the seeds
    mean: float | None  # over the values; None where one has no accuracy
    validation: float | None = None  # mean over the values of the accuracy on the rows to choose by
    rows: dict[str, int | None] = field(default_factory=dict)  # by the value: its test rows

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
class PrunedPoint:
    """A trial of a search that was stopped on its way, and so is never ranked."""

    method: str
    sweep: dict[str, str]
    round: int  # after which it was stopped
    rounds: int  # that it would have had
    validation: float | None  # accuracy on the rows to choose by, at that round
    path: str  # of its run, which ``fedcache train`` would go on with

    @property
    def sentence(self) -> str:
        """After which round, and at what accuracy."""
        return f"Pruned after round {self.round} of {self.rounds} at {percent(self.validation)} % on validation rows"


@dataclass(frozen=True)
class Spending:
    """What the noise of one run of a grid costs."""

    dataset: str  # digest
    partitions: tuple[str, ...]  # digests, one for each seed
    cost: Mapping[str, Any]  # as ``trust.privacy`` of a result

    @property
    def kind(self) -> tuple[str, bool]:
        """The dataset, and whether the noise is a simulation: only costs of one kind add up."""
        return self.dataset, bool(self.cost["simulation"])

    @classmethod
    def of_result(cls, result: Mapping[str, Any]) -> Spending | None:
        """That of a stored run; None for a run without noise."""
        cost = result.get("trust", {}).get("privacy")
        if cost is None or not cost["noise"]:
            return None
        partition = result["partition"]
        return cls(
            result["dataset"]["digest"],
            tuple(partition.get("digests", [partition["digest"]])),
            cost,
        )


def _spent_by(points: Sequence[Point]) -> list[Spending]:
    """What the noise of each point costs; points without noise are left out."""
    found = (Spending.of_result(point.run.result) for point in points)
    return [spending for spending in found if spending is not None]


@dataclass
class Grid:
    """All points of a grid, in the order of the product; damaged and failed ones are apart."""

    points: list[Point]  # those with a result
    damaged: list[LostPoint] = field(default_factory=list)  # those whose stored run is damaged
    failed: list[LostPoint] = field(default_factory=list)  # those that could not be trained
    # of the point that was chosen: trained again on all training rows, where that was asked for; of a grid that holds
    # values out in turn, one for each of them
    retrained: list[Point] = field(default_factory=list)
    # of a search, those that were stopped on their way
    pruned: list[PrunedPoint] = field(default_factory=list)
    search: dict[str, Any] | None = (
        None  # of a search: sampler, seed, pruner, counts of trials, and where they are
    )
    score: str | None = (
        None  # client-mean | pooled: what points are ranked and shown by; None as ``scored_by`` says
    )
    # of points that were pruned, failed or are damaged
    without_result: list[Spending] = field(default_factory=list)

    @property
    def code(self) -> Exit:
        """CorruptionError when a stored run is damaged, else FederatedRunError when a point failed, else OK.

        Trials of a search may fail, as where a rate is too high: that is found out, and no error.
        """
        failed = self.failed and not (self.search and self.points)
        if self.damaged:
            return Exit.CORRUPT
        if failed:
            return Exit.FEDERATED
        return Exit.OK

    @property
    def reused(self) -> int:
        """Points whose result was there already."""
        return sum(p.run.reused for p in self.points)

    @property
    def scored_by(self) -> str:
        """The one score of all points: that which was asked for, else as ``runs.score.score_for``."""
        return self.score or score_for(p.run.result for p in self.points)

    def score_of(self, point: Point) -> Score:
        """A point's accuracy on test rows, by ``scored_by``."""
        return score_of(point.run.result, self.scored_by)

    def std_of(self, point: Point) -> float | None:
        """Its spread over seeds, ddof 1; None for one seed, and where every seed gives the same: that is no spread."""
        found = self.score_of(point)
        std: float | None
        if self.scored_by == "own":
            std = point.run.accuracy["std"]
        else:
            std = found.std
        if len(set(found.per_seed)) == 1:
            return None
        return std

    @property
    def unchanging(self) -> list[str]:
        """Swept keys whose values make no difference to any figure."""
        return without_effect([(p.method, p.sweep, p.run.result) for p in self.points])

    @property
    def by_validation(self) -> bool:
        """Whether all points have rows to choose by."""
        return has_validation(p.run.result for p in self.points)

    @property
    def chosen_by(self) -> str:
        """What ``best`` is, in words: chosen by validation accuracy, or what is no choice."""
        if self.by_validation:
            return BY_VALIDATION
        return NOT_A_CHOICE

    def best(self) -> Point:
        """The point with the highest validation accuracy, without such rows test accuracy; of equals see ``ranked``.

        It was trained without the rows to choose by; the run on all rows is in ``retrained``, under ``--retrain``.
        """
        return self.ranked()[0]

    def ranked(self) -> list[Point]:
        """The points by falling ``figure``; equal ones by method and settings, numbers ascending, then words.

        So the order in which values are swept decides nothing.
        """

        def order(point: Point) -> tuple[float, Order, Order, str]:
            figure = self.figure(point)
            result = point.run.result
            of_run = order_of_run({**result, "method": point.method})
            swept = order_of_settings(point.sweep)
            return -round(figure or 0.0, DIGITS), of_run, swept, str(result.get("digest"))

        return sorted(self.points, key=order)

    @property
    def tie(self) -> str | None:
        """That several points, or settings of held-out values, have the highest figure, and which is taken; or None."""
        if rows := self.held_out():
            figures = [row.validation if self.by_validation else row.mean for row in rows]
            return tie_sentence(figures, rows[0].words, "settings")
        ranked = self.ranked()
        return tie_sentence(
            [self.figure(p) for p in ranked], ranked[0].words if ranked else "", "points"
        )

    def figure(self, point: Point) -> float | None:
        """What the points of this grid are ranked by, mean over seeds: validation accuracy, or test accuracy."""
        if self.by_validation:
            return choice_value(point.run.result, self.scored_by)
        return self.score_of(point).mean

    def chosen(self) -> list[Point]:
        """The points to train again: the best, or of a grid that holds values out those of the first setting."""
        if not (rows := self.held_out()):
            return [self.best()]
        return [
            p
            for p in self.points
            if (p.method, without_hold_out(p.sweep)) == (rows[0].method, rows[0].sweep)
        ]

    def held_out(self) -> list[HeldOut]:
        """One row per setting of a grid that holds values out in turn, by falling mean; [] for any other grid.

        A setting that lacks the run of a value has no mean. With rows to choose by, the mean is that of validation.
        """
        values = list(
            dict.fromkeys(p.sweep["hold_out"] for p in self.points if "hold_out" in p.sweep)
        )
        lost = {p.sweep["hold_out"] for p in (*self.damaged, *self.failed) if "hold_out" in p.sweep}
        values += sorted(lost - set(values))
        rows: dict[tuple[str, ...], HeldOut] = {}
        chosen_by: dict[tuple[str, ...], list[float | None]] = {}
        for point in self.points if values else ():
            rest = without_hold_out(point.sweep)
            key = (point.method, *(f"{k}={v}" for k, v in rest.items()))
            row = rows.setdefault(key, HeldOut(point.method, rest, {}, None))
            row.accuracy[point.sweep["hold_out"]] = self.score_of(point).mean
            row.rows[point.sweep["hold_out"]] = point.run.result["partition"].get("test_rows")
            if self.by_validation:
                chosen_by.setdefault(key, []).append(self.figure(point))
        for key, row in rows.items():
            row.accuracy = {value: row.accuracy.get(value) for value in values}
            row.rows = {value: row.rows.get(value) for value in values}
            row.mean = _mean(list(row.accuracy.values()), len(values))
            row.validation = _mean(chosen_by.get(key, []), len(values))

        def order(row: HeldOut) -> tuple[float, str, Order]:
            if self.by_validation:
                figure = row.validation
            else:
                figure = row.mean
            return (
                -round(figure if figure is not None else -1.0, DIGITS),
                row.method,
                order_of_settings(row.sweep),
            )

        return sorted(rows.values(), key=order)

    def privacy(self) -> list[dict[str, Any]]:
        """What all noise of this grid costs together, for each dataset; [] without noise.

        Every release about the dataset is composed: the points, those that were pruned or failed, all their seeds, and
        the models that were trained again on all training rows. Real noise and simulations are told apart.

        Returns:
            for each dataset ``dataset`` (digest), ``points``, ``retrained``, ``seeds`` (of all of them), ``delta``,
            ``simulation``, ``epsilon_pld``, ``epsilon_rdp`` and ``unit``: about whom epsilon speaks. That is ``client``
            where all points have one partition: training again gives each of its clients the validation rows back, so
            it stays the same client. It is ``row`` where the partition differs between points or seeds, as a row is
            held by one client of each partition.
        """
        of_points = [*_spent_by(self.points), *self.without_result]
        retrained = _spent_by(self.retrained)
        made = []
        # Real noise and simulations of one dataset are two kinds.
        for kind in dict.fromkeys(s.kind for s in of_points):
            dataset, simulation = kind
            first = [s for s in of_points if s.kind == kind]
            again = [s for s in retrained if s.kind == kind]
            costs = [s.cost for s in (*first, *again)]
            spent = [Spent(c["noise"], counted_share(c), c["rounds"] * c["seeds"]) for c in costs]
            delta = min(c["delta"] for c in costs)
            unit = "row"
            if len({digest for s in first for digest in s.partitions}) == 1:
                unit = "client"
            facts = {
                "dataset": dataset,
                "unit": unit,
                "points": len(first),
                "retrained": len(again),
                "seeds": sum(c["seeds"] for c in costs),
                "delta": delta,
                "simulation": simulation,
            }
            made.append({**facts, **epsilons(spent, delta)})
        return made

    def to_dict(self) -> dict[str, Any]:
        """The ``data`` of the envelope."""
        best = self.best()
        chosen = {
            "method": best.method,
            "sweep": best.sweep,
            "digest": best.run.result["digest"],
            "chosen_by": self.chosen_by,
        }
        if tie := self.tie:
            chosen["tie"] = tie
        data = {
            "points": [p.to_dict() for p in self.points],
            "damaged": [asdict(d) for d in self.damaged],
            "failed": [asdict(f) for f in self.failed],
            "reused": self.reused,
            "best": chosen,
            "score": self.scored_by,
        }
        # What only some grids have.
        more = {
            "unchanging": self.unchanging,
            "retrained": [p.to_dict() for p in self.retrained],
            "privacy": self.privacy(),
            "held_out": [asdict(row) for row in self.held_out()],
            "search": self.search,
        }
        data |= {name: value for name, value in more.items() if value}
        if self.search:
            data["pruned"] = [asdict(p) for p in self.pruned]
        return data

    def frame(self) -> Any:
        """pandas columns, one row per point: method, every swept value, accuracy (mean and std over seeds), bytes.

        Accuracies, on test rows and on those to choose by, are by ``scored_by``.

        Raises MachineError without pandas.
        """
        swept = list(dict.fromkeys(k for p in self.points for k in p.sweep))
        results = [p.run.result for p in self.points]
        validation = {}
        if self.by_validation:
            validation["validation"] = [self.figure(p) for p in self.points]
        return data_frame(
            {
                "method": [p.method for p in self.points],
                **{k: values_of([p.sweep.get(k) for p in self.points]) for k in swept},
                **validation,
                "accuracy": [self.score_of(p).mean for p in self.points],
                "accuracy_std": [
                    r["accuracy"]["std"] if self.scored_by == "own" else self.score_of(p).std
                    for p, r in zip(self.points, results, strict=True)
                ],
                "worst10": [r["fairness"].get("worst10") for r in results],
                "bytes_up": [r["traffic"]["exact"]["up_bytes"] for r in results],
                "bytes_down": [r["traffic"]["exact"]["down_bytes"] for r in results],
                "seconds": [p.run.measured.get("seconds", {}).get("train") for p in self.points],
                "path": [str(p.run.path) for p in self.points],
            }
        )

    def __repr__(self) -> str:
        lost = len(self.damaged) + len(self.failed)
        without = ""
        if lost:
            without = f", {lost} without a result"
        if not self.points:
            return f"Grid(0 points{without})"
        best = self.best()
        many = f"{len(self.points)} point{'s' * (len(self.points) > 1)}"
        figures = spread(best.run.result["accuracy"])
        if len(self.retrained) == 1:
            again = spread(self.retrained[0].run.result["accuracy"])
            figures += f"; trained again on all training rows: {again}"
        return f"Grid({many}{without}, {self.chosen_by}: {best.words}, {figures})"

    def _repr_html_(self) -> str:
        swept = list(dict.fromkeys(k for p in self.points for k in p.sweep))
        ranked = self.ranked()
        validation = ("validation",) if self.by_validation else ()
        rows = [
            (
                p.method,
                *(p.sweep.get(k) for k in swept),
                *(percent(self.figure(p)) for _ in validation),
                percent(self.score_of(p).mean),
                percent(self.std_of(p)),
                f"{p.run.traffic.bytes_up:,}",
            )
            for p in ranked
        ]
        lost = [
            (
                f.method,
                *(f.sweep.get(k) for k in swept),
                *(None for _ in validation),
                "no result",
                None,
                None,
            )
            for f in self.damaged + self.failed
        ]
        return html_table(
            repr(self),
            ("method", *swept, *validation, "accuracy", "std", "bytes up"),
            [*rows, *lost],
        )


def without_effect(points: Sequence[tuple[str, Mapping[str, str], Mapping[str, Any]]]) -> list[str]:
    """Swept keys whose values make no difference: all points that differ in such a key alone have equal figures.

    Args:
        points: method, swept values and result of each.
    """
    found = []
    for key in dict.fromkeys(key for _, sweep, _ in points for key in sweep):
        groups: dict[tuple[Any, ...], list[Any]] = {}
        for name, sweep, result in points:
            if key in sweep:
                rest = tuple((k, v) for k, v in sweep.items() if k != key)
                groups.setdefault((name, *rest), []).append(_figures(result))
        several = [figures for figures in groups.values() if len(figures) > 1]
        if several and all(f == figures[0] for figures in several for f in figures):
            found.append(key)
    return found


def _figures(result: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        result.get(k)
        for k in ("accuracy", "macro_f1", "confusion", "traffic", "diagnostics", "partition")
    )
