"""Feature arrays in flight: what is missing of them, and the command that goes on."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass

from fedcache.config import ExtractConfig, Home, resolve
from fedcache.errors import FedcacheError
from fedcache.extract.planning.command_lines import extract_arguments, extract_command, store_option_of
from fedcache.extract.planning.plan import memory_of
from fedcache.extract.recipe import slug
from fedcache.store.catalog.find import ingest_command, is_ingested
from fedcache.store.journal import journals
from fedcache.store.store import Store


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
    memory = memory_of(home)
    found = []
    for journal in journals(store.path):
        header = journal.header
        if header is None or header["dtype"] == "uint8" or journal.key in store.arrays:
            continue
        label, order = None, None
        fact = memory.recall(["order", store.dataset["digest"], header["recipe"]])
        with suppress(FedcacheError):  # another version of fedcache may have ordered it, in other words
            if isinstance(fact, list):
                label, order = str(fact[0]), resolve(ExtractConfig, fact[1], {})
        found.append(UnfinishedArray(journal.key, journal.count - len(journal.chunks), journal.count, label, order))
    return found
