"""What the build of the site does besides: folders in the navigation, drawings in the page's colours, no network.

Named in mkdocs.yml under ``hooks``.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

ELSEWHERE = re.compile(r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//|<link[^>]+href=["']?(?:https?:)?//""")
MARKER = re.compile(r"-\s*8\s*<\s*-")
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
    others = sorted(p.name for p in (docs / item).glob("*.md") if p.name != "README.md")
    return [f"{item}README.md", *(f"{item}{name}" for name in others)]


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """A drawing in ``currentColor`` becomes part of the page: as a picture it would be black in the dark."""

    def drawn(found: re.Match[str]) -> str:
        path = Path(config.docs_dir) / Path(page.file.src_uri).parent / f"{found[2] or ''}{found[3]}.svg"
        svg = path.read_text(encoding="utf-8") if path.is_file() else ""
        if "currentColor" not in svg:
            return found[0]
        return re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)  # its colours for when it stands alone

    return DRAWING.sub(drawn, html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that fetches anything from another host, or that shows an include in place of what it names."""
    if found := ELSEWHERE.search(output):
        raise ValueError(f"{page.file.src_uri} fetches from elsewhere: {found[0]}")
    if found := MARKER.search(unescape(re.sub(r"<[^>]*>", "", output))):
        raise ValueError(f"{page.file.src_uri} shows {found[0]!r}: an include that was not expanded")
    return output
