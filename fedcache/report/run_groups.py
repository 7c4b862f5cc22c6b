"""Groups of runs: runs of equal settings and different seeds as one run, and leave-one-out runs with their mean.

Earlier versions stored one result for each list of seeds. For a comparison these results are one run: one row, whose
mean is over all seeds. If two results hold the same seed, both have the same values for it.

The figures of each seed are exact. A result holds figures of clients, classes and costs only as a mean or a sum over
its seeds. To merge them, each result is weighted by the number of seeds that it adds. The merged figure is exact,
unless a result shares some but not all of its seeds with another.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fedcache.report.find_runs import (
    AS_CLAIMED,
    Gathered,
    Result,
    StoredRun,
    differing,
    grouped,
    label_of,
    name_without_hold_out,
    without,
)
from fedcache.runs.directory import PLACES, train_table
from fedcache.runs.result_files import ClientColumns, TestRows
from fedcache.runs.score import score_for, values_held_out

NO_SETTING = {
    *PLACES,
    "method",
    "preset",
    "set",
    "backbones",
    "seeds",
    "rounds",
    "participation",
    "execution",
    "device",
}
"""Names in ``config.toml`` that do not separate runs. Most of them are compared as values in the result instead. Seeds
are not compared, and a preset is only another name for hyperparameters."""
OUTCOMES = {"simulated_time", "updates", "staleness_mean", "staleness_max"}
"""Values in a result's ``timing`` that are measured; its other values are settings."""


@dataclass(frozen=True)
class MergedRun(StoredRun):
    """Runs of equal settings as one. ``path`` and everything that is not a figure are those of the first run.

    Attributes:
        members: the runs that add seeds, the one with most seeds first.
        added: for each member, the seeds that no earlier member has.
    """

    members: tuple[StoredRun, ...]
    added: tuple[tuple[int, ...], ...]

    @property
    def exact(self) -> bool:
        """Whether figures of clients, classes and costs are exact: each member adds all of its seeds."""
        seeds = [run.seeds for run in self.members]
        return list(map(len, seeds)) == list(map(len, self.added))

    @cached_property
    def clients(self) -> ClientColumns:
        """Name, accuracy and classes of every client, means over the seeds."""
        weights = [len(new) for new in self.added]
        columns = [run.clients for run in self.members]
        names = columns[0].names
        accuracy = _mean_array([c.accuracy for c in columns], weights)
        classes_owned = _mean_array([c.classes_owned for c in columns], weights)
        validations = [c.validation for c in columns if c.validation is not None]
        validation = None
        if len(validations) == len(columns):
            validation = _mean_array(validations, weights)
        # Only means are merged, so there are no accuracies by seed.
        no_seeds = np.empty((0, len(names)))
        return ClientColumns(names, accuracy, classes_owned, no_seeds, validation)

    @cached_property
    def test_rows(self) -> dict[int, TestRows] | None:
        """How often each test row was right, by seed; None where a run does not hold it."""
        made: dict[int, TestRows] = {}
        for run, new in zip(self.members, self.added, strict=True):
            found = run.test_rows
            if found is None:
                return None
            made |= {seed: found[seed] for seed in new}
        return made

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """Its records, seed by seed."""
        made = []
        for run, new in zip(self.members, self.added, strict=True):
            made += [record for record in run.rounds if record["seed"] in new]
        return made


def merge_seeds(found: Gathered) -> Gathered:
    """Runs of equal settings as one run each, at the place of the first of them."""
    groups = grouped(found.entries, settings_key)
    return replace(found, entries=[merged(group) for group in groups.values()])


def settings_key(run: StoredRun) -> str:
    """A key that is equal for runs that differ only in their seeds.

    The name of a preset does not count; the hyperparameters that it stands for do. A run with noise for privacy is
    never merged, because its epsilon is that of its own seeds.
    """
    result = run.result
    # The number of rejected uploads is an outcome and no setting.
    facts = without(run.facts, ("preset", "trust.rejected"))
    settings = without(train_table(run.path), NO_SETTING)
    timing = without(result.get("timing") or {}, OUTCOMES)
    participants = result.get("participants")
    kinds = [result.get(name) for name in ("features", "code", "device", "protocol")]
    private = ""
    if result.get("trust", {}).get("privacy"):
        private = run.digest
    key = [run.setting, facts, settings, timing, participants, kinds, private]
    return json.dumps(key, default=str)


def merged(runs: Sequence[StoredRun]) -> StoredRun:
    """Runs of equal settings as one run; if one of them has all seeds, that run.

    Of two runs with the same number of seeds the later one comes first.
    """
    # The run with most seeds comes first. The list is sorted upwards and reversed, so the later of equal ones is first.
    order = sorted(runs, key=lambda run: len(run.seeds))[::-1]
    members = []
    added = []
    seen: set[int] = set()
    for run in order:
        new = tuple(seed for seed in run.seeds if seed not in seen)
        if not new:
            continue
        members.append(run)
        added.append(new)
        seen.update(new)
    first = members[0]
    if len(members) == 1:
        return first
    result = _result(members, added)
    measured = _measured(members, added)
    return MergedRun(first.path, result, measured, tuple(members), tuple(added))


def _result(runs: Sequence[StoredRun], added: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The result of the first run, with figures that are over all runs."""
    results = [run.result for run in runs]
    weights = [len(new) for new in added]
    shares = _shares(results, added)

    def per_seed(part: str, name: str) -> list[Any]:
        """The values of all seeds; [] where a result lacks them."""
        made = []
        for result, new in zip(results, added, strict=True):
            values = (result.get(part) or {}).get(name)
            if values is None or len(values) != len(result["seeds"]):
                return []
            by_seed = dict(zip(result["seeds"], values, strict=True))
            made += [by_seed[seed] for seed in new]
        return made

    def of_seeds(part: str) -> dict[str, Any]:
        """Means over seeds of all values in a part of the result. Values by seed give exact means and deviations."""
        made: dict[str, Any] = _mean_of([result[part] for result in results], weights)
        for name in results[0][part]:
            if name == "per_seed" or name.endswith("_per_seed"):
                made[name] = per_seed(part, name)
                # The mean of ``client_mean_per_seed`` is ``client_mean``, and that of ``per_seed`` is ``mean``.
                mean = name.removesuffix("per_seed").removesuffix("_") or "mean"
                made[mean] = mean_and_deviation(made[name])[0]
        if "std" in made:
            made["std"] = mean_and_deviation(made["per_seed"])[1]
        return made

    made = dict(results[0])
    made["seeds"] = list(itertools.chain(*added))
    digests = per_seed("partition", "digests")
    if digests:
        made["partition"] = {**results[0]["partition"], "digests": digests}
    for part in ("accuracy", "validation", "macro_f1"):
        if all(part in result for result in results):
            made[part] = of_seeds(part)
    if "eval_clients" in results[0]["accuracy"]:
        made["accuracy"]["eval_clients"] = per_seed("accuracy", "eval_clients")
    for part in ("fairness", "classes_owned", "diagnostics"):
        if all(part in result for result in results):
            made[part] = _mean_of([result[part] for result in results], weights)
    if all("traffic" in result for result in results):
        made["traffic"] = _traffic(results, shares)
    if "rejected" in made.get("trust", {}):
        rejected = _total([result["trust"].get("rejected", 0) for result in results], shares)
        made["trust"] = {**made["trust"], "rejected": rejected}
    if all(result.get("confusion") for result in results):
        made["confusion"] = _total([result["confusion"] for result in results], shares)
    else:
        made.pop("confusion", None)
    return made


def _traffic(results: Sequence[Result], shares: Sequence[float]) -> dict[str, Any]:
    """Sums over the seeds; numbers per client and round are those of the first run."""
    first = results[0]["traffic"]
    made = _total([result["traffic"] for result in results], shares)
    for part in ("exact", "paper"):
        if "per_client_round" in first.get(part, {}):
            made[part]["per_client_round"] = first[part]["per_client_round"]
    return dict(made)


def _measured(runs: Sequence[StoredRun], added: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Measurements of the first run, with the seconds of training of all seeds if they are known for every run."""
    times = [run.seconds for run in runs]
    known = [time for time in times if time is not None]
    seconds = dict(runs[0].measured.get("seconds", {}))
    seconds.pop("train", None)
    if len(known) == len(times):
        shares = _shares([run.result for run in runs], added)
        seconds["train"] = sum(time * share for time, share in zip(known, shares, strict=True))
    return {**runs[0].measured, "seconds": seconds}


def _shares(results: Sequence[Result], added: Sequence[Sequence[int]]) -> list[float]:
    """For each run, the number of seeds that it adds as a share of its seeds."""
    return [len(new) / len(result["seeds"]) for result, new in zip(results, added, strict=True)]


def mean_and_deviation(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (ddof 1) of the values of seeds, as in a result; None where a value is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None, None
    deviation = None
    if len(known) > 1:
        deviation = float(np.std(known, ddof=1))
    return float(np.mean(known)), deviation


def _mean_of(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Weighted means of the numbers in equal structures; other values are those of the first structure."""
    first = values[0]
    if isinstance(first, Mapping):
        means = dict(first)
        for key in first:
            # A key that is not in all of them keeps its first value.
            if all(key in value for value in values):
                means[key] = _mean_of([value[key] for value in values], weights)
        return means
    if isinstance(first, list):
        same_length = all(isinstance(value, list) and len(value) == len(first) for value in values)
        if same_length:
            return [_mean_of(items, weights) for items in zip(*values, strict=True)]
    if any(value is None for value in values):
        return None
    if isinstance(first, bool | str | list):
        return first
    if all(value == first for value in values):
        return first
    total = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return total / sum(weights)


def _total(values: Sequence[Any], shares: Sequence[float]) -> Any:
    """Sums of the counts in equal structures, each times its share; other values are those of the first structure."""
    first = values[0]
    if isinstance(first, Mapping):
        totals = {}
        for key in first:
            if all(key in value for value in values):
                totals[key] = _total([value[key] for value in values], shares)
        return totals
    if isinstance(first, list):
        return [_total(items, shares) for items in zip(*values, strict=True)]
    if isinstance(first, bool | str) or any(value is None for value in values):
        return first
    return round(sum(value * share for value, share in zip(values, shares, strict=True)))


def _mean_array(columns: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Weighted mean of some [M] columns."""
    return np.average(np.stack(columns), axis=0, weights=weights)


# Leave-one-out runs: the same partition with each value of a column held out in turn, as one
# group with its mean.


HELD_OUT = "held-out values"
"""Name of the blocks if runs that each hold out one value are compared."""


@dataclass(frozen=True)
class HeldOutGroup:
    """Runs that differ in the held-out value, and in methods and settings.

    Attributes:
        title: dataset and partition in words.
        column: the column whose values are held out.
        values: the held-out values, in the order in which they first appear.
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
        """Label -> held-out value -> run, for each method with its settings. Of equal runs the last one is taken."""
        names = differing(self.entries)
        made: dict[str, dict[str, StoredRun]] = {}
        for entry in self.entries:
            row = made.setdefault(label_of(entry, names), {})
            row[value_of(entry)] = entry
        return made

    def accuracies(self, score: str | None = None) -> dict[str, dict[str, float | None]]:
        """The accuracy of each row on each value; None for a value that it lacks."""
        used = score or self.score
        found: dict[str, dict[str, float | None]] = {}
        for name, row in self.rows().items():
            found[name] = dict.fromkeys(self.values)
            for value, run in row.items():
                found[name][value] = run.accuracy(used)
        return found


def value_of(entry: StoredRun) -> str:
    """The values that a run holds out, in words; "" for none."""
    return ",".join(values_held_out(entry.result))


def mean_over_values(accuracy: Mapping[str, float | None]) -> float | None:
    """The mean over held-out values; None where the accuracy on one of them is missing."""
    return mean_and_deviation(list(accuracy.values()))[0]


def held_out_groups(entries: Sequence[StoredRun]) -> list[HeldOutGroup]:
    """The groups of two or more held-out values among some runs, in the order in which they first appear."""
    held_out = [e for e in entries if values_held_out(e.result)]
    made = []
    for group in grouped(held_out, group_key).values():
        values = tuple(dict.fromkeys(map(value_of, group)))
        if len(values) < 2:
            continue
        first = group[0].result
        column = first["partition"]["args"].get("by") or "domain"
        dataset = first["dataset"]["slug"]
        title = f"{dataset}, {name_without_hold_out(first)}, each {column} held out in turn"
        if group[0].claimed:
            title += AS_CLAIMED
        made.append(HeldOutGroup(title, column, values, tuple(group)))
    return made


def group_key(entry: StoredRun) -> str:
    """A key that is equal for runs of one setting; leave-one-out runs of one group also have one common key."""
    if not values_held_out(entry.result):
        return json.dumps(entry.setting)
    dataset = entry.result["dataset"]["digest"]
    part = entry.result["partition"]
    args = without(part["args"], ("hold_out",))
    # If every seed redraws the partition, the seed of the first partition does not separate groups.
    seed = "redrawn"
    if len(set(part["digests"])) == 1:
        seed = part["seed"]
    return json.dumps([dataset, part["scheme"], args, seed, entry.claimed], default=str)
