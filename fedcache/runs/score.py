"""The one accuracy by which all methods of a table are scored: the mean over clients, or pooled over test rows (D-89).

A method's own headline is not alike for all: of one model the accuracy on the union of the test rows, of personal
models the mean (or minimum) over clients. Every result holds both scores below of every method.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from fedcache.errors import unknown
from fedcache.notebooks import percent

SCORES = ("client-mean", "pooled")
WORDS = {
    "client-mean": "unweighted mean over clients, each on its own test rows",
    "pooled": "over the pooled test rows of all clients",
    "own": "primary metric of each method",
}
LEVEL = 0.95


@dataclass(frozen=True)
class Score:
    """One score of a run: fractions; None for what an old result neither holds nor implies."""

    per_seed: tuple[float | None, ...]
    mean: float | None

    @property
    def std(self) -> float | None:
        """Over seeds, ddof 1; None with one seed or without all of them."""
        known = [v for v in self.per_seed if v is not None]
        if len(known) == len(self.per_seed) > 1:
            return float(np.std(known, ddof=1))
        return None


def check_score(score: str | None) -> None:
    """Refuse an unknown one. Raises UsageError."""
    if score is not None and score not in SCORES:
        raise unknown("--score", score, SCORES)


def score_of(result: Mapping[str, Any], score: str) -> Score:
    """A score of a stored result: ``client-mean`` | ``pooled`` | ``own``, its headline.

    Earlier results hold the headline of every seed and the mean over clients. Of them the mean over clients of a
    seed is the headline of personal models; the pooled accuracy is the headline of one model, whose rows count once, or
    what the counts by class say of personal models, mean over seeds.
    """
    accuracy = result["accuracy"]
    own = Score(tuple(accuracy.get("per_seed", ())), accuracy["mean"])
    if score == "own":
        return own
    name = score.replace("-", "_")
    if f"{name}_per_seed" in accuracy:
        return Score(tuple(accuracy[f"{name}_per_seed"]), accuracy[name])
    personal = result.get("protocol", "global") != "global"
    # Earlier results of several seeds have the mean over seeds only.
    seeds = len(own.per_seed)
    if score == "client-mean":
        mean = accuracy.get("client_mean")
        alike = (
            mean is not None
            and own.mean is not None
            and math.isclose(mean, own.mean, abs_tol=1e-12)
        )
        if alike and personal:
            return own
        return _over_seeds(mean, seeds)
    if not personal:
        return own
    counts = np.array(result.get("confusion") or [], np.int64)
    if not counts.size or not counts.sum():
        return _over_seeds(None, seeds)
    return _over_seeds(float(counts.trace() / counts.sum()), seeds)


def _over_seeds(mean: float | None, seeds: int) -> Score:
    """A mean as a score; with one seed it is also the value of that seed, with several theirs are not known."""
    if seeds == 1:
        return Score((mean,), mean)
    return Score((None,) * seeds, mean)


def values_held_out(result: Mapping[str, Any]) -> tuple[str, ...]:
    """The held-out values of a column, whose rows score a result and are not trained on; () if there are none."""
    held = result.get("partition", {}).get("args", {}).get("hold_out") or ()
    if isinstance(held, str):
        return (held,)
    return tuple(map(str, held))


def score_for(results: Iterable[Mapping[str, Any]]) -> str:
    """The default score of a table: the primary metric if all runs share it, else the mean over clients.

    The headline too where an earlier run lacks the mean over clients of a seed.
    """
    known = list(results)
    if len({r.get("protocol") for r in known}) < 2 or any(
        None in score_of(r, "client-mean").per_seed for r in known
    ):
        return "own"
    return "client-mean"


def wilson(
    accuracy: float | None, rows: int | None, level: float = LEVEL
) -> tuple[float, float] | None:
    """Wilson's score interval (JASA 22, 1927) of an accuracy p on n independent test rows.

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), z the quantile of the level.

    None without rows, and where the accuracy is no count of them, as a mean over clients of unequal sizes.
    """
    if accuracy is None or not rows or abs(accuracy * rows - round(accuracy * rows)) > 1e-6:
        return None
    z = NormalDist().inv_cdf(0.5 + level / 2.0)
    p = round(accuracy * rows) / rows
    middle = p + z**2 / (2 * rows)
    half = z * math.sqrt(p * (1.0 - p) / rows + z**2 / (4 * rows**2))
    return max(0.0, (middle - half) / (1.0 + z**2 / rows)), min(
        1.0, (middle + half) / (1.0 + z**2 / rows)
    )


def rows_interval(
    result: Mapping[str, Any], level: float = LEVEL
) -> tuple[int, float, float] | None:
    """Test rows of a result whose accuracy does not vary over its seeds, and the Wilson interval of it.

    Only of one model on a partition that all seeds share: there the test rows are all there is to sample.
    """
    per_seed: Sequence[float | None] = result["accuracy"].get("per_seed", ())
    part = result.get("partition", {})
    fixed = len(set(part.get("digests", ()))) == 1
    # With one model, one partition and equal seeds, only the test rows are a sample.
    if (
        result.get("protocol") != "global"
        or not fixed
        or None in per_seed
        or len(set(per_seed)) != 1
    ):
        return None
    # The confusion matrix sums over seeds, each with the same test rows.
    counts = np.array(result.get("confusion") or [], np.int64)
    if counts.size:
        rows = int(counts.sum()) // len(per_seed)
    else:
        rows = part.get("test_rows")
    found = wilson(per_seed[0], rows, level)
    if found is None or rows is None:
        return None
    return (rows, *found)


# Whether a result is better than a guess: what is asked of every accuracy before it is believed.


ERRORS = 2.0
"""Standard errors of a guess's accuracy within which a result is no better than it."""

SHARE = 0.5
POINTS = 0.05
"""A result must be above a guess by this share of it, or by these points where that is less: of ten classes 15 %."""


@dataclass(frozen=True)
class Chance:
    """Accuracy of a guess on the test rows of a run that is no better."""

    accuracy: float  # of the run, mean over seeds
    level: (
        float  # of always the same class: 1 / C, or the share of the largest class of the test rows
    )
    least: float  # from which on a result would be better than a guess
    classes: int
    rows: int  # different test rows of a seed, at most


def at_chance(result: Mapping[str, Any]) -> Chance | None:
    """Accuracy of a guess, for a ``result.json`` that is no better; None for a better one, or one without a score.

    Better is above max(1/C, share of the largest class) by ``ERRORS`` standard errors of a share of so many rows, and
    by ``SHARE`` of it or ``POINTS``. Of the test rows of results without a confusion matrix only the number is known.
    """
    accuracy = result["accuracy"]["mean"]
    classes = int(result.get("classes") or 0)  # earlier releases had no number
    if accuracy is None or classes < 2:
        return None
    # Test rows of each class, summed over seeds.
    counts = [sum(row) for row in result.get("confusion") or []]
    total = sum(counts)
    level = 1 / classes
    if total:
        level = max(level, max(counts) / total)
    rows = distinct = int(result["partition"].get("test_rows") or 0)
    if total:  # clients that are tested on the same rows are no more rows
        rows = min(total // len(result["seeds"]), distinct or total)
    if not rows:
        return None
    error = math.sqrt(level * (1 - level) / rows)
    least = level + max(ERRORS * error, min(SHARE * level, POINTS))
    if least >= 1.0:  # so few rows, or one class so large, that nothing could be told from a guess
        return None
    if accuracy <= least:
        return Chance(accuracy, level, least, classes, rows)
    return None


# By what runs are chosen: accuracy on validation rows; without such rows the highest is no
# choice.


NOT_A_CHOICE = "best by test accuracy (no validation split)"
BY_VALIDATION = "best by validation accuracy"
FIRST_OF_EQUALS = "the first by method and settings (numbers in ascending order, then words)"
"""Which of several runs with equal figures is taken."""
DIGITS = 12
"""Figures that are equal to so many decimals are: sums in another order differ in the last ones."""

Order = tuple[tuple[str, int, float, str], ...]
"""What settings are sorted by."""


def choice_value(result: Mapping[str, Any], score: str = "own") -> float | None:
    """The value by which runs are chosen, mean over seeds: validation accuracy, or test accuracy without validation.

    ``score`` is a word of ``runs.score``: what is compared on test rows is chosen by the same score.
    """
    if "validation" in result:
        return validation_value(result, score)
    return score_of(result, score).mean


def validation_value(result: Mapping[str, Any], score: str = "own") -> float | None:
    """Accuracy on validation rows, mean over seeds, by a word of ``runs.score``; None without such rows.

    Where an earlier result has not that score it is their mean.
    """
    held = result.get("validation")
    if held is None:
        return None
    key = "mean"
    if score != "own":
        key = score.replace("-", "_")
    mean: float | None = held.get(key, held["mean"])
    return mean


def has_validation(results: Iterable[Mapping[str, Any]]) -> bool:
    """Whether all of some results, one or more, have validation rows."""
    held = ["validation" in result for result in results]
    return bool(held) and all(held)


def order_of_settings(settings: Mapping[str, Any]) -> Order:
    """Sort key of settings: by name, then numbers ascending, then words, however they were written.

    >>> sorted([{"lr": "auto"}, {"lr": 1}, {"lr": "0.1"}], key=order_of_settings)
    [{'lr': '0.1'}, {'lr': 1}, {'lr': 'auto'}]
    """
    return tuple((name, *_order_of_value(settings[name])) for name in sorted(settings))


def order_of_run(result: Mapping[str, Any]) -> Order:
    """Sort key of runs with equal figures: the method, then its hyperparameters and all other settings."""
    part = result.get("partition", {})
    trust = result.get("trust", {})
    rest = {key: result.get(key) for key in ("backbones", "preset", "rounds", "participation")}
    rest |= {f"partition.{key}": value for key, value in part.get("args", {}).items()}
    rest |= {
        f"trust.{key}": value for key, value in trust.items() if not isinstance(value, dict | list)
    }
    method = order_of_settings({"method": result.get("method")})
    return (
        *method,
        *order_of_settings(result.get("hyperparameters", {})),
        *order_of_settings(rest),
    )


def tie_sentence(
    figures: Sequence[float | None], first: str, what: str, of: str = ""
) -> str | None:
    """A note that the first of some figures ties with others, and which is taken; None if it does not.

    ``what`` are the things that have the figures, and ``of`` what these are, where that is not plain.
    """
    if not figures or figures[0] is None:
        return None
    tied = sum(f is not None and round(f, DIGITS) == round(figures[0], DIGITS) for f in figures)
    if tied < 2:
        return None
    score = percent(figures[0])
    return f"{tied} {what} tie at {of}{score}. fedcache takes {first}, {FIRST_OF_EQUALS}."


def _order_of_value(value: object) -> tuple[int, float, str]:
    """Numbers before words, also those that are written as words (``0.1``, ``10%``)."""
    if not isinstance(value, bool):
        try:
            number = float(str(value).removesuffix("%"))
        except ValueError:
            number = math.nan
        if not math.isnan(number):
            return 0, number, str(value).rpartition("%")[1]
    if isinstance(value, list | tuple):
        return 1, 0.0, ",".join(map(str, value))
    return 1, 0.0, str(value)


def unlike_tests(results: Iterable[Mapping[str, Any]]) -> str | None:
    """Why validation may choose wrongly between models of different kinds; None for runs where it may not."""
    known = list(results)
    kinds = {r.get("protocol") for r in known}
    if (
        len(kinds) < 2
        or not all("validation" in r for r in known)
        or not any(map(unseen_classes, known))
    ):
        return None
    return (
        "Validation rows have the classes of each client, but the test rows here have all classes. "
        "Validation may therefore prefer another kind of model (personal or global) than the one that is "
        "best on the test rows. --option test_protocol=matched makes both alike."
    )


def unseen_classes(result: Mapping[str, Any]) -> list[str]:
    """A caution where clients' own models are scored on classes that most clients have no training row of; []
    otherwise.
    """
    args = result["partition"].get("args", {})
    if result.get("protocol") != "personalised" or args.get("test_protocol") != "balanced":
        return []
    typical = typical_classes(result)
    if typical is None or typical > result["classes"] / 2:
        return []
    return [
        f"ON UNSEEN CLASSES: each personal model is tested on all {result['classes']} classes, but a "
        f"typical client has training rows of {typical:.3g}. To test with each client's own class shares: "
        "--option test_protocol=matched"
    ]


def typical_classes(result: Mapping[str, Any]) -> float | None:
    """Number of classes among the training rows of a typical client; None for a result without it."""
    owned = result.get("classes_owned", {})
    each = owned.get("per_client")
    if each:
        return float(np.median(each))
    mean: float | None = owned.get("mean")
    return mean
