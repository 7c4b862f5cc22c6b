"""Shell completion of option values: names of methods, backbones, datasets, stores and runs.

Each source is imported when its own values are asked for, and none imports torch: an answer has to come while somebody
types. What cannot be read offers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from fedcache.config import Home
from fedcache.errors import FedcacheError
from fedcache.federate.methods import NAMES
from fedcache.plugins import plugins

Names = Callable[[str], list[str]]


def _completer(names: Callable[[Home], Iterable[str]], *, several: bool = False) -> Names:
    """A completer of one name; with ``several``, of the last one of a comma-separated list."""

    def complete(incomplete: str) -> list[str]:
        # Of several names between commas the last is completed, and the others are not proposed again.
        if several:
            before = incomplete.rpartition(",")
        else:
            before = ("", "", incomplete)
        head = "".join(before[:2])
        given = set(before[0].split(","))
        try:
            found = [name for name in names(Home.from_environment()) if name not in given]
        # The shell waits for an answer: nothing to propose is better than an error.
        except (FedcacheError, OSError):
            return []
        return [f"{head}{name}" for name in found if name.startswith(before[2])]

    return complete


def _methods(_home: Home) -> list[str]:
    return [*NAMES, *plugins("methods")]


def _backbones(home: Home) -> list[str]:
    table: Any = import_module("fedcache.extract.backbones.table")
    return [*table.BACKBONES, *plugins("backbones")]


def _datasets(home: Home) -> list[str]:
    listing: Any = import_module("fedcache.extract.datasets.listing")
    catalog: Any = import_module("fedcache.store.catalog")
    return [entry["name"] for entry in listing.known(data=home.data)] + list(
        catalog.ingested_stores(home)
    )


def _schemes(_home: Home) -> list[str]:
    return list(import_module("fedcache.federate.partition.partition").SCHEMES)


def _stores(home: Home) -> list[str]:
    return sorted(path.name for path in home.stores.glob("*.zarr"))


def _partitions(home: Home) -> list[str]:
    catalog: Any = import_module("fedcache.store.catalog")
    return sorted({name for store in catalog.finished_stores(home) for name in store.partitions})


def _runs(home: Home) -> list[str]:
    runs: Any = import_module("fedcache.report.find_runs")
    names: list[str] = runs.names_in(home.runs)
    return names


def _tags(home: Home) -> list[str]:
    return [name.removeprefix("tag:") for name in _runs(home) if name.startswith("tag:")]


complete_methods = _completer(_methods, several=True)
complete_backbones = _completer(_backbones, several=True)
complete_datasets = _completer(_datasets)
complete_runs = _completer(_runs)
complete_tags = _completer(_tags)

OF_FIELDS: dict[str, Names] = {
    "method": complete_methods,
    "backbones": complete_backbones,
    "dataset": complete_datasets,
    "scheme": _completer(_schemes),
    "store": _completer(_stores),
    "partition": _completer(_partitions),
}
"""What completes an option, by the field of a configuration that it is."""


def complete_words(words: Iterable[str]) -> Names:
    """A completer of a fixed list of words."""
    return _completer(lambda _home: words, several=True)
