"""docs/add-a-method.md: a contributor who follows the page adds a method without a failing test."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from loaded_files import ROOT, content

COPIED = (
    ".gitignore",
    "fedcache",
    "tests",
    "tools",
    "docs",
    "examples",
    "Makefile",
    "pyproject.toml",
    "README.md",
    "benchmarks",
)
TABLES = (
    "tests/contract/test_golden.py::test_the_table_is_of_these_methods",
    "tests/project/test_pages.py::test_every_method_has_a_page_of_its_own_that_cites_known_papers",
    "tests/commands/test_describe.py::test_the_catalogue_foretells_what_counting_finds",
)
"""Tests of tables that name every method."""


def commands_of(section):
    """The lines of the shell blocks of a section of the page."""
    page = content("docs/add-a-method.md")
    body = page.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [
        line
        for block in re.findall(r"```sh\n(.*?)```", body, re.DOTALL)
        for line in block.splitlines()
    ]


@pytest.fixture
def checkout(tmp_path):
    """A copy of the repository."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.zarr")
            )
        else:
            shutil.copy(source, tmp_path / name)
    run(["sh", "-c", "git init -q && git add '*.md'"], tmp_path)
    return tmp_path


def run(words, folder):
    """Run a command in the copy, with its package and this environment's Python; returns the output."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_following_the_page_adds_a_method(checkout):
    copy, check = commands_of("Contribute it to fedcache")
    run(["sh", "-c", copy], checkout)
    # The environment of these tests is the contributor's: nothing is installed.
    out = run([*check.split(), f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.dev"], checkout)
    assert int(re.search(r"(\d+) passed", out)[1]) > 30
    assert "# shrunken-means" in content(checkout / "docs/methods/shrunken-means.md")
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TABLES], checkout)
