"""Folders of images: one dataset however it is packed, read as its folders say, with nothing lost in silence."""

import hashlib
import json
import os
import shutil
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conversion_lines import run_conversion
from hypothesis import given
from hypothesis import strategies as st
from make_images import SPLIT, encoded, pixels, png, tree, write_directory, write_tar, write_zip
from no_dataset import missing_dataset, no_dataset
from opened import digests, open_dataset, peek
from refusal import bad_image, refused
from sent import sent

from fedcache.extract.datasets import archives
from fedcache.extract.datasets import tree as file_tree
from fedcache.extract.datasets.folder import enter_top_folder, infer
from fedcache.extract.image_files import MAX_BYTES
from fedcache.extract.images import decode
from fedcache.tables.splits import SPLIT_WORDS

OFFICE = [
    f"{d}/{c}/{i}.jpg"
    for d in ("amazon", "dslr")
    for c in ("bike", "mug", "pen")
    for i in range(10)
]


@pytest.fixture
def folder(tmp_path):
    """The images of ``SPLIT``."""
    return write_directory(tmp_path / "images", tree(SPLIT))


def open_tree(tmp_path, files, **options):
    root = write_directory(tmp_path / "images", files)
    return open_dataset(f"folder:{root}", **options)


@pytest.mark.parametrize(("names", "top"), [(SPLIT, ""), (SPLIT, "office/"), (OFFICE, "deep/er/")])
def test_directory_zip_and_tar_of_one_tree_are_one_dataset(tmp_path, names, top):
    files = {top + name: raw for name, raw in tree(names).items()}
    shuffled = dict(
        sorted(files.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())
    )
    packed = [
        write_directory(tmp_path / "a", files),
        write_zip(tmp_path / "b.zip", shuffled),
        write_zip(tmp_path / "c.zip", files, compression=0),
        write_tar(tmp_path / "d.tar", {f"./{n}": raw for n, raw in shuffled.items()}),
    ]
    found = [open_dataset(f"folder:{path}") for path in packed]
    assert len({data.digest for data in found}) == 1
    assert [data.slug for data in found] == ["a", "b", "c", "d"]
    for data in found:
        assert data.names == tuple(sorted(names))
        for row in (0, len(data) - 1):
            raw = files[top + data.names[row]]
            assert data.source.read(row) == raw
            assert data.uid[row].tobytes() == hashlib.sha256(raw).digest()[:16]


def test_the_digest_sees_every_column_and_not_the_place(tmp_path):
    files = tree(SPLIT)
    base = open_tree(tmp_path / "1", files)
    assert open_tree(tmp_path / "2", files).digest == base.digest
    changed = {**files, "train/cat/0.png": png(99)}
    renamed = {
        ("train/cat/9.png" if n == "train/cat/0.png" else n): raw for n, raw in files.items()
    }
    relabelled = {n.replace("dog", "fox"): raw for n, raw in files.items()}
    for i, other in enumerate((changed, renamed, relabelled)):
        assert open_tree(tmp_path / f"x{i}", other).digest != base.digest


def test_a_domain_level_is_found_and_a_fifth_of_each_class_is_held_out(tmp_path):
    data = open_tree(tmp_path, tree(OFFICE))
    assert data.classes == ("bike", "mug", "pen")
    assert data.domains == ("amazon", "dslr")
    for d in range(2):
        for c in range(3):
            rows = np.flatnonzero((data.domain == d) & (data.label == c))
            uids = [data.uid[r].tobytes() for r in rows]
            held = {u for u, r in zip(uids, rows, strict=True) if data.split[r] == 1}
            assert held == set(sorted(uids)[:2])  # 20 % of 10
    for word in ("domain/class", "48 train", "12 test", "3 classes", "2 domains"):
        assert word in data.reading


@pytest.mark.parametrize(
    ("folders", "layout", "classes", "domains", "splits"),
    [
        ("train/cat", "split/class", "cat", "all", [0, 0]),
        ("photo/cat", "domain/class", "cat", "photo", None),
        ("photo/Train/cat", "domain/split/class", "cat", "photo", [0, 0]),
        ("cat/VAL", "class/split", "cat", "all", [2, 2]),
        ("test/a/b/cat", "split/domain/domain/class", "cat", "a/b", [1, 1]),
        ("cat", "class", "cat", "all", None),
    ],
)
def test_the_levels_mean_what_the_manual_says(folders, layout, classes, domains, splits):
    # A second class beside it, so that the dataset has two.
    other = folders.replace("cat", "dog")
    labels = infer([f"{folders}/1.png", f"{other}/2.png"], None, where="x")
    assert labels.layout == layout
    assert labels.classes[0] == classes
    assert labels.domains[0] == domains
    assert labels.splits == splits


@pytest.mark.parametrize("pack", ["directory", "zip", "tar"])
def test_an_empty_class_folder_is_a_class_without_rows(tmp_path, pack):
    root = write_directory(tmp_path / "x", {**tree(["train/cat/1.png", "test/dog/2.png"])})
    plain = open_dataset(f"folder:{root}")
    # Only the empty folder at the level of the classes is a class, and only below a split.
    for name in ("train/ant", "train/cow/old", "notes/drafts", "val"):
        (root / name).mkdir(parents=True)
    (root / "train/ant/.gitkeep").touch()
    (root / "train/eel").mkdir()
    (root / "train/eel/notes.txt").touch()
    path = root
    if pack != "directory":
        path = Path(shutil.make_archive(str(tmp_path / "y"), pack, root))
    data = open_dataset(f"folder:{path}")
    assert data.classes == ("ant", "cat", "dog")
    assert [data.classes[row] for row in data.label] == [plain.classes[row] for row in plain.label]
    assert "no files of ant" in data.reading
    assert data.digest == open_dataset(f"folder:{root}").digest != plain.digest


def test_a_folder_of_one_class_is_read_if_the_other_class_folders_are_empty(tmp_path):
    root = write_directory(tmp_path / "x", tree(["cat/1.png", "cat/2.png"]))
    refused(lambda: open_dataset(f"folder:{root}"), "only one class")
    (root / "dog").mkdir()
    assert open_dataset(f"folder:{root}").classes == ("cat", "dog")


def test_a_given_layout_overrules_what_the_names_suggest(tmp_path):
    names = [
        f"{a}/{b}/{i}.png" for a in ("cat", "dog") for b in ("left", "right") for i in range(2)
    ]
    write_directory(tmp_path / "images", tree(names))
    spec = f"folder:{tmp_path / 'images'}"
    for layout, classes, domains in (
        ("class/domain", ("cat", "dog"), ("left", "right")),
        ("class/*", ("cat", "dog"), ("all",)),
        (None, ("left", "right"), ("cat", "dog")),
    ):
        data = open_dataset(spec, layout=layout)
        assert data.classes == classes
        assert data.domains == domains
        assert peek(spec, layout=layout) == ("images", data.digest)


def test_a_layout_that_does_not_fit_is_refused(tmp_path):
    write_directory(tmp_path / "images", tree(OFFICE))
    spec = f"folder:{tmp_path / 'images'}"
    for layout in (
        "domain",
        "class/class",
        "split/split/class",
        "clas/domain",
        "",
        "splits/class",
        "site/site/class",
        "a site/class",
        "split/domain/class",
        "split/class",
    ):
        no_dataset(spec, "layout", layout=layout)


def test_only_a_top_folder_without_meaning_is_entered():
    for names, length in (
        (["top/train/a/1.png", "top/test/b/2.png"], 4),
        (["train/a/1.png", "train/b/2.png"], 0),  # a lone split means something
        (["cat/1.png", "cat/2.png"], 0),  # so does a lone class
        (["xa/a/1.png", "xb/b/2.png"], 0),
    ):
        assert enter_top_folder(names) == length


def test_missing_test_sets_are_taken_from_validation_or_train_and_said(tmp_path):
    train = [n for n in SPLIT if n.startswith("train")]
    validation = [n.replace("test/", "val/") for n in SPLIT]
    for number, (names, counts) in enumerate(
        ((validation, [6, 6]), (train, [4, 2]), ([*SPLIT, *validation], [6] * 3))
    ):
        assert np.bincount(open_tree(tmp_path / str(number), tree(names)).split).tolist() == counts
    test = [n for n in SPLIT if n not in train]
    refused(lambda: open_tree(tmp_path / "4", tree(test)), "no training images")


def test_what_is_no_image_is_left_out_and_counted(tmp_path):
    extra = {
        "README.md": b"x",
        "train/cat/Thumbs.db": b"x",
        "train/cat/noextension": b"x",
        ".DS_Store": b"x",
        ".git/config/1.png": b"x",
        "__MACOSX/train/cat/._0.png": b"x",
        "train/cat/.png": b"x",
    }
    clean = open_tree(tmp_path / "clean", tree(SPLIT))
    for data in (
        open_tree(tmp_path / "dirty", tree(SPLIT) | extra),
        open_dataset(f"folder:{write_zip(tmp_path / 'z.zip', {**tree(SPLIT), **extra})}"),
    ):
        assert data.digest == clean.digest
        assert "2 not an image" in data.reading
        assert "1 file without an ending" in data.reading
        assert "4 hidden" in data.reading
    assert "ignored" not in clean.reading


@pytest.mark.parametrize(
    ("names", "word"),
    [
        ([], "holds no images"),
        (["1.png", "2.png"], "0 for"),
        (["cat/1.png", "cat/2.png"], "'cat'"),
        ([*SPLIT, "preview.png"], "'preview.png'"),
    ],
)
def test_trees_without_classes_are_refused(tmp_path, names, word):
    (tmp_path / "images").mkdir()
    refused(lambda: open_tree(tmp_path, tree(names)), word)


def test_missing_paths_and_other_files_are_refused(tmp_path):
    (tmp_path / "x.rar").write_bytes(b"x")
    for spec, word in (
        (f"folder:{tmp_path}/none", "none"),
        (f"folder:{tmp_path}/x.rar", ".zip"),
        ("folder:", "PATH"),
    ):
        no_dataset(spec, word)


def test_a_file_that_cannot_be_read_keeps_its_row(folder):
    (folder / "train/cat/broken.png").symlink_to(folder / "nowhere")
    (folder / "train/cat/loop.png").symlink_to(folder / "train/cat/loop.png")
    with (folder / "train/cat/huge.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    data = open_dataset(f"folder:{folder}")
    assert len(data) == len(SPLIT) + 3
    for name, why in (("broken", "no such file"), ("huge", "67,108,865 bytes"), ("loop", "cannot")):
        path = f"train/cat/{name}.png"
        row = data.names.index(path)
        bad_image(data.source.read, row, why)
        said = hashlib.sha256(b"unreadable\0" + path.encode()).digest()
        assert data.uid[row].tobytes() == said[:16]
    assert "3 cannot be read" in data.reading


def test_links_to_folders_are_followed_and_loops_end(tmp_path):
    files = tree(SPLIT)
    root = write_directory(
        tmp_path / "images", {n: r for n, r in files.items() if n.startswith("train")}
    )
    elsewhere = write_directory(
        tmp_path / "elsewhere", {n: r for n, r in files.items() if n.startswith("test")}
    )
    (root / "test").symlink_to(elsewhere / "test")
    (root / "train/cat/up").symlink_to(root)
    data = open_dataset(f"folder:{root}", follow_links=True)
    assert data.digest == open_tree(tmp_path / "plain", files).digest
    assert "1 link to a folder above" in data.reading


def test_links_out_of_the_folder_are_left_out_unless_asked_for(tmp_path, folder):
    """A link to a file, to a folder and to a link that leads out; one that stays inside is read either way."""
    outside = write_directory(tmp_path / "outside", tree(["a/0.png", "a/1.png"]))
    plain = open_tree(tmp_path / "plain", tree(SPLIT))
    (folder / "train/cat/secret.png").symlink_to(outside / "a/0.png")
    (folder / "train/cat/chain.png").symlink_to(folder / "train/cat/secret.png")
    (folder / "train/cat/gone.png").symlink_to(outside / "none.png")
    (folder / "train/more").symlink_to(outside / "a")
    data = open_dataset(f"folder:{folder}")
    assert data.digest == plain.digest
    assert data.links_left_out == 4
    assert "--follow-links" in data.reading
    assert peek(f"folder:{folder}") == (data.slug, data.digest)
    every = open_dataset(f"folder:{folder}", follow_links=True)
    assert len(every) == len(SPLIT) + 5
    assert every.links_left_out == 0
    assert peek(f"folder:{folder}", follow_links=True) == (every.slug, every.digest)
    (folder / "train/cat/inside.png").symlink_to(folder / "train/dog/0.png")
    assert len(open_dataset(f"folder:{folder}")) == len(SPLIT) + 1


def test_a_file_that_becomes_a_link_out_is_not_read(tmp_path):
    data = open_tree(tmp_path, tree(SPLIT))
    (tmp_path / "secret").write_bytes(b"of this machine")
    (tmp_path / f"images/{data.names[0]}").unlink()
    (tmp_path / f"images/{data.names[0]}").symlink_to(tmp_path / "secret")
    bad_image(data.source.read, 0, "link to a file outside the dataset's folder")


def test_a_folder_that_is_a_link_itself_is_what_the_user_named(tmp_path):
    plain = open_tree(tmp_path, tree(SPLIT))
    (tmp_path / "named").mkdir()
    (tmp_path / "named/images").symlink_to(tmp_path / "images")
    data = open_dataset(f"folder:{tmp_path / 'named/images'}")
    assert data.digest == plain.digest
    assert data.links_left_out == 0
    assert data.source.read(0) == plain.source.read(0)


def test_links_out_that_a_csv_lists_are_left_out_unless_asked_for(tmp_path, folder):
    (tmp_path / "secret.png").write_bytes(png(3))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    lines = [f"{name},{name.split('/')[1]},{name.split('/')[0]}" for name in SPLIT]
    (folder / "list.csv").write_text("\n".join(["path,label,split", "link.png,dog,train", *lines]))
    data = open_dataset(f"folder:{folder / 'list.csv'}")
    assert data.names == tuple(sorted(SPLIT))
    assert data.links_left_out == 1
    assert [data.classes[i] for i in data.label] == [name.split("/")[1] for name in data.names]
    assert len(open_dataset(f"folder:{folder / 'list.csv'}", follow_links=True)) == len(SPLIT) + 1
    (folder / "only.csv").write_text("path,label\nlink.png,dog\n")
    no_dataset(f"folder:{folder / 'only.csv'}", "outside its folder", "--follow-links")


def test_named_pipes_neither_hang_nor_count_as_images(tmp_path, folder):
    os.mkfifo(folder / "train/cat/pipe.png")
    data = open_dataset(f"folder:{folder}")
    assert len(data) == len(SPLIT)
    assert "1 special file" in data.reading
    (tmp_path / "list.csv").write_text(
        "path,label\nimages/train/cat/pipe.png,a\nimages/train/cat/0.png,b\n"
    )
    listed = open_dataset(f"folder:{tmp_path / 'list.csv'}")
    bad_image(
        listed.source.read, listed.names.index("images/train/cat/pipe.png"), "not a regular file"
    )


ODD = [
    "a b",
    "ümlaut",
    "日本",
    "<script>alert(1)<∕script>",
    "semi;colon",
    "-rf",
    "new\nline",
    "'quote\"",
    "%s",
]


def test_odd_names_are_kept_as_they_are(tmp_path):
    files = tree([f"{odd}/{odd}.png" for odd in ODD])
    data = open_tree(tmp_path, files)
    assert data.classes == tuple(sorted(ODD))
    assert data.digest == open_dataset(f"folder:{write_zip(tmp_path / 'o.zip', files)}").digest
    assert data.digest == open_dataset(f"folder:{write_tar(tmp_path / 'o.tar', files)}").digest
    for row in range(len(data)):
        assert decode(data.source.read(row)).size == (8, 6)


def test_composed_and_decomposed_names_are_the_same_name(tmp_path):
    files = tree(["é/1.png", "o/2.png"])
    apart = {unicodedata.normalize("NFD", name): raw for name, raw in files.items()}
    assert list(apart) != list(files)
    composed = open_tree(tmp_path / "c", files)
    decomposed = open_tree(tmp_path / "d", apart)
    assert composed.digest == decomposed.digest
    assert decomposed.source.read(1) == composed.source.read(1)
    clash = files | {name: png(9) for name in apart if "\u0301" in name}
    refused(lambda: open_tree(tmp_path / "both", clash), "two images named")


def test_a_name_that_is_no_utf8_is_escaped_and_read(folder):
    try:
        with open(os.fsencode(folder) + b"/train/cat/\xff.png", "wb") as file:  # noqa: PTH123 - no str
            file.write(png(50))
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    data = open_dataset(f"folder:{folder}")
    assert data.source.read(data.names.index("train/cat/\\xff.png")) == png(50)
    assert open_dataset(f"folder:{folder}").digest == data.digest


@pytest.mark.parametrize("pack", [write_directory, write_zip, write_tar])
def test_sources_survive_pickling_and_threads(tmp_path, pack):
    suffix = {"write_zip": ".zip", "write_tar": ".tar"}.get(pack.__name__, "")
    files = tree(OFFICE)
    data = open_dataset(f"folder:{pack(tmp_path / f'x{suffix}', files)}")
    data.source.read(0)  # opened before it is pickled
    source = sent(data.source)
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(source.read, [*range(len(data))] * 5))
    assert read == [files[name] for name in data.names] * 5


def test_a_relative_path_is_read_from_another_directory(here, monkeypatch):
    files = tree(SPLIT)
    write_directory(here / "mine", files)
    source = open_dataset("folder:mine").source
    monkeypatch.chdir("/")
    assert source.read(0) == files[sorted(files)[0]]


@pytest.mark.parametrize("pack", [write_directory, write_zip])
def test_a_finished_dataset_is_recognised_without_reading_an_image(tmp_path, monkeypatch, pack):
    path = pack(tmp_path / ("x.zip" if pack is write_zip else "x"), tree(SPLIT))
    spec = f"folder:{path}"
    assert peek(spec) is None
    data = open_dataset(spec)
    for source in (archives.ArchiveSource, file_tree.FilesSource):
        monkeypatch.setattr(source, "read", lambda *_: pytest.fail("an image was read"))
    assert peek(spec) == (data.slug, data.digest)
    again = open_dataset(spec)
    assert again.digest == data.digest
    assert again.reading == data.reading
    assert peek(spec, memory=digests(rehash=True)) is None
    monkeypatch.undo()
    changed = next(f for f in (path.rglob("*.png") if path.is_dir() else [path]))
    stamp = changed.stat().st_mtime_ns + 1_000_000
    os.utime(changed, ns=(stamp, stamp))
    assert peek(spec) is None
    assert open_dataset(spec).digest == data.digest


# ---- CSV


def csv_of(tmp_path, text, **options):
    root = write_directory(tmp_path / "set", tree([f"img/{i}.png" for i in range(8)]))
    (root / "list.csv").write_text(text)
    return open_dataset(f"folder:{root / 'list.csv'}", **options)


def test_a_missing_image_of_a_csv_keeps_its_row(tmp_path):
    data = csv_of(tmp_path, "path,label\nimg/0.png,a\nimg/99.png,b\n")
    bad_image(data.source.read, 1, "no such file")
    spec = f"folder:{tmp_path / 'set/list.csv'}"
    assert peek(spec) == (data.slug, data.digest)
    (tmp_path / "set/img/99.png").write_bytes(png(99))
    assert peek(spec) is None
    assert open_dataset(spec).digest != data.digest


WRONG_LISTS = [
    ("label,domain\na,b\n", ["path"]),
    ("path,path\na,b\n", ["twice"]),
    ("path,label\n", ["0 rows"]),
    ("path,label\nimg/0.png\n", ["Row 1"]),
    ("path,label\nimg/0.png,a\nimg/0.png,b\n", ["Row 2", "row 1"]),
    ("path,label\n../x.png,a\n", ["Row 1", "'../x.png'"]),
    ("path,label\n/etc/x.png,a\n", ["Row 1", "'/etc/x.png'"]),
    ("path,label\nC:\\data\\a.png,cat\nC:\\data\\b.png,dog\n", ["relative", "C:"]),
    ("path,label\nnone/0.png,a\n", ["none/0.png"]),
    ('path,label\n"img/0.png,a\n', ["CSV"]),
]


def test_a_wrong_csv_is_refused_with_the_line(tmp_path):
    refused(lambda: csv_of(tmp_path, "path\nimg/0.png\n", layout="class"), "--layout")
    for text, words in WRONG_LISTS:
        refused(lambda text=text: csv_of(tmp_path, text), *words)


def test_a_folder_that_cannot_be_listed_stops_the_reading(tmp_path, monkeypatch):
    write_directory(tmp_path / "x", tree(["cat/a.png", "dog/b.png"]))
    scandir = os.scandir

    def refuses(place):
        if str(place).endswith("dog"):
            raise PermissionError(13, "Permission denied")
        return scandir(place)

    monkeypatch.setattr(file_tree.os, "scandir", refuses)
    missing_dataset(f"folder:{tmp_path / 'x'}", f"{tmp_path}/x/dog")


def test_a_folder_of_too_many_files_is_refused(tmp_path, monkeypatch):
    # two folders, two files; each is listed too
    write_directory(tmp_path / "x", tree(["cat/a.png", "dog/b.png"]))
    monkeypatch.setattr(archives, "MAX_ENTRIES", 7)
    assert len(open_dataset(f"folder:{tmp_path / 'x'}")) == 2
    monkeypatch.setattr(archives, "MAX_ENTRIES", 6)
    no_dataset(f"folder:{tmp_path / 'x'}", "more than 6")


def test_a_level_with_a_name_of_its_own_is_a_group_and_no_part_of_the_digest(tmp_path):
    files = tree(
        [
            f"{site}/{c}/{i}.png"
            for site in ("north", "south")
            for c in ("cat", "dog")
            for i in range(3)
        ]
    )
    data = open_tree(tmp_path, files, layout="site/class")
    assert data.domains == ("all",)
    assert "site: 2 values" in data.reading
    plain = open_dataset(f"folder:{tmp_path / 'images'}", layout="*/class")
    assert plain.digest == data.digest
    assert plain.groups == {}
    for held in (data, data.part(5)):
        assert held.groups["site"].values() == [name.split("/")[0] for name in held.names]


# Lists of images and ImageFolders of other programs: one dataset, however it is written down


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
def pictures(tmp_path):
    """The images of ``ROWS``, in a folder without a list."""
    return images(tmp_path / "set")


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
def test_a_list_of_images_means_the_same_however_it_is_written(pictures, plain, name, raw):
    (pictures / name).write_bytes(raw)
    assert facts(open_dataset(f"folder:{pictures / name}")) == plain


def test_the_column_of_paths_has_a_usual_name(pictures, plain):
    for name in ("image", "file_name", "FileName", "image_path", "file", "img", "id"):
        (pictures / "list.csv").write_text(csv_text((name, *PLAIN[1:])))
        assert facts(open_dataset(f"folder:{pictures / 'list.csv'}")) == plain


def test_the_mapping_of_fedscale_is_a_list(pictures):
    lines = ["client_id, sample_path, label_name, label_id"]
    lines += [f"{client}, {path}, {word}, {WORDS.index(word)}" for path, word, _, client in ROWS]
    (pictures / "client_data_mapping.csv").write_text("\n".join(lines))
    data = open_dataset(f"folder:{pictures / 'client_data_mapping.csv'}")
    assert data.classes == tuple(WORDS)
    assert data.groups["client_id"].words == ("u0", "u1", "u2", "u3", "u4")


def test_a_line_of_json_ends_only_at_a_line_break(tmp_path):
    write_directory(tmp_path, {"a.png": png(0), "b.png": png(1)})
    lines = ['{"path": "a.png", "label": "x\u2028y"}', "", '{"path": "b.png", "label": "z\u0085w"}']
    file = tmp_path / "list.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    assert open_dataset(f"folder:{file}").classes == ("x\u2028y", "z\u0085w")
    file.write_text("\n".join([*lines, "", "no JSON"]), encoding="utf-8")
    no_dataset(f"folder:{file}", "Line 5", "is not JSON")


# Hugging Face's ImageFolder


def image_folder(*, tables, ending):
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
    files = {top + name: raw for name, raw in image_folder(tables=tables, ending=ending).items()}
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
    files = image_folder(tables="top", ending="csv")
    files["train/unlisted.png"] = png(99)
    files["metadata.csv"] += b"\ntrain/gone.png,cat,u0"
    data = open_dataset(f"folder:{write_directory(tmp_path / 'pets', files)}")
    assert len(data) == len(ROWS)
    assert "1 not listed" in data.reading
    assert "1 listed but missing" in data.reading


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
    refused(lambda: infer(files, None, where="pets"), "named like splits", "metadata.csv")


def test_a_split_beside_other_names_is_no_class_either():
    def inferred(*names, layout=None):
        files = [f"{name}/{i}.png" for name in names for i in range(3)]
        return infer(files, layout, where="pets").classes

    refused(lambda: inferred("train", "test", "unlabeled"), "named like splits")
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
    assert run_conversion(refused(lambda: open_dataset(f"folder:{root}"))) == root
    assert open_dataset(f"folder:{root}").classes == ("cat", "dog")
