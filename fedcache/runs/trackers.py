"""``--track``: adapters that write the result stream somewhere else. They are hooks, so a run does not know of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedcache.config import Home
from fedcache.errors import MachineError, UsageError, unknown
from fedcache.progress import Observer, Round

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


OPEN = 32
"""Seeds whose files are open at a time: each is a file and a thread. Points of a grid beyond them are written when they
end."""


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

    Args:
        folder: DIR.
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


TRACKERS = ("tensorboard",)


def tracker(spec: str, runs: Path) -> Tracker:
    """The tracker of ``--track NAME[:DIR]``; without DIR it writes to ``<runs>/<name>``.

    Raises:
        UsageError for an unknown name; MachineError, with the line that installs it, for a missing package.
    """
    name, colon, folder = spec.partition(":")
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    if colon and not folder:
        raise UsageError(f"--track {spec} names no directory.", f"For example --track {name}:boards")
    if find_spec("tensorboard") is None:
        raise MachineError(
            f"--track {name} needs the package tensorboard, which is not installed.",
            "pip install 'fedcache[tensorboard]'",
        )
    return TensorBoard(Path(folder).expanduser() if folder else runs / name)


@contextmanager
def tracking(
    spec: str | None, home: Home, runs: Path | None, observer: Observer | None
) -> Iterator[tuple[Tracker, ...]]:
    """The hooks of ``--track``, none when it is not given; they are closed however the block ends.

    What cannot be written at the end is told to the observer: by then there is a result to keep.

    Raises:
        FedcacheError: as ``tracker``.
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
