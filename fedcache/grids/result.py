"""Result of a grid: its points with their runs, the best point, and the points without a result."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.trust.accounting import Spent, counted_share, epsilons
from fedcache.notebooks import data_frame, html_table, percent
from fedcache.parsing import Facts, Record, counted
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


def point_words(method: str, sweep: Mapping[str, str]) -> str:
    """Method and swept values of a point: ``fedavg lr=0.1``."""
    words = [method]
    words += [f"{key}={value}" for key, value in sweep.items()]
    return " ".join(words)


@dataclass
class Point:
    """One combination: a method, the swept values, and its run over all seeds."""

    method: str
    sweep: dict[str, str]
    run: Run

    def to_dict(self) -> Facts:
        """Plain JSON values: the point and its run."""
        return {"method": self.method, "sweep": self.sweep, **self.run.to_dict()}

    def __repr__(self) -> str:
        accuracy = spread(self.run.result["accuracy"])
        return f"Point({self.words}: {accuracy}, {self.run.path})"

    @property
    def words(self) -> str:
        """Method and swept values: ``fedavg lr=0.1``."""
        return point_words(self.method, self.sweep)


def without_hold_out(sweep: Mapping[str, str]) -> dict[str, str]:
    """The swept values of a point without the held-out value."""
    return {key: value for key, value in sweep.items() if key != "hold_out"}


def _mean(figures: Sequence[float | None], count: int) -> float | None:
    """The mean of ``count`` figures; None if one is missing."""
    known = [f for f in figures if f is not None]
    if known and len(known) == count:
        return sum(known) / len(known)
    return None


@dataclass
class HeldOut:
    """One row of a table of held-out values: a setting, its accuracy on each value in turn, and their mean.

    Attributes:
        method: its name.
        sweep: swept values, without ``hold_out``.
        accuracy: held-out value -> test accuracy, mean over the seeds.
        mean: mean of the accuracies over the held-out values; None if one is missing.
        validation: mean of the validation accuracies over the held-out values; None if one is missing.
        rows: held-out value -> number of its test rows.
    """

    method: str
    sweep: dict[str, str]
    accuracy: dict[str, float | None]
    mean: float | None
    validation: float | None = None
    rows: dict[str, int | None] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Method and swept values: ``fedavg lr=0.1``."""
        return point_words(self.method, self.sweep)


@dataclass
class LostPoint:
    """A point without a result, because its stored run is damaged or its training failed; with the error."""

    method: str
    sweep: dict[str, str]
    message: str
    hint: str


@dataclass
class PrunedPoint:
    """A trial of a search that the pruner stopped early; it is not ranked.

    Attributes:
        method: its name.
        sweep: swept values.
        round: its last round.
        rounds: rounds of a whole trial.
        validation: validation accuracy at its last round.
        path: directory of its run, which ``fedcache train`` can continue.
    """

    method: str
    sweep: dict[str, str]
    round: int
    rounds: int
    validation: float | None
    path: str

    @property
    def sentence(self) -> str:
        """The last round, and the accuracy there."""
        accuracy = percent(self.validation)
        return f"Pruned after round {self.round} of {self.rounds} at {accuracy} on validation rows"


@dataclass(frozen=True)
class Spending:
    """The privacy cost of one run of a grid.

    Attributes:
        dataset: digest of the dataset.
        partitions: digests of the partitions of all seeds.
        cost: the cost, as in ``trust.privacy`` of a result.
    """

    dataset: str
    partitions: tuple[str, ...]
    cost: Record

    @property
    def kind(self) -> tuple[str, bool]:
        """The dataset, and whether the noise is simulated: only costs of one kind add up."""
        return self.dataset, bool(self.cost["simulation"])

    @classmethod
    def of_result(cls, result: Record) -> Spending | None:
        """The cost of a stored run; None for a run without noise."""
        cost = result.get("trust", {}).get("privacy")
        if cost is None or not cost["noise"]:
            return None
        partition = result["partition"]
        partitions = tuple(partition.get("digests", [partition["digest"]]))
        return cls(result["dataset"]["digest"], partitions, cost)


def _spent_by(points: Sequence[Point]) -> list[Spending]:
    """The privacy cost of each point; points without noise are left out."""
    spent = [Spending.of_result(point.run.result) for point in points]
    return [spending for spending in spent if spending is not None]


@dataclass
class Grid:
    """All points of a grid, in the order of the product; damaged and failed points are separate.

    Attributes:
        points: points with a result.
        damaged: points whose stored run is damaged.
        failed: points whose training failed.
        retrained: with ``--retrain``, the chosen point of each method, trained again on all training rows; one for each
            held-out value.
        pruned: trials of a search that were stopped early.
        search: sampler, seed, pruner, counts of trials, and the path of the study of a search; None for a grid.
        score: client-mean | pooled, by which points are ranked and shown; None for the default of ``score_for``.
        without_result: privacy cost of points that were pruned, failed or are damaged.
    """

    points: list[Point]
    damaged: list[LostPoint] = field(default_factory=list)
    failed: list[LostPoint] = field(default_factory=list)
    retrained: list[Point] = field(default_factory=list)
    pruned: list[PrunedPoint] = field(default_factory=list)
    search: Facts | None = None
    score: str | None = None
    without_result: list[Spending] = field(default_factory=list)

    @property
    def code(self) -> Exit:
        """CORRUPT if a stored run is damaged, else FEDERATED if a point failed, else OK.

        A failed trial of a search is no error: it tells the search that a value is too high, for example.
        """
        if self.damaged:
            return Exit.CORRUPT
        if self.failed and not (self.search and self.points):
            return Exit.FEDERATED
        return Exit.OK

    def need_points(self) -> None:
        """Raise the errors of the lost points if no point has a result: CorruptionError or FederatedRunError."""
        if not self.points and (self.damaged or self.failed):
            self.raise_lost()

    def raise_lost(self) -> NoReturn:
        """Raise the errors of the lost points as one."""
        lost = [*self.damaged, *self.failed]
        messages = "\n".join(point.message for point in lost)
        raise FedcacheError(self.code, messages, lost[0].hint)

    @property
    def reused(self) -> int:
        """Number of points whose result was stored before."""
        return sum(p.run.reused for p in self.points)

    @property
    def scored_by(self) -> str:
        """The one score of all points: the requested one, else the default of ``runs.score.score_for``."""
        return self.score or score_for(p.run.result for p in self.points)

    def score_of(self, point: Point) -> Score:
        """A point's accuracy on test rows, by ``scored_by``."""
        return score_of(point.run.result, self.scored_by)

    def std_of(self, point: Point) -> float | None:
        """Standard deviation over seeds, ddof 1; None for one seed, and if all seeds give the same accuracy."""
        if len(set(self.score_of(point).per_seed)) == 1:
            return None
        return self._raw_std(point)

    def _raw_std(self, point: Point) -> float | None:
        """The standard deviation over seeds: stored for the primary metric (``own``), computed for the other scores."""
        if self.scored_by == "own":
            std: float | None = point.run.result["accuracy"]["std"]
            return std
        return self.score_of(point).std

    @property
    def unchanging(self) -> list[str]:
        """Swept keys whose values make no difference to any figure."""
        return without_effect([(p.method, p.sweep, p.run.result) for p in self.points])

    @property
    def by_validation(self) -> bool:
        """Whether all points have validation rows."""
        return has_validation(p.run.result for p in self.points)

    @property
    def chosen_by(self) -> str:
        """How ``best`` was selected, in words: by validation accuracy, or by test accuracy."""
        if self.by_validation:
            return BY_VALIDATION
        return NOT_A_CHOICE

    def best(self) -> Point:
        """The point with the highest validation accuracy, or test accuracy without validation rows (see ``ranked``).

        It was trained without the validation rows; with ``--retrain``, ``retrained`` has the run on all rows.
        """
        return self.ranked()[0]

    def ranked(self) -> list[Point]:
        """The points by falling ``figure``; ties by method and settings (numbers in ascending order, then words).

        The order does not depend on the order in which values are swept.
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
        """A sentence if several points, or rows of held-out values, share the highest figure; else None."""
        rows = self.held_out()
        if rows:
            figures = [self._held_out_figure(row) for row in rows]
            return tie_sentence(figures, rows[0].words, "settings")
        ranked = self.ranked()
        if not ranked:
            return None
        return tie_sentence([self.figure(p) for p in ranked], ranked[0].words, "points")

    def figure(self, point: Point) -> float | None:
        """The figure that ranks the points of this grid, mean over seeds: validation accuracy, or test accuracy."""
        if self.by_validation:
            return choice_value(point.run.result, self.scored_by)
        return self.score_of(point).mean

    def chosen(self) -> list[Point]:
        """The points to train again: of each method the best one, or those of its best row of held-out values."""
        # Rows and points are sorted, so the first one of each method is its best.
        by_method = {}
        for row in self.held_out():
            if row.method not in by_method:
                of_method = [p for p in self.points if p.method == row.method]
                by_method[row.method] = [
                    p for p in of_method if without_hold_out(p.sweep) == row.sweep
                ]
        if not by_method:
            for point in self.ranked():
                by_method.setdefault(point.method, [point])
        return list(itertools.chain(*by_method.values()))

    def retrained_scores(self) -> dict[str, float | None]:
        """The test accuracy of each setting that was trained again, mean over held-out values, by ``words``."""
        again = Grid(self.retrained, score=self.scored_by)
        rows = again.held_out()
        if rows:
            return {row.words: row.mean for row in rows}
        return {p.words: self.score_of(p).mean for p in self.retrained}

    def _held_out_figure(self, row: HeldOut) -> float | None:
        if self.by_validation:
            return row.validation
        return row.mean

    def held_out(self) -> list[HeldOut]:
        """One row per setting of a grid that holds values out in turn, by falling mean; [] for any other grid.

        A setting without a run for one of the values has no mean. With validation rows, the mean of the validation
        accuracies ranks the rows.
        """
        # Values with a result come first, in the order of the sweep.
        sweeps = [p.sweep for p in self.points]
        sweeps += [p.sweep for p in self.damaged + self.failed]
        values = list(dict.fromkeys(sweep["hold_out"] for sweep in sweeps if "hold_out" in sweep))
        if not values:
            return []
        rows = {}
        validation: dict[str, list[float | None]] = {}
        for point in self.points:
            value = point.sweep["hold_out"]
            swept = without_hold_out(point.sweep)
            key = point_words(point.method, swept)
            if key not in rows:
                accuracy: dict[str, float | None] = dict.fromkeys(values)
                rows[key] = HeldOut(point.method, swept, accuracy, None, rows=dict.fromkeys(values))
            row = rows[key]
            row.accuracy[value] = self.score_of(point).mean
            row.rows[value] = point.run.result["partition"].get("test_rows")
            if self.by_validation:
                validation.setdefault(key, []).append(self.figure(point))
        for key, row in rows.items():
            row.mean = _mean(list(row.accuracy.values()), len(values))
            row.validation = _mean(validation.get(key, []), len(values))

        def order(row: HeldOut) -> tuple[float, str, Order]:
            figure = self._held_out_figure(row)
            # A row without a figure is the last one.
            if figure is None:
                figure = -1.0
            return -round(figure, DIGITS), row.method, order_of_settings(row.sweep)

        return sorted(rows.values(), key=order)

    def privacy(self) -> list[Facts]:
        """The composed privacy cost of this grid, for each dataset; [] without noise.

        It covers every release about the dataset: all points, pruned and failed ones included, all their seeds, and the
        models that were trained again on all training rows. Real noise and simulated noise are counted separately.

        Returns:
            for each dataset ``dataset`` (digest), ``points``, ``retrained``, ``seeds`` (sum over them), ``delta``,
            ``simulation``, ``epsilon_pld``, ``epsilon_rdp`` and ``unit``, the unit of privacy. It is ``client`` if all
            points have one partition: training again adds validation rows to the same clients. It is ``row`` if the
            partition differs between points or seeds, because each partition gives a row to another client.
        """
        of_points = _spent_by(self.points) + self.without_result
        retrained = _spent_by(self.retrained)
        made = []
        # Releases of one dataset add up; those of different datasets do not.
        for kind in dict.fromkeys(s.kind for s in of_points):
            dataset, simulation = kind
            trained = [s for s in of_points if s.kind == kind]
            again = [s for s in retrained if s.kind == kind]
            costs = [s.cost for s in trained + again]
            spent = [Spent(c["noise"], counted_share(c), c["rounds"] * c["seeds"]) for c in costs]
            # Epsilons are composed at one delta, the smallest of all.
            delta = min(c["delta"] for c in costs)
            partitions = set(itertools.chain(*(s.partitions for s in trained)))
            unit = "row"
            if len(partitions) == 1:
                unit = "client"
            facts = {
                "dataset": dataset,
                "unit": unit,
                "points": len(trained),
                "retrained": len(again),
                "seeds": sum(c["seeds"] for c in costs),
                "delta": delta,
                "simulation": simulation,
            }
            made.append({**facts, **epsilons(spent, delta)})
        return made

    def to_dict(self) -> Facts:
        """The ``data`` of the JSON output."""
        best = self.best()
        chosen = {
            "method": best.method,
            "sweep": best.sweep,
            "digest": best.run.result["digest"],
            "chosen_by": self.chosen_by,
        }
        tie = self.tie
        if tie:
            chosen["tie"] = tie
        data = {
            "points": [p.to_dict() for p in self.points],
            "damaged": [asdict(d) for d in self.damaged],
            "failed": [asdict(f) for f in self.failed],
            "reused": self.reused,
            "best": chosen,
            "score": self.scored_by,
        }
        # Fields that only some grids have.
        optional = {
            "unchanging": self.unchanging,
            "retrained": [p.to_dict() for p in self.retrained],
            "privacy": self.privacy(),
            "held_out": [asdict(row) for row in self.held_out()],
            "search": self.search,
        }
        for name, value in optional.items():
            if value:
                data[name] = value
        if self.search:
            data["pruned"] = [asdict(p) for p in self.pruned]
        return data

    def frame(self) -> Any:
        """A pandas DataFrame, one row per point: method, every swept value, accuracy (mean and std over seeds), bytes.

        Test and validation accuracies are by ``scored_by``.

        Raises MachineError without pandas.
        """
        results = [p.run.result for p in self.points]
        exact = [result["traffic"]["exact"] for result in results]
        columns: Facts = {"method": [p.method for p in self.points]}
        for key in self._swept():
            columns[key] = values_of([p.sweep.get(key) for p in self.points])
        if self.by_validation:
            columns["validation"] = [self.figure(p) for p in self.points]
        columns["accuracy"] = [self.score_of(p).mean for p in self.points]
        columns["accuracy_std"] = [self._raw_std(p) for p in self.points]
        columns["worst10"] = [result["fairness"].get("worst10") for result in results]
        columns["bytes_up"] = [each["up_bytes"] for each in exact]
        columns["bytes_down"] = [each["down_bytes"] for each in exact]
        measured = [p.run.measured.get("seconds", {}) for p in self.points]
        columns["seconds"] = [seconds.get("train") for seconds in measured]
        columns["path"] = [str(p.run.path) for p in self.points]
        return data_frame(columns)

    def __repr__(self) -> str:
        lost = len(self.damaged) + len(self.failed)
        without = ""
        if lost:
            without = f", {lost} without a result"
        if not self.points:
            return f"Grid(0 configurations{without})"
        best = self.best()
        many = counted(len(self.points), "configuration")
        figures = spread(best.run.result["accuracy"])
        if self.retrained and not self.held_out():
            # The best point is the first that is trained again.
            again = spread(self.retrained[0].run.result["accuracy"])
            figures += f"; trained again on all training rows: {again}"
        chosen = f"{best.words}, {figures}"
        return f"Grid({many}{without}, {self.chosen_by}: {chosen})"

    def _swept(self) -> list[str]:
        """The swept keys of all points with a result."""
        return list(dict.fromkeys(itertools.chain(*(p.sweep for p in self.points))))

    def _repr_html_(self) -> str:
        swept = self._swept()
        heads = ["method", *swept, "validation", "accuracy", "std", "bytes up"]
        rows: list[list[Any]] = []
        for p in self.ranked():
            values = [p.sweep.get(key) for key in swept]
            validation = percent(self.figure(p))
            accuracy = percent(self.score_of(p).mean)
            std = percent(self.std_of(p))
            sent = f"{p.run.traffic.bytes_up:,}"
            rows.append([p.method, *values, validation, accuracy, std, sent])
        for lost in self.damaged + self.failed:
            values = [lost.sweep.get(key) for key in swept]
            rows.append([lost.method, *values, None, "no result", None, None])
        # Without validation rows, the column ``validation`` is left out.
        if not self.by_validation:
            for row in (heads, *rows):
                del row[1 + len(swept)]
        return html_table(repr(self), heads, rows)


def without_effect(points: Sequence[tuple[str, Mapping[str, str], Record]]) -> list[str]:
    """Swept keys without effect: points that differ only in such a key have equal figures.

    Args:
        points: method, swept values and result of each.
    """
    keys = []
    for key in dict.fromkeys(itertools.chain(*(sweep for _, sweep, _ in points))):
        # Figures of points that differ only in this key.
        groups: dict[tuple[Any, ...], list[Any]] = {}
        for name, sweep, result in points:
            if key in sweep:
                other_settings = [(other, value) for other, value in sweep.items() if other != key]
                groups.setdefault((name, *other_settings), []).append(_figures(result))
        several = [figures for figures in groups.values() if len(figures) > 1]
        equal = [figures.count(figures[0]) == len(figures) for figures in several]
        if several and all(equal):
            keys.append(key)
    return keys


def _figures(result: Record) -> list[Any]:
    """The parts of a result that are compared."""
    parts = ("accuracy", "macro_f1", "confusion", "traffic", "diagnostics", "partition")
    return [result.get(part) for part in parts]
