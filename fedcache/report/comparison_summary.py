"""Short form of comparisons for a terminal: one table, the answer with its certainty, and a list of omitted parts."""

from __future__ import annotations

from collections import Counter

from fedcache.parsing import counted
from fedcache.progress import percent
from fedcache.report.compare import Comparisons
from fedcache.report.comparison import Comparison, Pair, too_few_words
from fedcache.report.comparison_output import Sheet, sheets, show_p
from fedcache.tables.words import some_names

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
    """The corrected p of a pair over blocks, else over test rows; None where neither was tested."""
    if pair.holm is None and pair.rows is not None:
        return pair.rows.holm
    return pair.holm


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
