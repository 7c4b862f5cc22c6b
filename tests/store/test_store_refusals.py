"""What the files of a store answer when they are missing, torn, of others or in the way."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from embedding_file import read_embeddings
from refusal import corruption, machine_error, refused, store_error
from toy_store import KEYS, samples

from fedcache.store import chunks, lock, manifest
from fedcache.store.export import export
from fedcache.store.manifest import read_quarantine
from fedcache.store.store import Store


def fails(error):
    def call(*_args, **_kwargs):
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "lives"), [(None, True), (ProcessLookupError(), False), (PermissionError(), True)]
)
def test_a_process_lives_unless_the_system_knows_none(error, lives, monkeypatch):
    monkeypatch.setattr(lock.os, "kill", fails(error) if error else lambda pid, signal: None)
    assert lock.is_alive(7) is lives


def test_a_manifest_that_is_no_file_is_corrupt_and_one_that_appears_is_read(finished, monkeypatch):
    path = finished.path
    answers = iter([fails(FileNotFoundError()), manifest.read_whole])
    monkeypatch.setattr(manifest, "read_whole", lambda file: next(answers)(file))
    assert manifest.read_manifest(path).rows == 14
    assert list(answers) == []
    monkeypatch.setattr(manifest, "read_whole", fails(PermissionError(13, "Permission denied")))
    corruption(lambda: manifest.read_manifest(path), f"{path}/manifest.json")


def test_a_store_without_features_says_so():
    def select(**held):
        arrays = {key: SimpleNamespace(dtype=dtype) for key, dtype in held.items()}
        return manifest.select_arrays(arrays, None, "s.zarr")

    store_error(select, "s.zarr")
    store_error(lambda: select(pixels="uint8"), "s.zarr")
    assert select(pixels="uint8", a="float16") == ["a"]


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("label", np.zeros(3), "14 rows"),
        ("uid", np.zeros((14, 8), np.uint8), "14 rows"),
        ("label", np.full(14, 3), "3 to 3"),
        ("label", np.full(14, -2), "-2 to -2"),
        ("domain", np.full(14, -1), "-1 to -1"),
        ("domain", np.full(14, 2), "2 to 2"),
    ],
)
def test_columns_that_do_not_fit_are_refused(column, values, said):
    assert samples().checked().label.dtype == np.int32
    refused(replace(samples(), **{column: values}).checked, said)


def test_a_chunk_that_is_missing_or_ends_while_it_is_read_is_corrupt(place, monkeypatch):
    path = place / "c"
    out = np.empty(8, np.uint8)

    def both_refuse():
        corruption(lambda: chunks.map_file(path, 8, "chunk 0"), path)
        corruption(lambda: chunks.read_file(path, out, 8, "chunk 0"), path)

    both_refuse()
    path.write_bytes(b"12345678rest")
    assert chunks.read_file(path, out, 8, "chunk 0") == b"rest"
    assert out.tobytes() == b"12345678"
    monkeypatch.setattr(chunks, "check_size", lambda *_: None)
    path.write_bytes(b"")
    both_refuse()


@pytest.mark.parametrize(("row", "value"), [(1, 0.0), (2, np.nan), (0, np.inf)])
def test_text_features_that_are_zero_or_not_finite_are_named(place, row, value):
    text = np.ones((3, 4), np.float32)
    text[row] = value
    np.savez(place / "x.npz", features=np.ones((6, 4)), labels=np.arange(6) % 3, text=text)
    corruption(lambda: read_embeddings(place / "x.npz"), f"row {row} of text")


def test_a_list_of_unreadable_rows_that_is_no_file_is_corrupt(finished):
    path = finished.path
    known = manifest.read_manifest(path)
    listed = path / "quarantine.jsonl"
    listed.unlink()
    for _ in range(2):
        corruption(lambda: read_quarantine(path, known), listed)
        listed.mkdir(exist_ok=True)


def test_an_export_has_a_known_ending_and_a_folder(finished, place):
    refused(lambda: export(finished, place / "x.csv", KEYS), "'.csv'")
    refused(lambda: export(finished, place / "no/x.npz", KEYS), f"{place}/no")


@pytest.mark.parametrize("key", ["..", "-x", "x" * 120])
def test_features_have_names_that_a_folder_can_have(tmp_path, key):
    refused(lambda: Store.from_arrays({key: np.eye(3)}, path=tmp_path / "s.zarr"), key)


def test_a_lock_names_its_holder_and_tidies_up_after_killed_ones(place):
    path = place / "locks/x.lock"
    path.parent.mkdir()
    note = path.with_suffix(".json")
    unknown = lock.lock_holder(path)
    note.write_text('{"pid": 7, "host": "a"}')
    assert lock.lock_holder(path) == "process 7 on a"
    for said in ('{"pid": "x", "host": "a"}', '{"pid": 7}', "[]"):
        note.write_text(said)
        assert lock.lock_holder(path) == unknown
    left = path.parent / ".x.json.7.partial"
    other = path.parent / ".y.json.7.partial"
    left.touch()
    other.touch()
    with lock.hold_lock(path, "it", wait=False):
        assert json.loads(note.read_text())["pid"] == os.getpid()
        assert not left.exists()
        assert other.exists()
    assert not note.exists()
    nowhere = left / "x.lock"
    left.touch()
    machine_error(lambda: lock.hold_lock(nowhere, "it", wait=False).__enter__(), nowhere)
