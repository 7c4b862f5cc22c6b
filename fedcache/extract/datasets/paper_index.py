"""Reads the index of a paper's dataset: its rows, from the lists, tables, pickles and folders of the dataset.

``papers/NAME.toml`` says which files and folders a layout has, and how a line of a list is written. A list may name
images that are missing. Their rows stay and are quarantined, as in every other dataset.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import CorruptionError, FedcacheError, MachineError, UsageError, shell_word
from fedcache.extract.datasets import tree
from fedcache.extract.datasets.archives import Reopened
from fedcache.extract.datasets.dataset import Source
from fedcache.extract.datasets.paper import FoundLayout, Paper, damaged
from fedcache.extract.datasets.row_sources import Shards
from fedcache.extract.datasets.tree import FilesSource, name_of
from fedcache.extract.image_files import BadImage
from fedcache.parsing import parse_json
from fedcache.tables.plain_pickle import load_plain
from fedcache.tables.splits import SPLIT_WORDS
from fedcache.tables.words import some_names


@dataclass(frozen=True)
class PaperIndex:
    """The rows of a dataset, sorted by name."""

    names: list[str]  # [N]
    label: list[int]  # [N] class numbers
    domain: list[int]  # [N] domain numbers
    # [N] split codes; without any test row, a fifth of each class becomes the test set
    split: list[int]
    source: Source  # where the images are
    notes: tuple[str, ...] = ()  # what a reader of the results should know


class ImageEntry(NamedTuple):
    """One image file: the name of its row, its path below the folder of the images, and its codes."""

    name: str
    path: str
    label: int
    domain: int
    split: int


def read_index(place: FoundLayout) -> PaperIndex:
    """Every row of a layout.

    Raises MachineError for a missing file, CorruptionError for a file with other content than its layout says, and
    UsageError for a link that leads out of the folder, unless links are followed.
    """
    _check_links(place)
    if place.layout.format == "arrays":
        return _read_arrays(place)
    notes: list[str] = []
    entries = list(READERS[place.layout.format](place, notes))
    return _of_files(place, entries, tuple(notes))


def _check_links(place: FoundLayout) -> None:
    """Raise UsageError for a link to an index file outside the dataset's folder.

    Error messages quote lines of the index, so they could show any file.
    """
    within = tree.real_folder(place.within)
    for path in files_of(place):
        if path.is_file() and tree.leads_out(str(path), within):
            raise UsageError(
                f"{path} is a link to a file outside the dataset's folder.",
                "If you made the link: --follow-links",
            )


def files_of(place: FoundLayout) -> list[Path]:
    """The files and folders that determine the index."""
    if place.layout.format == "arrays":
        return [path for _, _, path in _array_files(place)]
    lists = [path for *_, path in _lists(place)]
    folders = []
    tops = set()
    for _, top, _, folder in _class_folders(place):
        folders.append(folder)
        tops.add(top)
    # A layout that has only lists, and no folder ``images``, keeps its images in class folders below each domain.
    if lists and not folders and "images" not in place.layout.options:
        for domain in place.paper.domains:
            folders += [place.base / domain / name for name in place.paper.folders]
    # ``needs`` may name a folder above class folders (top). It is left out, because the index reads only some of its
    # class folders: imagenet100 reads a tenth of ImageNet's.
    needs = [place.path(need) for need in place.layout.needs if need not in tops]
    return list(dict.fromkeys([*needs, *lists, *folders]))


def _of_files(
    place: FoundLayout, entries: Sequence[ImageEntry], notes: tuple[str, ...]
) -> PaperIndex:
    """The index of a dataset of image files.

    Raises CorruptionError if there is no image, for a path that leaves the folder, and for an image listed twice.
    """
    images = place.base / place.layout.options.get("images", "")
    # Needs whose names have an ending are files, the others are folders.
    tables = [place.path(need) for need in place.layout.needs if "." in need]
    lists = [path for *_, path in _lists(place)]
    # Messages name this file: the last list, or the last table if there are no lists, or else the folder itself.
    where = [place.base, *(lists or tables)][-1]
    if not entries:
        raise CorruptionError(
            f"{where} has no image of any class of {place.paper.title}.",
            "Download or unpack the dataset again, and check its path",
        )
    entries = sorted(entries, key=lambda entry: name_of(entry.name))
    for entry in entries:
        path = entry.path
        # A backslash separates folders on Windows.
        if not tree.is_plain(path) or "\\" in path:
            shown = path[:80]
            raise CorruptionError(
                f"{where} contains the path {shown!r}; expected a relative path to a file below {images}.",
                "Download it again from its authors; nothing was read",
            )
    names = [name_of(entry.name) for entry in entries]
    for name, following in pairwise(names):
        if name == following:
            raise CorruptionError(
                f"{where} names {name!r} twice.",
                "Download it again, or list every image once",
            )
    return PaperIndex(
        names=names,
        label=[entry.label for entry in entries],
        domain=[entry.domain for entry in entries],
        split=[entry.split for entry in entries],
        source=FilesSource(images.absolute(), [entry.path for entry in entries], place.within),
        notes=notes,
    )


# Folders and lists: format "files"


def _read_files(place: FoundLayout, notes: list[str]) -> Iterator[ImageEntry]:
    """The images in folders ``split/class`` or ``domain/class`` and in lists; a layout may have both.

    There is a list for each split, or for each domain and split. Files next to the folders are ignored. If the option
    ``ordered`` is set, a number in the name of each row keeps the rows in the order of their list.
    """
    class_folders = list(_class_folders(place))
    missing = [
        str(folder.relative_to(place.base)) for *_, folder in class_folders if not folder.is_dir()
    ]
    if missing:
        names = some_names(missing, 3)
        dataset = shell_word(place.paper.name)
        raise MachineError(
            f"Class folders are missing in {place.base}: {names}.",
            f"Unpack the dataset again, then check it:  fedcache datasets check {dataset} {shell_word(place.root)}",
        )
    domains = place.paper.domains
    options = place.layout.options
    for split, top, class_number, folder in class_folders:
        domain = 0
        if top in domains:
            domain = domains.index(top)
        class_folder = place.paper.folders[class_number]
        # With None, ``scan`` also lists links that lead out of the folder. They are rows, so that the numbers of the
        # rows stay the same, and are quarantined when they are read.
        for image in tree.scan(folder, None).paths:
            path = f"{top}/{class_folder}/{image}"
            yield ImageEntry(path, path, class_number, domain, SPLIT_WORDS[split])
    for domain, split, file in _lists(place):
        if options["line"] == "pickle":
            listed = list(_pairs(file))
        else:
            listed = list(_lines_of(file, place))
        lines = len(listed)
        expected = place.layout.lines.get(file.name, lines)
        if expected != lines:
            notes.append(f"{file.name} has {lines:,} lines; expected {expected:,}")
        kept = 0  # images of this list so far, without those of left-out classes
        for image, folder_name in listed:
            label = place.paper.number_of.get(folder_name)
            if label is None:
                # The option ``others`` says that the list also names classes that the dataset leaves out.
                if options.get("others"):
                    continue
                shown = folder_name[:60]
                what = f"it names the class {shown!r}, which is not one of {place.paper.title}"
                raise damaged(file, what)
            name = image
            if options.get("ordered"):
                name = f"{domains[domain]}/{split}/{kept:05d}/{image}"
            yield ImageEntry(name, image, label, domain, SPLIT_WORDS[split])
            kept += 1


def _class_folders(place: FoundLayout) -> Iterator[tuple[str, str, int, Path]]:
    """(split, top, class number, folder) of each class folder. The folder ``top`` above it is a split or a domain."""
    options = place.layout.options
    has_only_lists = "lists" in options and "splits" not in options
    if place.layout.format != "files" or has_only_lists:
        return
    tops: Mapping[str, str] = options.get("splits") or dict.fromkeys(place.paper.domains, "train")
    for top, split in tops.items():
        for number, folder in enumerate(place.paper.folders):
            yield split, top, number, place.base / top / folder


def _lists(place: FoundLayout) -> Iterator[tuple[int, str, Path]]:
    """(domain number, split, file) of every list."""
    for number, domain in enumerate(place.paper.domains):
        for split, name in place.layout.options.get("lists", {}).items():
            yield number, split, place.base / name.replace("{domain}", domain)


def _lines_of(file: Path, place: FoundLayout) -> Iterator[tuple[str, str]]:
    """(image, class folder) of every line of a list.

    ``line.match`` is a regular expression with named groups: ``folder`` is the class as folders spell it, or ``number``
    is its number, counted from 1. ``line.image`` is a format string for the path of the image. Its fields are these
    groups, and ``name``, the name of the class. ``line.expected`` describes a line in words. If it is set, a line with
    an unknown class raises CorruptionError here; otherwise the caller decides (option ``others``).
    """
    line: Mapping[str, str] = place.layout.options["line"]
    folders = place.paper.folders
    classes = place.paper.classes
    # ``splitlines`` would also split at U+2028 and similar characters, which names may contain.
    for text in map(str.strip, _text(file).split("\n")):
        if not text or text.startswith("#"):
            continue
        match = re.fullmatch(line["match"], text)
        groups = {}
        if match:
            groups = match.groupdict()
        # Classes are counted from 1; a number beyond the last class names no folder.
        if "number" in groups:
            number = int(groups["number"])
            groups["folder"] = ""
            if 1 <= number <= len(folders):
                groups["folder"] = folders[number - 1]
        folder = groups.get("folder", "")
        label = place.paper.number_of.get(folder)
        if match is None or (label is None and "expected" in line):
            shown = text[:60]
            expected = line.get("expected", "a path")
            raise damaged(file, f"it has the line {shown!r}; expected {expected}")
        name = folder
        if label is not None:
            name = classes[label]
        image = line["image"].format(**groups, name=name)
        yield image, folder


def _pairs(file: Path) -> Iterator[tuple[str, str]]:
    """(image, class folder) of every image in a pickle of (paths, class names).

    The first folder of each path is left out: it is the place of the dataset on the authors' machine.
    """
    try:
        images, words = load_pickle(file)
        pairs = list(zip(images, words, strict=True))
    except (TypeError, ValueError):
        raise damaged(file, "it does not contain the pair (paths, class names)") from None
    for image, word in pairs:
        yield str(image).partition("/")[2], str(word)


def _open(path: Path) -> IO[bytes]:
    """A file to read. Raises MachineError for a missing or unreadable file."""
    try:
        return path.open("rb")
    except OSError as error:
        raise MachineError(
            f"{path} cannot be opened: {error.strerror}.",
            "Check its permissions, or unpack the dataset again",
        ) from None


def _text(path: Path) -> str:
    """The text of a file; CorruptionError if it is not UTF-8, MachineError as ``_open``."""
    with TextIOWrapper(_open(path), encoding="utf-8") as file:
        try:
            return file.read()
        except UnicodeDecodeError:
            raise damaged(path, "it is not text in UTF-8") from None


# CoOp's splits: format "coop"


def _read_coop(place: FoundLayout, notes: list[str]) -> Iterator[ImageEntry]:
    """CoOp's ``{"train": [[path, label, class name], ...], "val": ..., "test": ...}``."""
    path = place.path(place.layout.needs[0])
    try:
        content = parse_json(_text(path))
    except ValueError as error:
        raise damaged(path, f"it is not JSON ({error})") from None
    match content:
        case {"train": list(), "val": list(), "test": list()}:
            pass
        case _:
            raise damaged(path, "it does not contain the lists train, val and test")
    # Label -> CoOp's spelling of its class. They are compared at the end, when all labels have been read.
    spelled = {}
    for split in ("train", "val", "test"):
        for entry in content[split]:
            match entry:
                case [str(image), int(label), str(word)] if 0 <= label < len(place.paper.classes):
                    yield ImageEntry(image, image, label, 0, SPLIT_WORDS[split])
                    spelled[label] = word
                case _:
                    shown = str(entry)[:80]
                    raise damaged(
                        path, f"{split} has the entry {shown}; expected [path, label, class name]"
                    )
    _check_order(path, place.paper, spelled)


def _check_order(path: Path, paper: Paper, spelled: Mapping[int, str]) -> None:
    """Raise CorruptionError for a list in which class names have other labels; other spellings are accepted."""
    number_of = {_letters(name): number for number, name in enumerate(paper.classes)}
    known = 0
    for label, word in spelled.items():
        expected = number_of.get(_letters(word))
        if expected is None:
            continue
        known += 1
        if label != expected:
            name = paper.classes[label]
            raise damaged(
                path, f"it gives label {label} the class name {word!r}; expected {name!r}"
            )
    # If fewer than half of the names are known, the list belongs to another dataset.
    if 2 * known < len(spelled):
        example = next(iter(spelled.values()))
        raise damaged(path, f"its classes, such as {example!r}, are not those of {paper.title}")


def _letters(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum())


# MATLAB tables: formats "flowers" and "cars"


def _read_flowers(place: FoundLayout, notes: list[str]) -> Iterator[ImageEntry]:
    """Reads ``imagelabels.mat`` (classes, from 1) and ``setid.mat`` (numbers of each split's images, from 1)."""
    labels = _column(place.base / "imagelabels.mat", "labels", len(place.paper.classes))
    for split, key in (("train", "trnid"), ("val", "valid"), ("test", "tstid")):
        for number in _column(place.base / "setid.mat", key, len(labels)):
            image = f"image_{number:05d}.jpg"
            label = labels[number - 1] - 1
            yield ImageEntry(image, image, label, 0, SPLIT_WORDS[split])


def _read_cars(place: FoundLayout, notes: list[str]) -> Iterator[ImageEntry]:
    """Reads the development kit: ``annotations`` with ``fname`` and ``class`` (from 1), one file for each split."""
    files = {
        "train": "devkit/cars_train_annos.mat",
        "test": "cars_test_annos_withlabels.mat",
    }
    classes = len(place.paper.classes)
    for split, file in files.items():
        path = place.base / file
        pairs = []
        try:
            for row in _mat(path)["annotations"].reshape(-1):
                pairs.append((str(row["fname"].item()), int(row["class"].item())))
        except (KeyError, ValueError, TypeError, AttributeError, IndexError):
            raise damaged(path, "it does not contain annotations with fname and class") from None
        for name, number in pairs:
            if not 1 <= number <= classes:
                shown = name[:40]
                raise damaged(
                    path, f"{shown!r} has the class number {number}; expected 1 to {classes}"
                )
            image = f"cars_{split}/{name}"
            yield ImageEntry(image, image, number - 1, 0, SPLIT_WORDS[split])


def _column(path: Path, key: str, high: int) -> list[int]:
    """The whole numbers of a column of a MATLAB file; CorruptionError unless all are from 1 to ``high``."""
    array = _mat(path).get(key)
    if array is None or not np.issubdtype(array.dtype, np.number):
        raise damaged(path, f"it has no array of numbers called {key!r}")
    values: list[int] = array.reshape(-1).astype(np.int64).tolist()
    for value in values:
        if not 1 <= value <= high:
            raise damaged(path, f"{key} has {value}; expected 1 to {high:,}")
    return values


def _mat(path: Path) -> dict[str, Any]:
    """The arrays of a MATLAB file by name; errors as ``_text``."""
    import scipy.io

    with _open(path) as file:
        try:
            arrays: dict[str, Any] = scipy.io.loadmat(file)
        except Exception as error:
            # scipy's parsers raise errors of many classes: ValueError, TypeError, zlib.error, ...
            kind = type(error).__name__
            reason = str(error)[:80]
            raise damaged(path, f"scipy cannot read it ({kind}: {reason})") from None
    return arrays


# Pickles of arrays (CIFAR's Python batches, and the digits of FedBN's release): format "arrays"


def _read_arrays(place: FoundLayout) -> PaperIndex:
    """Every row of a layout of pickled arrays.

    A row is named by its position in the files of its split, such as ``train/00017`` or ``svhn/test/00017``. So schemes
    that take the first n rows of each class take the first n in the files.
    """
    options = place.layout.options
    labels_key = str(options.get("labels", ""))
    limit = options.get("first")
    last = len(place.paper.classes) - 1
    # (prefix of the names of rows, split, domain) -> its files, each with the labels of its rows.
    files: dict[tuple[str, str, int], list[tuple[Path, NDArray[np.int64]]]] = {}
    for domain, split, path in _array_files(place):
        labels = read_images(path, labels_key)[1]
        if limit is not None and split == "train":
            labels = labels[: int(limit)]
        wrong = labels[(labels < 0) | (labels > last)]
        if len(wrong):
            first = int(wrong[0])
            raise damaged(path, f"it has the label {first}; expected 0 to {last}")
        prefix = f"{split}/"
        if len(place.paper.domains) > 1:
            prefix = f"{place.paper.domains[domain]}/{prefix}"
        files.setdefault((prefix, split, domain), []).append((path, labels))
    names = []
    label = []
    domain_of = []
    split_of = []
    images = []
    counts = []
    # The prefixes are sorted, so the rows are sorted by name.
    for prefix, split, domain in sorted(files):
        rows = 0
        for path, labels in files[prefix, split, domain]:
            images.append(PickledImages(path.absolute(), labels_key))
            counts.append(len(labels))
            label += labels.tolist()
            rows += len(labels)
        width = max(5, len(str(rows - 1)))
        names += [f"{prefix}{i:0{width}d}" for i in range(rows)]
        domain_of += [domain] * rows
        split_of += [SPLIT_WORDS[split]] * rows
    # Threads read rows in order, but may be one batch apart, so two files are kept in memory.
    source = Shards(images, counts, warm=2)
    return PaperIndex(names, label, domain_of, split_of, source)


def _array_files(place: FoundLayout) -> Iterator[tuple[int, str, Path]]:
    """(domain number, split, file) of every file; the files of a domain and split are in the order of their rows."""
    options = place.layout.options
    folders = options.get("folders", {})
    for number, domain in enumerate(place.paper.domains):
        folder = place.base / folders.get(domain, "")
        for split in ("train", "test"):
            for name in options[split]:
                yield number, split, folder / name


READERS: dict[str, Callable[[FoundLayout, list[str]], Iterable[ImageEntry]]] = {
    "files": _read_files,
    "coop": _read_coop,
    "flowers": _read_flowers,
    "cars": _read_cars,
}
"""Readers by ``format`` in ``papers/*.toml``, in addition to ``arrays``. Each reader adds its notes for the user to the
list that is its second argument."""


# Pickles of plain data. ``tables/plain_pickle.py`` describes what they may hold, and why no code in them is run.


def load_pickle(path: Path) -> Any:
    """The content of a pickle of plain data.

    Raises CorruptionError for a damaged pickle, or one with other objects, and MachineError as ``_open``.
    """
    with _open(path) as file:
        try:
            return load_plain(file)
        except ValueError as error:
            raise CorruptionError(
                f"{path} is not a pickle of arrays, lists and texts only: {str(error)[:200]}. Nothing in it was "
                "executed.",
                "Download it again from the address that `fedcache datasets info` gives",
            ) from None


def read_images(path: Path, labels_key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """(images uint8 [n, H, W] or [n, H, W, 3], labels int64 [n]) of a pickle.

    The pickle holds ``{"data": uint8 [n, 3072], labels_key: [n]}`` (channels first, as CIFAR has them). If
    ``labels_key`` is empty, it holds the pair (images, labels).
    """
    content = load_pickle(path)
    if labels_key:
        if not isinstance(content, dict) or "data" not in content or labels_key not in content:
            raise damaged(path, f"it does not contain 'data' and {labels_key!r}")
        flat = _as_array(path, content["data"])
        raw = content[labels_key]
        if flat.dtype != np.uint8 or flat.ndim != 2 or flat.shape[1] != 3072:
            shape = list(flat.shape)
            raise damaged(path, f"its data are {flat.dtype} {shape}; expected uint8 [n, 3072]")
        # A row is three planes of 32 x 32 pixels: red, green, blue.
        images = flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    else:
        if not isinstance(content, tuple | list) or len(content) != 2:
            raise damaged(path, "it does not contain the pair (images, labels)")
        images = _as_array(path, content[0])
        raw = content[1]
        is_gray = images.ndim == 3
        is_rgb = images.ndim == 4 and images.shape[3] == 3
        if images.dtype != np.uint8 or not (is_gray or is_rgb):
            shape = list(images.shape)
            raise damaged(
                path,
                f"its images are {images.dtype} {shape}; expected uint8 [n, H, W] or [n, H, W, 3]",
            )
    try:
        labels = np.asarray(raw).astype(np.int64).reshape(-1)
    except (TypeError, ValueError):
        raise damaged(path, "its labels are not numbers") from None
    if len(labels) != len(images):
        count = len(labels)
        raise damaged(path, f"it has {len(images):,} images and {count:,} labels")
    return images, labels


def _as_array(path: Path, images: Any) -> NDArray[Any]:
    try:
        return np.asarray(images)
    except ValueError:  # nested lists of different lengths
        raise damaged(path, "its images are no array") from None


@dataclass(frozen=True)
class PickledImages(Reopened):
    """The images of a pickled array, which a process unpickles when it reads its first row."""

    path: Path
    labels: str  # ``labels_key`` of ``read_images``

    def read(self, row: int) -> NDArray[np.uint8]:
        """uint8 [H, W] or [H, W, 3]; raises ``BadImage`` when the file has changed."""
        try:
            images = self._images
        except FedcacheError as error:
            raise BadImage(error.message) from None
        if row >= len(images):
            raise BadImage(f"{self.path} has {len(images):,} images, fewer than when it was listed")
        return np.ascontiguousarray(images[row])

    @cached_property
    def _images(self) -> NDArray[np.uint8]:
        return read_images(self.path, self.labels)[0]
