"""The bytes of a store, kept for ever: what is written today equals the kept files, and those still read."""

import hashlib
import json
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import xarray
import zarr
from golden_store import GOLDEN, lay_golden
from refusal import refused, store_error
from toy_store import (
    ALL_BAD,
    CHUNK,
    KEYS,
    ROWS,
    content,
    create,
    fill,
    samples,
    values,
    whole,
    write,
    writer,
)

from fedcache.errors import Exit
from fedcache.store.chunks import decode_strings, encode_strings, write_chunk_file
from fedcache.store.export import write_shards
from fedcache.store.reader import MAPS
from fedcache.store.store import Samples, Store, put_groups
from fedcache.store.verify import verify
from fedcache.tables.groups import Group


def printable(raw):
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return "hex:" + raw.hex()
    return "text:" + text if text.isprintable() or text.endswith("\n") else "hex:" + raw.hex()


def write_all(store, key, x, bad=None, **changed):
    """A finished array of these values."""
    with writer(store, key, shape=x.shape, dtype=str(x.dtype), **changed) as w:
        for chunk in w.missing():
            start = chunk * w.chunk_rows
            w.write(chunk, x[start : start + w.chunk_rows], bad)
        w.complete()
    return w


def store_of(path, held):
    return Store.create(path, held, dataset={"slug": "t", "digest": "0", "template": None})


def test_a_store_has_the_bytes_of_the_golden_file(finished):
    kept = json.loads((GOLDEN / "store-format-1-named-axes.json").read_text())
    assert {name: printable(raw) for name, raw in content(finished.path).items()} == kept


@pytest.mark.parametrize("golden", ["store-format-1.json", "store-format-1-named-axes.json"])
def test_a_store_of_format_1_still_reads(place, golden):
    """The first file is of a version that gave the axes of arrays no names."""
    lay_golden(place, golden)
    assert verify(place).problems == []
    store = Store.open(place)
    for key in KEYS:
        assert np.array_equal(store.reader(key).all(), values(key), equal_nan=True)
    assert store.samples.name == samples().name
    assert np.array_equal(store.samples.label, samples().label)
    assert np.flatnonzero(store.samples.ok == 0).tolist() == sorted(ALL_BAD)
    assert np.array_equal(store.text("a", ["a photo of a {}."]), np.eye(3, 3))
    assert store.partition("p") == {"clients": [[0, 2], [3]]}


def test_the_bytes_of_a_chunk_by_hand(tmp_path):
    # 1.0 = 0x3c00, -2.0 = 0xc000, 65504 = 0x7bff, little-endian; one row of two is missing: NaN = 0x7e00 twice
    crc = write_chunk_file(
        tmp_path / "c/0/0", np.array([[1.0, -2.0], [65504, 0]], np.float16), 3, "float16"
    )
    payload = bytes.fromhex("003c00c0" + "ff7b0000" + "007e007e")
    assert crc == google_crc32c.value(payload)
    assert (tmp_path / "c/0/0").read_bytes() == payload + crc.to_bytes(4, "little")


def test_crc32c_is_castagnoli():
    # the check value of RFC 3720, appendix B.4's polynomial
    assert google_crc32c.value(b"123456789") == 0xE3069283
    assert google_crc32c.value(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4: 32 bytes of zeros


def test_the_bytes_of_names_by_hand():
    raw = "02000000" + "02000000c3bc" + "00000000"
    assert encode_strings(["ü", ""]).hex() == raw
    assert decode_strings(bytes.fromhex(raw)) == ("ü", "")
    assert decode_strings(bytes(4)) == ()
    one = "01000000"
    for torn in ("", one + "02000000c3", one + "02000000c3bc" + "00", one + "01000000" + "c3"):
        with pytest.raises(ValueError, match=r"."):
            decode_strings(bytes.fromhex(torn))


def test_the_manifest_ends_with_the_digest_of_the_rest(store):
    raw = (store.path / "manifest.json").read_bytes()
    body = raw[:-77] + b"}"
    claimed = raw[-66:-2]
    assert raw.endswith(b'"sha256":"' + claimed + b'"}')
    assert hashlib.sha256(body).hexdigest().encode() == claimed
    one_way = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": False}
    assert body == json.dumps(json.loads(body), **one_way).encode()


# of the manifest, which is no Zarr file
@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
def test_xarray_opens_a_store_with_arrays_of_several_widths(tmp_path):
    features = {"narrow": np.ones((7, 2), np.float32), "wide": np.zeros((7, 3), np.float32)}
    labels = ["zebra", "ant"] * 3 + ["ant"]
    texts = {"wide": np.eye(2, 3)}
    store = Store.from_arrays(features, labels=labels, text=texts, path=tmp_path / "s.zarr")
    tree = xarray.open_datatree(store.path, engine="zarr", consolidated=False)
    for key in store.arrays:
        found = tree["features"][key]
        assert found.dims == ("row", f"view_{key}", f"feature_{key}")
        assert np.array_equal(found.to_numpy(), store.reader(key).all())
    found = tree["samples"]["label"]
    assert found.dims == ("row",)
    assert np.array_equal(found.to_numpy(), store.samples.label)


def test_zarr_reads_what_fedcache_writes_and_sees_no_unfinished_array(store):
    fill(store, KEYS[0], chunks=3)
    assert "a-00000000" not in zarr.open_group(store.path / "features", mode="r")
    store = whole(store.path)
    group = zarr.open_group(store.path, mode="r")
    for key in KEYS:
        array = group[f"features/{key}"]
        assert array.shape == (ROWS, 1, 3)
        assert array.chunks == (CHUNK, 1, 3)
        assert array.dtype == np.float16
        assert np.array_equal(array[:], values(key), equal_nan=True)
    for column in ("uid", "label", "domain", "split", "ok"):
        found = group[f"samples/{column}"][:]
        held = getattr(store.samples, column)
        assert found.dtype == held.dtype
        assert np.array_equal(found, held)
    assert tuple(group["samples/name"][:]) == store.samples.name
    ((_, text),) = group["text/a"].arrays()
    assert np.array_equal(text[:], store.text("a"))
    assert group["samples/label"].attrs["classes"] == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("dtype", "fill_value"), [("float32", None), ("uint8", 0), ("int32", -1), ("int16", -1)]
)
def test_zarr_reads_every_dtype_and_the_rows_beyond_the_end_are_the_fill_value(
    store, dtype, fill_value
):
    x = np.arange(ROWS * 2).reshape(ROWS, 2).astype(dtype)
    w = write_all(store, "d-0", x)
    assert np.array_equal(zarr.open_group(store.path, mode="r")["features/d-0"][:], x)
    beyond = np.frombuffer((w.path / "c/3/0").read_bytes()[:-4], dtype)[4:]
    assert np.isnan(beyond).all() if fill_value is None else (beyond == fill_value).all()


def test_zarr_raises_on_a_flipped_bit_wherever_it_is(finished):
    array = zarr.open_group(finished.path, mode="r")[f"features/{KEYS[1]}"]
    chunk = finished.path / f"features/{KEYS[1]}/c/1/0/0"
    raw = chunk.read_bytes()
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        chunk.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"(?i)checksum"):
            array[4:8]


def test_a_store_without_rows_is_a_store(place):
    none = np.zeros(0)
    held = Samples(np.zeros((0, 16)), (), none, none, none, none, ("x",), ("d",))
    store = store_of(place / "e.zarr", held)
    assert store.rows == 0
    assert store.samples.name == ()
    assert store.samples.uid.shape == (0, 16)
    write_all(store, KEYS[0], np.zeros((0, 1, 3), np.float16))
    assert store.reader(KEYS[0]).all().shape == (0, 1, 3)
    assert store.reader(KEYS[0]).rows(np.array([], np.int64)).shape == (0, 1, 3)
    assert verify(store.path).problems == []


def test_what_is_there_already_is_left_alone(place):
    (place / "file").write_text("mine")
    (place / "folder").mkdir()
    (place / "folder/x").write_text("mine")
    (place / "empty").mkdir()
    for name in ("file", "folder"):
        store_error(lambda name=name: create(place / name), name)
    assert create(place / "empty").rows == ROWS


def test_many_chunks_need_few_descriptors(place):
    store = store_of(place / "s.zarr", samples(rows=200))
    assert MAPS < 200  # more chunks of one row than are mapped at a time
    x = np.arange(200, dtype=np.float32).reshape(200, 1, 1)
    write_all(store, "m-0", x, chunk_rows=1)
    reader = store.reader("m-0")
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    assert np.array_equal(reader.all(), x)
    assert [block.item() for _, block in reader.blocks()] == list(range(200))
    assert len(list(descriptors.iterdir())) <= before + MAPS


def test_bad_rows_have_one_spelling_of_nan(store):
    odd = np.full((4, 1, 3), np.nan, np.float32)
    odd[1] = np.array([0xFFC12345], np.uint32).view(np.float32)  # a NaN with sign and payload
    with writer(store, KEYS[0]) as w:
        w.write(0, odd, dict.fromkeys(range(4), "truncated"))
    assert (w.path / "c/0/0/0").read_bytes()[:-4] == bytes.fromhex("007e") * 12


def test_what_a_store_does_not_hold_is_named_with_the_command_that_makes_it(store):
    fill(store, KEYS[1])
    store = Store.open(store.path)
    for call, *words in (
        (lambda: store.partition("p"), "s.zarr", "'p'"),
        (lambda: store.text("a"), f"fedcache extract --store {store.path} --backbones a"),
        (lambda: store.use_text("a", ["{}"]), "s.zarr"),
        (lambda: store.reader("c-1"), "c-1", KEYS[1]),
    ):
        store_error(call, *words)


def test_the_text_features_written_or_chosen_last_are_the_current_ones(store):
    one = np.eye(3, 4, dtype=np.float32)
    two = np.eye(3, 4, 1, dtype=np.float32)
    weights = {"weights": "w"}
    store.put_text("a b", ["one {}"], one, weights)
    store.put_text("a b", ["two {}"], two, weights)
    assert store.templates("a b") == ["two {}"]
    assert np.array_equal(store.text("a b"), two)
    assert np.array_equal(store.text("a b", ["one {}"]), one)
    assert store.has_text("a b", ["one {}"], **weights)
    assert not store.has_text("a b", ["one {}"], weights="v")
    assert store.use_text("a b", ["one {}"], **weights)
    assert not store.use_text("a b", ["one {}"]), "it is current already"
    assert np.array_equal(Store.open(store.path).text("a b"), one)
    store.put_text("a b", ["two {}"], one, weights)
    assert np.array_equal(store.text("a b"), one), "the same templates and weights again replace"
    assert [e["templates"] for e in store.texts["a_b"]] == [["one {}"], ["two {}"]]


def test_rows_for_scikit_learn_are_the_readable_ones_of_a_split_side_by_side(finished):
    one, two = (values(key)[:, 0].astype(np.float32) for key in KEYS)
    # rows 1, 9 and 13 cannot be read; of the others 0, 3, 6 and 12 have split 1, which is the test set
    train = [2, 4, 5, 7, 8, 10, 11]
    test = [0, 3, 6, 12]
    x, y = finished.Xy()
    assert np.array_equal(x, np.hstack([one, two])[train])
    assert x.dtype == np.float32
    assert y.dtype == np.int64
    assert y.tolist() == [2, 1, 1, 1, 2, 1, 2]
    for split, rows in (("test", test), ("validation", []), (None, sorted([*train, *test]))):
        x, y = finished.Xy("b", split)
        assert np.array_equal(x, two[rows])
        assert len(y) == len(rows)
    refused(lambda: finished.Xy(split="tets"), "Did you mean 'test'")
    frame = finished.frame()
    row = {
        "uid": samples().uid[5].tobytes().hex(),
        "name": "train/ß/005.png",
        "label": 1,
        "class": "y",
        "domain": "chalk",
        "split": "train",
        "ok": True,
    }
    assert frame.iloc[5].to_dict() == row
    assert frame["ok"].tolist() == [i not in ALL_BAD for i in range(ROWS)]


def test_an_array_that_lacks_chunks_is_not_completed(store):
    with writer(store, KEYS[0]) as w:
        for chunk in (2, 0, 1):
            write(w, chunk, KEYS[0])
        assert w.missing() == [3]
        assert w.kept == [0, 1, 2]
        assert w.bad == {1: "truncated", 9: "not an image"}
        refused(w.complete, "[3]", code=Exit.BUG)


def test_a_client_store_has_its_rows_bytes_groups_texts_and_what_its_parent_could_not_read(
    finished, place
):
    (entry,) = finished.texts["a"]
    other = np.eye(3, 3, 1, dtype=np.float32)
    finished.put_text("a", entry["templates"], other, {"backbone": "a", "weights": "others"})
    put_groups(finished, {"site": Group.of(np.arange(ROWS) // 4)})
    # Of images, row 9 is listed, as an array of features could not read it; row 2 is black, and nothing is wrong.
    images = np.full((ROWS, 1, 3), 7, np.uint8)
    images[[2, 9, 10]] = 0
    images[10, 0, -1] = 1
    write_all(finished, "pixels-00000000", images, {9: "not an image"})
    rows = np.array([0, 1, 2, 9, 10, 12, 13])
    clients = [("ink", rows[:4], rows[4:]), ("ch/alk", np.array([7, 9]), np.array([1, 3]))]
    for _ in range(2):  # the second time finds them there
        paths = write_shards(finished, clients, place / "clients")
    assert [p.name for p in paths] == ["0-ink.zarr", "1-ch_alk.zarr"]
    for path, (name, train, test) in zip(paths, clients, strict=True):
        shard = Store.open(path)
        held = np.array(shard.dataset["shard"]["rows"])
        assert shard.dataset["shard"]["client"] == name
        assert set(held) == {*train, *test}
        assert np.array_equal(held[shard.samples.split == 0], np.sort(train))
        for key in finished.arrays:
            assert shard.reader(key).all().tobytes() == finished.reader(key).rows(held).tobytes()
        assert shard.texts == finished.texts, "each with the numbers of its own weights"
        assert np.array_equal(shard.text("a"), finished.text("a"))
        assert shard.group("site").values() == [str(row // 4) for row in held]
        assert verify(path).ok
    shard = Store.open(paths[0])
    listed = {e["row"]: e["reason"] for e in shard.quarantined()}
    assert listed == {1: "truncated", 3: "not an image", 6: "too large"}
    assert shard.samples.ok.tolist() == [1, 0, 1, 0, 1, 1, 0]


def test_rows_given_as_unreadable_are_listed_from_the_start(place):
    given = samples()
    given.ok[[2, 9]] = 0
    store = store_of(place / "s.zarr", given)
    fill(store, KEYS[0])
    reasons = {e["row"]: e["reason"] for e in store.quarantined()}
    unknown = "given as unreadable"
    assert reasons == {1: "truncated", 2: unknown, 9: unknown}
