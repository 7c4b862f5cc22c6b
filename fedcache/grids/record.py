"""Record of a grid: its command, its points and how each ended, as a file in the fedcache home.

Each grid has one file of lines under ``grids/`` of the home. The name of the file is a digest of the request, so the
same grid overwrites its earlier record. No result depends on a record, so a grid continues if its record cannot be
written. The points of a search are added as they are drawn.
"""

from __future__ import annotations

from pathlib import Path

from fedcache.errors import CorruptionError, shell_word
from fedcache.parsing import Facts
from fedcache.store.files import first_of, read_sealed_lines

FOLDER = "grids"
"""Folder of the records in the fedcache home."""


def read_record(path: Path) -> Facts | None:
    """A record as one object; None without a record. Raises CorruptionError for a damaged one.

    The object holds the values of the first line, ``points`` (for a search the points drawn so far), ``ends`` (point ->
    its line), and for a grid that has ended ``ended`` and ``error``. An incomplete last line is ignored.
    """
    if not path.exists():
        return None
    try:
        lines = read_sealed_lines(path, chain_start(path))
        if not lines:
            raise ValueError("is damaged: it has no complete line")
    except (OSError, ValueError) as error:
        raise CorruptionError(
            f"{path} {damage_of(error)}. The runs of the grid are not affected.",
            f"Remove the file. The grid command writes it again:  rm {shell_word(path)}",
        ) from error
    start = lines[0]
    points = [(str(method), dict(sweep)) for method, sweep in start["points"]]
    ends: dict[int, Facts] = {}
    # Later lines replace earlier ones, because a search may forget its last trials and draw trials with their numbers
    # again. ``ends`` has none of them: the search forgets a trial before it records the end of this trial.
    end: Facts = {}
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


def chain_start(path: Path) -> bytes:
    """Start of the chain of seals: it ties the lines to this record."""
    return first_of({"kind": "record of a grid", "grid": path.stem})
