"""Layouts whose images are files: lists of them (CoOp's json, texts, FedBN's pickles) and trees of folders.

A reader is a pair of functions on a ``Place``: ``parts`` are the files and folders the answer depends on, ``rows`` the
answer. Lists name images that may be missing: those rows stay and are quarantined, as everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.datasets import paper_arrays, paper_mats, plain_pickle, tree
from fedcache.extract.datasets.layout import SPLITS
from fedcache.extract.datasets.paper import Paper, Place
from fedcache.extract.datasets.paper_arrays import damaged
from fedcache.extract.datasets.paper_rows import Item, Rows, of_files


@dataclass(frozen=True)
class Format:
    """How one kind of layout is read.

    Attributes:
        parts: the files and folders the answer depends on.
        rows: the rows; raises ENVIRONMENT for what is missing, CORRUPT for what is not as it should be.
    """

    parts: Callable[[Place], list[Path]]
    rows: Callable[[Place], Rows]


def _coop_parts(place: Place) -> list[Path]:
    images = place.layout.options["images"]
    folders = [images] if images else [need for need in place.layout.needs if not need.endswith(".json")]
    return [place.path(place.layout.options["file"]), *(place.base / folder for folder in folders)]


def _coop_rows(place: Place) -> Rows:
    """CoOp's ``{"train": [[path, label, class name], ...], "val": ..., "test": ...}``."""
    path = place.path(place.layout.options["file"])
    try:
        held = json.loads(_text(path))
    except ValueError as error:
        raise damaged(path, f"it is not JSON ({error})") from None
    if not isinstance(held, dict) or not {"train", "val", "test"} <= set(held):
        raise damaged(path, "it does not hold the lists train, val and test")
    items, spelled = [], {}
    for split in ("train", "val", "test"):
        for entry in held[split]:
            match entry:
                case [str(image), int(label), str(word)] if 0 <= label < len(place.paper.classes):
                    items.append(Item(image, image, label, 0, SPLITS[split]))
                    spelled[label] = word
                case _:
                    raise damaged(path, f"{split} has the entry {str(entry)[:80]}; expected [path, label, class name]")
    _check_order(path, place.paper, spelled)
    return of_files(place.base / place.layout.options["images"], items, path)


def _check_order(path: Path, paper: Paper, spelled: Mapping[int, str]) -> None:
    """Refuse a list whose class names belong to other labels; a name that is only spelled otherwise is no matter."""
    number = {_letters(name): i for i, name in enumerate(paper.classes)}
    known = {label: number[_letters(word)] for label, word in spelled.items() if _letters(word) in number}
    for label, expected in known.items():
        if label != expected:
            raise damaged(path, f"its label {label} is {spelled[label]!r}; expected {paper.classes[label]!r}")
    if 2 * len(known) < len(spelled):
        raise damaged(path, f"its classes, such as {next(iter(spelled.values()))!r}, are not those of {paper.title}")


def _letters(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum())


def _list_parts(place: Place) -> list[Path]:
    lists = [path for _, _, path in _lists(place)]
    if place.layout.options.get("images"):
        return [*lists, place.base / place.layout.options["images"]]
    return [*lists, *(place.base / d / f for d in place.paper.domains for f in place.paper.folders)]


def _lists(place: Place) -> Iterator[tuple[int, str, Path]]:
    """(domain, split, file) of every list."""
    for number, domain in enumerate(place.paper.domains):
        for split, name in place.layout.options["lists"].items():
            yield number, split, place.base / name.replace("{domain}", domain)


def _list_rows(place: Place) -> Rows:
    """Lists, one per split and domain; with ``ordered``, rows keep the order of the list by a number in their name."""
    options = place.layout.options
    number = {folder: i for i, folder in enumerate(place.paper.folders)}
    items, notes = [], []
    for domain, split, path in _lists(place):
        entries = list(_LINES[options["line"]](path, place.paper))
        expected = place.layout.lines.get(path.name, len(entries))
        if expected != len(entries):
            notes.append(f"{path.name} has {len(entries):,} lines; expected {expected:,}")
        kept = 0
        for image, folder in entries:
            if folder not in number:
                if options.get("others"):
                    continue
                raise damaged(path, f"it names the class {folder[:60]!r}, which is not one of {place.paper.title}")
            name = f"{place.paper.domains[domain]}/{split}/{kept:05d}/{image}" if options.get("ordered") else image
            items.append(Item(name, image, number[folder], domain, SPLITS[split]))
            kept += 1
    return of_files(place.base / options.get("images", ""), items, path, tuple(notes))


def _paths(path: Path, paper: Paper) -> Iterator[tuple[str, str]]:
    """Lines ``clipart/bird/clipart_031_000001.jpg 31`` or ``banded/banded_0002.jpg``: the last folder is the class."""
    for line in _lines(path):
        image = line.split(" ")[0]
        yield image, (image.split("/")[-2] if "/" in image else "")


def _numbered(path: Path, paper: Paper) -> Iterator[tuple[str, str]]:
    """Lines ``Abyssinian_100 1 1 1``: the image without its ending, and its class counted from 1."""
    for line in _lines(path):
        if line.startswith("#"):
            continue
        image, *numbers = line.split(" ")
        if not numbers or not numbers[0].isdigit() or not 1 <= int(numbers[0]) <= len(paper.folders):
            raise damaged(path, f"it has the line {line[:60]!r}; expected a name and a class from 1")
        yield f"{image}.jpg", paper.folders[int(numbers[0]) - 1]


def _videos(path: Path, paper: Paper) -> Iterator[tuple[str, str]]:
    """Lines ``YoYo/v_YoYo_g08_c01.avi 101``; the frames lie in folders named as the classes, ``Yo_Yo``."""
    classes = dict(zip(paper.folders, paper.classes, strict=True))
    for line in _lines(path):
        folder, _, video = line.split(" ")[0].partition("/")
        yield f"{classes.get(folder, folder)}/{video.removesuffix('.avi')}.jpg", folder


def _pairs(path: Path, paper: Paper) -> Iterator[tuple[str, str]]:
    """A pickle of (paths, class names); the first folder of a path is where its authors had the dataset."""
    held = plain_pickle.load(path)
    if not isinstance(held, tuple | list) or len(held) != 2 or len(held[0]) != len(held[1]):
        raise damaged(path, "it does not hold the pair (paths, class names)")
    for image, word in zip(held[0], held[1], strict=True):
        yield str(image).partition("/")[2], str(word)


_LINES: dict[str, Callable[[Path, Paper], Iterator[tuple[str, str]]]] = {
    "path": _paths,
    "numbered": _numbered,
    "videos": _videos,
    "pairs": _pairs,
}


def _folders(place: Place) -> Iterator[tuple[str, str, int, Path]]:
    """(split, top, class, folder) of every class folder: below the splits, or below the domains where no split is."""
    splits = place.layout.options.get("splits")
    tops: Mapping[str, str] = splits or dict.fromkeys(place.paper.domains, "train")
    for top, split in tops.items():
        for number, folder in enumerate(place.paper.folders):
            yield split, top, number, place.base / top / folder


def _tree_parts(place: Place) -> list[Path]:
    return [folder for _, _, _, folder in _folders(place)]


def _tree_rows(place: Place) -> Rows:
    """Folders ``split/class`` or ``domain/class``; what else lies beside them is not looked at."""
    found = list(_folders(place))
    _need([folder for _, _, _, folder in found], place)
    items = []
    for split, top, number, folder in found:
        domain = place.paper.domains.index(top) if top in place.paper.domains else 0
        paths = [f"{top}/{place.paper.folders[number]}/{image}" for image in tree.scan(folder).paths]
        items += [Item(path, path, number, domain, SPLITS[split]) for path in paths]
    return of_files(place.base, items, place.base)


def _need(folders: list[Path], place: Place) -> None:
    missing = [str(folder.relative_to(place.base)) for folder in folders if not folder.is_dir()]
    if missing:
        raise FedcacheError(
            Exit.ENVIRONMENT,
            f"{place.base} has not all class folders: {', '.join(missing[:3])}"
            f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''} are missing.",
            f"Unpack it again; fedcache datasets check {place.paper.name} {place.root}",
        )


_ANNOTATIONS = "val/val_annotations.txt"


def _tiny_parts(place: Place) -> list[Path]:
    train = [place.base / "train" / folder for folder in place.paper.folders]
    return [*train, place.base / "val/images", place.base / _ANNOTATIONS]


def _tiny_rows(place: Place) -> Rows:
    """``train/nXXXXXXXX/images``, and ``val/images`` whose classes are in a table."""
    train = [place.base / "train" / folder for folder in place.paper.folders]
    _need(train, place)
    items = []
    for number, folder in enumerate(train):
        paths = [f"train/{folder.name}/{image}" for image in tree.scan(folder).paths]
        items += [Item(path, path, number, 0, SPLITS["train"]) for path in paths]
    number_of = {folder: i for i, folder in enumerate(place.paper.folders)}
    for line in _lines(place.base / _ANNOTATIONS):
        image, *rest = line.split("\t")
        if not rest or rest[0] not in number_of:
            raise damaged(place.base / _ANNOTATIONS, f"it has the line {line[:60]!r}; expected an image and a class")
        path = f"val/images/{image}"
        items.append(Item(path, path, number_of[rest[0]], 0, SPLITS["test"]))
    return of_files(place.base, items, place.base)


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in _text(path).splitlines() if line.strip()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise damaged(path, "it is not text in UTF-8") from None
    except FileNotFoundError:
        raise FedcacheError(Exit.ENVIRONMENT, f"{path} is missing.", "Download or unpack it again") from None


FORMATS = {
    "cifar": Format(paper_arrays.parts, paper_arrays.rows),
    "digits": Format(paper_arrays.parts, paper_arrays.rows),
    "coop": Format(_coop_parts, _coop_rows),
    "lists": Format(_list_parts, _list_rows),
    "tree": Format(_tree_parts, _tree_rows),
    "tiny-imagenet": Format(_tiny_parts, _tiny_rows),
    "flowers": Format(paper_mats.flowers_parts, paper_mats.flowers_rows),
    "cars": Format(paper_mats.cars_parts, paper_mats.cars_rows),
}
"""Formats of ``papers/*.toml`` by name."""
