"""Origin of a run's rows: finds the store of a stored run, and refuses text features of weights unlike the images'."""

from __future__ import annotations

from pathlib import Path

from fedcache.errors import FedcacheError, StoreError
from fedcache.extract.planning.find_store import more_features
from fedcache.parsing import Record
from fedcache.runs.directory import train_table
from fedcache.store.manifest import find_text, text_of_array
from fedcache.store.store import Store


def store_behind(run: Path, result: Record) -> Store | None:
    """The store of a run's dataset: the one in its configuration, else one of the run's home; None if it is gone."""
    digest = str(result["dataset"]["digest"])
    named = train_table(run).get("store")
    stores = run.parent.parent / "stores"
    # Stores with the digest in their name come first, because opening every store of a large home takes time.
    candidates = [
        *sorted(stores.glob(f"*-{digest[:8]}.zarr")),
        *sorted(stores.glob("*.zarr")),
    ]
    if named:
        candidates.insert(0, named)
    for path in candidates:
        try:
            store = Store.open(path)
        except (FedcacheError, OSError):
            continue
        if store.dataset["digest"] == digest:
            return store
    return None


def check_text(store: Store, key: str) -> None:
    """Raise StoreError if the current text features of an array's backbone were made with other weights than the array.

    The error has the command that makes text features with the array's weights.
    """
    recipe = store.arrays[key].recipe
    name = str(recipe.get("backbone"))
    current = find_text(store.manifest, name)
    if current is None or current is text_of_array(store.manifest, key):
        return
    of_text = str(current["meta"].get("weights"))[:12]
    of_images = str(recipe.get("weights"))[:12]
    raise StoreError(
        f"The text features of {name} were made with the weights {of_text}, but the image features "
        f"({key}) were made with {of_images}.",
        more_features(store, name),
    )
