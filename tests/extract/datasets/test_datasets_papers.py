"""The datasets of the papers: every layout as its authors publish it, what is refused, and a run from end to end."""

import hashlib
import json
import os
import pickle
import shutil

import numpy as np
import pytest
from command import fedcache, ok
from make_images import write_directory
from no_dataset import missing_dataset, no_dataset
from opened import open_dataset, peek
from paper_trees import TREES, python2, write
from sent import sent

from fedcache.errors import Exit
from fedcache.extract.datasets import paper
from fedcache.extract.datasets.listing import info
from fedcache.extract.datasets.paper_index import READERS, _letters
from fedcache.extract.datasets.papers import check


def refused(name, root, code, *words):
    no_dataset(f"paper:{name}", *words, code=code, roots={name: root})


def test_every_layout_of_every_dataset_has_a_tree_here():
    assert sorted(TREES) == sorted(
        (n, i) for n in paper.NAMES for i in range(len(paper.read(n).layouts))
    )


@pytest.mark.parametrize(("name", "layout"), TREES)
def test_a_layout_gives_its_rows(name, layout, tmp_path):
    expected = write(name, layout, tmp_path / "here")
    held = paper.read(name)
    data = open_dataset(f"paper:{name}", roots={name: tmp_path / "here"})
    assert held.layouts[layout].name in data.reading
    assert data.classes == held.classes
    assert data.domains == held.domains
    assert data.slug == name
    assert data.template == held.template
    assert data.mirror == (name != "digit5")
    assert data.names == tuple(row.name for row in expected)
    assert data.label.tolist() == [row.label for row in expected]
    assert [data.domains[d] for d in data.domain] == [row.domain for row in expected]
    if (name, layout) != ("office10", 1):  # has no split of its own
        assert data.split.tolist() == [row.split for row in expected]
    source = sent(data.source)
    for i, row in enumerate(expected):
        read = source.read(i)
        assert type(read) is type(row.image)
        assert (
            np.array_equal(read, row.image) if isinstance(read, np.ndarray) else read == row.image
        )
        raw = read if isinstance(read, bytes) else read.tobytes()
        assert data.uid[i].tobytes() == hashlib.sha256(raw).digest()[:16]


def test_a_dataset_is_the_same_wherever_it_lies_and_below_a_folder_of_its_name(tmp_path):
    write("digit5", 0, tmp_path / "a")
    top = next(at for at in paper.read("digit5").layouts[0].at if at)
    shutil.copytree(tmp_path / "a", tmp_path / f"b/digit5/{top}")
    a = open_dataset("paper:digit5", roots={"digit5": tmp_path / "a"})
    assert open_dataset("paper:digit5", data=tmp_path / "b").digest == a.digest
    assert peek("paper:digit5", data=tmp_path / "b") == ("digit5", a.digest)


def test_what_was_read_is_remembered_until_a_file_changes(tmp_path):
    write("eurosat", 0, tmp_path)
    roots = {"eurosat": tmp_path}
    assert peek("paper:eurosat", roots=roots) is None
    data = open_dataset("paper:eurosat", roots=roots)
    assert peek("paper:eurosat", roots=roots) == ("eurosat", data.digest)
    for changed in ("2750/River/image_test_0008.jpg", "split_zhou_EuroSAT.json"):
        os.utime(tmp_path / changed, ns=(1, 1))
        assert peek("paper:eurosat", roots=roots) is None
        open_dataset("paper:eurosat", roots=roots)
    write_directory(tmp_path, {"notes.txt": b"beside the data"})
    assert peek("paper:eurosat", roots=roots) is not None


def test_cifar_10_is_the_dataset_torchvision_reads(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")
    write("cifar10", 0, tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    names = paper.read("cifar10").classes
    (folder / "batches.meta").write_bytes(python2({"label_names": list(names)}))
    md5 = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    cifar = datasets.CIFAR10
    monkeypatch.setattr(
        cifar, "train_list", [[f"data_batch_{i}", md5[f"data_batch_{i}"]] for i in range(1, 6)]
    )
    monkeypatch.setattr(cifar, "test_list", [["test_batch", md5["test_batch"]]])
    monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": md5["batches.meta"]})
    ours = open_dataset("paper:cifar10", roots={"cifar10": tmp_path})
    roots = {"CIFAR10": tmp_path}
    theirs = open_dataset("torchvision:CIFAR10", roots=roots)
    assert ours.digest == theirs.digest
    assert ours.slug == theirs.slug
    for path in folder.glob("data_batch_*"):
        path.unlink()
    assert len(open_dataset("torchvision:CIFAR10", roots=roots)) == 4
    # A damaged batch is refused although the other part is whole.
    (folder / "data_batch_3").write_bytes(b"half")
    missing_dataset("torchvision:CIFAR10", "CIFAR10", roots=roots)


def test_the_whole_digit_pickles_begin_with_the_parts(tmp_path, monkeypatch):
    """FedBN cuts train.pkl at 743.8 n, n = 0..10: the ten parts are its first 7,438 rows."""
    write("digit5", 0, tmp_path / "parts")
    write("digit5", 1, tmp_path / "whole")
    more = tmp_path / "whole/SVHN/train.pkl"
    images, labels = pickle.loads(more.read_bytes())
    more.write_bytes(
        pickle.dumps((np.concatenate([images, images]), np.concatenate([labels, labels])), 5)
    )
    layouts = list(paper.read("digit5").layouts)
    assert layouts[1].options["first"] == int(743.8 * 10)
    monkeypatch.setitem(layouts[1].options, "first", 40)
    digests = {
        open_dataset("paper:digit5", roots={"digit5": tmp_path / kind}).digest
        for kind in ("parts", "whole")
    }
    assert len(digests) == 1


# What is missing


def test_a_missing_dataset_ends_in_exit_6_with_the_steps(tmp_path):
    place = tmp_path / "nowhere"
    for name in paper.NAMES:
        steps = paper.read(name).steps
        refused(name, place, Exit.ENVIRONMENT, str(place), f"--data {name}=", *steps)
    missing_dataset("paper:cars", "--data")


@pytest.mark.parametrize(
    ("name", "layout", "lost"),
    [
        ("cifar10", 0, "cifar-10-batches-py/data_batch_3"),
        ("eurosat", 0, "split_zhou_EuroSAT.json"),
        ("domainnet10", 1, "real_train.txt"),
        ("cinic10", 0, "valid/dog"),
        ("tiny-imagenet", 0, "train/n02124075"),
    ],
)
def test_a_part_that_is_missing_stops_the_reading(name, layout, lost, tmp_path):
    write(name, layout, tmp_path)
    path = tmp_path / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    refused(name, tmp_path, Exit.ENVIRONMENT, lost.rpartition("/")[2])
    assert lost.rpartition("/")[2] in check(name, tmp_path)["missing"][0]


@pytest.mark.parametrize(
    ("name", "layout", "file"),
    [
        ("office10", 0, "webcam_test.pkl"),
        ("domainnet10", 1, "real_test.txt"),
        ("flowers102", 1, "setid.mat"),
    ],
)
def test_a_file_that_cannot_be_opened_is_not_called_damaged(name, layout, file, tmp_path):
    write(name, layout, tmp_path)
    (tmp_path / file).unlink()
    (tmp_path / file).mkdir()
    refused(name, tmp_path, Exit.ENVIRONMENT, f"{file} cannot be opened: Is a directory")


def test_an_image_that_is_missing_keeps_its_row(tmp_path):
    rows = write("office10", 0, tmp_path)
    (tmp_path / "dslr/mug/train_0001.jpg").unlink()
    data = open_dataset("paper:office10", roots={"office10": tmp_path})
    assert len(data) == len(rows)
    assert "1 cannot be read" in data.reading
    (missing,) = check("office10", tmp_path)["missing"]
    assert missing == f"1 of {len(rows)} images are listed but missing: dslr/mug/train_0001.jpg"


# What is wrong


def test_two_spellings_of_one_name_are_one_name(tmp_path):
    write("eurosat", 0, tmp_path)
    twice = [[f"River/{name}.jpg", 8, "River"] for name in ("\u00e9", "e\u0301")]
    change_json(tmp_path / "split_zhou_EuroSAT.json", lambda s: s["train"].extend(twice))
    refused("eurosat", tmp_path, Exit.CORRUPT, "'River/\u00e9.jpg' twice")


def test_a_line_ends_only_at_a_line_break(tmp_path):
    write("tiny-imagenet", 0, tmp_path)
    folder = paper.read("tiny-imagenet").folders[0]
    with (tmp_path / "val/val_annotations.txt").open("a", encoding="utf-8") as file:
        file.write(f"a\u2028b.JPEG\t{folder}\t0\r\n")
    data = open_dataset("paper:tiny-imagenet", roots={"tiny-imagenet": tmp_path})
    assert "val/images/a\u2028b.JPEG" in data.names


def change_json(path, change):
    held = json.loads(path.read_text())
    change(held)
    path.write_text(json.dumps(held))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("test"), "train, val and test"),
        (lambda s: s.update(train=3), "train, val and test"),
        (lambda s: s["train"].append(["River/x.jpg", 10, "x"]), "'River/x.jpg', 10"),
        (lambda s: s["train"].append(["../../x.jpg", 8, "River"]), "'../../x.jpg'"),
        (lambda s: s["test"].append(s["train"][0]), "twice"),
        (
            lambda s: s.update({k: [[p, 9 - n, w] for p, n, w in v] for k, v in s.items()}),
            "'Annual Crop Land'",
        ),
        (lambda s: s.update({k: [] for k in s}), "no image"),
    ],
)
def test_a_split_that_is_not_the_published_one_is_refused(change, words, tmp_path):
    write("eurosat", 0, tmp_path)
    change_json(tmp_path / "split_zhou_EuroSAT.json", change)
    refused("eurosat", tmp_path, Exit.CORRUPT, words)
    assert words in check("eurosat", tmp_path)["wrong"][-1]


def bad_cifar(**changes):
    return python2({"labels": [0], "data": np.zeros((1, 3072), np.uint8), **changes})


CAR = np.array([("1.jpg", 197)], dtype=[("fname", object), ("class", object)])


@pytest.mark.parametrize(
    ("name", "layout", "file", "content", "words"),
    [
        (
            "cifar10",
            0,
            "cifar-10-batches-py/data_batch_2",
            bad_cifar(labels=[10]),
            "the label 10; expected 0 to 9",
        ),
        (
            "cifar10",
            0,
            "cifar-10-batches-py/test_batch",
            bad_cifar(data=np.zeros((1, 768), np.uint8)),
            "[1, 768]",
        ),
        (
            "cifar10",
            0,
            "cifar-10-batches-py/test_batch",
            bad_cifar()[:-900],
            "is not a pickle of arrays",
        ),
        (
            "digit5",
            0,
            "SVHN/test.pkl",
            pickle.dumps((np.zeros((2, 9, 9, 3)), np.zeros(2))),
            "float64 [2, 9, 9, 3]",
        ),
        (
            "digit5",
            0,
            "SVHN/test.pkl",
            pickle.dumps(([[1, 2], [3]], [0, 1])),
            "its images are no array",
        ),
        (
            "office10",
            0,
            "webcam_test.pkl",
            pickle.dumps((["a/webcam/chair/c.jpg"], ["chair"])),
            "the class 'chair'",
        ),
        ("office10", 0, "webcam_test.pkl", pickle.dumps((3, ["mug"])), "the pair (paths"),
        ("office10", 0, "webcam_test.pkl", pickle.dumps(([], ["mug"])), "the pair (paths"),
        (
            "pets",
            1,
            "annotations/test.txt",
            b"Abyssinian_1 38 1 1\n",
            "expected a name and a class from 1",
        ),
        (
            "tiny-imagenet",
            0,
            "val/val_annotations.txt",
            b"val_0.JPEG n01443537\n",
            "expected an image and a class",
        ),
        ("flowers102", 1, "setid.mat", b"MATLAB 5.0 MAT-file, cut", "scipy cannot read it"),
        (
            "flowers102",
            1,
            "setid.mat",
            {"trnid": np.array([[1]])},
            "has no array of numbers called 'valid'",
        ),
        ("domainnet10", 1, "real_test.txt", b"\xff\xfe\n", "not text in UTF-8"),
        (
            "cars",
            1,
            "cars_test_annos_withlabels.mat",
            {"annotations": CAR},
            "'1.jpg' has the class number 197; expected 1 to",
        ),
        (
            "flowers102",
            1,
            "imagelabels.mat",
            {"labels": np.array([[1, 103]])},
            "labels has 103; expected 1 to 102",
        ),
    ],
)
def test_a_file_that_does_not_hold_what_it_should_is_named(
    name, layout, file, content, words, tmp_path
):
    import scipy.io

    write(name, layout, tmp_path)
    if isinstance(content, bytes):
        (tmp_path / file).write_bytes(content)
    else:
        scipy.io.savemat(tmp_path / file, content)
    refused(name, tmp_path, Exit.CORRUPT, words)


# Counts


def test_a_whole_copy_passes_and_one_image_less_does_not(tmp_path, monkeypatch):
    write("office10", 0, tmp_path)
    counts = paper.read("office10").layouts[0].counts
    for domain in counts:
        monkeypatch.setitem(counts, domain, 60)
    report = check("office10", tmp_path)
    assert report["missing"] == []
    assert report["wrong"] == []
    assert report["counts"] == {"train": 120, "test": 120}
    ok(f"datasets check office10 {tmp_path}")
    monkeypatch.setitem(counts, "dslr", 61)
    assert check("office10", tmp_path)["wrong"] == ["dslr: 60 images (published: 61)"]
    data = open_dataset("paper:office10", roots={"office10": tmp_path})
    assert "dslr 60 (published: 61)" in data.reading
    assert fedcache(f"datasets check office10 {tmp_path}").code == 5


def test_md5_lines_and_empty_classes_are_checked(tmp_path):
    write("cifar10", 0, tmp_path / "c")
    write("domainnet10", 1, tmp_path / "d")
    write("eurosat", 0, tmp_path / "e")
    change_json(
        tmp_path / "e/split_zhou_EuroSAT.json",
        lambda s: s.update({k: [e for e in v if e[1] != 8] for k, v in s.items()}),
    )
    for name, place, said in (
        (
            "cifar10",
            "c",
            "data_batch_4 has an md5 that differs from the published 634d18415352ddfa",
        ),
        ("domainnet10", "d", "clipart_test.txt has 11 lines; expected 14,604"),
        ("eurosat", "e", "1 of 10 classes have no image, such as 'River'"),
    ):
        assert said in "\n".join(check(name, tmp_path / place)["wrong"])


# The data files


@pytest.mark.parametrize("name", paper.NAMES)
def test_a_data_file_agrees_with_itself(name):
    held = paper.read(name)
    assert (
        len(set(held.classes)) == len(held.classes) == len(held.folders) == len(set(held.folders))
    )
    # told apart in CoOp's spelling too
    assert len({_letters(name) for name in held.classes}) == len(held.classes)
    assert all((held.title, held.paper, held.licence, held.steps))
    assert held.template is None or held.template.count("{}") == 1
    words = {"train", "test", "validation"}
    for layout in held.layouts:
        assert layout.format in {*READERS, "arrays"}
        assert set(layout.counts) <= {
            *words,
            *held.domains,
            *(f"{d}/{w}" for d in held.domains for w in words),
        }
    assert set(info(f"paper:{name}")["splits"]) <= words


def test_the_class_lists_are_those_of_torchvision_where_it_has_them():
    flowers = pytest.importorskip("torchvision.datasets").Flowers102
    assert paper.read("flowers102").classes == tuple(flowers.classes)
    from torchvision.models._meta import _IMAGENET_CATEGORIES

    for name in ("imagenet100", "tiny-imagenet"):
        held = paper.read(name)
        assert list(held.folders) == sorted(held.folders)
        assert set(held.classes) <= set(_IMAGENET_CATEGORIES)


# The command line


def test_check_tells_missing_from_wrong(tmp_path):
    empty = fedcache(f"datasets check ucf101 {tmp_path} --json")
    assert empty.code == 4
    assert empty.envelope["status"] == "problem"
    assert len(empty.data["missing"]) == 2
    write("ucf101", 0, tmp_path)
    few = fedcache(f"datasets check paper:ucf101 {tmp_path} --json")
    assert few.code == 5
    assert few.data["missing"] == []
    assert few.data["layout"] == "CoOp's split"


def test_a_list_that_is_a_link_out_of_the_folder_is_not_read_unless_asked(tmp_path):
    write("eurosat", 0, tmp_path / "here")
    split = tmp_path / "here/split_zhou_EuroSAT.json"
    secret = tmp_path / "elsewhere.json"
    split.rename(secret)
    split.symlink_to(secret)
    said = ("split_zhou_EuroSAT.json is a link to a file outside", "--follow-links")
    refused("eurosat", tmp_path / "here", Exit.USAGE, *said)
    roots = {"eurosat": tmp_path / "here"}
    assert len(open_dataset("paper:eurosat", roots=roots, follow_links=True))
    inside = tmp_path / "here/2750/list.json"
    secret.rename(inside)
    split.unlink()
    split.symlink_to(inside)
    assert len(open_dataset("paper:eurosat", roots=roots))
