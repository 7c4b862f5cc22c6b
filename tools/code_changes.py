"""Copies of the package, the digest of its code, and changes of a line that find their place however it is laid out."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NIGHT = ROOT / "docs" / "nightly.json"
RECORDS = ("docs/nightly.json", "docs/trust.json", "docs/trust.md")
"""What `make nightly` and `make trust` write."""

CHANGED = "-changed"


def git(line: str) -> str:
    """What a git command prints in the checkout."""
    words = ["git", *line.split()]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def code_digest() -> str:
    """Digest of all committed files without ``RECORDS``, with ``CHANGED`` where the checkout differs from them."""
    listed = [line for line in git("ls-tree -r HEAD").splitlines() if not line.endswith(RECORDS)]
    digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()[:12]
    changes = [
        line for line in git("status --porcelain -uno").splitlines() if not line.endswith(RECORDS)
    ]
    return digest + CHANGED if changes else digest


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
