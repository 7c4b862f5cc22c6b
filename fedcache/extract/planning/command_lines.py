"""Feature arrays in flight, and the ``fedcache extract`` commands that hints give: each runs as it is written."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace

from fedcache.config import ExtractConfig, Home, resolve
from fedcache.errors import FedcacheError
from fedcache.extract import datasets
from fedcache.extract.planning.plan import memory_of, roots_of
from fedcache.extract.recipe import slug
from fedcache.store.catalog import ingest_command, is_ingested
from fedcache.store.journal import journals
from fedcache.store.store import Store


def extract_arguments(config: ExtractConfig) -> list[str]:
    """The options of ``fedcache extract`` that make ``config``."""
    arguments: list[str] = []
    for item in fields(config):
        value, option = getattr(config, item.name), f"--{item.name.replace('_', '-')}"
        if isinstance(value, Mapping):
            arguments += [word for key, one in value.items() for word in (option, f"{key}={one}")]
        elif item.name == "text":
            arguments += [word for one in value for word in (option, one)]
        elif isinstance(value, tuple):
            arguments += [option, ",".join(value)] if value else []
        elif value is True:
            arguments.append(option)
        elif value != item.default:
            arguments += [option, str(value)]
    return arguments


def extract_command(
    store: Store, backbones: Sequence[str], recipe: Mapping[str, str] | None = None, home: Home | None = None
) -> str:
    """The command that adds arrays to a store: with its dataset and limit, and --store only where no dataset finds it.

    A store says nothing of places, so its dataset is what this home remembers of its arrays. Where the home knows
    nothing, as for a store from elsewhere, the sentence says what to add.
    """
    home = home or Home.from_environment()
    known = _dataset_of(store, home)
    order = replace(known or ExtractConfig(), backbones=tuple(backbones), recipe=dict(recipe or {}))
    if known is None:
        return f"{shlex.join(['fedcache', 'extract', '--store', str(store.path), *extract_arguments(order)])}, " + (
            "with --dataset and the options it was begun with"
        )
    return shlex.join(["fedcache", "extract", *extract_arguments(order), *store_option_of(store, home)])


def store_option_of(store: Store, home: Home) -> list[str]:
    """``--store PATH`` where an extraction of its dataset would not find the store by itself; else nothing."""
    usual = home.store(store.dataset["slug"], store.content)
    return [] if store.path.resolve() == usual.resolve() else ["--store", str(store.path)]


def _dataset_of(store: Store, home: Home) -> ExtractConfig | None:
    """The options that name a store's dataset: those of an array's order, or of the bundle; None when not known."""
    memory = memory_of(home)
    for array in store.arrays.values():
        fact = memory.recall(["order", store.dataset["digest"], array.digest])
        with suppress(FedcacheError):  # another version of fedcache may have ordered it, in other words
            if isinstance(fact, list):
                order = resolve(ExtractConfig, fact[1], {})
                return ExtractConfig(
                    dataset=order.dataset,
                    limit=order.limit,
                    layout=order.layout,
                    max_bad=order.max_bad,
                    data=order.data,
                )
    name, _, size = str(store.dataset["slug"]).partition("-")
    limit = int(size) if size.isdecimal() else None
    roots = roots_of(ExtractConfig(), home)
    known = datasets.peek("digits", limit=limit, memory=memory, roots=roots, data=home.data)
    if name == "digits" and known is not None and known[1] == store.content:
        return ExtractConfig(dataset="digits", limit=limit)
    return None


@dataclass(frozen=True)
class UnfinishedArray:
    """A feature array in flight: begun by an extraction, or opened again by ``repair``.

    Attributes:
        key: of the array.
        missing: chunks still to be computed.
        chunks: in all.
        label: ``backbone@size``; None when this home did not extract it.
        order: the extraction that goes on with it; None likewise.
    """

    key: str
    missing: int
    chunks: int
    label: str | None
    order: ExtractConfig | None

    @property
    def backbone(self) -> str:
        """Its name, or the slug of it."""
        return self.order.backbones[0] if self.order else self.key.rpartition("-")[0]

    def means(self, name: str) -> bool:
        """Whether a word of ``--backbones`` may mean this array."""
        bare = slug(name.partition("@")[0]) == slug(self.backbone)
        return name == self.key or (bare and ("@" not in name or self.label in (None, name)))

    def state(self, store: Store) -> str:
        """A clause for messages."""
        return f"{self.key} in {store.path} is unfinished: {self.missing} of {self.chunks} chunks are missing"

    def command(self, store: Store, home: Home) -> str:
        """The extract command that computes what is missing, and only that."""
        if self.order is None:
            if is_ingested(store):
                return ingest_command(store)
            return extract_command(store, [self.backbone], home=home)
        return shlex.join(["fedcache", "extract", *extract_arguments(self.order), *store_option_of(store, home)])


def unfinished_arrays_of(store: Store, home: Home) -> list[UnfinishedArray]:
    """The feature arrays of a store that are in flight; images (``pixels``) are left out, nobody trains on them."""
    found = []
    for journal in journals(store.path):
        header = journal.header
        if header is None or header["dtype"] == "uint8" or journal.key in store.arrays:
            continue
        label, order = None, None
        fact = memory_of(home).recall(["order", store.dataset["digest"], header["recipe"]])
        with suppress(FedcacheError):  # another version of fedcache may have ordered it, in other words
            if isinstance(fact, list):
                label, order = str(fact[0]), resolve(ExtractConfig, fact[1], {})
        found.append(UnfinishedArray(journal.key, journal.count - len(journal.chunks), journal.count, label, order))
    return found
