"""Accuracy from counts: sites send how many rows of each label they took for each class, and no row.

The counts are dealt out again as rows, one for each, and scored by the evaluation of the in-process engine, so every
figure is the same number. Sites with one test set (a global one that each has a copy of) are counted once for a global
model; test sets that overlap otherwise are counted as often as they are held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.evaluate import Scores, evaluate_global, evaluate_personal
from fedcache.federate.engine.outcome import Evaluation
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engines.flower.site_facts import RowCounts, SiteFacts


def score_counts(run: RunState, facts: Sequence[SiteFacts], counts: Mapping[int, Tensor]) -> tuple[Evaluation, Data]:
    """The evaluation of a run, and the labels that its rows are numbers of.

    Args:
        run: of which method and classes are read.
        facts: of every client.
        counts: int64 [domains, C, C + 1] of every client that answered; the last class is no prediction.
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
    y, of, predicted = (np.concatenate([np.empty(0, np.int64), *parts]) for parts in (label, domain, guess))
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

    return evaluate_personal(model, data, clients, headline=run.method.headline), data


def domain_names(facts: Sequence[SiteFacts]) -> list[str]:
    """Names of the domains of all sites, in the order in which they are first told."""
    return list(dict.fromkeys(name for known in facts for name in known.domains))
