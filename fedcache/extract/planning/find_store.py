"""Which store a command means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedcache.config import ExtractConfig, Home
from fedcache.errors import FedcacheError, StoreError, UsageError, closest, unknown
from fedcache.extract import datasets
from fedcache.extract.planning.command_lines import extract_command, unfinished_arrays_of
from fedcache.extract.planning.plan import memory_of, roots_of
from fedcache.progress import Observer
from fedcache.store.catalog import ingest_command, ingested_stores, is_ingested, last_store, resolve_path
from fedcache.store.samples import INGESTED
from fedcache.store.store import Store, slug_of


def locate_store(
    home: Home, *, path: Path | None = None, dataset: str | None = None, observer: Observer | None = None
) -> Path | None:
    """``--store``, else the store of ``--dataset``, else the one last used; None when there is none yet.

    Nothing is opened, so that a damaged store can be named too. A dataset's store is found from its remembered digest,
    so no image is read; an ingested one by its name, with or without ``ingested:``.

    Raises:
        StoreError for a path where nothing is; UsageError for a dataset that is not known, or one beside a path.
    """
    if path is not None and dataset is not None:
        raise UsageError("A store and --dataset are both given. A store holds its dataset.", "Leave one of them out.")
    if path is not None:
        place = resolve_path(home, path)
        if not place.exists():
            near = closest(path.name, [p.name for p in home.stores.glob("*.zarr")])
            raise StoreError(
                f"There is no store {path}, here or under {home.stores}."
                + (f" Did you mean {near!r}?" if near else ""),
                "fedcache ls   lists them. A new one:  "
                "fedcache extract --dataset digits --backbones efficientnet-lite0",
            )
        return place
    if dataset is not None:
        found = ingested_path(home, dataset)
        if found is None:
            known = datasets.peek(
                dataset, memory=memory_of(home), roots=roots_of(ExtractConfig(), home), data=home.data
            )
            found = home.store(*known) if known else None
        return found if found is not None and found.exists() else None
    last = last_store(home)
    if last is None:
        return None
    chosen, spec = last
    if observer is not None:
        observer.note(f"Store {chosen.name}: {spec}, the dataset last extracted (--dataset chooses another).")
    return chosen


def need_path(
    home: Home, *, path: Path | None = None, dataset: str | None = None, observer: Observer | None = None
) -> Path:
    """``locate_store``, or exit 4 with the command that makes one."""
    found = locate_store(home, path=path, dataset=dataset, observer=observer)
    if found is None:
        known = None if dataset else no_store_remembered(home)
        if known is not None:
            raise known
        what = f"of {dataset} " if dataset else ""
        raise StoreError(
            f"There is no store {what}under {home.stores} yet.",
            f"fedcache extract --dataset {dataset or 'digits'} --backbones efficientnet-lite0",
        )
    return found


def no_store_remembered(home: Home) -> FedcacheError | None:
    """The error of leaving out the store where none is remembered although some exist, as after a stopped extraction.

    A StoreError with the names and the commands that go on; None when the home has no store.
    """
    shown, following = [], []
    paths = sorted(home.stores.glob("*.zarr")) if home.stores.is_dir() else []
    for path in paths:
        try:
            store = Store.open(path)
            begun = unfinished_arrays_of(store, home)
        except FedcacheError:
            shown.append(f"{path.name} (damaged)")
            continue
        shown.append(path.name + (" (unfinished)" if begun else "" if store.arrays else " (empty)"))
        following += [array.command(store, home) for array in begun]
    if not paths:
        return None
    ways = [f"Name the one you mean, as in:  fedcache inspect {paths[0].name}   (train and others: --store NAME)"]
    return StoreError(
        f"No finished extraction is remembered. Stores under {home.stores}: {', '.join(shown)}.",
        "\n".join([*ways, *(f"To go on:  {command}" for command in following)]),
    )


def need_store(
    home: Home, *, path: Path | None = None, dataset: str | None = None, observer: Observer | None = None
) -> Store:
    """``need_path``, opened; CorruptionError for a damaged store."""
    return Store.open(need_path(home, path=path, dataset=dataset, observer=observer))


def ingested_path(home: Home, spec: str) -> Path | None:
    """The store of ``ingested:NAME``, or of NAME unless that is a dataset of its own; None for anything else.

    A name that is near an ingested one is a UsageError with "did you mean".
    """
    kind, sign, rest = spec.partition(":")
    explicit = bool(sign) and kind == INGESTED
    if not explicit and (sign or "=" in spec or spec == "digits"):
        return None
    found = ingested_stores(home)
    name = rest if explicit else spec
    if slug_of(name) in found:
        return found[slug_of(name)]
    others = () if explicit else [row["name"] for row in datasets.known()]
    if explicit or closest(name, [*others, *found]) in found:
        hint = f"Ingested: {', '.join(found) or 'nothing yet'}. Another:  fedcache ingest FILE --name {name or 'NAME'}"
        raise unknown("dataset", spec, [*found, *others], hint=hint)
    return None


def more_features(
    store: Store, backbone: str, key: str = "features/NAME", recipe: Mapping[str, str] | None = None
) -> str:
    """The command that brings a store what it lacks: extraction, or another file where there are only embeddings."""
    if is_ingested(store):
        return f"Add {key} to the file, then:  {ingest_command(store)}"
    return extract_command(store, [backbone], recipe)
