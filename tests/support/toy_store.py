"""A small store with two feature arrays that could not read different images, written the way extraction writes."""

import hashlib
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedcache.store.store import Samples, Store

ROWS = 14
WIDTH = 3
CHUNK = 4  # 4 chunks, the last with two rows
KEYS = ("a-00000000", "b-00000000")
BAD = {KEYS[0]: {1: "truncated", 9: "not an image"}, KEYS[1]: {9: "not an image", 13: "too large"}}
ALL_BAD = BAD[KEYS[1]] | BAD[KEYS[0]]


@contextmanager
def in_memory():
    """A directory in memory where the system has one: these tests make thousands of fsyncs and measure none."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    ) as made:
        yield Path(made)


def samples(rows=ROWS):
    i = np.arange(rows)
    uid = [hashlib.sha256(bytes([k])).digest()[:16] for k in range(rows)]
    return Samples(
        uid=np.frombuffer(b"".join(uid), np.uint8).reshape(rows, 16),
        name=tuple(f"train/ß/{k:03}.png" for k in range(rows)),
        label=i % 3 - (i == 5),
        domain=i % 2,
        split=i % 3 == 0,
        ok=np.ones(rows, np.uint8),
        classes=("x", "y", "z"),
        domains=("ink", "chalk"),
    )


def values(key):
    x = np.random.default_rng(KEYS.index(key)).standard_normal((ROWS, 1, WIDTH)).astype(np.float16)
    x[list(BAD[key])] = np.nan
    return x


def create(path):
    return Store.create(
        path, samples(), dataset={"slug": "toy", "digest": "ab" * 32, "template": None}
    )


def writer(store, key, **changed):
    words = {
        "shape": (ROWS, 1, WIDTH),
        "dtype": "float16",
        "chunk_rows": CHUNK,
        "recipe": {"backbone": key[0]},
        "how": {"batch": 4},
    }
    return store.writer(key, **words | changed)


def write(open_writer, chunk, key):
    open_writer.write(chunk, values(key)[chunk * CHUNK : (chunk + 1) * CHUNK], BAD[key])


def fill(store, key, chunks=99):
    with writer(store, key) as w:
        for chunk in w.missing()[:chunks]:
            write(w, chunk, key)
        if not w.missing():
            w.complete()


def whole(path):
    store = create(path)
    for key in KEYS:
        fill(store, key)
    store.put_text(
        "a",
        ["a photo of a {}."],
        np.eye(3, WIDTH, dtype=np.float32),
        {"backbone": "a", "weights": "none"},
    )
    store.put_partition("p", {"clients": [[0, 2], [3]]})
    return store


def content(path):
    """Every file the identity promise covers."""
    return {
        str(f.relative_to(path)): f.read_bytes()
        for f in sorted(path.rglob("*"))
        if f.is_file() and f.name != "history.jsonl" and "locks" not in f.parts
    }


def check_what_is_read(path):
    """What readers see is right, or they say that it is unfinished."""
    store = Store.open(path)
    ok = store.samples.ok
    listed = {e["row"]: e["reason"] for e in store.quarantined()}
    assert {row: ALL_BAD[row] for row in listed} == listed
    assert set(np.flatnonzero(ok == 0).tolist()) <= set(ALL_BAD)
    for key in store.arrays:
        assert np.array_equal(store.reader(key).all(), values(key), equal_nan=True)
        assert set(BAD[key]) <= set(np.flatnonzero(ok == 0).tolist()), (
            "a complete array's bad rows are not ok"
        )
        assert set(BAD[key]) <= set(listed)
