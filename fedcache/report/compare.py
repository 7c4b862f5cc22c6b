"""Comparisons of runs, as ``fc.compare`` returns them: one for each dataset and partition, or one over all of them."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedcache.errors import FedcacheError, UsageError, unknown
from fedcache.parsing import Facts, counted, visible
from fedcache.progress import percent
from fedcache.report import comparison_output
from fedcache.report.comparison import (
    TESTS,
    Comparison,
    Pair,
    PairedBlocks,
    across,
    check_metric,
    compared,
    over_held_out,
    scored_by,
    too_few_words,
    within,
)
from fedcache.report.comparison_output import Sheet, sheets, show_p
from fedcache.report.find_runs import (
    HELD_OUT,
    Gathered,
    HeldOutGroup,
    LeftOut,
    MergedRun,
    StoredRun,
    by_setting,
    held_out_groups,
    mean_over_values,
    measured_alone,
    merge_seeds,
    setting_names,
)
from fedcache.runs.run import Run
from fedcache.tables.words import some_names

PAIRS = ("best", "all")
"""Pairs that are tested: every other run with the reference, or all pairs."""
ENOUGH = 6
"""Minimum number of blocks with which Wilcoxon's test can reach p < 0.05: its lowest p is 2^(1 - blocks)."""
LOWEST = 0.5
HIGHEST = 0.999
"""Lowest and highest level of intervals."""


@dataclass(frozen=True)
class Comparisons:
    """Comparisons of one call.

    Attributes:
        tables: one for each setting with at least two runs, or one over settings.
        sentences: on settings without a table, and on all tables together.
        left_out: runs that could not be read.
    """

    tables: tuple[Comparison, ...]
    sentences: tuple[str, ...]
    left_out: tuple[LeftOut, ...]

    def to_dict(self) -> Facts:
        """The ``data`` of the JSON output."""
        left_out = [{"path": str(e.path), "why": e.why, "hint": e.hint} for e in self.left_out]
        return {
            "comparisons": [c.to_dict() for c in self.tables],
            "sentences": list(self.sentences),
            "left_out": left_out,
        }

    def markdown(self) -> str:
        """All tables as Markdown."""
        parts = list(map(comparison_output.markdown, self.tables))
        parts += [f"{sentence}\n" for sentence in self.sentences]
        return "\n".join(parts)

    def latex(self) -> str:
        """All tables as LaTeX for the package booktabs."""
        parts = list(map(comparison_output.comment, self.sentences))
        parts += map(comparison_output.latex, self.tables)
        return "\n".join(parts)

    def plot(self, path: str | Path) -> None:
        """Draw the critical-difference diagram of the one table; the ending of the file chooses png, svg or pdf.

        Raises UsageError for several tables, fewer than three runs, or another ending.
        """
        if len(self.tables) != 1:
            raise UsageError(
                f"--plot can draw only one table, but these runs give {len(self.tables)} tables.",
                "Give several runs of one setting, or compare over settings:  --over settings",
            )
        comparison_output.draw_ranks(self.tables[0], Path(path))

    def _repr_html_(self) -> str:
        from html import escape

        parts = [f"<p>{escape(visible(sentence))}</p>" for sentence in self.sentences]
        parts += map(comparison_output.as_html, self.tables)
        return "".join(parts)

    def __repr__(self) -> str:
        if len(self.tables) == 1:
            return f"Comparisons({self.tables[0]!r})"
        treatments = sum(len(c.treatments) for c in self.tables)
        return f"Comparisons({len(self.tables)} settings, {treatments} treatments)"


def compare_entries(
    found: Gathered,
    *,
    over: str | None = None,
    metric: str = "accuracy",
    test: str | None = None,
    against: str | Run | None = None,
    pairs: str = "best",
    level: float = 0.95,
) -> Comparisons:
    """``compare`` for runs that were already found. If ``over`` is None, ``what_varies`` chooses it."""
    check(over=over, metric=metric, test=test, against=against, pairs=pairs, level=level)
    automatic = over is None
    if over is None:
        over = what_varies(found, metric)
    if over == "settings":
        found = measured_alone(found)
    found = merge_seeds(found)
    entries = found.entries
    if len(entries) < 2:
        what = "no run was found"
        if entries:
            only = entries[0]
            what = f"only one run was found ({only.method}, {only.digest})"
            if isinstance(only, MergedRun):
                members = len(only.members)
                what = f"these {members} runs have equal settings and count as one"
        lost = ""
        if found.left_out:
            lost = f"; runs that could not be read: {len(found.left_out)}"
        raise UsageError(
            f"A comparison needs two finished runs, but {what}{lost}.",
            "Train another method on the same partition:  fedcache grid --method fedavg,fed3r --seeds 0-4",
        )

    def table(blocks: PairedBlocks, unit: str, score: str) -> Comparison:
        reference = None
        if against is not None:
            reference = _reference(against, blocks)
        return compared(
            blocks, over=unit, metric=score, test=test, against=reference, pairs=pairs, level=level
        )

    if over == "settings":
        score = scored_by(entries, metric, over)
        only_table = table(across(entries, score), over, score)
        explanation: tuple[str, ...] = ()
        if automatic:
            explanation = (
                "The tests pair settings, because there are enough settings. For one table per setting:  "
                "--over seeds",
            )
        return Comparisons((only_table,), explanation, tuple(found.left_out))
    tables = []
    sentences = []
    refused = []
    # Runs that hold out one value each are compared over these values. Other runs are compared setting by setting.
    held_out = []
    if over == "seeds":
        held_out = held_out_groups(entries)
    # Digests of runs that are not compared setting by setting.
    grouped = set()
    for leave_one_out in held_out:
        digests = {e.digest for e in leave_one_out.entries}
        try:
            score = scored_by(leave_one_out.entries, metric, over)
            blocks = over_held_out(leave_one_out, score)
        except UsageError:
            sentences += alone_lines(leave_one_out)
            # A group of one treatment has only a mean, and nothing to compare. The runs of a group with several
            # treatments are compared setting by setting.
            if len(leave_one_out.rows()) == 1:
                grouped |= digests
            continue
        tables.append(table(blocks, HELD_OUT, score))
        grouped |= digests
    groups = by_setting([e for e in entries if e.digest not in grouped])
    for where, group in zip(setting_names(groups), groups, strict=True):
        if len(group) < 2:
            only = group[0]
            digest = only.digest[:8]
            sentences.append(
                f"{where}: there is only one run, {only.method} ({digest}), so nothing can be compared."
            )
            continue
        try:
            score = scored_by(group, metric, over)
            blocks = within(group, where, score, over)
            tables.append(table(blocks, over, score))
        except FedcacheError as error:
            refused.append(error)
            reason = error.message.removeprefix(f"{where}: ")
            sentences.append(f"{where}: not compared. {reason}")
    if not tables and refused:
        # If all settings were refused for the same reason, the error has this reason, else a list of all sentences.
        alike = len({error.message for error in refused}) == 1
        if alike and (len(refused) > 1 or len(groups) == 1):
            raise refused[0]
        raise UsageError(" ".join(sentences), refused[0].hint)
    if not tables and not held_out:
        raise UsageError(
            f"No two of the {len(entries)} runs share a dataset and a partition, so they cannot be "
            "compared.",
            "Train another method with the same partition. Or compare methods over settings:  --over settings",
        )
    if any(made.over == HELD_OUT for made in tables):
        sentences.append(
            "Runs that hold out one value each are compared in one table over these values. To compare the runs of "
            "one value:  fedcache compare RUN RUN"
        )
    if len(groups) > 1:
        sentences.insert(
            0,
            f"The runs belong to {len(groups)} different datasets or partitions, so there is one table for each. To "
            "compare methods across all of them:  --over settings",
        )
    return Comparisons(tuple(tables), tuple(sentences), tuple(found.left_out))


def what_varies(found: Gathered, metric: str) -> str:
    """The unit of the tests where none is given: settings or seeds.

    Settings if enough of them have the same runs for a test to reach significance, else seeds.
    """
    entries = measured_alone(found).entries
    if held_out_groups(entries):
        return "seeds"
    if len(by_setting(entries)) >= ENOUGH:
        merged = merge_seeds(Gathered(entries)).entries
        # Runs that cannot be compared over settings, such as two equal runs, are compared setting by setting.
        with suppress(UsageError):
            score = scored_by(merged, metric, "settings")
            if len(across(merged, score).blocks) >= ENOUGH:
                return "settings"
    return "seeds"


def alone_lines(group: HeldOutGroup) -> list[str]:
    """The mean of each row of leave-one-out runs that cannot be compared with another."""
    lines = []
    for name, accuracy in group.accuracies().items():
        each = ", ".join(f"{value} {percent(a)}" for value, a in accuracy.items())
        mean = mean_over_values(accuracy)
        mean_words = "no mean"
        if mean is not None:
            count = len(accuracy)
            mean_words = f"mean {percent(mean)} % over {count} held-out values"
        lines.append(f"{group.title}: {name}, {mean_words} ({each}).")
    return lines


def check(
    *,
    over: str | None,
    metric: str,
    test: str | None,
    against: str | Run | None,
    pairs: str,
    level: float,
) -> None:
    """Refuse wrong and contradicting values before anything is read. Raises UsageError."""
    check_metric(metric, over or "seeds")
    if test is not None and test not in TESTS:
        raise unknown("--test", test, TESTS)
    if pairs not in PAIRS:
        raise unknown("--pairs", pairs, PAIRS)
    if pairs == "all" and against is not None:
        raise UsageError(
            "--pairs all and --against are both given, but --pairs all uses no reference.",
            "Leave one of them out.",
        )
    if not LOWEST <= level <= HIGHEST:
        raise UsageError(
            f"--level is {level:g}, expected a number from {LOWEST} to {HIGHEST}.",
            "For example --level 0.95",
        )


def is_called(entry: StoredRun, letters: str, path: Path) -> bool:
    """Whether a run, or one of the runs that were merged into it, has this digest prefix or this directory."""
    if isinstance(entry, MergedRun):
        members = entry.members
    else:
        members = (entry,)
    return any(e.digest.startswith(letters) or e.path.resolve() == path for e in members)


def _reference(against: str | Run, blocks: PairedBlocks) -> str:
    """The name of the treatment that ``against`` means: a name, a method, a run's directory or first letters.

    Raises UsageError if no treatment fits, or if several do.
    """
    if isinstance(against, Run):
        against = str(against.path)
    if against in blocks.names:
        return against
    # Methods with this name are taken first; only if there is none, directories and digests of runs.
    matching = [name for name, row in blocks.runs.items() if row[0].method == against]
    if not matching and against:
        path = Path(against).resolve()
        for name, row in blocks.runs.items():
            if any(is_called(e, against, path) for e in row):
                matching.append(name)
    if not matching:
        raise unknown("--against", against, blocks.names)
    if len(matching) > 1:
        listed = ", ".join(matching[:5])
        raise UsageError(
            f"--against {against} matches {len(matching)} runs: {listed}.",
            "Give one of these names, or the first letters of its digest (fedcache runs list).",
        )
    return matching[0]


# Short form of comparisons for a terminal: one table, the answer with its certainty, and a list of omitted parts.

MOST_ROWS = 15
"""Maximum number of rows of a short table. Then the output has fewer than forty lines, even if names wrap."""
MOST_NOTES = 3
MOST_NAMED = 3
"""Maximum number of notes, and of names in a sentence."""


def summary(made: Comparisons) -> tuple[str, Sheet, list[str]]:
    """Title, table and sentences on the runs of one setting, or on several settings with one row for each."""
    tables = made.tables
    notes = list(made.sentences)
    if len(tables) == 1:
        left_out = ["intervals of the differences"]
        (only,) = tables
        title = only.setting
        sheet = _runs(only)
        best = only.first
        sure = certainty(only)[1]
        lines = [
            f"{best.name} ({percent(best.mean)} % on the test rows) is {only.chosen_by}. {sure}"
        ]
        # The answer already contains the note on a test that cannot reach significance.
        notes = [note for note in (*only.notes, *notes) if note not in lines[0]]
    else:
        title = "best run of each setting"
        rows = [_row(table) for table in tables]
        sheet = Sheet(("setting", "best", "accuracy %", "how sure"), tuple(rows))
        wins = Counter(row[1] for row in rows).most_common(MOST_NAMED)
        count = len(rows)
        parts = [f"{name} is best in {won} of {count} settings" for name, won in wins]
        lines = ["; ".join(parts) + "."]
        left_out = ["the table and notes of each setting"]
    for what, have, most in (("row", sheet.rows, MOST_ROWS), ("note", notes, MOST_NOTES)):
        if len(have) > most:
            left_out.append(counted(len(have) - most, what))
    if any(table.ranking is not None for table in tables):
        left_out.append("ranks")
    lines += notes[:MOST_NOTES]
    named = ", ".join(left_out)
    lines.append(f"Left out: {named}. To show everything: --all")
    return title, Sheet(sheet.columns, sheet.rows[:MOST_ROWS]), lines


def certainty(c: Comparison) -> tuple[str, str]:
    """How sure the first place is: sure | not sure | not known, and a sentence."""
    best = c.first.name
    if c.too_few:
        return "not known", f"How sure: not known. {too_few_words(c)}"
    tested = {}
    for pair in c.pairs:
        p = decisive_p(pair)
        if best in (pair.one, pair.other) and p is not None:
            other = pair.one
            lead = -pair.difference
            if other == best:
                other = pair.other
                lead = pair.difference
            # If another run is significantly better than the chosen one, the choice is not sure either.
            if lead <= 0:
                p = 1.0
            tested[other] = p
    if not tested:
        return "not known", "How sure: not known, because no difference can be tested."
    unclear = [name for name, p in tested.items() if p >= c.alpha]
    if not unclear:
        names = some_names([*tested], MOST_NAMED)
        worst = show_p(max(tested.values()))
        return (
            "sure",
            f"How sure: its lead over {names} is significant (largest p {worst}).",
        )
    names = some_names(unclear, MOST_NAMED)
    count = len(unclear)
    return (
        "not sure",
        f"How sure: not sure. It has no significant lead over {count} of {len(tested)} runs: {names}.",
    )


def decisive_p(pair: Pair) -> float | None:
    """The larger corrected p of a pair, over blocks or over test rows; None where neither was tested.

    All seeds have the same test rows, so a difference that is significant over seeds alone may be one of these rows.
    """
    found = [pair.holm]
    if pair.rows is not None:
        found.append(pair.rows.holm)
    return max((p for p in found if p is not None), default=None)


def _runs(c: Comparison) -> Sheet:
    """The runs of one setting: mean, interval, and difference from the reference with its corrected p."""
    long = sheets(c)[0]
    dropped = ("rank", c.over, f"over {c.over}", "p")
    columns: dict[str, list[str]] = {}
    for place, name in enumerate(long.columns):
        if name in dropped or name.endswith("over rows"):
            continue
        # The first of two intervals is that of the mean.
        columns.setdefault(name, [row[place] for row in long.rows])
    return Sheet.of(list(columns.items()))


def _row(c: Comparison) -> tuple[str, ...]:
    """The best run of one of several settings."""
    best = c.first
    return c.setting, best.name, percent(best.mean), certainty(c)[0]
