"""Answers to command lines that the parser refuses; each proposes the command that is probably meant.

The module is imported only after a command line was refused, so it may import all groups of commands and methods.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from fedcache.errors import UsageError, closest, shell_word
from fedcache.federate.methods import METHODS
from fedcache.parsing import Record

RENAMED = {"--lift": "--execution", "--metric": "--score", "--seed": "--partition-seed"}
"""Options of releases before 0.3 -> their names now."""

HYPERPARAMETERS = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "bs": "batch",
    "local_epochs": "epochs",
    "weight_decay": "wd",
    "optimizer": "opt",
    "lambda": "lam",
}
"""Names of hyperparameters in other libraries -> their names in fedcache."""

VERBS = {
    "status": "list",
    "results": "list",
    "ps": "list",
    "describe": "show",
    "view": "show",
    "info": "show",
    "remove": "rm",
    "delete": "rm",
}
"""Other words for commands -> the word that fedcache uses in its groups of commands."""

OF_STORES = {"list": "ls", "show": "inspect", "rm": "gc"}
"""Command of a group -> the command for stores, which are in no group."""

LIKE = 0.7
"""Minimum similarity, as of ``closest``, at which an option counts as a misspelling of another."""

GROUPS = ("runs", "methods", "backbones", "datasets")
"""Groups with commands that list and show, named after what they list."""


def answer(error: Any, arguments: Sequence[str]) -> UsageError:
    """An error of the parser, with the command that is probably meant.

    Args:
        error: an error of the click library that typer contains.
        arguments: arguments of the command line.
    """
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if context is None:
        return UsageError(message, "See `fedcache --help`.")
    option = getattr(error, "option_name", "")
    if option:
        return unknown_option(option, message, context, arguments)
    commands = getattr(context.command, "commands", None)
    words = [word for word in arguments if not word.startswith("-")]
    # The words after the path of the command. The path begins with fedcache, which is no argument.
    after_path = words[len(context.command_path.split()) - 1 :]
    if commands and after_path and after_path[0] not in commands:
        words = list(arguments[arguments.index(after_path[0]) :])
        return unknown_command(words, context.command_path, commands)
    return UsageError(message, f"See `{context.command_path} --help`.")


def unknown_option(option: str, message: str, context: Any, arguments: Sequence[str]) -> UsageError:
    """The error message for an option that a command does not have."""
    known = []
    for parameter in context.command.params:
        known += parameter.opts
    path = context.command_path
    renamed = RENAMED.get(option)
    if renamed in known:
        return UsageError(message, f"The option is now called {renamed}.")
    if "--set" in known and option.startswith("--"):
        error = hyperparameter(option, path, known, arguments)
        if error is not None:
            return error
    full = "--help"
    if "--help-all" in known:
        full = "--help-all"
    return UsageError(message, f"See `{path} {full}`.")


def hyperparameter(
    option: str, path: str, known: Sequence[str], arguments: Sequence[str]
) -> UsageError | None:
    """The answer to an option that is a hyperparameter of a method; None if it is a misspelt option."""
    word = option.removeprefix("--").replace("-", "_")
    key = HYPERPARAMETERS.get(word, word)
    # Methods may be named as arguments, as values of options (--method=a) and in lists (a,b).
    parts = ",".join(arguments).replace("=", ",").split(",")
    methods = [part for part in parts if part in METHODS]
    for name in methods:
        names = [h.name for h in METHODS[name].hparams]
        for candidate in (word, key):
            if candidate in names:
                line = shlex.join(["fedcache", *_as_setting(option, candidate, arguments)])
                return UsageError(
                    f"{option} is not an option of {path}: {candidate} is a hyperparameter of {name}.",
                    line,
                )
    options = [name.strip("-").replace("-", "_") for name in known]
    if closest(word, options, LIKE) is not None:
        return None
    if methods:
        return UsageError(
            f"{option} is not an option of {path}, and {methods[0]} has no hyperparameter {key}.",
            f"fedcache methods info {shell_word(methods[0])}   lists its hyperparameters.",
        )
    return UsageError(
        f"{option} is not an option of {path}.",
        f"Set a hyperparameter of a method with --set {key}=VALUE. `fedcache methods info METHOD` lists all names.",
    )


def _as_setting(option: str, key: str, arguments: Sequence[str]) -> list[str]:
    """The arguments with ``--set key=value`` in place of an option, or ``--sweep`` for several values of a grid."""
    words = list(arguments)
    start = next(i for i, word in enumerate(words) if word.partition("=")[0] == option)
    _, equals, value = words[start].partition("=")
    end = start + 1
    if not equals and end < len(words) and not words[end].startswith("--"):
        value = words[end]
        end += 1
    name = "--set"
    if "," in value and "grid" in words:
        name = "--sweep"
    return [*words[:start], name, f"{key}={value or 'VALUE'}", *words[end:]]


def unknown_command(words: Sequence[str], path: str, commands: Record) -> UsageError:
    """The error for an unknown command of the program or of a group. The unknown word is the first of ``words``."""
    word, *next_words = words
    called = f"{path} {word}".removeprefix("fedcache ")
    message = f"There is no command {called!r}."
    verb = VERBS.get(word, word)
    if path != "fedcache":
        shows = next((name for name in ("info", "show") if name in commands), None)
        # The word may be a verb that other groups have, or else the name of something to show.
        is_verb = verb in OF_STORES
        if shows is not None and (is_verb or closest(word, commands) is None):
            names = list(words)
            if is_verb:
                names = next_words or ["NAME"]
            return UsageError(message, shlex.join([*path.split(), shows, *names]))
    elif word == "help":
        named = [part for part in next_words if not part.startswith("-")]
        return UsageError(message, shlex.join(["fedcache", *named, "--help"]))
    elif verb in OF_STORES:
        return UsageError(message, _of_groups(verb, commands))
    elif word in METHODS:
        return UsageError(message, shlex.join(["fedcache", "train", *words]))
    near = closest(word, commands)
    if near is not None:
        return UsageError(f"{message} Did you mean {near!r}?", f"See `{path} {near} --help`.")
    return UsageError(message, f"See `{path} --help`.")


def _of_groups(verb: str, commands: Record) -> str:
    """A sentence with the command for stores, and that of each group with this verb."""
    phrases = [f"for stores `fedcache {OF_STORES[verb]}`"]
    for group in GROUPS:
        below = commands[group].load().commands
        # Some groups call their command `info` instead of `show`.
        for name in (verb, "info"):
            if name in below and (name == verb or verb == "show"):
                phrases.append(f"for {group} `fedcache {group} {name}`")
                break
    sentence = ", ".join(phrases)
    return f"{sentence[:1].upper()}{sentence[1:]}."
