"""Ingest reads a file block by block: the same store as of the whole file, in the memory of one block."""

import hashlib
import tracemalloc
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from arrays import normals
from damage import flip_bit
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from refusal import refused
from safetensors.numpy import save_file

from fedcache import Store
from fedcache.store import content as contents
from fedcache.store.chunks import all_finite, decode_strings, encode_strings
from fedcache.store.content import arrange
from fedcache.store.samples import held_out
from fedcache.store.verify import verify
from fedcache.tables import table_files as tables
from fedcache.tables.embeddings import open_embeddings
from fedcache.tables.words import EqualStrings, FileRows, numbered

ENDINGS = ("npz", "npy", "h5", "parquet", "safetensors")
ROWS = 1500


def values(*shape, dtype="float16"):
    return normals(0, *shape).astype(dtype)


def write(path, x, **columns):
    """Features and other columns as a file of the ending of ``path``; npy has features alone."""
    given = {"features": x, **columns}
    if path.suffix == ".npy":
        np.save(path, x)
    elif path.suffix == ".npz":
        np.savez_compressed(path, **given)
    elif path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            for name, v in given.items():
                file.create_dataset(name, data=v.astype("S") if v.dtype.kind == "U" else v)
    elif path.suffix == ".safetensors":
        save_file({k: v for k, v in given.items() if v.dtype.kind != "U"}, path)
    else:
        lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x[0].size)
        others = {k: pa.array(v) for k, v in columns.items()}
        pq.write_table(pa.table({"features": lists, **others}), path, row_group_size=400)
    return path


def content_of(file):
    return arrange(open_embeddings(file), "e")


def rows_of(store):
    return store.reader(*store.arrays).all()[:, 0]


@pytest.mark.parametrize("ending", ENDINGS)
def test_blocks_are_the_rows_in_order(tmp_path, ending):
    x = values(ROWS, 6)
    rows = open_embeddings(write(tmp_path / f"e.{ending}", x)).features["e"]
    assert isinstance(rows, FileRows)
    for size in (7, 400, 512, 4 * ROWS):
        blocks = list(rows.blocks(size))
        assert [len(b) for b in blocks] == [min(size, ROWS - at) for at in range(0, ROWS, size)]
        assert np.array_equal(np.concatenate(blocks)[:, 0], x)
    assert np.array_equal(rows.whole()[:, 0], x)


def test_parts_of_any_size_become_blocks_of_one_size():
    x = values(50, 3)
    rows = FileRows(Path("x.npy"), x.shape, x.dtype, lambda _: iter(np.split(x, [3, 12, 32, 33])))
    blocks = list(rows.blocks(4))
    assert [len(block) for block in blocks] == 12 * [4] + [2]
    assert np.array_equal(np.concatenate(blocks), x)


def test_a_large_array_has_few_chunk_files(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "LARGE", 10_000)
    monkeypatch.setattr(contents, "CHUNK_BYTES", 13_000)
    file = write(tmp_path / "e.npz", values(2500, 6), labels=np.arange(2500) % 3)
    store = Store.from_content(content_of(file), tmp_path / "s.zarr")
    (info,) = store.arrays.values()
    assert info.chunk_rows == 1024
    assert len(info.chunks) == 3
    assert np.array_equal(rows_of(store), values(2500, 6))
    assert verify(store.path).ok


def test_a_row_is_named_by_its_values_and_an_array_by_all_of_them(tmp_path):
    x = values(ROWS, 2, 6)
    z = values(ROWS, 3, dtype="float64")
    np.savez(tmp_path / "e.npz", **{"features/b": x, "features/a": z})
    content = content_of(tmp_path / "e.npz")
    single = z.astype(np.float32)
    for row in (0, 511, 512, ROWS - 1):
        wanted = hashlib.sha256(single[row].tobytes() + x[row].tobytes()).digest()[:16]
        assert content.samples.uid[row].tobytes() == wanted
    recipes = [array.recipe for array in content.arrays.values()]
    digests = {"a": hashlib.sha256(single).hexdigest(), "b": hashlib.sha256(x).hexdigest()}
    assert {recipe["backbone"]: recipe["weights"] for recipe in recipes} == digests


def test_rows_in_another_order_are_the_same_store(tmp_path):
    def arranged(name, rows):
        labels = np.arange(ROWS) % 5
        names = np.array([f"{i:05}" for i in range(ROWS)])
        file = write(tmp_path / name, values(ROWS, 6)[rows], labels=labels[rows], name=names[rows])
        content = content_of(file)
        # The backbone is called as the file, and is no part of the rows.
        return content.dataset["digest"], content.values

    order = np.random.default_rng(1).permutation(ROWS)
    assert arranged("a.npz", np.arange(ROWS)) == arranged("b.npz", order)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending",
    [
        "npy",
        "csv",
        *(pytest.param(e, marks=pytest.mark.full) for e in (*ENDINGS[2:], "npz", "wide.parquet")),
    ],
)
def test_a_file_needs_the_memory_of_one_block(tmp_path, ending, monkeypatch):
    most = 1 << 18 if ending in ("csv", "wide.parquet") else 1 << 20
    for module, name in ((contents, "LARGE"), (contents, "CHUNK_BYTES"), (tables, "TEXT_BLOCK")):
        monkeypatch.setattr(module, name, most)
    file = tmp_path / f"e.{ending}"
    x = values(32_000, 256)  # 16 MB
    if most < 1 << 20:
        x = values(10_000, 100, dtype="float32").round(2)  # 4 MB
        wide = pa.table({f"f{i}": column for i, column in enumerate(x.T)})
        if ending == "csv":
            pyarrow.csv.write_csv(wide, file)
        else:
            pq.write_table(wide, file, row_group_size=2000)
        del wide
    else:
        write(file, x)
    held = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        content = content_of(file)
        allocated = pa.total_allocated_bytes() - held
        store = Store.from_content(content, tmp_path / "s.zarr")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    columns = len(x) * (16 + 4 + 2 + 1 + 1 + 150)  # names are objects
    assert peak < 6 * most + columns, f"{peak / 2**20:.1f} MiB"
    assert allocated < 1 << 21
    assert np.array_equal(rows_of(store), x)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    file = write(tmp_path / "e.npy", values(ROWS, 6))
    content = content_of(file)
    write(file, -values(ROWS, 6))
    refused(lambda: Store.from_content(content, tmp_path / "s.zarr"), "rows 0 to 511")
    write(file, values(ROWS, 6))
    store = Store.from_content(content, tmp_path / "s.zarr")
    assert np.array_equal(rows_of(store), values(ROWS, 6))


def test_a_zip_whose_sum_is_wrong_is_refused(tmp_path):
    file = tmp_path / "e.npz"
    np.savez(file, features=values(ROWS, 6))
    flip_bit(file, 5000)
    refused(lambda: content_of(file), "Bad CRC", file)


@given(
    st.lists(st.text(max_size=4), max_size=9)
    | st.lists(st.sampled_from(["ab", "cd", "é", "0\0"]), max_size=9)
)
def test_strings_come_back(words):
    raw = encode_strings(words)
    assert decode_strings(raw) == tuple(words)
    for broken in (raw[:-1], raw + b"x", raw[4:]):
        with suppress(ValueError):
            assert decode_strings(broken) != tuple(words)


@pytest.mark.slow
@given(
    hnp.arrays(
        st.sampled_from(["f2", "f4", "f8", ">f2", ">f4"]),
        hnp.array_shapes(max_dims=2, min_side=0),
        elements=st.floats(allow_nan=True, allow_infinity=True, width=16),
    )
)
def test_finite_is_what_numpy_says(x):
    assert all_finite(x) == bool(np.isfinite(x).all())


@examples(30, 100)
@given(st.data())
def test_the_held_out_fifth_has_the_smallest_uids(data):
    eight = st.sampled_from([bytes(8), b"\0" * 7 + b"\1", b"\xff" * 8]) | st.binary(
        min_size=8, max_size=8
    )
    # many with the same first half
    row = st.tuples(st.integers(-1, 2), st.integers(0, 1), eight, eight)
    rows = data.draw(st.lists(row, max_size=40))
    label = np.array([r[0] for r in rows], np.int32)
    domain = np.array([r[1] for r in rows], np.int16)
    uid = np.frombuffer(b"".join(r[2] + r[3] for r in rows), np.uint8).reshape(-1, 16)
    chosen = held_out(label, domain, uid, np.ones(len(rows), bool))
    for group in {r[:2] for r in rows}:
        of_group = [i for i, r in enumerate(rows) if r[:2] == group]
        of_group.sort(key=lambda i: (rows[i][2:], i))
        count = max(1, len(of_group) // 5) if len(of_group) > 1 else 0
        assert [bool(chosen[i]) for i in of_group] == [i < count for i in range(len(of_group))]


@given(st.integers(1, 4), st.integers(1, 30), st.data())
def test_numbered_names_are_cut_out_of_one_text_and_are_what_a_tuple_is(length, count, data):
    words = tuple(f"{i % 10**length:0{length}d}" for i in range(count))
    found = decode_strings(encode_strings(words))
    assert isinstance(found, EqualStrings)
    assert len(found) == len(words)
    assert tuple(found) == words
    assert repr(found) == repr(words)
    assert found == words
    assert found != words[:-1]
    assert found.increasing == all(a < b for a, b in pairwise(words))
    place = data.draw(st.slices(len(words)))
    assert tuple(found[place]) == words[place]
    number = data.draw(st.integers(-len(words), len(words) - 1))
    assert found[number] == words[number]
    for beyond in (len(words), -len(words) - 1):
        with pytest.raises(IndexError):
            found[beyond]
    in_order = numbered(count)
    assert in_order == tuple(f"{i:0{len(str(count - 1))}d}" for i in range(count))
    assert in_order.increasing
