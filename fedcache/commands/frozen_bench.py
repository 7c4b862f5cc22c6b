"""``fedcache reproduce frozen-bench``: a ranking of all methods on frozen features, tuned in the same way."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedcache import __version__
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable, plain_line
from fedcache.config import Home, option_value
from fedcache.errors import MachineError, UsageError, shell_word
from fedcache.extract.backbones import lookup
from fedcache.parsing import Record
from fedcache.process import keep_freed_memory, stopped_by_signals
from fedcache.reproduce.frozen_bench.study import NAME, BenchBackbone, Study, read_study
from fedcache.reproduce.planning import Options, RequirementCheck
from fedcache.store.lock import write_output

COMMAND = f"fedcache reproduce {NAME}"


def chosen_study(
    on: Sequence[str], only: Mapping[str, Sequence[str]], options: Options, add: Sequence[Path]
) -> Study:
    """The study with the changes of a user. Raises UsageError for an unknown backbone, label or value."""
    study = read_study().with_data(on)
    # Results that are only added need no training.
    if add and not on:
        study = replace(study, data={})
        if "data" in only:
            raise UsageError(
                "With --add and without --on, nothing is trained, so --only data=LABEL has no dataset to choose.",
                f"{COMMAND} --on DATASET",
            )
    for name in options.backbones:
        lookup(name, home=Home.from_environment().root)
    if options.backbones:  # a named backbone is used on all data
        study = replace(study, backbones=dict.fromkeys(options.backbones, BenchBackbone()))
    if options.rounds is not None:
        study = replace(study, rounds=options.rounds)
    if options.seeds is not None:
        study = replace(study, seeds=options.seeds)
    if options.limit is not None:
        study = replace(study, limit=options.limit)
    study = replace(study, recipe=dict(options.recipe))
    return study.only(only)


def list_sentence() -> str:
    """The line on this study in the answer of ``reproduce list``."""
    study = read_study()
    checker = RequirementCheck(Home.from_environment())
    available = [name for name in study.backbones if checker.missing_weights(name) is None]
    treatments = len(study.treatments)
    backbones = len(study.backbones)
    ready = ", ".join(available) or "none"
    return (
        f"In addition to the papers, all methods on frozen features ({treatments} treatments; {ready} of "
        f"{backbones} backbones available):  {COMMAND}"
    )


def describe_bench() -> CommandResult:
    """The answer of ``reproduce info frozen-bench``: the protocol, the treatments and the partitions."""
    study = read_study()
    treatments = len(study.treatments)
    partitions = len(study.partitions)
    lines = [
        f"{NAME}: {study.title}",
        f"{treatments} treatments x {partitions} partitions x the data of --on x the backbones of --backbones; "
        f"{study.rounds} rounds, seeds {study.seeds}, {study.limit} images of each data set.",
        f"Settings are selected on {study.validation} of every client's training rows, with seed "
        f"{study.search_seeds}.",
    ]
    rows = []
    for label, t in study.treatments.items():
        searched = [f"{key} {', '.join(values)}" for key, values in t.search.items()]
        rows.append((label, t.method, t.family, _pairs(t.set), "; ".join(searched)))
    partition_rows = [
        (label, made.scheme, made.clients or "", _pairs(made.options))
        for label, made in study.partitions.items()
    ]
    shown = [
        TextTable("Treatments", ("treatment", "method", "family", "set", "chosen among"), rows),
        TextTable("Partitions", ("partition", "scheme", "clients", "arguments"), partition_rows),
    ]
    data = {
        "name": NAME,
        "title": study.title,
        "treatments": {label: t.method for label, t in study.treatments.items()},
        "partitions": list(study.partitions),
    }
    return CommandResult(data, lines, renderables=shown)


def _command(study: Study, add: Sequence[Path]) -> str:
    """The command that runs a study, without paths, because paths differ between machines."""
    full = read_study()
    words = [COMMAND]
    words += [f"--add {shell_word(path.name)}" for path in add]
    if study.data != full.data:
        words += [f"--on {label}=..." for label in study.data]
    # Other backbones than the study's are all named; a part of the study's own backbones is chosen by label.
    if any(full.backbones.get(label) != backbone for label, backbone in study.backbones.items()):
        backbones = shell_word(",".join(study.backbones))
        words.append(f"--backbones {backbones}")
    elif study.backbones.keys() != full.backbones.keys():
        words += [f"--only backbone={label}" for label in study.backbones]
    for axis in ("partition", "treatment"):
        chosen = getattr(study, f"{axis}s")
        if chosen.keys() != getattr(full, f"{axis}s").keys():
            words += [f"--only '{axis}={label}'" for label in chosen]
    return " ".join(words)


def _pairs(values: Record) -> str:
    """Keys and values as text, with true and false as TOML spells them."""
    return ", ".join(f"{key} {option_value(value)}" for key, value in values.items())


def run_bench(
    study: Study,
    options: Options,
    runs: Path | None,
    out: Path | None,
    add: Sequence[Path],
    observer: TerminalObserver,
) -> CommandResult:
    """Run the study and show its rankings. Raises FedcacheError, as ``run_study`` and ``add_results``."""
    from fedcache.reproduce.frozen_bench import measure, page

    began = time.monotonic()
    # There are thousands of small runs, and each can use the freed memory of the last one.
    keep_freed_memory()
    added = page.add_results(study, add)
    with stopped_by_signals(observer.note) as stop:
        scores = measure.run_study(
            study,
            Home.from_environment(),
            options,
            runs=runs,
            earlier=added.scores,
            observer=observer,
            stop=stop,
        )
    # If nothing was scored, the command fails, with the reason why the first score is missing.
    if not any(s.values for s in scores):
        why = "no combination of data, backbone and partition is available"
        if scores:
            why = scores[0].why_not
        raise MachineError(f"Nothing was compared: {why}", f"fedcache reproduce info {NAME}")
    # ``s.seconds`` is the mean over the runs of a score.
    seconds = sum((s.seconds or 0.0) * len(s.runs) for s in scores)
    facts = {"command": _command(study, add), "version": __version__, "runs_seconds": seconds}
    data = page.study_data(added.study, scores, facts)
    # The JSON file next to the page has unrounded numbers, and the digests of the runs.
    if out is not None:
        write_output(out, page.markdown(data).encode())
        write_output(out.with_suffix(".json"), page.as_json(data).encode())
    shown = []
    for ranked in data["rankings"]:
        shown += [plain_line(text) for text in page.sentences(ranked)]
        rows = page.summary_rows(ranked)
        shown.append(TextTable(ranked["title"], page.SUMMARY, rows, right=page.SUMMARY[2:]))
    elapsed = time.monotonic() - began
    taken = len(added.scores)
    observer.note(f"{len(scores)} comparisons ({taken} from --add) in {elapsed:,.0f} s")
    lines = []
    if out is not None:
        lines.append(str(out))
    return CommandResult(data, lines, renderables=shown)
