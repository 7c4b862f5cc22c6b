"""Downloads of the papers' datasets, from a server on this machine: resumed, checked, unpacked, or refused."""

import hashlib
import os
import shlex
import shutil
import ssl
import subprocess
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from command import data_of, fedcache, ok
from failing_command import must_fail, must_fail_corrupt, must_fail_machine
from make_images import write_tar, write_zip
from opened import open_dataset
from paper_trees import write
from refusal import corruption, machine_error, refused
from web_server import web_server

from fedcache.extract.datasets import download, paper, torchvision


@pytest.fixture
def server(tmp_path):
    """A server of a folder, which has a.bin."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"the file")
    with web_server(folder) as found:
        yield found


@pytest.fixture
def encrypted(tmp_path, monkeypatch):
    """A server with TLS, whose certificate this test alone believes."""
    if shutil.which("openssl") is None:
        pytest.skip("this system has no openssl to make a certificate")
    key = tmp_path / "key.pem"
    certificate = tmp_path / "certificate.pem"
    words = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 1 -subj /CN=localhost"
    words = [*shlex.split(words), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(words, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with web_server(tmp_path, context) as found:
        yield found


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def archived(folder, name, path, without=""):
    """A tiny dataset in its true layout, packed as its owners pack it; without the file of this name."""
    write(name, 0, folder)
    files = {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != without
    }
    return write_zip(path, files) if path.suffix == ".zip" else write_tar(path, files, "w:gz")


@pytest.fixture
def published(monkeypatch):
    """Let the data file of a dataset say the md5 of what the test serves."""

    def say(name, **digests):
        held = paper.read(name)
        files = tuple(
            replace(f, md5=digests[f.name]) if f.name in digests else f for f in held.files
        )
        changed = replace(held, files=files)
        read = paper.read
        monkeypatch.setattr(paper, "read", lambda asked: changed if asked == name else read(asked))
        return changed

    return say


def test_a_pulled_dataset_can_be_extracted(server, published, tmp_path, own_home):
    archive = archived(tmp_path / "made", "cifar10", server.folder / "cifar-10-python.tar.gz")
    published("cifar10", **{archive.name: md5(archive)})
    done = fedcache(f"datasets pull cifar10 --from {server.address}")
    assert done.code == 0
    place = own_home / "data/cifar10"
    assert str(place) in done.out
    assert "fedcache extract --dataset paper:cifar10" in done.out
    assert f"{server.address}/cifar-10-python.tar.gz" in done.err
    assert sorted(p.name for p in place.iterdir()) == ["cifar-10-batches-py"]
    here = open_dataset("paper:cifar10", data=own_home / "data")
    assert here.digest == open_dataset("paper:cifar10", roots={"cifar10": tmp_path / "made"}).digest
    before = len(server.asked)
    assert data_of(f"datasets pull paper:cifar10 --from {server.address}")["missing"] == []
    assert len(server.asked) == before  # nothing is fetched twice


def test_what_has_to_be_got_by_hand_is_said_after_a_pull(server, published, tmp_path, own_home):
    listed = "split_zhou_EuroSAT.json"
    archive = archived(tmp_path / "made", "eurosat", server.folder / "EuroSAT.zip", listed)
    published("eurosat", **{"EuroSAT.zip": md5(archive)})
    done = data_of(f"datasets pull eurosat --from {server.address}")
    assert [listed in text for text in done["missing"]] == [True]
    assert (own_home / "data/eurosat/2750/River").is_dir()


def test_what_a_dataset_is_recognised_by_comes_last(
    server, published, tmp_path, own_home, monkeypatch
):
    """A stop between two entries leaves nothing that looks whole; an archive inside the archive is unpacked too."""
    entries = {
        "101_ObjectCategories/ant/image_0001.jpg": b"x",
        "a-first.txt": b"a",
        "z-last.txt": b"z",
    }
    inner = write_tar(tmp_path / "inner.tar.gz", entries, "w:gz")
    held = {
        "caltech-101/101_ObjectCategories.tar.gz": inner.read_bytes(),
        "caltech-101/Annotations.tar": b"y",
    }
    archive = write_zip(server.folder / "caltech-101.zip", held)
    published("caltech101", **{"caltech-101.zip": md5(archive)})
    order = []
    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda self, to: (order.append(Path(to).name), rename(self, to))[1]
    )
    ok(f"datasets pull caltech101 --from {server.address}")
    expected = ["a-first.txt", "z-last.txt", "101_ObjectCategories"]
    assert [name for name in order if name in expected] == expected
    place = own_home / "data/caltech101"
    assert {str(p.relative_to(place)) for p in place.rglob("*") if p.is_file()} == entries.keys()


def test_offline_nothing_is_asked_and_by_hand_means_the_steps(server, monkeypatch):
    monkeypatch.setenv("FEDCACHE_OFFLINE", "1")
    assert fedcache(f"datasets pull cifar10 --from {server.address}").code == 6
    assert server.asked == []
    monkeypatch.delenv("FEDCACHE_OFFLINE")
    for name in (n for n in paper.NAMES if not paper.read(n).pulls):
        must_fail_machine(paper.read(name).steps[0], f"datasets pull {name}")
    must_fail("", f"datasets pull torchvision:MNIST --from {server.address}")
    # An empty address is none, as of a variable that is not set.
    calls = []
    monkeypatch.setattr(torchvision, "pull", lambda *given: calls.append(given))
    ok("datasets pull torchvision:MNIST --from ''")
    assert len(calls) == 1


def test_another_file_than_the_published_one_is_removed(server, own_home):
    (server.folder / "cifar-10-python.tar.gz").write_bytes(b"not the batches")
    said = "the published md5 is c58f30108f718f92721af3b95e74349a"
    must_fail_machine(said, f"datasets pull cifar10 --from {server.address}")
    assert [p for p in (own_home / "data/cifar10").rglob("*") if p.is_file()] == []


def fetched(server, place, name="a.bin"):
    """What is said while a file of the server is fetched into a folder."""
    said = []
    digest = md5(server.folder / name)
    download.fetch(f"{server.address}/{name}", place / name, md5=digest, say=said.append)
    return said


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_stopped(ranges, server, tmp_path):
    raw = os.urandom(3 << 20)
    (server.folder / "a.bin").write_bytes(raw)
    server.ranges = ranges
    server.stop_after = 1 << 20
    machine_error(lambda: fetched(server, tmp_path), "a.bin")
    assert (tmp_path / "a.bin.part").stat().st_size == 1 << 20
    assert not (tmp_path / "a.bin").exists()
    server.stop_after = None
    (said,) = fetched(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == raw
    assert server.wanted == f"bytes={1 << 20}-"
    assert ("resuming at 1.0 MB" in said) == ranges


def test_a_download_whose_length_nobody_tells_is_whole_and_said_so(server, tmp_path):
    server.tells_length = False
    (said,) = fetched(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == b"the file"
    assert "MB" not in said
    assert fetched(server, tmp_path) == [], "what is there is not asked for"


def test_a_whole_part_of_another_file_is_fetched_again(server, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(b"longer than the file")
    fetched(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == b"the file"


def test_a_web_page_is_not_taken_for_a_file(server, tmp_path):
    (server.folder / "a.html").write_bytes(b"<html>sign in</html>")
    machine_error(lambda: fetched(server, tmp_path, "a.html"), "web page")
    gone = f"{server.address}/gone"
    machine_error(lambda: download.fetch(gone, tmp_path / "gone", md5="", say=print), "Not Found")
    assert server.asked == ["/a.html", "/gone"], "what is not there is asked for once"
    local = f"file://{server.folder}/a.html"
    refused(lambda: download.fetch(local, tmp_path / "c", md5="", say=print), "file://")
    assert list(tmp_path.glob("*.part")) == []


def test_no_address_of_a_paper_gives_an_unencrypted_file_without_a_checksum():
    for name in paper.NAMES:
        for file in paper.read(name).files:
            assert (
                file.url.startswith("https://") or len(file.md5) == 32 or len(file.sha256) == 64
            ), file
            assert not file.direct or file.md5 or file.sha256, file


def test_an_unencrypted_address_of_another_machine_needs_a_checksum(
    no_network, published, tmp_path
):
    """Refused before anything is asked; with a checksum it is asked, and from this machine it is taken either way."""
    plain = partial(download.fetch, "http://mirror.example/a.bin", tmp_path / "a.bin", say=print)
    assert "https://" in refused(plain, "not encrypted").hint
    assert no_network == []
    published("cifar10", **{"cifar-10-python.tar.gz": ""})
    must_fail("", "datasets pull cifar10 --from http://mirror.example/data")
    assert no_network == []
    machine_error(lambda: plain(sha256="0" * 64))
    assert no_network
    no_network.clear()


def test_a_file_with_another_sha256_is_removed(server, tmp_path):
    fetch = partial(download.fetch, f"{server.address}/a.bin", tmp_path / "a.bin", say=print)
    machine_error(lambda: fetch(sha256="0" * 64), "published sha256 is 000")
    assert list(tmp_path.glob("a.bin*")) == []
    right = hashlib.sha256(b"the file").hexdigest()
    assert fetch(sha256=right).exists()


def test_an_address_that_leads_on_to_an_unencrypted_one_is_refused(server, tmp_path, no_network):
    """From this machine to another without a checksum; and from an encrypted address to any that is not."""
    server.leads_to = "http://mirror.example/a.bin"
    moved = partial(download.fetch, f"{server.address}/moved", tmp_path / "a.bin", say=print)
    machine_error(moved, "mirror.example")
    assert no_network == []
    server.leads_to = f"{server.address}/a.bin"
    assert moved().read_bytes() == b"the file"
    assert server.asked == ["/moved", "/moved", "/a.bin"]


@pytest.mark.slow
def test_an_encrypted_address_that_leads_on_to_an_unencrypted_one_is_refused(
    encrypted, server, tmp_path
):
    """Also for a file whose checksum is known: who asks for https means it."""
    encrypted.leads_to = f"{server.address}/a.bin"
    moved = f"{encrypted.address}/moved".replace("http:", "https:")
    machine_error(
        lambda: download.fetch(moved, tmp_path / "a.bin", md5="0" * 32, say=print), "not encrypted"
    )
    assert server.asked == []


def tar_with(path, kind):
    """A tar with one entry that is no file."""
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("data/a.txt")
        member.type = kind
        member.linkname = "/etc"
        archive.addfile(member)
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda p: write_zip(p, {"../out.txt": b"x"}),
        lambda p: write_zip(p, {"/out.txt": b"x"}),
        lambda p: write_tar(p, {"data/../../out.txt": b"x"}),
        lambda p: tar_with(p, tarfile.SYMTYPE),
        lambda p: tar_with(p, tarfile.FIFOTYPE),
        lambda p: p.write_bytes(b"neither zip nor tar"),
        lambda p: p.write_bytes(write_tar(p, {"a": os.urandom(5000)}, "w:gz").read_bytes()[:-900]),
        lambda p: write_zip(p, {"bomb": bytes(1 << 20)}),
    ],
)
def test_an_archive_that_should_not_be_unpacked_is_refused(make, tmp_path, monkeypatch):
    # of the 256 MB that may always be unpacked
    monkeypatch.setattr(download, "FREE_BYTES", 100_000)
    path = tmp_path / "archive"
    make(path)
    inside = tmp_path / "inside/place"
    corruption(lambda: download.unpack(path, inside))
    assert not list(tmp_path.rglob("out.txt"))
    assert not (tmp_path / "etc").exists()


def test_an_archive_without_what_it_should_give_puts_nothing_in_place(server, published, own_home):
    archive = write_tar(server.folder / "cifar-100-python.tar.gz", {"other/readme": b"x"}, "w:gz")
    published("cifar100", **{archive.name: md5(archive)})
    said = "does not contain cifar-100-python. None of its files was added"
    must_fail_corrupt(said, f"datasets pull cifar100 --from {server.address}")
    assert [p.name for p in (own_home / "data/cifar100").iterdir()] == [".partial"]
