"""Pickles of plain data: what numpy and Python write comes back, and nothing else is ever called."""

import pickle

import numpy as np
import pytest
from refusal import bad_image, corruption
from trap import Trap

from fedcache.extract.datasets.paper_index import PickledImages, load_pickle, read_images
from fedcache.extract.datasets.row_sources import Shards


def test_nothing_is_run(tmp_path):
    trap = Trap(tmp_path / "sprung")
    for protocol in range(6):
        for held in (trap, {"data": [trap]}, (np.array([trap]), 0)):
            (tmp_path / "x").write_bytes(pickle.dumps(held, protocol))
            corruption(lambda: load_pickle(tmp_path / "x"), ".mkdir")
            assert not (tmp_path / "sprung").exists()


def test_a_pickle_may_name_only_what_arrays_need(tmp_path):
    for name in ("builtins.eval", "os.system", "numpy.load", "numpy.core.multiarray.scalar2"):
        module, _, function = name.rpartition(".")
        (tmp_path / "x").write_bytes(f"c{module}\n{function}\n(tR.".encode())
        corruption(lambda: load_pickle(tmp_path / "x"), name)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_data_comes_back_from_every_protocol(protocol, tmp_path):
    held = [
        np.arange(12, dtype=np.uint8).reshape(3, 4),
        np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
        np.array(["ab", "cde"]),
        np.array([1.5, -2.0], dtype=">f4"),
        np.array(["ab", None], dtype=object),
        np.zeros((0, 28, 28), np.uint8),
        {"a": [1, 2.5, (None, True)]},
        np.int64(7),
        np.str_("word"),
        b"raw",
    ]
    (tmp_path / "x").write_bytes(pickle.dumps(held, protocol))
    back = load_pickle(tmp_path / "x")
    for a, b in zip(held, back, strict=True):
        assert np.array_equal(a, b)
        if isinstance(a, np.ndarray):
            assert isinstance(b, np.ndarray)
            # numpy may turn the bytes while it reads
            assert a.shape == b.shape
            assert a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=")


def test_an_array_may_not_ask_for_memory_it_does_not_bring(tmp_path):
    big = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ftU\x01btR."
    for raw in (big, b"cnumpy\nndarray\n(K\x05tR.", b"cnumpy\ndtype\n(U\x0cV99999999999tR."):
        (tmp_path / "x").write_bytes(b"\x80\x02" + raw)
        corruption(lambda: load_pickle(tmp_path / "x"), "x")


def test_a_dtype_that_is_neither_numbers_nor_words_is_named(tmp_path):
    named = {
        code: b"U" + bytes([len(code)]) + code.encode()
        for code in ("V8", "i4,f4", "O8O8", "M8[s]", "")
    }
    for code, raw in {**named, "None": b"N", "5": b"K\x05"}.items():
        (tmp_path / "x").write_bytes(b"\x80\x02cnumpy\ndtype\n(" + raw + b"tR.")
        corruption(lambda: load_pickle(tmp_path / "x"), f"the dtype '{code}'")


OBJECT = b"cnumpy\ndtype\n(U\x02O8K\x00K\x01tR"
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
FIELDS = (
    b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|(" + OBJECT + b"(K\x02ttNNK\x01K\x01K\x00tb."
)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"c_codecs\nencode\n(N}U\x01xK\x01stb.", "it modifies an object"),
        (b"cnumpy\nndarray\n(N}U\x01xK\x01stb.", "it modifies an object"),
        (FIELDS, "a dtype with fields"),
        (b"c_codecs\nencode\n(U\x01xU\x05rot13tR.", "odd encoding"),
        (ARRAY + b"(K\x01K\x02tb.", "an array that numpy did not write"),
    ],
)
def test_a_pickle_can_change_nothing_it_names(raw, words, tmp_path):
    (tmp_path / "x").write_bytes(b"\x80\x02" + raw)
    corruption(lambda: load_pickle(tmp_path / "x"), words)


def test_what_is_no_pair_of_images_and_labels_is_named(tmp_path):
    images = np.zeros((2, 4, 4), np.uint8)
    for held, named in (
        ((images, ["cat", "dog"]), "labels"),
        (images, "pair"),
        ((images, [0]), "1 labels"),
    ):
        (tmp_path / "x").write_bytes(pickle.dumps(held))
        corruption(lambda: read_images(tmp_path / "x", ""), named)


def test_a_file_that_is_lost_while_it_is_read_costs_its_images(tmp_path):
    images = np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3)
    for name in "ab":
        (tmp_path / name).write_bytes(pickle.dumps((images, [0, 1])))
    source = Shards([PickledImages(tmp_path / name, "") for name in "ab"], [2, 2])
    (tmp_path / "b").write_bytes(b"no pickle")
    assert np.array_equal(source.read(1), images[1])
    bad_image(source.read, 2, "pickle")
    (tmp_path / "b").write_bytes(pickle.dumps((images[:1], [0])))
    bad_image(source.read, 3, "1 images")
