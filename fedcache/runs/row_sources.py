"""Where the rows of a run come from: what every source answers, and what preparing a run may do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedcache.config import Home
from fedcache.extract.stop import Stop
from fedcache.federate.engine.client_overrides import ClientOverrides
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import Method
from fedcache.federate.partition.partition import Partition
from fedcache.progress import Observer
from fedcache.runs.features import RunFeatures


class RowSource(Protocol):
    """Where the rows of a run come from. The methods are called in this order, each once for a run."""

    def open(self, method: Method, settings: Mapping[str, Value]) -> float:
        """Find what holds the rows, and extract what is missing; the seconds that extracting took.

        Raises:
            StoreError for what is missing; UsageError for what the method cannot have of this source.
        """

    def arrays(self, method: Method, settings: Mapping[str, Value]) -> list[str]:
        """Keys of the arrays the run trains on."""

    def partitions(self, method: Method, seeds: Sequence[int]) -> tuple[dict[int, Partition], str | None]:
        """Which rows each client holds, by seed, and the name of a saved partition."""

    def feat_post(self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str]) -> str:
        """What is done to features before training."""

    def read(self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str], feat_post: str) -> RunFeatures:
        """The features of all rows."""

    def overrides(self, method: Method, features: RunFeatures, clients: int) -> dict[int, ClientOverrides]:
        """In what single clients differ."""

    def dataset(self) -> dict[str, Any]:
        """Slug, digest and numbers of rows."""

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the domains and of the classes."""

    def backbones(self, arrays: Sequence[str]) -> tuple[str, ...]:
        """Names of the backbones that made the arrays."""


@dataclass
class InputCache:
    """What the points of one grid share: features and partitions, read and drawn once.

    Attributes:
        features: of the last arrays read; grids keep arrays together, so one is enough.
        partitions: by everything that determines them.
        warned: warnings that were given.
    """

    features: tuple[Any, RunFeatures] | None = None
    partitions: dict[Any, tuple[dict[int, Partition], str | None]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Preparation:
    """What preparing a run may do, and who hears of it.

    Attributes:
        home: where stores are.
        observer: told every choice that was not the user's.
        stop: honoured while an extraction runs.
        extract: whether to run the extraction that is missing.
        repartition: every seed draws its own partition (else all seeds share one).
        cache: shared by the points of a grid.
    """

    home: Home
    observer: Observer
    stop: Stop
    extract: bool = True
    repartition: bool = False
    cache: InputCache = field(default_factory=InputCache)
