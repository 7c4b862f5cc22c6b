"""Paired comparisons as figures: differences from a reference with their intervals, and ranks with what they tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcache.report.comparison_output import MOST_BARS, fill_ranks, ranking_words, show_p
from fedcache.report.drawing import INK, MUTED, SERIES, Cell, Marks, Plot, plot, settings_of, shortened
from fedcache.report.paired_tests import Comparison

MOST_ROWS = 20
LEAST_BLOCKS = 5
"""Blocks from which on ranks are drawn, where the critical difference is also shorter than their scale."""


def differences(ident: str, c: Comparison, keys: Mapping[str, str] | None = None) -> Plot | None:
    """Every treatment's mean difference from the reference, in points, with its interval; None without intervals.

    Args:
        ident: unique in the page.
        c: pairs with one reference.
        keys: name of a treatment -> key of its run.
    """
    pairs = [p for p in c.pairs if p.other == c.reference][:MOST_ROWS]
    by_rows = not any(p.interval for p in pairs)
    shown = [(p, p.rows.interval if p.rows else None, p.rows.holm if p.rows else None) if by_rows else
             (p, p.interval, p.holm) for p in pairs]  # fmt: skip
    if not any(reach for _, reach, _ in shown):
        return None
    alpha = 1.0 - c.level
    over = "the test rows" if by_rows else f"{len(c.blocks)} {c.over}"
    says = f"Mean difference from {c.reference} in points over {over}, with {100 * c.level:g} % "
    says += f"intervals; filled dots differ after Holm's correction at {alpha:.2g}."
    says += f" The first {len(pairs)} of {len(c.pairs)}." if len(c.pairs) > len(pairs) else ""

    def fill(axes: Any, marks: Marks) -> None:
        axes.axvline(0, color=MUTED, linewidth=1)
        for y, (p, reach, holm) in enumerate(shown):
            key = (keys or {}).get(p.one, "")
            value, sure = 100 * p.difference, holm is not None and holm < alpha
            if reach is not None:
                (line,) = axes.plot([100 * v for v in reach], [y, y], color=SERIES[0], linewidth=1.6)
                marks(line, (), key)
            said = f"{p.one}: {value:+.2f} points"
            said += f", {100 * reach[0]:+.2f} to {100 * reach[1]:+.2f}" if reach else ""
            said += f", p {show_p(holm)} (Holm)" if holm is not None else ""
            face = SERIES[0] if sure else "none"
            marks(axes.scatter([value], [y], s=34, facecolors=face, edgecolors=SERIES[0]), [said], [key])
        names = [p.one for p in pairs]
        axes.set_yticks(range(len(pairs)), shortened(names, 20))
        axes.set(xlabel="difference in points", ylabel=settings_of(names, 20), ylim=(len(pairs) - 0.4, -0.6))
        axes.grid(visible=False, axis="y")

    rows: list[list[Cell]] = [[p.one, p.difference, *(reach or (None, None)), holm] for p, reach, holm in shown]
    columns = ("run", "difference", "low", "high", "p Holm")
    height = 1.1 + 0.3 * max(3, len(pairs))
    return plot(ident, f"Differences from {c.reference}", says, columns, rows, fill, height=height)


def enough_blocks(c: Comparison) -> bool:
    """Whether ranks can tell anything apart: blocks enough, and a critical difference shorter than the scale."""
    return c.ranking is not None and len(c.blocks) >= LEAST_BLOCKS and c.ranking.cd < len(c.treatments) - 1


def ranks(ident: str, c: Comparison) -> Plot | None:
    """The critical-difference diagram; None where blocks are too few for it to tell any two apart."""
    words = ranking_words(c)
    if c.ranking is None or words is None or not enough_blocks(c) or len(c.treatments) > MOST_BARS:
        return None

    def fill(axes: Any, _marks: Marks) -> None:
        fill_ranks(axes, c, INK, MUTED, longest=16)

    rows: list[list[Cell]] = [[t.name, t.rank] for t in c.treatments]
    says = f"Mean ranks over {len(c.blocks)} {c.over}, best left; a bar joins what is not told apart. {words}"
    height = 1.6 + 0.14 * len(c.treatments) + 0.14 * len(c.ranking.groups)
    return plot(ident, "Ranks with the critical difference", says, ("run", "mean rank"), rows, fill, height=height)
