"""``fedcache report``: runs to one self-contained HTML file that asks nothing of any network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.errors import MachineError, UsageError
from fedcache.extract.planning.image_places import ImagePlaces
from fedcache.progress import Observer, Silent
from fedcache.report.drawing import need_matplotlib, short
from fedcache.report.figures import data, grids
from fedcache.report.find_runs import Gathered, RunQuery, gather, need_finished
from fedcache.report.galleries import ToShow, refuse_private
from fedcache.report.held_out import held_out_groups
from fedcache.report.held_out_section import held_out_section
from fedcache.report.merge_seeds import merge_seeds
from fedcache.report.render import Section, render_page
from fedcache.report.run_names import by_setting, setting_names
from fedcache.report.run_origin import RunStore, store_of_run
from fedcache.report.sections import PRIVATE, Shown, section_of
from fedcache.report.verdict import Verdict
from fedcache.runs.score import check_score
from fedcache.store.outputs import write_output


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        path: the file.
        runs: how many it shows.
        left_out: runs that it names and cannot show.
        bytes: its size.
        images: thumbnails of the dataset that it shows.
        mistakes: whose images it was to show.
    """

    path: Path
    runs: int
    left_out: int
    bytes: int
    images: int = 0
    mistakes: int = 0

    def __repr__(self) -> str:
        runs = f"{self.runs} run{'' if self.runs == 1 else 's'}"
        return f"Report({self.path}, {runs}, {self.left_out} left out, {self.bytes / 1e6:.2f} MB)"

    def to_dict(self) -> dict[str, Any]:
        """The ``data`` of the envelope."""
        return {**self.__dict__, "path": str(self.path)}


def write_report(
    asked: Sequence[RunQuery],
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
        asked: runs as ``gather`` takes them; [] for all under ``root``.
        out: the file; an earlier one is replaced, whole.
        root: where digests are looked up.
        title: heading; a general one when empty.
        embed: how features come to two dimensions: pca | tsne | umap | none.
        score: client-mean | pooled, what scores all runs; None takes the methods' own headline where it is one for all
            runs of a setting, else the mean over clients.
        images: where images are, to show mistakes with them; None shows none.
        observer: told the progress.

    Raises:
        UsageError for a name that is no run, an unknown embedding, a directory that is not there or images of a
            private run; StoreError where there is no finished run, CorruptionError where all are damaged: an earlier
            file stays as it is; MachineError without matplotlib.
    """
    observer = observer or Silent()
    if not out.parent.is_dir():
        raise UsageError(f"The directory {out.parent} does not exist.", f"mkdir -p {out.parent}")
    # a link stays a link
    if out.is_symlink():
        out = out.resolve()
    if not os.access(out.parent, os.W_OK):
        raise MachineError(f"{out.parent} cannot be written to.", "-o another/place/report.html")
    if out.is_dir() or out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(
            f"{out} is no HTML file.",
            f"-o {out / 'report.html' if out.is_dir() else out.with_suffix('.html')}",
        )
    need_matplotlib()
    data.check_embedding(embed)
    check_score(score)
    found = gather(asked, root)
    need_finished(found, root)
    if images is not None:
        refuse_private(found.entries)
    merged = merge_seeds(found)
    groups = held_out_groups(merged.entries)
    in_groups = {e.digest for group in groups for e in group.entries}
    # A group says first what its runs say together; the sections of its runs come last.
    settings = sorted(
        by_setting(merged.entries), key=lambda entries: entries[0].digest in in_groups
    )
    titles = setting_names(settings)
    shown = ToShow()
    observer.start("comparing", len(settings), "settings")
    try:
        sections: list[Section] = []
        verdicts: list[Verdict] = []
        recipes: dict[str, str] = {}
        for number, group in enumerate(groups):
            said, made = held_out_section(number, group, score)
            verdicts.append(said)
            sections.append(made)
        for number, (name, entries) in enumerate(zip(titles, settings, strict=True)):
            source = PRIVATE if any(e.private for e in entries) else store_of_run(entries)
            said, made = section_of(
                number, name, entries, source, Shown(embed, score, images, shown)
            )
            if entries[0].digest not in in_groups:
                verdicts.append(said)
            sections.append(made)
            recipes |= recipes_of(source)
            observer.advance(1)
    finally:
        observer.stop()
    plots = [plot for section in sections for plot in (*section.plots, *section.details)]
    observer.start("drawing", len(plots), "figures")
    try:
        for plot in plots:
            plot.svg  # noqa: B018  draws the figure, which keeps the drawing
            observer.advance(1)
    finally:
        observer.stop()
    raw = _page(
        found, sections, verdicts, recipes, title or "Federated runs on cached features"
    ).encode()
    write_output(out, raw)
    for sentence in dict.fromkeys(shown.missing):
        observer.warn(sentence)
    there = sum(s.images for s in sections)
    return Report(out, len(found.entries), len(found.left_out), len(raw), there, shown.mistakes)


def recipes_of(source: RunStore | str) -> dict[str, str]:
    """Array -> its recipe in words, of the arrays that the runs read; {} without a store."""
    if isinstance(source, str):
        return {}
    recipes = {key: source.store.arrays[key].recipe for key in source.keys}
    return {
        key: ", ".join(f"{k} {v}" for k, v in recipe.items() if not isinstance(v, dict | list))
        for key, recipe in recipes.items()
    }


def _page(
    found: Gathered,
    sections: list[Section],
    verdicts: list[Verdict],
    recipes: Mapping[str, str],
    title: str,
) -> str:
    accuracy = [(method, s.title, mean) for s in sections for method, mean in s.points]
    matrix = grids.matrix("across", accuracy, [s.title for s in sections])
    return render_page(
        title,
        sections,
        len(found.entries),
        across=[] if matrix is None else [matrix],
        verdicts=verdicts,
        left_out=[(e.path.name, short(e.why.lstrip("/"), 300), e.hint) for e in found.left_out],
        recipes=recipes,
        trained=sorted({str(e.measured["torch"]) for e in found.entries if "torch" in e.measured}),
    )
