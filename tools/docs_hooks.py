"""What the build of the site does besides: folders in the navigation, formulas, drawings in page colours, no network.

Named in mkdocs.yml under ``hooks``.
"""

from __future__ import annotations

import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import latex2mathml.converter

sys.path.insert(0, str(Path(__file__).parent))
import method_families  # beside this file

ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//|<link[^>]+href=["']?(?:https?:)?//"""
)
MARKER = re.compile(r"-\s*8\s*<\s*-")
FORMULA = re.compile(r'<(div|span) class="arithmatex">(.*?)</\1>', re.DOTALL)
DRAWING = re.compile(r'<img alt="([^"]*)" src="([^"]+/)?([\w-]+)\.svg" ?/?>')


def on_config(config: Any) -> Any:
    config.nav = [_expanded(item, Path(config.docs_dir)) for item in config.nav]
    return config


def _expanded(item: Any, docs: Path) -> Any:
    """``methods/`` as the list of its pages, so that a new method needs no line in mkdocs.yml."""
    if isinstance(item, dict):
        return {title: _expanded(below, docs) for title, below in item.items()}
    if isinstance(item, list):
        return [_expanded(one, docs) for one in item]
    if not item.endswith("/"):
        return item
    if item == "methods/":
        pages = {
            family: [f"methods/{name}.md" for name in method_families.methods_of(family)]
            for family in method_families.ABOUT
        }
        return [f"{item}README.md", *({family: named} for family, named in pages.items())]
    others = sorted(p.name for p in (docs / item).glob("*.md") if p.name != "README.md")
    return [f"{item}README.md", *(f"{item}{name}" for name in others)]


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """A drawing in ``currentColor`` becomes part of the page: as a picture it would be black in the dark."""

    def drawn(found: re.Match[str]) -> str:
        path = (
            Path(config.docs_dir)
            / Path(page.file.src_uri).parent
            / f"{found[2] or ''}{found[3]}.svg"
        )
        svg = path.read_text(encoding="utf-8") if path.is_file() else ""
        if "currentColor" not in svg:
            return found[0]
        # its colours for when it stands alone
        return re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)

    return FORMULA.sub(_mathml, DRAWING.sub(drawn, html))


def _mathml(found: re.Match[str]) -> str:
    """A formula as MathML, which browsers draw without a script or a font of another host."""
    display = "block" if found[1] == "div" else "inline"
    tex = re.sub(r"^\\[\[(]|\\[\])]$", "", unescape(found[2]).strip()).strip()
    # the converter knows the same layout by this name alone
    tex = tex.replace("{aligned}", "{split}")
    return f'<{found[1]} class="formula">{latex2mathml.converter.convert(tex, display=display)}</{found[1]}>'


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that fetches anything from another host, or that shows an include in place of what it names."""
    if found := ELSEWHERE.search(output):
        raise ValueError(f"{page.file.src_uri} fetches from elsewhere: {found[0]}")
    if found := MARKER.search(unescape(re.sub(r"<[^>]*>", "", output))):
        raise ValueError(
            f"{page.file.src_uri} shows {found[0]!r}: an include that was not expanded"
        )
    return output
