"""Tutorials and README run, methods' pages say what was measured, notebooks' pages are those of the notebooks."""

import json
import math
import re
import subprocess
import sys
from typing import get_args

import latex2mathml.converter
import numpy as np
import pytest
from loaded_files import ROOT, content, tool

import fedcache as fc
from fedcache.federate.engine.method import Family
from fedcache.federate.methods import METHODS, NAMES
from fedcache.report.methods.facts import objective

DOCS = ROOT / "docs"


RUN = tool("run_pages")
FAMILIES = tool("method_families")
SCALE = tool("make_scale")


# README and tutorials


def test_every_tutorial_is_one_that_is_run_and_listed():
    there = sorted(p.name for p in (DOCS / "tutorials").glob("*.md") if p.name != "README.md")
    assert there == [p.name for p in RUN.PAGES[1:]]
    listed = content("docs/tutorials/README.md")
    assert [name for name in there if f"]({name})" not in listed] == []


def test_what_a_page_shows_must_be_printed():
    printed = "run 9176445d1122 in 0.31 s\n  accuracy 88.57 %\n\nname   rows\n─────\na   12\n"
    shown = "run b911aeeb in 2 s\n  accuracy 88.10 %\n...\na  7\n"
    assert (
        RUN.matched(shown, printed)
        == "run 9176445d1122 in 0.31 s\n  accuracy 88.57 %\n...\na   12\n"
    )
    assert RUN.matched("?", printed).count("\n") == 5
    all_right = "accuracy 100.00 %, one model\n"
    assert RUN.matched(all_right, "accuracy 99.53 % (95 % interval 98.61 to 100.00), one model\n")
    for wrong, why in (
        (shown.replace("88.10", "80.10"), "80.10 %, printed 88.57 %"),
        (shown.replace("a  7", "b  7"), "shows 'b  7'"),
        (shown.replace("...\n", ""), "shows 'a  7'"),
        ("run 1 in 2 s\n", "printed more"),
    ):
        with pytest.raises(RUN.PageError, match=re.escape(why)):
            RUN.matched(wrong, printed)


@pytest.mark.slow
def test_a_page_that_fails_ends_with_the_command_and_its_message(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```sh\nfedcache train --method fedagv\n```\n")
    words = [sys.executable, ROOT / "tools/run_pages.py", page]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "page.md, line 2: exit 2" in done.stderr
    assert "Did you mean 'fedavg'?" in done.stderr


# methods


def test_every_method_has_a_page_of_its_own_that_cites_known_papers():
    pages = {name: FAMILIES.page_of(name) for name in NAMES}
    assert len({page.formula + page.when for page in pages.values()}) == len(pages), (
        "a page is inherited by replace()"
    )
    assert {key for page in pages.values() for key in page.cite} == set(FAMILIES.papers())
    assert all(page.when.strip() and page.cite for page in pages.values())
    assert set(FAMILIES.ABOUT) == set(get_args(Family))


def test_a_formula_becomes_mathml_with_no_command_left():
    for page in map(FAMILIES.page_of, NAMES):
        inline = re.findall(r"\$(.+?)\$", page.terms + page.when)
        for tex in (page.formula.replace("{aligned}", "{split}"), *inline):
            found = latex2mathml.converter.convert(tex)
            assert found.startswith("<math")
            assert "\\" not in found, tex
            assert "<mi>&amp;" not in found, tex


MAKE = tool("make_docs")


def readable_lines(page):
    """Lines of a page above its folded parts, without blank lines: a row of a table, or 100 characters of text."""
    unfolded = re.sub(r"\]\([^)]*\)", "]", page.partition("\n??? ")[0])
    lines = [line for line in unfolded.splitlines() if line]
    return sum(1 if line.startswith("|") else math.ceil(len(line) / 100) for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_is_explained_in_forty_lines(name):
    page = MAKE.method_page(name)
    assert readable_lines(page) <= 40, "move details of the docstring below its second paragraph"
    sections = ("```math", "## When to use it", f"fedcache train --method {name}", "## Measured")
    shown, _, below = page.partition("\n??? ")
    assert [s for s in (*sections, "## What leaves a client") if s not in shown] == []
    folds = ('note "Hyperparameters"', '??? note "Details', '??? note "Cite"')
    assert [fold for fold in folds if fold not in below] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_idea_of_a_method_is_two_or_three_short_sentences_and_its_symbols_are_explained(name):
    _, idea, *_ = objective(name).split("\n\n")
    sentences = re.split(r"[.!?:]\s+", idea)
    assert 2 <= len(re.findall(r"[.]\s+[A-Z`]|[.]$", idea)) <= 3, idea
    assert max(len(sentence.split()) for sentence in sentences) <= 30, idea
    assert FAMILIES.page_of(name).terms.strip()


def test_every_symbol_that_a_page_explains_is_in_its_equations():
    def compact(tex):
        return re.sub(r"\\[,; ]|[\s{}]", "", tex)

    for name in NAMES:
        page = FAMILIES.page_of(name)
        symbols = map(compact, re.findall(r"\$([^$]+)\$", page.terms))
        assert [s for s in symbols if s not in compact(page.formula)] == [], name


@pytest.mark.slow
def test_the_accuracies_of_a_page_are_those_of_the_ranking():
    found = json.loads(content("docs/frozen-bench.json"))
    checked = 0
    pages = {name: MAKE.method_page(name) for name in NAMES}
    for ranking in found["rankings"]:
        part = ranking["title"].removeprefix("partition ")
        if part not in found["protocol"]["partitions"]:
            continue
        for standing in ranking["standings"]:
            treatment = found["protocol"]["treatments"][standing["treatment"]]
            table = pages[treatment["method"]].partition("## Measured")[2].partition("\n## ")[0]
            rows = [
                [cell.strip() for cell in line.strip("|").split("|")]
                for line in table.splitlines()
                if "|" in line
            ]
            column = rows[0].index(part)
            settings = [
                f"`{k}={str(v).lower() if isinstance(v, bool) else v}`"
                for k, v in treatment["set"].items()
            ]
            settings += [f"`{key}` chosen" for key in treatment["search"]]
            (row,) = [row for row in rows if row[0] == (", ".join(settings) or "default")]
            assert float(row[column].partition(" ")[0]) == pytest.approx(
                100 * standing["mean"], abs=0.051
            ), (standing["treatment"], part)
            checked += 1
    assert checked > 100


def test_the_gains_of_a_page_are_those_that_were_measured_on_photographs():
    for name, settings in json.loads(content("docs/photographs.json")).items():
        page = MAKE.method_page(name)
        fold = page.partition('"Measured on photographs"')[2].partition("\n???")[0]
        lines = [line for line in fold.splitlines() if line.startswith("    |")]
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
        assert rows[0][1:] == list(settings)
        shown = {cells[0]: cells[1:] for cells in rows}
        for column, found in enumerate(settings.values()):
            assert float(shown["steps of a client"][column].replace(",", "")) == found["steps"]
            for row, (mean, half) in found["gain"].items():
                interval = "" if half is None else f" ± {half:.1f}"
                assert shown[row][column] == f"{mean:+.1f}{interval}"
        gains = [found["gain"][name][0] for found in settings.values()]
        assert f"{min(gains):+.1f} to {max(gains):+.1f} points from zero-shot" in page


# notebooks


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda p: p.name)
def test_the_page_of_a_notebook_has_its_cells_and_what_they_print(path):
    page = content(f"docs/examples/{path.stem}.md")
    cells = json.loads(content(path))["cells"]
    again = f"run: python tools/run_notebooks.py --write {path.name}"
    for cell in cells:
        # Outputs are on the page alone.
        assert cell.get("outputs", []) == [], f"clear the outputs of {path.name}"
        assert cell.get("execution_count") is None
        source = "".join(cell["source"])
        shown = (
            source.partition("\n")[2]
            if source.startswith("# ") and cell["cell_type"] == "markdown"
            else source
        )
        assert shown in page, again
    assert 0 < page.count("```python\n") == sum(c["cell_type"] == "code" for c in cells), again


# docs/readings.md: every number that code and docs refer to has a row, and every switch in it exists


def test_every_number_of_a_reading_has_one_row_and_every_switch_exists():
    lines = content("docs/readings.md").splitlines()
    rows = [line.split("|") for line in lines if re.match(r"\| D-\d+ \|", line)]
    numbers = [row[1].strip() for row in rows]
    assert len(set(numbers)) == len(numbers)
    files = [p for kind in ("py", "toml", "md") for p in (ROOT / "fedcache").rglob(f"*.{kind}")]
    used = set()
    for path in [*files, *(ROOT / "docs").glob("*.md")]:
        used |= set(re.findall(r"\bD-\d+\b", content(path)))
    assert used <= set(numbers)
    settings = {h.name for name in METHODS for h in METHODS[name].hparams}
    switches = {word for row in rows for word in re.findall(r"`([a-z_A-Z0-9]+)", row[-2])}
    assert switches - settings - {"sharing", "test_protocol"} == set()  # two of partitions


# docs/scale/large.md: bytes of messages, files of a store


def test_the_page_is_that_of_the_code():
    text = content("docs/scale/large.md")
    assert text == SCALE.page(text), "run: python tools/make_scale.py"


@pytest.mark.parametrize(
    ("method", "numbers", "width"),
    [
        ("fedavg", lambda D, C: (D + 1) * C, 4),
        ("fedncm", lambda D, C: D * C, 8),
        ("fed3r", lambda D, C: D * (D + 1) // 2 + C * D, 8),
    ],
)
def test_an_upload_is_as_large_as_the_formula_says(method, numbers, width):
    for D, C in ((16, 3), (33, 5)):
        words = len(SCALE.pack(SCALE.SiteMessage({}, [SCALE.wire(method, D, C).upload])).words)
        told = SCALE.wire(method, D, C).up - words
        assert told - width * numbers(D, C) in range(8 * C + 9)  # of class counts


def test_a_store_has_the_files_and_bytes_that_the_page_multiplies_out(tmp_path):
    rows = SCALE.chunk_rows_for(64, 2 * 16)
    store = fc.Store.from_arrays(
        {"mine": np.zeros((1100, 16), np.float32)}, path=tmp_path / "s.zarr"
    )
    (info,) = store.arrays.values()
    chunks = [p for p in (store.path / "features").rglob("c/*/0/*") if p.is_file()]
    assert info.chunk_rows == rows
    assert len(chunks) == -(-1100 // rows) == 3
    assert {p.stat().st_size for p in chunks} == {
        SCALE.array_bytes((rows, 1, 16), info.dtype) + SCALE.CRC_BYTES
    }
