"""The stores of a home: by the name a user writes, and those made from embeddings by the name of their dataset."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from fedcache.config import Home
from fedcache.errors import FedcacheError
from fedcache.store.manifest import was_store
from fedcache.store.samples import INGESTED
from fedcache.store.store import Store
from fedcache.store.text_features import slug_of


def is_ingested(store: Store) -> bool:
    """Whether a store was made from a file of embeddings: no image is known of it."""
    return store.dataset.get("source") == INGESTED


def resolve_path(home: Home, path: Path) -> Path:
    """A store as the user wrote it: a path, or a name of ``fedcache ls`` with or without ``.zarr``.

    The working directory comes first, then the stores of the home, then the names of ingested datasets.

    Returns:
        a store if there is one of that name, else the path itself.
    """
    bare = len(path.parts) == 1
    places = [path, path.with_name(f"{path.name}.zarr")] if path.name else [path]
    if bare:
        places += [home.stores / place for place in places]
    found = next((p for p in places if was_store(p) or (p / "manifest.json").exists()), None)
    if found is None and bare and not path.exists():
        found = ingested_stores(home).get(slug_of(path.name.removeprefix(f"{INGESTED}:")))
    return path if found is None else found


def last_store(home: Home) -> tuple[Path, str] | None:
    """The store last extracted or ingested, and what was asked for; None when none is remembered or it is gone."""
    try:
        last = json.loads(home.last.read_bytes())
        path, spec = Path(last["store"]), str(last["spec"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (path, spec) if path.exists() else None


def ingested_stores(home: Home) -> dict[str, Path]:
    """The stores of a home that were made from embeddings, by the name of their dataset; damaged ones are left out."""
    found = {}
    for path in sorted(home.stores.glob("*.zarr")) if home.stores.is_dir() else []:
        try:
            store = Store.open(path)
        except FedcacheError:
            continue
        if is_ingested(store):
            found[str(store.dataset["slug"])] = path
    return found


def ingest_command(store: Store) -> str:
    """The command that replaces an ingested dataset by a file that holds more."""
    arguments = ["fedcache", "ingest", "FILE", "--name", str(store.dataset["slug"]), "--replace", *store_option(store)]
    return shlex.join(arguments)


def store_option(store: Store) -> list[str]:
    """``--store PATH`` for a store outside the home, which no name finds; else nothing."""
    inside = store.path.resolve().parent == Home.from_environment().stores.resolve()
    return [] if inside else ["--store", str(store.path)]
