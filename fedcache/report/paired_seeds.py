"""Which seeds of two runs belong together: those of the same number, never those at the same place of a list.

A run that does not depend on the seed gives the same figures whichever seed it is asked for, so its one result is
paired with every seed of the other run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcache.report.find_runs import StoredRun
from fedcache.report.statistics import Floats
from fedcache.runs.method_facts import draws_nothing
from fedcache.runs.score import score_of

MOST_NAMED = 10
"""Seeds that are named one by one."""
FIGURES = ("own", "client-mean", "pooled")
"""Scores that are equal for all seeds of a run that does not depend on the seed."""


def paired_seeds(one: StoredRun, other: StoredRun) -> list[tuple[int, int]]:
    """Seeds of one run with the seeds of another that they are compared with.

    Equal numbers belong together, where both runs trained on the same partition. The first seed of a run that does not
    depend on the seed is paired with every seed of the other that it lacks.
    """
    ours = list(map(int, one.result["seeds"]))
    theirs = list(map(int, other.result["seeds"]))
    here = _partition_of_seed(one)
    there = _partition_of_seed(other)
    pairs = [(seed, seed) for seed in ours if seed in theirs and here.get(seed) == there.get(seed)]
    if same_partition(one, other):
        if not depends_on_seed(one):
            pairs += [(ours[0], seed) for seed in theirs if seed not in ours]
        if not depends_on_seed(other):
            pairs += [(seed, theirs[0]) for seed in ours if seed not in theirs]
    return pairs


def differences_of_seeds(one: StoredRun, other: StoredRun, score: str) -> Floats:
    """[S] one score of a run minus that of another, of every pair of seeds; seeds without a score are left out."""
    ours = dict(
        zip(map(int, one.result["seeds"]), score_of(one.result, score).per_seed, strict=False)
    )
    theirs = dict(
        zip(map(int, other.result["seeds"]), score_of(other.result, score).per_seed, strict=False)
    )
    gaps = []
    for mine, its in paired_seeds(one, other):
        value = ours.get(mine)
        other_value = theirs.get(its)
        if value is not None and other_value is not None:
            gaps.append(value - other_value)
    return np.array(gaps, np.float64)


def common_seeds(one: StoredRun, other: StoredRun) -> list[int]:
    """The seeds over which two runs are compared: those of the run that depends on the seed where one does not."""
    pairs = paired_seeds(one, other)
    ours = [mine for mine, _ in pairs]
    theirs = [its for _, its in pairs]
    if len(set(ours)) >= len(set(theirs)):
        return ours
    return theirs


def same_partition(one: StoredRun, other: StoredRun) -> bool:
    """Whether all seeds of both runs are trained and tested on the same rows."""
    return len(_partitions(one) | _partitions(other)) == 1


def depends_on_seed(run: StoredRun) -> bool:
    """Whether another seed may give other figures.

    Several seeds show it: where all of them gave the same figures on one partition, the run does not. One seed shows
    nothing, so then the method says whether anything is drawn.
    """
    if len(_partitions(run)) != 1:
        return True
    if len(run.result["seeds"]) > 1:
        return any(len(set(score_of(run.result, name).per_seed)) > 1 for name in FIGURES)
    return not _draws_nothing(run.result)


def _partitions(run: StoredRun) -> set[str]:
    return set(map(str, run.result.get("partition", {}).get("digests", ())))


def _partition_of_seed(run: StoredRun) -> dict[int, str]:
    """Digest of the partition of each seed; {} where a result does not hold one for each."""
    seeds = run.result["seeds"]
    digests = run.result.get("partition", {}).get("digests", ())
    if len(seeds) == len(digests):
        return dict(zip(map(int, seeds), map(str, digests), strict=True))
    return {}


def _draws_nothing(result: Mapping[str, Any]) -> bool:
    """Whether a run has all clients in its round, no liar and no noise, and its method draws nothing."""
    usual = result.get("participation") in ("all", "100%")
    other_draws = any(result.get(key) for key in ("participants", "timing", "trust"))
    drawn_tests = bool(result["accuracy"].get("eval_clients"))
    if not usual or other_draws or drawn_tests:
        return False
    return draws_nothing(str(result["method"]), result["hyperparameters"])


def compact(seeds: Sequence[object]) -> str:
    """Seeds in words: their numbers, and of many how many they are."""
    many = len(seeds) > MOST_NAMED
    if many:
        return f"{len(seeds)} seeds"
    return ", ".join(map(str, seeds))
