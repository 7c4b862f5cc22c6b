"""Leave-one-out runs: the held-out value stands in every label, and the group has its mean."""

from pathlib import Path

import numpy as np
import pytest
from command import data_of, ok
from homes import made_once
from refusal import refused
from test_merge_seeds import run

import fedcache as fc
from fedcache.report.compare import compare_entries
from fedcache.report.comparison import compared, over_held_out
from fedcache.report.find_runs import (
    HELD_OUT,
    Gathered,
    by_setting,
    held_out_groups,
    mean_over_values,
    setting_name,
)
from fedcache.report.page import held_out_section
from fedcache.ui.server import read_run

VALUES = ("zebra", "ant", "10", "9")


def held_out(method, value, accuracy, **more):
    """A run of seeds 3 and 1 that holds out a value of ``site``."""
    part = {
        "scheme": "natural",
        "args": {"by": "site", "hold_out": [value], "tests": "within"},
        "name": None,
        "seed": 0,
        "clients": 3,
        "digests": [f"p-{value}"] * 2,
    }
    return run(f"{method}{value}", {3: accuracy, 1: accuracy}, method, partition=part, **more)


def runs_of(**methods):
    return [
        held_out(m, v, a) for m, row in methods.items() for v, a in zip(VALUES, row, strict=True)
    ]


def test_the_group_is_all_values_of_one_column_and_its_mean_is_over_them():
    other = run("skew", {3: 0.5}, "fedavg")
    alone = held_out("fedavg", "zebra", 0.5, dataset={"slug": "other", "digest": "e" * 64, "ok": 9})
    runs = runs_of(fedavg=(0.9, 0.1, 0.5, 0.7), fedprox=(0.2, 0.4, 0.6, 0.8))
    (group,) = held_out_groups([other, alone, *runs])
    assert group.column == "site"
    assert group.values == VALUES
    assert {name: mean_over_values(a) for name, a in group.accuracies().items()} == pytest.approx(
        {"fedavg": 0.55, "fedprox": 0.5}
    )
    assert mean_over_values(held_out_groups(runs[:-1])[0].accuracies()["fedprox"]) is None


def test_the_value_stands_in_the_name_of_the_setting_for_every_partition_is_called():
    entry = held_out("fedavg", "zebra", 0.5)
    assert setting_name(entry) == "digits, natural-by-site-s0, hold_out=zebra"
    entry.result["partition"]["name"] = "mine"
    assert setting_name(entry) == "digits, mine, hold_out=zebra"
    assert len(by_setting([entry, held_out("fedavg", "ant", 0.5)])) == 2


def test_four_values_are_too_few_for_the_test_and_nothing_is_called_alike():
    runs = runs_of(
        fedavg=(0.9, 0.8, 0.95, 0.7), fedprox=(0.4, 0.5, 0.45, 0.3), fedrep=(0.1, 0.2, 0.1, 0.2)
    )
    (group,) = held_out_groups(runs)
    made = compared(over_held_out(group, "accuracy"), over=HELD_OUT, metric="accuracy")
    assert min(p.p for p in made.pairs if p.p is not None) == 0.125
    assert made.too_few
    assert made.alike == ()
    said = held_out_section("h0", group, None).verdict
    assert said.label == "fedavg"
    assert said.certainty == "Unknown"


# -- the commands --------------------------------------------------------------------------------------------------


@made_once
def home(folder):
    """A home with the leave-one-out grid of three methods over four sites."""
    rng = np.random.default_rng(0)
    y = np.arange(240) % 3
    x = (rng.normal(size=(3, 6))[y] + 1.2 * rng.normal(size=(240, 6))).astype("f4")
    site = np.array(VALUES)[np.arange(240) // 3 % 4]
    np.savez(folder / "d.npz", **{"features/mine": x, "labels": y, "site": site})
    ok(f"ingest {folder}/d.npz --name sites")
    ok("grid fed3r,fedncm,fedavg --by site --hold-out each --rounds 1 --sweep lr=0.1,0.01")
    return folder


@pytest.mark.slow
def test_list_compare_report_card_and_page_name_the_value_and_the_list_has_the_mean(home, tmp_path):
    listed = data_of("runs list method:fed3r")
    assert {tuple(e["hold_out"]) for e in listed["entries"]} == {(v,) for v in VALUES}
    (group,) = listed["held_out"]
    (row,) = group["rows"]
    assert row["mean"] == pytest.approx(np.mean(list(row["accuracy"].values())))
    (table,) = data_of("compare")["comparisons"]
    assert table["over"] == HELD_OUT
    means = {t["name"]: t["mean"] for t in table["treatments"]}
    assert means["fed3r"] == pytest.approx(row["mean"])
    grid = data_of("grid fed3r --by site --hold-out each")["held_out"][0]
    assert grid["mean"] == pytest.approx(row["mean"])
    ok(f"report -o {tmp_path}/r.html")
    first = (tmp_path / "r.html").read_text().partition('<details id="held-out"')[0]
    assert first.count('class="verdict"') == 1, (
        "one answer for the group; those of each value are folded"
    )
    for entry in listed["entries"]:
        assert read_run(Path(entry["path"]))["hold_out"] == entry["hold_out"]


def test_the_best_model_of_each_method_is_kept_for_each_value(home):
    entries = data_of("runs list")["entries"]
    with_model = [(e["method"], *e["hold_out"]) for e in entries if e["model_bytes"]]
    assert sorted(with_model) == sorted(
        (m, v) for m in ("fed3r", "fedncm", "fedavg") for v in VALUES
    )


def test_the_mean_over_seeds_and_values_of_two_grids_with_other_seeds(home):
    ok("grid fedavg --by site --hold-out each --rounds 1 --set lr=0.1 --seeds 3,1")
    (row,) = [t for t in fc.compare("method:fedavg").tables[0].treatments if "0.1" in t.name]
    assert len(row.known) == 4


def test_runs_without_a_table_have_no_diagram():
    found = compare_entries(Gathered(runs_of(fedavg=(0.9, 0.1, 0.5, 0.7))))
    assert found.tables == ()
    refused(lambda: found.plot("ranks.svg"), "0 tables", "several runs")
