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
    """A requested grid.

    Attributes:
        methods: names of the methods.
        sweeps: key -> values, as the user wrote them.
        sampling: how points are drawn.
        points: method and swept values of every point.
        config: options of all points, without the swept values.
        partition: partition of all points, without its swept arguments.
        home: the fedcache home, which has the stores.
        runs: directory of results.
        repartition: whether every seed draws its own partition.
        extract: whether to run the extraction that is missing.
        fresh: whether to train again although a result is stored.
        exact: whether every point is computed alone, with the bits of its single run.
        save: points whose models are kept.
        retrain: whether to train the points chosen by validation again, on all training rows.
        search: how points are drawn one after another; ``points`` are then corners of its space. None for a grid.
        score: client-mean | pooled, by which points are ranked; None for the default of ``runs.score.score_for``.
        notes: sentences to show before anything is trained.
    """

    methods: tuple[str, ...]
    sweeps: Mapping[str, Sequence[str]]
    sampling: Sampling
    points: tuple[tuple[str, dict[str, str]], ...]
    config: TrainConfig
    partition: PartitionConfig
    home: Home
    runs: Path
    repartition: bool = False
    extract: bool = True
    fresh: bool = False
    exact: bool = False
    save: SaveModels = field(default_factory=lambda: SaveModels("best"))
    retrain: bool = False
    search: SearchPlan | None = None
    score: str | None = None
    notes: tuple[str, ...] = ()

    def config_of(self, number: int) -> TrainConfig:
        """The configuration with which ``train`` trains a point alone."""
        name, sweep = self.points[number]
        words = values_of_place(sweep, "run")
        values: dict[str, Any] = {**words, **typed_sweep_values(words)}
        # These options are tuples of names; a swept value joins several names with +.
        for key in ("backbones", "domain"):
            if key in values:
                values[key] = tuple(values[key].split("+"))
        settings = settings_for(name, self.methods, self.config.set)
        settings |= values_of_place(sweep, "set")
        return replace(self.config, method=name, set=settings, **values)

    def partition_of(self, number: int) -> PartitionConfig:
        """The partition of a point."""
        _, sweep = self.points[number]
        return partition_of_point(self.partition, sweep, swept_schemes(self.points))

    def words_of(self, number: int) -> str:
        """Method and swept values of a point: ``fedavg lr=0.1``."""
        return point_words(*self.points[number])

    def compared_by(self) -> str:
        """The one score of all points: the requested one, else the one that ``runs.score.score_for`` will choose."""
        if self.score is not None:
            return self.score
        protocols = set()
        for number, (name, _) in enumerate(self.points):
            # An error of a point is reported when the point is trained.
            with suppress(FedcacheError):
                method = find_method(name)
                hp = hyperparameters(method, self.config_of(number))
                protocols.add(method.protocol(hp))
        # Methods of one protocol have the same primary metric (``own``).
        if len(protocols) < 2:
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
    sampling: Sampling | None = None,
    **fields: Any,
) -> GridRequest:
    """The grid of every combination of methods and swept values, checked before anything runs. Raises UsageError.

    ``methods`` are names and ``sweeps`` key -> values, as ``--sweep``; ``sampling`` says how points are drawn, by
    default all combinations. All other arguments are fields of ``GridRequest``.
    """
    check_score(fields.get("score"))
    sampling = sampling or Sampling()
    search = search_of(sampling, methods, sweeps)
    notes: tuple[str, ...] = ()
    if search is None:
        all_points, notes = points_that_differ(methods, sweeps, config)
        points = sampled(sampling.sampler, all_points)
    else:
        points = search.corners()
        # If there are fewer corners than ``MOST_CHECKED``, none was left out, so they contain every value of each list.
        # Only then can ``drop_unread`` refuse a key that no point reads.
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
        search=search,
        notes=notes,
        **fields,
    )
    # The constructor checks the options of saved models.
    KeptModels(request.save)
    request.check()
    return request
