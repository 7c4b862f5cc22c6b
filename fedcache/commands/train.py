"""``fedcache train`` and ``fedcache grid``: read the options, train, and describe the results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcache.commands.grid_options import GridOptions, Methods
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
    configured,
    engine_of,
    one_value,
    pairs,
    partition_config,
    pick,
    split_list,
    sweep_lists,
    train_config,
)
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.config import Home, PartitionConfig, SaveModels, TrainConfig, read_file
from fedcache.errors import UsageError, shell_word
from fedcache.extract.recipe import IMAGES, ROWS, SOUNDS, TEXTS
from fedcache.federate.methods import METHODS
from fedcache.grids import presets
from fedcache.grids.hold_out import EACH, every_value
from fedcache.grids.result import Grid, HeldOut, Point, point_words
from fedcache.grids.sampling import Sampling
from fedcache.parsing import counted, seeds_text
from fedcache.process import keep_freed_memory, stopped_by_signals
from fedcache.progress import VALIDATION_ACCURACY, percent
from fedcache.report.find_runs import StoredRun, setting_name
from fedcache.report.verdict import (
    caution_lines,
    cost_words,
    describe_trust,
    drawn_clients,
    uncertainty,
)
from fedcache.runs.directory import (
    MODELS,
    bytes_of_models,
    check_config,
    command_saving,
    has_client_models,
    is_private,
    reads_embeddings,
)
from fedcache.runs.run import Run, is_claimed
from fedcache.runs.score import LEVEL, check_score, score_of, unlike_tests
from fedcache.runs.trackers import tracking

if TYPE_CHECKING:
    from fedcache.federate.engines.ray.engine import RayEngine


def plan_answer(data: dict[str, Any]) -> CommandResult:
    """The answer of ``--dry-run``."""
    lines = []
    for p in data["programs"]:
        points = ""
        together = ""
        if p["points"] > 1:
            points = f" {p['points']} configurations"
            together = f", {p['points_at_once']} configurations at once"
        clients = f"{p['clients_at_once']} clients at once"
        method = p["method"]
        execution = p["execution"]
        lines += [f"{method}{points}: {execution}, {clients}{together}", f"  {p['words']}"]
    return CommandResult(data, lines)


PROTOCOLS = {
    "global": "one global model on the pooled test rows",
    "personalised": "personal models, each on the client's own test rows, mean over clients",
    "everywhere": "personal models, each on all test rows, mean over clients",
}

TAILS = {"worst10": "worst 10 %", "worst40": "worst 40 %", "best10": "best 10 %"}
"""Keys of means over the worst or best clients -> their names. A run with few clients lacks some of them."""


def answer_lines(done: Run, *, verbose: bool) -> list[str]:
    """The answer of a run in lines: data and settings, accuracy, cautions, cost, directory and the next command.

    With ``verbose`` all other figures follow the cost.
    """
    run = StoredRun(done.path, done.result, done.measured)
    result = run.result
    preset = result["preset"]
    fidelity = result["fidelity"]
    name = f"{run.method} ({preset}, {fidelity})"
    # Number of updates for a step of the server; None for training in rounds.
    buffer = result.get("timing", {}).get("asynchronous")
    length = counted(result["rounds"], "round")
    if buffer is not None:
        steps = counted(result["rounds"], "step")
        length = f"{steps} of {buffer} updates"
    features = " + ".join(map(str, result["backbones"]))
    clients = counted(result["partition"]["clients"], "client")
    seeds = counted(len(result["seeds"]), "seed")
    trained_on = f"{features}, {clients}, {length}, {seeds}"
    lines = [f"{name} on {setting_name(run)}: {trained_on}", f"  {accuracy_words(run)}"]
    notes = caution_lines(result)
    if result["accuracy"]["mean"] is None:
        notes.append(
            "No accuracy, because a model gives scores that are not finite or no client has test rows."
        )
    drawn = drawn_clients(result)
    if drawn is not None:
        notes.append(f"{drawn[0]}.")
    prior = result["accuracy"].get("client_prior")
    if prior is not None:
        shown = {name: percent(value) for name, value in prior.items()}
        for_own = "own test rows {own_rows} % without and {own_rows_with_prior} % with the prior"
        for_all = "all test rows {all_rows} % without and {all_rows_with_prior} % with the prior"
        notes.append(f"Client prior: {for_own}; {for_all}.".format(**shown))
    stages = result["accuracy"].get("stages")
    if stages is not None:
        count = len(stages["per_seed"][0]["by_stage"])
        average = percent(stages["average"])
        final = percent(stages["final"])
        forgetting = percent(stages["forgetting"])
        notes.append(
            f"Classes in {count} stages: average accuracy {average} %, final accuracy {final} %, forgetting "
            f"{forgetting} points."
        )
    generalised = result["accuracy"].get("base_to_new")
    if generalised is not None:
        classes = result["classes"]
        rows = generalised["per_seed"][0]["new_rows"]
        base = percent(generalised["base"])
        new = percent(generalised["new"])
        harmonic = percent(generalised["harmonic_mean"])
        notes.append(
            f"Base to new: {base} % on the {classes:,} base classes, {new} % on {rows:,} test rows of the new classes, "
            f"harmonic mean {harmonic} %."
        )
    transferred = result["accuracy"].get("transfer")
    if transferred is not None:
        figures = [f"{name} {percent(value)} %" for name, value in transferred["mean"].items()]
        listed = ", ".join(figures)
        notes.append(f"Transfer to other datasets: {listed}.")
    notes += describe_trust(result.get("trust", {}))
    notes.append(cost_words(run))
    lines += [f"  {note}" for note in notes]
    if verbose:
        lines += [f"  {line}" for line in detail_lines(result, run.measured)]
    following = model_lines(run.path, result) or [compare_line(run.path.parent)]
    return [*lines, f"  Stored in {run.path}", *following]


def accuracy_words(run: StoredRun) -> str:
    """The accuracy of a run with its interval, validation accuracy and zero-shot accuracy, where it has them."""
    accuracy = run.result["accuracy"]
    mean = percent(accuracy["mean"])
    words = f"accuracy {mean} %"
    interval = uncertainty(run, "own")
    if interval is not None:
        level = 100 * LEVEL
        words += f" ({level:g} % interval {interval.ends} over {interval.over})"
    protocol = run.result["protocol"]
    if protocol != "global":
        words += f", {PROTOCOLS[protocol]}"
    validation = run.result.get("validation")
    if validation is not None:
        on_validation = percent(validation["mean"])
        rows = validation["rows"]
        words += f"; {on_validation} % on {rows:,} validation rows"
    zero_shot = accuracy.get("zero_shot")
    if zero_shot is not None:
        words += f"; zero-shot (no training) {percent(zero_shot)} %"
    return words


def detail_lines(result: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """Figures that ``train -v`` adds to the answer."""
    share = result["participation"]
    execution = result["execution"]
    lines = [f"{share} clients per round, {execution}"]
    deviation = result["accuracy"]["std"]
    if deviation is not None:
        lines.append(f"standard deviation over seeds {percent(deviation)} points")
    lines += score_lines(result)
    owned = result["classes_owned"]
    # A result of many clients has only the least and the most.
    per_client = owned.get("per_client") or [owned["least"], owned["most"]]
    least = min(per_client)
    most = max(per_client)
    span = f"{most:g}"
    if least < most:
        span = f"{least:g} to {span}"
    size = result["parameters"]
    trained = f"{size['trainable']:,} parameters trained"
    if size["fixed"] is not None:
        trained += f" ({size['fixed']:,} fixed)"
    macro_f1 = percent(result["macro_f1"]["mean"])
    classes = result["classes"]
    lines.append(f"macro-F1 {macro_f1} %; {span} of {classes} classes per client; {trained}")
    per_domain = result["accuracy"]["per_domain"]
    if len(per_domain) > 1:
        domains = [" ".join((name, percent(value))) for name, value in per_domain.items()]
        lines.append("per domain   " + "  ".join(domains))
    lines += _fairness_lines(result)
    exact = result["traffic"]["exact"]["per_client_round"]
    paper = result["traffic"]["paper"]["per_client_round"]
    sent = f"{exact['up']:,.0f} scalars per client per round"
    lines.append(f"sends {sent} (paper counts {paper['up']:,.0f}), receives {exact['down']:,.0f}")
    diagnostics = [
        f"{key} {value:.4g}"
        for key, value in result.get("diagnostics", {}).items()
        if value is not None and key != VALIDATION_ACCURACY
    ]
    if diagnostics:
        lines.append("diagnostics " + ", ".join(diagnostics))
    seconds = measured.get("seconds", {})
    if seconds:
        lines.append(", ".join(f"{key} {value:,.2f} s" for key, value in seconds.items()))
    return lines


def _fairness_lines(result: Mapping[str, Any]) -> list[str]:
    """Spread over clients; [] where one model has the same test rows for all clients."""
    fairness = result["fairness"]
    deviation = fairness.get("std_pp")
    if deviation is None or (result["protocol"] == "global" and deviation < 1e-9):
        return []
    parts = [f"mean {percent(fairness['mean'])}", f"std {deviation:.2f} points"]
    for key, name in TAILS.items():
        if fairness[key] is not None:
            parts.append(f"{name} {percent(fairness[key])}")
    return ["over clients " + ", ".join(parts)]


def score_lines(result: Mapping[str, Any]) -> list[str]:
    """The client mean and the pooled accuracy; [] if both equal the accuracy that is shown anyway."""
    client_mean = score_of(result, "client-mean").mean
    pooled = score_of(result, "pooled").mean
    if client_mean is None or pooled is None:
        return []
    shown = result["accuracy"]["mean"] or 0.0
    if all(math.isclose(score, shown, abs_tol=1e-12) for score in (client_mean, pooled)):
        return []
    return [f"client mean {percent(client_mean)} %, pooled over test rows {percent(pooled)} %"]


WHAT_PREDICT_TAKES = {TEXTS: "TEXTS.csv", ROWS: "--store STORE", SOUNDS: "SOUNDS"}
"""Contents of a dataset other than images -> what ``fedcache predict`` takes for a model of such a dataset."""


def model_lines(path: Path, result: Mapping[str, Any]) -> list[str]:
    """The command that uses the models of a run; [] for a run without models."""
    if bytes_of_models(path) is None:
        return []
    holds = result.get("dataset", {}).get("holds", IMAGES)
    inputs = WHAT_PREDICT_TAKES.get(holds)
    if inputs is None:
        inputs = "IMAGES"
        if reads_embeddings(path):
            inputs = "--embeddings FILE"
    run = str(path)
    if in_home(path.parent):
        run = path.name[:8]
    predict = f"  Next:  fedcache predict {shell_word(run)} {inputs}"
    if result["protocol"] == "global":
        lines = [predict]
        if is_claimed(result):
            file = min((path / MODELS).glob("*.safetensors"))
            lines.append(
                f"  At a site:  copy {file}, then  fedcache predict {shell_word(file.name)} {inputs}"
            )
        return lines
    if is_claimed(result):
        return [
            "  each site keeps its own model, in flower/ of its FEDCACHE_HOME:  fedcache predict FILE "
            "IMAGES"
        ]
    # Clients' own parts of private runs are not saved.
    if is_private(result):
        return [f"{predict} --global"]
    if not has_client_models(path):
        return [f"  No personal model was saved. To save them:  {command_saving(path, 'all')}"]
    return [f"{predict} --client NAME"]


def in_home(runs: Path) -> bool:
    """Whether a directory is the runs directory of the fedcache home. Its runs can be named by their first letters."""
    return runs.resolve() == Home.from_environment().runs.resolve()


def compare_line(runs: Path) -> str:
    """The command that compares the runs of a directory."""
    if in_home(runs):
        return "  Next:  fedcache compare"
    return f"  Next:  fedcache compare {shell_word(runs)}"


FEW_ROWS = 20
"""Number of test rows below which the accuracy of a held-out value gets a note."""


def held_out_answer(done: Grid, rows: Sequence[HeldOut], *, verbose: bool) -> CommandResult:
    """The answer of a grid that holds values out in turn: one row per setting, one column per value, and the mean."""
    best = rows[0]
    values = list(best.accuracy)
    # The swept keys of all rows, each once.
    swept = list(dict.fromkeys(key for row in rows for key in row.sweep))
    # Values differ in size, so the heading of a value says how many rows it has.
    counts = {}
    headings = []
    for value in values:
        known = [row.rows[value] for row in rows if row.rows[value] is not None]
        count = next(iter(known), None)
        counts[value] = count
        heading = value
        if count is not None:
            heading = f"{value} ({count:,})"
        headings.append(heading)
    trained_again = _retrained(done)
    columns = ["method", *swept, *headings, "mean"]
    if done.by_validation:
        columns.append("validation")
    if trained_again:
        columns.append(RETRAINED)
    cells = []
    for row in rows:
        settings = [row.sweep.get(key) for key in swept]
        accuracies = [percent(row.accuracy[value]) for value in values]
        line = [row.method, *settings, *accuracies, percent(row.mean)]
        if done.by_validation:
            line.append(percent(row.validation))
        if trained_again:
            line.append(trained_again.get(row.words, ""))
        cells.append(line)
    shown = TextTable("accuracy % on each held-out value (rows)", columns, cells, right=columns[1:])
    lines = [points_line(done)]
    if best.mean is not None:
        choice = "Best by mean test accuracy (no validation split)"
        if done.by_validation:
            choice = "Best by mean validation accuracy"
        again = ""
        if trained_again:
            again = f", trained again on all rows {trained_again[best.words]} %"
        figures = f"{percent(best.mean)} %{again}"
        lines.append(f"{choice} over {len(values)} held-out values: {best.words}  {figures}")
        if done.tie:
            lines.append(done.tie)
        lines += weight_lines(counts)
    return _grid_result(done, lines, shown, verbose=verbose)


def _grid_result(
    done: Grid, lines: Sequence[str], table: TextTable, *, verbose: bool
) -> CommandResult:
    """The answer of a grid: its table, sentences on it, and the next command; with ``verbose`` every retrained run."""
    last = list(lines)
    if verbose:
        for again in done.retrained:
            last.append(f"Trained again on all training rows: {again.words}")
            last += answer_lines(again.run, verbose=True)
    last += failure_lines(done)
    best = done.best()
    if done.retrained:
        best = done.retrained[0]
    following = model_lines(best.run.path, best.run.result)
    # With several held-out values there is no single best model to predict with.
    if done.held_out() or not following:
        following = [compare_line(best.run.path.parent)]
    return CommandResult(done.to_dict(), [], done.code, [table], [*last, *following])


RETRAINED = "trained again %"
"""Column of the test accuracy after training on all training rows, including the validation rows."""


def _retrained(done: Grid) -> dict[str, str]:
    """Method and swept values of each setting that was trained again -> its accuracy in percent."""
    return {words: percent(score) for words, score in done.retrained_scores().items()}


def weight_lines(counts: Mapping[str, int | None]) -> list[str]:
    """A note that the mean gives held-out values with few rows the same weight as others; [] without such values."""
    few = [
        f"{value} with {count:,}"
        for value, count in counts.items()
        if count is not None and count < FEW_ROWS
    ]
    if not few:
        return []
    names = ", ".join(few)
    return [
        f"{len(few)} of {len(counts)} held-out values have fewer than {FEW_ROWS} rows: {names}. The mean gives them "
        "the same weight as the others.",
        f"  To leave them out of training and test: --hold-out each --min-rows {FEW_ROWS}",
    ]


def failure_lines(done: Grid) -> list[str]:
    """Points of a grid that failed, with hints."""
    lines = []
    for word, lost in (
        ("Left out because its result is damaged", done.damaged),
        ("Failed", done.failed),
    ):
        for point in lost:
            words = point_words(point.method, point.sweep)
            lines += [f"{word}: {words}. {point.message}", f"  {point.hint}"]
    return lines


def search_lines(done: Grid) -> list[str]:
    """Counts of a search's trials; [] for a grid that is no search."""
    search = done.search
    if search is None:
        return []
    sampler = search["sampler"]
    how = f"{sampler}, seed {search['seed']}"
    if search["pruner"] != "none":
        how += f", {search['pruner']}"
    counts = ", ".join(f"{search[state]} {state}" for state in ("finished", "pruned", "failed"))
    trials = search["trials"]
    return [f"{trials} trials ({how}): {counts}; {search['study']}"]


def _unlike_seeds(done: Grid) -> str | None:
    """A sentence if some points were trained with more seeds by an earlier command than by this one; else None."""
    seeds = [set(p.run.result["seeds"]) for p in done.points]
    all_seeds = set[int]().union(*seeds)
    if all(of_point == all_seeds for of_point in seeds):
        return None
    return (
        "Some configurations have more seeds than others, because earlier runs trained them. To compare all on equal "
        f"seeds: --seeds {seeds_text(all_seeds)}"
    )


def points_line(done: Grid) -> str:
    """A sentence with the number of points, and how many of them were stored before."""
    points = counted(len(done.points), "configuration")
    return f"{points}, {done.reused} of them stored already."


def grid_answer(done: Grid, sweeps: Sequence[str], *, verbose: bool = False) -> CommandResult:
    """The answer of a grid: a table of every configuration, the chosen or best one, and failed or damaged points.

    A grid that holds values out has one row per setting.
    """
    held_out = done.held_out()
    if held_out:
        return held_out_answer(done, held_out, verbose=verbose)
    best = done.best()
    trained_again = _retrained(done)
    # The column of the worst 10 % is left out if it only repeats the accuracy.
    with_worst = any(map(_differing_tail, done.points))
    by_score = ""
    if done.scored_by != "own":
        by_score = f" ({done.scored_by})"
    columns = ["method", *sweeps]
    if done.by_validation:
        columns.append("validation %")
    columns.append(f"accuracy %{by_score}")
    if trained_again:
        columns.append(RETRAINED)
    columns.append("std")
    if with_worst:
        columns.append("worst 10 %")
    columns += ["sends per round", "seconds"]
    rows = []
    for point in done.ranked():
        row = [point.method, *(point.sweep.get(key) for key in sweeps)]
        if done.by_validation:
            row.append(percent(done.figure(point)))
        row.append(percent(done.score_of(point).mean))
        if trained_again:
            row.append(trained_again.get(point.words, ""))
        row.append(percent(done.std_of(point)))
        if with_worst:
            row.append(percent(point.run.fairness.get("worst10")))
        sends = point.run.traffic["exact"]["per_client_round"]["up"]
        seconds = "-"
        if point.run.measured:
            trained = point.run.measured["seconds"]["train"]
            seconds = f"{trained:.2f}"
        rows.append([*row, f"{sends:,.0f}", seconds])
    # Points that failed are listed too, with the word "failed" in place of the first figure.
    # The other two cells are the method and "failed".
    blank = [""] * (len(columns) - len(sweeps) - 2)
    for lost in done.failed:
        settings = [lost.sweep.get(key) for key in sweeps]
        rows.append([lost.method, *settings, "failed", *blank])
    shown = TextTable("", columns, rows, right=columns[1:])
    values = " ".join(f"{key}={value}" for key, value in best.sweep.items())
    figures = f"{percent(done.score_of(best).mean)} %{by_score}"
    if done.by_validation:
        chosen_on = percent(done.figure(best))
        figures = f"{chosen_on} %, on test rows {figures}"
    if trained_again:
        figures += f", trained again on all rows {trained_again[best.words]} %"
    chosen_by = done.chosen_by[:1].upper() + done.chosen_by[1:]
    lines = [points_line(done), *search_lines(done)]
    lines.append(f"{chosen_by}: {best.method} {values}  {figures}")
    # Facts that make the choice less certain: ties, different kinds of models, different seeds.
    results = [point.run.result for point in done.points]
    cautions = (done.tie, unlike_tests(results), _unlike_seeds(done))
    lines += [sentence for sentence in cautions if sentence]
    lines += [
        f"{key} has no effect here: configurations that differ only in it give equal results."
        for key in done.unchanging
    ]
    lines += [_privacy_line(spent) for spent in done.privacy()]
    return _grid_result(done, lines, shown, verbose=verbose)


def _differing_tail(point: Point) -> bool:
    """Whether the accuracy of the worst tenth of the clients is known and differs from the mean.

    They are equal where one model has the same test rows for all clients.
    """
    tail = point.run.fairness.get("worst10")
    mean = point.run.result["accuracy"]["mean"]
    if tail is None or mean is None:
        return False
    return not math.isclose(tail, mean, abs_tol=1e-9)


def _privacy_line(spent: Mapping[str, Any]) -> str:
    """A sentence on the total privacy cost of a grid, from an entry of ``Grid.privacy``."""
    # Where the tighter accountant has no bound, the other one may have one.
    bounds = [spent[key] for key in ("epsilon_pld", "epsilon_rdp") if spent[key] is not None]
    epsilon = "no bound"
    if bounds:
        epsilon = f"epsilon {bounds[0]:.3g}"
    kind = "Privacy"
    if spent["simulation"]:
        kind = "Simulated privacy"
    models = f"{spent['points']} configurations"
    if spent["retrained"]:
        models += f" and {spent['retrained']} retrained"
    seeds = spent["seeds"]
    delta = spent["delta"]
    whose = f"{kind} of each {spent['unit']}"
    return f"{whose} over all {models} ({seeds} seeds): {epsilon} for delta {delta:g}."


@command("train", pick(TrainConfig), pick(PartitionConfig), pick(SchemeArguments), pick(RunOptions))
def train(
    observer: TerminalObserver,
    given: Given,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="METHOD",
            help="A method name, as listed by `fedcache methods list`.",
            show_default=False,
            autocompletion=complete_methods,
        ),
    ] = None,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    config: ConfigFile = None,
) -> CommandResult:
    """Train a federated method on cached features.

    Options that you leave out take the values of the method's paper; -v prints these values. Run the same command
    again to get the stored result, or to resume an interrupted run.

    Example: fedcache train fed3r --scheme dirichlet --clients 100 --alpha 0.1
    """
    check_config(config)
    observer.verbose = given["verbose"]
    file = read_file(config, observer.note)
    given = {**given, "method": one_value(name, given["method"], "--method")}
    resolved = train_config(file, given)
    partition = partition_config(file, given)
    if resolved.method is None:
        raise UsageError(
            "No method was given.",
            f"fedcache train METHOD, where METHOD is one of {', '.join(METHODS)}",
        )
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
    data = {**done.to_dict(), "model_bytes": bytes_of_models(done.path)}
    return CommandResult(data, answer_lines(done, verbose=given["verbose"]))


def train_run(
    config: TrainConfig,
    partition: PartitionConfig,
    home: Home,
    given: Given,
    observer: TerminalObserver,
    cluster: RayEngine | None,
) -> Run:
    """Train a run, or return its stored result. Raises the errors of ``runs.loop.train``."""
    from fedcache.runs.loop import train as run

    runs = given["runs"] or home.runs
    models = "all"
    if given["no_model"]:
        models = "none"
    keep_freed_memory()
    with ExitStack() as opened:
        # On a cluster, workers compute the clients; everything else happens in this process.
        if cluster is not None:
            training = cluster.training(config, partition, home, given["repartition"], observer)
            opened.enter_context(training)
        stop = opened.enter_context(stopped_by_signals(observer.note))
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
            help="Names of `fedcache methods list`, comma-separated or as several words.",
            show_default=False,
            autocompletion=complete_methods,
        ),
    ] = None,
    method: Methods = None,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    config: ConfigFile = None,
) -> CommandResult:
    """Train every combination of methods, sweeps and seeds; finished combinations are not trained again.

    Configurations that differ only in numbers are trained together if that is faster. Their results equal those of
    single runs up to rounding; --exact trains them one by one.

    Example: fedcache grid fedavg,fedprox --sweep lr=0.1,0.01 --seeds 0-2 --scheme dirichlet --alpha 0.1
    Example: fedcache grid --method fedpcl --sweep lr=0.01,0.001 --validation 0.2 --retrain
    Example: fedcache grid --method fed3r,fedavg,fedncm --by domain --hold-out each
    """
    options = configured(GridOptions, given)
    if options.ready == "list":
        return list_ready_grids()
    check_config(config)
    observer.verbose = given["verbose"]
    file = read_file(config, observer.note)
    preset = None
    if options.ready is not None:
        preset = presets.find_preset(options.ready)
        schemes = requested_schemes(options.sweep, given) or presets.scheme_of_file(file)
        note_preset(preset, schemes, observer)
        file = preset.merged_with(file, schemes)
    resolved = train_config(file, given)
    partition = partition_config(file, given)
    sweeps = swept_values(options.sweep, given, preset)
    home = Home.from_environment()
    if partition.options.get("hold_out") == EACH:
        sweeps, partition = hold_out_each(sweeps, partition, resolved, home, observer)
    # Methods of the command line override those of a predefined grid, which override the method of fedcache.toml.
    methods = split_list([*(names or ()), *(method or ())], "--method")
    if not methods and preset is not None:
        methods = preset.methods
    if not methods and resolved.method:
        methods = (resolved.method,)
    if not methods:
        raise UsageError(
            "No method was given.", "For example fedcache grid fedavg --sweep lr=0.1,0.01"
        )
    check_methods(methods)
    runs = given["runs"] or home.runs
    check_score(options.score)
    sampling = Sampling(options.sampler, options.trials, options.pruner)
    from fedcache.grids import train_grid as grids

    save_models = options.save_models
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
        sampling=sampling,
        exact=options.exact,
        save=SaveModels(save_models, given["save_clients"]),
        retrain=options.retrain,
        score=options.score,
    )
    if given["dry_run"]:
        return plan_answer(grids.grid_plan(request, observer))
    cluster = engine_of(engine, ray_address)
    keep_freed_memory()
    with (
        stopped_by_signals(observer.note) as stop,
        tracking(given["track"], home, runs, observer) as hooks,
    ):
        done = grids.train_points(
            request, jobs=options.jobs, engine=cluster, observer=observer, hooks=hooks, stop=stop
        )
    return grid_answer(done, list(sweeps), verbose=given["verbose"])


def list_ready_grids() -> CommandResult:
    """The answer of ``grid --ready list``: every predefined grid, in the order of their names."""
    grids = [presets.find_preset(name) for name in presets.preset_names()]
    rows = []
    for preset in grids:
        methods = ",".join(preset.methods)
        sweep = {key: ",".join(values) for key, values in preset.sweep.items()}
        words = point_words(methods, sweep)
        rows.append((preset.name, preset.title, preset.paper, words, str(preset.points)))
    shown = TextTable(
        "",
        ("name", "varies", "paper", "methods and sweeps", "configurations"),
        rows,
        right=("configurations",),
    )
    last = (
        "Run one:  fedcache grid --ready local-losses   (your methods, sweeps and options replace those of "
        "the predefined grid)"
    )
    return CommandResult(
        {"grids": [g.to_dict() for g in grids]}, [last], renderables=[shown], listing=True
    )


def requested_schemes(sweep: Sequence[str] | None, given: Given) -> tuple[str, ...]:
    """The partition schemes that the command line names or sweeps."""
    swept = pairs(sweep, "--sweep").get("scheme")
    if swept:
        return split_list([swept], "--sweep scheme")
    if given["scheme"]:
        return (given["scheme"],)
    return ()


def note_preset(
    preset: presets.GridPreset, schemes: Sequence[str], observer: TerminalObserver
) -> None:
    """Show which arguments of a predefined grid the requested schemes do not take, and then the notes of the grid."""
    left_out = preset.unused_arguments(schemes)
    if left_out:
        own_schemes = " or ".join(s for s in preset.schemes if s not in schemes)
        observer.note(
            f"These arguments of the predefined grid are left out, because only the scheme {own_schemes} takes them: "
            f"{', '.join(left_out)}."
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
    """Replace ``--hold-out each`` by a sweep over the values of the column ``by``; returns sweeps and partition.

    Raises UsageError for a column with one value, and if hold_out is also swept; StoreError if there is no store.
    """
    by = str(partition.options.get("by", "domain"))
    if "hold_out" in sweeps:
        raise UsageError(
            "--hold-out each and --sweep hold_out are both given.", "Leave one of them out."
        )
    min_rows = partition.options.get("min_rows", 1)
    values = every_value(by, resolved, home, min_rows=min_rows, observer=observer)
    options = {**partition.options, "by": by}
    options.pop("hold_out", None)
    return {**sweeps, "hold_out": values}, replace(partition, options=options)


def swept_values(
    sweep: Sequence[str] | None, given: Given, preset: presets.GridPreset | None
) -> dict[str, tuple[str, ...]]:
    """Each swept key and its values; values of ``--sweep`` replace those of a predefined grid.

    Raises UsageError for a key that is also in ``--set``.
    """
    swept = sweep_lists(sweep)
    # A hyperparameter may be swept as lr or as set.lr.
    names = {key.removeprefix("set.") for key in swept}
    both = sorted(names & pairs(given["set"], "--set").keys())
    if both:
        raise UsageError(f"{', '.join(both)} is in --set and in --sweep.", "Leave one of them out.")
    if preset is not None:
        swept = {**preset.sweep, **swept}
    return swept
