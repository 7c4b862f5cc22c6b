"""Optional packages, which ``pip install fedcache`` does not install: they are imported where they are used.

If a package cannot be imported, the error has the command that installs it. ``doctor`` lists every extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedcache.errors import MachineError, shell_word


def needed_library(package: str, what: str, extra: str) -> Any:
    """Import an optional library.

    Raises MachineError with the command that installs the library, or that reinstalls it if it is damaged.

    Args:
        package: dotted name of the module.
        what: subject of the error's sentence "... needs PACKAGE": a file, a backbone, "Drawing".
        extra: extra of fedcache that installs the library.
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
    """Check before any work that pyarrow is installed, for parquet, Arrow, feather and CSV. Raises MachineError."""
    needed_library("pyarrow", what, "tables")


def need_h5py(what: str) -> None:
    """Check before any work that h5py is installed, for HDF5 files. Raises MachineError."""
    needed_library("h5py", what, "h5")


def reason(error: BaseException) -> str:
    """An exception's type and the first line of its message, at most 300 characters."""
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    if lines:
        return f"{kind}: {lines[0][:300]}"
    return f"{kind}."
