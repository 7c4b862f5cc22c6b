"""The part of a report on leave-one-out runs: which method has the highest mean over the held-out values."""

from __future__ import annotations

from fedcache.errors import UsageError
from fedcache.report.comparison_output import sentences
from fedcache.report.drawing import percent
from fedcache.report.find_runs import CLAIMED
from fedcache.report.held_out import HELD_OUT, HeldOutGroup, mean_over_values
from fedcache.report.paired_blocks import over_held_out
from fedcache.report.paired_tests import Comparison, compared
from fedcache.report.render import Column, HtmlCell, Section
from fedcache.report.verdict import Verdict, price
from fedcache.runs.score import WORDS

MOST_NAMED = 4
"""Runs of which the first lines say the names."""


def held_out_section(
    number: int, group: HeldOutGroup, score: str | None
) -> tuple[Verdict, Section]:
    """What is to be said of a group first, and its table: accuracy on each held-out value, and the mean."""
    used = score or group.score
    accuracies = group.accuracies(used)
    means = {name: mean_over_values(accuracy) for name, accuracy in accuracies.items()}
    found = _comparison(group, used)
    names = sorted(means, key=lambda name: _falling(means[name]))
    if found is None:
        validation = {}
    else:
        validation = {t.name: t.validation for t in found.treatments if t.validation is not None}
    if found is not None and found.chosen is not None:
        names.sort(key=lambda name: _falling(validation.get(name)))
        names.sort(key=lambda name: name != found.chosen)
    best = names[0]
    columns = [Column("run"), Column("mean accuracy %", numbers=True)]
    columns += [Column("validation %", numbers=True)] if validation else []
    columns += [Column(f"{group.column} {value} %", numbers=True) for value in group.values]
    rows = []
    for name in names:
        cells = [HtmlCell(name, name), _cell(means[name], best=name == best and len(names) > 1)]
        cells += [_cell(validation.get(name))] if validation else []
        rows.append(cells + [_cell(value) for value in accuracies[name].values()])
    says = f"Accuracy on the rows of each {group.column} when the runs train on the others, and the unweighted mean."
    says += f" Accuracy is {used}: {WORDS[used]}." if used != "own" else ""
    says += f" {CLAIMED}" if group.entries[0].claimed else ""
    if found is None:
        notes = []
    else:
        notes = sentences(found)
    section = Section(
        f"h{number}",
        group.title,
        says,
        columns,
        rows,
        [],
        notes,
        commands=[],
        points=[],
        chosen=0,
    )
    return _verdict(group, best, means, found), section


def _comparison(group: HeldOutGroup, score: str) -> Comparison | None:
    """The tests over held-out values; None where no two methods have all of them."""
    metric = "accuracy"
    if score != "own":
        metric = score.replace("-", "_")
    try:
        return compared(over_held_out(group, metric), over=HELD_OUT, metric=metric)
    except UsageError:
        return None


def _falling(value: float | None) -> float:
    """What sorts accuracies from the highest to the lowest, missing ones last."""
    if value is None:
        return 1.0
    return -value


def _cell(value: float | None, *, best: bool = False) -> HtmlCell:
    return HtmlCell(percent(value), "" if value is None else repr(value), best=best)


def _verdict(
    group: HeldOutGroup, best: str, means: dict[str, float | None], found: Comparison | None
) -> Verdict:
    """The first lines of a group: the highest mean, how far above the second it is, and what the tests can say."""
    count = len(group.values)
    mean = means[best]
    entry = next(iter(group.rows()[best].values()))
    chosen = found is not None and found.chosen is not None
    by = "has the highest mean test accuracy,"
    if chosen:
        by = "is best by mean validation accuracy and reaches"
    headline = f"{best} {by} {percent(mean)} % over {count} held-out values of {group.column}"
    others = {name: value for name, value in means.items() if name != best and value is not None}
    if others and mean is not None:
        second = max(others, key=lambda name: others[name])
        gap = 100 * (mean - others[second])
        headline += (
            f", {abs(gap):.2f} points {'above' if gap >= 0 else 'below'} the second, {second}"
        )
    word, sure = _sure(group, found)
    if not chosen and others:
        sure += " No rows were kept to choose by, so this is the highest of "
        sure += f"{len(others) + 1} on the test rows themselves (`--validation 0.2` keeps some)."
    cost = price(entry)
    return Verdict(
        group.title,
        best,
        entry.digest,
        chosen,
        f"{headline}.",
        word,
        sure,
        f"{cost[:1].upper()}{cost[1:]}.",
    )


def _sure(group: HeldOutGroup, found: Comparison | None) -> tuple[str, str]:
    """How sure the order is, in a word, and why."""
    if found is None or not found.pairs:
        return "Alone", f"No other method has a run for each {group.column}."
    count = len(found.blocks)
    if found.too_few:
        return (
            "Not known",
            f"{count} held-out values are too few for a test, whatever the differences are.",
        )
    open_pairs = [p.one for p in found.pairs if p.holm is None or p.holm >= 1.0 - found.level]
    if not open_pairs:
        return (
            "Sure",
            f"It differs from every other run over {count} held-out values (Wilcoxon's test, Holm).",
        )
    names = ", ".join(open_pairs[:MOST_NAMED]) + (", ..." if len(open_pairs) > MOST_NAMED else "")
    return (
        "Not sure",
        f"Its difference from {names} may be chance over {count} held-out values (Wilcoxon, Holm).",
    )
