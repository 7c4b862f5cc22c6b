"""Treatments compared over paired blocks: means with intervals, paired differences with corrected p values, ranks.

A treatment is a run (over settings: equal runs of several settings), a block is a seed, a client or a setting. Numbers
in, frozen dataclasses out; ``blocks.py`` finds the numbers, ``comparison_output.py`` writes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fedcache.report.held_out import HELD_OUT
from fedcache.report.paired_blocks import PairedBlocks
from fedcache.report.paired_rows import RowDifference, row_difference, rows_of_run
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
from fedcache.runs.score import (
    BY_VALIDATION,
    DIGITS,
    NOT_A_CHOICE,
    SCORES,
    WORDS,
    Order,
    order_of_run,
    rows_interval,
    tie_sentence,
)

USUAL_TEST = {"seeds": "ttest", "clients": "wilcoxon", "settings": "wilcoxon", HELD_OUT: "wilcoxon"}
"""Seeds are few, and Wilcoxon's p of five is never below 0.06; an accuracy is a mean over many test rows, so its
differences over seeds are near normal. Differences over clients and settings are of unlike sizes, which ranks bear."""
SCORE_WORDS = {f"{name.replace('-', '_')}": f"accuracy ({name}: {WORDS[name]})" for name in SCORES}


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
        validation: mean accuracy of its runs on the rows to choose by; None where not all treatments have such rows.
        test_rows: over seeds, of values that do not vary over them: test rows, and the interval over these; Wilson's of
            one model, of models of clients that of ``rows_of_run``.
    """

    name: str
    values: tuple[float | None, ...]
    mean: float
    std: float | None
    interval: tuple[float, float] | None
    rank: float | None
    validation: float | None = None
    test_rows: tuple[int, float, float] | None = None

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
        chosen: name of the treatment with the highest validation accuracy; None where not all have rows to choose by.
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
        """What stands out in words: chosen by validation accuracy, or highest, which is no choice."""
        if self.chosen is not None:
            return BY_VALIDATION
        if self.metric in ("accuracy", *SCORE_WORDS):
            return NOT_A_CHOICE
        return f"highest {self.metric} (not a choice)"

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
        undecided = [p for p in self.pairs if p.holm is not None and p.holm >= alpha]
        return tuple(
            p.one if p.other == self.reference else p.other
            for p in undecided
            if self.reference in (p.one, p.other)
        )

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
        what = f"{len(self.treatments)} treatments over {len(self.blocks)} {self.over}"
        return (
            f"Comparison({self.setting}: {what}, {self.chosen_by}: {first.name} {first.mean:.4f})"
        )


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
    means = np.nanmean(found.values, axis=1)
    order = sorted(
        range(len(means)), key=lambda i: (-round(float(means[i]), DIGITS), *_place(found, i))
    )
    names = [found.names[i] for i in order]
    values = found.values[order]
    known = ~np.isnan(values)
    whole = values[:, known.all(0)]  # what ranks are of: blocks of which all have a value
    ranks = list(map(float, mean_ranks(whole))) if whole.size else [None] * len(names)
    held = (
        None if found.validation is None else dict(zip(found.names, found.validation, strict=True))
    )
    if over == "seeds" and metric in ("accuracy", *SCORE_WORDS):
        rows = _test_rows(found, metric, level)
    else:
        rows = {}
    treatments = tuple(
        _treatment(n, v, r, level, None if held is None else held[n], rows.get(n))
        for n, v, r in zip(names, values, ranks, strict=True)
    )
    picked = None
    if found.validation is not None:
        picked = found.names[_chosen(found, found.validation)]
    reference = against or picked or names[0]
    place = names.index(reference)
    if pairs == "all":
        chosen = list(itertools.combinations(range(len(names)), 2))
    else:
        chosen = [(i, place) for i in range(len(names)) if i != place]
    apart = [(names[i], names[j]) for i, j in chosen if not (known[i] & known[j]).any()]
    chosen = [(i, j) for i, j in chosen if (known[i] & known[j]).any()]
    made = _pairs_of(found.blocks, names, values, chosen, test, over, level)
    if over == "seeds":
        made = _with_rows(made, found, metric, level)
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
        ranking=None if _repeated(whole, over) else ranking(whole, level),
        notes=found.notes,
        chosen=picked,
    )
    chose = against is None and pairs == "best" and picked is None
    unpaired = [
        f"{one} and {other} have no seed in common, so they are not compared."
        for one, other in apart
    ]
    return replace(done, notes=(*found.notes, *unpaired, *_tied(done), *_notes(done, chose=chose)))


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


def _with_rows(
    pairs: tuple[Pair, ...], found: PairedBlocks, metric: str, level: float
) -> tuple[Pair, ...]:
    """The pairs with their differences over test rows, where these add up to what is compared."""
    runs = found.runs
    made = [
        row_difference(runs[p.one][0], runs[p.other][0], metric, level)
        if {p.one, p.other} <= runs.keys()
        else None
        for p in pairs
    ]
    made = [
        r if r is not None and abs(r.difference - p.difference) < 1e-9 else None
        for p, r in zip(pairs, made, strict=True)
    ]
    corrected = holm([None if r is None else r.p for r in made])
    return tuple(
        p if r is None else replace(p, rows=replace(r, holm=h))
        for p, r, h in zip(pairs, made, corrected, strict=True)
    )


def _place(found: PairedBlocks, number: int) -> tuple[Order, int]:
    """What treatments with equal figures are sorted by: as the points of a grid, then in the order of the runs."""
    row = found.runs.get(found.names[number])
    return (order_of_run(row[0].result) if row else ()), number


def _chosen(found: PairedBlocks, validation: Sequence[float]) -> int:
    """The number of the treatment that validation chooses."""
    return min(
        range(len(validation)), key=lambda i: (-round(validation[i], DIGITS), *_place(found, i))
    )


def _tied(c: Comparison) -> list[str]:
    """A sentence where the treatment that validation chose has equals."""
    held = {t.name: t.validation for t in c.treatments if t.validation is not None}
    if c.chosen is None or c.chosen not in held:
        return []
    highest_first = sorted(held.values(), reverse=True)
    told = tie_sentence(highest_first, c.chosen, "runs", "a validation accuracy of ")
    if told is None:
        return []
    return [told]


def _test_rows(
    found: PairedBlocks, metric: str, level: float
) -> dict[str, tuple[int, float, float]]:
    """Rows and interval of the treatments that do not vary, where these are the values that are compared."""
    made = {}
    for name, row in zip(found.names, found.values, strict=True):
        run = None
        if name in found.runs:
            run = found.runs[name][0]
        values = row[~np.isnan(row)]
        if run is None or not constant(values):
            continue
        told = rows_interval(run.result, level)
        if told is not None and constant(np.append(values, run.result["accuracy"]["mean"])):
            made[name] = told
        elif (clients := rows_of_run(run, metric, level, list(map(int, found.blocks)))) is not None:
            made[name] = clients
    return made


def _treatment(
    name: str,
    row: Floats,
    rank: float | None,
    level: float,
    validation: float | None,
    rows: tuple[int, float, float] | None,
) -> Treatment:
    values = row[~np.isnan(row)]
    std = None
    if len(values) > 1:
        std = float(values.std(ddof=1))
    told = tuple(None if np.isnan(value) else float(value) for value in row)
    return Treatment(
        name, told, float(values.mean()), std, interval(values, level), rank, validation, rows
    )


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
    """What these numbers cannot say."""
    count = len(c.blocks)
    alpha = 1.0 - c.level
    if count == 1:
        more = {
            "seeds": "More seeds (--seeds 0-4) or --over clients give both.",
            "clients": "More clients or --over seeds give both.",
            "settings": "More datasets or partitions give both.",
            HELD_OUT: "More held-out values give both.",
        }
        by_rows = any(t.test_rows is not None for t in c.treatments)
        over_rows = ""
        if by_rows:
            over_rows = (
                " Intervals are over test rows: Wilson's of one model, normal of clients' models."
            )
        lacks = "no interval"
        if by_rows:
            lacks = f"no interval over {c.over}"
        untested = "no test"
        if any(p.rows for p in c.pairs):
            untested = f"no test over {c.over}"
        return [
            f"One {c.over[:-1]} only ({c.blocks[0]}): {lacks} and {untested}.{over_rows} {more[c.over]}"
        ]
    notes = []
    if count < 3:
        notes.append(f"Two {c.over}: no interval, which takes three.")
    notes += _spreadless(c)
    common = sum(
        None not in column for column in zip(*(t.values for t in c.treatments), strict=True)
    )
    if len(c.treatments) > 2 and common < 2:
        notes.append(f"No test of ranks: fewer than two {c.over} are common to all runs.")
    elif c.ranking is None and len(c.treatments) > 2:
        notes.append(
            f"No test of ranks: each of the {c.over} would count the order of runs without a spread again."
        )
    if c.ranking is not None and c.ranking.blocks < count:
        notes.append(f"Ranks are over the {c.ranking.blocks} {c.over} that all runs have.")
    tested = sum(p.p is not None for p in c.pairs)
    if c.too_few:
        times = ""
        if tested > 1:
            times = f", {tested} times that after Holm"
        notes.append(
            f"{count} {c.over} are too few for this test: Wilcoxon's p is never below {c.lowest / tested:.3g}{times}, "
            f"and it would have to be below {alpha:.2g}."
        )
    if chose and tested:
        notes.append(
            "The highest was found by these numbers, which flatters its p; --against RUN fixes it beforehand."
        )
    if c.ranking is not None and c.ranking.p >= alpha:
        notes.append(
            f"Friedman's test finds no difference (p = {c.ranking.p:.2g}): distances beyond the critical one decide "
            "nothing."
        )
    return notes


def _spreadless(c: Comparison) -> list[str]:
    """Sentences on treatments and differences that do not vary, and so have no interval and no test."""
    single = [t for t in c.treatments if len(t.known) == 1]
    same = [t.name for t in c.treatments if t not in single and constant(t.known)]
    by_rows = [t for t in c.treatments if t.name in same and t.test_rows is not None]
    why = {
        "seeds": "does not depend on the seed",
        "clients": "is the same for every client, as where all are scored on the same rows",
        "settings": "is the same in every setting",
        HELD_OUT: "is the same for every held-out value",
    }[c.over]
    without = [name for name in same if name not in [t.name for t in by_rows]]
    notes = [
        f"{t.name} has one of the {c.over} ({', '.join(t.blocks(c.blocks))}): no interval."
        for t in single
    ]
    notes += (
        [f"Without an interval, because its value {why}: {', '.join(without)}."] if without else []
    )
    if by_rows:
        counts = ", ".join(
            dict.fromkeys(f"{t.test_rows[0]:,}" for t in by_rows if t.test_rows is not None)
        )
        notes.append(
            f"The value {why}, and the interval is over {counts} test rows: {', '.join(t.name for t in by_rows)}."
        )
    once = [p for p in c.pairs if len(p.blocks) == 1]
    notes += [
        f"{_pairs([p])} share one of the {c.over} ({p.blocks[0]}): no test over {c.over}."
        for p in once
    ]
    untested = [p for p in c.pairs if p.p is None and p not in once]
    among = [
        p
        for p in untested
        if {p.one, p.other} <= set(same) and c.over not in ("settings", HELD_OUT)
    ]
    if among:
        notes.append(f"{_pairs(among)} not tested: neither of the two varies over {c.over}.")
    others = [p for p in untested if p not in among]
    if others:
        notes.append(
            f"{_pairs(others)} not tested: the differences are all equal, without a spread to test by."
        )
    return notes


def _pairs(pairs: Sequence[Pair]) -> str:
    return "; ".join(f"{p.one} and {p.other}" for p in pairs)
