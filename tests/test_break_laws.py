"""The mutations of ``tools/break_laws.py`` fit the code as it is, so that the tool can be run at any time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("break_laws", ROOT / "tools" / "break_laws.py")
assert SPEC is not None
assert SPEC.loader is not None
break_laws = importlib.util.module_from_spec(SPEC)
sys.modules["break_laws"] = break_laws
SPEC.loader.exec_module(break_laws)


@pytest.mark.parametrize("row", break_laws.TABLE, ids=lambda row: row.what)
def test_a_mutation_finds_its_place_and_its_law(row):
    text = (ROOT / "fedcache" / row.file).read_text(encoding="utf-8")
    assert text.count(row.old) == 1
    assert row.new not in text or row.new in row.old
    assert row.law in break_laws.laws()


def test_every_law_of_the_engine_has_a_mutation():
    general = {law for law, file in break_laws.laws().items() if file.name == "test_engine_laws.py"}
    assert general <= {row.law for row in break_laws.TABLE}
