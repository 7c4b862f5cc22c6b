"""Sampling options of a grid, without torch because commands read them at start-up."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLERS = ("tpe", "random", "gp")
"""How a search draws points."""
PRUNERS = ("none", "median", "asha")
"""How a search stops trials early."""
TRIALS = 40
"""Default number of trials of a search."""


@dataclass(frozen=True)
class Sampling:
    """The options that say how the points of a grid are drawn."""

    sampler: str = "grid"  # grid, random:N[:SEED] or optuna[:SAMPLER[:SEED]]
    trials: int | None = None
    pruner: str = "none"
