"""Clients that lie, for studying what a federation withstands (``--attack name:share:scale``).

An attacker knows what the honest clients of its round send (the strongest usual assumption) and works on the same rows
V [m, d] as robust rules: updates, statistics per row of data, prototypes. Counts are left alone, because a wrong count
is malformed and update validation finds it. Who lies is drawn once per run and seed.

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

DEFAULTS: dict[str, float | None] = {
    "sign-flip": 10.0,
    "ipm": 0.5,
    "alie": None,
    "mimic": None,
    "gaussian": 10.0,
    "label-flip": None,
    "nan": None,
}
"""The scale of each attack where none is written; None for those without."""

SHARE = 0.2


@dataclass(frozen=True)
class Attack:
    """A parsed ``--attack``."""

    name: str  # of ``DEFAULTS``
    share: float  # of all clients
    scale: float | None  # factor of the attack, None where it has none

    @property
    def text(self) -> str:
        """The one way to write it."""
        numbers = [f"{self.share:g}"] + ([f"{self.scale:g}"] if self.scale is not None else [])
        return ":".join([self.name, *numbers])

    def attackers(self, names: Sequence[str], seed: int) -> frozenset[int]:
        """Numbers of the clients that lie, by name, so that their order does not matter."""
        count = int(self.share * len(names) + 1e-9)
        by_name = sorted(range(len(names)), key=names.__getitem__)
        order = generator(seed, "attackers").permutation(len(names))
        return frozenset(by_name[i] for i in order[:count])

    def __call__(self, V: Tensor, lying: Tensor, seed: int, now: int) -> Tensor:
        """What all clients of a round send once the attackers have lied.

        Args:
            V: [m, d] what they would send.
            lying: [m] bool.
            seed: of the run.
            now: the round.

        Returns:
            [m, d]; honest rows are those of ``V``.
        """
        if self.name == "label-flip" or not lying.any():
            return V  # its attackers train honestly on labels that lie
        honest = V
        if (~lying).any():
            honest = V[~lying]
        mean = honest.mean(0)
        scale = float(self.scale or 0.0)
        if self.name == "sign-flip":
            lies = -scale * V[lying]
        elif self.name == "ipm":
            lies = (-scale * mean).expand(int(lying.sum()), -1)
        elif self.name == "alie":
            lies = (
                mean - self.deviations(len(V), int(lying.sum())) * honest.std(0, correction=0)
            ).expand(int(lying.sum()), -1)
        elif self.name == "mimic":
            lies = honest[0].expand(int(lying.sum()), -1)
        elif self.name == "nan":
            lies = torch.full_like(V[lying], math.nan)
        else:
            # per coordinate, so that scale 1 is inconspicuous
            norm = honest.norm(dim=1).mean() / math.sqrt(V.shape[1])
            drawn = generator(seed, "attack", now).standard_normal((int(lying.sum()), V.shape[1]))
            lies = scale * norm * torch.from_numpy(drawn).to(V)
        out = V.clone()
        out[lying] = lies
        return out

    @staticmethod
    def deviations(m: int, liars: int) -> float:
        """ALIE's z: as far from the mean as s = m // 2 + 1 - liars honest clients are on the other side of it."""
        honest = max(1, m - liars)
        share = (honest - (m // 2 + 1 - liars)) / honest
        return NormalDist().inv_cdf(min(max(share, 1e-6), 1 - 1e-6))


def flipped_labels(
    y: Tensor, rows: Mapping[int, np.ndarray], attackers: frozenset[int], classes: int
) -> Tensor:
    """Labels [N] with class c as class C - 1 - c on the rows of attackers; rows without a label stay without.

    Raises UsageError, when attackers and honest clients share rows.

    Args:
        y: [N] labels, -1 for none.
        rows: client -> numbers of its training rows.
        attackers: clients that lie.
        classes: C.
    """
    theirs = np.unique(np.concatenate([np.empty(0, np.int64), *(rows[c] for c in attackers)]))
    if any(np.isin(own, theirs).any() for c, own in rows.items() if c not in attackers):
        raise UsageError(
            "--attack label-flip: attackers and honest clients share training rows, whose labels cannot be both.",
            "Use a partition without overlap, or another attack.",
        )
    flipped = y.clone()
    at = torch.from_numpy(theirs).to(y.device)
    flipped[at] = torch.where(y[at] >= 0, classes - 1 - y[at], y[at])
    return flipped


def parse_attack(text: str) -> Attack:
    """``sign-flip:0.2:10``; share and scale may be left out. Raises UsageError."""
    name, *numbers = text.split(":")
    if name not in DEFAULTS:
        raise unknown("attack", name, tuple(DEFAULTS), hint="For example --attack sign-flip:0.2:10")
    try:
        values = [float(n) for n in numbers]
    except ValueError:
        values = [math.nan]
    share = SHARE
    if values:
        share = values[0]
    scale = values[1] if len(values) > 1 else DEFAULTS[name]
    if (
        len(values) > 2
        or not 0.0 <= share < 1.0
        or (len(values) > 1 and not math.isfinite(values[1]))
    ):
        raise UsageError(
            f"--attack {text}: expected name:share:scale with a share of clients from 0 to below 1.",
            f"For example --attack {name}:0.2" + (f":{DEFAULTS[name]:g}" if DEFAULTS[name] else ""),
        )
    if len(values) > 1 and DEFAULTS[name] is None:
        raise UsageError(
            f"--attack {text}: {name} has no scale.", f"For example --attack {name}:0.2"
        )
    return Attack(name, share, scale)
