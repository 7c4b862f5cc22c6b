"""Weights & Biases: one run for every run and seed, only on disk unless ``WANDB_MODE`` says otherwise."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedcache.progress import Round
from fedcache.runs.trackers.seeds import (
    PROJECT,
    Figures,
    SeedTracker,
    metrics_of,
    name_of,
    parameters_of,
)

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

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
