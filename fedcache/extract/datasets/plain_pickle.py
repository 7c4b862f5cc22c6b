"""Pickles of arrays, lists, texts and numbers, read without running anything they name, and the images in them.

A pickle is a program that may call any function it names. Datasets of research code are often pickles (CIFAR's
batches, the lists and digits of FedBN), and none of them needs more than the few numpy helpers below, which are
replaced here by functions that can do nothing else; any other name ends the reading before it is looked up.
"""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, FedcacheError, MachineError
from fedcache.extract.datasets.paper import damaged
from fedcache.extract.images import BadImage

_DTYPE = re.compile(r"[<>=|]?[biufSUO]\d{0,6}")


class _PickledDtype:
    """A dtype. numpy's own would take any state from the pickle, and believe it."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype

    def __setstate__(self, state: Any) -> None:
        """Takes the byte order of ``(version, byte order, None, None, None, ...)``."""
        match state:
            case (int(), "<" | ">" | "|" | "=" as order, None, None, None, *_):
                self.dtype = self.dtype if order in "|=" else self.dtype.newbyteorder(order)
            case _:
                raise pickle.UnpicklingError("a dtype with fields")


class _Array(np.ndarray[Any, Any]):
    """An array that is filled by numpy, which checks sizes, with a dtype that was checked here."""

    def __setstate__(self, state: Any) -> None:
        match state:
            case (int() as version, tuple() as shape, _PickledDtype() as kind, bool() | int() as fortran, raw):
                super().__setstate__((version, shape, kind.dtype, fortran, raw))  # type: ignore[arg-type]
            case _:
                raise pickle.UnpicklingError("an array that numpy did not write")


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _NDARRAY or shape != (0,):
        raise pickle.UnpicklingError("an array that numpy did not write")
    return np.ndarray.__new__(_Array, (0,), dtype="b")


def _dtype(code: Any, *rest: Any) -> _PickledDtype:
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        raise pickle.UnpicklingError(f"the dtype {str(code)[:40]!r}")
    return _PickledDtype(np.dtype(code))


def _frombuffer(raw: Any, kind: _PickledDtype, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(raw, dtype=kind.dtype).reshape(shape, order="F" if order == "F" else "C")


def _scalar(kind: _PickledDtype, raw: Any) -> Any:
    return np.frombuffer(raw.encode("latin1") if isinstance(raw, str) else raw, dtype=kind.dtype)[0]


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1" or not isinstance(text, str):
        raise pickle.UnpicklingError("bytes in an odd encoding")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


def _never(*words: Any) -> Any:
    raise pickle.UnpicklingError("an array that numpy did not write")


class _Frozen:
    """A function that a pickle can call and not change: plain functions would take attributes from it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *words: Any) -> Any:
        return self._function(*words)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes what it names")


_NDARRAY = _Frozen(_never)  # pickles name the class, and need not call it
_CORES = ("numpy.core", "numpy._core")  # before and since numpy 2
_ALLOWED = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _Frozen(_dtype),
    ("_codecs", "encode"): _Frozen(_encode),
    ("__builtin__", "bytes"): _Frozen(_no_bytes),  # how protocol 2 says b""
    **{(f"{core}.multiarray", "_reconstruct"): _Frozen(_reconstruct) for core in _CORES},
    **{(f"{core}.multiarray", "scalar"): _Frozen(_scalar) for core in _CORES},
    **{(f"{core}.numeric", "_frombuffer"): _Frozen(_frombuffer) for core in _CORES},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None


def load(path: Path) -> Any:
    """The content of a pickle of plain data; CorruptionError for a damaged one, or one that names anything else."""
    try:
        with path.open("rb") as file:
            # Python 2 wrote CIFAR's batches: its byte strings are read as latin1 texts, as numpy expects.
            return _Unpickler(file, encoding="latin1").load()
    except FileNotFoundError:
        raise MachineError(f"{path} is missing.", "Unpack the dataset again, or copy the file there") from None
    except (OSError, MemoryError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        why = str(error)
    except (pickle.UnpicklingError, EOFError, RecursionError, ImportError, AssertionError) as error:
        why = str(error) or type(error).__name__
    raise CorruptionError(
        f"{path} is not a pickle of arrays, lists and texts alone: {why[:200]}. Nothing in it was run.",
        "Download it again from the address that `fedcache datasets info` gives",
    )


def read_images(path: Path, labels_key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """(images uint8 [n, H, W] or [n, H, W, 3], labels int64 [n]) of a pickle.

    It holds ``{"data": uint8 [n, 3072], labels_key: [n]}`` (channels first, as CIFAR has them), or, where
    ``labels_key`` is empty, the pair (images, labels).
    """
    held = load(path)
    if labels_key:
        if not isinstance(held, dict) or "data" not in held or labels_key not in held:
            raise damaged(path, f"it does not hold 'data' and {labels_key!r}")
        flat, raw = np.asarray(held["data"]), held[labels_key]
        if flat.dtype != np.uint8 or flat.ndim != 2 or flat.shape[1] != 3072:
            raise damaged(path, f"its data are {flat.dtype} {list(flat.shape)}; expected uint8 [n, 3072]")
        images = flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    else:
        if not isinstance(held, tuple | list) or len(held) != 2:
            raise damaged(path, "it does not hold the pair (images, labels)")
        images, raw = np.asarray(held[0]), held[1]
        if images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)):
            shape = list(images.shape)
            raise damaged(path, f"its images are {images.dtype} {shape}; expected uint8 [n, H, W] or [n, H, W, 3]")
    try:
        labels = np.asarray(raw).astype(np.int64).reshape(-1)
    except (TypeError, ValueError):
        raise damaged(path, "its labels are not numbers") from None
    if len(labels) != len(images):
        raise damaged(path, f"it has {len(images):,} images and {len(labels):,} labels")
    return images, labels


_OPEN = 2  # files kept in memory: rows are read in order, by threads that may be a batch apart


class StackSource:
    """Images that follow each other in pickled arrays; a process unpickles a file when it reads its first row."""

    def __init__(self, files: Sequence[str], counts: Sequence[int], labels: str) -> None:
        self.files = tuple(files)  # in the order of the rows
        self.counts = tuple(counts)  # rows of each file
        self.labels = labels  # see ``read_images``
        self._starts = np.cumsum([0, *self.counts])
        self._open: dict[int, NDArray[np.uint8]] = {}
        self._lock = threading.Lock()

    def read(self, row: int) -> NDArray[np.uint8]:
        """uint8 [H, W] or [H, W, 3]; raises ``BadImage`` when the file has changed."""
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        with self._lock:
            images = self._open.get(part)
            if images is None:
                try:
                    images = read_images(Path(self.files[part]), self.labels)[0]
                except FedcacheError as error:
                    raise BadImage(error.message) from None
                while len(self._open) >= _OPEN:
                    del self._open[next(iter(self._open))]  # the one opened first
                self._open[part] = images
        at = row - int(self._starts[part])
        if at >= len(images):
            raise BadImage(f"{self.files[part]} has {len(images):,} images, fewer than when it was listed")
        return np.ascontiguousarray(images[at])

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "counts": self.counts, "labels": self.labels}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
