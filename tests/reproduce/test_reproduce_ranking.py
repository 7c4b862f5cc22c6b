"""A proxy compares orders, never numbers; and measures nothing twice."""

from dataclasses import replace

import pytest
from pictures import folder
from scipy.stats import kendalltau

from fedcache.config import Home
from fedcache.reproduce import runner as kinds
from fedcache.reproduce.metrics import Measurement
from fedcache.reproduce.planning import Options, PaperCell, PlannedCell, Printed, entry
from fedcache.reproduce.render import orders, rows
from fedcache.reproduce.runner import ReproducedCell, Reproduction, reproduce


def line(at, printed, measured, why=""):
    labels = dict(zip(("set", "method"), at, strict=True))
    shown = (None if printed is None else Printed(printed, 0.1),)
    cell = PaperCell(labels, "solo", metrics=("client_mean",), printed=shown)
    return ReproducedCell(
        PlannedCell(cell, cell, ()),
        {"client_mean": measured} if measured is not None else {},
        why_not=why,
    )


def proxy(*lines):
    e = replace(
        entry("fedpcl-table11"), labels=("set", "method"), metrics=("client_mean",), differences=()
    )
    return Reproduction(e, True, "digits", list(lines), [])


def test_both_orders_of_a_group_by_hand():
    # got: A 80 (2.0 of 4: error 1.0), B 79 (error 1.0), C 90, D 60. A-B: 1.0 < sqrt(2), undecided; C above A and B is
    # the other way round; D is below all as printed. Ranks printed 1 2 3 4, got 2 3 1 4: tau = (4 - 2) / 6.
    report = proxy(
        line(("x", "A"), 50.0, Measurement(80.0, 2.0, 4)),
        line(("x", "D"), 10.0, Measurement(60.0, 2.0, 4)),
        line(("x", "C"), 30.0, Measurement(90.0, 2.0, 4)),
        line(("x", "B"), 40.0, Measurement(79.0, 2.0, 4)),
        line(("x", "not run"), 60.0, None, "missing weights"),
        line(("x", "not printed"), None, Measurement(99.0, 1.0, 4)),
        line(("y", "A"), 50.0, Measurement(80.0, 2.0, 4)),
    )
    (one,) = orders(report)
    assert one.at == ("x",)
    ranks = {p.label: (p.rank_printed, p.rank_got) for p in one.places}
    assert ranks == {"A": (1, 2), "B": (2, 3), "C": (3, 1), "D": (4, 4)}
    assert set(one.agree) == {("A", "D"), ("B", "D"), ("C", "D")}
    assert set(one.reverse) == {("A", "C"), ("B", "C")}
    assert one.undecided == (("A", "B"),)
    assert one.tau == pytest.approx(1 / 3)
    assert rows(report)[2][-2:] == ("3 of 4", "1 of 4")


def test_equal_numbers_share_a_rank_and_say_nothing():
    printed = [50.0, 50.0, 40.0, 30.0]
    got = [80.0, 70.0, 70.0, 75.0]
    (one,) = orders(proxy(*map(alone, "ABCD", printed, got)))
    assert [(p.rank_printed, p.rank_got) for p in one.places] == [(1, 1), (1, 3), (3, 3), (4, 2)]
    assert one.tied == (("A", "B"),)
    assert one.undecided == (("B", "C"),)
    # 3 decided pairs agree (AC, AD) or not (BD, CD): tau-b = (2 - 2) / sqrt((6 - 1) (6 - 1)) = 0
    assert one.tau == pytest.approx(0.0)
    assert one.tau == pytest.approx(kendalltau(printed, got).statistic)
    (flat,) = orders(proxy(alone("A", 2.0, 70.0), alone("B", 1.0, 70.0)))
    assert flat.tau is None


def test_rows_that_a_proxy_cannot_tell_apart_are_measured_once(tmp_path, own_home, monkeypatch):
    images = f"folder:{folder(tmp_path / 'shapes', domains=('mnist', 'chalk'))}"
    twice = entry("fst-fig2")
    cell = twice.cells[0]
    other = replace(cell, labels={"dataset": "CIFAR-100"}, dataset="paper:cifar100")
    calls = []

    def counted(cell, workbench):
        calls.append(cell)
        return kinds.entropy(cell, workbench)

    monkeypatch.setitem(kinds.MEASURES, "entropy", counted)
    options = Options(on=images, backbones=("glyph-clip",))
    both = replace(twice, labels=("dataset",), cells=(cell, other))
    one, two = reproduce(both, Home(own_home), options).lines
    assert len(calls) == 1
    assert two.measured == one.measured
    assert two.same_as == cell.at


def alone(label, printed, mean):
    return line(("x", label), printed, Measurement(mean, None, 1))
