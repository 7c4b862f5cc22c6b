"""Stores among each other: which was extracted last, which are old, what killed processes left in them."""

import os
from pathlib import Path

import numpy as np
import pytest
from refusal import store_error
from toy_store import KEYS, create, fill, samples, whole, writer

from fedcache import Store
from fedcache.config import Home
from fedcache.extract.planning.find_store import need_store, resolve_path
from fedcache.store import catalog
from fedcache.store.lock import hold_lock
from fedcache.store.manifest import append_event


@pytest.fixture
def home(place):
    home = Home(place)
    home.stores.mkdir(parents=True)
    return home


def extracted(home, name, *times, slug="toy", finished=True):
    """A store of a home with one array, whose history tells when it was extracted."""
    store = Store.create(
        home.stores / f"{name}.zarr", samples(), dataset={"slug": slug, "digest": name}
    )
    if finished:
        fill(store, KEYS[0])
    for time in times:
        append_event(store.path, {"event": "extract", "time": time, "keys": []})
    append_event(store.path, {"event": "shard", "time": 99.0})
    return store.path


def test_the_store_extracted_last_is_found_by_the_histories_of_its_name(home):
    first = extracted(home, "toy-a", 1.0, 5.0, 2.0)
    extracted(home, "toy-b", 5.0)
    extracted(home, "toy-c", 9.0, finished=False)
    extracted(home, "toy-d", 9.0, slug="toy-other")
    extracted(home, "other", 9.0)
    (home.stores / "toy-e.zarr").mkdir()
    assert catalog.extracted_later(first) is None, "as late is no later, and others do not count"
    for name in "vzyxw":
        extracted(home, f"toy-{name}", 6.0)
    latest = home.stores / "toy-v.zarr"
    assert catalog.extracted_later(first) == latest, "of equals the first by name"
    assert catalog.extracted_later(latest) is None
    assert catalog.extracted_later(home.stores / "nothing.zarr") is None


def test_stores_of_a_home_are_listed_in_the_order_of_their_names(home):
    for name in "cab":
        extracted(home, name, finished=name != "b")
    (home.stores / ".hidden").mkdir()
    (home.stores / "a file").touch()
    assert [s.path.stem for s in catalog.finished_stores(home)] == ["a", "c"]
    assert [p.name for p in catalog.folders_in(home.stores)] == ["a.zarr", "b.zarr", "c.zarr"]
    nowhere = Home(home.root / "nowhere")
    assert catalog.folders_in(nowhere.stores) == []
    assert catalog.ingested_stores(home) == catalog.ingested_stores(nowhere) == {}


def test_old_stores_are_all_but_the_newest_of_a_name_that_nobody_writes(home):
    for changed, name in enumerate("acbd"):
        path = extracted(home, name, slug="alone" if name == "d" else "toy")
        os.utime(path / "manifest.json", (changed, changed))
    why = "toy was extracted again with other content: b.zarr"
    one, two = (home.stores / f"{name}.zarr" for name in "ac")
    assert list(catalog.old_stores(home)) == [(one, why), (two, why)]
    with writer(Store.open(one), KEYS[1]):
        assert list(catalog.old_stores(home)) == [(two, why)]


def test_what_killed_processes_left_in_stores_is_told_and_what_is_written_is_not(home, monkeypatch):
    store = create(home.stores / "s.zarr")
    fill(store, KEYS[0])
    journal, begun = (store.path / f"journal-{name}.jsonl" for name in (KEYS[0], "c-00000000"))
    note = store.path / "locks/a.json"
    dead, alive = (store.path / f".x.{pid}-00.partial" for pid in (2**22 + 1, os.getpid()))
    stray = store.path / "stray"
    new = store.path / "new.partial"
    old = store.path / "old.partial"
    for file in (journal, dead, alive, stray, new, old):
        file.touch()
    note.write_text("{}")
    now = 10 * catalog.DAY
    monkeypatch.setattr(catalog.time, "time", lambda: now)
    for file, age in ((new, 1.0 - 1e-6), (old, 1.0)):
        os.utime(file, (now - age * catalog.DAY,) * 2)
    found = [path for path, why in catalog.leftovers_of_stores(home) if why]
    assert found == [dead, old, stray, journal, note]
    assert catalog.is_being_written(store.path / "gone.partial"), "who knows"
    begun.touch()
    store.refresh()
    for key, held in ((KEYS[0], journal), ("a", note)):
        with hold_lock(store.path / f"locks/{key}.lock", "it", wait=False):
            catalog.clean_up(store)
            assert held.exists(), "its process still writes"
    note.write_text("{}")
    catalog.clean_up(store)
    assert [file.exists() for file in (journal, note, begun)] == [False, False, True]
    begun.unlink()
    with writer(store, KEYS[1]):
        assert list(catalog.leftovers_of_stores(home)) == []


def test_a_name_is_looked_for_here_then_in_the_home_then_among_ingested_ones(
    home, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)

    def found(name):
        return resolve_path(home, Path(name))

    there = whole(home.stores / "s.zarr").path
    mine = Store.from_arrays({"x": np.eye(3)}, name="m i", path=home.stores / "m_i-1.zarr").path
    for name, path in (
        ("s", there),
        ("s.zarr", there),
        ("m_i", mine),
        ("m i", mine),
        ("ingested:m i", mine),
        ("away/s", Path("away/s")),  # a path is no name
        ("", Path()),
    ):
        assert found(name) == path
    here = whole(tmp_path / "s.zarr").path
    assert found("s") == Path(here.name)
    (tmp_path / "m_i").mkdir()
    assert found("m_i") == Path("m_i"), "what is here is meant"
    # A command that needs a store does not take a folder for one.
    assert need_store(home, path=Path("m_i")).path == mine
    (tmp_path / "test").mkdir()
    store_error(
        lambda: need_store(home, path=Path("test")),
        "test",
        "fedcache extract --dataset folder:test",
    )
