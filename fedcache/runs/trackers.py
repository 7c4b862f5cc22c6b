"""``--track NAME[:PLACE]``: find the tracker, check that it is installed, and close it at the end."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import platform
import shutil
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

from fedcache.config import Home, refuse_remote
from fedcache.errors import MachineError, UsageError, shell_word, unknown
from fedcache.parsing import Record, parse_toml
from fedcache.plugins import KINDS, Plugin, find, offer, plugins
from fedcache.progress import Observer, Round
from fedcache.runs.directory import PLACES, measured_of

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from torch.utils.tensorboard import SummaryWriter
    from wandb.sdk.wandb_run import Run

# Shared code of trackers: one tracked run for every run and seed, its parameters, and its final figures.

OPEN = 32
"""Maximum number of seeds that are written at the same time, because each needs a file and a thread. Rounds of other
seeds wait until one of these seeds has ended."""

PROJECT = "fedcache"
"""Default project or experiment of tracked runs; the library's environment variables take precedence."""

Seed = tuple[Path, int]
"""Directory of a run, and one of its seeds."""

Figures = Mapping[str, float]
"""Name -> final value."""


class SeedLog(Protocol):
    """Destination of the rounds of one seed."""

    def write(self, round_: Round) -> None:
        """Write one round."""

    def end(self, figures: Figures | None) -> None:
        """Write the final figures and close; they are None for a run that was stopped."""


class SeedTracker(ABC):
    """A tracker that has one tracked run for every run and seed.

    All rounds of a seed are passed to the tracker, even if training resumes from a checkpoint or the result is stored
    already. A tracked run of the same seed is replaced. So no round is repeated, and none is missing.

    Args:
        most_open: maximum number of seeds that are written at the same time, by default ``OPEN``; rounds of other seeds
            wait in memory.
    """

    def __init__(self, most_open: int | None = None) -> None:
        self._most_open = most_open or OPEN
        self._open: dict[Seed, SeedLog] = {}
        self._waiting: dict[Seed, list[Round]] = {}
        self.failed = False  # whether something could not be written

    @abstractmethod
    def begin(self, round_: Round) -> SeedLog:
        """Open the tracked run of a seed; ``round_`` is its first round."""

    def __call__(self, round_: Round) -> None:
        """Write one round, or keep it until another seed has ended."""
        key = (round_.path, round_.seed)
        if key not in self._open and len(self._open) >= self._most_open:
            self._waiting.setdefault(key, []).append(round_)
            return
        try:
            self._write(key, [*self._waiting.pop(key, []), round_])
        except Exception:
            self.failed = True
            raise

    def ended(self, path: Path, result: Record) -> None:
        """Write the final figures of a run, and close its seeds."""
        seeds = [key for key in (*self._open, *self._waiting) if key[0] == path]
        try:
            for key in seeds:
                self._write(key, self._waiting.pop(key, []))
                figures = final_figures(path, result, key[1])
                self._open.pop(key).end(figures)
        except Exception:
            self.failed = True
            raise

    def close(self) -> None:
        """Write the waiting rounds of runs without a result, and close all; after a failure nothing more is written."""
        while not self.failed and (self._open or self._waiting):
            key = next(iter((*self._open, *self._waiting)))
            self._write(key, self._waiting.pop(key, []))
            self._open.pop(key).end(None)
        for log in self._open.values():
            with suppress(Exception):  # the first failure was reported before
                log.end(None)
        self._open.clear()

    def _write(self, key: Seed, rounds: list[Round]) -> None:
        for round_ in rounds:
            if key not in self._open:
                self._open[key] = self.begin(round_)
            self._open[key].write(round_)


@dataclass(frozen=True)
class TrackedName:
    """Names of a tracked run."""

    key: str  # identifies the seed of the run; equal if it is tracked again
    name: str  # for the user
    group: str  # of the points of a grid, or of the seeds of a run; "" for a run with one seed


def name_of(round_: Round) -> TrackedName:
    """The names of the tracked run of a round."""
    words = [round_.method, f"seed {round_.seed}"]
    if round_.point:
        words.insert(1, round_.point)
    run = round_.path.name
    group = round_.grid
    # Without a grid, the seeds of a run are a group.
    if not group and round_.seeds > 1:
        group = f"{round_.method}-{run}"
    return TrackedName(f"{run}-seed-{round_.seed}", " ".join(words), group)


def metrics_of(round_: Round) -> dict[str, float]:
    """The figures of a round: ``accuracy``, ``bytes/up`` and ``bytes/down`` so far, ``diagnostics/<name>``.

    Figures that were not measured are left out.
    """
    figures = {}
    if round_.accuracy is not None:
        figures["accuracy"] = round_.accuracy
    figures["bytes/up"] = float(round_.sent_bytes)
    figures["bytes/down"] = float(round_.received_bytes)
    for name, value in round_.diagnostics.items():
        if value is not None:
            figures[f"diagnostics/{name}"] = value
    return figures


def parameters_of(round_: Round) -> dict[str, bool | int | float | str]:
    """Everything that determines the run of a round: its configuration and settings, digests, and versions."""
    file = {}
    with suppress(OSError, ValueError, KeyError):
        file = parse_toml((round_.path / "config.toml").read_text(encoding="utf-8"))["train"]
    # ``PLACES`` may differ between equal runs; the round itself has the settings and its seed.
    left_out = (*PLACES, "set", "seeds")
    from_file = {name: value for name, value in file.items() if name not in left_out}
    versions = {"version.python": platform.python_version()}
    for name in ("fedcache", "torch", "numpy"):
        with suppress(metadata.PackageNotFoundError):  # not installed, but run from a folder
            versions[f"version.{name}"] = metadata.version(name)
    parameters = {
        **from_file,
        **round_.settings,
        "method": round_.method,
        "seed": round_.seed,
        "rounds": round_.rounds,
        "point": round_.point or None,
        "grid": round_.grid or None,
        **round_.about,
        "run": round_.path.name,
        **versions,
    }
    return {key: _plain(value) for key, value in parameters.items() if value is not None}


def _plain(value: Any) -> bool | int | float | str:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, default=str)
    return str(value)


def final_figures(path: Path, result: Record, seed: int) -> dict[str, float]:
    """Final figures of a run: the values of one seed, and ``mean`` and ``std`` over all seeds. All are finite."""
    index = [int(number) for number in result["seeds"]].index(seed)
    values = {}
    for name in ("accuracy", "validation", "macro_f1"):
        figures = result.get(name) or {}
        per_seed = figures.get("per_seed") or []
        if index < len(per_seed):
            values[name] = per_seed[index]
        values[f"{name}_mean"] = figures.get("mean")
        values[f"{name}_std"] = figures.get("std")
    for name, value in result.get("fairness", {}).items():
        values[f"clients/{name}"] = value
    values["trainable_parameters"] = result.get("parameters", {}).get("trainable")
    measured = measured_of(path, result) or {}
    seconds = measured.get("seconds") or {}
    values["seconds"] = seconds.get("train")
    return {
        f"final/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


# Delayed metrics of private runs for trackers.
#
# Tracking libraries note the time at which each round is written. The time of a round grows with its number of
# clients, and the epsilon of a private run assumes that this number is secret. So a tracker gets all rounds of a
# private run at once, when the run has ended. With ``--dp-allow participants`` the participants are published and no
# round is delayed.


class Tracker(Protocol):
    """A hook that receives rounds and must be closed. It may also have a method ``ended(path, result)``."""

    def __call__(self, round_: Round) -> None:
        """Write one round."""

    def close(self) -> None:
        """Close the tracker after the last round."""


class HeldBack:
    """Delays the rounds of private runs until the run has ended, and passes all other rounds on immediately.

    Args:
        tracker: receives the rounds; of fedcache, or of a plug-in.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.__qualname__ = type(tracker).__name__  # the name of the hook in warnings
        self._rounds: dict[Path, list[Round]] = {}

    @property
    def failed(self) -> bool:
        """Whether something could not be written."""
        return bool(getattr(self.tracker, "failed", False))

    def __call__(self, round_: Round) -> None:
        """Pass on one round, or hold it back."""
        if round_.secret_times:
            self._rounds.setdefault(round_.path, []).append(round_)
        else:
            self.tracker(round_)

    def ended(self, path: Path, result: Record) -> None:
        """Pass on the delayed rounds of a run that has ended, and its result if the tracker has ``ended``."""
        self._release(path)
        if hasattr(self.tracker, "ended"):
            self.tracker.ended(path, result)

    def close(self) -> None:
        """Pass on the rounds of runs that were stopped, and close the tracker."""
        for path in list(self._rounds):
            self._release(path)
        self.tracker.close()

    def _release(self, path: Path) -> None:
        for round_ in self._rounds.pop(path, []):
            self.tracker(round_)


# TensorBoard: one folder of events for every run and seed.


class TensorBoard(SeedTracker):
    """Events of every run and seed for TensorBoard, in ``DIR/<run>/seed-<seed>``.

    The figures of every round and the final figures are scalars, and all parameters are text. The settings are also
    hyperparameters, with the accuracy of the last round.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def begin(self, round_: Round) -> EventFile:
        """A new file of events; older files of the seed are deleted."""
        from torch.utils.tensorboard import SummaryWriter

        place = self.folder / round_.path.name / f"seed-{round_.seed}"
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        return EventFile(SummaryWriter(str(place)), round_)


class EventFile:
    """The events of one seed."""

    def __init__(self, writer: SummaryWriter, first: Round) -> None:
        self._writer = writer
        self._last = first
        # All events of a private run get one time, so that the times of its rounds stay secret.
        self._moment = None
        if first.secret_times:
            self._moment = time.time()
        rows = []
        for key, value in parameters_of(first).items():
            cell = str(value).replace("|", "/")
            rows.append(f"| {key} | {cell} |")
        table = "\n".join(rows)
        writer.add_text("settings", f"| setting | value |\n|---|---|\n{table}")

    def write(self, round_: Round) -> None:
        """Write one point of every scalar, and in the last round the hyperparameters."""
        self._last = round_
        for name, value in metrics_of(round_).items():
            self._writer.add_scalar(name, value, round_.round, walltime=self._moment)
        if round_.round == round_.rounds and round_.accuracy is not None:
            given = {"method": round_.method, **round_.settings}
            plain = {name: _plain(value) for name, value in given.items()}
            # Without ``run_name``, the hyperparameters would be another run, in a folder with the time as its name.
            self._writer.add_hparams(plain, {"hparam/accuracy": round_.accuracy}, run_name=".")

    def end(self, figures: Figures | None) -> None:
        """Write the final figures at the last round, and close the file."""
        for name, value in (figures or {}).items():
            self._writer.add_scalar(name, value, self._last.round, walltime=self._moment)
        self._writer.close()


# trackio: one run for every run and seed, in a database on this machine.


class Trackio(SeedTracker):
    """Runs of the trackio project ``fedcache`` in ``DIR``; a run that was tracked before is replaced.

    trackio writes one run at a time. The rounds of other runs wait in memory until it has ended.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(1)  # one seed at a time
        self.folder = folder

    def begin(self, round_: Round) -> TrackioRun:
        """A new run of a seed. Raises UsageError if trackio was imported with another folder."""
        os.environ["TRACKIO_DIR"] = str(self.folder.absolute())  # read when the package is imported
        import trackio
        from trackio.utils import TRACKIO_DIR

        if Path(TRACKIO_DIR) != self.folder.absolute():
            folder = self.folder.absolute()
            raise UsageError(
                f"trackio already writes to {TRACKIO_DIR} in this process, so it cannot write to {folder}.",
                "Start a new process for another folder.",
            )
        name = name_of(round_)
        # trackio prints messages, but the standard output is for the answer of the command.
        with redirect_stdout(io.StringIO()):
            with suppress(ValueError):  # the project does not exist yet
                runs = trackio.Api().runs(PROJECT)
                for old in [run for run in runs if run.name == name.key]:
                    old.delete()
            trackio.init(
                project=PROJECT,
                name=name.key,
                group=name.group or None,
                config=parameters_of(round_),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return TrackioRun()


class TrackioRun:
    """The run of one seed, to which trackio writes until it is finished."""

    _last = 0

    def write(self, round_: Round) -> None:
        """Write the figures of a round, with its number as their step."""
        import trackio

        self._last = round_.round
        trackio.log(metrics_of(round_), step=round_.round)

    def end(self, figures: Figures | None) -> None:
        """Write the final figures at the last round, and close the run."""
        import trackio

        with redirect_stdout(io.StringIO()):
            if figures:
                trackio.log(dict(figures), step=self._last)
            trackio.finish()


# Weights & Biases: one run for every run and seed, only on disk unless ``WANDB_MODE`` says otherwise.

OFFLINE = "offline"


class WandB(SeedTracker):
    """Runs of Weights & Biases in ``DIR/wandb``; points of a grid, and seeds of a run, are a group.

    Offline, a run that was written before is replaced, and ``wandb sync`` sends the whole run. Online, a run with the
    same id is continued, and its rounds are not sent again.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def begin(self, round_: Round) -> WandBRun:
        """The run of a seed."""
        import wandb

        name = name_of(round_)
        mode = os.environ.get("WANDB_MODE") or OFFLINE
        resume: Any = "allow"
        if mode == OFFLINE:
            # Offline, a run that is logged again replaces the files of the one before.
            resume = None
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
            for old in (self.folder / "wandb").glob(f"offline-run-*-{name.key}"):
                shutil.rmtree(old)
        self.folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=name.key,
            name=name.name,
            group=name.group or None,
            dir=str(self.folder),
            mode=cast(Any, mode),
            config=parameters_of(round_),
            reinit="create_new",
            resume=resume,
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
            ),
        )
        return WandBRun(run)


class WandBRun:
    """The run of one seed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._logged = run.step  # rounds below this one were sent before

    def write(self, round_: Round) -> None:
        """Write the figures of a round, with its number as their step."""
        if round_.round >= self._logged:
            self._run.log(metrics_of(round_), step=round_.round)

    def end(self, figures: Figures | None) -> None:
        """Write the final figures into the summary, and close the run."""
        if figures is None:
            self._run.finish(exit_code=1)  # the run was stopped
            return
        self._run.summary.update(dict(figures))
        self._run.finish(exit_code=0)


# MLflow: one run for every run and seed, in a local database or on a tracking server.

KEY = "fedcache.key"
GROUP = "fedcache.group"
"""Tags of MLflow runs: the key by which the tracker finds the run of a seed or a group, and the group of a seed."""

FLUSH_SECONDS = 1.0
FLUSH_METRICS = 500
MOST_PARAMETERS = 100
"""Gathered metrics are written after ``FLUSH_SECONDS``, or as soon as there are ``FLUSH_METRICS``.

A call writes at most ``MOST_PARAMETERS`` parameters, the limit of MLflow.
"""


class MLflow(SeedTracker):
    """Runs of an MLflow experiment: one for every seed, nested in one for the grid or for the run of several seeds.

    A run that was tracked before is continued, and its rounds are not written again. If a seed is trained again, its
    old run is deleted. MLflow can restore deleted runs.

    Args:
        place: a tracking URI; or a folder with the database ``mlflow.db``.
    """

    def __init__(self, place: str | Path) -> None:
        super().__init__()
        self._folder: Path | None = None
        self.uri = str(place)
        if isinstance(place, Path):
            self._folder = place
            self.uri = f"sqlite:///{place.absolute() / 'mlflow.db'}"
        self._groups: dict[str, str] = {}  # name of a group -> id of its run

    def begin(self, round_: Round) -> MLflowRun:
        """The existing run of a seed, or a new one."""
        name = name_of(round_)
        with quiet():
            found = self._find(KEY, name.key)
            if found is not None and not round_.stored:
                self._client.delete_run(found)
                found = None
            if found is None:
                return MLflowRun(self._client, self._new(round_, name), set())
            # Every round that was written has this figure.
            logged = {metric.step for metric in self._client.get_metric_history(found, "bytes/up")}
            return MLflowRun(self._client, found, logged)

    def close(self) -> None:
        """Close the runs of groups too."""
        super().close()
        while self._groups and not self.failed:
            _, run = self._groups.popitem()
            with quiet():
                self._client.set_terminated(run)

    def _new(self, round_: Round, name: TrackedName) -> str:
        from mlflow.entities import Param

        tags = {KEY: name.key}
        if name.group:
            tags |= {GROUP: name.group, "mlflow.parentRunId": self._group(name.group)}
        run = self._create(name.name, tags)
        params = [Param(key, str(value)) for key, value in parameters_of(round_).items()]
        for start in range(0, len(params), MOST_PARAMETERS):
            self._client.log_batch(run, params=params[start : start + MOST_PARAMETERS])
        return run

    def _group(self, name: str) -> str:
        if name not in self._groups:
            self._groups[name] = self._find(KEY, name) or self._create(name, {KEY: name})
        return self._groups[name]

    def _create(self, name: str, tags: dict[str, str]) -> str:
        """Create a run of the experiment, and return its id."""
        tags = {**tags, "mlflow.source.name": "fedcache"}
        run = self._client.create_run(self._experiment, run_name=name, tags=tags)
        return str(run.info.run_id)

    def _find(self, tag: str, value: str) -> str | None:
        found = self._client.search_runs(
            [self._experiment], f"tags.`{tag}` = '{value}'", max_results=1
        )
        if found:
            return str(found[0].info.run_id)
        return None

    @cached_property
    def _client(self) -> MlflowClient:
        # MLflow must not send data that the user did not request.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        # This hides the messages about new tables of the database.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        return MlflowClient(self.uri)

    @cached_property
    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        place = None
        if self._folder is not None:
            place = (self._folder.absolute() / "artifacts").as_uri()
        return str(self._client.create_experiment(name, artifact_location=place))


@dataclass(eq=False)
class MLflowRun:
    """The run of one seed."""

    _client: MlflowClient
    _run: str
    _logged: set[int]  # the rounds that were written before

    def __post_init__(self) -> None:
        self._gathered: list[Any] = []
        # the time of all figures of a private run, in milliseconds since 1970
        self._moment: int | None = None
        self._written = time.monotonic()  # time of the last call that wrote figures
        self._last = 0  # the last round
        self._live = not self._logged  # whether MLflow shows the run as running

    def write(self, round_: Round) -> None:
        """Gather the figures of a round, and write gathered figures if there are many or some time has passed."""
        self._last = round_.round
        if round_.secret_times and self._moment is None:
            self._moment = int(1000 * time.time())
        if round_.round in self._logged:
            return
        if not self._live:
            with quiet():
                self._client.update_run(self._run, status="RUNNING")
            self._live = True
        self._gather(metrics_of(round_))
        waited = time.monotonic() - self._written
        if len(self._gathered) >= FLUSH_METRICS or waited > FLUSH_SECONDS:
            self._flush()

    def end(self, figures: Figures | None) -> None:
        """Write the final figures and close the run; nothing is written if the run was finished before."""
        with quiet():
            if not self._live and self._client.get_run(self._run).info.status == "FINISHED":
                return
            self._gather(dict(figures or {}))
            self._flush()
            status = "FINISHED"
            if figures is None:
                status = "KILLED"
            self._client.set_terminated(self._run, status=status)

    def _gather(self, figures: Figures) -> None:
        from mlflow.entities import Metric

        now = self._moment or int(1000 * time.time())
        self._gathered += [Metric(name, value, now, self._last) for name, value in figures.items()]

    def _flush(self) -> None:
        with quiet():
            for start in range(0, len(self._gathered), FLUSH_METRICS):
                self._client.log_batch(
                    self._run, metrics=self._gathered[start : start + FLUSH_METRICS]
                )
        self._gathered = []
        self._written = time.monotonic()


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings of MLflow's dependencies about each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
