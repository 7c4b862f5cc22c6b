"""fedcache: run every frozen backbone once, then train federated models on the cached features in seconds.

    import fedcache as fc

    store = fc.extract("digits", backbones=["efficientnet-lite0"])
    parts = fc.partition(store, "dirichlet", clients=20, alpha=0.1)
    run = fc.train("fed3r", store, parts)
    run.accuracy.mean

``import fedcache`` imports neither torch nor numpy; names that need them are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# ``extract`` and ``report`` are names of packages and of functions. Importing a package binds its name here, so the
# packages are imported first, and the import of the functions below binds the names again. A later import of a package
# that is already imported does not bind its name.
import fedcache.extract
import fedcache.report  # noqa: F401
from fedcache.api import (
    compare,
    evaluate,
    extract,
    grid,
    ingest,
    personalise,
    report,
    train,
)
from fedcache.errors import FedcacheError
from fedcache.progress import Round

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fedcache.calls.models import forget as forget
    from fedcache.calls.models import load_model as load_model
    from fedcache.calls.stores import join as join
    from fedcache.calls.stores import partition as partition
    from fedcache.calls.stores import shard as shard
    from fedcache.extract.backbones.own_module import backbone as backbone
    from fedcache.extract.extract_dataset import Extraction as Extraction
    from fedcache.extract.recipe import Recipe as Recipe
    from fedcache.federate.engine.method import Method as Method
    from fedcache.federate.partition.partition import Partition as Partition
    from fedcache.grids.result import Grid as Grid
    from fedcache.models.fed_classifier import FedClassifier as FedClassifier
    from fedcache.models.model import Model as Model
    from fedcache.plugins import register as register
    from fedcache.runs.run import Run as Run
    from fedcache.store.store import Store as Store

# Name -> the module that defines it, which is imported when the name is first used.
_LATER = {
    "backbone": "fedcache.extract.backbones.own_module",
    "forget": "fedcache.calls.models",
    "join": "fedcache.calls.stores",
    "load_model": "fedcache.calls.models",
    "partition": "fedcache.calls.stores",
    "shard": "fedcache.calls.stores",
    "Extraction": "fedcache.extract.extract_dataset",
    "FedClassifier": "fedcache.models.fed_classifier",
    "Grid": "fedcache.grids.result",
    "Method": "fedcache.federate.engine.method",
    "Model": "fedcache.models.model",
    "Partition": "fedcache.federate.partition.partition",
    "Recipe": "fedcache.extract.recipe",
    "Run": "fedcache.runs.run",
    "Store": "fedcache.store.store",
    "register": "fedcache.plugins",
}

__all__ = [
    *_LATER,
    "FedcacheError",
    "Round",
    "__version__",
    "compare",
    "evaluate",
    "extract",
    "grid",
    "ingest",
    "personalise",
    "report",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'fedcache' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
