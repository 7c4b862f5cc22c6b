"""What sites score themselves is marked wherever it is shown, and stands apart from what was measured here."""

from pathlib import Path

import pytest
from command import data_of, ok
from fake_grid import grid_of
from small_sites import sharded

from fedcache.config import Home, TrainConfig
from fedcache.federate.engines.flower.plan import Plan
from fedcache.federate.engines.flower.server import federate
from fedcache.progress import Silent
from fedcache.runs.directory import read_result
from fedcache.runs.run import Run, is_claimed

METHODS = ("fed3r", "fedncm")


def both_ways(place):
    """Two methods over two datasets' sites, and the same in one process."""
    for name, rows in (("one", 90), ("two", 99)):
        sites = sharded(place / name, 3, rows=rows)
        for method in METHODS:
            asked = Plan(TrainConfig(method=method), sites=3, wait=0.01).checked()
            federate(
                asked, grid_of(sites, place / f"state/{name}"), Home.from_environment(), Silent()
            )
            ok(f"train --method {method} --clients-from {sites}")
    return place


@pytest.fixture
def runs(once):
    once(both_ways)


def test_a_report_keeps_claimed_figures_apart_and_says_what_they_are(runs, tmp_path):
    first = data_of("runs list --state finished")["entries"]
    kept = [e["path"] for e in first if e["method"] == "fed3r"]  # four settings
    ok("report", *kept, "-o", tmp_path / "page.html", "--embed", "none")
    sections = (tmp_path / "page.html").read_text().split("<section id=")[1:]
    settings = [s for s in sections if 'class="setting"' in s]
    claimed = [s for s in settings if "as reported by the sites" in s.partition("</h2>")[0]]
    assert len(settings) == 4
    assert len(claimed) == 2
    for section in settings:
        assert ("each site scored itself" in section) == (section in claimed)
        assert ("accuracy % (claimed)" in section) == (section in claimed)


@pytest.mark.parametrize("claimed", [True, False])
def test_python_says_which_figures_are_claimed(runs, claimed):
    entry = next(
        e for e in data_of("runs list --state finished")["entries"] if e["claimed"] == claimed
    )
    run = Run(Path(entry["path"]), read_result(Path(entry["path"]) / "result.json"), {})
    assert run.claimed == claimed
    for shown in (repr(run), repr(run.accuracy), repr(run.fairness), run._repr_html_()):
        assert ("claimed" in shown) == claimed
    for what in ("rounds", "clients"):
        frame = run.frame(what)
        assert frame["claimed"].tolist() == [claimed] * len(frame)
        assert "accuracy" in frame


def test_a_comparison_never_pairs_claimed_with_measured_figures(runs):
    found = data_of("compare")["comparisons"]
    assert len(found) == 4
    for table in found:
        assert len(table["treatments"]) == len(METHODS)
        assert ("as reported by the sites" in table["setting"]) == any(
            "each site scored itself" in n for n in table["notes"]
        )
    assert sum("as reported by the sites" in table["setting"] for table in found) == 2


def test_claimed_figures_are_left_out_of_means_over_settings(runs):
    found = data_of("compare --over settings")
    (table,) = found["comparisons"]
    assert len(table["blocks"]) == 2
    assert not any("claim" in block for block in table["blocks"])
    assert len(found["left_out"]) == 4
    alone = [left["path"] for left in found["left_out"]]
    (own,) = data_of("compare", *alone, "--over", "settings")["comparisons"]
    assert all("as reported by the sites" in block for block in own["blocks"])


@pytest.mark.parametrize(
    ("result", "claimed"),
    [
        ({}, False),
        ({"federation": {"claimed": ["accuracy"]}}, True),
        ({"federation": {}}, True),
        ({"federation": {"claimed": ["dataset.rows"]}}, False),
    ],
)
def test_a_federation_claims_its_accuracy_unless_it_says_otherwise(result, claimed):
    assert is_claimed(result) == claimed
