"""``tools/mutate.py`` on a toy package: what is tested is noticed, what is not is shown, and a person's word counts."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
from files_now import bytes_of
from loaded_files import ROOT, content, tool
from make_images import write_directory

TOOLS = ROOT / "tools"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("coverage") is None, reason="coverage is not installed"
)


def changes(source):
    """(before, after) of every mutant."""
    return {
        (m.before, m.after) for m in tool("mutants").mutants_of(textwrap.dedent(source), "m.py")
    }


STATEMENTS = [
    ("x = a < b", "x = (a <= b)"),
    ("x = a + b", "x = (a - b)"),
    ("x = a and b", "x = (a or b)"),
    ("x = not a", "x = a"),
    ("x = a[1:n]", "x = a[1:((n) + 1)]"),
    ("x = 0.5", "x = (0.75)"),
    ("x = True", "x = False"),
    ("x = min(a, b)", "x = (max(a, b))"),
    ("x = f(a, b)", "x = (f(b, a))"),
    ("x += a", "x -= a"),
    ("x.y = a", "pass"),
    ("return a", "return None"),
    ("raise TooSmallError(a + b)", "pass"),
]


def test_a_statement_is_changed():
    for before, after in STATEMENTS:
        assert (before, after) in changes(f"def f(x, a, b, n):\n    {before}\n")


def test_a_condition_is_turned_round_and_a_loop_goes_on():
    made = changes("""
        def f(a):
            for x in a:
                if x == 1:
                    continue
    """)
    assert {
        ("if x == 1:", "if (not (x == 1)):"),
        ("if x == 1:", "if (x != 1):"),
        ("continue", "break"),
    } <= made


def test_what_is_only_for_people_and_type_checkers_stays():
    assert not changes('''
        """Up to 3 words."""
        from typing import TYPE_CHECKING, Annotated, Literal

        if TYPE_CHECKING:
            LIMIT = 3
        Name = Annotated[str, Option(min=1)]
        __all__ = ["f"]

        class Shape(Protocol):
            rows: int = 3

        class Table:
            def __repr__(self):
                return "table"[:3]

        def f(x: Literal[3], y: dict[str, Literal[4]]) -> Literal[5]:
            """Add 1."""
            story.note(f"{x + 1} rows", 7)
            z: Literal[6]
    ''')


@pytest.fixture
def toy(tmp_path):
    """A package with a tested and an untested function, a value made once for two tests, and a started process."""
    root = tmp_path / "toy"
    files = {
        "toypack/__init__.py": "",
        "toypack/tested.py": "def double(x):\n    return x + x\n",
        "toypack/untested.py": "def half(x):\n    return x / 2\n",
        "toypack/loose.py": "def inorder(x):\n    x.sort()\n    return x\n",
        "toypack/shared.py": "def made():\n    return 4 * 5\n",
        "toypack/started.py": "import sys\n\n\ndef exit_code():\n    return 3 + 4\n\n\nsys.exit(exit_code())\n",
        "toypack/limits.py": "MOST = 8\n\n\ndef fits(x):\n    return x <= MOST\n",
        "toypack/data.py": "class Limit:\n    low = 2\n\n\nLIMIT = Limit()\n",
        "toypack/table.py": "from toypack import data\n\nTABLE = [data.LIMIT]\n",
        "tests/test_double.py": """
            from toypack.loose import inorder
            from toypack.tested import double

            def test_double():
                assert double(3) == 6

            def test_inorder():
                assert inorder([1, 2]) == [1, 2]
        """,
        "tests/deep/down/test_rest.py": """
            import subprocess, sys
            import pytest
            from toypack.limits import fits
            from toypack.shared import made
            from toypack.table import TABLE

            @pytest.fixture(scope="module")
            def value():
                return made()

            def test_that_there_is_one(value):
                assert value

            def test_that_it_is_right(value):
                assert value == 20

            def test_table():  # which executes no line of the package
                assert TABLE[0].low == 2

            def test_process():
                assert subprocess.run([sys.executable, "-m", "toypack.started"]).returncode == 7

            @pytest.mark.parametrize("x", [8, 9])
            def test_fits(x):
                assert fits(x) == (x == 8)
        """,
    }
    return write_directory(
        root, {name: textwrap.dedent(text).lstrip().encode() for name, text in files.items()}
    )


def mutate(root, *words):
    run = subprocess.run(
        [
            sys.executable,
            TOOLS / "mutate.py",
            "--root",
            root,
            "--package",
            "toypack",
            "--cache",
            root.parent / "cache",
            "--seed",
            "0",
            *map(str, words),
        ],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # the toy's tests need none
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    return run.returncode, run.stdout + run.stderr


@pytest.mark.slow
def test_the_tested_is_noticed_and_the_untested_survives(toy):
    before = bytes_of(toy)
    report = toy.parent / "report.md"
    code, said = mutate(toy, "--count", 99, "--report", report)
    assert code == 1, said
    assert bytes_of(toy) == before
    survivors = {line.split()[1] for line in said.splitlines() if line.startswith("SURVIVES")}
    assert survivors == {"toypack/loose.py:2", "toypack/untested.py:2"}, said
    assert (
        "+ pass\n    1 of the 1 tests that execute it ran\n      tests/test_double.py::test_inorder\n"
        in said
    )
    assert "no test executes it" in said
    for noticed in (
        "tested.py:2",
        "data.py:2",
        "shared.py:2",
        "started.py:5",
        "limits.py:1",
        "limits.py:5",
    ):
        assert f"noticed   toypack/{noticed}" in said
    text = report.read_text()
    assert "**nothing**" in text.split("toypack/untested.py:2")[1].splitlines()[0]


def test_a_change_that_a_person_accepted_is_not_drawn_again():
    mutate_ = tool("mutate")
    sources = {"m.py": "def f(x):\n    return x - 1\n"}
    drawn = mutate_.draw(sources, set(), 0, 0, "m.py:2")
    accepted = {("m.py", "f", "return x - 1", "return (x + 1)")}
    left = mutate_.draw(sources, accepted, 0, 0, "m.py:2")
    assert {m.after for m in drawn} - {m.after for m in left} == {"return (x + 1)"}
    for seed in range(20):
        assert mutate_.draw(sources, accepted, 5, seed, "")[0] in left


@pytest.mark.slow
def test_every_accepted_change_has_a_reason_and_is_one_of_the_code_as_it_is():
    for row in tool("mutate").accepted_rows(TOOLS / "mutants-equivalent.toml"):
        assert row.keys() == {"file", "where", "before", "after", "why"}
        assert len(row["why"].split()) >= 4
        made = tool("mutants").mutants_of(content(row["file"]), row["file"])
        assert (row["where"], row["before"], row["after"]) in {
            (m.where, m.before, m.after) for m in made
        }
