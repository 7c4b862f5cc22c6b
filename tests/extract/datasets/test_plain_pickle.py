"""Pickles of plain data: what numpy and Python write comes back, and nothing else is ever called."""

from __future__ import annotations

import os
import pickle
import re

import numpy as np
import pytest

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.datasets.plain_pickle import StackSource, load, read_images
from fedcache.extract.image_files import BadImage


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("make", [lambda p: Trap(p), lambda p: {"data": [Trap(p)]}, lambda p: (np.array([Trap(p)]), 0)])
def test_nothing_is_run(make, protocol, tmp_path):
    (tmp_path / "x").write_bytes(pickle.dumps(make(str(tmp_path / "sprung")), protocol))
    with pytest.raises(FedcacheError, match=r"it names \w+\.mkdir\. Nothing in it was run") as caught:
        load(tmp_path / "x")
    assert caught.value.code == Exit.CORRUPT
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["builtins.eval", "os.system", "numpy.load", "numpy.core.multiarray.scalar2"])
def test_a_pickle_may_name_only_what_arrays_need(name, tmp_path):
    module, _, function = name.rpartition(".")
    (tmp_path / "x").write_bytes(f"c{module}\n{function}\n(tR.".encode())
    with pytest.raises(FedcacheError, match=f"it names {name}"):
        load(tmp_path / "x")


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
    back = load(tmp_path / "x")
    for a, b in zip(held, back, strict=True):
        assert np.array_equal(a, b)
        if isinstance(a, np.ndarray):
            assert isinstance(b, np.ndarray)
            same = a.dtype.newbyteorder("="), b.dtype.newbyteorder("=")  # numpy may turn the bytes while it reads
            assert same[0] == same[1]
            assert a.shape == b.shape


def test_an_array_may_not_ask_for_memory_it_does_not_bring(tmp_path):
    big = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ftU\x01btR."
    for raw in (
        b"\x80\x02" + big,
        b"\x80\x02cnumpy\nndarray\n(K\x05tR.",
        b"\x80\x02cnumpy\ndtype\n(U\x0cV99999999999tR.",
    ):
        (tmp_path / "x").write_bytes(raw)
        with pytest.raises(FedcacheError, match="is not a pickle of arrays"):
            load(tmp_path / "x")


@pytest.mark.parametrize("code", ["V8", "i4,f4", "O8O8", "M8[s]", "x", "", "V99999999999"])
def test_a_dtype_that_is_neither_numbers_nor_words_is_named(code, tmp_path):
    (tmp_path / "x").write_bytes(b"\x80\x02cnumpy\ndtype\n(U" + bytes([len(code)]) + code.encode() + b"tR.")
    with pytest.raises(FedcacheError, match=rf"is not a pickle of arrays.*the dtype {re.escape(repr(code))}") as caught:
        load(tmp_path / "x")
    assert caught.value.code == Exit.CORRUPT


def test_a_dtype_that_is_no_text_is_named(tmp_path):
    for raw, code in ((b"N", None), (b"K\x05", 5)):
        (tmp_path / "x").write_bytes(b"\x80\x02cnumpy\ndtype\n(" + raw + b"tR.")
        with pytest.raises(FedcacheError, match=f"the dtype '{code}'"):
            load(tmp_path / "x")


OBJECT = b"cnumpy\ndtype\n(U\x02O8K\x00K\x01tR"
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
FIELDS = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|(" + OBJECT + b"(K\x02ttNNK\x01K\x01K\x00tb."


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"c_codecs\nencode\n(N}U\x01xK\x01stb.", "it changes what it names"),
        (b"cnumpy\nndarray\n(N}U\x01xK\x01stb.", "it changes what it names"),
        (FIELDS, "a dtype with fields"),
        (b"c_codecs\nencode\n(U\x01xU\x05rot13tR.", "odd encoding"),
        (ARRAY + b"(K\x01K\x02tb.", "an array that numpy did not write"),
    ],
)
def test_a_pickle_can_change_nothing_it_names(raw, words, tmp_path):
    (tmp_path / "x").write_bytes(b"\x80\x02" + raw)
    with pytest.raises(FedcacheError, match=words):
        load(tmp_path / "x")
    (tmp_path / "y").write_bytes(pickle.dumps([b"raw", np.arange(3)], 2))
    assert load(tmp_path / "y")[1].tolist() == [0, 1, 2]


def test_labels_that_are_no_numbers_are_named(tmp_path):
    (tmp_path / "x").write_bytes(pickle.dumps((np.zeros((2, 4, 4), np.uint8), ["cat", "dog"])))
    with pytest.raises(FedcacheError, match=r"its labels are not numbers") as caught:
        read_images(tmp_path / "x", "")
    assert caught.value.code == Exit.CORRUPT


def test_a_file_that_is_lost_while_it_is_read_costs_its_images(tmp_path):
    images = np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3)
    for name in "ab":
        (tmp_path / name).write_bytes(pickle.dumps((images, [0, 1])))
    source = StackSource([str(tmp_path / name) for name in "ab"], [2, 2], "")
    (tmp_path / "b").write_bytes(b"no pickle")
    assert np.array_equal(source.read(1), images[1])
    with pytest.raises(BadImage, match="is not a pickle of arrays"):
        source.read(2)
