"""Clients that the data brings, on the command line: ``--by``, ``--hold-out`` and the table of held-out values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import fedcache, ok

import fedcache as fc
from fedcache.errors import Exit, UsageError
from fedcache.store.groups import Group, put_groups
from fedcache.store.store import Store

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


def test_the_table_is_printed_with_a_column_for_each_value_and_the_mean(store: Path) -> None:
    words = ("grid", "--method", "fedncm", "--hold-out", "each", "--by", "site", "--store", store)
    text = fedcache(*words).out
    head = next(line for line in text.splitlines() if "mean" in line and "method" in line)
    assert head.split() == ["method", *sorted(SITES), "mean"]
    assert "Highest mean (not a choice) over 4 held-out values: fedncm" in text


def test_tests_within_beside_hold_out_are_refused_from_python_too(store: Path) -> None:
    with pytest.raises(UsageError, match="hold_out and tests within both say which rows are the test set"):
        fc.partition(store, by="site", hold_out="east", tests="within")
    made = fc.partition(store, by="site", hold_out="east")
    assert (made.args["tests"], made.default_name()) == ("within", "natural-by-site-without-east-s0")


def test_a_setting_with_held_out_values_has_the_name_of_its_partition(store: Path) -> None:
    grid = ok("grid", "--method", "fedncm,fed3r", "--by", "site", "--hold-out", "each", "--store", store).data
    saved = [ok("partition", "--by", "site", "--hold-out", site, "--store", store).data for site in SITES]
    assert {p["partition"]["digest"] for p in grid["points"]} == {one["digest"] for one in saved}
    names = {table.setting.rpartition(", ")[2] for table in fc.compare().tables}
    assert names == {one["name"] for one in saved} == {f"natural-by-site-without-{site}-s0" for site in SITES}


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
