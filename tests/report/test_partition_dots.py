"""The drawing of a partition: which dots, in which colour, how large, in which files."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from partition_rows import even_columns

from fedcache.federate.partition.partition import make
from fedcache.report import figure_data
from fedcache.report.figure_data import dot_scale, draw

matplotlib = pytest.importorskip("matplotlib")

COLUMNS = even_columns(20, 5, 4, domains=3)


def drawn(monkeypatch, partition, columns, tmp_path):
    """The axes that ``draw`` fills."""
    seen = []
    fill = figure_data._fill
    monkeypatch.setattr(
        figure_data, "_fill", lambda axes, *rest: (seen.append(axes), fill(axes, *rest))
    )
    draw(partition, columns, tmp_path / "p.svg")
    return seen[0]


@pytest.mark.parametrize(
    ("kind", "head"), [("PNG", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_the_ending_chooses_the_format_and_equal_partitions_give_equal_files(kind, head, tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        draw(make("feature-label-shift", COLUMNS), COLUMNS, tmp_path / place / f"p.{kind}")
    one, two = ((tmp_path / place / f"p.{kind}").read_bytes() for place in ("a", "b"))
    assert one.startswith(head)
    assert one == two
    assert [p.name for p in (tmp_path / "a").iterdir()] == [f"p.{kind}"]


def test_a_dot_for_each_class_a_client_owns_and_its_area_is_the_count(monkeypatch, tmp_path):
    partition = make("dirichlet", COLUMNS, clients=6, alpha=0.3)
    counts = partition.counts(COLUMNS)
    axes = drawn(monkeypatch, partition, COLUMNS, tmp_path)
    assert len(axes.collections) == 1  # clients mix domains: one colour
    dots = axes.collections[0]
    places = dots.get_offsets().astype(int)
    assert sorted(map(tuple, places.tolist())) == sorted(
        zip(*map(np.ndarray.tolist, np.nonzero(counts)), strict=True)
    )
    assert dots.get_sizes() == pytest.approx(counts[places[:, 0], places[:, 1]] * dot_scale(counts))
    assert not any(dots.get_linewidths())  # an outline would add to the area
    assert axes.get_legend() is None


def test_a_dot_of_one_row_is_called_one_row():
    partition = make("iid", even_columns(2, 1, 2), clients=2)
    source = SimpleNamespace(partition=partition, columns=even_columns(2, 1, 2))
    svg = figure_data.dots("d", source).svg
    assert "1 row<" in svg
    assert "1 rows" not in svg


def test_names_are_drawn_as_they_are(tmp_path):
    # dollar signs would be read as mathematics, and this one does not parse; the font lacks the last
    names = ("$\\frac{$", "<script>", "a\x00b\n", "数" * 60)
    odd = replace(COLUMNS, classes=names, domains=("$_$", "b", "c"))
    draw(make("feature-shift", odd), odd, tmp_path / "p.svg")
    assert "<script>" not in (tmp_path / "p.svg").read_text()
