"""Published stores: written as few files, and read from a folder, a web server and a bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from command import fedcache, ok
from toy_store import KEYS, whole
from web_server import WebServer, web_server

import fedcache as fc
from fedcache.config import Home
from fedcache.errors import CorruptionError, Exit, FedcacheError, StoreError, UsageError
from fedcache.progress import Silent
from fedcache.runs.garbage import find_garbage
from fedcache.store import byte_source, publish
from fedcache.store.byte_source import FolderSource, RemoteSource
from fedcache.store.chunks import chunk_path
from fedcache.store.mirror import FOLDER, Mirror, local_place
from fedcache.store.store import Store, put_groups
from fedcache.store.verify import repair, verify
from fedcache.tables.groups import Group


@pytest.fixture
def toy(place: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Two arrays of 4 chunks, of which 3 make a shard; groups, text features and a partition."""
    monkeypatch.setattr(publish, "SHARD_BYTES", 3 * 28)
    monkeypatch.setattr(byte_source, "WAITS", (0.0,) * 5)
    store = whole(place / "toy.zarr")
    put_groups(store, {"place": Group(np.arange(14, dtype=np.int32) % 3 - 1, ("here", "there"))})
    return store


@pytest.fixture
def published(toy: Store, place: Path) -> Path:
    """A folder served as ``ADDRESS/toy``."""
    publish.publish(toy, str(place / "web" / "toy"), "# Toy\n", Silent())
    return place / "web" / "toy"


@pytest.fixture
def server(published: Path) -> Iterator[WebServer]:
    with web_server(published.parent) as found:
        yield found


def assert_equal(one: Store, other: Store) -> None:
    """Both hold the same rows, features, texts, partitions and groups."""
    assert one.rows == other.rows
    assert one.arrays == other.arrays
    for column in ("uid", "label", "domain", "split", "ok"):
        assert np.array_equal(one.column(column), other.column(column))
    assert list(one.samples.name) == list(other.samples.name)
    assert one.quarantined() == other.quarantined()
    assert (one.partitions, one.groups) == (other.partitions, other.groups)
    for name in one.partitions:
        assert bytes(one.partition_bytes(name)) == bytes(other.partition_bytes(name))
    for name in one.groups:
        assert one.group(name).values() == other.group(name).values()
    for name in one.texts:
        assert one.text(name).tobytes() == other.text(name).tobytes()
    for key in one.arrays:
        assert one.reader(key).all().tobytes() == other.reader(key).all().tobytes()
        assert one.reader(key).rows(np.array([13, 0, 13])).tobytes() == (
            other.reader(key).rows(np.array([13, 0, 13])).tobytes()
        )


def test_a_published_folder_is_the_store(toy: Store, published: Path) -> None:
    found = Store.open(published)
    assert_equal(toy, found)
    assert found.place == str(published)
    assert found.path.parent.name == FOLDER
    again = Store.open(found.path)  # as workers open it, by the path of its mirror
    assert again.address == str(published)


def test_chunks_of_a_shard_are_chunk_files_byte_for_byte(toy: Store, published: Path) -> None:
    for key in KEYS:
        shard = (published / f"features/{key}/c/0/0/0").read_bytes()
        files = [
            chunk_path(toy.path / "features" / key, number, 3).read_bytes() for number in range(3)
        ]
        assert shard.startswith(b"".join(files))
        assert len(list((published / f"features/{key}").rglob("c/*/0/0"))) == 2


def test_a_published_store_is_read_from_a_web_server(toy: Store, server: WebServer) -> None:
    assert_equal(toy, Store.open(f"{server.address}/toy"))
    before = len(server.asked)
    other = Store.open(f"{server.address}/toy/")
    assert_equal(toy, other)
    assert len(server.asked) == before + 1  # the manifest alone: everything else is in the home
    assert other.place == f"{server.address}/toy"


def test_a_server_without_ranges_sends_a_shard_once(toy: Store, server: WebServer) -> None:
    server.ranges = False
    store = Store.open(f"{server.address}/toy")
    store.reader(KEYS[0]).all()
    shards = [path for path in server.asked if "/features/" in path]
    assert len(shards) <= 2 + byte_source_threads()  # two shards, and first requests for a range
    assert_equal(toy, store)


def byte_source_threads() -> int:
    """Requests that may be under way when the server refuses the first range."""
    from fedcache.store.mirror import FETCHERS

    return FETCHERS


@pytest.mark.slow
def test_a_server_that_fails_every_third_request_costs_time_alone(
    toy: Store, server: WebServer
) -> None:
    server.fail_every = 3
    assert_equal(toy, Store.open(f"{server.address}/toy"))
    assert verify(local_place(f"{server.address}/toy")).ok


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, Exit.STORE, "there is no manifest.json"),
        (403, Exit.STORE, "does not allow access"),
        (401, Exit.STORE, "does not allow access"),
        (503, Exit.ENVIRONMENT, "status 503"),
        (400, Exit.ENVIRONMENT, "status 400"),
    ],
)
def test_a_refusal_is_one_sentence(server: WebServer, status: int, code: Exit, words: str) -> None:
    server.status = status
    done = fedcache("inspect", f"{server.address}/toy")
    assert done.code == code
    assert words in done.err
    assert len(server.asked) == {503: 6, 404: 2}.get(status, 1)


def test_an_address_without_a_server_or_a_store_is_one_sentence(
    toy: Store, server: WebServer
) -> None:
    (server.folder / "manifest.json").write_text("<html></html>")
    with pytest.raises(CorruptionError, match="does not have the digest"):
        Store.open(server.address)
    with pytest.raises(FedcacheError, match="gave no manifest") as caught:
        Store.open("http://127.0.0.1:1/toy")
    assert caught.value.code == Exit.ENVIRONMENT


def test_offline_nothing_is_read_from_an_address(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCACHE_OFFLINE", "1")
    with pytest.raises(FedcacheError, match="downloads are off"):
        Store.open(f"{server.address}/toy")
    assert server.asked == []


@pytest.mark.slow
def test_other_bytes_are_found_and_never_kept(toy: Store, server: WebServer) -> None:
    shard = server.folder / "toy" / f"features/{KEYS[0]}/c/0/0/0"
    raw = bytearray(shard.read_bytes())
    raw[30] ^= 1  # in the second chunk
    shard.write_bytes(raw)
    address = f"{server.address}/toy"
    store = Store.open(address)
    assert len(store.reader(KEYS[0]).chunk(0))
    with pytest.raises(CorruptionError, match="does not have the checksum of the manifest"):
        store.reader(KEYS[0]).chunk(1)
    done = fedcache("verify", address)
    assert done.code == Exit.CORRUPT
    assert f"features/{KEYS[0]}, chunk 1" in done.out
    raw[30] ^= 1
    shard.write_bytes(raw)
    assert_equal(toy, store)


def test_a_mirror_that_lost_or_damaged_a_chunk_brings_it_again(
    toy: Store, server: WebServer
) -> None:
    store = Store.open(f"{server.address}/toy")
    store.reader(KEYS[0]).all()
    chunks = sorted((store.path / "features" / KEYS[0]).rglob("c/*/0/0"))
    assert len(chunks) == 4
    chunks[0].unlink()
    chunks[1].write_bytes(b"x" * 28)
    chunks[2].write_bytes(b"")
    assert_equal(toy, Store.open(f"{server.address}/toy"))


def test_the_room_of_mirrors_is_bounded(
    toy: Store, server: WebServer, monkeypatch: pytest.MonkeyPatch, own_home: Path
) -> None:
    monkeypatch.setenv("FEDCACHE_REMOTE_CACHE", "90")
    monkeypatch.setattr("fedcache.store.mirror.KEPT", 2)
    store = Store.open(f"{server.address}/toy")
    for _ in range(2):
        for number in (0, 1, 2, 3):
            for key in KEYS:
                reader = Store.open(store.path).reader(key)
                assert reader.chunk(number).tobytes() == toy.reader(key).chunk(number).tobytes()
                held = [f for f in (own_home / FOLDER).rglob("features/*/c/*/0/0") if f.is_file()]
                assert sum(f.stat().st_size for f in held) <= 90
    assert not Mirror(store.path, store.place, store.manifest).bring_all(KEYS[0])
    monkeypatch.setenv("FEDCACHE_REMOTE_CACHE", "much")
    with pytest.raises(UsageError, match="FEDCACHE_REMOTE_CACHE"):
        Store.open(store.path).reader(KEYS[0]).chunk(0)


def test_nothing_is_added_to_a_published_store(published: Path) -> None:
    store = Store.open(published)
    changes: list[Callable[[], object]] = [
        lambda: store.put_partition("p", {"a": 1}),
        lambda: put_groups(store, {"who": Group(np.zeros(14, np.int32), ("me",))}),
        lambda: store.append_history({"event": "x"}),
        lambda: store.writer(
            "c", shape=(14, 1, 3), dtype="float16", chunk_rows=4, recipe={}, how={}
        ),
        lambda: repair(store.path),
        lambda: Store.create(published, store.samples, dataset=store.dataset),
    ]
    for change in changes:
        with pytest.raises(StoreError, match="published store"):
            change()


def test_publishing_again_writes_no_shard_again(toy: Store, published: Path) -> None:
    shards = {f: f.stat().st_mtime_ns for f in published.rglob("features/*/c/*/0/0")}
    again = publish.publish(toy, str(published), "# Toy\n", Silent())
    assert {f: f.stat().st_mtime_ns for f in shards} == shards
    assert again.files == again.written + len(shards) + 1
    assert again.files == sum(f.is_file() for f in published.rglob("*"))
    assert again.bytes == sum(
        f.stat().st_size for f in published.rglob("*") if f.is_file() and f.name != publish.MARK
    )


def test_an_address_with_a_password_is_refused() -> None:
    done = fedcache("inspect", "http://me:secret@127.0.0.1:1/toy")
    assert (done.code, "secret" in done.err) == (Exit.USAGE, False)


@pytest.mark.parametrize("name", ["manifest.json", f"features/{KEYS[0]}/c/0/0/0", "README.md"])
@pytest.mark.parametrize("place_of_byte", [30, -1])
def test_publishing_again_replaces_a_damaged_file(
    toy: Store, published: Path, name: str, place_of_byte: int
) -> None:
    before = contents(published)
    raw = bytearray(before[name])
    raw[place_of_byte % len(raw)] ^= 1
    (published / name).write_bytes(raw)
    publish.publish(toy, str(published), "# Toy\n", Silent())
    assert contents(published) == before


def test_a_publication_of_a_publication_is_equal(
    server: WebServer, place: Path, published: Path
) -> None:
    publish.publish(Store.open(f"{server.address}/toy"), str(place / "b"), "# Toy\n", Silent())
    assert contents(place / "b") == contents(published)


def test_a_changed_store_takes_the_place_of_its_publication(toy: Store, published: Path) -> None:
    before = Store.open(published)
    first = {f: f.stat().st_mtime_ns for f in published.rglob("features/*/c/*/0/0")}
    put_groups(toy, {"who": Group(np.arange(14, dtype=np.int32) % 2, ("me", "you"))})
    publish.publish(toy, str(published), "# Toy\n", Silent())
    now = Store.open(published)
    assert now.path != before.path
    assert_equal(toy, now)
    assert {
        f: f.stat().st_mtime_ns for f in first
    } == first  # the same chunks are not written again
    mark = json.loads((published / publish.MARK).read_bytes())
    assert mark["replaces"] is True


def test_a_place_with_something_else_is_left_alone(
    toy: Store, place: Path, published: Path
) -> None:
    other = place / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"thesis\.txt"):
        publish.publish(toy, str(other), "", Silent())
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]
    with pytest.raises(StoreError, match="is no publication of this store"):
        publish.publish(toy, str(toy.path), "", Silent())
    (other / "thesis.txt").unlink()
    (other / publish.MARK).write_bytes(
        (published / publish.MARK).read_bytes().replace(b"ab", b"ac")
    )
    with pytest.raises(StoreError, match="does not have the digest"):
        publish.publish(toy, str(other), "", Silent())
    with pytest.raises(StoreError, match="holds a file"):
        publish.publish(toy, str(other / publish.MARK), "", Silent())
    for store in (toy.path, published):
        with pytest.raises(StoreError, match="is inside the store"):
            publish.publish(toy, str(store / "inside"), "", Silent())
        assert not (store / "inside").exists()
    mine = Store.from_arrays({"mine": np.ones((4, 2), np.float32)}, labels=[0, 1, 0, 1])
    with pytest.raises(StoreError, match="a publication of another dataset"):
        publish.publish(mine, str(published), "", Silent())


@pytest.mark.slow
def test_a_killed_publication_is_no_store_and_is_completed(
    toy: Store, place: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after every single object, in turn; then completed to the same bytes."""
    all_files = contents(published)
    real = FolderSource.put
    for left in range(len(all_files)):
        target = place / f"killed-{left}"
        written = []

        def put(self: FolderSource, name: str, *parts: Any, written: list[str] = written) -> None:
            if len(written) >= left:  # noqa: B023
                raise KeyboardInterrupt
            real(self, name, *parts)
            written.append(name)

        monkeypatch.setattr(FolderSource, "put", put)
        with pytest.raises(KeyboardInterrupt):
            publish.publish(toy, str(target), "# Toy\n", Silent())
        monkeypatch.setattr(FolderSource, "put", real)
        with pytest.raises(StoreError):
            Store.open(target)
        if left < len(all_files) - 2:  # where the manifest alone is missing, all arrays are there
            with pytest.raises(FileNotFoundError):
                zarr.open_group(str(target), mode="r")
        publish.publish(toy, str(target), "# Toy\n", Silent())
        assert contents(target) == all_files


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_names_become_numbers(toy: Store, place: Path) -> None:
    target = place / "anonymous"
    publish.publish(toy, str(target), "", Silent(), anonymous_names=True)
    found = Store.open(target)
    assert list(found.samples.name) == [f"{row:02}" for row in range(14)]
    assert [e["name"] for e in found.quarantined()] == ["01", "09", "13"]
    assert b"train/" not in b"".join(contents(target).values())
    for key in KEYS:
        assert found.reader(key).all().tobytes() == toy.reader(key).all().tobytes()
    assert verify(found.path).ok


@pytest.mark.slow
def test_the_command_writes_a_card(toy: Store, place: Path) -> None:
    target = place / "made"
    done = ok("publish", toy.path, target)
    assert done.data["files"] == sum(f.is_file() for f in target.rglob("*"))
    card = (target / "README.md").read_text(encoding="utf-8")
    for words in ("14 ", "licence of the weights: not known", "14 names in 1 folders", "sha256"):
        assert words in card
    assert "train/ß" not in card
    done = ok("publish", toy.path, target, "--anonymous-names")
    assert "were replaced by numbers" in (target / "README.md").read_text(encoding="utf-8")
    assert ok("inspect", target).data["path"] == str(target)
    assert fedcache("publish", place / "none.zarr", target).code == Exit.STORE


def test_a_store_of_a_gigabyte_has_at_most_fifty_files() -> None:
    """Counted for the layout; ``test_chunks_of_a_shard_are_chunk_files_byte_for_byte`` looks at real shards."""
    rows, width = 500_000, 1024  # 1.02 GB of float16
    chunk = 512 * width * 2
    chunks = -(-rows // 512)
    per_shard = publish.SHARD_BYTES // (chunk + 4)
    shards = -(-chunks // per_shard)
    fixed = 31 - 4 - 3  # of the toy store without its shards, and without groups and partitions
    assert shards == 8
    assert shards + fixed <= 50


@pytest.mark.slow
def test_zarr_finds_every_array_in_one_request(toy: Store, server: WebServer) -> None:
    found = zarr.open_group(f"{server.address}/toy", mode="r")
    assert sorted(name for name, _ in found["features"].arrays()) == list(KEYS)
    for key in KEYS:
        assert np.asarray(found[f"features/{key}"][:]).tobytes() == toy.reader(key).all().tobytes()
    assert found["samples/name"][3] == toy.samples.name[3]


@pytest.mark.slow
def test_xarray_reads_features_and_rows(toy: Store, server: WebServer) -> None:
    import xarray

    features = xarray.open_zarr(f"{server.address}/toy", group="features")
    rows = xarray.open_zarr(f"{server.address}/toy", group="samples")
    both = xarray.merge([features, rows])
    assert both.sizes["row"] == 14
    assert np.array_equal(both[KEYS[0]].values, toy.reader(KEYS[0]).all(), equal_nan=True)
    assert both["label"].values.tolist() == toy.samples.label.tolist()


def test_a_plain_copy_of_a_store_is_read_from_a_server_too(toy: Store, place: Path) -> None:
    with web_server(place) as server:
        assert_equal(toy, Store.open(f"{server.address}/toy.zarr"))


@pytest.mark.slow
def test_python_trains_on_a_published_store(toy: Store, server: WebServer, own_home: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    x = rng.standard_normal((60, 4)).astype(np.float32) + labels[:, None]
    made = Store.from_arrays({"mine": x}, labels=labels)
    publish.publish(made, str(server.folder / "mine"), "", Silent())
    address = f"{server.address}/mine"
    parts = fc.partition(address, "iid", clients=3)
    there = fc.train("fedncm", Store.open(address), parts)
    here = fc.train("fedncm", made, fc.partition(made, "iid", clients=3), fresh=True)
    assert there.result["accuracy"] == here.result["accuracy"]
    assert fc.train("fedncm", address, parts).result["accuracy"] == here.result["accuracy"]
    assert list((own_home / "partitions").glob("*.partition"))
    with pytest.raises(UsageError, match="local path"):
        fc.extract("digits", ["glyph-clip"], store=address)


@pytest.mark.slow
def test_the_partition_of_a_published_store_needs_a_file(server: WebServer, place: Path) -> None:
    address = f"{server.address}/toy"
    done = fedcache("partition --scheme iid --clients 2 --store", address)
    assert done.code == Exit.USAGE
    file = place / "iid.partition"
    told = ok("partition --scheme iid --clients 2 --store", address, "-o", file)
    assert told.data["name"] == str(file)
    assert told.data["store"] == address
    assert file.is_file()
    shown = fedcache("partition --scheme iid --clients 2 --store", address, "-o", file).out
    assert f"--method fed3r --store {address}" in shown


def test_two_objects_never_take_the_place_of_each_other(place: Path) -> None:
    source = FolderSource(place / "s")
    assert source.put_if_absent("a/b", b"1")
    assert not source.put_if_absent("a/b", b"2")
    assert source.get("a/b") == b"1"
    assert source.get_range("a/b", 0, 1) == b"1"
    assert source.size("a/c") is None
    assert [p.name for p in (place / "s" / "a").iterdir()] == ["b"]
    with pytest.raises(FileNotFoundError):
        source.get("a/b/c")


def test_gc_finds_mirrors_that_nobody_opens(published: Path, own_home: Path) -> None:
    path = Store.open(published).path
    assert [g.path for g in find_garbage(Home(own_home), ("given-up",), idle_days=1)] == []
    os.utime(path / "origin.json", (0, 0))
    left = path / ".0.999999999-ab.partial"
    left.write_bytes(b"x")
    found = find_garbage(Home(own_home), ("leftovers", "given-up"), idle_days=1)
    assert {g.path for g in found} == {path, left}
    Store.open(published)  # opened again, it stays
    assert [g.path for g in find_garbage(Home(own_home), ("given-up",), idle_days=1)] == []


def test_the_home_of_a_mirror_is_private(published: Path, own_home: Path) -> None:
    path = Store.open(published).path
    assert path.parent == Home.from_environment().root / FOLDER
    assert path.stat().st_mode & 0o077 == 0


def test_a_forked_process_fetches_nothing(
    toy: Store, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(f"{server.address}/toy")
    rows = store.torch_dataset(KEYS[0], split=None)
    asked = len(server.asked)
    monkeypatch.setattr(RemoteSource, "_process", 1)  # as in a child of the process that opened it
    read = [rows[number][0].numpy() for number in range(len(rows))]
    assert np.array_equal(read, toy.Xy(KEYS[0], split=None)[0])
    assert len(server.asked) == asked
    with pytest.raises(FedcacheError, match="forked process"):
        store.reader(KEYS[1]).chunk(0)


class Absent:
    """Finds no library of the extra, as on a machine without it."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in ("obstore", "zarr"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_without_the_extra_the_command_that_installs_it_is_named(
    toy: Store, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("obstore", "obstore.store", "zarr"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    for act in (
        lambda: Store.open("s3://bucket/digits"),
        lambda: publish.publish(toy, str(place / "x"), "", Silent()),
    ):
        with pytest.raises(FedcacheError) as caught:
            act()
        assert caught.value.code == Exit.ENVIRONMENT
        assert caught.value.hint == "pip install 'fedcache[remote]'"


@pytest.mark.slow
def test_opening_a_local_store_imports_no_library_of_the_extra(toy: Store) -> None:
    code = (
        f"import sys, fedcache as fc; fc.Store.open({str(toy.path)!r}).reader({KEYS[0]!r}).all();"
        "assert not {'obstore', 'zarr', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
