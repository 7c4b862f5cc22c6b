"""A comparison in words, tables and a diagram, whole: three runs whose numbers are written by hand."""

from dataclasses import replace

from fedcache.report.comparison import Comparison, Pair, Ranking, Treatment
from fedcache.report.comparison_output import latex, markdown

SEEDS = ("0", "1", "2")
A = Treatment("a_1", (0.5, 0.6, 0.7), 0.6, 0.1, (0.5, 0.7), 1.25)
B = Treatment("b", (0.58, 0.58, 0.58), 0.58, 0.0, None, 1.75)
C = Treatment("c", (0.1, 0.2, 0.3), 0.2, 0.1, (0.1, 0.3), 3.0)
THREE = Comparison(
    setting="x & y",
    over="seeds",
    metric="accuracy",
    test="ttest",
    level=0.9,
    blocks=SEEDS,
    treatments=(A, B, C),
    reference="a_1",
    pairs=(
        Pair("b", "a_1", -0.02, (-0.12, 0.08), 0.25, 0.25, blocks=SEEDS),
        Pair("c", "a_1", -0.4, None, 0.0004, 0.0008, blocks=SEEDS),
    ),
    ranking=Ranking((1.25, 1.75, 3.0), 4.5, 0.105, 1.6, ((0, 1), (1, 2)), 3),
    notes=("A <note>.",),
)
EVERY = replace(
    THREE, pairs=(*THREE.pairs, Pair("b", "c", 0.38, None, None, None, blocks=SEEDS)), notes=()
)

MARKDOWN = r"""### x &amp; y

| run | accuracy % | 90 % interval | rank | difference, pp | 90 % interval | p | p (Holm) |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| a\_1 | **60.00 ± 10.00** | 50.00 to 70.00 | 1.25 |  |  |  |  |
| b | 58.00 † |  | 1.75 | -2.00 | -12.00 to 8.00 | 0.25 | 0.25 |
| c | 20.00 ± 10.00 | 10.00 to 30.00 | 3.00 | -40.00 |  | &lt;0.001 | &lt;0.001 |

x &amp; y: accuracy in %, mean ± standard deviation over 3 seeds (0, 1, 2); 90 % Student's t intervals; \
differences from a\_1; t-test paired over seeds, p corrected for 2 (Holm). Bold: best by test accuracy \
(no validation split). †: no significant difference from a\_1 at 0.1.

- Friedman's test: chi-squared 4.50, p 0.105. Nemenyi: critical difference of mean ranks 1.60 at 0.1; \
no significant difference within: {a\_1, b}, {b, c}.
- A &lt;note&gt;.
""".replace("\\\n", "")
LATEX = r"""% needs \usepackage{booktabs}
% Friedman's test: chi-squared 4.50, p 0.105. Nemenyi: critical difference of mean ranks 1.60 at 0.1; @
no significant difference within: {a_1, b}, {b, c}.
\begin{table}
\centering
\caption{x \& y: accuracy in \%, mean $\pm$ standard deviation over 3 seeds (0, 1, 2); 90 \% Student's t @
intervals; t-test paired over seeds, p corrected for 2 (Holm). Bold: best by test accuracy @
(no validation split). $^{\dagger}$: no significant difference from a\_1 at 0.1.}
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


def test_the_markdown_of_a_comparison_with_a_reference():
    assert markdown(THREE) == MARKDOWN


def test_the_latex_of_a_comparison_of_all_pairs_has_two_tables():
    assert latex(EVERY) == LATEX
