"""``fedcache train`` and ``grid``, and what they say at the end, for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcache.commands.options import (
    ConfigFile,
    EngineName,
    Given,
    RayAddress,
    RunOptions,
    SchemeArguments,
    check_methods,
    command,
    pairs,
    partition_config,
    pick,
    split_list,
    train_config,
)
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.config import Home, PartitionConfig, SaveModels, TrainConfig, read_file
from fedcache.errors import UsageError
from fedcache.federate.engines.choose import engine_of
from fedcache.federate.methods import METHODS
from fedcache.grids import presets
from fedcache.option_info import COMPUTING, RESULTS
from fedcache.process import Stop, keep_freed_memory, stop_on_signals
from fedcache.report.drawing import percent
from fedcache.runs.directory import bytes_of_models, check_config, command_saving, has_client_models
from fedcache.runs.events import tracking
from fedcache.runs.run import is_claimed
from fedcache.runs.trust_words import describe_trust, is_private

if TYPE_CHECKING:
    from fedcache.grids.points import Grid


@command("train", pick(TrainConfig), pick(PartitionConfig), pick(SchemeArguments), pick(RunOptions))
def train(observer: TerminalObserver, given: Given, config: ConfigFile = None) -> CommandResult:
    """Train a federated method on cached features.

    What is left out takes the setting of the method's paper; each choice is printed. The same run again returns the
    stored result, a killed one goes on.

    Example: fedcache train --method fed3r --scheme dirichlet --clients 100 --alpha 0.1
    """
    check_config(config)
    file = read_file(config, observer.note)
    resolved, partition = train_config(file, given), partition_config(file, given)
    if resolved.method is None:
        raise UsageError("No method was named.", f"--method {' | '.join(METHODS)}")
    check_methods([resolved.method])
    home = Home.from_environment()
    if given["dry_run"]:
        from fedcache.grids import train_grid as grids

        request = grids.request_grid([resolved.method], {}, resolved, home, partition=partition)
        return plan_answer(grids.grid_plan(request, observer))
    from fedcache.runs.loop import train as run

    stop, runs = Stop(), given["runs"] and Path(given["runs"])
    keep_freed_memory()
    with stop_on_signals(stop.ask, observer.note), tracking(given["track"], home, runs, observer) as hooks:
        done = run(
            resolved,
            home,
            partition=partition,
            runs=runs,
            repartition=given["repartition"],
            extract=not given["no_extract"],
            fresh=given["fresh"],
            observer=observer,
            hooks=hooks,
            stop=stop,
            save=SaveModels("none" if given["no_model"] else "all", given["save_clients"]),
        )
    lines = result_lines(done.result, done.measured, str(done.path))
    data = {**done.to_dict(), "model_bytes": bytes_of_models(done.path)}
    # The directory stays the last line.
    return CommandResult(data, [*lines[:-1], *model_lines(done.path, done.result), lines[-1]])


POINTS = "Points"

Methods = Annotated[
    list[str] | None,
    typer.Option("--method", help="Methods, comma-separated.", rich_help_panel=POINTS, show_default="those of --ready"),
]
Ready = Annotated[
    str | None,
    typer.Option(
        "--ready",
        help="A grid of the papers' ablations by name; list shows them.",
        rich_help_panel=POINTS,
        show_default="none",
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        help="key=v1,v2: a hyperparameter, or rounds, participation, clients, alpha, shards, shots, aggregate, "
        "attack. Repeatable.",
        rich_help_panel=POINTS,
        show_default="those of --ready",
    ),
]
Sampler = Annotated[
    str,
    typer.Option(
        "--sampler", help="grid, or random:N[:SEED] for N points drawn without repeats.", rich_help_panel=POINTS
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact", help="Compute every point alone, with the bits of its single run.", rich_help_panel=COMPUTING
    ),
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        min=1,
        help="Processes that train points alone; for what cannot be computed together.",
        rich_help_panel=COMPUTING,
    ),
]
WhichModels = Annotated[
    str,
    typer.Option(
        "--save-models",
        help="Of which points the trained models stay: the best of each method, all, or none.",
        metavar="best|all|none",
        rich_help_panel=RESULTS,
    ),
]


@command(
    "grid",
    [item for item in pick(TrainConfig) if item.name != "method"],
    pick(PartitionConfig),
    pick(SchemeArguments),
    pick(RunOptions),
)
def grid(
    observer: TerminalObserver,
    given: Given,
    method: Methods = None,
    ready: Ready = None,
    sweep: Sweep = None,
    sampler: Sampler = "grid",
    exact: Exact = False,
    jobs: Jobs = 1,
    save_models: WhichModels = "best",
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    config: ConfigFile = None,
) -> CommandResult:
    """Train every combination of methods, sweeps and seeds; finished points are not run again.

    Points that differ in numbers alone are computed together where that is faster, and equal their single runs up to
    rounding; --exact computes them one by one.

    Example: fedcache grid --method fedavg,fedprox --sweep lr=0.1,0.01 --seeds 0-2 --scheme dirichlet --alpha 0.1
    """
    if ready == "list":
        return list_ready_grids()
    check_config(config)
    file, preset = read_file(config, observer.note), presets.find_preset(ready) if ready is not None else None
    if preset is not None:
        note_preset(preset, file, given["scheme"], observer)
        file = preset.merged_with(file, given["scheme"])
    resolved, partition = train_config(file, given), partition_config(file, given)
    sweeps = swept_values(sweep, given, preset)
    methods = split_list(method, "--method") or (preset.methods if preset is not None else ())
    methods = methods or ((resolved.method,) if resolved.method else ())
    if not methods:
        raise UsageError("No method was named.", "For example fedcache grid --method fedavg --sweep lr=0.1,0.01")
    check_methods(methods)
    from fedcache.grids import train_grid as grids

    home = Home.from_environment()
    runs = given["runs"] and Path(given["runs"])
    request = grids.request_grid(
        methods,
        sweeps,
        resolved,
        home,
        partition=partition,
        runs=runs,
        repartition=given["repartition"],
        extract=not given["no_extract"],
        fresh=given["fresh"],
        sampler=sampler,
        exact=exact,
        save=SaveModels("none" if given["no_model"] else save_models, given["save_clients"]),
    )
    if given["dry_run"]:
        return plan_answer(grids.grid_plan(request, observer))
    cluster, stop = engine_of(engine, ray_address), Stop()
    keep_freed_memory()
    with stop_on_signals(stop.ask, observer.note), tracking(given["track"], home, runs, observer) as hooks:
        done = grids.grid(request, jobs=jobs, engine=cluster, observer=observer, hooks=hooks, stop=stop)
    return grid_answer(done, list(sweeps))


def list_ready_grids() -> CommandResult:
    """Every ready grid."""
    grids = [presets.find_preset(name) for name in presets.preset_names()]
    rows = [
        (g.name, g.title, g.paper, " ".join([",".join(g.methods), *(f"{k}={','.join(v)}" for k, v in g.sweep.items())]),
         str(g.points))
        for g in grids
    ]  # fmt: skip
    shown = TextTable("", ("name", "what it varies", "paper", "methods and sweeps", "points"), rows, right=("points",))
    last = "Run one:  fedcache grid --ready local-losses   (methods, sweeps and all other options take its place)"
    return CommandResult({"grids": [g.to_dict() for g in grids]}, [last], renderables=[shown])


def note_preset(
    preset: presets.GridPreset, file: Mapping[str, Mapping[str, Any]], scheme: str | None, observer: TerminalObserver
) -> None:
    """Say what is to know of a ready grid, and which arguments of its scheme another scheme leaves out."""
    left_out = preset.unused_arguments(scheme or file.get("partition", {}).get("scheme"))
    if left_out:
        own = preset.partition["scheme"]
        observer.note(f"Left out, as the grid's own scheme {own} is not used: {', '.join(left_out)}.")
    for note in preset.notes:
        observer.note(note)


def swept_values(
    sweep: Sequence[str] | None, given: Given, preset: presets.GridPreset | None
) -> dict[str, tuple[str, ...]]:
    """Each swept key and its values: those of a ready grid under those of ``--sweep``.

    Raises UsageError, for a key that ``--set`` fixes too.
    """
    asked = {
        key: tuple(part.strip() for part in values.split(",") if part.strip())
        for key, values in pairs(sweep, "--sweep", once=True).items()
    }
    both = sorted({key.removeprefix("set.") for key in asked} & pairs(given["set"], "--set", once=True).keys())
    if both:
        raise UsageError(f"{', '.join(both)} is in --set and in --sweep.", "Leave one of them out.")
    return {**(preset.sweep if preset is not None else {}), **asked}


def plan_answer(data: dict[str, Any]) -> CommandResult:
    """The answer of ``--dry-run``."""
    lines = []
    for p in data["programs"]:
        together = f", {p['points_at_once']} points at once" if p["points"] > 1 else ""
        points = f" {p['points']} points" if p["points"] > 1 else ""
        lines += [
            f"{p['method']}{points}: {p['execution']}, {p['clients_at_once']} clients at once{together}",
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
    buffer = result.get("timing", {}).get("asynchronous")
    how = f"a round, {result['rounds']} rounds" if buffer is None else (
        f"at a time, {result['rounds']} steps of {buffer} updates")  # fmt: skip
    setting = f"{part['scheme']}, {part['clients']} clients, {result['participation']} {how}"
    lines = [f"{name}: accuracy {percent(accuracy['mean'])} %{spread}", f"  {what}; {setting}, {result['execution']}"]
    if accuracy["mean"] is None:
        lines.append("  no accuracy: the scores of a model are not numbers, or nobody could be scored")
    owned, size = result["classes_owned"], result["parameters"]
    each = owned.get("per_client") or [owned["least"], owned["most"]]
    span = "" if min(each) == max(each) else f"{min(each):g} to "
    fixed = "" if size["fixed"] is None else f" ({size['fixed']:,} fixed)"
    lines.append(
        f"  macro-F1 {percent(result['macro_f1']['mean'])} %; {span}{max(each):g} of {result['classes']} "
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


def model_lines(path: Path, result: Mapping[str, Any]) -> list[str]:
    """How the models of a run with that result are used; [] for a run without any."""
    size = bytes_of_models(path)
    if size is None:
        return []
    if result["protocol"] == "global":
        return [f"  model of {size / 1e6:,.2f} MB:  fedcache predict {path.name[:8]} IMAGES"]
    if is_claimed(result):
        return ["  each site keeps its own model, in flower/ of its home:  fedcache predict FILE IMAGES"]
    if not is_private(result) and not has_client_models(path):
        return [f"  no client's model was saved; this saves them:  {command_saving(path, 'all')}"]
    whose = "--global" if is_private(result) else "--client NAME"  # clients' own parts of private runs are not saved
    return [f"  models of {size / 1e6:,.2f} MB:  fedcache predict {path.name[:8]} IMAGES {whose}"]


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
    shown = TextTable("", columns, [*rows, *lost_rows], right=columns[1:])
    values = " ".join(f"{k}={v}" for k, v in best.sweep.items())
    last = f"Best: {best.method} {values}  {percent(best.run.accuracy['mean'])} %"
    lines = [f"{len(done.points)} points, {done.reused} of them were there already.", last]
    lines += model_lines(best.run.path, best.run.result)
    if not all(tails):
        lines.append("worst 10 % needs at least 10 scored clients" + ("; - has fewer." if worst else "."))
    for spent in done.privacy():
        epsilon = "no bound" if spent["epsilon_pld"] is None else f"epsilon {spent['epsilon_pld']:.3g}"
        kind = "Simulated privacy" if spent["simulation"] else "Privacy"
        lines.append(
            f"{kind} of all {spent['points']} points and {spent['seeds']} seeds on partition {spent['partition'][:8]} "
            f"together: {epsilon} for delta {spent['delta']:g}."
        )
    for word, lost in (("Damaged, left out", done.damaged), ("Failed", done.failed)):
        for one in lost:
            point = " ".join([one.method, *(f"{k}={v}" for k, v in one.sweep.items())])
            lines += [f"{word}: {point}. {one.message}", f"  {one.hint}"]
    return CommandResult(done.to_dict(), lines, done.code, [shown])
