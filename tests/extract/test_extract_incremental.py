"""Extraction of a dataset that has got new images: what is reused, what is computed, and that it is the same."""

import os
import random
import shutil
import signal
import time

import numpy as np
import pytest
from command import apart, fedcache, ok, start, words_of
from damage import flip_bit
from draws import examples
from failing_command import must_fail
from files_now import files_now
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pictures import CLASSES, folder, picture
from test_extract import SMALL, extract

from fedcache import Store
from fedcache.errors import Exit
from fedcache.runs.partitions import make_partition
from fedcache.store.manifest import VANISHED
from fedcache.store.verify import verify


def store_of(done):
    assert done.code in (0, 3)
    return Store.open(done.data["path"])


def add(images, name="train/zebra/zzz.png", seed=5, label=0):
    place = images / name
    place.parent.mkdir(parents=True, exist_ok=True)
    picture(seed, label).save(place)


def by_uid(store):
    """Every row that may be used, by name and uid, with its columns in words and its features."""
    s = store.samples
    features = {key: store.reader(key).all() for key in store.arrays}
    return {
        (s.name[r], s.uid[r].tobytes()): {
            "label": s.classes[s.label[r]] if s.label[r] >= 0 else None,
            "domain": s.domains[s.domain[r]],
            "split": int(s.split[r]),
            **{key: x[r].tobytes() for key, x in features.items()},
        }
        for r in np.flatnonzero(s.ok).tolist()
    }


def fresh(images, tmp_path):
    """The rows of a store of the same images in a home that knows no other, and without one beside it."""
    before = os.environ["FEDCACHE_HOME"]
    os.environ["FEDCACHE_HOME"] = f"{tmp_path}/other"
    shutil.rmtree(tmp_path / "other", ignore_errors=True)
    try:
        return by_uid(store_of(extract(images)))
    finally:
        os.environ["FEDCACHE_HOME"] = before


@pytest.mark.slow
def test_new_images_are_appended_and_whole_chunks_are_linked(images):
    add(images, "train/ant/extra.png", 1, 1)  # 49 rows: 6 whole chunks and one row
    before = store_of(extract(images))
    add(images, "train/zebra/000a.png", 2)
    add(images, "test/10/zzz.png", 3, 2)
    (images / "train/zebra/005.png").unlink()
    add(images, "train/10/003.png", 4, 2)  # other content under the same name
    plan = extract(images, "--dry-run").data
    done = extract(images)
    after = store_of(done)
    # 3 new (one of them the changed one), 2 gone; the partial chunk's one row and the 3 new rows are computed
    expected = {"new": 3, "vanished": 2, "reused_chunks": 6, "forward_passes": 4}
    assert plan["growth"] == expected == done.data["growth"]
    assert [done.data[k] for k in ("images", "ok", "vanished", "bad")] == [50, 50, 2, []]
    assert done.data["decoded"] == 4
    key = next(iter(after.arrays))
    for chunk in range(6):
        places = [s.path / f"features/{key}/c/{chunk}/0/0" for s in (before, after)]
        assert places[0].stat().st_ino == places[1].stat().st_ino
    names = after.samples.name
    gone = np.flatnonzero(after.samples.ok == 0)
    assert sorted(names[r] for r in gone) == ["train/10/003.png", "train/zebra/005.png"]
    assert {q["reason"] for q in after.quarantined()} == {VANISHED}
    assert verify(before.path).ok  # and the earlier store is what it was


@pytest.mark.slow
def test_an_image_that_comes_back_is_a_new_row(images, tmp_path):
    extract(images)
    kept = (images / "train/zebra/005.png").read_bytes()
    (images / "train/zebra/005.png").unlink()
    add(images, "train/10/new.png", 7, 2)
    middle = store_of(extract(images))
    (images / "train/zebra/005.png").write_bytes(kept)
    add(images, "train/10/newer.png", 8, 2)
    last = store_of(extract(images))
    # the store with the most of these images, not the first
    assert last.dataset["grown"] == middle.dataset["digest"]
    assert last.samples.name.count("train/zebra/005.png") == 2
    assert int(last.samples.ok.sum()) == 50
    assert by_uid(last) == fresh(images, tmp_path)


@pytest.mark.slow
def test_unreadable_images_stay_unreadable_and_are_told_from_vanished_ones(images, tmp_path):
    (images / "train/ant/broken.png").write_bytes(b"not a picture")
    extract(images)
    (images / "train/zebra/001.png").unlink()
    add(images, "train/ant/zzz.png", 9, 1)
    done = extract(images)
    assert done.code == 3
    assert [entry["name"] for entry in done.data["bad"]] == ["train/ant/broken.png"]
    assert done.data["images"] - done.data["ok"] == 1
    assert done.data["vanished"] == 1
    assert by_uid(store_of(done)) == fresh(images, tmp_path)
    many = extract(images, "--max-bad", 1)
    assert many.code == 3  # what has vanished is not counted as bad


@pytest.mark.slow
def test_vanished_rows_are_dealt_to_nobody(images):
    extract(images)
    for name in ("train/zebra/001.png", "train/ant/002.png", "test/10/001.png"):
        (images / name).unlink()
    plan = fedcache(f"extract folder:{images} -b random-projection {SMALL} --dry-run").out
    assert "all of them have features in the earlier store" in plan
    add(images)
    store = store_of(extract(images))
    must_fail("3 rows that were deleted", f"publish {store.path} {images}/web", code=Exit.STORE)
    gone = set(np.flatnonzero(store.samples.ok == 0).tolist())
    assert len(gone) == 3
    made = make_partition(store, "iid", seed=0, clients=3)
    dealt = {int(r) for c in made.clients for r in (*c.train, *c.test)}
    assert not dealt & gone
    assert len(store.samples.name) - 1 in dealt  # and the new row is
    ok("train --method fedncm --clients 3")
    scored = ok(f"evaluate method:fedncm --store {store.path} --split all").data
    assert scored["runs"][0]["left_out"]["unreadable"] == 0
    told = ok(f"predict method:fedncm --store {store.path}").data["rows"]
    assert {row["name"] for row in told}.isdisjoint(store.samples.name[row] for row in gone)


@pytest.mark.parametrize(
    "words", ["--batch 8", "--chunk-rows 16", "--fresh"], ids=["how", "chunks", "fresh"]
)
def test_what_was_computed_otherwise_is_computed_again(images, words):
    extract(images)
    add(images)
    done = extract(images, *words_of(words))
    assert done.code == 0
    assert done.data["growth"] is None
    assert done.data["decoded"] == 49
    assert list(store_of(done).samples.name) == sorted(store_of(done).samples.name)


@pytest.mark.slow
def test_a_damaged_chunk_of_the_earlier_store_is_not_taken_over(images, tmp_path):
    before = store_of(extract(images))
    file = before.path / "features" / next(iter(before.arrays)) / "c/2/0/0"
    flip_bit(file, 5)
    add(images)
    done = extract(images)
    assert done.data["growth"] == {"new": 1, "vanished": 0, "reused_chunks": 5, "forward_passes": 9}
    assert by_uid(store_of(done)) == fresh(images, tmp_path)


def test_chunks_are_copied_where_they_cannot_be_linked(images, monkeypatch):
    before = store_of(extract(images))
    add(images)

    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    done = extract(images)
    after = store_of(done)
    assert done.data["growth"]["reused_chunks"] == 6
    key = next(iter(after.arrays))
    places = [s.path / f"features/{key}/c/0/0/0" for s in (before, after)]
    assert places[0].stat().st_ino != places[1].stat().st_ino
    assert places[0].read_bytes() == places[1].read_bytes()
    assert verify(after.path).ok


@pytest.mark.slow
def test_a_killed_extraction_goes_on_where_it_was(own_home, tmp_path):
    images = folder(tmp_path / "many", train=60, test=20)  # 240 rows, 30 chunks
    words = f"extract --dataset folder:{images} --backbones random-projection {SMALL} --json"
    first = apart(words, home=own_home)
    assert first.code == 0
    for i in range(120):
        add(images, f"train/ant/new{i:03}.png", 100 + i, 1)
    (images / "train/zebra/001.png").unlink()
    kills = 0
    for share in (3, 33):
        process = start(words, home=own_home)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            lines = sum(
                f.read_bytes().count(b'"chunk":')
                for f in files_now(own_home / "stores", "*/journal-*.jsonl")
            )
            if lines >= share:
                break
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills
    store = store_of(apart(words, home=own_home))
    assert verify(store.path).ok
    assert not [p for p in store.path.rglob("*") if p.name.endswith(".partial")]
    assert store.samples.name[:240] == store_of(first).samples.name
    assert int(store.samples.ok.sum()) == 359
    assert by_uid(store) == fresh(images, tmp_path)


@pytest.mark.slow
def test_an_unfinished_store_goes_on_without_its_parent(images):
    before = store_of(extract(images))
    add(images)
    (images / "train/ant/002.png").unlink()
    grown = store_of(extract(images))
    shutil.rmtree(before.path)
    done = extract(images, backbones="pixels")
    assert store_of(done).path == grown.path
    assert done.data["decoded"] == 48  # of 49 rows; one has vanished
    assert verify(grown.path).ok
    assert extract(images, "--rehash", backbones="pixels").code == 0


@pytest.mark.slow
@given(seed=st.integers(0, 10**6))
@examples(3, 20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changes_give_the_rows_of_a_fresh_extraction(tmp_path, seed):
    draw = random.Random(seed)
    place = tmp_path / str(seed)
    shutil.rmtree(place, ignore_errors=True)
    images = folder(place / "shapes", train=8, test=3)
    os.environ["FEDCACHE_HOME"] = f"{place}/home"
    expected = {p.relative_to(images).as_posix() for p in images.rglob("*.png")}
    previous = store_of(extract(images))
    for step in range(2):
        for name in draw.sample(sorted(expected), draw.randrange(5)):
            if draw.random() < 0.5:
                (images / name).unlink()
                expected.discard(name)
            else:
                add(images, name, draw.randrange(10**6))
        for _ in range(draw.randrange(8)):
            name = f"{draw.choice(['train', 'test'])}/{draw.choice(CLASSES[:4])}/{draw.randrange(100)}.png"
            add(images, name, draw.randrange(10**6))
            expected.add(name)
        done = extract(images)
        store = store_of(done)
        assert {
            n for n, good in zip(store.samples.name, store.samples.ok, strict=True) if good
        } == expected, step
        if done.data["growth"] is not None:
            assert store.samples.name[: previous.rows] == previous.samples.name
            assert store.samples.name[previous.rows :] == tuple(
                sorted(store.samples.name[previous.rows :])
            )
            grown = done.data["growth"]
            # and the rest of a partial chunk of 8
            assert grown["forward_passes"] <= grown["new"] + 7
        assert by_uid(store) == fresh(images, place)
        assert verify(store.path).ok
        previous = store
