"""Paired comparisons as figures: differences from a reference with their intervals, and ranks with what they tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcache.report.comparison import Comparison, compact
from fedcache.report.comparison_output import (
    MOST_BARS,
    fill_ranks,
    ranking_words,
    same_blocks,
    show_p,
)
from fedcache.report.drawing import INK, MUTED, SERIES, Cell, Marks, Plot, settings_of, shortened

MOST_ROWS = 20
MOST_NAMED = 4
"""Runs whose seeds the caption names."""
LEAST_BLOCKS = 5
"""Blocks from which on ranks are drawn, where the critical difference is also shorter than their scale."""


def differences(
    ident: str, c: Comparison, keys: Mapping[str, str] | None = None, runs: int = 0
) -> Plot | None:
    """Every treatment's mean difference from the reference, in points, with its interval; None without intervals.

    Args:
        ident: unique in the page.
        c: pairs with one reference.
        keys: name of a treatment -> key of its run.
        runs: that there are, where ``c`` compares the first of them.
    """
    pairs = [p for p in c.pairs if p.other == c.reference][:MOST_ROWS]
    all_rows = all(p.rows and p.rows.interval for p in pairs)
    # of one kind, so that bars can be compared
    by_rows = all_rows and not all(p.interval for p in pairs)
    shown = [
        (p, p.rows.interval if p.rows else None, p.rows.holm if p.rows else None)
        if by_rows
        else (p, p.interval, p.holm)
        for p in pairs
    ]
    if not any(reach for _, reach, _ in shown):
        return None
    alpha = 1.0 - c.level
    over = "the test rows" if by_rows else f"{len(c.blocks)} {c.over}"
    own_seeds = not same_blocks(c)
    if own_seeds:
        over = f"{'the test rows of ' if by_rows else ''}the {c.over} that both runs have"
    says = f"Mean difference from {c.reference} in points over {over}, with {100 * c.level:g} % "
    says += f"intervals; filled dots differ after Holm's correction at {alpha:.2g}."
    of = max(len(c.pairs), runs - 1)
    if own_seeds:
        named = "; ".join(f"{p.one}: {compact(p.blocks)}" for p in pairs[:MOST_NAMED])
        says += f" Shared {c.over}: {named}{'; ...' if len(pairs) > MOST_NAMED else ''}."
    says += (
        " A hollow dot without an interval could not be tested."
        if any(not reach for _, reach, _ in shown)
        else ""
    )
    says += (
        f" Of {of} runs the first {len(pairs)}, in the order of the table."
        if of > len(pairs)
        else ""
    )

    def fill(axes: Any, marks: Marks) -> None:
        from matplotlib.collections import LineCollection

        axes.axvline(0, color=MUTED, linewidth=1)
        said = [
            f"{p.one}: {100 * p.difference:+.2f} points"
            + (f", {100 * reach[0]:+.2f} to {100 * reach[1]:+.2f}" if reach else "")
            + (f", p {show_p(holm)} (Holm)" if holm is not None else "")
            + (f", over {c.over} {compact(p.blocks)}" if own_seeds else "")
            for p, reach, holm in shown
        ]
        of_run = [(keys or {}).get(p.one, "") for p, *_ in shown]
        long = [(y, reach) for y, (_, reach, _) in enumerate(shown) if reach is not None]
        lines = LineCollection(
            [[(100 * v, y) for v in reach] for y, reach in long], colors=SERIES[0], linewidths=1.6
        )
        marks(axes.add_collection(lines), [said[y] for y, _ in long], [of_run[y] for y, _ in long])
        values = [100 * p.difference for p, *_ in shown]
        sure = [h is not None and h < alpha for *_, h in shown]
        faces = [SERIES[0] if s else "none" for s in sure]
        marks(
            axes.scatter(values, range(len(shown)), s=34, facecolors=faces, edgecolors=SERIES[0]),
            said,
            of_run,
        )
        names = [p.one for p in pairs]
        axes.set_yticks(range(len(pairs)), shortened(names, 20))
        axes.set(
            xlabel="difference in points",
            ylabel=settings_of(names, 20),
            ylim=(len(pairs) - 0.4, -0.6),
        )
        axes.grid(visible=False, axis="y")

    rows: list[list[Cell]] = [
        [
            p.one,
            p.difference,
            *(reach or (None, None)),
            holm,
            *([compact(p.blocks)] if own_seeds else []),
        ]
        for p, reach, holm in shown
    ]
    columns = ("run", "difference", "low", "high", "p Holm", *([c.over] if own_seeds else []))
    height = 1.1 + 0.3 * max(3, len(pairs))
    return Plot(ident, f"Differences from {c.reference}", says, columns, rows, fill, height=height)


def enough_blocks(c: Comparison) -> bool:
    """Whether ranks can tell anything apart: blocks enough, and a critical difference shorter than the scale."""
    return c.ranking is not None and c.ranking.blocks >= LEAST_BLOCKS and not c.ranking.too_few


def ranks(ident: str, c: Comparison) -> Plot | None:
    """The critical-difference diagram; None where blocks are too few for it to tell any two apart."""
    words = ranking_words(c)
    if c.ranking is None or words is None or not enough_blocks(c) or len(c.treatments) > MOST_BARS:
        return None

    def fill(axes: Any, _marks: Marks) -> None:
        fill_ranks(axes, c, INK, MUTED, longest=16)

    rows: list[list[Cell]] = [[t.name, t.rank] for t in c.treatments]
    says = f"Mean ranks over {c.ranking.blocks} {c.over}, best left; a bar joins what is not told apart. {words}"
    height = 1.6 + 0.14 * len(c.treatments) + 0.14 * len(c.ranking.groups)
    return Plot(
        ident,
        "Ranks with the critical difference",
        says,
        ("run", "mean rank"),
        rows,
        fill,
        height=height,
    )
