"""Whether Flower is installed, asked before anything is started, and before it is imported."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fedcache.errors import MachineError

LOW, HIGH = (1, 41), (1, 42)
INSTALL = "pip install 'fedcache[flower]'"


def need_flower() -> str:
    """Flower's version.

    Raises:
        MachineError without Flower, or with one that works otherwise; pip's line is the hint.
    """
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise MachineError("Flower is not installed.", INSTALL) from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not LOW <= numbers < HIGH:
        raise MachineError(f"Flower is {found}, and fedcache works with 1.41.", f"{INSTALL}  (or flwr>=1.41,<1.42)")
    return found


def program(name: str) -> str:
    """The path of one of Flower's programs: beside this Python, else on the path.

    Raises:
        MachineError when it is in neither place.
    """
    need_flower()
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise MachineError(f"{name} of Flower is not where Python's programs are.", INSTALL)
    return found
