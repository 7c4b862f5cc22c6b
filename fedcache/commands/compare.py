"""``fedcache compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedcache.commands import options as o
from fedcache.commands.output import Answer, Story, answer, table
from fedcache.errors import Exit, FedcacheError, unknown
from fedcache.report.compare import Comparisons, check, compare_entries
from fedcache.report.comparison_text import caption, differences, sentences, values
from fedcache.report.drawing_files import check_file
from fedcache.report.find_runs import gather
from fedcache.report.paired_tests import Comparison
from fedcache.store.files import write_atomic

FORMATS = ("table", "markdown", "latex")
ENDINGS = {".md": "markdown", ".tex": "latex"}


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Directories, or first letters of `fedcache ls --runs`; default all.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--runs", help="Directory of the runs, instead of the one under FEDCACHE_HOME.")
    ] = None,
    over: Annotated[str, typer.Option("--over", help="What pairs values: seeds | clients | settings.")] = "seeds",
    metric: Annotated[
        str,
        typer.Option(
            "--metric",
            help="accuracy; over seeds macro_f1; over settings also client_mean, worst10, worst20, worst40, best10.",
        ),
    ] = "accuracy",
    test: Annotated[
        str | None,
        typer.Option("--test", help="wilcoxon | ttest; default ttest over seeds, wilcoxon over clients and settings."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", help="What all are compared with: a name of the table, a method or a digest; default the best."
        ),
    ] = None,
    pairs: Annotated[str, typer.Option("--pairs", help="best: all with one; all: every pair.")] = "best",
    level: Annotated[float, typer.Option("--level", help="Of intervals; tests decide at 1 - level.")] = 0.95,
    form: Annotated[
        str | None,
        typer.Option("--format", help="table | markdown | latex, on stdout; default table.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write it here; .md is Markdown, .tex is LaTeX.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the critical-difference diagram: FILE.svg, .png or .pdf.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Compare finished runs: means, bootstrap intervals, paired tests (Holm), ranks (Friedman, Nemenyi).

    Runs of different datasets or partitions are different tables, never averaged; --over settings takes each of them as
    one block. Seeds repeat training, not data: their p speaks of this partition only.

    Example: fedcache compare --against fedavg -o table.tex --plot ranks.svg
    """

    def call(story: Story) -> Answer:

        check(over=over, metric=metric, test=test, against=against, pairs=pairs, level=level)
        written = _written(form, out, json)
        if plot is not None:
            check_file(plot)
        if folder is not None and not folder.is_dir():
            raise FedcacheError(Exit.USAGE, f"There is no directory {folder}.", "See `fedcache ls --runs`.")
        root = folder or o.home().runs
        found = gather(runs or [], root)
        for left in found.left_out:
            story.warn(f"{left.path.name} {left.why.lstrip('/')} {left.hint}")
        if not runs and not found.entries and not found.left_out:
            # As `ls --runs` answers: nothing is wrong with a home that is new.
            empty: dict[str, Any] = {"comparisons": [], "said": [f"No result under {root} yet."], "left_out": []}
            return Answer(empty, [f"No result under {root} yet.", "fedcache grid --method fedavg,fed3r --seeds 0-4"])
        made = compare_entries(found, over=over, metric=metric, test=test, against=against, pairs=pairs, level=level)
        data, files = made.to_dict(), []
        if plot is not None:
            made.plot(plot)
            files.append(str(plot))
        if out is not None:
            write_atomic(out, (made.latex() if written == "latex" else made.markdown()).encode())
            files.append(str(out))
        data["files"] = files
        if form in ("markdown", "latex"):
            return Answer(data, [(made.latex() if form == "latex" else made.markdown()).rstrip("\n")])
        return Answer(data, [], renderables=[*_shown(made), *(_words(f"Written: {name}") for name in files)])

    answer("compare", json, call)


def _written(form: str | None, out: Path | None, json: bool) -> str | None:
    """What ``-o`` writes.

    Raises:
        FedcacheError: USAGE for unknown formats and endings, a missing directory, and options that would be ignored.
    """
    if form is not None and form not in FORMATS:
        raise unknown("--format", form, FORMATS)
    if form is not None and json:
        raise FedcacheError(
            Exit.USAGE,
            "--format and --json are both given, and stdout is one of them.",
            "With --json, -o FILE.md or FILE.tex",
        )
    if out is None:
        return None
    written = ENDINGS.get(out.suffix.lower())
    if written is None:
        raise FedcacheError(
            Exit.USAGE,
            f"Cannot write {out.name!r}: its ending is {out.suffix or '(none)'!r}, expected .md or .tex.",
            f"-o {out.with_suffix('.md')}",
        )
    if not out.parent.is_dir():
        raise FedcacheError(Exit.USAGE, f"The directory {out.parent} does not exist.", f"mkdir -p {out.parent}")
    return written


def _shown(made: Comparisons) -> list[Any]:
    """Tables and sentences for a terminal."""
    shown: list[Any] = []
    for c in made.tables:
        shown += _tables(c)
    return [*shown, *map(_words, made.said)]


def _tables(c: Comparison) -> list[Any]:
    main, beside = values(c), differences(c)
    marks = ["best" if i in main.best else "†" if i in main.alike else "" for i in range(len(main.rows))]
    rows = [(*row, mark) for row, mark in zip(main.rows, marks, strict=True)]
    shown = [table(c.setting, (*main.columns, ""), rows, right=main.columns[1:])]
    if beside is not None:
        title = f"minus {c.reference}" if beside.columns[0] == "run" else "pairs"
        shown.append(table(title, beside.columns, beside.rows, right=beside.columns[1:]))
    # The title names the setting, and the word says what bold says in a document.
    what = caption(c).removeprefix(f"{c.setting}: ").replace(" Bold: best.", "")
    return [*shown, *map(_words, [what, *sentences(c)]), _words("")]


def _words(text: str) -> Any:
    from rich.text import Text

    return Text(text)
