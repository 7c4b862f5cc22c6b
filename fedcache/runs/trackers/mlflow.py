"""MLflow: one run for every run and seed, in a local database or on a tracking server."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.progress import Round
from fedcache.runs.trackers.seeds import (
    PROJECT,
    Figures,
    SeedTracker,
    TrackedName,
    metrics_of,
    name_of,
    parameters_of,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

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


class MLflowRun:
    """The run of one seed; ``logged`` are the rounds that were written before."""

    def __init__(self, client: MlflowClient, run: str, logged: set[int]) -> None:
        self._client = client
        self._run = run
        self._logged = logged
        self._gathered: list[Any] = []
        # the time of all figures of a private run, in milliseconds since 1970
        self._moment: int | None = None
        self._written = time.monotonic()  # time of the last call that wrote figures
        self._last = 0  # the last round
        self._live = not logged  # whether MLflow shows the run as running

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
