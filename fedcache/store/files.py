"""Files that are either whole or absent, and the one way fedcache hashes, serialises and signs.

``os.replace`` alone survives a crash of the process but not of the machine: the data and then the directory entry
must reach the disk, in that order, before anything may refer to the file.

Signed JSON ends with its own digest: the manifest, and every line of a journal and of the history. The digest covers
the bytes, not the parsed value, so a flipped bit that parses to the same value (``1e5``, ``1E5``) is found as well.
Nothing is parsed before the digest was verified.

The digest of Python code is that of its syntax tree, without comments, docstrings, formatting and paths of files.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fedcache.config import refuse_remote
from fedcache.errors import CorruptionError, MachineError, UsageError
from fedcache.parsing import parse_json

if TYPE_CHECKING:
    from torch import Tensor


Buffer = bytes | bytearray | memoryview

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors that mean a full disk, or a full quota of the user."""

OPENED = "/proc/self/fd"
"""Folder in which Linux lists the open files of a process."""

_DIGEST_START = b',"sha256":"'
_DIGEST_END = b'"}'

SCHEME = 2
"""Version of the digest of code, which is part of that digest. Version 1 hashed paths and whole files."""


HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]
"""Digits for this host in names of temporary files. The number of a process says nothing on another host."""


def canonical_json(value: Any) -> bytes:
    """JSON with one spelling: sorted keys, no spaces, UTF-8, no NaN, and no trailing newline.

    >>> canonical_json({"rows": 3, "classes": ["cat", "dog"]})
    b'{"classes":["cat","dog"],"rows":3}'
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
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


def file_sha256(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def at_once(path: str, flags: int) -> int:
    """An ``opener`` that never waits: a pipe in place of a file is read as empty and does not block."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_whole(path: Path) -> bytes:
    """The bytes of a file; b"" for a pipe. Raises OSError for a missing or unreadable file."""
    with open(path, "rb", buffering=0, opener=at_once) as file:
        return file.read() or b""


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_name(path: Path) -> Path:
    """A name that no other process uses, also no process with the same number on another host of a shared disk."""
    return path.with_name(f".{path.name}.{os.getpid()}-{HOST}-{os.urandom(4).hex()}.partial")


class FullDiskError(OSError):
    """A disk, or the quota of a user, is full.

    Attributes:
        needed: bytes of the whole file; 0 if not known.
        written: bytes of the file that were written before.
    """

    def __init__(self, error: OSError, path: Path, *, needed: int = 0, written: int = 0) -> None:
        super().__init__(error.errno, error.strerror, str(path))
        self.needed = needed
        self.written = written


def size_of(parts: Iterable[Buffer]) -> int:
    """Bytes of several buffers."""
    return sum(memoryview(part).nbytes for part in parts)


def write_atomic(path: Path, *parts: Buffer) -> None:
    """Replace ``path`` by the concatenated parts, as ``written_whole``."""
    with written_whole(path, size_of(parts)) as file:
        for part in parts:
            file.write(part)


@contextmanager
def written_whole(path: Path, needed: int) -> Iterator[BinaryIO]:
    """A file to write that replaces ``path`` when the block ends, and is removed if the block raises an error.

    The steps are: temporary file, fsync, rename, fsync of the directory. The temporary name starts with a dot and ends
    in ``.partial``, by which cleanups and readers know it.

    Args:
        path: of the file.
        needed: bytes that will be written, for the message of a full disk; 0 if not known.
    """
    temporary = temporary_name(path)
    try:
        with _filled(
            lambda: temporary.open("w+b"), path, needed, lambda _: temporary.replace(path)
        ) as file:
            yield file
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def written_unnamed(path: Path, needed: int) -> Iterator[BinaryIO]:
    """As ``written_whole``, but a process that is killed while it writes leaves no file.

    The file has no name before it is complete (``O_TMPFILE`` of Linux). If the system or the file system has no such
    files, this is ``written_whole``.
    """
    unnamed = open_unnamed(path.parent)
    if unnamed is None:
        with written_whole(path, needed) as file:
            yield file
        return
    with _filled(lambda: unnamed, path, needed, lambda file: _give_name(file, path)) as file:
        yield file


@contextmanager
def _filled(
    opened: Callable[[], BinaryIO], path: Path, needed: int, put: Callable[[BinaryIO], object]
) -> Iterator[BinaryIO]:
    """A file to write. When the block ends, its content is written to the disk, and then ``put`` moves it to its place.

    An error of the system names ``path``; FullDiskError for a full disk. Raises UsageError for an address instead
    of a path: ``s3://bucket/x`` would make a folder named ``s3:``.
    """
    refuse_remote(path, str(path))
    written = 0
    try:
        with opened() as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
            finally:
                if not file.closed:
                    written = file.tell()
            put(file)
    except OSError as error:
        if error.errno in FULL:
            raise FullDiskError(error, path, needed=needed, written=written) from error
        # Name the file that the caller writes, not the temporary one.
        error.filename = str(path)
        error.filename2 = None
        raise
    fsync_directory(path.parent)


def open_unnamed(folder: Path) -> BinaryIO | None:
    """A file without a name on the disk of a folder, removed when it is closed; None on systems without such files."""
    if not hasattr(os, "O_TMPFILE") or not Path(OPENED).is_dir():
        return None
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666)
        return os.fdopen(fd, "w+b")
    except OSError:
        # The file system has no such files. If the folder cannot be written, the next attempt raises the error.
        return None


def _give_name(file: BinaryIO, path: Path) -> None:
    """Give a file without a name the name ``path``, and replace an existing file of that name."""
    with suppress(FileExistsError):
        _link_opened(file, path)
        return
    # No system call replaces a file by one without a name, so it gets a temporary name first.
    temporary = temporary_name(path)
    try:
        _link_opened(file, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _link_opened(file: BinaryIO, path: Path) -> None:
    """Give an open file a name that no file has. Raises FileExistsError if a file has it."""
    fd = file.fileno()
    # Python follows the link in /proc only if ``src_dir_fd`` is given. The value is not used for an absolute path.
    os.link(f"{OPENED}/{fd}", path, src_dir_fd=fd, follow_symlinks=True)


def link_atomic(source: Path, path: Path) -> bool:
    """Make ``path`` another name of a file, whole or not at all; False if the file system cannot."""
    temporary = temporary_name(path)
    try:
        os.link(source, temporary)
    except OSError:  # another device, too many links, or a file system without links
        return False
    try:
        temporary.replace(path)
    finally:
        # A rename does nothing if both names already belong to one file.
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)
    return True


def append_line(path: Path, line: bytes) -> None:
    """Append one fsynced line. Readers must ignore an incomplete last line, which a power cut leaves."""
    try:
        with path.open("ab") as file:
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in FULL:
            raise FullDiskError(error, path, needed=len(line) + 1) from error
        raise


def read_lines(path: Path) -> Iterable[Any]:
    """The JSON lines of a file up to the first damaged one (no newline, or not JSON); none for a missing file."""
    if not path.exists():
        return
    # Never wait for a pipe in place of the file, as ``read_whole``.
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


_TAIL = len(_DIGEST_START) + 64 + len(_DIGEST_END)  # bytes from the key ``sha256`` to the end


def to_signed(body: Mapping[str, Any]) -> bytes:
    """Canonical JSON of a non-empty object, with a last key ``sha256``: the digest of the JSON without this key."""
    raw = canonical_json(dict(body))
    return raw[:-1] + _DIGEST_START + sha256_hex(raw).encode() + _DIGEST_END


def parse_signed(raw: bytes) -> dict[str, Any]:
    """The object of signed JSON, without the digest.

    Raises ValueError for other bytes. Its message continues a sentence that begins with the name of the file.
    """
    body = raw[:-_TAIL] + b"}"
    if raw[-_TAIL:] != _DIGEST_START + sha256_hex(body).encode() + _DIGEST_END:
        raise ValueError("does not match the checksum at its end")
    try:
        value = parse_json(body)
        canonical = canonical_json(value)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not JSON written by fedcache") from error
    if type(value) is not dict or canonical != body:
        raise ValueError("is not JSON written by fedcache")
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
    digests = [tree_digest(path.read_text(encoding="utf-8")) for path in files]
    # Sorted by digest and not by path, because the path of a file does not change its results.
    return digest_of([SCHEME, sorted(digests)])


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
        # These three fields hold the prefix u of a string, and comments that give types.
        if value is None or value == [] or name in ("kind", "type_comment", "type_ignores"):
            continue
        is_imported_module = isinstance(node, ast.ImportFrom) and name == "module"
        if is_imported_module and str(value).startswith("fedcache"):
            continue
        yield f" {name}="
        items = value
        if not isinstance(value, list):
            items = [value]
        for item in items:
            if not isinstance(item, ast.AST):
                yield f"{item!r},"
            elif not _is_without_effect(item):
                yield from _parts(item)
    yield ")"


def _is_without_effect(node: ast.AST) -> bool:
    """Whether a statement is a docstring, or imports for type checkers alone."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
        return node.test.id == "TYPE_CHECKING"
    return False


# Limits of the machine: the memory above which features are mapped from files, and the space on
# its disk.


SHARE = 0.5
"""Share of the free memory that features may take. A run also makes a few other arrays of this size."""

UNKNOWN = 2 << 30
"""Bytes of memory that are assumed to be free if the system does not say."""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@contextmanager
def explain_disk_errors(place: Path, needed: int = 0) -> Iterator[None]:
    """Turn the operating system's refusal to write ``needed`` bytes to ``place`` into an error with its figures.

    ``needed`` is 0 if the number is not known. Raises MachineError, with needed and free bytes when the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise full_disk(error, place, needed) from error
        raise MachineError(
            f"{place} cannot be written: {error.strerror or error}.",
            "Check the permissions and the disk, then run the same command again. Finished work is kept.",
        ) from error


def full_disk(error: OSError, place: Path | None = None, needed: int = 0) -> MachineError:
    """The error of a full disk, with the file that was being written, its size, and the free bytes.

    Args:
        error: of the system; a FullDiskError also has the size of the file.
        place: the file; None for the file that ``error`` names.
        needed: bytes of the file; 0 if not known.
    """
    at_least = 0
    if isinstance(error, FullDiskError):
        needed = max(needed, error.needed)
        at_least = error.written
    if error.filename:
        place = place or Path(str(error.filename))
    what = "The file being written"
    if place is not None:
        what = str(place)
    if needed:
        size = f"{needed:,} bytes"
    elif at_least:
        size = f"at least {at_least:,} bytes"
    else:
        size = "more space"
    return MachineError(
        f"The disk is full: {what} needs {size}{_free_words(place)}.",
        "Free some space and run the same command again. Finished work is kept.",
    )


def _free_words(place: Path | None) -> str:
    """The free bytes of a disk as the end of a sentence; "" if the system does not tell."""
    try:
        free = disk_free(place or Path())
    except OSError:
        return ""
    # The free bytes may be more than the file needs, because its folder grows too and disks are filled by whole blocks.
    if free:
        return f" and {free:,} bytes are free"
    return " and none is free"


def disk_free(place: Path) -> int:
    """Free bytes of the disk of a path, which need not exist. Raises OSError if the system does not tell."""
    parent = place.absolute()
    while not parent.exists():
        parent = parent.parent
    return shutil.disk_usage(parent).free


def memory_limit() -> int:
    """Bytes one set of features may take: ``FEDCACHE_MEMORY`` (``8G``, ``500M``, bytes), else half of the free memory.

    Raises UsageError for a ``FEDCACHE_MEMORY`` that is not a size.
    """
    value = size_in_environment("FEDCACHE_MEMORY")
    if value is not None:
        return value
    return int(SHARE * free_memory())


def free_memory() -> int:
    """Bytes of memory that this process can use without swapping.

    It is the free memory of the system or of the process's control group, whichever is less, and half of all memory if
    the system does not tell what is free.
    """
    free = [size for size in (_free_of_system(), _free_of_group()) if size is not None]
    return min(free, default=UNKNOWN)


def size_in_environment(name: str) -> int | None:
    """Bytes in a variable, such as ``8G``, ``500M`` or a number; None if it is not set. Raises UsageError."""
    value = os.environ.get(name, "").strip()
    if not value:
        return None
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", value.lower())
    if size is None:
        raise UsageError(f"{name} is {value!r}, which is not a size.", "For example 8G or 500M.")
    return int(float(size[1]) * _UNITS[size[2]])


def threads_for(parts: int) -> int:
    """Threads that copy ``parts`` chunks: one per core of this process, at most four; memory is no faster for more."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min(4, cores, parts))


def _free_of_system() -> int | None:
    """Bytes of memory that are free without swapping; None if the system does not tell."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    with suppress(OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None


def _free_of_group() -> int | None:
    """Bytes of memory that are free in the control group; None if it has no limit.

    Page cache is not subtracted, because the system releases it.
    """
    with suppress(OSError, ValueError, KeyError):
        place = Path("/sys/fs/cgroup")
        limit = int((place / "memory.max").read_text())
        lines = (place / "memory.stat").read_text().splitlines()
        used = dict(line.split() for line in lines)
        return max(0, limit - int(used["anon"]))
    return None


# Sealed files: files that fedcache keeps for itself. They are read only if they are whole,
# unchanged and in their own place.
#
# A seal is signed JSON (``to_signed``) of the content and of the identity of the file: its kind and
# its owner, such as the run and seed of a checkpoint. So a changed digit is found, and also two
# whole files that were exchanged. Files with tensors are safetensors; the seal is in their metadata
# and contains a digest of the tensors.
#
# A file that is damaged, belongs elsewhere, or is of a release that did not seal it is never read.
# If it can be made again, the caller ignores it, and says so if that costs time. Otherwise the
# caller refuses to continue.

TENSORS = ".safetensors"
SEAL = "seal"

LONGEST_HEADER = 100_000_000
"""Limit in bytes for a header, as in safetensors."""


@dataclass(frozen=True)
class Sealed:
    """Content of a sealed file."""

    content: Any  # JSON value
    tensors: dict[str, Tensor]  # {} for a file of JSON alone


def write_sealed(
    path: Path, what: Mapping[str, Any], content: Any, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Replace ``path`` by a sealed file, whole or not at all.

    Args:
        path: ends in ``.safetensors`` if and only if there are ``tensors``.
        what, content, tensors: see ``sealed_bytes``.
    """
    if (tensors is not None) != (path.suffix == TENSORS):
        raise ValueError(
            f"{path.name}: a sealed file with tensors must end in {TENSORS}, and one without must not"
        )
    write_atomic(path, sealed_bytes(what, content, tensors))


def sealed_bytes(
    what: Mapping[str, Any], content: Any, tensors: Mapping[str, Tensor] | None
) -> bytes:
    """The bytes of a sealed file.

    Args:
        what: identity of the file, a JSON object that the reader must know: its kind and its owner.
        content: any JSON value without NaN.
        tensors: by name, of any shape and dtype; they are written from the CPU.
    """
    if tensors is None:
        return to_signed({"what": dict(what), "content": content})
    from safetensors.torch import save

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    seal = to_signed({"what": dict(what), "content": content, "tensors": _tensors_digest(plain)})
    return bytes(save(plain, {SEAL: seal.decode()}))


def read_sealed(path: Path, what: Mapping[str, Any]) -> Sealed | None:
    """Content of a sealed file, after its seal was verified; None if there is no file.

    Raises CorruptionError for a file that was changed, is not sealed, or has another identity than ``what``.
    """
    if not path.exists():
        return None
    try:
        return _opened(path, what)
    except FileNotFoundError:
        # Another process that has finished the same work removed the file at this moment.
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        why = "cannot be read"
        # The text of such an error continues the sentence, as in ``parse_signed``.
        if type(error) is ValueError and error.args:
            why = error.args[0]
        raise CorruptionError(
            f"{path} {why}.", "Remove the file. fedcache makes its content again."
        ) from error


def is_sealed(path: Path) -> bool:
    """Whether a safetensors file has a seal. True for a damaged file, so that reading it reports the damage."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, LONGEST_HEADER)))
        return SEAL in header.get("__metadata__", {})
    except (OSError, ValueError, AttributeError, RecursionError):
        return True


def content_beside_tensors(path: Path) -> Any:
    """The content of a sealed safetensors file, without reading or checking its tensors.

    Raises SafetensorError for another file, ValueError for a changed seal.
    """
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return parse_signed((file.metadata() or {})[SEAL].encode())["content"]


def _opened(path: Path, what: Mapping[str, Any]) -> Sealed:
    """As ``read_sealed``, with the errors of the libraries that read the bytes; ValueError for a seal that differs."""
    tensors: dict[str, Tensor] = {}
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("is not a file")
    if path.suffix != TENSORS:
        seal = parse_signed(read_whole(path))
    else:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                seal = parse_signed((file.metadata() or {})[SEAL].encode())
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        except SafetensorError as error:
            raise ValueError("was changed since it was written") from error
        if seal["tensors"] != _tensors_digest(tensors):
            raise ValueError("does not contain the tensors that were written")
    if seal["what"] != what:
        raise ValueError("has content that belongs to another file")
    return Sealed(seal["content"], tensors)


def _tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            # A tensor of one number may have any stride; only as_strided sets it to 1.
            flat = tensor.as_strided((tensor.numel(),), (1,))
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Sealed lines: a file that grows by one signed line at a time. Every line contains the sha256 of the line before it.
#
# This detects a changed digit, a missing line in the middle, and a line of another file. A last line without a newline
# was cut by a power failure. Nothing depends on it yet, so readers leave it out and the next line replaces it. Missing
# lines at the end are not detected, because the file is then the same as it was earlier.


NUMBER = "number"
BEFORE = "before"
"""Keys of every line in addition to its content: its number from 1, and the sha256 of the line before it."""


def first_of(what: Mapping[str, Any]) -> bytes:
    """Bytes in place of the line before the first one: the identity of the file, as ``what`` of sealed files."""
    return canonical_json(dict(what))


def read_sealed_lines(path: Path, first: bytes = b"") -> list[dict[str, Any]]:
    """The contents of all whole lines; [] for a missing file.

    Raises ValueError for a changed line; its message continues a sentence that begins with the name of the file.
    Raises OSError for an unreadable file.
    """
    found = []
    before = first
    for number, line in enumerate(_whole_lines(_read(path)), 1):
        found.append(_content(line, number, before))
        before = line
    return found


def write_sealed_lines(path: Path, contents: Iterable[Mapping[str, Any]], first: bytes) -> None:
    """Replace ``path`` by lines with these contents, whole or not at all."""
    lines = []
    before = first
    for number, content in enumerate(contents, 1):
        before = to_signed({**content, NUMBER: number, BEFORE: sha256_hex(before)})
        lines.append(before + b"\n")
    write_atomic(path, *lines)


class SealedLines:
    """A file of sealed lines to which one process appends.

    Only the last line is read, when it is opened. Raises ValueError, as ``read_sealed_lines``; OSError.

    Args:
        path: of the file; a missing file is created with the first line.
        first: as ``first_of``.
    """

    def __init__(self, path: Path, first: bytes = b"") -> None:
        self._path = path
        raw = _read(path)
        lines = _whole_lines(raw)
        self._last = first
        self._whole = sum(len(line) + 1 for line in lines)
        self._torn = self._whole < len(raw)
        self.count = len(lines)
        if lines:
            self._last = lines[-1]
            number = _signed(self._last, "its last line").get(NUMBER)
            if number != len(lines):
                raise ValueError(
                    f"is damaged: it has {len(lines)} lines, but the last line carries the number {number}"
                )

    def append(self, content: Mapping[str, Any]) -> None:
        """Append one line. A torn last line is cut off first."""
        line = to_signed({**content, NUMBER: self.count + 1, BEFORE: sha256_hex(self._last)})
        if self._torn:
            os.truncate(self._path, self._whole)
            self._torn = False
        append_line(self._path, line)
        self._last = line
        self._whole += len(line) + 1
        self.count += 1


def _content(line: bytes, number: int, before: bytes) -> dict[str, Any]:
    """The content of a line, after its digest, its number and the digest of the line ``before`` were checked."""
    content = _signed(line, f"line {number}")
    stored_number = content.pop(NUMBER, 0)
    stored_before = content.pop(BEFORE, "")
    if stored_number != number or stored_before != sha256_hex(before):
        raise ValueError(f"is damaged: line {number} does not continue the line before it")
    return content


def _signed(line: bytes, which: str) -> dict[str, Any]:
    try:
        return parse_signed(line)
    except ValueError as error:
        raise ValueError(f"is damaged: {which} {error}") from error


def _whole_lines(raw: bytes) -> list[bytes]:
    """The lines that end with a newline, without it."""
    return raw.split(b"\n")[:-1]


def _read(path: Path) -> bytes:
    try:
        return read_whole(path)
    except FileNotFoundError:
        return b""
