"""``idx:FOLDER``: pairs of IDX files of images and labels, as for MNIST, compressed (.gz) or not.

``train-images-idx3-ubyte`` is the training set, and ``t10k`` or ``test`` the test set. fedcache also knows the file
names of EMNIST (``emnist-letters-train-images-idx3-ubyte``), KMNIST and QMNIST. A single file of images can be given
too. If a folder holds several datasets, name the beginning of their file names: ``idx:raw/emnist-letters``. QMNIST's
labels have eight columns; the column of writers becomes a group. fedcache does not rotate images: EMNIST's files hold
transposed images, and they stay transposed.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, FedcacheError, UsageError, shell_word
from fedcache.extract.datasets import columns, tree
from fedcache.extract.datasets.archives import stamp_of
from fedcache.extract.datasets.arrays import MOST_COLUMN
from fedcache.extract.datasets.columns import LABEL, TableRows
from fedcache.extract.datasets.dataset import Context, Dataset, Source
from fedcache.extract.datasets.row_sources import (
    BLOCK,
    BlockRows,
    FixedRows,
    Packed,
    PackedBlocks,
    layout_of,
)
from fedcache.extract.digests import stat_key
from fedcache.tables.splits import SPLIT_NAMES, SPLIT_WORDS

_IMAGES = re.compile(
    r"(?P<stem>.*?)(?P<split>train|t10k|test)?-?images[-.]idx\d-ubyte(?P<gz>\.gz)?", re.IGNORECASE
)
_DTYPES = {8: "u1", 9: "i1", 11: "i2", 12: "i4", 13: "f4", 14: "f8"}
"""Code in a header -> type of the numbers, which are stored big-endian."""
_WRITER = 2
"""Column of QMNIST's labels that gives the number of the writer (github.com/facebookresearch/qmnist, README)."""


def key(rest: str, context: Context) -> list[Any]:
    """The stat of every file."""
    files = _locate(rest, context)
    labels = []
    for images in files:
        labels_file = _labels_beside(images, context)
        if labels_file is not None:
            labels.append(labels_file)
    return ["idx", [stat_key(file) for file in files], [stat_key(file) for file in labels]]


def load(rest: str, context: Context) -> Dataset:
    """The dataset of ``idx:FOLDER``. Raises UsageError for missing files, CorruptionError for damaged ones."""
    files = _locate(rest, context)
    facts = key(rest, context)
    parts = []
    layouts = []
    for file in files:
        part, layout = _part(file, alone=len(files) == 1, context=context)
        parts.append(part)
        layouts.append(layout)
    sizes = " and ".join(dict.fromkeys(layouts))
    names = ", ".join(file.name for file in files)
    place = Path(rest).expanduser()
    if place.is_file():
        place = place.parent / place.name.split(".")[0]
    return columns.assemble(
        f"idx:{rest}",
        place,
        parts,
        request=columns.request_for(parts),
        how=f"images {sizes} from {names}",
        facts=facts,
        context=context,
        mirror=False,  # a mirrored digit or letter is another one
    )


def _locate(rest: str, context: Context) -> list[Path]:
    """The files of images that a spec means, in the order of the names of their splits.

    Raises UsageError if there is none, or if there are several datasets.
    """
    place = Path(rest).expanduser()
    if place.is_file():
        return [place]
    folder = place.parent
    begin = place.name.lower()
    if place.is_dir():
        folder = place
        begin = ""
    listed = []
    if rest and folder.is_dir():
        listed = sorted(folder.iterdir())
    real = tree.real_folder(context.within(folder))
    listed = [file for file in listed if not tree.leads_out(str(file), real)]
    found: dict[str, dict[str, Path]] = {}
    for file in listed:
        match = _IMAGES.fullmatch(file.name)
        if match and file.is_file() and file.name.lower().startswith(begin):
            stem = match["stem"].rstrip("-_").lower()
            split = (match["split"] or "").lower()
            # An unpacked file may be next to its .gz. The unpacked one is taken: it sorts first.
            found.setdefault(stem, {}).setdefault(split, file)
    if not found:
        named = rest or "path"
        raise UsageError(
            f"There is no {named!r} with IDX files (current directory: {Path.cwd()}); expected for example "
            "train-images-idx3-ubyte and train-labels-idx1-ubyte, or with .gz.",
            "Give the folder that contains them: --dataset idx:FOLDER",
        )
    if len(found) > 1:
        stems = ", ".join(stem or "without a name" for stem in sorted(found))
        # The last name in alphabetical order is the example. The first may be "": files that begin with the split.
        example = shell_word(folder / max(found))
        raise UsageError(
            f"{folder} holds {len(found)} datasets: {stems}.",
            f"Choose one by the beginning of its file names: --dataset idx:{example}",
        )
    (files,) = found.values()
    return [files[split] for split in sorted(files, key=_word)]


def _word(split: str) -> str:
    """The name of a split in the names of rows, for its word in the name of a file; "" for ""."""
    if split:
        return SPLIT_NAMES[SPLIT_WORDS[split]]
    return ""


def _labels_beside(images: Path, context: Context) -> Path | None:
    """The file of labels next to a file of images, with or without .gz; None if there is none."""
    name = images.name.removesuffix(".gz")
    folder = images.parent
    real = tree.real_folder(context.within(folder))
    for ending in ("idx1-ubyte", "idx2-int"):
        plain = re.sub(r"images([-.])idx\d-ubyte", rf"labels\1{ending}", name, flags=re.IGNORECASE)
        # A file of images without a usual name, in which nothing was replaced, has no file of labels.
        if plain == name:
            continue
        for file in (folder / plain, folder / f"{plain}.gz"):
            if file.is_file() and not tree.leads_out(str(file), real):
                return file
    return None


def _part(images: Path, *, alone: bool, context: Context) -> tuple[TableRows, str]:
    """The rows of a file of images, and their layout in words.

    A file of a test set that is ``alone`` has no split, because its rows are all that there are.
    """
    shape, dtype, start = _header(images)
    count = shape[0]
    layout = layout_of(shape, dtype, str(images))
    stamp = stamp_of(images)
    size, _ = stamp
    # ``layout_of`` accepts only uint8, which is one byte for each number.
    expected = start + math.prod(shape)
    source: Source
    if images.suffix.lower() == ".gz":
        _check_stream(images, expected, context)
        packed = Packed(images.absolute(), stamp)
        source = BlockRows(PackedBlocks(packed, start, count, layout.shape), layout)
    else:
        if size != expected:
            raise _damaged(images, f"it has {size:,} bytes, expected {expected:,}")
        source = FixedRows(images.absolute(), stamp, start, layout)
    labels_file = _labels_beside(images, context)
    found = {}
    if labels_file is not None:
        label = _numbers(labels_file)
        if len(label) != count:
            raise _damaged(labels_file, f"it has {len(label):,} labels for {count:,} images")
        # The first column is the class. QMNIST's labels have more columns, one of them the writer.
        if label.shape[1] > _WRITER:
            found["writer"] = label[:, _WRITER]
        found[LABEL] = label[:, 0]
    match = _IMAGES.fullmatch(images.name)
    word = ""
    if match:
        word = (match["split"] or "").lower()
    split = None
    if word == "train" or (word and not alone):
        split = SPLIT_WORDS[word]
    names = columns.row_names(count, split)
    return TableRows(names, source, found, split), str(layout)


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path)  # type: ignore[return-value]
    return path.open("rb")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises CorruptionError instead of the errors of reading a damaged file."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, str(error)[:80]) from None


def _header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, dtype and the byte at which the numbers begin. Raises CorruptionError for another kind of file."""
    with _reading(path), _open(path) as file:
        # Two zero bytes, the type of the numbers, and the number of axes; then the length of each axis.
        magic = file.read(4)
        axes = int.from_bytes(magic[3:])
        raw = file.read(4 * axes)
    is_idx = len(magic) == 4 and magic[:2] == b"\0\0" and magic[2] in _DTYPES
    if not is_idx or not 1 <= axes <= 4 or len(raw) != 4 * axes:
        raise _damaged(path, "it does not begin like an IDX file")
    shape = tuple(np.frombuffer(raw, dtype=">u4").tolist())
    return shape, np.dtype(_DTYPES[magic[2]]), 4 + 4 * axes


def _numbers(path: Path) -> NDArray[np.int64]:
    """Labels [N, K]; most files have K = 1. Raises CorruptionError for a file whose size is not that of its header."""
    shape, dtype, start = _header(path)
    size = math.prod(shape) * dtype.itemsize
    if size > MOST_COLUMN or len(shape) > 2 or dtype.kind == "f":
        raise _damaged(
            path,
            f"its header declares labels of shape {list(shape)} and type {dtype}, expected at most "
            "two axes of whole numbers",
        )
    expected = start + size
    with _reading(path), _open(path) as file:
        raw = file.read(expected + 1)  # one byte more, to notice a file that is too long
    if len(raw) != expected:
        raise _damaged(path, f"it has {len(raw):,} bytes; {expected:,} were expected")
    numbers = np.frombuffer(raw, dtype=dtype.newbyteorder(">"), offset=start)
    return numbers.astype(np.int64).reshape(shape[0], math.prod(shape[1:]))


def _check_stream(path: Path, expected: int, context: Context) -> None:
    """Unpack a .gz once to compare its checksum and its length; the length is remembered until the file changes.

    Raises CorruptionError for a damaged file, or another length than ``expected``.
    """
    fact = ["length of a gz", *stat_key(path)]
    length = context.memory.recall(fact)
    if length is None:
        length = 0
        with _reading(path), gzip.open(path) as file:
            while raw := file.read(BLOCK):
                length += len(raw)
                if length > expected:  # a bomb is not unpacked to its end
                    break
        context.memory.remember(fact, length)
    if length != expected:
        raise _damaged(path, f"its unpacked content does not have the expected {expected:,} bytes")


def _damaged(path: Path, why: str) -> FedcacheError:
    return CorruptionError(
        f"{path} is not a complete IDX file: {why}.", "Copy or download it again"
    )
