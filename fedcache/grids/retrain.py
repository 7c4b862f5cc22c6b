"""``grid --retrain``: what was chosen by validation is trained again on all training rows (FedPCL, appendix A.1.4)."""

from __future__ import annotations

from typing import Any, Protocol

from fedcache.config import SaveModels
from fedcache.errors import UsageError
from fedcache.grids.result import Grid, Point
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.runs.events import GridPosition
from fedcache.runs.features import RunInputs
from fedcache.runs.loop import train_run
from fedcache.runs.run_models import KeptModels


class EndedGrid(Protocol):
    """What is needed of a grid; ``train_grid.GridRun`` is one."""

    request: Any  # its ``GridRequest``
    observer: Observer
    stop: Stop

    def prepare(self, number: int, *, whole: bool = False) -> RunInputs:
        """The inputs of a point; with ``whole`` the rows to choose by are training rows."""


def check_validation(
    grid: EndedGrid, why: str = "--retrain trains what was chosen by validation"
) -> None:
    """Refuse a grid that has no rows to choose by, before any point is trained. Raises UsageError.

    ``why`` is what they are needed for, in words.
    """
    partitions = grid.prepare(0).partitions.values()
    if any(partition.validation is None for partition in partitions):
        raise UsageError(
            f"{why}, and the partition has no rows to choose by.",
            "Take some out of the training rows:  --validation 0.2",
        )


def retrain(grid: EndedGrid, done: Grid) -> list[Point]:
    """The chosen points of a grid, trained on all training rows with all seeds.

    The partition is that of the point with the validation rows among the training rows again, which is the one that is
    made without any: a run on it that is there already is returned. Raises FedcacheError, as ``train``.
    """
    request, made = grid.request, []
    which = SaveModels("none" if request.save.which == "none" else "all", request.save.clients)
    for point in done.chosen():
        number = request.points.index((point.method, point.sweep))
        grid.observer.note(f"Training {request.words_of(number)} again, on all training rows.")
        config = request.config_of(number)
        run = train_run(
            grid.prepare(number, whole=True),
            config,
            request.runs,
            fresh=request.fresh,
            observer=grid.observer,
            stop=grid.stop,
            position=GridPosition(f"{request.words_of(number)}, on all rows"),
            kept=KeptModels(which),
        )
        made.append(Point(point.method, point.sweep, run))
    return made
