"""Reads pickles of arrays, lists, texts and numbers without running any function that they name.

A pickle is a program that may call any function whose name it contains. Datasets of research code are often pickles
(CIFAR's batches, the lists and digits of FedBN), and so are columns of words in an npz. They need only a few functions
of numpy, which are replaced here by functions that only make arrays and bytes. Reading stops at any other name, before
the name is looked up.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from functools import cache
from typing import IO, Any

import numpy as np

_DTYPE = re.compile(r"[<>=|]?[biufSUO]\d{0,6}")


class _PickledDtype:
    """A dtype that checks the state in the pickle. numpy's own class would accept any state."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype

    def __setstate__(self, state: Any) -> None:
        """Take the byte order from numpy's state, ``(version, byte order, None, None, None, ...)``."""
        match state:
            case (int(), "<" | ">" | "|" | "=" as order, None, None, None, *_):
                if order not in "|=":
                    self.dtype = self.dtype.newbyteorder(order)
            case _:
                raise pickle.UnpicklingError("a dtype with fields")


class _Array(np.ndarray[Any, Any]):
    """An array whose dtype is checked here. numpy fills the array, and checks its size."""

    def __setstate__(self, state: Any) -> None:
        match state:
            case (
                int() as version,
                tuple() as shape,
                _PickledDtype() as kind,
                bool() | int() as fortran,
                raw,
            ):
                super().__setstate__((version, shape, kind.dtype, fortran, raw))  # type: ignore[arg-type]
            case _:
                raise pickle.UnpicklingError("an array that numpy did not write")


# Replacements of the functions that pickles of arrays call, with the arguments that numpy writes.


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _allowed()["numpy", "ndarray"] or shape != (0,):
        raise pickle.UnpicklingError("an array that numpy did not write")
    return np.ndarray.__new__(_Array, (0,), dtype="b")


def _dtype(code: Any, *flags: Any) -> _PickledDtype:
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        shown = str(code)[:40]
        raise pickle.UnpicklingError(f"the dtype {shown!r}")
    return _PickledDtype(np.dtype(code))


def _frombuffer(raw: Any, kind: _PickledDtype, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    flat = np.frombuffer(raw, dtype=kind.dtype)
    if order == "F":
        return flat.reshape(shape, order="F")
    return flat.reshape(shape)


def _scalar(kind: _PickledDtype, raw: Any) -> Any:
    if isinstance(raw, str):
        raw = raw.encode("latin1")
    return np.frombuffer(raw, dtype=kind.dtype)[0]


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1" or not isinstance(text, str):
        raise pickle.UnpicklingError("bytes in an odd encoding")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


def _never(*args: Any) -> Any:
    raise pickle.UnpicklingError("an array that numpy did not write")


class _Frozen:
    """A function that a pickle can call but not modify; a pickle can set attributes of a plain function."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it modifies an object")


@cache
def _allowed() -> dict[tuple[str, str], _Frozen]:
    """(module, name) in a pickle -> the object that fedcache uses for it."""
    allowed = {
        ("numpy", "ndarray"): _Frozen(_never),  # pickles name the class but do not call it
        ("numpy", "dtype"): _Frozen(_dtype),
        ("_codecs", "encode"): _Frozen(_encode),
        ("__builtin__", "bytes"): _Frozen(_no_bytes),  # protocol 2 writes b"" as bytes()
    }
    for core in ("numpy.core", "numpy._core"):  # before and since numpy 2
        allowed[f"{core}.multiarray", "_reconstruct"] = _Frozen(_reconstruct)
        allowed[f"{core}.multiarray", "scalar"] = _Frozen(_scalar)
        allowed[f"{core}.numeric", "_frombuffer"] = _Frozen(_frombuffer)
    return allowed


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _allowed()[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None


def load_plain(file: IO[bytes]) -> Any:
    """The content of a pickle of plain data. Raises ValueError, with the reason, for any other pickle."""
    try:
        # Python 2 wrote CIFAR's batches. Its byte strings are read as latin1 texts, as numpy requires.
        return _Unpickler(file, encoding="latin1").load()
    except (
        OSError,
        MemoryError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        raise ValueError(str(error)) from error
    except (pickle.UnpicklingError, EOFError, RecursionError, ImportError, AssertionError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
