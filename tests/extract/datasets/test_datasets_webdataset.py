"""Samples in tar shards: parts joined by name, labels from .cls, .json or .txt, splits from the names of shards."""

import json

import numpy as np
from make_images import encoded, pixels, write_tar
from no_dataset import damaged_dataset, no_dataset
from opened import open_dataset, peek
from refusal import refused
from sent import sent

from fedcache.extract.datasets.listing import info
from fedcache.extract.datasets.row_sources import WARM
from fedcache.extract.datasets.webdataset import _expand

PNG = [encoded(pixels(i)) for i in range(60)]


def samples(rows, **parts):
    """``000017.png`` and a .cls of row mod 3; ``parts`` are functions of the row that give another part, or None."""
    found = {}
    for i in rows:
        found[f"{i:06d}.png"] = PNG[i]
        for ending, make in {"cls": lambda i: str(i % 3), **parts}.items():
            if make is not None:
                found[f"{i:06d}.{ending}"] = make(i).encode()
    return found


def shards(root, count=3, **parts):
    root.mkdir()
    for n in range(count):
        write_tar(root / f"train-{n:04d}.tar", samples(range(10 * n, 10 * n + 10), **parts))
    write_tar(root / "test-0000.tar", samples(range(50, 60), **parts))
    return root


def opened(place, tail=""):
    return open_dataset(f"webdataset:{place}{tail}")


def test_shards_are_one_dataset_by_folder_glob_and_braces(tmp_path):
    root = shards(tmp_path / "wds")
    data = opened(root)
    assert np.bincount(data.split).tolist() == [30, 10]
    assert data.classes == ("0", "1", "2")
    assert data.names[0] == "test-0000/000050"
    assert data.names[10] == "train-0000/000000"
    for i in (0, 9, 10, 29):
        row = data.names.index(f"train-{i // 10:04d}/{i:06d}")
        assert data.source.read(row) == PNG[i]
        assert data.label[row] == i % 3
    assert "4 shards" in data.reading
    for place in (f"{root}/*.tar", f"{root}/{{train,test}}-*.tar"):
        assert opened(place).digest == data.digest
    train = opened(f"{root}/train-{{0000..0001}}.tar")
    assert len(train) == 20
    assert "no split given" in train.reading
    assert len(opened(root / "train-0002.tar")) == 10
    copy = sent(data.source)
    for row in (39, 0, 20):
        assert copy.read(row) == data.source.read(row)
    assert peek(f"webdataset:{root}") == ("wds", data.digest)
    assert info(f"webdataset:{root}")["note"]


def test_braces_stand_for_numbers_of_one_length_and_for_words():
    assert list(_expand("a-{008..010}.tar")) == ["a-008.tar", "a-009.tar", "a-010.tar"]
    assert list(_expand("{a,b}-{0..1}")) == ["a-0", "a-1", "b-0", "b-1"]
    assert list(_expand("plain.tar")) == ["plain.tar"]
    refused(lambda: list(_expand("{0..999}/{0..999}.tar")), "more than 100,000")


def test_the_label_is_cls_then_json_then_txt(tmp_path):
    def written(name, **parts):
        return write_tar(tmp_path / f"{name}.tar", samples(range(12), **parts))

    some = {
        "json": lambda i: json.dumps({"class": f"k{i % 4}"}),
        "txt": lambda i: ["red\n", "blue\n"][i % 2],
    }
    assert opened(written("a", **some)).classes == ("0", "1", "2")
    path = written("b", cls=None, **some)
    assert opened(path).classes == ("k0", "k1", "k2", "k3")
    assert opened(path, "?label=txt").classes == ("blue", "red")
    assert opened(written("c", cls=None, txt=some["txt"])).classes == ("blue", "red")
    bare = opened(written("d", cls=None))
    assert bare.classes == ()
    assert set(bare.label.tolist()) == {-1}
    ten = opened(written("e", cls=str))
    assert ten.classes == tuple(map(str, range(12)))  # numbers, not words: 2 before 10


def test_folders_inside_and_outside_of_shards_are_part_of_names(tmp_path):
    root = tmp_path / "wds"
    for split, rows in (("train", range(8)), ("val", range(8, 12))):
        (root / split).mkdir(parents=True)
        write_tar(
            root / f"{split}/0000.tar", {f"in/{name}": raw for name, raw in samples(rows).items()}
        )
    data = opened(root)
    assert data.names[0] == "train/0000/in/000000"
    assert np.bincount(data.split).tolist() == [8, 4]
    assert "validation images are used as the test set" in data.reading


def test_two_images_of_a_sample_need_a_choice_and_other_parts_are_counted(tmp_path):
    files = {
        **samples(range(4)),
        **{f"{i:06d}.seg.png": PNG[20 + i] for i in range(4)},
        "000001.pyd": b"x",
        ".hidden": b"",
    }
    data = opened(write_tar(tmp_path / "a.tar", files))
    assert [data.source.read(i) for i in range(4)] == PNG[:4]
    assert "4 .seg.png, 1 .pyd" in data.reading
    assert opened(tmp_path / "a.tar", "?images=seg.png").source.read(2) == PNG[22]
    both = write_tar(tmp_path / "b.tar", {**samples(range(4)), "000001.jpg": PNG[9]})
    no_dataset(f"webdataset:{both}", "two images", "--images-key")
    none = write_tar(tmp_path / "c.tar", {"a.npy": b"x", "a.cls": b"1"})
    no_dataset(f"webdataset:{none}", "contains no images", "cls, npy")


def test_many_shards_are_read_with_few_open(tmp_path):
    root = tmp_path / "wds"
    root.mkdir()
    for n in range(30):
        write_tar(root / f"{n:03d}.tar", samples(range(2 * n, 2 * n + 2)))
    data = opened(root)
    for row in [*range(60), 3, 59, 0]:
        assert data.source.read(row) == PNG[row]
    (source,) = data.source.sources
    assert len(source._warm) == WARM


def test_cut_compressed_and_odd_shards_are_refused(tmp_path):
    path = write_tar(tmp_path / "a.tar", samples(range(8)))
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2 // 512 * 512])
    damaged_dataset(f"webdataset:{path}", "a.tar")
    (tmp_path / "gz").mkdir()
    packed = write_tar(tmp_path / "gz/a.tar.gz", samples(range(3)), "w:gz")
    for place in (packed, packed.parent):
        no_dataset(f"webdataset:{place}", "gunzip")
    for part, held, named in (
        ("json", b"{", "JSON"),
        ("json", b"[" * 100_000, "JSON"),
        ("cls", b"{\xff", "UTF-8"),
        ("txt", b"x" * (2 << 20), "1,048,576"),
    ):
        path = write_tar(tmp_path / "b.tar", {"a.png": PNG[0], f"a.{part}": held})
        no_dataset(f"webdataset:{path}", named)


def test_patterns_that_match_nothing_say_so(tmp_path):
    root = shards(tmp_path / "wds", count=1)
    for place, named in (
        (f"{root}/no-*.tar", "no-*.tar"),
        (f"{root}/train-{{0000..0003}}.tar", "train-0001.tar"),
        (tmp_path / "no", f"ls {tmp_path}"),
    ):
        no_dataset(f"webdataset:{place}", named)
