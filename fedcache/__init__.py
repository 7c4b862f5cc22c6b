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
    from fedcache.api.extracted import Extraction as Extraction
    from fedcache.api.functions import extract as extract
    from fedcache.api.functions import grid as grid
    from fedcache.api.functions import ingest as ingest
    from fedcache.api.functions import partition as partition
    from fedcache.api.functions import shard as shard
    from fedcache.api.functions import train as train
    from fedcache.api.points import Grid as Grid
    from fedcache.api.run import Run as Run
    from fedcache.errors import FedcacheError as FedcacheError
    from fedcache.extract.recipe import Recipe as Recipe
    from fedcache.federate.method import Method as Method
    from fedcache.federate.partition import Partition as Partition
    from fedcache.progress import Round as Round
    from fedcache.report.comparisons import compare as compare
    from fedcache.report.functions import report as report
    from fedcache.store.store import Store as Store

_PLACES = {
    "Extraction": "fedcache.api.extracted",
    "FedcacheError": "fedcache.errors",
    "Grid": "fedcache.api.points",
    "Method": "fedcache.federate.method",
    "Partition": "fedcache.federate.partition",
    "Recipe": "fedcache.extract.recipe",
    "Round": "fedcache.progress",
    "Run": "fedcache.api.run",
    "Store": "fedcache.store.store",
    "compare": "fedcache.report.comparisons",
    "grid": "fedcache.api.functions",
    "ingest": "fedcache.api.functions",
    "partition": "fedcache.api.functions",
    "shard": "fedcache.api.functions",
    "train": "fedcache.api.functions",
}

__all__ = [*_PLACES, "__version__", "extract", "report"]


def __getattr__(name: str) -> Any:
    if name in ("extract", "report"):  # packages of that name, which can be called
        return import_module(f"fedcache.{name}")
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'fedcache' has no attribute {name!r}")
