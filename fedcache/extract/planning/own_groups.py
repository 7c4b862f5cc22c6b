"""The groups of the dataset that is named.

Groups are no part of a dataset's content, so that two datasets which differ in nothing else share one store. A command
that names one of them puts its groups in the place of the other's, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import FedcacheError
from fedcache.extract.datasets import Dataset, asked_for, holds_of, open_dataset
from fedcache.progress import Observer, told_as
from fedcache.store.groups import group_digests
from fedcache.store.store import Store, replace_groups
from fedcache.tables.groups import Group


def bring_groups(
    path: Path, spec: str, where: Mapping[str, Any], observer: Observer, held: Dataset | None = None
) -> None:
    """Give the store at ``path`` the groups of a dataset of its content, which is read where it has others.

    ``held`` is the dataset where a program holds it. A damaged store stays as it is. Raises as
    ``open_dataset``, and StoreError for a store that cannot be written.
    """
    try:
        store = Store.open(path)
    except FedcacheError:
        return  # whoever opens it says what is wrong
    if held is None:
        if where["memory"].recall(_key(store, spec, where)) == group_digests(store.manifest):
            return
        with told_as(observer, "reading", holds_of(spec)) as progress:
            held = open_dataset(spec, **where, progress=progress)
    keep_groups(store, groups_in_order(store, held), spec, observer)
    remember_groups(store, spec, where)


def remember_groups(store: Store, spec: str, where: Mapping[str, Any]) -> None:
    """Note that the groups of a store are those of a dataset.

    Nothing is noted of images that a program held, nor in a home that cannot be written: they are looked at again.
    """
    with suppress(FedcacheError, OSError):
        where["memory"].remember(_key(store, spec, where), group_digests(store.manifest))


def groups_in_order(store: Store, data: Dataset) -> dict[str, Group]:
    """The groups of a dataset in the order of a store's rows, which is another one where the store grew."""
    if store.dataset["digest"] == data.digest:
        return dict(data.groups)
    place = {
        (name, uid.tobytes()): row
        for row, (name, uid) in enumerate(zip(data.names, data.uid, strict=True))
    }
    s = store.samples
    rows = np.array(
        [place.get((n, u.tobytes()), -1) for n, u in zip(s.name, s.uid, strict=True)], np.int64
    )
    return {name: group.take(rows) for name, group in data.groups.items()}


def keep_groups(store: Store, groups: Mapping[str, Group], spec: str, observer: Observer) -> None:
    """Keep these groups of a store and no others; what that changed is told."""
    before = set(store.groups)
    begun = bool(store.arrays)
    changed, gone = replace_groups(store, groups)
    if begun and changed:
        if before & set(changed):
            tell = observer.warn
        else:
            tell = observer.note
        tell(
            f"{_columns(changed)} those of {spec} now, in {store.path.name}; partitions made before keep their rows."
        )
    if gone:
        observer.warn(
            f"{_columns(gone)} not of {spec} and no longer in {store.path.name}; a command that names the dataset with "
            f"{'it' if len(gone) == 1 else 'them'} brings {'it' if len(gone) == 1 else 'them'} again."
        )


def _columns(names: list[str]) -> str:
    if len(names) == 1:
        return f"The column {names[0]} is"
    return f"The columns {', '.join(names)} are"


def _key(store: Store, spec: str, where: Mapping[str, Any]) -> list[Any]:
    return ["groups", *asked_for(spec, **where), store.dataset["digest"]]
