"""Record of a grid: its command, its points and how each ended, as a file in the fedcache home.

Each grid has one file of lines under ``grids/`` of the home. The name of the file is a digest of the request, so the
same grid overwrites its earlier record. No result depends on a record, so a grid continues if its record cannot be
written. The points of a search are added as they are drawn.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.config import option_value, option_words
from fedcache.errors import CorruptionError, shell_word
from fedcache.parsing import in_a_list
from fedcache.store.files import (
    SealedLines,
    digest_of,
    first_of,
    make_private,
    read_sealed_lines,
    write_sealed_lines,
)
from fedcache.store.lock import this_process

if TYPE_CHECKING:  # reading a record must not import torch
    from fedcache.grids.request import GridRequest

FOLDER = "grids"
"""Folder of the records in the fedcache home."""


class GridRecord:
    """Writer of the record of a running grid: a line at its start, for each point that ends, and at its end.

    Args:
        request: the grid.
        search: name of a search; it does not change if the search is continued with more trials. None for a grid.
    """

    def __init__(self, request: GridRequest, search: str | None = None) -> None:
        points = []
        if not search:
            points = [[method, dict(sweep)] for method, sweep in request.points]
        # The directory of the runs, if it is not that of the home: no path inside the home is recorded, because a home
        # may be moved.
        elsewhere = ""
        if request.runs != request.home.runs:
            elsewhere = str(request.runs.resolve())
        command = command_of_grid(request)
        identity = [points, command, elsewhere]
        if search:
            # More trials change the command, but not the record. So the name of the search replaces points and command.
            identity = [search, search, elsewhere]
        name = digest_of(identity)[:16]
        self._file = request.home.root / FOLDER / f"{name}.jsonl"
        start: dict[str, Any] = {
            "process": this_process(),
            "started": time.time(),
            "command": command,
            "runs": elsewhere,
            "points": points,
        }
        if request.search is not None:
            start["trials"] = int(min(request.search.trials, request.search.size))
        self._lines: SealedLines | None = None
        with suppress(OSError):
            make_private(self._file.parent)
            write_sealed_lines(self._file, [start], _chain_start(self._file))
            self._lines = SealedLines(self._file, _chain_start(self._file))

    def point_drawn(self, number: int, method: str, sweep: Mapping[str, str]) -> None:
        """Record a point that a search has drawn. It replaces recorded points with this number and higher ones."""
        self._append({"drawn": number, "method": method, "sweep": dict(sweep)})

    def point_ended(self, number: int, **how: str | int) -> None:
        """Record the end of a point.

        ``how`` has ``run`` (the name of the directory), and for a pruned run also ``pruned`` (its last round). For a
        point without a run, it has only ``error``.
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
    """A record as one object; None without a record. Raises CorruptionError for a damaged one.

    The object holds the values of the first line, ``points`` (for a search the points drawn so far), ``ends`` (point ->
    its line), and for a grid that has ended ``ended`` and ``error``. An incomplete last line is ignored.
    """
    if not path.exists():
        return None
    try:
        lines = read_sealed_lines(path, _chain_start(path))
        if not lines:
            raise ValueError("is damaged: it has no complete line")
    except (OSError, ValueError) as error:
        raise CorruptionError(
            f"{path} {damage_of(error)}. The runs of the grid are not affected.",
            f"Remove the file. The grid command writes it again:  rm {shell_word(path)}",
        ) from error
    start = lines[0]
    points = [(str(method), dict(sweep)) for method, sweep in start["points"]]
    ends: dict[int, dict[str, Any]] = {}
    # Later lines replace earlier ones, because a search may forget its last trials and draw trials with their numbers
    # again. ``ends`` has none of them: the search forgets a trial before it records the end of this trial.
    end: dict[str, Any] = {}
    for line in lines[1:]:
        if "drawn" in line:
            point = (str(line["method"]), dict(line["sweep"]))
            del points[int(line["drawn"]) :]  # points that the search has forgotten
            points.append(point)
        elif "point" in line:
            ends[int(line["point"])] = line
        else:
            end = {key: line[key] for key in ("ended", "error") if key in line}
    return {**start, "points": points, "ends": ends, **end}


def damage_of(error: Exception) -> str:
    """The damage of a sealed file in words; a ValueError describes it."""
    if isinstance(error, ValueError):
        return str(error)
    return "cannot be read"


def _chain_start(path: Path) -> bytes:
    """Start of the chain of seals: it ties the lines to this record."""
    return first_of({"kind": "record of a grid", "grid": path.stem})


def command_of_grid(request: GridRequest) -> str:
    """One line for a shell: the methods, the sweeps, and every option that is not at its default."""
    words = ["fedcache", "grid", "--method", ",".join(request.methods)]
    for key, values in request.sweeps.items():
        words += ["--sweep", f"{key}={in_a_list(values)}"]
    sampling = request.sampling
    search = {
        "--sampler": (sampling.sampler, "grid"),
        "--trials": (sampling.trials, None),
        "--pruner": (sampling.pruner, "none"),
    }
    words += _changed(search)
    words += option_words(request.config, without=("method",))
    words += option_words(request.partition)
    further = {
        "--repartition": (request.repartition, False),
        "--no-extract": (not request.extract, False),
        "--exact": (request.exact, False),
        "--retrain": (request.retrain, False),
        "--score": (request.score, None),
        "--save-models": (request.save.which, "best"),
        "--save-clients": (request.save.clients, None),
        "--runs": (request.runs, request.home.runs),
    }
    words += _changed(further)
    return shlex.join(words)


def _changed(options: Mapping[str, tuple[object, object]]) -> list[str]:
    """Command-line words of the options that are not at their default; ``options`` is option -> (value, default)."""
    words = []
    for option, (value, default) in options.items():
        if value != default:
            words.append(option)
            if value is not True:
                words.append(option_value(value))
    return words
