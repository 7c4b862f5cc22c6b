"""Packages that single jobs need and ``pip install fedcache`` does not bring: imported where they are used.

What cannot be imported is refused with the command that installs it; ``doctor`` lists every extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedcache.errors import MachineError, shell_word


def needed_library(package: str, what: str, extra: str) -> Any:
    """An optional library, imported.

    Raises MachineError with the command that installs it, or that installs it again where it is there and damaged.

    Args:
        package: dotted name of the module.
        what: that needs it, as a sentence begins: a file, a backbone, "Drawing".
        extra: of fedcache, that brings it.
    """
    try:
        return import_module(package)
    except ImportError as error:
        top = package.split(".")[0]
        absent = isinstance(error, ModuleNotFoundError) and error.name == top
        command = f"pip install --force-reinstall {shell_word(top)}"
        if absent:
            command = f"pip install {shell_word(f'fedcache[{extra}]')}"
        raise MachineError(
            f"{what} needs {package}, which is not installed or cannot be imported ({reason(error)}).",
            command,
        ) from error


def need_arrow(what: str) -> None:
    """Refuse before any work what is a table for pyarrow: parquet, Arrow, feather and CSV. Raises MachineError."""
    needed_library("pyarrow", what, "tables")


def need_h5py(what: str) -> None:
    """Refuse before any work what is an HDF5 file. Raises MachineError."""
    needed_library("h5py", what, "h5")


def reason(error: BaseException) -> str:
    """An exception's type and the first line of what it says, cut to what a sentence can hold."""
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    if lines:
        return f"{kind}: {lines[0][:300]}"
    return f"{kind}."
