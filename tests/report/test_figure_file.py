"""``fedcache figure``: every kind from real runs, fonts inside, widths of columns, and wrong words answered."""

import re

import pytest
from command import fedcache, ok
from made_path import extracted

from fedcache.report.page import LISTED


@pytest.fixture
def runs(once, own_home):
    """Two methods, one of them over eight points, on a partition whose clients have rows of their own."""

    def made(place):
        return extracted(place, "random-projection --size 8", test=6)

    store = once(made)
    ok(
        "partition --scheme dirichlet --alpha 1 --clients 5 --option test_protocol=matched --name own"
    )
    words = (
        f"--store {store.name} --backbones random-projection --partition own "
        "--participation all --seeds 0-2"
    )
    ok(
        f"grid --method fedavg {words} --rounds 2 --eval-every 1 --set batch=4 "
        "--sweep lr=0.3,0.1,0.01,0.001 --sweep wd=0,0.1"
    )
    ok(f"train --method fed3r {words}")
    return own_home / "runs"


@pytest.mark.slow
def test_every_kind_is_drawn_or_says_what_it_takes(runs, tmp_path):
    drawn = []
    for kind in LISTED:
        done = fedcache(f"figure {kind} -o {tmp_path}/{kind}.pdf --json")
        if done.code == 0:
            drawn.append(kind)
            raw = (tmp_path / f"{kind}.pdf").read_bytes()
            assert raw.startswith(b"%PDF")
            assert b"/FontFile2" in raw, "the letters are in the file"
            assert b"/Type3" not in raw
        else:
            assert done.code == 2
            assert "needs" in str(done.error)
    # Both methods are right on every row here, and three seeds give no ranks.
    assert set(LISTED) - set(drawn) == {"ranks", "settings", "confusion-difference"}
    assert runs.is_dir()


@pytest.mark.slow
def test_a_figure_is_as_wide_as_a_column_or_two_and_comes_again_byte_by_byte(runs, tmp_path):
    for columns, width in ((1, 3.4), (2, 7.0)):
        out = tmp_path / f"{columns}.svg"
        ok("figure clients -o", out, "--columns", columns, "--runs", runs)
        text = out.read_text()
        assert float(re.search(r'width="([\d.]+)pt"', text)[1]) == pytest.approx(72 * width)
        assert "<text" not in text, "letters are outlines"
        ok("figure clients -o", tmp_path / "again.svg", "--columns", columns)
        assert (tmp_path / "again.svg").read_text() == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("curve", "Unknown kind of figure 'curve'.*curves: accuracy per round"),
        ("curves -o x.gif", ".svg"),
        ("curves --columns 3", "--columns 3"),
    ],
)
def test_wrong_words_are_answered(words, said, here):
    done = fedcache(f"figure {words} --json")
    assert done.code == 2
    assert re.search(said, str(done.error))
    assert list(here.glob("*.pdf")) == []
