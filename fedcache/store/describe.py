"""A store in plain values, as a data frame of its rows, and as HTML for a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedcache.notebooks import data_frame, html_table
from fedcache.store.manifest import ArrayInfo, Manifest
from fedcache.store.partitions import partition_names
from fedcache.store.samples import Samples
from fedcache.store.selection import SPLITS


def samples_frame(s: Samples) -> Any:
    """pandas columns of the rows: uid, name, label, class, domain, split, ok.

    Raises:
        MachineError without pandas.
    """
    return data_frame(
        {
            "uid": [row.tobytes().hex() for row in s.uid],
            "name": list(s.name),
            "label": s.label,
            "class": [s.classes[i] if i >= 0 else None for i in s.label],
            "domain": [s.domains[i] for i in s.domain],
            "split": [SPLITS[i] for i in s.split],
            "ok": s.ok == 1,
        }
    )


def describe_store(path: Path, m: Manifest) -> dict[str, Any]:
    """What the manifest says, plain JSON values; rows and features are not among them."""
    return {
        "path": str(path),
        "dataset": dict(m.dataset),
        "rows": m.rows,
        "ok": m.rows_ok,
        "classes": list(m.classes),
        "domains": list(m.domains),
        "arrays": [{"key": k, **_described(a)} for k, a in sorted(m.arrays.items())],
        "texts": {k: [list(e["templates"]) for e in v] for k, v in m.texts.items()},
        "partitions": partition_names(m),
    }


def store_html(path: Path, m: Manifest) -> str:
    """A table of the arrays under one line on the dataset."""
    some = ", ".join(m.classes[:10]) + (f", .. ({len(m.classes):,})" if len(m.classes) > 10 else "")
    title = f"{m.dataset['slug']}: {m.rows_ok:,} of {m.rows:,} images; classes {some}; {path}"
    rows = [(k, *_described(a).values()) for k, a in sorted(m.arrays.items())]
    return html_table(title, ("array", "backbone", "shape", "dtype"), rows)


def _described(info: ArrayInfo) -> dict[str, Any]:
    return {"backbone": str(info.recipe.get("backbone", "")), "shape": list(info.shape), "dtype": info.dtype}
