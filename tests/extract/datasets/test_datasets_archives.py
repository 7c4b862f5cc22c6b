"""Archives are untrusted: hostile ones are refused whole, damage costs one image, and nothing is ever extracted."""

import os
import stat
import struct
import tarfile
import tracemalloc
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_images import SPLIT, png, tree, write_tar, write_zip
from no_dataset import no_dataset
from opened import open_dataset
from refusal import bad_image, machine_error

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.datasets import archives
from fedcache.extract.image_files import BadImage

HOSTILE = [
    "../escape.png",
    "train/../../escape.png",
    "/tmp/escape.png",
    "C:/escape.png",
    "train\\..\\..\\escape.png",
    "train/cat/0.PNG",
    "TRAIN/cat/0.png",
    "train//0.png",
    "train/cat/0.png",
    "train/cat/" + "x" * 1000 + ".png",
]


def refused(path, *words, code=Exit.CORRUPT):
    before = files_beside(path)
    no_dataset(f"folder:{path}", *words, code=code)
    assert files_beside(path) == before


def files_beside(path):
    return {p for p in path.parent.rglob("*") if "digests" not in p.parts}


def zip_with(path, name):
    with zipfile.ZipFile(path, "w") as archive:
        for n, raw in tree(SPLIT).items():
            archive.writestr(n, raw)
        if name in SPLIT:
            with pytest.warns(UserWarning, match="Duplicate"):
                archive.writestr(name, png(99))
        else:
            archive.writestr(name, png(99))
    return path


def appended(path, name, kind=None):
    """A tar with one entry more."""
    write_tar(path, tree(SPLIT))
    with tarfile.open(path, "a") as archive:
        member = tarfile.TarInfo(name)
        if kind is not None:
            member.type = kind
            member.linkname = "/etc/passwd"
        archive.addfile(member)
    return path


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_hostile_name_refuses_the_archive(tmp_path, kind):
    for number, name in enumerate(HOSTILE):
        path = tmp_path / f"{number}.{kind}"
        refused(zip_with(path, name) if kind == "zip" else appended(path, name))


def test_links_devices_and_hostile_folders_in_a_tar_refuse_it(tmp_path):
    for kind in (
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
    ):
        refused(appended(tmp_path / "x.tar", "train/cat/link.png", kind), "'train/cat/link.png'")
    refused(appended(tmp_path / "x.tar", "../up", tarfile.DIRTYPE), "'../up'")


def test_folders_of_an_archive_are_no_entries(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.mkdir("train")
        for name, raw in tree(SPLIT).items():
            archive.writestr(name, raw)
    tars = [
        appended(tmp_path / f"{i}.tar", name, tarfile.DIRTYPE)
        for i, name in enumerate((".", "train/cat"))
    ]
    for path in (tmp_path / "x.zip", *tars):
        assert open_dataset(f"folder:{path}").names == tuple(sorted(SPLIT))


def test_links_and_devices_in_a_zip_refuse_it(tmp_path):
    for kind in (stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO):
        path = write_zip(tmp_path / "x.zip", tree(SPLIT))
        info = zipfile.ZipInfo("train/cat/link.png")
        info.create_system = 3
        info.external_attr = (kind | 0o777) << 16
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(info, "/etc/passwd")
        refused(path, "'train/cat/link.png'")


@pytest.mark.slow
def test_a_zip_bomb_is_refused_before_anything_is_unpacked(tmp_path, monkeypatch):
    zeros = bytes(40 << 20)
    write_zip(tmp_path / "x.zip", {f"{c}/{i}.png": zeros for c in "ab" for i in range(4)})
    assert (tmp_path / "x.zip").stat().st_size < 400_000  # a thousandfold
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda *_: pytest.fail("a member was unpacked"))
    refused(tmp_path / "x.zip", "would unpack to 335,544,320", "100-fold")


@pytest.mark.slow
def test_one_oversized_entry_costs_that_image_and_no_memory(tmp_path):
    write_zip(tmp_path / "x.zip", {**tree(SPLIT), "train/cat/bomb.png": bytes(100 << 20)})
    tracemalloc.start()
    data = open_dataset(f"folder:{tmp_path / 'x.zip'}")
    bad_image(
        data.source.read,
        data.names.index("train/cat/bomb.png"),
        "104,857,600 bytes; the limit is 67,108,864",
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20
    assert "1 cannot be read" in data.reading


def test_a_lying_size_is_a_bad_image_and_unpacks_no_more_than_it_says(tmp_path):
    path = write_zip(tmp_path / "x.zip", {**tree(SPLIT), "train/cat/liar.png": bytes(30 << 20)})
    raw = path.read_bytes()
    # its record in the central directory; the size is at +24
    at = raw.rindex(b"train/cat/liar.png") - 46
    assert raw[at : at + 4] == b"PK\x01\x02"
    path.write_bytes(raw[: at + 24] + struct.pack("<I", 1000) + raw[at + 28 :])
    data = open_dataset(f"folder:{path}")
    bad_image(data.source.read, data.names.index("train/cat/liar.png"), "damaged")


@pytest.mark.parametrize(
    ("suffix", "mode", "tool"),
    [(".tar.gz", "w:gz", "gunzip"), (".tar.bz2", "w:bz2", "bunzip2"), (".tar.xz", "w:xz", "unxz")],
)
def test_a_compressed_tar_is_refused_with_the_command_that_helps(tmp_path, suffix, mode, tool):
    path = write_tar(tmp_path / f"x{suffix}", tree(SPLIT), mode)
    refused(path, f"{tool} --keep {path}", code=Exit.USAGE)
    refused(write_tar(tmp_path / "y.tar", tree(SPLIT), mode), tool, code=Exit.USAGE)


@pytest.mark.parametrize(
    ("field", "value", "words", "code"),
    [
        (8, b"\x01", ["1 files", "need a password"], Exit.USAGE),
        (10, b"\x0c", ["method 12", "zip -r0"], Exit.USAGE),
        (20, b"\x00\x0d", ["overlap"], Exit.CORRUPT),
        (42, b"\xff\xff\xff", ["outside the file"], Exit.CORRUPT),
    ],
)
def test_a_directory_of_entries_that_cannot_be_read_refuses_the_zip(
    tmp_path, field, value, words, code
):
    path = write_zip(tmp_path / "x.zip", tree(SPLIT), compression=0)
    raw = path.read_bytes()
    at = raw.index(b"PK\x01\x02") + field
    path.write_bytes(raw[:at] + value + raw[at + len(value) :])
    refused(path, *words, code=code)


def test_files_that_are_no_archive_are_refused(tmp_path):
    for raw in (b"", b"not an archive at all", os.urandom(5000)):
        for path in (tmp_path / "x.zip", tmp_path / "x.tar"):
            path.write_bytes(raw)
            refused(path)


def test_a_tar_cut_anywhere_is_refused_and_never_shortened(tmp_path):
    path = write_tar(tmp_path / "whole.tar", tree(SPLIT))
    with tarfile.open(path) as archive:
        ends = [m.offset_data + (m.size + 511) // 512 * 512 for m in archive.getmembers()]
    whole = path.read_bytes()
    for end in (ends[4], ends[4] + 100, ends[4] + 512, ends[-1], ends[4] - 300):
        (tmp_path / "cut.tar").write_bytes(whole[:end])
        refused(tmp_path / "cut.tar")
    broken = bytearray(whole)
    broken[ends[4] + 150] ^= 0xFF  # in the checksum field of the next header
    (tmp_path / "cut.tar").write_bytes(broken)
    refused(tmp_path / "cut.tar", f"byte {ends[4]:,}")


def test_damaged_data_in_a_zip_costs_one_image(tmp_path):
    # The last is a block of a kind that there is not.
    for compression, part, value in (
        (zipfile.ZIP_STORED, 0.5, 0x55),
        (zipfile.ZIP_DEFLATED, 0.5, 0x55),
        (zipfile.ZIP_DEFLATED, 0, 0x02),
    ):
        path = write_zip(tmp_path / "x.zip", tree(SPLIT), compression)
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo("train/cat/1.png")
        raw = bytearray(path.read_bytes())
        begin = info.header_offset + 30 + len(info.filename)
        raw[begin + int(info.compress_size * part)] ^= value
        path.write_bytes(raw)
        data = open_dataset(f"folder:{path}")
        for row, name in enumerate(data.names):
            if name == "train/cat/1.png":
                bad_image(data.source.read, row, "damaged")
            else:
                assert data.source.read(row) == tree(SPLIT)[name]


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(0, 255), st.sampled_from([".zip", ".tar"]))
@settings(max_examples=60)
def test_random_damage_never_gives_anything_but_the_image_or_a_refusal(
    tmp_path_factory, where, byte, suffix
):
    folder = tmp_path_factory.mktemp("damage")
    files = tree(SPLIT)
    path = folder / f"x{suffix}"
    (write_zip if suffix == ".zip" else write_tar)(path, files)
    raw = bytearray(path.read_bytes())
    raw[where % len(raw)] = byte
    path.write_bytes(raw)
    try:
        data = open_dataset(f"folder:{path}")
    except FedcacheError:
        return
    for row in range(len(data)):
        try:
            read = data.source.read(row)
        except BadImage:
            continue
        # A zip has checksums; a tar has none for data, and there the damage may be in the image itself.
        assert suffix == ".tar" or read in files.values()


def test_an_archive_that_changes_under_a_reader_is_noticed(tmp_path):
    path = write_zip(tmp_path / "x.zip", tree(SPLIT))
    open_dataset(f"folder:{path}")
    # uids from memory: the file is not open yet
    fresh = open_dataset(f"folder:{path}")
    write_zip(path, tree([*SPLIT, "train/cat/9.png"]))
    machine_error(lambda: fresh.source.read(0), "has changed since it was listed")


def test_an_archive_of_too_many_entries_is_refused(tmp_path, monkeypatch):
    for path in (
        write_zip(tmp_path / "x.zip", tree(SPLIT)),
        write_tar(tmp_path / "x.tar", tree(SPLIT)),
    ):
        monkeypatch.setattr(archives, "MAX_ENTRIES", len(SPLIT))
        assert len(open_dataset(f"folder:{path}")) == len(SPLIT)
        monkeypatch.setattr(archives, "MAX_ENTRIES", len(SPLIT) - 1)
        os.utime(path, (1, 1))  # what was read before is remembered until the file changes
        refused(path, "more than 11 entries")
