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
