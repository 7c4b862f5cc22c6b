"""Metrics of a finished run in the unit that the papers print, and their comparison as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcache.errors import unknown
from fedcache.federate.methods.common.model import head_of
from fedcache.report.comparison import LEAST_BLOCKS, student_half
from fedcache.reproduce.planning import Printed, find_domain
from fedcache.runs.directory import rounds_of

if TYPE_CHECKING:
    from fedcache.runs.run import Run

Value = float | str | list[float]

LEVEL = 0.95
"""Level of the intervals over seeds."""

NEAR = 0.5
"""Maximum distance in points from the best accuracy at which an accuracy counts as near it (``near_best``)."""


@dataclass(frozen=True)
class Measurement:
    """Measured value over seeds.

    Attributes:
        mean: None for a text, a curve, or nothing.
        std: standard deviation over seeds, ddof 1; None with one seed.
        n: number of seeds.
        text: a text or the path of a picture.
        curve: one number per round, mean over seeds.
        half: half of the 95 % interval of the mean (Student's); None with fewer than three seeds.
    """

    mean: float | None = None
    std: float | None = None
    n: int = 0
    text: str | None = None
    curve: tuple[float, ...] | None = None
    half: float | None = None


@dataclass(frozen=True)
class AgainstPrinted:
    """Got minus printed.

    Attributes:
        difference: in the metric's unit; None unless both are numbers.
        errors: the difference in standard errors; None where no spread is known.
        spread: the std that the standard error uses: ``both`` | ``printed`` | ``got``; "" for none.
        same: whether two texts are equal; None unless both are texts.
    """

    difference: float | None = None
    errors: float | None = None
    spread: str = ""
    same: bool | None = None


def over_seeds(values: Sequence[Value | None]) -> Measurement:
    """Combine one value per seed into one measurement; it is empty when any seed lacks the value."""
    known = [v for v in values if v is not None]
    # With a seed missing, the mean would cover fewer runs than the paper's.
    if not known or len(known) < len(values):
        return Measurement(n=len(values))
    first = known[0]
    if isinstance(first, str):
        return Measurement(text=first, n=len(known))
    # Curves are averaged round by round.
    if isinstance(first, list):
        curves = np.array(known, np.float64)
        mean_curve = np.mean(curves, axis=0)
        return Measurement(curve=tuple(mean_curve.tolist()), n=len(known))
    numbers = np.array(known, np.float64)
    deviation = None
    half = None
    if len(numbers) > 1:
        deviation = float(numbers.std(ddof=1))
    if len(numbers) >= LEAST_BLOCKS:
        half = student_half(numbers, LEVEL)
    return Measurement(float(numbers.mean()), deviation, len(numbers), half=half)


def compare(printed: Printed | None, printed_seeds: int, measured: Measurement) -> AgainstPrinted:
    """The difference between measured and printed value, also in units of its standard error.

    The standard error is sqrt(s_p^2 / n_p + s_g^2 / n_g) for printed (p) and measured (g) values. A std that is missing
    is left out of it; ``spread`` says which one was used.
    """
    if printed is None:
        return AgainstPrinted()
    # Text can only be equal or different.
    if printed.text is not None:
        if measured.text is None:
            return AgainstPrinted()
        return AgainstPrinted(same=measured.text == printed.text)
    if printed.mean is None or measured.mean is None:
        return AgainstPrinted()
    difference = measured.mean - printed.mean
    # The variance of a mean over n seeds is s^2 / n; those of printed and measured add up.
    parts = {}
    if printed.std is not None and printed_seeds:
        parts["printed"] = printed.std**2 / printed_seeds
    if measured.std is not None:
        parts["got"] = measured.std**2 / measured.n
    error = math.sqrt(sum(parts.values()))
    if not error:
        return AgainstPrinted(difference)
    spread = "both"
    if len(parts) == 1:
        # ``printed`` or ``got``, the only std that is known.
        (spread,) = parts
    return AgainstPrinted(difference, difference / error, spread)


def subtract(a: Measurement, b: Measurement) -> Measurement:
    """The difference of two measured means; their variances add, as the runs are independent."""
    if a.mean is None or b.mean is None:
        return Measurement(n=min(a.n, b.n))
    if a.std is None or b.std is None:
        std = None
    else:
        std = math.hypot(a.std, b.std)
    return Measurement(a.mean - b.mean, std, min(a.n, b.n))


def measure(metric: str, run: Run) -> Value | None:
    """A metric of a run of one seed; None when the run does not have it.

    Raises:
        UsageError for an unknown metric.
    """
    # ``client:4`` and ``curve:loss`` are metrics with an argument.
    name, _, argument = metric.partition(":")
    if name not in METRICS:
        raise unknown("metric", metric, METRICS)
    return METRICS[name](run, argument)


def unit(metric: str) -> str:
    """The unit of a metric's numbers: ``%`` | ``points`` | ``s`` | ``bits`` | "" for none."""
    name, _, argument = metric.partition(":")
    # ``curve:loss`` is a curve of a number without a unit; only ``curve`` is one of accuracies.
    if name == "curve" and argument:
        return ""
    return UNITS.get(name, "")


def _percent(value: Any) -> float | None:
    if value is None:
        return None
    return 100.0 * float(value)


def _at(*keys: str, scale: float = 1.0) -> Callable[[Run, str], Value | None]:
    """A function that reads the number at these keys of a run's result, times ``scale``; None without a number."""

    def read(run: Run, _argument: str) -> Value | None:
        value: Any = run.result
        for key in keys:
            value = value.get(key, {})
        # {} stands for a key that is missing.
        if value is None or value == {}:
            return None
        return scale * float(value)

    return read


def _client_min(run: Run, _argument: str) -> Value | None:
    known = run.clients.scored
    if len(known):
        return _percent(known.min())
    return None


def _client(run: Run, argument: str) -> Value | None:
    values = run.clients.accuracy
    client = int(argument)
    if client < len(values) and not np.isnan(values[client]):
        return _percent(values[client])
    return None


def _domain(run: Run, argument: str) -> Value | None:
    values: Mapping[str, float] = run.accuracy["per_domain"]
    name = find_domain(argument, list(values))
    if name is None:
        return None
    return _percent(values[name])


def _params(run: Run, _argument: str) -> Value | None:
    return float(run.traffic["paper"]["per_client_round"]["up"])


def _head_params(run: Run, _argument: str) -> Value | None:
    """Weights of P and Q without biases, for the features of this run; with an encoder, all trainable parameters."""
    hyperparameters = run.result["hyperparameters"]
    if "encoder" in hyperparameters:
        return float(run.result["parameters"]["trainable"])
    head = head_of({"dim": hyperparameters.get("dim", 256)}, "mlp")
    width = sum(run.result["widths"])
    return float(head.paper_weights(width, run.result["classes"]))


def _seconds(run: Run, _argument: str) -> Value | None:
    """Mean seconds of a round over all rounds of all seeds."""
    rounds: list[float] = []
    for seed in run.measured.get("per_seed", {}).values():
        rounds += seed.get("rounds", ())
    if rounds:
        return float(np.mean(rounds))
    return None


def _curve(run: Run, argument: str) -> Value | None:
    """Accuracy after each round, or one of the method's own numbers (``curve:loss``)."""
    values = []
    for record in rounds_of(run.path):
        if argument:
            diagnostics = record.get("diagnostics") or {}
            value = record.get(argument, diagnostics.get(argument))
        else:
            value = _percent(record.get("accuracy"))
        if value is None:
            return None
        values.append(float(value))
    return values or None


def _near_best(run: Run, argument: str) -> Value | None:
    """The first round whose accuracy is within ``NEAR`` points of the best."""
    curve = _curve(run, argument)
    if not isinstance(curve, list):
        return None
    enough = max(curve) - NEAR
    return float(next(i for i, accuracy in enumerate(curve, 1) if accuracy >= enough))


TAILS = ("worst10", "worst20", "worst40", "best10")
"""Metrics that are mean accuracies of the worst or best 10, 20 or 40 % of clients."""

METRICS: Mapping[str, Callable[[Run, str], Value | None]] = {
    "accuracy": _at("accuracy", "mean", scale=100.0),
    "client_mean": _at("accuracy", "client_mean", scale=100.0),
    "client_min": _client_min,
    "client": _client,
    "domain": _domain,
    **{tail: _at("fairness", tail, scale=100.0) for tail in TAILS},
    "std": _at("fairness", "std_pp"),
    "params": _params,
    "head_params": _head_params,
    "fixed_params": _at("parameters", "fixed"),
    "macro_f1": _at("macro_f1", "mean", scale=100.0),
    "seconds_per_round": _seconds,
    "curve": _curve,
    "near_best": _near_best,
}
"""Metrics that entries with ``kind = "runs"`` can measure."""

UNITS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "accuracy",
            "client_mean",
            "client_min",
            "client",
            "domain",
            *TAILS,
            "macro_f1",
            "curve",
        ),
        "%",
    ),
    "std": "points",
    "seconds_per_round": "s",
    "entropy_bound": "bits",
    "entropy_mean": "bits",
    "entropy_least": "bits",
}


def show_metric(metric: str) -> str:
    """A metric with its unit."""
    words = metric.replace("_", " ").replace(":", " ")
    if unit(metric):
        return f"{words} ({unit(metric)})"
    return words


def show_number(value: float, metric: str) -> str:
    """A number as text with 3 decimals for bits and 2 for other units.

    Without a unit, whole numbers have no decimals, bounds of theorem 4.1 have 5, and all other numbers 2.
    """
    if unit(metric) == "bits":
        return f"{value:.3f}"
    if unit(metric):
        return f"{value:.2f}"
    if float(value).is_integer():
        return f"{value:,.0f}"
    digits = 2
    if metric.startswith("bound_"):
        digits = 5
    return f"{value:,.{digits}f}"


def show_printed(printed: Printed | None, metric: str) -> str:
    """A printed value as the paper shows it: mean (std), or its text."""
    if printed is None:
        return "-"
    if printed.mean is None:
        return printed.text or "-"
    return _with_std(printed.mean, printed.std, metric)


def _with_std(mean: float, std: float | None, metric: str) -> str:
    """``mean (std)``, or the mean alone."""
    words = show_number(mean, metric)
    if std is None:
        return words
    spread = show_number(std, metric)
    return f"{words} ({spread})"


def show_measured(measured: Measurement, metric: str) -> str:
    """Mean (std) ± half of the interval, a text, or a curve from its first to its last round."""
    if measured.curve is not None:
        first = show_number(measured.curve[0], metric)
        last = show_number(measured.curve[-1], metric)
        rounds = len(measured.curve)
        return f"{first} to {last} in {rounds} rounds"
    if measured.mean is None:
        return measured.text or "-"
    # A count that is the same for every seed has no spread worth showing.
    if not unit(metric) and not measured.std:
        return show_number(measured.mean, metric)
    words = _with_std(measured.mean, measured.std, metric)
    if measured.half is not None:
        words += f" ± {show_number(measured.half, metric)}"
    return words


def show_compared(compared: AgainstPrinted, metric: str) -> tuple[str, str]:
    """The difference, and its standard errors with a note if only one std is known."""
    # A text is equal or differs; it has no standard error.
    if compared.same is not None:
        words = "differs"
        if compared.same:
            words = "equal"
        return words, ""
    if compared.difference is None:
        return "", ""
    sign = "-"
    if compared.difference >= 0:
        sign = "+"
    difference = sign + show_number(abs(compared.difference), metric)
    if compared.errors is None:
        return difference, "-"
    whose = ""
    if compared.spread != "both":
        whose = f" ({compared.spread} std only)"
    return difference, f"{compared.errors:+.1f}{whose}"
