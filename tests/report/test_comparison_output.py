"""A comparison in words, tables and a diagram, whole: three runs whose numbers are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from fedcache.report import comparison_output
from fedcache.report.comparison_output import draw_ranks, latex, markdown, ranking_words, stacked
from fedcache.report.paired_tests import Comparison, Pair, Treatment
from fedcache.report.statistics import Ranking

SEEDS = ("0", "1", "2")
A = Treatment("a_1", (0.5, 0.6, 0.7), 0.6, 0.1, (0.5, 0.7), 1.25)
B = Treatment("b", (0.58, 0.58, 0.58), 0.58, 0.0, None, 1.75)
C = Treatment("c", (0.1, 0.2, 0.3), 0.2, 0.1, (0.1, 0.3), 3.0)
THREE = Comparison(
    setting="x & y", over="seeds", metric="accuracy", test="ttest", level=0.9, blocks=SEEDS,
    treatments=(A, B, C), reference="a_1",
    pairs=(
        Pair("b", "a_1", -0.02, (-0.12, 0.08), 0.25, 0.25, blocks=SEEDS),
        Pair("c", "a_1", -0.4, None, 0.0004, 0.0008, blocks=SEEDS),
    ),
    ranking=Ranking((1.25, 1.75, 3.0), 4.5, 0.105, 1.6, ((0, 1), (1, 2)), 3), notes=("A <note>.",),
)  # fmt: skip
EVERY = replace(THREE, pairs=(*THREE.pairs, Pair("b", "c", 0.38, None, None, None, blocks=SEEDS)), notes=())

MARKDOWN = r"""### x &amp; y

| run | accuracy % | 90 % interval | rank | difference, pp | 90 % interval | p | p (Holm) |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| a\_1 | **60.00 ± 10.00** | 50.00 to 70.00 | 1.25 |  |  |  |  |
| b | 58.00 † |  | 1.75 | -2.00 | -12.00 to 8.00 | 0.25 | 0.25 |
| c | 20.00 ± 10.00 | 10.00 to 30.00 | 3.00 | -40.00 |  | &lt;0.001 | &lt;0.001 |

x &amp; y: accuracy in %, mean ± standard deviation over 3 seeds (0, 1, 2); 90 % Student's t intervals; \
differences from a\_1; t-test paired over seeds, p corrected for 2 (Holm). Bold: highest test accuracy \
(not a choice). †: not told from a\_1 at 0.1.

- Friedman's test: chi-squared 4.50, p 0.105. Nemenyi: critical difference of mean ranks 1.60 at 0.1; not told apart: \
{a\_1, b}, {b, c}.
- A &lt;note&gt;.
""".replace("\\\n", "")
LATEX = r"""% needs \usepackage{booktabs}
% Friedman's test: chi-squared 4.50, p 0.105. Nemenyi: critical difference of mean ranks 1.60 at 0.1; not told apart: @
{a_1, b}, {b, c}.
\begin{table}
\centering
\caption{x \& y: accuracy in \%, mean $\pm$ standard deviation over 3 seeds (0, 1, 2); 90 \% Student's t @
intervals; t-test paired over seeds, p corrected for 2 (Holm). Bold: highest test accuracy @
(not a choice). $^{\dagger}$: not told from a\_1 at 0.1.}
\begin{tabular}{lrrr}
\toprule
run & accuracy \% & 90 \% interval & rank \\
\midrule
a\_1 & \textbf{60.00 $\pm$ 10.00} & 50.00 to 70.00 & 1.25 \\
b & 58.00 $^{\dagger}$ &  & 1.75 \\
c & 20.00 $\pm$ 10.00 & 10.00 to 30.00 & 3.00 \\
\bottomrule
\end{tabular}
\begin{tabular}{lrrrr}
\toprule
pair & difference, pp & 90 \% interval & p & p (Holm) \\
\midrule
b - a\_1 & $-$2.00 & $-$12.00 to 8.00 & 0.25 & 0.25 \\
c - a\_1 & $-$40.00 &  & $<$0.001 & $<$0.001 \\
b - c & +38.00 &  &  &  \\
\bottomrule
\end{tabular}
\end{table}
""".replace("@\n", "")


def test_the_markdown_of_a_comparison_with_a_reference() -> None:
    assert markdown(THREE) == MARKDOWN


def test_the_latex_of_a_comparison_of_all_pairs_has_two_tables() -> None:
    assert latex(EVERY) == LATEX


def test_the_groups_of_a_ranking_in_words() -> None:
    assert THREE.ranking is not None
    for groups, words in ((((0, 1, 2),), "none is told"), (((1, 2),), "{b, c}"), ((), "all are told")):
        said = ranking_words(replace(THREE, ranking=replace(THREE.ranking, groups=groups)))
        assert said is not None
        assert words in said
    assert ranking_words(replace(THREE, ranking=None)) is None


def drawn(c: Comparison, monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[float, float], Any]:
    """Size in inches and axes of the diagram."""
    made: list[Any] = []

    def keep(path: Path, size: tuple[float, float], fill: Callable[[Any], None]) -> None:
        axes = Figure(figsize=size).add_subplot()
        fill(axes)
        made.extend((size, axes))

    monkeypatch.setattr(comparison_output, "write_drawing", keep)
    draw_ranks(c, Path("ranks.svg"))
    size, axes = made
    return size, axes


def lines(axes: Any) -> list[list[tuple[float, float]]]:
    """The points of every line, in the order drawn."""
    return [[(round(float(x), 9), round(float(y), 9)) for x, y in line.get_xydata()] for line in axes.lines]


def test_the_diagram_of_three_runs_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    size, axes = drawn(THREE, monkeypatch)
    texts = {t.get_text(): (pytest.approx(t.get_position()), t.get_ha(), t.get_va()) for t in axes.texts}
    # The scale from 1 to 3 with its ticks, the critical difference of 1.6 from 1 on.
    scale = [[(1, 0), (3, 0)], *([(i, 0), (i, -0.22)] for i in (1, 2, 3)), [(1, -1.35), (2.6, -1.35)],
             [(1, -1.5), (1, -1.2)], [(2.6, -1.5), (2.6, -1.2)]]  # fmt: skip
    # Bars of {a, b} (1.25 to 1.75) and {b, c} (1.75 to 3), which meet: two levels of .55 below the scale.
    bars = [[(1.21, 0.55), (1.79, 0.55)], [(1.71, 1.1), (3.04, 1.1)]]
    # Labels begin .8 below: 1.9. The better two are on the left (.9), the first above; the worst on the right (3.1).
    labels = [
        [(1.25, 0), (1.25, 1.9), (0.9, 1.9)],
        [(1.75, 0), (1.75, 2.9), (0.9, 2.9)],
        [(3, 0), (3, 1.9), (3.1, 1.9)],
    ]
    assert lines(axes) == [*scale, *bars, *labels]
    assert texts == {
        **{str(i): ((i, -0.32), "center", "bottom") for i in (1, 2, 3)},
        "CD 1.60": ((1.8, -1.6), "center", "bottom"),
        "a_1  1.25": ((0.86, 1.9), "right", "center"),
        "b  1.75": ((0.86, 2.9), "right", "center"),
        "c  3.00": ((3.14, 1.9), "left", "center"),
    }
    assert (axes.get_xlim(), axes.get_ylim()) == (pytest.approx((0.9, 3.1)), pytest.approx((3.5, -2.3)))
    # 3.2 and two names of 9 letters of .062, and .12 a run; 2 lines of labels, 2 levels of .55, 3.2 above, .5 around.
    assert size == pytest.approx((3.2 + 2 * 9 * 0.062 + 0.36, 0.26 * (2 + 1.1 + 3.2) + 0.5))


def test_bars_share_a_level_where_they_are_more_than_a_tenth_apart() -> None:
    assert stacked([(3.5, 4.0), (1.0, 2.0), (2.0, 3.0)]) == [(1.0, 2.0, 0), (2.0, 3.0, 1), (3.5, 4.0, 0)]
    assert stacked([(1.0, 2.0), (2.1, 3.0), (2.2, 3.0)]) == [(1.0, 2.0, 0), (2.1, 3.0, 1), (2.2, 3.0, 0)]
