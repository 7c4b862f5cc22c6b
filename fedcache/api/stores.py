"""Which store a command means."""

from __future__ import annotations

import json
from pathlib import Path

from fedcache.config import ExtractConfig, Home
from fedcache.errors import Exit, FedcacheError
from fedcache.extract import datasets
from fedcache.progress import Observer
from fedcache.store.store import Store


def find_store(
    home: Home, *, path: Path | None = None, dataset: str | None = None, observer: Observer | None = None
) -> Store | None:
    """``--store``, else the store of ``--dataset``, else the one last extracted; None when there is none yet.

    A path must exist; a dataset's store is found from its remembered digest, so no image is read.

    Raises:
        FedcacheError: STORE for a path that is no store; CORRUPT for a damaged one.
    """
    from fedcache.api.planning import memory_of, roots_of, store_path

    if path is not None:
        return Store.open(path)
    if dataset is not None:
        known = datasets.peek(dataset, memory=memory_of(home), roots=roots_of(ExtractConfig(), home), data=home.data)
        found = store_path(home, *known) if known else None
        return Store.open(found) if found is not None and found.exists() else None
    try:
        last = json.loads(home.last.read_bytes())
        chosen = Path(last["store"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not chosen.exists():
        return None
    if observer is not None:
        observer.note(f"Store {chosen.name}: {last['spec']}, the dataset last extracted (--dataset chooses another).")
    return Store.open(chosen)


def need_store(
    home: Home, *, path: Path | None = None, dataset: str | None = None, observer: Observer | None = None
) -> Store:
    """``find_store``, or exit 4 with the command that makes one."""
    store = find_store(home, path=path, dataset=dataset, observer=observer)
    if store is None:
        what = f"of {dataset} " if dataset else ""
        raise FedcacheError(
            Exit.STORE,
            f"There is no store {what}under {home.stores} yet.",
            f"fedcache extract --dataset {dataset or 'digits'} --backbones efficientnet-lite0",
        )
    return store


def ingest_file(home: Home, file: Path, name: str, path: Path | None = None) -> Store:
    """A file of embeddings as a store, which commands without a store then use.

    Raises:
        FedcacheError: USAGE for a name without a letter or digit, or a file that cannot be read; CORRUPT for
            non-finite features.
    """
    from fedcache.api.extraction import remember_last
    from fedcache.extract.recipe import slug
    from fedcache.store.exchange import ingest, read_embeddings
    from fedcache.store.files import file_sha256, make_private

    if not slug(name).strip("._-"):
        raise FedcacheError(Exit.USAGE, f"The name {name!r} has no letter or digit.", "For example --name mine")
    embeddings = read_embeddings(file)
    if path is None:
        make_private(home.root)
        make_private(home.stores)
    made = ingest(embeddings, path or home.stores / f"{slug(name)}-{file_sha256(file)[:8]}.zarr", name)
    remember_last(home, made.path, f"ingested:{name}")
    return made
