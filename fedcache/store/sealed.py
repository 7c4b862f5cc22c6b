"""Sealed files: what fedcache keeps for itself and reads back, whole, unchanged and in its own place, or not at all.

A seal is signed JSON (``files.to_signed``) around the content and around *what the file is*: its kind and whose it is,
as the run and seed of a checkpoint. So a changed digit is found, and also two whole files that were exchanged. Files
with tensors are safetensors; the seal lies in their metadata and holds a digest of the tensors.

What is sealed can be made again. A file that is damaged, another's, or of a release that did not seal it is never read:
the caller forgets it, says so where that costs time, or refuses to go on where it cannot be made again.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fedcache.config import Home
from fedcache.errors import CorruptionError
from fedcache.store.files import (
    Buffer,
    append_line,
    canonical_json,
    make_private,
    parse_signed,
    read_whole,
    sha256_hex,
    size_of,
    to_signed,
    write_atomic,
    written_unnamed,
)
from fedcache.store.lock import is_alive, writer_of

if TYPE_CHECKING:
    from torch import Tensor


TENSORS = ".safetensors"
SEAL = "seal"

LONGEST_HEADER = 100_000_000
"""Bytes of a header, as safetensors allows them."""


@dataclass(frozen=True)
class Sealed:
    """What a sealed file holds."""

    content: Any  # JSON value
    tensors: dict[str, Tensor]  # {} for a file of JSON alone


def write_sealed(
    path: Path, what: Mapping[str, Any], content: Any, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Replace ``path`` by a sealed file, whole or not at all.

    Args:
        path: ends in ``.safetensors`` exactly where there are ``tensors``.
        what, content, tensors: see ``sealed_bytes``.
    """
    if (tensors is not None) != (path.suffix == TENSORS):
        raise ValueError(f"{path.name}: {TENSORS} files hold tensors, and no others do")
    write_atomic(path, sealed_bytes(what, content, tensors))


def sealed_bytes(
    what: Mapping[str, Any], content: Any, tensors: Mapping[str, Tensor] | None = None
) -> bytes:
    """The bytes of a sealed file.

    Args:
        what: what the file is, a JSON object that the reader must know: its kind and whose it is.
        content: any JSON value without NaN.
        tensors: by name, of any shape and dtype; they are written from the CPU.
    """
    if tensors is None:
        return to_signed({"what": dict(what), "content": content})
    from safetensors.torch import save

    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    seal = to_signed({"what": dict(what), "content": content, "tensors": _tensors_digest(plain)})
    return bytes(save(plain, {SEAL: seal.decode()}))


def read_sealed(path: Path, what: Mapping[str, Any]) -> Sealed | None:
    """What a sealed file holds; None where there is no file. Nothing of it is returned before the seal agrees.

    Raises CorruptionError for a file that is not what was written, not sealed, or not ``what``.
    """
    if not path.exists():
        return None
    try:
        return _opened(path, what)
    except FileNotFoundError:
        # removed at this moment, by another process that has ended the same work
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        why = "cannot be read"
        if type(error) is ValueError and error.args:
            why = error.args[0]
        raise CorruptionError(f"{path} {why}.", "Remove it; what it held is made again.") from error


def is_sealed(path: Path) -> bool:
    """Whether a safetensors file that can be opened has a seal; True for what is damaged, so that it is called so."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, LONGEST_HEADER)))
        return SEAL in header.get("__metadata__", {})
    except (OSError, ValueError, AttributeError, RecursionError):
        return True


def content_beside_tensors(path: Path) -> Any:
    """The content of a safetensors file that has a seal; its tensors are not read and so not checked.

    Raises SafetensorError for another file, ValueError for a seal that is not what was written.
    """
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return parse_signed((file.metadata() or {})[SEAL].encode())["content"]


def _opened(path: Path, what: Mapping[str, Any]) -> Sealed:
    """As ``read_sealed``, with the errors of whatever reads the bytes; ValueError in words for what the seal says."""
    tensors: dict[str, Tensor] = {}
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("is no file")
    if path.suffix != TENSORS:
        seal = parse_signed(read_whole(path))
    else:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                seal = parse_signed((file.metadata() or {})[SEAL].encode())
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        except SafetensorError as error:
            raise ValueError("is not the file that was written") from error
        if seal["tensors"] != _tensors_digest(tensors):
            raise ValueError("holds other tensors than were written")
    if seal["what"] != what:
        raise ValueError("is another file than its name says")
    return Sealed(seal["content"], tensors)


def _tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].contiguous()
        digest.update(f"{name}:{t.dtype}:{tuple(t.shape)}\n".encode())
        if t.numel():
            # A tensor of one number may have any stride, which only as_strided takes back to 1.
            digest.update(t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Sealed lines: a file that grows by one signed line at a time, where every line names the line before it.
#
# A changed digit, a line that is missing from the middle and a line of another file are found. A last line without its
# newline is one that a power cut tore: nothing depended on it yet, so readers leave it out and the next line
# replaces it.
# Whole lines that are missing from the end are not found, because the file is then what it was earlier.


NUMBER = "number"
BEFORE = "before"
"""Keys of every line besides its content: its number from 1, and the sha256 of the line before it."""


def first_of(what: Mapping[str, Any]) -> bytes:
    """What the first line of a file names as the line before it: the kind of the file, and to what it belongs."""
    return canonical_json(dict(what))


def read_sealed_lines(path: Path, first: bytes = b"") -> list[dict[str, Any]]:
    """The contents of all whole lines; [] where there is no file.

    Raises ValueError, in words that follow the file's name, for a line that is not what was written; OSError.
    """
    found = []
    before = first
    for number, line in enumerate(_whole_lines(_read(path)), 1):
        found.append(_content(line, number, before))
        before = line
    return found


def write_sealed_lines(
    path: Path, contents: Iterable[Mapping[str, Any]], first: bytes = b""
) -> None:
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
        path: of the file, which may come with the first line.
        first: as ``first_of``.
    """

    def __init__(self, path: Path, first: bytes = b"") -> None:
        self._path = path
        raw = _read(path)
        lines = _whole_lines(raw)
        self._last = lines[-1] if lines else first
        self._whole = sum(len(line) + 1 for line in lines)
        self._torn = self._whole < len(raw)
        self.count = len(lines)
        if lines:
            number = _signed(lines[-1], "its last line").get(NUMBER)
            if number != len(lines):
                raise ValueError(
                    f"is damaged: it has {len(lines)} lines, and the last one is number {number}"
                )

    def append(self, content: Mapping[str, Any]) -> None:
        """Append one line. A torn last line is cut off first."""
        line = to_signed({**content, NUMBER: self.count + 1, BEFORE: sha256_hex(self._last)})
        if self._torn:
            with self._path.open("r+b") as file:
                file.truncate(self._whole)
            self._torn = False
        append_line(self._path, line)
        self._last = line
        self._whole += len(line) + 1
        self.count += 1


def _content(line: bytes, number: int, before: bytes) -> dict[str, Any]:
    content = _signed(line, f"line {number}")
    if (content.pop(NUMBER, 0), content.pop(BEFORE, "")) != (number, sha256_hex(before)):
        raise ValueError(f"is damaged: line {number} does not follow the one before")
    return content


def _signed(line: bytes, which: str) -> dict[str, Any]:
    try:
        return parse_signed(line)
    except ValueError as error:
        raise ValueError(f"is damaged: {which} {error}") from error


def _whole_lines(raw: bytes) -> list[bytes]:
    return raw[: raw.rfind(b"\n") + 1].split(b"\n")[:-1]


def _read(path: Path) -> bytes:
    try:
        return read_whole(path)
    except FileNotFoundError:
        return b""


NOTES = "outputs"
"""Folder of the home: one note for each file that is being written outside."""

WHAT = {"kind": "file that is being written"}


@contextmanager
def output_file(path: Path, needed: int = 0) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` when the block ends, as ``written_unnamed``.

    Args:
        path: of the file.
        needed: bytes that will be written, for the message of a full disk; 0 where that is not known.
    """
    with _noted(path), written_unnamed(path, needed) as file:
        yield file


def write_output(path: Path, *parts: Buffer) -> None:
    """Replace ``path`` by the concatenated parts, as ``output_file``."""
    with output_file(path, size_of(parts)) as file:
        for part in parts:
            file.write(part)


def leftover_outputs(home: Home) -> Iterator[Path]:
    """Temporary files of killed processes that were writing outputs, and the notes of these."""
    for note in sorted((home.root / NOTES).glob("*.json")):
        try:
            found = read_sealed(note, WHAT)
        except CorruptionError:
            yield note
            continue
        if found is None or is_alive(int(found.content["pid"])):
            continue
        yield from _partials(Path(found.content["path"]), str(found.content["pid"]))
        yield note


@contextmanager
def _noted(path: Path) -> Iterator[None]:
    """Remove what killed processes left of an output, and note in the home that it is being written now."""
    home = Home.from_environment()
    for left in _partials(path, "*"):
        with suppress(OSError):
            if not is_alive(writer_of(left)):
                left.unlink(missing_ok=True)
    note = home.root / NOTES / f"{os.getpid()}-{os.urandom(4).hex()}.json"
    if home.root.is_dir():
        with suppress(OSError):
            make_private(note.parent)
            write_sealed(note, WHAT, {"path": str(path.absolute()), "pid": os.getpid()})
    try:
        yield
    finally:
        with suppress(OSError):
            note.unlink(missing_ok=True)


def _partials(path: Path, pid: str) -> list[Path]:
    """Temporary files of an output, of the process of that number or, for ``*``, of any."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.{pid}-{'[0-9a-f]' * 8}.partial"))
