"""A comparison as Markdown, LaTeX and HTML, and its critical-difference diagram.

In tables the run that validation chose is bold, else the run with the highest mean. A dagger marks runs that do not
differ significantly from the reference. The diagram (Demšar, JMLR 7, 2006, figure 1) shows mean ranks on a line, the
best on the left. A thick bar joins treatments that do not differ by Nemenyi's test.
"""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.errors import UsageError
from fedcache.parsing import visible
from fedcache.progress import percent_range
from fedcache.report.comparison import (
    ROW_TESTS,
    SCORE_WORDS,
    Comparison,
    Interval,
    Ranking,
    Treatment,
    compact,
    constant,
    interval_words,
    is_one_group,
)
from fedcache.report.drawing import short, write_drawing
from fedcache.report.find_runs import HELD_OUT

TEST_NAMES = {"wilcoxon": "Wilcoxon's signed-rank test", "ttest": "t-test"}
DAGGER = "†"
MOST_BLOCKS = 10
"""Maximum number of seeds that a caption lists, and of held-out values that have a column each."""

_LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    DAGGER: r"$^{\dagger}$",
    "±": r"$\pm$",
}


@dataclass(frozen=True)
class Sheet:
    """Cells as text.

    Attributes:
        columns: names; the first column holds names of runs, all others numbers.
        rows: cells, one for each column.
        best: rows whose second cell is bold: the run that validation chose, or the highest values.
        alike: rows whose second cell has a dagger.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: frozenset[int] = frozenset()
    alike: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        columns: Sequence[tuple[str, Sequence[str]]],
        best: frozenset[int] = frozenset(),
        alike: frozenset[int] = frozenset(),
    ) -> Sheet:
        """Named columns as a sheet. Empty columns are left out, except for the first two."""
        kept = [*columns[:2]]
        kept += [(name, cells) for name, cells in columns[2:] if any(cells)]
        names = tuple(name for name, _ in kept)
        rows = tuple(zip(*(cells for _, cells in kept), strict=True))
        return cls(names, rows, best, alike)


def values(c: Comparison) -> Sheet:
    """The table of the runs. Its columns are run, mean with deviation, interval, rank and more where they apply."""
    runs = c.treatments
    seeds = [""] * len(runs)
    if not same_blocks(c):
        seeds = [compact(t.blocks(c.blocks)) for t in runs]
    # If some intervals are over test rows and others over blocks, a column shows the unit of each.
    over = []
    for t in runs:
        unit = ""
        if t.test_rows is not None:
            unit = "rows"
        elif t.interval is not None:
            unit = c.over
        over.append(unit)
    if len(set(over) - {""}) < 2:
        over = [""] * len(runs)
    ranks = [""] * len(runs)
    if len(c.blocks) > 1:
        ranks = [_two(t.rank) for t in runs]
    metric = c.metric
    if metric in SCORE_WORDS:
        metric = metric.replace("_", " ")
    columns = [
        ("run", [t.name for t in runs]),
        (f"{metric} %", [_mean(t) for t in runs]),
        (c.over, seeds),
        (f"{_level(c)} interval", [percent_range(_reach(t)) for t in runs]),
        ("over", over),
        ("rank", ranks),
        ("validation %", [_two(t.validation, 100) for t in runs]),
    ]
    more = []
    for t in runs:
        named = {key.replace("_", " "): v for key, v in {**t.client_prior, **t.base_to_new}.items()}
        more.append(named | {f"transfer to {name}": v for name, v in t.transfer.items()})
    for name in dict.fromkeys(itertools.chain(*more)):
        columns.append((f"{name} %", [_two(one.get(name), 100) for one in more]))
    if c.over == HELD_OUT and len(c.blocks) <= MOST_BLOCKS:
        each = zip(*(t.values for t in runs), strict=True)
        for block, accuracies in zip(c.blocks, each, strict=True):
            columns.append((block, [_two(value, 100) for value in accuracies]))
    best = c.best
    if c.chosen is not None:
        best = (c.chosen,)
    return Sheet.of(columns, _places(c, best), _places(c, c.alike))


def same_blocks(c: Comparison) -> bool:
    """Whether all treatments have a value for every block."""
    return all(None not in t.values for t in c.treatments)


def _two(value: float | None, times: float = 1) -> str:
    """A number with two decimals; "" for None."""
    if value is None:
        return ""
    return f"{times * value:.2f}"


def _mean(t: Treatment) -> str:
    """Mean in percent, with its deviation where its values differ."""
    mean = _two(t.mean, 100)
    if t.std is None or constant(t.known):
        return mean
    return f"{mean} ± {_two(t.std, 100)}"


def _reach(t: Treatment) -> Interval | None:
    """The interval that is shown: the one over test rows if there is one."""
    if t.test_rows is None:
        return t.interval
    return t.test_rows[1:]


def differences(c: Comparison) -> Sheet | None:
    """The table of the pairs: mean difference with interval and p, and the same over test rows.

    None if there is only one block, and no pair has a difference over test rows.
    """
    if len(c.blocks) < 2 and not any(p.rows for p in c.pairs):
        return None
    # With one reference, the other run of each pair is always the same and is named in the caption.
    first = ("pair", [f"{p.one} - {p.other}" for p in c.pairs])
    if _against_one(c):
        first = ("run", [p.one for p in c.pairs])
    # The shared seeds of each pair are shown only where they differ.
    over = [""] * len(c.pairs)
    if not same_blocks(c):
        over = [compact(p.blocks) for p in c.pairs]
    intervals_over_rows = []
    p_over_rows = []
    for pair in c.pairs:
        interval = ""
        p = ""
        if pair.rows is not None:
            interval = percent_range(pair.rows.interval)
            p = show_p(pair.rows.holm)
        intervals_over_rows.append(interval)
        p_over_rows.append(p)
    columns = [
        first,
        ("difference, pp", [points(p.difference) for p in c.pairs]),
        (f"over {c.over}", over),
        (f"{_level(c)} interval", [percent_range(p.interval) for p in c.pairs]),
        ("p", [show_p(p.p) for p in c.pairs]),
        ("p (Holm)", [show_p(p.holm) for p in c.pairs]),
        (f"{_level(c)} over rows", intervals_over_rows),
        ("p over rows (Holm)", p_over_rows),
    ]
    return Sheet.of(columns)


def _against_one(c: Comparison) -> bool:
    """Whether the second run of every pair is the reference."""
    return all(p.other == c.reference for p in c.pairs)


def sheets(c: Comparison) -> list[Sheet]:
    """All tables of a document: ``values``, with ``differences`` as further columns, or below them for all pairs."""
    left = values(c)
    right = differences(c)
    if right is None:
        return [left]
    if not _against_one(c):
        return [left, right]
    differences_of_run = {row[0]: row[1:] for row in right.rows}
    columns = left.columns + right.columns[1:]
    blank = ("",) * (len(right.columns) - 1)
    rows = tuple(row + differences_of_run.get(row[0], blank) for row in left.rows)
    return [Sheet(columns, rows, left.best, left.alike)]


def caption(c: Comparison) -> str:
    """The caption: metric, blocks, kind of interval, tests and marks."""
    metric = SCORE_WORDS.get(c.metric, c.metric)
    what = f"{c.setting}: {metric} in %"
    bold = f"{_rows_words(c)}. Bold: {c.chosen_by}."
    # With one block there is no mean, no interval over blocks and no test.
    if len(c.blocks) == 1:
        unit = c.over.removesuffix("s")
        return f"{what}, {unit} {c.blocks[0]}{bold}"
    over = f"over the {c.over} that each run has"
    shared = f", over the {c.over} that both have"
    if same_blocks(c):
        over = f"over {len(c.blocks)} {c.over}"
        shared = ""
        if c.over == "seeds" and len(c.blocks) <= MOST_BLOCKS:
            seeds = ", ".join(c.blocks)
            over += f" ({seeds})"
    parts = [f"{what}, mean ± standard deviation {over}"]
    kinds = dict.fromkeys(interval_words(len(t.known)) for t in c.treatments if t.interval)
    if kinds:
        named = " or ".join(kinds)
        parts.append(f"{_level(c)} {named}")
    if _against_one(c):
        parts.append(f"differences from {c.reference}{shared}")
    if c.tested:
        test = TEST_NAMES[c.test]
        parts.append(f"{test} paired over {c.over}, p corrected for {c.tested} (Holm)")
    words = "; ".join(parts) + bold
    if c.alike:
        words += f" {DAGGER}: no significant difference from {c.reference} at {c.alpha:.2g}."
    return words


def _rows_words(c: Comparison) -> str:
    """The tests of the columns over rows, and the number of rows."""
    found = [p.rows for p in c.pairs if p.rows is not None]
    if not found:
        return ""
    used = {r.test for r in found}
    tests = " or ".join(words for name, words in ROW_TESTS.items() if name in used)
    counts = sorted(r.rows for r in found)
    rows = f"{counts[0]:,}"
    if counts[0] < counts[-1]:
        rows += f" to {counts[-1]:,}"
    return f"; over rows: {tests} on {rows} test rows, p corrected for {len(found)} (Holm)"


def ranking_words(c: Comparison) -> str | None:
    """Friedman, the critical difference and the groups in one sentence; None without a ranking."""
    if c.ranking is None:
        return None
    names = [t.name for t in c.treatments]
    # Groups of runs without a difference by Nemenyi's test, each in braces.
    groups = []
    for group in c.ranking.groups:
        members = ", ".join(names[i] for i in group)
        groups.append("{" + members + "}")
    blocks = c.ranking.blocks
    if c.ranking.too_few:
        result = f"{blocks} {c.over} are too few to show any difference"
    elif is_one_group(c):
        result = "no two methods differ significantly"
    elif groups:
        listed = ", ".join(groups)
        result = f"no significant difference within: {listed}"
    else:
        result = "all methods differ significantly"
    return (
        f"Friedman's test: chi-squared {c.ranking.statistic:.2f}, p {show_p(c.ranking.p)}. Nemenyi: critical "
        f"difference of mean ranks {c.ranking.cd:.2f} at {c.alpha:.2g}; {result}."
    )


def sentences(c: Comparison) -> list[str]:
    """Sentences to read with the numbers."""
    ranked = ranking_words(c)
    if ranked is None:
        return list(c.notes)
    return [ranked, *c.notes]


def markdown(c: Comparison) -> str:
    """Tables and sentences as GitHub Markdown."""
    lines = [f"### {_markdown(c.setting)}", ""]
    for sheet in sheets(c):
        head = " | ".join(map(_markdown, sheet.columns))
        lines.append(f"| {head} |")
        # Numbers are aligned to the right.
        alignment = "| --- |" + " ---: |" * (len(sheet.columns) - 1)
        lines.append(alignment)
        for row in _marked(sheet, _markdown, _markdown, lambda s: f"**{s}**"):
            cells = " | ".join(row)
            lines.append(f"| {cells} |")
        lines.append("")
    lines.append(_markdown(caption(c)))
    lines.append("")
    lines += [f"- {_markdown(sentence)}" for sentence in sentences(c)]
    return "\n".join(lines).rstrip() + "\n"


def latex(c: Comparison) -> str:
    r"""A ``table`` for the package booktabs; the sentences are comments, so that the author can use them."""
    title = _latex(caption(c))
    lines = [r"% needs \usepackage{booktabs}"]
    lines += map(comment, sentences(c))
    lines += [r"\begin{table}", r"\centering", rf"\caption{{{title}}}"]
    for sheet in sheets(c):
        sides = "l" + "r" * (len(sheet.columns) - 1)
        head = " & ".join(map(_latex, sheet.columns))
        lines += [rf"\begin{{tabular}}{{{sides}}}", r"\toprule", rf"{head} \\", r"\midrule"]
        for row in _marked(sheet, _latex, _latex_number, lambda s: rf"\textbf{{{s}}}"):
            cells = " & ".join(row)
            lines.append(rf"{cells} \\")
        lines += [r"\bottomrule", r"\end{tabular}"]
    lines.append(r"\end{table}")
    return "\n".join(lines) + "\n"


def comment(text: str) -> str:
    """A sentence as a comment of LaTeX."""
    return f"% {visible(text)}"


def as_html(c: Comparison) -> str:
    """Tables and sentences for a notebook."""
    parts = [f"<h4>{_html(c.setting)}</h4>"]
    for sheet in sheets(c):
        head = "".join(f"<th>{_html(name)}</th>" for name in sheet.columns)
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>")
        for row in _marked(sheet, _html, _html, lambda s: f"<b>{s}</b>"):
            cells = "".join(f"<td>{cell}</td>" for cell in row)
            parts.append(f"<tr>{cells}</tr>")
        parts.append("</tbody></table>")
    parts += [f"<p>{_html(sentence)}</p>" for sentence in (caption(c), *sentences(c))]
    return "".join(parts)


def show_p(p: float | None) -> str:
    """A p value with three digits; "" for None."""
    if p is None:
        return ""
    if p < 0.001:
        return "<0.001"
    return f"{p:.3g}"


def points(difference: float) -> str:
    """A difference of fractions in percentage points, with its sign."""
    return f"{100 * difference:+.2f}".replace("-0.00", "0.00").replace("+0.00", "0.00")


def _level(c: Comparison) -> str:
    return f"{100 * c.level:g} %"


def _places(c: Comparison, names: Sequence[str]) -> frozenset[int]:
    return frozenset(i for i, t in enumerate(c.treatments) if t.name in names)


def _marked(
    sheet: Sheet,
    words: Callable[[str], str],
    numbers: Callable[[str], str],
    bold: Callable[[str], str],
) -> list[list[str]]:
    """The rows, escaped, with the best in bold and daggers.

    ``words`` escapes the first cell of a row, which is a name, and ``numbers`` all other cells.
    """
    made = []
    for i, row in enumerate(sheet.rows):
        cells = [words(row[0]), *map(numbers, row[1:])]
        if i in sheet.best:
            cells[1] = bold(cells[1])
        if i in sheet.alike:
            cells[1] += words(f" {DAGGER}")
        made.append(cells)
    return made


def _html(text: str) -> str:
    return html.escape(visible(text))


def _markdown(text: str) -> str:
    escaped = re.sub(r"[\\`*_\[\]|~#]", r"\\\g<0>", visible(text))
    return html.escape(escaped, quote=False)


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in visible(text))


def _latex_number(text: str) -> str:
    return _latex(text).replace("-", "$-$").replace(r"\textless{}", "$<$")


LINE = 0.26
"""Inches from one label to the next. This distance is the unit of y, and y grows downwards."""
LONGEST = 40
"""Maximum number of letters of a name in the diagram."""
MOST_BARS = 24
"""Maximum number of treatments with which a page shows the diagram."""
LETTER = 0.062
"""Width of a letter in inches."""
STEP = 0.55
"""Distance between two bars, in the unit of y."""


def draw_ranks(c: Comparison, path: Path) -> None:
    """Draw the diagram; equal comparisons give equal files.

    Args:
        c: of at least three treatments.
        path: ends in .png, .svg or .pdf.

    Raises:
        UsageError for another ending, a missing directory, or a comparison without a ranking; MachineError
            without matplotlib.
    """
    count = len(c.treatments)
    # Without a ranking there is nothing to draw.
    if c.ranking is None:
        raise UsageError(
            f"A critical-difference diagram needs three runs and two {c.over}, and at most one run with the same "
            f"result for all {c.over}. Found {c.over}: {len(c.blocks)}, runs: {count}.",
            "Leave --plot out, or give other runs.",
        )
    _, levels = _bars(c.ranking)
    # Half of the names are on each side, below the bars.
    lines = (count + 1) // 2 + STEP * levels
    longest = max(map(len, _rank_labels(c, LONGEST)))
    width = 3.2 + 2 * LETTER * longest + 0.12 * count
    height = LINE * (lines + 3.2) + 0.5
    p = show_p(c.ranking.p)
    description = f"{c.metric} over {c.ranking.blocks} {c.over}; Friedman p {p}"
    if c.ranking.p >= c.alpha:
        description += f": no difference at {c.alpha:.2g}"
    title = short(c.setting, 80)

    def fill(axes: Any) -> None:
        fill_ranks(axes, c)
        axes.set_title(f"{title}\n{description}", parse_math=False, fontsize=8)

    write_drawing(path, (width, height), fill)


def fill_ranks(
    axes: Any, c: Comparison, ink: str = "black", muted: str = "0.35", longest: int = LONGEST
) -> None:
    """Draw the diagram of a comparison on ``axes``; the comparison must have a ranking."""
    assert c.ranking is not None  # nosec B101
    ranks = c.ranking.ranks
    count = len(c.treatments)
    spans, levels = _bars(c.ranking)
    _scale(axes, count, c.ranking.cd, ink)
    thick = {"color": ink, "linewidth": 3.2, "solid_capstyle": "butt", "gid": "group"}
    for low, high, level in spans:
        y = STEP * (level + 1)
        axes.plot([low - 0.04, high + 0.04], [y, y], **thick)
    top = STEP * levels + 0.8
    _labels(axes, ranks, _rank_labels(c, longest), top, muted)
    bottom = top + (count + 1) // 2 - 0.4
    axes.set(xlim=(0.9, count + 0.1), ylim=(bottom, -2.3))
    axes.axis("off")


def stacked(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float, int]]:
    """Spans as (low, high, level); the level is the first one on which the span overlaps no other."""
    # The end of the last span on each level.
    ends: list[float] = []
    made = []
    for low, high in sorted(spans):
        # Between two spans on a level there must be a gap of 0.1.
        level = next((i for i, end in enumerate(ends) if end + 0.1 < low), len(ends))
        # This replaces the end of a level, or adds a level.
        ends[level : level + 1] = [high]
        made.append((low, high, level))
    return made


def _scale(axes: Any, count: int, cd: float, ink: str) -> None:
    """The line of ranks with its ticks, and the critical difference above it."""
    axes.plot([1, count], [0, 0], color=ink, linewidth=0.9)
    # At most 20 ticks have a number.
    step = -(-count // 20)
    for rank in range(1, count + 1):
        axes.plot([rank, rank], [0, -0.22], color=ink, linewidth=0.9)
        if (rank - 1) % step == 0:
            axes.text(rank, -0.32, str(rank), ha="center", va="bottom")
    # A difference that is longer than the scale is drawn as long as the scale; the words give its length.
    shown = min(cd, count - 1.0)
    axes.plot([1, 1 + shown], [-1.35, -1.35], color=ink, linewidth=1.6)
    for end in (1.0, 1.0 + shown):
        axes.plot([end, end], [-1.5, -1.2], color=ink, linewidth=0.9)
    beyond = ""
    if shown < cd:
        beyond = ", longer than the scale"
    axes.text(1 + shown / 2, -1.6, f"CD {cd:.2f}{beyond}", ha="center", va="bottom")


def _rank_labels(c: Comparison, longest: int) -> list[str]:
    labels = []
    for t in c.treatments:
        name = short(t.name, longest)
        labels.append(f"{name}  {t.rank:.2f}")
    return labels


def _bars(ranking: Ranking) -> tuple[list[tuple[float, float, int]], int]:
    """(low, high, level) of the bar of each group, and the number of levels."""
    spans = []
    for group in ranking.groups:
        inside = [ranking.ranks[i] for i in group]
        spans.append((min(inside), max(inside)))
    made = stacked(spans)
    return made, max((level + 1 for *_, level in made), default=0)


def _labels(
    axes: Any, ranks: Sequence[float], names: Sequence[str], top: float, muted: str
) -> None:
    """Names left and right of the scale, each with a line to its rank; the better half is on the left."""
    count = len(ranks)
    order = sorted(range(count), key=lambda i: (ranks[i], i))
    half = (count + 1) // 2
    for place, i in enumerate(order):
        # The extremes come first on both sides, so that no line crosses another.
        if place < half:
            y = top + place
            end = 0.9
            text = {"x": end - 0.04, "ha": "right"}
        else:
            y = top + count - 1 - place
            end = count + 0.1
            text = {"x": end + 0.04, "ha": "left"}
        axes.plot([ranks[i], ranks[i], end], [0, y, y], color=muted, linewidth=0.8)
        axes.text(y=y, s=names[i], va="center", parse_math=False, **text)
