"""Training rows of a run's clients, and the check that a model is not measured on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.config import Home
from fedcache.errors import FedcacheError
from fedcache.federate.partition.partition import Partition
from fedcache.models.evaluate import LabelledRows
from fedcache.models.predictor import array_keys
from fedcache.models.saved_model import SavedModel
from fedcache.runs.directory import train_table
from fedcache.runs.origin import store_behind
from fedcache.runs.partitions import load_partition
from fedcache.runs.predict_run import result_of
from fedcache.runs.store_choice import open_clients
from fedcache.store.content import row_digests
from fedcache.store.samples import SPLITS
from fedcache.store.store import Store

BLOCK = 4096
"""Rows of stored features that are compared at once."""
TRAIN = SPLITS.index("train")
TEST = SPLITS.index("test")


def warning_of_trained_rows(
    place: Path, members: Sequence[SavedModel], label: str, rows: LabelledRows, home: Home
) -> str | None:
    """What is to be said where rows are among those that a model was trained on, as far as that can be known.

    Its run is that of the directory, else the one beside the model's file, else one of the home. Rows of the run's own
    dataset are known by their numbers, those of others by their content, and those of a file by their features, where
    the run's store is still there. Where its partition is not, all training rows of the dataset may be meant.

    Args:
        place: the directory of a run, or a model file.
        members: the models of its seeds.
        label: of the model.
        rows: that it was measured on.
        home: where the run and its store are looked for.
    """
    run = None
    digest = members[0].facts.run
    for folder in (place if place.is_dir() else place.parent.parent, home.runs / digest[:16]):
        with suppress(FedcacheError):  # of a damaged run nothing is known
            run = run or (None if (found := result_of(folder, digest)) is None else (folder, found))
    if run is None:
        return None
    with suppress(FedcacheError, OSError):
        return _warning(run, members, label, rows)
    return None


def _warning(
    run: tuple[Path, dict[str, Any]], members: Sequence[SavedModel], label: str, rows: LabelledRows
) -> str | None:
    data = run[1]["dataset"]
    given = None
    if isinstance(rows.source, Store):
        given = rows.source
    itself = given is not None and data["digest"] == given.dataset.get("digest")
    if itself:
        own = given
    else:
        own = store_behind(*run)
    trained = None
    with suppress(FedcacheError, OSError):  # a partition that is gone or damaged
        trained = rows_of_clients(*run, [m.facts.seed for m in members], own)
    was = "may have been"
    if trained is not None:
        was = "was"
    of_all = f"of {len(rows.rows):,} rows"
    if given is not None and (
        itself or given.dataset.get("shard", {}).get("parent") == data["digest"]
    ):
        split = given.column("split")
        if itself:
            numbers = np.arange(given.rows)
        else:
            numbers = np.array(given.dataset["shard"]["rows"], np.int64)
        if trained is None:
            seen = split == TRAIN
        else:
            seen = np.isin(numbers, trained)
        if not (same := int(seen[rows.rows].sum())):
            return None
        # A scheme may deal rows of the test split too: then that split does not leave them out.
        advice = ": --split test leaves them out."
        if (seen & (split == TEST)).any():
            advice = "."
        return f"{label} {was} trained on {same:,} {of_all} of {given.path.name}{advice}"
    if own is None:
        return None
    if trained is None:
        trained = np.flatnonzero((own.column("split") == TRAIN) & (own.column("ok") == 1))
    if given is not None:
        same = int(
            np.isin(_keys(given.column("uid")[rows.rows]), _keys(own.column("uid")[trained])).sum()
        )
    else:
        same = _same_features(own, trained, members[0], rows)
    if not same:
        return None
    return f"{same:,} {of_all} have the same content as rows of {data['slug']} that {label} {was} trained on."


def rows_of_clients(
    folder: Path, result: Mapping[str, Any], seeds: Sequence[int], store: Store | None
) -> NDArray[np.int64] | None:
    """The rows, as numbers of the run's dataset, that clients trained on; None where its partition is not known.

    Args:
        folder: the run's directory, which keeps the partitions that were made for it.
        result: of the run.
        seeds: whose rows are meant.
        store: of the dataset, which keeps those that have a name there; None where there is none any more.

    Raises StoreError, CorruptionError for a partition or client store that is not what was written.
    """
    table = train_table(folder)
    digest = str(result["dataset"]["digest"])
    # its partition numbers the rows that any client has, not those of the dataset
    if table.get("clients_from"):
        stores = open_clients(Path(table["clients_from"]))
        if stores[0].dataset["shard"]["parent"] != digest:
            return None
        held = [
            (np.array(s.dataset["shard"]["rows"], np.int64), s.column("split"), s.column("ok"))
            for s in stores
        ]
        return np.unique(
            np.concatenate([numbers[(split == TRAIN) & (ok == 1)] for numbers, split, ok in held])
        )
    found = []
    for seed in seeds:
        if (file := folder / f"partition-{seed}.partition").is_file():
            partition = Partition.load(file, dataset=digest)
        elif store is not None:
            partition = load_partition(
                store, str(table.get("partition") or result["partition"]["name"])
            )
        else:
            return None
        if partition.digest not in result["partition"]["digests"]:
            return None
        found.append(partition.table.train.rows)
    return np.unique(np.concatenate(found))


def _same_features(
    store: Store, trained: NDArray[np.int64], model: SavedModel, rows: LabelledRows
) -> int:
    """How many rows of a file have the features of some trained row of a store, of the model's first backbone."""
    assert not isinstance(rows.source, Store)
    reader = store.reader(array_keys(model, store)[0])
    with np.errstate(over="ignore"):  # what does not fit into the stored dtype is no stored row
        asked = [
            row_digests(first.astype(reader.info.dtype))
            for first, *_ in rows.source.of_rows(rows.rows)
        ]
    parts = (trained[start : start + BLOCK] for start in range(0, max(1, len(trained)), BLOCK))
    known = [row_digests(reader.rows(part)[:, 0]) for part in parts]
    return int(np.isin(_keys(np.concatenate(asked)), _keys(np.concatenate(known))).sum())


def _keys(uid: NDArray[np.uint8]) -> NDArray[np.void]:
    """[n, 16] -> [n]: rows of bytes that compare as one value."""
    found: NDArray[np.void] = np.ascontiguousarray(uid).view("V16").ravel()
    return found
