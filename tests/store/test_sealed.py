"""Sealed files: given back as they were, or refused in words; never another's, and never a number that was changed."""

import json
import os
from pathlib import Path

import pytest
import torch
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from json_values import FINITE
from refusal import corruption

from fedcache.store.files import read_sealed, write_sealed

WHAT = {"kind": "test", "run": "ab", "seed": 3}
KINDS = {"a.json": None, "a.safetensors": {"w": torch.ones(2)}}
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
)
shapes = st.lists(st.integers(0, 3), max_size=3)


@examples(40, 1000)
@given(
    content=FINITE,
    kinds=st.none() | st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=3),
)
def test_what_is_sealed_is_given_back(content, kinds, tmp_path_factory):
    path = tmp_path_factory.mktemp("sealed") / "a.json"
    tensors = None
    if kinds is not None:
        path = path.with_suffix(".safetensors")
        tensors = {f"t{i}": torch.ones(shape).to(dtype) for i, (shape, dtype) in enumerate(kinds)}
    write_sealed(path, WHAT, content, tensors)
    found = read_sealed(path, WHAT)
    assert found.content == json.loads(json.dumps(content))
    assert found.tensors.keys() == (tensors or {}).keys()
    for name, tensor in found.tensors.items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_is_another_than_its_name_says_is_refused(tmp_path, name):
    path = tmp_path / name
    assert read_sealed(path, WHAT) is None
    write_sealed(path, WHAT, 1, KINDS[name])
    for other in ({**WHAT, "seed": 4}, {**WHAT, "kind": "other"}, {"kind": "test"}, {}):
        corruption(lambda other=other: read_sealed(path, other), path)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_sealed_file_is_refused_in_words(tmp_path, name):
    path = tmp_path / name
    write_sealed(path, WHAT, [1.5], KINDS[name])
    raw = path.read_bytes()
    for bad in (
        b"",
        raw[:-1],
        raw[:-1] + bytes([raw[-1] ^ 1]),
        raw + b" ",
        raw[:9],
        bytes(len(raw)),
        b"[" * 99_999,
        b"\xff" * 64,
        b"{}",
        raw[::-1],
    ):
        path.write_bytes(bad)
        assert corruption(lambda: read_sealed(path, WHAT)).message.startswith(str(path))
    for make in (path.mkdir, lambda: os.mkfifo(path)):  # nobody waits for a writer of a pipe
        path.rmdir() if path.is_dir() else path.unlink()
        make()
        corruption(lambda: read_sealed(path, WHAT), "is not a file")


def test_a_number_whose_stride_is_not_one_is_sealed_as_any_other(tmp_path):
    """As the offset of a head for one class, a column of a matrix."""
    column = torch.arange(8.0).view(1, 8)[:, 3]
    assert column.stride() == (8,)
    one = tmp_path / "a.safetensors"
    other = tmp_path / "plain.safetensors"
    write_sealed(one, WHAT, None, {"b": column})
    write_sealed(other, WHAT, None, {"b": torch.tensor([3.0])})
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_is_removed_while_it_is_read_is_not_there(name, tmp_path, monkeypatch):
    def there_and_gone(path):
        path.unlink()
        return True

    path = tmp_path / name
    write_sealed(path, WHAT, 1, KINDS[name])
    monkeypatch.setattr(Path, "exists", there_and_gone)
    assert read_sealed(path, WHAT) is None
