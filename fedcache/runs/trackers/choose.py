"""``--track NAME[:PLACE]``: which tracker is meant, whether it is installed, and the end of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from fedcache.config import Home, refuse_remote
from fedcache.errors import MachineError, UsageError, shell_word, unknown
from fedcache.plugins import KINDS, Plugin, find, offer, plugins
from fedcache.progress import Observer
from fedcache.runs.trackers.held_back import HeldBack, Tracker
from fedcache.runs.trackers.mlflow import MLflow
from fedcache.runs.trackers.tensorboard import TensorBoard
from fedcache.runs.trackers.trackio import Trackio
from fedcache.runs.trackers.wandb import WandB


@dataclass(frozen=True)
class TrackerKind:
    """A tracker of fedcache's own; its extra has its name."""

    packages: tuple[str, ...]  # as they are imported
    make: Callable[[Path], Tracker]  # of a folder
    variable: str = ""  # of the environment, that names a place
    default: str = ""  # folder below the directory of results, where nothing names one
    url: Callable[[str], Tracker] | None = (
        None  # of the address of a server or a database, where it takes one
    )
    look: str = (
        ""  # the command that shows what was written in ``{place}``, a path as the shell reads it
    )


TRACKERS = MappingProxyType(
    {
        "tensorboard": TrackerKind(
            ("tensorboard",),
            TensorBoard,
            default="tensorboard",
            look="tensorboard --logdir {place}",
        ),
        "mlflow": TrackerKind(
            ("mlflow", "sqlalchemy", "alembic"),
            MLflow,
            "MLFLOW_TRACKING_URI",
            "mlflow",
            MLflow,
            "mlflow ui --backend-store-uri sqlite:///{place}/mlflow.db",
        ),
        "wandb": TrackerKind(
            ("wandb",), WandB, "WANDB_DIR", look="wandb sync {place}/wandb/offline-run-*"
        ),
        "trackio": TrackerKind(
            ("trackio",), Trackio, "TRACKIO_DIR", "trackio", look="TRACKIO_DIR={place} trackio show"
        ),
    }
)
offer("trackers", tuple(TRACKERS))


def tracker(spec: str, runs: Path) -> Tracker:
    """The tracker of ``--track NAME[:PLACE]``.

    Without PLACE it writes where the library's environment says, else below the directory of results. Raises UsageError
    for an unknown name; MachineError, with the line that installs it, for a missing package.
    """
    name, colon, place = spec.partition(":")
    own = find("trackers", name)
    kind = TRACKERS.get(name)
    if kind is None and own is None:
        raise unknown("tracker", name, [*TRACKERS, *plugins("trackers")])
    if colon and not place:
        raise UsageError(
            f"--track {spec} has an empty directory.",
            f"For example --track {shell_word(name)}:boards",
        )
    if own is not None:
        folder = runs / name
        if place:
            folder = Path(place).expanduser()
        return _tracker_of(own, folder)
    assert kind is not None
    if missing := [package for package in kind.packages if find_spec(package) is None]:
        raise MachineError(
            f"--track {name} needs the package {missing[0]}, which is not installed.",
            f"pip install {shell_word(f'fedcache[{name}]')}",
        )
    folder_of_kind = _folder(kind, place, runs)
    if folder_of_kind is None:
        assert kind.url is not None
        return kind.url(place or os.environ[kind.variable])
    return kind.make(folder_of_kind)


def _folder(kind: TrackerKind, place: str, runs: Path) -> Path | None:
    """The folder of a tracker; None for the address of a server or a database."""
    place = place or os.environ.get(kind.variable, "")
    if kind.url is not None and ("://" in place or place == "databricks"):
        return None
    refuse_remote(place, "--track")
    if place:
        return Path(place).expanduser()
    return runs / kind.default


def look_at(spec: str, runs: Path) -> str | None:
    """The command that shows what ``--track`` wrote; None for a plug-in's, and where a server has it."""
    name, _, place = spec.partition(":")
    kind = TRACKERS.get(name)
    if kind is None or find("trackers", name) is not None:
        folder = None
    else:
        folder = _folder(kind, place, runs)
    if kind is None or folder is None:
        return None
    return kind.look.format(place=shell_word(folder.absolute()))


def _tracker_of(own: Plugin, place: Path) -> Tracker:
    """The tracker that a plug-in makes for a folder. Raises UsageError if it cannot be loaded or is no tracker."""
    make = own.load()
    if callable(make):
        made = make(place)
    else:
        made = make
    if not callable(made) or not callable(getattr(made, "close", None)):
        kind = type(made).__name__
        raise UsageError(
            f"The tracker {own.name!r} of {own.origin} makes a {kind}.",
            f"Expected {KINDS['trackers']}.",
        )
    tracker: Tracker = made
    return tracker


@contextmanager
def tracking(
    specs: str | Sequence[str] | None, home: Home, runs: Path | None, observer: Observer | None
) -> Iterator[tuple[Tracker, ...]]:
    """The hooks of ``--track``, one or several, none when it is not given; they are closed however the block ends.

    Failures to write at the end are reported to the observer: by then there is a result to keep. Raises FedcacheError,
    as ``tracker``.
    """
    if isinstance(specs, str):
        given = [specs]
    else:
        given = list(specs or ())
    if len({spec.partition(":")[0] for spec in given}) < len(given):
        raise UsageError(
            f"--track gives a tracker twice: {', '.join(given)}.", "Leave one of them out."
        )
    made = [(spec, HeldBack(tracker(spec, runs or home.runs))) for spec in given]
    with ExitStack() as opened:
        for spec, one in made:
            opened.callback(_close, spec, one, runs or home.runs, observer)
        yield tuple(one for _, one in made)


def _close(spec: str, made: Tracker, runs: Path, observer: Observer | None) -> None:
    """Close it, and say what shows it, or what went wrong."""
    try:
        made.close()
        command = None
        if not getattr(made, "failed", False):
            command = look_at(spec, runs)
        if observer is not None and command is not None:
            name = spec.partition(":")[0]
            observer.note(f"Tracked by {name}:  {command}")
    except Exception as error:
        kind = type(error).__name__
        text = f"--track {shell_word(spec)} could not be finished: {kind}: {error}"
        if observer is not None:
            observer.warn(text)
        else:
            warnings.warn(text, RuntimeWarning, stacklevel=6)
