"""Does a proxy order the rows as the paper does? On other data the numbers say nothing, their order may.

Rows that share every label but the last are a group; the last label is what a paper ranks (methods, losses, terms). Of
each group: both ranks of every row, Kendall's tau-b, and which pairs are ordered as printed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedcache.reproduce.metrics import Measurement, name
from fedcache.reproduce.registry import PaperCell
from fedcache.reproduce.runner import ReproducedCell, Reproduction

LEADING = ("accuracy", "client_mean", "client_min")
"""What a row is ranked by if its paper prints it; else the first of its metrics with a printed number."""

Pair = tuple[str, str]
"""Last labels of two rows; the first is printed above the second."""


@dataclass(frozen=True)
class RankedRow:
    """A row of a group that has a printed number and one that was got.

    Attributes:
        line: the row.
        metric: what it is ranked by.
        printed: the number printed.
        got: the mean that was measured.
        measured: it with its spread.
        rank_printed: 1 for the largest of the group; equals share the smallest rank.
        rank_got: likewise.
    """

    line: ReproducedCell
    metric: str
    printed: float
    got: float
    measured: Measurement
    rank_printed: int
    rank_got: int

    @property
    def label(self) -> str:
        """The value of the last label."""
        return self.line.cell.at[-1]


@dataclass(frozen=True)
class RowRanking:
    """Two orders of one group.

    Attributes:
        at: the labels its rows share, in the order of the entry's.
        places: two rows or more, as the registry has them.
        tau: Kendall's tau-b of the numbers printed and got; None where one side is all equal.
        agree: pairs ordered as printed, by one standard error of the difference or more.
        reverse: pairs the other way round, likewise.
        undecided: pairs got within one standard error, or equal.
        tied: pairs that are printed equal, of which there is nothing to say.
    """

    at: tuple[str, ...]
    places: tuple[RankedRow, ...]
    tau: float | None
    agree: tuple[Pair, ...]
    reverse: tuple[Pair, ...]
    undecided: tuple[Pair, ...]
    tied: tuple[Pair, ...]

    def sentence(self) -> str:
        """Where the order agrees with the paper and where it does not."""
        metrics = dict.fromkeys(name(p.metric) for p in self.places)
        where = ", ".join((*self.at, " and ".join(metrics)))
        counted = len(self.agree) + len(self.reverse) + len(self.undecided)
        parts = [f"{len(self.agree)} of {counted} pairs as printed{_pairs(self.agree)}"]
        if self.reverse:
            parts.append(
                f"{len(self.reverse)} the other way round{_pairs(self.reverse, 'printed above')}"
            )
        if self.undecided:
            parts.append(
                f"{len(self.undecided)} undecided, less than one standard error apart{_pairs(self.undecided, 'and')}"
            )
        if self.tied:
            parts.append(f"{len(self.tied)} printed equal{_pairs(self.tied, 'and')}")
        single = all(p.measured.std is None for p in self.places)
        alone = ""
        if single:
            alone = " There is one seed, so no standard error: every difference counts."
        tau = ""
        if self.tau is not None:
            tau = f" Kendall's tau-b is {self.tau:+.2f}."
        return f"PROXY, order of {where}: {'; '.join(parts)}.{tau}{alone}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "proxy": True,
            "at": list(self.at),
            "rows": [
                {
                    "row": p.label,
                    "metric": p.metric,
                    "rank_printed": p.rank_printed,
                    "rank_got": p.rank_got,
                    "printed": p.printed,
                    "got": p.got,
                }
                for p in self.places
            ],
            "tau_b": self.tau,
            "as_printed": [list(pair) for pair in self.agree],
            "reversed": [list(pair) for pair in self.reverse],
            "undecided": [list(pair) for pair in self.undecided],
            "printed_equal": [list(pair) for pair in self.tied],
            "sentence": self.sentence(),
        }


def orders(report: Reproduction) -> list[RowRanking]:
    """The groups of a proxy with at least two rows to rank, in the registry's order; [] where runs are not compared."""
    if not report.proxy or report.entry.kind != "runs":
        return []
    groups: dict[tuple[str, ...], list[ReproducedCell]] = {}
    for line in report.lines:
        groups.setdefault(line.cell.at[:-1], []).append(line)
    made = [order(at, lines) for at, lines in groups.items()]
    return [one for one in made if one is not None]


def order(at: tuple[str, ...], lines: Sequence[ReproducedCell]) -> RowRanking | None:
    """Both orders of a group's rows; None with fewer than two that have both numbers."""
    found = [(line, *known) for line in lines if (known := _numbers(line)) is not None]
    if len(found) < 2:
        return None
    prints = [f[2] for f in found]
    means = [f[3] for f in found]
    places = tuple(
        RankedRow(*f, rank_printed=_rank(f[2], prints), rank_got=_rank(mean, means))
        for f, mean in zip(found, means, strict=True)
    )
    sorts: dict[str, list[Pair]] = {"agree": [], "reverse": [], "undecided": [], "tied": []}
    for a, b in itertools.combinations(places, 2):
        above, below = (a, b) if a.printed >= b.printed else (b, a)
        sorts[_verdict(above, below)].append((above.label, below.label))
    return RowRanking(at, places, _tau(prints, means), **{k: tuple(v) for k, v in sorts.items()})


def ranked_by(cell: PaperCell) -> tuple[str, float] | None:
    """The metric a row is ranked by and the number printed of it, or None where no number is printed."""
    every = zip(cell.metrics, cell.printed, strict=True)
    printed = {metric: p.mean for metric, p in every if p is not None and p.mean is not None}
    metric = next((m for m in printed if m in LEADING), next(iter(printed), None))
    if metric is None:
        return None
    return (metric, printed[metric])


def _numbers(line: ReproducedCell) -> tuple[str, float, float, Measurement] | None:
    """What a row is ranked by, the number printed, the mean got, and all of what was; None where one is missing."""
    ranked = ranked_by(line.cell)
    if ranked is None or line.why_not:
        return None
    metric, printed = ranked
    measured = line.measured[metric]
    if measured.mean is None:
        return None
    return (metric, printed, measured.mean, measured)


def _rank(value: float, values: Sequence[float]) -> int:
    return 1 + sum(v > value for v in values)


def _verdict(above: RankedRow, below: RankedRow) -> str:
    if above.printed == below.printed:
        return "tied"
    apart = above.got - below.got
    error = math.sqrt(
        sum(p.measured.std**2 / p.measured.n for p in (above, below) if p.measured.std is not None)
    )
    if apart == 0.0 or abs(apart) < error:
        return "undecided"
    if apart > 0:
        return "agree"
    return "reverse"


def _tau(printed: Sequence[float], measured: Sequence[float]) -> float | None:
    from scipy.stats import kendalltau  # a second to import, needed by proxies alone

    if len(set(printed)) == 1 or len(set(measured)) == 1:
        return None
    return float(kendalltau(printed, measured, variant="b").statistic)


def _pairs(pairs: Sequence[Pair], word: str = "above") -> str:
    """`` (A above B, C; B above C)``, pairs with the same first row together."""
    if not pairs:
        return ""
    lower: dict[str, list[str]] = {}
    for above, below in pairs:
        lower.setdefault(above, []).append(below)
    said = "; ".join(" ".join((above, word, ", ".join(below))) for above, below in lower.items())
    return f" ({said})"
