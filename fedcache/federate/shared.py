"""What the runs of one grid compute once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedcache.federate.clients import Data
from fedcache.federate.dual import Grams
from fedcache.federate.rounds import Rounds


class Shared:
    """What runs on the same features and clients have in common: features in the dtype computed in, Gram matrices."""

    def __init__(self) -> None:
        self._cast: dict[tuple[int, torch.dtype], tuple[Data, Data]] = {}
        self._grams: dict[tuple[Any, ...], tuple[Data, Grams]] = {}

    def cast(self, data: Data, dtype: torch.dtype) -> Data:
        """The data with features of that dtype; images stay bytes."""
        if data.x.dtype == dtype or data.image is not None:
            return data
        key = (id(data), dtype)
        if key not in self._cast:
            self._cast[key] = (data, replace(data, x=data.x.to(dtype)))  # the first keeps its id from being reused
        return self._cast[key][1]

    def grams(self, job: Rounds) -> Grams:
        """Of the clients of a run that ``dual`` serves."""
        width = job.data.x.shape[2]
        rows = {c: np.asarray(job.lanes[c].train, np.int64) for c in job.eligible}
        rows = {c: r for c, r in rows.items() if 2 * len(r) <= width}
        key = (id(job.data), *((c, r.tobytes()) for c, r in sorted(rows.items())))
        if key not in self._grams:
            self._grams[key] = (job.data, Grams(job.data.x, rows))
        return self._grams[key][1]
