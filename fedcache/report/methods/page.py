"""The documentation page of a method, made from the code."""

from __future__ import annotations

from fedcache.federate.engine.method import Method
from fedcache.federate.methods import METHODS
from fedcache.report.methods.facts import disagreements, fidelities, objective
from fedcache.report.methods.uploads import leaves


def page(name: str) -> str:
    """The documentation page of a method, in Markdown; the same text for the same code."""
    m = METHODS[name]
    d = m.defaults
    share = "all" if d.participation is None else d.participation
    lines = [
        f"# {name}",
        "",
        m.summary,
        "",
        f"{m.paper}. Reads {', '.join(sorted(m.needs)) or 'features alone'}. Fidelity: {fidelities(m)}. Lifts: "
        f"{', '.join(m.executions)}.",
        "",
        f"Setting of the paper: `{d.scheme}`, {d.clients} clients, {share} a round, {d.rounds} "
        f"round{'s' if d.rounds > 1 else ''}.",
        "",
        f"    fedcache train --method {name}",
        "",
        "```text",
        objective(name),
        "```",
        "",
        "## What leaves a client",
        "",
        *leaves(m),
        "",
        *sides(m),
        "## Switches",
        "",
        "`--set key=value`; *official* is `--preset official`. [`fedcache grid`](../commands/grid.md) sweeps them.",
        "",
        "| key | paper | official | legal | meaning |",
        "|---|---|---|---|---|",
    ]
    for h in m.hparams:
        official = h.show(h.official) if h.official is not None else ""
        lines.append(row(f"`{h.name}`", h.show(), official, h.legal(), h.help))
    return "\n".join(lines) + "\n"


def row(*cells: str) -> str:
    """A row of a Markdown table.

    >>> row("`lr`", "a | b")
    '| `lr` | a \\\\| b |'
    """
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def sides(method: Method) -> list[str]:
    """Where the paper and its released code differ, and the switch that chooses; nothing where they do not."""
    found = disagreements(method)
    if not found:
        return []
    rows = [row(side["d"], f"`{side['switch']}`", side["paper"], side["official"]) for side in found]
    return [
        "## Where paper and code differ",
        "",
        "The text above and the switches below say what each number is about. `--preset official` takes the last "
        "column; where it equals the one before, only the switch takes the other side.",
        "",
        "| disagreement | switch | paper | released code |",
        "|---|---|---|---|",
        *rows,
        "",
    ]
