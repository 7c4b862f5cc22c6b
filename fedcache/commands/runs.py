"""``fedcache runs``: lists, shows, compares, tags and removes stored results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.commands.options import (
    RunQuery,
    RunsDirectory,
    command,
    complete_datasets,
    complete_methods,
    complete_runs,
    complete_tags,
    complete_words,
    runs_directory,
    split_list,
)
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.errors import UsageError, shell_word
from fedcache.parsing import Facts, counted
from fedcache.progress import percent
from fedcache.report.describe_run import (
    STATES,
    RunFilter,
    begun,
    different,
    figures_of,
    files_of,
    finished_run,
    listed,
    set_apart,
    settings_of,
    state_of,
)
from fedcache.report.find_runs import (
    HeldOutGroup,
    StoredRun,
    every_run,
    mean_over_values,
    setting_name,
)
from fedcache.runs.directory import check_tag, command_again, tags_of, write_tags
from fedcache.runs.garbage import partitions_named, plan_removal, remove_runs
from fedcache.runs.run import sites_words

runs = typer.Typer(
    name="runs",
    help="Stored results: list, show, compare settings, tag, remove.",
    no_args_is_help=True,
)

RUN_HELP = (
    "Run: a directory, a name in `fedcache runs list` or its first letters, tag:NAME, method:NAME, dataset:NAME "
    "or partition:NAME."
)
RunName = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_runs)]
RunNames = Annotated[
    list[str], typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_runs)
]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking for confirmation.")]
SHARES = (
    "accuracy",
    "std over seeds",
    "standard error of drawn clients",
    "client-mean",
    "pooled",
    "validation",
    "zero-shot",
    "macro-F1",
    "worst 10 %",
)
"""Figures that are fractions; they are shown in per cent."""
TOTALS = ("bytes up", "bytes down", "seconds")
"""Figures that are sums over the seeds."""


@command("runs list", within=runs)
def runs_list(
    observer: TerminalObserver,
    names: RunQuery = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Only runs of these methods, or of a pattern such as fed*.",
            autocompletion=complete_methods,
        ),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            "-d",
            help="Only runs on these datasets, or on a pattern such as digits*.",
            autocompletion=complete_datasets,
        ),
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(help="Only runs with one of these tags.", autocompletion=complete_tags),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{' | '.join(STATES)}, comma-separated.",
            autocompletion=complete_words(STATES),
        ),
    ] = None,
    root: RunsDirectory = None,
) -> CommandResult:
    """List all runs, oldest first, with their accuracy and the settings that differ between runs of one method.

    Example: fedcache runs list --method fed3r,fedavg --state finished
    """
    condition = RunFilter(
        split_list(method, "--method"),
        split_list(dataset, "--dataset"),
        split_list(tag, "--tag"),
        split_list(state, "--state"),
    )
    folder = runs_directory(root)
    matched = listed(names or [], folder, condition)
    for omitted in matched.problems:
        observer.warn(f"{omitted.sentence} {omitted.hint}")
    for problem in matched.tags_lost:
        observer.warn(problem)
    shown = []
    lines = []
    if matched.entries:
        shown.append(_table_of_runs(matched.entries))
    elif every_run([], folder):
        lines = ["No run matches.", "fedcache runs list"]
    else:
        lines = [f"No result under {folder} yet.", "fedcache train fed3r"]
    left_out = [{"path": str(e.path), "why": e.why, "hint": e.hint} for e in matched.problems]
    data = {
        "entries": matched.entries,
        "left_out": left_out,
        "held_out": [_means(group) for group in matched.groups],
    }
    shown += [_means_table(group) for group in matched.groups]
    return CommandResult(data, lines, renderables=shown, listing=True)


def _table_of_runs(entries: Sequence[Facts]) -> TextTable:
    """One row for each run. On a terminal, columns in which all runs have the usual value are left out."""
    cells = [_run_cells(entry) for entry in entries]
    columns = list(cells[0])
    # A script always gets the same columns. The usual value of a column that is not named below is None, an empty cell.
    if sys.stdout.isatty():
        usual = {"state": "finished", "differs in": "", "metric": "measured", "tags": ""}
        columns = [name for name in columns if {row[name] for row in cells} != {usual.get(name)}]
    rows = [[row[name] for name in columns] for row in cells]
    return TextTable("", columns, rows, right=("rounds", "seeds", "accuracy %", "model MB"))


def _run_cells(entry: Facts) -> Facts:
    """The row of a run: name of a column -> cell."""
    partition = entry["partition"]
    held_out = ",".join(entry["hold_out"])
    if held_out:
        partition = f"{partition}, hold_out={held_out}"
    metric = "measured"
    if entry["claimed"]:
        metric = f"reported by {entry['sites']}"
    megabytes = None
    if entry["model_bytes"] is not None:
        megabytes = f"{entry['model_bytes'] / 1e6:,.2f}"
    return {
        "run": entry["name"],
        "state": entry["state"],
        "method": entry["method"],
        "differs in": entry["differs"],
        "dataset": entry["dataset"],
        "backbones": " + ".join(entry["backbones"]),
        "partition": partition,
        "rounds": entry["rounds"],
        "seeds": len(entry["seeds"]) or None,
        "accuracy %": percent(entry["accuracy"]),
        "metric": metric,
        "model MB": megabytes,
        "tags": " ".join(entry["tags"]),
    }


def _means(group: HeldOutGroup) -> Facts:
    """A group of leave-one-out runs as plain JSON values; accuracies are fractions."""
    rows = []
    for name, accuracy in group.accuracies().items():
        mean = mean_over_values(accuracy)
        rows.append({"name": name, "accuracy": accuracy, "mean": mean})
    return {
        "title": group.title,
        "column": group.column,
        "values": list(group.values),
        "rows": rows,
    }


def _means_table(group: HeldOutGroup) -> TextTable:
    """Accuracy of each method on each held-out value, and its mean over them."""
    rows = []
    for name, accuracy in group.accuracies().items():
        mean = percent(mean_over_values(accuracy))
        rows.append((name, *map(percent, accuracy.values()), mean))
    columns = ("run", *group.values, "mean")
    return TextTable(f"{group.title}: accuracy %", columns, rows, right=columns[1:])


@command("runs show", within=runs)
def runs_show(name: RunName, root: RunsDirectory = None) -> CommandResult:
    """Show one finished run: its changed settings, its results and its files.

    Example: fedcache runs show 3f9c
    """
    entry = finished_run(name, runs_directory(root))
    r = entry.result
    changed = set_apart(entry)
    figures = figures_of(entry)
    files = files_of(entry.path)
    tags = tags_of(entry.path)
    dataset, _, partition = setting_name(entry).partition(", ")
    clients = r["partition"]["clients"]
    preset = r["preset"]
    fidelity = r["fidelity"]
    rounds = r["rounds"]
    execution = f"{r['execution']}, {r['dtype']}"
    # The facts are shown in this order; --json has them under the same names.
    facts = {
        "run": entry.digest,
        "state": state_of(entry),
        "tags": " ".join(tags) or "none",
        "begun": begun(entry.path),
        "method": f"{entry.method} ({preset}, {fidelity})",
        "dataset": dataset,
        "backbones": " + ".join(r["arrays"]),
        "partition": f"{partition}: {clients} clients",
        "rounds": f"{rounds}, {r['participation']} clients per round",
        "seeds": " ".join(map(str, r["seeds"])),
        "computed": f"{execution}, {r['device']}",
        "directory": str(entry.path),
        "again": command_again(entry.path),
    }
    if "federation" in r:
        facts["sites"] = sites_words(r)
    data = {
        **facts,
        "path": str(entry.path),
        "tags": list(tags),
        "settings": changed,
        "figures": figures,
        "files": [{"name": name, "bytes": size} for name, size in files],
    }
    lines = [f"{name:<11} {value}" for name, value in facts.items()]
    # Settings that are the method's own or the default are not shown.
    tables = []
    if changed:
        cells = [tuple(setting.values()) for setting in changed]
        tables.append(TextTable("changed settings", ("setting", "value", "default"), cells))
    else:
        lines.append("settings    all at the defaults of the method")
    # Figures that the run does not have are left out.
    known = []
    seeds = len(r["seeds"])
    for name, value in figures.items():
        if value is None:
            continue
        label = name
        if name in TOTALS and seeds > 1:
            label = f"{name}, {seeds} seeds"
        known.append((label, _figure(name, value)))
    tables.append(TextTable("figures", ("figure", "value"), known, right=("value",)))
    sizes = [(name, f"{size:,}") for name, size in files]
    tables.append(TextTable("files", ("file", "bytes"), sizes, right=("bytes",)))
    return CommandResult(data, lines, renderables=tables)


@command("runs diff", within=runs)
def runs_diff(names: RunNames, root: RunsDirectory = None) -> CommandResult:
    """Show the settings and results that differ between finished runs.

    Example: fedcache runs diff 3f9c 81ab
    """
    folder = runs_directory(root)
    paths = {}
    for name in names:
        for one in every_run([name], folder):
            paths[one.path.resolve()] = one.path
    if len(paths) < 2:
        raise UsageError(
            f"{' '.join(names)} names only one run, but a comparison needs two.",
            "fedcache runs diff A B",
        )
    entries = [finished_run(str(path), folder) for path in paths.values()]
    digests = [e.digest for e in entries]
    settings = different([settings_of(e) for e in entries])
    figures = different([figures_of(e) for e in entries])
    data: Facts = {"runs": digests}
    for kind, rows_of_kind in (("settings", settings), ("figures", figures)):
        data[kind] = {
            k: dict(zip(digests, values, strict=True)) for k, values in rows_of_kind.items()
        }
    heads = [f"{e.digest[:8]} {e.method}" for e in entries]
    tables = []
    lines = []
    if settings:
        cells = [(name, *values) for name, values in settings.items()]
        tables.append(TextTable("settings", ("setting", *heads), cells))
    else:
        lines.append("The settings are equal.")
    if figures:
        with_difference = len(entries) == 2
        columns = ["figure", *heads]
        if with_difference:
            columns.append("difference")
        rows = []
        for name, values in figures.items():
            row = [name, *(_figure(name, value) for value in values)]
            if with_difference:
                row.append(_difference(name, values))
            rows.append(row)
        tables.append(TextTable("figures", columns, rows, right=columns[1:]))
    else:
        lines.append("The results are equal.")
    # Totals grow with the seeds, so a difference between runs of different seeds is explained.
    counts = [len(e.result["seeds"]) for e in entries]
    sums = [name for name in TOTALS if name in figures]
    if len(set(counts)) > 1 and sums:
        seeds = " and ".join(map(str, counts))
        lines.append(f"{', '.join(sums)}: sums over {seeds} seeds.")
    return CommandResult(data, lines, renderables=tables, listing=True)


@command("runs rm", within=runs)
def runs_rm(
    observer: TerminalObserver,
    as_json: bool,
    names: RunNames,
    yes: Yes = False,
    root: RunsDirectory = None,
) -> CommandResult:
    """Remove finished, unfinished or damaged runs, with their models and their tracker logs.

    The command asks for confirmation; without a terminal it needs --yes. Runs that are being trained are not removed,
    and files that do not belong to a run are kept. The privacy that a private run spent stays in the ledger.

    Example: fedcache runs rm 3f9c tag:tried --yes
    """
    folder = runs_directory(root)
    entries = {run.path: run for run in every_run(names, folder)}
    planned = [plan_removal(path) for path in entries]
    # Before asking for confirmation, note what is removed and what is kept.
    size = sum(removal.bytes for removal in planned)
    total = f"{counted(len(planned), 'run')}, {size / 1e6:,.2f} MB"
    for removal in planned:
        entry = entries[removal.path]
        name = removal.path.name
        words = state_of(entry)
        if isinstance(entry, StoredRun):
            accuracy = percent(entry.result["accuracy"]["mean"])
            words = f"{entry.method}, {accuracy} %"
        megabytes = removal.bytes / 1e6
        observer.note(f"{name}  {words}  {megabytes:,.2f} MB")
        if removal.kept:
            kept = ", ".join(removal.kept)
            observer.warn(
                f"{name} also holds files that do not belong to the run. They are kept: {kept}."
            )
        users = ", ".join(partitions_named(removal.path, entries))
        if users:
            observer.warn(
                f"{users} cannot be trained again after the removal, because config.toml names a partition "
                f"that is stored in {name}."
            )
        if isinstance(entry, StoredRun) and entry.private:
            observer.note(
                f"The privacy budget that {name} spent stays in the ledger (fedcache ls --privacy)."
            )
    data = {"removed": [str(removal.path) for removal in planned], "bytes": size}
    # Without --yes a person has to answer; a script without --yes removes nothing.
    if not yes and not _confirmed(f"Remove {total}? [y/N] ", names, as_json):
        return CommandResult({"removed": [], "bytes": 0}, ["Nothing was removed."])
    remove_runs(planned)
    return CommandResult(data, [f"Removed {total}."])


def _confirmed(question: str, names: list[str], as_json: bool) -> bool:
    """Whether a person confirms. Raises UsageError where there is no terminal to ask."""
    if as_json or not sys.stdin.isatty():
        raise UsageError(
            "Nothing was removed, because a removal must be confirmed in a terminal or with --yes.",
            shlex.join(["fedcache", "runs", "rm", *names, "--yes"]),
        )
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@command("runs tag", within=runs)
def runs_tag(
    tag: Annotated[
        str | None,
        typer.Argument(
            help="The tag, one word. Without a tag, the command lists all tags.",
            autocompletion=complete_tags,
        ),
    ] = None,
    names: RunQuery = None,
    remove: Annotated[
        bool,
        typer.Option(
            "--remove", help="Remove the tag from these runs, or from all runs if none is given."
        ),
    ] = False,
    root: RunsDirectory = None,
) -> CommandResult:
    """Add a tag to runs; other commands then find them as tag:NAME.

    The tag is stored in tags.json next to the result and changes no digest.

    Example: fedcache runs tag baseline 3f9c 81ab
    """
    folder = runs_directory(root)
    if tag is None:
        return _tags_answer(folder)
    check_tag(tag)
    if not names and not remove:
        raise UsageError(
            f"No run was given for the tag {tag}.", f"fedcache runs tag {shell_word(tag)} RUN"
        )
    # --remove without names applies to all runs that have the tag.
    paths = [one.path for one in every_run(names or [f"tag:{tag}"], folder)]
    for path in paths:
        tags = {*tags_of(path), tag}
        if remove:
            tags.remove(tag)
        write_tags(path, tags)
    changed = ", ".join(path.name for path in paths)
    if remove:
        lines = [f"Tag {tag} removed from: {changed}"]
    else:
        lines = [f"Tag {tag} added to: {changed}", f"fedcache compare tag:{shell_word(tag)}"]
    return CommandResult({"tag": tag, "removed": remove, "runs": [str(p) for p in paths]}, lines)


def _tags_answer(folder: Path) -> CommandResult:
    """The answer of ``runs tag`` without a tag: every tag and its runs."""
    runs_of: dict[str, list[str]] = {}
    # Tags are stored with the runs, so every run is read.
    for one in every_run([], folder):
        for tag in tags_of(one.path):
            runs_of.setdefault(tag, []).append(one.path.name)
    rows = []
    for tag, names in sorted(runs_of.items()):
        rows.append((tag, len(names), " ".join(name[:8] for name in names)))
    if not rows:
        return CommandResult(
            {"tags": runs_of}, ["No run has a tag.", "fedcache runs tag baseline RUN"], listing=True
        )
    shown = [TextTable("", ("tag", "runs", "which"), rows, right=("runs",))]
    return CommandResult({"tags": runs_of}, renderables=shown, listing=True)


def _figure(name: str, value: Any) -> str:
    """A figure as text; a fraction is shown in per cent."""
    if value is None:
        return "-"
    if name in SHARES:
        return f"{percent(value)} %"
    if isinstance(value, float) and name == "seconds":
        return f"{value:,.2f}"
    return f"{value:,.0f}"


def _difference(name: str, values: list[Any]) -> str:
    """The second value minus the first, with its sign; the difference of fractions is in points."""
    first, second = values
    if first is None or second is None:
        return "-"
    if name in SHARES:
        return f"{100 * (second - first):+.2f} points"
    if name == "seconds":
        return f"{second - first:+,.2f}"
    return f"{second - first:+,.0f}"
