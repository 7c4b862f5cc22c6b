"""Power cuts and full disks at every write, fsync and rename; and the window in which a commit replaces sidecars."""

import errno
import os
import resource
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from draws import FULL
from refusal import corruption, machine_error, refused
from toy_store import BAD, KEYS, check_what_is_read, content, create, fill, whole, write, writer

from fedcache.errors import Exit, FedcacheError
from fedcache.store import chunks, files, journal
from fedcache.store.store import Store
from fedcache.store.verify import verify


class Faults:
    """Makes the n-th write, fsync or rename of the store fail; a failing write leaves half of its bytes."""

    def __init__(self, patch, code=errno.EIO):
        self.left, self.code, self.count = -1, code, 0
        patch.setattr(files.os, "fsync", self.guard(os.fsync))
        patch.setattr(files.Path, "replace", self.guard(Path.replace))
        patch.setattr(files.Path, "rename", self.guard(Path.rename))
        real = Path.open

        def open_path(path, mode="r", *args, **kwargs):
            file = real(path, mode, *args, **kwargs)
            return Torn(file, self) if mode in ("wb", "ab") else file

        patch.setattr(files.Path, "open", open_path)

    def spend(self):
        self.count += 1
        self.left -= 1
        return self.left == 0

    def guard(self, real):
        def call(*args, **kwargs):
            if self.spend():
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **kwargs)

        return call


class Torn:
    """A file whose writes may fail half way."""

    def __init__(self, file, faults):
        self.file, self.faults = file, faults

    def write(self, data):
        if self.faults.spend():
            raw = bytes(data)
            self.file.write(raw[: len(raw) // 2])
            raise OSError(self.faults.code, os.strerror(self.faults.code))
        return int(self.file.write(data))

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


@pytest.mark.slow
def test_after_a_failure_at_any_point_reads_are_right_and_the_next_run_ends_the_same(
    expected, place, monkeypatch, record_property
):
    faults = Faults(monkeypatch)
    failures = 0
    codes = set()
    for n in range(1, 1000, 1 if FULL else 3):
        path = place / "s.zarr"
        faults.left = n
        failures += 1
        try:
            whole(path)
        except FedcacheError as error:
            codes.add(error.code)
        if faults.left > 0:
            break  # nothing is left to fail
        faults.left = -1
        if path.exists():
            check_what_is_read(path)
        assert content(whole(path).path) == expected, f"after fault {n}"
        assert verify(path).problems == []
        assert not list(place.rglob("*.partial"))
        for file in sorted(path.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        path.rmdir()
    assert failures > (150 if FULL else 50)
    record_property("cases", failures)
    assert codes == {Exit.ENVIRONMENT}


def test_a_full_disk_says_what_it_needs_and_what_is_free(store, monkeypatch):
    with writer(store, KEYS[0]) as w:
        write(w, 0, KEYS[0])
        faults = Faults(monkeypatch, errno.ENOSPC)
        faults.left = 1
        # 4 rows x 3 float16
        machine_error(lambda: write(w, 1, KEYS[0]), "needs 24 bytes")
        write(w, 1, KEYS[0])  # there is room again
    with writer(store, KEYS[0]) as w:
        assert w.kept == [0, 1]


def test_an_error_of_the_system_names_the_file_that_was_to_be_written(place):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            files.write_atomic(place / "classes.csv", bytes(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == f"{place}/classes.csv"
    assert not list(place.iterdir())


def crash_in_commit(store, key, monkeypatch, step):
    """Complete an array and die at its step-th write of a file; whether it died."""
    with monkeypatch.context() as patch, writer(store, key) as w:
        for chunk in w.missing():
            write(w, chunk, key)
        real = Path.replace
        left = [step]

        def dying(path, target):
            if target.suffix == ".json" and target.parent.name == "locks":
                return real(path, target)  # who holds the lock; not part of the commit
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.EIO, "power cut")
            return real(path, target)

        patch.setattr(files.Path, "replace", dying)
        try:
            w.complete()
        except FedcacheError:
            return True
    return False


STEPS = {"ok": 1, "quarantine": 2, "zarr.json": 3, "manifest": 4}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_between_the_steps_of_a_commit_readers_are_right_and_another_array_may_commit(
    expected, store, monkeypatch, step
):
    early = Store.open(store.path)
    assert crash_in_commit(store, KEYS[0], monkeypatch, step)
    check_what_is_read(store.path)
    assert Store.open(store.path).arrays == {}
    fill(store, KEYS[1])  # another backbone ends while the first is dead
    check_what_is_read(store.path)
    assert verify(store.path).problems == []
    assert set(np.flatnonzero(early.samples.ok == 0).tolist()) >= set(BAD[KEYS[1]]), (
        "readers follow the manifest"
    )
    whole(store.path)
    assert content(store.path) == expected
    assert not crash_in_commit(store, KEYS[0], monkeypatch, step), (
        "a complete array has nothing to commit"
    )


def test_an_array_that_died_in_its_commit_may_be_discarded(expected, store, monkeypatch):
    assert crash_in_commit(store, KEYS[0], monkeypatch, STEPS["manifest"])
    with writer(store, KEYS[0], fresh=True) as w:
        assert w.kept == []
        check_what_is_read(store.path)
    assert content(whole(store.path).path) == expected


def test_ok_without_a_commit_that_vouches_is_refused(finished):
    file = finished.path / "samples/ok/c/0"
    raw = bytearray(file.read_bytes())
    raw[9] = 1  # a row whose features are NaN now looks readable
    raw[-4:] = google_crc32c.value(bytes(raw[:-4])).to_bytes(4, "little")
    file.write_bytes(raw)
    corruption(lambda: Store.open(finished.path).samples)
    assert [p["file"] for p in verify(finished.path).problems] == ["samples/ok/c/0"]


def test_a_killed_creator_leaves_nothing_behind(place):
    dead = place / ".s.zarr.999999999-a.partial"  # above the largest pid of any system
    (dead / "samples").mkdir(parents=True)
    other = place / f".s.zarr.{os.getppid()}-b.partial"  # somebody is at work there
    other.mkdir()
    create(place / "s.zarr")
    assert not dead.exists()
    assert other.exists()


def test_a_partition_whose_name_is_no_file_name_is_refused(store):
    for name in ("../out", ".hidden", "a/b", ""):
        refused(lambda name=name: store.put_partition(name, {"clients": []}), "partition")
    assert store.partitions == []


def test_every_new_directory_is_durable_before_what_lies_below_it(place, monkeypatch):
    synced = []
    monkeypatch.setattr(chunks, "fsync_directory", synced.append)
    chunks.make_directories(place / "a/b/c")
    assert synced == [place, place / "a", place / "a/b"]
    chunks.make_directories(place / "a/b")
    assert len(synced) == 3, "nothing was new"


def test_a_chunk_that_is_written_twice_counts_once_with_its_last_bad_rows(store):
    x = np.ones((4, 1, 3), np.float16)
    with writer(store, KEYS[0]) as w:
        w.write(1, x)
        x[2] = np.nan
        w.write(1, x, {6: "truncated", 0: "of another chunk"})
        assert w.bad == {6: "truncated"}
        x[2] = 1
        w.write(1, x)
        assert w.bad == {}
        assert w.kept == [1]
    assert journal.read_journal(journal.journal_path(store.path, KEYS[0])).bad == {}


def test_an_array_whose_journal_lost_its_first_line_is_begun_anew_and_kept(store):
    fill(store, KEYS[0], chunks=2)
    path = journal.journal_path(store.path, KEYS[0])
    path.write_bytes(path.read_bytes()[:20])  # of the header
    fill(store, KEYS[0], chunks=1)
    begun = journal.read_journal(path)
    assert begun.header is not None
    assert sorted(begun.chunks) == [0]
    assert begun.torn is False
    fill(store, KEYS[0])
    check_what_is_read(store.path)
    assert verify(store.path).problems == []


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_after(place, monkeypatch):
    """Otherwise a power cut could leave the new name with the old, or no, bytes."""
    seen = []
    sync = os.fsync
    rename = Path.replace

    def synced(fd):
        seen.append(Path(f"/proc/self/fd/{fd}").resolve().name)
        sync(fd)

    def renamed(path, to):
        seen.append("renamed")
        return rename(path, to)

    monkeypatch.setattr(files.os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    files.write_atomic(place / "file", b"new")
    assert (place / "file").read_bytes() == b"new"
    assert seen[0].startswith(".file.")
    assert seen[1:] == ["renamed", place.resolve().name]


def test_the_next_change_removes_what_killed_writers_left_and_no_file_of_another(finished):
    mine = (".manifest.json.1-a.partial", "partitions/.p.json.1-a.partial", "text/a/.b.1-a.partial")
    others = (".journal-a.jsonl.1-a.partial", ".history.jsonl.1-a.partial", "text/a/b.partial")
    for name in (*mine, *others):
        (finished.path / name).write_bytes(b"half")
    finished.put_partition("one", {"clients": []})
    assert [name for name in (*mine, *others) if (finished.path / name).exists()] == list(others)
    left = finished.path / "features/c-0/c/.0.partial"
    left.parent.mkdir(parents=True)
    left.touch()
    with writer(finished, "c-0", recipe={"backbone": "c"}):
        assert not left.exists()
