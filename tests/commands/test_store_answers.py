"""What the commands on stores and results answer a person, of small stores whose counts are known."""

import numpy as np
import pytest
from arrays import normals
from command import data_of, fedcache, ok
from failing_command import must_fail

import fedcache as fc


@pytest.fixture
def small():
    """20 rows of two classes and two domains, with text features: 12 train, 5 test, 3 validation."""
    rows = np.arange(20)
    splits = np.where(rows < 12, "train", np.where(rows < 17, "test", "validation"))
    return fc.Store.from_arrays(
        {"mine": np.ones((20, 3), np.float32), "other": np.ones((20, 2), np.float16)},
        labels=rows % 2,
        classes=("cat", "dog"),
        domains=np.where(rows < 10, "ink", "pen"),
        splits=splits,
        text={"mine": np.ones((2, 3), np.float32)},
        name="small",
    )


def test_a_store_is_named_as_an_argument_or_by_the_option_of_other_commands(small):
    for name in ("inspect", "verify", "repair"):
        assert fedcache(f"{name} --store {small.path}").out == fedcache(f"{name} {small.path}").out
        must_fail("", f"{name} {small.path} --store other.zarr")


def test_lists_that_exclude_each_other_are_refused():
    must_fail("", "ls --privacy --runs")


def test_ls_lists_stores_with_their_sizes_and_damaged_ones_with_why(small, own_home):
    ok(f"partition --scheme iid --clients 2 --name mine --store {small.path}")
    size = sum(f.stat().st_size for f in small.path.rglob("*") if f.is_file())
    (entry,) = data_of("ls")["entries"]
    assert entry == {
        "name": small.path.name,
        "path": str(small.path),
        "dataset": "small",
        "images": 20,
        "ok": 20,
        "arrays": sorted(small.arrays),
        "text": ["mine"],
        "groups": {},
        "partitions": ["mine"],
        "bytes": size,
    }
    assert data_of("ls --dataset small")["entries"] == [entry]
    (own_home / "stores/broken.zarr").mkdir()
    told = ok("ls")
    broken, kept = told.data["entries"]
    assert kept == entry
    assert broken.keys() == {"name", "path", "problem"}
    assert told.warnings == [f"broken.zarr: {broken['problem']}"]


@pytest.mark.parametrize(
    ("file", "following"),
    [
        (
            {"labels": [0, 1] * 5, "split": ["train"] * 6 + ["test"] * 3 + ["validation"]},
            "fedcache train --method fedavg --scheme iid --clients 3 --dataset mine",
        ),
        (
            {
                "split": ["train"] * 6 + ["test"] * 4,
                "text/mine": np.ones((2, 3)),
                "classes": ["cat", "dog"],
            },
            "fedcache train --method clip-zs --scheme iid --clients 3 --dataset mine",
        ),
        ({"labels": list(range(10))}, "fedcache ingest FILE --name mine --replace"),
    ],
)
def test_ingest_says_what_it_found_and_what_comes_next(tmp_path, file, following):
    rows = len(file.get("labels", file.get("split", ())))
    np.savez(tmp_path / "e.npz", **{"features/mine": np.ones((rows, 3), np.float32), **file})
    done = data_of(f"ingest {tmp_path}/e.npz --name mine")
    assert "10 rows" in done["notes"][0]
    assert done["next"] == following
    again = fedcache(f"ingest {tmp_path}/e.npz --name mine")
    assert again.out.splitlines() == [*done["notes"], done["path"], following]


@pytest.mark.parametrize(
    ("site", "labels", "dealt"),
    [
        (["a", "b"] * 20, [0, 1] * 20, "--by site"),
        (["a", "b"] * 20, [0.0, 0.0, 1.0, np.nan] * 10, "--by site --option unlabelled=drop"),
        (
            [str(i) for i in range(40)],
            [0, 1] * 20,
            "--scheme iid --clients 5",
        ),  # a value for each row is no client
        (["a"] * 40, [0, 1] * 20, "--scheme iid --clients 5"),
    ],
)
def test_after_a_table_with_sites_the_next_command_trains_on_these(tmp_path, site, labels, dealt):
    x = normals(0, 40, 3)
    np.savez(tmp_path / "e.npz", **{"features/mine": x, "labels": labels, "site": site})
    following = data_of(f"ingest {tmp_path}/e.npz --name mine")["next"]
    assert following == f"fedcache train --method fedavg {dealt} --dataset mine"
    ok(*following.split()[1:], "--rounds", 1)
