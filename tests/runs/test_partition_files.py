"""Partitions on disk: files of arrays in stores and runs, and the JSON of earlier releases, which is read for ever."""

from pathlib import Path

import pytest
from arrays import small_store
from command import data_of, fedcache, ok
from damage import flip_bit
from made_path import place_of
from refusal import corruption, refused

import fedcache as fc
from fedcache.errors import Exit
from fedcache.report.find_runs import gather
from fedcache.report.run_origin import store_of_run
from fedcache.runs.directory import file_digest, read_result, write_result
from fedcache.runs.partitions import load_partition, make_partition
from fedcache.store.files import canonical_json
from fedcache.store.verify import repair, verify

DIRICHLET = {"clients": 3, "alpha": 2.0}


@pytest.fixture
def store(tmp_path):
    return fc.Store.open(small_store(tmp_path))


def files_of(store):
    return [file.name for file in (store.path / "partitions").iterdir()]


def damage(store, at):
    flip_bit(store.path / "partitions/p.partition", at)


@pytest.mark.parametrize("protocol", ["balanced", "matched"])
def test_a_saved_partition_is_a_file_of_arrays_and_the_same_again_writes_nothing(store, protocol):
    how = {**DIRICHLET, "test_protocol": protocol}
    made = make_partition(store, "dirichlet", name="p", **how)
    assert files_of(store) == ["p.partition"]
    assert load_partition(store, "p").to_payload() == made.to_payload()
    before = (store.path / "manifest.json").stat().st_mtime_ns
    make_partition(store, "dirichlet", name="p", **how)
    assert (store.path / "manifest.json").stat().st_mtime_ns == before
    assert verify(store.path).ok


def test_json_of_an_earlier_release_is_read_by_everything(store, tmp_path):
    made = make_partition(store, "dirichlet", save=False, **DIRICHLET)
    store.put_partition("old", made.to_payload())
    assert load_partition(store, "old").digest == made.digest
    assert store.partition("old") == made.to_payload()
    # and is left as it is
    assert make_partition(store, "dirichlet", name="old", **DIRICHLET).digest == made.digest
    assert files_of(store) == ["old.json"]
    where = f"--store {store.path}"
    assert data_of(f"inspect {store.path}")["partitions"] == ["old"]
    assert data_of(f"train --method fed3r {where} -p old")["partition"]["digest"] == made.digest
    ok(f"shard {where} -p old --out {tmp_path}/sites")
    ok(f"verify {store.path}")
    file = tmp_path / "old.json"
    file.write_bytes(canonical_json(made.to_payload()))
    assert data_of(f"train --method fed3r {where} -p {file}")["reused"]
    other = make_partition(store, "dirichlet", name="old", **DIRICHLET, seed=1, replace=True)
    assert files_of(store) == ["old.partition"]
    assert load_partition(fc.Store.open(store.path), "old").digest == other.digest
    assert verify(store.path).ok


@pytest.mark.parametrize("place", [0, 12, 300, -1, None])
def test_a_damaged_or_missing_file_is_found_and_forgotten_by_repair(store, place):
    make_partition(store, "dirichlet", name="p", **DIRICHLET)
    if place is None:
        (store.path / "partitions/p.partition").unlink()
    else:
        damage(store, place)
    corruption(lambda: load_partition(store, "p"))
    assert fedcache(f"train --method fed3r --store {store.path} -p p --json").code == Exit.CORRUPT
    assert [p["file"] for p in verify(store.path).problems] == ["partitions/p.partition"]
    repair(store.path)
    assert fc.Store.open(store.path).partitions == []


@pytest.mark.parametrize("name", ["mine.json", "mine.partition"])
def test_a_partition_is_shared_as_a_file_of_either_form(store, tmp_path, name):
    where = f"--store {store.path}"
    made = data_of(f"partition {where} --scheme iid --clients 3 --out", tmp_path / name)
    raw = (tmp_path / name).read_bytes()
    assert raw.startswith(b"{" if name == "mine.json" else b"\x89FCARR1\n")
    train = f"train --method fed3r {where} -p {tmp_path / name}"
    run = data_of(train)
    assert run["partition"]["digest"] == made["digest"]
    (tmp_path / name).unlink()  # the run keeps the partition
    assert data_of("train --config", Path(run["path"]) / "config.toml")["reused"]
    (tmp_path / name).write_bytes(raw[:-9])
    assert fedcache(train).code == Exit.CORRUPT


@pytest.mark.slow
def test_a_run_of_an_earlier_release_keeps_its_partition_as_json(store):
    words = f"train --method fed3r --store {store.path} --scheme iid --clients 3"
    path = place_of(words)
    # The directory as an earlier release left it: the partition as JSON, named by configuration and result.
    new = path / "partition-0.partition"
    old = path / "partition-0.json"
    made = fc.Partition.load(new)
    old.write_bytes(canonical_json(made.to_payload()))
    new.unlink()
    (path / "files.json").unlink()
    config = path / "config.toml"
    config.write_text(config.read_text().replace("partition-0.partition", "partition-0.json"))
    result = read_result(path / "result.json")
    files = {k: v for k, v in result["files"].items() if k != new.name}
    files[old.name] = file_digest(old.name, old.read_bytes())
    write_result(path / "result.json", {**result, "files": files})

    assert data_of(f"train --config {config}")["reused"]
    (entry,) = gather([path], path.parent).entries
    assert store_of_run([entry]).partition.digest == made.digest
    old.write_bytes(old.read_bytes().replace(b"client-0", b"client-9"))
    assert fedcache(f"{words} --json").code == Exit.CORRUPT


def test_verify_computes_the_digest_that_reading_a_store_believes(store):
    made = make_partition(store, "dirichlet", name="p", **DIRICHLET)
    other = make_partition(store, "dirichlet", save=False, **DIRICHLET, seed=1)
    other.__dict__["digest"] = made.digest
    store.put_partition("p", other.to_file())  # somebody who writes manifests, too
    assert load_partition(store, "p").digest == made.digest
    done = fedcache(f"verify {store.path} --json")
    assert done.code == Exit.CORRUPT
    assert [problem["file"] for problem in done.data["problems"]] == ["partitions/p.partition"]


@pytest.mark.parametrize(
    ("at", "scheme"),
    [(-64, "--scheme dirichlet --clients 3 --alpha 2 --partition-seed 7"), (20, "--scheme SCHEME")],
)
def test_a_damaged_partition_is_made_again_by_the_command_that_its_error_names(store, at, scheme):
    made = make_partition(store, "dirichlet", name="p", **DIRICHLET, seed=7)
    damage(store, at)
    corruption(lambda: load_partition(store, "p"), f"fedcache partition {scheme} --name p")
    error = refused(
        lambda: make_partition(store, "dirichlet", name="p", **DIRICHLET, seed=8), "damaged"
    )
    assert error.hint.endswith("--replace")
    make_partition(store, "dirichlet", name="p", **DIRICHLET, seed=7)
    assert load_partition(store, "p").digest == made.digest
    damage(store, at)
    other = make_partition(store, "dirichlet", name="p", **DIRICHLET, seed=8, replace=True)
    assert load_partition(store, "p").digest == other.digest
