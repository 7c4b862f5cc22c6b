"""Stores and partitions, for ``extract``, ``ingest``, ``join``, ``partition`` and ``shard`` of the Python API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcache.calls.backbones import backbone_names
from fedcache.calls.keywords import fields_of, names_checked
from fedcache.config import ExtractConfig, Home, refuse_remote, resolve
from fedcache.errors import UsageError
from fedcache.extract.extract_dataset import extract as extract_dataset
from fedcache.extract.planning.find_store import need_store
from fedcache.extract.planning.ingest import ingest_file
from fedcache.extract.planning.parts import join as join_parts
from fedcache.federate.partition.partition import Partition
from fedcache.progress import Observer, Silent
from fedcache.runs.partitions import given_partition, is_given, make_partition, write_shards
from fedcache.store.store import Store
from fedcache.tables.roles import ColumnChoice


def opened(store: Store | str | Path | None) -> Store:
    """A store, given as an object or a path; None for the store of fedcache.toml or the only one."""
    if store is not None and not isinstance(store, str | Path):
        return store
    return need_store(Home.from_environment(), path=store)


def extract(given: Mapping[str, Any]) -> Store:
    """The store of an extraction; ``given`` are the arguments of ``fedcache.extract``."""
    keywords = fields_of(ExtractConfig, given)
    # Modules in memory become names that this process knows.
    if keywords["backbones"]:
        keywords["backbones"] = backbone_names(keywords["backbones"])
    # A dataset is a spec, or the images themselves.
    images = None
    if not isinstance(keywords["dataset"], str):
        images = keywords.pop("dataset")
    config = resolve(ExtractConfig, keywords, {}, "extract()")
    place = _place(given["store"])
    home = Home.from_environment()
    observer = given["observer"]
    return extract_dataset(config, home, store=place, observer=observer, images=images).store


def _place(store: str | Path | None) -> Path | None:
    """The directory of a new store; None for the default directory. Raises UsageError for a remote address."""
    if not store:
        return None
    refuse_remote(store, "store")
    return Path(store)


def ingest(given: Mapping[str, Any]) -> Store:
    """The store of embeddings from a file; ``given`` are the arguments of ``fedcache.ingest``.

    Raises UsageError for a column that is not given by its name, and the errors of ``ingest_file``.
    """
    file = given["file"]
    if not isinstance(file, str | Path):
        raise UsageError(
            f"ingest needs the path of a file of embeddings, but got {type(file).__name__}.",
            "fc.Store.from_arrays({'mine': X}, labels=y, name='mine')   takes arrays",
        )
    keys = [given[name] for name in ("label_key", "split_key", "name_key", "domain_key")]
    for key in keys:
        if key is not None and not isinstance(key, str):
            raise UsageError(
                f"{key!r} is not the name of a column.", 'For example label_key="diagnosis"'
            )
    # () means no groups; None means that fedcache chooses them.
    groups = given["group_key"]
    if groups is not None:
        groups = _names(groups)
    no_label = given["no_label"]
    if isinstance(no_label, str | int | float):
        no_label = (no_label,)
    no_labels = tuple(map(str, no_label))
    columns = _names(given["features_key"])
    label, split, row_name, domain = keys
    choice = ColumnChoice(
        columns, label, split, row_name, domain, groups, no_labels, given["unlabelled"]
    )
    return ingest_file(
        Home.from_environment(),
        Path(file),
        given["name"],
        _place(given["store"]),
        replace=given["replace"],
        choice=choice,
        drop_nan=given["drop_nan"],
        observer=given["observer"],
    ).store


@names_checked
def join(
    parts: Sequence[Store | str | Path],
    *,
    store: str | Path | None = None,
    max_bad: str = "1%",
    observer: Observer | None = None,
) -> Store:
    """Assemble the parts of a store, which ``extract(part="1/4")`` and so on made on this or other machines.

    Args:
        parts: all parts, in any order.
        store: directory of the store; None for the default directory of the dataset.
        max_bad: largest share (``"1%"``) or number of unreadable images in all parts together.
        observer: receives progress messages.

    Raises StoreError if parts are missing, given twice, unfinished, or differ in data, recipes or weights, and
    CorruptionError if a part is damaged.
    """
    if isinstance(parts, str | Path | Store):
        parts = [parts]
    folders = [part.path if isinstance(part, Store) else part for part in parts]
    return join_parts(folders, store, Home.from_environment(), max_bad, observer or Silent())


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    """One name or several names, as a tuple."""
    if isinstance(given, str):
        return (given,)
    return tuple(given)


@names_checked
def partition(
    store: Store | str | Path | None,
    scheme: Any = None,
    *,
    seed: int = 0,
    name: str | None = None,
    **arguments: Any,
) -> Partition:
    """Assign the rows of a store to clients, and save the partition in the store, unless the store is published.

    Args:
        store: a store or its path; None for the only one.
        scheme: a name as for ``fedcache partition``, or None with ``by=COLUMN``. Or the assignment itself: a list with
            the client of each row in the order of ``Store.samples.name``, a dict from clients to rows, a CSV file with
            ``name,client[,split]``, or a function of the store that returns an assignment.
        seed: seed of the random draws.
        name: name under which the partition is saved.
        arguments: arguments of the scheme (clients, alpha, shards, ...). ``replace=True`` replaces a partition of the
            same name that assigns the rows differently.

    Raises UsageError for an argument that the scheme does not have, for a value that the rows do not allow, and for
    the name of a partition that assigns the rows differently.
    """
    opened_store = opened(store)
    if is_given(scheme):
        return given_partition(opened_store, scheme, seed=seed, name=name, **arguments)
    if scheme is not None:
        scheme = str(scheme)
    return make_partition(opened_store, scheme, seed=seed, name=name, **arguments)


def shard(
    store: Store | str | Path | None, parts: Partition, out: str | Path | None = None
) -> Path:
    """Write one ordinary store per client; returns their directory.

    Args:
        store: a store or its path; None for the only one.
        parts: the partition.
        out: directory for the stores; None for one next to the store.

    Raises UsageError if ``parts`` is only a name.
    """
    if isinstance(parts, str):
        raise UsageError(
            f"parts= must be a partition, but got {parts!r}.",
            "fc.shard(store, fc.partition(store, 'iid'))",
        )
    return write_shards(opened(store), parts, out, Silent())
