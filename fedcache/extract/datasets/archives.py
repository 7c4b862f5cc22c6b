"""Zip and tar archives, listed once and read by position, never extracted.

The standard library finds the entries, and ``pread`` then reads their bytes. ``pread`` needs no shared file position,
so threads do not wait for each other. A worker process opens an archive in microseconds, where ``ZipFile`` takes 0.4 s
for 60,000 entries. fedcache also decides how many bytes are unpacked.

An archive is untrusted. It is refused as a whole if it has a name that would leave its folder, a link, a device, two
names that differ only in case, overlapping entries or an expansion above ``MAX_EXPANSION``. A single damaged or
oversized image is a bad image. A compressed tar is refused with the command that unpacks it: its n-th image can only be
reached by unpacking everything before it, and images do not compress.
"""

from __future__ import annotations

import inspect
import os
import re
import stat
import tarfile
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, FedcacheError, MachineError, UsageError, shell_word
from fedcache.extract.image_files import BadImage, check_file_size

MAX_ENTRIES = 5_000_000
MAX_NAME = 1_000
MAX_EXPANSION = 100
"""Maximum ratio of unpacked to packed size, for archives that unpack to more than ``FREE_BYTES`` in total."""
FREE_BYTES = 256 << 20

_COMPRESSED = re.compile(r"\.(tgz|tbz2?|txz|tzst|tar\.(gz|bz2|xz|zst|lzma|Z))$", re.IGNORECASE)
# First two bytes of a compressed file -> the tool that unpacks it.
_MAGIC = {b"\x1f\x8b": "gunzip", b"BZ": "bunzip2", b"\xfd7": "unxz", b"(\xb5": "unzstd"}
# Part of the ending of a file -> the tool. Both spellings of an ending contain the part: .tar.gz and .tgz contain gz.
_TOOLS = {"gz": "gunzip", "bz": "bunzip2", "xz": "unxz", "zst": "unzstd"}
# The two methods of zip that are read.
_STORED = 0
_DEFLATED = 8
# Values of ``Entries.method`` that are no method of zip: for an entry with a password, and for an entry of a tar.
_PASSWORD = 254
_TAR = 255


@dataclass(frozen=True)
class Entries:
    """The entries of an archive, in its order."""

    path: Path  # the archive
    stamp: tuple[int, int]  # (size, mtime_ns) of the archive when it was listed
    names: tuple[str, ...]  # [n] names
    at: NDArray[np.int64]  # int64 [n] position of the local header (zip) or of the data (tar)
    packed: NDArray[np.int64]  # int64 [n] bytes in the archive
    size: NDArray[np.int64]  # int64 [n] bytes of the entry
    method: NDArray[np.uint8]  # uint8 [n] zip compression method, ``_PASSWORD`` or ``_TAR``
    crc: NDArray[np.uint32]  # uint32 [n] checksum of the entry; 0 in a tar, which has none
    # names of the folders that have an entry of their own, each ending with a slash
    folders: tuple[str, ...] = ()

    def take(self, rows: NDArray[np.int64]) -> Entries:
        """The entries at ``rows``, in that order. Their names are left out, because a source does not need them."""
        columns = {c: getattr(self, c)[rows] for c in ("at", "packed", "size", "method", "crc")}
        return replace(self, names=(), folders=(), **columns)


def is_compressed_tar(path: Path) -> bool:
    """Whether the name says that it is a compressed tar."""
    return _COMPRESSED.search(path.name) is not None


def refuse_compressed(path: Path, tool: str = "") -> FedcacheError:
    """The error for a compressed tar, with the command that makes it readable."""
    ending = path.suffix.lower()
    for kind, known in _TOOLS.items():
        if kind in ending and not tool:
            tool = known
    if tool:
        command = f"{tool} --keep {shell_word(path)}"
    else:
        command = f"unpack {path} with the tool that made it"
    return UsageError(
        f"{path} is a compressed tar file, so fedcache cannot read its images one by one.",
        f"Run: {command}   and use the .tar file. It is hardly larger, because images are already compressed",
    )


def list_zip(path: Path, *, capitals: bool = False) -> Entries:
    """The files of a zip; CorruptionError for a damaged or hostile archive.

    With ``capitals``, names may differ only in capital letters. The names of arrays may, because arrays are never
    unpacked into files.
    """
    stamp = stamp_of(path)
    archive_bytes, _ = stamp
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise _damaged(path, str(error), f"Check it: unzip -t {path}") from None
    _check_count(path, len(infos))
    files = []
    folders = []
    methods = []
    for info in infos:
        # Only a zip from Unix (3) gives the type of a file; 0 is unknown.
        kind = 0
        if info.create_system == 3:
            kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _hostile(path, info.filename, "is a link or a device")
        if info.is_dir():
            _check_name(path, info.filename.rstrip("/"))
            folders.append(info.filename)
            continue
        _check_name(path, info.filename)
        _check_place(path, archive_bytes, info.filename, info.header_offset, info.compress_size)
        files.append(info)
        # A method is kept in one byte. Bit 0 of the flags marks a file that needs a password.
        method = min(info.compress_type, _PASSWORD - 1)
        if info.flag_bits & 1:
            method = _PASSWORD
        methods.append(method)
    entries = Entries(
        path=path,
        stamp=stamp,
        names=tuple(info.filename for info in files),
        at=np.array([info.header_offset for info in files], dtype=np.int64),
        packed=np.array([info.compress_size for info in files], dtype=np.int64),
        # Capped, because a zip64 record can claim more than an int64 holds. Sizes are only compared with lower limits.
        size=np.array([min(info.file_size, 2**62) for info in files], dtype=np.int64),
        method=np.array(methods, dtype=np.uint8),
        crc=np.array([info.CRC for info in files], dtype=np.uint32),
        folders=tuple(folders),
    )
    if int(entries.packed.sum()) > archive_bytes:
        raise _damaged(
            path, "its entries overlap (together they are longer than the file)", "Do not unpack it"
        )
    return _checked(entries, capitals=capitals)


def list_tar(path: Path) -> Entries:
    """The files of an uncompressed tar.

    Raises UsageError for a compressed one, CorruptionError for a damaged or hostile one.
    """
    stamp = stamp_of(path)
    archive_bytes, _ = stamp
    with path.open("rb") as file:
        tool = _MAGIC.get(file.read(2))
    if tool is not None:
        raise refuse_compressed(path, tool)
    names = []
    folders = []
    at = []
    size = []
    try:
        for member in _members(path):
            name = member.name.removeprefix("./")
            # Names of folders are checked too; the name of the top folder itself is "" or a dot.
            if member.isdir():
                if name not in ("", "."):
                    _check_name(path, name)
                    folders.append(f"{name}/")
                continue
            if not member.isfile() or member.issparse():
                raise _hostile(path, name, "is a link, a device or sparse")
            _check_name(path, name)
            _check_place(path, archive_bytes, name, member.offset_data, member.size)
            names.append(name)
            at.append(member.offset_data)
            size.append(member.size)
            _check_count(path, len(names))
    except (tarfile.TarError, OSError, ValueError, EOFError) as error:
        raise _damaged(path, str(error), f"Check it: tar tf {path}") from None
    sizes = np.array(size, dtype=np.int64)
    entries = Entries(
        path=path,
        stamp=stamp,
        names=tuple(names),
        at=np.array(at, dtype=np.int64),
        packed=sizes,
        size=sizes,
        method=np.full(len(names), _TAR, dtype=np.uint8),
        crc=np.zeros(len(names), dtype=np.uint32),
        folders=tuple(folders),
    )
    return _checked(entries)


def _members(path: Path) -> Iterator[tarfile.TarInfo]:
    with tarfile.open(path, "r:") as archive:
        while (member := archive.next()) is not None:
            # Otherwise tarfile keeps every member: 100 MB for 100,000 entries.
            archive.members = []  # type: ignore[attr-defined]
            yield member
        # tarfile takes a broken header in the middle for the end of the archive, and so it does if the file is cut at a
        # header. Images would be missing without an error. So the end is checked: a whole tar ends in zero blocks.
        with path.open("rb") as file:
            file.seek(archive.offset)
            if file.read(512) != bytes(512):
                raise tarfile.ReadError(
                    f"the header at byte {archive.offset:,} is broken or the end is missing"
                )


def _checked(entries: Entries, *, capitals: bool = False) -> Entries:
    """The same entries. Raises CorruptionError for repeated names; see ``list_zip`` for ``capitals``."""
    seen: dict[str, str] = {}
    for name in entries.names:
        key = name
        if not capitals:
            key = name.casefold()
        if key in seen:
            raise _hostile(entries.path, name, f"clashes with {seen[key]!r}")
        seen[key] = name
    return entries


def check_images(entries: Entries) -> None:
    """Check that the entries, which are images or arrays, can be unpacked.

    Raises UsageError for a password or a rare compression, CorruptionError for a bomb.
    """
    odd = np.flatnonzero(~np.isin(entries.method, (_STORED, _DEFLATED, _TAR)))
    if len(odd):
        method = int(entries.method[odd[0]])
        problem = "need a password"
        if method != _PASSWORD:
            problem = f"use compression method {method}, but fedcache reads only stored and deflated files"
        count = len(odd)
        raise UsageError(
            f"{count:,} files of {entries.path} {problem}.",
            f"Unpack it into an empty folder and pack its files again there:  zip -r0 new{entries.path.suffix} *",
        )
    # A small archive may expand a lot; a large one may not.
    # The sum is an integer of Python, because the sum of the claimed sizes can exceed an int64.
    total = sum(entries.size.tolist())
    packed = entries.stamp[0]
    if total > FREE_BYTES and total > MAX_EXPANSION * packed:
        raise _damaged(
            entries.path,
            f"its {packed:,} bytes would unpack to {total:,}, more than {MAX_EXPANSION}-fold",
            "If you trust it, unpack it into an empty folder and pack its files again there:  "
            f"zip -r0 new{entries.path.suffix} *",
        )


class Reopened:
    """Base class of readers that are pickled without their open file, so that another process opens the file again.

    Each argument of the constructor is an attribute of the same name. A pickle holds only these attributes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = inspect.signature(type(self)).parameters
        return type(self), tuple(getattr(self, name) for name in arguments)


def stamp_of(path: Path) -> tuple[int, int]:
    """(size, mtime_ns) of a file, by which a later change is noticed."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def open_as_listed(path: Path, stamp: tuple[int, int]) -> int:
    """A descriptor of a file, which the caller closes; MachineError when its (size, mtime_ns) is not ``stamp`` now."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise MachineError(
            f"{path} cannot be read: {error.strerror}.",
            "Restore the file and run the command again.",
        ) from None
    status = os.fstat(fd)
    if (status.st_size, status.st_mtime_ns) != stamp:
        os.close(fd)
        listed_size, _ = stamp
        raise MachineError(
            f"{path} has changed since it was listed: it has {status.st_size:,} bytes and had {listed_size:,}.",
            "Run the command again",
        )
    return fd


def data_begins(fd: int, at: int) -> int:
    """The byte at which the data of an entry of a zip begin, behind its local header at ``at``; raises ``BadImage``."""
    header = os.pread(fd, 30, at)
    if len(header) != 30 or header[:4] != b"PK\x03\x04":
        raise BadImage("its header in the archive is damaged")
    name_length = int.from_bytes(header[26:28], "little")
    extra_length = int.from_bytes(header[28:30], "little")
    return at + 30 + name_length + extra_length


@dataclass(frozen=True, eq=False)
class ArchiveSource(Reopened):
    """Reads entries of a zip or tar, one per row, by position."""

    entries: Entries

    def read(self, row: int) -> bytes:
        """The bytes of a row's entry, checked against its length and checksum; raises ``BadImage``."""
        e = self.entries
        at = int(e.at[row])
        packed = int(e.packed[row])
        size = int(e.size[row])
        method = int(e.method[row])
        check_file_size(max(size, packed))
        if method != _TAR:
            at = data_begins(self._fd, at)
        raw = os.pread(self._fd, packed, at)
        if method == _DEFLATED:
            # One byte more than the entry claims is unpacked at most: this is enough to detect a wrong size.
            try:
                raw = zlib.decompressobj(-zlib.MAX_WBITS).decompress(raw, size + 1)
            except zlib.error:
                raise BadImage("its data in the archive is damaged") from None
        damaged = len(raw) != size
        if not damaged and method != _TAR:
            damaged = zlib.crc32(raw) != int(e.crc[row])
        if damaged:
            raise BadImage("its data in the archive is damaged (length or checksum differs)")
        return raw

    @cached_property
    def _fd(self) -> int:
        fd = open_as_listed(self.entries.path, self.entries.stamp)
        weakref.finalize(self, os.close, fd)
        return fd


def _check_name(path: Path, name: str) -> None:
    """Raise CorruptionError for a name that would be outside of the folder when unpacked, or is not plain."""
    parts = name.split("/")
    if name.startswith("/") or re.match(r"^[A-Za-z]:", name):
        raise _hostile(path, name, "is an absolute path")
    if ".." in parts:
        raise _hostile(path, name, "leaves the archive")
    if "\\" in name or "\0" in name or "" in parts or "." in parts:
        raise _hostile(path, name, "is not a relative path with '/' between folders")
    if len(name) > MAX_NAME:
        raise _hostile(path, name, f"has {len(name):,} characters; at most {MAX_NAME:,} are read")


def _check_place(path: Path, archive_bytes: int, name: str, at: int, length: int) -> None:
    if at < 0 or length < 0 or at + length > archive_bytes:
        raise _damaged(
            path, f"its entry {name[:80]!r} is outside the file", "Copy or download it again"
        )


def _check_count(path: Path, count: int) -> None:
    if count > MAX_ENTRIES:
        raise _damaged(
            path, f"it has more than {MAX_ENTRIES:,} entries", "Split it into several archives"
        )


def _hostile(path: Path, name: str, what: str) -> FedcacheError:
    if len(name) <= 80:
        shown = name
    else:
        shown = f"{name[:77]}..."
    return CorruptionError(
        f"{path} is rejected, because its entry {shown!r} {what}. Nothing was extracted.",
        "Unpack it with a tool that you trust, check the files, and pack them again without this entry.",
    )


def _damaged(path: Path, what: str, hint: str) -> FedcacheError:
    return CorruptionError(f"{path} cannot be used as an archive: {what}.", hint)
