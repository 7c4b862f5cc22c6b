"""``fedcache train`` and ``grid``: from options to runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcache.commands.grid_options import (
    Exact,
    GridOptions,
    Methods,
    Ready,
    Sampler,
    Sweep,
    WhichModels,
)
from fedcache.commands.options import (
    ConfigFile,
    EngineName,
    Given,
    RayAddress,
    RunOptions,
    SchemeArguments,
    check_methods,
    command,
    complete_methods,
    pairs,
    partition_config,
    pick,
    split_list,
    train_config,
)
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.commands.train_answers import grid_answer, model_lines, plan_answer, result_lines
from fedcache.config import Home, PartitionConfig, SaveModels, TrainConfig, read_file
from fedcache.errors import UsageError
from fedcache.federate.engines.choose import engine_of
from fedcache.federate.methods import METHODS
from fedcache.grids import presets
from fedcache.grids.hold_out import EACH, every_value
from fedcache.grids.sampling import Sampling
from fedcache.process import Stop, keep_freed_memory, stop_on_signals
from fedcache.runs.directory import bytes_of_models, check_config
from fedcache.runs.run import Run
from fedcache.runs.score import check_score
from fedcache.runs.trackers.choose import tracking

if TYPE_CHECKING:
    from fedcache.federate.engines.ray.engine import RayEngine


@command("train", pick(TrainConfig), pick(PartitionConfig), pick(SchemeArguments), pick(RunOptions))
def train(
    observer: TerminalObserver,
    given: Given,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="METHOD",
            help="As --method.",
            show_default=False,
            autocompletion=complete_methods,
        ),
    ] = None,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    config: ConfigFile = None,
) -> CommandResult:
    """Train a federated method on cached features.

    What is left out takes the setting of the method's paper; each choice is printed. The same run again returns the
    stored result, a killed one goes on.

    Example: fedcache train fed3r --scheme dirichlet --clients 100 --alpha 0.1
    """
    check_config(config)
    file = read_file(config, observer.note)
    given = {**given, "method": one_of(name, given["method"])}
    resolved = train_config(file, given)
    partition = partition_config(file, given)
    if resolved.method is None:
        raise UsageError("No method was named.", f"fedcache train METHOD, of {', '.join(METHODS)}")
    check_methods([resolved.method])
    home = Home.from_environment()
    cluster = engine_of(engine, ray_address)
    if given["dry_run"]:
        from fedcache.grids import train_grid as grids

        request = grids.request_grid([resolved.method], {}, resolved, home, partition=partition)
        return plan_answer(grids.grid_plan(request, observer))
    if cluster is not None:
        resolved = cluster.client_by_client(resolved)
    done = train_run(resolved, partition, home, given, observer, cluster)
    lines = result_lines(done.result, done.measured, str(done.path))
    data = {**done.to_dict(), "model_bytes": bytes_of_models(done.path)}
    # The directory stays the last line.
    return CommandResult(data, [*lines[:-1], *model_lines(done.path, done.result), lines[-1]])


def one_of(name: str | None, option: str | None) -> str | None:
    """The method that was named, as an argument or by its option. Raises UsageError for two different ones."""
    if name is not None and option is not None and name != option:
        raise UsageError(f"{name} and --method {option} are both given.", "Leave one of them out.")
    return name or option


def train_run(
    config: TrainConfig,
    partition: PartitionConfig,
    home: Home,
    given: Given,
    observer: TerminalObserver,
    cluster: RayEngine | None,
) -> Run:
    """Train a run, or return its stored result. Raises as ``runs.loop.train``."""
    from fedcache.runs.loop import train as run

    stop = Stop()
    runs = Path(given["runs"] or home.runs)
    models = "all"
    if given["no_model"]:
        models = "none"
    keep_freed_memory()
    with ExitStack() as opened:
        # On a cluster, clients are computed by workers; everything else happens in this process.
        if cluster is not None:
            opened.enter_context(
                cluster.training(config, partition, home, given["repartition"], observer)
            )
        opened.enter_context(stop_on_signals(stop.ask, observer.note))
        hooks = opened.enter_context(tracking(given["track"], home, runs, observer))
        return run(
            config,
            home,
            partition=partition,
            runs=runs,
            repartition=given["repartition"],
            extract=not given["no_extract"],
            fresh=given["fresh"],
            observer=observer,
            hooks=hooks,
            stop=stop,
            save=SaveModels(models, given["save_clients"]),
        )


@command(
    "grid",
    [item for item in pick(TrainConfig) if item.name != "method"],
    pick(PartitionConfig),
    pick(SchemeArguments),
    pick(RunOptions),
    pick(GridOptions),
)
def grid(
    observer: TerminalObserver,
    given: Given,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD",
            help="As --method.",
            show_default=False,
            autocompletion=complete_methods,
        ),
    ] = None,
    method: Methods = None,
    ready: Ready = None,
    sweep: Sweep = None,
    sampler: Sampler = "grid",
    exact: Exact = False,
    save_models: WhichModels = "best",
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    config: ConfigFile = None,
) -> CommandResult:
    """Train every combination of methods, sweeps and seeds; finished points are not run again.

    Points that differ in numbers alone are computed together where that is faster, and equal their single runs up to
    rounding; --exact computes them one by one.

    Example: fedcache grid fedavg,fedprox --sweep lr=0.1,0.01 --seeds 0-2 --scheme dirichlet --alpha 0.1
    Example: fedcache grid --method fedpcl --sweep lr=0.01,0.001 --validation 0.2 --retrain
    Example: fedcache grid --method fed3r,fedavg,fedncm --by domain --hold-out each
    """
    if ready == "list":
        return list_ready_grids()
    check_config(config)
    file = read_file(config, observer.note)
    preset = None
    if ready is not None:
        preset = presets.find_preset(ready)
    if preset is not None:
        schemes = requested_schemes(sweep, given) or presets.of_file(file)
        note_preset(preset, schemes, observer)
        file = preset.merged_with(file, schemes)
    resolved = train_config(file, given)
    partition = partition_config(file, given)
    sweeps = swept_values(sweep, given, preset)
    home = Home.from_environment()
    if partition.options.get("hold_out") == EACH:
        sweeps, partition = hold_out_each(sweeps, partition, resolved, home, observer)
    # Methods of the command line come before those of a ready grid, and these before that of fedcache.toml.
    methods = split_list([*(names or ()), *(method or ())], "--method")
    if not methods and preset is not None:
        methods = preset.methods
    if not methods and resolved.method:
        methods = (resolved.method,)
    if not methods:
        raise UsageError(
            "No method was named.", "For example fedcache grid fedavg --sweep lr=0.1,0.01"
        )
    check_methods(methods)
    runs = Path(given["runs"] or home.runs)
    jobs = given["jobs"] or 1
    check_score(given["score"])
    sampling = Sampling(sampler, given["trials"], given["pruner"] or "none")
    from fedcache.grids import search
    from fedcache.grids import train_grid as grids

    if given["no_model"]:
        save_models = "none"
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
        sampler=sampling,
        exact=exact,
        save=SaveModels(save_models, given["save_clients"]),
        retrain=given["retrain"],
        score=given["score"],
    )
    if given["dry_run"]:
        return plan_answer(grids.grid_plan(request, observer))
    cluster = engine_of(engine, ray_address)
    stop = Stop()
    keep_freed_memory()
    with (
        stop_on_signals(stop.ask, observer.note),
        tracking(given["track"], home, runs, observer) as hooks,
    ):
        done = search.train_points(
            request, jobs=jobs, engine=cluster, observer=observer, hooks=hooks, stop=stop
        )
    return grid_answer(done, list(sweeps))


def list_ready_grids() -> CommandResult:
    """Every ready grid."""
    # Ready grids are files of the package, in the order of their names.
    grids = [presets.find_preset(name) for name in presets.preset_names()]
    rows = [
        (
            g.name,
            g.title,
            g.paper,
            " ".join([",".join(g.methods), *(f"{k}={','.join(v)}" for k, v in g.sweep.items())]),
            str(g.points),
        )
        for g in grids
    ]
    shown = TextTable(
        "",
        ("name", "what it varies", "paper", "methods and sweeps", "points"),
        rows,
        right=("points",),
    )
    last = "Run one:  fedcache grid --ready local-losses   (methods, sweeps and all other options take its place)"
    return CommandResult(
        {"grids": [g.to_dict() for g in grids]}, [last], renderables=[shown], listing=True
    )


def requested_schemes(sweep: Sequence[str] | None, given: Given) -> tuple[str, ...]:
    """The partition schemes that the command line names or sweeps."""
    swept = pairs(sweep, "--sweep", once=True).get("scheme")
    if swept:
        return split_list([swept], "--sweep scheme")
    if given["scheme"]:
        return (given["scheme"],)
    return ()


def note_preset(
    preset: presets.GridPreset, schemes: Sequence[str], observer: TerminalObserver
) -> None:
    """Note a ready grid's title, and arguments of its schemes that the requested schemes do not have."""
    if left_out := preset.unused_arguments(schemes):
        own = " or ".join(s for s in preset.schemes if s not in schemes)
        observer.note(
            f"Left out, as the grid's own scheme {own} is not used: {', '.join(left_out)}."
        )
    for note in preset.notes:
        observer.note(note)


def hold_out_each(
    sweeps: Mapping[str, tuple[str, ...]],
    partition: PartitionConfig,
    resolved: TrainConfig,
    home: Home,
    observer: TerminalObserver,
) -> tuple[dict[str, tuple[str, ...]], PartitionConfig]:
    """One point for each value of the column that is held out in turn: the sweep of them, and the partition without it.

    Raises UsageError for a column with one value, and for a sweep of the same; StoreError where nothing is extracted.
    """
    by = str(partition.options.get("by", "domain"))
    if "hold_out" in sweeps:
        raise UsageError(
            "--hold-out each and --sweep hold_out are both given.", "Leave one of them out."
        )
    least = partition.options.get("min_rows", 1)
    words = every_value(by, resolved, home, min_rows=least, observer=observer)
    options = {key: value for key, value in partition.options.items() if key != "hold_out"}
    return {**sweeps, "hold_out": words}, replace(partition, options={**options, "by": by})


def swept_values(
    sweep: Sequence[str] | None, given: Given, preset: presets.GridPreset | None
) -> dict[str, tuple[str, ...]]:
    """Each swept key and its values: those of a ready grid under those of ``--sweep``.

    Raises UsageError, for a key that ``--set`` fixes too.
    """
    swept = {
        key: tuple(part.strip() for part in values.split(",") if part.strip())
        for key, values in pairs(sweep, "--sweep", once=True).items()
    }
    # A hyperparameter may be swept as lr or as set.lr.
    names = {key.removeprefix("set.") for key in swept}
    both = sorted(names & pairs(given["set"], "--set", once=True).keys())
    if both:
        raise UsageError(f"{', '.join(both)} is in --set and in --sweep.", "Leave one of them out.")
    if preset is not None:
        swept = {**preset.sweep, **swept}
    return swept
