"""fedcache: run every frozen backbone once, then federate on the cached features in seconds.

    import fedcache as fc

    store = fc.extract("digits", backbones=["efficientnet-lite0"])
    parts = fc.partition(store, "dirichlet", clients=20, alpha=0.1)
    run = fc.train("fed3r", store, parts)
    run.accuracy.mean

Importing it imports neither torch nor numpy; each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from fedcache.api import extract as extract
    from fedcache.api import grid as grid
    from fedcache.api import ingest as ingest
    from fedcache.api import partition as partition
    from fedcache.api import shard as shard
    from fedcache.api import train as train
    from fedcache.errors import FedcacheError as FedcacheError
    from fedcache.extract.recipe import Recipe as Recipe
    from fedcache.extract.result import Extraction as Extraction
    from fedcache.federate.engine.method import Method as Method
    from fedcache.federate.partition.partition import Partition as Partition
    from fedcache.grids.points import Grid as Grid
    from fedcache.progress import Round as Round
    from fedcache.report.compare import compare as compare
    from fedcache.report.function import report as report
    from fedcache.runs.run import Run as Run
    from fedcache.store.store import Store as Store

_PLACES = {
    "Extraction": "fedcache.extract.result",
    "FedcacheError": "fedcache.errors",
    "Grid": "fedcache.grids.points",
    "Method": "fedcache.federate.engine.method",
    "Partition": "fedcache.federate.partition.partition",
    "Recipe": "fedcache.extract.recipe",
    "Round": "fedcache.progress",
    "Run": "fedcache.runs.run",
    "Store": "fedcache.store.store",
    "compare": "fedcache.report.compare",
    "grid": "fedcache.api",
    "ingest": "fedcache.api",
    "partition": "fedcache.api",
    "shard": "fedcache.api",
    "train": "fedcache.api",
}

__all__ = [*_PLACES, "__version__", "extract", "report"]


def __getattr__(name: str) -> Any:
    if name in ("extract", "report"):  # packages of that name, which can be called
        return import_module(f"fedcache.{name}")
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'fedcache' has no attribute {name!r}")
