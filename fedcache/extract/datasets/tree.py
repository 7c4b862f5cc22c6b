"""Searches a directory or an archive for images, names them, and makes their source.

A link that leads out of the dataset's folder is followed only if the user requests it. Otherwise, the author of the
folder could choose which other files of this machine are read.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, MachineError, UsageError
from fedcache.extract.datasets import archives
from fedcache.extract.digests import stat_key
from fedcache.extract.image_files import (
    EXTENSIONS,
    OTHER_FORMATS,
    TABLES,
    BadImage,
    check_file_size,
    to_convert,
)
from fedcache.store.files import at_once, digest_of

# Reasons why a file is left out.
LINK_OUT = "link to a file outside the folder (to read it: --follow-links)"
NO_IMAGE = "not an image"
OTHER_FILE = "other file"
HIDDEN = "hidden"
TABLE = "table"


class FilesSource:
    """Reads files below ``root``, one relative path per row, and nothing outside of ``within`` (None: anywhere)."""

    def __init__(self, root: Path, paths: Sequence[str], within: Path | None) -> None:
        self.root = str(root)
        self.paths = tuple(paths)
        self.within = real_folder(within)

    def read(self, row: int) -> bytes:
        """The bytes of a row's file; raises ``BadImage``."""
        path = f"{self.root}/{self.paths[row]}"
        # Checked at every read: the folder may have changed since it was listed.
        if leads_out(path, self.within):
            raise BadImage(
                "it is a link to a file outside the dataset's folder (to read it: --follow-links)"
            )
        try:
            with open(path, "rb", opener=at_once) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise BadImage("it is not a regular file")
                check_file_size(status.st_size)
                return file.read()
        except OSError as error:
            reason = "unknown error"
            if error.errno:
                reason = os.strerror(error.errno).lower()
            raise BadImage(f"the file cannot be read: {reason}") from None


def real_folder(within: Path | None) -> str | None:
    """The path of a folder with all links resolved, for ``leads_out``; None for None."""
    if within is None:
        return None
    return os.path.realpath(within)


def leads_out(path: str, within: str | None) -> bool:
    """Whether a path, after resolving all links, is outside of ``within`` (from ``real_folder``); false for None."""
    if within is None:
        return False
    real = os.path.realpath(path)
    return real != within and not real.startswith(f"{within.rstrip('/')}/")


@dataclass(frozen=True)
class Tree:
    """The images of a folder or an archive, in no particular order."""

    paths: list[str]  # as the file system or the archive spells them
    ignored: Counter[str]  # how many files were left out, by reason
    # entries of the images, in the order of ``paths``; None for a directory
    entries: archives.Entries | None
    # paths of the files that are neither images nor hidden
    others: list[str] = field(default_factory=list)
    # entries of ``others``, in their order; None for a directory
    other_entries: archives.Entries | None = None
    # paths of the folders that hold nothing but hidden files; each ends with a slash
    empty: list[str] = field(default_factory=list)

    def source(
        self, root: Path, rows: NDArray[np.int64], within: Path | None
    ) -> FilesSource | archives.ArchiveSource:
        """Source of some images, in the order of ``rows``, which are indices into ``paths``."""
        if self.entries is None:
            return FilesSource(root.absolute(), [self.paths[row] for row in rows], within)
        return archives.ArchiveSource(self.entries.take(rows))

    def read_other(self, root: Path, name: str) -> bytes:
        """The bytes of a file that is no image. Raises UsageError for one that cannot be read."""
        # None: no check is needed, because ``scan`` has left out links that lead out.
        source: FilesSource | archives.ArchiveSource = FilesSource(root, [name], None)
        if self.other_entries is not None:
            row = np.array([self.others.index(name)], dtype=np.int64)
            source = archives.ArchiveSource(self.other_entries.take(row))
        try:
            return source.read(0)
        except BadImage as error:
            raise UsageError(
                f"The table {root}/{name} cannot be read: {error}.", "Write the table again."
            ) from None


def is_plain(path: str) -> bool:
    """Whether a relative path with slashes stays below its folder: no empty name, ``.``, ``..`` or NUL."""
    odd_names = {"", ".", ".."} & set(path.split("/"))
    return not odd_names and "\0" not in path


def no_such_path(place: str, expected: str, hint: str) -> FedcacheError:
    """The error for a path in a spec that is empty or does not exist; ``expected`` describes the files to give."""
    named = "path"
    if place:
        named = str(Path(place).expanduser())
    return UsageError(
        f"There is no {named!r} (current directory: {Path.cwd()}); expected {expected}.", hint
    )


def scan(path: Path, within: Path | None, endings: frozenset[str] = EXTENSIONS) -> Tree:
    """The images (or files with other ``endings``) of a directory, zip or tar.

    Links of a directory that lead out of ``within`` are left out.

    Raises MachineError for an unreadable folder, CorruptionError for an archive.
    """
    ignored = Counter[str]()
    entries = None
    names = []
    if path.is_dir():
        for relative, info in _walk(path, ignored, within):
            if info is not None and not stat.S_ISREG(info.st_mode):
                ignored["special file"] += 1
            else:
                names.append(relative)
    else:
        if path.suffix.lower() == ".zip":
            entries = archives.list_zip(path)
        else:
            entries = archives.list_tar(path)
        names += [*entries.names, *entries.folders]
    images = []
    others = []
    folders = []
    for row, name in enumerate(names):
        why = _why_ignored(name, endings)
        if why is None:
            images.append(row)
            continue
        if name.endswith("/"):
            if why != HIDDEN:
                folders.append(name)
            continue
        ignored[why] += 1
        if why != HIDDEN:
            others.append(row)
    of_images = None
    of_others = None
    if entries is not None:
        of_images = entries.take(np.array(images, dtype=np.int64))
        archives.check_images(of_images)
        of_others = entries.take(np.array(others, dtype=np.int64))
    return Tree(
        [names[row] for row in images],
        ignored,
        of_images,
        [names[row] for row in others],
        of_others,
        _without_content(folders, [names[row] for row in (*images, *others)]),
    )


def _without_content(folders: Sequence[str], files: Sequence[str]) -> list[str]:
    """The folders that hold none of the files and none of the other folders."""
    if not folders:
        return []
    filled = set()
    for name in (*files, *folders):
        above = name.rstrip("/").rpartition("/")[0]
        while above and above not in filled:
            filled.add(above)
            above = above.rpartition("/")[0]
    return [folder for folder in folders if folder.rstrip("/") not in filled]


def _why_ignored(relative: str, endings: frozenset[str]) -> str | None:
    """Why a file is not read, such as ``hidden``; None for a file with one of ``endings``."""
    parts = relative.split("/")
    if "__MACOSX" in parts or any(part.startswith(".") for part in parts):
        return HIDDEN
    base = parts[-1]
    dot = base.rfind(".")
    ending = ""
    if dot > 0:
        ending = base[dot:].lower()
    if ending in endings:
        return None
    if ending in TABLES:
        return TABLE
    # Only a search for images names image formats that fedcache does not read.
    if endings is not EXTENSIONS:
        return OTHER_FILE
    return OTHER_FORMATS.get(ending, NO_IMAGE)


def ignored_text(ignored: Counter[str]) -> str:
    """``; ignored: 3 hidden, 1 not an image``; "" if no file was ignored."""
    if not ignored:
        return ""
    reasons = [f"{n:,} {why}{to_convert(why)}" for why, n in sorted(ignored.items())]
    return f"; ignored: {', '.join(reasons)}"


def _walk(
    root: Path, ignored: Counter[str], within: Path | None
) -> list[tuple[str, os.stat_result | None]]:
    """(relative path, stat or None for a broken link) of every file, and (path with a slash, None) of empty folders.

    Links to directories are followed, except loops and links that lead out of ``within`` (None: all are followed).
    """
    real = real_folder(within)
    found: list[tuple[str, os.stat_result | None]] = []
    top = root.stat()
    visited = 0
    # Folders to be listed, each with the identities of it and the folders above it: a link to one of them is a loop.
    pending = [("", frozenset({(top.st_dev, top.st_ino)}))]
    while pending:
        prefix, above = pending.pop()
        try:
            with os.scandir(root / prefix) as entries:
                listed = list(entries)
        except OSError as error:
            # Without this error, fedcache would train on part of the data without a warning.
            raise MachineError(
                f"The folder {root / prefix} cannot be listed: {error.strerror}.",
                "Fix its permissions, or move it out of the dataset",
            ) from None
        visited += 1 + len(listed)
        # Links between sibling folders can make a few folders an endless tree.
        if visited > archives.MAX_ENTRIES:
            raise UsageError(
                f"{root} has more than {archives.MAX_ENTRIES:,} files and folders. Files and folders behind links "
                "also count.",
                "Remove links between folders of the dataset, or split the dataset",
            )
        if prefix and all(entry.name.startswith(".") for entry in listed):
            found.append((prefix, None))
        for entry in listed:
            relative = prefix + entry.name
            if entry.is_symlink() and leads_out(entry.path, real):
                ignored[LINK_OUT] += 1
                continue
            try:
                info = entry.stat()
            except OSError:
                found.append((relative, None))
                continue
            identity = (info.st_dev, info.st_ino)
            if not stat.S_ISDIR(info.st_mode):
                found.append((relative, info))
            elif entry.name.startswith(".") or entry.name == "__MACOSX":
                ignored[HIDDEN] += 1
            elif identity in above:
                ignored["link to a folder above"] += 1
            else:
                pending.append((f"{relative}/", above | {identity}))
    return found


def listing_digest(root: Path, within: Path | None) -> str:
    """sha256 over (relative path, size, mtime_ns, inode) of every file: changes whenever a file does.

    Links that lead out of ``within`` (None: all are followed) do not count, because they are not read.
    """
    rows = []
    for relative, info in _walk(root, Counter(), within):
        name = relative
        # A name may hold bytes that are not UTF-8. JSON cannot hold them, so such names are written in hexadecimal.
        if not relative.isascii():
            name = os.fsencode(relative).hex()
        rows.append([name, *_numbers(info)])
    return digest_of([str(root.resolve()), sorted(rows)])


def state_of(path: Path, within: Path | None) -> Any:
    """``stat_key`` of a file, or ``listing_digest`` of a folder: a JSON value that changes with the files."""
    if path.is_dir():
        return listing_digest(path, within)
    return stat_key(path)


def _numbers(info: os.stat_result | None) -> list[int]:
    """[size, mtime_ns, inode]; -1 for each when there is no file."""
    if info is None:
        return [-1, -1, -1]
    return [info.st_size, info.st_mtime_ns, info.st_ino]


def stat_numbers(path: Path) -> list[int]:
    """[size, mtime_ns, inode] of a file, or -1 for each when there is none."""
    try:
        return _numbers(path.stat())
    except OSError:
        return _numbers(None)


def name_of(path: str) -> str:
    """A path as a UTF-8 name: NFC, and bytes that are no UTF-8 written as ``\\xff``."""
    if path.isascii():
        text = path
    else:
        text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return unicodedata.normalize("NFC", text)
