"""The errors that users see: each says what was found, what was expected, and the next command.

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
_CERTAIN = 0.6  # smallest likeness of two names with different first letters
_BEGINNING = 3  # fewest letters that ``closest`` completes to a name that begins with them


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
    """A failure that a user can act on. Each exit code of a failure has a subclass below.

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
    """An error whose exit code is that of its class."""

    exit: ClassVar[Exit]

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(self.exit, message, hint)


class UsageError(CodedError):
    """An invalid request: an unknown name, a value out of range."""

    exit = Exit.USAGE


class StoreError(CodedError):
    """A store is missing, locked, incompatible, or without the requested features."""

    exit = Exit.STORE


class CorruptionError(CodedError):
    """Bytes on the disk are not the bytes that were written, or too many inputs cannot be read."""

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
    """The known name that is most similar to ``name``, or the shortest that begins with it; None if none is similar.

    ``likeness`` is the smallest similarity, between 0 and 1 (equal names). Two words of six letters that share three
    letters have 0.5. Names with another first letter need a similarity of at least 0.6.

    >>> closest("fedpc", ["fedavg", "fedpcl", "solo"])
    'fedpcl'
    >>> closest("resnet", ["resnet18-quickdraw", "vgg11"])
    'resnet18-quickdraw'
    >>> closest("nosuch", ["fedavg", "supcon", "solo"]) is None
    True
    """
    lowered = {n.lower(): n for n in known}
    lower = name.lower()
    # ``n`` must be at least 1, also if no name is known.
    alike = difflib.get_close_matches(lower, list(lowered), n=len(lowered) or 1, cutoff=likeness)
    certain = difflib.get_close_matches(lower, alike, n=1, cutoff=max(likeness, _CERTAIN))
    near = certain or [n for n in alike if n[:1] == lower[:1]]
    if not near and len(lower) >= _BEGINNING:
        near = sorted((n for n in lowered if n.startswith(lower)), key=len)
    if near:
        return lowered[near[0]]
    return None


def unknown(kind: str, name: str, known: Iterable[str], *, hint: str = "") -> FedcacheError:
    """A usage error for an unknown name, with "did you mean" if a known name is similar."""
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
    """A value as one word of a command line, in quotes if a shell needs them.

    >>> print("fedcache inspect", shell_word(PurePath("my stores/office.zarr")))
    fedcache inspect 'my stores/office.zarr'
    """
    if isinstance(value, PurePath) and str(value).startswith("-"):
        return shlex.quote(f"./{value}")  # without "./" it would be read as an option
    return shlex.quote(str(value))


def all_at_once(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Results of some calls, or one error for all calls that failed.

    Usage and store errors are collected, so that a user can fix all of them at once. Raises a single error unchanged;
    several become one error with all messages and all different hints. Any other error is raised at once.
    """
    results = []
    errors = []
    for call in calls:
        try:
            results.append(call())
        except FedcacheError as error:
            if error.code is not Exit.USAGE and error.code is not Exit.STORE:
                raise
            errors.append(error)
    if len(errors) > 1:
        first = errors[0]
        messages = "\n".join(error.message for error in errors)
        hints = dict.fromkeys(error.hint for error in errors)
        raise FedcacheError(first.code, messages, "\n".join(hints)) from first
    if errors:
        raise errors[0]
    return results


def memory_error(error: BaseException) -> FedcacheError | None:
    """A failed allocation of numpy, torch or CUDA as an error with its size; None for other errors."""
    text = str(error)
    # torch and CUDA raise RuntimeError with one of these texts; numpy raises MemoryError.
    texts = (
        r"DefaultCPUAllocator|not enough memory|out of memory|Storage size calculation overflowed"
    )
    of_torch = isinstance(error, RuntimeError) and re.search(texts, text)
    if not of_torch and not isinstance(error, MemoryError):
        return None
    size = re.search(r"(?:Unable|tried) to allocate ([\d.]+ ?\w+)", text, re.IGNORECASE)
    shape = re.search(r"with shape (\([\d, ]+\))", text)
    # The size and the shape of the request, if the message has them.
    parts = []
    if size:
        parts.append(size[1])
    if shape:
        parts.append(f"an array of shape {shape[1]}")
    request = ""
    if parts:
        request = " for " + ", ".join(parts)
    return MachineError(
        f"There is not enough memory{request}.",
        "Use a smaller dim, batch or number of clients, or a machine with more memory.",
    )
