"""trackio: one run for every run and seed, in a database on this machine."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout, suppress
from pathlib import Path

from fedcache.errors import UsageError
from fedcache.progress import Round
from fedcache.runs.trackers.seeds import (
    PROJECT,
    Figures,
    SeedTracker,
    metrics_of,
    name_of,
    parameters_of,
)


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
            run = trackio.init(
                project=PROJECT,
                name=name.key,
                group=name.group or None,
                config=parameters_of(round_),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return TrackioRun(run)


class TrackioRun:
    """The run of one seed."""

    def __init__(self, run: object) -> None:
        self._run = run
        self._last = 0

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
