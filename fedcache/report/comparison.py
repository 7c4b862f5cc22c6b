"""Treatments compared over paired blocks: means with intervals, paired differences with corrected p values, ranks.

A treatment is a run; over settings, it is the equal runs of several settings. A block is a seed, a client or a setting.
``within``, ``across`` and ``over_held_out`` collect the values as ``PairedBlocks``, ``compared`` tests them, and
``comparison_output.py`` writes the result.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from fedcache.errors import UsageError, unknown
from fedcache.parsing import Facts, Record, counted
from fedcache.report.find_runs import (
    CLAIMED,
    HELD_OUT,
    HeldOutGroup,
    MergedRun,
    StoredRun,
    by_setting,
    differing,
    label_of,
    labels,
    setting_names,
)
from fedcache.runs.directory import TestRows, draws_nothing
from fedcache.runs.score import (
    BY_VALIDATION,
    DIGITS,
    NOT_A_CHOICE,
    SCORES,
    WORDS,
    Order,
    mean_std,
    one_learning_rate,
    order_of_run,
    rows_interval,
    score_for,
    score_of,
    tie_sentence,
    unlike_tests,
    validation_value,
)

# Statistics of paired values: intervals, tests, correction, ranks, critical differences, as in Demšar (JMLR 7, 2006).
#
# Values of one treatment in several blocks (seeds, clients, settings) are paired by block. No result depends on the
# order of the blocks, because values are sorted before they are resampled.
#
# ``scipy.stats`` takes most of a second to import, and ``scipy.special`` a quarter. Scipy imports each of them at its
# first use, which few pages need.

TESTS = ("wilcoxon", "ttest")
LEAST_BLOCKS = 3
"""Minimum number of values for an interval. With two values, an interval is too wide to be useful."""
FEW_BLOCKS = 10
"""Number of values from which the interval is a bootstrap interval: with fewer, its coverage is not as stated."""
RESAMPLES = 9999
SEED = 0

Floats = NDArray[np.float64]
Interval = tuple[float, float]
"""The low and the high end of an interval."""


def interval(values: Floats, level: float) -> Interval | None:
    """Interval of the mean of [B] values: Student's of fewer than ``FEW_BLOCKS``, else the percentile bootstrap.

    None with fewer than ``LEAST_BLOCKS`` values, and for equal values, because an interval of length 0 would claim too
    much certainty.

    The bootstrap of few normal values is too narrow: a 95 % interval covers the mean in 76 % of cases with 3 values,
    83 % with 5 and 91 % with 10. BCa is not used, because it estimates its acceleration from few values, covers no
    better, and is NaN for equal values.
    """
    count = len(values)
    if count < LEAST_BLOCKS or constant(values):
        return None
    # Student's interval is right for few values that are about normal; the bootstrap needs more of them.
    if count < FEW_BLOCKS:
        mean = float(values.mean())
        half = student_half(values, level)
        return mean - half, mean + half
    # Sorted values and a fixed seed give the same interval for every order of the runs.
    found = scipy.stats.bootstrap(
        (np.sort(values),),
        np.mean,
        n_resamples=RESAMPLES,
        # At most 2 million resampled values are in memory at once.
        batch=max(1, 2_000_000 // count),
        confidence_level=level,
        method="percentile",
        random_state=np.random.default_rng(SEED),
    )
    ends = found.confidence_interval
    return float(ends.low), float(ends.high)


def student_half(values: Floats, level: float) -> float:
    """Half of Student's interval of the mean of [B] values, t s / sqrt(B)."""
    count = len(values)
    deviation = float(values.std(ddof=1))
    return student_quantile(level, count - 1) * deviation / math.sqrt(count)


@lru_cache(maxsize=256)
def student_quantile(level: float, freedom: int) -> float:
    """The quantile of Student's t for a two-sided interval of this level."""
    return float(scipy.special.stdtrit(freedom, 0.5 + level / 2))


def interval_words(count: int) -> str:
    """The name of the interval that ``interval`` uses for this number of values."""
    if count < FEW_BLOCKS:
        return "Student's t intervals"
    return "percentile bootstrap intervals"


def constant(values: Floats) -> bool:
    """Whether all of [B] values are equal up to rounding."""
    return float(np.ptp(values)) < 10.0**-DIGITS


def p_value(test: str, differences: Floats) -> float | None:
    """Two-sided p of the hypothesis that [B] paired differences are centred at 0.

    Args:
        test: ``wilcoxon`` (signed ranks; differences of 0 are dropped) or ``ttest``.
        differences: B of at least 2.

    Returns:
        1 where all differences are 0; None for a t-test of equal differences, because they have no spread.
    """
    d = np.round(differences, DIGITS)
    if not d.any():
        return 1.0
    if test == "wilcoxon":
        return float(scipy.stats.wilcoxon(d).pvalue)
    if constant(d):
        return None
    return float(scipy.stats.ttest_1samp(d, 0.0).pvalue)


def lowest_p(test: str, blocks: int) -> float:
    """The lowest two-sided p that a test of this number of differences can give; 0 for a test without such a bound."""
    if test == "wilcoxon":
        return 2.0 ** (1 - blocks)
    return 0.0


def holm(found: Sequence[float | None]) -> list[float | None]:
    """p values corrected for their number (Holm 1979, step-down); None stays None and does not count."""
    known = sorted((p, i) for i, p in enumerate(found) if p is not None)
    corrected: list[float | None] = [None] * len(found)
    highest = 0.0
    for place, (p, i) in enumerate(known):
        # Corrected values never fall as p rises.
        highest = max(highest, min(1.0, (len(known) - place) * p))
        corrected[i] = highest
    return corrected


def mean_ranks(values: Floats) -> Floats:
    """Mean rank over blocks of [T, B] values as [T]; 1 is the highest value, equals share the mean of their ranks."""
    rounded = np.round(values, DIGITS)
    blocks = rounded.shape[1]
    # A rank is 1, plus the number of higher values, plus half the number of other equal values.
    higher = np.array([(rounded > row).sum() for row in rounded])
    equal = np.array([(rounded == row).sum() - blocks for row in rounded])
    return np.asarray((blocks + higher + equal / 2.0) / blocks, np.float64)


def friedman(values: Floats) -> tuple[float, float]:
    """Friedman's chi-squared, corrected for ties, and its p for [T, B] values of T >= 3 treatments in B >= 2 blocks."""
    rounded = np.round(values, DIGITS)
    # Where all values of every block are tied, the statistic would be 0/0.
    if not np.ptp(rounded, axis=0).any():
        return 0.0, 1.0
    found = scipy.stats.friedmanchisquare(*rounded)
    return float(found.statistic), float(found.pvalue)


def critical_difference(treatments: int, blocks: int, level: float) -> float:
    """Nemenyi's: mean ranks further apart than this differ at 1 - ``level``.

    CD = q_alpha sqrt(k (k + 1) / (6 N)), where q_alpha is the studentized range of k groups and infinitely many degrees
    of freedom, divided by sqrt(2).
    """
    q = float(scipy.stats.studentized_range.ppf(level, treatments, np.inf)) / math.sqrt(2)
    return q * math.sqrt(treatments * (treatments + 1) / (6 * blocks))


def groups(ranks: Sequence[float], apart: float) -> tuple[tuple[int, ...], ...]:
    """The largest sets of at least two treatments whose ranks span at most ``apart``.

    The groups, and the treatments in each group, are sorted from the best rank to the worst.
    """
    order = sorted(range(len(ranks)), key=lambda i: (ranks[i], i))
    most = apart + 10.0**-DIGITS
    made = []
    reached = 0
    for first, i in enumerate(order):
        last = max(k for k in range(first, len(order)) if ranks[order[k]] - ranks[i] <= most)
        # A set that ends where an earlier group ends is a part of that group.
        if last > first and last > reached:
            made.append(tuple(order[first : last + 1]))
            reached = last
    return tuple(made)


@dataclass(frozen=True)
class Ranking:
    """Treatments by mean rank.

    Attributes:
        ranks: of each treatment; 1 is best.
        statistic: Friedman's chi-squared.
        p: p of Friedman's test.
        cd: the critical difference.
        groups: indices of treatments whose ranks do not differ by more than the critical difference.
        blocks: number of blocks that were ranked.
    """

    ranks: tuple[float, ...]
    statistic: float
    p: float
    cd: float
    groups: tuple[tuple[int, ...], ...]
    blocks: int

    @property
    def too_few(self) -> bool:
        """Whether the blocks are too few for any two mean ranks to differ by the critical difference."""
        # Mean ranks of k treatments are between 1 and k, so they differ by at most k - 1.
        return self.cd >= len(self.ranks) - 1


def ranking(values: Floats, level: float) -> Ranking | None:
    """The ranking of [T, B] values; None with fewer than three treatments or two blocks."""
    treatments, blocks = values.shape
    if treatments < 3 or blocks < 2:
        return None
    ranks = tuple(map(float, mean_ranks(values)))
    statistic, p = friedman(values)
    cd = critical_difference(treatments, blocks, level)
    return Ranking(ranks, statistic, p, cd, groups(ranks, cd), blocks)


USUAL_TEST = {"seeds": "ttest", "clients": "wilcoxon", "settings": "wilcoxon", HELD_OUT: "wilcoxon"}
"""Unit of the tests -> default test. With five seeds, Wilcoxon's p is never below 0.06. Accuracies are means over many
test rows, so their differences over seeds are nearly normal, as the t-test needs. Differences over clients and settings
vary in size, and Wilcoxon's test uses only their ranks."""
METRIC_OF_SCORE = {"own": "accuracy", "client-mean": "client_mean", "pooled": "pooled"}
"""Value of ``--score`` in a report -> the metric of its comparisons."""
SCORE_WORDS = {name.replace("-", "_"): f"accuracy ({name}: {WORDS[name]})" for name in SCORES}


RowsInterval = tuple[int, float, float]
"""Number of test rows, and the low and the high end of an interval over these rows."""


@dataclass(frozen=True)
class Treatment:
    """One row of a comparison.

    Attributes:
        name: unique in the comparison.
        values: fractions, one for each block; None where the treatment has no value for a block.
        mean: of all its values.
        std: of its values (ddof 1); None for one value.
        interval: of the mean, as ``statistics.interval``; None with fewer than three values.
        rank: mean rank over the blocks where all treatments have a value, 1 is best; None without such a block.
        validation: mean accuracy of its runs on validation rows; None where not all treatments have such rows.
        test_rows: number of test rows, and the interval of the mean over these rows. None unless seeds are compared and
            the values do not vary over them. It is Wilson's interval for one global model, and the interval of
            ``rows_of_run`` for models of clients.
        client_prior: accuracy without and with ``--client-prior``, means over its runs; {} where a run has none.
        base_to_new: accuracy on base and on new classes and their harmonic mean, as ``client_prior``.
        transfer: accuracy on other datasets, as ``client_prior``.
    """

    name: str
    values: tuple[float | None, ...]
    mean: float
    std: float | None
    interval: Interval | None
    rank: float | None
    validation: float | None = None
    test_rows: RowsInterval | None = None
    client_prior: Mapping[str, float | None] = field(default_factory=dict)
    base_to_new: Mapping[str, float | None] = field(default_factory=dict)
    transfer: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def known(self) -> Floats:
        """Its values, without the blocks that have none."""
        return np.array([value for value in self.values if value is not None])

    def blocks(self, names: Sequence[str]) -> tuple[str, ...]:
        """Names of the blocks for which the treatment has a value; ``names`` are the names of all blocks."""
        each = zip(names, self.values, strict=True)
        return tuple(name for name, value in each if value is not None)


@dataclass(frozen=True)
class Pair:
    """Two treatments compared.

    Attributes:
        one: name of a treatment.
        other: name of the treatment that it is compared with.
        difference: mean of one minus other over the blocks where both have a value, a fraction.
        interval: of that mean, as ``statistics.interval``.
        p: of the paired test; None where no test is possible.
        holm: p corrected for all pairs of the comparison.
        rows: the same difference over the test rows of the runs. None unless seeds are compared and both runs hold
            their test rows.
        blocks: names of the blocks where both have a value.
    """

    one: str
    other: str
    difference: float
    interval: Interval | None
    p: float | None
    holm: float | None
    rows: RowDifference | None = None
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Treatments of one setting, or over all settings.

    Attributes:
        setting: dataset and partition in words; over settings, their number.
        over: seeds | clients | settings | held-out values.
        metric: name of the metric of the values.
        test: wilcoxon | ttest.
        level: of the intervals; tests decide at 1 - level.
        blocks: names.
        treatments: the highest mean first.
        reference: name of the treatment that the others are compared with.
        pairs: every other treatment with the reference, or all pairs.
        ranking: Friedman and Nemenyi; None with fewer than three treatments or two blocks, and over seeds or clients
            where two treatments differ and neither varies. Its groups hold indices into ``treatments``.
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
        """How the run that is marked in tables was found, in words: by validation accuracy, else by test accuracy."""
        if self.chosen is not None:
            return BY_VALIDATION
        if self.metric in ("accuracy", *SCORE_WORDS):
            return NOT_A_CHOICE
        return f"best by {self.metric} on the test rows (no validation split)"

    @property
    def alpha(self) -> float:
        """The significance level of the tests."""
        return 1.0 - self.level

    @property
    def tested(self) -> int:
        """Number of pairs that were tested over blocks."""
        return sum(p.p is not None for p in self.pairs)

    @property
    def best(self) -> tuple[str, ...]:
        """Names with the highest mean: one, or several that are equal."""
        highest = self.treatments[0].mean
        return tuple(t.name for t in self.treatments if constant(np.array([t.mean, highest])))

    @property
    def lowest(self) -> float:
        """The lowest p after correction that any pair could have with this number of blocks; 0 without a bound."""
        # Holm's correction multiplies the smallest p by the number of tests.
        possible = [lowest_p(self.test, len(p.blocks)) for p in self.pairs if p.p is not None]
        return len(possible) * min(possible, default=0.0)

    @property
    def too_few(self) -> bool:
        """Whether there are too few blocks for the test to tell any pair apart."""
        return self.lowest >= self.alpha

    @property
    def alike(self) -> tuple[str, ...]:
        """Names that do not differ significantly from the reference; () where there are too few blocks for the test."""
        if self.too_few:
            return ()
        names = []
        for pair in self.pairs:
            if pair.holm is None or pair.holm < self.alpha:
                continue
            if pair.other == self.reference:
                names.append(pair.one)
            elif pair.one == self.reference:
                names.append(pair.other)
        return tuple(names)

    def to_dict(self) -> Facts:
        """Plain JSON values."""
        return {
            **asdict(self),
            "best": list(self.best),
            "alike": list(self.alike),
            "chosen_by": self.chosen_by,
        }

    @property
    def first(self) -> Treatment:
        """The treatment that validation chose, else the one with the highest mean."""
        return next((t for t in self.treatments if t.name == self.chosen), self.treatments[0])

    def __repr__(self) -> str:
        first = self.first
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
        found: at least two treatments and one block.
        over: seeds | clients | settings, for words and the usual test.
        metric: name of the metric of the values.
        test: wilcoxon | ttest; None takes that of ``USUAL_TEST``.
        against: name of the reference; None takes the one that validation chooses, else the one with the highest mean.
        pairs: ``best``, every treatment with the reference, or ``all``.
        level: of intervals; tests decide at 1 - level.
    """
    test = test or USUAL_TEST[over]
    order = _falling(found, np.nanmean(found.values, axis=1).tolist())
    names = [found.names[i] for i in order]
    values = found.values[order]
    known = ~np.isnan(values)
    # Only blocks for which all treatments have a value are ranked.
    ranked_values = values[:, known.all(0)]
    ranks: list[float | None] = [None] * len(names)
    if ranked_values.size:
        ranks = list(map(float, mean_ranks(ranked_values)))
    validation = {}
    chosen = None
    if found.validation is not None:
        validation = dict(zip(found.names, found.validation, strict=True))
        chosen = found.names[_falling(found, found.validation)[0]]
    rows = {}
    if over == "seeds" and metric in ("accuracy", *SCORE_WORDS):
        rows = _test_rows(found, metric, level)
    treatments = []
    for name, row, rank in zip(names, values, ranks, strict=True):
        treatment = _treatment(name, row, level, found.runs.get(name, ()))
        treatments.append(
            replace(treatment, rank=rank, validation=validation.get(name), test_rows=rows.get(name))
        )
    reference = against or chosen or names[0]
    reference_index = names.index(reference)
    if pairs == "all":
        pairs_to_test = list(itertools.combinations(range(len(names)), 2))
    else:
        pairs_to_test = [(i, reference_index) for i in range(len(names)) if i != reference_index]
    paired = [(i, j) for i, j in pairs_to_test if (known[i] & known[j]).any()]
    tested_pairs = _pairs_of(found.blocks, names, values, paired, test=test, over=over, level=level)
    if over == "seeds":
        tested_pairs = _with_rows(tested_pairs, found, metric, level)
    ranked = None
    if not _repeated(ranked_values, over):
        ranked = ranking(ranked_values, level)
    comparison = Comparison(
        setting=found.setting,
        over=over,
        metric=metric,
        test=test,
        level=level,
        blocks=found.blocks,
        treatments=tuple(treatments),
        reference=reference,
        pairs=tested_pairs,
        ranking=ranked,
        notes=found.notes,
        chosen=chosen,
    )
    notes = list(found.notes)
    # Two treatments can have no common block only over seeds: over other blocks no value is missing.
    for i, j in pairs_to_test:
        if (i, j) not in paired:
            one = names[i]
            notes.append(f"{one} and {names[j]} have no common seed, so they are not compared.")
    if chosen is not None:
        falling = sorted(validation.values(), reverse=True)
        tie = tie_sentence(falling, chosen, "runs", "a validation accuracy of ")
        if tie is not None:
            notes.append(tie)
    # Without another choice, the reference is the best on the values that are tested.
    best_is_reference = against is None and pairs == "best" and chosen is None
    notes += _notes(comparison, best_is_reference=best_is_reference)
    return replace(comparison, notes=tuple(notes))


def _pairs_of(
    blocks: Sequence[str],
    names: Sequence[str],
    values: Floats,
    index_pairs: Sequence[tuple[int, int]],
    test: str,
    over: str,
    level: float,
) -> tuple[Pair, ...]:
    """Pairs of treatments, each over the blocks for which both have a value."""
    known = ~np.isnan(values)
    made = []
    for i, j in index_pairs:
        shared = known[i] & known[j]
        one = values[i, shared]
        other = values[j, shared]
        differences = one - other
        mean = float(differences.mean())
        ends = interval(differences, level)
        p = _p(test, one, other, over)
        names_of_blocks = tuple(itertools.compress(blocks, shared))
        made.append(Pair(names[i], names[j], mean, ends, p, holm=None, blocks=names_of_blocks))
    # Holm's correction is for all pairs together.
    corrected = holm([pair.p for pair in made])
    return tuple(replace(pair, holm=p) for pair, p in zip(made, corrected, strict=True))


def _falling(found: PairedBlocks, values: Sequence[float]) -> list[int]:
    """Indices of the treatments, the highest value first.

    Treatments with equal values are in the order of their settings in a grid, then in the order of ``found``.
    """

    def sort_key(i: int) -> tuple[float, Order, int]:
        order: Order = ()
        row = found.runs.get(found.names[i])
        if row:
            order = order_of_run(row[0].result)
        return -round(values[i], DIGITS), order, i

    return sorted(range(len(values)), key=sort_key)


def _with_rows(
    pairs: tuple[Pair, ...], found: PairedBlocks, metric: str, level: float
) -> tuple[Pair, ...]:
    """The pairs, each with its difference over test rows if this equals its mean difference over seeds."""
    over_rows = {}
    for i, pair in enumerate(pairs):
        if pair.one not in found.runs or pair.other not in found.runs:
            continue
        one = found.runs[pair.one][0]
        other = found.runs[pair.other][0]
        of_rows = row_difference(one, other, metric, level)
        if of_rows is not None and abs(of_rows.difference - pair.difference) < 1e-9:
            over_rows[i] = of_rows
    corrected = holm([rows.p for rows in over_rows.values()])
    completed = list(pairs)
    for (i, rows), p in zip(over_rows.items(), corrected, strict=True):
        completed[i] = replace(pairs[i], rows=replace(rows, holm=p))
    return tuple(completed)


def _test_rows(found: PairedBlocks, metric: str, level: float) -> dict[str, RowsInterval]:
    """Name -> test rows and their interval, of the treatments whose values do not vary over seeds."""
    made = {}
    for name, row in zip(found.names, found.values, strict=True):
        values = row[~np.isnan(row)]
        if name not in found.runs or not constant(values):
            continue
        run = found.runs[name][0]
        rows = rows_interval(run.result, level)
        # ``rows_interval`` holds for the primary accuracy of one global model. Values that differ from this accuracy
        # may be those of clients' models.
        if rows is None or not constant(np.append(values, run.result["accuracy"]["mean"])):
            rows = rows_of_run(run, metric, level, list(map(int, found.blocks)))
        if rows is not None:
            made[name] = rows
    return made


def _treatment(name: str, row: Floats, level: float, runs: Sequence[StoredRun]) -> Treatment:
    """The treatment of one row of values, which are NaN where there is none; ``rank`` is filled in later."""
    values = row[~np.isnan(row)]
    mean = float(values.mean())
    std = None
    if len(values) > 1:
        std = float(values.std(ddof=1))
    each: list[float | None] = row.tolist()
    for block in np.flatnonzero(np.isnan(row)):
        each[block] = None
    ends = interval(values, level)
    return Treatment(
        name,
        tuple(each),
        mean,
        std,
        ends,
        rank=None,
        client_prior=_means_of(runs, "client_prior"),
        base_to_new=_means_of(runs, "base_to_new"),
        transfer=_common_means(
            [run.result["accuracy"].get("transfer", {}).get("mean", {}) for run in runs]
        ),
    )


def _means_of(runs: Sequence[StoredRun], section: str) -> dict[str, float]:
    """Means over runs of the accuracies in a section of a result, without accuracies that a run lacks."""
    return _common_means([run.result["accuracy"].get(section, {}) for run in runs])


def _common_means(found: Sequence[Record]) -> dict[str, float]:
    """Means of the accuracies that all of ``found`` have."""
    means = {}
    for name in dict.fromkeys(itertools.chain(*found)):
        values = [one[name] for one in found if one.get(name) is not None]
        if name != "per_seed" and len(values) == len(found):
            means[name] = float(np.mean(values))
    return means


def _p(test: str, one: Floats, other: Floats, over: str) -> float | None:
    """p of a pair; None for one block, and if the two differ although neither varies over seeds or clients."""
    if len(one) < 2 or _repeated(np.stack([one, other]), over):
        return None
    return p_value(test, one - other)


def _repeated(values: Floats, over: str) -> bool:
    """Whether two treatments among [T, B] values differ, although neither varies over seeds or clients.

    Each of the two is then one number that is repeated for each block. Wilcoxon's and Friedman's tests would count the
    repetitions as evidence.
    """
    if over in ("settings", HELD_OUT) or not values.size:
        return False
    repeated = [row[0] for row in values if constant(row)]
    return len(repeated) > 1 and not constant(np.array(repeated))


def is_one_group(c: Comparison) -> bool:
    """Whether no two treatments are further apart than the critical difference of ranks."""
    return c.ranking is not None and len(c.treatments) in map(len, c.ranking.groups)


def _notes(c: Comparison, *, best_is_reference: bool) -> list[str]:
    """Notes on the limits of these numbers: missing intervals, missing tests and biased choices."""
    count = len(c.blocks)
    if count == 1:
        return [_one_block(c)]
    notes = []
    if count < 3:
        notes.append(
            f"There are no intervals, because they need at least three {c.over}, and there are only two."
        )
    notes += _spreadless(c)
    if len(c.treatments) > 2:
        columns = zip(*(t.values for t in c.treatments), strict=True)
        common = sum(None not in column for column in columns)
        if common < 2:
            notes.append(
                f"Ranks are not tested, because fewer than two {c.over} are common to all runs."
            )
        elif c.ranking is None:
            notes.append(
                f"Ranks are not tested, because some runs have the same result for all {c.over}."
            )
    if c.ranking is not None and c.ranking.blocks < count:
        blocks = c.ranking.blocks
        notes.append(f"Ranks use the {blocks} {c.over} that all runs share.")
    if c.too_few:
        notes.append(too_few_words(c))
    if best_is_reference and c.tested and not c.too_few:
        notes.append(
            "The reference was selected as the best on these results, so its p-values are optimistic. To "
            "choose the reference beforehand: --against RUN"
        )
    # Without methods that are further apart than the critical difference, there is nothing to qualify.
    if c.ranking is not None and c.ranking.p >= c.alpha and not is_one_group(c):
        notes.append(
            f"Friedman's test finds no difference (p = {c.ranking.p:.2g}), so distances beyond the "
            "critical difference are not significant."
        )
    return notes


def too_few_words(c: Comparison) -> str:
    """A sentence that the test of a comparison cannot reach significance with any values."""
    times = ""
    if c.tested > 1:
        times = f" ({c.lowest:.3g} after Holm's correction for {c.tested} tests)"
    least = c.lowest / c.tested
    return (
        f"{len(c.blocks)} {c.over} are too few for this test to show significance: its smallest possible p is "
        f"{least:.3g}{times}, and a significant p is below {c.alpha:.2g}."
    )


_MORE_BLOCKS = {
    "seeds": "For intervals and tests over seeds, use more seeds (--seeds 0-4). Or use --over clients.",
    "clients": "For intervals and tests over clients, use more clients. Or use --over seeds.",
    "settings": "For intervals and tests over settings, use more datasets or partitions.",
    HELD_OUT: "For intervals and tests, use more held-out values.",
}
"""Unit of the tests -> how to get an interval and a test if there is only one block."""
_SAME_VALUE = {
    "seeds": "does not depend on the seed",
    "clients": "is the same for every client, for example because all clients are scored on the same rows",
    "settings": "is the same in every setting",
    HELD_OUT: "is the same for every held-out value",
}
"""Unit of the tests -> the reason why a treatment can have the same value in all blocks."""


def _one_block(c: Comparison) -> str:
    """A note that one block gives no interval and no test, and which options would give both."""
    more = _MORE_BLOCKS[c.over]
    lacks = "no interval"
    if any(t.test_rows is not None for t in c.treatments):
        more = (
            "Intervals are over test rows: Wilson intervals for one model, normal intervals for clients' models. "
            f"{more}"
        )
        lacks = f"no interval over {c.over}"
    untested = "no test"
    if any(p.rows for p in c.pairs):
        untested = f"no test over {c.over}"
    block = c.over.removesuffix("s")
    return f"There is only one {block} ({c.blocks[0]}), so there is {lacks} and {untested}. {more}"


def _spreadless(c: Comparison) -> list[str]:
    """Sentences on treatments and differences that do not vary, and therefore have no interval and no test."""
    why = _SAME_VALUE[c.over]
    notes = []
    same = []
    by_rows = {}
    for t in c.treatments:
        if len(t.known) == 1:
            (block,) = t.blocks(c.blocks)
            notes.append(f"{t.name} has only one of the {c.over} ({block}), so it has no interval.")
        elif constant(t.known):
            same.append(t.name)
            if t.test_rows is not None:
                by_rows[t.name] = t.test_rows[0]
    without = [name for name in same if name not in by_rows]
    if without:
        named = ", ".join(without)
        notes.append(f"No interval, because the value {why}: {named}.")
    if by_rows:
        counts = ", ".join(dict.fromkeys(f"{rows:,}" for rows in by_rows.values()))
        named = ", ".join(by_rows)
        notes.append(f"The value {why}, and the interval is over {counts} test rows: {named}.")
    # Reason -> pairs that it leaves without a test.
    each_repeats = f"each run has the same result for all {c.over}"
    same_difference = f"the difference is the same for all {c.over}"
    untested: dict[str, list[str]] = {each_repeats: [], same_difference: []}
    for pair in c.pairs:
        words = f"{pair.one} and {pair.other}"
        both_same = pair.one in same and pair.other in same
        if len(pair.blocks) == 1:
            block = pair.blocks[0]
            notes.append(
                f"{words} have only one of the {c.over} in common ({block}), which is too few for a test."
            )
        elif pair.p is not None:
            continue
        elif both_same and c.over in ("seeds", "clients"):
            untested[each_repeats].append(words)
        else:
            untested[same_difference].append(words)
    for reason, pairs in untested.items():
        if pairs:
            named = "; ".join(pairs)
            notes.append(f"{named} not tested, because {reason}.")
    return notes


MOST_NAMED = 6
"""Maximum number of names in a note."""

Cells = Mapping[str, Mapping[str, float | None]]
"""Treatment -> block -> value."""
RunsByName = Mapping[str, Sequence[StoredRun]]
"""Name of a treatment -> its runs."""
NamedValues = tuple[Sequence[str], Floats]
"""Names of a run's blocks, and the run's values in these blocks."""

_PROTOCOL = {
    "global": "one global model",
    "personalised": "personal models on each client's own test rows",
    "everywhere": "personal models on all test rows",
}
"""Protocol of a result -> the models that are scored, in words."""
_PER_SEED: dict[str, Callable[[Any], Any]] = {
    "accuracy": lambda r: r["accuracy"]["per_seed"],
    "client_mean": lambda r: score_of(r, "client-mean").per_seed,
    "pooled": lambda r: score_of(r, "pooled").per_seed,
    "macro_f1": lambda r: r["macro_f1"]["per_seed"],
}
"""Metric -> function that reads the values of all seeds from a result."""
_PER_RUN: dict[str, Callable[[Any], Any]] = {
    "accuracy": lambda r: r["accuracy"]["mean"],
    "macro_f1": lambda r: r["macro_f1"]["mean"],
    "client_mean": lambda r: score_of(r, "client-mean").mean,
    "pooled": lambda r: score_of(r, "pooled").mean,
    "worst10": lambda r: r["fairness"]["worst10"],
    "worst20": lambda r: r["fairness"]["worst20"],
    "worst40": lambda r: r["fairness"]["worst40"],
    "best10": lambda r: r["fairness"]["best10"],
}
"""Metric -> function that reads the mean over seeds from a result."""
METRICS = {"seeds": tuple(_PER_SEED), "clients": ("accuracy",), "settings": tuple(_PER_RUN)}
"""Unit of the tests -> metrics that a stored result has for each seed, client or setting."""


@dataclass(frozen=True)
class PairedBlocks:
    """Values of treatments in blocks.

    Attributes:
        setting: dataset and partition in words; over settings, their number.
        names: of the T treatments, all different.
        blocks: names of the B blocks.
        values: [T, B] fractions. Over seeds they are NaN where a treatment has no value for a seed; over other blocks
            there is no NaN.
        notes: sentences on treatments and blocks that were left out, and on other differences between the treatments.
        runs: name of a treatment -> its runs.
        validation: [T] mean accuracies of their runs on validation rows; None where a run has no such rows.
    """

    setting: str
    names: tuple[str, ...]
    blocks: tuple[str, ...]
    values: Floats
    notes: tuple[str, ...] = ()
    runs: RunsByName = field(default_factory=dict)
    validation: tuple[float, ...] | None = None


def check_metric(metric: str, over: str) -> None:
    """Refuse a metric that is unknown, or that results do not hold for every block.

    Raises UsageError, with the reason.
    """
    if over not in METRICS:
        raise unknown("--over", over, METRICS)
    if metric not in _PER_RUN:
        raise unknown("score", metric, _PER_RUN)
    if metric not in METRICS[over]:
        block = over.removesuffix("s")
        known = ", ".join(METRICS[over])
        raise UsageError(
            f"The score {metric} cannot be compared over {over}. Such a comparison needs a value for each {block}, but "
            f"a result contains only the mean of {metric} over seeds.",
            f"Use --over settings with this score. Scores for --over {over}: {known}.",
        )


def scored_by(entries: Sequence[StoredRun], metric: str, over: str) -> str:
    """The metric of a table. ``accuracy`` becomes the score that is comparable for all of these runs.

    Over clients it stays ``accuracy``, because a client has only one.
    """
    if metric != "accuracy" or over == "clients":
        return metric
    return METRIC_OF_SCORE[score_for(e.result for e in entries)]


def within(
    entries: Sequence[StoredRun],
    where: str,
    metric: str,
    over: str,
    names: Sequence[str] | None = None,
) -> PairedBlocks:
    """Runs of one setting over seeds or clients, with ``names`` or the shortest labels that tell them apart.

    ``where`` is the setting in words.

    Raises UsageError when fewer than two runs have values, no two runs share a seed, or no client is common to all.
    """
    runs = dict(zip(names or labels(entries), entries, strict=True))
    rows: dict[str, NamedValues]
    if over == "clients":
        rows = {name: (e.clients.names, e.clients.accuracy) for name, e in runs.items()}
    else:
        rows = values_of_seeds(runs, _PER_SEED[metric])
    empty = [name for name, (_, row) in rows.items() if np.isnan(row).all()]
    kept = {name: [run] for name, run in runs.items() if name not in empty}
    if len(kept) < 2:
        raise UsageError(
            f"{where}: a comparison needs two runs with a value of {metric}, but found {len(kept)}.",
            "Train another method on the same dataset and partition:  fedcache train --method fed3r",
        )
    blocks, values = _aligned([rows[name] for name in kept])
    known = ~np.isnan(values)
    notes = _not_alike(kept, metric)
    if empty:
        notes.append(f"Left out, because values are missing: {_some(empty)}.")
    # Blocks that are ``used`` have a value in the table. Blocks that are ``shared`` give a difference of two runs.
    if over == "clients":
        # Only clients that every run scored are compared.
        used = known.all(axis=0)
        shared = used
        hint = "Compare them over seeds:  --over seeds"
        for without, clients in _lacking([*kept], blocks, known).items():
            notes.append(
                f"Clients left out, because they have no value in {without}: {_some(clients)}."
            )
        notes += _seeds_differ(kept)
    else:
        # Every seed of a run is used, also one that no other run has.
        used = known.any(axis=0)
        shared = known.sum(axis=0) >= 2
        hint = "Train all runs with the same --seeds, or give runs that have seeds in common."
        notes += merged_notes(kept)
    if not shared.any():
        held = []
        for name, row in zip(kept, known, strict=True):
            blocks_of_run = _some(list(itertools.compress(blocks, row)))
            held.append(f"{name}: {blocks_of_run}")
        if len(held) > MOST_NAMED:
            held[MOST_NAMED:] = [".."]
        block = over.removesuffix("s")
        listed = "; ".join(held)
        raise UsageError(
            f"{where}: the runs have no {block} in common ({listed}).",
            hint,
        )
    return PairedBlocks(
        setting=where,
        names=tuple(kept),
        blocks=tuple(blocks[int(i)] for i in np.flatnonzero(used)),
        values=values[:, used],
        notes=tuple(notes),
        runs=kept,
        validation=_validation(kept, metric, over),
    )


def by_seed(run: StoredRun, values: Iterable[Any]) -> dict[int, Any]:
    """Seed -> value, for values of a run in the order of its seeds."""
    return dict(zip(run.seeds, values, strict=False))


def values_of_seeds(
    runs: Mapping[str, StoredRun], take: Callable[[Any], Any]
) -> dict[str, NamedValues]:
    """Seeds and values of each run.

    A run that does not depend on the seed gets its value for every seed of the other runs.

    Args:
        runs: of one setting, by name.
        take: reads the values of a result, in the order of its seeds.
    """
    of_run = {name: by_seed(run, take(run.result)) for name, run in runs.items()}
    fixed = fixed_runs(runs)
    seeds_of_others: list[int] = []
    for name, values in of_run.items():
        if name not in fixed:
            seeds_of_others += values
    if seeds_of_others:
        for name in fixed:
            first = next(iter(of_run[name].values()))
            of_run[name] = dict.fromkeys(seeds_of_others, first)
    rows: dict[str, NamedValues] = {
        name: (list(map(str, values)), np.array(list(values.values()), float))
        for name, values in of_run.items()
    }
    return rows


def fixed_runs(runs: Mapping[str, StoredRun]) -> list[str]:
    """Names of the runs that do not depend on the seed; [] if all runs have the same seeds, so that it does not matter.

    [] also if the runs have different partitions.
    """
    entries = list(runs.values())
    different_seeds = {tuple(e.seeds) for e in entries}
    if len(different_seeds) < 2 or not all(same_partition(entries[0], e) for e in entries):
        return []
    return [name for name, e in runs.items() if not depends_on_seed(e)]


def merged_notes(runs: RunsByName) -> list[str]:
    """Notes on treatments that merge several runs of equal settings, and on their figures that are not exact means."""
    notes = []
    for name, row in runs.items():
        for run in row:
            if not isinstance(run, MergedRun):
                continue
            seeds = compact(run.seeds)
            which = _some([member.digest[:8] for member in run.members])
            members = len(run.members)
            notes.append(
                f"{name} combines {members} runs with equal settings and the seeds {seeds} ({which})."
            )
            if not run.exact:
                notes.append(
                    f"{name}: these runs share some seeds. Accuracy uses each seed once. Costs, and "
                    "results per client and class, are means over the runs, weighted by the number of seeds "
                    "that each run adds."
                )
    return notes


def _aligned(rows: Sequence[NamedValues]) -> tuple[Sequence[str], Floats]:
    """Names of the blocks of all runs in the order of their first appearance, and their values [T, B]; NaN for none.

    Args:
        rows: names and values of each run.
    """
    first, _ = rows[0]
    # The usual case, which is fast with many clients: all runs have the same names in the same order.
    if all(names == first for names, _ in rows[1:]):
        return _distinct(first), np.stack([values for _, values in rows])
    distinct = [_distinct(names) for names, _ in rows]
    blocks = list(dict.fromkeys(itertools.chain(*distinct)))
    place_of = {name: i for i, name in enumerate(blocks)}
    table = np.full((len(rows), len(blocks)), np.nan)
    for run, (_, values) in enumerate(rows):
        places = [place_of[name] for name in distinct[run]]
        table[run, places] = values
    return blocks, table


def _lacking(
    names: Sequence[str], blocks: Sequence[str], known: NDArray[np.bool_]
) -> dict[str, list[str]]:
    """Names of runs, in one text -> the blocks for which exactly these runs have no value; ``known`` is [T, B]."""
    lost = np.flatnonzero(~known.all(0))
    if not len(lost):
        return {}
    # Blocks that the same runs lack have equal columns.
    kinds, first, kind_of = np.unique(
        known[:, lost], axis=1, return_index=True, return_inverse=True
    )
    found = {}
    for kind in np.argsort(first).tolist():
        without = _some(list(itertools.compress(names, ~kinds[:, kind])))
        found[without] = [blocks[i] for i in lost[kind_of == kind].tolist()]
    return found


def across(entries: Sequence[StoredRun], metric: str) -> PairedBlocks:
    """Equal runs over settings: one value for each run, its mean over seeds.

    Raises UsageError for fewer than two treatments or settings, and for two equal runs in one setting.
    """
    groups = by_setting(entries)
    facts = differing(entries)
    wheres = setting_names(groups)
    # Label -> setting in words -> run.
    by_label: dict[str, dict[str, StoredRun]] = {}
    for where, group in zip(wheres, groups, strict=True):
        for entry in group:
            label = label_of(entry, facts)
            row = by_label.setdefault(label, {})
            before = row.setdefault(where, entry)
            if before is not entry:
                both = []
                for one in (before, entry):
                    seeds = ",".join(map(str, one.seeds))
                    digest = one.digest[:8]
                    both.append(f"{digest} (seeds {seeds})")
                twins = " and ".join(both)
                raise UsageError(
                    f"{label} has two runs on {where}: {twins}.",
                    "Give the runs to use:  fedcache compare RUN RUN ... --over settings",
                )
    runs, blocks, lost = _without_holes(by_label, wheres, metric)
    if len(runs) < 2 or len(blocks) < 2:
        methods = counted(len(by_label), "method")
        settings = counted(len(wheres), "setting")
        raise UsageError(
            f"A comparison over settings needs two methods and two settings, with {metric} for both methods in both "
            f"settings. The given runs ({methods}, {settings}) do not contain this.",
            "Train the same methods on another dataset or partition, or leave --over settings out.",
        )
    kept = [e for row in runs.values() for e in row]
    # Fewer facts may differ between the remaining runs, so that shorter names are enough.
    facts = differing(kept)
    short = {label_of(row[0], facts): row for row in runs.values()}
    if len(short) == len(runs):
        runs = short
    datasets = len({e.setting[0] for e in kept})
    count = len(blocks)
    where = f"{count} settings of {counted(datasets, 'dataset')}"
    notes = []
    if datasets < count:
        notes.append(f"{where} are not independent, so the true p is larger.")
    return _one_value_each(where, runs, blocks, metric, lost, notes)


def over_held_out(group: HeldOutGroup, metric: str) -> PairedBlocks:
    """Leave-one-out runs over the held-out values: one value for each run, its mean over seeds.

    Raises UsageError unless two treatments have runs for the same two held-out values.
    """
    runs, values, lost = _without_holes(group.rows(), group.values, metric)
    if len(runs) < 2 or len(values) < 2:
        raise UsageError(
            f"{group.title}: a comparison needs two methods and two values of {group.column}, with {metric} for both "
            "methods at both values. The given runs do not contain this.",
            "Train the same methods again, with the option --hold-out each.",
        )
    notes = [
        *merged_notes(runs),
        f"Each {group.column} is a separate test set, but the training sets overlap, so the true p is larger.",
    ]
    return _one_value_each(group.title, runs, values, metric, lost, notes)


def _validation(runs: RunsByName, metric: str, over: str) -> tuple[float, ...] | None:
    """Validation accuracy by which treatments are chosen, in the score of the comparison; None where a run lacks it."""
    score = metric.replace("_", "-")
    if score not in SCORES and over == "clients":
        score = "client-mean"
    elif score not in SCORES:
        score = score_for(e.result for e in itertools.chain(*runs.values()))
    made = []
    for row in runs.values():
        mean, _ = mean_std([validation_value(e.result, score) for e in row])
        if mean is None:
            return None
        made.append(mean)
    return tuple(made)


def complete(cells: Cells, blocks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Treatments and blocks without a missing value.

    The treatment or block that lacks the largest share of its values is removed, until no value is missing. Of equal
    ones the last is removed, and a treatment before a block.
    """
    names = list(cells)
    remaining = list(blocks)
    while names and remaining:
        # [T, B]: whether each treatment lacks a value for each block.
        missing = np.array(
            [[cells[name].get(block) is None for block in remaining] for name in names]
        )
        if not missing.any():
            break
        by_name = missing.mean(1)
        by_block = missing.mean(0)
        if by_name.max() >= by_block.max():
            worst = np.flatnonzero(by_name == by_name.max())
            del names[worst[-1]]
        else:
            worst = np.flatnonzero(by_block == by_block.max())
            del remaining[worst[-1]]
    return names, remaining


def _without_holes(
    table: Mapping[str, Mapping[str, StoredRun]], blocks: Sequence[str], metric: str
) -> tuple[dict[str, list[StoredRun]], list[str], list[str]]:
    """Runs [T][B] of the treatments and blocks that have all values, these blocks, and the names that are left out."""
    take = _PER_RUN[metric]
    cells = {}
    for name, row in table.items():
        cells[name] = {block: take(run.result) for block, run in row.items()}
    names, kept = complete(cells, blocks)
    runs = {name: [table[name][block] for block in kept] for name in names}
    lost = [block for block in blocks if block not in kept]
    lost += [name for name in cells if name not in names]
    return runs, kept, lost


def _one_value_each(
    where: str,
    runs: RunsByName,
    blocks: Sequence[str],
    metric: str,
    lost: Sequence[str],
    more_notes: Sequence[str],
) -> PairedBlocks:
    """The paired blocks of runs [T][B]; the value of a run is its mean over seeds. ``lost`` are names left out."""
    notes = _not_alike(runs, metric)
    if lost:
        notes.append(f"Left out, because values are missing: {_some(lost, '; ')}.")
    notes += _seeds_differ(runs)
    take = _PER_RUN[metric]
    values = [[take(run.result) for run in row] for row in runs.values()]
    return PairedBlocks(
        setting=where,
        names=tuple(runs),
        blocks=tuple(blocks),
        values=np.array(values, np.float64),
        notes=(*notes, *more_notes),
        runs=runs,
        validation=_validation(runs, metric, "settings"),
    )


def _distinct(names: Sequence[str]) -> list[str]:
    """Names of clients; a repeated name gets a number, so that all names are different."""
    seen = Counter[str]()
    made = []
    for name in names:
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name} #{seen[name]}"
        made.append(name)
    return made


def _not_alike(runs: RunsByName, metric: str) -> list[str]:
    """Sentences on treatments that sites scored, that were scored in another way, or that approximate their method."""
    every = list(itertools.chain(*runs.values()))
    notes = []
    if any(e.claimed for e in every):
        notes.append(CLAIMED)
    kinds: dict[str, list[str]] = {}
    approximations = []
    for name, row in runs.items():
        kind = str(row[0].result.get("protocol"))
        kinds.setdefault(kind, []).append(name)
        if any(e.result.get("fidelity") not in (None, "exact") for e in row):
            approximations.append(name)
    # All kinds but the most common one are listed with their runs; that one is "all others".
    if len(kinds) > 1:
        usual = max(kinds, key=lambda kind: len(kinds[kind]))
        parts = []
        for kind, names in kinds.items():
            if kind != usual:
                words = _PROTOCOL.get(kind, kind)
                parts.append(f"{_some(names)}: {words}")
        head = "Runs are not scored alike"
        if metric in ("client_mean", "pooled"):
            head = "Runs have models of different kinds"
        others = _PROTOCOL.get(usual, usual)
        scored = "; ".join(parts)
        notes.append(f"{head}. {scored}; all others: {others}.")
    notes += _drawn_apart(runs)
    unlike = unlike_tests(e.result for e in every)
    if unlike is not None:
        notes.append(unlike)
    rates = one_learning_rate(e.result for e in every)
    if rates is not None:
        notes.append(rates)
    if approximations:
        notes.append(f"These runs approximate their method: {_some(approximations)}.")
    return notes


def _drawn_apart(runs: RunsByName) -> list[str]:
    """A note where runs were scored over different numbers of clients (``--eval-clients``); [] where they were not."""
    kinds: dict[str, list[str]] = {}
    for name, row in runs.items():
        kind = "all"
        drawn = row[0].result["accuracy"].get("eval_clients")
        if drawn:
            scored = drawn[0]["scored"]
            kind = f"{scored:,} drawn"
        kinds.setdefault(kind, []).append(name)
    if len(kinds) < 2:
        return []
    parts = "; ".join(f"{_some(names)}: {kind}" for kind, names in kinds.items())
    return [f"Runs are scored on different numbers of clients. {parts}."]


def _seeds_differ(runs: RunsByName) -> list[str]:
    """A note where runs have different seeds; [] where they have the same ones."""
    different = {tuple(e.seeds) for e in itertools.chain(*runs.values())}
    if len(different) < 2:
        return []
    counts = sorted(map(len, different))
    number = str(counts[0])
    if counts[0] < counts[-1]:
        number = f"{counts[0]} to {counts[-1]}"
    return [
        f"Each value is the mean over the run's own seeds ({number}), and runs have different seeds."
    ]


def _some(names: Sequence[str], between: str = ", ") -> str:
    """The first names, and the number of the others."""
    words = between.join(names[:MOST_NAMED])
    if len(names) > MOST_NAMED:
        words += f" and {len(names) - MOST_NAMED} more"
    return words


ROW_TESTS = {"mcnemar": "McNemar's exact test", "z": "z-test of the paired rows"}
"""Test over test rows -> its name."""
PERSONAL = ("personalised", "everywhere")
"""Protocols of results with a model for each client."""
MOST_EXACT = 2000
"""Maximum number of differing rows for which the binomial is summed in whole numbers, which takes 1 ms. For more rows,
scipy is imported, which takes a quarter of a second the first time."""


@dataclass(frozen=True)
class RowDifference:
    """One run minus another over test rows.

    Attributes:
        rows: number of distinct test rows that both runs were scored on.
        gained: number of rows that the first run classifies correctly more often, over clients and seeds.
        lost: number of rows that the other run classifies correctly more often.
        difference: of the accuracies, a fraction.
        interval: of the difference, over test rows: difference -+ z sqrt(R / (R - 1) sum_r e_r^2), with
            e_r = d_r - difference w_r, where row r adds d_r to the difference and has weight w_r; None for one row.
        p: two-sided. If all rows that differ have the same weight, it is McNemar's exact test: the binomial of
            ``gained`` among ``gained + lost``. Otherwise it is a z-test with the variance above.
        test: mcnemar | z.
        holm: p corrected for all pairs of the comparison.
    """

    rows: int
    gained: int
    lost: int
    difference: float
    interval: Interval | None
    p: float
    test: str
    holm: float | None = None


def row_difference(
    one: StoredRun, other: StoredRun, metric: str, level: float
) -> RowDifference | None:
    """``one`` minus ``other``, over the pairs of ``paired_seeds``.

    None where a run holds no test rows, where the two were not scored on the same rows, and for a metric that is not a
    sum over rows.

    Args:
        one: a run.
        other: a run of the same dataset and partition.
        metric: accuracy (the primary metric of both), client_mean or pooled.
        level: of the interval.

    Raises:
        DamagedRunError for test rows that were changed.
    """
    # The primary metric of personal models is the mean over clients. For global models each test row counts once.
    personal = [run.result.get("protocol") in PERSONAL for run in (one, other)]
    if metric == "accuracy" and all(personal):
        metric = "client_mean"
    elif metric == "accuracy" and not any(personal):
        metric = "once"
    if metric not in ("client_mean", "pooled", "once"):
        return None
    ours = one.test_rows or {}
    theirs = other.test_rows or {}
    per_seed = []
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
"""Row numbers, contribution of each row to a sum over rows, and weight of each row; the weights sum to 1."""


def _of_seed(ours: TestRows, theirs: TestRows, metric: str) -> Rows | None:
    """The rows of one seed with their differences; None where the two runs were not scored on the same rows."""
    same_rows = np.array_equal(ours.rows, theirs.rows)
    if not same_rows or not np.array_equal(ours.scored, theirs.scored):
        return None
    if not np.allclose(ours.weight, theirs.weight, rtol=1e-9, atol=0.0):
        return None
    if metric == "client_mean":
        return ours.rows, ours.share - theirs.share, ours.weight
    apart = (ours.right - theirs.right).astype(np.float64)
    if metric == "pooled":
        total = ours.scored.sum()
        return ours.rows, apart / total, ours.scored / total
    # One model predicts the same for every client, so each row counts once.
    count = len(ours.rows)
    return ours.rows, apart / ours.scored / count, np.full(count, 1.0 / count)


def _joined(seeds: list[Rows]) -> tuple[Floats, Floats]:
    """Contribution and weight of each test image, averaged over seeds. A test image of several seeds counts once."""
    # The numbers of the rows are needed only to join several seeds.
    if len(seeds) == 1:
        return seeds[0][1:]
    numbers, adds, weights = (np.concatenate(column) for column in zip(*seeds, strict=True))
    rows, place = np.unique(numbers, return_inverse=True)
    mean_adds = np.bincount(place, adds, len(rows)) / len(seeds)
    mean_weights = np.bincount(place, weights, len(rows)) / len(seeds)
    return mean_adds, mean_weights


def _spread(adds: Floats, weights: Floats) -> float:
    """Standard error of a sum over R rows of a sample: sqrt(R / (R - 1) sum_r e_r^2).

    The residual of row r is e_r = adds_r - weights_r sum(adds).
    """
    count = len(adds)
    residuals = adds - adds.sum() * weights
    return float(np.sqrt(count / (count - 1) * (residuals**2).sum()))


def _half(adds: Floats, weights: Floats, level: float) -> float:
    """Half of the normal interval of a sum over rows of a sample."""
    return NormalDist().inv_cdf(0.5 + level / 2.0) * _spread(adds, weights)


def rows_of_run(
    run: StoredRun, metric: str, level: float, seeds: Sequence[int] | None = None
) -> RowsInterval | None:
    """Number of test rows of a run with models of clients, and the interval of its accuracy over these rows.

    The interval is accuracy -+ z sqrt(R / (R - 1) sum_r (a_r - accuracy w_r)^2). Row r has weight w_r and adds a_r to
    the accuracy. None for a run with one model, and for a run that holds no test rows.

    Args:
        run: of one seed, or of several seeds with the same accuracy.
        metric: accuracy | client_mean | pooled; for models of clients the first two are the same.
        level: of the interval.
        seeds: the seeds of the run that are used; None for all.

    Raises:
        DamagedRunError for test rows that were changed.
    """
    if run.result.get("protocol") not in PERSONAL:
        return None
    if metric not in ("accuracy", "client_mean", "pooled"):
        return None
    made = []
    for seed, found in (run.test_rows or {}).items():
        if seeds is not None and seed not in seeds:
            continue
        if metric == "pooled":
            total = found.scored.sum()
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
    # C(n, 0) = 1, and C(n, i) = C(n, i - 1) (n - i + 1) / i.
    ways = 1
    tail = 1
    for i in range(1, fewer + 1):
        ways = ways * (throws - i + 1) // i
        tail += ways
    return min(1.0, 2 * tail / (1 << throws))


def _tested(seeds: list[Rows], level: float) -> RowDifference:
    """The difference over the rows of all seeds, with its interval and test."""
    adds, weights = _joined(seeds)
    count = len(adds)
    # A contribution that is only a rounding error counts as 0.
    adds = np.where(np.abs(adds) < 10.0**-DIGITS / count, 0.0, adds)
    difference = float(adds.sum())
    gained = int((adds > 0).sum())
    lost = int((adds < 0).sum())
    ends = None
    p = 1.0
    test = "mcnemar"
    if count > 1:
        half = _half(adds, weights, level)
        ends = (difference - half, difference + half)
        sizes = np.abs(adds[adds != 0])
        if not len(sizes) or np.ptp(sizes) <= 1e-9 * sizes.max():
            p = sign_test(gained, lost)
        else:
            test = "z"
            spread = _spread(adds, weights)
            p = 0.0
            if spread > 0:
                p = math.erfc(abs(difference) / spread / math.sqrt(2.0))
    return RowDifference(count, gained, lost, difference, ends, p, test)


MOST_SEEDS = 10
"""Maximum number of seeds that are listed one by one."""


def paired_seeds(one: StoredRun, other: StoredRun) -> list[tuple[int, int]]:
    """Pairs of a seed of one run and a seed of another that are compared.

    Equal seeds are a pair if both runs trained on the same partition. If a run does not depend on the seed, its first
    seed is also paired with every seed that only the other run has.
    """
    ours = one.seeds
    theirs = other.seeds
    here = _partition_of_seed(one)
    there = _partition_of_seed(other)
    common = [seed for seed in ours if seed in theirs]
    pairs = [(seed, seed) for seed in common if here.get(seed) == there.get(seed)]
    if same_partition(one, other):
        if not depends_on_seed(one):
            pairs += [(ours[0], seed) for seed in theirs if seed not in ours]
        if not depends_on_seed(other):
            pairs += [(seed, theirs[0]) for seed in ours if seed not in theirs]
    return pairs


def differences_of_seeds(one: StoredRun, other: StoredRun, score: str) -> Floats:
    """[S] score of one run minus that of another, for each pair of seeds; pairs without a score are left out."""
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
    """The seeds over which two runs are compared; if only one of them depends on the seed, the seeds of that run."""
    pairs = paired_seeds(one, other)
    ours = [mine for mine, _ in pairs]
    theirs = [its for _, its in pairs]
    if len(set(ours)) >= len(set(theirs)):
        return ours
    return theirs


def same_partition(one: StoredRun, other: StoredRun) -> bool:
    """Whether all seeds of both runs are trained and tested on the same rows."""
    return len({*_digests(one), *_digests(other)}) == 1


def depends_on_seed(run: StoredRun) -> bool:
    """Whether another seed may give other figures.

    A run with several seeds does not depend on them if all gave the same figures on one partition. For a run with one
    seed, the method says whether training draws random numbers.
    """
    if len(set(_digests(run))) != 1:
        return True
    if len(run.seeds) > 1:
        return any(len(set(score_of(run.result, name).per_seed)) > 1 for name in WORDS)
    return not _draws_nothing(run.result)


def _digests(run: StoredRun) -> Sequence[str]:
    """Digests of the partitions of a run, usually one for each seed."""
    digests: Sequence[str] = run.result.get("partition", {}).get("digests", ())
    return digests


def _partition_of_seed(run: StoredRun) -> dict[int, str]:
    """Digest of the partition of each seed; {} where a result does not hold one for each."""
    digests = _digests(run)
    if len(run.seeds) == len(digests):
        return by_seed(run, digests)
    return {}


def _draws_nothing(result: Record) -> bool:
    """Whether a run uses no random numbers: all clients take part and are scored, without attacks or noise."""
    if result.get("participation") not in ("all", "100%"):
        return False
    if any(result.get(key) for key in ("participants", "timing", "trust")):
        return False
    if result["accuracy"].get("eval_clients"):
        return False
    return draws_nothing(result["method"], result["hyperparameters"])


def compact(seeds: Sequence[object]) -> str:
    """Seeds in words: each of them, or their number if there are more than ``MOST_SEEDS``."""
    if len(seeds) > MOST_SEEDS:
        return f"{len(seeds)} seeds"
    return ", ".join(map(str, seeds))
