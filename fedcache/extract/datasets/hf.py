"""``hf:PATH``: a dataset in the file formats of Hugging Face, read without the library of Hugging Face.

PATH is a parquet file, a folder of parquet files (``data/train-00000-of-00002.parquet``,
``default/test/0000.parquet``), or a folder that ``save_to_disk`` wrote. The names of files and folders give the split.
If a folder holds several configurations, fedcache rejects it and lists them; name one as ``hf:PATH/CONFIG``.

Images are columns of bytes or of {bytes, path}. Class names come from ``ClassLabel``. Every other column of words,
whole numbers or booleans is a group. ``hf:NAME`` is a dataset that ``fedcache datasets pull hf:NAME`` downloaded; no
other command downloads it.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import MachineError, UsageError, shell_word
from fedcache.extract.datasets import columns, tree
from fedcache.extract.datasets.archives import Reopened, open_as_listed, stamp_of
from fedcache.extract.datasets.columns import DatasetRequest, TableRows
from fedcache.extract.datasets.dataset import Context, Dataset, Source
from fedcache.extract.datasets.row_sources import Shards, place_of
from fedcache.extract.image_files import BadImage
from fedcache.optional import need_arrow, needed_library
from fedcache.parsing import counted, parse_json
from fedcache.tables.roles import find_column
from fedcache.tables.splits import SPLIT_NAMES, SPLIT_WORDS, split_named
from fedcache.tables.table_files import (
    Table,
    class_names_of,
    hugging_face_features,
    usable_features,
)
from fedcache.tables.table_readers import read_others
from fedcache.tables.words import Unread, explain_damage

SUFFIXES = (".parquet", ".arrow")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class RecordFile:
    """A parquet or Arrow file."""

    path: Path
    split: int | None  # code of the split in its path; None if the path names no split
    schema: Any  # pyarrow's schema
    features: dict[str, dict[str, Any]]  # Hugging Face's description of the columns, by name
    rows: int
    groups: tuple[int, ...]  # rows of each row group of a parquet file


def key(rest: str, context: Context) -> list[Any]:
    """Values that change if the content of a row may have changed.

    They are the words of the spec that name columns, and the stat of every file.
    """
    request = columns.parse_rest(rest, "hf")
    path = _locate(request.place, context)
    return ["hf", request.facts, tree.state_of(path, context.within(path))]


def load(rest: str, context: Context) -> Dataset:
    """The dataset of ``hf:PATH``.

    Raises UsageError for files without images, several configurations, or columns that make no sense, MachineError for
    a name that was not pulled, and without pyarrow.
    """
    request = columns.parse_rest(rest, "hf")
    path = _locate(request.place, context)
    facts = key(rest, context)
    need_arrow(f"hf:{request.place}")
    # If the spec names a column of splits, the names of files do not give the split.
    files, left_out = _files(path, context, by_name=request.choice.split is None)
    columns.refuse_without_training(path, [file.split for file in files], left_out)
    images = [_image_column(file, request) for file in files]
    # Files without class names get, for each column, those of the first file that has some. The files are in reversed
    # order, so that an earlier one overwrites a later one.
    names_of_first: dict[str, list[str]] = {}
    for file in reversed(files):
        names_of_first |= class_names_of(file.features)
    by_split: dict[int | None, list[TableRows]] = {}
    for file, image in zip(files, images, strict=True):
        class_names = names_of_first | class_names_of(file.features)
        rows = _rows(file, image, class_names)
        by_split.setdefault(file.split, []).append(rows)
    # Names of rows begin with the word of their split. Splits sorted by word therefore put the rows in order.
    splits = sorted(by_split, key=_word)
    parts = [_one_after_another(by_split[split]) for split in splits]
    suffix = files[0].path.suffix[1:]
    number = counted(len(files), f"{suffix} file")
    # For all files, the message shows the image column of the first one.
    how = f"images from {images[0]}, of {number}"
    how += columns.left_out_words(left_out)
    return columns.assemble(
        f"hf:{rest}",
        path,
        parts,
        request=request,
        how=how,
        facts=facts,
        context=context,
    )


def pull(name: str, root: Path, say: Callable[[str], None]) -> None:
    """Download the parquet files of a dataset of huggingface.co into ``root``; ``say`` receives their size first.

    If a repository has no parquet files, fedcache downloads the ones that Hugging Face made. Raises UsageError
    for an invalid name, MachineError without the library, the network or the files.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not the name of a dataset.",
            "For example fedcache datasets pull hf:ylecun/mnist",
        )
    huggingface_hub = needed_library("huggingface_hub", f"hf:{name}", "hf")
    api = huggingface_hub.HfApi()
    # First the repository itself, then the branch where Hugging Face puts its own conversion to parquet.
    for revision in ("main", "refs/convert/parquet"):
        try:
            info = api.dataset_info(name, revision=revision, files_metadata=True)
            listed = info.siblings or ()  # the files of the repository
            files = [file for file in listed if file.rfilename.endswith(".parquet")]
            if not files:
                continue
            megabytes = sum(file.size or 0 for file in files) / 1e6
            source = f"huggingface.co/datasets/{name}, {revision}"
            say(f"{len(files)} files ({megabytes:,.1f} MB) from {source}")
            huggingface_hub.snapshot_download(
                name,
                repo_type="dataset",
                revision=info.sha,
                local_dir=root,
                allow_patterns=["*.parquet"],
            )
            return
        except huggingface_hub.errors.RevisionNotFoundError:
            continue  # Hugging Face has not converted it
        except Exception as error:
            # Of any class: the library also raises the errors of the packages that it uses for the network.
            message = str(error).strip() or type(error).__name__
            first_line = message.splitlines()[0]
            raise MachineError(
                f"{name} cannot be downloaded from huggingface.co: {first_line[:200]}",
                "Try again with a network connection, or copy its parquet files: --dataset hf:FOLDER",
            ) from None
    raise MachineError(
        f"{name} has no parquet files on huggingface.co.",
        "Write them with its library, ds.to_parquet('train-00000.parquet'), and use hf:FOLDER",
    )


def _locate(place: str, context: Context) -> Path:
    """The file or folder of ``hf:PLACE``. Raises UsageError, and MachineError for a name that was not pulled."""
    path = Path(place).expanduser()
    # An empty place is tested first, because ``Path("")`` is the current folder.
    if place and path.exists():
        if path.is_file() and path.suffix not in SUFFIXES:
            raise UsageError(
                f"{path} is not a {' or '.join(SUFFIXES)} file.",
                "Give such a file, or a folder of them",
            )
        return path
    # A name of huggingface.co stands for the folder where it was pulled.
    root = None
    if _NAME.fullmatch(place) and path.suffix not in SUFFIXES:
        root = context.root_of("hf", place)
    if root is None:
        raise tree.no_such_path(
            place,
            f"a {' or '.join(SUFFIXES)} file or a folder of them",
            "Give the path of the files, --dataset hf:PATH, or the name of a dataset on huggingface.co",
        )
    if not root.exists():
        name = shell_word(place)
        raise MachineError(
            f"The files of {place!r} were not found: neither {root} nor a path {place!r} exists.",
            f"fedcache datasets pull hf:{name}   or --data {name}=DIR",
        )
    return root


def _word(split: int | None) -> str:
    """The word of a split; "" for none."""
    if split is None:
        return ""
    return SPLIT_NAMES[split]


def split_in(relative: str) -> int | None:
    """The split in the name of a file, else in the name of the nearest folder above it; None where no name has one."""
    *folders, name = relative.split("/")
    words = re.split(r"[-_.]", name)
    of_file = split_named(words)
    if of_file is None:
        # Reversed, so that the nearest folder comes first.
        return split_named([*reversed(folders)])
    return of_file


def _files(path: Path, context: Context, *, by_name: bool) -> tuple[list[RecordFile], list[str]]:
    """The files of a dataset in the order of their names, and the names of those left out for lack of a split.

    If ``by_name`` is true, the names of a file and its folders give its split. Otherwise, no file has a split, and none
    is left out.
    """
    if path.is_file():
        # A single file is the whole dataset, so its name gives no split.
        return [_open(path, None, path)], []
    names = []
    # ``others`` are the files that are no images. Files called cache-* are leftovers of ``Dataset.map``.
    for name in sorted(tree.scan(path, context.within(path)).others):
        is_cache = name.rpartition("/")[2].startswith("cache-")
        if name.endswith(SUFFIXES) and not is_cache:
            names.append(name)
    # A folder may hold parquet and Arrow files of the same rows. If there is a parquet file, Arrow files are ignored.
    parquet = [name for name in names if name.endswith(".parquet")]
    names = parquet or _saved(path, names)
    if not names:
        raise UsageError(
            f"{path} contains no {' or '.join(SUFFIXES)} files.",
            "Give the folder that contains them, hf:FOLDER",
        )
    # Several configurations are several datasets.
    configurations = {_configuration(name) for name in names}
    if len(configurations) > 1:
        named = ", ".join(sorted(c or "." for c in configurations))
        # The last configuration in alphabetical order is the example. The first may be "", the files without a folder.
        example = shell_word(path / max(configurations))
        raise UsageError(
            f"{path} holds {len(configurations)} configurations: {named}.",
            f"Choose one: --dataset hf:{example}",
        )
    splits = dict.fromkeys(names)
    if by_name:
        splits = {name: split_in(name) for name in names}
    # If the names of some files give a split, the files without a split are left out.
    with_split = [name for name in names if splits[name] is not None]
    without_split = []
    if with_split:
        without_split = [name for name in names if splits[name] is None]
    chosen = with_split or names
    files = [_open(path / name, splits[name], path) for name in chosen]
    return files, without_split


def _configuration(name: str) -> str:
    """The configuration of a file: the folders above it that are neither its split nor ``data``; "" for none."""
    folders = name.split("/")[:-1]
    of_configuration = [f for f in folders if f.lower() not in SPLIT_WORDS and f != "data"]
    return "/".join(of_configuration)


def _saved(path: Path, names: Sequence[str]) -> list[str]:
    """The Arrow files that ``save_to_disk`` wrote: those that the ``state.json`` of their folder lists.

    Other files in such a folder are leftovers, for example of ``Dataset.map``. If a folder has no ``state.json``, all
    its files are returned.
    """
    saved = []
    for name in names:
        folder, _, file = name.rpartition("/")
        state = _read_json(path / folder / "state.json")
        if state.get("_indices_data_files"):
            raise UsageError(
                f"{path / folder} was saved with an index that selects rows. fedcache cannot read such an index.",
                "Save the selected rows again:  ds.flatten_indices().save_to_disk(FOLDER)",
            )
        listed = state.get("_data_files")
        is_leftover = isinstance(listed, list) and {"filename": file} not in listed
        if not is_leftover:
            saved.append(name)
    return saved


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; {} if the file is missing, damaged or holds something else."""
    content = None
    with suppress(OSError, ValueError):
        if path.is_file():
            content = parse_json(path.read_text(encoding="utf-8"))
    if isinstance(content, dict):
        return content
    return {}


def _open(path: Path, split: int | None, root: Path) -> RecordFile:
    """The description of a file of the dataset at ``root``; no image is decoded."""
    groups = ()
    with explain_damage(path):
        if path.suffix == ".arrow":
            table = open_arrow(path)
            # The whole file is checked now: later, reading a row follows an offset even if it leads out of the file.
            table.validate(full=True)
            schema = table.schema
            rows = table.num_rows
        else:
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as file:
                metadata = file.metadata
                groups = tuple(
                    metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)
                )
                schema = file.schema_arrow
            rows = sum(groups)
    # The columns are described in the file, else in ``dataset_info.json`` of its folder or of the dataset.
    features = hugging_face_features(schema)
    for folder in (path.parent, root):
        if not features:
            info = _read_json(folder / "dataset_info.json")
            features = usable_features(info.get("features"))
    return RecordFile(path.absolute(), split, schema, features, rows, groups)


def _image_column(file: RecordFile, request: DatasetRequest) -> str:
    """The column of images: the named one, else the one that the file marks as images, else one of a usual name.

    Raises UsageError where no column holds bytes, or several may be meant.
    """
    import pyarrow as pa

    def holds_bytes(kind: Any) -> bool:
        if pa.types.is_struct(kind):
            return any(f.name == "bytes" and holds_bytes(f.type) for f in kind)
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    path = file.path
    with_bytes = [f.name for f in file.schema if holds_bytes(f.type)]
    named = request.content or None
    # () stands for no usual names: at this point, only the column that the user names is searched.
    chosen = find_column(path, dict.fromkeys(file.schema.names), named, (), "--images-key")
    if chosen is None:
        marked = [
            name for name in with_bytes if file.features.get(name, {}).get("_type") == "Image"
        ]
        # If only one column is possible, it needs no usual name.
        possible = marked or with_bytes
        if len(possible) == 1:
            chosen = possible[0]
        else:
            usual = columns.IMAGE_NAMES
            chosen = find_column(path, dict.fromkeys(possible), None, usual, "--images-key")
    # A column that the user names may hold no bytes.
    if chosen is None or chosen not in with_bytes:
        shown = ", ".join(f"{f.name} {f.type}" for f in list(file.schema)[:8])
        what = "no column of images"
        if chosen is not None:
            what += f" {chosen!r}"
        elif with_bytes:
            what = "several columns that could be images"
        raise UsageError(
            f"{path} has {what}. Its first columns: {shown[:300]}.",
            "A column of images holds bytes, or structs of bytes and path. Choose one with --images-key NAME",
        )
    return chosen


def _is_extension(field: Any) -> bool:
    """Whether a column has an extension type of Arrow, which may bring code."""
    import pyarrow as pa

    if isinstance(field.type, pa.BaseExtensionType):
        return True
    return b"ARROW:extension:name" in (field.metadata or {})


def _rows(file: RecordFile, image: str, class_names: dict[str, list[str]]) -> TableRows:
    """The rows of a file. All columns are read now, except the images."""
    found = {}
    names = []
    for field in file.schema:
        if field.name == image:
            continue
        if _is_extension(field):
            # () stands for an unknown shape.
            found[field.name] = Unread((), str(field.type), "an extension type")
        else:
            names.append(field.name)
    if names:
        others, _ = read_others(_table(file, class_names), names)
        found |= others
    stamp = stamp_of(file.path)
    source: Source = ParquetRows(file.path, stamp, image, file.groups)
    if file.path.suffix == ".arrow":
        source = ArrowRows(file.path, stamp, image)
    return TableRows(columns.row_names(file.rows, file.split), source, found, file.split)


def _one_after_another(files: Sequence[TableRows]) -> TableRows:
    """The rows of all files of a split; only a few of the files are open at a time."""
    lengths = [len(file.names) for file in files]
    split = files[0].split
    # joined_parts also returns the split of each row, here the same for all, and the columns that belong to no rows,
    # here none.
    joined, _, _ = columns.joined_parts(files)
    rows = Shards([file.source for file in files], lengths)
    names = columns.row_names(sum(lengths), split)
    return TableRows(names, rows, joined, split)


def _table(file: RecordFile, class_names: dict[str, list[str]]) -> Table:
    """A file as a table."""

    def batches(columns: Sequence[str], rows: int, *, floats: bool = False) -> Iterator[Any]:
        """See ``Batches``; ``floats`` is for CSV files, and not used here."""
        import pyarrow.parquet as pq

        with explain_damage(file.path):
            if file.path.suffix == ".arrow":
                chosen = open_arrow(file.path).select(list(columns))
                yield from chosen.to_batches(rows)
                return
            with pq.ParquetFile(file.path) as opened:
                yield from opened.iter_batches(rows, columns=list(columns))

    types = {field.name: field.type for field in file.schema}
    return Table(file.path, types, batches, file.rows, class_names=class_names)


# The classes below read images that are values of a column: encoded bytes in parquet or Arrow files. A row group of a
# parquet file is read from its beginning in small batches, so one row group of gigabytes needs the memory of a few
# images. Arrow files are mapped into memory.

BATCH = 32
"""Rows of a parquet file that are decoded at a time."""

KEPT = 4
"""Decoded batches of a file that a process keeps. Its threads read nearby rows, but not always of the same batch."""


def image_bytes(values: Any, at: int) -> bytes:
    """The encoded image at index ``at`` of a column from ``only_bytes``; raises ``BadImage`` if there is no image."""
    image = values[at].as_py()
    if not isinstance(image, bytes):
        raise BadImage("its row contains no image data; a path alone is not enough")
    return image


def only_bytes(values: Any) -> Any:
    """The bytes in a column that holds bytes, or {bytes, path}, as Hugging Face writes images."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(values.type):
        return pc.struct_field(values, "bytes")
    return values


@dataclass(eq=False)
class ParquetRows(Reopened):
    """The images of a parquet file."""

    path: Path
    stamp: tuple[int, int]
    column: str  # holds bytes, or {bytes, path}; the bytes are read
    groups: tuple[int, ...]  # rows of each row group

    def __post_init__(self) -> None:
        self._starts = np.cumsum([0, *self.groups])
        self._lock = threading.Lock()
        self._file: Any = None
        # Iterator over the batches of row group ``_group`` that were not read yet.
        self._batches: Any = None
        self._group = -1  # -1 if there is no iterator
        self._at = 0  # first row of the next batch
        # (first row, values) of the last batches
        self._kept: deque[tuple[int, Any]] = deque(maxlen=KEPT)
        self._broken: dict[int, int] = {}  # row group -> first row that could not be read

    def read(self, row: int) -> bytes:
        """The encoded image of a row; raises ``BadImage``."""
        with self._lock:
            for first, values in self._kept:
                if first <= row < first + len(values):
                    return image_bytes(values, row - first)
            first, values = self._find(row)
            return image_bytes(values, row - first)

    def _find(self, row: int) -> tuple[int, Any]:
        """The batch that holds a row, and its first row; raises ``BadImage``."""
        import pyarrow as pa

        group, _ = place_of(row, self._starts)
        if group in self._broken and row >= self._broken[group]:
            raise BadImage("its data in the file is damaged")
        try:
            # The iterator cannot go back: for an earlier row, the group is read from its start again.
            if group != self._group or row < self._at:
                self._at = int(self._starts[group])
                self._batches = self._open().iter_batches(
                    BATCH, row_groups=[group], columns=[self.column]
                )
                self._group = group
            # Batches before the one with the row are read and kept too.
            for batch in self._batches:
                first = self._at
                self._at += len(batch)
                newest = (first, only_bytes(batch.column(0)))
                self._kept.append(newest)
                if row < self._at:
                    return newest
        except pa.ArrowException:
            pass  # handled below as damaged data
        except OSError as error:
            # pyarrow raises OSError for damaged data too: without a number, or because an offset makes no sense.
            if error.errno not in (None, errno.EINVAL):
                self._group = -1
                raise MachineError(
                    f"{self.path} cannot be read: {error.strerror}.", "Run the command again."
                ) from error
        # The row was not found: reading failed, or the group has fewer rows than the file says. This is remembered.
        # Otherwise each later row would read the group from its start again.
        self._broken[group] = self._at
        self._group = -1
        raise BadImage("its data in the file is damaged")

    def _open(self) -> Any:
        if self._file is None:
            import pyarrow.parquet as pq

            # Opened and closed, only to raise an error if the file has changed since it was listed.
            os.close(open_as_listed(self.path, self.stamp))
            self._file = pq.ParquetFile(
                self.path, buffer_size=1 << 20, page_checksum_verification=True
            )
        return self._file


@dataclass(frozen=True, eq=False)
class ArrowRows(Reopened):
    """The images of an Arrow file or stream, which is mapped."""

    path: Path
    stamp: tuple[int, int]  # (size, mtime_ns) of the file when it was listed
    column: str  # holds bytes, or {bytes, path}; the bytes are read

    def read(self, row: int) -> bytes:
        """The encoded image of a row; raises ``BadImage``."""
        return image_bytes(self._values, row)

    @cached_property
    def _values(self) -> Any:
        # As in ``ParquetRows``: raises an error if the file has changed since it was listed.
        os.close(open_as_listed(self.path, self.stamp))
        return only_bytes(open_arrow(self.path).column(self.column))


def open_arrow(path: Path) -> Any:
    """The table of an Arrow file or stream, mapped and not read. Raises pyarrow's own errors for a damaged one."""
    import pyarrow as pa

    mapped = pa.memory_map(str(path))
    if mapped.read(6) == b"ARROW1":
        return pa.ipc.open_file(mapped).read_all()
    mapped.seek(0)
    return pa.ipc.open_stream(mapped).read_all()
