"""The table: every backbone with a name, and the two prefixes that open a library's own names.

Rows are data, so looking one up imports no torch; a library's name is derived from its configuration once and then
remembered under ``<home>/recipes``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcache.errors import FedcacheError, unknown
from fedcache.extract.backbones import (
    cnn,
    glyph_clip,
    metadataset,
    open_clip,
    packaged,
    pixels,
    random,
    timm,
    torchvision,
)
from fedcache.extract.backbones.backbone import Backbone
from fedcache.extract.recipe import VERSION, Recipe, slug
from fedcache.store.files import digest_of, make_private, write_atomic

_ROWS = (
    *packaged.BACKBONES,
    glyph_clip.BACKBONE,
    *open_clip.BACKBONES,
    *metadataset.BACKBONES,
    *timm.BACKBONES,
    *torchvision.BACKBONES,
    *cnn.BACKBONES,
    *pixels.BACKBONES,
    *random.BACKBONES,
)

BACKBONES: Mapping[str, Backbone] = {row.name: row for row in _ROWS}

DERIVE: Mapping[str, Callable[[str], Backbone]] = {
    timm.PREFIX: timm.derive,
    open_clip.PREFIX: open_clip.derive,
    "random-projection:": random.derive,
}
"""What makes the row of a library's own name, by its prefix."""


def lookup(name: str, *, home: Path | None = None) -> Backbone:
    """The row of a name.

    Args:
        name: of the table, ``timm:<name>``, ``open_clip:<arch>@<tag>`` or ``random-projection:<D>``.
        home: ``$FEDCACHE_HOME``, where rows of library names are remembered.

    Raises:
        UsageError, for a name nobody has, with "did you mean".
    """
    if name in BACKBONES:
        return BACKBONES[name]
    derive = next((derive for prefix, derive in DERIVE.items() if name.startswith(prefix)), None)
    if derive is None:
        raise unknown(
            "backbone", name, BACKBONES, hint=f"Known: {', '.join(BACKBONES)}; or timm:NAME, open_clip:ARCH@TAG"
        )
    remembered = None if home is None else home / "recipes" / f"{slug(name)}-{digest_of(name)[:8]}.json"
    row = _recall(remembered, name) if remembered is not None else None
    if row is None:
        row = derive(name)
        if remembered is not None:
            make_private(remembered.parent)
            write_atomic(remembered, json.dumps(_to_dict(row), indent=1).encode())
    return row


def _to_dict(row: Backbone) -> dict[str, Any]:
    return {**asdict(row), "recipe": row.recipe.to_dict()}


def _recall(path: Path, name: str) -> Backbone | None:
    """A remembered row; None when there is none, or it is damaged or of another version and must be derived again."""
    try:
        data = json.loads(path.read_bytes())
        data["recipe"] = Recipe.from_dict(data["recipe"])
        data["files"] = tuple(data["files"])
        data["sha256"] = tuple((file, digest) for file, digest in data["sha256"])
        row = Backbone(**data)
    except (OSError, ValueError, KeyError, TypeError, FedcacheError):
        return None
    # Preprocessing of another version of fedcache must not be passed off as this one's, nor the other way round.
    return row if row.name == name == row.recipe.backbone and row.recipe.version == VERSION else None
