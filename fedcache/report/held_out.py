"""Leave-one-out runs: the same partition with each value of a column held out in turn, as one group with its mean.

``--hold-out each`` makes a run for every value. Each of them has its own test rows, so they are different settings, and
what they say together is the mean over the values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedcache.report.find_runs import (
    AS_CLAIMED,
    StoredRun,
    differing,
    label_of,
    name_without_hold_out,
)
from fedcache.runs.score import score_for, score_of, values_held_out

HELD_OUT = "held-out values"
"""What the blocks of a comparison of such runs are called."""


@dataclass(frozen=True)
class HeldOutGroup:
    """Runs that differ in the held-out value, and in methods and settings.

    Attributes:
        title: words for dataset and partition.
        column: the column whose values are held out.
        values: that are held out, in the order in which they first appear.
        entries: the runs.
    """

    title: str
    column: str
    values: tuple[str, ...]
    entries: tuple[StoredRun, ...]

    @property
    def score(self) -> str:
        """The one score of all runs."""
        return score_for(e.result for e in self.entries)

    def rows(self) -> dict[str, dict[str, StoredRun]]:
        """The runs of each method and settings by the value that they hold out; the last one of equal runs."""
        names = differing(self.entries)
        made: dict[str, dict[str, StoredRun]] = {}
        for entry in self.entries:
            made.setdefault(label_of(entry, names), {})[value_of(entry)] = entry
        return made

    def accuracies(self, score: str | None = None) -> dict[str, dict[str, float | None]]:
        """The accuracy of each row on each value; None for a value that it lacks."""
        used = score or self.score
        return {
            name: {v: score_of(row[v].result, used).mean if v in row else None for v in self.values}
            for name, row in self.rows().items()
        }


def value_of(entry: StoredRun) -> str:
    """The values that a run holds out, in words; "" for none."""
    return ",".join(values_held_out(entry.result))


def mean_over_values(accuracy: Mapping[str, float | None]) -> float | None:
    """The mean over held-out values; None where the accuracy on one of them is missing."""
    known = [value for value in accuracy.values() if value is not None]
    if known and len(known) == len(accuracy):
        return float(np.mean(known))
    return None


def held_out_groups(entries: Sequence[StoredRun]) -> list[HeldOutGroup]:
    """The groups of two or more held-out values among some runs, in the order in which they first appear."""
    found: dict[str, list[StoredRun]] = {}
    for entry in entries:
        if values_held_out(entry.result):
            found.setdefault(_key(entry), []).append(entry)
    made = []
    for group in found.values():
        values = tuple(dict.fromkeys(map(value_of, group)))
        if len(values) < 2:
            continue
        first = group[0].result
        column = str(first["partition"]["args"].get("by") or "domain")
        title = f"{first['dataset']['slug']}, {name_without_hold_out(first)}, each {column} held out in turn"
        made.append(
            HeldOutGroup(
                f"{title}{AS_CLAIMED if group[0].claimed else ''}", column, values, tuple(group)
            )
        )
    return made


def _key(entry: StoredRun) -> str:
    """What leave-one-out runs have in common."""
    part = entry.result["partition"]
    args = {name: value for name, value in part["args"].items() if name != "hold_out"}
    seeds = "redrawn"
    if len(set(part["digests"])) == 1:
        seeds = part["seed"]
    return json.dumps(
        [entry.result["dataset"]["digest"], part["scheme"], args, seeds, entry.claimed], default=str
    )
