"""Write docs/methods/: one page per method, from the code. `python tools/make_method_pages.py` after every change."""

from __future__ import annotations

from pathlib import Path

from fedcache.api.pages import page
from fedcache.federate.methods import METHODS

TARGET = Path(__file__).resolve().parent.parent / "docs" / "methods"


def pages() -> dict[str, str]:
    """File name -> content, the index included."""
    made = {f"{name}.md": page(name) for name in METHODS}
    rows = [f"| [{m.name}]({m.name}.md) | {m.summary} | {m.paper} |" for m in METHODS.values()]
    made["README.md"] = "\n".join(["# Methods", "", "| method | what it does | paper |", "|---|---|---|", *rows]) + "\n"
    return made


if __name__ == "__main__":
    TARGET.mkdir(parents=True, exist_ok=True)
    for old in TARGET.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (TARGET / name).write_text(text, encoding="utf-8")
    print(f"{len(pages())} pages in {TARGET}")
