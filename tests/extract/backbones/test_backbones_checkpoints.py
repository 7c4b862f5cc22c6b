"""Checkpoints are read as data: never run, never half loaded, and refused with the way on."""

import argparse
import collections
import io
import json
import pickle
import shlex
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import machine_error, refused
from safetensors.torch import save_file
from torch import nn
from trap import Trap

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.backbones import checkpoints
from fedcache.extract.backbones.checkpoints import Taken, load_strict, read_state

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.tensor([1.0, 2.0])}


def same(state):
    return state.keys() == STATE.keys() and all(torch.equal(state[k], STATE[k]) for k in STATE)


def network():
    """A module whose tensors have the names and shapes of STATE."""
    net = nn.Module()
    net.add_module("a", nn.Linear(3, 2))
    return net


def loaded(path, key=None):
    """The tensors that a network has after it was loaded from a file, and which of the file they are."""
    net = network()
    taken = []
    load_strict(net, read_state(path, key=key), backbone="net", path=path, taken=taken)
    return net.state_dict(), taken[0]


def unread(path, *said, **options):
    return machine_error(lambda: read_state(path, **options), path, *said)


def test_every_layout_of_the_same_tensors_reads_alike(tmp_path):
    save_file(STATE, tmp_path / "a.safetensors")
    np.savez(tmp_path / "b.npz", **{k: v.numpy() for k, v in STATE.items()})
    torch.save(STATE, tmp_path / "c.pt")
    torch.save(STATE, tmp_path / "d.pth.tar", _use_new_zipfile_serialization=False)
    torch.save(
        collections.OrderedDict((f"module.{k}", v) for k, v in STATE.items()), tmp_path / "e.bin"
    )
    for wrapper in ("state_dict", "model_state_dict", "model"):
        torch.save(
            {"epoch": 3, wrapper: STATE, "best": np.float64(0.5), "n": np.int64(4)},
            tmp_path / f"{wrapper}.pt",
        )
    for file in tmp_path.iterdir():
        assert same(loaded(file)[0]), file.name
    assert loaded(tmp_path / "c.pt")[1].sentence(tmp_path / "c.pt", "net") == ""


def test_numpy_scalars_of_numpy_1_are_read(tmp_path):
    # numpy 1 spelt the module numpy.core; files from before 2024 say so
    raw = io.BytesIO()
    torch.save({"state_dict": STATE, "best_acc": np.float64(71.5)}, raw)
    path = tmp_path / "old.pt"
    with zipfile.ZipFile(raw) as old, zipfile.ZipFile(path, "w") as new:
        for item in old.infolist():
            data = old.read(item)
            new.writestr(
                item.filename, data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
            )
    assert same(loaded(path)[0])


@pytest.mark.parametrize("legacy", [False, True])
def test_a_payload_is_never_run(tmp_path, legacy):
    mark = tmp_path / "ran"
    payload = Trap(mark)
    path = tmp_path / "model_best.pth.tar"
    for content in (payload, {"state_dict": STATE, "args": payload}, {"w": payload}):
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
        unread(path, "posix.mkdir")
        assert not mark.exists()


def test_a_bare_pickle_a_joblib_file_and_object_arrays_are_never_run(tmp_path):
    import joblib

    mark = tmp_path / "ran"
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Trap(mark)))
    joblib.dump({"w": Trap(mark)}, tmp_path / "b.pt")
    np.savez(tmp_path / "c.npz", w=np.array([Trap(mark)], dtype=object))
    for name in ("a.pkl", "b.pt", "c.npz"):
        unread(tmp_path / name)
    assert not mark.exists()


def test_the_options_of_a_training_script_are_read_as_data(tmp_path):
    # every file of timm's train.py, DeiT and MAE holds them
    options = argparse.Namespace(lr=0.1, data=Path("images"), nested=argparse.Namespace(epochs=3))
    torch.save({"state_dict": STATE, "args": options, "epoch": 3}, tmp_path / "a.pt")
    assert same(loaded(tmp_path / "a.pt")[0])


def under(prefix, state):
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


OTHERS = {
    "a counter of SWA beside the weights": {
        "n_averaged": torch.tensor(3),
        **under("module.", STATE),
    },
    "a projector": {
        "model": under("net.", STATE) | under("projector.", {"b.weight": torch.ones(2, 2)})
    },
    "a part of the same names and other shapes": under("q.", STATE)
    | under("p.", {"a.weight": torch.ones(9, 3)}),
    "the state of an optimizer": {
        "net": STATE,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "lr": 0.1},
    },
    "an unfinished copy": {"net": STATE, "ema": {"a.weight": 0 * STATE["a.weight"]}},
}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
def test_the_weights_are_where_all_tensors_of_the_model_are_and_the_others_are_named(
    tmp_path, content
):
    torch.save(content, tmp_path / "a.pt")
    weights, taken = loaded(tmp_path / "a.pt")
    assert same(weights)
    everything = read_state(tmp_path / "a.pt")
    assert set(taken.left) == {name for name in everything if not name.startswith(taken.prefix)}
    sentence = taken.sentence(tmp_path / "a.pt", "net")
    assert all(name in sentence for name in taken.left)


@given(
    st.lists(
        st.sampled_from(["module", "model", "_orig_mod", "state_dict", "a", "net"]), max_size=4
    ),
    st.booleans(),
)
def test_weights_load_after_any_prefix_of_keys_and_names(tmp_path_factory, words, nested):
    path = tmp_path_factory.mktemp("prefix") / "a.pt"
    content = dict(STATE)
    for word in reversed(words):
        content = {word: content} if nested else under(f"{word}.", content)
    torch.save({**content, "epoch": 3}, path)
    weights, taken = loaded(path)
    assert same(weights)
    assert taken == Taken("".join(f"{word}." for word in words), (), ())


TWO = {
    "MoCo": (
        {"state_dict": under("module.encoder_q.", STATE) | under("module.encoder_k.", STATE)},
        ("state_dict.module.encoder_q", "state_dict.module.encoder_k"),
    ),
    "DINO": (
        {"teacher": under("backbone.", STATE), "student": under("module.backbone.", STATE)},
        ("teacher.backbone", "student.module.backbone"),
    ),
    "one inside of a longer name": (under("ema.q.", STATE) | under("q.", STATE), ("ema.q", "q")),
}


@pytest.mark.parametrize(("content", "prefixes"), TWO.values(), ids=TWO)
def test_a_file_with_the_weights_of_several_models_lists_them_and_a_key_chooses(
    tmp_path, content, prefixes
):
    path = tmp_path / "it's two.pt"
    torch.save(content, path)
    hint = refused(lambda: loaded(path)).hint
    for prefix in prefixes:
        words = ["fedcache", "backbones", "import", str(path), "--as", "net", "--key", prefix]
        assert shlex.join(words) in hint
        weights, taken = loaded(path, key=prefix)
        assert same(weights)
        assert taken.prefix == f"{prefix}."


def test_averaged_weights_are_named_and_can_be_chosen(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"state_dict": {k: 0 * v for k, v in STATE.items()}, "state_dict_ema": STATE}, path)
    weights, taken = loaded(path)
    assert not same(weights)
    assert f"fedcache backbones import {path} --as net --key state_dict_ema" in taken.sentence(
        path, "net"
    )
    assert same(loaded(path, key="state_dict_ema")[0])
    unread(path, "no weights under 'teacher'", key="teacher")
    torch.save(STATE | under("ema.", {k: 0 * v for k, v in STATE.items()}), path)
    weights, taken = loaded(path)
    assert same(weights)
    assert taken.also == ("ema.",)


def test_tensors_at_the_level_of_the_model_are_parts_of_another_model(tmp_path):
    # Twice as deep, or with tokens of its own: all tensors of the smaller model are there too.
    for content in (
        {**STATE, "b.weight": torch.ones(2)},
        {"model": under("net.", {**STATE, "token": torch.ones(1)})},
    ):
        torch.save(content, tmp_path / "a.pt")
        machine_error(lambda: loaded(tmp_path / "a.pt"), "1 unexpected: ")


def test_a_lying_safetensors_header_is_an_error_of_ours(tmp_path):
    path = tmp_path / "a.safetensors"
    for entry in (
        {
            "dtype": "F32",
            "shape": [1000, 1000],
            "data_offsets": [0, 4_000_000],
        },  # more than the file holds
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},  # shape and bytes disagree
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},  # a hole at the start
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        None,
    ):
        text = json.dumps(["no", "dict"] if entry is None else {"a": entry}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
        unread(path, "header")
    for length in (2**62, 2**64 - 1, 10**6, 1):  # beyond the file, which allocates nothing
        path.write_bytes(struct.pack("<Q", length) + b"{}" + b"\0" * 20)
        unread(path, "header")


@pytest.mark.parametrize("start", [b"PK", b"\x80", b"<"])
def test_a_safetensors_length_that_looks_like_another_kind_is_still_a_length(tmp_path, start):
    # the header is padded with spaces, as the format allows, until its length starts with the bytes of another magic
    save_file(STATE, tmp_path / "a.safetensors")
    raw = (tmp_path / "a.safetensors").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    longer = next(n for n in range(size, 2**16) if struct.pack("<Q", n).startswith(start))
    padded = struct.pack("<Q", longer) + raw[8 : 8 + size].ljust(longer) + raw[8 + size :]
    (tmp_path / "b.bin").write_bytes(padded)
    assert same(read_state(tmp_path / "b.bin"))


def test_what_is_no_checkpoint_is_named(tmp_path):
    path = tmp_path / "a.pt"
    for data, said in (
        (b"", "empty"),
        (b"<!DOCTYPE html><html>404</html>", "HTML"),
        (b"\n  <html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "Git LFS pointer"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 90, "neither safetensors"),
        (b"PK\x03\x04 cut short", "zip"),
        (b"PK\x05\x06" + b"\0" * 18, "without weights"),
        (b"\x80\x02}q\x00.", "objects that are not tensors"),
    ):
        path.write_bytes(data)
        unread(path, said)
    unread(tmp_path / "gone.pt", "No such file")
    unread(tmp_path, "Is a directory")


def test_a_checkpoint_without_tensors_or_with_more_is_named(tmp_path):
    for content in ({}, {"epoch": 3, "args": {"lr": 0.1}}, [torch.ones(1)], torch.ones(1)):
        torch.save(content, tmp_path / "a.pt")
        unread(tmp_path / "a.pt")


def test_an_npz_that_claims_too_much_is_refused_before_unpacking(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "NPZ_LIMIT", 1 << 20)
    np.savez_compressed(tmp_path / "bomb.npz", w=np.zeros(1 << 20, np.uint8))
    assert (tmp_path / "bomb.npz").stat().st_size < 5_000
    unread(tmp_path / "bomb.npz", "according to its header")


@settings(max_examples=60)
@given(st.binary(max_size=200), st.sampled_from(["", "PK\x03\x04", "\x80\x02", "{", "\x93NUMPY"]))
def test_random_bytes_are_only_ever_refused(tmp_path_factory, data, start):
    path = tmp_path_factory.mktemp("fuzz") / "a.pt"
    path.write_bytes(start.encode("latin1") + data)
    unread(path)


@settings(max_examples=40)
@given(st.data())
def test_a_damaged_checkpoint_loads_only_what_has_the_right_names_and_shapes(
    tmp_path_factory, data
):
    path = tmp_path_factory.mktemp("flip") / "a.safetensors"
    save_file(STATE, path)
    raw = bytearray(path.read_bytes())
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    raw[data.draw(st.integers(0, header - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    try:
        loaded(path)
    except FedcacheError as error:
        assert error.code is Exit.ENVIRONMENT  # noqa: PT017 - most flips are refused, some change a name's spelling only


def test_a_strict_load_names_what_is_missing_unexpected_and_misshapen(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    state = dict(model.state_dict())
    del state["2.bias"], state["1.num_batches_tracked"]
    state["2.weight"] = torch.zeros(1, 4)
    state["extra"] = torch.zeros(1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    error = machine_error(
        lambda: load_strict(model, state, backbone="net", path=tmp_path),
        "1 missing: 2.bias",
        "1 unexpected: extra",
        "1 of another shape: 2.weight has shape (1, 4), expected (1, 2)",
    )
    assert "num_batches_tracked" not in error.message
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("script", [False, True], ids=["pickle", "TorchScript"])
def test_the_command_of_the_hint_writes_what_fedcache_reads(tmp_path, script):
    path = tmp_path / "it's a.pt"
    if script:
        torch.jit.script(nn.Linear(2, 2)).save(str(path))
    else:
        torch.save({"state_dict": STATE, "args": collections.UserDict(lr=0.1)}, path)
    hint = unread(path, "is not loaded").hint
    command = shlex.split(hint[hint.index("python -c") :])
    subprocess.run(
        [sys.executable, "-W", "ignore", *command[1:]],
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )
    state = read_state(tmp_path / "OUT.safetensors")
    assert state.keys() == ({"weight", "bias"} if script else STATE.keys())
