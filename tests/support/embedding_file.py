"""A file of embeddings as a whole."""

from dataclasses import replace

from fedcache.tables.embeddings import open_embeddings
from fedcache.tables.words import FileRows


def read_embeddings(path):
    """``open_embeddings`` with the features in memory."""
    found = open_embeddings(path)
    whole = {
        name: v.whole() if isinstance(v, FileRows) else v for name, v in found.features.items()
    }
    return replace(found, features=whole)
