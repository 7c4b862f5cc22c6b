"""``verify`` finds a flipped bit in any file of a store, and after ``repair`` only what was damaged is made again."""

import os
import random
from dataclasses import replace

import numpy as np
import pytest
from damage import files_of, flip, found, with_history_and_an_array_in_flight
from refusal import corruption, store_error
from toy_store import BAD, KEYS, content, fill, whole, write, writer

from fedcache.store.files import sha256_hex
from fedcache.store.manifest import read_manifest, read_quarantine
from fedcache.store.store import Store
from fedcache.store.verify import repair, verify


@pytest.fixture
def path(place):
    """A store with a history and an array in flight."""
    return with_history_and_an_array_in_flight(place / "s.zarr").path


@pytest.mark.slow
def test_a_flipped_bit_is_found_in_every_file_also_of_journals_and_history(path):
    assert verify(path).problems == []
    draw = random.Random(7)
    files = files_of(path)
    assert {"history.jsonl", f"journal-{KEYS[1]}.jsonl", "quarantine.jsonl", "manifest.json"} <= {
        f.name for f in files
    }
    flips = [(f, n) for f in files for n in range(8)]
    assert len(flips) > 250
    for file, n in flips:
        raw = flip(file, draw)
        assert found(path), (file, n)
        file.write_bytes(raw)
    assert verify(path).problems == []


@pytest.mark.parametrize("kind", ["shorter", "longer", "zero", "gone"])
def test_every_file_that_is_cut_grown_zeroed_or_deleted_is_found(path, kind):
    # No history and no array in flight are ordinary states; chunks whose journal is gone are named in a note.
    optional = {"history.jsonl", f"journal-{KEYS[1]}.jsonl"} if kind == "gone" else {}
    for file in files_of(path):
        raw = file.read_bytes()
        changed = {"shorter": raw[:-1], "longer": raw + b"\0", "zero": bytes(len(raw))}
        file.unlink() if kind == "gone" else file.write_bytes(changed[kind])
        assert found(path) or file.name in optional, file
        file.write_bytes(raw)
    assert verify(path).problems == []


def test_the_report_counts_every_byte_once(path):
    files = files_of(path)
    (path / "features/README").write_text("mine")
    report = verify(path)
    assert report.ok
    assert "features/README" in "".join(report.notes)
    assert report.checked == len(files)
    assert report.bytes == sum(f.stat().st_size for f in files)


def test_a_repaired_array_computes_only_its_damaged_chunks_again(finished):
    expected = content(finished.path)
    chunk = finished.path / f"features/{KEYS[0]}/c/2/0/0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    reader = Store.open(finished.path).reader(KEYS[0])
    corruption(reader.all, "chunk 2 of", f"fedcache repair {finished.path}")
    (done,) = repair(finished.path)
    assert KEYS[0] in done
    assert list(Store.open(finished.path).arrays) == [KEYS[1]]
    with writer(Store.open(finished.path), KEYS[0]) as w:
        assert w.missing() == [2]
        assert w.bad == {row: why for row, why in BAD[KEYS[0]].items() if row // 4 != 2} | {
            13: "too large"
        }
        write(w, 2, KEYS[0])
        w.complete()
    assert content(finished.path) == expected


def test_a_store_whose_parts_are_all_damaged_is_whole_after_repair_and_extraction(
    expected, finished
):
    path = finished.path
    for event in ("one", "two"):
        Store.open(path).append_history({"event": event})
    history = path / "history.jsonl"
    history.write_bytes(history.read_bytes().replace(b"one", b"0ne"))
    broken = [
        f"features/{KEYS[1]}/zarr.json",
        "zarr.json",
        "samples/label/zarr.json",
        "partitions/p.json",
        next(f for f in expected if f.startswith("text/") and f.endswith("c/0/0")),
    ]
    for name in broken:
        (path / name).write_bytes(b"?")
    assert {p["file"] for p in verify(path).problems} == {*broken, "history.jsonl"}
    assert len(repair(path)) == len(broken) + 1
    assert verify(path).problems == []
    assert b"0ne" not in history.read_bytes()
    assert content(whole(path).path) == expected


def test_of_the_text_features_of_a_backbone_only_the_damaged_ones_are_forgotten(finished):
    (damaged,) = finished.texts["a"]
    kept = np.eye(3, 3, 1, dtype=np.float32)
    finished.put_text("a", ["a {}."], kept, {"backbone": "a", "weights": "none"})
    (finished.path / f"text/a/{damaged['id']}/c/0/0").write_bytes(b"?")
    (done,) = repair(finished.path)
    assert damaged["id"] in done
    assert np.array_equal(Store.open(finished.path).text("a", ["a {}."]), kept)
    assert not Store.open(finished.path).has_text("a", damaged["templates"])
    assert verify(finished.path).problems == []


def test_a_list_of_bad_images_with_the_right_digest_and_other_words_is_damaged(finished):
    before = read_manifest(finished.path)
    for line in (b"no json", b'{"row":1}', b'{"row":"x","name":"a","reason":"b"}', b"[" * 100_000):
        (finished.path / "quarantine.jsonl").write_bytes(line)
        manifest = replace(before, files={**before.files, "quarantine.jsonl": sha256_hex(line)})
        corruption(lambda manifest=manifest: read_quarantine(finished.path, manifest))


def test_what_cannot_be_made_again_is_still_named_after_repair(finished):
    path = finished.path
    names = {"samples/label/c/0", "samples/name/c/0", "quarantine.jsonl"}
    for name in names:
        (path / name).write_bytes(b"?")
    assert repair(path) == []
    assert names <= {p["file"] for p in verify(path).problems}


def test_repair_refuses_an_array_that_is_being_written(store):
    fill(store, KEYS[0], chunks=2)
    with writer(store, KEYS[0]) as w:
        (w.path / "c/1/0/0").write_bytes(b"?")
        store_error(lambda: repair(store.path), KEYS[0])


def test_a_torn_line_of_the_history_is_cut_off_by_the_next_event(store):
    store.append_history({"event": "one"})
    with (store.path / "history.jsonl").open("ab") as file:
        file.write(b'{"event":"tw')
    assert not verify(store.path).ok
    store.append_history({"event": "three"})
    assert verify(store.path).ok
    lines = (store.path / "history.jsonl").read_bytes().splitlines()
    assert b"one" in lines[0]
    assert b"three" in lines[1]
    assert len(lines) == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize("name", ["manifest.json", f"features/{KEYS[0]}/c/0/0/0"])
def test_a_pipe_in_the_place_of_a_file_is_damage_and_blocks_nobody(finished, name):
    path = finished.path
    (path / name).unlink()
    os.mkfifo(path / name)
    corruption(lambda: Store.open(path).reader(KEYS[0]).all())
