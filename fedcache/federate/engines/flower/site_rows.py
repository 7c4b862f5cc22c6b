"""The rows of sites as the server knows them: their numbers, widths, digests and counts, and no row.

For scores, sites send how many rows of each label they took for each class. The counts are dealt out again as rows, one
for each, and scored by the evaluation of the in-process engine, so every figure is the same number. Sites with one test
set (a global one that each has a copy of) are counted once for a global model; test sets that overlap otherwise are
counted as often as they are held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.evaluate import (
    PersonalModels,
    Scores,
    evaluate_global,
    evaluate_personal,
)
from fedcache.federate.engine.feature_post import longest_row
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import ClientOverrides, Method
from fedcache.federate.engine.outcome import Evaluation
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engines.flower.site_facts import RowCounts, SiteFacts
from fedcache.federate.partition.partition import Client, Partition
from fedcache.parsing import parse_json
from fedcache.runs.features import RunFeatures
from fedcache.store.files import digest_of


class SiteRows:
    """A ``RowSource``: what sites say of themselves, in client order, and the class text features [C, D], if any."""

    def __init__(self, facts: Sequence[SiteFacts], text: torch.Tensor | None) -> None:
        self.facts, self.text = list(facts), text
        self._stores = digest_of([[f.name, f.dataset] for f in facts])

    def open(self, method: Method, settings: Mapping[str, Value]) -> float:
        """Nothing is extracted for sites here."""
        return 0.0

    def arrays(self, method: Method, settings: Mapping[str, Value]) -> list[str]:
        """Those of the first site; all have them by the same recipes."""
        return list(self.facts[0].keys)

    def partitions(
        self, method: Method, seeds: Sequence[int]
    ) -> tuple[dict[int, Partition], str | None]:
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

    def feat_post(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str]
    ) -> str:
        """What every site does to its features."""
        return self.facts[0].feat_post

    def read(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str], feat_post: str
    ) -> RunFeatures:
        """Widths, views and classes of features that have no row."""
        first = self.facts[0]
        data = Data(
            x=torch.empty(0, first.views, sum(first.widths)),
            y=torch.empty(0, dtype=torch.int64),
            classes=len(first.classes),
            text=self.text,
            widths=first.widths,
            domain=torch.empty(0, dtype=torch.int64),
            backbones=first.backbones,
            longest_row=longest_row(first.feat_post, first.widths),
        )
        digests = (*first.recipes, *((first.text,) if first.text else ()))
        recipes = tuple(parse_json(text.encode()) for text in first.made_from)
        return RunFeatures(tuple(arrays), data, digests, first.templates, recipes, first.feat_post)

    def overrides(
        self, method: Method, features: RunFeatures, clients: int
    ) -> dict[int, ClientOverrides]:
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
        return self.facts[0].backbones

    def choices(self, arrays: Sequence[str]) -> dict[str, Any]:
        """None: a federation is run again by its app."""
        return {}


def score_counts(
    run: RunState, facts: Sequence[SiteFacts], counts: Mapping[int, Tensor]
) -> tuple[Evaluation, Data]:
    """The evaluation of a run, and the labels that its rows are numbers of.

    ``counts`` are int64 [domains, C, C + 1] of every client that answered; the last class is no prediction.
    """
    C, own = run.env.classes, run.method.protocol(run.hp) != "global"
    names = domain_names(facts)
    label, domain, guess, clients = [], [], [], []
    first: dict[str, np.ndarray] = {}
    start = 0
    for i, known in enumerate(facts):
        if i not in counts:
            clients.append(RowCounts(known.name, np.empty(0, np.int64), np.empty(0, np.int64)))
            continue
        key = str(i) if own else known.tests
        if key not in first:
            flat = counts[i].numpy().reshape(-1)
            cell = np.repeat(np.arange(len(flat)), flat)
            place, taken = cell // (C + 1), cell % (C + 1)
            label.append(place % C)
            domain.append(np.array([names.index(d) for d in known.domains], np.int64)[place // C])
            guess.append(np.where(taken == C, -1, taken))
            first[key] = np.arange(start, start + len(cell))
            start += len(cell)
        clients.append(RowCounts(known.name, first[key], first[key]))
    y, of, predicted = (
        np.concatenate([np.empty(0, np.int64), *parts]) for parts in (label, domain, guess)
    )
    data = Data(torch.empty(len(y), 1, 0), torch.from_numpy(y), C, domain=torch.from_numpy(of))

    def scores(rows: Tensor) -> Tensor:
        answer = torch.from_numpy(predicted)[rows]
        hot = one_hot(answer.clamp(min=0), C).double()
        hot[answer < 0] = torch.nan
        return hot

    if not own:
        return evaluate_global(scores, data, clients), data

    def model(_client: int) -> Scores:
        return scores

    return evaluate_personal(
        PersonalModels(model), data, clients, headline=run.method.headline
    ), data


def domain_names(facts: Sequence[SiteFacts]) -> list[str]:
    """Names of the domains of all sites, in the order in which they are first told."""
    return list(dict.fromkeys(name for known in facts for name in known.domains))
