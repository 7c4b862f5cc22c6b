"""The documentation page of a method, made from the code."""

from __future__ import annotations

from fedcache.api.describe import fidelities, objective
from fedcache.api.leaving import leaves
from fedcache.federate.methods import METHODS


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
        f"{', '.join(m.lifts)}.",
        "",
        f"Setting of the paper: `{d.scheme}`, {d.clients} clients, {share} a round, {d.rounds} rounds.",
        "",
        "```text",
        objective(name),
        "```",
        "",
        "## What leaves a client",
        "",
        *leaves(m),
        "",
        "## Switches",
        "",
        "`--set key=value`; *official* is `--preset official`.",
        "",
        "| key | paper | official | legal | meaning |",
        "|---|---|---|---|---|",
    ]
    for h in m.hparams:
        official = h.show(h.official) if h.official is not None else ""
        cells = (f"`{h.name}`", h.show(), official, h.legal(), h.help)
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines) + "\n"
