"""Simulated attacks (``--attack name:share:scale``), to study the robustness of a federation.

An attacker knows the uploads of the honest clients of its round (the strongest usual assumption) and changes the same
rows V [m, d] that robust rules read: updates, statistics per row of data, prototypes. It leaves counts unchanged,
because update validation finds wrong counts. The attackers are drawn once per run and seed.

Sources: ALIE, Baruch et al., NeurIPS 2019; inner-product manipulation, Xie et al., UAI 2019; mimic, Karimireddy et al.,
ICLR 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import UsageError, unknown
from fedcache.federate.engine.context import generator
from fedcache.federate.partition.client_table import sorted_by_name

DEFAULTS: dict[str, float | None] = {
    "sign-flip": 10.0,
    "ipm": 0.5,
    "alie": None,
    "mimic": None,
    "gaussian": 10.0,
    "label-flip": None,
    "nan": None,
}
"""Attack -> its default scale; None for an attack without a scale."""

SHARE = 0.2


@dataclass(frozen=True)
class Attack:
    """A parsed ``--attack``."""

    name: str  # of ``DEFAULTS``
    share: float  # of all clients
    scale: float | None  # factor of the attack, None for one without

    @property
    def text(self) -> str:
        """The canonical spelling."""
        words = f"{self.name}:{self.share:g}"
        if self.scale is not None:
            words += f":{self.scale:g}"
        return words

    def attackers(self, names: Sequence[str], seed: int) -> frozenset[int]:
        """Numbers of the attackers. They are drawn by name, so that the order of clients does not matter."""
        # In float64 a product may be slightly below a whole number: 0.29 x 100, for example.
        count = int(self.share * len(names) + 1e-9)
        by_name = sorted_by_name(names, np.arange(len(names)))
        order = generator(seed, "attackers").permutation(len(names))
        return frozenset(by_name[order[:count]].tolist())

    def __call__(self, V: Tensor, is_attacker: Tensor, seed: int, now: int) -> Tensor:
        """The rows of all clients of a round after the attack.

        Args:
            V: [m, d] honest rows of all clients.
            is_attacker: [m] bool.
            seed: of the run.
            now: the round.

        Returns:
            [m, d]; honest rows are those of ``V``.
        """
        # The attackers of label-flip train honestly on wrong labels.
        if self.name == "label-flip" or not is_attacker.any():
            return V
        # If all clients are attackers, their own rows serve as the honest ones.
        honest = V
        if not is_attacker.all():
            honest = V[~is_attacker]
        mean = honest.mean(0)
        count = int(is_attacker.sum())
        scale = float(self.scale or 0.0)
        if self.name == "sign-flip":
            false_rows = -scale * V[is_attacker]
        elif self.name == "ipm":
            false_rows = -scale * mean
        elif self.name == "alie":
            deviation = honest.std(0, correction=0)
            false_rows = mean - self.deviations(len(V), count) * deviation
        elif self.name == "mimic":
            false_rows = honest[0]
        elif self.name == "nan":
            false_rows = torch.full_like(V[is_attacker], math.nan)
        else:
            # The norm is divided among the coordinates, so that scale 1 gives rows of usual length.
            norm = honest.norm(dim=1).mean() / math.sqrt(V.shape[1])
            drawn = generator(seed, "attack", now).standard_normal((count, V.shape[1]))
            false_rows = scale * norm * torch.from_numpy(drawn).to(V)
        out = V.clone()
        out[is_attacker] = false_rows
        return out

    @staticmethod
    def deviations(m: int, attackers: int) -> float:
        """ALIE's z: the distance from the mean beyond which s = m // 2 + 1 - attackers honest clients are expected."""
        honest = max(1, m - attackers)
        needed = m // 2 + 1 - attackers
        share = (honest - needed) / honest
        share = min(max(share, 1e-6), 1 - 1e-6)
        return NormalDist().inv_cdf(share)


def flipped_labels(
    y: Tensor, rows: Mapping[int, np.ndarray], attackers: frozenset[int], classes: int
) -> Tensor:
    """Labels [N] with class c replaced by C - 1 - c on the rows of attackers; missing labels stay missing.

    Raises UsageError if attackers and honest clients share rows.

    Args:
        y: [N] labels, -1 for none.
        rows: client -> numbers of its training rows.
        attackers: numbers of the attackers.
        classes: C.
    """
    lists = [rows[client] for client in attackers]
    attacked = np.unique(np.concatenate([np.empty(0, np.int64), *lists]))
    for client, client_rows in rows.items():
        if client not in attackers and np.isin(client_rows, attacked).any():
            raise UsageError(
                "--attack label-flip: some training rows belong to attackers and also to honest clients, so the "
                "labels cannot be flipped only for the attackers.",
                "Use a partition without overlap, or another attack.",
            )
    flipped = y.clone()
    index = torch.from_numpy(attacked).to(y.device)
    flipped[index] = torch.where(y[index] >= 0, classes - 1 - y[index], y[index])
    return flipped


def parse_attack(text: str) -> Attack:
    """``sign-flip:0.2:10``; share and scale may be left out. Raises UsageError."""
    name, *numbers = text.split(":")
    if name not in DEFAULTS:
        raise unknown("attack", name, tuple(DEFAULTS), hint="For example --attack sign-flip:0.2:10")
    try:
        values = [float(n) for n in numbers]
    except ValueError:
        values = [math.nan]  # in no range, so it is refused below
    share = SHARE
    scale = DEFAULTS[name]
    example = Attack(name, SHARE, scale).text
    if values:
        share = values[0]
    if len(values) > 1:
        if scale is None:
            raise UsageError(
                f"--attack {text}: {name} has no scale.", f"For example --attack {example}"
            )
        scale = values[1]
    in_range = 0.0 <= share < 1.0 and math.isfinite(scale or 0.0)
    if len(values) > 2 or not in_range:
        raise UsageError(
            f"--attack {text}: expected name:share:scale with a share of clients from 0 to below 1.",
            f"For example --attack {example}",
        )
    return Attack(name, share, scale)
