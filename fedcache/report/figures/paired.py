"""Paired comparisons as figures: differences from a reference with their intervals, and ranks with what they tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcache.report.comparison import Comparison, Pair, compact
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
    shown: Sequence[tuple[Pair, tuple[float, float] | None, float | None]]
    shown = [(p, p.interval, p.holm) for p in pairs]
    over = f"{len(c.blocks)} {c.over}"
    own_seeds = not same_blocks(c)
    if own_seeds:
        over = f"the {c.over} that both runs have"
    # All intervals are of one kind, so that bars can be compared.
    over_rows = [(p, p.rows.interval, p.rows.holm) for p in pairs if p.rows and p.rows.interval]
    if len(over_rows) == len(pairs) and not all(p.interval for p in pairs):
        shown = over_rows
        over = "the test rows"
        if own_seeds:
            over = f"the test rows of the {c.over} that both runs have"
    if not any(reach for _, reach, _ in shown):
        return None
    alpha = 1.0 - c.level
    says = f"Mean difference from {c.reference} in points over {over}, with {100 * c.level:g} % "
    says += f"intervals; filled dots differ after Holm's correction at {alpha:.2g}."
    if own_seeds:
        named = [f"{p.one}: {compact(p.blocks)}" for p in pairs]
        if len(named) > MOST_NAMED:
            named[MOST_NAMED:] = ["..."]
        says += f" Shared {c.over}: {'; '.join(named)}."
    if not all(reach for _, reach, _ in shown):
        says += " A hollow dot without an interval could not be tested."
    of = max(len(c.pairs), runs - 1)
    if of > len(pairs):
        says += f" Of {of} runs the first {len(pairs)}, in the order of the table."

    def words_of(pair: Pair, reach: tuple[float, float] | None, holm: float | None) -> str:
        words = f"{pair.one}: {100 * pair.difference:+.2f} points"
        if reach is not None:
            words += f", {100 * reach[0]:+.2f} to {100 * reach[1]:+.2f}"
        if holm is not None:
            words += f", p {show_p(holm)} (Holm)"
        if own_seeds:
            words += f", over {c.over} {compact(pair.blocks)}"
        return words

    def fill(axes: Any, marks: Marks) -> None:
        from matplotlib.collections import LineCollection

        axes.axvline(0, color=MUTED, linewidth=1)
        words = [words_of(*one) for one in shown]
        of_run = [(keys or {}).get(p.one, "") for p in pairs]
        long = [(y, reach) for y, (_, reach, _) in enumerate(shown) if reach is not None]
        paths = [[(100 * low, y), (100 * high, y)] for y, (low, high) in long]
        lines = axes.add_collection(LineCollection(paths, colors=SERIES[0], linewidths=1.6))
        marks(lines, [words[y] for y, _ in long], [of_run[y] for y, _ in long])
        values = [100 * p.difference for p in pairs]
        faces = [SERIES[0] if h is not None and h < alpha else "none" for *_, h in shown]
        dots = axes.scatter(values, range(len(pairs)), s=34, facecolors=faces, edgecolors=SERIES[0])
        marks(dots, words, of_run)
        names = [p.one for p in pairs]
        axes.set_yticks(range(len(pairs)), shortened(names, 20))
        axes.set(
            xlabel="difference in points",
            ylabel=settings_of(names, 20),
            ylim=(len(pairs) - 0.4, -0.6),
        )
        axes.grid(visible=False, axis="y")

    columns = ["run", "difference", "low", "high", "p Holm"]
    rows: list[list[Cell]] = [[p.one, p.difference, *(r or (None, None)), h] for p, r, h in shown]
    if own_seeds:
        columns.append(c.over)
        for row, pair in zip(rows, pairs, strict=True):
            row.append(compact(pair.blocks))
    height = 1.1 + 0.3 * max(3, len(pairs))
    return Plot(ident, f"Differences from {c.reference}", says, columns, rows, fill, height=height)


def enough_blocks(c: Comparison) -> bool:
    """Whether ranks can tell anything apart: blocks enough, and a critical difference shorter than the scale."""
    return c.ranking is not None and c.ranking.blocks >= LEAST_BLOCKS and not c.ranking.too_few


def ranks(ident: str, c: Comparison) -> Plot | None:
    """The critical-difference diagram; None where blocks are too few for it to tell any two apart."""
    if c.ranking is None or not enough_blocks(c) or len(c.treatments) > MOST_BARS:
        return None
    rows: list[list[Cell]] = [[t.name, t.rank] for t in c.treatments]
    says = f"Mean ranks over {c.ranking.blocks} {c.over}, best left; a bar joins what is not told apart. "
    says += ranking_words(c) or ""
    return Plot(
        ident,
        "Ranks with the critical difference",
        says,
        ("run", "mean rank"),
        rows,
        lambda axes, _marks: fill_ranks(axes, c, INK, MUTED, longest=16),
        height=1.6 + 0.14 * len(c.treatments) + 0.14 * len(c.ranking.groups),
    )
