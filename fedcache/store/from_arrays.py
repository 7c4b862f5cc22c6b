"""Embeddings that are in memory already, as the content of a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.config import Home
from fedcache.errors import UsageError
from fedcache.store.content import Content, arrange, usable_name
from fedcache.store.embedding_files import assemble
from fedcache.store.files import make_private

WHERE = Path("from_arrays()")
"""What messages name in the place of a file."""


def arrange_arrays(
    features: object, text: Mapping[str, Any], columns: Mapping[str, Any], name: str | None, path: str | Path | None
) -> tuple[Content, Path]:
    """The arguments of ``Store.from_arrays`` as the content of a store, and where it goes.

    Args:
        features: by backbone.
        text: by backbone.
        columns: called as in a file, and None where they were not given.
        name: of the dataset; the backbones' names when None.
        path: of the store; under FEDCACHE_HOME when None, in folders that are made.

    Raises:
        UsageError, for shapes or values that do not fit; CorruptionError, for values that are not finite.
    """
    if not isinstance(features, Mapping):
        raise UsageError(
            f"from_arrays() takes features by backbone, not {type(features).__name__}.", 'Give {"mine": X}'
        )
    if not features:
        raise UsageError("from_arrays() was given no features.", 'For example {"mine": X}')
    raw = {f"features/{key}": _array(values) for key, values in features.items()}
    raw |= {f"text/{key}": _array(values) for key, values in text.items()}
    raw |= {key: _array(values) for key, values in columns.items() if values is not None}
    name = name or "-".join(features)
    slug = usable_name(name)
    content = arrange(assemble(WHERE, raw), name)
    if path is not None:
        return content, Path(path).expanduser()
    home = Home.from_environment()
    make_private(home.root)
    make_private(home.stores)
    return content, home.store(slug, content.dataset["digest"])


def _array(values: Any) -> Any:
    """As numpy has it; words that came as objects (pandas) are words, and numbers that did stay refused."""
    made = np.asarray(values)
    if made.dtype.kind in "OT" and made.size and all(isinstance(v, str) for v in made.ravel()):
        return made.astype(np.str_)
    return made
