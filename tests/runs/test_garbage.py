"""``gc`` lists what nothing will read again, deletes it when told to, and never touches what is whole or in use."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import toy_store
from arrays import ingested
from command import data_of, ok
from made_path import extracted

from fedcache.config import Home
from fedcache.runs import garbage
from fedcache.runs.directory import write_result
from fedcache.store.lock import hold_lock
from fedcache.store.store import Store
from fedcache.store.verify import verify

DEAD = 2**22 + 1
"""Beyond any process number."""


@pytest.fixture
def home(shapes):
    ok("train --method fed3r --scheme iid --clients 2")
    return Path(os.environ["FEDCACHE_HOME"])


def listed(*words):
    return {Path(g["path"]).name: g["kind"] for g in data_of("gc", *words)["garbage"]}


@pytest.mark.parametrize("remover", ["gc", "ingest"])
def test_a_journal_that_a_killed_ingest_left_is_named_and_removed(tmp_path, monkeypatch, remover):
    """Killed after the manifest, before the journal goes: the store is whole, and so it stays."""
    unlink = Path.unlink

    def killed(path, **words):
        if "journal" not in path.name:
            unlink(path, **words)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)
        store = ingested(tmp_path)
    (journal,) = store.glob("journal-*")
    (store / "locks/x.json").write_text("{}")
    assert listed() == {journal.name: "leftovers", "x.json": "leftovers"}
    assert verify(store).ok
    ok({"gc": "gc --delete", "ingest": f"ingest {tmp_path}/mine.npz --name mine"}[remover])
    assert listed() == {}
    assert not journal.exists()
    assert verify(store).ok


def test_a_store_that_is_replaced_goes_whole(tmp_path, monkeypatch):
    """Killed while the old store is removed: the new one is in its place, and gc names what is left of the old."""
    place = ingested(tmp_path)
    np.savez(tmp_path / "other.npz", features=np.eye(30), label=np.arange(30) % 3)
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda path, **words: None)
        ok(f"ingest {tmp_path}/other.npz --name mine --store {place} --replace")
    assert verify(place).ok
    (left,) = place.parent.glob(".*.partial")
    assert verify(left).ok


def test_leftovers_are_listed_and_deleted_when_told(home):
    (store,) = (home / "stores").glob("*.zarr")
    assert listed() == {}  # and none of the models of the run
    made = [
        home / f"scratch/.predict.{DEAD}-x.partial",
        home / f"stores/.x.zarr.{DEAD}-abc.partial",
        home / f"runs/.result.json.{DEAD}.partial",
        home / f"flower/rows-0123/job/client/.after-1.safetensors.{DEAD}-0.partial",
        store / "features/old-00000000/c/0",
        home / f"flower/loopback/up.{DEAD}-abc",
    ]
    for path in made:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name.startswith("up."):
            path.mkdir()
            path = path / "server.log"
        path.write_bytes(b"x" * 1000)
    (home / f"flower/loopback/up.{os.getpid()}-abc").mkdir()
    mine = home / f"runs/.y.{os.getpid()}.partial"
    mine.write_bytes(b"x")  # this process is alive
    assert listed() == {p.name: "leftovers" for p in made}
    done = data_of("gc --delete")
    assert done["deleted"]
    assert done["bytes"] == 1000 * len(made)
    assert not any(p.exists() for p in made)
    assert mine.exists()
    assert verify(store).ok
    assert data_of("train --method fed3r --scheme iid --clients 2")["reused"]


def test_a_store_that_is_written_and_a_damaged_one_are_left_alone(home):
    (store,) = (home / "stores").glob("*.zarr")
    stray = store / "stray.bin"
    stray.write_bytes(b"x")
    with hold_lock(store / "locks/a.lock", "a", wait=False):
        assert listed() == {}
    assert listed() == {"stray.bin": "leftovers"}
    (store / "manifest.json").write_bytes(b"{}")
    assert listed() == {}


def test_runs_without_a_result_are_given_up_after_some_days(home):
    run = home / "runs/0123456789abcdef"
    run.mkdir()
    (run / "config.toml").write_text("[train]\n")
    assert listed() == {}
    old = time.time() - 8 * 86_400
    os.utime(run / "config.toml", (old, old))
    assert listed() == {run.name: "given-up"}
    ok("gc --delete")
    assert not run.exists()
    assert len(list(run.parent.iterdir())) == 1, "the run with a result stays"


def test_unfinished_arrays_are_given_up_after_some_days_and_the_store_stays():
    """As of an extraction that cannot be completed: its file is gone, or its model writes no numbers."""
    place = Home.from_environment().stores / "toy.zarr"
    place.parent.mkdir(parents=True)
    store = toy_store.create(place)
    toy_store.fill(store, toy_store.KEYS[0])
    toy_store.fill(store, toy_store.KEYS[1], chunks=2)
    (journal,) = place.glob("journal-*")
    assert listed() == {}
    assert listed("--days", 0) == dict.fromkeys((journal.name, toy_store.KEYS[1]), "given-up")
    with hold_lock(place / "locks/a.lock", "a", wait=False):
        assert listed("--days", 0) == {}
    ok("gc --days 0 --delete")
    assert listed("--days", 0) == {}
    assert list(Store.open(place).arrays) == [toy_store.KEYS[0]]
    assert verify(place).ok
    toy_store.fill(store, toy_store.KEYS[1])
    assert verify(place).ok


def test_results_of_other_code_and_stores_of_other_content(home, tmp_path, monkeypatch):
    monkeypatch.setattr(garbage, "code_digest", lambda _method: "another")
    somebodys = home / "runs/somebody's"
    somebodys.mkdir()
    write_result(somebodys / "result.json", {"method": "mine", "code": "c"})
    assert list(listed("--kind", "old-runs").values()) == ["old-runs"], (
        "one run is of a method that is here"
    )
    assert listed() == {}
    (first,) = (home / "stores").glob("*.zarr")
    extracted(tmp_path, train=9, test=2)
    assert listed("--kind", "old-stores") == {first.name: "old-stores"}
