"""Request of a grid: its points and options, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedcache.config import Home, PartitionConfig, SaveModels, TrainConfig
from fedcache.errors import FedcacheError
from fedcache.federate.engine.method import clients_per_round
from fedcache.federate.methods import find_method
from fedcache.grids.points import (
    partition_of_point,
    sampled,
    swept_schemes,
    typed_sweep_values,
    values_of_place,
)
from fedcache.grids.result import point_words
from fedcache.grids.sampling import Sampling
from fedcache.grids.search_space import MOST_CHECKED, SearchPlan, search_of
from fedcache.grids.unused import drop_unread, points_that_differ, settings_for
from fedcache.runs.run_models import KeptModels
from fedcache.runs.score import check_score
from fedcache.runs.spec import (
    hyperparameters,
    parse_participation,
    policy_from_config,
    timing_from_config,
)


@dataclass(frozen=True)
class GridRequest:
    """A requested grid."""

    methods: tuple[str, ...]
    sweeps: Mapping[str, Sequence[str]]  # key -> values, as the user wrote them
    sampling: Sampling
    points: tuple[tuple[str, dict[str, str]], ...]  # method and swept values of every point
    config: TrainConfig  # of all points
    partition: PartitionConfig  # of all points, without its swept arguments
    home: Home  # with the stores
    runs: Path  # directory of results
    repartition: bool = False  # every seed draws its own partition
    extract: bool = True  # whether to run the extraction that is missing
    fresh: bool = False  # train again although a result is stored
    exact: bool = False  # whether every point is computed alone, with the bits of its single run
    # points whose models are kept
    save: SaveModels = field(default_factory=lambda: SaveModels("best"))
    retrain: bool = False  # train the points chosen by validation again, on all training rows
    # how points are drawn one after another; ``points`` are then corners of its space
    search: SearchPlan | None = None
    # points are ranked by client-mean or pooled accuracy; None as ``runs.score.score_for``
    score: str | None = None
    notes: tuple[str, ...] = ()  # sentences to show before anything is trained

    def config_of(self, number: int) -> TrainConfig:
        """The configuration with which ``train`` trains a point alone."""
        name, sweep = self.points[number]
        values: dict[str, Any] = dict(values_of_place(sweep, "run"))
        values |= typed_sweep_values(values)
        for key in ("backbones", "domain"):
            if key in values:
                values[key] = tuple(values[key].split("+"))
        settings = {
            **settings_for(name, self.methods, self.config.set),
            **values_of_place(sweep, "set"),
        }
        return replace(self.config, method=name, set=settings, **values)

    def partition_of(self, number: int) -> PartitionConfig:
        """The partition of a point."""
        return partition_of_point(
            self.partition, self.points[number][1], swept_schemes(self.points)
        )

    def words_of(self, number: int) -> str:
        """Method and swept values of a point: ``fedavg lr=0.1``."""
        return point_words(*self.points[number])

    def compared_by(self) -> str:
        """The one score of all points: the requested one, else as ``runs.score.score_for`` of their results."""
        if self.score is not None:
            return self.score
        kinds = set()
        for number, (name, _) in enumerate(self.points):
            with suppress(FedcacheError):  # reported when that point is trained
                method = find_method(name)
                kinds.add(method.protocol(hyperparameters(method, self.config_of(number))))
        if len(kinds) < 2:
            return "own"
        return "client-mean"

    def check(self) -> None:
        """Check upload policy and timing of every point against its method and number of clients.

        Raises UsageError, naming the point.
        """
        for number, (name, _) in enumerate(self.points):
            config = self.config_of(number)
            clients = self.partition_of(number).clients
            method = find_method(name)
            try:
                trust = policy_from_config(config, method)
                timing_from_config(config, method)
                if clients is not None and config.participation is not None:
                    participation = parse_participation(config.participation)
                    trust.check_round(clients_per_round(participation, clients))
            except FedcacheError as error:
                words = self.words_of(number)
                raise FedcacheError(error.code, f"{words}: {error.message}", error.hint) from error


def request_grid(
    methods: Sequence[str],
    sweeps: Mapping[str, Sequence[str]],
    config: TrainConfig,
    home: Home,
    *,
    partition: PartitionConfig | None = None,
    runs: Path | None = None,
    repartition: bool = False,
    extract: bool = True,
    fresh: bool = False,
    sampler: str | Sampling = "grid",
    **fields: Any,
) -> GridRequest:
    """The grid of every combination of methods and swept values, checked before anything runs. Raises UsageError.

    ``methods`` are names and ``sweeps`` key -> values, as ``--sweep``; ``sampler`` is ``grid``, ``random:N[:SEED]``
    for N points drawn without repeats, or the sampler of a search. The others are fields of ``GridRequest``.
    """
    check_score(fields.get("score"))
    sampling = sampler
    if isinstance(sampling, str):
        sampling = Sampling(sampling)
    search = search_of(sampling, methods, sweeps)
    notes: tuple[str, ...] = ()
    if search is None:
        every, notes = points_that_differ(methods, sweeps, config)
        points = sampled(sampling.sampler, every)
    else:
        points = search.corners()
        # If all corners fit in, they hold every value of a list, so a key that none of them reads is never read.
        if len(points) < MOST_CHECKED:
            drop_unread(points, config)
    request = GridRequest(
        tuple(methods),
        sweeps,
        sampling,
        tuple(points),
        config,
        partition or PartitionConfig(),
        home,
        runs or home.runs,
        repartition,
        extract,
        fresh,
        search=search,
        notes=notes,
        **fields,
    )
    KeptModels(request.save)  # checks the options of saved models
    request.check()
    return request
