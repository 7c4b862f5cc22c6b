"""``fedcache compare``: compares finished runs, with intervals and tests."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.commands.options import (
    Given,
    RunQuery,
    RunsDirectory,
    command,
    configured,
    pick,
    runs_directory,
)
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable, plain_line
from fedcache.config import option
from fedcache.errors import UsageError, unknown
from fedcache.parsing import Facts
from fedcache.report.compare import Comparisons, check, compare_entries, summary
from fedcache.report.comparison import Comparison
from fedcache.report.comparison_output import caption, differences, sentences, values
from fedcache.report.drawing import check_file
from fedcache.report.find_runs import gather, need_finished
from fedcache.store.lock import need_folder, write_output

# Values of ``--format``, and ending of the file of ``-o`` -> its format.
FORMATS = ("table", "markdown", "latex")
ENDINGS = {".md": "markdown", ".tex": "latex"}


@dataclass(frozen=True)
class CompareOptions:
    """Options that choose the tests, which pairs are compared, and how much is printed."""

    over: str | None = option(
        None,
        "Unit of the paired tests: seeds | clients | settings (dataset and partition). Default: "
        "settings if there are enough of them for a test, else seeds.",
        "",
    )
    score: str = option(
        "accuracy",
        "Metric: accuracy | client-mean | pooled | macro_f1. `accuracy` is the primary metric if all methods have "
        "the same one, else client-mean; `pooled` is the accuracy over all test rows. With `--over settings` also "
        "worst10 | worst20 | worst40 | best10.",
        "",
    )
    test: str | None = option(
        None,
        "Paired test: wilcoxon | ttest. Default: ttest over seeds, wilcoxon over clients and settings.",
        "",
    )
    against: str | None = option(
        None,
        "Compare all others with this one: a name in the table, a method or a digest. Default: the best by "
        "validation accuracy, else by test accuracy.",
        "",
    )
    level: float = option(
        0.95,
        "Confidence level of intervals; tests use the significance level 1 - LEVEL.",
        "",
    )
    form: str | None = option(
        None,
        "Output format on stdout: table | markdown | latex. Default: table.",
        "",
        name="--format",
    )
    pairs: str = option(
        "best", "`best` compares all runs with the reference; `all` compares every pair.", ""
    )
    everything: bool = option(
        False, "Print every table, interval, test and note.", "", name="--all"
    )


@command("compare", pick(CompareOptions))
def compare(
    observer: TerminalObserver,
    given: Given,
    runs: RunQuery = None,
    folder: RunsDirectory = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Also write the tables to FILE.md (Markdown) or FILE.tex (LaTeX)."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the critical-difference diagram: FILE.svg, .png or .pdf."),
    ] = None,
) -> CommandResult:
    """Compare finished runs: means, intervals, paired tests (Holm), ranks (Friedman, Nemenyi).

    Each combination of dataset and partition gets its own table and is never averaged with others. With --over
    settings, each combination is one block of the test. Seeds repeat the training, not the partition, so p-values
    over seeds hold only for the partition of the runs.

    Example: fedcache compare --against fedavg -o table.tex --plot ranks.svg
    """
    options = configured(CompareOptions, given)
    form = options.form
    how: Facts = {
        "over": options.over,
        "metric": options.score.replace("-", "_"),
        "test": options.test,
        "against": options.against,
        "pairs": options.pairs,
        "level": options.level,
    }
    try:
        check(**how)
    except UsageError as error:  # the hint has names of Python, such as client_mean
        raise UsageError(error.message, error.hint.replace("_", "-")) from None
    file_format = written_format(form, out, observer.as_json)
    if plot is not None:
        check_file(plot)
    root = runs_directory(folder)
    gathered = gather(runs or [], root)
    if out is not None or plot is not None:
        need_finished(gathered, root)
    for omitted in gathered.left_out:
        observer.warn(f"{omitted.sentence} {omitted.hint}")
    if not runs and not gathered.entries and not gathered.left_out:
        # A new home without runs is no error; `runs list` answers the same.
        sentence = f"No result under {root} yet."
        empty: Facts = {"comparisons": [], "sentences": [sentence], "left_out": []}
        return CommandResult(empty, [sentence, "fedcache grid --method fedavg,fed3r --seeds 0-4"])
    made = compare_entries(gathered, **how)
    if plot is not None:
        made.plot(plot)
    if out is not None:
        write_output(out, _as_document(made, file_format).encode())
    files = [str(file) for file in (plot, out) if file is not None]
    data = {**made.to_dict(), "files": files}
    if form in ("markdown", "latex"):
        return CommandResult(data, [_as_document(made, form).rstrip("\n")])
    # Without --format, stdout gets tables for a terminal.
    shown: list[Any] = []
    last = list(made.sentences)
    if options.everything:
        for table in made.tables:
            shown += tables_of(table)
    elif made.tables:
        title, sheet, last = summary(made)
        shown.append(TextTable(title, sheet.columns, sheet.rows, right=sheet.columns[1:]))
    last += [f"Written: {name}" for name in files]
    following = shlex.join(["fedcache", "report", *(runs or ())])
    last.append(f"Next:  {following}")
    return CommandResult(data, [], renderables=shown, last=last)


def _as_document(made: Comparisons, form: str | None) -> str:
    """The tables as LaTeX, or as Markdown for any other format."""
    if form == "latex":
        return made.latex()
    return made.markdown()


def written_format(form: str | None, out: Path | None, as_json: bool) -> str | None:
    """The format of the file that ``-o`` names.

    Raises UsageError for unknown formats and endings, a missing directory, and options that would be ignored.
    """
    if form is not None and form not in FORMATS:
        raise unknown("--format", form, FORMATS)
    if form is not None and as_json:
        raise UsageError(
            "--format and --json are both given, but only one of them can be printed on stdout.",
            "With --json, write the table to a file:  -o FILE.md or -o FILE.tex",
        )
    if out is None:
        return None
    file_format = ENDINGS.get(out.suffix.lower())
    if file_format is None:
        ending = out.suffix or "(none)"
        raise UsageError(
            f"Cannot write {out.name!r}: its ending is {ending!r}, expected .md or .tex.",
            f"-o {out.with_suffix('.md')}",
        )
    need_folder(out)
    return file_format


def tables_of(c: Comparison) -> list[Any]:
    """The table of one setting, the table of differences if there is one, and the sentences below them."""
    main = values(c)
    of_pairs = differences(c)
    if c.chosen is None:
        word = "highest"
        best_runs = ", ".join(c.best)
    else:
        word = "chosen"
        best_runs = c.chosen
    # The last column marks the best row, and with a dagger the rows that do not differ significantly from it.
    rows = []
    for i, row in enumerate(main.rows):
        mark = ""
        if i in main.best:
            mark = word
        elif i in main.alike:
            mark = "†"
        rows.append((*row, mark))
    shown = [TextTable(c.setting, (*main.columns, ""), rows, right=main.columns[1:])]
    if of_pairs is not None:
        title = "pairs"
        # If all pairs have the same reference, the first column names only the other run of each pair.
        if of_pairs.columns[0] == "run":
            title = f"minus {c.reference}"
        columns = of_pairs.columns
        shown.append(TextTable(title, columns, of_pairs.rows, right=columns[1:]))
    # In a document the caption explains the bold row. Here the name of that row replaces the explanation.
    bold = f" Bold: {c.chosen_by}."
    capital = c.chosen_by[:1].upper() + c.chosen_by[1:]
    text = caption(c).removeprefix(f"{c.setting}: ")
    text = text.replace(bold, f" {capital}: {best_runs}.")
    below = [text, *sentences(c), ""]
    return [*shown, *map(plain_line, below)]
