"""Downloads dataset files: announces each file, resumes it where it stopped, checks it, and moves it into place.

Without encryption, anyone between server and client can change a file. So an unencrypted address is used only for a
file with a published checksum, or on this machine. An encrypted address may not redirect to an unencrypted one.

Everything is prepared in ``.partial`` inside the dataset's folder; the files in the folder itself are complete.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

from fedcache.errors import CorruptionError, FedcacheError, MachineError, UsageError
from fedcache.extract.datasets.archives import FREE_BYTES, MAX_EXPANSION
from fedcache.extract.datasets.paper import Paper, PaperFile
from fedcache.parsing import whole_number

_BLOCK = 1 << 20
_TIMEOUT = 60.0
_HERE = ("127.0.0.1", "::1", "localhost")


def pull(
    paper: Paper, root: Path, *, say: Callable[[str], None], mirror: str | None = None
) -> None:
    """Download the files with a permanent address into ``root`` and unpack them; existing files stay as they are.

    ``say`` receives the size and source of each file before it is fetched. ``mirror`` is another address below which
    files of the same names are. Raises MachineError for a download that fails or whose checksum differs,
    CorruptionError for an archive with other content than expected.
    """
    for file in paper.files:
        target = root / (file.gives or file.name)
        if not file.direct or target.exists():
            continue
        # Files are downloaded into a folder of their own, so that an interrupted download leaves nothing in ``root``.
        partial = root / ".partial"
        partial.mkdir(parents=True, exist_ok=True)
        url = file.url
        if mirror:
            address = mirror.rstrip("/")
            url = f"{address}/{file.name}"
        archive = fetch(
            url,
            partial / file.name,
            md5=file.md5,
            sha256=file.sha256,
            megabytes=file.megabytes,
            say=say,
        )
        if file.gives:
            say(f"Unpacking {file.name}")
            _install(archive, file, root)
        else:
            archive.replace(target)
    shutil.rmtree(root / ".partial", ignore_errors=True)


def fetch(
    url: str,
    target: Path,
    *,
    md5: str = "",
    sha256: str = "",
    megabytes: int = 0,
    say: Callable[[str], None],
) -> Path:
    """Download one file to ``target.part``, rename it when it is complete, and return ``target``.

    An existing part is continued. Raises UsageError for an address without encryption if neither ``md5`` nor ``sha256``
    is known; MachineError if the address does not answer, redirects to an address that is not allowed, stops early, or
    sends a web page or another file.
    """
    if target.exists():
        return target
    part = target.with_name(f"{target.name}.part")
    start = 0
    if part.exists():
        start = part.stat().st_size
    has_checksum = bool(md5 or sha256)
    check_address(url, target.name, known=has_checksum)
    import urllib.error
    import urllib.request
    from http.client import HTTPException

    request = urllib.request.Request(
        url, headers={"User-Agent": "fedcache", "Range": f"bytes={start}-"}
    )
    try:
        with closing(_open(request, known=has_checksum)) as answer:
            # Only 206 means that the server continues where the part ends; any other answer is the whole file.
            if answer.status != 206:
                start = 0
            left = whole_number(answer.headers.get("Content-Length") or "")
            expected = megabytes * 1_000_000
            if left is not None:
                expected = start + left
            size = "size unknown"
            if expected:
                size = f"{expected / 1e6:,.1f} MB"
            announcement = f"{target.name} ({size}) from {url}"
            mode = "wb"
            if start:
                announcement += f", resuming at {start / 1e6:,.1f} MB"
                mode = "ab"
            say(announcement)
            if answer.headers.get("Content-Type", "").startswith("text/html"):
                raise _failed(url, "the server returned a web page, not a file")
            with part.open(mode) as out:
                received = 0
                while block := answer.read(_BLOCK):
                    out.write(block)
                    received += len(block)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise _failed(url, str(getattr(error, "reason", error))) from None
    if left is not None and received < left:
        raise _failed(url, f"the download stopped after {received:,} of {left:,} bytes")
    for kind, published in (("md5", md5), ("sha256", sha256)):
        if not published:
            continue
        found = checksum(part, kind)
        if found != published:
            part.unlink()
            raise MachineError(
                f"{url} has the {kind} {found}; the published {kind} is {published}. The download was removed.",
                "Try again later, or get the file elsewhere and check it: fedcache datasets check NAME PATH",
            )
    return part.replace(target)


def check_address(url: str, name: str, *, known: bool) -> None:
    """Raise UsageError for an address that is not encrypted, unless it is on this machine or the checksum is ``known``.

    Other addresses than those of the web are refused too.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"{url!r} is not an http address.", "Give an address that starts with https://"
        )
    if parts.scheme == "http" and not _may_be_plain(url, known):
        raise UsageError(
            f"{url} is not encrypted, and no checksum of {name} is published, so a changed file could not "
            "be detected.",
            f"Give an https address (--from https://...), or download {name} yourself and use --data NAME=DIR",
        )


def _may_be_plain(url: str, known: bool) -> bool:
    """Whether an address without encryption may be used: the checksum is known, or it is on this machine."""
    parts = urlsplit(url)
    return parts.scheme == "http" and (known or parts.hostname in _HERE)


def _open(request: Any, *, known: bool) -> Any:
    """The answer of the server to a request; redirects are followed unless encryption would be lost."""
    import urllib.error
    import urllib.request

    class Careful(urllib.request.HTTPRedirectHandler):
        def redirect_request(
            self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
        ) -> Any:
            encrypted = urlsplit(newurl).scheme == "https"
            if not encrypted and (req.type == "https" or not _may_be_plain(newurl, known)):
                fp.close()
                raise urllib.error.URLError(f"it redirects to {newurl}, which is not encrypted")
            return super().redirect_request(req, fp, code, msg, headers, newurl)

    opener = urllib.request.build_opener(Careful)
    try:
        return opener.open(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 416:
            raise
        # 416: the part is as long as the file, or longer, so the server has no more bytes. Begin again.
        whole = urllib.request.Request(request.full_url, headers={"User-Agent": "fedcache"})
        return opener.open(whole, timeout=_TIMEOUT)


def _failed(url: str, why: str) -> FedcacheError:
    return MachineError(
        f"{url} cannot be downloaded: {why}.",
        "Run the same command again to resume. Or download the file yourself and use --data NAME=DIR",
    )


def checksum(path: Path, kind: str) -> str:
    """md5 or sha256 of a file, as its owners publish it; an md5 detects damage, not a malicious change."""
    with path.open("rb") as file:
        return hashlib.file_digest(
            file, lambda: hashlib.new(kind, usedforsecurity=False)
        ).hexdigest()


def _install(archive: Path, file: PaperFile, root: Path) -> None:
    """Unpack an archive and the archives inside it into a folder next to it, and move the entries into ``root``."""
    place = archive.with_name("unpacked")
    shutil.rmtree(place, ignore_errors=True)
    unpack(archive, place)
    for inner in file.inner:
        if not (place / inner).is_file():
            raise _odd(archive, f"it does not contain {inner}")
        unpack(place / inner, place)
        # The folder of the inner archive is not needed any more.
        shutil.rmtree(place / inner.split("/")[0])
    if not (place / file.gives).exists():
        raise _odd(archive, f"it does not contain {file.gives}")
    # The entry by which the dataset is recognised is moved last, so that an interrupted move is not taken for complete.
    entries = sorted(place.iterdir(), key=lambda entry: (entry.name == file.gives, entry.name))
    for entry in entries:
        target = root / entry.name
        if not target.exists():
            entry.rename(target)


def unpack(archive: Path, place: Path) -> None:
    """Unpack the regular files of a zip or tar into the folder ``place``.

    Raises CorruptionError for a damaged archive, an entry that leaves the folder or is a link, or a bomb.
    """
    # The sizes that entries claim are subtracted from a limit while they are unpacked, so a bomb is stopped in time.
    limit = max(FREE_BYTES, MAX_EXPANSION * archive.stat().st_size)
    if zipfile.is_zipfile(archive):
        entries = _zip_entries(archive)
    else:
        entries = _tar_entries(archive)
    try:
        with closing(entries):
            for name, size, stream in entries:
                limit -= size
                path = PurePosixPath(name)
                with stream:
                    # Every entry must stay below the folder, on any system.
                    leaves = path.is_absolute() or ".." in path.parts
                    if leaves or "\\" in name or "\0" in name or limit < 0:
                        raise _odd(
                            archive,
                            f"its entry {name[:80]!r} leads out of the target folder, or its content is too large",
                        )
                    target = place / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("wb") as out:
                        shutil.copyfileobj(stream, out, _BLOCK)
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        gzip.BadGzipFile,
        zlib.error,
        EOFError,
        RuntimeError,
    ) as error:
        raise _odd(archive, str(error)) from None


def _zip_entries(archive: Path) -> Generator[tuple[str, int, IO[bytes]], None, None]:
    with zipfile.ZipFile(archive) as whole:
        for entry in whole.infolist():
            if not entry.is_dir():
                yield entry.filename, entry.file_size, whole.open(entry)


def _tar_entries(archive: Path) -> Generator[tuple[str, int, IO[bytes]], None, None]:
    with tarfile.open(archive) as whole:
        for entry in whole:
            if entry.isdir():
                continue
            stream = None
            if entry.isfile():
                stream = whole.extractfile(entry)
            if stream is None:
                raise _odd(archive, f"its entry {entry.name[:80]!r} is a link or a device")
            yield entry.name, entry.size, stream


def _odd(archive: Path, what: str) -> FedcacheError:
    return CorruptionError(
        f"{archive} does not contain the dataset: {what}. None of its files was added to the dataset.",
        f"Remove {archive} and run the same command again, or unpack it yourself and use --data NAME=DIR",
    )
