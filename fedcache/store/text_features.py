"""Text features of a store: their entries in the manifest, and the names of their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import Exit, FedcacheError
from fedcache.store import chunks as files
from fedcache.store.manifest import SAFE, Manifest


def find(
    manifest: Manifest, backbone: str, templates: Sequence[str] | None, weights: str | None
) -> dict[str, Any] | None:
    """The entry written or chosen last of a backbone, of these templates and weights if given."""
    for entry in reversed(manifest.texts.get(slug_of(backbone), [])):
        if templates is not None and entry["templates"] != list(templates):
            continue
        if weights is not None and entry["meta"].get("weights") != weights:
            continue
        found: dict[str, Any] = entry
        return found
    return None


def read(store: Path, backbone: str, entry: dict[str, Any]) -> NDArray[np.float32]:
    """The matrix [C, D] of an entry, verified.

    Raises:
        FedcacheError: CORRUPT.
    """
    place = files.chunk_path(store / "text" / slug_of(backbone) / entry["id"], 0, 2)
    size = files.array_bytes((max(1, entry["shape"][0]), entry["shape"][1]), "float32")
    raw = files.read_checked(place, entry["crc"], f"text features of {backbone}", size=size)
    return np.frombuffer(raw, "<f4")[: entry["shape"][0] * entry["shape"][1]].reshape(entry["shape"])


def without(store: Path, backbone: str) -> FedcacheError:
    """The error for text features that are not there."""
    return FedcacheError(
        Exit.STORE,
        f"{store.name} has no text features of {backbone}.",
        f"fedcache extract --store {store} --backbones {backbone}, with --dataset and the options it was begun with",
    )


def slug_of(name: str) -> str:
    """A name as that of a folder."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)


def check_name(what: str, name: str) -> None:
    """Refuse what cannot be the name of a file.

    Raises:
        FedcacheError: USAGE.
    """
    if not SAFE.fullmatch(name):
        raise FedcacheError(
            Exit.USAGE,
            f"{what} name {name!r} is not usable as a file name.",
            "Use letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 128.",
        )
