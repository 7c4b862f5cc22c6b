"""Table of the kinds of datasets that fedcache reads: the word before the colon of a spec, and the reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedcache.store.samples import HELD_OUT


@dataclass(frozen=True)
class OwnFiles:
    """The files of a user that a kind of datasets reads, as lists and the documentation show them."""

    spec: str  # for example folder:PATH
    about: str  # which files
    note: str  # how they are read
    example: str  # a spec to look at
    extracted: str  # a spec with the options that often go with it


@dataclass(frozen=True)
class DatasetKind:
    """One kind of datasets."""

    # Module of this package, imported when a dataset of the kind is requested. Its function ``key(rest, context)``
    # returns the facts that determine the rows, and ``load(rest, context)`` returns the dataset.
    module: str
    files: OwnFiles | None = None
    # the column that --images-key names: images, texts, rows or paths; "" if no columns can be named
    content: Literal["", "images", "text", "rows", "path"] = ""


KINDS = {
    "digits": DatasetKind("digits"),
    "folder": DatasetKind(
        "folder",
        OwnFiles(
            "folder:PATH",
            "a directory, .zip or .tar with one folder per class or with metadata.csv, or a .csv that lists images",
            "a folder level with names such as train, test, val or dev is the split, the last level is the class, "
            f"and any other level is the domain. Without a split, {HELD_OUT} is the test set. --layout domain/class "
            "overrides this. Choose columns of metadata.csv and of lists with --images-key (paths), --label-key and "
            "--group-key",
            "folder:photos.zip",
            "folder:photos.zip --layout domain/class",
        ),
        content="path",
    ),
    "arrays": DatasetKind(
        "arrays",
        OwnFiles(
            "arrays:FILE",
            "images and labels in a .npz, .npy or .h5 file, or in a folder of .npy files",
            "columns are detected by name, or chosen with --images-key, --label-key and --group-key, or "
            "arrays:FILE?images=A&label=B&group=C,D",
            "arrays:cells.npz",
            "arrays:cells.npz --label-key grade --group-key hospital,scanner",
        ),
        content="images",
    ),
    "idx": DatasetKind(
        "idx",
        OwnFiles(
            "idx:FOLDER",
            "pairs of IDX files (images and labels) such as MNIST's, also compressed (.gz)",
            "files named train are the training set, files named t10k or test the test set",
            "idx:mnist/raw",
            "idx:mnist/raw",
        ),
    ),
    "hf": DatasetKind(
        "hf",
        OwnFiles(
            "hf:PATH",
            "parquet or Arrow files of Hugging Face datasets, or a folder of them; hf:NAME for a downloaded dataset",
            "the names of files and folders give the splits, and the files give the class names; columns are chosen as "
            "for arrays:FILE",
            "hf:cifar100",
            "hf:cifar100 --label-key coarse_label",
        ),
        content="images",
    ),
    "webdataset": DatasetKind(
        "webdataset",
        OwnFiles(
            "webdataset:PATTERN",
            "tar files of samples: images, each with a .cls, .json or .txt of the same name",
            "PATTERN is a tar, a folder, a glob or shard-{0000..0009}.tar; the names of shards and folders give the "
            "splits; fields of .json are columns, chosen as for arrays:FILE",
            "webdataset:shards",
            "webdataset:shards/train-{0000..0009}.tar",
        ),
        content="images",
    ),
    "torchvision": DatasetKind("torchvision"),
    "paper": DatasetKind("papers"),
    "texts": DatasetKind(
        "texts",
        OwnFiles(
            "texts:FILE",
            "texts in a column of a .csv, .tsv, .parquet or .feather file (also .gz), with labels in another column",
            "columns are detected by name, or chosen with --images-key for the texts, --label-key, --group-key, "
            "or texts:FILE?text=A&label=B&split=C&name=D&domain=E&group=F,G",
            "texts:reviews.csv",
            "texts:reviews.csv --label-key stars --group-key shop",
        ),
        content="text",
    ),
    "rows": DatasetKind(
        "rows",
        OwnFiles(
            "rows:FILE",
            "rows of numbers, such as wave forms, and labels in a .npz, .npy or .h5 file, or in a folder of .npy files",
            'a backbone module:MODULE:FACTORY with reads = "rows" gets the rows unchanged. --images-key or '
            "rows:FILE?rows=A chooses the column of rows; other columns are chosen as for arrays:FILE",
            "rows:tones.npz",
            "rows:tones.npz --label-key pitch",
        ),
        content="rows",
    ),
    "sound": DatasetKind(
        "sound",
        OwnFiles(
            "sound:PATH",
            "a directory, .zip or .tar of .wav and .flac files with one folder per class or with metadata.csv",
            "folder levels, tables and --layout have the same meaning as for folder:PATH; needs "
            'pip install "fedcache[sound]"',
            "sound:recordings",
            "sound:recordings --layout speaker/class",
        ),
        content="path",
    ),
}
"""Word before the colon of a spec -> its kind."""

FILES = {kind.files.spec: kind.files for kind in KINDS.values() if kind.files is not None}
"""Form of a spec, such as folder:PATH -> description of the files that the user provides."""

CONTENT = {name: kind.content for name, kind in KINDS.items() if kind.content}
"""Kinds of datasets whose columns can be chosen -> the word for their main column: images, texts, rows or paths."""
