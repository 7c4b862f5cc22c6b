"""The store's promises: whole or refused, the same bytes however interrupted, readable by any Zarr reader."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcache.errors import Exit, FedcacheError
from fedcache.store import files
from fedcache.store.export import write_shards
from fedcache.store.store import Samples, Store
from fedcache.store.verify import verify

N, D, ROWS = 21, 5, 4  # 6 chunks, the last with one row
KEYS = ("a-00000000", "b-00000000")
BAD = {6: "not an image", 20: "truncated"}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where the system has such a place: these tests make thousands of fsyncs and test none of their cost."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() and os.access(memory, os.W_OK) else None) as made:
        yield Path(made)


def samples(n: int = N) -> Samples:
    i = np.arange(n)
    uid = np.stack([np.frombuffer(hashlib.sha256(bytes([k])).digest()[:16], np.uint8) for k in range(n)])
    names = tuple(f"train/ü/{k:03}.png" for k in range(n))
    return Samples(uid, names, i % 3 - (i == 5), i % 2, i % 3 == 0, np.ones(n), ("x", "y", "z"), ("ink", "chalk"))


def values(key: str, n: int = N) -> np.ndarray[Any, Any]:
    x = np.random.default_rng(KEYS.index(key)).standard_normal((n, 1, D)).astype(np.float32)
    x[[r for r in BAD if r < n]] = np.nan
    return x


def create(path: Path) -> Store:
    return Store.create(path, samples(), dataset={"slug": "toy", "digest": "ab" * 32, "template": None})


def fill(store: Store, key: str, chunks: int = 99) -> None:
    x = values(key)
    with store.writer(
        key, shape=x.shape, dtype="float16", chunk_rows=ROWS, recipe={"backbone": key[0]}, how={"batch": 4}
    ) as writer:
        for chunk in writer.missing()[:chunks]:
            writer.write(chunk, x[chunk * ROWS : (chunk + 1) * ROWS], BAD)
        if not writer.missing():
            writer.complete()


def whole(path: Path) -> Store:
    store = create(path)
    for key in KEYS:
        fill(store, key)
    store.put_text("a", ["a photo of a {}."], np.eye(3, D, dtype=np.float32), {"backbone": "a", "weights": "none"})
    store.put_partition("p", {"clients": []})
    return Store.open(path)


def content(path: Path) -> dict[str, str]:
    return {
        str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(path.rglob("*"))
        if f.is_file() and f.name != "history.jsonl" and "locks" not in f.parts
    }


def test_zarr_reads_every_array(tmp_path: Path) -> None:
    store = whole(tmp_path / "s.zarr")
    group = zarr.open_group(store.path, mode="r")
    for key in KEYS:
        assert np.array_equal(group[f"features/{key}"][:], values(key).astype(np.float16), equal_nan=True)
        assert np.array_equal(store.reader(key).all(), values(key).astype(np.float16), equal_nan=True)
    assert list(group["samples/name"][:]) == list(store.samples.name)
    for column in ("uid", "label", "domain", "split", "ok"):
        assert np.array_equal(group[f"samples/{column}"][:], getattr(store.samples, column))
    entry = store.texts["a"][0]["id"]
    assert np.array_equal(group[f"text/a/{entry}"][:], store.text("a"))
    assert store.rows_ok == N - len(BAD)
    assert [e["row"] for e in store.quarantined()] == sorted(BAD)


def test_zarr_raises_on_a_flipped_bit(tmp_path: Path) -> None:
    store = whole(tmp_path / "s.zarr")
    chunk = store.path / "features" / KEYS[0] / "c/1/0/0"
    raw = bytearray(chunk.read_bytes())
    raw[3] ^= 1
    chunk.write_bytes(raw)
    with pytest.raises(ValueError, match=r"(?i)checksum"):
        zarr.open_group(store.path, mode="r")[f"features/{KEYS[0]}"][:]


def test_literal_bytes_of_a_tiny_store(tmp_path: Path) -> None:
    one = Samples(
        np.arange(16, dtype=np.uint8)[None],
        ("a",),
        np.array([1]),
        np.array([0]),
        np.array([1]),
        np.array([1]),
        ("x", "y"),
        ("d",),
    )
    store = Store.create(tmp_path / "t.zarr", one, dataset={"slug": "t", "digest": "00", "template": None})
    with store.writer(
        "k-0", shape=(1, 1, 2), dtype="float16", chunk_rows=2, recipe={"backbone": "k"}, how={"batch": 2}
    ) as w:
        w.write(0, np.array([[[1.0, -2.0]]], np.float32))
        w.complete()
    read = {name: (store.path / name).read_bytes() for name in content(store.path)}
    # 1.0 = 3c00, -2.0 = c000, the row beyond N is NaN = 7e00; then the crc32c of those eight bytes
    assert read["features/k-0/c/0/0/0"].hex() == "003c00c0007e007e" + "5e6995fd"
    assert read["samples/label/c/0"][:4].hex() == "01000000"
    assert read["samples/name/c/0"][:9].hex() == "01000000" + "01000000" + "61"
    assert read["samples/uid/c/0/0"][:16] == bytes(range(16))
    meta = json.loads(read["features/k-0/zarr.json"])
    assert meta["codecs"] == [{"configuration": {"endian": "little"}, "name": "bytes"}, {"name": "crc32c"}]
    assert meta["chunk_grid"]["configuration"]["chunk_shape"] == [2, 1, 2]
    manifest = json.loads(read["manifest.json"])
    assert manifest["format"] == 1
    assert sorted(manifest) == [
        "arrays",
        "classes",
        "dataset",
        "domains",
        "files",
        "format",
        "rows",
        "rows_ok",
        "samples",
        "sha256",
        "texts",
    ]
    assert set(read) == {
        "zarr.json",
        "manifest.json",
        "features/zarr.json",
        "features/k-0/zarr.json",
        "features/k-0/c/0/0/0",
        "text/zarr.json",
        "samples/zarr.json",
        *(f"samples/{c}/zarr.json" for c in ("uid", "label", "domain", "split", "ok", "name")),
        *(f"samples/{c}/c/0" for c in ("label", "domain", "split", "ok", "name")),
        "samples/uid/c/0/0",
    }


def test_stores_are_private(tmp_path: Path) -> None:
    assert create(tmp_path / "s.zarr").path.stat().st_mode & 0o777 == 0o700


def test_the_place_and_the_hour_leave_no_trace(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    assert content(whole(tmp_path / "a.zarr").path) == content(whole(tmp_path / "deeper" / "b.zarr").path)


@given(index=st.lists(st.integers(0, N - 1), max_size=60))
@settings(max_examples=40)
def test_gathered_rows_are_those_asked_for(tmp_path_factory: pytest.TempPathFactory, index: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "gather.zarr"
    store = Store.open(path) if path.exists() else whole(path)
    x = values(KEYS[0]).astype(np.float16)
    got = store.reader(KEYS[0]).rows(np.array(index, np.int64))
    assert np.array_equal(got, x[index], equal_nan=True)


@pytest.mark.slow
def test_every_single_bit_flip_is_found(tmp_path: Path) -> None:
    path = whole(tmp_path / "s.zarr").path
    everything = [
        f for f in sorted(path.rglob("*")) if f.is_file() and f.name != "history.jsonl" and "locks" not in f.parts
    ]
    draw = random.Random(0)
    for _ in range(300):
        file = draw.choice(everything)
        raw = file.read_bytes()
        if not raw:
            continue
        spot, bit = draw.randrange(len(raw)), 1 << draw.randrange(8)
        file.write_bytes(raw[:spot] + bytes([raw[spot] ^ bit]) + raw[spot + 1 :])
        try:
            found = not verify(path).ok
        except FedcacheError as error:
            found = error.code in (Exit.CORRUPT, Exit.STORE)
        assert found, (file, spot, bit)
        file.write_bytes(raw)
    assert verify(path).ok


def damage_delete(path: Path) -> None:
    (path / "features" / KEYS[0] / "c/1/0/0").unlink()


def damage_truncate(path: Path) -> None:
    file = path / "features" / KEYS[0] / "c/1/0/0"
    file.write_bytes(file.read_bytes()[:-1])


def damage_extend(path: Path) -> None:
    with (path / "features" / KEYS[0] / "c/1/0/0").open("ab") as file:
        file.write(b"\0")


def damage_zero(path: Path) -> None:
    file = path / "features" / KEYS[0] / "c/1/0/0"
    file.write_bytes(bytes(file.stat().st_size))


def damage_swap(path: Path) -> None:
    a, b = (path / "features" / KEYS[0] / f"c/{k}/0/0" for k in (1, 2))
    one, two = a.read_bytes(), b.read_bytes()
    a.write_bytes(two)
    b.write_bytes(one)


def damage_column(path: Path) -> None:
    file = path / "samples/label/c/0"
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(raw)


def read_everything(path: Path) -> None:
    store = Store.open(path)
    assert store.samples.label.shape == (N,)
    store.reader(KEYS[0]).all()


@pytest.mark.parametrize(
    "damage", [damage_delete, damage_truncate, damage_extend, damage_zero, damage_swap, damage_column]
)
def test_damage_is_refused_by_readers_and_named_by_verify(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = whole(tmp_path / "s.zarr").path
    damage(path)
    with pytest.raises(FedcacheError) as caught:
        read_everything(path)
    assert caught.value.code is Exit.CORRUPT
    assert "fedcache verify" in caught.value.hint
    assert not verify(path).ok


def test_swapped_manifests_of_two_stores_are_found(tmp_path: Path) -> None:
    a = whole(tmp_path / "a.zarr")
    b = Store.create(tmp_path / "b.zarr", samples(), dataset={"slug": "other", "digest": "cd" * 32, "template": None})
    x = values(KEYS[0]) * 2
    with b.writer(KEYS[0], shape=x.shape, dtype="float16", chunk_rows=ROWS, recipe={"backbone": "a"}, how={}) as w:
        for k in w.missing():
            w.write(k, x[k * ROWS : (k + 1) * ROWS], BAD)
        w.complete()
    (b.path / "manifest.json").write_bytes((a.path / "manifest.json").read_bytes())
    with pytest.raises(FedcacheError) as caught:
        Store.open(b.path).reader(KEYS[0]).all()
    assert caught.value.code is Exit.CORRUPT


def test_an_unfinished_array_is_refused_and_resumed(tmp_path: Path) -> None:
    expected = content(whole(tmp_path / "whole.zarr").path)
    store = create(tmp_path / "s.zarr")
    fill(store, KEYS[0], chunks=2)
    with pytest.raises(FedcacheError) as caught:
        Store.open(store.path).reader(KEYS[0])
    assert caught.value.code is Exit.STORE
    assert "2 of 6 chunks" in caught.value.message
    assert Store.open(store.path).unfinished() == [{"name": KEYS[0], "kept": 2, "chunks": 6}]
    with (store.path / f"journal-{KEYS[0]}.jsonl").open("ab") as file:
        file.write(b'{"chunk":3,"cr')  # a torn line vouches for nothing
    for key in KEYS:
        fill(store, key)
    store.put_text("a", ["a photo of a {}."], np.eye(3, D, dtype=np.float32), {"backbone": "a", "weights": "none"})
    store.put_partition("p", {"clients": []})
    assert content(store.path) == expected


def test_a_chunk_the_journal_vouches_for_is_kept_only_if_its_file_agrees(tmp_path: Path) -> None:
    store = create(tmp_path / "s.zarr")
    fill(store, KEYS[0], chunks=3)
    file = store.path / "features" / KEYS[0] / "c/1/0/0"
    file.write_bytes(file.read_bytes()[:-2])
    x = values(KEYS[0])
    with store.writer(
        KEYS[0], shape=x.shape, dtype="float16", chunk_rows=ROWS, recipe={"backbone": "a"}, how={"batch": 4}
    ) as w:
        assert w.kept == [0, 2]


def test_another_how_is_refused_until_fresh(tmp_path: Path) -> None:
    store = create(tmp_path / "s.zarr")
    fill(store, KEYS[0], chunks=2)
    x = values(KEYS[0])
    words: dict[str, Any] = {"shape": x.shape, "dtype": "float16", "chunk_rows": ROWS, "recipe": {"backbone": "a"}}
    with pytest.raises(FedcacheError) as caught, store.writer(KEYS[0], **words, how={"batch": 8}):
        pass
    assert caught.value.code is Exit.STORE
    assert "batch was 4, now 8" in caught.value.message
    assert "--fresh" in caught.value.hint
    before = [file.name for file in (store.path / "features" / KEYS[0]).rglob("*") if file.is_file()]
    assert before
    with store.writer(KEYS[0], **words, how={"batch": 8}, fresh=True) as w:
        assert w.kept == []
        left = [file for file in (store.path / "features" / KEYS[0] / "c").rglob("*") if file.is_file()]
        assert left == [], "no chunk of the array that was given up"


def test_non_finite_rows_are_refused_with_their_numbers(tmp_path: Path) -> None:
    store = create(tmp_path / "s.zarr")
    x = np.ones((N, 1, D), np.float32)
    words: dict[str, Any] = {
        "shape": x.shape,
        "dtype": "float16",
        "chunk_rows": ROWS,
        "recipe": {"backbone": "a"},
        "how": {},
    }
    with store.writer(KEYS[0], **words) as w:
        x[5] = np.inf
        with pytest.raises(FedcacheError, match="row 5"):
            w.write(1, x[4:8])
        x[5] = 1e6  # finite, but not in float16
        with pytest.raises(FedcacheError, match="does not fit float16"):
            w.write(1, x[4:8])


def test_a_second_writer_is_told_who_writes(tmp_path: Path) -> None:
    store = create(tmp_path / "s.zarr")
    x = values(KEYS[0])
    words: dict[str, Any] = {
        "shape": x.shape,
        "dtype": "float16",
        "chunk_rows": ROWS,
        "recipe": {"backbone": "a"},
        "how": {},
    }
    with store.writer(KEYS[0], **words):
        with pytest.raises(FedcacheError) as caught, Store.open(store.path).writer(KEYS[0], **words):
            pass
        assert caught.value.code is Exit.STORE
        assert "another thread of this process" in caught.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=8), v, max_size=4),
    max_leaves=12,
)


class InjectedError(OSError):
    pass


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the n-th write, fsync or rename of the store fail, once."""
    state = {"left": -1}

    def arm(n: int) -> None:
        state["left"] = n

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            state["left"] -= 1
            if state["left"] == 0:
                raise InjectedError(5, "injected")
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(files.os, "fsync", failing(os.fsync))
    monkeypatch.setattr(files.Path, "replace", failing(Path.replace))
    monkeypatch.setattr(files, "fsync_directory", failing(files.fsync_directory))
    return arm


@pytest.mark.full  # the short draw has the faults of test_store_faults.py
def test_whatever_fails_nothing_wrong_is_read_and_the_next_run_mends_it(
    tmp_path: Path, faults: Callable[[int], None]
) -> None:
    expected = content(whole(tmp_path / "whole.zarr").path)
    failed = 0
    for n in range(1, 400):
        path = tmp_path / f"{n}.zarr"
        faults(n)
        try:
            whole(path)
        except FedcacheError:
            failed += 1
        else:
            faults(-1)
            break
        faults(-1)
        readers_are_right_or_refused(path)
        assert content(whole(path).path) == expected, n
    assert failed > 60
    assert not list(path.rglob("*.partial"))


def readers_are_right_or_refused(path: Path) -> None:
    if not path.exists():
        return  # a store exists whole or not at all
    store = Store.open(path)
    bad = store.samples.ok == 0
    assert set(np.flatnonzero(bad)) <= set(BAD)
    for key in KEYS:
        if key not in store.arrays:
            with pytest.raises(FedcacheError) as caught:
                store.reader(key)
            assert caught.value.code is Exit.STORE, "unfinished, not corrupt"
            continue
        found = store.reader(key).all()
        assert np.array_equal(found, values(key).astype(np.float16), equal_nan=True)


def slow_fill(path: str) -> None:
    store = create(Path(path))
    for key in KEYS:
        x = values(key)
        with store.writer(
            key, shape=x.shape, dtype="float16", chunk_rows=ROWS, recipe={"backbone": key[0]}, how={"batch": 4}
        ) as writer:
            for chunk in writer.missing():
                writer.write(chunk, x[chunk * ROWS : (chunk + 1) * ROWS], BAD)
                time.sleep(0.01)
            writer.complete()


@pytest.mark.slow
def test_killed_writers_leave_a_store_that_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    slow_fill(str(tmp_path / "whole.zarr"))
    expected = content(tmp_path / "whole.zarr")
    context = multiprocessing.get_context("spawn")
    draw = random.Random(1)
    path = tmp_path / "s.zarr"
    for _ in range(5):
        process = context.Process(target=slow_fill, args=(str(path),))
        process.start()
        while process.is_alive() and not path.exists():
            time.sleep(0.002)
        time.sleep(draw.random() * 0.1)
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        readers_are_right_or_refused(path)
    slow_fill(str(path))
    assert content(path) == expected
    assert not list(path.rglob("*.partial"))


def test_shards_hold_the_parents_bytes(tmp_path: Path) -> None:
    store = whole(tmp_path / "s.zarr")
    (entry,) = store.texts["a"]
    store.put_text("a", entry["templates"], np.eye(3, 3, 1, dtype=np.float32), {"backbone": "a", "weights": "others"})
    clients = [("ink", np.array([0, 2, 4]), np.array([1, 3])), ("ch/alk", np.array([7, 9]), np.array([1, 3]))]
    for _ in range(2):  # the second time finds them there
        paths = write_shards(store, clients, tmp_path / "sites")
    assert [p.name for p in paths] == ["0-ink.zarr", "1-ch_alk.zarr"]
    for path, (name, train, test) in zip(paths, clients, strict=True):
        shard = Store.open(path)
        rows = np.array(shard.dataset["shard"]["rows"])
        assert shard.dataset["shard"]["client"] == name
        assert set(rows) == {*train, *test}
        assert np.array_equal(rows[shard.samples.split == 0], np.sort(train))
        for key in KEYS:
            assert np.array_equal(shard.reader(key).all(), store.reader(key).rows(rows), equal_nan=True)
        assert np.array_equal(shard.text("a"), store.text("a"))
        assert shard.texts == store.texts, "each with the numbers of its own weights"
        assert verify(path).ok


@pytest.mark.slow
@given(raw=st.one_of(st.binary(max_size=200), st.text(max_size=100).map(str.encode)))
@settings(max_examples=150)
def test_hostile_manifests_and_journals_are_errors_of_ours(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile.zarr"
    if not path.exists():
        fill(create(path), KEYS[0], chunks=2)
    kept = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(raw)
    with pytest.raises(FedcacheError):
        Store.open(path)
    (path / "manifest.json").write_bytes(kept)
    journal = path / f"journal-{KEYS[0]}.jsonl"
    lines = journal.read_bytes()
    journal.write_bytes(lines + raw)
    assert Store.open(path).unfinished()[0]["chunks"] == 6
    journal.write_bytes(lines)


@pytest.mark.slow
@given(data=JSON, key=st.sampled_from(["dataset", "rows", "classes", "samples", "arrays", "texts", "files", "format"]))
@settings(max_examples=150)
def test_manifests_of_the_wrong_types_are_errors_of_ours(
    tmp_path_factory: pytest.TempPathFactory, data: Any, key: str
) -> None:
    """Even with a digest that fits: a manifest is untrusted until every field has its type."""
    from fedcache.store.files import to_signed

    path = tmp_path_factory.getbasetemp() / "typed.zarr"
    if not path.exists():
        whole(path)
        (path / "kept").write_bytes((path / "manifest.json").read_bytes())
    manifest = json.loads((path / "kept").read_bytes())
    manifest.pop("sha256")
    if manifest[key] == data:
        return
    manifest[key] = data
    (path / "manifest.json").write_bytes(to_signed(manifest))
    try:
        assert Store.open(path).samples.name
    except FedcacheError:
        return
    assert key in ("dataset", "texts", "files", "arrays", "samples", "classes")
