"""Removal of files under ``FEDCACHE_HOME``: ``gc`` for files that nothing will read again, ``runs rm`` for runs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.config import Home
from fedcache.errors import FedcacheError, MachineError, UsageError
from fedcache.federate.methods import NAMES
from fedcache.runs.directory import MODELS, is_of_run, is_running, read_result
from fedcache.runs.identity import code_digest
from fedcache.runs.privacy_ledger import ROUNDS
from fedcache.runs.result_files import is_private
from fedcache.store.catalog import (
    DAY,
    folders_in,
    given_up_arrays,
    is_being_written,
    leftovers_of_stores,
    old_stores,
    size_of,
)
from fedcache.store.lock import is_alive, leftover_outputs
from fedcache.store.mirror import FOLDER, idle_mirrors

IDLE_DAYS = 7.0
"""Days without a change after which a run without a result counts as given up."""

PARTIAL = ".*.partial"
"""Names under which files are written before they have their own: ``store.files.write_atomic``."""

KINDS = ("leftovers", "given-up", "old-runs", "old-stores", "models")
DEFAULT = ("leftovers", "given-up")


@dataclass(frozen=True)
class Garbage:
    """One thing that can go."""

    path: Path  # a file or a directory
    kind: str  # of ``KINDS``
    why: str  # in words
    bytes: int  # that it takes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"path": str(self.path), "kind": self.kind, "why": self.why, "bytes": self.bytes}


def find_garbage(
    home: Home, kinds: Sequence[str] = DEFAULT, *, idle_days: float = IDLE_DAYS
) -> list[Garbage]:
    """Files that can be deleted, largest first; nothing is changed.

    leftovers are temporary files of killed processes and files in a store that neither its manifest nor a journal
    knows; given-up are runs without a result, unfinished arrays and copies of published stores that nothing has
    touched for ``idle_days``; old-runs are results of other code than this, which no command finds again; old-stores
    hold content that a dataset of the same name no longer has; models are those of every finished run, whose results
    stay.
    A store that is being written is left alone, and so is a damaged one.
    """
    found: dict[Path, Garbage] = {}
    finders: dict[str, Callable[[], Iterator[tuple[Path, str]]]] = {
        "leftovers": lambda: _leftovers(home),
        "given-up": lambda: _given_up(home, idle_days),
        "old-runs": lambda: _old_runs(home),
        "old-stores": lambda: old_stores(home),
        "models": lambda: _models(home),
    }
    for kind in kinds:
        for path, why in finders[kind]():
            found.setdefault(path, Garbage(path, kind, why, size_of(path)))
    return sorted(found.values(), key=lambda g: (-g.bytes, str(g.path)))


def remove(garbage: Sequence[Garbage]) -> list[Garbage]:
    """Delete it; what was deleted.

    Raises MachineError for what cannot be deleted; the rest of the list is left as it is.
    """
    done: list[Garbage] = []
    # the journal of an array before its chunks
    for one in sorted(garbage, key=lambda g: g.path.is_dir()):
        try:
            if one.path.is_dir() and not one.path.is_symlink():
                shutil.rmtree(one.path)
            else:
                one.path.unlink(missing_ok=True)
        except OSError as error:
            gone = f"{len(done)} of {len(garbage)} were deleted"
            raise MachineError(
                f"{one.path} cannot be deleted: {error.strerror}. {gone}.",
                "Check its owner and permissions, then run the same command again.",
            ) from error
        done.append(one)
    return done


def _leftovers(home: Home) -> Iterator[tuple[Path, str]]:
    flat = (
        home.root,
        home.stores,
        home.runs,
        *folders_in(home.runs),
        home.digests,
        home.root / "scratch",
    )
    deep = (
        *(
            home.root / name
            for name in ("recipes", "weights", "flower", "partitions", FOLDER, ROUNDS)
        ),
        *home.runs.glob(f"*/{MODELS}"),
    )
    written = (*(f.glob(PARTIAL) for f in flat), *(f.rglob(PARTIAL) for f in deep))
    for path in sorted(path for found in written for path in found):
        if not is_being_written(path):
            yield path, "left by a killed process"
    for path in folders_in(home.root / "flower" / "loopback"):
        pid = path.name.removeprefix("up.").partition("-")[0]
        if not (pid.isdigit() and is_alive(int(pid))):
            yield path, "keys and logs of a loopback federation that has ended"
    for path in leftover_outputs(home):
        yield path, "partial output of a killed process"
    yield from leftovers_of_stores(home)


def _given_up(home: Home, idle_days: float) -> Iterator[tuple[Path, str]]:
    for run in folders_in(home.runs):
        if (run / "result.json").exists() or not (run / "config.toml").exists():
            continue
        days = (
            time.time()
            - max((f.stat().st_mtime for f in run.rglob("*")), default=run.stat().st_mtime)
        ) / DAY
        if days >= idle_days:
            yield run, f"no result; last change {days:,.0f} days ago"
    yield from given_up_arrays(home, idle_days)
    yield from idle_mirrors(home, idle_days)


def _models(home: Home) -> Iterator[tuple[Path, str]]:
    for run in folders_in(home.runs):
        if not (run / "result.json").exists() or not (run / MODELS).is_dir():
            continue
        # a damaged result is another finding, and keeps what lies next to it
        with suppress(FedcacheError, OSError):
            # to train these again spends privacy again
            if not is_private(read_result(run / "result.json")):
                yield (
                    run / MODELS,
                    "trained models of a finished run; --fresh trains them again",
                )


def _old_runs(home: Home) -> Iterator[tuple[Path, str]]:
    current: dict[str, str] = {}
    for run in folders_in(home.runs):
        try:
            result = read_result(run / "result.json")
            method = str(result["method"])
        except (FedcacheError, OSError, KeyError):
            continue
        if method not in NAMES:
            continue  # the user's own: its code is not here to compare with
        if method not in current:
            current[method] = code_digest(method)
        if result.get("code") != current[method]:
            yield (
                run,
                f"result of {method} by an older version of the code; the same command recomputes it",
            )


# Removal of runs: their own files, and those that a tracker wrote of them.


BOARDS = "tensorboard"
"""Folder next to the runs in which ``--track tensorboard`` writes, by the runs' names."""


@dataclass(frozen=True)
class Removal:
    """Files that are removed with a run, and files that stay."""

    path: Path  # its directory
    parts: tuple[
        Path, ...
    ]  # what is deleted: the directory or its own files in it, and boards next to it
    kept: tuple[str, ...]  # names of files in it that are not the run's, and stay
    bytes: int


def plan_removal(folder: Path) -> Removal:
    """The removal of a run's directory; nothing is changed. Of a link only the link is removed.

    Raises UsageError for a run that is being trained.
    """
    if is_running(folder):
        raise UsageError(
            f"{folder.name} is being trained, so it is not removed.",
            "Wait until it ends, or stop it; finished rounds are kept.",
        )
    if folder.is_symlink():
        return Removal(folder, (folder,), (), 0)
    inside = sorted(folder.iterdir())
    # Files that the user put into the directory stay, and then so does the directory.
    other = [
        p
        for p in inside
        if p.name != MODELS and not is_of_run(p.name) and not p.name.endswith(".partial")
    ]
    board = folder.parent / BOARDS / folder.name
    parts = [folder]
    if other:
        parts = [p for p in inside if p not in other]
    if board.is_dir():
        parts.append(board)
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
            gone = f"{done} of {len(removals)} runs were deleted"
            raise MachineError(
                f"{one.path} cannot be deleted: {error.strerror}. {gone}.",
                "Check its owner and permissions, then run the same command again.",
            ) from error


def partitions_named(folder: Path, going: Collection[Path]) -> list[str]:
    """Names of other runs whose configuration uses a partition in this run's directory, without ``going``."""
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
    process = os.getpid()
    away = path.with_name(f".{path.name}.{process}-removed.partial")
    path.rename(away)
    shutil.rmtree(away)
