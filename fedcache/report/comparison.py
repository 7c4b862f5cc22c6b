"""Treatments compared over paired blocks: means with intervals, paired differences with corrected p values, ranks.

A treatment is a run (over settings: equal runs of several settings), a block is a seed, a client or a setting. Numbers
in, frozen dataclasses out; ``blocks.py`` finds the numbers, ``comparison_output.py`` writes them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from fedcache.errors import UsageError, unknown
from fedcache.parsing import counted
from fedcache.report.find_runs import (
    CLAIMED,
    StoredRun,
    by_setting,
    differing,
    label_of,
    labels,
    setting_names,
)
from fedcache.report.run_groups import HELD_OUT, HeldOutGroup, MergedRun
from fedcache.report.statistics import (
    Floats,
    Ranking,
    constant,
    holm,
    interval,
    lowest_p,
    mean_ranks,
    p_value,
    ranking,
)
from fedcache.runs.identity import draws_nothing
from fedcache.runs.result_files import ClientColumns, TestRows
from fedcache.runs.score import (
    BY_VALIDATION,
    DIGITS,
    NOT_A_CHOICE,
    SCORES,
    WORDS,
    Order,
    order_of_run,
    rows_interval,
    score_for,
    score_of,
    tie_sentence,
    unlike_tests,
    validation_value,
)

USUAL_TEST = {"seeds": "ttest", "clients": "wilcoxon", "settings": "wilcoxon", HELD_OUT: "wilcoxon"}
"""Seeds are few, and Wilcoxon's p of five is never below 0.06; an accuracy is a mean over many test rows, so its
differences over seeds are near normal. Differences over clients and settings are of unlike sizes, which ranks bear."""
SCORE_WORDS = {name.replace("-", "_"): f"accuracy ({name}: {WORDS[name]})" for name in SCORES}


@dataclass(frozen=True)
class Treatment:
    """One row of a comparison.

    Attributes:
        name: tells it from the others.
        values: fractions, one a block; None where it has no value of a block.
        mean: of all its values.
        std: of them (ddof 1); None for one value.
        interval: of the mean, as ``statistics.interval``; None with fewer than three values.
        rank: mean rank over the blocks of which all treatments have a value, 1 is best; None where there is none.
        validation: mean accuracy of its runs on validation rows; None where not all treatments have such rows.
        test_rows: over seeds, of values that do not vary over them: test rows, and the interval over these; Wilson's of
            one model, of models of clients that of ``rows_of_run``.
        client_prior: accuracy without and with ``--client-prior``, means over its runs; {} where a run has none.
    """

    name: str
    values: tuple[float | None, ...]
    mean: float
    std: float | None
    interval: tuple[float, float] | None
    rank: float | None
    validation: float | None = None
    test_rows: tuple[int, float, float] | None = None
    client_prior: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def known(self) -> Floats:
        """Its values."""
        return np.array([value for value in self.values if value is not None])

    def blocks(self, names: Sequence[str]) -> tuple[str, ...]:
        """Names of the blocks of which it has a value."""
        return tuple(
            name for name, value in zip(names, self.values, strict=True) if value is not None
        )


@dataclass(frozen=True)
class Pair:
    """Two treatments compared.

    Attributes:
        one: a name.
        other: the name it is compared with.
        difference: mean of one minus other over the blocks of which both have a value, a fraction.
        interval: of that mean, as ``statistics.interval``.
        p: of the paired test; None where there is nothing to test by.
        holm: p corrected for all pairs of the comparison.
        rows: over seeds, the same difference over the test rows; None where runs hold none.
        blocks: names of these blocks.
    """

    one: str
    other: str
    difference: float
    interval: tuple[float, float] | None
    p: float | None
    holm: float | None
    rows: RowDifference | None = None
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Treatments of one setting, or over all settings.

    Attributes:
        setting: words for where; of ``over`` settings, how many.
        over: seeds | clients | settings | held-out values.
        metric: what the values are.
        test: wilcoxon | ttest.
        level: of the intervals; tests decide at 1 - level.
        blocks: names.
        treatments: the highest mean first.
        reference: name of the treatment that the others are compared with.
        pairs: every other treatment with the reference, or all pairs.
        ranking: Friedman and Nemenyi; None with fewer than three treatments or two blocks, and over seeds or clients
            where two differ and neither varies. Its numbers are places in ``treatments``.
        notes: sentences that must be read with the numbers.
        chosen: name of the treatment with the highest validation accuracy; None where not all have validation rows.
    """

    setting: str
    over: str
    metric: str
    test: str
    level: float
    blocks: tuple[str, ...]
    treatments: tuple[Treatment, ...]
    reference: str
    pairs: tuple[Pair, ...]
    ranking: Ranking | None
    notes: tuple[str, ...]
    chosen: str | None = None

    @property
    def chosen_by(self) -> str:
        """The marked run in words: chosen by validation accuracy, or best by test accuracy, which is no choice."""
        if self.chosen is not None:
            return BY_VALIDATION
        if self.metric in ("accuracy", *SCORE_WORDS):
            return NOT_A_CHOICE
        return f"best by {self.metric} on the test rows (no validation split)"

    @property
    def best(self) -> tuple[str, ...]:
        """Names with the highest mean: one, or several that are equal."""
        highest = self.treatments[0].mean
        return tuple(t.name for t in self.treatments if constant(np.array([t.mean, highest])))

    @property
    def lowest(self) -> float:
        """The lowest p after correction that any pair could have, whatever its values; 0 without a bound."""
        tested = [p for p in self.pairs if p.p is not None]
        return len(tested) * min((lowest_p(self.test, len(p.blocks)) for p in tested), default=0.0)

    @property
    def too_few(self) -> bool:
        """Whether there are too few blocks for the test to tell any pair apart."""
        return self.lowest >= 1.0 - self.level

    @property
    def alike(self) -> tuple[str, ...]:
        """Names that the test does not tell from the reference; () where it has too few blocks to tell anything."""
        if self.too_few:
            return ()
        alpha = 1.0 - self.level
        names = []
        for pair in self.pairs:
            if pair.holm is None or pair.holm < alpha:
                continue
            if pair.other == self.reference:
                names.append(pair.one)
            elif pair.one == self.reference:
                names.append(pair.other)
        return tuple(names)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **asdict(self),
            "best": list(self.best),
            "alike": list(self.alike),
            "chosen_by": self.chosen_by,
        }

    def __repr__(self) -> str:
        first = next((t for t in self.treatments if t.name == self.chosen), self.treatments[0])
        blocks = len(self.blocks)
        treatments = len(self.treatments)
        what = f"{treatments} treatments over {blocks} {self.over}"
        best = f"{first.name} {first.mean:.4f}"
        return f"Comparison({self.setting}: {what}, {self.chosen_by}: {best})"


def compared(
    found: PairedBlocks,
    *,
    over: str,
    metric: str,
    test: str | None = None,
    against: str | None = None,
    pairs: str = "best",
    level: float = 0.95,
) -> Comparison:
    """Compare treatments over their blocks.

    Args:
        found: two treatments or more, one block or more.
        over: seeds | clients | settings, for words and the usual test.
        metric: what the values are.
        test: wilcoxon | ttest; None takes that of ``USUAL_TEST``.
        against: name of the reference; None is the one that validation chooses, the highest mean without.
        pairs: ``best``, every treatment with the reference, or ``all``.
        level: of intervals; tests decide at 1 - level.
    """
    test = test or USUAL_TEST[over]
    order = _falling(found, np.nanmean(found.values, axis=1).tolist())
    names = [found.names[i] for i in order]
    values = found.values[order]
    known = ~np.isnan(values)
    # Ranks are over the blocks of which all treatments have a value.
    whole = values[:, known.all(0)]
    ranks: list[float | None] = [None] * len(names)
    if whole.size:
        ranks = list(map(float, mean_ranks(whole)))
    validation: dict[str, float] = {}
    picked = None
    if found.validation is not None:
        validation = dict(zip(found.names, found.validation, strict=True))
        picked = found.names[_falling(found, found.validation)[0]]
    rows: dict[str, tuple[int, float, float]] = {}
    if over == "seeds" and metric in ("accuracy", *SCORE_WORDS):
        rows = _test_rows(found, metric, level)
    treatments = tuple(
        _treatment(
            name, row, rank, level, validation.get(name), rows.get(name), found.runs.get(name, ())
        )
        for name, row, rank in zip(names, values, ranks, strict=True)
    )
    reference = against or picked or names[0]
    place = names.index(reference)
    if pairs == "all":
        pairs_to_test = list(itertools.combinations(range(len(names)), 2))
    else:
        pairs_to_test = [(i, place) for i in range(len(names)) if i != place]
    paired = [(i, j) for i, j in pairs_to_test if (known[i] & known[j]).any()]
    made = _pairs_of(found.blocks, names, values, paired, test, over, level)
    if over == "seeds":
        made = _with_rows(made, found, metric, level)
    ranked = None
    if not _repeated(whole, over):
        ranked = ranking(whole, level)
    done = Comparison(
        setting=found.setting,
        over=over,
        metric=metric,
        test=test,
        level=level,
        blocks=found.blocks,
        treatments=treatments,
        reference=reference,
        pairs=made,
        ranking=ranked,
        notes=found.notes,
        chosen=picked,
    )
    notes = list(found.notes)
    for i, j in pairs_to_test:
        if (i, j) not in paired:
            one = names[i]
            notes.append(f"{one} and {names[j]} have no common seed, so they are not compared.")
    if picked is not None:
        falling = sorted(validation.values(), reverse=True)
        tie = tie_sentence(falling, picked, "runs", "a validation accuracy of ")
        if tie is not None:
            notes.append(tie)
    chose = against is None and pairs == "best" and picked is None
    return replace(done, notes=(*notes, *_notes(done, chose=chose)))


def _pairs_of(
    blocks: Sequence[str],
    names: Sequence[str],
    values: Floats,
    chosen: Sequence[tuple[int, int]],
    test: str,
    over: str,
    level: float,
) -> tuple[Pair, ...]:
    """Pairs of treatments, each over the blocks of which both have a value."""
    known = ~np.isnan(values)
    shared = [known[i] & known[j] for i, j in chosen]
    tested = [
        _p(test, values[i, s], values[j, s], over) for (i, j), s in zip(chosen, shared, strict=True)
    ]
    made = []
    for (i, j), s, p, corrected in zip(chosen, shared, tested, holm(tested), strict=True):
        differences = values[i, s] - values[j, s]
        of = tuple(name for name, there in zip(blocks, s, strict=True) if there)
        mean = float(differences.mean())
        made.append(
            Pair(names[i], names[j], mean, interval(differences, level), p, corrected, blocks=of)
        )
    return tuple(made)


def _falling(found: PairedBlocks, values: Sequence[float]) -> list[int]:
    """Numbers of the treatments by falling values; equal ones as points of a grid, then in the order of the runs."""

    def place(number: int) -> tuple[float, Order, int]:
        order: Order = ()
        row = found.runs.get(found.names[number])
        if row:
            order = order_of_run(row[0].result)
        return -round(values[number], DIGITS), order, number

    return sorted(range(len(values)), key=place)


def _with_rows(
    pairs: tuple[Pair, ...], found: PairedBlocks, metric: str, level: float
) -> tuple[Pair, ...]:
    """The pairs with their differences over test rows, where these add up to what is compared."""
    over_rows: dict[int, RowDifference] = {}
    for number, pair in enumerate(pairs):
        if pair.one not in found.runs or pair.other not in found.runs:
            continue
        made = row_difference(found.runs[pair.one][0], found.runs[pair.other][0], metric, level)
        if made is not None and abs(made.difference - pair.difference) < 1e-9:
            over_rows[number] = made
    corrected = holm([rows.p for rows in over_rows.values()])
    done = list(pairs)
    for (number, rows), p in zip(over_rows.items(), corrected, strict=True):
        done[number] = replace(pairs[number], rows=replace(rows, holm=p))
    return tuple(done)


def _test_rows(
    found: PairedBlocks, metric: str, level: float
) -> dict[str, tuple[int, float, float]]:
    """Rows and interval of the treatments that do not vary, where these are the values that are compared."""
    made = {}
    for name, row in zip(found.names, found.values, strict=True):
        values = row[~np.isnan(row)]
        if name not in found.runs or not constant(values):
            continue
        run = found.runs[name][0]
        rows = rows_interval(run.result, level)
        if rows is None or not constant(np.append(values, run.result["accuracy"]["mean"])):
            rows = rows_of_run(run, metric, level, list(map(int, found.blocks)))
        if rows is not None:
            made[name] = rows
    return made


def _treatment(
    name: str,
    row: Floats,
    rank: float | None,
    level: float,
    validation: float | None,
    rows: tuple[int, float, float] | None,
    runs: Sequence[StoredRun],
) -> Treatment:
    priors = [run.result["accuracy"].get("client_prior", {}) for run in runs]
    prior = {}
    if priors and all(priors):
        prior = {key: float(np.mean([p[key] for p in priors])) for key in priors[0]}
    values = row[~np.isnan(row)]
    std = None
    if len(values) > 1:
        std = float(values.std(ddof=1))
    each = tuple(None if np.isnan(value) else float(value) for value in row)
    reach = interval(values, level)
    return Treatment(name, each, float(values.mean()), std, reach, rank, validation, rows, prior)


def _p(test: str, one: Floats, other: Floats, over: str) -> float | None:
    """p of a pair; None for one block, and for two treatments that do not vary over seeds or clients."""
    if len(one) < 2:
        return None
    if _repeated(np.stack([one, other]), over):
        return None
    return p_value(test, one - other)


def _repeated(values: Floats, over: str) -> bool:
    """Whether two of some [T, B] values differ, and neither varies over seeds or clients.

    Each is one number then, written once for each block: the repetitions are no evidence, and Wilcoxon's and
    Friedman's tests would count them.
    """
    if over in ("settings", HELD_OUT) or not values.size:
        return False
    still = [row[0] for row in values if constant(row)]
    return len(still) > 1 and not constant(np.array(still))


def _notes(c: Comparison, *, chose: bool) -> list[str]:
    """Notes on the limits of these numbers: missing intervals, missing tests and biased choices."""
    count = len(c.blocks)
    alpha = 1.0 - c.level
    if count == 1:
        return [_one_block(c)]
    notes = []
    if count < 3:
        notes.append(f"Only two {c.over}: an interval needs at least three.")
    notes += _spreadless(c)
    columns = zip(*(t.values for t in c.treatments), strict=True)
    common = sum(None not in column for column in columns)
    if len(c.treatments) > 2 and common < 2:
        notes.append(
            f"Ranks are not tested, because fewer than two {c.over} are common to all runs."
        )
    elif c.ranking is None and len(c.treatments) > 2:
        notes.append(f"Ranks are not tested, because some results are the same for all {c.over}.")
    if c.ranking is not None and c.ranking.blocks < count:
        blocks = c.ranking.blocks
        notes.append(f"Ranks use the {blocks} {c.over} that all runs share.")
    tested = sum(p.p is not None for p in c.pairs)
    if c.too_few:
        notes.append(too_few_words(c))
    if chose and tested:
        notes.append(
            "The reference was selected as the best on these results, so its p-values are optimistic. To "
            "choose the reference beforehand: --against RUN"
        )
    if c.ranking is not None and c.ranking.p >= alpha:
        notes.append(
            f"Friedman's test finds no difference (p = {c.ranking.p:.2g}), so distances beyond the "
            "critical difference are not significant."
        )
    return notes


def too_few_words(c: Comparison) -> str:
    """A sentence that the test of a comparison cannot reach significance, whatever the values."""
    tested = sum(p.p is not None for p in c.pairs)
    times = ""
    if tested > 1:
        times = f" ({c.lowest:.3g} after Holm's correction for {tested} tests)"
    least = c.lowest / tested
    count = len(c.blocks)
    alpha = 1.0 - c.level
    return (
        f"{count} {c.over} are too few for this test to reach significance: its smallest possible p is "
        f"{least:.3g}{times}, and significance needs less than {alpha:.2g}."
    )


def _one_block(c: Comparison) -> str:
    """A note that one block gives no interval and no test, and what would give both."""
    more = {
        "seeds": "For both, use more seeds (--seeds 0-4) or --over clients.",
        "clients": "For both, use more clients or --over seeds.",
        "settings": "For both, use more datasets or partitions.",
        HELD_OUT: "For both, use more held-out values.",
    }[c.over]
    lacks = "no interval"
    if any(t.test_rows is not None for t in c.treatments):
        more = f"Intervals are over test rows: Wilson's of one model, normal of clients' models. {more}"
        lacks = f"no interval over {c.over}"
    untested = "no test"
    if any(p.rows for p in c.pairs):
        untested = f"no test over {c.over}"
    block = c.over.removesuffix("s")
    return f"One {block} only ({c.blocks[0]}): {lacks} and {untested}. {more}"


def _spreadless(c: Comparison) -> list[str]:
    """Sentences on treatments and differences that do not vary, and so have no interval and no test."""
    why = {
        "seeds": "does not depend on the seed",
        "clients": "is the same for every client, as where all are scored on the same rows",
        "settings": "is the same in every setting",
        HELD_OUT: "is the same for every held-out value",
    }[c.over]
    notes = []
    same: list[str] = []
    by_rows: dict[str, int] = {}
    for t in c.treatments:
        if len(t.known) == 1:
            (block,) = t.blocks(c.blocks)
            notes.append(f"{t.name} has one of the {c.over} ({block}): no interval.")
        elif constant(t.known):
            same.append(t.name)
            if t.test_rows is not None:
                by_rows[t.name] = t.test_rows[0]
    without = [name for name in same if name not in by_rows]
    if without:
        notes.append(f"No interval, because the value {why}: {', '.join(without)}.")
    if by_rows:
        counts = ", ".join(dict.fromkeys(f"{rows:,}" for rows in by_rows.values()))
        named = ", ".join(by_rows)
        notes.append(f"The value {why}, and the interval is over {counts} test rows: {named}.")
    among = []
    others = []
    for pair in c.pairs:
        words = f"{pair.one} and {pair.other}"
        both_same = {pair.one, pair.other} <= {*same}
        if len(pair.blocks) == 1:
            block = pair.blocks[0]
            notes.append(f"{words} share one of the {c.over} ({block}), too few for a test.")
        elif pair.p is None and c.over in ("seeds", "clients") and both_same:
            among.append(words)
        elif pair.p is None:
            others.append(words)
    if among:
        named = "; ".join(among)
        notes.append(f"{named} not tested: neither result varies over {c.over}.")
    if others:
        notes.append(
            f"{'; '.join(others)} not tested: all differences are equal, so there is no spread for a test."
        )
    return notes


OVER = ("seeds", "clients", "settings")
MOST_NAMED = 6

Cells = Mapping[str, Mapping[str, float | None]]
"""Values by treatment and block."""

_PROTOCOL = {
    "global": "one global model",
    "personalised": "personal models on each client's own test rows",
    "everywhere": "personal models on all test rows",
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
        validation: [T] mean accuracies of their runs on validation rows; None where one has no such rows.
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
        block = over.removesuffix("s")
        known = ", ".join(METRICS[over])
        raise UsageError(
            f"The score {metric} cannot be compared over {over}: a result holds its mean over seeds, not its "
            f"{block}s' own values.",
            f"--over settings takes it; over {over} there is {known}.",
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
    runs = dict(zip(names or labels(entries), entries, strict=True))
    rows: Mapping[str, tuple[Sequence[str], Floats]]
    if over == "clients":
        rows = {name: (e.clients.names, take(e.clients)) for name, e in runs.items()}
    else:
        rows = values_of_seeds(runs, take)
    empty = [name for name, (_, row) in rows.items() if np.isnan(row).all()]
    kept = {name: [run] for name, run in runs.items() if name not in empty}
    if len(kept) < 2:
        count = "one run has"
        if not kept:
            count = "no run has"
        raise UsageError(
            f"{where}: {count} values of {metric}, but a comparison needs two.",
            "Train another method on the same dataset and partition:  fedcache train --method fed3r",
        )
    blocks, values = _aligned([rows[name] for name in kept])
    known = ~np.isnan(values)
    notes = _not_alike(kept, metric)
    if empty:
        notes.append(f"Left out, because they could not be scored: {_some(empty)}.")
    if over == "clients":
        # Clients count where every run scored them.
        common = known.all(0)
        shared = common
        for lack, left in _lacking([*kept], blocks, known).items():
            notes.append(
                f"These clients are left out, because {lack} has no value for them: {_some(left)}."
            )
        notes += _seeds_differ(kept)
    else:
        # Two runs that share a seed have a difference.
        shared = known.sum(0) >= 2
        common = known.any(0)
        notes += merged_notes(kept)
    if not shared.any():
        held = []
        for name, row in zip(kept, known, strict=True):
            blocks_of_run = _some(_names_at(blocks, row))
            held.append(f"{name}: {blocks_of_run}")
        if len(held) > MOST_NAMED:
            held[MOST_NAMED:] = [".."]
        block = over.removesuffix("s")
        listed = "; ".join(held)
        raise UsageError(
            f"{where}: the runs have no {block} in common ({listed}).",
            "Train all of them with the same --seeds, or name runs that share some.",
        )
    return PairedBlocks(
        where,
        tuple(kept),
        tuple(_names_at(blocks, common)),
        values[:, common],
        tuple(notes),
        kept,
        _validation(kept, metric, over),
    )


def by_seed(run: StoredRun, values: Iterable[Any]) -> dict[int, Any]:
    """The values of a run, which are in the order of its seeds, by the number of the seed."""
    return dict(zip(map(int, run.result["seeds"]), values, strict=False))


def values_of_seeds(
    runs: Mapping[str, StoredRun], take: Callable[[Any], Any]
) -> dict[str, tuple[list[str], Floats]]:
    """Seeds and values of each run; a run that does not depend on the seed has its value for every seed of the others.

    Args:
        runs: of one setting, by name.
        take: the values of a result by seed, in the order of its seeds.
    """
    of_run = {name: by_seed(run, take(run.result)) for name, run in runs.items()}
    fixed = fixed_runs(runs)
    seeds = [seed for name, values in of_run.items() if name not in fixed for seed in values]
    for name in fixed:
        if seeds:
            of_run[name] = dict.fromkeys(seeds, next(iter(of_run[name].values())))
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
    """Notes on rows that merge several runs of equal settings, and on figures of them that are not exact means."""
    notes = []
    for name, row in runs.items():
        for run in row:
            if not isinstance(run, MergedRun):
                continue
            seeds = compact(run.result["seeds"])
            which = _some([digest[:8] for digest in run.digests])
            members = len(run.members)
            notes.append(
                f"{name}: {members} runs of equal settings with the seeds {seeds} ({which})."
            )
            if not run.exact:
                notes.append(
                    f"{name}: these runs share some seeds. Accuracy uses each seed once. Costs, and "
                    "results per client and class, are means over the runs. A run counts by the number of "
                    "seeds that it adds."
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
        without = _some(_names_at(names, ~kinds[:, kind]))
        found[without] = [blocks[i] for i in lost[kind_of == kind].tolist()]
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
            label = label_of(entry, facts)
            before = taken.setdefault(label, {}).setdefault(where, entry)
            if before is not entry:
                both = []
                for one in (before, entry):
                    seeds = ",".join(map(str, one.result["seeds"]))
                    digest = one.digest[:8]
                    both.append(f"{digest} (seeds {seeds})")
                twins = " and ".join(both)
                raise UsageError(
                    f"{label} has two runs on {where}: {twins}.",
                    "Give the runs to use:  fedcache compare RUN RUN ... --over settings",
                )
    runs, blocks, lost = _without_holes(taken, wheres, metric)
    if len(runs) < 2 or len(blocks) < 2:
        methods = counted(len(taken), "method")
        settings = counted(len(wheres), "setting")
        raise UsageError(
            f"Of {methods} in {settings}, no two have {metric} in the same two settings.",
            "Train the same methods on another dataset or partition, or leave --over settings out.",
        )
    kept = [e for row in runs.values() for e in row]
    # Of those that are left, fewer facts may differ: shorter names.
    facts = differing(kept)
    short = {label_of(row[0], facts): row for row in runs.values()}
    if len(short) == len(runs):
        runs = short
    notes = _not_alike(runs, metric)
    if lost:
        notes.append(f"Left out, because some method has no value there: {_some(lost, '; ')}.")
    notes += _seeds_differ(runs)
    sets = len({e.setting[0] for e in kept})
    count = len(blocks)
    where = f"{count} settings of {counted(sets, 'dataset')}"
    if sets < len(blocks):
        notes.append(f"{where} are not independent: p is too small.")
    return _one_value_each(where, runs, blocks, metric, notes)


def over_held_out(group: HeldOutGroup, metric: str) -> PairedBlocks:
    """Leave-one-out runs over the values that are held out: one value each, of the run's mean over its seeds.

    Raises UsageError, for fewer than two treatments that have all of two values.
    """
    runs, values, lost = _without_holes(group.rows(), group.values, metric)
    if len(runs) < 2 or len(values) < 2:
        raise UsageError(
            f"{group.title}: no two methods have {metric} for the same two values of {group.column}.",
            "Train the same methods with --hold-out each.",
        )
    notes = _not_alike(runs, metric)
    if lost:
        notes.append(f"Left out, because some method has no run for it: {_some(lost, '; ')}.")
    notes += _seeds_differ(runs) + merged_notes(runs)
    notes.append(
        f"Each {group.column} is a test set of its own, and their training sets overlap: p is too small."
    )
    return _one_value_each(group.title, runs, values, metric, notes)


def _validation(
    runs: Mapping[str, Sequence[StoredRun]], metric: str, over: str
) -> tuple[float, ...] | None:
    """Validation accuracy by which treatments are chosen, in the score of the comparison; None where a run lacks it."""
    score = metric.replace("_", "-")
    if score not in SCORES and over == "clients":
        score = "client-mean"
    elif score not in SCORES:
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


def _without_holes(
    taken: Mapping[str, Mapping[str, StoredRun]], blocks: Sequence[str], metric: str
) -> tuple[dict[str, list[StoredRun]], list[str], list[str]]:
    """Runs [T][B] of the treatments and blocks that have all values, these blocks, and the names that are left out."""
    cells = {
        name: {block: _PER_RUN[metric](run.result) for block, run in row.items()}
        for name, row in taken.items()
    }
    names, kept = complete(cells, blocks)
    lost = [b for b in blocks if b not in kept] + [n for n in cells if n not in names]
    return {name: [taken[name][block] for block in kept] for name in names}, kept, lost


def _one_value_each(
    where: str,
    runs: Mapping[str, Sequence[StoredRun]],
    blocks: Sequence[str],
    metric: str,
    notes: Sequence[str],
) -> PairedBlocks:
    """Runs [T][B] with the mean of each over its seeds."""
    values = [[_PER_RUN[metric](run.result) for run in row] for row in runs.values()]
    chosen_by = _validation(runs, metric, "settings")
    table = np.array(values, np.float64)
    return PairedBlocks(where, tuple(runs), tuple(blocks), table, tuple(notes), runs, chosen_by)


def _distinct(names: Sequence[str]) -> list[str]:
    """Names of clients; those that come again get a number, so that none takes the place of another."""
    seen: Counter[str] = Counter()
    made = []
    for name in names:
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name} #{seen[name]}"
        made.append(name)
    return made


def _not_alike(runs: Mapping[str, Sequence[StoredRun]], metric: str) -> list[str]:
    """Sentences on treatments that sites scored, that were scored in another way, or that approximate their method."""
    every = [e for row in runs.values() for e in row]
    notes = []
    if any(e.claimed for e in every):
        notes.append(CLAIMED)
    kinds: dict[str, list[str]] = {}
    rough = []
    for name, row in runs.items():
        kinds.setdefault(str(row[0].result.get("protocol")), []).append(name)
        if any(e.result.get("fidelity") not in (None, "exact") for e in row):
            rough.append(name)
    if len(kinds) > 1:
        usual = max(kinds, key=lambda kind: len(kinds[kind]))
        parts = []
        for kind, names in kinds.items():
            if kind != usual:
                words = _PROTOCOL.get(kind, kind)
                parts.append(f"{_some(names)}: {words}")
        head = "Not scored alike"
        if metric in ("client_mean", "pooled"):
            head = "Models of different kinds"
        others = _PROTOCOL.get(usual, usual)
        scored = "; ".join(parts)
        notes.append(f"{head}. {scored}; all others: {others}.")
    notes += _drawn_apart({name: row[0].result["accuracy"] for name, row in runs.items()})
    unlike = unlike_tests(e.result for e in every)
    if unlike is not None:
        notes.append(unlike)
    if rough:
        notes.append(f"Approximations of their method: {_some(rough)}.")
    return notes


def _drawn_apart(accuracies: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A note where runs were scored over different numbers of clients (``--eval-clients``); [] where they were not."""
    kinds: dict[str, list[str]] = {}
    for name, accuracy in accuracies.items():
        kind = "all"
        if accuracy.get("eval_clients"):
            scored = accuracy["eval_clients"][0]["scored"]
            kind = f"{scored:,} drawn"
        kinds.setdefault(kind, []).append(name)
    if len(kinds) < 2:
        return []
    parts = "; ".join(f"{_some(names)}: {kind}" for kind, names in kinds.items())
    return [f"Scored over different numbers of clients. {parts}."]


def _seeds_differ(runs: Mapping[str, Sequence[StoredRun]]) -> list[str]:
    held = {tuple(e.result["seeds"]) for row in runs.values() for e in row}
    if len(held) < 2:
        return []
    # One number where all have as many seeds.
    counts = sorted({len(seeds) for seeds in held})
    spread = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return [f"Values are means over seeds that differ between runs ({spread} of them)."]


def _some(names: Sequence[str], between: str = ", ") -> str:
    words = between.join(names[:MOST_NAMED])
    if len(names) > MOST_NAMED:
        words += f" and {len(names) - MOST_NAMED} more"
    return words


ROW_TESTS = {"mcnemar": "McNemar's exact test", "z": "z-test of the paired rows"}
PERSONAL = ("personalised", "everywhere")
MOST_EXACT = 2000
"""Rows that differ up to which the binomial is added up in whole numbers: that takes 1 ms, and scipy's functions a
quarter of a second to import, which scipy does when one of them is first requested."""


@dataclass(frozen=True)
class RowDifference:
    """One run minus another over test rows.

    Attributes:
        rows: different test rows that both were scored on.
        gained: rows that the first gets right more often, over clients and seeds.
        lost: rows that the other gets right more often.
        difference: of the accuracies, a fraction.
        interval: of it, over test rows: difference -+ z sqrt(R / (R - 1) sum_r e_r^2), with e_r = d_r - difference w_r,
            where row r adds d_r to the difference and has the weight w_r of all; None for one row.
        p: two-sided. Where every row that differs counts the same, of McNemar's exact test: the binomial of ``gained``
            among ``gained + lost``. Else of a z-test with the variance above.
        test: mcnemar | z.
        holm: p corrected for all pairs of the comparison.
    """

    rows: int
    gained: int
    lost: int
    difference: float
    interval: tuple[float, float] | None
    p: float
    test: str
    holm: float | None = None


def row_difference(
    one: StoredRun, other: StoredRun, metric: str, level: float
) -> RowDifference | None:
    """``one`` minus ``other``, over the pairs of ``paired_seeds``.

    None where a run holds no test rows, where the two were not scored on the same ones, and for a metric that is no sum
    over rows.

    Args:
        one: a run.
        other: a run of the same dataset and partition.
        metric: accuracy (the headline of both), client_mean or pooled.
        level: of the interval.

    Raises:
        DamagedRunError for test rows that are not what was written.
    """
    personal = [run.result.get("protocol") in PERSONAL for run in (one, other)]
    if metric == "accuracy" and all(personal):
        metric = "client_mean"
    elif metric == "accuracy" and not any(personal):
        metric = "once"
    if metric not in ("client_mean", "pooled", "once"):
        return None
    ours = one.test_rows or {}
    theirs = other.test_rows or {}
    per_seed: list[Rows] = []
    for mine, its in paired_seeds(one, other):
        if mine not in ours or its not in theirs:
            continue
        found = _of_seed(ours[mine], theirs[its], metric)
        if found is None:
            return None
        per_seed.append(found)
    if per_seed:
        return _tested(per_seed, level)
    return None


Rows = tuple[np.ndarray, Floats, Floats]
"""Numbers of rows, what each adds to the difference, and its weight; weights have the sum 1."""


def _of_seed(ours: TestRows, theirs: TestRows, metric: str) -> Rows | None:
    alike = np.array_equal(ours.rows, theirs.rows) and np.array_equal(ours.scored, theirs.scored)
    if not alike or not np.allclose(ours.weight, theirs.weight, rtol=1e-9, atol=0.0):
        return None
    if metric == "client_mean":
        return ours.rows, ours.share - theirs.share, ours.weight
    apart = (ours.right - theirs.right).astype(np.float64)
    if metric == "pooled":
        total = float(ours.scored.sum())
        return ours.rows, apart / total, ours.scored / total
    count = len(ours.rows)  # of one model, which says the same to every client: each row once
    return ours.rows, apart / ours.scored / count, np.full(count, 1.0 / count)


def _joined(seeds: list[Rows]) -> tuple[Floats, Floats]:
    """Contribution and weight of each test image, averaged over seeds; an image that several seeds test counts once."""
    if len(seeds) == 1:
        return seeds[0][1:]
    numbers, adds, weights = (np.concatenate(column) for column in zip(*seeds, strict=True))
    rows, place = np.unique(numbers, return_inverse=True)
    mean_adds = np.bincount(place, adds, len(rows)) / len(seeds)
    mean_weights = np.bincount(place, weights, len(rows)) / len(seeds)
    return mean_adds, mean_weights


def _spread(adds: Floats, weights: Floats) -> float:
    """Standard error of a sum over R rows of a sample: sqrt(R / (R - 1) sum_r e_r^2), e_r = adds_r - sum weights_r."""
    count = len(adds)
    return float(np.sqrt(count / (count - 1) * ((adds - adds.sum() * weights) ** 2).sum()))


def _half(adds: Floats, weights: Floats, level: float) -> float:
    """Half of the normal interval of a sum over rows of a sample."""
    return NormalDist().inv_cdf(0.5 + level / 2.0) * _spread(adds, weights)


def rows_of_run(
    run: StoredRun, metric: str, level: float, seeds: Sequence[int] | None = None
) -> tuple[int, float, float] | None:
    """Test rows of a run, and the interval over them of its accuracy with models of clients; None without.

    accuracy -+ z sqrt(R / (R - 1) sum_r (a_r - accuracy w_r)^2). Row r has the weight w_r and adds a_r to the accuracy.

    Args:
        run: of one seed, or of several that give the same.
        metric: accuracy or client_mean, which of models of clients are one; or pooled.
        level: of the interval.
        seeds: of the run that count; None for all.

    Raises:
        DamagedRunError for test rows that are not what was written.
    """
    if run.result.get("protocol") not in PERSONAL:
        return None
    if metric not in ("accuracy", "client_mean", "pooled"):
        return None
    made: list[Rows] = []
    for seed, found in (run.test_rows or {}).items():
        if seeds is not None and seed not in seeds:
            continue
        if metric == "pooled":
            total = float(found.scored.sum())
            made.append((found.rows, found.right / total, found.scored / total))
        else:
            made.append((found.rows, found.share, found.weight))
    if not made:
        return None
    adds, weights = _joined(made)
    if len(adds) < 2:
        return None
    half = _half(adds, weights, level)
    mean = float(adds.sum())
    return len(adds), max(0.0, mean - half), min(1.0, mean + half)


def sign_test(gained: int, lost: int) -> float:
    """Two-sided p of ``gained`` among ``gained + lost`` fair throws: twice the smaller tail, at most 1."""
    fewer = min(gained, lost)
    throws = gained + lost
    if throws > MOST_EXACT:
        return min(1.0, 2.0 * float(scipy.special.bdtr(fewer, throws, 0.5)))
    ways = tail = 1  # of choosing none; then C(n, i) = C(n, i - 1) (n - i + 1) / i
    for i in range(1, fewer + 1):
        ways = ways * (throws - i + 1) // i
        tail += ways
    return min(1.0, 2 * tail / (1 << throws))


def _tested(seeds: list[Rows], level: float) -> RowDifference:
    adds, weights = _joined(seeds)
    count = len(adds)
    # What rounding alone leaves of a row is no difference.
    adds = np.where(np.abs(adds) < 10.0**-DIGITS / count, 0.0, adds)
    difference = float(adds.sum())
    gained = int((adds > 0).sum())
    lost = int((adds < 0).sum())
    if count < 2:
        return RowDifference(count, gained, lost, difference, None, 1.0, "mcnemar")
    half = _half(adds, weights, level)
    reach = (difference - half, difference + half)
    sizes = np.abs(adds[adds != 0])
    if not len(sizes) or np.ptp(sizes) <= 1e-9 * sizes.max():
        p = sign_test(gained, lost)
        return RowDifference(count, gained, lost, difference, reach, p, "mcnemar")
    p = 0.0
    spread = _spread(adds, weights)
    if spread > 0:
        p = math.erfc(abs(difference) / spread / math.sqrt(2.0))
    return RowDifference(count, gained, lost, difference, reach, p, "z")


MOST_SEEDS = 10
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
    ours = by_seed(one, score_of(one.result, score).per_seed)
    theirs = by_seed(other, score_of(other.result, score).per_seed)
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
    digests = run.result.get("partition", {}).get("digests", ())
    if len(run.result["seeds"]) == len(digests):
        return by_seed(run, map(str, digests))
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
    if len(seeds) > MOST_SEEDS:
        return f"{len(seeds)} seeds"
    return ", ".join(map(str, seeds))


def _names_at(names: Sequence[str], there: Any) -> list[str]:
    """The names at the places that are true."""
    return [names[i] for i in np.flatnonzero(there).tolist()]
