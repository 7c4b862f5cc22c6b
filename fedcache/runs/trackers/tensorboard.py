"""TensorBoard: one folder of events for every run and seed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from fedcache.progress import Round
from fedcache.runs.trackers.seeds import Figures, SeedTracker, metrics_of, parameters_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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
        place = self.folder / round_.path.name / f"seed-{round_.seed}"
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        return EventFile(self._writer(place), round_)

    def _writer(self, place: Path) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(place))


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
            plain = {
                name: value if isinstance(value, bool | int | float) else str(value)
                for name, value in given.items()
            }
            # Without ``run_name``, the hyperparameters would be another run, in a folder with the time as its name.
            self._writer.add_hparams(plain, {"hparam/accuracy": round_.accuracy}, run_name=".")

    def end(self, figures: Figures | None) -> None:
        """Write the final figures at the last round, and close the file."""
        for name, value in (figures or {}).items():
            self._writer.add_scalar(name, value, self._last.round, walltime=self._moment)
        self._writer.close()
