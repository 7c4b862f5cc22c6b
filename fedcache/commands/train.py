"""``fedcache train`` and ``fedcache grid``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.allocator import keep_freed_memory
from fedcache.commands import options as o
from fedcache.commands import trust_options as t
from fedcache.commands.output import Answer, Story, answer, stopping, table
from fedcache.commands.run_output import grid_answer, plan_answer, result_lines
from fedcache.commands.track_option import Track
from fedcache.config import PartitionConfig, TrainConfig, read_file, resolve
from fedcache.errors import Exit, FedcacheError, unknown
from fedcache.extract.stop import Stop
from fedcache.federate.engines.choose import engine_of
from fedcache.federate.methods import METHODS
from fedcache.grids import presets
from fedcache.runs.partitions import partition_flags
from fedcache.runs.trackers import tracking

Preset = Annotated[str | None, typer.Option("--preset", help="paper | official: equations as printed, or as released.")]
Saved = Annotated[str | None, typer.Option("--partition", "-p", help="A saved partition, or a partition file.")]
From = Annotated[str | None, typer.Option("--clients-from", help="A directory of client stores (fedcache shard).")]
Rounds = Annotated[int | None, typer.Option("--rounds", "-r", min=1, help="Rounds; default the paper's.")]
Share = Annotated[
    str | None, typer.Option("--participation", help="Clients a round: a number, a share (0.1, 10%) or all.")
]
Seeds = Annotated[str | None, typer.Option("--seeds", help="0,1,2 or 0-4; at most 10,000, each below 10^9.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="key=value of the method; see `fedcache methods info`. Repeatable.")
]
Mixed = Annotated[
    list[str] | None,
    typer.Option("--client-backbones", help="a,b,a+b: clients take turns with these, where the method allows it."),
]
MixedSet = Annotated[
    list[str] | None,
    typer.Option("--client-set", help="key=v1,v2: clients take turns with these values. Repeatable."),
]
Every = Annotated[int | None, typer.Option("--eval-every", min=0, help="Also score after every k-th round.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show how it would be computed and its peak of memory; train nothing.")
]
Lift = Annotated[
    str | None, typer.Option("--lift", help="auto | sequential | batched | gram: how clients are computed.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32 | float64.")]
Runs = Annotated[
    Path | None, typer.Option("--runs", help="Directory of results, instead of the one under FEDCACHE_HOME.")
]
Repartition = Annotated[bool, typer.Option("--repartition", help="Every seed draws its own partition.")]
NoExtract = Annotated[bool, typer.Option("--no-extract", help="Fail instead of extracting what is missing.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run again although the result is there.")]


def check_methods(names: Sequence[str]) -> None:
    """Refuse a misspelt method before torch is imported.

    Raises:
        FedcacheError: USAGE, with "did you mean".
    """
    for name in names:
        if name not in METHODS:
            raise unknown("method", name, METHODS)


def settings_of(values: list[str] | None) -> dict[str, Any]:
    """``--set`` pairs."""
    return dict(o.pairs(values, "--set", once=True))


def partition_config(
    file: dict[str, dict[str, Any]],
    scheme: str | None,
    clients: int | None,
    alpha: float | None,
    shards: int | None,
    shots: int | None,
    option: list[str] | None,
    seed: int | None,
) -> PartitionConfig:
    """The scheme and its arguments from the file and the flags."""

    made = resolve(PartitionConfig, file.get("partition", {}), {"scheme": scheme, "clients": clients, "seed": seed})
    extra = partition_flags(None, alpha, shards, shots, o.pairs(option, "--option"))
    return PartitionConfig(made.scheme, made.clients, made.seed, {**made.options, **extra})


def train(
    method: Annotated[str | None, typer.Option("--method", help="See `fedcache methods list`.")] = None,
    preset: Preset = None,
    dataset: o.Dataset = None,
    store: o.StoreDir = None,
    backbones: o.Backbones = None,
    domain: o.Domain = None,
    partition: Saved = None,
    scheme: o.Scheme = None,
    clients: o.Clients = None,
    alpha: o.Alpha = None,
    shards: o.Shards = None,
    shots: o.Shots = None,
    option: o.Option = None,
    seed: o.Seed = None,
    repartition: Repartition = False,
    clients_from: From = None,
    rounds: Rounds = None,
    participation: Share = None,
    seeds: Seeds = None,
    settings: Settings = None,
    client_backbones: Mixed = None,
    client_set: MixedSet = None,
    eval_every: Every = None,
    aggregate: t.Aggregate = None,
    attack: t.AttackOption = None,
    on_bad_update: t.OnBad = None,
    byzantine: t.Byzantine = None,
    max_update_norm: t.MaxNorm = None,
    dp_clip: t.Clip = None,
    dp_noise: t.Noise = None,
    dp_delta: t.Delta = None,
    lift: Lift = None,
    device: o.Device = None,
    dtype: Dtype = None,
    runs: Runs = None,
    track: Track = None,
    no_extract: NoExtract = False,
    dry_run: DryRun = False,
    fresh: Fresh = False,
    config: o.ConfigFile = None,
    json: o.Json = False,
) -> None:
    """Train a federated method on cached features.

    What is left out takes the setting of the method's paper; each choice is printed. The same run again returns the
    stored result, a killed one goes on.

    Example: fedcache train --method fed3r --scheme dirichlet --clients 100 --alpha 0.1
    """

    def call(story: Story) -> Answer:
        file = read_file(config)
        flags = {
            "method": method,
            "preset": preset,
            "dataset": dataset,
            "store": str(store) if store else None,
            "backbones": o.listed(backbones, "--backbones"),
            "domain": o.listed(domain, "--domain"),
            "partition": partition,
            "clients_from": clients_from,
            "rounds": rounds,
            "participation": participation,
            "seeds": seeds,
            "eval_every": eval_every,
            "lift": lift,
            "device": device,
            "dtype": dtype,
            "client_backbones": o.listed(client_backbones, "--client-backbones"),
            "client_set": o.pairs(client_set, "--client-set", once=True),
            "aggregate": aggregate,
            "attack": attack,
            "on_bad_update": on_bad_update,
            "byzantine": byzantine,
            "max_update_norm": max_update_norm,
            "dp_clip": dp_clip,
            "dp_noise": dp_noise,
            "dp_delta": dp_delta,
        }
        section = dict(file.get("train", {}))
        section["set"] = {**section.get("set", {}), **settings_of(settings)}
        resolved = resolve(TrainConfig, section, flags)
        check_methods([resolved.method] if resolved.method else [])
        if dry_run:
            from fedcache.grids.grid import grid_plan, request_grid

            if resolved.method is None:
                raise FedcacheError(Exit.USAGE, "No method was named.", "For example fedcache train --method fed3r")
            dealt = partition_config(file, scheme, clients, alpha, shards, shots, option, seed)
            request = request_grid([resolved.method], {}, resolved, o.home(), partition=dealt)
            return plan_answer(grid_plan(request, story))
        from fedcache.runs.loop import train as run

        stop = Stop()
        keep_freed_memory()
        with stopping(stop.ask, story), tracking(track, o.home(), runs, story) as hooks:
            done = run(
                resolved,
                o.home(),
                partition=partition_config(file, scheme, clients, alpha, shards, shots, option, seed),
                runs=runs,
                repartition=repartition,
                extract=not no_extract,
                fresh=fresh,
                observer=story,
                hooks=hooks,
                stop=stop,
            )
        return Answer(done.to_dict(), result_lines(done.result, done.measured, str(done.path)))

    answer("train", json, call)


def _ready_list() -> Answer:
    """Every ready grid."""

    grids = [presets.find_preset(name) for name in presets.preset_names()]
    rows = [
        (g.name, g.title, g.paper, " ".join([",".join(g.methods), *(f"{k}={','.join(v)}" for k, v in g.sweep.items())]),
         str(g.points))
        for g in grids
    ]  # fmt: skip
    shown = table("", ("name", "what it varies", "paper", "methods and sweeps", "points"), rows, right=("points",))
    last = "Run one:  fedcache grid --ready local-losses   (methods, sweeps and all other options take its place)"
    return Answer({"grids": [g.to_dict() for g in grids]}, [last], renderables=[shown])


def grid(
    method: Annotated[list[str] | None, typer.Option("--method", help="Methods, comma-separated.")] = None,
    ready: Annotated[
        str | None, typer.Option("--ready", help="A grid of the papers' ablations by name; list shows them.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            help="key=v1,v2: a hyperparameter, or rounds, participation, clients, alpha, shards, shots, aggregate, "
            "attack. Repeatable.",
        ),
    ] = None,
    preset: Preset = None,
    dataset: o.Dataset = None,
    store: o.StoreDir = None,
    backbones: o.Backbones = None,
    domain: o.Domain = None,
    partition: Saved = None,
    scheme: o.Scheme = None,
    clients: o.Clients = None,
    alpha: o.Alpha = None,
    shards: o.Shards = None,
    shots: o.Shots = None,
    option: o.Option = None,
    seed: o.Seed = None,
    repartition: Repartition = False,
    rounds: Rounds = None,
    participation: Share = None,
    seeds: Seeds = None,
    settings: Settings = None,
    client_backbones: Mixed = None,
    client_set: MixedSet = None,
    eval_every: Every = None,
    aggregate: t.Aggregate = None,
    attack: t.AttackOption = None,
    on_bad_update: t.OnBad = None,
    byzantine: t.Byzantine = None,
    max_update_norm: t.MaxNorm = None,
    dp_clip: t.Clip = None,
    dp_noise: t.Noise = None,
    dp_delta: t.Delta = None,
    lift: Lift = None,
    dtype: Dtype = None,
    sampler: Annotated[
        str, typer.Option("--sampler", help="grid, or random:N[:SEED] for N points drawn without repeats.")
    ] = "grid",
    exact: Annotated[
        bool, typer.Option("--exact", help="Compute every point alone, with the bits of its single run.")
    ] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, help="Processes that train points alone; for what is not one program.")
    ] = 1,
    engine: o.EngineName = "local",
    ray_address: o.RayAddress = None,
    runs: Runs = None,
    track: Track = None,
    no_extract: NoExtract = False,
    dry_run: DryRun = False,
    fresh: Fresh = False,
    config: o.ConfigFile = None,
    json: o.Json = False,
) -> None:
    """Train every combination of methods, sweeps and seeds; finished points are not run again.

    Points that differ in numbers alone are computed together where that is faster, and equal their single runs up to
    rounding; --exact computes them one by one.

    Example: fedcache grid --method fedavg,fedprox --sweep lr=0.1,0.01 --seeds 0-2 --scheme dirichlet --alpha 0.1
    """

    def call(story: Story) -> Answer:
        if ready == "list":
            return _ready_list()
        known = presets.find_preset(ready) if ready is not None else None
        read = read_file(config)
        file = known.merged_with(read, scheme) if known is not None else read
        gone = known.unused_arguments(scheme or read.get("partition", {}).get("scheme")) if known is not None else ()
        if known is not None and gone:
            own = known.partition["scheme"]
            story.note(f"Left out, as the grid's own scheme {own} is not used: {', '.join(gone)}.")
        names = o.listed(method, "--method") or (known.methods if known is not None else ())
        for note in known.notes if known is not None else ():
            story.note(note)
        flags = {
            "preset": preset,
            "dataset": dataset,
            "store": str(store) if store else None,
            "backbones": o.listed(backbones, "--backbones"),
            "domain": o.listed(domain, "--domain"),
            "partition": partition,
            "rounds": rounds,
            "participation": participation,
            "seeds": seeds,
            "eval_every": eval_every,
            "lift": lift,
            "dtype": dtype,
            "client_backbones": o.listed(client_backbones, "--client-backbones"),
            "client_set": o.pairs(client_set, "--client-set", once=True),
            "aggregate": aggregate,
            "attack": attack,
            "on_bad_update": on_bad_update,
            "byzantine": byzantine,
            "max_update_norm": max_update_norm,
            "dp_clip": dp_clip,
            "dp_noise": dp_noise,
            "dp_delta": dp_delta,
        }
        section = dict(file.get("train", {}))
        section["set"] = {**section.get("set", {}), **settings_of(settings)}
        resolved = resolve(TrainConfig, section, flags)
        swept = o.pairs(sweep, "--sweep", once=True)
        given = {k: tuple(p.strip() for p in v.split(",") if p.strip()) for k, v in swept.items()}
        sweeps = {**(known.sweep if known is not None else {}), **given}
        both = sorted({k.removeprefix("set.") for k in given} & settings_of(settings).keys())
        if both:
            raise FedcacheError(Exit.USAGE, f"{', '.join(both)} is in --set and in --sweep.", "Leave one of them out.")
        chosen = names or ((resolved.method,) if resolved.method else ())
        if not chosen:
            raise FedcacheError(
                Exit.USAGE, "No method was named.", "For example fedcache grid --method fedavg --sweep lr=0.1,0.01"
            )
        check_methods(chosen)
        from fedcache.grids.grid import grid as run
        from fedcache.grids.grid import grid_plan, request_grid

        request = request_grid(
            chosen,
            sweeps,
            resolved,
            o.home(),
            partition=partition_config(file, scheme, clients, alpha, shards, shots, option, seed),
            runs=runs,
            repartition=repartition,
            extract=not no_extract,
            fresh=fresh,
            sampler=sampler,
            exact=exact,
        )
        if dry_run:
            return plan_answer(grid_plan(request, story))
        where = engine_of(engine, ray_address)
        stop = Stop()
        keep_freed_memory()
        with stopping(stop.ask, story), tracking(track, o.home(), runs, story) as hooks:
            done = run(request, jobs=jobs, engine=where, observer=story, hooks=hooks, stop=stop)
        return grid_answer(done, list(sweeps))

    answer("grid", json, call)
