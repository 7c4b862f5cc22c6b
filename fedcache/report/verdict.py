"""Verdict on a setting: the best run, its lead, the certainty and the cost, in sentences; cautions on a result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fedcache.errors import FedcacheError, shell_word
from fedcache.parsing import Facts, Record, size
from fedcache.progress import percent
from fedcache.report.comparison import (
    LEAST_BLOCKS,
    METRIC_OF_SCORE,
    Floats,
    common_seeds,
    compact,
    constant,
    differences_of_seeds,
    row_difference,
    rows_of_run,
    student_half,
    student_quantile,
)
from fedcache.report.find_runs import Named, Result, StoredRun
from fedcache.runs.directory import usual_settings
from fedcache.runs.privacy_ledger import describe_privacy
from fedcache.runs.score import (
    DIGITS,
    LEVEL,
    at_chance,
    has_validation,
    one_learning_rate,
    order_of_run,
    rows_interval,
    score_of,
    unlike_tests,
    unseen_classes,
    validation_value,
)
from fedcache.tables.words import some_names

MOST_NAMED = 4
MOST_LETTERS = 90
"""Maximum number of runs that a sentence names, and of letters that their names take."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval, as fractions, and the sample in words (``5 seeds``, ``3,044 test rows``)."""

    value: float
    low: float
    high: float
    over: str

    @property
    def above_zero(self) -> bool:
        """Whether the interval is above 0."""
        return self.low > 0.0

    @property
    def ends(self) -> str:
        """The ends of the interval in percent."""
        return f"{percent(self.low)} to {percent(self.high)}"


@dataclass(frozen=True)
class Verdict:
    """Answer for a setting: the best run, its accuracy, the certainty and the cost.

    Attributes:
        label: name of the best run.
        best: the best run.
        accuracy: its test accuracy as a fraction.
        interval: its accuracy with an interval; None without repetitions.
        certainty: of its lead, in one or two words.
        lines: (name, sentences) on the selection, the certainty of the order, the cost, and other notes.
        what: name of the accuracy.
    """

    label: str
    best: StoredRun
    accuracy: float | None
    interval: Estimate | None
    certainty: str
    lines: tuple[tuple[str, str], ...]
    what: str = "test accuracy"


def sent_bytes(entry: StoredRun) -> float:
    """Bytes that one client sends in one seed's run, mean over clients."""
    return _each_client(entry, "up_bytes")


def seconds_of(entry: StoredRun) -> float | None:
    """Seconds of one seed's training."""
    if entry.seconds is None:
        return None
    return entry.seconds / max(1, len(entry.seeds))


def _each_client(entry: StoredRun, direction: str) -> float:
    """Bytes of one client in one seed's run, ``up_bytes`` or ``down_bytes``."""
    total = float(entry.result["traffic"]["exact"][direction])
    of_seed = total / max(1, len(entry.seeds))
    return of_seed / max(1, int(entry.result["partition"].get("clients") or 1))


def ranked(entries: Sequence[StoredRun], score: str) -> list[StoredRun]:
    """Runs by falling validation accuracy, or test accuracy without validation rows; equal runs in a grid's order."""
    by_validation = has_validation(e.result for e in entries)

    def sort_key(entry: StoredRun) -> tuple[object, ...]:
        accuracy = entry.accuracy(score)
        if by_validation:
            accuracy = validation_value(entry.result, score)
        if accuracy is None:
            accuracy = -1.0
        return -round(accuracy, DIGITS), order_of_run(entry.result), entry.digest

    return sorted(entries, key=sort_key)


def uncertainty(entry: StoredRun, score: str) -> Estimate | None:
    """A run's score with an interval: over seeds if it varies over seeds, else over test rows, else over clients."""
    found = score_of(entry.result, score)
    if found.mean is None:
        return None
    known = np.array([v for v in found.per_seed if v is not None])
    complete = len(known) == len(found.per_seed)
    if complete and _vary(known):
        return _student(known, LEVEL, "seeds")
    # The interval over test rows is that of the run's own accuracy. It holds for this score only if both are equal, as
    # they are if all clients are tested on the same rows.
    rows = None
    own_accuracy = entry.result["accuracy"]["mean"]
    if math.isclose(found.mean, own_accuracy, abs_tol=10.0**-DIGITS):
        rows = rows_interval(entry.result)
    if rows is None:
        rows = rows_of_run(entry, METRIC_OF_SCORE[score], LEVEL)
        # An interval that does not contain the score is that of another accuracy.
        if rows is not None and not rows[1] <= found.mean <= rows[2]:
            rows = None
    if rows is not None:
        count, low, high = rows
        return Estimate(found.mean, low, high, f"{count:,} test rows")
    values = _client_scores(entry, found.mean)
    if values is None:
        return None
    return _student(values, LEVEL, "clients")


def mean_uncertainty(entries: Sequence[StoredRun], score: str) -> Estimate | None:
    """Interval of the mean over runs with different test rows; None where a run has no interval."""
    found = [uncertainty(e, score) for e in entries]
    known = [each for each in found if each is not None]
    if len(known) < len(entries):
        return None
    # The words for the sample are those of the first run.
    over = known[0].over
    if over.endswith("test rows"):
        over = "all test rows"
    # Variances of independent estimates add up.
    value = float(np.mean([each.value for each in known]))
    halves = [(each.high - each.low) / 2 for each in known]
    half = math.hypot(*halves) / len(known)
    return Estimate(value, value - half, value + half, over)


def lead(one: StoredRun, other: StoredRun, score: str, level: float = LEVEL) -> Estimate | None:
    """Difference between the scores of two runs, with an interval.

    The interval is over the first of these that is possible:

    - three or more seeds, paired, if the difference varies over them, or test rows, paired; the wider one if both are
      possible, because all seeds have the same test rows
    - test rows as two independent samples, for results of one global model without a record of each test row; such an
      interval is wider than a paired one
    - clients, paired

    None where none is possible.
    """
    ours = one.accuracy(score)
    theirs = other.accuracy(score)
    if ours is None or theirs is None:
        return None
    # First choice: what both runs have. Differences vary over seeds only if training draws random numbers.
    found = [_lead_over_rows(one, other, score, level)]
    paired = differences_of_seeds(one, other, score)
    if _vary(paired):
        found.append(_student(paired, level, "seeds"))
    known = [each for each in found if each is not None]
    if known:
        return max(known, key=lambda each: each.high - each.low)
    # Second choice: one model on known numbers of rows, taken as independent.
    mine = rows_interval(one.result, level)
    its = rows_interval(other.result, level)
    if score == "own" and mine is not None and its is not None:
        rows = min(mine[0], its[0])
        gap = ours - theirs
        variance = (ours * (1 - ours) + theirs * (1 - theirs)) / rows
        half = NormalDist().inv_cdf(0.5 + level / 2) * math.sqrt(variance)
        return Estimate(gap, gap - half, gap + half, f"{rows:,} test rows")
    # Last choice: clients with their own scores, the same clients in both runs.
    if _client_scores(one, ours) is None or _client_scores(other, theirs) is None:
        return None
    if list(one.clients.names) != list(other.clients.names):
        return None
    return _student(one.clients.accuracy - other.clients.accuracy, level, "clients")


def _lead_over_rows(one: StoredRun, other: StoredRun, score: str, level: float) -> Estimate | None:
    """``lead`` over the test rows that both runs have, if their difference is that of the shared seeds; else None."""
    paired = differences_of_seeds(one, other, score)
    found = row_difference(one, other, METRIC_OF_SCORE[score], level)
    if not len(paired) or found is None or found.interval is None:
        return None
    if not math.isclose(found.difference, paired.mean(), abs_tol=1e-9):
        return None
    low, high = found.interval
    return Estimate(found.difference, low, high, f"{found.rows:,} test rows")


def _client_scores(entry: StoredRun, mean: float) -> Floats | None:
    """[M] accuracies of clients if their mean is this score; None for fewer than three, equal or missing ones."""
    values = np.asarray(entry.clients.accuracy, np.float64)
    if np.isnan(values).any() or not _vary(values):
        return None
    if math.isclose(values.mean(), mean, abs_tol=1e-6):
        return values
    return None


def _student(values: Floats, level: float, over: str) -> Estimate | None:
    """Student's interval of the mean of [B] values; None where they do not vary, or one is missing."""
    if np.isnan(values).any() or constant(values):
        return None
    mean = float(values.mean())
    half = student_half(values, level)
    return Estimate(mean, mean - half, mean + half, f"{len(values)} {over}")


def _vary(gaps: Floats) -> bool:
    """Whether values have an interval: three or more that are not all equal."""
    return len(gaps) >= LEAST_BLOCKS and not constant(gaps)


def verdict(named: Named, score: str) -> Verdict | None:
    """The verdict on the runs of one setting; None where no run was scored on test rows.

    Args:
        named: runs with the labels that tell them apart, in any order.
        score: client-mean | pooled | own.
    """
    label = {e.digest: name for name, e in named}
    scored = [e for _, e in named if e.accuracy(score) is not None]
    # A run with all rows in one place is only a reference, unless there is no other run.
    federated = [e for e in scored if not e.pooled_rows]
    field = ranked(federated or scored, score)
    if not field:
        return None
    best = field[0]
    equals = [e for e in field[1:] if _same_figures(e, best, score)]
    # The same settings with other seeds are not a rival.
    rivals = [e for e in field[1:] if e not in equals and e.facts != best.facts]
    gap = None
    undecided = []
    if rivals:
        gap = lead(best, rivals[0], score)
        undecided = _undecided(best, rivals, score)
    certainty, why = _sure(best, rivals, undecided, gap, label)
    if rivals:
        why = f"{_distance(best, rivals[0], gap, label, score)} {why}"
    if equals:
        names = some_names([label[e.digest] for e in equals], 2)
        why += f" {names} reached the same results."
    if equals and not rivals:
        certainty = "Tied"
        why = "All runs reached the same results; this run is the first in the order of methods and settings."
    validation = None
    if has_validation(e.result for e in field):
        validation = validation_value(best.result, score)
    lines = [
        ("Selected by", selected_by(validation, len(rivals) + len(equals) + 1)),
        ("How sure", why),
        ("Cost", cost_of(best, undecided, label, score)),
    ]
    reference = _reference([e for e in scored if e not in field], best, label, score)
    if reference:
        lines.append(("Reference", reference))
    rates = one_learning_rate(e.result for e in field)
    if rates is not None:
        lines.append(("Tuning", rates))
    unlike = unlike_tests(e.result for e in field)
    if validation is not None and unlike is not None:
        lines.append(("Note", unlike))
    accuracy = best.accuracy(score)
    interval = uncertainty(best, score)
    return Verdict(label[best.digest], best, accuracy, interval, certainty, tuple(lines))


def selected_by(validation: float | None, count: int) -> str:
    """How the best of some runs was selected; without validation rows, why its accuracy is optimistic."""
    if count == 1:
        return "This is the only configuration."
    if validation is not None:
        return (
            f"Validation accuracy: {percent(validation)} %, the highest of {count} configurations."
        )
    return (
        f"Test accuracy, because there is no validation split. The run is the best of {count} configurations "
        "on the test rows themselves, so its accuracy is optimistic (add `--validation 0.2`)."
    )


def _same_figures(one: StoredRun, other: StoredRun, score: str) -> bool:
    """Whether two runs have the same validation accuracy and the same score."""
    if validation_value(one.result, score) != validation_value(other.result, score):
        return False
    return score_of(one.result, score) == score_of(other.result, score)


def points_above(difference: float, second: str) -> str:
    """A difference in points from the second run in words; it may be negative if validation selected the best."""
    if abs(difference) < 0.005:
        return f"Equal to the second, {second}"
    side = "below"
    if difference > 0:
        side = "above"
    return f"{abs(difference):.2f} points {side} the second, {second}"


def _distance(
    best: StoredRun,
    second: StoredRun,
    gap: Estimate | None,
    label: dict[str, str],
    score: str,
) -> str:
    """How far the best run is above the second, in a sentence."""
    ours = best.accuracy(score) or 0.0
    theirs = second.accuracy(score) or 0.0
    difference = 100 * (ours - theirs)
    words = points_above(difference, label[second.digest])
    if gap is not None:
        # Seeds that only one run has count for its accuracy, but not for the paired difference.
        if abs(100 * gap.value - difference) >= 0.005:
            shared = compact(common_seeds(best, second))
            words += f", {100 * gap.value:+.2f} over the seeds that both have ({shared})"
        low = 100 * gap.low
        high = 100 * gap.high
        words += f" (95 % interval {low:+.2f} to {high:+.2f})"
    return f"{words}."


def bytes_words(count: float) -> str:
    """A number of bytes in words; "" for none."""
    if count >= 1000:
        return f"{size(count)}B"
    if count:
        return f"{count:.0f} B"
    return ""


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
) -> tuple[str, str]:
    """The certainty of the order in one word, and the reason."""
    if not rivals:
        return "Only one run", "There is no other run to compare it with."
    if gap is None:
        word = "Unknown"
        why = "An interval of the difference needs several seeds: train with `--seeds 0-4`."
    elif gap.above_zero and not undecided:
        word = "Sure"
        why = f"Its lead over every other method is statistically significant, for the second over {gap.over}."
    elif gap.high < 0:
        word = "Contradicted"
        why = f"On the test rows, the second run is significantly better over {gap.over}."
    else:
        word = "Not sure"
        # The interval of ``gap`` does not use the variances of other rivals, so ``undecided`` may be empty here.
        why = _chance([label[e.digest] for e in undecided or rivals[:1]], len(rivals), gap)
    partitions = set(best.result["partition"]["digests"])
    if gap is not None and gap.over.endswith("seeds") and len(partitions) == 1:
        why += " All seeds share one partition and its test rows."
    return word, why


def _chance(others: Sequence[str], count: int, gap: Estimate) -> str:
    """A sentence that the differences from ``others``, which are some of ``count`` rivals, may be chance."""
    # Long names are not all listed.
    letters = max(map(len, others))
    most = min(MOST_NAMED, MOST_LETTERS // letters)
    names = some_names(others, max(1, most))
    rivals = "the other"
    correction = ""
    if count > 1:
        rivals = f"{len(others)} of {count} others"
        correction = f", corrected for {count} comparisons"
    return f"The difference from {rivals} ({names}) is not statistically significant over {gap.over}{correction}."


def _undecided(best: StoredRun, rivals: Sequence[StoredRun], score: str) -> list[StoredRun]:
    """Rivals over which the best run has no significant lead: its interval is not above 0, or there is no interval.

    A lead must be significant over seeds and over test rows, where both can be tested. The level of the intervals is
    corrected for the number of rivals.

    With few seeds the variance of one rival is hardly known. All differences over seeds therefore share a typical
    variance: the median of their variances, divided by the median of chi-squared. The median is robust against rivals
    that diverge.
    """
    level = 1.0 - (1.0 - LEVEL) / len(rivals)
    over_seeds = {}
    for entry in rivals:
        gaps = differences_of_seeds(best, entry, score)
        if _vary(gaps):
            over_seeds[entry.digest] = gaps
    freedom = sum(len(gaps) - 1 for gaps in over_seeds.values())
    typical = 0.0
    if over_seeds:
        # The median of chi-squared over its freedom is near (1 - 2 / (9 freedom))^3.
        mean_freedom = freedom / len(over_seeds)
        median = float(np.median([gaps.var(ddof=1) for gaps in over_seeds.values()]))
        typical = median / (1.0 - 2.0 / (9.0 * mean_freedom)) ** 3
    found = []
    for entry in rivals:
        if entry.digest in over_seeds:
            gaps = over_seeds[entry.digest]
            half = student_quantile(level, freedom) * math.sqrt(typical / len(gaps))
            over_rows = _lead_over_rows(best, entry, score, level)
            decided = float(gaps.mean()) > half and (over_rows is None or over_rows.above_zero)
        else:
            gap = lead(best, entry, score, level)
            decided = gap is not None and gap.above_zero
        if not decided:
            found.append(entry)
    return found


def cost_words(best: StoredRun) -> str:
    """Bytes that each client of a run sends and receives, and the time of training, as a sentence."""
    if best.pooled_rows:
        return "It is not federated: all rows are in one place, so nothing is sent."
    # A one-shot method sends once, other methods in every round.
    rounds = best.result.get("rounds") or 1
    sent = sent_bytes(best)
    received = bytes_words(_each_client(best, "down_bytes"))
    words = "Clients send nothing"
    receives = f" and receive {received} each"
    if sent:
        words = f"Each client sends {bytes_words(sent)} once"
        receives = f" and receives {received}"
        if rounds > 1:
            words = f"Each client sends {bytes_words(sent)} in {rounds} rounds"
    if received:
        words += receives
    seconds = seconds_of(best)
    if seconds is not None:
        words += f"; training took {_seconds(seconds)} per seed"
    return f"{words}."


def cost_of(
    best: StoredRun, undecided: Sequence[StoredRun], label: dict[str, str], score: str
) -> str:
    """The cost of the best run as a sentence, and the undecided run that sends least if it sends less than half."""
    words = cost_words(best)
    if best.pooled_rows:
        return words
    sent = sent_bytes(best)
    cheaper = [e for e in undecided if sent_bytes(e) < 0.5 * sent]
    if cheaper:
        least = min(cheaper, key=sent_bytes)
        accuracy = percent(least.accuracy(score))
        sent_by_least = bytes_words(sent_bytes(least)) or "nothing"
        words += (
            f" The cheapest run that does not differ significantly on these rows: {label[least.digest]}, {accuracy} "
            f"%, {sent_by_least} sent."
        )
    return words


def _reference(
    references: Sequence[StoredRun], best: StoredRun, label: dict[str, str], score: str
) -> str:
    """A sentence on the best run with all rows in one place; "" without such a run."""
    if not references:
        return ""
    top = ranked(references, score)[0]
    accuracy = percent(top.accuracy(score))
    words = f"{label[top.digest]}, with all rows in one place, reaches {accuracy} %"
    features = top.result["backbones"]
    if set(features) != set(best.result["backbones"]):
        joined = " + ".join(features)
        words += f", on features of {joined}"
    return f"{words}."


HALF_A_POINT = 0.005
"""Minimum distance below zero-shot, as a fraction, for which a caution is shown. The numbers show smaller distances."""


def caution_lines(result: Result) -> list[str]:
    """Sentences on a ``result.json``; [] where nothing is unusual."""
    return [*chance_lines(result), *_below_zero_shot(result), *unseen_classes(result)]


def drawn_clients(result: Result) -> tuple[str, list[float]] | None:
    """How many clients were drawn and scored (``--eval-clients``), and the standard error of their mean in each seed.

    The words, ``500 of 100,000 clients drawn and scored; 3 of these took part in some round``, are of the first
    seed. Errors are fractions; a seed with fewer than two scored clients has none. None where all clients were scored.
    """
    drawn = result["accuracy"].get("eval_clients", ())
    if not drawn:
        return None
    scored = drawn[0]["scored"]
    trained = drawn[0].get("trained")
    clients = result["partition"]["clients"]
    who = f"{scored:,} of {clients:,} clients drawn and scored"
    if trained == 0:
        who += "; none of these took part in any round, so their models are untrained"
    elif trained is not None and trained < scored:
        who += f"; {trained:,} of these took part in some round"
    errors = [d["standard_error"] for d in drawn]
    return who, [float(error) for error in errors if error is not None]


def _below_zero_shot(result: Result) -> list[str]:
    """A caution where the class texts alone, without training, are more accurate; [] otherwise."""
    untrained = result["accuracy"].get("zero_shot")
    trained = result["accuracy"]["mean"]
    if untrained is None or trained is None or untrained - trained < HALF_A_POINT:
        return []
    cost = 100 * (untrained - trained)
    return [
        f"BELOW ZERO-SHOT: the model is {cost:.2f} points below the {percent(untrained)} % that the class "
        "texts alone reach on these rows. Try fewer rounds or a lower learning rate."
    ]


LARGE_RATE = 0.1
"""Learning rate from which no larger rate is recommended."""


def chance_lines(result: Result) -> list[str]:
    """A caution where the accuracy is no better than guessing, and the next command; [] for a better result."""
    chance = at_chance(result)
    if chance is None:
        return []
    guess = percent(chance.level)
    more = percent(chance.least)
    return [
        f"NO BETTER THAN CHANCE: guessing gives {guess} % on these {chance.rows:,} test rows of "
        f"{chance.classes} classes; only an accuracy above {more} % would differ from guessing.",
        f"Next: {next_step(result)}",
    ]


def next_step(result: Result) -> str:
    """The first thing to change in the same command.

    More clients if no client sent anything, tuned values if the method has some, else a larger rate, else more rounds,
    else the data.
    """
    exact = result.get("traffic", {}).get("exact", {})
    # A method may send nothing by design. But if the server sent something, it expected uploads. A result that does not
    # hold the bytes counts as one with uploads.
    expects_uploads = exact.get("down_bytes") or result.get("participants")
    if result.get("protocol") == "global" and expects_uploads and not exact.get("up_bytes", 1):
        return (
            "no client sent anything in any round; use more clients per round (--participation) or fewer "
            "unavailable clients (--availability, --client-dropout)"
        )
    method = result["method"]
    hp = result["hyperparameters"]
    tuned = _tuned_values(method)
    if tuned and any(hp.get(name) != value for name, value in tuned.items()):
        words = []
        for name, value in tuned.items():
            if isinstance(value, float):
                value = f"{value:g}"
            words.append(f"{name}={value}")
        values = " ".join(words)
        return f"the same command with --preset tuned  ({values}, chosen on validation rows)"
    rate = hp.get("lr")
    if isinstance(rate, float) and rate < LARGE_RATE:
        return f"the same command with a larger rate, --set lr={10 * rate:g}"
    if result["rounds"] > 1:
        rates = f"fedcache methods info {shell_word(method)}"
        return f"the same command with --rounds {4 * result['rounds']}, or other rates ({rates})"
    return "check in `fedcache inspect` whether the features separate the classes, or try other --backbones"


def _tuned_values(method: str) -> Facts:
    """The hyperparameters that preset ``tuned`` sets; {} for none, and for a method that is no longer installed."""
    try:
        usual = usual_settings(method, "paper")
        tuned = usual_settings(method, "tuned")
    except FedcacheError:
        return {}
    return {name: value for name, value in tuned.items() if value != usual[name]}


def describe_trust(section: Record) -> list[str]:
    """The ``trust`` part of a result as lines for a person."""
    lines = []
    if section.get("aggregate", "mean") != "mean":
        lines.append(f"Uploads combined by {section['aggregate']}.")
    if "attack" in section:
        attackers = sorted(set(itertools.chain(*section["attackers"])))
        happened = "no client was malicious"
        if attackers:
            named = some_names(attackers, 5)
            happened = f"{len(attackers)} clients were malicious ({named})"
        lines.append(f"Attack {section['attack']}: {happened}.")
    if section.get("rejected"):
        lines.append(f"{section['rejected']} uploads were rejected over all rounds and seeds.")
    cost = section.get("privacy")
    if cost:
        lines.append(describe_privacy(cost))
    return lines
