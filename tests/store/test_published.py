"""Published stores: written as few files, and read from a folder, a web server and a bucket."""

import gzip
import os
import sys
import threading
import time

import numpy as np
import pytest
import toy_store
import xarray
import zarr
from command import fedcache, ok, python
from damage import flip_bit
from failing_command import must_fail
from files_now import bytes_of, times_of
from refusal import corruption, machine_error, refused, store_error
from toy_store import KEYS, whole
from web_server import web_server

import fedcache as fc
from fedcache.config import Home
from fedcache.errors import Exit, StoreError
from fedcache.progress import Silent
from fedcache.runs.garbage import find_garbage
from fedcache.store import byte_source, publish
from fedcache.store.byte_source import FolderSource, RemoteSource
from fedcache.store.chunks import chunk_path
from fedcache.store.mirror import FETCHERS, FOLDER, Mirror
from fedcache.store.store import Store, put_groups
from fedcache.store.verify import repair, verify
from fedcache.tables.groups import Group


@pytest.fixture
def toy(place, monkeypatch):
    """Two arrays of 4 chunks, with 3 chunks in a shard; groups, text features and a partition."""
    monkeypatch.setattr(publish, "SHARD_BYTES", 3 * 28)
    monkeypatch.setattr(byte_source, "WAITS", (0.0,) * 5)
    store = whole(place / "toy.zarr")
    put_groups(store, {"place": Group(np.arange(14, dtype=np.int32) % 3 - 1, ("here", "there"))})
    return store


@pytest.fixture
def published(toy, place):
    """A folder served as ``ADDRESS/toy``."""
    publication(toy, place / "web/toy")
    return place / "web/toy"


def publication(store, place, **words):
    return publish.publish(store, str(place), "# Toy\n", Silent(), **words)


@pytest.fixture
def server(published):
    with web_server(published.parent) as found:
        yield found


def opened(server):
    return Store.open(f"{server.address}/toy")


def assert_equal(one, other):
    """Both hold the same rows, features, texts, partitions and groups."""
    assert one.rows == other.rows
    assert one.arrays == other.arrays
    for column in ("uid", "label", "domain", "split", "ok"):
        assert np.array_equal(one.column(column), other.column(column))
    assert list(one.samples.name) == list(other.samples.name)
    assert one.quarantined() == other.quarantined()
    assert one.partitions == other.partitions
    assert one.groups == other.groups
    for name in one.partitions:
        assert bytes(one.partition_bytes(name)) == bytes(other.partition_bytes(name))
    for name in one.groups:
        assert one.group(name).values() == other.group(name).values()
    for name in one.texts:
        assert one.text(name).tobytes() == other.text(name).tobytes()
    some = np.array([13, 0, 13])
    for key in one.arrays:
        ours = one.reader(key)
        theirs = other.reader(key)
        assert ours.all().tobytes() == theirs.all().tobytes()
        assert ours.rows(some).tobytes() == theirs.rows(some).tobytes()


def test_chunks_of_a_shard_are_chunk_files_byte_for_byte(toy, published):
    for key in KEYS:
        array = f"features/{key}"
        files = [chunk_path(toy.path / array, number, 3).read_bytes() for number in range(3)]
        assert (published / f"{array}/c/0/0/0").read_bytes().startswith(b"".join(files))
        assert len(list((published / array).rglob("c/*/0/0"))) == 2


def test_the_index_of_a_shard_follows_the_chunks_of_the_array(place):
    """Shards of 128 MiB would have an index of 70 MB for chunks of 28 bytes."""
    publication(whole(place / "small.zarr"), place / "published")
    for key in KEYS:
        size = (place / f"published/features/{key}/c/0/0/0").stat().st_size
        assert size == 4 * 28 + 4 * 16 + 4  # chunks, their places, and a checksum of the places


def test_a_published_store_is_read_from_a_web_server(toy, server):
    assert_equal(toy, opened(server))
    before = len(server.asked)
    other = Store.open(f"{server.address}/toy/")
    assert_equal(toy, other)
    assert len(server.asked) == before + 1  # the manifest alone: everything else is in the home
    assert other.place == f"{server.address}/toy"


def test_a_server_without_ranges_sends_a_shard_once(toy, server):
    server.ranges = False
    store = opened(server)
    store.reader(KEYS[0]).all()
    shards = [path for path in server.asked if "/features/" in path]
    # two shards, and requests that were under way when the server refused the first range
    assert len(shards) <= 2 + FETCHERS
    assert_equal(toy, store)


@pytest.mark.parametrize(
    ("status", "code", "words", "asked"),
    [
        (404, Exit.STORE, "it has no manifest.json", 2),
        (403, Exit.STORE, "does not allow access", 1),
        (401, Exit.STORE, "does not allow access", 1),
        (503, Exit.ENVIRONMENT, "status 503", 6),
        (400, Exit.ENVIRONMENT, "status 400", 1),
    ],
)
def test_a_refusal_is_one_sentence(server, status, code, words, asked):
    server.status = status
    done = fedcache(f"inspect {server.address}/toy")
    assert done.code == code
    assert len(server.asked) == asked
    assert words in done.err
    assert "AWS" not in done.err  # a web server takes no credentials of a bucket


def test_a_server_that_does_not_answer_is_reported_before_it_is_tried_again(
    server, monkeypatch, caplog
):
    monkeypatch.setitem(byte_source.TIMEOUTS, "read_timeout", "1s")
    server.stalled = 1
    assert opened(server).rows == 14
    (line,) = caplog.messages
    assert line.startswith(f"{server.address}/toy does not answer (")


def test_an_address_without_a_server_or_a_store_is_one_sentence(toy, server):
    manifest = server.folder / "manifest.json"
    manifest.write_text("{}")
    corruption(lambda: Store.open(server.address), "does not match the checksum")
    for raw in (b"\n<html></html>", gzip.compress(b"{}")):
        manifest.write_bytes(raw)
        store_error(lambda: Store.open(server.address), "instead of manifest.json")
    machine_error(lambda: Store.open("http://127.0.0.1:1/toy"), "did not return manifest")


def test_offline_nothing_is_read_from_an_address(server, monkeypatch):
    monkeypatch.setenv("FEDCACHE_OFFLINE", "1")
    machine_error(lambda: opened(server), "downloads are disabled")
    assert server.asked == []


@pytest.mark.slow
def test_other_bytes_are_found_and_never_kept(toy, server):
    shard = server.folder / f"toy/features/{KEYS[0]}/c/0/0/0"
    flip_bit(shard, 30)  # in the second chunk
    address = f"{server.address}/toy"
    store = Store.open(address)
    assert len(store.reader(KEYS[0]).chunk(0))
    corruption(
        lambda: store.reader(KEYS[0]).chunk(1), "does not have the checksum that the manifest lists"
    )
    done = fedcache(f"verify {address}")
    assert done.code == Exit.CORRUPT
    assert f"features/{KEYS[0]}, chunk 1" in done.out
    flip_bit(shard, 30)
    assert_equal(toy, store)


@pytest.mark.parametrize("length", [0, 28, 30])
def test_a_shard_that_was_cut_off_is_damage_and_no_fault_of_the_network(server, length):
    store = opened(server)
    with (server.folder / f"toy/features/{KEYS[0]}/c/0/0/0").open("r+b") as shard:
        shard.truncate(length)
    corruption(
        lambda: store.reader(KEYS[0]).chunk(1), "does not have the checksum that the manifest lists"
    )


@pytest.mark.parametrize("damage", [b"", b"x" * 28, None])
def test_a_mirror_brings_lost_and_damaged_files_again(toy, server, damage):
    store = opened(server)
    for key in KEYS:
        store.reader(key).all()
    for file in store.path.rglob("*"):
        if file.is_file() and damage is None:
            file.unlink()
        elif file.is_file():
            file.write_bytes(damage)
    again = opened(server)
    assert again.path == store.path
    assert_equal(toy, again)


def test_the_room_of_mirrors_is_bounded(toy, server, monkeypatch, own_home):
    monkeypatch.setenv("FEDCACHE_REMOTE_CACHE", "90")
    monkeypatch.setattr("fedcache.store.mirror.KEPT", 2)
    store = opened(server)
    for number in (0, 1, 2, 3) * 2:
        for key in KEYS:
            reader = Store.open(store.path).reader(key)
            assert reader.chunk(number).tobytes() == toy.reader(key).chunk(number).tobytes()
            held = (own_home / FOLDER).rglob("features/*/c/*/0/0")
            assert sum(f.stat().st_size for f in held if f.is_file()) <= 90
    assert not Mirror(store.path, store.place, store.manifest).bring_all(KEYS[0])
    monkeypatch.setenv("FEDCACHE_REMOTE_CACHE", "much")
    refused(lambda: Store.open(store.path).reader(KEYS[0]).chunk(0), "FEDCACHE_REMOTE_CACHE")


def test_nothing_is_added_to_a_published_store(published):
    store = Store.open(published)
    changes = [
        lambda: store.put_partition("p", {"a": 1}),
        lambda: put_groups(store, {"who": Group.of(["me"] * 14)}),
        lambda: store.append_history({"event": "x"}),
        lambda: store.writer(
            "c", shape=(14, 1, 3), dtype="float16", chunk_rows=4, recipe={}, how={}
        ),
        lambda: repair(store.path),
        lambda: Store.create(published, store.samples, dataset=store.dataset),
    ]
    for change in changes:
        store_error(change, "published store")


def test_publishing_again_writes_no_shard_again(toy, published):
    shards = times_of(published, "features/*/c/*/0/0")
    again = publication(toy, published)
    assert times_of(published, "features/*/c/*/0/0") == shards
    files = [f for f in published.rglob("*") if f.is_file()]
    assert again.files == again.written + len(shards) + 1 == len(files)
    assert again.bytes == sum(f.stat().st_size for f in files)


def test_a_publication_of_a_publication_is_equal(server, place, published):
    publication(opened(server), place / "b")
    assert bytes_of(place / "b") == bytes_of(published)


@pytest.mark.parametrize(
    "address",
    ["http://me:secret@127.0.0.1:1/toy", "s3://me:secret@bucket/toy", "http://x/toy?key=secret"],
)
def test_an_address_with_a_password_is_refused(address):
    done = fedcache("inspect", address)
    assert done.code == Exit.USAGE
    assert "secret" not in done.err


@pytest.mark.parametrize("name", ["manifest.json", f"features/{KEYS[0]}/c/0/0/0", "README.md"])
@pytest.mark.parametrize("place_of_byte", [0.5, -1])
def test_publishing_again_replaces_a_damaged_file(toy, published, name, place_of_byte):
    before = bytes_of(published)
    flip_bit(published / name, place_of_byte)
    publication(toy, published)
    assert bytes_of(published) == before


def test_a_changed_store_takes_the_place_of_its_publication(toy, published):
    before = Store.open(published)
    assert_equal(toy, before)
    put_groups(toy, {"who": Group.of(["me", "you"] * 7)})
    publication(toy, published)
    now = Store.open(published)
    assert now.path != before.path
    assert_equal(toy, now)
    assert now.place == str(published)
    assert now.path.parent == Home.from_environment().root / FOLDER
    assert now.path.stat().st_mode & 0o077 == 0
    assert Store.open(now.path).address == str(published)  # as workers open it


def test_shards_of_an_interrupted_publication_of_other_values_are_replaced(
    toy, place, published, monkeypatch
):
    """In a bucket, where only the lengths of shards are compared."""
    monkeypatch.setattr(publish, "_holds_chunks", lambda *_: True)
    real_values = toy_store.values
    real_put = FolderSource.put
    stores = []
    for factor in (2, 3):
        monkeypatch.setattr(toy_store, "values", lambda key, by=factor: by * real_values(key))
        stores.append(whole(place / f"times-{factor}.zarr"))
    before = bytes_of(published)

    def put(source, name, *parts):
        if name == publish.ROOT:
            raise KeyboardInterrupt
        real_put(source, name, *parts)

    for interrupted in (stores[:1], stores):
        for store in interrupted:
            with monkeypatch.context() as patch:
                patch.setattr(FolderSource, "put", put)
                with pytest.raises(KeyboardInterrupt):
                    publication(store, published)
        assert bytes_of(published) != before
        publication(toy, published)
        found = bytes_of(published)
        assert found.pop(publish.MARK)
        assert found == {name: raw for name, raw in before.items() if name != publish.MARK}


def test_a_place_with_something_else_is_left_alone(toy, place, published):
    other = place / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    mine = Store.from_arrays({"mine": np.ones((4, 2), np.float32)}, labels=[0, 1, 0, 1])
    for store, target, said in (
        (toy, other, r"thesis\.txt"),
        (toy, toy.path, "is inside the store"),
        (toy, published / "inside", "is inside the store"),
        (toy, toy.path / "inside", "is inside the store"),
        (mine, published, "a publication of another dataset"),
    ):
        with pytest.raises(StoreError, match=said):
            publication(store, target)
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]
    (other / "thesis.txt").rename(other / publish.MARK)
    store_error(
        lambda: publication(toy, other),
        f"delete everything in {other}",
        f"fedcache publish STORE {other}-published",
    )


@pytest.mark.slow
def test_a_killed_publication_is_no_store_and_is_completed(toy, place, published, monkeypatch):
    """Killed after every single object, in turn; then completed to the same bytes."""
    all_files = bytes_of(published)
    real = FolderSource.put
    for left in range(len(all_files)):
        target = place / f"killed-{left}"
        counted = iter(range(left))

        def put(source, name, *parts, counted=counted):
            if next(counted, None) is None:
                raise KeyboardInterrupt
            real(source, name, *parts)

        monkeypatch.setattr(FolderSource, "put", put)
        with pytest.raises(KeyboardInterrupt):
            publication(toy, target)
        monkeypatch.setattr(FolderSource, "put", real)
        store_error(lambda target=target: Store.open(target))
        if left < len(all_files) - 2:  # where the manifest alone is missing, all arrays are there
            with pytest.raises(FileNotFoundError):
                zarr.open_group(str(target), mode="r")
        publication(toy, target)
        assert bytes_of(target) == all_files


def test_names_become_numbers(toy, place):
    target = place / "anonymous"
    publication(toy, target, anonymous_names=True)
    found = Store.open(target)
    assert list(found.samples.name) == [f"{row:02}" for row in range(14)]
    assert [e["name"] for e in found.quarantined()] == ["01", "09", "13"]
    assert b"train/" not in b"".join(bytes_of(target).values())
    for key in KEYS:
        assert found.reader(key).all().tobytes() == toy.reader(key).all().tobytes()
    assert verify(found.path).ok
    before = bytes_of(target)
    refused(lambda: publication(toy, target), "--anonymous-names")
    assert bytes_of(target) == before
    # A publication that was killed before its manifest leaves the mark, which is enough.
    (target / "manifest.json").unlink()
    refused(lambda: publication(toy, target), "--anonymous-names")


@pytest.mark.slow
def test_the_command_writes_a_card(toy, place):
    target = place / "made"
    done = ok(f"publish {toy.path} {target}")
    assert done.data["files"] == sum(f.is_file() for f in target.rglob("*"))
    card = (target / "README.md").read_text(encoding="utf-8")
    assert "14 names in 1 folders" in card
    assert "train/ß" not in card
    ok(f"publish {toy.path} {target} --anonymous-names")
    assert ok(f"inspect {target}").data["path"] == str(target)


def test_a_plain_copy_of_a_store_is_read_from_a_server_too(toy, place):
    with web_server(place) as server:
        assert_equal(toy, Store.open(f"{server.address}/toy.zarr"))


@pytest.mark.slow
def test_python_trains_on_a_published_store(toy, server):
    labels = np.arange(60) % 3
    x = np.eye(3, dtype=np.float32)[labels]
    made = Store.from_arrays({"mine": x}, labels=labels)
    publication(made, server.folder / "mine")
    address = f"{server.address}/mine"
    parts = fc.partition(address, "iid", clients=3)
    here = fc.train("fedncm", made, fc.partition(made, "iid", clients=3), fresh=True)
    for store in (Store.open(address), address):
        assert fc.train("fedncm", store, parts).result["accuracy"] == here.result["accuracy"]
    refused(lambda: fc.extract("digits", ["glyph-clip"], store=address), "local path")


@pytest.mark.slow
def test_the_partition_of_a_published_store_needs_a_file(server, place):
    words = ("partition --scheme iid --clients 2 --store", f"{server.address}/toy")
    must_fail("", *words)
    file = place / "iid.partition"
    assert ok(*words, "-o", file).data["store"] == words[1]
    assert file.is_file()
    assert f"--method fed3r --store {words[1]}" in fedcache(*words, "-o", file).out


def test_two_objects_never_take_the_place_of_each_other(place):
    source = FolderSource(place / "s")
    assert source.put_if_absent("a/b", b"1")
    assert not source.put_if_absent("a/b", b"2")
    assert source.get("a/b") == b"1"
    assert [p.name for p in (place / "s/a").iterdir()] == ["b"]


def test_gc_finds_mirrors_that_nobody_opens(published, own_home):
    def garbage():
        found = find_garbage(Home(own_home), ("leftovers", "given-up"), idle_days=1)
        return {g.path for g in found}

    path = Store.open(published).path
    assert garbage() == set()
    os.utime(path / "origin.json", (0, 0))
    left = path / ".0.999999999-ab.partial"
    left.write_bytes(b"x")
    assert garbage() == {path, left}
    Store.open(published)  # opened again, it stays
    assert path not in garbage()


def test_a_forked_process_fetches_nothing(toy, server, monkeypatch):
    store = opened(server)
    rows = store.torch_dataset(KEYS[0], split=None)
    asked = len(server.asked)
    monkeypatch.setattr(RemoteSource, "_process", 1)  # as in a child of the process that opened it
    read = [rows[number][0].numpy() for number in range(len(rows))]
    assert np.array_equal(read, toy.Xy(KEYS[0], split=None)[0])
    assert len(server.asked) == asked
    machine_error(lambda: store.reader(KEYS[1]).chunk(0), "forked process")


class Absent:
    """Finds no library of the extra, as on a machine without it."""

    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("obstore", "zarr"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_without_the_extra_the_command_that_installs_it_is_named(toy, place, monkeypatch):
    for module in ("obstore", "obstore.store", "zarr"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    for act in (lambda: Store.open("s3://bucket/digits"), lambda: publication(toy, place / "x")):
        machine_error(act, "pip install 'fedcache[remote]'")


@pytest.mark.slow
def test_opening_a_local_store_imports_no_library_of_the_extra(toy):
    code = (
        f"import sys, fedcache as fc; fc.Store.open({str(toy.path)!r}).reader({KEYS[0]!r}).all();"
        "assert not {'obstore', 'zarr', 'torch'} & sys.modules.keys()"
    )
    python(code)


@pytest.mark.slow
def test_zarr_and_xarray_read_features_and_rows(toy, server):
    address = f"{server.address}/toy"
    found = zarr.open_group(address, mode="r")
    assert sorted(name for name, _ in found["features"].arrays()) == list(KEYS)
    assert found["samples/name"][3] == toy.samples.name[3]
    both = xarray.merge([xarray.open_zarr(address, group=name) for name in ("features", "samples")])
    assert both.sizes["row"] == 14
    for key in KEYS:
        features = toy.reader(key).all()
        assert np.asarray(found[f"features/{key}"][:]).tobytes() == features.tobytes()
        assert np.array_equal(both[key].values, features, equal_nan=True)
    assert both["label"].values.tolist() == toy.samples.label.tolist()


def test_an_interruption_ends_requests_that_would_be_tried_again(monkeypatch):
    """Other requests wait a minute before their next attempt when one call ends with Ctrl-C."""
    monkeypatch.setattr(byte_source, "WAITS", (60.0,) * 5)
    source = RemoteSource("http://127.0.0.1:9")
    failed = threading.Event()
    monkeypatch.setattr(byte_source, "_may_pass", lambda error: failed.set() or True)

    def call(number):
        if number == 0:
            assert failed.wait(60)
            raise KeyboardInterrupt
        source.get("manifest.json")

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        byte_source.in_threads(4, call, range(40))
    assert time.monotonic() - began < 25
