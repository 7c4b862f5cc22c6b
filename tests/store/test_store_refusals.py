"""What the files of a store answer when they are missing, torn, of others or in the way: exact sentences and values."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from embedding_file import read_embeddings
from pyarrow import parquet
from toy_store import KEYS, create, in_memory, samples, whole, writer

from fedcache.errors import CorruptionError, Exit, FedcacheError, InternalError, MachineError, StoreError, UsageError
from fedcache.runs.privacy_ledger import read_releases
from fedcache.store import array_file, catalog, chunks, content, files, journal, lock, manifest, mapped_rows
from fedcache.store import create as creating
from fedcache.store import samples as columns
from fedcache.store.export import export
from fedcache.store.sidecars import partition_file, read_quarantine
from fedcache.store.store import Store
from fedcache.store.verify import _reopen
from fedcache.tables.embeddings import open_embeddings
from fedcache.tables.file_rows import FileRows
from fedcache.tables.read import read_columns


@pytest.fixture
def place() -> Iterator[Path]:
    with in_memory() as path:
        yield path


def refused(kind: type[FedcacheError], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.message.startswith(message), caught.value.message
    assert caught.value.hint


def fails(error: BaseException) -> Callable[..., Any]:
    def call(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "lives"),
    [(None, True), (ProcessLookupError(), False), (PermissionError(), True), (OverflowError(), True)],
)
def test_a_process_lives_unless_the_system_knows_none(error: Any, lives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.os, "kill", fails(error) if error else lambda pid, signal: None)
    assert lock.is_alive(7) is lives


def test_the_start_of_a_process_is_a_number_also_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lock._started(os.getpid()) > 0
    for said in ("7 (a) b) S " + "0 " * 18 + "4711 0", "7 (a) S", "no numbers"):
        monkeypatch.setattr(Path, "read_text", lambda self, said=said: said)
        assert lock._started(7) == (4711 if "4711" in said else 0)
    monkeypatch.setattr(Path, "read_text", fails(OSError()))
    assert lock._started(7) == 0


def test_the_holder_of_a_lock_is_named_where_it_is_known(place: Path) -> None:
    path = place / "locks" / "x.lock"
    assert lock.lock_holder(path) == "another process or thread"
    path.parent.mkdir()
    for said, holder in (
        ({"pid": 7, "host": "a"}, "process 7 on a"),
        ({"pid": "x", "host": "a"}, "another process or thread"),
        ({"pid": 7}, "another process or thread"),
        ([], "another process or thread"),
    ):
        path.with_suffix(".json").write_text(json.dumps(said))
        assert lock.lock_holder(path) == holder


def test_a_lock_tidies_up_after_killed_holders_and_says_where_it_cannot_be(place: Path) -> None:
    path = place / "locks" / "x.lock"
    path.parent.mkdir()
    left, other = path.parent / ".x.json.7.partial", path.parent / ".y.json.7.partial"
    left.touch()
    other.touch()
    with lock.hold_lock(path, "it", wait=False):
        assert json.loads(path.with_suffix(".json").read_text())["pid"] == os.getpid()
        assert (left.exists(), other.exists()) == (False, True)
    assert not path.with_suffix(".json").exists()
    (place / "file").touch()
    with pytest.raises(MachineError) as caught, lock.hold_lock(place / "file" / "x.lock", "it", wait=False):
        pass
    assert caught.value.message.startswith(f"{place / 'file' / 'x.lock'} cannot be locked: ")


def test_a_manifest_that_is_no_file_is_corrupt_and_one_that_appears_is_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = whole(place / "s.zarr").path
    real, tries = manifest.read_whole, []

    def late(file: Path) -> bytes:
        tries.append(file)
        if len(tries) == 1:
            raise FileNotFoundError
        return real(file)

    monkeypatch.setattr(manifest, "read_whole", late)
    assert manifest.read_manifest(path).rows == 14
    assert len(tries) == 2
    monkeypatch.setattr(manifest, "read_whole", fails(PermissionError(13, "Permission denied")))
    said = f"{path / 'manifest.json'} cannot be read (Permission denied)"
    refused(CorruptionError, said, lambda: manifest.read_manifest(path))


@pytest.mark.parametrize(
    ("slug", "changed"),
    [("", {}), (".x", {}), ("a", {"id": "../x"}), ("a", {"shape": [3]}), ("a", {"shape": [3, 4, 1]})],
)
def test_text_features_of_a_manifest_have_names_that_folders_may_have(slug: str, changed: dict[str, Any]) -> None:
    entry = {"id": "0", "shape": [3, 4], "templates": ["a {}"], "crc": 1, "meta": {}}
    assert manifest._text_features("a", entry)["shape"] == [3, 4]
    with pytest.raises(ValueError, match=f"text features '{slug}'"):
        manifest._text_features(slug, {**entry, **changed})


def test_a_store_without_features_says_so() -> None:
    images = SimpleNamespace(dtype="uint8")
    for held in ({}, {"pixels-0": images}):
        refused(
            StoreError, "s.zarr holds no features yet.", lambda held=held: manifest.select_arrays(held, None, "s.zarr")
        )
    assert manifest.select_arrays({"p": images, "a": SimpleNamespace(dtype="float16")}, None, "s") == ["a"]  # type: ignore[dict-item]


def test_what_is_mapped_is_counted_or_taken_to_be_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, found in (("900 50 7 1 0 2 0", 7 * mmap.PAGESIZE), ("900 50", 33), ("a b c", 33)):
        monkeypatch.setattr(Path, "read_text", lambda self, encoding, said=said: said)
        assert mapped_rows.mapped_bytes(33) == found
    monkeypatch.setattr(Path, "read_text", fails(OSError()))
    assert mapped_rows.mapped_bytes(33) == 33


def test_a_system_that_refuses_to_map_is_no_error(place: Path) -> None:
    reader = whole(place / "s.zarr").reader(KEYS[0])
    calls: list[Any] = []
    libc: Any = SimpleNamespace(mmap=lambda *given: calls.append(given) or -1)
    assert mapped_rows._map_chunk(libc, reader, 0, 4096) is False
    ((address, size, _, flags, _, offset),) = calls
    assert (address, size, offset) == (4096, 24, 0)  # four rows of three half numbers
    assert flags & mmap.MAP_PRIVATE


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"label": np.zeros(3)}, "Columns of 14 rows have shapes "),
        ({"uid": np.zeros((14, 8), np.uint8)}, "Columns of 14 rows have shapes "),
        ({"label": np.full(14, 3)}, "label holds 3..3, but there are 3 names."),
        ({"label": np.full(14, -2)}, "label holds -2..-2, but there are 3 names."),
        ({"domain": np.full(14, -1)}, "domain holds -1..-1, but there are 2 names."),
        ({"domain": np.full(14, 2)}, "domain holds 2..2, but there are 2 names."),
    ],
)
def test_columns_that_do_not_fit_are_refused(changed: dict[str, Any], said: str) -> None:
    assert samples().checked().label.dtype == np.int32
    refused(UsageError, said, lambda: replace(samples(), **changed).checked())


def test_names_that_are_none_or_too_few_are_corruption(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = whole(place / "s.zarr").path
    known = manifest.read_manifest(path)
    for answer, said in (
        (lambda raw: ["a"] * 13, "holds 13 names for 14 rows."),
        (fails(ValueError("torn")), "holds no names (torn)."),
    ):
        monkeypatch.setattr(columns.files, "decode_strings", answer)
        with pytest.raises(CorruptionError) as caught:
            columns.read_samples(path, known)
        assert caught.value.message.startswith("samples/name: ")
        assert caught.value.message.endswith(said)


def test_a_chunk_that_is_missing_or_ends_while_it_is_read_is_corrupt(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = place / "c", np.empty(8, np.uint8)
    gone = f"chunk 0: {path} is missing or unreadable."
    refused(CorruptionError, gone, lambda: chunks.map_file(path, 8, "chunk 0"))
    refused(CorruptionError, gone, lambda: chunks.read_file(path, out, 8, "chunk 0"))
    path.write_bytes(b"12345678rest")
    assert chunks.read_file(path, out, 8, "chunk 0") == b"rest"
    assert out.tobytes() == b"12345678"
    monkeypatch.setattr(chunks, "check_size", lambda *_: None)
    path.write_bytes(b"1234")
    refused(
        CorruptionError, f"chunk 0: {path} ends while it is read.", lambda: chunks.read_file(path, out, 8, "chunk 0")
    )
    path.write_bytes(b"")
    refused(CorruptionError, gone, lambda: chunks.map_file(path, 8, "chunk 0"))


def test_files_of_embeddings_that_cannot_be_taken_are_named(place: Path) -> None:
    (place / "x.txt").touch()
    refused(UsageError, "Unknown file ending '.txt'.", lambda: open_embeddings(place / "x.txt"))
    text = np.ones((3, 4), np.float32)
    for row, value in ((1, 0.0), (2, np.nan), (0, np.inf)):
        bad = text.copy()
        bad[row] = value
        np.savez(place / "x.npz", features=np.ones((6, 4), np.float32), labels=np.arange(6) % 3, text=bad)
        said = f"{place / 'x.npz'}: row {row} of text is zero or not finite."
        refused(CorruptionError, said, lambda: read_embeddings(place / "x.npz"))


def test_rows_of_a_file_are_as_many_as_it_says(place: Path) -> None:
    rows = FileRows(place / "x.npy", (3, 2), np.dtype("f4"), lambda n: iter([np.ones((2, 2), "f4")]))
    said = f"{place / 'x.npy'} could not be read as .npy: ValueError: 2 rows are there of 3"
    refused(UsageError, said, lambda: list(rows.blocks(2)))
    refused(UsageError, said, lambda: list(rows.blocks(5)))


def test_lists_of_a_parquet_file_have_one_length(place: Path) -> None:
    lists = pa.array([[1.0, 2.0]] * 2 + [[1.0, 2.0, 3.0]] * 2)
    file = place / "x.parquet"
    parquet.write_table(pa.table({"x": lists}), file, row_group_size=2)
    parts = read_columns(file)["x"].parts(2)
    assert next(parts).tolist() == [[1.0, 2.0]] * 2
    refused(UsageError, f"{file}: the rows of x have lengths [2, 3].", lambda: next(parts))


def test_a_list_of_unreadable_rows_that_is_no_file_is_corrupt(place: Path) -> None:
    path = whole(place / "s.zarr").path
    known = manifest.read_manifest(path)
    what = f"the list of unreadable images: {path / 'quarantine.jsonl'}"
    (path / "quarantine.jsonl").unlink()
    refused(CorruptionError, f"{what} is missing.", lambda: read_quarantine(path, known))
    (path / "quarantine.jsonl").mkdir()
    refused(CorruptionError, f"{what} is unreadable.", lambda: read_quarantine(path, known))
    refused(StoreError, "s.zarr has no partition 'x'.", lambda: partition_file(path, known, "x"))


@pytest.mark.parametrize("raw", [b"", b"PK\x03\x04", b"{}" * 40])
def test_other_files_are_no_files_of_arrays(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"^does not begin as a file of arrays does$"):
        array_file.read_content(memoryview(raw))


def test_entries_of_a_file_of_arrays_hold_what_a_file_can_have() -> None:
    entry = {"dtype": "uint8", "length": 1, "offset": 0, "sha256": "a"}
    assert array_file._is_entry(entry)
    for wrong in ([], {**entry, "more": 1}, {k: v for k, v in entry.items() if k != "dtype"}):
        assert not array_file._is_entry(wrong)
    for changed in ({"dtype": "O"}, {"length": -1}, {"offset": 1 << 48}, {"length": True}, {"offset": 1.0}):
        assert not array_file._is_entry({**entry, **changed})


def test_an_export_has_a_known_ending_and_a_folder(place: Path) -> None:
    store = whole(place / "s.zarr")
    refused(UsageError, "Unknown file ending '.csv'.", lambda: export(store, place / "x.csv", KEYS))
    refused(
        UsageError, f"The folder {place / 'no'} does not exist.", lambda: export(store, place / "no" / "x.npz", KEYS)
    )


def test_a_size_that_cannot_be_found_out_is_none(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "a").mkdir()
    (place / "a" / "b").write_bytes(b"123")
    assert (catalog.size_of(place), catalog.size_of(place / "a" / "b")) == (3, 3)
    monkeypatch.setattr(Path, "lstat", fails(OSError()))
    assert catalog.size_of(place) == 0


@pytest.mark.parametrize("key", ["..", "-x", "x" * 120])
def test_features_have_names_that_a_folder_can_have(key: str) -> None:
    assert content._named("x" * 119, 1) == 1
    refused(UsageError, f"Features are named {key!r}.", lambda: content._named(key, 1))


def test_files_that_killed_writers_left_are_removed(place: Path) -> None:
    store = whole(place / "s.zarr")
    gone = [
        store.path / ".a.partial",
        store.path / "text" / "x" / ".b.partial",
        store.path / "partitions" / ".c.partial",
    ]
    kept = [store.path / ".journal-x.partial", store.path / ".history.partial", store.path / "text" / "x" / "d.partial"]
    for path in (*gone, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    creating.remove_partial_files(store.path)
    assert [p.exists() for p in (*gone, *kept)] == [False] * 3 + [True] * 3
    left = store.path / "features" / "c-0" / "c" / ".0.partial"
    left.parent.mkdir(parents=True)
    left.touch()
    with writer(store, "c-0", recipe={"backbone": "c"}):
        assert not left.exists()


def test_a_digest_tells_how_far_it_is(place: Path) -> None:
    (place / "x").write_bytes(bytes((1 << 20) + 5))
    told: list[int] = []
    assert files.file_sha256(place / "x", told.append) == files.file_sha256(place / "x")
    assert told == [1 << 20, 5]


GOOD = {"ok": 1, "quarantine": "a"}


@pytest.mark.parametrize("commit", [GOOD, [], {**GOOD, "ok": "1"}, {"ok": 1}, {**GOOD, "ok": True}])
def test_a_commit_of_a_journal_names_two_checksums(commit: Any) -> None:
    found = journal.Journal(Path("x"), header={})
    good = commit is GOOD
    assert journal._read_line(found, files.to_signed({"commit": commit})) is good
    assert found.commits == ([commit] if good else [])


@pytest.mark.parametrize("shape", [(3,), (3, 0), (3, 1, 4)])
def test_text_features_are_a_matrix(place: Path, shape: tuple[int, ...]) -> None:
    store = create(place / "s.zarr")
    said = f"Text features of a have shape {shape}."
    refused(InternalError, said, lambda: store.put_text("a", ["a {}"], np.ones(shape, np.float32), {}))


def test_an_array_that_is_gone_is_not_opened_again(place: Path) -> None:
    store = whole(place / "s.zarr")
    assert _reopen(store.path, "none-00000000") == []
    assert list(Store.open(store.path).arrays) == list(KEYS)


def test_a_ledger_that_is_no_file_is_corrupt(place: Path) -> None:
    assert list(read_releases(place / "none")) == []
    (place / "ledger").mkdir()
    with pytest.raises(FedcacheError) as caught:
        list(read_releases(place / "ledger"))
    assert caught.value.code is Exit.CORRUPT
    assert "cannot be read (Is a directory)" in caught.value.message
