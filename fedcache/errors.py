"""The one error type a user ever sees: what was found, what was expected, and the next command.

The exit codes are a contract of the command line (README, "Exit codes"); 1 is never used, because a Python
traceback exits with it.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import PurePath
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
_CERTAIN = 0.6  # likeness of names that need not begin alike
_BEGINNING = 3  # letters of a name that are enough to mean the names that begin with them


class Exit(IntEnum):
    """Exit codes of the command line; ``tools/make_docs.py`` says what each means."""

    OK = 0
    USAGE = 2
    QUARANTINED = 3
    STORE = 4
    CORRUPT = 5
    ENVIRONMENT = 6
    FEDERATED = 7
    BUG = 10
    INTERRUPTED = 130


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
    """A request that makes no sense: an unknown name, a value out of range."""

    exit = Exit.USAGE


class StoreError(CodedError):
    """A store is missing, locked, incompatible, or without the requested features."""

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
    """A signal stopped the work; the same command resumes it."""

    exit = Exit.INTERRUPTED


class InternalError(CodedError):
    """A bug in fedcache."""

    exit = Exit.BUG


def closest(name: str, known: Iterable[str], likeness: float = 0.5) -> str | None:
    """The known name most like ``name``, or the shortest that begins with it; None when nothing is near.

    ``likeness`` runs from 0 to 1, the same: at 0.5 two words of six letters are alike that share three. That is enough
    for names with the same first letter; others take 0.6.

    >>> closest("fedpc", ["fedavg", "fedpcl", "solo"])
    'fedpcl'
    >>> closest("resnet", ["resnet18-quickdraw", "vgg11"])
    'resnet18-quickdraw'
    >>> closest("nosuch", ["fedavg", "supcon", "solo"]) is None
    True
    """
    lowered = {n.lower(): n for n in known}
    lower = name.lower()
    alike = difflib.get_close_matches(lower, list(lowered), n=len(lowered) or 1, cutoff=likeness)
    certain = difflib.get_close_matches(lower, alike, n=1, cutoff=max(likeness, _CERTAIN))
    near = certain or [n for n in alike if n[:1] == lower[:1]]
    if not near and len(lower) >= _BEGINNING:
        near = sorted((n for n in lowered if n.startswith(lower)), key=len)
    if near:
        return lowered[near[0]]
    return None


def unknown(kind: str, name: str, known: Iterable[str], *, hint: str = "") -> FedcacheError:
    """A usage error for a name that is not known, with "did you mean" when one is near."""
    names = sorted(known)
    near = closest(name, names)
    guess = ""
    if near:
        guess = f" Did you mean {near!r}?"
    listing = "(none)"
    if names:
        listing = ", ".join(names)
    return UsageError(f"Unknown {kind} {name!r}.{guess}", hint or f"Known: {listing}")


def shell_word(value: object) -> str:
    """A value as one word of a command line that a text gives: quoted, where a shell would read it otherwise.

    >>> print("fedcache inspect", shell_word(PurePath("my stores/office.zarr")))
    fedcache inspect 'my stores/office.zarr'
    """
    if isinstance(value, PurePath) and str(value).startswith("-"):
        return shlex.quote(f"./{value}")  # a bare one would be an option
    return shlex.quote(str(value))


def all_at_once(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Results of some calls; if several refuse, one error with all messages and hints, each hint once.

    Raises UsageError for one, as it is, and for several.
    """
    found = []
    refused = []
    # Errors of use are collected, so that all of them can be fixed at once; any other error ends at once.
    for call in calls:
        try:
            found.append(call())
        except FedcacheError as error:
            if error.code is not Exit.USAGE and error.code is not Exit.STORE:
                raise
            refused.append(error)
    if len(refused) > 1:
        hints = dict.fromkeys(error.hint for error in refused)
        raise FedcacheError(
            refused[0].code, "\n".join(e.message for e in refused), "\n".join(hints)
        ) from refused[0]
    if refused:
        raise refused[0]
    return found


def memory_error(error: BaseException) -> FedcacheError | None:
    """A failed allocation of numpy, torch or CUDA as an error with its size; None for other errors."""
    # numpy raises MemoryError; torch and CUDA raise RuntimeError with these words.
    text = str(error)
    refused = (
        r"DefaultCPUAllocator|not enough memory|out of memory|Storage size calculation overflowed"
    )
    if not isinstance(error, MemoryError) and not (
        isinstance(error, RuntimeError) and re.search(refused, text)
    ):
        return None
    size = re.search(r"(?:Unable|tried) to allocate ([\d.]+ ?\w+)", text, re.IGNORECASE)
    shape = re.search(r"with shape (\([\d, ]+\))", text)
    # Say what was requested, as far as the message tells it.
    parts = []
    if size:
        parts.append(size[1])
    if shape:
        parts.append(f"an array of shape {shape[1]}")
    what = ""
    if parts:
        what = " for " + ", ".join(parts)
    return MachineError(
        f"There is not enough memory{what}.",
        "Use a smaller dim, batch or number of clients, or a machine with more memory.",
    )
