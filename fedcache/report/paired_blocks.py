"""The numbers of runs as a table of treatments and paired blocks: seeds, clients or settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError, unknown
from fedcache.report.caution_words import unlike_tests
from fedcache.report.find_runs import CLAIMED, StoredRun
from fedcache.report.held_out import HeldOutGroup
from fedcache.report.merge_seeds import MergedRun
from fedcache.report.paired_seeds import compact, depends_on_seed, same_partition
from fedcache.report.run_names import by_setting, differing, label_of, labels, setting_names
from fedcache.report.statistics import Floats
from fedcache.runs.client_columns import ClientColumns
from fedcache.runs.score import SCORES, score_for, score_of, validation_value

OVER = ("seeds", "clients", "settings")
MOST_NAMED = 6

Cells = Mapping[str, Mapping[str, float | None]]
"""Values by treatment and block."""

_PROTOCOL = {
    "global": "one model for all clients",
    "personalised": "each client's model on its own test rows",
    "everywhere": "each client's model on all test rows",
}
_PER_SEED: dict[str, Callable[[Any], Any]] = {
    "accuracy": lambda r: r["accuracy"]["per_seed"],
    "client_mean": lambda r: score_of(r, "client-mean").per_seed,
    "pooled": lambda r: score_of(r, "pooled").per_seed,
    "macro_f1": lambda r: r["macro_f1"]["per_seed"],
}
_PER_CLIENT: dict[str, Callable[[ClientColumns], Any]] = {"accuracy": lambda c: c.accuracy}
_PER_RUN: dict[str, Callable[[Any], Any]] = {
    "accuracy": lambda r: r["accuracy"]["mean"],
    "macro_f1": lambda r: r["macro_f1"]["mean"],
    "client_mean": lambda r: score_of(r, "client-mean").mean,
    "pooled": lambda r: score_of(r, "pooled").mean,
    **{
        name: lambda r, name=name: r["fairness"][name]  # type: ignore[misc]
        for name in ("worst10", "worst20", "worst40", "best10")
    },
}
METRICS = {"seeds": _PER_SEED, "clients": _PER_CLIENT, "settings": _PER_RUN}
"""What a stored result has for every block."""


@dataclass(frozen=True)
class PairedBlocks:
    """Values of treatments in blocks.

    Attributes:
        setting: words for where they are from.
        names: of the T treatments, all different.
        blocks: names of the B blocks.
        values: [T, B] fractions; over seeds NaN where a treatment has no value of a seed, else none is missing.
        notes: what was left out, and what sets the treatments apart besides their names.
        runs: the runs behind each name.
        validation: [T] mean accuracies of their runs on the rows to choose by; None where one has no such rows.
    """

    setting: str
    names: tuple[str, ...]
    blocks: tuple[str, ...]
    values: Floats
    notes: tuple[str, ...] = ()
    runs: Mapping[str, Sequence[StoredRun]] = field(default_factory=dict)
    validation: tuple[float, ...] | None = None


def check_metric(metric: str, over: str) -> None:
    """Refuse a metric that is unknown, or that results do not hold for every block.

    Raises UsageError, with the reason.
    """
    if over not in OVER:
        raise unknown("--over", over, OVER)
    if metric not in _PER_RUN:
        raise unknown("score", metric, _PER_RUN)
    if metric not in METRICS[over]:
        raise UsageError(
            f"The score {metric} cannot be compared over {over}: a result holds its mean over seeds, not its "
            f"{over.removesuffix('s')}s' own values.",
            f"--over settings takes it; over {over} there is {', '.join(METRICS[over])}.",
        )


def scored_by(entries: Sequence[StoredRun], metric: str, over: str) -> str:
    """The metric that stands for ``accuracy`` in the table of these runs: one for all of them.

    Over clients there is one accuracy only.
    """
    if metric != "accuracy" or over == "clients":
        return metric
    chosen = score_for(e.result for e in entries)
    if chosen == "own":
        return "accuracy"
    return chosen.replace("-", "_")


def within(
    entries: Sequence[StoredRun],
    where: str,
    metric: str,
    over: str,
    names: Sequence[str] | None = None,
) -> PairedBlocks:
    """Runs of one setting over seeds or clients, called by ``names`` or by what tells these apart.

    Raises UsageError, when fewer than two runs have values, no two runs share a seed, or no client is common to all.
    """
    check_metric(metric, over)
    take = METRICS[over][metric]
    one = over.removesuffix("s")
    runs = dict(zip(names or labels(entries), entries, strict=True))
    rows: Mapping[str, tuple[Sequence[str], Floats]]
    if over == "clients":
        rows = {name: (e.clients.names, take(e.clients)) for name, e in runs.items()}
    else:
        rows = values_of_seeds(runs, take)
    empty = [name for name, (_, row) in rows.items() if np.isnan(row).all()]
    cells = [name for name in runs if name not in empty]
    if len(cells) < 2:
        raise UsageError(
            f"{where}: {'one run has' if cells else 'no run has'} values of {metric}, and a comparison takes two.",
            "Train another method on the same dataset and partition:  fedcache train --method fed3r",
        )
    blocks, values = _aligned([rows[name] for name in cells])
    known = ~np.isnan(values)
    # Two runs that share a seed have a difference; clients count where every run scored them.
    least = 2
    if over == "clients":
        least = len(cells)
    if not (known.sum(0) >= least).any():
        held = "; ".join(
            f"{name}: {_some([blocks[i] for i in np.flatnonzero(row).tolist()])}"
            for name, row in zip(cells[:MOST_NAMED], known, strict=False)
        ) + ("; .." if len(cells) > MOST_NAMED else "")
        raise UsageError(
            f"{where}: the runs have no {one} in common ({held}).",
            "Train all of them with the same --seeds, or name runs that share some.",
        )
    kept = {name: [runs[name]] for name in cells}
    notes = _not_alike(kept, metric)
    notes += [f"Left out, because nothing of it could be scored: {_some(empty)}."] if empty else []
    if over == "clients":
        lacking = _lacking(cells, blocks, known)
        notes += [
            f"Left out of the clients: {_some(left)}, without a value in {lack}."
            for lack, left in lacking.items()
        ]
        notes += _seeds_differ(kept)
        common = known.all(0)
    else:
        notes += merged_notes(kept)
        common = known.any(0)
    if common.all():
        shared = tuple(blocks)
    else:
        shared = tuple(blocks[i] for i in np.flatnonzero(common).tolist())
    return PairedBlocks(
        where,
        tuple(cells),
        shared,
        values[:, common],
        tuple(notes),
        kept,
        _validation(kept, metric, over),
    )


def values_of_seeds(
    runs: Mapping[str, StoredRun], take: Callable[[Any], Any]
) -> dict[str, tuple[list[str], Floats]]:
    """Seeds and values of each run; a run that does not depend on the seed has its value for every seed of the others.

    Args:
        runs: of one setting, by name.
        take: the values of a result by seed, in the order of its seeds.
    """
    of_run = {
        name: dict(
            zip(map(int, e.result["seeds"]), np.array(take(e.result), float).tolist(), strict=True)
        )
        for name, e in runs.items()
    }
    fixed = fixed_runs(runs)
    seeds = list(
        dict.fromkeys(
            seed for name, values in of_run.items() if name not in fixed for seed in values
        )
    )
    for name in fixed if seeds else ():
        first = next(iter(of_run[name].values()))
        of_run[name] = dict.fromkeys(seeds, first)
    return {
        name: ([*map(str, values)], np.array(list(values.values()), float))
        for name, values in of_run.items()
    }


def fixed_runs(runs: Mapping[str, StoredRun]) -> list[str]:
    """Names of the runs that do not depend on the seed, where that makes a difference: some runs have other seeds."""
    held = {tuple(e.result["seeds"]) for e in runs.values()}
    entries = list(runs.values())
    if len(held) < 2 or not all(same_partition(entries[0], e) for e in entries):
        return []
    return [name for name, e in runs.items() if not depends_on_seed(e)]


def merged_notes(runs: Mapping[str, Sequence[StoredRun]]) -> list[str]:
    """Which rows are several runs of equal settings, and what of such a row is no exact mean over its seeds."""
    notes = []
    for name, row in runs.items():
        for run in row:
            if not isinstance(run, MergedRun):
                continue
            seeds = compact(run.result["seeds"])
            which = _some([digest[:8] for digest in run.digests])
            notes.append(
                f"{name}: {len(run.members)} runs of equal settings with the seeds {seeds} ({which})."
            )
            if not run.exact:
                notes.append(
                    f"{name}: these runs share some seeds. Accuracy is over all seeds, each once; figures of clients, "
                    "classes and costs are means of the runs, weighted by the seeds that each adds."
                )
    return notes


def _aligned(rows: Sequence[tuple[Sequence[str], Floats]]) -> tuple[Sequence[str], Floats]:
    """Names of the blocks of all runs, in the order of their first, and their values [T, B]; NaN where one has none.

    Args:
        rows: names and values of each run. Of a million clients, most runs have the same names in the same order.
    """
    first, _ = rows[0]
    if all(names == first for names, _ in rows[1:]):
        return _distinct(first), np.stack([values for _, values in rows])
    named = [_distinct(names) for names, _ in rows]
    places = {
        name: i for i, name in enumerate(dict.fromkeys(name for names in named for name in names))
    }
    table = np.full((len(rows), len(places)), np.nan)
    for own, names, (_, values) in zip(table, named, rows, strict=True):
        own[[places[name] for name in names]] = values
    return list(places), table


def _lacking(
    names: Sequence[str], blocks: Sequence[str], known: NDArray[np.bool_]
) -> dict[str, list[str]]:
    """The blocks that some run has no value of, by the names of these runs; ``known`` is [T, B]."""
    lost = np.flatnonzero(~known.all(0))
    if not len(lost):
        return {}
    kinds, first, kind_of = np.unique(
        known[:, lost], axis=1, return_index=True, return_inverse=True
    )
    found = {}
    for kind in np.argsort(first).tolist():
        without = [name for name, there in zip(names, kinds[:, kind], strict=True) if not there]
        found[_some(without)] = [blocks[i] for i in lost[kind_of == kind].tolist()]
    return found


def across(entries: Sequence[StoredRun], metric: str) -> PairedBlocks:
    """Equal runs over settings: one value each, of the run's mean over its seeds.

    Raises UsageError, for fewer than two treatments or settings, and for two runs that would be one value.
    """
    check_metric(metric, "settings")
    groups = by_setting(entries)
    facts = differing(entries)
    wheres = setting_names(groups)
    taken: dict[str, dict[str, StoredRun]] = {}
    for where, group in zip(wheres, groups, strict=True):
        for entry in group:
            row = taken.setdefault(label_of(entry, facts), {})
            before = row.setdefault(where, entry)
            if before is not entry:
                raise UsageError(
                    f"{label_of(entry, facts)} is there twice on {where}: {_seeded(before)} and {_seeded(entry)}.",
                    "Name the runs that are meant:  fedcache compare RUN RUN ... --over settings",
                )
    cells = {
        name: {where: _PER_RUN[metric](e.result) for where, e in row.items()}
        for name, row in taken.items()
    }
    names, blocks = complete(cells, wheres)
    if len(names) < 2 or len(blocks) < 2:
        raise UsageError(
            f"Of {_count(len(cells), 'method')} in {_count(len(wheres), 'setting')}, no two have {metric} in the same "
            "two settings.",
            "Train the same methods on another dataset or partition, or leave --over settings out.",
        )
    runs = {name: [taken[name][where] for where in blocks] for name in names}
    kept = [e for row in runs.values() for e in row]
    # Of those that are left, fewer facts may differ: shorter names.
    facts = differing(kept)
    short = [label_of(row[0], facts) for row in runs.values()]
    if len(set(short)) == len(short):
        runs = dict(zip(short, runs.values(), strict=True))
    lost = [*(w for w in wheres if w not in blocks), *(n for n in cells if n not in names)]
    notes = _not_alike(runs, metric)
    notes += (
        [f"Left out, so that every method has a value in every setting: {_some(lost, '; ')}."]
        if lost
        else []
    )
    notes += _seeds_differ(runs)
    sets = len({e.setting[0] for e in kept})
    if sets < len(blocks):
        notes.append(
            f"{len(blocks)} settings of {_count(sets, 'dataset')} are not independent: p is too small."
        )
    where = f"{len(blocks)} settings of {_count(sets, 'dataset')}"
    table = _table({name: cells[name] for name in names}, blocks)
    return PairedBlocks(
        where,
        tuple(runs),
        tuple(blocks),
        table,
        tuple(notes),
        runs,
        _validation(runs, metric, "settings"),
    )


def over_held_out(group: HeldOutGroup, metric: str) -> PairedBlocks:
    """Leave-one-out runs over the values that are held out: one value each, of the run's mean over its seeds.

    Raises UsageError, for fewer than two treatments that have all of two values.
    """
    runs = group.rows()
    cells = {
        name: {value: _PER_RUN[metric](e.result) for value, e in row.items()}
        for name, row in runs.items()
    }
    names, values = complete(cells, group.values)
    if len(names) < 2 or len(values) < 2:
        raise UsageError(
            f"{group.title}: no two methods have {metric} for the same two values of {group.column}.",
            "Train the same methods with --hold-out each.",
        )
    kept = {name: [runs[name][value] for value in values] for name in names}
    lost = [*(v for v in group.values if v not in values), *(n for n in cells if n not in names)]
    notes = _not_alike(kept, metric)
    notes += (
        [f"Left out, so that every method has every value: {_some(lost, '; ')}."] if lost else []
    )
    notes += _seeds_differ(kept) + merged_notes(kept)
    notes.append(
        f"Each {group.column} is a test set of its own, and their training sets overlap: p is too small."
    )
    table = _table({name: cells[name] for name in names}, values)
    return PairedBlocks(
        group.title,
        tuple(names),
        tuple(values),
        table,
        tuple(notes),
        kept,
        _validation(kept, metric, "settings"),
    )


def _validation(
    runs: Mapping[str, Sequence[StoredRun]], metric: str, over: str
) -> tuple[float, ...] | None:
    """What treatments are chosen by, where all of their runs have it: by the score by which they are compared."""
    score = metric.replace("_", "-")
    if score not in SCORES:
        score = "client-mean"
        if over != "clients":
            score = score_for(e.result for row in runs.values() for e in row)
    made = []
    for row in runs.values():
        found = [value for e in row if (value := validation_value(e.result, score)) is not None]
        if len(found) < len(row):
            return None
        made.append(float(np.mean(found)))
    return tuple(made)


def complete(cells: Cells, blocks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Treatments and blocks without a hole.

    Whatever lacks the largest share goes first; of equals a treatment, and the last of them.
    """
    names = list(cells)
    left = list(blocks)
    while names and left:
        holes = np.array([[cells[n].get(b) is None for b in left] for n in names])
        by_name = holes.mean(1)
        by_block = holes.mean(0)
        if not holes.any():
            break
        if by_name.max() >= by_block.max():
            del names[int(np.flatnonzero(by_name == by_name.max())[-1])]
        else:
            del left[int(np.flatnonzero(by_block == by_block.max())[-1])]
    return names, left


def _table(cells: Cells, blocks: Sequence[str]) -> Floats:
    return np.array([[row[b] for b in blocks] for row in cells.values()], np.float64)


def _distinct(names: Sequence[str]) -> list[str]:
    """Names of clients; those that come again get a number, so that none takes the place of another."""
    if len(set(names)) == len(names):
        return list(names)
    seen: Counter[str] = Counter()
    made = []
    for name in names:
        seen[name] += 1
        made.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return made


def _not_alike(runs: Mapping[str, Sequence[StoredRun]], metric: str) -> list[str]:
    """Sentences on treatments that sites scored, that were scored in another way, or that approximate their method."""
    kinds: dict[str, list[str]] = {}
    for name, (entry, *_) in runs.items():
        kinds.setdefault(str(entry.result.get("protocol")), []).append(name)
    if any(e.claimed for row in runs.values() for e in row):
        notes = [CLAIMED]
    else:
        notes = []
    if len(kinds) > 1:
        usual = max(kinds, key=lambda kind: len(kinds[kind]))
        told = "; ".join(
            f"{_some(names)}: {_PROTOCOL.get(k, k)}" for k, names in kinds.items() if k != usual
        )
        head = "Not scored alike"
        if metric in ("client_mean", "pooled"):
            head = "Models of different kinds"
        notes.append(f"{head}. {told}; all others: {_PROTOCOL.get(usual, usual)}.")
    notes += _drawn_apart({name: entry.result["accuracy"] for name, (entry, *_) in runs.items()})
    if (unlike := unlike_tests(e.result for row in runs.values() for e in row)) is not None:
        notes.append(unlike)
    rough = [
        name
        for name, row in runs.items()
        if any(e.result.get("fidelity") not in (None, "exact") for e in row)
    ]
    if rough:
        notes.append(f"Approximations of their method: {_some(rough)}.")
    return notes


def _drawn_apart(accuracies: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """That runs were scored over different numbers of clients (``--eval-clients``), of the accuracy in each result."""
    kinds: dict[str, list[str]] = {}
    for name, accuracy in accuracies.items():
        drawn = accuracy.get("eval_clients")
        kinds.setdefault(f"{drawn[0]['scored']:,} drawn" if drawn else "all", []).append(name)
    told = "; ".join(f"{_some(names)}: {kind}" for kind, names in kinds.items())
    if len(kinds) > 1:
        return [f"Scored over different numbers of clients. {told}."]
    return []


def _seeds_differ(runs: Mapping[str, Sequence[StoredRun]]) -> list[str]:
    held = {tuple(e.result["seeds"]) for row in runs.values() for e in row}
    counts = sorted({len(seeds) for seeds in held})
    if len(counts) == 1:
        spread = str(counts[0])
    else:
        spread = f"{counts[0]} to {counts[-1]}"
    if len(held) < 2:
        return []
    return [f"Values are means over seeds that differ between runs ({spread} of them)."]


def _seeded(entry: StoredRun) -> str:
    return f"{entry.digest[:8]} (seeds {','.join(map(str, entry.result['seeds']))})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _some(names: Sequence[str], between: str = ", ") -> str:
    rest = len(names) - MOST_NAMED
    return between.join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
