"""Text features of a store: their entries in the manifest, and the names of their folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, InternalError, StoreError, UsageError, shell_word
from fedcache.parsing import SAFE, slug_of
from fedcache.store import chunks as files
from fedcache.store.files import digest_of, sha256_hex, write_atomic
from fedcache.store.manifest import Manifest

TEXT_ORDER = ("clip-rn50", "clip-vit-b-16", "clip-vit-b-32", "glyph-clip")
"""Backbones with a text tower; of those of a store the first is taken."""


def find_text(
    manifest: Manifest, backbone: str, templates: Sequence[str] | None, weights: str | None
) -> dict[str, Any] | None:
    """The entry written or chosen last of a backbone or its array, of these templates and weights if given."""
    for entry in reversed(manifest.texts.get(slug_of(backbone_of(manifest, backbone)), [])):
        if templates is not None and entry["templates"] != list(templates):
            continue
        if weights is not None and entry["meta"].get("weights") != weights:
            continue
        found: dict[str, Any] = entry
        return found
    return None


def backbone_of(manifest: Manifest, name: str) -> str:
    """The backbone that is meant by its name, or by that of an array of it."""
    if slug_of(name) in manifest.texts or name not in manifest.arrays:
        return name
    return str(manifest.arrays[name].recipe.get("backbone"))


def text_of_array(manifest: Manifest, key: str) -> dict[str, Any] | None:
    """The entry of a backbone's text features that was current last and belongs to an array: both of the same weights.

    Of ingested features nobody knows weights: theirs are those of their backbone's name.
    """
    recipe = manifest.arrays[key].recipe
    name = str(recipe.get("backbone"))
    weights = recipe.get("weights")
    found = find_text(manifest, name, None, weights)
    current = find_text(manifest, name, None, None)
    if found is None and current is not None and "weights" not in current["meta"]:
        return current
    return found


def read_text(store: Path, backbone: str, entry: dict[str, Any]) -> NDArray[np.float32]:
    """The matrix [C, D] of an entry, verified. Raises CorruptionError."""
    place = files.chunk_path(store / "text" / slug_of(backbone) / entry["id"], 0, 2)
    size = files.array_bytes((max(1, entry["shape"][0]), entry["shape"][1]), "float32")
    raw = files.read_checked(place, entry["crc"], f"text features of {backbone}", size=size)
    return np.frombuffer(raw, "<f4")[: entry["shape"][0] * entry["shape"][1]].reshape(
        entry["shape"]
    )


def current_text(
    store: Path, manifest: Manifest, backbone: str, templates: Sequence[str] | None
) -> NDArray[np.float32]:
    """The matrix [C, D] of a backbone or its array. Raises StoreError where there is none; CorruptionError."""
    entry = find_text(manifest, backbone, templates, None)
    name = backbone_of(manifest, backbone)
    if entry is None:
        raise no_text_features(store, name)
    return read_text(store, name, entry)


def write_text(
    store: Path,
    manifest: Manifest,
    backbone: str,
    templates: Sequence[str],
    matrix: NDArray[np.float32],
    meta: Mapping[str, Any],
) -> None:
    """Write a matrix [C, D] and enter it last in ``manifest``, which the caller holds the lock of and writes.

    Raises CorruptionError, for values that are not finite; InternalError, for another shape.
    """
    values = np.asarray(matrix)
    if values.ndim != 2 or not values.shape[1]:
        raise InternalError(
            f"Text features of {backbone} have shape {values.shape}.", "Expected [classes, D]."
        )
    values = files.to_stored_dtype(values, "float32", (), 0, f"text features of {backbone}")
    slug = slug_of(backbone)
    rows = max(1, len(values))
    check_name("backbone", slug)
    entry = {"templates": list(templates), "meta": dict(meta)}
    name = digest_of(entry)[:8]
    # The chunk first, then what describes it: a crash in between leaves files that no manifest lists.
    crc = files.write_chunk_file(
        files.chunk_path(store / "text" / slug / name, 0, 2), values, rows, "float32"
    )
    attributes = {"templates": list(templates)}
    dimensions = (f"class_{name}", f"feature_{name}")
    for relative, raw in (
        (f"text/{slug}/zarr.json", files.group_metadata({"backbone": backbone})),
        (
            f"text/{slug}/{name}/zarr.json",
            files.array_metadata(values.shape, "float32", rows, attributes, dimensions),
        ),
    ):
        write_atomic(store / relative, raw)
        manifest.files[relative] = sha256_hex(raw)
    kept = [e for e in manifest.texts.get(slug, []) if e["id"] != name]
    manifest.texts[slug] = [*kept, {**entry, "id": name, "shape": list(values.shape), "crc": crc}]


def no_text_features(store: Path, backbone: str) -> FedcacheError:
    """The error for text features that are not there."""
    return StoreError(
        f"{store.name} has no text features of {backbone}.",
        f"fedcache extract --store {shell_word(store)} --backbones {shell_word(backbone)}, "
        "with --dataset and the options it was begun with",
    )


def check_name(what: str, name: str) -> None:
    """Refuse what cannot be the name of a file. Raises UsageError."""
    if not SAFE.fullmatch(name):
        raise UsageError(
            f"{what} name {name!r} is not usable as a file name.",
            "Use letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 128.",
        )
