"""``fedcache methods``: list all methods, and describe one with its hyperparameters, deviations and traffic."""

from __future__ import annotations

from dataclasses import asdict

import typer

from fedcache.commands.options import ListedName, command
from fedcache.commands.output import CommandResult, TextTable
from fedcache.config import PRESETS, Home
from fedcache.federate.methods import METHODS, NAMES, unknown_method
from fedcache.parsing import without_codes
from fedcache.plugins import find, plugins
from fedcache.report.methods import current_sizes, method_entries, stored_counts

methods = typer.Typer(
    name="methods", help="Federated methods and their hyperparameters.", no_args_is_help=True
)


@command("methods list", within=methods)
def methods_list() -> CommandResult:
    """List every method in one line, with the upload per round of a client that has rows of every class.

    The sizes are counted for the store that was used last, else for 512 features and 10 classes. For methods that
    train on images, they are counted for 32 px with the image and text encoders of glyph-clip.

    Example: fedcache methods list
    """
    sizes = current_sizes(Home.from_environment())
    counted = stored_counts(sizes)
    if counted is None:
        from fedcache.report.methods.facts import every_method

        counted = every_method(sizes)
    entries = method_entries(counted, sizes)
    rows = []
    for e in entries:
        needs = ", ".join(e["needs"]) or "features"
        scalars = f"{e['sends']['scalars']:,}"
        size = f"{e['sends']['bytes']:,}"
        rows.append((e["name"], e["summary"], needs, scalars, size, e["fidelity"], e["paper"]))
    data = list(entries)
    lines = [f"Scalars and bytes that one client sends per round, with {sizes.source}."]
    # The catalogue does not count the traffic of methods of other packages.
    for plugin in plugins("methods").values():
        data.append({"name": plugin.name, "origin": plugin.origin})
        rows.append((plugin.name, f"plug-in: {plugin.origin}", "", "", "", "", ""))
        lines.append(f"Plug-in: {plugin.name} ({plugin.origin})")
    names = ("method", "description", "clients read", "sends", "bytes", "fidelity", "paper")
    shown = TextTable("", names, rows, right=("sends", "bytes"))
    return CommandResult({"methods": data}, lines, renderables=[shown], listing=True)


@command("methods info", within=methods)
def methods_info(name: ListedName) -> CommandResult:
    """Show one method: its objective, its hyperparameters in every preset, its deviations and the setting of its paper.

    Example: fedcache methods info fedpcl
    """
    if name not in METHODS:
        raise unknown_method(name)
    from fedcache.report.methods import facts

    m = METHODS[name]
    entries = []
    for h in m.hparams:
        values = {preset: h.show_preset(preset) for preset in PRESETS}
        entries.append({"name": h.name, **values, "legal": h.legal(), "help": h.help})
    # A plug-in may be a copy of a method of fedcache and still have the page of that method.
    when = ""
    family = ""
    if name in NAMES and m.page is not None:
        when = " ".join(m.page.when.split())
        family = m.page.family
    why_synchronous = facts.why_it_waits(m)
    d = m.defaults
    sizes = current_sizes(Home.from_environment())
    sends = facts.traffic_of(m, sizes)
    disagreements = facts.disagreements(m)
    leaving = facts.leaving(m, sizes)
    plugin = find("methods", name)
    origin = "fedcache"
    if plugin is not None:
        origin = plugin.origin
    data = {
        "name": m.name,
        "origin": origin,
        "paper": m.paper,
        "summary": m.summary,
        "when": when,
        "family": family,
        "uneven_rows": m.uneven_rows,
        "objective": facts.objective(m.name),
        "needs": sorted(m.needs),
        "fidelity": facts.fidelities(m),
        "executions": list(m.executions),
        "asynchronous": why_synchronous is None,
        "hyperparameters": entries,
        "disagreements": disagreements,
        "traffic": {**sends, "counted_at": sizes.source},
        "leaves": [asdict(p) for p in leaving],
        "defaults": {
            "rounds": d.rounds,
            "participation": d.participation,
            "clients": d.clients,
            "scheme": d.scheme,
        },
    }
    lines = [f"{m.name}: {m.summary}", m.paper]
    if plugin is not None:
        lines.append(f"Plug-in: {origin}.")
    share: str | float = "all"
    if d.participation is not None:
        share = d.participation
    reads = ", ".join(sorted(m.needs)) or "features only"
    setting = f"{d.scheme}, {d.clients} clients, {share} per round"
    lines.append(f"Paper's setting: {setting}, {d.rounds} rounds.")
    lines.append(f"Reads {reads}; fidelity {facts.fidelities(m)}.")
    if why_synchronous is None:
        lines.append("Supports --asynchronous.")
    else:
        lines.append(f"Does not support --asynchronous: {why_synchronous}.")
    received = f"{sends['down']:,} in a round"
    if sends["first_down"] != sends["down"]:
        received += f" ({sends['first_down']:,} in round 1)"
    counted_at = sizes.source
    if sends["clients"]:
        counted_at += f", {sends['clients']} clients"
    paper = f"the paper counts {sends['paper_up']:,}"
    sent = f"{sends['up']:,} scalars ({sends['up_bytes']:,} bytes; {paper})"
    lines += [f"A client sends {sent} and receives {received}, at {counted_at}.", ""]
    if when:
        lines += [f"When to use it: {when}", ""]
    lines.append(without_codes(facts.objective(m.name)))
    # Defaults that differ from the paper, and tuned values, have their own columns.
    presets = ["paper", "official"]
    if m.usual:
        presets.insert(0, "default")
    if m.tuned:
        presets.append("tuned")
    rows = []
    for e in entries:
        values_shown = [e[preset] for preset in presets]
        rows.append((e["name"], *values_shown, e["legal"], without_codes(e["help"])))
    columns = ("key", *presets, "legal", "meaning")
    shown = []
    if rows:
        shown.append(TextTable("--set key=value", columns, rows))
    if disagreements:
        title = "where the paper and the released code differ"
        decided = [(s["switch"], s["paper"], s["official"]) for s in disagreements]
        shown.append(TextTable(title, ("switch", "paper", "official"), decided))
    if leaving:
        columns = ("tensors", "dtype", "meaning", "what the server can learn", "with --dp-noise")
        title = f"what leaves a client in a round, with {sizes.source}"
        shown.append(TextTable(title, columns, facts.cells(leaving)))
    return CommandResult(data, lines, renderables=shown)
