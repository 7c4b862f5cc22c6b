"""``fedcache datasets``: list, describe, check and download datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.commands.options import Given, ListedName, bare, command, flags_of, pick
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable, yes_or_no
from fedcache.config import ExtractConfig, Home, option_name
from fedcache.errors import Exit, MachineError, shell_word
from fedcache.extract.datasets import Context, holds_of, open_dataset
from fedcache.extract.datasets.columns import with_keys
from fedcache.extract.datasets.kinds import FILES
from fedcache.extract.datasets.listing import info, known, pull
from fedcache.extract.datasets.papers import check, full_spec
from fedcache.extract.planning.plan import memory_of, paths_of
from fedcache.plugins import plugins
from fedcache.progress import progress_of

datasets = typer.Typer(
    name="datasets", help="Datasets and where they come from.", no_args_is_help=True
)

COLUMNS = (
    "images_key",
    "label_key",
    "split_key",
    "domain_key",
    "group_key",
    "no_label",
    "unlabelled",
)
"""Options that give columns a meaning."""


@command("datasets list", within=datasets)
def datasets_list() -> CommandResult:
    """List every dataset and what it needs.

    Example: fedcache datasets list
    """
    entries = known(data=Home.from_environment().data)
    rows = [(e["name"], e["about"], e["needs"], yes_or_no(e["ready"])) for e in entries]
    shown = TextTable("", ("dataset", "what it is", "needs", "ready"), rows)
    return CommandResult({"datasets": entries}, renderables=[shown], listing=True)


@command("datasets info", bare(pick(ExtractConfig, "data", "layout", *COLUMNS)), within=datasets)
def datasets_info(observer: TerminalObserver, name: ListedName, given: Given) -> CommandResult:
    """Show one dataset. With a specification such as folder:PATH, fedcache reads and counts its files.

    Columns are chosen as for `fedcache extract`.

    Example: fedcache datasets info paper:cifar10
    """
    home = Home.from_environment()
    # Options that name columns become part of the spec, so the name of the dataset says how it is read.
    columns = {option_name(item): given[item.name] for item in pick(ExtractConfig, *COLUMNS)}
    if given["unlabelled"]:
        columns["--unlabelled"] = "yes"
    name = with_keys(name, columns)
    roots = paths_of(flags_of(ExtractConfig, given).get("data", {}))
    facts = info(full_spec(name), roots=roots, data=home.data)
    # A dataset that is a file or a folder of the user is read and counted, not only described.
    kinds_to_read = {spec.partition(":")[0] for spec in FILES}
    kinds_to_read |= {reader.name for reader in plugins("datasets").values()}
    kind, separator, _ = name.partition(":")
    if separator and kind in kinds_to_read:
        with progress_of(observer, "reading", holds_of(name)) as progress:
            context = Context(memory_of(home), roots, home.data, given["layout"], progress=progress)
            read = open_dataset(name, context)
        facts = {
            **facts,
            "name": name,
            "reading": read.reading,
            read.holds: len(read),
            "classes": list(read.classes),
            "domains": list(read.domains),
            "digest": read.digest,
        }
    lines = []
    for key, value in facts.items():
        lines += _value_lines(key, value)
    return CommandResult(facts, lines)


def _value_lines(key: str, value: Any) -> list[str]:
    """A value in one line, or a list of sentences or tables with a line for each."""
    if not isinstance(value, list):
        return [f"{key:<12}{value}"]
    if key in ("classes", "domains", "splits"):
        names = ", ".join(value)
        return [f"{key:<12}{names}"]
    lines = []
    for i, row in enumerate(value):
        # The key is shown once, before the first row.
        title = ""
        if i == 0:
            title = key
        lines.append(f"{title:<12}{_flat(row)}")
    return lines


def _flat(value: Any) -> str:
    """A value of JSON in one line, without the empty values of a table."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(inner)}" for key, inner in value.items() if inner)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


@command("datasets check", within=datasets)
def datasets_check(
    name: ListedName,
    path: Annotated[Path, typer.Argument(help="Folder into which the dataset was unpacked.")],
) -> CommandResult:
    """Check a copy of a paper's dataset: exit code 4 if files are missing, 5 if counts are wrong.

    Example: fedcache datasets check cifar10 ~/data/cifar10
    """
    report = check(name.removeprefix("paper:"), path)
    problems = [f"missing: {text}" for text in report["missing"]]
    problems += [f"wrong: {text}" for text in report["wrong"]]
    counts = ", ".join(f"{n:,} {word}" for word, n in report["counts"].items())
    layout = report["layout"] or "no known layout"
    folder = report["path"]
    lines = [f"{report['name']} in {folder}: {layout}"]
    if counts:
        lines.append(f"counts: {counts}")
    lines += problems or ["All files are present."]
    if problems:
        lines.append(f"fedcache datasets info {shell_word(report['name'])}   shows how to get it")
    code = Exit.OK
    if report["missing"]:
        code = Exit.STORE
    elif report["wrong"]:
        code = Exit.CORRUPT
    return CommandResult(report, lines, code=code)


@command("datasets pull", within=datasets)
def datasets_pull(
    observer: TerminalObserver,
    name: ListedName,
    mirror: Annotated[
        str | None,
        typer.Option(
            "--from", help="For datasets named paper:NAME: address of a mirror with the same files."
        ),
    ] = None,
) -> CommandResult:
    """Download a dataset that has a permanent address. fedcache downloads nothing without this command.

    Example: fedcache datasets pull cifar10
    """
    home = Home.from_environment()
    spec = full_spec(name)
    if home.offline:
        raise MachineError("FEDCACHE_OFFLINE is set.", "unset FEDCACHE_OFFLINE")
    folder = pull(spec, data=home.data, say=observer.note, mirror=mirror)
    lines = [str(folder)]
    missing = []
    if spec.startswith("paper:"):
        report = check(spec.removeprefix("paper:"), folder)
        missing = report["missing"]
        if report["layout"]:
            lines.append(f"layout: {report['layout']}")
        lines += [f"still missing: {text}" for text in missing]
    if missing:
        lines.append(f"fedcache datasets info {shell_word(name)}   shows how to get the rest")
    else:
        lines.append(f"fedcache extract --dataset {shell_word(spec)}")
    return CommandResult({"name": spec, "path": str(folder), "missing": missing}, lines)
