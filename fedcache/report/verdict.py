"""Which run of a setting is best, by how much, how sure that is and what it costs, in sentences for a first screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fedcache.report.caution_words import unlike_tests
from fedcache.report.comparison import (
    common_seeds,
    compact,
    differences_of_seeds,
    row_difference,
    rows_of_run,
)
from fedcache.report.drawing import percent, size
from fedcache.report.find_runs import StoredRun, facts
from fedcache.report.statistics import (
    LEAST_BLOCKS,
    Floats,
    constant,
    student_half,
    student_quantile,
)
from fedcache.runs.score import (
    DIGITS,
    LEVEL,
    has_validation,
    order_of_run,
    rows_interval,
    score_of,
    validation_value,
)

MOST_NAMED = 4
MOST_LETTERS = 90
METRIC = {"own": "accuracy", "client-mean": "client_mean", "pooled": "pooled"}
Named = Sequence[tuple[str, StoredRun]]


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval: fractions, and what was sampled (``5 seeds``, ``3,044 test rows``, ``20 clients``)."""

    value: float
    low: float
    high: float
    over: str

    @property
    def above_zero(self) -> bool:
        """Whether the interval lies above 0."""
        return self.low > 0.0


@dataclass(frozen=True)
class Verdict:
    """What a first screen says of a setting.

    Attributes:
        title: words for the setting.
        label: the run that stands first, "" where none was scored.
        digest: of that run.
        chosen: whether validation accuracy chose it; else it is the highest by test rows.
        headline: one sentence: which, how much better than the second, and its cost.
        word: Sure | Not sure | Not known | Contradicted | Alone | Level.
        sure: why, and by which rows the order stands.
        cost: what a client sends and how long training took; what is as good and cheaper.
        reference: what a method that may see all rows in one place reaches; "" without one.
    """

    title: str
    label: str
    digest: str
    chosen: bool
    headline: str
    word: str = ""
    sure: str = ""
    cost: str = ""
    reference: str = ""


def sent_bytes(entry: StoredRun) -> float:
    """Bytes that one client sends in one seed's run, the mean over clients."""
    up = float(entry.result["traffic"]["exact"]["up_bytes"])
    return (
        up
        / max(1, len(entry.result["seeds"]))
        / max(1, int(entry.result["partition"].get("clients") or 1))
    )


def seconds_of(entry: StoredRun) -> float | None:
    """Seconds of one seed's training."""
    if entry.seconds is None:
        return None
    return entry.seconds / max(1, len(entry.result["seeds"]))


def ranked(entries: Sequence[StoredRun], score: str) -> list[StoredRun]:
    """Runs by falling validation accuracy, without such rows by falling test accuracy; of equals as in a grid."""
    held = has_validation(e.result for e in entries)

    def place(entry: StoredRun) -> tuple[object, ...]:
        found = (
            validation_value(entry.result, score) if held else score_of(entry.result, score).mean
        )
        return (
            -round(-1.0 if found is None else found, DIGITS),
            order_of_run(entry.result),
            entry.digest,
        )

    return sorted(entries, key=place)


def uncertainty(entry: StoredRun, score: str, level: float = LEVEL) -> Estimate | None:
    """A run's score with an interval: over seeds where it varies with them, else over test rows, else over clients."""
    found = score_of(entry.result, score)
    if found.mean is None:
        return None
    known = np.array([v for v in found.per_seed if v is not None])
    if len(known) == len(found.per_seed) >= LEAST_BLOCKS and not constant(known):
        return _student(known, level, "seeds")
    # Of clients that are all tested on the same rows the mean over clients is the model's own accuracy.
    alike = math.isclose(found.mean, entry.result["accuracy"]["mean"], abs_tol=10.0**-DIGITS)
    rows = rows_interval(entry.result, level) if alike else None
    if rows is not None:
        return Estimate(found.mean, rows[1], rows[2], f"{rows[0]:,} test rows")
    of_clients = rows_of_run(entry, METRIC[score], level)
    if of_clients is not None and of_clients[1] <= found.mean <= of_clients[2]:
        return Estimate(found.mean, of_clients[1], of_clients[2], f"{of_clients[0]:,} test rows")
    values = _client_scores(entry, found.mean)
    if values is None:
        return None
    return _student(values, level, "clients")


def lead(one: StoredRun, other: StoredRun, score: str, level: float = LEVEL) -> Estimate | None:
    """How far one run's score lies above another's.

    Paired over seeds (three or more) where the difference varies with them; else paired over test rows; of
    earlier results without rows, of two models that are fixed, as of two independent samples of rows, which is
    cautious; else paired over clients. None where nothing repeats.
    """
    a, b = (score_of(e.result, score) for e in (one, other))
    if a.mean is None or b.mean is None:
        return None
    gaps = _over_seeds(one, other, score)
    if gaps is not None:
        return _student(gaps, level, "seeds")
    paired = differences_of_seeds(one, other, score)
    over_rows = row_difference(one, other, METRIC[score], level) if len(paired) else None
    same = over_rows is not None and math.isclose(
        over_rows.difference, float(paired.mean()), abs_tol=1e-9
    )
    if same and over_rows is not None and over_rows.interval is not None:
        return Estimate(over_rows.difference, *over_rows.interval, f"{over_rows.rows:,} test rows")
    held = [rows_interval(e.result, level) if score == "own" else None for e in (one, other)]
    if held[0] is not None and held[1] is not None:
        rows = min(held[0][0], held[1][0])
        gap = a.mean - b.mean
        half = _normal(level) * math.sqrt(sum(p * (1 - p) for p in (a.mean, b.mean)) / rows)
        return Estimate(gap, gap - half, gap + half, f"{rows:,} test rows")
    mine = _client_scores(one, a.mean)
    theirs = _client_scores(other, b.mean)
    if mine is None or theirs is None or list(one.clients.names) != list(other.clients.names):
        return None
    return _student(one.clients.accuracy - other.clients.accuracy, level, "clients")


def _over_seeds(one: StoredRun, other: StoredRun, score: str) -> Floats | None:
    """[S] differences over paired seeds; None of fewer than three, or where all are equal."""
    gaps = differences_of_seeds(one, other, score)
    if len(gaps) >= LEAST_BLOCKS and not constant(gaps):
        return gaps
    return None


def _client_scores(entry: StoredRun, mean: float) -> Floats | None:
    """[M] accuracies of clients whose mean is this score; None of fewer than three, or where some are not known."""
    values = np.asarray(entry.clients.accuracy, np.float64)
    if len(values) < LEAST_BLOCKS or np.isnan(values).any() or constant(values):
        return None
    if math.isclose(float(values.mean()), mean, abs_tol=1e-6):
        return values
    return None


def _student(values: Floats, level: float, over: str) -> Estimate | None:
    """Student's interval of the mean of [B] values; None where they do not vary."""
    if np.isnan(values).any() or constant(values):
        return None
    mean = float(values.mean())
    half = student_half(values, level)
    return Estimate(mean, mean - half, mean + half, f"{len(values)} {over}")


def _normal(level: float) -> float:
    return NormalDist().inv_cdf(0.5 + level / 2)


def verdict(title: str, named: Named, score: str) -> Verdict:
    """What there is to say of the runs of one setting.

    Args:
        title: words for the setting.
        named: runs with the labels that tell them apart, in any order.
        score: client-mean | pooled | own.
    """
    label = {e.digest: n for n, e in named}
    entries = [e for _, e in named]
    scored = [e for e in entries if score_of(e.result, score).mean is not None]
    takeable = [e for e in scored if not e.pooled_rows]
    field = ranked(takeable or scored, score)
    if not field:
        return Verdict(title, "", "", False, "No run here was scored on test rows.")
    chosen = has_validation(e.result for e in field)
    best = field[0]
    name = label[field[0].digest]
    equals = [e for e in field[1:] if _same_figures(e, best, score)]
    same = {e.digest for e in equals}
    # The same settings with other seeds are no other run to take.
    rivals = [e for e in field[1:] if e.digest not in same and facts(e) != facts(best)]
    gap = lead(best, rivals[0], score) if rivals else None
    undecided = _not_told_apart(best, rivals, score) if rivals else []
    word, sure = _sure(best, rivals, undecided, gap, label, chosen)
    if equals and not rivals:
        word = "Level"
        sure = (
            "All runs here reached the very same figures; it is the first by method and settings."
        )
    if chosen and (unlike := unlike_tests(e.result for e in field)) is not None:
        sure = f"{sure} {unlike}"
    return Verdict(
        title,
        name,
        best.digest,
        chosen,
        headline=_headline(best, rivals, gap, label, score, chosen) + _equals(equals, label),
        word=word,
        sure=sure,
        cost=_cost(best, undecided, label, score),
        reference=_reference([e for e in scored if e not in field], best, label, score),
    )


def _same_figures(one: StoredRun, other: StoredRun, score: str) -> bool:
    """Whether two runs agree in every figure by which they are told apart."""
    held = [validation_value(e.result, score) for e in (one, other)]
    return held[0] == held[1] and score_of(one.result, score) == score_of(other.result, score)


def _equals(equals: Sequence[StoredRun], label: dict[str, str]) -> str:
    if not equals:
        return ""
    names = ", ".join(label[e.digest] for e in equals[:2]) + (", ..." if len(equals) > 2 else "")
    return f" {len(equals)} other{'' if len(equals) == 1 else 's'} ({names}) reached the very same figures."


def _headline(
    best: StoredRun,
    rivals: Sequence[StoredRun],
    gap: Estimate | None,
    label: dict[str, str],
    score: str,
    chosen: bool,
) -> str:
    accuracy = score_of(best.result, score).mean
    assert accuracy is not None  # nosec B101
    name = label[best.digest]
    held = percent(validation_value(best.result, score))
    by = (
        f"is best by validation accuracy ({held} %) and reaches"
        if chosen
        else "has the highest test accuracy,"
    )
    words = f"{name} {by} {percent(accuracy)} %{' on the test rows' if chosen else ''}"
    if best.claimed:
        words += " as its sites claim"
    if rivals:
        second = score_of(rivals[0].result, score).mean
        assert second is not None  # nosec B101
        difference = 100 * (accuracy - second)
        how = (
            "level with"
            if abs(difference) < 0.005
            else f"{abs(difference):.2f} points " + ("above" if difference > 0 else "below")
        )
        words += f", {how} the second, {label[rivals[0].digest]}"
        # Seeds that only one of them has are in its own accuracy, and in no difference.
        fewer = gap is not None and abs(100 * gap.value - difference) >= 0.005
        if gap is not None and fewer:
            shared = compact(common_seeds(best, rivals[0]))
            words += f", {100 * gap.value:+.2f} over the seeds that both have ({shared})"
        if gap is not None:
            words += f" (95 % interval of the difference {_points(gap)})"
    return f"{words}; {price(best)}."


def _points(gap: Estimate) -> str:
    return f"{100 * gap.low:+.2f} to {100 * gap.high:+.2f}"


def price(entry: StoredRun) -> str:
    """What a client of a run sends, and how long training takes, in words."""
    if entry.pooled_rows:
        return "it needs all rows in one place"
    sent = sent_bytes(entry)
    seconds = seconds_of(entry)
    words = f"a client sends {_bytes(sent)}" if sent else "a client sends nothing"
    return words + ("" if seconds is None else f" and training takes {_seconds(seconds)}")


def _bytes(count: float) -> str:
    if count >= 1000:
        return f"{size(count)}B"
    return f"{count:.0f} B"


def _seconds(value: float) -> str:
    if value < 0.1:
        return "less than 0.1 s"
    if value >= 120:
        return f"{value / 60:.3g} min"
    if value < 10:
        return f"{value:.2g} s"
    return f"{value:.0f} s"


def _sure(
    best: StoredRun,
    rivals: Sequence[StoredRun],
    undecided: Sequence[StoredRun],
    gap: Estimate | None,
    label: dict[str, str],
    chosen: bool,
) -> tuple[str, str]:
    """How sure the order is, in a word, and why: which others are not told apart, and by which rows it stands."""
    if not rivals:
        return "Alone", "There is no other run here to compare it with."
    said: list[str] = []
    if gap is None:
        word = "Not known"
        said.append(
            "Nothing repeats here from which an interval of the difference could be had; `--seeds 0-4` gives one."
        )
    elif gap.above_zero and not undecided:
        word = "Sure"
        said.append(f"Its lead over every other is larger than chance among {gap.over} explains.")
    elif gap.high < 0:
        word = "Contradicted"
        said.append(
            f"On the test rows the second is better, by more than chance among {gap.over} explains."
        )
    else:
        word = "Not sure"
        others = [label[e.digest] for e in undecided] or [label[rivals[0].digest]]
        named = max(1, min(MOST_NAMED, MOST_LETTERS // max(map(len, others))))
        names = ", ".join(others[:named]) + (", ..." if len(others) > named else "")
        of = f"{len(others)} of {len(rivals)} others" if len(rivals) > 1 else "the other"
        lies = "lead over" if gap.value >= 0 else "distance from"
        after = f", corrected for {len(rivals)} comparisons" if len(rivals) > 1 else ""
        said.append(f"Chance among {gap.over} can explain its {lies} {of} ({names}){after}.")
    if (
        gap is not None
        and gap.over.endswith("seeds")
        and len(set(best.result["partition"]["digests"])) == 1
    ):
        said.append("All seeds share one partition and its test rows.")
    if not chosen:
        said.append(
            f"No rows were kept to choose by: it is the highest of {len(rivals) + 1} on the rows that score "
            "it, which flatters it (`--validation 0.2` keeps some)."
        )
    return word, " ".join(said)


def _not_told_apart(best: StoredRun, rivals: Sequence[StoredRun], score: str) -> list[StoredRun]:
    """Rivals whose distance from the best has an interval that is not above 0, corrected for their number.

    Of few seeds a rival's own spread is hardly known, so differences over seeds take the typical one: the median
    variance over chi-squared's. Rivals that diverge neither widen the others' nor count as good, being unknown.
    """
    level = 1.0 - (1.0 - LEVEL) / len(rivals)
    over_seeds = {e.digest: g for e in rivals if (g := _over_seeds(best, e, score)) is not None}
    freedom = sum(len(g) - 1 for g in over_seeds.values())
    typical = 0.0
    if over_seeds:
        each = freedom / len(over_seeds)
        typical = (
            float(np.median([g.var(ddof=1) for g in over_seeds.values()]))
            / (1.0 - 2.0 / (9.0 * each)) ** 3
        )
    found = []
    for entry in rivals:
        if (gaps := over_seeds.get(entry.digest)) is not None:
            half = student_quantile(level, freedom) * math.sqrt(typical / len(gaps))
            apart = float(gaps.mean()) > half
        else:
            gap = lead(best, entry, score, level)
            apart = gap is not None and gap.above_zero
        if not apart:
            found.append(entry)
    return found


def _cost(
    best: StoredRun, undecided: Sequence[StoredRun], label: dict[str, str], score: str
) -> str:
    if best.pooled_rows:
        return "It is no federation: nothing travels because all rows lie in one place."
    rounds = int(best.result.get("rounds") or 1)
    sent = sent_bytes(best)
    each = f"{_bytes(sent)} in {rounds} rounds" if rounds > 1 else f"{_bytes(sent)}, once"
    words = f"Each client sends {each}" if sent else "Clients send nothing"
    down = best.result["traffic"]["exact"]["down_bytes"] / max(1, len(best.result["seeds"]))
    down /= max(1, int(best.result["partition"].get("clients") or 1))
    words += (
        f" and receives {_bytes(down)}"
        if down and sent
        else f" and receive {_bytes(down)} each"
        if down
        else ""
    )
    seconds = seconds_of(best)
    words += "." if seconds is None else f"; training a seed took {_seconds(seconds)}."
    cheaper = [e for e in undecided if sent_bytes(e) < 0.5 * sent]
    if cheaper:
        least = min(cheaper, key=sent_bytes)
        mean = score_of(least.result, score).mean
        words += f" Cheaper, and not told apart from it by these rows: {label[least.digest]}, {percent(mean)} %, "
        words += f"{_bytes(sent_bytes(least)) if sent_bytes(least) else 'nothing'} sent."
    return words


def _reference(
    found: Sequence[StoredRun], best: StoredRun, label: dict[str, str], score: str
) -> str:
    if not found:
        return ""
    top = ranked(found, score)[0]
    words = f"{label[top.digest]}, with all rows in one place, reaches {percent(score_of(top.result, score).mean)} %"
    other = set(map(str, top.result["backbones"])) != set(map(str, best.result["backbones"]))
    return words + (
        f", on features of {' + '.join(map(str, top.result['backbones']))}." if other else "."
    )
