"""Measurement of the cells of an entry, with the results next to the printed values.

Each cell and seed is one ordinary run under ``$FEDCACHE_HOME/runs``: a second call reads stored runs, a killed call
continues, and every metric has a std over seeds. A cell that was not run is never shown with a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedcache.config import Home, PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError, MachineError, shell_word
from fedcache.extract import datasets
from fedcache.extract.planning.plan import memory_of
from fedcache.process import Stop
from fedcache.progress import Observer, Silent
from fedcache.reproduce.cell_kinds import MEASURES
from fedcache.reproduce.metrics import (
    AgainstPrinted,
    Measurement,
    Value,
    compare,
    measure,
    over_seeds,
    show_measured,
    show_metric,
    subtract,
)
from fedcache.reproduce.planning import (
    Options,
    PlannedCell,
    Requirement,
    RequirementCheck,
    plan,
)
from fedcache.reproduce.prepare import (
    ReproductionEngine,
    Workbench,
    partition_cell,
    short_batches,
    with_known_domains,
)
from fedcache.reproduce.registry import READS, Difference, PaperCell, PaperTable
from fedcache.runs.loop import train
from fedcache.runs.spec import parse_seeds

ENDS_ALL = (Exit.INTERRUPTED, Exit.BUG, Exit.CORRUPT)
"""Exit codes of errors that end a reproduction. After other errors, it continues with the next cell."""


@dataclass
class ReproducedCell:
    """One row of a report.

    Attributes:
        planned: the cell of the paper and the one that was run.
        measured: metric -> its measurement; empty when the cell was not run.
        departures: sentences.
        why_not: why it was not run; "" when it was.
        runs: directories of its runs, one per seed.
        reused: how many of these runs were stored already.
        fidelity: exact | cached_views | approx, "" where nothing is trained.
        same_as: in a proxy, labels of the earlier row that is the same measurement as this one; () for none. Two rows
            become the same measurement if they differ only in something that the proxy replaces.
    """

    planned: PlannedCell
    measured: dict[str, Measurement] = field(default_factory=dict)
    departures: list[str] = field(default_factory=list)
    why_not: str = ""
    runs: list[Path] = field(default_factory=list)
    reused: int = 0
    fidelity: str = ""
    same_as: tuple[str, ...] = ()

    @property
    def cell(self) -> PaperCell:
        """The cell as it is in the paper."""
        return self.planned.paper


@dataclass
class Reproduction:
    """Answer of ``reproduce NAME``.

    Attributes:
        entry: of the registry.
        proxy: whether data or backbones are not the paper's.
        on: the dataset spec that replaces the paper's, or None.
        lines: one per cell, in the registry's order.
        departures: sentences that are true of every line.
    """

    entry: PaperTable
    proxy: bool
    on: str | None
    lines: list[ReproducedCell]
    departures: list[str]

    def compared(self, line: ReproducedCell, index: int) -> AgainstPrinted:
        """Got minus printed of one metric of a line."""
        metric = line.cell.metrics[index]
        printed = line.cell.printed[index]
        return compare(printed, self.entry.printed_seeds, line.measured.get(metric, Measurement()))

    def difference(self, difference: Difference) -> Measurement:
        """The measured difference of two cells."""
        # If lines have equal labels, the first one counts.
        found = {line.cell.at: line.measured for line in reversed(self.lines)}
        if difference.of not in found or difference.minus not in found:
            return Measurement()
        a = found[difference.of].get(difference.metric, Measurement())
        b = found[difference.minus].get(difference.metric, Measurement())
        return subtract(a, b)


def reproduce(
    entry: PaperTable,
    home: Home,
    options: Options | None = None,
    *,
    runs: Path | None = None,
    observer: Observer | None = None,
    stop: Stop | None = None,
    engine: ReproductionEngine | None = None,
) -> Reproduction:
    """Run every cell of an entry that can be run here.

    Args:
        entry: from ``registry.entry``.
        home: where stores, runs, weights and data are.
        options: changes of the paper's protocol.
        runs: directory of results instead of ``home.runs``.
        observer: receives notes, warnings and progress.
        stop: set by a signal handler; honoured where no finished round is lost.
        engine: a cluster that extracts and trains, to the same bits.

    Raises:
        UsageError for options that do not fit; MachineError when no cell can be run, naming what is missing;
            StoppedError after a stop, resumable; and the first cell's error if every cell failed.
    """
    options = options or Options()
    observer = observer or Silent()
    stop = stop or Stop()
    check = RequirementCheck(home, options.weights, options.data)
    # Each planned cell with the requirements that it lacks.
    todo = []
    for p in plan(entry, options, check):
        # Files that extraction fetches are not missing, and data given with --on is checked when it is opened.
        lack = [n for n in check.missing(entry, p.cell) if not n.fetched]
        if options.on is not None:
            lack = [n for n in lack if n.kind != "data"]
        todo.append((p, lack))
    if options.on is not None:  # a word that is no dataset is refused at once
        context = datasets.Context(memory_of(home), check.roots, home.data)
        datasets.peek(options.on, context)
    ready = [p for p, lack in todo if not p.refused and not lack]
    if not ready:
        raise _nothing_can_run(entry, todo)
    pictures = home.root / "reproduce" / entry.name
    workbench = Workbench(home, options, observer, stop, pictures, runs or home.runs, engine)
    if engine is not None and entry.kind == "runs":
        _train_on_cluster(ready, workbench, engine)
    lines: list[ReproducedCell] = []
    errors = []
    for number, (p, lack) in enumerate(todo, 1):
        labels = ", ".join(p.paper.at)
        where = f"{number} of {len(todo)}: {labels}"
        why_not = p.refused
        if lack and why_not is None:
            missing = ", ".join(f"{n.kind} {n.name}" for n in lack)
            why_not = f"missing {missing}"
        if why_not is None:
            try:
                # In a proxy, several cells may be the same measurement, which is then made only once.
                twin = None
                if options.proxy:
                    twin = _earlier_twin(lines, p.cell)
                line = _measure_cell(entry, p, workbench, twin)
            except FedcacheError as error:
                if error.code in ENDS_ALL:
                    raise
                errors.append(error)
                why_not = error.message
        if why_not is not None:
            lines.append(ReproducedCell(p, why_not=why_not))
            observer.note(f"{where}: not run, {why_not}")
            continue
        # The cell was measured: every other case has a ``why_not``.
        lines.append(line)
        metric = line.cell.metrics[0]
        stored = ""
        if line.reused:
            runs_of_cell = len(line.runs)
            stored = f" ({line.reused} of {runs_of_cell} runs were stored already)"
        measured = show_measured(line.measured[metric], metric)
        observer.note(f"{where}: {show_metric(metric)} {measured}{stored}")
    if errors and not any(line.measured for line in lines):
        raise errors[0]
    return Reproduction(entry, options.proxy, options.on, lines, _take_out_shared(lines))


def _nothing_can_run(
    entry: PaperTable, todo: Sequence[tuple[PlannedCell, Sequence[Requirement]]]
) -> FedcacheError:
    """The error of an entry without a cell that can be run."""
    # Each missing requirement is named once, and so is the command that gets it.
    needs = list(dict.fromkeys(need for _, lack in todo for need in lack))
    missing = "; ".join(f"{n.kind} {n.name}" for n in needs)
    if not missing:
        missing = next(p.refused or "" for p, _ in todo)
    commands = []
    for need in needs:
        # The list of backbones that are ready is left out.
        command = need.command.split(" Ready now:")[0]
        if need.command and command not in commands:
            commands.append(command)
    # If a cell lacks only weights or data, its protocol can be tried on data that are available offline.
    kinds = [{n.kind for n in lack} for _, lack in todo if lack]
    if any(of_cell <= {"weights", "data"} for of_cell in kinds):
        chosen = ""
        if entry.roles():
            chosen = " --backbones glyph-clip"
        commands.append(
            f"To run the same protocol on available data:  fedcache reproduce {shell_word(entry.name)} "
            f"--on digits{chosen}"
        )
    return MachineError(
        f"No row of {entry.name} can be run on this machine. Missing: {missing}.",
        "\n".join(commands) or f"fedcache reproduce info {shell_word(entry.name)}",
    )


def _earlier_twin(lines: Sequence[ReproducedCell], cell: PaperCell) -> ReproducedCell | None:
    """The first row that was run and is the same measurement as ``cell``: only labels and printed values differ."""
    measurement = replace(cell, labels={}, printed=())
    for line in lines:
        of_line = replace(line.planned.cell, labels={}, printed=())
        if of_line == measurement and not line.why_not:
            return line
    return None


def _measure_cell(
    entry: PaperTable, planned: PlannedCell, workbench: Workbench, twin: ReproducedCell | None
) -> ReproducedCell:
    """Measure one cell. ``twin`` is an earlier row that is the same measurement, or None.

    The runs of a twin are read again. If its values do not come from runs, they are copied or computed again.
    """
    line = ReproducedCell(planned, departures=list(planned.departures))
    if twin is not None:
        line.same_as = twin.cell.at
    if entry.kind == "runs":
        _train(line, workbench)
        return line
    # Only kinds that read data take long, so only their values are copied. Others are computed again.
    if twin is not None and "data" in READS[entry.kind]:
        line.departures += [d for d in twin.departures if d not in twin.planned.departures]
        line.measured = dict(twin.measured)
        return line
    values, departures = MEASURES[entry.kind](planned.cell, workbench)
    line.departures += departures
    line.measured = {m: over_seeds([values.get(m)]) for m in planned.cell.metrics}
    return line


RunRequest = tuple[TrainConfig, PartitionConfig]
"""Configuration and partition of an ordinary run of a cell, which is one seed."""


def _requests_of(planned: PlannedCell, workbench: Workbench) -> tuple[list[RunRequest], list[str]]:
    """The runs of a cell, and the departures that preparing them showed."""
    proxy = workbench.options.proxy
    features = workbench.features(planned.cell)
    cell, departures = with_known_domains(planned.cell, features.columns, proxy=proxy)
    requests = []
    # Every seed has its own partition, so every seed is a run of its own.
    for seed in parse_seeds(cell.seeds):
        assigned = partition_cell(cell, features.columns, seed, proxy=proxy)
        participation, fewer = _participation(cell, len(assigned.partition.clients), proxy)
        settings, short = short_batches(cell, assigned.partition, proxy=proxy)
        departures += [*assigned.departures, *fewer, *short]
        options = dict(assigned.args)
        if cell.domain:
            options["domain"] = cell.domain
        config = TrainConfig(
            method=cell.method,
            preset=cell.preset,
            store=str(features.path),
            backbones=features.names,
            rounds=cell.rounds,
            participation=participation,
            seeds=str(seed),
            eval_every=cell.eval_every,
            set=settings,
        )
        # The partition takes the number of clients as a field of its own.
        clients = options.pop("clients", None)
        requests.append((config, PartitionConfig(cell.scheme, clients, seed, options)))
    return requests, departures


def _train_on_cluster(
    planned: Sequence[PlannedCell], workbench: Workbench, engine: ReproductionEngine
) -> None:
    """Make the runs of all cells on a cluster. Measuring the cells later finds these runs.

    A run that fails here fails again when its cell is measured, and is reported then.
    """
    requests = []
    for one in planned:
        try:
            of_cell, _ = _requests_of(one, workbench)
            requests += [request for request in of_cell if request not in requests]
        except FedcacheError as error:
            if error.code in ENDS_ALL:
                raise
    if requests:
        workbench.made |= engine.run_configurations(
            requests, workbench.home, workbench.runs, workbench.observer, workbench.halt
        )


def _train(line: ReproducedCell, workbench: Workbench) -> None:
    """One ordinary run for each seed, each with its own partition."""
    requests, departures = _requests_of(line.planned, workbench)
    values: dict[str, list[Value | None]] = {m: [] for m in line.planned.cell.metrics}
    for config, partition in requests:
        done = train(
            config,
            workbench.home,
            partition=partition,
            runs=workbench.runs,
            extract=False,
            observer=workbench.quiet,
            stop=workbench.halt,
        )
        line.runs.append(done.path)
        # Runs that this command made, here for an earlier row or on a cluster, do not count as reused.
        if done.reused:
            line.reused += done.path not in workbench.made
        else:
            workbench.made.add(done.path)
        line.fidelity = str(done.result["fidelity"])
        departures += _feat_post(line.cell, done.result)
        for metric in values:
            values[metric].append(measure(metric, done))
    line.departures = list(dict.fromkeys([*line.departures, *departures]))
    line.measured = {metric: over_seeds(of_seeds) for metric, of_seeds in values.items()}


def _participation(cell: PaperCell, clients: int, proxy: bool) -> tuple[str | None, list[str]]:
    """Clients per round, ``all`` if a scaled-down proxy has fewer; and the departure."""
    requested = cell.participation
    if not proxy or requested is None or not requested.isdigit():
        return requested, []
    if int(requested) > clients:
        return "all", [f"all {clients} clients per round instead of {requested}"]
    return requested, []


def _feat_post(paper: PaperCell, result: dict[str, Any]) -> list[str]:
    """The departure of an official run whose features are not signs.

    The released code of FedPCL replaces the features of its ResNets by their signs (D-01).
    """
    feat_post = result["hyperparameters"].get("feat_post")
    only_resnets = all(b.startswith("resnet18-") for b in paper.backbones)
    if paper.preset == "official" and only_resnets and feat_post not in ("sign", None):
        return [f"feat_post `{feat_post}` instead of `sign`"]
    return []


def _take_out_shared(lines: Sequence[ReproducedCell]) -> list[str]:
    """The departures that all measured lines share. They are removed from the lines."""
    measured = [line for line in lines if not line.why_not]
    if not measured:
        return []
    common = []
    for departure in measured[0].departures:
        if all(departure in line.departures for line in measured):
            common.append(departure)
    for line in measured:
        line.departures = [d for d in line.departures if d not in common]
    return common
