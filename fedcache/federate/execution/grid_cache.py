"""What the runs of one grid compute once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.method import numel
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.execution.cache import LruCache, SameObject
from fedcache.federate.execution.gram_matrices import GramMatrices
from fedcache.heads.linear import Tree

Sent = list[tuple[int, int]]
"""(scalars, bytes of one) that each client sent."""

POOLED = 4
"""Pooled uploads that are kept, the latest used: a Gram matrix of 4,096 features is 64 MB."""


class GridCache:
    """What runs on the same features have in common.

    Features in the dtype computed in, Gram matrices of clients, what one-shot methods without gradients pool, and a
    memory of rows and draws.
    """

    def __init__(self) -> None:
        self.memo = LruCache()
        self._cast: dict[tuple[SameObject, torch.dtype], Data] = {}
        self._grams: dict[tuple[Any, ...], GramMatrices] = {}
        self._pooled: OrderedDict[tuple[Any, ...], tuple[Tree, Sent]] = OrderedDict()

    def cast(self, data: Data, dtype: torch.dtype) -> Data:
        """The data with features of that dtype; images stay bytes."""
        if data.x.dtype == dtype or data.image is not None:
            return data
        key = (SameObject(data), dtype)
        if key not in self._cast:
            self._cast[key] = replace(data, x=data.x.to(dtype))
        return self._cast[key]

    def grams(self, job: RunState) -> GramMatrices:
        """Of the clients of a run that ``gram`` serves."""
        width = job.data.x.shape[2]
        rows = {c: np.asarray(job.training_clients[c].train, np.int64) for c in job.eligible}
        rows = {c: r for c, r in rows.items() if 2 * len(r) <= width}
        key = (SameObject(job.data), *((c, r.tobytes()) for c, r in sorted(rows.items())))
        if key not in self._grams:
            self._grams[key] = GramMatrices(job.data.x, rows)
        return self._grams[key]

    def pooled(self, job: RunState, ids: Sequence[int], make: Callable[[], tuple[Tree, Sent]]) -> tuple[Tree, Sent]:
        """What the clients of a one-shot run pool, computed by ``make`` unless another run has pooled the same.

        Runs pool the same when they differ in nothing that ``fit`` reads. Where the method is ``additive``, clients do
        not matter either, only all their rows: sums then differ from those of ``make`` by rounding.

        Returns:
            the pooled upload, not to be changed, and what each client sent.
        """
        method, hp = job.method, job.hp
        read = {h.name for h in method.hparams if h.fit}
        same = (SameObject(job.data), method.name, *((k, v) for k, v in sorted(hp.items()) if k in read))
        rows = [np.asarray(job.training_clients[c].train, np.int64) for c in ids]
        own = ((job.training_clients[c].name, r.tobytes()) for c, r in zip(ids, rows, strict=True))
        key: tuple[Any, ...] = (*same, job.seed, *own)
        if method.additive(hp) and method.sent is numel:
            key = (*same, np.sort(np.concatenate(rows)).tobytes())
        if key not in self._pooled:
            self._pooled[key] = make()
            if len(self._pooled) > POOLED:
                self._pooled.popitem(last=False)
        self._pooled.move_to_end(key)
        pooled, sent = self._pooled[key]
        return pooled, sent if len(sent) == len(ids) else [sent[0]] * len(ids)
