"""``fedcache train`` and ``fedcache grid``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.allocator import keep_freed_memory
from fedcache.commands import options as o
from fedcache.commands import trust as t
from fedcache.commands.output import Answer, Story, answer, stopping, table
from fedcache.commands.track import Track
from fedcache.config import PartitionConfig, TrainConfig, read_file, resolve
from fedcache.errors import Exit, FedcacheError

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
Lift = Annotated[str | None, typer.Option("--lift", help="auto | loop | stack | dual: how clients are computed.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32 | float64.")]
Runs = Annotated[
    Path | None, typer.Option("--runs", help="Directory of results, instead of the one under FEDCACHE_HOME.")
]
Repartition = Annotated[bool, typer.Option("--repartition", help="Every seed draws its own partition.")]
NoExtract = Annotated[bool, typer.Option("--no-extract", help="Fail instead of extracting what is missing.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run again although the result is there.")]


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
    from fedcache.api.partitions import partition_flags

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
        from fedcache.api.tracking import tracking
        from fedcache.api.training import train as run
        from fedcache.extract.stop import Stop

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
        if dry_run:
            from fedcache.api.grids import grid_plan

            if resolved.method is None:
                raise FedcacheError(Exit.USAGE, "No method was named.", "For example fedcache train --method fed3r")
            dealt = partition_config(file, scheme, clients, alpha, shards, shots, option, seed)
            return _plan(grid_plan([resolved.method], {}, resolved, o.home(), partition=dealt, observer=story))
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


def percent(value: float | None, digits: int = 2) -> str:
    """A fraction as per cent."""
    return "-" if value is None else f"{100 * value:.{digits}f}"


def _plan(data: dict[str, Any]) -> Answer:
    """The answer of ``--dry-run``."""
    lines = []
    for p in data["programs"]:
        together = f", {p['points_at_once']} points at once" if p["points"] > 1 else ""
        points = f" {p['points']} points" if p["points"] > 1 else ""
        lines += [
            f"{p['method']}{points}: {p['lift']}, {p['clients_at_once']} clients at once{together}",
            f"  {p['words']}",
        ]
    return Answer(data, lines)


PROTOCOLS = {
    "global": "one model on the global test rows",
    "personalised": "each client's own model on its own test rows, mean over clients",
    "everywhere": "each client's own model on all test rows, over clients",
}

TAILS = {"worst10": ("worst 10 %", 10), "worst40": ("worst 40 %", 3), "best10": ("best 10 %", 10)}
"""Means over the tails of the clients: their names, and the clients of which the tail is at least one."""


def result_lines(result: dict[str, Any], measured: dict[str, Any], path: str) -> list[str]:
    """A result for a person."""
    from fedcache.api.trusting import words

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
    lines = [
        f"{name}: accuracy {percent(accuracy['mean'])} %{spread}",
        f"  {what}; {setting}, {result['lift']}",
    ]
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
        *(f"  {line}" for line in words(result.get("trust", {}))),
        *([f"  at the end {watched}"] if watched else []),
        *([f"  {timing}"] if timing else []),
        f"  {path}",
    ]
    return lines


def _ready_list() -> Answer:
    """Every ready grid."""
    from fedcache.api.ready_grids import names, ready

    grids = [ready(name) for name in names()]
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
        from fedcache.api.grids import grid as run
        from fedcache.api.ready_grids import ready as lookup
        from fedcache.api.tracking import tracking
        from fedcache.extract.stop import Stop

        if ready == "list":
            return _ready_list()
        known = lookup(ready) if ready is not None else None
        read = read_file(config)
        file = known.under(read, scheme) if known is not None else read
        gone = known.dropped(scheme or read.get("partition", {}).get("scheme")) if known is not None else ()
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
        if dry_run:
            from fedcache.api.grids import grid_plan

            dealt = partition_config(file, scheme, clients, alpha, shards, shots, option, seed)
            return _plan(grid_plan(chosen, sweeps, resolved, o.home(), partition=dealt, repartition=repartition,
                                   sampler=sampler, exact=exact, observer=story))  # fmt: skip
        stop = Stop()
        keep_freed_memory()
        with stopping(stop.ask, story), tracking(track, o.home(), runs, story) as hooks:
            done = run(
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
                jobs=jobs,
                observer=story,
                hooks=hooks,
                stop=stop,
            )
        data = done.to_dict()
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
        return Answer(data, lines, done.code, [shown])

    answer("grid", json, call)
