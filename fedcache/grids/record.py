"""Record of a grid: its command, its points and how each ended, kept next to its runs.

One file of lines per grid under ``grids/`` of the home, named by a digest of what was asked, so that the same grid
asked again takes the place of the record before. No result depends on it: where it cannot be written, the grid goes on.
The points of a search are told as they are drawn.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.errors import CorruptionError, shell_word
from fedcache.option_info import option_name, option_value
from fedcache.store.files import digest_of, make_private
from fedcache.store.lock import this_process
from fedcache.store.sealed import SealedLines, first_of, read_sealed_lines, write_sealed_lines

if TYPE_CHECKING:  # what reads a record imports no torch
    from fedcache.grids.request import GridRequest

FOLDER = "grids"
"""Of the home: where the records are."""


class GridRecord:
    """The record of a grid under way, a context: a line when it begins, one per point that ends, one at its end.

    Args:
        request: the grid.
        search: name of the search that it is, which has the same with more trials; None for a grid.
    """

    def __init__(self, request: GridRequest, search: str | None = None) -> None:
        if search:
            points = []
        else:
            points = [[method, dict(sweep)] for method, sweep in request.points]
        # a home may be moved
        elsewhere = ""
        if request.runs != request.home.runs:
            elsewhere = str(request.runs.resolve())
        command = command_of_grid(request)
        what = [search or points, search or command, elsewhere]
        self._file = request.home.root / FOLDER / f"{digest_of(what)[:16]}.jsonl"
        told: dict[str, Any] = {
            "process": this_process(),
            "started": time.time(),
            "command": command,
            "runs": elsewhere,
            "points": points,
        }
        if request.search is not None:
            told["trials"] = int(min(request.search.trials, request.search.size))
        self._lines: SealedLines | None = None
        with suppress(OSError):
            make_private(self._file.parent)
            write_sealed_lines(self._file, [told], _first(self._file))
            self._lines = SealedLines(self._file, _first(self._file))

    def point_drawn(self, number: int, method: str, sweep: Mapping[str, str]) -> None:
        """A search has drawn a point; one that had this number before is forgotten."""
        self._append({"drawn": number, "method": method, "sweep": dict(sweep)})

    def point_ended(self, number: int, **how: str | int) -> None:
        """A point has ended: ``run``, the name of its directory, with ``pruned``, the round after which it was; or
        ``error``.
        """
        self._append({"point": number, **how})

    def __enter__(self) -> GridRecord:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> None:
        line: dict[str, Any] = {"ended": time.time()}
        if error is not None:
            line["error"] = getattr(error, "message", "") or type(error).__name__
        self._append(line)

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._lines is not None:
            with suppress(OSError):
                self._lines.append(line)


def read_record(path: Path) -> dict[str, Any] | None:
    """A record as one object: what its first line says, ``points`` (of a search those that are drawn, of ``trials``),
    ``ends`` (point -> its line), and ``ended`` and ``error`` where the grid is over; None where there is no record.
    A last line that is being written is left out. Raises CorruptionError for a damaged record.
    """
    if not path.exists():
        return None
    try:
        lines = read_sealed_lines(path, _first(path))
        if not lines:
            raise ValueError("is damaged: it has no whole line")
    except (OSError, ValueError) as error:
        why = error if isinstance(error, ValueError) else "cannot be read"
        raise CorruptionError(
            f"{path} {why}. No run of the grid depends on it.",
            f"Remove it; the command of the grid writes it again:  rm {shell_word(path)}",
        ) from error
    told = lines[0]
    points = [(str(method), dict(sweep)) for method, sweep in told["points"]]
    ends: dict[int, dict[str, Any]] = {}
    over: dict[str, Any] = {}
    for line in lines[1:]:
        if "drawn" in line:
            points[int(line["drawn"]) :] = [(str(line["method"]), dict(line["sweep"]))]
        elif "point" in line:
            ends[int(line["point"])] = line
        else:
            over = {key: line[key] for key in ("ended", "error") if key in line}
    return {**told, "points": points, "ends": ends, **over}


def _first(path: Path) -> bytes:
    """What the first line of a record is sealed for."""
    return first_of({"kind": "record of a grid", "grid": path.stem})


def command_of_grid(request: GridRequest) -> str:
    """One line for a shell: the methods, the sweeps, and every option that is not its default."""
    words = ["fedcache", "grid", "--method", ",".join(request.methods)]
    for key, values in request.sweeps.items():
        words += ["--sweep", f"{key}={','.join(values)}"]
    how = request.sampling
    drawn = {
        "--sampler": (how.sampler, "grid"),
        "--trials": (how.trials, None),
        "--pruner": (how.pruner, "none"),
    }
    others = {
        "--repartition": (request.repartition, False),
        "--no-extract": (not request.extract, False),
        "--exact": (request.exact, False),
        "--retrain": (request.retrain, False),
        "--score": (request.score, None),
        "--save-models": (request.save.which, "best"),
        "--save-clients": (request.save.clients, None),
        "--runs": (request.runs, request.home.runs),
    }
    words += _changed(drawn)
    words += option_words(request.config, without=("method",)) + option_words(request.partition)
    return shlex.join([*words, *_changed(others)])


def _changed(options: Mapping[str, tuple[object, object]]) -> list[str]:
    """The options whose value is not their default, as words: option -> value and default."""
    words = []
    for option, (value, default) in options.items():
        if value != default:
            words.append(option)
            if value is not True:
                words.append(option_value(value))
    return words


def option_words(config: Any, without: Sequence[str] = ()) -> list[str]:
    """The options of the command line that make a configuration, as words; what has its default is left out."""
    words: list[str] = []
    for item in fields(config):
        value = getattr(config, item.name)
        default = item.default
        if item.name in without or value in (default, None, (), {}):
            continue
        option = option_name(item)
        if isinstance(value, Mapping):
            for key, one in value.items():
                words += [option, f"{key}={option_value(one)}"]
        else:
            words += _changed({option: (value, default)})
    return words
