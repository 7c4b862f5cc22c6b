"""Saved partitions of a store: which there are, and the payload of one, verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedcache.store import chunks as files
from fedcache.store.files import read_whole, sha256_hex
from fedcache.store.manifest import Manifest


def partition_names(manifest: Manifest) -> list[str]:
    """Names of the partitions that a manifest lists, sorted."""
    places = (name for name in manifest.files if name.startswith("partitions/"))
    return sorted(Path(name).stem if name.endswith(".json") else name for name in places)


def read_partition(store: Path, manifest: Manifest, name: str) -> dict[str, Any]:
    """The payload of a partition that the manifest lists.

    Raises:
        CorruptionError.
    """
    relative = f"partitions/{name}.json"
    path = store / relative
    try:
        raw = read_whole(path)
    except OSError as error:
        raise files.damaged(f"partition {name}", path, "is missing or unreadable") from error
    if sha256_hex(raw) != manifest.files[relative]:
        raise files.damaged(f"partition {name}", path, "does not have the sha256 of the manifest")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise files.damaged(f"partition {name}", path, "is not JSON") from error
    if not isinstance(found, dict):
        raise files.damaged(f"partition {name}", path, "is not a partition")
    return found
