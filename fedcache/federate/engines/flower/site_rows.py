"""The rows of sites, which keep them to themselves: the server knows their numbers, widths and digests, and no row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.client_overrides import ClientOverrides
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import Method
from fedcache.federate.engines.flower.scoring import domain_names
from fedcache.federate.engines.flower.site_facts import SiteFacts
from fedcache.federate.partition.partition import Client, Partition
from fedcache.runs.features import RunFeatures
from fedcache.store.files import digest_of


class SiteRows:
    """A ``RowSource``: what sites say of themselves.

    Args:
        facts: of every site, in client order.
        text: [C, D] class text features; None where the method reads none.
    """

    def __init__(self, facts: Sequence[SiteFacts], text: torch.Tensor | None) -> None:
        self.facts, self.text = list(facts), text
        self._stores = digest_of([[f.name, f.dataset] for f in facts])

    def open(self, method: Method, settings: Mapping[str, Value]) -> float:
        """Nothing is extracted for sites here."""
        return 0.0

    def arrays(self, method: Method, settings: Mapping[str, Value]) -> list[str]:
        """Those of the first site; all have them by the same recipes."""
        return list(self.facts[0].keys)

    def partitions(self, method: Method, seeds: Sequence[int]) -> tuple[dict[int, Partition], str | None]:
        """Every site is a client. One row stands for all of its own; the digest of the stores says which they are."""
        one, none = np.zeros(1, np.int64), np.ones(1, np.int64)
        partition = Partition(
            scheme="sites",
            args={"stores": self._stores},
            seed=0,
            clients=tuple(Client(f.name, one, none) for f in self.facts),
            test=none,
            dataset=str(self.dataset()["digest"]),
            pool=sum(f.train for f in self.facts),
            dropped=0,
        )
        return dict.fromkeys(seeds, partition), None

    def feat_post(self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str]) -> str:
        """What every site does to its features."""
        return self.facts[0].feat_post

    def read(self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str], feat_post: str) -> RunFeatures:
        """Widths, views and classes of features that have no row."""
        first = self.facts[0]
        data = Data(
            x=torch.empty(0, first.views, sum(first.widths)),
            y=torch.empty(0, dtype=torch.int64),
            classes=len(first.classes),
            text=self.text,
            widths=first.widths,
            domain=torch.empty(0, dtype=torch.int64),
        )
        digests = (*first.recipes, *((first.text,) if first.text else ()))
        return RunFeatures(tuple(arrays), data, digests, first.templates)

    def overrides(self, method: Method, features: RunFeatures, clients: int) -> dict[int, ClientOverrides]:
        """None: they were refused."""
        return {}

    def dataset(self) -> dict[str, Any]:
        """The store that all shards were cut from, or all stores together."""
        first, parents = self.facts[0], {f.parent for f in self.facts}
        return {
            "slug": first.slug,
            "digest": first.parent if parents == {first.parent} and first.parent else self._stores,
            "rows": sum(f.rows for f in self.facts),
            "ok": sum(f.ok for f in self.facts),
        }

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Domains of all sites, and the classes that they have in common."""
        return tuple(domain_names(self.facts)), self.facts[0].classes

    def backbones(self, arrays: Sequence[str]) -> tuple[str, ...]:
        """Names of the backbones that made the arrays."""
        return self.facts[0].backbones
