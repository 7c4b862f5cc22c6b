"""The critical-difference diagram of a comparison (Demšar, JMLR 7, 2006, figure 1): mean ranks on a line, best left.

A thick bar joins treatments that Nemenyi's test does not tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcache.errors import UsageError
from fedcache.report.comparison_text import show_p
from fedcache.report.drawing_files import plain, write_drawing
from fedcache.report.paired_tests import Comparison

LINE = 0.26
"""Inches from a label to the next; y is counted in lines, downwards."""
LONGEST = 40
LETTER = 0.062
"""Inches of a letter."""


def draw(c: Comparison, path: Path) -> None:
    """Draw the diagram; equal comparisons give equal files.

    Args:
        c: of at least three treatments.
        path: ends in .png, .svg or .pdf.

    Raises:
        UsageError for another ending, a missing directory, or a comparison without a ranking; MachineError
            without matplotlib.
    """
    if c.ranking is None:
        raise UsageError(
            f"A critical-difference diagram takes three runs or more and two {c.over} or more; there are "
            f"{len(c.treatments)} and {len(c.blocks)}.",
            "Leave --plot out, or name more runs.",
        )
    ranking, count = c.ranking, len(c.treatments)
    bars = stacked([_span(ranking.ranks, group) for group in ranking.groups])
    names = [f"{plain(t.name, LONGEST)}  {t.rank:.2f}" for t in c.treatments]
    lines = -(-count // 2) + 0.55 * (max((level for *_, level in bars), default=-1) + 1)
    width = 3.2 + 2 * LETTER * max(map(len, names)) + 0.12 * count
    alpha = 1.0 - c.level
    says = f"{c.metric} over {len(c.blocks)} {c.over}; Friedman p {show_p(ranking.p)}" + (
        f": no difference at {alpha:.2g}" if ranking.p >= alpha else ""
    )

    def fill(axes: Any) -> None:
        _scale(axes, count, ranking.cd)
        for low, high, level in bars:
            y = 0.55 * (level + 1)
            axes.plot(
                [low - 0.04, high + 0.04], [y, y], color="black", linewidth=3.2, solid_capstyle="butt", gid="group"
            )
        top = 0.55 * (max((level for *_, level in bars), default=-1) + 1) + 0.8
        _labels(axes, ranking.ranks, names, top)
        axes.set_title(f"{plain(c.setting, 80)}\n{says}", parse_math=False, fontsize=8)
        axes.set(xlim=(0.9, count + 0.1), ylim=(top + -(-count // 2) - 0.4, -2.3))
        axes.axis("off")

    write_drawing(path, (width, LINE * (lines + 3.2) + 0.5), fill)


def stacked(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float, int]]:
    """Spans (low, high) with the first level on which each meets no other."""
    ends: list[float] = []
    made = []
    for low, high in sorted(spans):
        level = next((i for i, end in enumerate(ends) if end + 0.1 < low), len(ends))
        ends[level : level + 1] = [high]
        made.append((low, high, level))
    return made


def _span(ranks: Sequence[float], group: Sequence[int]) -> tuple[float, float]:
    inside = [ranks[i] for i in group]
    return min(inside), max(inside)


def _scale(axes: Any, count: int, cd: float) -> None:
    """The line of ranks with its ticks, and the critical difference above it."""
    axes.plot([1, count], [0, 0], color="black", linewidth=0.9)
    step = -(-count // 20)
    for rank in range(1, count + 1):
        axes.plot([rank, rank], [0, -0.22], color="black", linewidth=0.9)
        if (rank - 1) % step == 0:
            axes.text(rank, -0.32, str(rank), ha="center", va="bottom")
    shown = min(cd, count - 1.0)  # a longer one tells nothing apart, and the words say how long it is
    axes.plot([1, 1 + shown], [-1.35, -1.35], color="black", linewidth=1.6)
    for end in (1.0, 1.0 + shown):
        axes.plot([end, end], [-1.5, -1.2], color="black", linewidth=0.9)
    beyond = ", longer than the scale" if shown < cd else ""
    axes.text(1 + shown / 2, -1.6, f"CD {cd:.2f}{beyond}", ha="center", va="bottom")


def _labels(axes: Any, ranks: Sequence[float], names: Sequence[str], top: float) -> None:
    """Names left and right of the scale, each joined to its place; the better half is on the left."""
    count = len(ranks)
    order = sorted(range(count), key=lambda i: (ranks[i], i))
    half = -(-count // 2)
    for place, i in enumerate(order):
        left = place < half
        # The extremes come first on both sides, so that no line crosses another.
        y = top + (place if left else count - 1 - place)
        end = 0.9 if left else count + 0.1
        axes.plot([ranks[i], ranks[i], end], [0, y, y], color="0.35", linewidth=0.8)
        axes.text(
            end + (-0.04 if left else 0.04), y, names[i], ha="right" if left else "left", va="center", parse_math=False
        )
