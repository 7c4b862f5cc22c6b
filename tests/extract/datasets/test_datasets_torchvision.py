"""torchvision's datasets, written by the tests in their true layouts: all splits, torchvision's labels, no download."""

import bz2
import hashlib
import os
import pickle
from collections import Counter

import numpy as np
import pytest
from make_images import png, random_bytes, write_directory
from no_dataset import missing_dataset
from opened import open_dataset, peek
from refusal import bad_image, machine_error
from sent import sent
from test_datasets_idx import write
from trap import Trap

from fedcache.extract.datasets import torchvision as readers
from fedcache.extract.datasets.listing import info
from fedcache.extract.image_files import BadImage

datasets = pytest.importorskip("torchvision.datasets")


@pytest.fixture
def mnist(tmp_path):
    """60 training and 20 test images; label of image i is i mod 10."""
    train = random_bytes(0, 60, 28, 28)
    test = random_bytes(1, 20, 28, 28)
    root = tmp_path / "data/MNIST"
    for prefix, images in (("train", train), ("t10k", test)):
        write(
            root / "MNIST/raw", f"{prefix}-images-idx3-ubyte", images, f"{prefix}-labels-idx1-ubyte"
        )
    return root, train, test


def test_mnist_has_both_splits_digit_names_and_gray_pixels(tmp_path, mnist, capsys):
    _, train, test = mnist
    data = open_dataset("torchvision:MNIST", data=tmp_path / "data")
    assert data.classes == tuple("0123456789")
    assert data.slug == "mnist"
    assert data.domains == ("all",)
    assert data.mirror is False
    assert Counter(data.split.tolist()) == {0: 60, 1: 20}
    source = sent(data.source)
    for split, images in (("train", train), ("test", test)):
        for i in (0, 13, len(images) - 1):
            row = data.names.index(f"{split}/{i:05d}")
            assert np.array_equal(source.read(row), images[i])
            assert data.label[row] == i % 10
            assert data.uid[row].tobytes() == hashlib.sha256(images[i].tobytes()).digest()[:16]
    assert capsys.readouterr().out == ""


def test_it_is_found_by_name_remembered_and_seen_to_change(tmp_path, mnist, monkeypatch):
    root, *_ = mnist

    def peeked(**where):
        return peek("torchvision:MNIST", **(where or {"roots": {"MNIST": root}}))

    assert peeked() is None
    data = open_dataset("torchvision:MNIST", roots={"MNIST": root})
    monkeypatch.setattr(readers, "_construct", lambda *a, **k: pytest.fail("torchvision was asked"))
    (root / "notes.txt").write_text("beside the dataset, in the root that several share")
    assert peeked() == peeked(data=tmp_path / "data") == ("mnist", data.digest)
    os.utime(root / "MNIST/raw/t10k-labels-idx1-ubyte", ns=(1, 1))
    assert peeked() is None


def test_dtd_keeps_its_validation_set_and_a_lost_image_keeps_its_row(tmp_path):
    root = tmp_path / "dtd/dtd"
    names = [f"{c}/{c}_{i}.jpg" for c in ("banded", "dotted") for i in range(3)]
    write_directory(root / "images", {n: png(i) for i, n in enumerate(names)})
    labels = {
        f"{s}1.txt": "".join(n + "\n" for n in names[k::3]).encode()
        for k, s in enumerate(("train", "val", "test"))
    }
    write_directory(root / "labels", labels)
    (root / f"images/{names[0]}").unlink()
    data = open_dataset("torchvision:DTD", roots={"DTD": tmp_path})
    assert data.classes == ("banded", "dotted")
    assert data.split.tolist() == [1, 1, 0, 0, 2, 2]  # names: test/, train/, validation/
    bad_image(data.source.read, 2)
    assert data.source.read(4) == png(1)
    assert "1 cannot be read" in data.reading


def test_usps_counts_its_labels_from_zero(tmp_path):
    for name, count in (("usps.bz2", 20), ("usps.t.bz2", 10)):
        lines = []
        for i in range(count):
            values = [f"{pixel + 1}:{(-1) ** i}" for pixel in range(256)]
            lines.append(" ".join([str(i % 10 + 1), *values]))
        (tmp_path / name).write_bytes(bz2.compress("\n".join(lines).encode()))
    data = open_dataset("torchvision:USPS", roots={"USPS": tmp_path})
    row = data.names.index("train/00003")
    assert data.classes[data.label[row]] == "3"
    assert np.array_equal(data.source.read(row), np.zeros((16, 16), np.uint8))
    assert np.array_equal(data.source.read(row + 1), np.full((16, 16), 255, np.uint8))


def test_emnist_letters_loses_its_class_without_images(tmp_path):
    images = np.stack([np.full((28, 28), i, np.uint8) for i in range(1, 27)])
    for part in ("train", "test"):
        names = [f"emnist-letters-{part}-{end}-ubyte" for end in ("images-idx3", "labels-idx1")]
        write(tmp_path / "EMNIST/raw", names[0], images, names[1], range(1, 27))
    data = open_dataset("torchvision:EMNIST-letters", roots={"EMNIST-letters": tmp_path})
    assert data.classes == tuple("abcdefghijklmnopqrstuvwxyz")
    row = data.names.index("train/00002")
    assert data.classes[data.label[row]] == "c"
    assert int(data.source.read(row)[0, 0]) == 3
    assert data.slug == "emnist-letters"


def test_a_cifar_pickle_that_is_not_the_published_one_is_never_opened(tmp_path):
    trap = Trap(tmp_path / "sprung")
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]
    write_directory(tmp_path / "cifar-10-batches-py", dict.fromkeys(names, pickle.dumps(trap)))
    missing_dataset("torchvision:CIFAR10", "CIFAR10", roots={"CIFAR10": tmp_path})
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(("left", "word"), [("train", "train"), ("t10k", "test")])
def test_of_one_part_that_is_there_a_fifth_is_the_test_set(tmp_path, mnist, left, word):
    root, train, test = mnist
    images = train if left == "train" else test
    raw = root / "MNIST/raw"
    for file in raw.iterdir():
        if not file.name.startswith(left):
            file.unlink()
    data = open_dataset("torchvision:MNIST", data=tmp_path / "data")
    assert data.names == tuple(f"{word}/{i:05d}" for i in range(len(images)))
    source = sent(data.source)
    assert all(np.array_equal(source.read(i), images[i]) for i in range(len(images)))
    assert {0, 1} == set(data.split.tolist())
    next(raw.glob("*images*")).unlink()  # half a part is no part that is missing
    machine_error(lambda: open_dataset("torchvision:MNIST", data=tmp_path / "data"), "MNIST")


@pytest.mark.parametrize("name", ["MNIST", "ImageNet", "SVHN"])
def test_missing_files_say_how_to_get_them(tmp_path, name):
    caught = machine_error(
        lambda: open_dataset(f"torchvision:{name}", data=tmp_path),
        f"{tmp_path}/{name}",
        f"--data {name}=",
    )
    assert ("datasets pull" in caught.hint) == readers.TABLE[name].pulls
    assert list(tmp_path.glob(f"{name}*")) == []  # torchvision makes folders where it looks
    # What a failed download leaves.
    (tmp_path / name).mkdir()
    assert not info(f"torchvision:{name}", data=tmp_path)["ready"]


def test_every_entry_names_a_class_and_arguments_torchvision_has():
    import inspect

    for name, entry in readers.TABLE.items():
        cls = getattr(datasets, entry.cls or name)
        accepted = {
            p
            for base in cls.__mro__
            if base is not object
            for p in inspect.signature(base.__init__).parameters
        }
        for options, code in entry.splits:
            assert {*options, *entry.options} <= accepted, name
            assert code in (0, 1, 2)
        if entry.pulls:
            assert "download" in accepted, name


def test_no_classification_dataset_of_torchvision_is_forgotten():
    listed = {entry.cls or name for name, entry in readers.TABLE.items()}
    # Loaders and random data; captions, detection, segmentation, matching, flow, stereo; video; attributes.
    others = """
        ImageFolder DatasetFolder FakeData VisionDataset wrap_dataset_for_transforms_v2
        CocoCaptions CocoDetection SBU Flickr8k Flickr30k VOCSegmentation VOCDetection Cityscapes WIDERFace SBDataset
        PhotoTour LFWPairs Kitti KittiFlow Sintel FlyingChairs FlyingThings3D HD1K Kitti2012Stereo Kitti2015Stereo
        CarlaStereo Middlebury2014Stereo CREStereo FallingThingsStereo SceneFlowStereo SintelStereo InStereo2k
        ETH3DStereo MovingMNIST Kinetics HMDB51 UCF101 CelebA LSUN LSUNClass
    """
    other = set(others.split())
    assert listed.isdisjoint(other)
    assert set(datasets.__all__) <= listed | other


def test_a_link_out_of_the_folder_is_a_bad_image(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "a").write_bytes(b"out")
    (tmp_path / "data/a").symlink_to(tmp_path / "a")
    with pytest.raises(
        BadImage,
        match=r"^it is a link to a file outside the dataset's folder \(to read it: --follow-links\)$",
    ):
        readers._read_file(tmp_path / "data/a", tmp_path / "data")
    assert readers._read_file(tmp_path / "data/a", None) == b"out"
