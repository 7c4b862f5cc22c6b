"""``fedcache figure``: every kind from real runs, fonts inside, widths of columns, and wrong words answered."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import fedcache, ok
from pictures import folder

from fedcache.report.drawing import NAMES, PAPER, SERIES, Plot, write_plot
from fedcache.report.figure_file import LISTED


@pytest.fixture
def runs(once: Callable[[Callable[[Path], Path]], Path], own_home: Path) -> Path:
    """Two methods, one of them over eight points, on a partition whose clients have rows of their own."""

    def extracted(place: Path) -> Path:
        images = folder(place / "shapes", train=12, test=6)
        done = ok("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", "--size", 8)
        return Path(done.data["path"])

    store = once(extracted)
    ok(
        "partition",
        "--scheme",
        "dirichlet",
        "--alpha",
        1,
        "--clients",
        5,
        "--option",
        "test_protocol=matched",
        "--name",
        "own",
    )
    words = ("--store", store.name, "--backbones", "random-projection", "--partition", "own", "--participation", "all",
             "--seeds", "0-2")  # fmt: skip
    ok("grid", "--method", "fedavg", *words, "--rounds", 2, "--eval-every", 1, "--set", "batch=4",
       "--sweep", "lr=0.3,0.1,0.01,0.001", "--sweep", "wd=0,0.1")  # fmt: skip
    ok("train", "--method", "fed3r", *words)
    return own_home / "runs"


@pytest.mark.slow
def test_every_kind_is_drawn_or_says_what_it_takes(runs: Path, tmp_path: Path) -> None:
    drawn = []
    for kind in LISTED:
        done = fedcache("figure", kind, "-o", tmp_path / f"{kind}.pdf", "--json")
        if done.code == 0:
            drawn.append(kind)
            raw = (tmp_path / f"{kind}.pdf").read_bytes()
            assert raw.startswith(b"%PDF")
            assert b"/FontFile2" in raw, "the letters are in the file"
            assert b"/Type3" not in raw
        else:
            assert done.code == 2
            assert "it takes" in str(done.envelope["error"])
    # Both methods are right on every row here, and three seeds give no ranks.
    assert set(LISTED) - set(drawn) == {"ranks", "settings", "confusion-difference"}
    assert runs.is_dir()


@pytest.mark.slow
def test_a_figure_is_as_wide_as_a_column_or_two_and_comes_again_byte_by_byte(runs: Path, tmp_path: Path) -> None:
    for columns, width in ((1, 3.4), (2, 7.0)):
        out = tmp_path / f"{columns}.svg"
        ok("figure", "clients", "-o", out, "--columns", columns, "--runs", runs)
        text = out.read_text()
        wide = re.search(r'width="([\d.]+)pt"', text)
        assert wide is not None
        assert float(wide[1]) == pytest.approx(72 * width)
        assert "<text" not in text, "letters are outlines"
        ok("figure", "clients", "-o", tmp_path / "again.svg", "--columns", columns)
        assert (tmp_path / "again.svg").read_text() == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("curve",), "Unknown kind of figure 'curve'.*curves: accuracy per round"),
        (("curves", "-o", "x.gif"), ".svg"),
        (("curves", "-o", "nowhere/x.pdf"), "nowhere"),
        (("curves", "--columns", "3"), "--columns 3"),
        (("curves", "--score", "mean"), "client-mean"),
    ],
)
def test_wrong_words_are_answered(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fedcache("figure", *words, "--json")
    assert done.code == 2
    assert re.search(said, str(done.envelope["error"]))
    assert list(tmp_path.glob("*.pdf")) == []


def test_colours_that_a_page_names_become_those_of_its_light_theme(tmp_path: Path) -> None:
    def fill(axes: Any, _marks: Any) -> None:
        axes.plot([0, 1], [0, 1], color=SERIES[3], alpha=0.5)
        axes.scatter([0], [0], facecolors="none", edgecolors=SERIES[1])
        axes.bar([0], [1], color=SERIES[0])
        axes.annotate("word", (0, 0), color=SERIES[2], bbox={"facecolor": PAPER, "edgecolor": SERIES[5]})

    write_plot(tmp_path / "f.svg", Plot("f", "", "", (), (), fill))
    text = (tmp_path / "f.svg").read_text()
    assert "#0f00" not in text
    for name in (SERIES[3], SERIES[1], SERIES[0], SERIES[2], PAPER, SERIES[5]):
        assert NAMES[name].rpartition(", ")[2].rstrip(")") in text
