"""Numbers as text: what is printed, what was got, and the difference, each in the unit of its metric."""

from __future__ import annotations

from fedcache.reproduce.metrics import Compared, Got, unit
from fedcache.reproduce.registry import Printed


def name(metric: str) -> str:
    """A metric with its unit."""
    words = metric.replace("_", " ").replace(":", " ")
    return f"{words} ({unit(metric)})" if unit(metric) else words


def show_number(value: float, metric: str) -> str:
    """Two decimals for what has a unit, whole numbers for what is counted, five decimals for a bound."""
    if unit(metric):
        return f"{value:.3f}" if unit(metric) == "bits" else f"{value:.2f}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.{5 if metric.startswith('bound_') else 2}f}"


def show_printed(printed: Printed | None, metric: str) -> str:
    """As the paper has it: mean (std)."""
    if printed is None:
        return "-"
    if printed.mean is None:
        return printed.text or "-"
    spread = f" ({show_number(printed.std, metric)})" if printed.std is not None else ""
    return show_number(printed.mean, metric) + spread


def show_got(got: Got, metric: str) -> str:
    """Mean (std), a text, or a curve from its first to its last round."""
    if got.curve is not None:
        first, last = show_number(got.curve[0], metric), show_number(got.curve[-1], metric)
        return f"{first} to {last} in {len(got.curve)} rounds"
    if got.mean is None:
        return got.text or "-"
    counted = not unit(metric) and not got.std  # what is counted is the same for every seed
    spread = "" if got.std is None or counted else f" ({show_number(got.std, metric)})"
    return show_number(got.mean, metric) + spread


def show_compared(compared: Compared, metric: str) -> tuple[str, str]:
    """The difference, and its standard errors with whose spread they are of."""
    if compared.same is not None:
        return ("equal" if compared.same else "differs"), ""
    if compared.difference is None:
        return "", ""
    sign = "+" if compared.difference >= 0 else "-"
    difference = sign + show_number(abs(compared.difference), metric)
    if compared.errors is None:
        return difference, "-"
    whose = "" if compared.spread == "both" else f" ({compared.spread} std only)"
    return difference, f"{compared.errors:+.1f}{whose}"
