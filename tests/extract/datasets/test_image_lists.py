"""Lists of images and ImageFolders of other programs: one dataset, however it is written down."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_images import encoded, pixels, png, write_directory, write_tar, write_zip
from no_dataset import no_dataset
from opened import open_dataset

from fedcache.errors import FedcacheError, UsageError
from fedcache.extract.datasets.folder import infer
from fedcache.tables.foreign_files import BEGIN, MARK
from fedcache.tables.splits import SPLIT_WORDS

WORDS = ["cat", "dog", "none"]
ROWS = [
    (f"img/{i:02}.png", WORDS[i % 3], ["train", "test"][i % 4 == 0], f"u{i % 5}") for i in range(24)
]


def images(root):
    return write_directory(root, {path: png(i) for i, (path, *_) in enumerate(ROWS)})


def facts(data):
    """What every row is: its content, class, split and client."""
    clients = data.groups[next(name for name in data.groups if name.startswith("client"))].values()
    words = [data.classes[code] for code in data.label]
    return set(
        zip((uid.tobytes() for uid in data.uid), words, data.split.tolist(), clients, strict=True)
    )


def csv_text(names, separator=",", spelt=str):
    lines = [separator.join(names)]
    return (
        "\n".join([*lines, *(separator.join([spelt(path), *rest]) for path, *rest in ROWS)]) + "\n"
    )


PLAIN = ("path", "label", "split", "client")


@pytest.fixture
def plain(tmp_path):
    root = images(tmp_path / "plain")
    (root / "list.csv").write_text(csv_text(PLAIN))
    return facts(open_dataset(f"folder:{root / 'list.csv'}"))


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("list.csv", csv_text(PLAIN, "\t").encode("utf-16")),
        ("list.csv", ("sep=;\n" + csv_text(PLAIN, ";")).encode("utf-8-sig")),
        ("list.tsv", csv_text(PLAIN, "\t").encode()),
        ("list.csv", csv_text(PLAIN, spelt=lambda path: f".\\{path}".replace("/", "\\")).encode()),
        ("list.csv", csv_text(PLAIN, spelt=lambda path: f"./{path}").encode()),
        (
            "list.csv",
            csv_text(
                ("image_id", *PLAIN[1:]), spelt=lambda path: path.removesuffix(".png")
            ).encode(),
        ),
        (
            "list.jsonl",
            "\n".join(json.dumps(dict(zip(PLAIN, row, strict=True))) for row in ROWS).encode(),
        ),
    ],
)
def test_a_list_of_images_means_the_same_however_it_is_written(tmp_path, plain, name, raw):
    root = images(tmp_path / "set")
    (root / name).write_bytes(raw)
    assert facts(open_dataset(f"folder:{root / name}")) == plain


def test_the_column_of_paths_has_a_usual_name(tmp_path, plain):
    root = images(tmp_path / "set")
    for name in ("image", "file_name", "FileName", "image_path", "file", "img", "id"):
        (root / "list.csv").write_text(csv_text((name, *PLAIN[1:])))
        assert facts(open_dataset(f"folder:{root / 'list.csv'}")) == plain


def test_the_mapping_of_fedscale_is_a_list(tmp_path):
    root = images(tmp_path / "set")
    lines = ["client_id, sample_path, label_name, label_id"]
    lines += [f"{client}, {path}, {word}, {WORDS.index(word)}" for path, word, _, client in ROWS]
    (root / "client_data_mapping.csv").write_text("\n".join(lines))
    data = open_dataset(f"folder:{root / 'client_data_mapping.csv'}")
    assert data.classes == tuple(WORDS)
    assert data.groups["client_id"].words == ("u0", "u1", "u2", "u3", "u4")


def test_paths_of_a_drive_are_refused(tmp_path):
    root = images(tmp_path / "set")
    (root / "list.csv").write_text("path,label\nC:\\data\\a.png,cat\nC:\\data\\b.png,dog\n")
    no_dataset(f"folder:{root / 'list.csv'}", "relative", "C:")


# Hugging Face's ImageFolder


def image_folder(root, *, tables, ending):
    """Files of an ImageFolder: one table at the top, or one in each split."""
    files = {f"{split}/{Path(path).name}": png(i) for i, (path, _, split, _) in enumerate(ROWS)}
    groups = (
        {"": ROWS}
        if tables == "top"
        else {s: [row for row in ROWS if row[2] == s] for s in ("train", "test")}
    )
    for split, rows in groups.items():
        records = [
            {
                "file_name": Path(path).name if split else f"{of}/{Path(path).name}",
                "label": word,
                "client": client,
            }
            for path, word, of, client in rows
        ]
        if ending == "jsonl":
            text = "\n".join(map(json.dumps, records))
        else:
            text = "\n".join(
                ["file_name,label,client", *(",".join(record.values()) for record in records)]
            )
        files[f"{split}/metadata.{ending}".lstrip("/")] = text.encode()
    return files


@pytest.mark.parametrize(
    ("tables", "ending", "top"),
    [("top", "csv", "pets/"), ("each", "csv", ""), ("each", "jsonl", "pets/")],
)
def test_an_image_folder_of_hugging_face_is_read_from_its_tables(
    tmp_path, plain, tables, ending, top
):
    files = {
        top + name: raw
        for name, raw in image_folder(tmp_path, tables=tables, ending=ending).items()
    }
    packed = [
        write_directory(tmp_path / "dir", files),
        write_zip(tmp_path / "z.zip", files),
        write_tar(tmp_path / "t.tar", files),
    ]
    found = [open_dataset(f"folder:{path}") for path in packed]
    for data in found:
        assert facts(data) == plain
        assert "not an image" not in data.reading
    assert len({data.digest for data in found}) == 1
    assert found[0].names[0].startswith("test/")


def test_images_and_rows_without_each_other_are_counted(tmp_path):
    files = image_folder(tmp_path, tables="top", ending="csv")
    files["train/unlisted.png"] = png(99)
    files["metadata.csv"] += b"\ntrain/gone.png,cat,u0"
    data = open_dataset(f"folder:{write_directory(tmp_path / 'pets', files)}")
    assert len(data) == len(ROWS)
    assert "1 not listed" in data.reading
    assert "1 listed and not there" in data.reading


def test_classes_are_folders_where_the_tables_have_none(tmp_path):
    files = {
        f"{split}/{word}/{Path(path).name}": png(i) for i, (path, word, split, _) in enumerate(ROWS)
    }
    lines = [f"{split}/{word}/{Path(path).name},{client}" for path, word, split, client in ROWS]
    files["metadata.csv"] = "\n".join(["file_name,client", *lines]).encode()
    data = open_dataset(f"folder:{write_directory(tmp_path / 'pets', files)}")
    assert data.classes == tuple(WORDS)
    assert np.bincount(data.split).tolist() == [18, 6]
    assert data.groups["client"].words == ("u0", "u1", "u2", "u3", "u4")


# Folders that are named like splits


@given(
    names=st.sets(st.sampled_from(sorted(SPLIT_WORDS)), min_size=2),
    upper=st.booleans(),
    depth=st.integers(1, 2),
)
def test_folders_that_are_all_named_like_splits_are_never_classes(names, upper, depth):
    spelt = [name.upper() if upper else name for name in sorted(names)]
    files = [f"{'/'.join([name] * depth)}/{i}.png" for name in spelt for i in range(3)]
    with pytest.raises(FedcacheError, match="named like splits") as refused:
        infer(files, None, where="pets")
    assert "metadata.csv" in refused.value.hint


def test_a_split_beside_other_names_is_no_class_either():
    def inferred(*names, layout=None):
        files = [f"{name}/{i}.png" for name in names for i in range(3)]
        return infer(files, layout, where="pets").classes

    with pytest.raises(FedcacheError, match="named like splits"):
        inferred("train", "test", "unlabeled")
    assert set(inferred("bus", "car", "train")) == {"bus", "car", "train"}
    assert set(inferred("train", "test", layout="class")) == {"train", "test"}


# Formats that are not read


@pytest.mark.parametrize(("ending", "kind"), [("jp2", "JPEG2000"), ("", "PNG")])
def test_images_in_other_formats_are_refused_with_lines_that_convert_them(tmp_path, ending, kind):
    root = tmp_path / "photos"
    dot = f".{ending}" if ending else ""
    files = {
        f"{word}/{i}{dot}": encoded(pixels(i), kind) for word in ("cat", "dog") for i in range(3)
    }
    write_directory(root, files)
    with pytest.raises(UsageError) as refused:
        open_dataset(f"folder:{root}")
    lines = refused.value.hint.splitlines()
    assert lines[0] == BEGIN
    assert lines[-1] == f"Then:  fedcache datasets info folder:{root}"
    script = "\n".join(line.removeprefix(MARK) for line in lines if line.startswith(MARK))
    subprocess.run([sys.executable, "-c", script], check=True)
    assert open_dataset(f"folder:{root}").classes == ("cat", "dog")
