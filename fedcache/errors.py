"""The one error type a user ever sees: what was found, what was expected, and the next command.

The exit codes are a contract of the command line (README, "Exit codes"); 1 is never used, because a Python
traceback exits with it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar


class Exit(IntEnum):
    """Exit codes of the command line."""

    OK = 0
    USAGE = 2
    QUARANTINED = 3
    STORE = 4
    CORRUPT = 5
    ENVIRONMENT = 6
    FEDERATED = 7
    BUG = 10
    INTERRUPTED = 130


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
    Exit.OK: Meaning("done", "The command did what it says, or found it done.", "Nothing.", "fedcache methods list"),
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
        "method reads are not in it.",
        "Run the extraction that the message prints; for a locked array wait, or say --wait.",
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
        "Ctrl-C or SIGTERM. What was finished is on the disk; a second Ctrl-C stops at once and costs at most one "
        "chunk of every backbone. (`flower server` and `flower site` stay until they are stopped, and leave with 0.)",
        "Run the same command again.",
        "fedcache extract --dataset digits --backbones efficientnet-lite0",
        "when Ctrl-C is pressed",
    ),
}
"""Every code of ``Exit``; the README's table and docs/exit-codes.md are made of it."""


class FedcacheError(Exception):
    """A failure a user can act on. Each exit code has a subclass below, whose ``code`` it carries.

    Args:
        code: the exit code of the command line.
        message: what was found and what was expected, in one or two sentences.
        hint: the next command or the value that would work.
    """

    def __init__(self, code: Exit, message: str, hint: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}"

    def __reduce__(self) -> tuple[type[FedcacheError], tuple[Any, ...]]:
        # Exceptions cross process borders in the extraction workers; the default keeps only the message.
        return FedcacheError, (self.code, self.message, self.hint)


class CodedError(FedcacheError):
    """An error whose class says its exit code."""

    exit: ClassVar[Exit]

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(self.exit, message, hint)


class UsageError(CodedError):
    """What was asked for makes no sense: an unknown name, a value out of range."""

    exit = Exit.USAGE


class StoreError(CodedError):
    """A store is missing, locked, incompatible, or without the features asked for."""

    exit = Exit.STORE


class CorruptionError(CodedError):
    """Bytes on the disk are not those that were written, or too many inputs cannot be read."""

    exit = Exit.CORRUPT


class MachineError(CodedError):
    """This machine lacks something: weights, a package, a device, memory, space, a network."""

    exit = Exit.ENVIRONMENT


class FederatedRunError(CodedError):
    """Training gave numbers that are not finite, or an upload was malformed."""

    exit = Exit.FEDERATED


class StoppedError(CodedError):
    """A signal stopped the work; the same command goes on."""

    exit = Exit.INTERRUPTED


class InternalError(CodedError):
    """A bug in fedcache."""

    exit = Exit.BUG


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, or None when nothing is near.

    >>> closest("fedpc", ["fedavg", "fedpcl", "solo"])
    'fedpcl'
    >>> closest("xyz", ["fedavg", "fedpcl", "solo"]) is None
    True
    """
    names = list(known)
    lowered = {n.lower(): n for n in names}
    near = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.5)
    return lowered[near[0]] if near else None


def unknown(kind: str, name: str, known: Iterable[str], *, hint: str = "") -> FedcacheError:
    """A usage error for a name that is not known, with "did you mean" when one is near."""
    names = sorted(known)
    near = closest(name, names)
    guess = f" Did you mean {near!r}?" if near else ""
    listing = ", ".join(names) if names else "(none)"
    return UsageError(f"Unknown {kind} {name!r}.{guess}", hint or f"Known: {listing}")


def memory_error(error: BaseException) -> FedcacheError | None:
    """An allocation of numpy, torch or CUDA that failed, as an error with what was asked for; None for other errors."""
    text = str(error)
    refused = r"DefaultCPUAllocator|not enough memory|out of memory|Storage size calculation overflowed"
    if not isinstance(error, MemoryError) and not (isinstance(error, RuntimeError) and re.search(refused, text)):
        return None
    size = re.search(r"(?:Unable|tried) to allocate ([\d.]+ ?\w+)", text, re.IGNORECASE)
    shape = re.search(r"with shape (\([\d, ]+\))", text)
    asked = [size[1]] if size else []
    asked += [f"an array of shape {shape[1]}"] if shape else []
    return MachineError(
        f"There is not enough memory{' for ' if asked else ''}{', '.join(asked)}.",
        "Ask for less (a smaller dim, batch or number of clients), or run where there is more memory.",
    )
