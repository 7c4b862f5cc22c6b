"""``fedcache grid``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.allocator import keep_freed_memory
from fedcache.commands.options import (
    ConfigFile,
    EngineName,
    Given,
    Json,
    RayAddress,
    check_methods,
    pairs,
    partition_config,
    pick,
    split_list,
    train_config,
    with_options,
)
from fedcache.commands.output import CommandResult, TerminalObserver, run_command, stop_on_signals, table
from fedcache.commands.run_output import grid_answer, plan_answer
from fedcache.config import Home, PartitionConfig, TrainConfig, read_file
from fedcache.config.sections import COMPUTING, RunOptions, SchemeArguments
from fedcache.errors import UsageError
from fedcache.extract.stop import Stop
from fedcache.federate.engines.choose import engine_of
from fedcache.grids import presets
from fedcache.runs.trackers import tracking

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


@with_options(
    [item for item in pick(TrainConfig) if item.name != "method"],
    pick(PartitionConfig),
    pick(SchemeArguments),
    pick(RunOptions),
)
def grid(
    given: Given,
    method: Methods = None,
    ready: Ready = None,
    sweep: Sweep = None,
    sampler: Sampler = "grid",
    exact: Exact = False,
    jobs: Jobs = 1,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Train every combination of methods, sweeps and seeds; finished points are not run again.

    Points that differ in numbers alone are computed together where that is faster, and equal their single runs up to
    rounding; --exact computes them one by one.

    Example: fedcache grid --method fedavg,fedprox --sweep lr=0.1,0.01 --seeds 0-2 --scheme dirichlet --alpha 0.1
    """

    def call(observer: TerminalObserver) -> CommandResult:
        if ready == "list":
            return list_ready_grids()
        file, preset = read_file(config), presets.find_preset(ready) if ready is not None else None
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
        from fedcache.grids import grid as grids

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
        )
        if given["dry_run"]:
            return plan_answer(grids.grid_plan(request, observer))
        cluster, stop = engine_of(engine, ray_address), Stop()
        keep_freed_memory()
        with stop_on_signals(stop.ask, observer), tracking(given["track"], home, runs, observer) as hooks:
            done = grids.grid(request, jobs=jobs, engine=cluster, observer=observer, hooks=hooks, stop=stop)
        return grid_answer(done, list(sweeps))

    run_command("grid", json, call)


def list_ready_grids() -> CommandResult:
    """Every ready grid."""
    grids = [presets.find_preset(name) for name in presets.preset_names()]
    rows = [
        (g.name, g.title, g.paper, " ".join([",".join(g.methods), *(f"{k}={','.join(v)}" for k, v in g.sweep.items())]),
         str(g.points))
        for g in grids
    ]  # fmt: skip
    shown = table("", ("name", "what it varies", "paper", "methods and sweeps", "points"), rows, right=("points",))
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

    Raises:
        UsageError, for a key that ``--set`` fixes too.
    """
    asked = {
        key: tuple(part.strip() for part in values.split(",") if part.strip())
        for key, values in pairs(sweep, "--sweep", once=True).items()
    }
    both = sorted({key.removeprefix("set.") for key in asked} & pairs(given["set"], "--set", once=True).keys())
    if both:
        raise UsageError(f"{', '.join(both)} is in --set and in --sweep.", "Leave one of them out.")
    return {**(preset.sweep if preset is not None else {}), **asked}
