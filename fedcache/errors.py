"""The one error type a user ever sees: what was found, what was expected, and the next command.

The exit codes are a contract of the command line (README, "Exit codes"); 1 is never used, because a Python
traceback exits with it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from enum import IntEnum
from typing import Any


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


class FedcacheError(Exception):
    """A failure a user can act on.

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


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, or None when nothing is near."""
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
    return FedcacheError(Exit.USAGE, f"Unknown {kind} {name!r}.{guess}", hint or f"Known: {listing}")


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
    return FedcacheError(
        Exit.ENVIRONMENT,
        f"There is not enough memory{' for ' if asked else ''}{', '.join(asked)}.",
        "Ask for less (a smaller dim, batch or number of clients), or run where there is more memory.",
    )
