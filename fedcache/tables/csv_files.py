"""How a CSV is written: its separator and its encoding, found in the same way wherever a CSV is read.

Excel writes semicolons where numbers have decimal commas, tabs in UTF-16 as "Unicode text", and on request a first line
``sep=;`` that names the separator.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fedcache.errors import FedcacheError, UsageError
from fedcache.tables.conversion import conversion
from fedcache.tables.words import ending_of, stem_of

PIECE = 64 << 10
"""Bytes that are decoded at a time."""

LOOKED_AT = 8 << 20
"""Bytes of a file that are looked at; its first line has no more."""

SEPARATORS = (",", ";", "\t")
MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""First bytes of a file in UTF-16, as Excel writes it."""

_NAMED = re.compile(r"sep=(.)\s*", re.IGNORECASE)
_QUOTED = re.compile(r'"[^"]*"')


@dataclass(frozen=True)
class Dialect:
    """How a CSV is written."""

    separator: str
    encoding: str  # utf8 or utf-16
    skip: int  # lines before the one that names the columns


def dialect_of(path: Path) -> Dialect:
    """The dialect of a CSV or TSV, .gz too. Raises UsageError for an empty file, and for one in another encoding."""
    with open_bytes(path) as file:
        return _dialect(file, path)


def decoded(raw: bytes, path: Path) -> tuple[str, Dialect]:
    """The text of a CSV, which is not packed, and its dialect; errors as ``dialect_of``."""
    dialect = _dialect(io.BytesIO(raw), path)
    try:
        return raw.decode("utf-16" if dialect.encoding == "utf-16" else "utf-8-sig"), dialect
    except UnicodeDecodeError:
        raise other_encoding(path) from None


def _dialect(file: IO[bytes], path: Path) -> Dialect:
    piece = file.read(PIECE)
    if not piece:
        raise UsageError(
            f"{path} is empty.", "Its first line names the columns, for example f0,f1,f2,label"
        )
    encoding = "utf-16" if piece.startswith(MARKS) else "utf8"
    decoder = codecs.getincrementaldecoder("utf-16" if encoding == "utf-16" else "utf-8-sig")()
    head = ""
    # All that is looked at is decoded, so that another encoding is named before the columns are.
    for _ in range(LOOKED_AT // PIECE):
        try:
            text = decoder.decode(piece)
        except UnicodeDecodeError:
            raise other_encoding(path) from None
        head += "" if "\n" in head else text
        piece = file.read(PIECE)
        if not piece:
            break
    head = head.lstrip("\r\n").splitlines()[0] if head.strip() else ""
    named = _NAMED.fullmatch(head)
    if named is not None:
        return Dialect(named[1], encoding, 1)
    if ending_of(path).startswith(".tsv"):
        return Dialect("\t", encoding, 0)
    bare = _QUOTED.sub("", head)
    counts = {mark: bare.count(mark) for mark in SEPARATORS}
    return Dialect(max(counts, key=lambda mark: counts[mark]), encoding, 0)


def open_bytes(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked if it ends in .gz."""
    if ending_of(path).endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def other_encoding(path: Path) -> FedcacheError:
    """The error of a CSV that is neither UTF-8 nor UTF-16, with the lines that convert it."""
    out = path.with_name(f"{stem_of(path)}-utf8{ending_of(path).removesuffix('.gz')}")
    packed = ending_of(path).endswith(".gz")
    raw = f"pathlib.Path({str(path)!r}).read_bytes()"
    lines = [
        "import gzip, pathlib" if packed else "import pathlib",
        f"text = {f'gzip.decompress({raw})' if packed else raw}.decode('cp1252')  # of Excel in Western Europe",
        f"pathlib.Path({str(out)!r}).write_text(text, 'utf-8', newline='')",
    ]
    return UsageError(
        f"{path} is not in UTF-8.", conversion(lines, f"give {out} in place of {path.name}")
    )
