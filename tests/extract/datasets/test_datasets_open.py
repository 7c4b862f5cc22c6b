"""Specs: one dataset or several as domains, and what is said when a spec makes no sense."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from make_images import encoded, pixels, png, tree, write_directory, write_tar, write_zip
from no_dataset import no_dataset
from opened import open_dataset, peek
from PIL import Image
from refusal import machine_error, refused
from sent import sent

import fedcache as fc
from fedcache.extract.datasets.listing import info, known, pull


@pytest.fixture
def two(tmp_path):
    """Two folders with the same classes, one of them with two domains of its own."""
    photos = write_directory(
        tmp_path / "photos", tree([f"{c}/{i}.png" for c in ("cat", "dog") for i in range(5)])
    )
    names = [f"{d}/{c}/{i}.png" for d in ("ink", "oil") for c in ("cat", "dog") for i in range(5)]
    drawings = write_zip(tmp_path / "drawings.zip", {n: png(500 + i) for i, n in enumerate(names)})
    return photos, drawings


def test_named_sources_become_domains_of_one_dataset(two):
    photos, drawings = two
    spec = f"photo=folder:{photos},drawn=folder:{drawings}"
    assert peek(spec) is None
    data = open_dataset(spec)
    alone = {"photo": open_dataset(f"folder:{photos}"), "drawn": open_dataset(f"folder:{drawings}")}
    assert data.domains == ("photo", "drawn/ink", "drawn/oil")
    assert data.names == tuple(sorted(f"{k}/{n}" for k, d in alone.items() for n in d.names))
    for row, name in enumerate(data.names):
        source, _, inner = name.partition("/")
        one = alone[source]
        at = one.names.index(inner)
        assert data.source.read(row) == one.source.read(at)
        assert np.array_equal(data.uid[row], one.uid[at])
        assert data.classes[data.label[row]] == one.classes[one.label[at]]
        assert data.split[row] == one.split[at]
        domain = data.domains[data.domain[row]]
        assert domain == (source if source == "photo" else f"drawn/{one.domains[one.domain[at]]}")
    assert peek(spec) == (data.slug, data.digest)
    assert open_dataset(spec.replace("photo=", "x=")).digest != data.digest
    assert sent(data.source).read(3) == data.source.read(3)


def test_an_unknown_label_stays_unknown_when_joined(two):
    root = two[0].parent
    (root / "some.csv").write_text(
        "path,label\nphotos/cat/0.png,cat\nphotos/cat/1.png,\nphotos/dog/0.png,dog\n"
    )
    data = open_dataset(f"a=folder:{two[0]},b=folder:{root / 'some.csv'}")
    assert data.label[data.names.index("b/photos/cat/1.png")] == -1
    assert data.classes[data.label[data.names.index("b/photos/dog/0.png")]] == "dog"


def test_sources_that_do_not_go_together_are_refused(tmp_path, two):
    other = write_directory(tmp_path / "other", tree([f"{c}/1.png" for c in ("cat", "fox", "owl")]))
    no_dataset(f"a=folder:{two[0]},b=folder:{other}", "only a has 'dog'", "only b has 'fox', 'owl'")
    no_dataset(f"a=folder:{two[0]},a=folder:{two[1]}", "'a'")


def test_a_comma_in_a_path_is_part_of_the_path(tmp_path):
    odd = write_directory(tmp_path / "x,y", tree([f"{c}/{i}.png" for c in "ab" for i in range(2)]))
    assert len(open_dataset(f"folder:{odd}")) == 4
    assert len(open_dataset(f"a=folder:{odd},b=folder:{odd}")) == 8


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("digit", "Did you mean 'digits'"),
        ("CIFAR10", "Did you mean 'torchvision:CIFAR10'"),
        ("torchvison:MNIST", "Did you mean 'torchvision:MNIST'"),
        ("qqqqqq", "'qqqqqq'"),
        ("", "Unknown dataset"),
        ("folder", "folder:PATH"),
        ("torchvision:", "torchvision:NAME"),
        ("a=digits,b=", "Unknown dataset"),
    ],
)
def test_a_spec_that_names_nothing_says_what_would(spec, word):
    no_dataset(spec, word)


def test_a_bare_path_is_pointed_to_folder_and_a_layout_is_for_folders(two):
    no_dataset(str(two[0]), f"folder:{two[0]}")
    no_dataset("digits", "--layout", layout="class")


def test_only_torchvision_is_pulled(tmp_path):
    for spec in ("digits", "folder:x"):
        refused(lambda spec=spec: pull(spec, data=tmp_path))
    machine_error(lambda: pull("torchvision:ImageNet", data=tmp_path), "ImageNet")
    assert list(tmp_path.iterdir()) == []


def test_pull_downloads_into_the_folder_open_looks_in(tmp_path, monkeypatch):
    from fedcache.extract.datasets import torchvision as readers

    asked = []
    monkeypatch.setattr(
        readers, "_construct", lambda *words, download: asked.append((*words, download))
    )
    assert pull("torchvision:MNIST", data=tmp_path) == tmp_path / "MNIST"
    assert asked == [("MNIST", tmp_path / "MNIST", {"train": t}, True) for t in (True, False)]


def test_every_listed_name_has_info():
    for row in known():
        told = info(row["name"])
        assert {k: told[k] for k in row} == row
    assert "layout" in info("folder:anything")["note"]
    refused(lambda: info("torchvision:MNISTT"), "Did you mean")


# The same images have the same features and uids in every form


PICTURES = np.stack([pixels(i) for i in range(12)])
PNG = [encoded(picture) for picture in PICTURES]
LABELS = [i % 3 for i in range(12)]


def as_arrays(root):
    np.savez(root / "a.npz", images=PICTURES, labels=LABELS)
    return f"arrays:{root / 'a.npz'}"


def as_parquet(root):
    pq.write_table(
        pa.table({"image": [{"bytes": png} for png in PNG], "label": LABELS}), root / "a.parquet"
    )
    return f"hf:{root / 'a.parquet'}"


def as_shards(root):
    files = {f"{i:06d}.png": png for i, png in enumerate(PNG)}
    files |= {
        f"{i:06d}.json": json.dumps({"label": label}).encode() for i, label in enumerate(LABELS)
    }
    return f"webdataset:{write_tar(root / 'a.tar', files)}"


def as_list(root):
    return list(zip(map(Image.fromarray, PICTURES), LABELS, strict=True))


@pytest.mark.parametrize("write", [as_arrays, as_parquet, as_shards, as_list])
def test_equal_images_have_equal_features(tmp_path, monkeypatch, write):
    def extracted(dataset, home):
        monkeypatch.setenv("FEDCACHE_HOME", f"{tmp_path}/{home}")  # where nothing can be taken over
        return fc.extract(dataset, ["random-projection", "pixels"], size=16, workers=0, batch=4)

    folder = write_directory(
        tmp_path / "png", {f"{LABELS[i]}/{i:07d}.png": png for i, png in enumerate(PNG)}
    )
    files = extracted(f"folder:{folder}", "one")
    order = [int(name.rpartition("/")[2].removesuffix(".png")) for name in files.samples.name]
    ours = extracted(write(tmp_path), "other")
    for key in ours.arrays:
        features = ours.reader(key).all()
        assert np.array_equal(features[order], files.reader(key).all())
        assert features.any()
    if write in (as_parquet, as_shards):  # of bytes of files; arrays have the uids of their pixels
        assert np.array_equal(ours.samples.uid[order], files.samples.uid)
