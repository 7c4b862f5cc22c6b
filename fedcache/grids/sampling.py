"""Sampling options of a grid, without torch because commands read them at start-up."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLERS = ("tpe", "random", "gp")
PRUNERS = ("none", "median", "asha")
TRIALS = 40
"""Of a search: how points are drawn, how trials are stopped on their way, and how many there are."""


@dataclass(frozen=True)
class Sampling:
    """How the points of a grid are drawn, as it is asked for."""

    sampler: str = "grid"  # grid, random:N[:SEED] or optuna[:SAMPLER[:SEED]]
    trials: int | None = None
    pruner: str = "none"
