"""``fedcache reproduce``: measures the values of published tables and figures, and shows both side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.commands import frozen_bench
from fedcache.commands.options import (
    EngineName,
    Given,
    RayAddress,
    RunsDirectory,
    command,
    engine_of,
    flags_of,
    pairs,
    pick,
)
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable, plain_line
from fedcache.config import ExtractConfig, Home, option, option_value
from fedcache.errors import UsageError, shell_word, unknown
from fedcache.parsing import Facts, without_codes
from fedcache.process import keep_freed_memory, stopped_by_signals
from fedcache.reproduce import planning
from fedcache.reproduce.frozen_bench.study import NAME as FROZEN_BENCH
from fedcache.reproduce.planning import Options, RequirementCheck
from fedcache.store.lock import need_folder, write_output

PROTOCOL = "Protocol"

What = Annotated[
    str,
    typer.Argument(help="list, info, or the name of a table or figure to reproduce."),
]
Which = Annotated[str | None, typer.Argument(help="Name of a table or figure, after info.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Also write the report to a Markdown file.")
]
Add = Annotated[
    list[Path] | None,
    typer.Option(
        "--add",
        help="For frozen-bench: also rank the results in this JSON file, which an earlier -o wrote. Repeatable. "
        "If --on is not given, fedcache only ranks these files and trains nothing.",
    ),
]


@dataclass(frozen=True)
class DepartureOptions:
    """Options that make the run of a table differ from the paper."""

    on: tuple[str, ...] = option(
        (),
        "Run the protocol on this substitute dataset instead of the paper's. Repeatable for frozen-bench.",
        PROTOCOL,
        whole=True,
        default_text="the dataset of the paper",
    )
    backbones: tuple[str, ...] = option(
        (),
        "Use these backbones instead of the paper's, in the same order. `proxy` means three MobileNets.",
        PROTOCOL,
        short="-b",
        default_text="the backbones of the paper",
    )
    rounds: int | None = option(
        None,
        "Train every row of the table for this many rounds (a deviation from the paper).",
        PROTOCOL,
        short="-r",
        minimum=1,
        default_text="the rounds of the paper",
    )
    seeds: str | None = option(
        None,
        "Use these seeds for every row of the table, e.g. 0,1,2 or 0-4 (a deviation from the paper).",
        PROTOCOL,
        default_text="as many seeds as in the paper",
    )
    limit: int | None = option(
        None,
        "Use only this many images, evenly spaced over the dataset (a deviation from the paper).",
        PROTOCOL,
        minimum=1,
        default_text="all images",
    )
    only: tuple[str, ...] = option(
        (),
        "LABEL=VALUE: reproduce only the rows of the table whose LABEL is VALUE, such as alpha=0.1 "
        "(frozen-bench has the labels data, backbone, partition and treatment). Repeatable.",
        PROTOCOL,
        whole=True,
        default_text="all rows",
    )


def _name(what: str, **_others: Any) -> str:
    """The name of the command in the JSON output; it depends only on ``what``."""
    if what in ("list", "info"):
        return f"reproduce {what}"
    return "reproduce"


@command(_name, pick(DepartureOptions), pick(ExtractConfig, "recipe", "weights", "data", "device"))
def reproduce(
    observer: TerminalObserver,
    what: What,
    given: Given,
    name: Which = None,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    runs: RunsDirectory = None,
    out: Out = None,
    add: Add = None,
) -> CommandResult:
    """Reproduce a table or figure of a paper: prints the published value, the measured value and the difference.

    `list` shows which tables can run now and what is missing; `info NAME` prints the protocol and every published
    number. With --on or --backbones, the same protocol runs on other data or backbones, marked as a substitute.
    frozen-bench compares all methods on frozen features, all tuned on validation rows.

    Example: fedcache reproduce fedpcl-table5 --on digits --backbones glyph-clip
    """
    if what in ("list", "info"):
        # Options that only a run has. ``engine`` is never None: it was given if it is not the default.
        run_options = {"ray_address": ray_address, "runs": runs, "out": out, "add": add}
        if engine != "local":
            run_options = {"engine": engine, **run_options}
        refuse_options(what, {**given, **run_options})
    if what == "list":
        if name is not None:
            raise UsageError(
                f"list does not take a name, got {name!r}.",
                f"fedcache reproduce info {shell_word(name)}",
            )
        return list_entries()
    if what == "info":
        if name is None:
            raise UsageError(
                "info needs a name.", "For example fedcache reproduce info fedpcl-table2"
            )
        if name == FROZEN_BENCH:
            return frozen_bench.describe_bench()
        return describe_entry(name)
    known = (*planning.names(), FROZEN_BENCH)
    if what not in known:
        raise unknown("table or figure", what, known, hint="fedcache reproduce list   shows all")
    if name is not None:
        raise UsageError(
            f"Two names were given: {what} and {name}.", f"fedcache reproduce {shell_word(what)}"
        )
    if out is not None:
        need_folder(out)
        if out.suffix == ".json":
            page = shell_word(out.with_suffix(".md"))
            raise UsageError(
                f"--out {out} is a JSON file, but the report is Markdown.",
                f"For example --out {page}",
            )
    flags = {**flags_of(DepartureOptions, given), **flags_of(ExtractConfig, given)}
    # --on and --only are converted separately: the study takes them as arguments, a table as fields of ``Options``.
    on = flags.pop("on", ())
    only = only_labels(given["only"])
    device = given["device"] or "auto"
    # The study of frozen features, which is no table of a paper.
    if what == FROZEN_BENCH:
        if engine != "local":
            raise UsageError(
                f"{what} trains in this process, not on {engine}.", "Leave --engine out."
            )
        # ``flags`` may hold the raw values of --only. ``chosen_study`` applies --only, so ``Options`` gets none.
        flags |= {"only": {}, "device": device}
        options = Options(**flags)
        results = add or []
        study = frozen_bench.chosen_study(on, only, options, results)
        return frozen_bench.run_bench(study, options, runs, out, results, observer)
    if add:
        raise UsageError(f"{what} takes no --add, only {FROZEN_BENCH} does.", "Leave --add out.")
    if len(on) > 1:
        dataset = shell_word(on[0])
        raise UsageError(
            f"{what} runs on one dataset, got {len(on)}.",
            f"fedcache reproduce {shell_word(what)} --on {dataset}",
        )
    # A dataset to use instead of the paper's.
    substitute = None
    if on:
        substitute = on[0]
    flags |= {"on": substitute, "only": only, "device": device}
    cluster = engine_of(engine, ray_address)
    return run_entry(what, Options(**flags), runs, out, observer, cluster)


def refuse_options(what: str, given: Facts) -> None:
    """Refuse options of a run for ``list`` and ``info``, which would ignore them. Raises UsageError."""
    options = []
    for name, value in given.items():
        # None and [] mean that the option was not given.
        if value not in (None, []):
            option = name.replace("_", "-")
            options.append(f"--{option}")
    if options:
        named = ", ".join(options)
        raise UsageError(
            f"reproduce {what} trains nothing, so it does not take {named}.",
            "Leave these options out, or give the name of a table or figure:  fedcache reproduce NAME",
        )


def only_labels(values: list[str] | None) -> dict[str, tuple[str, ...]]:
    """Label of ``--only`` -> its allowed values."""
    labels: dict[str, tuple[str, ...]] = {}
    for value in values or ():
        # One LABEL=VALUE at a time, because ``pairs`` refuses a repeated label.
        for label, allowed in pairs([value], "--only").items():
            labels[label] = (*labels.get(label, ()), allowed)
    return labels


def list_entries() -> CommandResult:
    """The answer of ``reproduce list``: every entry, and what it lacks on this machine."""
    checker = RequirementCheck(Home.from_environment())
    entries = []
    rows = []
    # (kind, name) of a requirement that is missing -> (reason, command that gets it).
    commands = {}
    for entry in planning.entries():
        per_cell = [checker.missing(entry, cell) for cell in entry.cells]
        ready = sum(not needs for needs in per_cell)
        missing = checker.all_missing(entry)
        status = "ready"
        if missing:
            kinds = ", ".join(dict.fromkeys(n.kind for n in missing))
            status = f"missing {kinds}"
        if missing and ready:
            status = f"{ready} of {len(per_cell)} rows ready, {status}"
        # Entries may lack the same requirement, so the second table names each one once. The details that the messages
        # of ``extract.backbones.weights`` end with are cut off.
        for need in missing:
            why = need.why.split(" Looked at:")[0]
            command = need.command.split(" Ready now:")[0]
            commands[need.kind, need.name] = (why, command)
        entries.append(
            {
                "name": entry.name,
                "title": entry.title,
                "paper": entry.paper,
                "kind": entry.kind,
                "ready": not missing,
                "status": status,
                "cells": len(per_cell),
                "ready_cells": ready,
                "missing": [n.to_dict() for n in missing],
                "command": f"fedcache reproduce {shell_word(entry.name)}",
            }
        )
        lacking = ", ".join(n.name for n in missing)
        rows.append((entry.name, entry.title, f"{ready}/{len(per_cell)}", status, lacking))
    shown = [
        TextTable("", ("name", "description", "rows", "status", "missing"), rows, right=("rows",))
    ]
    # One row for each requirement: kind (a column without a heading), name, reason, command.
    if commands:
        lines = [(*requirement, *answer) for requirement, answer in commands.items()]
        shown.append(TextTable("How to get it", ("", "missing", "found", "command"), lines))
    last = "Without the paper's data or weights:  fedcache reproduce fedpcl-table5 --on digits --backbones glyph-clip"
    return CommandResult(
        {"entries": entries}, [last, frozen_bench.list_sentence()], renderables=shown, listing=True
    )


def describe_entry(name: str) -> CommandResult:
    """The answer of ``reproduce info``: the protocol, the settings and every printed number of an entry."""
    from fedcache.reproduce import metrics, render

    entry = planning.entry(name)
    missing = RequirementCheck(Home.from_environment()).all_missing(entry)
    data = render.entry_data(entry)
    data["missing"] = [n.to_dict() for n in missing]
    lines = [f"{entry.name}: {entry.title}", entry.paper, entry.setting]
    if entry.roles():
        roles = ", ".join(entry.roles())
        lines.append(f"Backbones, in the order of --backbones: {roles}.")
    lines += [f"Not given: {without_codes(text)}." for text in entry.not_given]
    lines += [f"Note: {without_codes(text)}" for text in entry.notes]
    for need in missing:
        thing = f"{need.kind} {need.name}"
        lines.append(f"Missing {thing}:  {need.command}")
    if not missing:
        lines.append("All data and weights are available.")
    # One row for each printed number, and one for the protocol of each cell. Rows begin with the cell's labels.
    printed = []
    protocols = []
    for cell in entry.cells:
        for metric, value in zip(cell.metrics, cell.printed, strict=True):
            shown_value = metrics.show_printed(value, metric)
            printed.append((*cell.at, metrics.show_metric(metric), shown_value))
        settings = [f"{key}={_plain(held)}" for key, held in render.cell_data(cell).items()]
        protocols.append((*cell.at, "  ".join(settings)))
    shown = [
        TextTable("Printed", (*entry.labels, "metric", "printed"), printed, right=("printed",)),
        TextTable("Protocol of each row", (*entry.labels, "complete settings"), protocols),
    ]
    return CommandResult(data, lines, renderables=shown)


def _plain(value: Any) -> str:
    """A setting as text, with true and false as TOML spells them."""
    if not isinstance(value, dict):
        return option_value(value)
    inner = ", ".join(f"{key} {_plain(held)}" for key, held in value.items())
    return "{" + inner + "}"


def run_entry(
    name: str,
    options: Any,
    runs: Path | None,
    out: Path | None,
    observer: TerminalObserver,
    engine: Any,
) -> CommandResult:
    """Run an entry and show its result."""
    from fedcache.reproduce import render, runner

    keep_freed_memory()
    with stopped_by_signals(observer.note) as stop:
        report = runner.reproduce(
            planning.entry(name),
            Home.from_environment(),
            options,
            runs=runs,
            observer=observer,
            stop=stop,
            engine=engine,
        )
    if out is not None:
        write_output(out, render.markdown(report).encode())
    # The column "got" and all columns after it hold numbers.
    columns = render.columns(report)
    right = columns[columns.index("got") :]
    shown = TextTable(render.title(report), columns, render.rows(report), right=right)
    below = [without_codes(sentence) for sentence in render.sentences(report)]
    if out is not None:
        below.append(str(out))
    return CommandResult(render.report_data(report), renderables=[shown, *map(plain_line, below)])
