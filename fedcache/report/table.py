"""The table of a setting's runs: what is asked first stands first, and the rest is there to be chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcache.federate.trust.accounting import short_privacy
from fedcache.report.drawing import percent, size
from fedcache.report.find_runs import StoredRun, facts
from fedcache.report.render import Column, HtmlCell
from fedcache.report.verdict import seconds_of, sent_bytes, uncertainty
from fedcache.runs.score import has_validation, score_of, validation_value

MOST_SHOWN = 6
"""Settings that differ and stand in the table from the start."""

NOTHING = HtmlCell("", "")


def table_of(
    entries: Sequence[StoredRun], names: Sequence[str], score: str, chosen: str
) -> tuple[list[Column], list[list[HtmlCell]]]:
    """Columns and rows.

    Args:
        entries: runs of one setting, in the order of the rows.
        names: of the facts that tell them apart.
        score: what their accuracy is.
        chosen: digest of the run that stands first of those that can be taken.
    """
    held = has_validation(e.result for e in entries)
    made: list[tuple[Column, list[HtmlCell]]] = []

    def put(name: str, cells: list[HtmlCell], *, numbers: bool = True, shown: bool = True) -> None:
        made.append((Column(name, numbers, shown), cells))

    # of a setting all are, or none
    said_by = ""
    if entries[0].claimed:
        said_by = " (claimed)"
    put("method", [HtmlCell(e.method, e.method) for e in entries], numbers=False)
    put(f"accuracy %{said_by}", [_number(score_of(e.result, score).mean) for e in entries])
    if any("validation" in e.result for e in entries):
        put("validation %", [_number(validation_value(e.result, score)) for e in entries])
    told = [facts(e) for e in entries]
    differ = [n for n in names if n != "method"]
    for place, name in enumerate(differ):
        cells = [HtmlCell(f.get(name, "-"), f.get(name, "")) for f in told]
        put(name.removeprefix("set."), cells, numbers=False, shown=place < MOST_SHOWN)
    put("95 % interval", [_interval(e, score) for e in entries])
    put("a client sends", [_sent(e) for e in entries])
    put("seconds a seed", [_seconds(seconds_of(e)) for e in entries])
    if any(e.result["fairness"].get("worst10") is not None for e in entries):
        put(
            f"worst 10 %{said_by}",
            [_number(e.result["fairness"].get("worst10")) for e in entries],
            shown=len({e.method for e in entries}) > 1 and len(differ) < 3,
        )
    if any("privacy" in e.result.get("trust", {}) for e in entries):
        put(
            "privacy",
            [_privacy(e.result.get("trust", {}).get("privacy")) for e in entries],
            numbers=False,
        )
    _rest(put, entries, score, said_by)
    columns = [c for c, _ in made]
    rows = [list(row) for row in zip(*(cells for _, cells in made), strict=True)]
    for place, column in enumerate(columns):
        if column.name.removesuffix(said_by) in MARKED:
            _mark(rows, place, [e.digest == chosen for e in entries] if held else None)
    return columns, rows


MARKED = (
    "accuracy %",
    "validation %",
    "worst 10 %",
    "headline %",
    "client mean %",
    "pooled %",
    "macro F1 %",
)


def _rest(put: Any, entries: Sequence[StoredRun], score: str, said_by: str) -> None:
    """Columns that are hidden at first."""
    results = [e.result for e in entries]
    if any("zero_shot" in r["accuracy"] for r in results):
        put("zero-shot %", [_number(r["accuracy"].get("zero_shot")) for r in results], shown=False)
    stds = [score_of(r, score).std or None for r in results]
    if any(stds):
        put("± seeds", [_number(s) for s in stds], shown=False)
    put(
        "seeds",
        [HtmlCell(str(len(r["seeds"])), str(len(r["seeds"]))) for r in results],
        shown=False,
    )
    others = {"headline": "own", "client mean": "client-mean", "pooled": "pooled"}
    for name, other in others.items():
        if other != score:
            put(
                f"{name} %{said_by}",
                [_number(score_of(r, other).mean) for r in results],
                shown=False,
            )
    put(f"macro F1 %{said_by}", [_number(r["macro_f1"]["mean"]) for r in results], shown=False)
    sent = [r["traffic"]["exact"]["per_client_round"]["up"] for r in results]
    put("scalars a round", [HtmlCell(size(s), str(s)) for s in sent], shown=False)
    exact = [r["traffic"]["exact"] for r in results]
    megabytes = [(x["up_bytes"] + x["down_bytes"]) / 1e6 for x in exact]
    put("MB in all", [HtmlCell(f"{m:,.2f}", str(m)) for m in megabytes], shown=False)
    put(
        "fidelity",
        [HtmlCell(str(r["fidelity"]), str(r["fidelity"])) for r in results],
        numbers=False,
        shown=False,
    )
    put("run", [HtmlCell(e.digest[:8], e.digest) for e in entries], numbers=False, shown=False)


def _interval(entry: StoredRun, score: str) -> HtmlCell:
    """The interval and what was sampled for it; sorted by its lower end."""
    found = uncertainty(entry, score)
    if found is None:
        return NOTHING
    if found.over.endswith("rows"):
        over = found.over.removesuffix(" test rows") + " rows"
    else:
        over = found.over
    return HtmlCell(f"{100 * found.low:.2f}–{100 * found.high:.2f}", repr(found.low), note=over)


def _sent(entry: StoredRun) -> HtmlCell:
    if entry.pooled_rows:
        return HtmlCell("all rows", "", note="no federation")
    sent = sent_bytes(entry)
    return HtmlCell(f"{size(sent)}B" if sent >= 1000 else f"{sent:.0f} B", repr(sent))


def _seconds(value: float | None) -> HtmlCell:
    if value is None:
        return HtmlCell("-", "")
    return HtmlCell(f"{value:,.2f}" if value >= 1 else f"{value:.2g}", repr(value))


def _privacy(cost: Mapping[str, Any] | None) -> HtmlCell:
    said = "-"
    if cost is not None:
        said = short_privacy(cost)
    return HtmlCell(said, said)


def _number(value: float | None) -> HtmlCell:
    return HtmlCell(percent(value), "" if value is None else repr(value))


def _mark(rows: list[list[HtmlCell]], place: int, chosen: Sequence[bool] | None) -> None:
    """Make bold what validation chose; the highest of the column where there are no rows to choose by."""
    known = [float(row[place].sort) for row in rows if row[place].sort]
    for number, row in enumerate(rows):
        cell = row[place]
        best = bool(cell.sort) and (
            float(cell.sort) == max(known) if chosen is None else chosen[number]
        )
        if len(rows) > 1 and best:
            row[place] = HtmlCell(cell.text, cell.sort, best=True, note=cell.note)
