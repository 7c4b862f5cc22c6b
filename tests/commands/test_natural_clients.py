"""Clients that the data brings, on the command line: ``--by``, ``--hold-out`` and the table of held-out values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import fedcache, ok

import fedcache as fc
from fedcache.config import Home, TrainConfig
from fedcache.errors import Exit, UsageError
from fedcache.grids.hold_out import every_value
from fedcache.store.groups import put_groups
from fedcache.store.store import Store
from fedcache.tables.groups import Group

ROWS, WIDTH = 360, 12
DOMAINS, SITES = ("clay", "ink", "oil"), ("north", "south", "east", "west")


def made(place: Path) -> Path:
    """Three classes in three domains that look a little different; every row is of one of four sites, or of none."""
    rng = np.random.default_rng(3)
    label, domain = rng.integers(0, 3, ROWS), rng.integers(0, 3, ROWS)
    middle, shift = rng.normal(size=(3, WIDTH)), 0.4 * rng.normal(size=(3, WIDTH))
    x = (middle[label] + shift[domain] + 0.6 * rng.normal(size=(ROWS, WIDTH))).astype("f4")
    words = {"labels": label, "domains": [DOMAINS[d] for d in domain]}
    store = Store.from_arrays({"mine": x}, **words, path=place / "paintings.zarr")
    site = [("", *SITES)[i] for i in rng.integers(0, 5, ROWS)]
    put_groups(store, {"site": Group.of(site)})
    return store.path


@pytest.fixture
def store(once: Callable[[Callable[[Path], Path]], Path]) -> Path:
    return once(made)


def test_a_partition_by_a_column_is_trained_on(store: Path) -> None:
    done = ok("partition", "--by", "site", "--store", store)
    assert done.data["name"] == "natural-by-site-s0"
    assert [c["name"] for c in done.data["clients"]] == sorted(SITES)
    assert "have no value of site and are left out" in " ".join(done.data["notes"])
    saved = ok("train", "--method", "fed3r", "--partition", "natural-by-site-s0", "--store", store).data
    at_once = ok("train", "--method", "fed3r", "--by", "site", "--store", store).data
    assert at_once["accuracy"] == saved["accuracy"]
    assert at_once["partition"]["digest"] == done.data["digest"]


def test_each_cell_of_the_held_out_table_is_a_ridge_on_the_other_domains(store: Path) -> None:
    done = ok("grid", "--method", "fed3r,fedncm", "--hold-out", "each", "--store", store)
    rows = {row["method"]: row for row in done.data["held_out"]}
    assert list(rows) == sorted(rows, key=lambda name: -rows[name]["mean"])
    opened = Store.open(store)
    (key,) = opened.arrays
    x = opened.reader(key).rows(np.arange(ROWS))[:, 0].astype(np.float64)
    label, domain = opened.samples.label, opened.samples.domain
    for code, name in enumerate(DOMAINS):
        inside, outside = domain != code, domain == code
        gram = x[inside].T @ x[inside] + 0.01 * np.eye(WIDTH)  # lam of fed3r
        head = np.linalg.solve(gram, x[inside].T @ np.eye(3)[label[inside]])
        wanted = float(((x[outside] @ head).argmax(1) == label[outside]).mean())
        assert rows["fed3r"]["accuracy"][name] == pytest.approx(wanted, abs=1e-12)
    for row in rows.values():
        assert row["mean"] == pytest.approx(np.mean(list(row["accuracy"].values())), abs=1e-12)
    again = ok("grid", "--method", "fed3r,fedncm", "--hold-out", "each", "--store", store)
    assert again.data["held_out"] == done.data["held_out"]
    assert again.data["reused"] == 6
    in_python = fc.grid(["fed3r", "fedncm"], store, hold_out="each")  # by domain, as the command
    assert {r.method: (r.accuracy, r.mean) for r in in_python.held_out()} == {
        name: (row["accuracy"], row["mean"]) for name, row in rows.items()
    }


def test_a_value_with_a_comma_can_be_held_out(tmp_path: Path) -> None:
    site = [("A", "B,c", "B", "d,e", "d", "e")[i % 6] for i in range(120)]
    x = np.random.default_rng(0).normal(size=(120, 4)).astype("f4")
    path = tmp_path / "s.zarr"
    Store.from_arrays({"mine": x}, labels=np.arange(120) % 2, groups={"site": site}, path=path)
    words = ("partition", "--by", "site", "--store", path, "--hold-out")
    for said, away in (("B,c", {"B,c"}), ("A, B", {"A", "B"}), ("d,e", {"d", "e"})):
        name = f"without-{len(away)}-{said[0]}"
        ok(*words, said, "--name", name)
        held = fc.Partition.from_file(Store.open(path).partition_bytes(name))
        assert {client.name for client in held.clients} == set(site) - away
        assert {site[row] for row in held.test.tolist()} == away
    assert len(fc.partition(path, by="site", hold_out="B,c", name="python").clients) == 5


def test_the_table_is_printed_with_a_column_for_each_value_and_the_mean(store: Path) -> None:
    words = ("grid", "--method", "fedncm", "--hold-out", "each", "--by", "site", "--store", store)
    text = fedcache(*words).out
    head = next(line for line in text.splitlines() if "mean" in line and "method" in line)
    opened = Store.open(store)
    codes = opened.group("site").codes
    counts = np.bincount(codes[codes >= 0]).tolist()
    assert head.split() == ["method", *(w for s, n in zip(sorted(SITES), counts, strict=True) for w in (s, f"({n})")),
                            "mean"]  # fmt: skip
    assert "Highest mean (not a choice) over 4 held-out values: fedncm" in text
    assert "weigh as much" not in text, "none has few rows"


def with_a_small_site(place: Path) -> Path:
    """Sites of 200, 100, 60 and 3 rows."""
    rng = np.random.default_rng(5)
    words = ["big"] * 200 + ["middle"] * 100 + ["less"] * 60 + ["few"] * 3
    label = rng.integers(0, 2, len(words))
    x = (label[:, None] + 0.5 * rng.normal(size=(len(words), 4))).astype("f4")
    store = Store.from_arrays({"mine": x}, labels=label, path=place / "sites.zarr")
    put_groups(store, {"site": Group.of(words)})
    return store.path


@pytest.mark.slow
def test_a_value_of_few_rows_is_said_to_weigh_as_much_and_can_be_left_out(tmp_path: Path) -> None:
    store = with_a_small_site(tmp_path)
    words = ("grid", "--method", "fedncm", "--by", "site", "--hold-out", "each", "--store", store)
    done = fedcache(*words)
    assert "1 of 4 values have less than 20 rows and weigh as much as the others in the mean: few 3." in done.out
    assert "Highest test accuracy" not in done.err, "accuracies on different rows are not compared"
    (row,) = ok(*words).data["held_out"]
    assert row["rows"] == {"big": 200, "few": 3, "less": 60, "middle": 100}
    without = fedcache(*words, "--min-rows", 20)
    assert "Less than 20 rows, and so not held out: few." in without.err
    assert "weigh as much" not in without.out
    (row,) = ok(*words, "--min-rows", 20).data["held_out"]
    assert row["rows"] == {"big": 200, "less": 60, "middle": 100}
    (same,) = fc.grid("fedncm", store, by="site", hold_out="each", min_rows=[20]).held_out()
    assert (same.rows, same.accuracy) == (row["rows"], row["accuracy"])
    refused = fedcache(*words, "--min-rows", 150)
    assert refused.code == Exit.USAGE
    assert "two values of site are needed that have 150 rows or more, and there are 1." in refused.err
    assert refused.err.splitlines()[-1] == "--min-rows 100"
    assert ok(*words, "--min-rows", 100).data["held_out"][0]["rows"] == {"big": 200, "middle": 100}


def test_tests_within_beside_hold_out_are_refused_from_python_too(store: Path) -> None:
    with pytest.raises(UsageError, match="hold_out and tests within both say which rows are the test set"):
        fc.partition(store, by="site", hold_out="east", tests="within")
    made = fc.partition(store, by="site", hold_out="east")
    assert (made.args["tests"], made.default_name()) == ("within", "natural-by-site-without-east-s0")


@pytest.mark.slow
def test_a_setting_with_a_held_out_value_says_it_and_is_found_by_the_name_of_its_partition(store: Path) -> None:
    grid = ok("grid", "--method", "fedncm,fed3r", "--by", "site", "--hold-out", "each", "--store", store).data
    saved = [ok("partition", "--by", "site", "--hold-out", site, "--store", store).data for site in SITES]
    assert {p["partition"]["digest"] for p in grid["points"]} == {one["digest"] for one in saved}
    assert {one["name"] for one in saved} == {f"natural-by-site-without-{site}-s0" for site in SITES}
    for site in SITES:
        (table,) = fc.compare(f"partition:natural-by-site-without-{site}-s0").tables
        assert table.setting.endswith(f", natural-by-site-s0, hold_out={site}")


@pytest.mark.parametrize(("method", "words"), [("fedavg", ()), ("fed3r", ("--exact",))])
def test_a_run_with_a_held_out_value_finds_the_point_of_a_grid(
    store: Path, method: str, words: tuple[str, ...]
) -> None:
    asked = ("--method", method, "--by", "site", "--rounds", 1, "--store", store)
    points = ok("grid", *asked, "--hold-out", "each", *words).data["points"]
    run = ok("train", *asked, "--hold-out", "east").data
    assert run["reused"]
    assert [p["digest"] for p in points if p["sweep"]["hold_out"] == "east"] == [run["digest"]]


def test_a_grid_says_once_what_holds_for_all_its_points(store: Path) -> None:
    owners = ["large" if i < 300 else f"small-{i % 4}" for i in range(ROWS)]
    fc.partition(store, owners, name="uneven")
    words = ("grid", "--method", "fed3r,fedavg", "--sweep", "rounds=2,3", "--partition", "uneven", "--store", store)
    said = [line for line in fedcache(*words).err.splitlines() if line.strip()]
    assert sum("client 0 ('large') has" in line for line in said) == 1
    assert [sum(f"fed3r takes one round; --rounds {r} changes nothing" in line for line in said) for r in (2, 3)] == [
        1, 1,
    ]  # fmt: skip
    assert sum(line.startswith("Points ") for line in said) == 4
    assert len(said) == len(set(said))


def with_values(place: Path, count: int) -> Path:
    """A store with a column ``note`` of so many values, the first with a comma in it."""
    notes = ["a, b", *(f"n{i:03d}" for i in range(1, count))]
    rng = np.random.default_rng(0)
    path = place / f"notes-{count}.zarr"
    store = Store.from_arrays(
        {"mine": rng.normal(size=(4 * count, 5)).astype("f4")}, labels=np.arange(4 * count) // 2 % 2, path=path
    )
    put_groups(store, {"note": Group.of([notes[i % count] for i in range(4 * count)])})
    return store.path


@pytest.mark.parametrize("method", ["fedncm", "fed3r,fedncm"])
def test_each_of_more_than_fifty_values_is_refused_with_the_way_on(tmp_path: Path, method: str) -> None:
    store = with_values(tmp_path, 51)
    done = fedcache("grid", "--method", method, "--by", "note", "--hold-out", "each", "--store", store)
    assert done.code == Exit.USAGE
    assert "the column note has 51 values" in done.err
    assert "--by note --sweep hold_out=n001,n002" in done.err
    assert "Points 1" not in done.err
    with pytest.raises(UsageError, match="the column note has 51 values"):
        fc.grid("fedncm", store, by="note", hold_out="each")
    some = ok("grid", "--method", "fedncm", "--by", "note", "--sweep", "hold_out=n001,n002", "--store", store).data
    assert list(some["held_out"][0]["accuracy"]) == ["n001", "n002"]
    assert every_value("note", TrainConfig(store=str(with_values(tmp_path, 50))), Home.from_environment())[0] == "a, b"


@pytest.mark.slow
def test_a_grid_in_python_takes_what_deals_the_rows_as_keywords(store: Path) -> None:
    words = ("--by", "site", "--validation", "0.3")
    asked = ("grid", "--method", "fedavg", *words, "--sweep", "lr=0.01,0.1", "--rounds", 2, "--store", store)
    printed = ok(*asked, "--hold-out", "each").data["held_out"]
    sweeps = {"by": "site", "validation": 0.3, "lr": [0.01, 0.1]}
    made = fc.grid("fedavg", store, hold_out="each", options={"rounds": 2}, **sweeps)
    assert made.by_validation
    of = {row.sweep["lr"]: (row.accuracy, row.validation) for row in made.held_out()}
    assert of == {row["sweep"]["lr"]: (row["accuracy"], row["validation"]) for row in printed}
    few = fc.grid("fedavg", store, by="site", max_clients=2, unlabelled="drop", options={"rounds": 1})
    args = few.points[0].run.result["partition"]["args"]
    assert (args["max_clients"], args["unlabelled"]) == (2, "drop")
    with pytest.raises(UsageError, match="validation is '2', expected a share above 0 and below 1 or split"):
        fc.grid("fedavg", store, by="site", validation=2)


def test_a_value_with_a_comma_is_held_out_as_one(tmp_path: Path) -> None:
    done = ok("grid", "--method", "fedncm", "--by", "note", "--hold-out", "each", "--store", with_values(tmp_path, 3))
    assert list(done.data["held_out"][0]["accuracy"]) == ["a, b", "n001", "n002"]
    assert [p["partition"]["args"]["hold_out"] for p in done.data["points"]] == [["a, b"], ["n001"], ["n002"]]


def test_a_scheme_beside_a_column_deals_every_value(store: Path) -> None:
    done = ok("partition", "--by", "domain", "--scheme", "iid", "--clients", 2, "--store", store)
    names = [c["name"] for c in done.data["clients"]]
    assert names == [f"{d}/client-{i}" for d in DOMAINS for i in (0, 1)]


def test_shards_of_natural_clients_keep_the_column(store: Path, tmp_path: Path) -> None:
    ok("partition", "--by", "site", "--store", store)
    done = ok("shard", "--partition", "natural-by-site-s0", "--out", tmp_path / "sites", "--store", store)
    for path in done.data["stores"]:
        group = Store.open(path).group("site")
        assert len(set(group.codes.tolist())) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("partition", "--by", "sitte"), "Did you mean 'site'"),
        (("partition",), "No scheme was named"),
        (("train", "--method", "fed3r", "--by", "domain", "--hold-out", "oill"), "Did you mean 'oil'"),
        (
            ("grid", "--method", "fed3r", "--by", "class", "--domain", "ink", "--hold-out", "x"),
            "Unknown value of class 'x'",
        ),
        (("grid", "--method", "fed3r", "--hold-out", "each", "--sweep", "hold_out=oil"), "both given"),
        (("grid", "--method", "fed3r", "--hold-out", "each", "--domain", "ink"), "has one value, ink"),
        (("partition", "--by", "site", "--clients", "3"), "clients is an argument of the scheme inside"),
        (("partition", "--scheme", "iid", "--min-rows", "3"), "Unknown argument of iid 'min_rows'"),
        (("partition", "--by", "site", "--hold-out", "east", "--tests", "within"), "both say which rows are the test"),
        (
            ("train", "--method", "fed3r", "--hold-out", "ink", "--option", "tests=within"),
            "hold_out and tests within both say",
        ),
        (("grid", "--method", "fed3r", "--hold-out", "each", "--tests", "within"), "hold_out and tests within both"),
        (("grid", "--method", "fed3r", "--sweep", "tests=within,global", "--hold-out", "ink"), "tests within both"),
    ],
)
def test_what_cannot_be_is_one_sentence(store: Path, words: tuple[str, ...], said: str) -> None:
    done = fedcache(*words, "--store", store)
    assert done.code == Exit.USAGE
    assert said in done.err


@pytest.mark.parametrize("words", [("partition",), ("train", "--method", "fed3r"), ("grid", "--method", "fed3r")])
@pytest.mark.parametrize("option", ["--store", "--dataset"])
def test_the_command_of_a_refused_partition_is_for_the_store_that_was_named(
    own_home: Path, tmp_path: Path, words: tuple[str, ...], option: str
) -> None:
    for name in ("meant", "last one"):  # the second is the one last used
        np.savez(
            tmp_path / f"{name}.npz",
            features=np.random.default_rng(0).normal(size=(60, 3)).astype("f4"),
            labels=np.arange(60) % 2,
            site=np.arange(60) // 20 if name == "meant" else np.arange(60) // 30,
        )
        ok("ingest", tmp_path / f"{name}.npz", "--name", name)
    store = "meant" if option == "--dataset" else ok("inspect", "meant").data["path"]
    ok("inspect", "last one")
    done = fedcache(*words, option, store, "--by", "site", "--min-rows", 1000)
    assert done.code == Exit.USAGE
    (command,) = re.findall(r"fedcache (partition .*)", done.err.replace("\n  ", " "))
    assert command.startswith(f"partition {option} {store} --scheme natural --by site --min-rows ")
    assert ok(*shlex.split(command)).data["store"] == ok("inspect", "meant").data["path"]
