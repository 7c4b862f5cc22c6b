"""The page of a reproduction, whole: what is printed beside what was got, and all that must be read with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedcache.reproduce.metrics import Measurement
from fedcache.reproduce.planning import Difference, PaperCell, PaperTable, PlannedCell, Printed
from fedcache.reproduce.render import markdown, report_data, title
from fedcache.reproduce.runner import ReproducedCell, Reproduction

METRICS = ("params", "client_mean")


def row(method, mean, measured, **more):
    """A row of x: of 2,560 numbers, with a mean that is printed with a std of 0.2."""
    printed = (Printed(2560.0), Printed(mean, 0.2))
    cell = PaperCell({"set": "x", "method": method}, "solo", metrics=METRICS, printed=printed)
    got = (
        {} if measured is None else {"params": Measurement(2560.0, 0.0, 4), "client_mean": measured}
    )
    return ReproducedCell(PlannedCell(cell, cell, ()), got, **more)


ROWS = [
    row("A", 50.0, Measurement(52.5, 0.2, 4), runs=[Path("a")], fidelity="exact"),
    row(
        "B",
        40.0,
        Measurement(41.0, None, 1),
        departures=["rounds 1 instead of 2"],
        fidelity="cached_views",
    ),
    row("C", 30.0, None, why_not="missing method m"),
]
TABLE = PaperTable(
    "t",
    "A | title",
    "Somebody, table 1",
    "runs",
    "Some protocol.",
    ("set", "method"),
    METRICS,
    4,
    ("the seed",),
    ("a misprint",),
    (),
    (
        Difference(("x", "A"), ("x", "B"), "client_mean", Printed(10.0)),
        Difference(("x", "A"), ("x", "C"), "client_mean", Printed(20.0)),
    ),
)
PAPER = Reproduction(TABLE, False, None, ROWS, [])

# A: 52.5 - 50 = 2.5, of an error of sqrt(.2^2 / 4 + .2^2 / 4) = .141421: 17.7 of them. B has one seed, so the printed
# std alone: 1 / (.2 / 2) = 10. A minus B is 52.5 - 41 = 11.5, without a std as B has none; C was not run.


def proxy():
    """The same rows on digits; B is A measured again."""
    same = replace(ROWS[1], same_as=("x", "A"))
    return Reproduction(TABLE, True, "digits", [ROWS[0], same, ROWS[2]], ["data: digits"])


PAPER_ROWS = [
    "| reproduced | x | A | params | 2,560 | 2,560 | +0 | - |",
    "| reproduced | x | A | client mean (%) | 50.00 (0.20) | 52.50 (0.20) | +2.50 | +17.7 |",
    "| cached_views departs | x | B | client mean (%) | 40.00 (0.20) | 41.00 | +1.00 | +10.0 (printed std only) |",
    "| not run | x | C |  |  | not run: missing method m |  |  |",
    "| reproduced | x, A minus x, B |  | client mean (%) | 10.00 | 11.50 | +1.50 | - |",
]
PROXY_ROWS = [
    "| substitute | x | A | client mean (%) | 50.00 (0.20) | 52.50 (0.20) | 1 of 2 | 1 of 2 |",
    "| substitute cached_views | x | B | client mean (%) | 40.00 (0.20) | 41.00 | 2 of 2 | 2 of 2 |",
    "| substitute not run | x | C |  |  | not run: missing method m |  |  |",
]


def test_the_page_of_a_paper_has_every_difference_and_its_errors_and_that_of_a_proxy_ranks():
    for report, wanted in ((PAPER, PAPER_ROWS), (proxy(), PROXY_ROWS)):
        lines = markdown(report).splitlines()
        assert lines[0] == f"# {title(report)}"
        assert [line for line in wanted if line not in lines] == []
        assert any("rounds 1 instead of 2" in line for line in lines)


@pytest.mark.parametrize("here", [PAPER, proxy()], ids=["paper", "proxy"])
def test_the_data_of_a_reproduction_are_those_of_its_page(here):
    found = report_data(here)
    one, two, three = found["cells"]
    shared = {
        "proxy": here.proxy,
        "on": here.on,
        "departures": here.departures,
        "printed_seeds": 4,
        "name": "t",
        "title": title(here),
        "not_given": ["the seed"],
        "notes": ["a misprint"],
    }
    assert {key: found[key] for key in shared} == shared
    mean = one["values"]["client_mean"]
    got = {"mean": 52.5, "std": 0.2, "n": 4}
    assert {key: mean["got"][key] for key in got} == got
    assert mean["unit"] == "%"
    assert ("difference" in mean) == (not here.proxy)
    assert ("orders" in found) == here.proxy
    assert two["departures"] == [*here.departures, "rounds 1 instead of 2"]
    assert two.get("same_as") == (["x", "A"] if here.proxy else None)
    assert three["run"] is False
    assert three["why_not"] == "missing method m"
    assert three["departures"] == []
    minus_b, minus_c = found["differences"]
    assert minus_b["got"]["mean"] == 11.5
    assert minus_b["printed"]["mean"] == 10.0
    assert minus_c["got"]["mean"] is None
