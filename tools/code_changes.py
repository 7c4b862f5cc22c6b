"""Copies of the package, and changes of a line of code that find their place however the line is laid out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def copied(folder: Path, *parts: str) -> Path:
    """``folder``, with a copy of pyproject.toml and of these folders of the repository."""
    for part in parts:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def changed(text: str, old: str, new: str, where: str) -> str:
    """``text`` with ``new`` instead of ``old``, which must stand in it once.

    Spaces, line breaks and a comma before a closing bracket make no difference.
    Raises ValueError, which names ``where``, for code that is not there or stands there several times.
    """
    parts = re.findall(r"\w+|[^\w\s]", old)
    pattern = r"\s*".join(
        r",?\s*" + re.escape(part) if part in ")]}" else re.escape(part) for part in parts
    )
    found = list(re.finditer(pattern, text))
    if len(found) != 1:
        raise ValueError(f"{where} holds {old!r} {len(found)} times, expected once.")
    place = found[0]
    return text[: place.start()] + new.strip() + text[place.end() :]
