"""Scores of runs: the accuracy by which the methods of a table are compared, and by which runs are selected.

The primary metric differs between methods. For one global model it is the accuracy on the pooled test rows, for
personal models the mean (or minimum) over clients. To compare methods, every result has two scores for every method:
the mean over clients, and the accuracy on the pooled test rows (D-89 in docs/readings.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fedcache.errors import unknown
from fedcache.notebooks import percent
from fedcache.parsing import Record
from fedcache.tables.words import some_names

SCORES = ("client-mean", "pooled")
WORDS = {
    "client-mean": "unweighted mean over clients, each on its own test rows",
    "pooled": "over the pooled test rows of all clients",
    "own": "primary metric of each method",
}
LEVEL = 0.95


@dataclass(frozen=True)
class Score:
    """One score of a run, as fractions; None for a seed that was not scored."""

    per_seed: tuple[float | None, ...]
    mean: float | None

    @property
    def std(self) -> float | None:
        """Standard deviation over seeds (ddof 1); None for one seed, or if a seed has no value."""
        return mean_std(self.per_seed)[1]


def mean_std(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (ddof 1) over seeds; both None if a value is missing.

    The deviation of a single seed is None.
    """
    if not values or None in values:
        return None, None
    known = np.array(values, np.float64)
    deviation = None
    if len(known) > 1:
        deviation = float(known.std(ddof=1))
    return float(known.mean()), deviation


def check_score(score: str | None) -> None:
    """Raise UsageError for an unknown score."""
    if score is not None and score not in SCORES:
        raise unknown("--score", score, SCORES)


def score_of(result: Record, score: str) -> Score:
    """A score of a stored result: ``client-mean`` | ``pooled`` | ``own``, which is the primary metric."""
    accuracy = result["accuracy"]
    if score == "own":
        return Score(tuple(accuracy["per_seed"]), accuracy["mean"])
    name = score.replace("-", "_")
    return Score(tuple(accuracy[f"{name}_per_seed"]), accuracy[name])


def values_held_out(result: Record) -> tuple[str, ...]:
    """The held-out values of a column, whose rows are test rows and not trained on; () if there are none."""
    values = result.get("partition", {}).get("args", {}).get("hold_out") or ()
    if isinstance(values, str):
        return (values,)
    return tuple(map(str, values))


def score_for(results: Iterable[Record]) -> str:
    """The default score of a table: the primary metric if all runs share it, else the mean over clients.

    It is the primary metric too if an earlier run lacks the mean over clients of a seed.
    """
    known = list(results)
    protocols = {result.get("protocol") for result in known}
    if len(protocols) < 2:
        return "own"
    if any(None in score_of(result, "client-mean").per_seed for result in known):
        return "own"
    return "client-mean"


def wilson(
    accuracy: float | None, rows: int | None, level: float = LEVEL
) -> tuple[float, float] | None:
    """Wilson's score interval (JASA 22, 1927) of an accuracy p on n independent test rows.

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), z the quantile of the level.

    None without rows, and if p is not a number of rows divided by n, as a mean over clients of unequal sizes.
    """
    if accuracy is None or not rows:
        return None
    right = round(accuracy * rows)
    if abs(accuracy * rows - right) > 1e-6:
        return None
    z = NormalDist().inv_cdf(0.5 + level / 2.0)
    p = right / rows
    middle = p + z**2 / (2 * rows)
    half = z * math.sqrt(p * (1.0 - p) / rows + z**2 / (4 * rows**2))
    scale = 1.0 + z**2 / rows
    low = max(0.0, (middle - half) / scale)
    high = min(1.0, (middle + half) / scale)
    return low, high


def rows_interval(result: Record, level: float = LEVEL) -> tuple[int, float, float] | None:
    """Number of test rows of a result, and the Wilson interval of its accuracy.

    The interval is over test rows only. So it is None for personal models, and if seeds have different partitions or
    accuracies.
    """
    per_seed: Sequence[float | None] = result["accuracy"].get("per_seed", ())
    partition = result.get("partition", {})
    partitions = set(partition.get("digests", ()))
    equal_seeds = len(set(per_seed)) == 1 and None not in per_seed
    if result.get("protocol") != "global" or len(partitions) != 1 or not equal_seeds:
        return None
    # The confusion matrix sums over seeds, which all have the same test rows.
    counts = np.array(result.get("confusion") or [], np.int64)
    rows = partition.get("test_rows")
    if counts.size:
        rows = int(counts.sum()) // len(per_seed)
    interval = wilson(per_seed[0], rows, level)
    if interval is None or rows is None:
        return None
    return (rows, *interval)


# Whether the accuracy of a result is better than that of a guess.


ERRORS = 2.0
"""Number of standard errors by which a result must be above the accuracy of guessing."""

SHARE = 0.5
POINTS = 0.05
"""A result must also be above guessing by this share of the accuracy of guessing, or by these points if they are less.

With ten equal classes, for example, guessing gives 10 %, and a result must be above 15 %.
"""


@dataclass(frozen=True)
class Chance:
    """The accuracy of a guess, for a run that is no better than a guess."""

    accuracy: float  # of the run, mean over seeds
    # of a guess of always the same class: 1 / C, or the share of the largest class of the test rows
    level: float
    least: float  # a result above this accuracy is better than a guess
    classes: int
    rows: int  # distinct test rows of a seed, or an upper limit of their number


def at_chance(result: Record) -> Chance | None:
    """The accuracy of a guess, if a ``result.json`` is no better; None if it is better, or has no accuracy.

    The accuracy of a guess is max(1/C, share of the largest class). A better result is above it by ``ERRORS`` standard
    errors, and also by ``SHARE`` of this accuracy or by ``POINTS``, whichever is less. The share of the largest class
    is not known for a result without a confusion matrix.
    """
    accuracy = result["accuracy"]["mean"]
    classes = result["classes"]
    if accuracy is None or classes < 2:
        return None
    # Test rows of each class, summed over seeds.
    counts = [sum(row) for row in result.get("confusion") or []]
    total = sum(counts)
    level = 1 / classes
    if total:
        level = max(level, max(counts) / total)
    distinct = int(result["partition"].get("test_rows") or 0)
    rows = distinct
    if total:  # a row that several clients are tested on counts once
        rows = min(total // len(result["seeds"]), distinct or total)
    if not rows:
        return None
    error = math.sqrt(level * (1 - level) / rows)
    least = level + max(ERRORS * error, min(SHARE * level, POINTS))
    if least >= 1.0:  # with so few rows, or so large a class, no result differs from a guess
        return None
    if accuracy <= least:
        return Chance(accuracy, level, least, classes, rows)
    return None


# Selection of runs by accuracy on validation rows. Without such rows, the best run by test accuracy is named, but not
# as a selection.


NOT_A_CHOICE = "best by test accuracy (no validation split)"
BY_VALIDATION = "best by validation accuracy"
FIRST_OF_EQUALS = (
    "the first in the order of methods and settings (numbers in ascending order, then words)"
)
"""Rule that selects one of several runs with equal values."""
DIGITS = 12
"""Decimals in which values are compared: sums in another order differ in the last digits of a float."""

Order = tuple[tuple[str, int, float, str], ...]
"""Sort key of a run's settings."""


def choice_value(result: Record, score: str = "own") -> float | None:
    """The value by which runs are selected, mean over seeds: validation accuracy, or test accuracy without validation.

    ``score`` is one of ``WORDS``; runs are selected by the score by which they are compared.
    """
    if "validation" in result:
        return validation_value(result, score)
    return score_of(result, score).mean


def validation_value(result: Record, score: str) -> float | None:
    """Accuracy on validation rows, mean over seeds, for a ``score`` of ``WORDS``; None without such rows.

    It is the primary metric if an earlier result does not have this score.
    """
    section = result.get("validation")
    if section is None:
        return None
    key = "mean"
    if score != "own":
        key = score.replace("-", "_")
    mean: float | None = section.get(key, section["mean"])
    return mean


def has_validation(results: Iterable[Record]) -> bool:
    """Whether there are results, and all of them have validation rows."""
    flags = ["validation" in result for result in results]
    return bool(flags) and all(flags)


def order_of_settings(settings: Record) -> Order:
    """Sort key of settings: by name, then numbers in ascending order, then words. Text such as "0.1" is a number.

    >>> sorted([{"lr": "auto"}, {"lr": 1}, {"lr": "0.1"}], key=order_of_settings)
    [{'lr': '0.1'}, {'lr': 1}, {'lr': 'auto'}]
    """
    return tuple((name, *_order_of_value(settings[name])) for name in sorted(settings))


def order_of_run(result: Record) -> Order:
    """Sort key of runs with equal figures: the method, then its hyperparameters and all other settings."""
    partition = result.get("partition", {})
    trust = result.get("trust", {})
    further = {key: result.get(key) for key in ("backbones", "preset", "rounds", "participation")}
    for key, value in partition.get("args", {}).items():
        further[f"partition.{key}"] = value
    for key, value in trust.items():
        if not isinstance(value, dict | list):
            further[f"trust.{key}"] = value
    method = order_of_settings({"method": result.get("method")})
    return (
        *method,
        *order_of_settings(result.get("hyperparameters", {})),
        *order_of_settings(further),
    )


def tie_sentence(
    figures: Sequence[float | None], first: str, what: str, of: str = ""
) -> str | None:
    """A note that the best value, the first of ``figures``, ties with others; None if it does not.

    ``first`` names the run that is taken, ``what`` the runs in the plural, and ``of`` the values if that is not clear.
    """
    if not figures or figures[0] is None:
        return None
    best = round(figures[0], DIGITS)
    tied = sum(value is not None and round(value, DIGITS) == best for value in figures)
    if tied < 2:
        return None
    score = percent(figures[0])
    return f"{tied} {what} tie at {of}{score}. fedcache chooses {first}, {FIRST_OF_EQUALS}."


def _order_of_value(value: object) -> tuple[int, float, str]:
    """Sort key of one value: numbers come before words. Text such as ``0.1`` and ``10%`` is a number."""
    if not isinstance(value, bool):
        try:
            number = float(str(value).removesuffix("%"))
        except ValueError:
            number = math.nan
        if not math.isnan(number):
            # The last part is "%" or "", so that 10 and 10% have a fixed order.
            return 0, number, str(value).rpartition("%")[1]
    if isinstance(value, list | tuple):
        return 1, 0.0, ",".join(map(str, value))
    return 1, 0.0, str(value)


def one_learning_rate(results: Iterable[Record]) -> str | None:
    """Which methods are compared with one learning rate only; None without such a method, and for a single method."""
    rates: dict[str, set[float]] = {}
    for result in results:
        of_method = rates.setdefault(result["method"], set())
        if "lr" in result.get("hyperparameters", {}):
            of_method.add(result["hyperparameters"]["lr"])
    names = [method for method, tried in rates.items() if len(tried) == 1]
    if len(rates) < 2 or not names:
        return None
    named = some_names(names, 3)
    return (
        f"Only one learning rate of {named} is compared. If it was not selected on validation rows, "
        "another rate may be better (`--sweep lr=0.001,0.01,0.1`)."
    )


def unlike_tests(results: Iterable[Record]) -> str | None:
    """Why scores may put methods or settings into a wrong order; None if this cannot happen."""
    known = list(results)
    if len(known) < 2:
        return None
    # Tests with the class shares of each client: matched ones, and those within each group of --by.
    own_shares = False
    for result in known:
        args = result.get("partition", {}).get("args", {})
        own_shares |= args.get("test_protocol") == "matched" or args.get("tests") == "within"
    without_prior = [
        r for r in known if r.get("protocol") == "global" and "client_prior" not in r["accuracy"]
    ]
    kinds = {result.get("protocol") for result in known}
    if len(kinds) > 1 and own_shares and without_prior:
        return (
            "The test rows of each client have the client's own class shares. Personal models learn these shares, "
            "but global models do not. For a fair comparison, also train methods with a global model that read "
            "labels with --client-prior fitted"
        )
    if not has_validation(known):
        return None
    cautions = (few_validation_classes(result) for result in known)
    return next(filter(None, cautions), None)


def few_validation_classes(result: Record) -> str | None:
    """Why validation may rank personal models in another order than the test rows; None if it may not."""
    partition = result.get("partition", {})
    args = partition.get("args", {})
    validation = result.get("validation")
    # Only with a domain for each client, it can be tested on all classes and validated on rows of its own. Elsewhere,
    # it shares both kinds of rows with all clients, or is tested on rows like its own.
    by_domain = partition.get("scheme") in ("feature-shift", "feature-label-shift")
    if not by_domain or args.get("test_protocol", "balanced") != "balanced":
        return None
    if result.get("protocol") != "personalised" or validation is None:
        return None
    # A client has at most as many classes among its validation rows as it has validation rows.
    most = validation["rows"] / partition["clients"]
    most = min(most, typical_classes(result) or math.inf)
    classes = result["classes"]
    if most >= classes:
        return None
    return (
        f"The validation rows of a typical client have at most {most:.3g} of {classes} classes, but "
        "personal models are tested on all classes. Validation may therefore rank settings, or personal and global "
        "models, in another order than the test rows. To test each client with its own class shares: "
        "--option test_protocol=matched"
    )


def unseen_classes(result: Record) -> list[str]:
    """A caution if personal models are tested on classes without training rows on most clients; [] otherwise."""
    args = result["partition"].get("args", {})
    if result.get("protocol") != "personalised" or args.get("test_protocol") != "balanced":
        return []
    typical = typical_classes(result)
    if typical is None or typical > result["classes"] / 2:
        return []
    return [
        f"ON UNSEEN CLASSES: each personal model is tested on all {result['classes']} classes, but a "
        f"typical client has training rows of only {typical:.3g} classes. To test with each client's own class shares: "
        "--option test_protocol=matched"
    ]


def typical_classes(result: Record) -> float | None:
    """Number of classes among the training rows of a typical client; None if the result does not have it."""
    owned = result.get("classes_owned", {})
    each = owned.get("per_client")
    if each:
        return float(np.median(each))
    mean: float | None = owned.get("mean")
    return mean
