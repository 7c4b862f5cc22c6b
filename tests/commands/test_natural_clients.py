"""Clients that the data brings, on the command line: ``--by``, ``--hold-out`` and the table of held-out values."""

import re
import shlex

import numpy as np
import pytest
from command import data_of, ok
from failing_command import must_fail
from homes import made_once
from sklearn.linear_model import Ridge

import fedcache as fc
from fedcache.config import Home, TrainConfig
from fedcache.grids.hold_out import every_value
from fedcache.store.store import Store, put_groups
from fedcache.tables.groups import Group

ROWS = 360
WIDTH = 12
DOMAINS = ("clay", "ink", "oil")
SITES = ("north", "south", "east", "west")


@made_once
def store(place):
    """Three classes in three domains that look a little different; every row is of one of four sites, or of none."""
    rng = np.random.default_rng(3)
    label = rng.integers(0, 3, ROWS)
    domain = rng.integers(0, 3, ROWS)
    middle = rng.normal(size=(3, WIDTH))
    shift = 0.4 * rng.normal(size=(3, WIDTH))
    x = (middle[label] + shift[domain] + 0.6 * rng.normal(size=(ROWS, WIDTH))).astype("f4")
    words = {"labels": label, "domains": [DOMAINS[d] for d in domain]}
    store = Store.from_arrays({"mine": x}, **words, path=place / "paintings.zarr")
    site = [("", *SITES)[i] for i in rng.integers(0, 5, ROWS)]
    put_groups(store, {"site": Group.of(site)})
    return store.path


def test_a_partition_by_a_column_is_trained_on(store, tmp_path):
    done = data_of(f"partition --by site --store {store}")
    assert [c["name"] for c in done["clients"]] == sorted(SITES)
    saved = data_of(f"train --method fed3r --partition {done['name']} --store {store}")
    at_once = data_of(f"train --method fed3r --by site --store {store}")
    assert at_once["accuracy"] == saved["accuracy"]
    assert at_once["partition"]["digest"] == done["digest"]
    shards = data_of(f"shard --partition {done['name']} --out {tmp_path}/sites --store {store}")[
        "stores"
    ]
    assert all(len(set(Store.open(path).group("site").codes.tolist())) == 1 for path in shards)
    dealt = data_of(f"partition --by domain --scheme iid --clients 2 --store {store}")["clients"]
    assert [c["name"] for c in dealt] == [f"{d}/client-{i}" for d in DOMAINS for i in (0, 1)]


def test_each_cell_of_the_held_out_table_is_a_ridge_on_the_other_domains(store):
    done = data_of(f"grid --method fed3r,fedncm --preset paper --hold-out each --store {store}")
    rows = {row["method"]: row for row in done["held_out"]}
    opened = Store.open(store)
    x, label = opened.Xy(split=None)
    x = x.astype(np.float64)
    domain = opened.samples.domain
    for code, name in enumerate(DOMAINS):
        inside = domain != code
        outside = domain == code
        ridge = Ridge(0.01, fit_intercept=False)  # lam of fed3r
        ridge.fit(x[inside], np.eye(3)[label[inside]])
        wanted = float((ridge.predict(x[outside]).argmax(1) == label[outside]).mean())
        assert rows["fed3r"]["accuracy"][name] == pytest.approx(wanted, abs=1e-12)
    for row in rows.values():
        assert row["mean"] == pytest.approx(np.mean(list(row["accuracy"].values())), abs=1e-12)
    in_python = fc.grid(  # by domain, as the command
        ["fed3r", "fedncm"], store, hold_out="each", options={"preset": "paper"}
    )
    found = {r.method: (r.accuracy, r.mean) for r in in_python.held_out()}
    assert found == {name: (row["accuracy"], row["mean"]) for name, row in rows.items()}


def store_of_sites(place, sites):
    """A store whose rows are of these sites, one after another."""
    rng = np.random.default_rng(5)
    label = rng.integers(0, 2, len(sites))
    x = (label[:, None] + 0.5 * rng.normal(size=(len(sites), 4))).astype("f4")
    return Store.from_arrays(
        {"mine": x}, labels=label, groups={"site": sites}, path=place / "sites.zarr"
    ).path


def test_a_value_with_a_comma_can_be_held_out(tmp_path):
    site = ["A", "B,c", "B", "d,e", "d", "e"] * 20
    path = store_of_sites(tmp_path, site)
    words = f"partition --by site --store {path} --hold-out"
    for said, away in (("B,c", {"B,c"}), ("A, B", {"A", "B"}), ("d,e", {"d", "e"})):
        name = f"without-{len(away)}-{said[0]}"
        ok(words, said, "--name", name)
        held = fc.Partition.from_file(Store.open(path).partition_bytes(name))
        assert {client.name for client in held.clients} == set(site) - away
        assert {site[row] for row in held.test.tolist()} == away
    each = data_of(f"grid --method fedncm --by site --hold-out each --store {path}")
    assert set(each["held_out"][0]["accuracy"]) == set(site)
    line = f"""grid --method fedncm --by site --sweep 'hold_out="B,c", A' --store {path}"""
    assert list(data_of(line)["held_out"][0]["accuracy"]) == ["B,c", "A"]


@pytest.mark.slow
def test_a_value_of_few_rows_is_said_to_weigh_as_much_and_can_be_left_out(tmp_path):
    store = store_of_sites(tmp_path, ["big"] * 200 + ["middle"] * 100 + ["less"] * 60 + ["few"] * 3)
    words = f"grid --method fedncm --by site --hold-out each --store {store}"
    (row,) = data_of(words)["held_out"]
    assert row["rows"] == {"big": 200, "few": 3, "less": 60, "middle": 100}
    (row,) = data_of(f"{words} --min-rows 20")["held_out"]
    assert row["rows"] == {"big": 200, "less": 60, "middle": 100}
    (same,) = fc.grid("fedncm", store, by="site", hold_out="each", min_rows=[20]).held_out()
    assert same.rows == row["rows"]
    assert same.accuracy == row["accuracy"]
    assert must_fail("", f"{words} --min-rows 150")["hint"] == "--min-rows 100"


@pytest.mark.parametrize(("method", "words"), [("fedavg", ""), ("fed3r", "--exact")])
def test_a_run_with_a_held_out_value_finds_the_point_of_a_grid(store, method, words):
    asked = f"--method {method} --by site --rounds 1 --store {store} --hold-out"
    points = data_of(f"grid {asked} each {words}")["points"]
    run = data_of(f"train {asked} east")
    assert run["reused"]
    assert [p["digest"] for p in points if p["sweep"]["hold_out"] == "east"] == [run["digest"]]


def test_each_of_more_than_fifty_values_is_refused_with_the_way_on(tmp_path):
    store = store_of_sites(tmp_path, [f"n{i % 51:03d}" for i in range(204)])
    words = f"grid --method fedncm --by site --store {store}"
    must_fail("51 values", f"{words} --hold-out each")
    some = data_of(f"{words} --sweep hold_out=n001,n002")
    assert list(some["held_out"][0]["accuracy"]) == ["n001", "n002"]
    fewer = TrainConfig(
        store=str(store_of_sites(tmp_path / "fewer", [f"n{i % 50:03d}" for i in range(200)]))
    )
    assert len(every_value("site", fewer, Home.from_environment())) == 50


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("partition --by sitte", "'site'"),
        ("train --method fed3r --by domain --hold-out oill", "'oil'"),
        ("grid --method fed3r --hold-out each --sweep hold_out=oil", "both"),
        ("partition --by site --clients 3", "clients"),
        ("grid --method fed3r --sweep tests=within,global --hold-out ink", "tests within"),
    ],
)
def test_what_cannot_be_is_refused(store, words, said):
    must_fail(said, f"{words} --store {store}")


def test_the_command_of_a_refused_partition_is_for_the_store_that_was_named(tmp_path):
    meant = store_of_sites(tmp_path, ["a", "b", "c"] * 20)
    ok("inspect", store_of_sites(tmp_path / "last", ["d"] * 30))
    error = must_fail("", "partition --by site --min-rows 1000 --store", meant)
    (command,) = re.findall(r"fedcache (partition .*)", error["hint"])
    assert data_of(*shlex.split(command))["store"] == str(meant)
