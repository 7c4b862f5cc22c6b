"""Where the rows of a stored run are: the store of its dataset, found by what the run's directory says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcache.errors import FedcacheError
from fedcache.parsing import parse_toml
from fedcache.store.store import Store


def train_table(run: Path) -> dict[str, Any]:
    """The ``[train]`` table that made the run in a directory; {} when it is not readable."""
    try:
        table: dict[str, Any] = parse_toml((run / "config.toml").read_text(encoding="utf-8"))["train"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return table


def store_behind(run: Path, result: Mapping[str, Any]) -> Store | None:
    """The store of the dataset of a run with that result: the one that its configuration names, else one of the home
    that its directory lies in; None where there is none any more.
    """
    digest = str(result["dataset"]["digest"])
    named, beside = train_table(run).get("store"), run.parent.parent / "stores"
    slug = f"*-{digest[:8]}.zarr"
    for path in (*([Path(named)] if named else []), *sorted(beside.glob(slug)), *sorted(beside.glob("*.zarr"))):
        try:
            store = Store.open(path)
        except (FedcacheError, OSError):
            continue
        if store.dataset["digest"] == digest:
            return store
    return None
