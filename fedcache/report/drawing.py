"""Figures drawn by matplotlib: as SVG in a page, and in files of their own.

A page takes its colours from CSS variables. Matplotlib draws with the placeholder colours of ``NAMES``, and each
placeholder is then replaced by ``var(--name, fallback)``. One drawing therefore serves the light and the dark theme,
and still has colours without a style sheet. The tooltip of a mark is an SVG ``<title>``. The ending of a file chooses
its format, and equal drawings give equal bytes.
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
from fedcache.parsing import Facts, visible
from fedcache.store.lock import need_folder, write_output

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
_LIGHT = {
    "s0": "#2563eb",
    "s1": "#d9480f",
    "s2": "#0f8a5f",
    "s3": "#a21caf",
    "s4": "#b58900",
    "s5": "#0e7490",
    "s6": "#be123c",
    "s7": "#4d7c0f",
    "s8": "#6d4aff",
    "s9": "#6b7280",
    "ink": "#1b1f24",
    "muted": "#59636e",
    "line": "#d8dee4",
    "paper": "#ffffff",
}
"""CSS variable -> its colour in the light theme. Matplotlib knows the n-th of them as ``Cn``."""
NAMES = {f"#0f00{10 + i}": f"var(--{name}, {_LIGHT[name]})" for i, name in enumerate(_LIGHT)}
"""Placeholder colour -> CSS variable with its fallback, the colour of the light theme."""
SERIES = tuple(f"C{i}" for i in range(10))
INK = "C10"
MUTED = "C11"
LINE = "C12"
PAPER = "C13"
WIDTH = 4.8
HEIGHT = 3.4
"""Inches of a drawing, with 72 units each. A phone of 390 px shows it 350 px wide, so a unit is at least 1 px."""
LETTERS = 12.6
"""Size of the smallest letters in units. It gives letters of at least twelve pixels on every screen."""
LONGEST = 34
"""Maximum number of letters of a label."""
MOST_TICKS = 24
"""Maximum number of names on an axis."""

Cell = str | int | float | None
Rows = list[list[Cell]]
"""Rows of a figure's data, each with a cell for every column."""
Marks = Callable[..., None]
"""``marks(artist, words, runs)`` gives the marks of an artist their tooltips (words) and the keys of their runs.

Each mark has one tooltip and one key. One key may also apply to the whole artist, and ``words`` may be ()."""
Draw = Callable[[Any, Marks], None]

_ALONE = threading.RLock()
"""Lock with which one figure is drawn at a time, because all threads share matplotlib's settings."""
_STYLE: Facts = {
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "legend.frameon": False,
    "axes.formatter.use_mathtext": False,
}
"""Settings of matplotlib for a report's figures, on its page and in files."""
_WITHOUT_DATE: dict[str, Facts] = {
    "png": {},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}
"""Format of a file -> its metadata without a date."""

ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", XLINK)


@dataclass(frozen=True)
class Plot:
    """A figure of the report.

    Attributes:
        ident: unique in the page; names the files that are downloaded.
        title: what it shows.
        description: the text alternative, and what was left out.
        columns: names of the data.
        rows: the data, as in the CSV.
        fill: draws the figure on its axes, and calls ``marks(artist, words)`` for every artist with tooltips.
        height: inches of the drawing, which is ``WIDTH`` wide.
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
        return draw(self)


Marked = dict[str, tuple[list[str], str | Sequence[str]]]
"""Group of marks -> their tooltips and the keys of their runs."""


def draw(plot: Plot) -> str:
    """A figure as SVG without size, scripts or fonts of its own. Every id in it begins with ``plot.ident``."""
    import matplotlib
    from cycler import cycler
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    marked: Marked = {}

    def marks(artist: Any, words: Sequence[str] = (), runs: str | Sequence[str] = "") -> None:
        name = f"marks{len(marked)}"
        artist.set_gid(name)
        marked[name] = list(words), runs

    style: Any = {
        **_STYLE,
        "svg.fonttype": "none",
        "svg.hashsalt": plot.ident,
        "font.size": LETTERS,
        "text.color": INK,
        "axes.edgecolor": LINE,
        "axes.labelcolor": MUTED,
        "axes.facecolor": "none",
        "grid.color": LINE,
        "grid.linewidth": 0.6,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED,
        "legend.fontsize": LETTERS,
        "legend.title_fontsize": LETTERS,
        "figure.facecolor": "none",
        "axes.prop_cycle": cycler(color=NAMES),
        "savefig.facecolor": "none",
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "lines.linewidth": 1.8,
        "path.simplify_threshold": 0.5,
    }
    buffer = io.BytesIO()
    with _ALONE, warnings.catch_warnings(), matplotlib.rc_context(style):
        # A script that the font lacks is measured as boxes here and drawn by the browser's own fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(WIDTH, plot.height), dpi=72, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        plot.fill(axes, marks)
        # An artist that is clipped at the axes needs no room outside them.
        for artist in (*axes.lines, *axes.patches, *axes.collections):
            artist.set_in_layout(not artist.get_clip_on())
        # The layout is computed here. savefig would draw the whole figure once more to compute it.
        cast(Any, figure.get_layout_engine()).execute(figure)
        figure.set_layout_engine(None)
        figure.savefig(
            buffer,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    return _themed(buffer.getvalue(), marked, plot)


def _themed(raw: bytes, marked: Marked, plot: Plot) -> str:
    """An SVG of matplotlib as part of a page: unique ids, colours as CSS variables, and a tooltip for each mark."""
    root = ElementTree.fromstring(raw)  # nosec B314
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", plot.description)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith("}metadata"):
                parent.remove(child)
    ident = plot.ident
    for element in root.iter():
        name = element.get("id", "")
        if name in marked:
            _label_marks(element, *marked[name])
        for key, value in list(element.attrib.items()):
            if key == "id":
                element.set(key, f"{ident}-{value}")
            elif key == f"{{{XLINK}}}href":
                element.attrib.pop(key)
                element.set("href", f"#{ident}-{value.removeprefix('#')}")
            elif key in ("style", "clip-path", "fill", "stroke"):
                element.set(key, _style(value, ident))
            elif key in ("d", "x", "y", "points", "transform"):
                # Two decimals are enough, and the file is a third as large.
                cut = re.sub(r"(\d\.\d\d)\d+", r"\1", value)
                element.set(key, cut.replace("\n", " "))
    text = ElementTree.tostring(root, encoding="unicode")
    return visible(re.sub(r">\s+<", "><", text), lines=True)


def _style(value: str, ident: str) -> str:
    value = value.replace("url(#", f"url(#{ident}-")
    value = re.sub(r"#0f00[12]\d", lambda m: NAMES.get(m[0], m[0]), value)
    # Only the size of a font is kept: the page chooses the font.
    return re.sub(r"font: (\S+) [^;]*", r"font-size: \1", value)


def _label_marks(
    group: ElementTree.Element, words: Sequence[str], runs: str | Sequence[str]
) -> None:
    """Give the n-th mark of a group the n-th words and run; one run for all marks is set on the group."""
    if isinstance(runs, str) and runs:
        group.set("data-run", runs)
    # Elements in <defs> are templates. Marks are the <use> elements outside, or else the <path> elements.
    templates: set[int] = set()
    for defs in group.iter(f"{{{SVG}}}defs"):
        templates.update(map(id, defs.iter()))
    marks = [e for e in group.iter(f"{{{SVG}}}use") if id(e) not in templates]
    if not marks:
        marks = [e for e in group.iter(f"{{{SVG}}}path") if id(e) not in templates]
    for number, (mark, text) in enumerate(zip(marks, words, strict=False)):
        mark.set("class", "mark")
        if not isinstance(runs, str) and runs[number]:
            mark.set("data-run", runs[number])
        ElementTree.SubElement(mark, f"{{{SVG}}}title").text = text


def shortened(names: Sequence[str], longest: int) -> list[str]:
    """Names of at most ``longest`` letters that still differ where the names do.

    If a name is too long, words that all names share are removed, then the names of settings (``settings_of`` returns
    them), then letters in the middle. If two names are then equal, each name begins with a number.
    """
    if all(len(visible(name)) <= longest for name in names):
        return [visible(name) for name in names]
    without = _without_shared(names)
    if settings_of(names, longest):
        return list(map(_values_only, without))
    for tried in (names, without):
        made = [_middle(name, longest) for name in tried]
        if len(set(made)) == len(set(names)):
            return made
    # Numbers tell names apart that have equal beginnings and ends.
    numbered = []
    for number, name in enumerate(without, 1):
        prefix = f"{number}: "
        numbered.append(prefix + _middle(name, longest - len(prefix)))
    return numbered


def settings_of(names: Sequence[str], longest: int) -> str:
    """Names of the settings, in order, if ``shortened`` keeps only the values of the settings; else "".

    It does so if all names consist of the same settings (``lr=0.1 tau=2``), and the values fit and differ.
    """
    if len(names) < 2 or all(len(visible(name)) <= longest for name in names):
        return ""
    without = _without_shared(names)
    keys_of_names = set()
    for name in without:
        words = name.split()
        if not all("=" in word for word in words):
            return ""
        keys_of_names.add(tuple(word.partition("=")[0] for word in words))
    values = list(map(_values_only, without))
    # Values alone may be a little longer than ``longest``.
    fit = all(len(visible(value)) <= longest + 4 for value in values)
    different = len(set(values)) == len(set(names))
    if fit and different and len(keys_of_names) == 1:
        return ", ".join(keys_of_names.pop())
    return ""


def _values_only(name: str) -> str:
    """``lr=0.1 tau=2`` as ``0.1 2``."""
    return " ".join(word.partition("=")[2] for word in name.split())


def _without_shared(names: Sequence[str]) -> list[str]:
    """The names without the words that all of them share; a name that would become empty stays as it is."""
    shared = set()
    if len(names) > 1:
        shared.update(names[0].split())
        shared.intersection_update(*(name.split() for name in names))
    made = []
    for name in names:
        own_words = " ".join(word for word in name.split() if word not in shared)
        made.append(own_words or name)
    return made


def _middle(name: str, longest: int) -> str:
    """A name of at most ``longest`` letters: its beginning and its end, with an ellipsis between them."""
    text = visible(name)
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 2
    start = text[: longest - 1 - tail]
    return start + "…" + text[len(text) - tail :]


def short(name: object, longest: int = LONGEST) -> str:
    """A name from a dataset or a run as a label: ``visible``, and at most ``longest`` letters."""
    text = visible(str(name))
    if len(text) <= longest:
        return text
    return text[: longest - 3] + "..."


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
    # Callers pass the words of ``settings_of``, which are "" for no title.
    style["title"] = style.get("title") or None
    legend = axes.figure.legend(handles, names, loc="outside lower left", alignment="left", **style)
    # On a page, a name in the legend highlights the marks of its run.
    if marks is not None:
        for run, handle, text in zip(runs, legend.legend_handles, legend.get_texts(), strict=True):
            marks(handle, (), run)
            marks(text, (), run)


def name_places(
    set_ticks: Any, names: Sequence[str], most: int = MOST_TICKS, longest: int = 18, **style: Any
) -> None:
    """Name the places 0, 1, ... of an axis. If there are more than ``most`` names, only every n-th place gets one."""
    step = max(1, -(-len(names) // most))
    places = range(0, len(names), step)
    set_ticks(list(places), [short(names[i], longest) for i in places], **style)


def check_file(path: Path, option: str = "--plot") -> None:
    """Refuse a file that cannot be drawn, before any work; ``option`` is the option that names the file.

    Raises:
        FedcacheError: usage error for an ending other than .png, .svg and .pdf or a missing directory; environment
            error without matplotlib.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in _WITHOUT_DATE:
        near = closest(kind, _WITHOUT_DATE) or "png"
        ending = path.suffix or "(none)"
        other = path.with_suffix("." + near)
        raise UsageError(
            f"Cannot draw {path.name!r}: its ending is {ending!r}, expected .png, .svg or .pdf.",
            f"{option} {other}",
        )
    need_folder(path)
    need_matplotlib()


def need_matplotlib() -> None:
    """Raise MachineError where matplotlib is not installed, before any work."""
    needed_library("matplotlib", "Drawing", "plots")


def write_drawing(
    path: Path, size: tuple[float, float], fill: Callable[[Any], None], style: Any = None
) -> None:
    """Draw one pair of axes into a file, whole or not at all.

    Args:
        path: its ending chooses the format.
        size: width and height in inches.
        fill: draws on the axes.
        style: settings of matplotlib for a paper, which also needs a higher resolution; None for other files.

    Raises:
        FedcacheError: as ``check_file``.
    """
    check_file(path)
    import matplotlib
    from matplotlib.figure import Figure

    kind = path.suffix.lower().removeprefix(".")
    buffer = io.BytesIO()
    # Without the salt, ids in an SVG would be random.
    settings: Any = {"svg.hashsalt": "fedcache", "font.size": 8}
    resolution = 150
    if style:
        settings |= style
        resolution = 300
    with _ALONE, warnings.catch_warnings(), matplotlib.rc_context(settings):
        # A script that the font lacks is drawn as boxes; a warning for each character would add nothing.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=size, layout="constrained")
        fill(figure.add_subplot())
        figure.savefig(buffer, format=kind, dpi=resolution, metadata=_WITHOUT_DATE[kind])
    write_output(path, buffer.getvalue())


COLUMNS = {1: 3.4, 2: 7.0}
"""Number of columns of a paper -> inches of a figure of this width."""
_POINTS = 8.0
"""Size of the letters in a figure for a paper, in points."""


def write_plot(path: Path, made: Plot, columns: int) -> None:
    """Draw a figure of the report into a file, in the colours of the page's light theme and with embedded fonts.

    Args:
        path: its ending chooses the format: in a PDF letters are text in an embedded font, in an SVG outlines.
        made: the figure.
        columns: 1 | 2, the width in columns of a paper.

    Raises:
        FedcacheError: as ``check_file``.
    """
    from cycler import cycler

    fill = made.fill
    width = COLUMNS[columns]
    ink = "#1b1f24"
    muted = "#3c444d"
    line = "#d8dee4"
    # Type 42 embeds the font, so that text in a PDF stays text; in an SVG letters become outlines.
    style = {
        **_STYLE,
        "axes.prop_cycle": cycler(color=_LIGHT.values()),
        "font.size": _POINTS,
        "legend.fontsize": _POINTS,
        "legend.title_fontsize": _POINTS,
        "pdf.fonttype": 42,
        "svg.fonttype": "path",
        "text.color": ink,
        "axes.edgecolor": muted,
        "axes.labelcolor": ink,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "xtick.color": muted,
        "ytick.color": muted,
        "grid.color": line,
        "grid.linewidth": 0.4,
        "axes.linewidth": 0.6,
        "lines.linewidth": 1.2,
        "xtick.major.size": 2,
        "ytick.major.size": 2,
    }
    height = made.height * COLUMNS[1] / WIDTH
    # Two columns are twice as wide as one, but only a little higher.
    if columns != 1:
        height *= 1.2

    write_drawing(path, (width, height), lambda axes: fill(axes, lambda *_: None), style)


def bars(
    axes: Any,
    marks: Marks,
    values: Sequence[float],
    words: Sequence[str],
    names: Sequence[str],
    colours: str | Sequence[str] = SERIES[0],
) -> None:
    """Named bars, the first on top, with a tooltip for each."""
    drawn = axes.barh(range(len(values)), values, color=colours, height=0.7)
    for bar, sentence in zip(drawn, words, strict=True):
        marks(bar, [sentence])
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
