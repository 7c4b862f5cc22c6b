"""Datasets opened with the digests of the test's own home, unless others are given."""

from fedcache.config import Home
from fedcache.extract import datasets
from fedcache.extract.datasets import Context
from fedcache.extract.digests import DigestMemory


def digests(*, rehash=False):
    """The remembered digests of the home."""
    return DigestMemory(Home.from_environment().digests, rehash=rehash)


def open_dataset(spec, **options):
    """``datasets.open_dataset``."""
    return datasets.open_dataset(spec, Context(**{"memory": digests(), **options}))


def peek(spec, **options):
    """``datasets.peek``."""
    return datasets.peek(spec, Context(**{"memory": digests(), **options}))
