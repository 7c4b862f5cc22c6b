"""``fedcache report``: runs as one self-contained HTML file that loads nothing from any network."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from fedcache.errors import FedcacheError, MachineError, UsageError, unknown
from fedcache.extract.planning.find_images import ImagePlaces
from fedcache.extract.recipe import ROWS
from fedcache.federate.trust.accounting import short_privacy
from fedcache.parsing import Facts, counted, size
from fedcache.progress import Observer, Silent, percent, piece_of_work
from fedcache.report import figure_data, figure_runs
from fedcache.report.comparison import (
    LEAST_BLOCKS,
    METRIC_OF_SCORE,
    Comparison,
    compared,
    merged_notes,
    over_held_out,
    within,
)
from fedcache.report.comparison_output import caption, differences, sentences
from fedcache.report.drawing import COLUMNS, Plot, check_file, need_matplotlib, short, write_plot
from fedcache.report.find_runs import (
    CLAIMED,
    HELD_OUT,
    Gathered,
    HeldOutGroup,
    Labelled,
    Named,
    RunQuery,
    StoredRun,
    by_setting,
    differing,
    gather,
    held_out_groups,
    labels,
    mean_over_values,
    merge_seeds,
    need_finished,
    setting_name,
    setting_names,
)
from fedcache.report.render import (
    Column,
    ExtraTable,
    Gallery,
    HtmlCell,
    Section,
    gallery,
    number_cell,
    render_page,
)
from fedcache.report.run_origin import RunStore, command_of, store_of_run
from fedcache.report.verdict import (
    Estimate,
    Verdict,
    bytes_words,
    caution_lines,
    cost_of,
    drawn_clients,
    mean_uncertainty,
    points_above,
    ranked,
    seconds_of,
    selected_by,
    sent_bytes,
    uncertainty,
    verdict,
)
from fedcache.runs.score import (
    WORDS,
    check_score,
    has_validation,
    score_for,
    score_of,
    validation_value,
)
from fedcache.store.lock import need_folder, write_output
from fedcache.tables.words import some_names


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        path: the file.
        runs: number of runs that it shows.
        left_out: number of runs that it only names, because they cannot be shown.
        bytes: its size.
        images: number of thumbnails of the dataset that it shows.
        mistakes: number of mistakes whose images were looked for.
    """

    path: Path
    runs: int
    left_out: int
    bytes: int
    images: int
    mistakes: int

    def __repr__(self) -> str:
        megabytes = self.bytes / 1e6
        runs = counted(self.runs, "run")
        return f"Report({self.path}, {runs}, {self.left_out} left out, {megabytes:.2f} MB)"

    def to_dict(self) -> Facts:
        """The ``data`` of the JSON output."""
        return {**self.__dict__, "path": str(self.path)}


def write_report(
    queries: Sequence[RunQuery],
    out: Path,
    root: Path,
    *,
    title: str = "",
    embed: str = "pca",
    score: str | None = None,
    images: ImagePlaces | None = None,
    observer: Observer | None = None,
) -> Report:
    """Write the page of some runs.

    Args:
        queries: runs as ``gather`` takes them; [] for all under ``root``.
        out: the file; an earlier file is replaced as a whole.
        root: where digests are looked up.
        title: heading; a general one when empty.
        embed: projection of features to two dimensions: pca | tsne | umap | none.
        score: client-mean | pooled, the score of all runs; None takes the primary metric of the methods where all runs
            of a setting have the same one, else the mean over clients.
        images: where images are, to show mistakes with them; None shows none.
        observer: receives the progress.

    Raises:
        UsageError for a name that is no run, an unknown embedding, a directory that is not there or images of a
            private run; StoreError where there is no finished run; CorruptionError where all runs are damaged;
            MachineError without matplotlib. An earlier file is then unchanged.
    """
    observer = observer or Silent()
    need_folder(out)
    # The target of a link is replaced, not the link.
    if out.is_symlink():
        out = out.resolve()
    if not os.access(out.parent, os.W_OK):
        raise MachineError(
            f"The directory {out.parent} is not writable.", "-o another/place/report.html"
        )
    if out.is_dir() or out.suffix.lower() not in (".html", ".htm"):
        example = out.with_suffix(".html")
        if out.is_dir():
            example = out / "report.html"
        raise UsageError(f"{out} is not an HTML file.", f"-o {example}")
    need_matplotlib()
    figure_data.check_embedding(embed)
    check_score(score)
    found = gather(queries, root)
    need_finished(found, root)
    if images is not None:
        refuse_private(found.entries)
    merged = merge_seeds(found)
    groups = held_out_groups(merged.entries)
    in_groups = {e.digest for group in groups for e in group.entries}
    # The runs of a held-out group are already in the section of the group. The sections of their settings therefore
    # come last and are folded.
    settings = by_setting(merged.entries)
    settings.sort(key=lambda runs: (runs[0].digest in in_groups, order_of_setting(runs[0])))
    titles = setting_names(settings)
    request = Shown(embed, score, images)
    with piece_of_work(observer, "comparing", len(settings), "settings"):
        sections = [
            held_out_section(f"h{number}", group, score) for number, group in enumerate(groups)
        ]
        recipes: dict[str, str] = {}
        for number, (name, entries) in enumerate(zip(titles, settings, strict=True)):
            source = store_of_run(entries)
            made = section_of(number, name, entries, source, request)
            sections.append(replace(made, folded=entries[0].digest in in_groups))
            recipes |= recipes_of(source)
            observer.advance(1)
    plots = []
    for section in sections:
        plots += [*section.plots, *section.details]
    with piece_of_work(observer, "drawing", len(plots), "figures"):
        for plot in plots:
            plot.svg  # noqa: B018  draws the figure, which keeps the drawing
            observer.advance(1)
    raw = _page(found, sections, recipes, title or "Federated learning results").encode()
    write_output(out, raw)
    for sentence in dict.fromkeys(request.missing):
        observer.warn(sentence)
    shown = sum(s.images for s in sections)
    return Report(out, len(found.entries), len(found.left_out), len(raw), shown, request.mistakes)


def recipes_of(source: RunStore | str) -> dict[str, str]:
    """Array -> its recipe in words, for the arrays that the runs read; {} without a store."""
    if isinstance(source, str):
        return {}
    recipes = {}
    for key in source.keys:
        words = [
            f"{name} {value}"
            for name, value in source.store.arrays[key].recipe.items()
            if not isinstance(value, dict | list)
        ]
        recipes[key] = ", ".join(words)
    return recipes


def _page(found: Gathered, sections: list[Section], recipes: Mapping[str, str], title: str) -> str:
    left_out = []
    for e in found.left_out:
        # A reason may begin with the path of a damaged file, as in "/result.json is ...".
        why = short(e.why.lstrip("/"), 300)
        left_out.append((e.path.name, why, e.hint))
    torch_versions = {str(e.measured["torch"]) for e in found.entries if "torch" in e.measured}
    return render_page(
        title,
        sections,
        len(found.entries),
        overview=overview_of([section for section in sections if not section.folded]),
        left_out=left_out,
        recipes=recipes,
        trained=sorted(torch_versions),
    )


def order_of_setting(entry: StoredRun) -> list[tuple[int, float, str]]:
    """Sort key of settings by name; numbers in names by size."""
    parts = re.split(r"(\d+(?:\.\d+)?)", setting_name(entry))
    return list(map(figure_runs.order_of_value, parts))


def overview_of(sections: Sequence[Section]) -> Section | None:
    """The best run of each setting, and the accuracy of each method's best run; None for one setting."""
    columns = [
        Column("setting"),
        Column("best run"),
        Column("accuracy %", numbers=True),
        Column("how sure"),
        Column("95 % interval", numbers=True),
        Column("sent per client", numbers=True),
    ]
    shown = [(section, section.verdict) for section in sections if section.verdict is not None]
    points = itertools.chain(*(section.points for section, _ in shown))
    methods = list(dict.fromkeys(method for method, _ in points))
    if len(methods) > 1:
        columns += [Column(f"{method} %", numbers=True) for method in methods]
    rows = []
    winners = Counter[str]()
    for section, answer in shown:
        winners[answer.best.method] += 1
        row = [
            _word(section.title),
            replace(_word(answer.label), best=True),
            _number(answer.accuracy),
            _word(answer.certainty),
            _interval(answer.interval),
            _sent(answer.best),
        ]
        if len(methods) > 1:
            # The first run of a method in a section is the one that was selected. The points are reversed, because
            # ``dict`` keeps the last value of a key.
            first = dict(reversed(section.points))
            for method in methods:
                best = method == answer.best.method
                row.append(replace(_number(first.get(method)), best=best))
        rows.append(row)
    if len(rows) < 2:
        return None
    description = (
        "One row for each setting: a dataset with a partition. Settings are not averaged. The columns of "
        "methods show the test accuracy of each method's best run, and the best run of a setting is in bold. Runs "
        "are selected by validation accuracy if there is a validation split, else by test accuracy."
    )
    counts = ", ".join(f"{name} in {count}" for name, count in winners.most_common())
    sure = sum(answer.certainty == "Sure" for _, answer in shown)
    title = f"Best in {len(rows)} settings (sure in {sure}): {counts}"
    # In the overview, each row is a section and not a run: its key and its link are the ident of the section.
    idents = [(section.ident, section.title, section.ident) for section, _ in shown]
    return Section("overview", title, description, columns, rows, runs=idents)


MOST_GALLERIES = 4
"""Maximum number of runs in a section for which images of mistakes are shown."""
MOST_SETTINGS = 12
"""Maximum number of settings with figures; for the others only the table is shown."""
MOST_PLANES = 3
"""Maximum number of feature arrays that are drawn in two dimensions."""
MOST_COMPARED = 20
"""Maximum number of runs that are tested. A page has room for their tests, and Holm's correction covers them all."""
MOST_NAMED = 4
"""Maximum number of runs that a note lists; for more runs it gives their number."""
MOST_VALUES = 24
"""Maximum number of values of a setting for which the table has a filter."""


def refuse_private(entries: Sequence[StoredRun]) -> None:
    """Refuse runs whose epsilon does not cover who holds which rows. Raises UsageError."""
    private = [e.digest[:8] for e in entries if e.private]
    if private:
        raise UsageError(
            f"{some_names(private, 5)} has differential privacy. --with-images would show images of rows, and "
            "epsilon does not cover these images.",
            "Leave --with-images out, or name other runs.",
        )


@dataclass
class Shown:
    """Options of a page, and the counts and warnings on images that are collected while it is made.

    Attributes:
        embed: projection of features to two dimensions.
        score: the score of all runs; None for the usual score of each setting.
        images: where images are; None shows none.
        mistakes: number of mistakes whose images were looked for so far.
        missing: sentences on images that were not found so far.
    """

    embed: str
    score: str | None
    images: ImagePlaces | None
    mistakes: int = 0
    missing: list[str] = field(default_factory=list)


def galleries_of(
    ident: str,
    named: Named,
    source: RunStore | str,
    places: ImagePlaces,
    request: Shown,
) -> tuple[list[Gallery], list[str]]:
    """The mistakes of runs of one setting on their own test rows, and sentences on what is not shown.

    Args:
        ident: of the section.
        named: label and run; the first ``MOST_GALLERIES`` are shown.
        source: the store of their rows, or why there is none.
        places: where images are looked for.
        request: gets the counts and warnings of this call.
    """
    if isinstance(source, str):
        request.missing.append(f"Mistakes are not shown: {source}.")
        return [], request.missing[-1:]
    from fedcache.runs.evaluate_run import mistakes_of_run  # computes with torch

    found = []
    notes = []
    for i, (label, entry) in enumerate(named[:MOST_GALLERIES]):
        try:
            mistakes = mistakes_of_run(entry.path, source.store, source.partition, places.home)
            request.mistakes += len(mistakes.most)
            on = ("its own test rows", "its own rows")
            made = gallery(f"{ident}-mistakes{i}", label, mistakes, on, places)
            if made is not None:
                found.append(made)
                request.missing += made.warnings
            if not mistakes.wrong:
                notes.append(f"{label} made no mistake on its {mistakes.rows:,} test rows.")
        except FedcacheError as error:
            note = f"Mistakes of {label} are not shown: {error.message} {error.hint}"
            if note not in notes:
                request.missing.append(note)
                notes.append(note)
    if len(named) > MOST_GALLERIES:
        notes.append(
            f"Mistakes are shown for {MOST_GALLERIES} runs. For other runs, write a separate report."
        )
    return found, notes


def ranked_runs(entries: Sequence[StoredRun], score: str | None) -> tuple[list[Labelled], str]:
    """Runs of one setting with their labels, the best first, and their score."""
    used = score or score_for(e.result for e in entries)
    entries = ranked(entries, used)
    return list(zip(labels(entries), entries, strict=True)), used


def answer_of(ident: str, title: str, named: Named, score: str) -> Section:
    """Answer and table of one setting, without figures."""
    entries = [e for _, e in named]
    names = differing(entries)
    answer = verdict(named, score)
    best = None
    if answer is not None:
        best = answer.best
    columns, rows = table_of(entries, names, score, best)
    # The index of the best run's row.
    chosen = next((i for i, e in enumerate(entries) if e is best), None)
    return Section(
        ident,
        title,
        _summary(entries, score),
        columns,
        rows,
        points=[(e.method, e.accuracy(score)) for e in entries],
        runs=[(e.key, label, e.digest) for label, e in named],
        chosen=chosen,
        filters=_filters(entries, names),
        verdict=answer,
    )


def answer_of_runs(paths: Sequence[Path]) -> Section | None:
    """Answer and table of the runs of one setting or of one leave-one-out group; None where no run can be read.

    The ident of the section is the names of its runs.
    """
    ident = ",".join(path.name for path in paths)
    entries = merge_seeds(gather(list(paths), Path())).entries
    if not entries:
        return None
    groups = held_out_groups(entries)
    if groups:
        return held_out_section(ident, groups[0], None)
    return answer_of(ident, setting_name(entries[0]), *ranked_runs(entries, None))


def section_of(
    number: int, title: str, entries: list[StoredRun], source: RunStore | str, request: Shown
) -> Section:
    """Section of one setting: its answer, its table and its figures."""
    ident = f"s{number}"
    named, score = ranked_runs(entries, request.score)
    # Figures take most of the time and of the page, so only the first settings get them.
    plots = []
    details: list[Plot] = []
    notes: list[str] = []
    galleries: list[Gallery] = []
    tables = []
    if number < MOST_SETTINGS:
        tests = comparison_of(title, named, score)
        plots = _first_plots(ident, named, score, tests)
        if tests is not None:
            tables.append(_tests_table(tests))
        details, notes = _detail_plots(ident, named, source, request.embed)
        if request.images is not None:
            galleries, sentences_on_images = galleries_of(
                ident, every_method_first(named), source, request.images, request
            )
            notes += sentences_on_images
    else:
        notes.append(
            f"Figures are made for the first {MOST_SETTINGS} settings. For the figures of this setting, "
            "write a separate report of its runs."
        )
    # Commands name the store, so that they can be run where the store is.
    store = ""
    if isinstance(source, RunStore):
        store = source.store.path.name
    return replace(
        answer_of(ident, title, named, score),
        plots=plots,
        notes=notes,
        commands=[(label, e.digest, command_of(e, store)) for label, e in named],
        galleries=galleries,
        details=details,
        tables=tables,
    )


def _summary(entries: Sequence[StoredRun], score: str) -> str:
    """The text above a table: dataset, partition, score and order."""
    data_of = entries[0].result["dataset"]
    part = entries[0].result["partition"]
    # Ingested features may belong to something else than images.
    holds = data_of.get("holds", ROWS)
    clients = counted(part["clients"], "client")
    description = f"{data_of['ok']:,} readable {holds} in the dataset, {clients}"
    if entries[0].redrawn:
        description += "; every seed has its own partition, and the figure shows the first"
    description += "."
    if score != "own":
        description += f" Accuracy is {score}: {WORDS[score]}."
    if has_validation(e.result for e in entries):
        description += " Sorted by validation accuracy; the best run is bold."
    elif len(entries) > 1:
        description += " Sorted by test accuracy; the highest accuracy of a column is bold."
    if any(_worst(e) is not None for e in entries):
        description += " Worst 10 % is the mean over the tenth of clients with the lowest accuracy, if clients differ."
    if entries[0].claimed:
        description += f" {CLAIMED}"
    return description


def _filters(entries: Sequence[StoredRun], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Columns of settings with the values by which the table can be filtered, in the order of a grid."""
    made = []
    for name in names:
        values = {e.facts[name] for e in entries if name in e.facts}
        if 1 < len(values) <= MOST_VALUES:
            ordered = sorted(values, key=figure_runs.order_of_value)
            made.append((name.removeprefix("set."), ordered))
    return made


def comparison_of(title: str, named: Named, score: str) -> Comparison | None:
    """The paired tests of the first runs against the very first: over seeds and test rows, else over clients.

    None where they have no common blocks.
    """
    federated = [pair for pair in named if not pair[1].pooled_rows]
    compared_runs = federated[:MOST_COMPARED]
    names = [name for name, _ in compared_runs]
    entries = [e for _, e in compared_runs]
    if len(entries) < 2:
        return None
    over = "seeds"
    metric = METRIC_OF_SCORE[score]
    testable = all(len(e.seeds) >= LEAST_BLOCKS or e.test_rows for e in entries)
    if not testable:
        # A run has too few seeds for a test, and no test rows. Clients are the blocks if each has its own score.
        over = "clients"
        metric = "accuracy"
        if score == "pooled" or any(len(e.clients.names) < LEAST_BLOCKS for e in entries):
            return None
    # Runs that cannot be compared get a page without tests, not an error.
    try:
        blocks = within(entries, title, metric, over, names)
    except UsageError:
        return None
    # A run without values is left out of ``blocks``. If it is the first run, the best of the others is the reference.
    against = None
    if names[0] in blocks.names:
        against = names[0]
    found = compared(blocks, over=over, metric=metric, against=against)
    if any(p.interval or p.p is not None or p.rows for p in found.pairs):
        return found
    return None


def _tests_table(c: Comparison) -> ExtraTable:
    """The paired tests of a comparison of ``comparison_of``, which has at least one interval or test."""
    sheet = differences(c)
    assert sheet is not None  # nosec B101
    # The caption without the setting, which is the heading of the section, and without the words on bold runs.
    words = caption(c).removeprefix(f"{c.setting}: ").partition(" Bold:")[0]
    notes: Sequence[str] = c.notes
    if figure_runs.enough_blocks(c):
        notes = sentences(c)
    title = f"Paired tests against {c.reference}"
    return title, " ".join([words, *notes]), sheet.columns, sheet.rows


def _first_plots(ident: str, named: Named, score: str, tests: Comparison | None) -> list[Plot]:
    """The first figures: costs, curves, accuracy of clients, swept values."""
    shown = every_method_first(named)
    entries = [e for _, e in named]
    made = [
        figure_runs.against_bytes(f"{ident}-bytes", named, score),
        figure_runs.against_seconds(f"{ident}-seconds", named, score),
        figure_runs.curves(f"{ident}-curves", shown),
        figure_runs.spread(f"{ident}-clients", shown),
        figure_runs.differences(f"{ident}-differences", tests, named, len(named)),
        figure_runs.ranks(f"{ident}-ranks", tests),
    ]
    made += figure_runs.sweeps(f"{ident}-grid", entries, score)
    made += figure_runs.hyperparameters(f"{ident}-settings", entries, score)
    return [p for p in made if p is not None]


def _detail_plots(
    ident: str, named: Named, source: RunStore | str, embed: str
) -> tuple[list[Plot], list[str]]:
    """Figures of confusions, the methods' diagnostics, the partition and the features; and notes on the figures."""
    entries = [e for _, e in named]
    notes = []
    scored_rounds = [e.result["accuracy"].get("per_round") or () for e in entries]
    if all(len(rounds) < 2 for rounds in scored_rounds):
        notes.append(
            "No run measured its accuracy in more than one round. For curves, train with `--eval-every "
            "1`."
        )
    # The confusion matrix of the best run, and its difference from that of the second method's best run.
    first, *others = first_of_each(named)
    made = [figure_runs.confusion(f"{ident}-confusion0", *first)]
    if others:
        made.append(figure_runs.confusion_difference(f"{ident}-against0", first, others[0]))
    notes += caution_notes(named) + drawn_notes(named)
    notes += merged_notes({label: [e] for label, e in named})
    made += figure_runs.own_numbers(f"{ident}-own", named)
    # Figures of the data need the store and its partition.
    if isinstance(source, RunStore):
        made.append(figure_data.dots(f"{ident}-dots", source))
        for i, key in enumerate(source.keys[:MOST_PLANES]):
            made.append(figure_data.plane(f"{ident}-plane{i}", source, key, embed))
        made.append(figure_data.agreement(f"{ident}-fusion", source))
        made.append(figure_data.label_entropy(f"{ident}-entropy", source))
    else:
        notes.append(f"Partition and features are not drawn: {source}.")
    return [p for p in made if p is not None], notes


def caution_notes(named: Named) -> list[str]:
    """Cautions of all runs; more than ``MOST_NAMED`` of one kind become one note with their number and the last one."""
    kinds: dict[str, list[str]] = {}
    for label, entry in named:
        lines = caution_lines(entry.result)
        if lines:
            kind = lines[0].partition(":")[0]
            words = " ".join(lines)
            kinds.setdefault(kind, []).append(f"{label}: {words}")
    notes = []
    for each in kinds.values():
        if len(each) > MOST_NAMED:
            # Runs are ranked from the best, so the last one ranks lowest.
            lowest = each[-1]
            each = [f"{len(each)} runs; the lowest is {lowest}"]
        notes += each
    return notes


def drawn_notes(named: Named) -> list[str]:
    """Notes on runs that scored only some of their clients, with the range of the standard error of their mean."""
    labels_of: dict[str, list[str]] = {}
    errors_of: dict[str, list[float]] = {}
    for label, entry in named:
        drawn = drawn_clients(entry.result)
        if drawn is not None:
            who, standard_errors = drawn
            labels_of.setdefault(who, []).append(label)
            errors_of.setdefault(who, []).extend(standard_errors)
    notes = []
    for who, names in labels_of.items():
        words = ", ".join(names)
        if len(names) > MOST_NAMED:
            words = f"{len(names)} runs"
        errors = "there is no standard error"
        if errors_of[who]:
            # One number where the smallest and the largest are the same.
            ends = [percent(min(errors_of[who])), percent(max(errors_of[who]))]
            span = " to ".join(dict.fromkeys(ends))
            errors = f"the standard error of their mean is {span} points"
        notes.append(f"{words}: {who}; {errors}.")
    return notes


def first_of_each(named: Named) -> list[Labelled]:
    """The first run of each method: the one that validation chose, or the one with the highest test accuracy."""
    best: dict[str, Labelled] = {}
    for label, entry in named:
        best.setdefault(entry.method, (label, entry))
    return list(best.values())


def every_method_first(named: Named) -> list[Labelled]:
    """The first run of each method, then its variants."""
    firsts = first_of_each(named)
    known = {e.digest for _, e in firsts}
    return [*firsts, *(pair for pair in named if pair[1].digest not in known)]


MOST_SHOWN = 6
"""Maximum number of columns of settings that are visible at first; other columns are hidden."""


def table_of(
    entries: Sequence[StoredRun], names: Sequence[str], score: str, chosen: StoredRun | None
) -> tuple[list[Column], list[list[HtmlCell]]]:
    """Columns and rows of the table of one setting.

    Args:
        entries: the runs, in the order of the rows.
        names: names of the facts that tell the runs apart.
        score: client-mean | pooled | own.
        chosen: the best run.
    """
    results = [e.result for e in entries]
    by_validation = has_validation(results)
    columns = []
    cells_of_columns = []

    def put(name: str, cells: list[HtmlCell], *, numbers: bool = True, shown: bool = True) -> None:
        columns.append(Column(name, numbers, shown))
        cells_of_columns.append(cells)

    def put_fractions(name: str, values: Sequence[float | None], *, shown: bool = True) -> None:
        """A column of fractions in percent. Of several runs the best is bold."""
        highest = max((value for value in values if value is not None), default=None)
        cells = []
        for entry, value in zip(entries, values, strict=True):
            cell = _number(value)
            best = value == highest
            if by_validation:
                best = entry is chosen
            if best and value is not None and len(entries) > 1:
                cell = replace(cell, best=True)
            cells.append(cell)
        put(name, cells, shown=shown)

    # Either all runs of a setting are claimed, or none is.
    claimed = ""
    if entries[0].claimed:
        claimed = " (claimed)"
    put("method", [_word(e.method) for e in entries], numbers=False)
    accuracies = [e.accuracy(score) for e in entries]
    put_fractions(f"accuracy %{claimed}", accuracies)
    put("95 % interval", [_interval(uncertainty(e, score)) for e in entries])
    if any("validation" in r for r in results):
        put_fractions("validation %", [validation_value(r, score) for r in results])
    differ = [n for n in names if n != "method"]
    for place, name in enumerate(differ):
        cells = [HtmlCell(e.facts.get(name, "-"), e.facts.get(name, "")) for e in entries]
        put(name.removeprefix("set."), cells, numbers=False, shown=place < MOST_SHOWN)
    put("sent per client", [_sent(e) for e in entries])
    put("seconds per seed", [_seconds(seconds_of(e)) for e in entries])
    worst = [_worst(e) for e in entries]
    if any(value is not None for value in worst):
        several = len({e.method for e in entries}) > 1 and len(differ) < 3
        put_fractions(f"worst 10 %{claimed}", worst, shown=several)
    trust = [r.get("trust", {}) for r in results]
    if any("privacy" in section for section in trust):
        cells = []
        for section in trust:
            cost = section.get("privacy")
            words = "-"
            if cost is not None:
                words = short_privacy(cost)
            cells.append(_word(words))
        put("privacy", cells, numbers=False)
    # The following columns are hidden at first.
    if any("zero_shot" in r["accuracy"] for r in results):
        put("zero-shot %", [_number(r["accuracy"].get("zero_shot")) for r in results], shown=False)
    # ``or None``: a deviation of 0 is shown as a dash.
    stds = [score_of(r, score).std or None for r in results]
    if any(stds):
        put("± seeds", [_number(s) for s in stds], shown=False)
    put("seeds", [_word(len(r["seeds"])) for r in results], shown=False)
    others = {"headline": "own", "client mean": "client-mean", "pooled": "pooled"}
    # Another accuracy has a column only if it differs from the accuracies that already have one.
    columns_of_means = [accuracies]
    for name, other in others.items():
        means = [e.accuracy(other) for e in entries]
        if means not in columns_of_means:
            columns_of_means.append(means)
            put_fractions(f"{name} %{claimed}", means, shown=False)
    put_fractions(f"macro F1 %{claimed}", [r["macro_f1"]["mean"] for r in results], shown=False)
    exact = [r["traffic"]["exact"] for r in results]
    sent = [x["per_client_round"]["up"] for x in exact]
    put("scalars per round", [HtmlCell(size(s), str(s)) for s in sent], shown=False)
    megabytes = [(x["up_bytes"] + x["down_bytes"]) / 1e6 for x in exact]
    put("MB in total", [HtmlCell(f"{m:,.2f}", str(m)) for m in megabytes], shown=False)
    put("fidelity", [_word(r["fidelity"]) for r in results], numbers=False, shown=False)
    put("run", [HtmlCell(e.digest[:8], e.digest) for e in entries], numbers=False, shown=False)
    return columns, [list(row) for row in zip(*cells_of_columns, strict=True)]


def _worst(entry: StoredRun) -> float | None:
    """Accuracy of the worst tenth of clients; None where all clients have the same accuracy."""
    worst: float | None = entry.result["fairness"].get("worst10")
    mean = entry.accuracy("client-mean")
    if worst is None or mean is None or math.isclose(worst, mean, abs_tol=1e-9):
        return None
    return worst


def _interval(found: Estimate | None) -> HtmlCell:
    """The cell of an interval, with a note on what was sampled; it is sorted by the lower end."""
    if found is None:
        return HtmlCell("", "")
    over = found.over.replace(" test rows", " rows")
    return HtmlCell(found.ends, repr(found.low), note=over)


def _sent(entry: StoredRun) -> HtmlCell:
    if entry.pooled_rows:
        return HtmlCell("all rows", "", note="not federated")
    sent = sent_bytes(entry)
    return HtmlCell(bytes_words(sent) or "0 B", repr(sent))


def _seconds(value: float | None) -> HtmlCell:
    if value is None:
        return HtmlCell("-", "")
    words = f"{value:.2g}"
    if value >= 1:
        words = f"{value:,.2f}"
    return HtmlCell(words, repr(value))


def _word(value: object) -> HtmlCell:
    return HtmlCell(str(value), str(value))


def _number(value: float | None) -> HtmlCell:
    """A fraction in percent; a dash for None."""
    return number_cell(value, percent(value))


def held_out_section(ident: str, group: HeldOutGroup, score: str | None) -> Section:
    """Section of a group of runs that hold out one value each: accuracy on each value, and the mean."""
    used = score or group.score
    accuracies = group.accuracies(used)
    means = {name: mean_over_values(accuracy) for name, accuracy in accuracies.items()}
    metric = METRIC_OF_SCORE[used]
    # ``tests`` stays None if no two methods have runs for the same two values.
    tests = None
    with suppress(UsageError):
        tests = compared(over_held_out(group, metric), over=HELD_OUT, metric=metric)
    names = sorted(means, key=lambda name: _falling(means[name]))
    validation = {}
    notes = []
    selected = None
    if tests is not None:
        notes = sentences(tests)
        validation = {t.name: t.validation for t in tests.treatments if t.validation is not None}
        # The chosen run comes first, then the others by validation accuracy. The sort is stable, so runs with equal
        # validation accuracy stay in the order of their means.
        if tests.chosen is not None:
            names.sort(key=lambda name: (name != tests.chosen, _falling(validation.get(name))))
            selected = validation.get(names[0])
    best = names[0]
    runs = {name: list(row.values()) for name, row in group.rows().items()}
    intervals = dict.fromkeys(names)
    for name in names:
        if means[name] is not None:
            intervals[name] = mean_uncertainty(runs[name], used)
    columns = [
        Column("run"),
        Column("mean accuracy %", numbers=True),
        Column("95 % interval", numbers=True),
    ]
    if validation:
        columns.append(Column("validation %", numbers=True))
    columns += [Column(f"{group.column} {value} %", numbers=True) for value in group.values]
    columns.append(Column("sent per client", numbers=True))
    rows = []
    for name in names:
        mean = replace(_number(means[name]), best=name == best and len(names) > 1)
        cells = [_word(name), mean, _interval(intervals[name])]
        if validation:
            cells.append(_number(validation.get(name)))
        cells += [_number(value) for value in accuracies[name].values()]
        rows.append([*cells, _sent(runs[name][0])])
    description = (
        f"Accuracy on the rows of each {group.column} when the runs train on the others, and the "
        "unweighted mean."
    )
    if used != "own":
        description += f" Accuracy is {used}: {WORDS[used]}."
    if group.entries[0].claimed:
        description += f" {CLAIMED}"
    certainty, why = _sure(group, tests)
    best_run = runs[best][0]
    lines = (
        ("Selected by", selected_by(selected, len(names))),
        ("How sure", f"{_distance(best, means)}{why}"),
        ("Cost", cost_of(best_run, [], {}, used)),
    )
    what = f"mean test accuracy over {len(group.values)} held-out values of {group.column}"
    answer = Verdict(best, best_run, means[best], intervals[best], certainty, lines, what)
    points = [(runs[name][0].method, means[name]) for name in names]
    return Section(
        ident,
        group.title,
        description,
        columns,
        rows,
        notes=notes,
        points=points,
        chosen=0,
        verdict=answer,
    )


def _falling(value: float | None) -> float:
    """Sort key of accuracies, highest first and missing ones last."""
    if value is None:
        return 1.0
    return -value


def _distance(best: str, means: Mapping[str, float | None]) -> str:
    """How far the best run of a group is above the second, in a sentence; "" without a second."""
    others = {name: value for name, value in means.items() if name != best and value is not None}
    mean = means[best]
    if not others or mean is None:
        return ""
    second = max(others, key=lambda name: others[name])
    difference = 100 * (mean - others[second])
    return f"{points_above(difference, second)}. "


def _sure(group: HeldOutGroup, tests: Comparison | None) -> tuple[str, str]:
    """The certainty of the order in one word, and the reason."""
    if tests is None or not tests.pairs:
        return "Only one run", f"No other method has a run for each {group.column}."
    count = len(tests.blocks)
    if tests.too_few:
        return (
            "Unknown",
            f"{count} held-out values are too few for any test.",
        )
    undecided = [p.one for p in tests.pairs if p.holm is None or p.holm >= tests.alpha]
    if not undecided:
        return (
            "Sure",
            f"It differs significantly from every other run over {count} held-out values (Wilcoxon's "
            "test, Holm).",
        )
    names = some_names(undecided, MOST_NAMED)
    return (
        "Not sure",
        f"Its difference from {names} is not significant over {count} held-out values (Wilcoxon, Holm).",
    )


# ``fedcache figure``: one figure of runs as a file for a paper, the same data and drawing as in a report.


@dataclass(frozen=True)
class FigureInput:
    """Input of a figure: the runs of one setting in the order of a report."""

    title: str
    named: Named
    score: str
    embed: str

    @property
    def entries(self) -> list[StoredRun]:
        """The runs."""
        return [e for _, e in self.named]

    @property
    def tests(self) -> Comparison | None:
        """Paired tests with the first run."""
        return comparison_of(self.title, self.named, self.score)

    @cached_property
    def source(self) -> RunStore:
        """The store of the runs. Raises UsageError if it is not available or must not be shown."""
        store_or_reason = store_of_run(self.entries)
        if isinstance(store_or_reason, str):
            raise UsageError(
                f"Partition and features cannot be drawn: {store_or_reason}.",
                "fedcache figure curves",
            )
        return store_or_reason


@dataclass(frozen=True)
class Kind:
    """A kind of figure: its description, the runs that it needs, and the function that makes it."""

    description: str
    needs: str
    make: Callable[[FigureInput], Plot | None]


# Every drawing function gets "figure" as the name of its plot, which is needed only in the page of a report.


def _confusion_difference(i: FigureInput) -> Plot | None:
    """The first two methods, or the first two runs where there is one method only."""
    runs: Named = first_of_each(i.named)
    if len(runs) < 2:
        runs = i.named
    if len(runs) < 2:
        return None
    return figure_runs.confusion_difference("figure", runs[0], runs[1])


KINDS = {
    "bytes": Kind(
        "accuracy against bytes sent",
        "two runs, and one of them sends something",
        lambda i: figure_runs.against_bytes("figure", i.named, i.score),
    ),
    "seconds": Kind(
        "accuracy against seconds of training",
        "two runs whose seconds were measured",
        lambda i: figure_runs.against_seconds("figure", i.named, i.score),
    ),
    "curves": Kind(
        "accuracy per round with bands over seeds",
        "runs with --eval-every",
        # All runs; the first of each method come before the others.
        lambda i: figure_runs.curves("figure", every_method_first(i.named)),
    ),
    "clients": Kind(
        "accuracy of every client",
        "clients that are scored on rows of their own",
        lambda i: figure_runs.spread("figure", every_method_first(i.named)),
    ),
    "differences": Kind(
        "paired differences from the first run",
        "two runs with three seeds or clients",
        lambda i: figure_runs.differences("figure", i.tests, i.named),
    ),
    "ranks": Kind(
        "mean ranks with the critical difference",
        "three runs with five seeds or clients, and significant differences",
        lambda i: figure_runs.ranks("figure", i.tests),
    ),
    "grid": Kind(
        "accuracy over one or two swept hyperparameters",
        "two configurations of a method",
        lambda i: next(iter(figure_runs.sweeps("figure", i.entries, i.score)), None),
    ),
    "importance": Kind(
        "effect of each hyperparameter of a grid",
        "eight configurations of a method that differ in two hyperparameters",
        lambda i: next(iter(figure_runs.hyperparameters("figure", i.entries, i.score)), None),
    ),
    "parallel": Kind(
        "every configuration of a grid as a line",
        "eight configurations of a method that differ in two hyperparameters",
        # The plots of the first method are its bars and its lines.
        lambda i: next(iter(figure_runs.hyperparameters("figure", i.entries, i.score)[1:]), None),
    ),
    "confusion": Kind(
        "test rows by true and predicted class of the first run",
        "a run with a mistake",
        lambda i: figure_runs.confusion("figure", *i.named[0]),
    ),
    "confusion-difference": Kind(
        "confusion of the first run minus that of a second method or run",
        "two runs with different predictions for a test row",
        _confusion_difference,
    ),
    "partition": Kind(
        "classes of each client",
        "training rows with labels",
        lambda i: figure_data.dots("figure", i.source),
    ),
    "features": Kind(
        "test rows in two dimensions",
        "three test rows, and --embed other than none",
        lambda i: figure_data.plane("figure", i.source, i.source.keys[0], i.embed),
    ),
}
ACROSS = "settings"
"""The kind of figure that shows several settings."""
LISTED = (*KINDS, ACROSS)


def kind_lines() -> list[str]:
    """Every kind with its description."""
    lines = [f"{name}: {kind.description}" for name, kind in KINDS.items()]
    lines.append(f"{ACROSS}: methods in several settings")
    return lines


def write_figure(
    kind: str,
    queries: Sequence[RunQuery],
    out: Path,
    root: Path,
    *,
    columns: int,
    score: str | None,
    embed: str,
) -> Plot:
    """Draw one figure of some runs into a file.

    Args:
        kind: of ``LISTED``.
        queries: runs as ``gather`` takes them; [] for all under ``root``.
        out: ends in .pdf, .svg or .png.
        root: where digests are looked up.
        columns: 1 or 2, the width in columns of a paper.
        score: client-mean | pooled; None for the score that suits the methods of a setting (``score_for``).
        embed: pca | tsne | umap, for ``features``.

    Raises:
        UsageError for an unknown kind, another ending, runs of several settings, and runs that the kind cannot show;
        StoreError where there is no finished run; MachineError without matplotlib.
    """
    if kind not in LISTED:
        kinds = "; ".join(kind_lines())
        raise UsageError(unknown("kind of figure", kind, LISTED).message, f"Kinds: {kinds}.")
    if columns not in COLUMNS:
        raise UsageError(
            f"--columns {columns} is not 1 or 2.",
            "--columns is the width of the figure in columns of a paper. --columns 2 is the full width of the text.",
        )
    check_file(out, "-o")
    check_score(score)
    figure_data.check_embedding(embed)
    found = gather(queries, root)
    need_finished(found, root)
    settings = by_setting(merge_seeds(found).entries)
    titles = setting_names(settings)
    if kind == ACROSS:
        plot = _across(settings, titles, score)
    elif len(settings) > 1:
        listed = "; ".join(titles[:4])
        raise UsageError(
            f"The runs belong to {len(settings)} settings, such as {listed}, but a figure shows only one.",
            "Give the runs of one setting (fedcache runs list), or draw the figure `settings`.",
        )
    else:
        named, used = ranked_runs(settings[0], score)
        plot = KINDS[kind].make(FigureInput(titles[0], named, used, embed))
    if plot is None:
        needs = "two methods in two settings"
        if kind != ACROSS:
            needs = KINDS[kind].needs
        others = ", ".join(name for name in LISTED if name != kind)
        raise UsageError(
            f"The figure {kind} needs {needs}, which these runs do not give.",
            f"Other kinds: {others}",
        )
    write_plot(out, plot, columns)
    return plot


def _across(
    settings: Sequence[Sequence[StoredRun]], titles: Sequence[str], score: str | None
) -> Plot | None:
    """Methods in all settings, each with its first run in a setting."""
    points = []
    for title, entries in zip(titles, settings, strict=True):
        used = score or score_for(e.result for e in entries)
        # The label "" is not shown.
        firsts = first_of_each([("", e) for e in ranked(list(entries), used)])
        points += [(e.method, title, e.accuracy(used)) for _, e in firsts]
    return figure_runs.matrix("figure", points, titles)
