"""The widths at which a method's traffic is counted."""

from __future__ import annotations

from dataclasses import dataclass

from fedcache.config import Home
from fedcache.errors import FedcacheError
from fedcache.store.catalog import last_store
from fedcache.store.manifest import TEXT_ORDER
from fedcache.store.store import Store


@dataclass(frozen=True)
class Sizes:
    """The widths at which traffic is counted.

    Attributes:
        width: D, all backbones together.
        text_width: D of the backbone that methods with text take.
        classes: C.
        source: where they come from, for a person.
    """

    width: int = 512
    text_width: int = 512
    classes: int = 10
    source: str = "512 features, 10 classes"


def current_sizes(home: Home) -> Sizes:
    """Those of the store last used, else 512 features and 10 classes (one ResNet-18 of FedPCL's table)."""
    try:
        last = last_store(home)
        store = None
        if last is not None:
            store = Store.open(last[0])
    except FedcacheError:
        store = None
    if store is not None:
        arrays = {k: a for k, a in store.arrays.items() if a.dtype != "uint8"}
    else:
        arrays = {}
    if store is None or not arrays:
        return Sizes()
    by_name = {str(a.recipe.get("backbone")): a.shape[2] for a in arrays.values()}
    text = next((by_name[n] for n in TEXT_ORDER if n in by_name), next(iter(by_name.values())))
    width = sum(by_name.values())
    classes = len(store.samples.classes)
    return Sizes(
        width,
        text,
        classes,
        f"{store.path.name}: {' + '.join(by_name)}, {width} features, {classes} classes",
    )
