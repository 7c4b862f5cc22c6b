"""Features in and out: npz, npy, h5, parquet and safetensors, never a pickle.

One layout for all: ``features/<name>`` [N, D] (or [N, V, D]) per backbone, ``labels``, ``domain``, ``split`` [N], and
``name`` where the format has strings, with the class and domain names. What ``export`` writes, ``ingest`` reads; it
also takes class text features, ``text/<name>`` [C, D], where the format has arrays of another length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import UsageError, unknown
from fedcache.store.content import Content, value_id
from fedcache.store.disk_errors import explain_disk_errors
from fedcache.store.import_export_formats import WRITERS
from fedcache.store.store import Store


def export(store: Store, out: Path, keys: Sequence[str]) -> int:
    """Write the readable rows of some arrays to a file; its ending chooses the format.

    Returns:
        rows written.

    Raises:
        UsageError for an unknown ending or a folder that is not there.
    """
    if out.suffix not in WRITERS:
        raise unknown("file ending", out.suffix, WRITERS)
    if not out.parent.is_dir():
        raise UsageError(f"The folder {out.parent} does not exist.", f"mkdir -p {out.parent}")
    s = store.samples
    good = np.flatnonzero(s.ok == 1)
    columns: dict[str, Any] = {f"features/{key}": store.reader(key).rows(good) for key in keys}
    columns |= {"labels": s.label[good], "domain": s.domain[good], "split": s.split[good]}
    names = [s.name[i] for i in good]
    meta = {"classes": list(s.classes), "domains": list(s.domains), "dataset": store.dataset["slug"]}
    temporary = out.with_name(f".{out.name}.partial{out.suffix}")
    with explain_disk_errors(out, sum(values.nbytes for values in columns.values())):
        try:
            WRITERS[out.suffix](temporary, columns, names, meta)
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    return len(good)


def holds_content(store: Store, content: Content) -> bool:
    """Whether a store holds all of some content, under whatever name its file was."""
    same = bool(store.dataset["digest"] == content.dataset["digest"])
    return same and content.values <= _held(store) and all(store.has_text(name) for name in content.texts)


def holds_part_of(store: Store, content: Content) -> bool:
    """Whether a store holds nothing but some content, of which an interrupted ingest left out a part."""
    return bool(store.dataset["digest"] == content.dataset["digest"]) and _held(store) <= content.values


def _held(store: Store) -> set[tuple[str, int]]:
    return {value_id(info.recipe) for info in store.arrays.values()}
