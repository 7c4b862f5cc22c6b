"""Drawings in files of their own: which endings there are, and equal bytes for equal drawings."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedcache.errors import MachineError, UsageError, closest
from fedcache.store.files import write_atomic

FORMATS = ("png", "svg", "pdf")


def check_file(path: Path) -> None:
    """Refuse a file that cannot be drawn, before any work.

    Raises:
        FedcacheError: usage error for an ending other than .png, .svg and .pdf or a missing directory; environment
            error without matplotlib.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        near = closest(kind, FORMATS) or FORMATS[0]
        raise UsageError(
            f"Cannot draw {path.name!r}: its ending is {path.suffix or '(none)'!r}, expected .png, .svg or .pdf.",
            f"--plot {path.with_suffix('.' + near)}",
        )
    if not path.parent.is_dir():
        raise UsageError(f"The directory {path.parent} does not exist.", f"mkdir -p {path.parent}")
    need_matplotlib()


def need_matplotlib() -> None:
    """Refuse before any work what cannot be drawn.

    Raises:
        FedcacheError: environment error without matplotlib.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MachineError(
            "Drawing needs matplotlib, which is not installed or damaged.", "pip install --force-reinstall matplotlib"
        ) from error


def write_drawing(path: Path, size: tuple[float, float], fill: Callable[[Any], None]) -> None:
    """Draw one pair of axes into a file, whole or not at all.

    Args:
        path: its ending chooses the format.
        size: width and height in inches.
        fill: draws on the axes.

    Raises:
        FedcacheError: as ``check_file``.
    """
    check_file(path)
    import matplotlib
    from matplotlib.figure import Figure

    kind = path.suffix.lower().removeprefix(".")
    buffer = io.BytesIO()
    # Ids in an SVG are random, and a PDF carries the date, unless told otherwise.
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "fedcache", "font.size": 8}):
        # A script that the font lacks is drawn as boxes, which says it better than one warning for each character.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=size, layout="constrained")
        fill(figure.add_subplot())
        date: dict[str, Any] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
        figure.savefig(buffer, format=kind, dpi=150, metadata=date)
    write_atomic(path, buffer.getvalue())


def plain(name: str, longest: int = 24) -> str:
    """A name from a dataset or a run as a label: no control characters, not too long."""
    text = "".join(c if c.isprintable() else "?" for c in name)
    return text if len(text) <= longest else text[: longest - 3] + "..."
