"""When clients are there: a share of them in every round, or a trace that says for each client in which rounds."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcache.errors import UsageError
from fedcache.store.files import sha256_hex
from fedcache.visible_text import visible

COLUMNS = ("client", "first", "last")


@dataclass(frozen=True, eq=False)
class AvailabilityTrace:
    """In which rounds clients are there; one that has no line never is."""

    clients: tuple[str, ...]  # of the lines; a client may have several
    first: np.ndarray  # int64, the first round of each line, from 1
    last: np.ndarray  # int64, its last round
    digest: str  # sha256 of the file

    def places(self, names: Sequence[str]) -> np.ndarray:
        """int64: the number of each line's client. Raises UsageError for a client that the run has not."""
        return numbers_of(self.clients, names, "--availability")


def numbers_of(named: Sequence[str], names: Sequence[str], option: str) -> np.ndarray:
    """int64: the numbers of clients that a file of ``option`` names. Raises UsageError for one that the run has not."""
    number = {name: i for i, name in enumerate(names)}
    unknown = next((name for name in named if name not in number), None)
    if unknown is not None:
        raise UsageError(
            f"{option} has a line of client {visible(unknown)!r}, and the partition has no such client.",
            f"Names of this partition are like {visible(names[0])!r}; `fedcache partition --json` lists them.",
        )
    return np.array([number[name] for name in named], np.int64)


def read_trace(path: Path) -> AvailabilityTrace:
    """Read a CSV file with the columns ``client``, ``first`` and ``last``: rounds from 1, both included.

    Raises UsageError, naming the line, for a file that is none.
    """
    example = "A line for every client and time that it is there:  client,first,last  and then  client-0,1,20"
    here = f"--availability {path}"
    lines, digest = lines_of_clients(path, here, COLUMNS, example)
    spans = []
    for number, line in lines:
        try:
            first = int(line[1])
            last = int(line[2])
        except (ValueError, IndexError) as error:
            raise UsageError(
                f"{here}: line {number} is not a client and two rounds.", example
            ) from error
        if len(line) > len(COLUMNS) or not 1 <= first <= last < 2**62:
            raise UsageError(f"{here}: line {number} has no rounds from 1 on, in order.", example)
        spans.append((first, last))
    bounds = np.array(spans, np.int64)
    return AvailabilityTrace(
        tuple(line[0] for _, line in lines), bounds[:, 0], bounds[:, 1], digest
    )


def number_in(text: str) -> float | None:
    """The number that the value of an option is; None for one that is a file."""
    try:
        return float(text)
    except ValueError:
        return None


def lines_of_clients(
    path: Path, here: str, columns: Sequence[str], example: str
) -> tuple[list[tuple[int, list[str]]], str]:
    """The lines of a CSV file about clients, each with its number, and the sha256 of the file; names are stripped.

    ``here`` names option and file in errors, and ``example`` is their hint. Raises UsageError for a file that cannot be
    read, has other columns, or no line.
    """
    try:
        raw = path.read_bytes()
        lines = list(csv.reader(raw.decode("utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = f"it cannot be read as CSV ({type(error).__name__})"
        if isinstance(error, FileNotFoundError):
            why = "there is no such file"
        raise UsageError(f"{here}: {why}.", example) from error
    if not lines or tuple(word.strip() for word in lines[0]) != tuple(columns):
        raise UsageError(f"{here}: the first line is not {','.join(columns)}.", example)
    found = [
        (number, [line[0].strip(), *line[1:]]) for number, line in enumerate(lines[1:], 2) if line
    ]
    if not found:
        raise UsageError(f"{here}: it names no client.", example)
    return found, sha256_hex(raw)
