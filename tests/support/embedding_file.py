"""A file of embeddings as a whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedcache.tables.embeddings import Embeddings, open_embeddings
from fedcache.tables.words import FileRows


def read_embeddings(path: Path) -> Embeddings:
    """``open_embeddings`` with the features in memory."""
    found = open_embeddings(path)
    whole = {
        name: v.whole() if isinstance(v, FileRows) else v for name, v in found.features.items()
    }
    return replace(found, features=whole)
