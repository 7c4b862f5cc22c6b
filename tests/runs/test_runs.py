"""Stored results: every promise is verified before it is returned, and a damaged one says what to do."""

import shutil
from pathlib import Path

import pytest
from arrays import ingested
from command import data_of, fedcache, ok
from damage import flip_bit
from failing_command import must_fail_corrupt
from made_path import place_of

from fedcache.store.files import to_signed

FILES = ("config.toml", "rounds.jsonl", "partition-0.partition", "partition-1.partition")
IID = "--scheme iid --clients 3"
FED3R = f"train --method fed3r {IID}"
GRID = f"grid --method fedavg --sweep lr=0.1,0.01 {IID} --rounds 1"


@pytest.mark.parametrize(
    ("name", "harm"),
    [*((name, "other") for name in FILES), ("rounds.jsonl", "gone"), ("result.json", "other")],
)
def test_a_result_with_a_damaged_promise_is_not_returned(shapes, name, harm):
    words = f"{FED3R} --seeds 0,1 --repartition"
    first = data_of(words)
    path = Path(first["path"]) / name
    before = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(before.replace(b"fed3r", b"fed3q").replace(b"0", b"7", 1))
    assert "--fresh" in must_fail_corrupt(str(path), words)["hint"]
    assert data_of(words, "--fresh")["accuracy"] == first["accuracy"]
    assert path.read_bytes() == before
    assert data_of(words)["reused"]


def test_a_repeated_command_prints_the_stored_result_and_checks_the_features_again(shapes):
    first = fedcache(FED3R)
    second = fedcache(FED3R)
    assert second.code == 0
    assert second.out == first.out
    assert "The same run is stored already" in second.err
    flip_bit(next(path for path in sorted((shapes / "features").rglob("*")) if path.is_file()))
    assert fedcache(FED3R).code == 5


def test_damaged_measurements_are_a_warning_and_no_error(shapes):
    path = place_of(FED3R) / "measured.json"
    anothers = (place_of(f"train --method fedncm {IID}") / "measured.json").read_bytes()
    for content in (b"[]", to_signed({"seconds": {"train": 0.1}}), anothers):
        path.write_bytes(content)
        again = ok(FED3R)
        assert again.data["reused"]
        assert again.data["seconds"] == {}
        assert any("measured.json" in w for w in again.warnings)
    ok(f"{FED3R} --fresh")
    assert ok(FED3R).warnings == []


def test_the_same_result_has_the_same_bits_wherever_store_and_runs_lie(shapes, tmp_path):
    moved = shutil.copytree(shapes, tmp_path / "elsewhere/other.zarr")
    results = []
    for number, place in enumerate((shapes, moved)):
        run = place_of(f"{FED3R} --store {place} --runs {tmp_path}/runs{number}")
        results.append((run / "result.json").read_bytes())
    assert results[0] == results[1]
    assert str(tmp_path).encode() not in results[0]


def test_a_finished_seed_that_was_damaged_begins_again(shapes):
    path = place_of(FED3R)
    before = (path / "result.json").read_bytes()
    (path / "result.json").unlink()
    (path / "seed-0.json").write_text("{}")
    assert "Seed 0 is trained again from the start." in "".join(ok(FED3R).warnings)
    assert (path / "result.json").read_bytes() == before
    assert (path / "seed-0.json").read_text() != "{}"


@pytest.mark.parametrize(
    ("old", "new"), [('method = "fed3r"', 'method = "fedncm"'), ("lam", "lambda")]
)
def test_the_configuration_of_a_finished_run_is_not_followed_when_it_was_changed(
    shapes, old, new, tmp_path
):
    config = place_of(FED3R) / "config.toml"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))
    must_fail_corrupt(str(config), f"train --config {config}")
    elsewhere = tmp_path / "config.toml"  # where it is the user's own
    shutil.copy(config, elsewhere)
    assert fedcache(f"train --config {elsewhere}").code in (0, 2)


def test_the_store_that_a_finished_run_names_is_not_changed_unseen(shapes, tmp_path):
    """Of the places in config.toml the result holds no digest: it has the same bits wherever its store lies."""
    config = place_of(FED3R) / "config.toml"
    config.write_text(config.read_text().replace(str(shapes), str(ingested(tmp_path))))
    assert fedcache(f"train --config {config} --json").code == 5


@pytest.mark.slow
def test_a_partition_of_another_run_is_found_in_an_unfinished_one(shapes):
    path = place_of(FED3R)
    other = place_of("train --method fed3r --scheme iid --clients 2")
    (path / "result.json").unlink()
    shutil.copy(other / "partition-0.partition", path)
    assert fedcache(f"train --config {path}/config.toml --json").code == 5
    assert not data_of(FED3R)["reused"]
    assert data_of(f"train --config {path}/config.toml")["reused"]


def test_an_unfinished_run_without_its_configuration_is_still_listed(shapes):
    path = place_of(FED3R)
    (path / "result.json").unlink()
    (path / "config.toml").unlink()
    (left,) = data_of("runs list")["left_out"]
    assert left["path"] == str(path)


def test_a_result_in_the_directory_of_another_run_is_not_returned(shapes):
    path = place_of(FED3R)
    other = place_of(f"train --method fedncm {IID}")
    shutil.rmtree(path)
    shutil.copytree(other, path)
    assert fedcache(f"{FED3R} --json").code == 5


@pytest.mark.slow
def test_a_grid_goes_round_a_damaged_point_and_says_so(shapes):
    points = data_of(GRID)["points"]
    path = Path(points[0]["path"]) / "result.json"
    path.write_text("{}")
    done = fedcache(f"{GRID} --json")
    assert done.code == 5
    assert [p["sweep"] for p in done.data["points"]] == [points[1]["sweep"]]
    (damaged,) = done.data["damaged"]
    assert damaged["sweep"] == points[0]["sweep"]
    assert str(path) in damaged["message"]
    (Path(points[1]["path"]) / "rounds.jsonl").write_text("")
    assert fedcache(f"{GRID} --json").code == 5
    fresh = data_of(f"{GRID} --fresh")
    assert [p["accuracy"] for p in fresh["points"]] == [p["accuracy"] for p in points]
    assert data_of(GRID)["reused"] == 2
