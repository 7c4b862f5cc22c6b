"""Files that are either whole or absent, and the one way fedcache hashes, serialises and signs.

``os.replace`` alone survives a crash of the process but not of the machine: the data and then the directory entry
must reach the disk, in that order, before anything may refer to the file.

Signed JSON ends with its own digest: the manifest, and every line of a journal and of the history. The digest covers
the bytes, not the parsed value, so a flipped bit that parses to the same value (``1e5``, ``1E5``) is found as well.
Nothing is parsed before the digest agrees.

Python code is digested by what it does: syntax trees without comments, docstrings, formatting and places of files.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from fedcache.parsing import parse_json

Buffer = bytes | bytearray | memoryview

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk, or the quota of a user, that is full."""

_BEFORE, _AFTER = b',"sha256":"', b'"}'

SCHEME = 2
"""Number of the rule by which code is digested; 1 hashed paths and whole files. It is part of every digest."""


def canonical_json(value: Any) -> bytes:
    """JSON with one spelling: sorted keys, no spaces, UTF-8, no NaN, and no trailing newline.

    >>> canonical_json({"rows": 3, "classes": ["cat", "dog"]})
    b'{"classes":["cat","dog"],"rows":3}'
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def sha256_hex(*parts: Buffer) -> str:
    """sha256 of the concatenated parts, in hex."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def digest_of(value: Any) -> str:
    """sha256 of the canonical JSON of ``value``."""
    return sha256_hex(canonical_json(value))


def file_sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """sha256 of a file, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            if progress is not None:
                progress(len(block))
    return digest.hexdigest()


def at_once(path: str, flags: int) -> int:
    """An ``opener`` that never waits: a pipe in the place of a file reads as empty instead of blocking for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_whole(path: Path) -> bytes:
    """The bytes of a file; none of a pipe. Raises OSError, when it is missing or unreadable."""
    with open(path, "rb", buffering=0, opener=at_once) as file:
        return file.read() or b""


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _temporary(path: Path) -> Path:
    """A name that no other process has, also none with the same number on another host of a shared disk."""
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.partial")


class FullDiskError(OSError):
    """A disk, or the quota of a user, that took no more of a file of ``needed`` bytes, as far as that is known."""

    def __init__(self, error: OSError, path: Path, needed: int) -> None:
        super().__init__(error.errno, error.strerror, str(path))
        self.needed = needed


@contextmanager
def _told_if_full(path: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Raise FullDiskError where the block raises that the disk is full."""
    try:
        yield
    except FullDiskError:
        raise
    except OSError as error:
        if error.errno in FULL:
            raise FullDiskError(error, path, needed()) from error
        raise


def write_atomic(path: Path, *parts: Buffer) -> None:
    """Replace ``path`` by the concatenated parts, as ``written_whole``."""
    with _told_if_full(path, lambda: sum(memoryview(part).nbytes for part in parts)), written_whole(path) as file:
        for part in parts:
            file.write(part)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` when the block ends, and is gone where it raises.

    That is a temporary file, fsync, rename, fsync of the directory. The temporary name starts with a dot and ends in
    ``.partial`` so that cleanups and readers know it.
    """
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # what was to be written, of a full disk too
        raise
    fsync_directory(path.parent)


def link_atomic(source: Path, path: Path) -> bool:
    """Make ``path`` another name of a file, whole or not at all; False where the file system cannot."""
    temporary = _temporary(path)
    try:
        os.link(source, temporary)
    except OSError:  # another device, too many links, or no such thing here
        return False
    try:
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # it stays where both names were of one file already
    fsync_directory(path.parent)
    return True


def append_line(path: Path, line: bytes) -> None:
    """Append one fsynced line. A torn last line (power cut) is the reader's to ignore."""
    with _told_if_full(path, lambda: len(line) + 1), path.open("ab") as file:
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> Iterable[Any]:
    """The JSON lines of a file up to the first torn one (no newline, or not JSON); nothing when it is missing."""
    if not path.exists():
        return
    # As ``read_whole``, which never waits for a pipe in the place of the file.
    with open(path, "rb", opener=at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            try:
                yield parse_json(raw)
            except ValueError:
                return


def make_private(path: Path) -> Path:
    """Create a directory with mode 0700 (features are personal data); parents get the umask's mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


_TAIL = len(_BEFORE) + 64 + len(_AFTER)


def to_signed(body: Mapping[str, Any]) -> bytes:
    """Canonical JSON of a non-empty object, closed by one more key: ``sha256``, over the JSON without it."""
    raw = canonical_json(dict(body))
    return raw[:-1] + _BEFORE + sha256_hex(raw).encode() + _AFTER


def parse_signed(raw: bytes) -> dict[str, Any]:
    """The object of signed JSON. Raises ValueError, in words that follow a file's name, for all that is not signed."""
    body = raw[:-_TAIL] + b"}"
    if raw[-_TAIL:] != _BEFORE + sha256_hex(body).encode() + _AFTER:
        raise ValueError("does not have the digest it ends with")
    try:
        value = parse_json(body)
        canonical = canonical_json(value)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not the JSON fedcache writes") from error
    if type(value) is not dict or canonical != body:
        raise ValueError("is not the JSON fedcache writes")
    return value


def digest_of_files(files: Iterable[Path]) -> str:
    """sha256 over the code of some modules.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     a, b = Path(folder) / "a.py", Path(folder) / "b.py"
    ...     _ = a.write_text("x = 1"), b.write_text("x  =  1  # one")
    ...     digest_of_files([a]) == digest_of_files([b])
    True
    """
    # Sorted digests instead of sorted paths: where a file lies is no part of what it computes.
    return digest_of([SCHEME, sorted(tree_digest(path.read_text(encoding="utf-8")) for path in files)])


@cache
def tree_digest(source: str) -> str:
    """sha256 of a module's syntax tree without comments, docstrings, and the paths of fedcache's own modules.

    >>> tree_digest("x = 1  # one") == tree_digest('x = 1')
    True
    >>> tree_digest("x = 1") == tree_digest("x = 2")
    False
    """
    digest = hashlib.sha256()
    for part in _parts(ast.parse(source)):
        digest.update(part.encode())
    return digest.hexdigest()


def _parts(node: ast.AST) -> Iterator[str]:
    """A syntax tree as words. Empty fields are left out, so that a field that a later Python adds changes nothing."""
    yield f"({type(node).__name__}"
    for name, value in ast.iter_fields(node):
        if value is None or value == [] or name in ("kind", "type_comment", "type_ignores"):
            continue
        if name == "module" and isinstance(node, ast.ImportFrom) and str(value).startswith("fedcache"):
            continue
        yield f" {name}="
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, ast.AST):
                yield f"{item!r},"
            elif not _says_nothing(item):
                yield from _parts(item)
    yield ")"


def _says_nothing(node: ast.AST) -> bool:
    """Whether a statement is a docstring, or imports for type checkers alone."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
