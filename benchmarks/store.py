"""A store against np.memmap, h5py and zarr: every row into memory, and the rows of each of 100 clients.

All contenders take turns in one process over files in the page cache, read once before the clock starts so that the
pages are arranged as reading leaves them. A scan and a *first* gather open the store again, so every chunk is verified
(crc32c and its place in the manifest); *again* gathers with the same reader. Prints one line per contender.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from benchmarks.measure import Row, Seconds, best, make_row, pairs, quartiles
from fedcache.store.store import Samples, Store

ROWS = 60_000
WIDTH = 1024
BYTES = ROWS * WIDTH * 2  # float16
TIMES = 7
CLIENTS = 100
CHUNK = 512
SCAN = 0.9
GATHER = 0.8


def make(folder: Path) -> None:
    """The same random features as a raw file, a store, an HDF5 file and a Zarr array of 8,192-row chunks."""
    import h5py
    import zarr

    g = np.random.default_rng(0)
    x = g.standard_normal((ROWS, WIDTH), dtype=np.float32).astype(np.float16)
    x.tofile(folder / "raw.bin")
    with h5py.File(folder / "x.h5", "w") as file:
        file["x"] = x
    array = zarr.create_array(
        folder / "plain.zarr", shape=x.shape, chunks=(8192, WIDTH), dtype=x.dtype, compressors=None
    )
    array[:] = x
    zeros = np.zeros(ROWS, np.uint8)
    samples = Samples(
        uid=g.integers(0, 256, (ROWS, 16), np.uint8),
        name=tuple(f"{i:07}" for i in range(ROWS)),
        label=zeros.astype(np.int32),
        domain=zeros.astype(np.int16),
        split=zeros,
        ok=zeros + 1,
        classes=("one",),
        domains=("all",),
    )
    store = Store.create(
        folder / "x.zarr", samples, dataset={"slug": "x", "digest": "0" * 64, "template": None}
    )
    shape = (ROWS, 1, WIDTH)
    with store.writer(
        "x-0", shape=shape, dtype="float16", chunk_rows=CHUNK, recipe={"backbone": "x"}, how={}
    ) as w:
        for chunk in w.missing():
            w.write(chunk, x[chunk * CHUNK : (chunk + 1) * CHUNK, None])
        w.complete()


def cool(folder: Path) -> None:
    """Drop the page cache of every file, so that it comes back as reading leaves it and not as writing did."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def contenders(folder: Path) -> dict[str, dict[str, Callable[[], Any]]]:
    """Per task, a call per contender; np.memmap is the one the others are held against."""
    import h5py
    import zarr

    def raw() -> Any:
        return np.memmap(folder / "raw.bin", np.float16, "r", shape=(ROWS, WIDTH))

    def ours() -> Any:
        return Store.open(folder / "x.zarr").reader("x-0")

    order = np.random.default_rng(1).permutation(ROWS)
    mixed = np.array_split(order, CLIENTS)
    held = ours()
    mapped = raw()
    held.rows(order)  # verified and in memory from here on
    np.array(mapped)

    def gathers(
        open_rows: Callable[[], Callable[[Any], Any]], clients: list[Any]
    ) -> Callable[[], None]:
        def gather() -> None:
            take = open_rows()
            for index in clients:
                take(index)

        return gather

    tasks: dict[str, dict[str, Callable[[], Any]]] = {
        "scan": {
            "np.memmap": lambda: np.array(raw()),
            "fedcache": lambda: ours().all(),
            "zarr[:]": lambda: zarr.open_array(folder / "plain.zarr", mode="r")[:],
            "h5py": lambda: h5py.File(folder / "x.h5")["x"][:],
        }
    }
    for kind, clients in (("random", mixed), ("sorted", [np.sort(c) for c in mixed])):
        tasks[f"gather {kind}, first"] = {
            "np.memmap": gathers(lambda: raw().__getitem__, clients),
            "fedcache": gathers(lambda: ours().rows, clients),
        }
        tasks[f"gather {kind}, again"] = {
            "np.memmap": gathers(lambda: mapped.__getitem__, clients),
            "fedcache": gathers(lambda: held.rows, clients),
        }
    # No first reading on one core can leave out the checksum of every byte.
    whole = np.fromfile(folder / "raw.bin", np.uint8)
    tasks["checksum"] = {"crc32c": lambda: google_crc32c.value(whole)}
    return tasks


def check(tasks: Mapping[str, Mapping[str, Callable[[], Any]]]) -> None:
    """Everybody reads the same numbers."""
    found = [np.asarray(read()).reshape(-1) for read in tasks["scan"].values()]
    assert all(np.array_equal(found[0], other) for other in found[1:])


def measure(tasks: Mapping[str, Mapping[str, Callable[[], Any]]]) -> dict[str, Seconds]:
    """Seconds of every call, turn by turn; what a call made is freed outside of them."""
    seconds: dict[str, Seconds] = {
        task: {name: [] for name in calls} for task, calls in tasks.items()
    }
    for _ in range(TIMES):
        for task, calls in tasks.items():
            for name, call in calls.items():
                begin = time.perf_counter()
                made = call()
                seconds[task][name].append(time.perf_counter() - begin)
                del made
    return seconds


def limit(task: str, target: float, seconds: Mapping[str, Seconds]) -> str:
    """Why a first reading cannot reach ``target``, or nothing where it could.

    It cannot leave out to bring the bytes in, as the fastest of all here does, and to check them.
    """
    memmap = min(seconds[task]["np.memmap"])
    read = min(min(taken) for taken in seconds["scan"].values())
    crc = min(seconds["checksum"]["crc32c"])
    floor = read + crc
    gathers = ""
    if "first" in task:
        floor += min(seconds[task.replace("first", "again")]["fedcache"])
        gathers = ", the gathers alone as in the row 'again'"
    if task.endswith("again") or memmap / floor >= target:
        return ""
    return (
        f"np.memmap checks nothing ({memmap * 1e3:.1f} ms); reading these bytes {read * 1e3:.1f} ms, their crc32c "
        f"{crc * 1e3:.1f} ms ({BYTES / crc / 1e9:.1f} GB/s){gathers}: at most {memmap / floor:.2f} on one core"
    )


def rows() -> list[Row]:
    """One row per task of the store; a first reading that misses its target says what its parts cost alone."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        make(place)
        cool(place)
        tasks = contenders(place)
        check(tasks)
        seconds = measure(tasks)
    out = []
    for task, calls in seconds.items():
        for name, taken in calls.items():
            rate = BYTES / min(taken) / 1e9
            print(f"{task:22} {name:10} {min(taken) * 1e3:8.1f} ms  {rate:5.1f} GB/s")
        if "fedcache" not in calls:
            continue
        target = SCAN if task.startswith("scan") else GATHER
        measured = round(best(calls, "np.memmap", "fedcache"), 2)
        spread = quartiles(pairs(calls, "np.memmap", "fedcache"))
        out.append(
            make_row(
                f"store {task}",
                f">= {target} of np.memmap",
                measured,
                spread,
                measured >= target,
                roofline=limit(task, target, seconds),
            )
        )
    return out
