"""What the files of a store answer when they are missing, torn, of others or in the way."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from embedding_file import read_embeddings
from toy_store import KEYS, samples, whole

from fedcache.errors import CorruptionError, MachineError, StoreError, UsageError
from fedcache.store import chunks, lock, manifest
from fedcache.store.export import export
from fedcache.store.manifest import read_quarantine
from fedcache.store.store import Store


def refused(kind, named, call):
    """The call is refused with this kind of error, which names what is wrong and has a hint."""
    with pytest.raises(kind) as caught:
        call()
    assert str(named) in caught.value.message
    assert caught.value.hint


def fails(error):
    def call(*_args, **_kwargs):
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "lives"),
    [
        (None, True),
        (ProcessLookupError(), False),
        (PermissionError(), True),
        (OverflowError(), True),
    ],
)
def test_a_process_lives_unless_the_system_knows_none(error, lives, monkeypatch):
    monkeypatch.setattr(lock.os, "kill", fails(error) if error else lambda pid, signal: None)
    assert lock.is_alive(7) is lives


def test_the_holder_of_a_lock_is_named_where_it_is_known(place):
    path = place / "x.lock"
    unknown = lock.lock_holder(path)
    path.with_suffix(".json").write_text('{"pid": 7, "host": "a"}')
    assert lock.lock_holder(path) == "process 7 on a"
    for said in ('{"pid": "x", "host": "a"}', '{"pid": 7}', "[]"):
        path.with_suffix(".json").write_text(said)
        assert lock.lock_holder(path) == unknown


def test_a_lock_tidies_up_after_killed_holders_and_says_where_it_cannot_be(place):
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
    with (
        pytest.raises(MachineError, match=str(place / "file" / "x.lock")),
        lock.hold_lock(place / "file" / "x.lock", "it", wait=False),
    ):
        pass


def test_a_manifest_that_is_no_file_is_corrupt_and_one_that_appears_is_read(place, monkeypatch):
    path = whole(place / "s.zarr").path
    answers = iter([fails(FileNotFoundError()), manifest.read_whole])
    monkeypatch.setattr(manifest, "read_whole", lambda file: next(answers)(file))
    assert manifest.read_manifest(path).rows == 14
    assert list(answers) == []
    monkeypatch.setattr(manifest, "read_whole", fails(PermissionError(13, "Permission denied")))
    refused(CorruptionError, path / "manifest.json", lambda: manifest.read_manifest(path))


def test_a_store_without_features_says_so():
    images = SimpleNamespace(dtype="uint8")
    for held in ({}, {"pixels-0": images}):
        refused(
            StoreError, "s.zarr", lambda held=held: manifest.select_arrays(held, None, "s.zarr")
        )
    assert manifest.select_arrays(
        {"p": images, "a": SimpleNamespace(dtype="float16")}, None, "s"
    ) == ["a"]  # type: ignore[dict-item]


def test_columns_that_do_not_fit_are_refused():
    assert samples().checked().label.dtype == np.int32
    for changed, named in (
        ({"label": np.zeros(3)}, "14 rows"),
        ({"uid": np.zeros((14, 8), np.uint8)}, "14 rows"),
        ({"label": np.full(14, 3)}, "3..3"),
        ({"label": np.full(14, -2)}, "-2..-2"),
        ({"domain": np.full(14, -1)}, "-1..-1"),
        ({"domain": np.full(14, 2)}, "2..2"),
    ):
        refused(UsageError, named, lambda changed=changed: replace(samples(), **changed).checked())


def test_a_chunk_that_is_missing_or_ends_while_it_is_read_is_corrupt(place, monkeypatch):
    path = place / "c"
    out = np.empty(8, np.uint8)
    refused(CorruptionError, path, lambda: chunks.map_file(path, 8, "chunk 0"))
    refused(CorruptionError, path, lambda: chunks.read_file(path, out, 8, "chunk 0"))
    path.write_bytes(b"12345678rest")
    assert chunks.read_file(path, out, 8, "chunk 0") == b"rest"
    assert out.tobytes() == b"12345678"
    monkeypatch.setattr(chunks, "check_size", lambda *_: None)
    path.write_bytes(b"1234")
    refused(CorruptionError, path, lambda: chunks.read_file(path, out, 8, "chunk 0"))
    path.write_bytes(b"")
    refused(CorruptionError, path, lambda: chunks.map_file(path, 8, "chunk 0"))


def test_text_features_that_are_zero_or_not_finite_are_named(place):
    for row, value in ((1, 0.0), (2, np.nan), (0, np.inf)):
        text = np.ones((3, 4), np.float32)
        text[row] = value
        np.savez(
            place / "x.npz",
            features=np.ones((6, 4), np.float32),
            labels=np.arange(6) % 3,
            text=text,
        )
        refused(CorruptionError, f"row {row} of text", lambda: read_embeddings(place / "x.npz"))


def test_a_list_of_unreadable_rows_that_is_no_file_is_corrupt(place):
    path = whole(place / "s.zarr").path
    known = manifest.read_manifest(path)
    listed = path / "quarantine.jsonl"
    listed.unlink()
    refused(CorruptionError, listed, lambda: read_quarantine(path, known))
    listed.mkdir()
    refused(CorruptionError, listed, lambda: read_quarantine(path, known))


def test_an_export_has_a_known_ending_and_a_folder(place):
    store = whole(place / "s.zarr")
    refused(UsageError, "'.csv'", lambda: export(store, place / "x.csv", KEYS))
    refused(UsageError, place / "no", lambda: export(store, place / "no" / "x.npz", KEYS))


def test_features_have_names_that_a_folder_can_have(tmp_path):
    for key in ("..", "-x", "x" * 120):
        given = {key: np.eye(3)}
        refused(
            UsageError, key, lambda given=given: Store.from_arrays(given, path=tmp_path / "s.zarr")
        )
