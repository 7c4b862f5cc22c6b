"""One setting of a report: what to take, the table, figures in the order in which one asks, and details after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedcache.extract.inputs import IMAGES
from fedcache.extract.planning.find_images import ImagePlaces
from fedcache.report.chance_words import chance_lines
from fedcache.report.drawing import Plot
from fedcache.report.figures import data, grids, runs
from fedcache.report.find_runs import CLAIMED, StoredRun, differing, facts, labels
from fedcache.report.galleries import Gallery, ToShow, galleries_of
from fedcache.report.render import Section
from fedcache.report.run_origin import RunStore, command_of
from fedcache.report.table import table_of
from fedcache.report.verdict import Verdict, ranked, verdict
from fedcache.runs.choice import has_validation
from fedcache.runs.score import WORDS, score_for, score_of

MOST_SETTINGS = 12
"""Settings that get figures; the others get their table."""
MOST_PLANES = 3
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
    if number < MOST_SETTINGS:
        plots = _first_plots(ident, named)
        details, notes = _detail_plots(ident, named, source, asked.embed)
        if asked.images is not None:
            galleries, told = galleries_of(ident, _every_method_first(named), source, asked.images, asked.found)
            notes += told
    else:
        notes.append(f"Figures are made for the first {MOST_SETTINGS} settings; report these runs alone to see theirs.")
    columns, rows = table_of(entries, names, score, said.digest)
    store = source.store.path.name if isinstance(source, RunStore) else ""
    return said, Section(
        ident, title, _says(entries, score), columns, rows, plots, notes,
        commands=[(label, e.digest, command_of(e, store)) for label, e in named],
        points=[(e.method, score_of(e.result, score).mean) for e in entries],
        galleries=galleries,
        runs=[(run_key(e), label) for label, e in named],
        chosen=next((i for i, e in enumerate(entries) if e.digest == said.digest), None),
        details=details,
        filters=_filters(entries, names),
    )  # fmt: skip


def run_key(entry: StoredRun) -> str:
    """What marks of a run are named by in a page."""
    return entry.digest[:10]


def _says(entries: Sequence[StoredRun], score: str) -> str:
    """What the table is of, and how it is to be read."""
    first = entries[0].result
    holds = first["dataset"].get("holds", IMAGES)
    says = f"Dataset {str(first['dataset']['digest'])[:16]}, {first['dataset']['ok']:,} readable {holds}; partition "
    says += f"{str(first['partition']['digest'])[:16]}, {first['partition']['clients']} clients"
    says += "; every seed has its own, the first is drawn." if len(set(first["partition"]["digests"])) > 1 else "."
    if score != "own":
        says += f" Accuracy is {score}: {WORDS[score]}."
    if has_validation(e.result for e in entries):
        says += " Runs stand by falling validation accuracy; bold is what it chose."
    elif len(entries) > 1:
        says += " Runs stand by falling test accuracy; bold is the highest of its column, which is no choice."
    return says + (f" {CLAIMED}" if entries[0].claimed else "")


def _filters(entries: Sequence[StoredRun], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Columns of settings with the values by which runs can be kept, in the order of a grid."""
    made = []
    for name in names:
        values = sorted({f[name] for f in map(facts, entries) if name in f}, key=grids.order_of_value)
        if 1 < len(values) <= MOST_VALUES:
            made.append((name.removeprefix("set."), values))
    return made


def _first_plots(ident: str, named: runs.Named) -> list[Plot]:
    """What one asks first: costs, curves, who is left behind, what the swept values did."""
    shown = _every_method_first(named)
    made = [
        runs.against_bytes(f"{ident}-bytes", named),
        runs.against_seconds(f"{ident}-seconds", named),
        runs.curves(f"{ident}-curves", shown),
        runs.spread(f"{ident}-clients", shown),
        *grids.sweeps(f"{ident}-grid", [e for _, e in named]),
    ]
    return [p for p in made if p is not None]


def _detail_plots(ident: str, named: runs.Named, source: RunStore | str, embed: str) -> tuple[list[Plot], list[str]]:
    """Confusions, the methods' own numbers, the partition and the features; and what there is to say of the figures."""
    entries = [e for _, e in named]
    firsts = _first_of_each(named)
    made: list[Plot | None] = []
    notes: list[str] = []
    if all(len(e.result["accuracy"].get("per_round") or ()) < 2 for e in entries):
        notes.append("No run measured its accuracy in more than one round: `--eval-every 1` gives the curves.")
    for i, (label, entry) in enumerate(firsts[:1]):
        made.append(runs.confusion(f"{ident}-confusion{i}", label, entry))
    if any("confusion" not in e.result for e in entries):
        notes.append("Results of earlier versions hold no confusion matrix: `--fresh` makes them again.")
    notes += [f"{label}: {' '.join(lines)}" for label, e in named if (lines := chance_lines(e.result))]
    made += runs.own_numbers(f"{ident}-own", named)
    notes += runs.last_numbers(named)
    if isinstance(source, RunStore):
        made.append(data.dots(f"{ident}-dots", source))
        made += [data.plane(f"{ident}-plane{i}", source, k, embed) for i, k in enumerate(source.keys[:MOST_PLANES])]
        made += [data.agreement(f"{ident}-fusion", source), data.label_entropy(f"{ident}-entropy", source)]
    else:
        notes.append(f"Partition and features are not drawn: {source}.")
    return [p for p in made if p is not None], notes


def _first_of_each(named: runs.Named) -> list[tuple[str, StoredRun]]:
    """The run of each method that stands first: the chosen one, or the highest."""
    best: dict[str, tuple[str, StoredRun]] = {}
    for label, entry in named:
        best.setdefault(entry.method, (label, entry))
    return list(best.values())


def _every_method_first(named: runs.Named) -> list[tuple[str, StoredRun]]:
    """The first run of each method, then its variants."""
    firsts = _first_of_each(named)
    known = {e.digest for _, e in firsts}
    return [*firsts, *(pair for pair in named if pair[1].digest not in known)]
