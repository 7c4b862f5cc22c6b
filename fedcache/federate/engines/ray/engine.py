"""The engine ``ray``: what an extraction or a grid is handed to compute its tasks on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedcache.config import Home
from fedcache.extract.stop import Stop
from fedcache.extract.workers.chunk_tasks import TaskSpec
from fedcache.federate.engines.ray.extraction import check_workers, open_pool
from fedcache.federate.engines.ray.grids import LoneRun, train_grid, train_runs
from fedcache.federate.engines.ray.workers import RayWorkerPool
from fedcache.grids.grid import GridRun
from fedcache.progress import Observer


@dataclass(frozen=True)
class RayEngine:
    """A Ray cluster to work on.

    Attributes:
        address: HOST:PORT of the cluster to join; None starts one on this machine.
    """

    address: str | None = None

    def check_extraction(self, workers: int | None) -> None:
        """Refuse ``--workers 0``; see ``check_workers``."""
        check_workers(workers)

    @contextmanager
    def extraction_workers(self, spec: TaskSpec, workers: int | None, observer: Observer) -> Iterator[RayWorkerPool]:
        """Workers for the chunk tasks of an extraction; see ``open_pool``."""
        with open_pool(self.address, spec, workers, observer) as pool:
            yield pool

    def run_grid(self, grid: GridRun, jobs: int) -> None:
        """Train every point of a grid; see ``train_grid``."""
        train_grid(grid, self.address, jobs)

    def run_configurations(
        self, todo: Sequence[LoneRun], home: Home, runs: Path, observer: Observer, stop: Stop
    ) -> set[Path]:
        """Train runs that are no grid; see ``train_runs``."""
        return train_runs(self.address, todo, home, runs, observer, stop)
