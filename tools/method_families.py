"""The methods by family, with what no code says of them: formula, when to use one, whom to cite.

They stand in tools/method_pages/, a file for each family in the order of the pages, and papers.bib beside them. They
are read by `make_docs.py`, which writes the pages, and by the build of the site, for its navigation.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "method_pages"
METHODS = FOLDER.parent.parent / "fedcache" / "federate" / "methods"


@dataclass(frozen=True)
class Entry:
    """What a person wrote about a method.

    Attributes:
        formula: its equations, in LaTeX.
        when: when to use it, and when not.
        cite: keys of papers.bib.
        terms: what the letters of the formula are, where the family's page does not say it.
    """

    formula: str
    when: str
    cite: tuple[str, ...]
    terms: str = ""


@dataclass(frozen=True)
class Family:
    """Methods of one kind, in the order in which one would try them."""

    title: str
    about: str
    methods: Mapping[str, Entry]


@cache
def read() -> tuple[Family, ...]:
    """The families in order, each with the methods of it that are in fedcache."""
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        page = tomllib.loads(path.read_text(encoding="utf-8"))
        title, about = page.pop("title"), page.pop("about")
        entries = {
            name: Entry(said["formula"].strip(), line(said["when"]), tuple(said["cite"]), line(said.get("terms", "")))
            for name, said in page.items()
            if METHODS.joinpath(f"{name.replace('-', '_')}.py").is_file()
        }
        found.append(Family(title, line(about), entries))
    return tuple(found)


def line(text: str) -> str:
    return " ".join(text.split())


def family_of(name: str) -> Family:
    """The family of a method; KeyError for one that stands in none."""
    for family in read():
        if name in family.methods:
            return family
    raise KeyError(f"{name} stands in no family: write formula, when and cite into a file of {FOLDER}")


@cache
def papers() -> Mapping[str, str]:
    """Key -> BibTeX."""
    text = FOLDER.joinpath("papers.bib").read_text(encoding="utf-8")
    return {m[1]: m[0].strip() for m in re.finditer(r"^@\w+\{([^,]+),.*?^\}$", text, re.MULTILINE | re.DOTALL)}
