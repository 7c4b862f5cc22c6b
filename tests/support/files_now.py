"""Files below a folder in which another process is writing."""

import fnmatch
import os
from pathlib import Path


def files_now(root, pattern="*"):
    """Files below ``root`` whose path from there matches ``pattern``, where ``*`` also stands for ``/``.

    ``Path.glob`` raises FileNotFoundError where the process removes or renames a folder meanwhile. Such a folder is
    left out here.
    """
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if fnmatch.fnmatch(path.relative_to(root).as_posix(), pattern):
                found.append(path)
    return sorted(found)


def bytes_of(folder, pattern="*"):
    """What each of these files holds, by its path from ``folder``."""
    found = files_now(folder, pattern)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def times_of(folder, pattern="*"):
    """When each of these files was last written."""
    return {path: path.stat().st_mtime_ns for path in files_now(folder, pattern)}
