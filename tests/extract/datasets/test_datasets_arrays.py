"""Images in arrays: the shape says how they lie, names say what a column is, and nothing is read that need not be."""

import zipfile

import h5py
import numpy as np
import pytest
from damage import flip_bit
from hypothesis import given, settings
from hypothesis import strategies as st
from make_images import random_bytes
from no_dataset import damaged_dataset, no_dataset
from opened import open_dataset, peek
from refusal import bad_image, corruption, machine_error, refused
from sent import sent
from trap import Trap

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.datasets import archives, row_sources
from fedcache.extract.datasets import columns as column_names

RGB = random_bytes(0, 20, 6, 8, 3)
GRAY = random_bytes(1, 20, 6, 8)
LABELS = np.arange(20) % 4


def write(path, **columns):
    """A file of columns, in the format of its ending; ``.npz`` compressed where its name says packed."""
    if path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            for name, value in columns.items():
                array = np.asarray(value)
                chunks = (3, *array.shape[1:]) if array.ndim > 2 else None
                file.create_dataset(
                    name,
                    data=array.astype("S") if array.dtype.kind == "U" else array,
                    chunks=chunks,
                    compression="gzip" if chunks else None,
                )
    elif path.suffix == ".npz":
        (np.savez_compressed if "packed" in path.name else np.savez)(path, **columns)  # type: ignore[arg-type]
    else:
        path.mkdir()
        for name, value in columns.items():
            np.save(path / f"{name}.npy", np.asarray(value))
    return path


def opened(path, tail=""):
    return open_dataset(f"arrays:{path}{tail}")


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (GRAY, GRAY),
        (GRAY[..., None], GRAY),
        (GRAY[:, None], GRAY),
        (RGB, RGB),
        (RGB.transpose(0, 3, 1, 2).copy(), RGB),
    ],
)
def test_the_shape_says_how_the_pixels_lie_and_every_format_gives_the_same_dataset(
    tmp_path, array, expected
):
    plain = opened(write(tmp_path / "b.npz", images=expected, y=LABELS))
    for name in ("a.npz", "packed.npz", "a.h5", "a"):
        data = opened(write(tmp_path / name, images=array, labels=LABELS))
        assert data.classes == ("0", "1", "2", "3")
        assert data.domains == ("all",)
        assert data.label.tolist() == LABELS.tolist()
        assert data.digest == plain.digest
        assert "6 x 8" in data.reading
        for source in (data.source, sent(data.source)):
            assert all(np.array_equal(source.read(row), expected[row]) for row in (0, 19, 7, 8, 3))


@pytest.mark.slow
@settings(max_examples=30)
@given(
    rows=st.integers(1, 40),
    packed=st.booleans(),
    order=st.permutations(range(12)),
    block=st.sampled_from([1, 5, 1 << 20]),
)
def test_rows_read_in_any_order_and_any_blocks_are_those_of_the_array(
    tmp_path_factory, rows, packed, order, block
):
    images = random_bytes(rows, rows, 2, 3)
    path = tmp_path_factory.mktemp("any") / ("packed.npz" if packed else "plain.npz")
    write(path, images=images)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sources, "BLOCK", block * 6)
        data = opened(path)
        for row in order:
            assert np.array_equal(data.source.read(row % rows), images[row % rows])


def test_a_compressed_array_is_unpacked_once_when_its_rows_are_read_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(row_sources, "BLOCK", 3 * 48)
    data = opened(write(tmp_path / "packed.npz", images=GRAY, labels=LABELS))
    begun = []
    real = row_sources.Packed.open
    monkeypatch.setattr(
        row_sources.Packed, "open", lambda packed: begun.append(packed) or real(packed)
    )
    fresh = sent(data.source)
    for row in range(20):
        assert np.array_equal(fresh.read(row), GRAY[row])
    assert len(begun) == 1


def test_rows_of_a_split_without_labels_are_no_class(tmp_path):
    for labels in (LABELS, LABELS.astype(float), np.array(list("abcd"))[LABELS]):
        data = opened(write(tmp_path / "a.npz", x_train=RGB, y_train=labels, x_test=GRAY))
        assert len(data.classes) == 4
        assert ((data.label < 0) == (data.split == 1)).all()
    named = {"x_train": RGB, "y_train": LABELS, "x_test": GRAY, "class_names": list("wxyz")}
    assert opened(write(tmp_path / "b.npz", **named)).classes == ("w", "x", "y", "z")


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (RGB / 255, ["float64", "255 * images"]),
        (RGB.astype("u2"), ["uint16", "images // 257"]),
        (GRAY > 100, ["bool", "255 * images.astype('uint8')"]),
        (RGB.reshape(20, -1), ["[20, 144]", "reshape"]),
        (np.concatenate([RGB, RGB[..., :1]], 3), ["[20, 6, 8, 4]", "images[..., :3]"]),
        (np.asfortranarray(RGB), ["ascontiguousarray"]),
        (RGB[:0], ["no images"]),
    ],
)
def test_what_is_no_pixels_is_refused_with_what_makes_them(tmp_path, images, words):
    refused(lambda: opened(write(tmp_path / "a.npz", images=images)), *words)


def test_a_file_without_images_says_what_it_holds(tmp_path):
    path = write(tmp_path / "a.npz", features=np.ones((4, 3)), scans=RGB, more=RGB)
    no_dataset(f"arrays:{path}", "features float64 [4, 3]", "scans uint8", "--images-key")
    assert np.array_equal(opened(path, "?images=more").source.read(2), RGB[2])
    alone = write(tmp_path / "b.npz", scans=RGB, features=np.ones((20, 3)))
    assert "from scans, no labels" in opened(alone).reading


def test_pickled_labels_are_refused_and_nothing_in_them_runs(tmp_path):
    ran = tmp_path / "ran"
    trap = np.array([Trap(ran)] * 20, dtype=object)
    refused(
        lambda: opened(write(tmp_path / "a.npz", images=RGB, labels=trap)), "it names posix.mkdir"
    )
    assert not opened(write(tmp_path / "b.npz", images=RGB, labels=LABELS, notes=trap)).groups
    assert not ran.exists()


@pytest.mark.parametrize("name", ["a.npz", "packed.npz", "a.h5"])
def test_a_cut_or_altered_file_ends_with_one_sentence(tmp_path, name):
    path = write(tmp_path / name, images=RGB, labels=LABELS)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(FedcacheError) as caught:
        opened(path)
    assert caught.value.code in (Exit.USAGE, Exit.CORRUPT)
    if name != "a.h5":  # a zip holds checksums
        path.write_bytes(raw)
        flip_bit(path, 400)
        damaged_dataset(f"arrays:{path}", name)


def test_no_file_of_arrays_is_to_be_unpacked_into_a_folder_of_images(tmp_path, monkeypatch):
    path = write(tmp_path / "packed.npz", images=np.zeros_like(RGB))
    monkeypatch.setattr(archives, "FREE_BYTES", 0)
    monkeypatch.setattr(archives, "MAX_EXPANSION", 1)
    assert "zip -r0 new.npz *" in corruption(lambda: opened(path), "would unpack").hint
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("../a.npy", b"")
    assert "pack them again" in corruption(lambda: opened(path), "leaves the archive").hint


def test_rows_of_a_damaged_block_are_bad_images_and_the_others_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(row_sources, "BLOCK", 1)  # blocks of one chunk, three rows
    path = write(tmp_path / "a.h5", images=RGB, labels=LABELS)
    with h5py.File(path) as file:
        at = file["images"].id.get_chunk_info(2).byte_offset
    raw = bytearray(path.read_bytes())
    raw[at : at + 40] = bytes(40)
    path.write_bytes(raw)
    data = opened(path)
    assert "3 cannot be read and will be skipped and listed" in data.reading
    for row in range(20):
        if row in (6, 7, 8):
            bad_image(data.source.read, row)
        else:
            assert np.array_equal(data.source.read(row), RGB[row])


@pytest.mark.parametrize("name", ["packed.npz", "a.h5"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path, name):
    path = write(tmp_path / name, images=RGB, labels=LABELS)
    source = sent(opened(path).source)
    with path.open("ab") as file:
        file.write(b" ")
    machine_error(lambda: source.read(0), "has changed since it was listed")


def test_links_out_of_an_h5_file_or_folder_are_not_followed(tmp_path):
    secret = write(tmp_path / "secret.h5", images=RGB)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = h5py.ExternalLink(str(secret), "images")
    no_dataset(f"arrays:{tmp_path / 'a.h5'}", "link")
    inside = write(tmp_path / "inside", labels=LABELS)
    np.save(tmp_path / "out.npy", RGB)
    (inside / "images.npy").symlink_to(tmp_path / "out.npy")
    no_dataset(f"arrays:{inside}", "no column of images")


def test_missing_files_other_endings_and_odd_specs_are_refused(tmp_path):
    path = write(tmp_path / "a.npz", x=RGB, y=LABELS)
    (tmp_path / "a.mat").write_bytes(b"x")
    no_dataset(f"arrays:{tmp_path / 'no.npz'}", "no.npz")
    no_dataset(f"arrays:{tmp_path / 'a.mat'}", ".npz or .npy or .h5", "savez")
    for tail, named in (
        ("?lable=y", "'label'"),
        ("?label=y&label=y", "twice"),
        ("?label=z", "'z'"),
    ):
        no_dataset(f"arrays:{path}{tail}", named)


def test_what_was_opened_is_remembered_until_the_file_or_the_columns_change(tmp_path, monkeypatch):
    path = write(tmp_path / "a.npz", x=RGB, y=LABELS, z=LABELS[::-1])
    assert peek(f"arrays:{path}") is None
    data = opened(path)
    assert peek(f"arrays:{path}") == (data.slug, data.digest) == ("a", data.digest)
    assert peek(f"arrays:{path}?label=z") is None
    with monkeypatch.context() as earlier:  # a release that numbered the same labels otherwise
        earlier.setattr(column_names, "READING", 1)
        assert peek(f"arrays:{path}") is None
    write(path, x=GRAY, y=LABELS)
    assert peek(f"arrays:{path}") is None


# ``rows:FILE``: rows of numbers come as they are, in every format, and what is no number is refused


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("<f4", (7, 2, 3)), (">f4", (7, 5)), ("f8", (7, 5)), ("i2", (7, 2, 3)), ("?", (7, 5))],
)
def test_rows_have_their_numbers_in_every_format(tmp_path, dtype, shape):
    waves = (np.random.default_rng(0).normal(size=shape) * 100).astype(dtype)
    digests = set()
    for name in ("stored.npz", "packed.npz", "h.h5"):
        path = write(tmp_path / name, waves=waves, label=np.array(list("abababa")))
        data = open_dataset(f"rows:{path}")
        assert data.holds == "rows"
        assert data.classes == ("a", "b")
        source = sent(data.source)
        for row in (6, 0, 3):
            found = source.read(row)
            assert found.dtype == np.dtype(dtype).newbyteorder("=")
            assert np.array_equal(found, waves[row]), (name, row)
        digests.add(data.digest)
    assert len(digests) == 1


def test_the_column_of_rows_is_named_by_the_user(tmp_path):
    np.savez(tmp_path / "n.npz", a=np.ones((4, 3)), b=np.ones((4, 2)), grade=[1, 2, 1, 2])
    no_dataset(f"rows:{tmp_path / 'n.npz'}", "float64")
    data = open_dataset(f"rows:{tmp_path / 'n.npz'}?rows=b&label=grade")
    assert data.source.read(0).shape == (2,)
    assert data.classes == ("1", "2")


def test_a_row_that_is_not_finite_is_a_bad_one(tmp_path):
    waves = np.zeros((3, 4), np.float32)
    waves[1, 2] = np.nan
    np.save(tmp_path / "w.npy", waves)
    data = open_dataset(f"rows:{tmp_path / 'w.npy'}")
    bad_image(data.source.read, 1, "NaN or infinite")
    assert "1 cannot be read" in data.reading
    assert data.source.read(2).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(3),
        np.zeros((3, 0)),
        np.zeros((3, 2), complex),
        np.array([["a", "b"]]),
        np.asfortranarray(np.arange(6.0).reshape(3, 2)),
    ],
)
def test_what_is_no_row_of_numbers_is_refused(tmp_path, values):
    np.savez(tmp_path / "x.npz", rows=values)
    caught = refused(lambda: open_dataset(f"rows:{tmp_path / 'x.npz'}"), "rows")
    assert "image" not in caught.message
