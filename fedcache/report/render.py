"""A page as one HTML file that loads nothing: tables, drawings and thumbnails in the template, everything escaped."""

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

    from fedcache.models.evaluate import Mistake, Mistakes  # torch: thumbnails of a store need none

VERSIONS = ("torch", "numpy", "timm", "open_clip_torch", "zarr", "scikit-learn")
SIDE = 64
"""Pixels of the longer side of a thumbnail; a smaller image keeps its size."""


@dataclass(frozen=True)
class HtmlCell:
    """A cell of a table: its text, its sort key, whether it is bold, and a small note."""

    text: str
    sort: str
    best: bool = False
    note: str = ""


class Column(NamedTuple):
    """A column of a table: its name, whether it holds numbers, whether it is shown before anybody chooses."""

    name: str
    numbers: bool = False
    shown: bool = True


@dataclass(frozen=True)
class Thumbnail:
    """One mistake with its image."""

    uri: str  # data:image/...
    mistake: Mistake
    probability: str  # per cent


@dataclass(frozen=True)
class Gallery:
    """The mistakes of one run."""

    ident: str
    title: str
    description: str
    images: tuple[Thumbnail, ...]
    lost: int = 0  # mistakes whose images are not there any more


@dataclass(frozen=True)
class Section:
    """One setting: its runs and their figures.

    Attributes:
        ident: unique in the page.
        title: heading.
        description: what the table is of.
        columns: of the table.
        rows: its cells.
        plots: what is looked at first.
        notes: sentences below the figures.
        commands: (label, digest, command) of every run.
        points: (method, accuracy) of every run.
        galleries: images of mistakes.
        runs: name of each row in figures, what it is called there, and its directory; () where rows are not runs.
        chosen: the row that stands out.
        details: figures that come after all others.
        tables: (title, caption, columns, rows) of tables below the figures.
        filters: (column, its values) by which rows can be kept.
        verdict: the best run, how sure that is and its cost.
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
    tables: Sequence[tuple[str, str, Sequence[str], Sequence[Sequence[str]]]] = ()
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
        count: runs that are shown.
        overview: the table of all settings; its ``runs`` are the sections of its rows.
        left_out: (run, why, what helps) of runs that are not shown.
        recipes: array -> its recipe in words.
        trained: versions of torch.
    """
    place = files("fedcache.report")
    style, script = (place.joinpath(n).read_text(encoding="utf-8") for n in ("page.css", "page.js"))
    # The page contains its style and script; the hash lets the browser run this script and no other.
    template = html_environment().from_string(
        place.joinpath("page.html.j2").read_text(encoding="utf-8")
    )
    return template.render(
        title=title,
        style=style,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        sections=sections,
        overview=overview,
        left_out=left_out,
        count=count,
        images=sum(s.images for s in sections),
        recipes=sorted((recipes or {}).items()),
        versions=[
            ("fedcache", fedcache.__version__),
            ("python", platform.python_version()),
            *_versions(),
        ],
        trained=trained,
    )


def html_environment(loader: jinja2.BaseLoader | None = None) -> jinja2.Environment:
    """The Jinja environment of all pages: every text is escaped and visible, and a name that is not known an error."""
    import jinja2

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
    env.globals["markup"] = _safe
    return env


def _versions() -> list[tuple[str, str]]:
    known = []
    for name in VERSIONS:
        try:
            known.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return known


def _shown(value: Any) -> Any:
    """Text of a template made ``visible``; drawings and code are markup already and stay."""
    if type(value) is str:
        return visible(value, lines=True)
    return value


def _safe(svg: str) -> Any:
    """A drawing of ``canvas.draw``: matplotlib's file, whose words were escaped when it was written."""
    import markupsafe

    return markupsafe.Markup(svg)  # nosec B704


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
        writer.writerow([f"{v:.6g}" if isinstance(v, float) else sheet_cell(v) for v in row])
    return out.getvalue()


def gallery(
    ident: str, label: str, mistakes: Mistakes, on: tuple[str, str], places: ImagePlaces
) -> list[Gallery]:
    """The mistakes of one run as a gallery, none where it made none.

    Raises StoreError, with the dataset that is needed, where no image is available.

    Args:
        ident: unique in the page.
        label: of the run.
        mistakes: of its models.
        on: in words, the rows of all models and those of each client's.
        places: where images are looked for.
    """
    if not mistakes.most:
        return []
    images = read_images(Store.open(mistakes.store), [m.row for m in mistakes.most], places)
    # Images that the dataset no longer has are counted below.
    shown = tuple(
        Thumbnail(thumbnail_uri(images[m.row]), m, f"{percent(m.probability)} %")
        for m in mistakes.most
        if m.row in images
    )
    rows, rows_of_client = on
    description = (
        f"The most confident of {mistakes.wrong:,} mistakes on {rows} ({mistakes.rows:,} scored), each "
        "with its class, the predicted class and the probability of the prediction."
    )
    if mistakes.clients:
        description += f" {mistakes.clients:,} personal models were evaluated, each on "
        description += f"{rows_of_client}; the client is named."
    lost = len(mistakes.most) - len(shown)
    if lost:
        description += f" {lost} of {len(mistakes.most)} images are no longer in the dataset."
    return [Gallery(ident, f"Mistakes of {label}", description, shown, lost)]


def lost_of(label: str, found: Sequence[Gallery]) -> list[str]:
    """A sentence on the images that the galleries of a run lack."""
    sentences = []
    for g in found:
        every = len(g.images) + g.lost
        if g.lost:
            sentences.append(
                f"{g.lost} of {every} images of {label}'s mistakes are not in the dataset any more."
            )
    return sentences


def thumbnail_uri(image: Image.Image) -> str:
    """An RGB image as a data URI of at most ``SIDE`` pixels: PNG where it was no larger, else JPEG."""
    # pixels alone: no profile, no words of a camera
    small = Image.fromarray(np.array(image.convert("RGB")))
    kind = "jpeg"
    options: dict[str, Any] = {"quality": 85}
    if max(small.size) <= SIDE:
        kind = "png"
        options = {"optimize": True}
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    small.save(out, kind, **options)
    data = base64.b64encode(out.getvalue()).decode()
    return f"data:image/{kind};base64,{data}"
