"""Removal of runs: their own files, and those that a tracker wrote of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedcache.errors import MachineError, UsageError
from fedcache.runs.directory import MODELS, is_of_run, is_running
from fedcache.store.catalog import size_of

BOARDS = "tensorboard"
"""Folder beside the runs in which ``--track tensorboard`` writes, by the runs' names."""


@dataclass(frozen=True)
class Removal:
    """What goes with a run."""

    path: Path  # its directory
    parts: tuple[
        Path, ...
    ]  # what is deleted: the directory or its own files in it, and boards of it beside
    kept: tuple[str, ...]  # names of files in it that are not the run's, and stay
    bytes: int


def plan_removal(folder: Path) -> Removal:
    """What goes with the run of a directory; nothing is changed. Of a link the link alone goes.

    Raises UsageError for a run that is being trained.
    """
    if is_running(folder):
        raise UsageError(
            f"{folder.name} is being trained now, and not removed.",
            "Let it end, or stop it: its finished rounds stay.",
        )
    if folder.is_symlink():
        return Removal(folder, (folder,), (), 0)
    inside = sorted(folder.iterdir())
    other = [
        p
        for p in inside
        if p.name != MODELS and not is_of_run(p.name) and not p.name.endswith(".partial")
    ]
    board = folder.parent / BOARDS / folder.name
    if not other:
        parts = [folder]
    else:
        parts = [p for p in inside if p not in other]
    parts += [board] if board.is_dir() else []
    return Removal(folder, tuple(parts), tuple(p.name for p in other), sum(map(size_of, parts)))


def remove_runs(removals: Sequence[Removal]) -> None:
    """Delete what was planned.

    A directory is renamed before it is emptied: what a kill leaves behind is no damaged run.

    Raises MachineError for what cannot be deleted; runs before it are gone.
    """
    for done, one in enumerate(removals):
        try:
            # The result first, so that what a kill leaves is never a result without its files.
            for part in sorted(one.parts, key=lambda p: p.name != "result.json"):
                _delete(part)
        except OSError as error:
            raise MachineError(
                f"{one.path} cannot be deleted: {error.strerror}. {done} of {len(removals)} runs are gone.",
                "Look at its owner and mode, then run the same command again.",
            ) from error


def partitions_named(folder: Path, going: Collection[Path]) -> list[str]:
    """The names of runs beside that of a directory, and not ``going``, whose configuration names a partition in it."""
    users = []
    for config in sorted(folder.parent.glob("*/config.toml")):
        if config.parent not in going:
            with suppress(OSError):
                if f"{folder.name}/partition-".encode() in config.read_bytes():
                    users.append(config.parent.name)
    return users


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # `gc` finds it when this process is dead
    away = path.with_name(f".{path.name}.{os.getpid()}-removed.partial")
    path.rename(away)
    shutil.rmtree(away)
