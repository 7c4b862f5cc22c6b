"""Downloads of the papers' datasets, from a server on this machine: resumed, checked, unpacked, or refused."""

import hashlib
import http.server
import io
import os
import shlex
import shutil
import ssl
import subprocess
import tarfile
import threading
from contextlib import contextmanager
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

from fedcache.extract.datasets import download, paper, torchvision


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; understands ranges when told to, and can hang up early."""

    ranges = True
    stop_after: int | None = None
    leads_to = ""
    tells_length = True
    asked: list[tuple[str, str | None]]

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.asked.append((self.path, wanted))
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", self.leads_to)
            self.end_headers()
            return None
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return self.send_error(404)
        raw = path.read_bytes()
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.ranges else 0
        if start and start >= len(raw):
            return self.send_error(416)
        self.send_response(206 if wanted and self.ranges else 200)
        self.send_header(
            "Content-Type", "text/html" if path.suffix == ".html" else "application/octet-stream"
        )
        if self.tells_length:
            self.send_header("Content-Length", str(len(raw) - start))
        self.end_headers()
        self.wfile.write(raw[start : None if self.stop_after is None else start + self.stop_after])
        return None

    def log_message(self, *words):
        pass


@contextmanager
def serving(folder, context=None):
    """(port, handler) of a server of its own; with TLS where a context is given."""
    handler = type("Handler", (Server,), {"asked": []})
    running = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(handler, directory=str(folder))
    )
    if context is not None:
        running.socket = context.wrap_socket(running.socket, server_side=True)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield running.server_port, handler
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.fixture
def server(tmp_path):
    """(address, folder, handler) of a server, which has a.bin."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"the file")
    with serving(folder) as (port, handler):
        yield f"http://127.0.0.1:{port}", folder, handler


@pytest.fixture
def encrypted(tmp_path, monkeypatch):
    """(address, handler) of a server with TLS, whose certificate this test alone believes."""
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
    with serving(tmp_path, context) as (port, handler):
        yield f"https://127.0.0.1:{port}", handler


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
    address, folder, handler = server
    archive = archived(tmp_path / "made", "cifar10", folder / "cifar-10-python.tar.gz")
    published("cifar10", **{archive.name: md5(archive)})
    done = fedcache(f"datasets pull cifar10 --from {address}")
    assert done.code == 0
    place = own_home / "data/cifar10"
    assert str(place) in done.out
    assert "fedcache extract --dataset paper:cifar10" in done.out
    assert f"{address}/cifar-10-python.tar.gz" in done.err
    assert sorted(p.name for p in place.iterdir()) == ["cifar-10-batches-py"]
    here = open_dataset("paper:cifar10", data=own_home / "data")
    assert here.digest == open_dataset("paper:cifar10", roots={"cifar10": tmp_path / "made"}).digest
    before = len(handler.asked)
    assert data_of(f"datasets pull paper:cifar10 --from {address}")["missing"] == []
    assert len(handler.asked) == before  # nothing is fetched twice


def test_what_has_to_be_got_by_hand_is_said_after_a_pull(server, published, tmp_path, own_home):
    address, folder, _ = server
    listed = "split_zhou_EuroSAT.json"
    archive = archived(tmp_path / "made", "eurosat", folder / "EuroSAT.zip", listed)
    published("eurosat", **{"EuroSAT.zip": md5(archive)})
    done = data_of(f"datasets pull eurosat --from {address}")
    assert [listed in text for text in done["missing"]] == [True]
    assert (own_home / "data/eurosat/2750/River").is_dir()


def test_what_a_dataset_is_recognised_by_comes_last(
    server, published, tmp_path, own_home, monkeypatch
):
    """A stop between two entries leaves nothing that looks whole; an archive inside the archive is unpacked too."""
    address, folder, _ = server
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
    archive = write_zip(folder / "caltech-101.zip", held)
    published("caltech101", **{"caltech-101.zip": md5(archive)})
    order = []
    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda self, to: (order.append(Path(to).name), rename(self, to))[1]
    )
    ok(f"datasets pull caltech101 --from {address}")
    expected = ["a-first.txt", "z-last.txt", "101_ObjectCategories"]
    assert [name for name in order if name in expected] == expected
    place = own_home / "data/caltech101"
    assert {str(p.relative_to(place)) for p in place.rglob("*") if p.is_file()} == entries.keys()


def test_offline_nothing_is_asked_and_by_hand_means_the_steps(server, monkeypatch):
    address, _, handler = server
    monkeypatch.setenv("FEDCACHE_OFFLINE", "1")
    assert fedcache(f"datasets pull cifar10 --from {address}").code == 6
    assert handler.asked == []
    monkeypatch.delenv("FEDCACHE_OFFLINE")
    for name in (n for n in paper.NAMES if not paper.read(n).pulls):
        must_fail_machine(paper.read(name).steps[0], f"datasets pull {name}")
    must_fail("", f"datasets pull torchvision:MNIST --from {address}")
    # An empty address is none, as of a variable that is not set.
    calls = []
    monkeypatch.setattr(torchvision, "pull", lambda *given: calls.append(given))
    ok("datasets pull torchvision:MNIST --from ''")
    assert len(calls) == 1


def test_another_file_than_the_published_one_is_removed(server, own_home):
    address, folder, _ = server
    (folder / "cifar-10-python.tar.gz").write_bytes(b"not the batches")
    said = "the published md5 is c58f30108f718f92721af3b95e74349a"
    must_fail_machine(said, f"datasets pull cifar10 --from {address}")
    assert [p for p in (own_home / "data/cifar10").rglob("*") if p.is_file()] == []


def fetched(server, place, name="a.bin"):
    """What is said while a file of the server is fetched into a folder."""
    said = []
    download.fetch(f"{server[0]}/{name}", place / name, md5=md5(server[1] / name), say=said.append)
    return said


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_stopped(ranges, server, tmp_path):
    _, folder, handler = server
    raw = os.urandom(3 << 20)
    (folder / "a.bin").write_bytes(raw)
    handler.ranges, handler.stop_after = ranges, 1 << 20
    machine_error(lambda: fetched(server, tmp_path), "a.bin")
    assert (tmp_path / "a.bin.part").stat().st_size == 1 << 20
    assert not (tmp_path / "a.bin").exists()
    handler.stop_after = None
    (said,) = fetched(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == raw
    assert handler.asked[-1] == ("/a.bin", f"bytes={1 << 20}-")
    assert ("resuming at 1.0 MB" in said) == ranges


def test_a_download_whose_length_nobody_tells_is_whole_and_said_so(server, tmp_path):
    server[2].tells_length = False
    (said,) = fetched(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == b"the file"
    assert "MB" not in said
    assert fetched(server, tmp_path) == [], "what is there is not asked for"


def test_a_whole_part_of_another_file_is_fetched_again(server, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(b"longer than the file")
    fetched(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == b"the file"


def test_a_web_page_is_not_taken_for_a_file(server, tmp_path):
    (server[1] / "a.html").write_bytes(b"<html>sign in</html>")
    machine_error(lambda: fetched(server, tmp_path, "a.html"), "web page")
    gone = f"{server[0]}/gone"
    machine_error(lambda: download.fetch(gone, tmp_path / "gone", md5="", say=print), "Not Found")
    assert [path for path, _ in server[2].asked] == ["/a.html", "/gone"], (
        "what is not there is asked for once"
    )
    local = f"file://{server[1]}/a.html"
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
    machine_error(
        lambda: download.fetch(
            f"{server[0]}/a.bin", tmp_path / "a.bin", sha256="0" * 64, say=print
        ),
        "published sha256 is 000",
    )
    assert list(tmp_path.glob("a.bin*")) == []
    right = hashlib.sha256(b"the file").hexdigest()
    assert download.fetch(
        f"{server[0]}/a.bin", tmp_path / "a.bin", sha256=right, say=print
    ).exists()


def test_an_address_that_leads_on_to_an_unencrypted_one_is_refused(server, tmp_path, no_network):
    """From this machine to another without a checksum; and from an encrypted address to any that is not."""
    server[2].leads_to = "http://mirror.example/a.bin"
    moved = partial(download.fetch, f"{server[0]}/moved", tmp_path / "a.bin", say=print)
    machine_error(moved, "mirror.example")
    assert no_network == []
    server[2].leads_to = f"{server[0]}/a.bin"
    assert moved().read_bytes() == b"the file"
    assert [path for path, _ in server[2].asked] == ["/moved", "/moved", "/a.bin"]


@pytest.mark.slow
def test_an_encrypted_address_that_leads_on_to_an_unencrypted_one_is_refused(
    encrypted, server, tmp_path
):
    """Also for a file whose checksum is known: who asks for https means it."""
    address, handler = encrypted
    handler.leads_to = f"{server[0]}/a.bin"
    machine_error(
        lambda: download.fetch(f"{address}/moved", tmp_path / "a.bin", md5="0" * 32, say=print),
        "not encrypted",
    )
    assert server[2].asked == []


def tar_with(path, change):
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("data/a.txt")
        member.size = 1
        change(member)
        archive.addfile(member, io.BytesIO(b"x"))
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda p: write_zip(p, {"../out.txt": b"x"}),
        lambda p: write_zip(p, {"/out.txt": b"x"}),
        lambda p: write_tar(p, {"data/../../out.txt": b"x"}),
        lambda p: tar_with(
            p, lambda m: (setattr(m, "type", tarfile.SYMTYPE), setattr(m, "linkname", "/etc"))
        ),
        lambda p: tar_with(p, lambda m: setattr(m, "type", tarfile.FIFOTYPE)),
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
    address, folder, _ = server
    archive = write_tar(folder / "cifar-100-python.tar.gz", {"other/readme": b"x"}, "w:gz")
    published("cifar100", **{archive.name: md5(archive)})
    said = "does not contain cifar-100-python. None of its files was added"
    must_fail_corrupt(said, f"datasets pull cifar100 --from {address}")
    assert [p.name for p in (own_home / "data/cifar100").iterdir()] == [".partial"]
