"""The result stream: what each round of a run gave, told to an observer, to hooks, and to trackers (``--track``).

A tracker is a hook that writes the stream somewhere else, so a run does not know of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedcache.config import Home
from fedcache.errors import MachineError, UsageError, unknown
from fedcache.plugins import KINDS, Plugin, find, offer, plugins
from fedcache.progress import Observer, Round, Silent
from fedcache.runs.directory import rounds_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


OnRound = Callable[[Round], object]
"""A hook on the result stream."""

MEASURED = ("accuracy", "seconds", "clients")
"""What the engine's metrics of a round hold besides the method's diagnostics."""

OPEN = 32
"""Seeds whose files are open at a time: each is a file and a thread. Points of a grid beyond them are written when they
end."""

TRACKERS = ("tensorboard",)
offer("trackers", TRACKERS)


@dataclass(frozen=True)
class GridPosition:
    """Where a run stands in a grid; the default is a run alone."""

    point: str = ""  # its swept values in words
    done: int = 0  # points that had ended before
    points: int = 1  # of the grid


ALONE = GridPosition()


class RunEvents:
    """Tells an observer of the rounds of one run, and counts what they have sent.

    Args:
        observer: is told.
        path: directory of the run.
        facts: what ``result.json`` says under these names: method, seeds, rounds, and what ``shown_settings`` reads.
        position: in a grid.
    """

    def __init__(
        self, observer: Observer, path: Path, facts: Mapping[str, Any], position: GridPosition = ALONE
    ) -> None:
        self.observer, self.path, self.position = observer, path, position
        self.method, self.rounds = str(facts["method"]), int(facts["rounds"])
        self.seeds = [int(s) for s in facts["seeds"]]
        self.settings = shown_settings(facts)
        self._sums: dict[int, tuple[int, int]] = {}

    def round_ended(self, seed: int, round_: int, metrics: Mapping[str, Any], traffic: Mapping[str, int]) -> None:
        """A round as the engine's ``on_round`` has it: metrics hold the accuracy and the method's diagnostics."""
        diagnostics = {k: v for k, v in metrics.items() if k not in MEASURED}
        self._publish(seed, round_, metrics["accuracy"], diagnostics, traffic, stored=False)

    def replay(self, seed: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Rounds of a seed that were computed before: of a checkpoint, of a finished seed, or of a stored run."""
        for r in records:
            self._publish(seed, int(r["round"]), r["accuracy"], r.get("diagnostics", {}), r["traffic"], stored=True)

    def _publish(
        self,
        seed: int,
        round_: int,
        accuracy: float | None,
        diagnostics: Mapping[str, float | None],
        traffic: Mapping[str, int],
        *,
        stored: bool,
    ) -> None:
        up, down = self._sums.get(seed, (0, 0))
        sent, received = self._sums[seed] = (up + traffic["up_bytes"], down + traffic["down_bytes"])
        self.observer.told(
            Round(
                path=self.path,
                method=self.method,
                seed=seed,
                seed_number=self.seeds.index(seed) + 1,
                seeds=len(self.seeds),
                round=round_,
                rounds=self.rounds,
                accuracy=number(accuracy),
                diagnostics={k: number(v) for k, v in diagnostics.items()},
                up_bytes=traffic["up_bytes"],
                down_bytes=traffic["down_bytes"],
                sent_bytes=sent,
                received_bytes=received,
                point=self.position.point,
                points_done=self.position.done,
                points=self.position.points,
                stored=stored,
                settings=self.settings,
            )
        )


def number(value: float | None) -> float | None:
    """A float that JSON has, or None."""
    return float(value) if value is not None and math.isfinite(value) else None


def shown_settings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was asked to do, flat: the words of its result and every hyperparameter."""
    plain = {k: facts[k] for k in ("preset", "participation", "dtype") if k in facts}
    return {
        "dataset": facts["dataset"]["slug"],
        "backbones": " + ".join(map(str, facts["backbones"])),
        **plain,
        **{k: "auto" if v is None else v for k, v in facts["hyperparameters"].items()},
    }


def replay_stored(observer: Observer, path: Path, result: Mapping[str, Any], position: GridPosition = ALONE) -> None:
    """All rounds of a run whose result is there."""
    events = RunEvents(observer, path, result, position)
    for record in rounds_of(path):
        events.replay(int(record["seed"]), [record])


class HookedObserver(Silent):
    """An observer that also hands every round to hooks.

    A hook that raises is told of and not called again, and the run goes on: tracking never costs a training.

    Args:
        observer: everything is passed on to it; None for nobody, and then a failure is a Python warning.
        hooks: called with every round.
    """

    def __init__(self, observer: Observer | None, hooks: Sequence[OnRound]) -> None:
        self._observer, self._heard = observer or Silent(), observer is not None
        self._hooks = list(hooks)
        for passed_on in ("note", "warn", "start", "advance", "stop"):
            setattr(self, passed_on, getattr(self._observer, passed_on))

    def told(self, round_: Round) -> None:
        """Passed on, and to every hook."""
        self._observer.told(round_)
        for hook in list(self._hooks):
            try:
                hook(round_)
            except Exception as error:
                self._hooks.remove(hook)
                self._failed(hook, round_, error)

    def _failed(self, hook: OnRound, round_: Round, error: Exception) -> None:
        name = getattr(hook, "__qualname__", None) or type(hook).__name__
        text = (
            f"on_round {name} failed in round {round_.round} of seed {round_.seed} and is not called again; the run "
            f"goes on. {type(error).__name__}: {error}"
        )
        if self._heard:
            self._observer.warn(text)
        else:
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def with_hooks(observer: Observer | None, hooks: Sequence[OnRound]) -> Observer:
    """The observer itself when nobody else listens."""
    return HookedObserver(observer, hooks) if hooks else observer or Silent()


class Tracker(Protocol):
    """A hook on the result stream that has something to close."""

    def __call__(self, round_: Round) -> None:
        """Write one round."""

    def close(self) -> None:
        """Nothing more comes."""


class TensorBoard:
    """Scalars of every run and seed as TensorBoard reads them: ``DIR/<run>/seed-<seed>``.

    ``accuracy`` of the rounds that were measured, ``bytes/up`` and ``bytes/down`` so far, ``diagnostics/<name>``; the
    settings as text and, with the accuracy of the last round, as hyperparameters.

    A seed is told from its first round on, also where it goes on from a checkpoint or is read from a stored result, and
    what lies there of it is replaced: no round is there twice, and none is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writers: dict[tuple[Path, int], SummaryWriter] = {}
        self._waiting: dict[tuple[Path, int], list[Round]] = {}

    def __call__(self, round_: Round) -> None:
        """Write one round; the last of a seed closes its file."""
        key = (round_.path, round_.seed)
        if key not in self._writers and len(self._writers) >= OPEN and round_.round < round_.rounds:
            self._waiting.setdefault(key, []).append(round_)
            return
        for earlier in self._waiting.pop(key, []):
            self._write(earlier)
        self._write(round_)

    def close(self) -> None:
        """Write what waits or is buffered of the seeds that have not ended."""
        while self._writers:
            self._writers.popitem()[1].close()
        while self._waiting:
            key, rounds = self._waiting.popitem()
            for round_ in rounds:
                self._write(round_)
            self._writers.pop(key).close()

    def _write(self, round_: Round) -> None:
        key = (round_.path, round_.seed)
        writer = self._writers.get(key)
        if writer is None:
            writer = self._writers[key] = self._begin(round_)
        if round_.accuracy is not None:
            writer.add_scalar("accuracy", round_.accuracy, round_.round)
        writer.add_scalar("bytes/up", round_.sent_bytes, round_.round)
        writer.add_scalar("bytes/down", round_.received_bytes, round_.round)
        for name, value in round_.diagnostics.items():
            if value is not None:
                writer.add_scalar(f"diagnostics/{name}", value, round_.round)
        if round_.round == round_.rounds:
            if round_.accuracy is not None:
                given = {"method": round_.method, **round_.settings}
                plain = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in given.items()}
                writer.add_hparams(plain, {"hparam/accuracy": round_.accuracy}, run_name=".")
            self._writers.pop(key).close()

    def _begin(self, round_: Round) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        place = self.folder / round_.path.name / f"seed-{round_.seed}"
        for left in place.glob("events.out.tfevents.*"):
            left.unlink()
        writer = SummaryWriter(str(place))
        given = {"method": round_.method, **({"point": round_.point} if round_.point else {}), **round_.settings}
        rows = "\n".join(f"| {name} | {str(value).replace('|', '/')} |" for name, value in given.items())
        writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")
        return writer


def tracker(spec: str, runs: Path) -> Tracker:
    """The tracker of ``--track NAME[:DIR]``; without DIR it writes to ``<runs>/<name>``.

    Raises UsageError for an unknown name; MachineError, with the line that installs it, for a missing package.
    """
    name, colon, folder = spec.partition(":")
    own = find("trackers", name)
    if name not in TRACKERS and own is None:
        raise unknown("tracker", name, [*TRACKERS, *plugins("trackers")])
    if colon and not folder:
        raise UsageError(f"--track {spec} names no directory.", f"For example --track {name}:boards")
    place = Path(folder).expanduser() if folder else runs / name
    if own is not None:
        return _tracker_of(own, place)
    if find_spec("tensorboard") is None:
        raise MachineError(
            f"--track {name} needs the package tensorboard, which is not installed.",
            "pip install 'fedcache[tensorboard]'",
        )
    return TensorBoard(place)


def _tracker_of(own: Plugin, place: Path) -> Tracker:
    """What a plug-in makes of a folder. Raises UsageError for what cannot be loaded or is no tracker."""
    make = own.load()
    made = make(place) if callable(make) else make
    if not callable(made) or not callable(getattr(made, "close", None)):
        raise UsageError(
            f"The tracker {own.name!r} of {own.origin} makes a {type(made).__name__}.", f"Expected {KINDS['trackers']}."
        )
    tracker: Tracker = made
    return tracker


@contextmanager
def tracking(
    spec: str | None, home: Home, runs: Path | None, observer: Observer | None
) -> Iterator[tuple[Tracker, ...]]:
    """The hooks of ``--track``, none when it is not given; they are closed however the block ends.

    What cannot be written at the end is told to the observer: by then there is a result to keep. Raises FedcacheError,
    as ``tracker``.
    """
    if spec is None:
        yield ()
        return
    made = tracker(spec, runs or home.runs)
    try:
        yield (made,)
    finally:
        try:
            made.close()
        except Exception as error:
            text = f"--track {spec} could not be finished: {type(error).__name__}: {error}"
            if observer is not None:
                observer.warn(text)
            else:
                warnings.warn(text, RuntimeWarning, stacklevel=3)
