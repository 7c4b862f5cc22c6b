"""What ``train`` and ``grid`` say at the end, for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedcache.commands.output import CommandResult, table
from fedcache.report.svg import percent

if TYPE_CHECKING:
    from fedcache.grids.points import Grid


def plan_answer(data: dict[str, Any]) -> CommandResult:
    """The answer of ``--dry-run``."""
    lines = []
    for p in data["programs"]:
        together = f", {p['points_at_once']} points at once" if p["points"] > 1 else ""
        points = f" {p['points']} points" if p["points"] > 1 else ""
        lines += [
            f"{p['method']}{points}: {p['lift']}, {p['clients_at_once']} clients at once{together}",
            f"  {p['words']}",
        ]
    return CommandResult(data, lines)


PROTOCOLS = {
    "global": "one model on the global test rows",
    "personalised": "each client's own model on its own test rows, mean over clients",
    "everywhere": "each client's own model on all test rows, over clients",
}

TAILS = {"worst10": ("worst 10 %", 10), "worst40": ("worst 40 %", 3), "best10": ("best 10 %", 10)}
"""Means over the tails of the clients: their names, and the clients of which the tail is at least one."""


def result_lines(result: dict[str, Any], measured: dict[str, Any], path: str) -> list[str]:
    """A result for a person."""
    from fedcache.runs.trust import describe_trust

    accuracy, fair, traffic, part = result["accuracy"], result["fairness"], result["traffic"], result["partition"]
    spread = f" +- {percent(accuracy['std'])} over {len(result['seeds'])} seeds" if accuracy["std"] is not None else ""
    what = PROTOCOLS[result["protocol"]]
    exact = traffic["exact"]["per_client_round"]
    paper = traffic["paper"]["per_client_round"]
    seconds = measured.get("seconds", {})
    timing = ", ".join(f"{k} {v:,.2f} s" for k, v in seconds.items())
    known = {k: v for k, v in result.get("diagnostics", {}).items() if v is not None}
    watched = ", ".join(f"{k} {v:.4g}" for k, v in known.items())
    name = f"{result['method']} ({result['preset']}, {result['fidelity']})"
    setting = (
        f"{part['scheme']}, {part['clients']} clients, {result['participation']} a round, {result['rounds']} rounds"
    )
    lines = [f"{name}: accuracy {percent(accuracy['mean'])} %{spread}", f"  {what}; {setting}, {result['lift']}"]
    if accuracy["mean"] is None:
        lines.append("  no accuracy: the scores of a model are not numbers, or nobody could be scored")
    owned, size = result["classes_owned"]["per_client"], result["parameters"]
    span = "" if min(owned) == max(owned) else f"{min(owned):g} to "
    fixed = "" if size["fixed"] is None else f" ({size['fixed']:,} fixed)"
    lines.append(
        f"  macro-F1 {percent(result['macro_f1']['mean'])} %; {span}{max(owned):g} of {result['classes']} "
        f"classes per client; {size['trainable']:,} parameters trained{fixed}"
    )
    if len(accuracy["per_domain"]) > 1:
        lines.append(
            "  per domain   " + "  ".join(f"{name} {percent(value)}" for name, value in accuracy["per_domain"].items())
        )
    if fair.get("std_pp") is not None:
        parts = [f"mean {percent(fair['mean'])}", f"std {fair['std_pp']:.2f} points"]
        parts += [f"{name} {percent(fair[key])}" for key, (name, _) in TAILS.items() if fair[key] is not None]
        few = [f"{name} at least {least}" for key, (name, least) in TAILS.items() if fair[key] is None]
        lines.append(f"  over clients {', '.join(parts)}")
        if few:
            lines.append(f"  left out for want of scored clients: {', '.join(few)}")
    lines += [
        f"  sends {exact['up']:,.0f} scalars per client and round (paper counts {paper['up']:,.0f}), "
        f"receives {exact['down']:,.0f}",
        *(f"  {line}" for line in describe_trust(result.get("trust", {}))),
        *([f"  at the end {watched}"] if watched else []),
        *([f"  {timing}"] if timing else []),
        f"  {path}",
    ]
    return lines


def grid_answer(done: Grid, sweeps: Sequence[str]) -> CommandResult:
    """A grid for a person: every point, the best one, and what was lost."""
    best = done.best()
    tails = [p.run.fairness.get("worst10") is not None for p in done.points]
    worst = ("worst 10 %",) if any(tails) else ()
    columns = ("method", *sweeps, "accuracy %", "std", *worst, "sends per round", "seconds")
    rows = [
        (
            p.method,
            *(p.sweep[k] for k in sweeps),
            percent(p.run.accuracy["mean"]),
            percent(p.run.accuracy["std"]),
            *(percent(p.run.fairness.get("worst10")) for _ in worst),
            f"{p.run.traffic['exact']['per_client_round']['up']:,.0f}",
            f"{p.run.measured['seconds']['train']:.2f}" if p.run.measured else "-",
        )
        for p in sorted(done.points, key=lambda p: -(p.run.accuracy["mean"] or 0))
    ]
    blank = ("",) * (len(columns) - len(sweeps) - 2)
    lost_rows = [(f.method, *(f.sweep[k] for k in sweeps), "failed", *blank) for f in done.failed]
    shown = table("", columns, [*rows, *lost_rows], right=columns[1:])
    values = " ".join(f"{k}={v}" for k, v in best.sweep.items())
    last = f"Best: {best.method} {values}  {percent(best.run.accuracy['mean'])} %"
    lines = [f"{len(done.points)} points, {done.reused} of them were there already.", last]
    if not all(tails):
        lines.append("worst 10 % needs at least 10 scored clients" + ("; - has fewer." if worst else "."))
    for word, lost in (("Damaged, left out", done.damaged), ("Failed", done.failed)):
        for one in lost:
            point = " ".join([one.method, *(f"{k}={v}" for k, v in one.sweep.items())])
            lines += [f"{word}: {point}. {one.message}", f"  {one.hint}"]
    return CommandResult(done.to_dict(), lines, done.code, [shown])
