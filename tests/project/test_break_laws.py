"""The mutations of ``tools/break_laws.py`` and ``make_trust.py`` fit the code as it is: the tools run at any time."""

import ast
import re
import subprocess
import sys
from collections import Counter

import pytest
from loaded_files import ROOT, content, tool

code_changes = tool("code_changes")  # first, as the other two import it
break_laws = tool("break_laws")
make_trust = tool("make_trust")
NAMES = Counter(
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def test_(\w+)", content(file), re.MULTILINE)
)
"""How many tests have a name."""


def changed_code(file, old, new):
    """A module with one change, which parses."""
    made = code_changes.changed(content(f"fedcache/{file}"), old, new, file)
    ast.parse(made)
    return made


@pytest.mark.slow
def test_a_mutation_uses_no_name_that_its_module_lacks(tmp_path):
    """Its law would fail by the unknown name, and not by what it says."""
    changes = [(row.file, row.old, row.new) for row in break_laws.TABLE]
    changes += [promise.breakage[:3] for promise in make_trust.PROMISES if promise.breakage]
    for number, (file, old, new) in enumerate(changes):
        if file.endswith(".py"):
            module = tmp_path / f"{number}-{file.replace('/', '-')}"
            module.write_text(changed_code(file, old, new))
    words = ["-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821", tmp_path]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_mutation_finds_its_law():
    laws = break_laws.laws()
    for row in break_laws.TABLE:
        assert row.law in laws, row.what
        assert NAMES[row.law] <= 1, f"of tests with one name the last one alone is tried: {row.law}"


def test_a_changed_line_is_found_however_it_is_laid_out():
    laid_out = "x = f(\n    a,\n    b,\n)\ny = f(a, c)\n"
    assert code_changes.changed(laid_out, "f(a, b)", "g()", "here") == "x = g()\ny = f(a, c)\n"
    for old in ("f(a", "f(d)"):
        with pytest.raises(ValueError, match="here holds"):
            code_changes.changed(laid_out, old, "", "here")


def test_every_law_of_the_engine_has_a_mutation():
    assert break_laws.general_laws() <= {row.law for row in break_laws.TABLE}


def unknown_words(selection):
    """The words of ``FILE -k WORDS`` that are nowhere in the file, so that they choose no test."""
    file, _, words = selection.partition(" -k ")
    text = content(file).lower()
    return [
        word
        for word in re.findall(r"\w+", words)
        if word not in ("and", "or", "not") and word.lower() not in text
    ]


def test_a_promise_names_files_that_are_there_and_lines_that_protect():
    for promise in make_trust.PROMISES:
        for selection in promise.tests:
            assert unknown_words(selection) == [], promise.id
        if promise.breakage is not None:
            file, old, new, tests = promise.breakage
            code_changes.changed(content(f"fedcache/{file}"), old, new, promise.id)
            assert unknown_words(tests) == [], promise.id
