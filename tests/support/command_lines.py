"""Command lines inside texts: find them, and say what the shell or the parser of fedcache has against each.

A command line in a text begins at ``fedcache``, ``pip install`` or ``python -c`` and ends where the text goes on as
prose: at two spaces, a line's end, a backtick, a closing bracket, or a punctuation mark before a space. Quoted words
are read as a shell reads them, so a path with a space stays one word only when it is quoted.
"""

import itertools
import re
import shlex
import sys
import tomllib
from contextlib import contextmanager
from dataclasses import fields
from functools import cache

import pytest
import typer.main
from loaded_files import content

from fedcache import FedcacheError
from fedcache.cli import app
from fedcache.config import ExtractConfig, PartitionConfig, TrainConfig
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import SCHEMES

COMMANDS = typer.main.get_command(app)

EXTRAS = set(tomllib.loads(content("pyproject.toml"))["project"]["optional-dependencies"])
BEGINS = re.compile(r"(?<![\w./$-])(?:fedcache (?=[a-z-])|pip install |python -c )")
STANDS = {"typed": re.compile(r"(?:\n|  )$"), "start": re.compile("^$"), "code": re.compile("`$")}
"""How a command line stands in a text, by what is before it: to be typed, at the start, as code; else in a sentence."""
ENDS = re.compile(r"\n|  | && |`|\)|(?<!\.)[.,;:](?=\s|$)")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(?:[:=][A-Z]+)?(?:,[A-Z]+)*|.*HOLE.*|.*\{.*|.*\.\.")
"""A word that a reader replaces: NAME, HOST:PORT, A,B; HOLE stands for a value of an f-string."""
WORDS = {"method": set(METHODS), "scheme": set(SCHEMES)} | {
    field.name: set(choices)
    for config in (TrainConfig, ExtractConfig, PartitionConfig)
    for field in fields(config)
    if (choices := field.metadata["option"].choices)
}
"""The words that an option takes, by its parameter, where these are few and fixed."""


def every_command():
    """The words and the command of every command that is no group."""
    return [
        (f"{name} {below}".strip(), command)
        for name, loaded in COMMANDS.load_all().items()
        for below, command in getattr(loaded, "commands", {"": loaded}).items()
    ]


def refused(words, *, check_words=False):
    """What the parser has against a command line, without running it; empty when nothing.

    ``check_words`` also checks the words of options that take one of a few, which commands check when they run.
    """
    found = COMMANDS
    rest = list(words)
    while hasattr(found, "commands"):
        if not rest or rest[0].startswith("-"):
            return ""  # help and version
        name = rest.pop(0)
        if name not in found.commands:
            return f"there is no command {name!r}"
        found = found.commands[name]
        found = found.load() if hasattr(found, "load") else found
    if rest[-1:] in (["--help"], ["--help-all"], ["-h"]):
        return ""
    try:
        context = found.make_context("fedcache", list(rest))
    except Exception as error:  # the parser's own family, which typer carries with it
        filled = _with_a_number(rest, error)
        if filled:
            return refused([*words[: len(words) - len(rest)], *filled], check_words=check_words)
        return str(error) or type(error).__name__
    return next(_unknown_words(context.params), "") if check_words else ""


def _with_a_number(words, error):
    """The words with a number for the placeholder that the parser could not read as one; empty for other errors."""
    names = getattr(getattr(error, "param", None), "opts", [])
    for place, (option, value) in enumerate(itertools.pairwise(words)):
        if option in names and PLACEHOLDER.fullmatch(value):
            return [*words[: place + 1], "1", *words[place + 2 :]]
    return []


def _unknown_words(values):
    for name, value in values.items():
        given = value if isinstance(value, list | tuple) else [value]
        for word in ",".join(str(one) for one in given if one is not None).split(","):
            if (
                name in WORDS
                and word
                and word not in WORDS[name]
                and not PLACEHOLDER.fullmatch(word)
            ):
                yield f"{word!r} is no {name}"


def commands(line):
    """The calls of fedcache in a line of shell, each as its words."""
    words = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    words.whitespace_split = True
    for operator, part in itertools.groupby(words, lambda word: set(word) <= set("|&;<>")):
        found = list(part)
        if not operator and found[0] == "fedcache":
            yield found[1:]


def spans(text):
    """The command lines of a text, and how each stands in it."""
    for begin in BEGINS.finditer(text):
        before = text[: begin.start()]
        stands = next((name for name, mark in STANDS.items() if mark.search(before)), "sentence")
        yield text[begin.start() : _end(text, begin.end())].rstrip(), stands


def _end(text, place):
    quote = ""
    while place < len(text):
        letter = text[place]
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif ENDS.match(text, place):
            return place
        place += 1
    return place


@cache
def faults(text):
    """What is wrong with each command line of a text."""
    found = []
    for line, stands in spans(text):
        problem = _fault(line, stands)
        if problem:
            found.append(f"{line}: {problem}")
    return tuple(found)


def _fault(line, stands):
    try:
        words = shlex.split(line)
        plain = list(shlex.shlex(line, posix=True, punctuation_chars="|&;<>"))
    except ValueError as error:
        return f"no shell reads it: {error}"
    if any(set(word) <= set("|&;<>") for word in plain):
        return "a shell reads |, &, ;, < or > as its own"
    if words[0] == "python":
        return _code_fault(words[2])
    if words[0] == "pip":
        return _extra_fault(words)
    return _command_fault([word for word in words[1:] if word != "..."], stands)


def _command_fault(words, stands):
    has_option = any(word.startswith("-") for word in words)
    if words[0] not in COMMANDS.commands and stands in ("start", "sentence") and not has_option:
        return ""  # a sentence about fedcache
    problem = refused(words, check_words=True)
    # A command that a sentence names needs no arguments there.
    named = stands in ("code", "sentence") and not has_option and len(words) <= 2
    return "" if named and problem.startswith("Missing") else problem


def _extra_fault(words):
    asked = [
        found[1] for word in words if (found := re.match(r"fedcache\[(.+)\]", word)) is not None
    ]
    lost = [
        extra
        for extra in ",".join(asked).split(",")
        if not PLACEHOLDER.fullmatch(extra) and extra not in EXTRAS
    ]
    return f"no such extra: {', '.join(lost)}" if asked and lost else ""


def _code_fault(code):
    try:
        compile(code, "<hint>", "exec")
    except SyntaxError as error:
        return f"no Python: {error}"
    return ""


@contextmanager
def hints_of_the_package():
    """The hints of all errors that code of the package makes, or changes, inside the block."""
    seen = set()

    def noted(error, name, value):
        object.__setattr__(error, name, value)
        caller = sys._getframe(1)
        while caller.f_code.co_name == "__init__" and caller.f_back is not None:
            caller = caller.f_back
        if name == "hint" and str(caller.f_globals.get("__name__", "")).startswith("fedcache."):
            seen.add(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedcacheError, "__setattr__", noted, raising=False)
        yield seen


@cache
def known_options():
    """Every option of every command."""
    found = {"--help", "--version"}
    for _, command in every_command():
        for parameter in command.params:
            found.update(parameter.opts, parameter.secondary_opts)
    return found
