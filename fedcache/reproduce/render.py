"""The report of a reproduction as Markdown and as JSON. The title and each row say whether the run is a proxy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedcache.parsing import Facts, as_lists
from fedcache.reproduce.metrics import (
    Measurement,
    compare,
    show_compared,
    show_measured,
    show_metric,
    show_printed,
    unit,
)
from fedcache.reproduce.planning import Difference, PaperCell, PaperTable, Printed
from fedcache.reproduce.runner import ReproducedCell, Reproduction

SUBSTITUTE = "substitute"
PLAIN = "reproduced"


def title(report: Reproduction) -> str:
    """The title of the report, in one line."""
    entry = report.entry
    if report.proxy:
        where = entry.name
        if report.on:
            where += f" on {report.on}"
        return f"{where}, substitute data or backbones: {entry.title}"
    words = f"{entry.name}: {entry.title}"
    if report.departures or any(line.departures for line in report.lines):
        words += ", with deviations"
    return words


def columns(report: Reproduction) -> tuple[str, ...]:
    """The columns of ``rows``; a proxy has ranks, because its differences from printed numbers mean nothing."""
    last: tuple[str, ...] = ("difference", "standard errors")
    if report.proxy:
        last = ()
        if orders(report):
            last = ("rank printed", "rank got")
    return ("row", *report.entry.labels, "metric", "printed", "got", *last)


def rows(report: Reproduction) -> list[tuple[str, ...]]:
    """One row per cell and metric; a cell that was not run has no number."""
    made = []
    # The rows of a proxy have ranks instead of differences. Labels and metric of a row -> its ranks as text.
    ranks = {}
    for ranking in orders(report):
        count = len(ranking.places)
        for place in ranking.places:
            printed_rank = f"{place.rank_printed} of {count}"
            got_rank = f"{place.rank_got} of {count}"
            ranks[place.line.cell.at, place.metric] = (printed_rank, got_rank)
    for line in report.lines:
        first = label(report, line)
        if line.why_not:
            made.append((first, *line.cell.at, "", "", f"not run: {line.why_not}", "", ""))
            continue
        for i, metric in enumerate(line.cell.metrics):
            last = ranks.get((line.cell.at, metric), ("", ""))
            if not report.proxy:
                last = show_compared(report.compared(line, i), metric)
            printed = show_printed(line.cell.printed[i], metric)
            got = show_measured(line.measured[metric], metric)
            made.append((first, *line.cell.at, show_metric(metric), printed, got, *last))
    blank = ("",) * (len(report.entry.labels) - 1)
    # Differences between rows that the paper prints, where all of these rows were run.
    for difference in report.entry.differences:
        measured = report.difference(difference)
        if measured.mean is None:
            continue
        of = ", ".join(difference.of)
        minus = ", ".join(difference.minus)
        what = f"{of} minus {minus}"
        first = PLAIN
        # Papers print differences without a std, so no number of seeds is needed.
        compared = compare(difference.printed, 0, measured)
        last = show_compared(compared, difference.metric)
        if report.proxy:
            first = SUBSTITUTE
            last = ("", "")
        printed = show_printed(difference.printed, difference.metric)
        got = show_measured(measured, difference.metric)
        made.append((first, what, *blank, show_metric(difference.metric), printed, got, *last))
    # A proxy without ranks lacks the last two columns. The rows above have empty cells for them, which are cut off.
    width = len(columns(report))
    return [row[:width] for row in made]


def label(report: Reproduction, line: ReproducedCell) -> str:
    """The label of a row, of the words that apply: ``substitute``, ``not run``, the fidelity if not exact, ``departs``.

    If none of them applies, it is ``reproduced``.
    """
    words = []
    if report.proxy:
        words.append(SUBSTITUTE)
    if line.why_not:
        return " ".join([*words, "not run"])
    if line.fidelity not in ("", "exact"):
        words.append(line.fidelity)
    if not report.proxy and (report.departures or line.departures):
        words.append("departs")
    return " ".join(words) or PLAIN


def sentences(report: Reproduction) -> list[str]:
    """Sentences below the table: departures, how differences are computed, and what the paper does not give."""
    made = []
    if report.proxy:
        made.append(
            "Substitute: the paper's protocol on other data or backbones. A difference from a published "
            "number would say nothing about the paper, so it is not shown. The order of rows can still "
            "be compared."
        )
        made += [ranking.sentence() for ranking in orders(report)]
    if report.departures:
        departures = "; ".join(report.departures)
        made.append(f"Deviations of every row: {departures}.")
    # A departure of only some rows is listed once, with these rows.
    for departure, where in of_rows(report).items():
        made.append(f"Deviation of {'; '.join(where)}: {departure}.")
    if report.proxy:
        for same in repeated(report):
            cells = [", ".join(at) for at in same]
            labels = "; ".join(cells)
            made.append(f"The same measurement: {labels}.")
    elif report.entry.printed_seeds:
        made.append(
            "Difference: got - printed. Standard errors: this difference divided by sqrt(s_printed^2 / "
            f"{report.entry.printed_seeds} + s_got^2 / seeds). If one std is missing, fedcache uses only "
            "the other one and marks the row."
        )
    else:
        made.append("Difference: got - printed.")
    if report.entry.kind == "runs":
        made.append("Got: mean (standard deviation) ± half of the 95 % interval, over seeds.")
    # Details that the paper does not give, and what fedcache uses instead.
    made += [f"Not given: {text}." for text in report.entry.not_given]
    made += [f"Note: {text}" for text in report.entry.notes]
    return made


def repeated(report: Reproduction) -> list[list[tuple[str, ...]]]:
    """Groups of rows, given by their labels, that are the same measurement in a proxy.

    The rows of a group differ only in something that the proxy replaces, such as the backbone.
    """
    groups = []
    for first in report.lines:
        if first.same_as:
            continue
        at = first.cell.at
        same = [line.cell.at for line in report.lines if line.same_as == at]
        if same:
            groups.append([at, *same])
    return groups


def of_rows(report: Reproduction) -> dict[str, list[str]]:
    """Departures that not every row has -> the rows that have them."""
    found: dict[str, list[str]] = {}
    for line in report.lines:
        if line.why_not:
            continue
        for departure in line.departures:
            found.setdefault(departure, []).append(", ".join(line.cell.at))
    return found


def markdown(report: Reproduction) -> str:
    """The report as a Markdown page."""
    header = columns(report)
    lines = [f"# {title(report)}", "", report.entry.paper, "", report.entry.setting, ""]
    lines += [markdown_row(header), markdown_row(["---"] * len(header))]
    lines += [markdown_row(row) for row in rows(report)]
    lines.append("")
    lines += [f"- {text}" for text in sentences(report)]
    lines.append("")
    return "\n".join(lines)


def markdown_row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    escaped = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
    row = " | ".join(escaped)
    return f"| {row} |"


def report_data(report: Reproduction) -> Facts:
    """The report as the field ``data`` of what ``reproduce --json`` prints."""
    ranked = {}
    if report.proxy:
        ranked = {"orders": [ranking.to_dict() for ranking in orders(report)]}
    differences = []
    for difference in report.entry.differences:
        got = report.difference(difference).__dict__
        differences.append({"proxy": report.proxy, **_difference_data(difference), "got": got})
    return {
        "name": report.entry.name,
        "title": title(report),
        "paper": report.entry.paper,
        "proxy": report.proxy,
        "on": report.on,
        "departures": report.departures,
        "printed_seeds": report.entry.printed_seeds,
        "not_given": list(report.entry.not_given),
        "notes": list(report.entry.notes),
        "cells": [_line_data(report, line) for line in report.lines],
        **ranked,
        "differences": differences,
    }


def _difference_data(difference: Difference) -> Facts:
    """A printed difference between two cells as plain values."""
    return {
        "of": list(difference.of),
        "minus": list(difference.minus),
        "metric": difference.metric,
        "printed": difference.printed.__dict__,
    }


def _line_data(report: Reproduction, line: ReproducedCell) -> Facts:
    values = {}
    # For a proxy, differences from printed numbers would be misleading, so they are left out.
    for i, metric in enumerate(line.cell.metrics):
        measured = line.measured.get(metric)
        values[metric] = {
            "unit": unit(metric),
            "printed": _plain(line.cell.printed[i]),
            "got": _plain(measured),
        }
        if not report.proxy:
            values[metric] |= report.compared(line, i).__dict__
    departures = []
    if not line.why_not:
        departures = [*report.departures, *line.departures]
    made = {
        "proxy": report.proxy,
        "row": label(report, line),
        "labels": dict(line.cell.labels),
        "run": not line.why_not,
        "why_not": line.why_not,
        "fidelity": line.fidelity,
        "departures": departures,
        "values": values,
        "protocol": cell_data(line.planned.cell),
        "runs": [str(path) for path in line.runs],
        "reused": line.reused,
    }
    if report.proxy:
        made["same_as"] = list(line.same_as)
    return made


def cell_data(cell: PaperCell) -> Facts:
    """All settings that determine a cell's runs."""
    found = {}
    for key, value in cell.__dict__.items():
        is_set = value not in ("", (), {}, None, 0)
        if is_set and key not in ("labels", "metrics", "printed"):
            found[key] = value
    return as_lists(found)


def _plain(value: Printed | Measurement | None) -> Facts | None:
    """A number with its spread as plain values; None for none."""
    if value is None:
        return None
    return value.__dict__


def entry_data(entry: PaperTable) -> Facts:
    """An entry as plain values: the protocol and every printed number."""
    cells = []
    for cell in entry.cells:
        printed = {m: _plain(p) for m, p in zip(cell.metrics, cell.printed, strict=True)}
        labels = dict(cell.labels)
        cells.append({"labels": labels, "printed": printed, "protocol": cell_data(cell)})
    return {
        "name": entry.name,
        "title": entry.title,
        "paper": entry.paper,
        "kind": entry.kind,
        "setting": entry.setting,
        "labels": list(entry.labels),
        "roles": list(entry.roles()),
        "printed_seeds": entry.printed_seeds,
        "not_given": list(entry.not_given),
        "notes": list(entry.notes),
        "cells": cells,
        # Papers print differences without a std, so the mean is enough.
        "differences": [
            {**_difference_data(d), "printed": d.printed.mean} for d in entry.differences
        ],
    }


LEADING = ("accuracy", "client_mean", "client_min")
"""Metrics that rank a row if its paper prints them. Otherwise, its first metric with a printed number ranks it."""

Pair = tuple[str, str]
"""Two rows of a group, each named by its last label. The row with the larger printed number comes first."""


@dataclass(frozen=True)
class RankedRow:
    """A row of a group that has both a printed and a measured number.

    Attributes:
        line: the row.
        metric: the metric that ranks it.
        printed: the number printed.
        got: the mean that was measured.
        measured: this mean with its spread.
        rank_printed: 1 for the largest printed number of the group; equal numbers share the smallest rank.
        rank_got: the same for the measured means.
    """

    line: ReproducedCell
    metric: str
    printed: float
    got: float
    measured: Measurement
    rank_printed: int
    rank_got: int

    @property
    def label(self) -> str:
        """The value of the last label."""
        return self.line.cell.at[-1]


@dataclass(frozen=True)
class RowRanking:
    """The printed and the measured order of one group of rows.

    Attributes:
        at: the labels that its rows share, in the order of the entry's labels.
        places: two rows or more, in the order of the registry.
        tau: Kendall's tau-b of printed and measured numbers; None where all numbers of one side are equal.
        agree: pairs measured in the printed order, at least one standard error of the difference apart.
        reverse: pairs measured in the opposite order, also at least one standard error apart.
        undecided: pairs measured less than one standard error apart, or equal.
        tied: pairs that are printed equal, so there is no order to compare.
    """

    at: tuple[str, ...]
    places: tuple[RankedRow, ...]
    tau: float | None
    agree: tuple[Pair, ...]
    reverse: tuple[Pair, ...]
    undecided: tuple[Pair, ...]
    tied: tuple[Pair, ...]

    def sentence(self) -> str:
        """Agreement and disagreement with the order of the paper, in words."""
        metrics = dict.fromkeys(show_metric(p.metric) for p in self.places)
        where = ", ".join((*self.at, " and ".join(metrics)))
        # Pairs that the paper prints as equal have no order to agree with.
        agree = len(self.agree)
        counted = agree + len(self.reverse) + len(self.undecided)
        parts = [f"{agree} of {counted} pairs as printed{_pairs(self.agree)}"]
        for pairs, word, what in (
            (self.reverse, "printed above", "in the opposite order"),
            (self.undecided, "against", "undecided, less than one standard error apart"),
            (self.tied, "against", "printed equal"),
        ):
            if pairs:
                parts.append(f"{len(pairs)} {what}{_pairs(pairs, word)}")
        alone = ""
        if all(p.measured.std is None for p in self.places):
            alone = " There is only one seed and no standard error, so every difference counts."
        tau = ""
        if self.tau is not None:
            tau = f" Kendall's tau-b is {self.tau:+.2f}."
        counts = "; ".join(parts)
        return f"Substitute, order of {where}: {counts}.{tau}{alone}"

    def to_dict(self) -> Facts:
        """Plain JSON values."""
        places = []
        for place in self.places:
            places.append(
                {
                    "row": place.label,
                    "metric": place.metric,
                    "rank_printed": place.rank_printed,
                    "rank_got": place.rank_got,
                    "printed": place.printed,
                    "got": place.got,
                }
            )
        return {
            "proxy": True,
            "at": list(self.at),
            "rows": places,
            "tau_b": self.tau,
            "as_printed": [list(pair) for pair in self.agree],
            "reversed": [list(pair) for pair in self.reverse],
            "undecided": [list(pair) for pair in self.undecided],
            "printed_equal": [list(pair) for pair in self.tied],
            "sentence": self.sentence(),
        }


def orders(report: Reproduction) -> list[RowRanking]:
    """The groups of a proxy with at least two rows to rank, in the registry's order.

    There are none without a proxy, and none for an entry that trains nothing.
    """
    if not report.proxy or report.entry.kind != "runs":
        return []
    groups: dict[tuple[str, ...], list[ReproducedCell]] = {}
    for line in report.lines:
        groups.setdefault(line.cell.at[:-1], []).append(line)
    made = [order(at, lines) for at, lines in groups.items()]
    return [one for one in made if one is not None]


def order(at: tuple[str, ...], lines: Sequence[ReproducedCell]) -> RowRanking | None:
    """The printed and the measured order of a group's rows; None if fewer than two rows have both numbers."""
    found = []
    for line in lines:
        ranked = ranked_by(line.cell)
        if ranked is None or line.why_not:
            continue
        metric, printed = ranked
        measured = line.measured[metric]
        if measured.mean is not None:
            found.append((line, metric, printed, measured.mean, measured))
    if len(found) < 2:
        return None
    # Only rows that have both numbers are ranked.
    all_printed = [printed for _, _, printed, _, _ in found]
    all_means = [mean for _, _, _, mean, _ in found]
    places = []
    for line, metric, printed, mean, measured in found:
        printed_rank = _rank(printed, all_printed)
        got_rank = _rank(mean, all_means)
        places.append(RankedRow(line, metric, printed, mean, measured, printed_rank, got_rank))
    by_verdict: dict[str, list[Pair]] = {"agree": [], "reverse": [], "undecided": [], "tied": []}
    # In each pair, the row with the higher printed number comes first.
    for above, below in itertools.combinations(places, 2):
        if above.printed < below.printed:
            above, below = below, above
        by_verdict[_verdict(above, below)].append((above.label, below.label))
    pairs = {verdict: tuple(found_pairs) for verdict, found_pairs in by_verdict.items()}
    return RowRanking(at, tuple(places), _tau(all_printed, all_means), **pairs)


def ranked_by(cell: PaperCell) -> tuple[str, float] | None:
    """The metric that ranks a row and its printed number; None where no number is printed."""
    printed = {}
    for metric, value in zip(cell.metrics, cell.printed, strict=True):
        if value is not None and value.mean is not None:
            printed[metric] = value.mean
    leading = [metric for metric in printed if metric in LEADING]
    candidates = leading or list(printed)
    if not candidates:
        return None
    first = candidates[0]
    return first, printed[first]


def _rank(value: float, values: Sequence[float]) -> int:
    return 1 + sum(v > value for v in values)


def _verdict(above: RankedRow, below: RankedRow) -> str:
    if above.printed == below.printed:
        return "tied"
    apart = above.got - below.got
    variances = []
    for measured in (above.measured, below.measured):
        if measured.std is not None:
            variances.append(measured.std**2 / measured.n)
    error = math.sqrt(sum(variances))
    if apart == 0.0 or abs(apart) < error:
        return "undecided"
    if apart > 0:
        return "agree"
    return "reverse"


def _tau(printed: Sequence[float], measured: Sequence[float]) -> float | None:
    from scipy.stats import kendalltau  # importing it takes a second, and only proxies need it

    if len(set(printed)) == 1 or len(set(measured)) == 1:
        return None
    return float(kendalltau(printed, measured, variant="b").statistic)


def _pairs(pairs: Sequence[Pair], word: str = "above") -> str:
    """`` (A above B, C; B above C)``, pairs with the same first row together."""
    if not pairs:
        return ""
    lower: dict[str, list[str]] = {}
    for pair in pairs:
        above, below = (f'"{label}"' if "," in label else label for label in pair)
        lower.setdefault(above, []).append(below)
    groups = [f"{above} {word} {', '.join(below)}" for above, below in lower.items()]
    return f" ({'; '.join(groups)})"
