"""A grid that is asked for: its points, and what is checked before anything runs."""

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
from fedcache.grids.sampling import Sampling
from fedcache.grids.search_space import MOST_CHECKED, SearchPlan, search_of
from fedcache.grids.unused import points_that_differ, refuse_unread, settings_for
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
    """A grid that is asked for."""

    methods: tuple[str, ...]
    sweeps: Mapping[str, Sequence[str]]  # key -> values, as they were asked for
    sampling: Sampling
    points: tuple[tuple[str, dict[str, str]], ...]  # every point's method and swept values
    config: TrainConfig  # of all points
    partition: PartitionConfig  # of all points, before what is swept of it
    home: Home  # where stores are
    runs: Path  # directory of results
    repartition: bool = False  # every seed draws its own partition
    extract: bool = True  # whether to run the extraction that is missing
    fresh: bool = False  # train points although their results are there
    exact: bool = False  # whether every point is computed alone, with the bits of its single run
    # of which points models are kept
    save: SaveModels = field(default_factory=lambda: SaveModels("best"))
    retrain: bool = False  # train what was chosen by validation again, on all training rows
    search: SearchPlan | None = (
        None  # how points are drawn one after another; ``points`` are then corners of its space
    )
    score: str | None = (
        None  # what points are ranked by: client-mean or pooled; None as ``runs.score.score_for``
    )
    notes: tuple[str, ...] = ()  # what is to say before anything is trained

    def config_of(self, number: int) -> TrainConfig:
        """What ``train`` would be asked for a point."""
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
        """How the rows of a point are dealt."""
        return partition_of_point(
            self.partition, self.points[number][1], swept_schemes(self.points)
        )

    def words_of(self, number: int) -> str:
        """Method and swept values of a point: ``fedavg lr=0.1``."""
        name, sweep = self.points[number]
        return " ".join([name, *(f"{k}={v}" for k, v in sweep.items())])

    def compared_by(self) -> str:
        """The one score of all points: that which was asked for, else as ``runs.score.score_for`` of their results."""
        if self.score is not None:
            return self.score
        kinds = set()
        for number, (name, _) in enumerate(self.points):
            with suppress(FedcacheError):  # a point that cannot be ends when its turn comes
                method = find_method(name)
                kinds.add(method.protocol(hyperparameters(method, self.config_of(number))))
        if len(kinds) < 2:
            return "own"
        return "client-mean"

    def check(self) -> None:
        """Refuse what a point asks of uploads that its method or number of clients does not allow, before any is run.

        Raises UsageError, naming the point.
        """
        for number, (name, _) in enumerate(self.points):
            config = self.config_of(number)
            clients = self.partition_of(number).clients
            try:
                trust = policy_from_config(config, find_method(name))
                timing_from_config(config, find_method(name))
                if clients is not None and config.participation is not None:
                    trust.check_round(
                        clients_per_round(parse_participation(config.participation), clients)
                    )
            except FedcacheError as error:
                raise FedcacheError(
                    error.code, f"{self.words_of(number)}: {error.message}", error.hint
                ) from error


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
    for N points drawn without repeats, or that of a search. The others are fields of ``GridRequest``.
    """
    check_score(fields.get("score"))
    if isinstance(sampler, str):
        sampling = Sampling(sampler)
    else:
        sampling = sampler
    fields["search"] = search = search_of(sampling, methods, sweeps)
    every, notes = (search.corners(), ()) if search else points_that_differ(methods, sweeps, config)
    if search is not None and len(every) < MOST_CHECKED:  # corners hold every value of a list
        refuse_unread(every, config)
    points = tuple(every if search else sampled(sampling.sampler, every))
    request = GridRequest(
        tuple(methods),
        sweeps,
        sampling,
        points,
        config,
        partition or PartitionConfig(),
        home,
        runs or home.runs,
        repartition,
        extract,
        fresh,
        notes=notes,
        **fields,
    )
    KeptModels(request.save)
    request.check()
    return request
