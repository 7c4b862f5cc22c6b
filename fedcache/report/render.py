"""Rendering of a page as one HTML file that loads nothing: tables, drawings and thumbnails, with all text escaped."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

import fedcache
from fedcache.extract.planning.find_images import ImagePlaces, read_images
from fedcache.parsing import sheet_cell, visible
from fedcache.progress import percent
from fedcache.report.drawing import Plot
from fedcache.report.verdict import Verdict
from fedcache.store.store import Store

if TYPE_CHECKING:
    import jinja2

    from fedcache.models.evaluate import Mistake, Mistakes  # imports torch, which pages do not need

VERSIONS = ("torch", "numpy", "timm", "open_clip_torch", "zarr", "scikit-learn")
SIDE = 64
"""Maximum of a thumbnail's longer side in pixels. A smaller image keeps its size."""


@dataclass(frozen=True)
class HtmlCell:
    """A cell of a table: its text, its sort key, whether it is bold, and a small note."""

    text: str
    sort: str
    best: bool = False
    note: str = ""


def number_cell(value: float | None, text: str) -> HtmlCell:
    """A cell that is sorted by its number."""
    if value is None:
        return HtmlCell(text, "")
    return HtmlCell(text, repr(value))


class Column(NamedTuple):
    """A column of a table: its name, whether it holds numbers, and whether it is shown at first."""

    name: str
    numbers: bool = False
    shown: bool = True


@dataclass(frozen=True)
class Thumbnail:
    """One mistake with its image: a data URI, and the probability of the prediction in percent."""

    uri: str
    mistake: Mistake
    probability: str


@dataclass(frozen=True)
class Gallery:
    """The mistakes of one run; ``warnings`` are sentences on images that no longer exist."""

    ident: str
    title: str
    description: str
    images: tuple[Thumbnail, ...]
    warnings: Sequence[str]


ExtraTable = tuple[str, str, Sequence[str], Sequence[Sequence[str]]]
"""Title, caption, columns and rows of a table that contains only text."""


@dataclass(frozen=True)
class Section:
    """One setting: its runs and their figures.

    Attributes:
        ident: unique in the page.
        title: heading.
        description: text above the table.
        columns: of the table.
        rows: cells of the table.
        plots: the first figures.
        notes: sentences below the figures.
        commands: (label, digest, command) of every run.
        points: (method, accuracy) of every run.
        galleries: images of mistakes.
        runs: (key in figures, label, directory) of each row; () where rows are not runs.
        chosen: number of the row that is highlighted.
        details: the last figures.
        tables: below the figures.
        filters: (column, its values) of filters of the table.
        verdict: the best run, its certainty and its cost.
        folded: whether it is shown only on request.
    """

    ident: str
    title: str
    description: str
    columns: list[Column]
    rows: list[list[HtmlCell]]
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()
    commands: Sequence[tuple[str, str, str]] = ()
    points: Sequence[tuple[str, float | None]] = ()
    galleries: Sequence[Gallery] = ()
    runs: Sequence[tuple[str, str, str]] = ()
    chosen: int | None = None
    details: Sequence[Plot] = ()
    tables: Sequence[ExtraTable] = ()
    filters: Sequence[tuple[str, Sequence[str]]] = ()
    verdict: Verdict | None = None
    folded: bool = False

    @property
    def images(self) -> int:
        """Thumbnails that it shows."""
        return sum(len(g.images) for g in self.galleries)


def render_page(
    title: str,
    sections: Sequence[Section],
    count: int,
    *,
    overview: Section | None = None,
    left_out: Sequence[tuple[str, str, str]] = (),
    recipes: Mapping[str, str] | None = None,
    trained: Sequence[str] = (),
) -> str:
    """A page as one file that loads nothing.

    Args:
        title: heading.
        sections: in order.
        count: number of runs that are shown.
        overview: the table of all settings. Each of its rows is a section, to which its ``runs`` link.
        left_out: (run, reason, hint) of runs that are not shown.
        recipes: array -> its recipe in words.
        trained: versions of torch that trained the runs.
    """
    folder = files("fedcache.report")
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    script = folder.joinpath("page.js").read_text(encoding="utf-8")
    source = folder.joinpath("page.html.j2").read_text(encoding="utf-8")
    # The page contains its style and script. The hash allows the browser to run only this script.
    script_digest = hashlib.sha256(script.encode()).digest()
    template = html_environment().from_string(source)
    return template.render(
        title=title,
        style=style,
        script=script,
        script_hash=base64.b64encode(script_digest).decode(),
        sections=sections,
        overview=overview,
        left_out=left_out,
        count=count,
        images=sum(s.images for s in sections),
        recipes=sorted((recipes or {}).items()),
        versions=_versions(),
        trained=trained,
    )


def html_environment(loader: jinja2.BaseLoader | None = None) -> jinja2.Environment:
    """The Jinja environment of all pages: all text is escaped and visible, and an unknown name is an error."""
    import jinja2
    import markupsafe

    env = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    env.filters["csv"] = _csv
    env.filters["code"] = _code
    env.filters["percent"] = percent
    # Drawings, style and script are markup already; words in a drawing were escaped when it was drawn.
    env.globals["markup"] = markupsafe.Markup
    return env


def _versions() -> list[tuple[str, str]]:
    """(name, version) of fedcache, Python and those packages of ``VERSIONS`` that are installed."""
    known = [("fedcache", fedcache.__version__), ("python", platform.python_version())]
    for name in VERSIONS:
        try:
            known.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return known


def _shown(value: Any) -> Any:
    """Text of a template made ``visible``; drawings and code are already markup and stay unchanged."""
    # Markup is a subclass of str, so ``isinstance`` would include it.
    if type(value) is str:
        return visible(value, lines=True)
    return value


def _code(text: str) -> Any:
    """Words between backticks as code; everything is escaped."""
    import markupsafe

    # Every second part was between two backticks.
    parts = [markupsafe.escape(part) for part in visible(text, lines=True).split("`")]
    parts[1::2] = [markupsafe.Markup("<code>{}</code>").format(part) for part in parts[1::2]]
    return markupsafe.Markup("").join(parts)


def _csv(plot: Plot) -> str:
    """The data of a figure; a word that a spreadsheet would run as a formula gets a quote before it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([sheet_cell(name) for name in plot.columns])
    for row in plot.rows:
        cells: list[object] = []
        for value in row:
            if isinstance(value, float):
                cells.append(f"{value:.6g}")
            else:
                cells.append(sheet_cell(value))
        writer.writerow(cells)
    return out.getvalue()


def gallery(
    ident: str, label: str, mistakes: Mistakes, on: tuple[str, str], places: ImagePlaces
) -> Gallery | None:
    """The mistakes of one run as a gallery; None where it made no mistake.

    Raises StoreError, with the dataset that is needed, where no image is available.

    Args:
        ident: unique in the page.
        label: of the run.
        mistakes: of its models.
        on: in words, the rows on which the mistakes were made, and the rows of each client if the models are personal.
        places: where images are looked for.
    """
    if not mistakes.most:
        return None
    images = read_images(Store.open(mistakes.store), [m.row for m in mistakes.most], places)
    # Images that are no longer in the dataset are counted below.
    shown = []
    for mistake in mistakes.most:
        if mistake.row in images:
            uri = thumbnail_uri(images[mistake.row])
            shown.append(Thumbnail(uri, mistake, f"{percent(mistake.probability)} %"))
    rows, rows_of_client = on
    description = (
        f"The most confident of {mistakes.wrong:,} mistakes on {rows} ({mistakes.rows:,} scored), each "
        "with its class, the predicted class and the probability of the prediction."
    )
    if mistakes.clients:
        description += (
            f" {mistakes.clients:,} personal models were evaluated, each on {rows_of_client}; the client is "
            "named."
        )
    warnings = []
    lost = len(mistakes.most) - len(shown)
    if lost:
        count = f"{lost} of {len(mistakes.most)} images"
        description += f" {count} are no longer in the dataset."
        warnings.append(f"{count} of {label}'s mistakes are not in the dataset any more.")
    return Gallery(ident, f"Mistakes of {label}", description, tuple(shown), warnings)


def thumbnail_uri(image: Image.Image) -> str:
    """An RGB image as a data URI of at most ``SIDE`` pixels: JPEG if it was larger, else PNG."""
    # Only the pixels are kept, without profile and camera metadata.
    small = Image.fromarray(np.array(image.convert("RGB")))
    kind = "jpeg"
    options = {"quality": 85}
    if max(small.size) <= SIDE:
        kind = "png"
        options = {"optimize": True}
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    small.save(out, kind, **options)
    data = base64.b64encode(out.getvalue()).decode()
    return f"data:image/{kind};base64,{data}"
