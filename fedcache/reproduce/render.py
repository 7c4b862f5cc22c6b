"""A report for a person, as Markdown, and as plain JSON values. A proxy is called so in the title and in every row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedcache.reproduce.metrics import (
    compare,
    name,
    show_compared,
    show_measured,
    show_printed,
    unit,
)
from fedcache.reproduce.ranking import orders
from fedcache.reproduce.registry import PaperCell, PaperTable
from fedcache.reproduce.runner import ReproducedCell, Reproduction

PROXY = "PROXY"
PLAIN = "reproduced"


def title(report: Reproduction) -> str:
    """One line that says what this is."""
    if report.proxy:
        where = ""
        if report.on:
            where = f" on {report.on}"
        return f"{PROXY} of {report.entry.name}{where}: {report.entry.title}"
    departs = ""
    if report.departures or any(line.departures for line in report.lines):
        departs = ", with departures"
    return f"{report.entry.name}: {report.entry.title}{departs}"


def columns(report: Reproduction) -> tuple[str, ...]:
    """The columns of ``rows``. On other data a difference from a printed number says nothing, a rank may."""
    last: tuple[str, ...] = ("difference", "standard errors")
    if report.proxy:
        if orders(report):
            last = ("rank printed", "rank got")
        else:
            last = ()
    return ("row", *report.entry.labels, "metric", "printed", "got", *last)


def rows(report: Reproduction) -> list[tuple[str, ...]]:
    """One row per cell and metric; what was not run has no number."""
    made = []
    ranks = {
        (p.line.cell.at, p.metric): (p, len(o.places)) for o in orders(report) for p in o.places
    }
    width = len(columns(report))
    for line in report.lines:
        first = label(report, line)
        if line.why_not:
            made.append((first, *line.cell.at, "", "", f"not run: {line.why_not}", "", "")[:width])
            continue
        for i, metric in enumerate(line.cell.metrics):
            measured = line.measured[metric]
            printed = line.cell.printed[i]
            if report.proxy:
                place, of = ranks.get((line.cell.at, metric), (None, 0))
                if place:
                    last = (f"{place.rank_printed} of {of}", f"{place.rank_got} of {of}")
                else:
                    last = ("", "")
            else:
                last = show_compared(report.compared(line, i), metric)
            values = (show_printed(printed, metric), show_measured(measured, metric), *last)
            made.append((first, *line.cell.at, name(metric), *values)[:width])
    blank = ("",) * (len(report.entry.labels) - 1)
    for wanted in report.entry.differences:
        measured = report.difference(wanted)
        if measured.mean is None:
            continue
        what = f"{', '.join(wanted.of)} minus {', '.join(wanted.minus)}"
        if report.proxy:
            last = ("", "")
        else:
            last = show_compared(compare(wanted.printed, 0, measured), wanted.metric)
        first = PLAIN
        if report.proxy:
            first = PROXY
        numbers = (
            show_printed(wanted.printed, wanted.metric),
            show_measured(measured, wanted.metric),
        )
        made.append((first, what, *blank, name(wanted.metric), *numbers, *last)[:width])
    return made


def label(report: Reproduction, line: ReproducedCell) -> str:
    """What a row is: PROXY, reproduced, with departures or as an approximation, or not run."""
    if report.proxy:
        words = [PROXY]
    else:
        words = []
    if line.why_not:
        return " ".join([*words, "not run"])
    if line.fidelity not in ("", "exact"):
        words.append(line.fidelity)
    if not report.proxy and (report.departures or line.departures):
        words.append("departs")
    return " ".join(words) or PLAIN


def sentences(report: Reproduction) -> list[str]:
    """What must be read with the numbers: departures, how differences are counted, what the paper leaves open."""
    said = []
    if report.proxy:
        said.append(
            f"{PROXY}: the paper's protocol on other data or backbones. A difference from a printed number would say "
            "nothing about the paper, so none is shown; the order of rows may."
        )
        said += [one.sentence() for one in orders(report)]
    if report.departures:
        said.append("Departures of every row: " + "; ".join(report.departures) + ".")
    for departure, where in of_rows(report).items():
        said.append(f"Departure of {'; '.join(where)}: {departure}.")
    if report.proxy:
        said += [
            f"The same measurement: {'; '.join(', '.join(at) for at in rows)}."
            for rows in repeated(report)
        ]
    else:
        said.append(
            f"Difference is got minus printed, in standard errors sqrt(s_printed^2 / {report.entry.printed_seeds} + "
            "s_got^2 / seeds); where one std is missing it is the other's alone, and the row says so."
            if report.entry.printed_seeds
            else "Difference is got minus printed."
        )
    said += [f"Not given: {text}." for text in report.entry.not_given]
    said += [f"Note: {text}" for text in report.entry.notes]
    return said


def repeated(report: Reproduction) -> list[list[tuple[str, ...]]]:
    """Labels of the rows that a proxy cannot tell apart, together: what made them differ was replaced."""
    first = [line.cell.at for line in report.lines if not line.same_as]
    groups = [[at, *(ln.cell.at for ln in report.lines if ln.same_as == at)] for at in first]
    return [group for group in groups if len(group) > 1]


def of_rows(report: Reproduction) -> dict[str, list[str]]:
    """Departures that not every row has -> the rows that have them."""
    found: dict[str, list[str]] = {}
    for line in report.lines:
        for departure in line.departures if not line.why_not else ():
            found.setdefault(departure, []).append(", ".join(line.cell.at))
    return found


def markdown(report: Reproduction) -> str:
    """The report as a Markdown page."""
    lines = [f"# {title(report)}", "", report.entry.paper, "", report.entry.setting, ""]
    lines += [markdown_row(columns(report)), markdown_row(["---"] * len(columns(report)))]
    lines += [markdown_row(row) for row in rows(report)]
    return "\n".join([*lines, "", *(f"- {text}" for text in sentences(report)), ""])


def markdown_row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"


def report_data(report: Reproduction) -> dict[str, Any]:
    """The ``data`` of the envelope."""
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
        **({"orders": [one.to_dict() for one in orders(report)]} if report.proxy else {}),
        "differences": [
            {
                "proxy": report.proxy,
                "of": list(d.of),
                "minus": list(d.minus),
                "metric": d.metric,
                "printed": d.printed.__dict__,
                "got": report.difference(d).__dict__,
            }
            for d in report.entry.differences
        ],
    }


def _line_data(report: Reproduction, line: ReproducedCell) -> dict[str, Any]:
    values = {}
    for i, metric in enumerate(line.cell.metrics):
        printed = line.cell.printed[i]
        values[metric] = {
            "unit": unit(metric),
            "printed": printed.__dict__ if printed is not None else None,
            "got": line.measured[metric].__dict__ if metric in line.measured else None,
            **({} if report.proxy else report.compared(line, i).__dict__),
        }
    return {
        "proxy": report.proxy,
        "row": label(report, line),
        "labels": dict(line.cell.labels),
        "run": not line.why_not,
        "why_not": line.why_not,
        "fidelity": line.fidelity,
        "departures": [*report.departures, *line.departures] if not line.why_not else [],
        "values": values,
        "protocol": cell_data(line.planned.cell),
        "runs": [str(path) for path in line.runs],
        "reused": line.reused,
        **({"same_as": list(line.same_as)} if report.proxy else {}),
    }


def cell_data(cell: PaperCell) -> dict[str, Any]:
    """Everything that determines a cell's runs."""
    found = {k: v for k, v in cell.__dict__.items() if k not in ("labels", "metrics", "printed")}
    return {
        k: list(v) if isinstance(v, tuple) else v
        for k, v in found.items()
        if v not in ("", (), {}, None, 0)
    }


def entry_data(entry: PaperTable) -> dict[str, Any]:
    """An entry as plain values: the protocol and every printed number."""
    return {
        **{key: getattr(entry, key) for key in ("name", "title", "paper", "kind", "setting")},
        "labels": list(entry.labels),
        "roles": list(entry.roles()),
        "printed_seeds": entry.printed_seeds,
        "not_given": list(entry.not_given),
        "notes": list(entry.notes),
        "cells": [
            {
                "labels": dict(cell.labels),
                "printed": {
                    m: p.__dict__ if p is not None else None
                    for m, p in zip(cell.metrics, cell.printed, strict=True)
                },
                "protocol": cell_data(cell),
            }
            for cell in entry.cells
        ],
        "differences": [
            {
                "of": list(d.of),
                "minus": list(d.minus),
                "metric": d.metric,
                "printed": d.printed.mean,
            }
            for d in entry.differences
        ],
    }
