"""Figures drawn by matplotlib: as SVG in a page, and in files of their own.

In a page a figure is data first, drawn once in colours that the page names, with words behind each mark. A colour is
written as one of the numbers of ``NAMES`` and becomes ``var(--name, fallback)``, so that one drawing serves light and
dark and still has colours where there is no style sheet. A mark's words become the SVG's own ``<title>``. A file has an
ending that chooses its format, and equal bytes for equal drawings.
"""

from __future__ import annotations

import io
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

from fedcache.errors import UsageError, closest
from fedcache.optional import needed_library
from fedcache.parsing import visible
from fedcache.store.lock import write_output

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
INK = "#0f0001"
MUTED = "#0f0002"
LINE = "#0f0003"
PAPER = "#0f0004"
SERIES = tuple(f"#0f00{10 + i}" for i in range(10))
_LIGHT = (
    "#2563eb",
    "#d9480f",
    "#0f8a5f",
    "#a21caf",
    "#b58900",
    "#0e7490",
    "#be123c",
    "#4d7c0f",
    "#6d4aff",
    "#6b7280",
)
NAMES = {
    INK: "var(--ink, #1b1f24)",
    MUTED: "var(--muted, #59636e)",
    LINE: "var(--line, #d8dee4)",
    PAPER: "var(--paper, #ffffff)",
    **{colour: f"var(--s{i}, {_LIGHT[i]})" for i, colour in enumerate(SERIES)},
}
WIDTH = 4.8
HEIGHT = 3.4
"""Inches of 72 units. A phone of 390 px shows a drawing in 350, so one unit is a pixel there and not less elsewhere."""
LETTERS = 12.6
"""Units of the smallest letters: twelve pixels and more on every screen."""
LONGEST = 34
MOST_TICKS = 24

Cell = str | int | float | None
Marks = Callable[..., None]
"""``marks(artist, words, runs)``: words behind each mark of an artist, and the keys of the runs that they are of, one
for each mark, or one key for all of the artist, whose words may be ()."""
Draw = Callable[[Any, Marks], None]

_ALONE = threading.RLock()
"""Matplotlib's settings are those of all threads: one figure is drawn at a time."""

ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", XLINK)


@dataclass(frozen=True)
class Plot:
    """A figure of the report.

    Attributes:
        ident: unique in the page; names the files that are downloaded.
        title: what it shows.
        description: a sentence for those who do not see it, and what was left out.
        columns: names of the data.
        rows: the data, as the CSV has them.
        fill: what draws it on its axes.
        height: inches of the drawing where it is ``WIDTH`` wide.
    """

    ident: str
    title: str
    description: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    fill: Draw
    height: float = HEIGHT

    @cached_property
    def svg(self) -> str:
        """The drawing, made when it is first requested."""
        return draw(self.ident, self.fill, height=self.height, description=self.description)


def draw(ident: str, fill: Draw, *, height: float = HEIGHT, description: str = "") -> str:
    """An SVG without size, scripts or fonts of its own.

    Args:
        ident: prefix of every id in it.
        fill: draws on the axes it is given; calls ``marks(artist, words)`` for what is to tell its words.
        height: inches.
        description: the text alternative.
    """
    import matplotlib
    from cycler import cycler
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    marked: dict[str, tuple[list[str], str | Sequence[str]]] = {}

    def marks(artist: Any, words: Sequence[str] = (), runs: str | Sequence[str] = "") -> None:
        name = f"marks{len(marked)}"
        artist.set_gid(name)
        marked[name] = list(words), runs

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": ident,
        "font.size": LETTERS,
        "text.parse_math": False,
        "text.color": INK,
        "axes.edgecolor": LINE,
        "axes.labelcolor": MUTED,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": LINE,
        "grid.linewidth": 0.6,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED,
        "legend.frameon": False,
        "legend.fontsize": LETTERS,
        "legend.title_fontsize": LETTERS,
        "figure.facecolor": "none",
        "axes.prop_cycle": cycler(color=SERIES),
        "savefig.facecolor": "none",
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "lines.linewidth": 1.8,
        "axes.formatter.use_mathtext": False,
        "path.simplify_threshold": 0.5,
    }
    buffer = io.BytesIO()
    with _ALONE, warnings.catch_warnings(), matplotlib.rc_context(style):
        # A script that the font lacks is measured as boxes here and drawn by the browser's own fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(WIDTH, height), dpi=72, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        fill(axes, marks)
        for artist in (
            *axes.lines,
            *axes.patches,
            *axes.collections,
        ):  # what is cut off at the axes needs no more room
            artist.set_in_layout(not artist.get_clip_on())
        # Laid out here and no more by savefig, which would draw everything once for it.
        cast(Any, figure.get_layout_engine()).execute(figure)
        figure.set_layout_engine(None)
        figure.savefig(
            buffer,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    return _themed(buffer.getvalue(), ident, marked, description)


def _themed(
    raw: bytes,
    ident: str,
    marked: dict[str, tuple[list[str], str | Sequence[str]]],
    description: str,
) -> str:
    """An SVG of matplotlib as part of a page: unique ids, named colours, and a text behind each mark."""
    root = ElementTree.fromstring(raw)  # nosec B314
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", description)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith("}metadata"):
                parent.remove(child)
    for element in root.iter():
        name = element.get("id", "")
        if name in marked:
            _tell(element, *marked[name])
        for key, value in list(element.attrib.items()):
            if key == "id":
                element.set(key, f"{ident}-{value}")
            elif key == f"{{{XLINK}}}href":
                element.attrib.pop(key)
                element.set("href", f"#{ident}-{value.removeprefix('#')}")
            elif key in ("style", "clip-path", "fill", "stroke"):
                element.set(key, _style(value, ident))
            elif key in ("d", "x", "y", "points", "transform"):
                # a third of the size
                element.set(key, re.sub(r"(\d\.\d\d)\d+", r"\1", value).replace("\n", " "))
    return visible(
        re.sub(r">\s+<", "><", ElementTree.tostring(root, encoding="unicode")), lines=True
    )


def _style(value: str, ident: str) -> str:
    value = value.replace("url(#", f"url(#{ident}-")
    value = re.sub(r"#0f00[01]\d", lambda m: NAMES.get(m[0], m[0]), value)
    return re.sub(r"font: (\S+) [^;]*", r"font-size: \1", value)


def _tell(group: ElementTree.Element, words: Sequence[str], runs: str | Sequence[str]) -> None:
    """Give the n-th mark of a group the n-th words and run; a group of one run is named by it as a whole."""
    if isinstance(runs, str) and runs:
        group.set("data-run", runs)
    inside = {id(e) for defs in group.iter(f"{{{SVG}}}defs") for e in defs.iter()}
    marks = [e for e in group.iter(f"{{{SVG}}}use") if id(e) not in inside]
    marks = marks or [e for e in group.iter(f"{{{SVG}}}path") if id(e) not in inside]
    for number, (mark, text) in enumerate(zip(marks, words, strict=False)):
        mark.set("class", "mark")
        if not isinstance(runs, str) and runs[number]:
            mark.set("data-run", runs[number])
        ElementTree.SubElement(mark, f"{{{SVG}}}title").text = text


def shortened(names: Sequence[str], longest: int) -> list[str]:
    """Names of at most ``longest`` letters that still differ where the names do.

    Words that all names share go first, then the names of settings (``settings_of`` says them), then the middle; where
    that makes two equal, a number is put before.
    """
    if all(len(visible(name)) <= longest for name in names):
        return [visible(name) for name in names]
    without = _without_shared(names)
    if settings_of(names, longest):
        return [" ".join(w.partition("=")[2] for w in name.split()) for name in without]
    for tried in (names, without):
        made = [_middle(name, longest) for name in tried]
        if len(set(made)) == len(set(names)):
            return made
    # Numbers make names different whose ends are alike.
    numbered = []
    for number, name in enumerate(without, 1):
        prefix = f"{number}: "
        numbered.append(prefix + _middle(name, longest - len(prefix)))
    return numbered


def settings_of(names: Sequence[str], longest: int) -> str:
    """Names of the settings whose values ``shortened`` keeps, in their order; "" where it keeps the names."""
    without = _without_shared(names)
    keys_of_names = {
        tuple(w.partition("=")[0] for w in name.split() if "=" in w) for name in without
    }
    alike = len(keys_of_names) == 1 and all("=" in w for name in without for w in name.split())
    if not alike or len(names) < 2 or all(len(visible(n)) <= longest for n in names):
        return ""
    values = [" ".join(w.partition("=")[2] for w in name.split()) for name in without]
    fit = all(len(visible(v)) <= longest + 4 for v in values) and len(set(values)) == len(
        set(names)
    )
    if fit:
        return ", ".join(keys_of_names.pop())
    return ""


def _without_shared(names: Sequence[str]) -> list[str]:
    words = [name.split() for name in names]
    if len(names) > 1:
        shared = set.intersection(*map(set, words))
    else:
        shared = set()
    return [
        " ".join(w for w in part if w not in shared) or name
        for part, name in zip(words, names, strict=True)
    ]


def _middle(name: str, longest: int) -> str:
    text = visible(name)
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 2
    start = text[: longest - 1 - tail]
    return start + "…" + text[len(text) - tail :]


def short(name: object, longest: int = LONGEST) -> str:
    """A name from a dataset or a run as a label: ``visible``, and not too long."""
    return plain(str(name), longest)


def legend_below(
    axes: Any, marks: Marks | None = None, runs: Sequence[str] = (), **style: Any
) -> None:
    """A legend under the axes, which covers nothing, in two columns where the names are short."""
    handles, names = axes.get_legend_handles_labels()
    if not names:
        return
    # Two columns fit only if all names are short.
    columns = 1
    if max(map(len, names)) <= 18:
        columns = 2
    style = {
        "ncols": columns,
        "handlelength": 1.4,
        "labelspacing": 0.3,
        "columnspacing": 1.0,
        **style,
    }
    style["title"] = style.get("title") or None
    legend = axes.figure.legend(handles, names, loc="outside lower left", alignment="left", **style)
    # On a page, a name in the legend highlights the marks of its run.
    if marks is not None:
        for run, handle, text in zip(runs, legend.legend_handles, legend.get_texts(), strict=True):
            marks(handle, (), run)
            marks(text, (), run)


def name_places(set_ticks: Any, names: Sequence[str], **style: Any) -> None:
    """Name the places 0, 1, ... of an axis, all of them or every so many."""
    step = max(1, -(-len(names) // MOST_TICKS))
    places = range(0, len(names), step)
    set_ticks(list(places), [short(names[i], 18) for i in places], **style)


FORMATS = ("png", "svg", "pdf")


def check_file(path: Path, option: str = "--plot") -> None:
    """Refuse a file that cannot be drawn, before any work; ``option`` is the one that names it.

    Raises:
        FedcacheError: usage error for an ending other than .png, .svg and .pdf or a missing directory; environment
            error without matplotlib.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        near = closest(kind, FORMATS) or FORMATS[0]
        ending = path.suffix or "(none)"
        other = path.with_suffix("." + near)
        raise UsageError(
            f"Cannot draw {path.name!r}: its ending is {ending!r}, expected .png, .svg or .pdf.",
            f"{option} {other}",
        )
    if not path.parent.is_dir():
        raise UsageError(f"The directory {path.parent} does not exist.", f"mkdir -p {path.parent}")
    need_matplotlib()


def need_matplotlib() -> None:
    """Refuse before any work what cannot be drawn. Raises MachineError without matplotlib."""
    needed_library("matplotlib", "Drawing", "plots")


def write_drawing(
    path: Path, size: tuple[float, float], fill: Callable[[Any], None], style: Any = None
) -> None:
    """Draw one pair of axes into a file, whole or not at all.

    Args:
        path: its ending chooses the format.
        size: width and height in inches.
        fill: draws on the axes.
        style: settings of matplotlib.

    Raises:
        FedcacheError: as ``check_file``.
    """
    check_file(path)
    import matplotlib
    from matplotlib.figure import Figure

    kind = path.suffix.lower().removeprefix(".")
    buffer = io.BytesIO()
    # Ids in an SVG are random, and a PDF carries the date, unless told otherwise.
    with (
        _ALONE,
        warnings.catch_warnings(),
        matplotlib.rc_context({"svg.hashsalt": "fedcache", "font.size": 8, **(style or {})}),
    ):
        # A script that the font lacks is drawn as boxes, which says it better than one warning for each character.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=size, layout="constrained")
        fill(figure.add_subplot())
        date: dict[str, Any] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[
            kind
        ]
        figure.savefig(buffer, format=kind, dpi=300 if style else 150, metadata=date)
    write_output(path, buffer.getvalue())


COLUMNS = {1: 3.4, 2: 7.0}
"""Inches of a figure that is as wide as one column of a paper, or two."""
_POINTS = 8.0
"""Size of the letters of a figure in a paper."""


def write_plot(path: Path, made: Plot, columns: int = 1) -> None:
    """Draw a figure of the report into a file, in the colours of the page's light theme and with fonts inside.

    Args:
        path: its ending chooses the format: in a PDF letters are text in an embedded font, in an SVG outlines.
        made: the figure.
        columns: 1 | 2, of a paper.

    Raises:
        FedcacheError: as ``check_file``.
    """
    fill = made.fill
    width = COLUMNS[columns]
    ink = "#1b1f24"
    muted = "#3c444d"
    line = "#d8dee4"
    # Type 42 embeds the font, so that text in a PDF stays text; in an SVG letters become outlines.
    style = {
        "font.size": _POINTS,
        "legend.fontsize": _POINTS,
        "legend.title_fontsize": _POINTS,
        "pdf.fonttype": 42,
        "svg.fonttype": "path",
        "text.parse_math": False,
        "text.color": ink,
        "axes.edgecolor": muted,
        "axes.labelcolor": ink,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "xtick.color": muted,
        "ytick.color": muted,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": line,
        "grid.linewidth": 0.4,
        "axes.linewidth": 0.6,
        "legend.frameon": False,
        "lines.linewidth": 1.2,
        "xtick.major.size": 2,
        "ytick.major.size": 2,
        "axes.formatter.use_mathtext": False,
    }
    # A figure over two columns of a paper is a little flatter than one of the page.
    height = made.height * COLUMNS[1] / WIDTH * (1.0 if columns == 1 else 1.2)

    def draw_in_colours(axes: Any) -> None:
        fill(axes, lambda *_: None)
        _recolour(axes.figure)

    write_drawing(path, (width, height), draw_in_colours, style)


def _recolour(figure: Any) -> None:
    """Put the colours of the light theme instead of the numbers that a page replaces by names."""
    from matplotlib.colors import to_hex, to_rgba

    shown = {name: value.rpartition(", ")[2].rstrip(")") for name, value in NAMES.items()}

    # Keep the opacity: only the colour changes.

    def light(colour: Any) -> Any:
        known = shown.get(to_hex(colour))
        if known is None:
            return colour
        return to_rgba(known, to_rgba(colour)[3])

    # Boxes behind texts are not found by findobj.
    boxes = [
        box
        for t in figure.findobj()
        if (box := getattr(t, "get_bbox_patch", lambda: None)()) is not None
    ]
    for artist in [*figure.findobj(), *boxes]:
        for part in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            take, put = (getattr(artist, f"{do}_{part}", None) for do in ("get", "set"))
            if take is None or put is None:
                continue
            colour = take()
            if isinstance(colour, str) and colour.lower() in ("none", "auto"):
                continue
            # A collection has one colour for each of its marks.
            rows = not isinstance(colour, str) and getattr(colour, "ndim", 1) == 2
            put([light(c) for c in colour] if rows else light(colour))


def plain(name: str, longest: int = 24) -> str:
    """A name from a dataset or a run as a label: ``visible``, and not too long."""
    text = visible(name)
    if len(text) <= longest:
        return text
    return text[: longest - 3] + "..."


def bars(
    axes: Any,
    marks: Marks,
    values: Sequence[float],
    words: Sequence[str],
    names: Sequence[str],
    colours: str | Sequence[str] = SERIES[0],
) -> None:
    """Named bars, the first on top, with words behind each."""
    drawn = axes.barh(range(len(values)), values, color=colours, height=0.7)
    for bar, sentence in zip(drawn, words, strict=True):
        marks(bar, [sentence])
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
