"""The help of a command: ``-h`` shows the common options, ``--help-all`` all of them; examples come first."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.models import ArgumentInfo

from fedcache.config import PANELS

COMMON = "shown by -h"
"""Mark in a parameter's annotation: ``-h`` shows the parameter. Fields of a configuration have ``common`` instead."""

FEW = 12
"""If a command has no more options than this, ``-h`` shows all of them."""

LINES = 2
"""Maximum number of lines of one option in ``-h``. If the help is longer than ``PAGE``, options get one line."""

PAGE = 40
"""Maximum number of lines of the help of ``-h``."""

CLAUSE = re.compile(r"[,;:.](?= )| (?=\()")
"""Places where ``-h`` may cut a text that is too long for its lines."""

WIDEST = 100
"""Maximum width of the help, in characters."""

LABEL = 27
"""Width, in characters, of the column of option names. After a longer name, the text begins on the next line."""

LONG_DEFAULT = 16
"""Maximum number of characters of a default in brackets, for an option that is shown in one line."""

OTHERS = "Options"
"""The panel of options without a panel. It comes last."""

KINDS = {int: "N", float: "NUMBER", Path: "PATH"}
"""Type of an option -> the word that stands for its value."""


@dataclass(frozen=True)
class Row:
    """One argument or option in the help."""

    label: str
    text: str
    default: str
    panel: str
    common: bool

    def lines(self, width: int, most: int | None) -> list[str]:
        """The option in lines of ``width`` characters, ``most`` lines at most; the whole text if ``most`` is None."""
        text = self.text
        end = ""
        # The short help shows no default that is none; in one line, it shows no long default.
        says_none = most and self.default == "default: none"
        if self.default and not says_none:
            end = f" [{self.default}]"
        if most == 1 and len(end) > LONG_DEFAULT:
            end = ""
        room = width - LABEL - 2
        # The short help has only the first sentence, and cuts it where it is still too long.
        if most is not None:
            text = re.split(r"\.\s+(?=[A-Z])", text)[0]
        wrapped = textwrap.wrap(text + end, room, break_on_hyphens=False)
        places = [found.start() for found in CLAUSE.finditer(text)]
        while most is not None and len(wrapped) > most and places:
            cut = text[: places.pop()]
            wrapped = textwrap.wrap(f"{cut} ...{end}", room, break_on_hyphens=False)
        label = f"  {self.label}"
        lines = []
        if len(label) > LABEL:
            lines.append(label)
            label = ""
        for line in wrapped or [""]:
            lines.append(f"{label:<{LABEL}}  {line}".rstrip())
            label = ""
        return lines


def show(context: typer.Context, *, everything: bool) -> None:
    """Print the help of a command, then exit."""
    function = inspect.unwrap(context.command.callback)  # type: ignore[arg-type]
    width = min(shutil.get_terminal_size().columns, WIDEST)
    lines = help_lines(
        function, context.command_path, context.get_usage(), width, everything=everything
    )
    typer.echo("\n".join(lines))
    raise typer.Exit


def help_lines(
    function: Any, command: str, usage: str, width: int, *, everything: bool
) -> list[str]:
    """The help of a command in lines.

    Args:
        function: function of the command, with the options in its signature.
        command: name of the command, as it is typed.
        usage: the line on its arguments.
        width: characters of a line.
        everything: whether to show all options in full, or the common ones in short.
    """
    rows = sorted(rows_of(function), key=_rank)
    options = sum(bool(row.panel) for row in rows)
    shown = rows
    if not everything and options > FEW:
        shown = [row for row in rows if row.common or not row.panel]
    text, examples = described(function.__doc__ or "")
    paragraphs = text.split("\n\n")
    if not everything:
        paragraphs = paragraphs[:1]
    lines = []
    for paragraph in paragraphs:
        lines += [*textwrap.wrap(paragraph, width, break_on_hyphens=False), ""]
    if examples:
        lines += [*(f"  {example}" for example in examples), ""]
    lines.append(usage)
    last = "Every command also takes --json."
    if len(shown) < len(rows):
        last = f"{command} --help-all shows all {options} options. {last}"
    titles = {row.panel for row in shown}
    # The 3 lines are a blank line above and below the options, and the last line.
    room = PAGE - len(lines) - len(titles) - 3
    if everything:
        blocks = [row.lines(width, None) for row in shown]
    else:
        blocks = _fitted(shown, width, room)
    panel = None
    for row, block in zip(shown, blocks, strict=True):
        if row.panel != panel:
            # The short help has no blank lines between panels.
            if everything or not panel:
                lines.append("")
            panel = row.panel
            if panel:
                lines.append(typer.style(panel, bold=True))
        lines += block
    return [*lines, "", last]


def _fitted(rows: Sequence[Row], width: int, room: int) -> list[list[str]]:
    """The lines of each option, at most ``LINES``. Options with short last lines get one line until all fit."""
    blocks = [row.lines(width, LINES) for row in rows]
    longer = [number for number, block in enumerate(blocks) if len(block) > 1]
    for number in sorted(longer, key=lambda number: len(blocks[number][-1])):
        if sum(map(len, blocks)) <= room:
            break
        blocks[number] = rows[number].lines(width, 1)
    return blocks


def described(documentation: str) -> tuple[str, list[str]]:
    """The paragraphs of a docstring, and the command lines of its examples."""
    text, *examples = re.split(r"\n\s*Example: ", inspect.cleandoc(documentation))
    return text.strip(), [example.strip() for example in examples]


def rows_of(function: Any) -> list[Row]:
    """The arguments and options of a command, without hidden ones and ``--json``, which every command has."""
    rows = []
    for name, parameter in inspect.signature(function).parameters.items():
        info = parameter.annotation.__metadata__[0]
        if name != "json" and not info.hidden:
            rows.append(_row(parameter))
    return rows


def names_of(parameter: inspect.Parameter) -> list[str]:
    """The names of an option as they are typed, ``["--store"]``; [] for an argument."""
    info = parameter.annotation.__metadata__[0]
    # Within Annotated, typer stores the first name of an option in ``default``.
    names = [str(name) for name in (info.default, *(info.param_decls or ()))]
    typed = [name for name in names if name.startswith("-")]
    if typed or isinstance(info, ArgumentInfo):
        return typed
    word = parameter.name.replace("_", "-")
    return [f"--{word}"]


def _row(parameter: inspect.Parameter) -> Row:
    info, *marks = parameter.annotation.__metadata__
    names = names_of(parameter)
    label = ", ".join(sorted(names, key=len))
    panel = info.rich_help_panel or OTHERS
    if not names:
        label = info.metavar or parameter.name
        panel = ""
    elif parameter.default is not False:
        label += f" {_value_word(parameter, names)}"
    text = " ".join((info.help or "").split())
    return Row(label, text, _default(parameter), panel, COMMON in marks)


def _value_word(parameter: inspect.Parameter, names: Sequence[str]) -> str:
    """The placeholder for the value of an option."""
    info = parameter.annotation.__metadata__[0]
    if info.metavar:
        # ``options.parameter`` writes <word> in place of a long list of words.
        return str(info.metavar).replace("<word>", "WORD")
    kind = typing.get_args(parameter.annotation)[0]
    if isinstance(kind, types.UnionType):
        kind = typing.get_args(kind)[0]
    if kind in KINDS:
        return KINDS[kind]
    # An option with completion takes a name; the placeholder is the option's own name.
    if info.autocompletion is not None:
        long_name = next(name for name in names if name.startswith("--"))
        return long_name.strip("-").upper()
    return "TEXT"


def _default(parameter: inspect.Parameter) -> str:
    """The default of an option in words; "" where there is none."""
    words = parameter.annotation.__metadata__[0].show_default
    value = parameter.default
    if value is inspect.Parameter.empty:
        return "required"
    if isinstance(words, str):
        return f"default: {words}"
    is_plain = isinstance(value, str | int | float | Path)
    is_empty = value is False or value == ""
    if words and is_plain and not is_empty:
        return f"default: {value}"
    return ""


def _rank(row: Row) -> int:
    """Sort key of an option: the place of its panel, so options of one panel keep the order of their declarations."""
    if not row.panel:
        return -1
    if row.panel in PANELS:
        return PANELS.index(row.panel)
    return len(PANELS)
