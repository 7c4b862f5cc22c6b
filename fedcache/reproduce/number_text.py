"""Numbers as text: what is printed, what was got, and the difference, each in the unit of its metric."""

from __future__ import annotations

from fedcache.reproduce.metrics import AgainstPrinted, Measurement, unit
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


def show_measured(measured: Measurement, metric: str) -> str:
    """Mean (std), a text, or a curve from its first to its last round."""
    if measured.curve is not None:
        first, last = show_number(measured.curve[0], metric), show_number(measured.curve[-1], metric)
        return f"{first} to {last} in {len(measured.curve)} rounds"
    if measured.mean is None:
        return measured.text or "-"
    counted = not unit(metric) and not measured.std  # what is counted is the same for every seed
    spread = "" if measured.std is None or counted else f" ({show_number(measured.std, metric)})"
    return show_number(measured.mean, metric) + spread


def show_compared(compared: AgainstPrinted, metric: str) -> tuple[str, str]:
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
