"""Dataset specs: the kinds, the module that reads each, and the error for a spec that names no dataset.

Nothing that reads is imported here: a command that finds its store by name starts without Pillow, h5py and readers.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from fedcache.errors import UsageError, shell_word, unknown
from fedcache.plugins import find, offer
from fedcache.store.samples import HELD_OUT, INGESTED

READERS = {
    "digits": "digits",
    "folder": "folder",
    "arrays": "arrays",
    "idx": "idx",
    "hf": "hf",
    "webdataset": "webdataset",
    "torchvision": "torchvision",
    "paper": "papers",
    "texts": "texts",
    "rows": "rows",
}
"""Kind -> the module of this package that reads it, with ``key(rest, context)``, what the answer depends on, and
``load(rest, context)``, the dataset."""
HELD = "python"
"""Kind of images that a program held, which no spec names."""
FILES = {
    "folder:PATH": (
        "a directory, .zip or .tar with one folder per class or with metadata.csv, or a .csv that lists images",
        "levels named train, test, val, dev or the like are the split, the last level is the class, "
        f"what remains is the domain; without a split, {HELD_OUT} is the test set; --layout domain/class overrides; "
        "columns of metadata.csv and of lists are named by --images-key (paths), --label-key and --group-key",
    ),
    "arrays:FILE": (
        "images and labels in a .npz, .npy or .h5 file, or in a folder of .npy files",
        "columns are found by their usual names, or named: --images-key, --label-key and --group-key, or "
        "arrays:FILE?images=A&label=B&group=C,D",
    ),
    "idx:FOLDER": (
        "pairs of IDX files of images and labels, as MNIST has them, .gz too",
        "files named train are the training set, t10k or test the test set",
    ),
    "hf:PATH": (
        "parquet or Arrow files of Hugging Face datasets, or a folder of them; hf:NAME where it was pulled",
        "splits are in the names of files and folders, class names in the files; columns are named as of arrays:FILE",
    ),
    "webdataset:PATTERN": (
        "tar files of samples: images with .cls, .json or .txt of the same name beside them",
        "a tar, a folder, a glob or shard-{0000..0009}.tar; splits are in the names of shards and folders; fields of "
        ".json are columns, named as of arrays:FILE",
    ),
    "texts:FILE": (
        "texts in a column of a .csv, .tsv, .parquet or .feather file, .gz too, with labels beside them",
        "columns are found by their usual names, or named: --images-key for the texts, --label-key, --group-key, or "
        "texts:FILE?text=A&label=B&split=C&name=D&domain=E&group=F,G",
    ),
    "rows:FILE": (
        "rows of numbers, such as wave forms, and labels in a .npz, .npy or .h5 file, or in a folder of .npy files",
        "they are given as they are to a module: encoder that reads rows; columns are named as of arrays:FILE, the "
        "rows themselves by --images-key or rows:FILE?rows=A",
    ),
}
"""Kinds of files of one's own: what they are, and how they are read."""
offer("datasets", [*READERS, INGESTED])
_NAMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*=")


def module(name: str) -> Any:
    """A module of this package, imported when it is first asked for."""
    return import_module(f"fedcache.extract.datasets.{name}")


def known_names() -> list[str]:
    """The specs of ``listing.known``, all that can be named."""
    return [row["name"] for row in module("listing").known()]


def kind_of(spec: str) -> tuple[str, str]:
    """The kind of a spec and what follows it; UsageError for one that names no dataset."""
    kind, _, rest = spec.partition(":")
    if (kind in READERS or find("datasets", kind) is not None) and (rest or kind == "digits"):
        return kind, rest
    if kind == INGESTED:
        raise UsageError(
            f"{spec!r} are embeddings: there are no images to read.",
            f"fedcache train --dataset {shell_word(spec)} --method fedavg   trains on them; "
            "--dataset digits or folder:PATH brings images.",
        )
    if kind == HELD:
        raise UsageError(
            f"{spec!r} are images that a program held; where they come from is not known.",
            "fc.extract(images, ...)   with the same images goes on; --dataset names others",
        )
    if spec and spec not in READERS and Path(spec).expanduser().exists():
        raise UsageError(
            f"{spec!r} is not the name of a dataset, but it is a path.",
            f"For images there: --dataset folder:{shell_word(spec)}",
        )
    names = known_names()
    if kind in READERS:
        raise UsageError(
            f"{spec!r} does not say which; expected {own_files(kind) or f'{kind}:NAME'}.",
            "fedcache datasets list",
        )
    bare = {name.partition(":")[2]: name for name in names if ":" in name and name not in FILES}
    if spec.lower() in {name.lower() for name in bare}:
        near = [full for name, full in bare.items() if name.lower() == spec.lower()]
        full = bare.get(spec, near[0])
        raise UsageError(
            f"Unknown dataset {spec!r}. Did you mean {full!r}?", f"--dataset {shell_word(full)}"
        )
    raise unknown("dataset", spec, names, hint="fedcache datasets list   shows all")


def own_files(kind: str) -> str | None:
    """The spec of a kind of files of one's own; None of another kind."""
    return next((spec for spec in FILES if spec.partition(":")[0] == kind), None)


def parts_of(spec: str) -> dict[str, str] | None:
    """``{name: spec}`` of ``NAME=SPEC,NAME=SPEC``, or None for a single spec."""
    if not _NAMED.match(spec):
        return None
    parts: dict[str, str] = {}
    for piece in re.split(rf",(?={_NAMED.pattern})", spec):
        name, _, one = piece.partition("=")
        if name in parts:
            raise UsageError(
                f"The domain {name!r} is given twice in {spec!r}.", "Give each another name"
            )
        parts[name] = one
    return parts
