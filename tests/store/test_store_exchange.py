"""Embeddings go out of a store and back in unchanged, and files that could run something or lie are refused."""

import errno
import json
import pickle
import struct

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrays import normals
from embedding_file import read_embeddings
from refusal import corruption, machine_error, refused
from tolerance import close
from toy_store import KEYS, whole

from fedcache.store import export as export_file
from fedcache.store.content import arrange
from fedcache.store.export import export
from fedcache.store.store import Store
from fedcache.store.verify import verify

ENDINGS = ("npz", "h5", "parquet", "safetensors")


@pytest.mark.parametrize("ending", ENDINGS)
def test_all_that_a_store_says_of_its_rows_goes_out_and_comes_back(tmp_path, ending):
    x = normals(0, 12, 4)
    x[2] = np.nan
    groups = {
        "hospital": ["b", "a", None, "é é"] * 3,
        "writer": [10, 2, 9] * 4,
        # Words that would be something else as columns of a file.
        "y": ["no", "yes"] * 6,
        "name": ["same"] * 12,
        "is_train": [True, False, True] * 4,
        "f0": [0, 1] * 6,
        "f1": [1, 0] * 6,
    }
    store = Store.from_arrays(
        {"net": x, "views": x.reshape(12, 2, 2).astype("f2")},
        labels=[3, 0, 2, -1, 1, 3] * 2,
        classes=["zebra", "10", "none", "9"],
        domains=["photo", "art", "photo", "art"] * 3,
        splits=[0, 1, 2, 0, 0, 1] * 2,
        text={"net": normals(1, 4, 4)},
        groups=groups,
        drop_nan=True,
        path=tmp_path / "s.zarr",
    )
    out = tmp_path / f"e.{ending}"
    assert export(store, out, list(store.arrays)) == 11
    back = Store.from_content(arrange(read_embeddings(out), "back"), tmp_path / "back.zarr")
    rows = np.delete(np.arange(12), 2)
    assert back.groups == store.groups == sorted(groups)
    for name in groups:
        assert back.group(name).equals(store.group(name).take(rows)), name
    ours = back.samples
    theirs = store.samples
    assert ours.classes == theirs.classes
    assert ours.domains == theirs.domains
    assert ours.name == tuple(theirs.name[row] for row in rows)
    for column in ("label", "domain", "split"):
        assert np.array_equal(getattr(ours, column), getattr(theirs, column)[rows]), column
    for info, name in zip(back.arrays, store.arrays, strict=True):
        assert back.arrays[info].dtype == store.arrays[name].dtype
        assert np.array_equal(back.reader(info).all(), store.reader(name).rows(rows))
    assert verify(back.path).ok
    key, _ = store.arrays
    assert close(back.text(key), store.text("net"), 1)
    if ending == "parquet":  # which shows words to other programs; row 2 is left out
        table = pq.read_table(out).to_pydict()
        assert table["labels"][:3] == ["9", "zebra", None]
        assert table["domain"][:3] == ["photo", "art", "art"]
        assert table["split"][6:9] == ["test", "validation", "train"]


def test_the_order_of_a_files_keys_is_no_content(tmp_path):
    given = {
        "features/b": normals(0, 6, 3),
        "features/a": normals(1, 6, 2),
        "labels": np.arange(6) % 2,
        "text/b": normals(2, 2, 3),
        "text/a": normals(3, 2, 2),
    }

    def digest(columns):
        np.savez(tmp_path / "e.npz", **columns)
        return arrange(read_embeddings(tmp_path / "e.npz"), "mine").dataset["digest"]

    one = digest(given)
    assert digest(dict(reversed(given.items()))) == one
    assert digest({**given, "text/a": given["text/a"][::-1]}) != one


@pytest.mark.parametrize("value", [np.inf, 1e39], ids=["not finite", "not float32"])
def test_rows_that_are_not_finite_are_named_by_their_place_in_the_file(tmp_path, value):
    x = np.ones((5, 2))
    x[3, 1] = value
    np.savez(tmp_path / "x.npz", X=x, name=np.array(["e", "d", "c", "b", "a"]))
    corruption(lambda: arrange(read_embeddings(tmp_path / "x.npz"), "x"), "row 3")


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def object_npz(path):
    np.savez(path, allow_pickle=True, X=np.array([[Bomb()]], dtype=object))


def pickle_as_npy(path):
    path.write_bytes(pickle.dumps(Bomb()))


def npy_header_that_lies(path):
    header = {"descr": "<f4", "fortran_order": False, "shape": (10**6, 10**6)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(b"\0" * 8)


def torn_npz(path):
    np.savez(path, X=np.ones((4, 4)))
    path.write_bytes(path.read_bytes()[:-30])


def external_link(path):
    with h5py.File(path, "w") as file:
        file["features"] = h5py.ExternalLink("/etc/passwd", "x")


def external_storage(path):
    secret = path.parent / "secret"
    secret.write_bytes(b"\0" * 64)
    with h5py.File(path, "w") as file:
        file.create_dataset("features", (4, 4), "f4", external=[(str(secret), 0, 64)])


def virtual_dataset(path):
    layout = h5py.VirtualLayout((4, 4), "f4")
    layout[:] = h5py.VirtualSource(str(path.parent / "other.h5"), "x", (4, 4))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("features", layout)


def a_group_inside_itself(path):
    with h5py.File(path, "w") as file:
        file["a/loop"] = file["/"]


def offsets_beyond_the_file(path):
    header = {"features": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0" * 8)


def extension_type(path):
    storage = pa.array([b"0123456789abcdef"] * 2, pa.binary(16))
    pq.write_table(pa.table({"features": pa.ExtensionArray.from_storage(pa.uuid(), storage)}), path)


def pickled_extension_type(path):
    lists = pa.list_(pa.float32())
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Bomb()),
    }
    schema = pa.schema([pa.field("features", lists, metadata=metadata)])
    pq.write_table(pa.table([pa.array([[1.0], [2.0]], lists)], schema=schema), path)


def ragged_rows_that_would_reshape(path):
    pq.write_table(pa.table({"features": [[1.0], [2.0, 3.0, 4.0]]}), path)  # four values, two rows


HOSTILE = {
    "npz": (object_npz, torn_npz),
    "npy": (pickle_as_npy, npy_header_that_lies),
    "h5": (external_link, external_storage, virtual_dataset, a_group_inside_itself),
    "safetensors": (offsets_beyond_the_file,),
    "parquet": (extension_type, pickled_extension_type, ragged_rows_that_would_reshape),
}


@pytest.mark.parametrize(
    ("ending", "make"), [(ending, make) for ending, made in HOSTILE.items() for make in made]
)
def test_hostile_and_broken_files_are_refused_in_words(tmp_path, ending, make):
    file = tmp_path / f"bad.{ending}"
    make(file)
    refused(lambda: read_embeddings(file), file)


ONES = np.ones((3, 2))


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"y": np.arange(3)}, "features"),
        ({"X": ONES[:, 0]}, "X"),
        ({"X": ONES.astype(int)}, "float32"),
        ({"X": ONES[:0]}, "0 rows"),
        ({"X": ONES, "features": ONES}, "both"),
        ({"X": ONES, "features/b": np.ones((4, 2))}, "4"),
        ({"X": ONES, "split": np.array([False, True, True])}, "'False'"),
        ({"X": ONES, "y": np.arange(3), "text": np.eye(3)}, "[classes, 2]"),
        ({"X": ONES, "y": np.arange(3), "text/other": ONES}, "text/c"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_named(tmp_path, columns, named):
    np.savez(tmp_path / "c.npz", **columns)
    refused(lambda: read_embeddings(tmp_path / "c.npz"), named)


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    def full(file, *_):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    store = whole(tmp_path / "s.zarr")
    monkeypatch.setitem(export_file.WRITERS, ".npz", full)
    machine_error(lambda: export(store, tmp_path / "e.npz", KEYS), "disk")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.zarr"]


def test_domains_of_every_row_are_the_domain_of_every_row(tmp_path):
    file = tmp_path / "rows.npz"

    def read(**columns):
        np.savez(file, features=np.eye(3), labels=[0, 1, 0], **columns)
        found = read_embeddings(file)
        return [found.domain_names[d] for d in found.domains]

    assert read(domains=["ink", "ink", "chalk"]) == ["ink", "ink", "chalk"]
    assert read(domains=[0, 0, 1]) == ["0", "0", "1"]
    assert read(domains=["a", "b"], domain=[1, 0, 1]) == ["b", "a", "b"]
    refused(lambda: read(domains=["a", "b"]), "2 domains")
    refused(lambda: read(domains=["a", "a"], domain=[0, 1, 0]), "'a'")
