"""The mutations of ``tools/break_laws.py`` and ``make_trust.py`` fit the code as it is: the tools run at any time."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from loaded_files import tool

ROOT = Path(__file__).parents[2]


break_laws, make_trust = tool("break_laws"), tool("make_trust")
NAMES = Counter(
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def test_(\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
)
"""How many tests have a name."""


def test_a_mutation_finds_its_place_and_its_law():
    laws = break_laws.laws()
    for row in break_laws.TABLE:
        text = (ROOT / "fedcache" / row.file).read_text(encoding="utf-8")
        assert text.count(row.old) == 1, row.what
        assert row.new not in text or row.new in row.old, row.what
        assert row.law in laws, row.what
        assert NAMES[row.law] <= 1, f"of tests with one name the last one alone is tried: {row.law}"


def test_every_law_of_the_engine_has_a_mutation():
    assert break_laws.general_laws() <= {row.law for row in break_laws.TABLE}


def unknown_words(selection: str) -> list[str]:
    """The words of ``FILE -k WORDS`` that are nowhere in the file, so that they choose no test."""
    file, _, words = selection.partition(" -k ")
    text = (ROOT / file).read_text(encoding="utf-8").lower()
    return [word for word in re.findall(r"\w+", words) if word not in ("and", "or", "not") and word.lower() not in text]


def test_a_promise_names_files_that_are_there_and_lines_that_protect():
    for promise in make_trust.PROMISES:
        for selection in promise.tests:
            assert unknown_words(selection) == [], promise.id
        if promise.breakage is not None:
            file, old, _, tests = promise.breakage
            assert (ROOT / "fedcache" / file).read_text(encoding="utf-8").count(old) == 1, promise.id
            assert unknown_words(tests) == [], promise.id
