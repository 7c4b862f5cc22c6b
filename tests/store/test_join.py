"""Parts of a store, written and joined without an extraction: the bytes of one writer, wherever the join is stopped."""

import numpy as np
import pytest
from command import fedcache
from refusal import corruption, store_error
from toy_store import KEYS, WIDTH, content, fill, samples, write, writer

from fedcache.progress import Silent
from fedcache.store.join import join_parts, open_parts, rows_of_part
from fedcache.store.manifest import StorePart, read_manifest
from fedcache.store.store import ArrayWriter, Store, finished_arrays, put_groups
from fedcache.store.verify import verify
from fedcache.tables.groups import Group

DATASET = {"slug": "toy", "digest": "ab" * 32, "template": None}


def new(path, part=None):
    """A store of the toy rows, or a part of one, with a group and the text features that a first part has."""
    dataset = dict(DATASET)
    if part is not None:
        dataset["part"] = part.record()
    store = Store.create(path, samples(), dataset=dataset)
    put_groups(store, {"ward": Group.of(["a", "b"] * 7)})
    if part is None or part.number == 1:
        for template in ("a {}.", "one {}."):
            text = np.eye(3, WIDTH, dtype=np.float32)
            store.put_text("a", [template], text, {"backbone": "a", "weights": "none"})
    return store


def whole(place):
    store = new(place / "whole.zarr")
    for key in KEYS:
        fill(store, key)
    return content(store.path)


def parts(place, count):
    made = []
    for number in range(1, count + 1):
        part = StorePart(number, count)
        store = new(part.place(place / "toy.zarr"), part)
        for key in KEYS:
            fill(store, key)
        made.append(store.path)
    return made


def joined(made, out):
    return join_parts(open_parts(made), out, max_bad=3, observer=Silent())


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_parts_in_any_order_give_the_bytes_of_one_writer(place, count):
    made = parts(place, count)
    store = joined(made[::-1], place / "out.zarr")
    assert content(store.path) == whole(place)
    assert store.templates("a") == ["one {}."]
    assert verify(store.path).ok
    assert content(joined(made, store.path).path) == whole(place)


def test_a_part_says_what_it_has_and_opens_as_nothing_else(place):
    _, second = parts(place, 2)
    store = Store.open(second, part=True)
    assert store.arrays == {}
    held = finished_arrays(store)
    assert [len(info.chunks) for info in held.values()] == [2, 2]  # of 4
    rows, bad = rows_of_part(store)
    assert rows == 6
    assert [entry["row"] for entry in bad] == [9, 13]
    checked = verify(second)
    assert checked.ok
    assert all("is finished in part 2 of 2: 2 of 2 chunks" in note for note in checked.notes)
    store_error(lambda: Store.open(second), "is only part 2 of 2 of a store")
    manifest = read_manifest(second)
    for wrong in ({"number": 3, "of": 2, "recipes": {}}, {"number": "1", "of": 2}, 7):
        manifest.dataset["part"] = wrong
        manifest.write(second)
        corruption(lambda: Store.open(second, part=True))


STEPS = ("adopt", "add_to_journal", "complete")


def stopped_at(step, number):
    """A method of the writer that ends the process, as far as the store can tell, when it is called that often."""
    real = getattr(ArrayWriter, step)
    calls = 0

    def method(self, *args):
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return real(self, *args)

    return method


@pytest.mark.parametrize("step", STEPS)
def test_a_join_that_is_stopped_anywhere_goes_on(place, monkeypatch, step):
    expected = whole(place)
    made = parts(place, 3)
    out = place / "out.zarr"
    for number in range(1, 9):
        with monkeypatch.context() as patch:
            patch.setattr(ArrayWriter, step, stopped_at(step, number))
            try:
                joined(made, out)
                break
            except KeyboardInterrupt:
                assert verify(out).ok
                assert set(Store.open(out).arrays) <= set(KEYS)
                # What a process leaves that is killed while it writes the manifest.
                (out / f".manifest.json.{2**22 + 1}-{number}.partial").write_bytes(b"half")
    assert content(joined(made, out).path) == expected


def test_inspect_names_the_join_that_completes_a_store(place, monkeypatch):
    made = parts(place, 2)
    monkeypatch.setattr(ArrayWriter, "complete", stopped_at("complete", 1))
    with pytest.raises(KeyboardInterrupt):
        joined(made, place / "out.zarr")
    shown = fedcache(f"inspect {place}/out.zarr").out
    assert "4 of 4 chunks; to resume, repeat the extract, ingest or join command" in shown


def toy_part(place, number, key, **words):
    part = StorePart(number, 2)
    store = new(part.place(place / "toy.zarr"), part)
    with writer(store, key, **words) as open_writer:
        for chunk in open_writer.missing():
            write(open_writer, chunk, KEYS[0])
        open_writer.complete()
    return store.path


def test_a_part_of_other_weights_is_refused_by_their_name(place):
    made = []
    for number in (1, 2):
        recipe = {"backbone": "a", "size": 32, "weights": f"{number}" * 4}
        made.append(toy_part(place, number, f"a-{number}0000000", recipe=recipe))
    store_error(lambda: open_parts(made), "weights is '2222' instead of '1111'")


@pytest.mark.parametrize("name", ["batch", "dtype", "code"])
def test_a_part_that_was_computed_differently_is_refused_by_the_difference(place, name):
    """The header of an array has a ``dtype`` too, that of the stored values."""
    made = [toy_part(place, n, KEYS[0], how={name: f"of-{n}"}) for n in (1, 2)]
    store_error(lambda: open_parts(made), f": {name} is 'of-2' instead of 'of-1'.")


def test_a_part_that_was_begun_and_has_no_array_is_unfinished(place):
    one, _ = parts(place, 2)
    empty = StorePart(2, 2)
    bare = new(empty.place(place / "bare.zarr"), empty)

    def unfinished(said):
        store_error(lambda: open_parts([one, bare.path]), said)

    unfinished("it has no features yet")
    fill(bare, KEYS[0])
    unfinished(f"has no {KEYS[1]}, but ")
    fill(bare, KEYS[1], chunks=1)
    unfinished(f"it has 1 of its 2 chunks of {KEYS[1]}")
    fill(bare, KEYS[1])
    assert len(open_parts([bare.path, one])) == 2
