"""Removal of files under ``FEDCACHE_HOME``: ``gc`` for files that no command reads again, ``runs rm`` for runs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedcache.config import Home
from fedcache.errors import FedcacheError, MachineError, UsageError
from fedcache.federate.methods import NAMES
from fedcache.parsing import Facts
from fedcache.runs.directory import (
    MODELS,
    code_digest,
    is_of_run,
    is_private,
    is_running,
    read_result,
)
from fedcache.runs.privacy_ledger import ROUNDS
from fedcache.store.catalog import (
    DAY,
    folders_in,
    given_up_arrays,
    is_being_written,
    leftovers_of_stores,
    old_stores,
    size_of,
)
from fedcache.store.files import HOST
from fedcache.store.lock import is_alive, leftover_outputs
from fedcache.store.mirror import FOLDER, idle_mirrors

PARTIAL = ".*.partial"
"""Pattern of files that ``store.files.write_atomic`` is still writing."""

KINDS = ("leftovers", "given-up", "old-runs", "old-stores", "models")
DEFAULT = ("leftovers", "given-up")


@dataclass(frozen=True)
class Garbage:
    """A file or directory that can be deleted."""

    path: Path
    kind: str  # of ``KINDS``
    why: str  # the reason, for the user
    bytes: int  # on disk

    def to_dict(self) -> Facts:
        """Plain JSON values."""
        return {**vars(self), "path": str(self.path)}


def find_garbage(home: Home, kinds: Sequence[str], *, idle_days: float) -> list[Garbage]:
    """Files that can be deleted, largest first; nothing is changed.

    - leftovers: temporary files of killed processes; files in a store that neither its manifest nor a journal lists.
    - given-up: runs without a result, unfinished arrays, and copies of published stores, if they did not change for
      ``idle_days``.
    - old-runs: results of another version of the code, which no command finds again.
    - old-stores: stores with content that the dataset of the same name no longer has.
    - models: the models of every finished run; the results stay.

    A store that is being written, or that is damaged, is never in the list.
    """
    found: dict[Path, Garbage] = {}
    # Each one searches when it is iterated.
    finders = {
        "leftovers": _leftovers(home),
        "given-up": _given_up(home, idle_days),
        "old-runs": _old_runs(home),
        "old-stores": old_stores(home),
        "models": _models(home),
    }
    for kind in kinds:
        for path, why in finders[kind]:
            found.setdefault(path, Garbage(path, kind, why, size_of(path)))
    return sorted(found.values(), key=lambda item: (-item.bytes, str(item.path)))


def _cannot_delete(path: Path, error: OSError, deleted: str) -> FedcacheError:
    """The error of a file that cannot be deleted; ``deleted`` counts the items that were deleted before it."""
    return MachineError(
        f"{path} cannot be deleted: {error.strerror}. {deleted} were deleted.",
        "Check its owner and permissions, then run the same command again.",
    )


def remove(garbage: Sequence[Garbage]) -> None:
    """Delete files and directories.

    Raises MachineError if one of them cannot be deleted; the rest of the list then stays.
    """
    # Files are deleted before directories, so that the journal of an array goes before its chunks.
    paths = sorted((item.path for item in garbage), key=Path.is_dir)
    for done, path in enumerate(paths):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise _cannot_delete(path, error, f"{done} of {len(garbage)}") from error


def _leftovers(home: Home) -> Iterator[tuple[Path, str]]:
    folders = (
        home.root,
        home.stores,
        home.runs,
        *folders_in(home.runs),
        home.digests,
        home.root / "scratch",
    )
    names = ("recipes", "weights", "flower", "partitions", FOLDER, ROUNDS)
    with_subfolders = [home.root / name for name in names]
    with_subfolders += home.runs.glob(f"*/{MODELS}")
    written: list[Path] = []
    for folder in folders:
        written += folder.glob(PARTIAL)
    for folder in with_subfolders:
        written += folder.rglob(PARTIAL)
    for path in sorted(written):
        if not is_being_written(path):
            yield path, "left by a killed process"
    # The name of a loopback folder is up.PID-..., with the number of the process that made it.
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
        times = (file.stat().st_mtime for file in run.rglob("*"))
        last = max(times, default=run.stat().st_mtime)
        days = (time.time() - last) / DAY
        if days >= idle_days:
            yield run, f"no result; last change {days:,.0f} days ago"
    yield from given_up_arrays(home, idle_days)
    yield from idle_mirrors(home, idle_days)


def _models(home: Home) -> Iterator[tuple[Path, str]]:
    for run in folders_in(home.runs):
        if not (run / "result.json").exists() or not (run / MODELS).is_dir():
            continue
        # The models of a damaged result stay.
        with suppress(FedcacheError, OSError):
            # Models of a private run stay, because training them again spends privacy again.
            if not is_private(read_result(run / "result.json")):
                yield (
                    run / MODELS,
                    "trained models of a finished run; --fresh trains the models again",
                )


def _old_runs(home: Home) -> Iterator[tuple[Path, str]]:
    current = {}
    for run in folders_in(home.runs):
        try:
            result = read_result(run / "result.json")
            method = str(result["method"])
        except (FedcacheError, OSError, KeyError):
            continue
        if method not in NAMES:
            continue  # a method of the user, whose code cannot be compared
        if method not in current:
            current[method] = code_digest(method)
        if result.get("code") != current[method]:
            yield (
                run,
                f"result of {method}, made by an older version of the code; the run's command "
                "recomputes it",
            )


# Removal of runs: their own files, and those of a tracker.


BOARDS = "tensorboard"
"""Folder next to the runs in which ``--track tensorboard`` writes one folder for each run."""


@dataclass(frozen=True)
class Removal:
    """Files that are removed with a run, and files that stay."""

    path: Path  # directory of the run
    # paths that are deleted: the directory, or the run's files in it, and the folder of its tracker
    parts: tuple[Path, ...]
    kept: tuple[str, ...]  # names of files in the directory that are not the run's, and stay
    bytes: int


def plan_removal(folder: Path) -> Removal:
    """The removal of a run's directory; nothing is changed. If it is a link, only the link is removed.

    Raises UsageError for a run that is being trained.
    """
    if is_running(folder):
        raise UsageError(
            f"{folder.name} is being trained, so it is not removed.",
            "Wait until it ends, or stop it; finished rounds are kept.",
        )
    if folder.is_symlink():
        return Removal(folder, (folder,), (), 0)
    run_files = []
    kept = []  # files that the user put into the directory
    for path in sorted(folder.iterdir()):
        is_own = path.name == MODELS or is_of_run(path.name)
        if is_own or path.name.endswith(".partial"):
            run_files.append(path)
        else:
            kept.append(path.name)
    # If files are kept, the directory stays too.
    parts = [folder]
    if kept:
        parts = run_files
    board = folder.parent / BOARDS / folder.name
    if board.is_dir():
        parts.append(board)
    return Removal(folder, tuple(parts), tuple(kept), sum(map(size_of, parts)))


def remove_runs(removals: Sequence[Removal]) -> None:
    """Delete the files of planned removals.

    A directory is renamed before its files are deleted, so a kill leaves no damaged run.

    Raises MachineError if a file cannot be deleted; the runs before it are deleted.
    """
    for done, removal in enumerate(removals):
        try:
            # The result is deleted first, so that a kill never leaves a result without its files.
            for part in sorted(removal.parts, key=lambda path: path.name != "result.json"):
                _delete(part)
        except OSError as error:
            deleted = f"{done} of {len(removals)} runs"
            raise _cannot_delete(removal.path, error, deleted) from error


def partitions_named(folder: Path, going: Collection[Path]) -> list[str]:
    """Names of other runs whose configuration uses a partition in this run's directory.

    ``going`` are directories of runs that are removed too, and not listed.
    """
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
    # `gc` deletes this directory if the process is killed.
    process = os.getpid()
    away = path.with_name(f".{path.name}.{process}-{HOST}-removed.partial")
    path.rename(away)
    shutil.rmtree(away)
