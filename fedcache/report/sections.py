"""One setting of a report: what to take, the table, figures in the order in which one asks, and details after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedcache.errors import UsageError
from fedcache.extract.inputs import ROWS
from fedcache.extract.planning.image_places import ImagePlaces
from fedcache.report.caution_words import caution_lines, drawn_clients
from fedcache.report.comparison_output import caption, differences, sentences
from fedcache.report.drawing import Plot, percent
from fedcache.report.figures import costs, data, grids, paired, runs
from fedcache.report.figures.confusions import confusion_difference
from fedcache.report.figures.hyperparameters import hyperparameters
from fedcache.report.find_runs import CLAIMED, StoredRun, facts
from fedcache.report.galleries import Gallery, ToShow, galleries_of
from fedcache.report.paired_blocks import merged_notes, within
from fedcache.report.paired_tests import Comparison, compared
from fedcache.report.render import Section
from fedcache.report.run_names import differing, labels
from fedcache.report.run_origin import RunStore, command_of
from fedcache.report.statistics import LEAST_BLOCKS
from fedcache.report.table import table_of
from fedcache.report.verdict import Verdict, ranked, verdict
from fedcache.runs.score import WORDS, has_validation, score_for, score_of

MOST_SETTINGS = 12
"""Settings that get figures; the others get their table."""
MOST_PLANES = 3
MOST_COMPARED = 20
"""Runs that are tested against the first: a family for Holm's correction that a page can show."""
MOST_NAMED = 4
"""Runs of which a note says the names; of more it says how many."""
MOST_VALUES = 24
"""Values of a setting up to which rows can be kept by them."""
PRIVATE = "a run here has differential privacy, and its epsilon covers neither who holds which rows nor the features"


@dataclass(frozen=True)
class Shown:
    """What a page is asked to show: how features are embedded, the score, where images are, and which were found."""

    embed: str
    score: str | None
    images: ImagePlaces | None
    found: ToShow


def section_of(
    number: int, title: str, entries: list[StoredRun], source: RunStore | str, asked: Shown
) -> tuple[Verdict, Section]:
    """What is to be said of a setting first, and all there is to see of it."""
    score = asked.score or score_for(e.result for e in entries)
    entries = ranked(entries, score)
    names = differing(entries)
    named = list(zip(labels(entries), entries, strict=True))
    said = verdict(title, named, score)
    ident = f"s{number}"
    plots: list[Plot] = []
    details: list[Plot] = []
    notes: list[str] = []
    galleries: list[Gallery] = []
    tables: list[tuple[str, str, Sequence[str], Sequence[Sequence[str]]]] = []
    if number < MOST_SETTINGS:
        tests = comparison_of(title, named, score)
        plots = _first_plots(ident, named, score, tests)
        tables += [] if tests is None else [_tests_table(tests)]
        details, notes = _detail_plots(ident, named, source, asked.embed)
        if asked.images is not None:
            galleries, told = galleries_of(
                ident, every_method_first(named), source, asked.images, asked.found
            )
            notes += told
    else:
        notes.append(
            f"Figures are made for the first {MOST_SETTINGS} settings; report these runs alone to see theirs."
        )
    columns, rows = table_of(entries, names, score, said.digest)
    store = ""
    if isinstance(source, RunStore):
        store = source.store.path.name
    return said, Section(
        ident,
        title,
        _says(entries, score),
        columns,
        rows,
        plots,
        notes,
        commands=[(label, e.digest, command_of(e, store)) for label, e in named],
        points=[(e.method, score_of(e.result, score).mean) for e in entries],
        galleries=galleries,
        runs=[(e.key, label) for label, e in named],
        chosen=next((i for i, e in enumerate(entries) if e.digest == said.digest), None),
        details=details,
        tables=tables,
        filters=_filters(entries, names),
    )


def _says(entries: Sequence[StoredRun], score: str) -> str:
    """What the table is of, and how it is to be read."""
    first = entries[0].result
    holds = first["dataset"].get("holds", ROWS)  # features that were ingested may be of anything
    says = f"Dataset {str(first['dataset']['digest'])[:16]}, {first['dataset']['ok']:,} readable {holds}; partition "
    says += f"{str(first['partition']['digest'])[:16]}, {first['partition']['clients']} clients"
    says += (
        "; every seed has its own, the first is drawn."
        if len(set(first["partition"]["digests"])) > 1
        else "."
    )
    if score != "own":
        says += f" Accuracy is {score}: {WORDS[score]}."
    if has_validation(e.result for e in entries):
        says += " Sorted by validation accuracy; the run that it chose is bold."
    elif len(entries) > 1:
        says += " Sorted by test accuracy; the highest value of a column is bold. Worst 10 % is of the clients."
    return says + (f" {CLAIMED}" if entries[0].claimed else "")


def _filters(entries: Sequence[StoredRun], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Columns of settings with the values by which runs can be kept, in the order of a grid."""
    made = []
    for name in names:
        values = sorted(
            {f[name] for f in map(facts, entries) if name in f}, key=grids.order_of_value
        )
        if 1 < len(values) <= MOST_VALUES:
            made.append((name.removeprefix("set."), values))
    return made


def comparison_of(title: str, named: runs.Named, score: str) -> Comparison | None:
    """The paired tests of the first runs with the one that stands first: over seeds and test rows, else over clients.

    None where nothing pairs them.
    """
    first = [pair for pair in named if not pair[1].pooled_rows][:MOST_COMPARED]
    names = [n for n, _ in first]
    entries = [e for _, e in first]
    if len(entries) < 2:
        return None
    seeds = all(len(e.result["seeds"]) >= LEAST_BLOCKS or e.test_rows for e in entries)
    over = "clients"
    if seeds:
        over = "seeds"
    if over == "clients" and (
        score == "pooled" or any(len(e.clients.names) < LEAST_BLOCKS for e in entries)
    ):
        return None
    if score == "own" or over == "clients":
        metric = "accuracy"
    else:
        metric = score.replace("-", "_")
    try:
        blocks = within(entries, title, metric, over, names)
    except UsageError:
        return None
    against = None
    if names[0] in blocks.names:
        against = names[0]
    found = compared(blocks, over=over, metric=metric, against=against)
    if any(p.interval or p.p is not None or p.rows for p in found.pairs):
        return found
    return None


def _tests_table(c: Comparison) -> tuple[str, str, Sequence[str], Sequence[Sequence[str]]]:
    sheet = differences(c)
    assert sheet is not None  # nosec B101
    words = caption(c).partition(": ")[2].partition(" Bold:")[0]
    said = sentences(c) if paired.enough_blocks(c) else c.notes
    return (
        f"Paired tests against {c.reference}",
        " ".join([words, *said]),
        sheet.columns,
        sheet.rows,
    )


def _first_plots(ident: str, named: runs.Named, score: str, tests: Comparison | None) -> list[Plot]:
    """What one asks first: costs, curves, who is left behind, what the swept values did."""
    shown = every_method_first(named)
    made = [
        costs.against_bytes(f"{ident}-bytes", named, score),
        costs.against_seconds(f"{ident}-seconds", named, score),
        runs.curves(f"{ident}-curves", shown),
        runs.spread(f"{ident}-clients", shown),
        paired.differences(f"{ident}-differences", tests, {n: e.key for n, e in named}, len(named))
        if tests
        else None,
        paired.ranks(f"{ident}-ranks", tests) if tests else None,
        *grids.sweeps(f"{ident}-grid", [e for _, e in named], score),
        *hyperparameters(f"{ident}-settings", [e for _, e in named], score),
    ]
    return [p for p in made if p is not None]


def _detail_plots(
    ident: str, named: runs.Named, source: RunStore | str, embed: str
) -> tuple[list[Plot], list[str]]:
    """Confusions, the methods' own numbers, the partition and the features; and what there is to say of the figures."""
    entries = [e for _, e in named]
    firsts = first_of_each(named)
    made: list[Plot | None] = []
    notes: list[str] = []
    if all(len(e.result["accuracy"].get("per_round") or ()) < 2 for e in entries):
        notes.append(
            "No run measured its accuracy in more than one round: `--eval-every 1` gives the curves."
        )
    for i, (label, entry) in enumerate(firsts[:1]):
        made.append(runs.confusion(f"{ident}-confusion{i}", label, entry))
        made += [
            confusion_difference(f"{ident}-against{i}", (label, entry), second)
            for second in firsts[1:2]
        ]
    if any("confusion" not in e.result for e in entries):
        notes.append(
            "Results of earlier versions hold no confusion matrix: `--fresh` makes them again."
        )
    notes += [
        *caution_notes(named),
        *drawn_notes(named),
        *merged_notes({label: [e] for label, e in named}),
    ]
    made += runs.own_numbers(f"{ident}-own", named)
    notes += runs.last_numbers(named)
    if isinstance(source, RunStore):
        made.append(data.dots(f"{ident}-dots", source))
        made += [
            data.plane(f"{ident}-plane{i}", source, k, embed)
            for i, k in enumerate(source.keys[:MOST_PLANES])
        ]
        made += [
            data.agreement(f"{ident}-fusion", source),
            data.label_entropy(f"{ident}-entropy", source),
        ]
    else:
        notes.append(f"Partition and features are not drawn: {source}.")
    return [p for p in made if p is not None], notes


def caution_notes(named: runs.Named) -> list[str]:
    """What is unusual in a run; of many runs of the same kind how many they are, and the words on the lowest."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for label, entry in named:
        if lines := caution_lines(entry.result):
            kinds.setdefault(lines[0].partition(":")[0], []).append((label, " ".join(lines)))
    notes = []
    for found in kinds.values():
        each = [f"{label}: {words}" for label, words in found]
        notes += (
            each
            if len(each) <= MOST_NAMED
            else [f"{len(each)} runs; the lowest of them is {each[-1]}"]
        )
    return notes


def drawn_notes(named: runs.Named) -> list[str]:
    """Of which runs only some clients were scored, and how large the standard error of their mean is."""
    found: dict[str, list[tuple[str, list[float]]]] = {}
    for label, entry in named:
        if (drawn := drawn_clients(entry.result)) is not None:
            found.setdefault(drawn[0], []).append((label, drawn[1]))
    notes = []
    for who, of_runs in found.items():
        if len(of_runs) <= MOST_NAMED:
            names = ", ".join(label for label, _ in of_runs)
        else:
            names = f"{len(of_runs)} runs"
        errors = [e for _, each in of_runs for e in each]
        if not errors:
            notes.append(f"{names}: {who}; there is no standard error.")
            continue
        low = percent(min(errors))
        high = percent(max(errors))
        if low == high:
            span = low
        else:
            span = f"{low} to {high}"
        notes.append(f"{names}: {who}; the standard error of their mean is {span} points.")
    return notes


def first_of_each(named: runs.Named) -> list[tuple[str, StoredRun]]:
    """The run of each method that stands first: the chosen one, or the highest."""
    best: dict[str, tuple[str, StoredRun]] = {}
    for label, entry in named:
        best.setdefault(entry.method, (label, entry))
    return list(best.values())


def every_method_first(named: runs.Named) -> list[tuple[str, StoredRun]]:
    """The first run of each method, then its variants."""
    firsts = first_of_each(named)
    known = {e.digest for _, e in firsts}
    return [*firsts, *(pair for pair in named if pair[1].digest not in known)]
