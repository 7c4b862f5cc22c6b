"""IDX files under the names of MNIST, EMNIST, KMNIST and QMNIST, written by the tests byte by byte."""

import gzip
import struct

import numpy as np
import pytest
from make_images import random_bytes
from no_dataset import damaged_dataset, no_dataset
from opened import open_dataset, peek

from fedcache.extract.datasets.listing import info

TRAIN = random_bytes(0, 30, 5, 7)
TEST = random_bytes(1, 10, 5, 7)


def put(path, raw):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def write(folder, images, array, labels="", numbers=None):
    """A pair of files; compressed where its name ends in .gz."""
    if labels:
        held = np.arange(len(array)) % 10 if numbers is None else np.asarray(numbers)
        code, kind = (0xC02, ">i4") if "int" in labels else (0x801, "u1")
        head = struct.pack(f">{1 + held.ndim}I", code, *held.shape)
        put(folder / labels, head + held.astype(kind).tobytes())
    head = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape)
    return put(folder / images, head + array.tobytes())


def check(folder):
    data = open_dataset(f"idx:{folder}")
    assert np.bincount(data.split).tolist() == [30, 10]
    assert data.classes == tuple("0123456789")
    for split, images in (("train", TRAIN), ("test", TEST)):
        for i in (0, 9, 4):
            row = data.names.index(f"{split}/{i:07d}")
            assert np.array_equal(data.source.read(row), images[i])
            assert data.label[row] == i % 10
    assert not data.mirror
    assert "images 5 x 7 gray" in data.reading


@pytest.mark.parametrize(
    ("train", "test", "ending"),
    [
        ("train-", "t10k-", ".gz"),
        ("emnist-letters-train-", "emnist-letters-test-", ""),
        ("x_train-", "x_test-", ""),
    ],
)
def test_pairs_under_their_published_names_are_read(tmp_path, train, test, ending):
    for begin, images in ((train, TRAIN), (test, TEST)):
        write(
            tmp_path / "raw",
            f"{begin}images-idx3-ubyte{ending}",
            images,
            f"{begin}labels-idx1-ubyte{ending}",
        )
    check(tmp_path / "raw")


def test_a_dot_in_the_name_and_both_packed_and_unpacked_files_are_read_once(tmp_path):
    for begin, images in (("train-", TRAIN), ("t10k-", TEST)):
        write(tmp_path / "raw", f"{begin}images.idx3-ubyte", images, f"{begin}labels.idx1-ubyte")
        write(
            tmp_path / "raw", f"{begin}images.idx3-ubyte.gz", images, f"{begin}labels.idx1-ubyte.gz"
        )
    check(tmp_path / "raw")


def test_writers_of_qmnist_are_a_group(tmp_path):
    table = np.stack(
        [np.arange(30) % 10, np.zeros(30), np.arange(30) // 3, *[np.arange(30)] * 5], 1
    )
    write(
        tmp_path / "raw",
        "qmnist-train-images-idx3-ubyte.gz",
        TRAIN,
        "qmnist-train-labels-idx2-int.gz",
        table,
    )
    data = open_dataset(f"idx:{tmp_path / 'raw'}")
    assert data.groups["writer"].words == tuple(map(str, range(10)))
    assert data.groups["writer"].codes.tolist() == [i // 3 for i in range(30)]
    assert data.label.tolist() == [i % 10 for i in range(30)]
    assert "no split given" in data.reading
    assert data.names[0] == "train/0000000"


def test_one_file_a_test_set_alone_and_images_without_labels(tmp_path):
    file = write(tmp_path / "raw", "t10k-images-idx3-ubyte", TEST, "t10k-labels-idx1-ubyte")
    for place in (file, tmp_path / "raw"):
        data = open_dataset(f"idx:{place}")
        assert "no split given" in data.reading
        assert data.names[9] == "0000009"
    bare = write(tmp_path / "bare", "train-images-idx3-ubyte", TRAIN)
    data = open_dataset(f"idx:{bare}")
    assert set(data.label.tolist()) == {-1}
    assert data.classes == ()
    assert data.slug == "train-images-idx3-ubyte"


def test_of_several_datasets_in_a_folder_the_beginning_of_the_names_chooses(tmp_path):
    raw = tmp_path / "raw"
    for name in ("digits", "letters"):
        write(
            raw,
            f"emnist-{name}-train-images-idx3-ubyte",
            TRAIN,
            f"emnist-{name}-train-labels-idx1-ubyte",
        )
    no_dataset(f"idx:{raw}", "emnist-digits, emnist-letters", "--dataset idx:")
    assert len(open_dataset(f"idx:{raw / 'emnist-letters'}")) == 30
    no_dataset(f"idx:{raw / 'mnist'}", "IDX files")
    no_dataset("idx", "idx:FOLDER")


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_cut_long_and_foreign_files_are_refused(tmp_path, ending):
    pack = gzip.compress if ending else bytes
    names = (f"train-images-idx3-ubyte{ending}", f"train-labels-idx1-ubyte{ending}")
    file = write(tmp_path / "raw", names[0], TRAIN, names[1])
    raw = file.read_bytes()
    plain = gzip.decompress(raw) if ending else raw
    claims_more = struct.pack(">IIII", 0x803, *[2**32 - 1] * 3) + bytes(64)
    packed = [
        pack(bad) for bad in (plain[:-1], plain + b"x", b"PK" + plain[2:], bytes(2), claims_more)
    ]
    for bad in (raw[: len(raw) // 2], *packed):
        file.write_bytes(bad)
        damaged_dataset(f"idx:{file}", "IDX")
    write(tmp_path / "raw", names[0], TRAIN, names[1], np.zeros(29))
    damaged_dataset(f"idx:{file}", "29 labels")


def test_a_link_out_of_the_folder_is_left_out(tmp_path):
    write(tmp_path / "else", "train-images-idx3-ubyte", TRAIN)
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "train-images-idx3-ubyte").symlink_to(tmp_path / "else/train-images-idx3-ubyte")
    no_dataset(f"idx:{raw}", "IDX files")
    assert len(open_dataset(f"idx:{raw}", follow_links=True)) == 30
    write(tmp_path / "else", "t10k-images-idx3-ubyte", TEST, "t10k-labels-idx1-ubyte")
    write(tmp_path / "half", "t10k-images-idx3-ubyte", TEST)
    (tmp_path / "half/t10k-labels-idx1-ubyte").symlink_to(tmp_path / "else/t10k-labels-idx1-ubyte")
    assert open_dataset(f"idx:{tmp_path / 'half'}").classes == ()


def test_idx_files_and_the_same_rows_in_a_keras_file_are_one_dataset(tmp_path):
    for begin, images in (("train-", TRAIN), ("t10k-", TEST)):
        write(tmp_path / "raw", f"{begin}images-idx3-ubyte", images, f"{begin}labels-idx1-ubyte")
    labels = np.arange(30) % 10
    np.savez(tmp_path / "m.npz", x_train=TRAIN, y_train=labels, x_test=TEST, y_test=labels[:10])
    one = f"idx:{tmp_path / 'raw'}"
    assert open_dataset(one).digest == open_dataset(f"arrays:{tmp_path / 'm.npz'}").digest
    assert peek(one) is not None
    assert info(one)["note"]
