"""``torchvision:NAME``: the image classification datasets of torchvision, read by torchvision's own code.

torchvision decides which of its files to trust. For example, the CIFAR archives are pickles, and torchvision opens them
only if they have the md5 that it publishes. If torchvision's class takes a ``loader``, fedcache reads encoded bytes, so
that nothing is decoded to identify an image; otherwise it reads pixels. Only ``pull`` downloads anything.

Video, detection, segmentation, matching and attribute datasets are not listed. The public test images of CLEVR have no
labels, so its validation set is the test set.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import os
import tomllib
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedcache.errors import MachineError, shell_word, unknown
from fedcache.extract.datasets import dataset, tree
from fedcache.extract.datasets.archives import Reopened
from fedcache.extract.datasets.dataset import Context, Dataset
from fedcache.extract.datasets.row_sources import place_of
from fedcache.extract.image_files import MAX_BYTES, BadImage
from fedcache.extract.images import quiet
from fedcache.extract.recipe import slug as safe
from fedcache.store.samples import HELD_OUT, held_out
from fedcache.tables.roles import ONE_DOMAIN
from fedcache.tables.splits import SPLIT_NAMES, SPLIT_WORDS, TEST, TRAIN


@dataclass(frozen=True)
class TorchvisionEntry:
    """One dataset of torchvision: the arguments that construct its parts, and facts about it."""

    # for each part: its keyword arguments, and the split code of its rows
    splits: tuple[tuple[dict[str, Any], int], ...]
    files: str  # folder below its root; "" if its files are in the root itself
    about: str  # one line
    cls: str = ""  # torchvision's class, if its name differs
    classes: tuple[str, ...] = ()  # class names, if torchvision's object has none or other ones
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of every part
    mirror: bool = True  # whether a mirrored image keeps its class
    pulls: bool = True  # whether torchvision can download the dataset


def _table() -> dict[str, TorchvisionEntry]:
    file = resources.files("fedcache.extract.datasets") / "torchvision.toml"
    table = {}
    for name, given in tomllib.loads(file.read_text(encoding="utf-8")).items():
        splits = tuple((options, SPLIT_WORDS[word]) for options, word in given.pop("splits"))
        classes = tuple(given.pop("classes", ()))
        table[name] = TorchvisionEntry(splits, classes=classes, **given)
    return table


TABLE = _table()
"""All datasets of ``torchvision.toml`` by name. EMNIST has one name for each of its splits."""


def entry_of(name: str) -> TorchvisionEntry:
    """The entry with this name. Raises UsageError for an unknown name, with the nearest known one."""
    if name not in TABLE:
        raise unknown("torchvision dataset", name, TABLE)
    return TABLE[name]


def ready(name: str, context: Context) -> bool:
    """Whether the folder of the dataset has files (torchvision checks them when the dataset is opened)."""
    root = context.root_of("torchvision", name)
    return root is not None and any((root / TABLE[name].files).glob("*"))


def key(rest: str, context: Context) -> list[Any]:
    """The stat of every file of the dataset, and the version of the code that reads them."""
    entry = entry_of(rest)
    root = _require(rest, context)
    version = importlib.metadata.version("torchvision")
    listing = tree.listing_digest(root / entry.files, context.within(root))
    return ["torchvision", rest, version, listing]


def load(rest: str, context: Context) -> Dataset:
    """The dataset with all its splits; MachineError if it is missing or torchvision refuses its files."""
    entry = entry_of(rest)
    root = _require(rest, context)
    facts = key(rest, context)
    splits = _splits_with_files(rest, root)
    source = TorchvisionSource(rest, root, context.within(root), splits)
    lengths = [len(part) for part in source.parts]
    width = max(5, len(str(max(lengths))))
    codes = [code for _, code in splits]
    names = []
    for code, length in zip(codes, lengths, strict=True):
        names += [f"{SPLIT_NAMES[code]}/{row:0{width}d}" for row in range(length)]
    label, classes = _labels(entry, source, facts, context)
    uid, unreadable = dataset.read_uids(source, names, facts, context)
    split = np.repeat(np.array(codes, dtype=np.uint8), lengths)
    domain = np.zeros(len(names), dtype=np.int16)
    missing = [SPLIT_NAMES[code] for _, code in _in_order(entry) if code not in codes]
    note = ""
    if missing:
        note = f"; the files of {' and '.join(missing)} are missing"
    lacking = ""
    if TEST not in codes:
        lacking = "test"
    if TRAIN not in codes:
        split[:] = TRAIN  # a part of these rows becomes the test set below
        lacking = "training"
    if lacking:
        split[held_out(label, domain, uid, split == TRAIN)] = TEST
        note += f"; no {lacking} set: {HELD_OUT} is the test set"
    if unreadable:
        note += f"; {unreadable:,} cannot be read and will be skipped and listed"
    counts = dataset.counts(split, classes, (ONE_DOMAIN,))
    return Dataset(
        spec=f"torchvision:{rest}",
        slug=safe(rest.lower()),
        classes=classes,
        domains=(ONE_DOMAIN,),
        names=tuple(names),
        label=label,
        domain=domain,
        split=split,
        uid=uid,
        template=None,
        reading=f"torchvision:{rest}: {counts}{note}",
        source=source,
        mirror=entry.mirror,
    )


def pull(name: str, root: Path) -> None:
    """Download a dataset into ``root``; MachineError when torchvision cannot. Only this function uses the network."""
    entry = entry_of(name)
    if not entry.pulls:
        raise MachineError(
            f"torchvision cannot download {name}: it requires registration, or its address no longer exists.",
            f"Get its files yourself, put them in {root}, then use --data {shell_word(f'{name}={root}')}",
        )
    root.mkdir(parents=True, exist_ok=True)
    for options, _ in entry.splits:
        _construct(name, root, options, download=True)


@dataclass(frozen=True)
class TorchvisionSource(Reopened):
    """Reads rows through torchvision's objects, which each process constructs when it reads its first row."""

    name: str  # key of ``TABLE``
    root: Path  # folder from ``Context.root_of``
    # folder in which encoded files must be, after resolving links; None for anywhere
    within: Path | None
    # keyword arguments and split code of each part, in their order
    splits: tuple[tuple[dict[str, Any], int], ...]

    @cached_property
    def parts(self) -> list[Any]:
        """torchvision's datasets, one per split."""
        return [
            _construct(self.name, self.root, options, download=False, within=self.within)
            for options, _ in self.splits
        ]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(len(part) for part in self.parts)])

    def item(self, row: int) -> tuple[Any, Any]:
        """torchvision's (image, target) of a row."""
        part, row_of_part = place_of(row, self._starts)
        pair: tuple[Any, Any] = self.parts[part][row_of_part]
        return pair

    def read(self, row: int) -> bytes | NDArray[np.uint8]:
        """The encoded file if torchvision returns it, otherwise the pixels; raises ``BadImage``."""
        try:
            image, _ = self.item(row)
        except OSError:
            raise BadImage("torchvision cannot read the file") from None
        if isinstance(image, Image.Image):
            mode = "RGB"
            if image.mode in ("1", "L"):
                mode = "L"
            return np.array(image.convert(mode))
        if isinstance(image, bytes):
            return image
        raise BadImage(f"torchvision gives a {type(image).__name__}, not an image")


def _in_order(entry: TorchvisionEntry) -> list[tuple[dict[str, Any], int]]:
    """The splits in the order of their rows: sorted by name (test, train, validation), not by code."""
    return sorted(entry.splits, key=lambda split: SPLIT_NAMES[split[1]])


def _splits_with_files(name: str, root: Path) -> tuple[tuple[dict[str, Any], int], ...]:
    """The splits that have files, in the order of the rows; all splits if none has files.

    A split counts as one with files if torchvision does not say which files it has.
    """
    splits = _in_order(TABLE[name])
    with_files = [(options, code) for options, code in splits if _any_file(name, root, options)]
    return tuple(with_files or splits)


def _files_of(cls: Any, train: bool, split: str) -> list[tuple[str, str | None]] | None:
    """(path below the root, md5 that torchvision checks) of each file of a part; None if torchvision does not say."""
    from torchvision.datasets import CIFAR10, MNIST, SVHN, USPS

    # MNIST itself, and classes that inherit this check from it.
    if getattr(cls, "_check_exists", None) is MNIST._check_exists:
        begin = "t10k"
        if train:
            begin = "train"
        kinds = ("images-idx3", "labels-idx1")
        return [(f"{cls.__name__}/raw/{begin}-{kind}-ubyte", None) for kind in kinds]
    if issubclass(cls, CIFAR10):
        listed = cls.test_list
        if train:
            listed = cls.train_list
        return [(f"{cls.base_folder}/{file}", md5) for file, md5 in listed]
    if issubclass(cls, SVHN | USPS):
        return [(cls.split_list[split][1], None)]  # [1] is the name of the file
    return None


def _any_file(name: str, root: Path, options: dict[str, Any]) -> bool:
    """Whether any file of a part exists; true if torchvision does not say which files the part has."""
    train = bool(options.get("train", True))
    split = "test"
    if train:
        split = "train"
    split = options.get("split", split)
    files = _files_of(_class_of(name), train, split)
    if files is None:
        return True
    return any((root / file).exists() for file, _ in files)


def _class_of(name: str) -> Any:
    """torchvision's class of the dataset called ``name`` in ``TABLE``."""
    import torchvision.datasets

    return getattr(torchvision.datasets, TABLE[name].cls or name)


def _own_part(cls: Any) -> Any:
    """The class; if torchvision's checks the files of all parts, a subclass that checks those of the opened part."""
    from torchvision.datasets import CIFAR10, MNIST
    from torchvision.datasets.utils import check_integrity

    def is_complete(self: Any) -> bool:
        # Without a list of files, nothing is checked.
        files = _files_of(cls, self.train, "") or ()
        return all(check_integrity(f"{self.root}/{file}", md5) for file, md5 in files)

    check = ""
    if getattr(cls, "_check_exists", None) is MNIST._check_exists:
        check = "_check_exists"
    elif issubclass(cls, CIFAR10):
        check = "_check_integrity"
    # The new class has the same name, because torchvision looks in a folder with the name of the class.
    if check:
        return type(cls.__name__, (cls,), {check: is_complete})
    return cls


def _require(name: str, context: Context) -> Path:
    root = context.root_of("torchvision", name)
    if root is not None and ready(name, context):
        return root
    looked_in = "no folder, because --data was not given"
    if root is not None:
        looked_in = str(root / TABLE[name].files)
    get = ""
    if TABLE[name].pulls:
        get = f"fedcache datasets pull torchvision:{shell_word(name)}   or "
    raise MachineError(
        f"The files of torchvision's {name} were not found (looked in {looked_in}).",
        f"{get}--data {shell_word(name)}=DIR, where DIR is the root argument of torchvision",
    )


def _read_file(path: str | Path, within: Path | None) -> bytes:
    if tree.leads_out(str(path), tree.real_folder(within)):
        raise BadImage(
            "it is a link to a file outside the dataset's folder (to read it: --follow-links)"
        )
    with Path(path).open("rb") as file:
        return file.read(MAX_BYTES + 1)  # one byte more, so that a file above the limit is noticed


def _construct(
    name: str, root: Path, options: dict[str, Any], *, download: bool, within: Path | None = None
) -> Any:
    entry = TABLE[name]
    cls = _class_of(name)
    accepted = set(inspect.signature(cls.__init__).parameters)
    given = {**entry.options, **options}
    if entry.cls == "EMNIST" or name == "QMNIST":
        accepted |= {"download"}  # passed on by **kwargs
    if name == "ImageNet":
        accepted |= {"loader"}  # passed on by **kwargs
    if "download" in accepted:
        given["download"] = download
    if "loader" in accepted:
        given["loader"] = partial(_read_file, within=within)
    # Without a download, only the files of this part are checked, because those of other parts may be missing.
    make = cls
    if not download:
        make = _own_part(cls)
    try:
        # torchvision prints progress to stdout, where fedcache's commands print only their result.
        with quiet, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
            return make(str(root), **given)
    except (RuntimeError, OSError, ValueError, KeyError, EOFError, ImportError) as error:
        # The reason is the first line of the message, or the type of an error without a message.
        lines = [*str(error).strip().splitlines(), type(error).__name__]
        reason = lines[0]
        word = shell_word(name)
        raise MachineError(
            f"torchvision cannot open {name} in {root}: {reason}",
            f"fedcache datasets pull torchvision:{word}   or, if the files are complete elsewhere, --data {word}=DIR",
        ) from None


def _labels(
    entry: TorchvisionEntry, source: TorchvisionSource, facts: list[Any], context: Context
) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """The label of each row, and the names of the classes that have an image (EMNIST-letters names an empty class)."""
    fact_key = ["labels", dataset.READING, *facts]
    fact = context.memory.recall(fact_key)
    if fact is None:
        fact = [_target(source, row) for row in range(int(source._starts[-1]))]
        context.memory.remember(fact_key, fact)
    raw = np.array(fact, dtype=np.int64)
    all_names = entry.classes or _class_names(source.parts[0])
    used = np.unique(raw[raw >= 0])
    numbers = used.tolist()
    count = len(all_names)
    if count and numbers and numbers[-1] >= count:
        raise MachineError(
            f"torchvision's {source.name} has the label {numbers[-1]}, but {count} class names.",
            "Update torchvision: pip install --upgrade torchvision",
        )
    names = [str(number) for number in numbers]
    if all_names:
        names = [all_names[number] for number in numbers]
    # If classes share a name, each gets its number behind the name.
    classes = []
    for name, number in zip(names, numbers, strict=True):
        if names.count(name) > 1:
            name = f"{name} #{number}"
        classes.append(name)
    # Rows without a label (-1) get any number here, and -1 again below.
    new_labels = np.searchsorted(used, np.maximum(raw, 0))
    label = np.where(raw >= 0, new_labels, -1).astype(np.int32)
    return label, tuple(classes)


def _target(source: TorchvisionSource, row: int) -> int:
    """The label of a row; -1 if it has none or cannot be read."""
    try:
        target = source.item(row)[1]
    except (OSError, BadImage):
        return -1
    if target is None:
        return -1
    return int(target)


def _class_names(part: Any) -> tuple[str, ...]:
    """The class names of a torchvision dataset by number; () if it has no attribute for them."""
    for attribute in ("classes", "categories", "all_categories"):
        names = getattr(part, attribute, None)
        if names:
            return tuple(map(_class_name, names))
    number_of = getattr(part, "class_to_idx", None)
    if number_of:
        return tuple(sorted(number_of, key=number_of.__getitem__))
    return ()


def _class_name(name: Any) -> str:
    """A class name as one text; ImageNet has a tuple of words for each class."""
    if isinstance(name, tuple):
        return ", ".join(name)
    return str(name)
