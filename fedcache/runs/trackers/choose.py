"""``--track NAME[:PLACE]``: find the tracker, check that it is installed, and close it at the end."""

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
    """A tracker of fedcache itself; the extra that installs it has its name."""

    packages: tuple[str, ...]  # names for import
    make: Callable[[Path], Tracker]  # makes a tracker that writes into a folder
    variable: str = ""  # environment variable with a place; "" if the library has none
    # folder below the directory of results, if no place is given; "" is that directory itself
    default: str = ""
    # makes a tracker for the address of a server or a database, if it can write there
    url: Callable[[str], Tracker] | None = None
    look: str = ""  # command that shows the results in ``{place}``, a path quoted for the shell


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
            variable="MLFLOW_TRACKING_URI",
            default="mlflow",
            url=MLflow,
            look="mlflow ui --backend-store-uri sqlite:///{place}/mlflow.db",
        ),
        "wandb": TrackerKind(
            ("wandb",),
            WandB,
            variable="WANDB_DIR",
            look="wandb sync {place}/wandb/offline-run-*",
        ),
        "trackio": TrackerKind(
            ("trackio",),
            Trackio,
            variable="TRACKIO_DIR",
            default="trackio",
            look="TRACKIO_DIR={place} trackio show",
        ),
    }
)
offer("trackers", tuple(TRACKERS))


def tracker(spec: str, runs: Path) -> Tracker:
    """The tracker of ``--track NAME[:PLACE]``.

    Without PLACE it writes to the place in the environment variable of its library, else below the directory of
    results. Raises UsageError for an unknown name; MachineError for a missing package, with the command that installs
    it.
    """
    name, colon, place = spec.partition(":")
    plugin = find("trackers", name)
    kind = TRACKERS.get(name)
    if kind is None and plugin is None:
        raise unknown("tracker", name, [*TRACKERS, *plugins("trackers")])
    if colon and not place:
        raise UsageError(
            f"--track {spec} names no directory after the colon.",
            f"For example --track {shell_word(name)}:boards",
        )
    if plugin is not None:
        folder = runs / name
        if place:
            folder = Path(place).expanduser()
        return _tracker_of(plugin, folder)
    assert kind is not None
    missing = [package for package in kind.packages if find_spec(package) is None]
    if missing:
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
    # MLflow also takes the address ``databricks``, which has no scheme.
    if kind.url is not None and ("://" in place or place == "databricks"):
        return None
    refuse_remote(place, "--track")
    if place:
        return Path(place).expanduser()
    return runs / kind.default


def look_at(spec: str, runs: Path) -> str | None:
    """The command that shows the results of ``--track``; None for a plug-in, and for results on a server."""
    name, _, place = spec.partition(":")
    kind = TRACKERS.get(name)
    if kind is None or find("trackers", name) is not None:
        return None
    folder = _folder(kind, place, runs)
    if folder is None:
        return None
    return kind.look.format(place=shell_word(folder.absolute()))


def _tracker_of(plugin: Plugin, place: Path) -> Tracker:
    """The tracker that a plug-in makes for a folder. Raises UsageError if it cannot be loaded or is no tracker."""
    made = plugin.load()
    # The plug-in must be a function that makes the tracker. Another object is refused below.
    if callable(made):
        made = made(place)
    # A tracker is called with each round, and closed at the end.
    if not callable(made) or not callable(getattr(made, "close", None)):
        kind = type(made).__name__
        raise UsageError(
            f"The plug-in {plugin.name!r} of {plugin.origin} gave a {kind} instead of a tracker.",
            f"Expected {KINDS['trackers']}.",
        )
    tracker: Tracker = made
    return tracker


@contextmanager
def tracking(
    specs: str | Sequence[str] | None, home: Home, runs: Path | None, observer: Observer | None
) -> Iterator[tuple[Tracker, ...]]:
    """The trackers of ``--track``, none if it is not given. They are closed after the block, also after an error.

    Errors while a tracker is closed are reported to the observer, because the results of runs exist already. Raises
    FedcacheError, as ``tracker``.
    """
    runs = runs or home.runs
    if isinstance(specs, str):
        specs = [specs]
    given = list(specs or ())
    names = {spec.partition(":")[0] for spec in given}
    if len(names) < len(given):
        listed = ", ".join(given)
        raise UsageError(f"--track gives a tracker twice: {listed}.", "Leave one of them out.")
    trackers = tuple(HeldBack(tracker(spec, runs)) for spec in given)
    with ExitStack() as opened:
        for spec, hook in zip(given, trackers, strict=True):
            opened.callback(_close, spec, hook, runs, observer)
        yield trackers


def _close(spec: str, hook: Tracker, runs: Path, observer: Observer | None) -> None:
    """Close a tracker, and report the command that shows its results, or its error."""
    try:
        hook.close()
        command = None
        if not getattr(hook, "failed", False):
            command = look_at(spec, runs)
        if observer is not None and command is not None:
            name = spec.partition(":")[0]
            observer.note(f"The runs are recorded with {name}. To see them:  {command}")
    except Exception as error:
        kind = type(error).__name__
        text = f"--track {shell_word(spec)} could not be finished: {kind}: {error}"
        if observer is not None:
            observer.warn(text)
        else:
            # Frame 6 has the ``with tracking(...)`` block; frames 2 to 5 are those of the context managers.
            warnings.warn(text, RuntimeWarning, stacklevel=6)
