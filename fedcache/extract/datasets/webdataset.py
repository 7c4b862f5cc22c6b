"""``webdataset:PATTERN``: samples in tar files, where the parts of a sample share a name and have different endings.

A sample is ``000017.jpg`` with ``000017.cls`` or ``000017.json`` next to it. PATTERN is one tar, a folder of tars,
``shard-*.tar`` or ``shard-{0000..0009}.tar``. A name ends at its first dot.

The label is the number or word in ``.cls``, otherwise a field of ``.json`` (``label``, ``class`` or the one that
``--label-key`` names), otherwise ``.txt``. The other fields of ``.json`` are groups. A ``.txt`` that differs in nearly
every sample is a caption, not a label. If a ``.json`` holds no object, its value is in a column ``json``. Words in
``.json`` stay words; the text in ``.cls`` has no type and is read like a cell of a CSV, so it may become a number.

The names of shards and folders give the split (``train-0000.tar``, ``test/0000.tar``). Otherwise the folder of each
sample gives it (``train/000017.jpg``), if every sample has such a folder. Shards are read in place and must not be
compressed. fedcache rejects links, devices and truncated shards, and skips other parts of a sample.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import UsageError, shell_word
from fedcache.extract.datasets import archives, columns, tree
from fedcache.extract.datasets.columns import DatasetRequest, TableRows
from fedcache.extract.datasets.dataset import Context, Dataset
from fedcache.extract.datasets.hf import split_in
from fedcache.extract.datasets.image_lists import splits_of_folders
from fedcache.extract.datasets.row_sources import Shards
from fedcache.extract.digests import stat_key
from fedcache.extract.image_files import EXTENSIONS, BadImage
from fedcache.parsing import counted, parse_json
from fedcache.tables.groups import Group, differs_in_every_row
from fedcache.tables.roles import LABELS, ColumnChoice
from fedcache.tables.words import Unread, Words, last_level, refuse_empty

MOST_TEXT = 1 << 20
"""Limit in bytes for a .cls, .txt or .json file of a sample."""

MOST_SHARDS = 100_000
FEW = 20
"""Number of samples up to which texts count as classes even if all of them differ."""

LABEL_PARTS = ("cls", "json", "txt")
_RANGE = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")


@dataclass(frozen=True)
class _Shard:
    """The samples of a tar, without their images."""

    name: str  # path below the folder of all shards
    split: int | None  # code; None where no name gives a split
    entries: archives.Entries  # entries of the images
    keys: tuple[str, ...]  # [n] names of the samples
    fields: list[Mapping[str, Any]]  # [n] fields of .json
    # cls or txt -> [n] text; None for a sample without such a part
    texts: dict[str, list[str | None]]


def key(rest: str, context: Context) -> list[Any]:
    """The columns that the spec names, and the stat of every shard."""
    request = columns.parse_rest(rest, "webdataset")
    _, paths = _shards(request.place, context)
    return ["webdataset", request.facts, [stat_key(path) for path in paths]]


def load(rest: str, context: Context) -> Dataset:
    """The dataset of ``webdataset:PATTERN``.

    Raises UsageError for a pattern that matches nothing, samples without images or compressed shards, CorruptionError
    for damaged or hostile ones.
    """
    request = columns.parse_rest(rest, "webdataset")
    facts = key(rest, context)
    top, paths = _shards(request.place, context)
    unused = Counter[str]()  # ending -> number of files that are not used
    shards = [_read_shard(top, path, request, unused) for path in paths]
    with_split = [shard for shard in shards if shard.split is not None]
    left_out = []
    if with_split:
        left_out = [shard.name for shard in shards if shard.split is None]
    columns.refuse_without_training(top, [shard.split for shard in with_split], left_out)
    # Names of shards that give a split take precedence over folders of samples.
    shards = with_split or _by_folder(shards)
    by_split: dict[int | None, list[_Shard]] = {}
    for shard in shards:
        by_split.setdefault(shard.split, []).append(shard)
    parts = [_rows(of_split) for of_split in by_split.values()]
    request = _with_label(request, parts, shards)
    how = counted(len(shards), "shard") + columns.left_out_words(left_out)
    if unused:
        listed = ", ".join(f"{n:,} .{ending}" for ending, n in unused.most_common(6))
        how += f"; not used: {listed}"
    # The dataset is named after the folder, or after its only shard.
    where = top
    if len(paths) == 1:
        where = paths[0]
    return columns.assemble(
        f"webdataset:{rest}",
        where,
        parts,
        request=request,
        how=how,
        facts=facts,
        context=context,
    )


def _shards(place: str, context: Context) -> tuple[Path, list[Path]]:
    """The folder of all shards, and their paths in order. Raises UsageError where there is none."""
    pattern = ""
    if place:
        pattern = str(Path(place).expanduser())
    path = Path(pattern)
    top = path
    if place and path.is_dir():
        # ``others`` are the files that are no images.
        others = sorted(tree.scan(path, context.within(path)).others)
        found = [path / name for name in others if name.endswith(".tar")]
        if not found:
            for file in sorted(path.rglob("*")):
                if archives.is_compressed_tar(file):
                    raise archives.refuse_compressed(file)
    else:
        matches: set[Path] = set()
        for text in _expand(pattern):
            matches.update(map(Path, _matching(text)))
        found = sorted(matches)
        if found:
            top = Path(os.path.commonpath([file.parent for file in found]))
    if not place or not found:
        named = place or "nothing"
        raise UsageError(
            f"No tar file matches {named!r} (current directory: {Path.cwd()}).",
            "Give a tar file, a folder of tar files or a pattern, for example --dataset "
            "'webdataset:shards/train-{0000..0009}.tar'",
        )
    for shard in found:
        if not shard.is_file():
            raise UsageError(
                f"There is no shard {shard}.",
                f"ls {shell_word(shard.parent)}   lists the existing shards.",
            )
        if archives.is_compressed_tar(shard):
            raise archives.refuse_compressed(shard)
    return top, found


def _expand(pattern: str) -> Iterator[str]:
    """All texts of a pattern such as ``a-{00..02}.tar`` or ``{a,b}.tar``. Raises UsageError for too many."""
    # The alternatives for each piece of the pattern; a piece of fixed text has only one.
    pieces = []
    last = 0
    total = 1
    for match in _RANGE.finditer(pattern):
        first, end, words = match.groups()
        if words is None:
            # One number more than allowed is enough to notice that there are too many.
            numbers = range(int(first), int(end) + 1)[: MOST_SHARDS + 1]
            width = len(first)
            choices = [f"{n:0{width}d}" for n in numbers]
        else:
            choices = words.split(",")
        total *= len(choices)
        if total > MOST_SHARDS:
            raise UsageError(
                f"{pattern!r} matches more than {MOST_SHARDS:,} shards.",
                "Give the folder of the shards instead.",
            )
        pieces.append([pattern[last : match.start()]])
        pieces.append(choices)
        last = match.end()
    pieces.append([pattern[last:]])
    for chosen in itertools.product(*pieces):
        yield "".join(chosen)


def _matching(text: str) -> list[str]:
    """The paths that a glob matches; a text that exists as a path, or is no glob, is returned as it is."""
    if not text:
        return []
    if Path(text).exists() or not glob.has_magic(text):
        return [text]
    return glob.glob(text, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern


def _read_shard(top: Path, path: Path, request: DatasetRequest, unused: Counter[str]) -> _Shard:
    """The samples of a shard; parts that are not used are counted by their endings in ``unused``.

    Raises UsageError for a sample with two images, and for a shard without images.
    """
    refuse_empty(path)
    entries = archives.list_tar(path)
    # The ending of images is the one that the user names, or any usual one.
    endings_of_images = {ending.removeprefix(".") for ending in EXTENSIONS}
    if request.content:
        endings_of_images = {request.content.lower().lstrip(".")}
    relative = os.path.relpath(path, top)
    images: dict[str, int] = {}  # sample -> number of its image in the tar
    parts_of: dict[str, dict[str, int]] = {}  # sample -> ending -> number in the tar
    for i, name in enumerate(entries.names):
        folder, slash, base = name.rpartition("/")
        stem, _, ending = base.partition(".")
        if not stem:  # hidden
            continue
        sample = f"{folder}{slash}{stem}"
        ending = ending.lower()
        if ending in endings_of_images:
            if sample in images:
                first = entries.names[images[sample]]
                raise UsageError(
                    f"The sample {sample!r} of {path} has two images, {first!r} and {name!r}.",
                    "--images-key jpg   selects images with this ending",
                )
            images[sample] = i
        elif ending in LABEL_PARTS:
            parts_of.setdefault(sample, {})[ending] = i
        else:
            unused[ending[:20]] += 1
    if not images:
        bases = [name.rpartition("/")[2] for name in entries.names]
        parts_found = {base.partition(".")[2] for base in bases}
        shown = ", ".join(sorted(parts_found)[:8]) or "(none)"
        usual = sorted(ending[1:] for ending in EXTENSIONS)
        examples = ", ".join(usual[:8])
        raise UsageError(
            f"{path} contains no images. The files of its samples have the endings {shown}.",
            f"Expected endings such as {examples}. Choose one with --images-key ENDING",
        )
    keys = sorted(images)
    numbers = np.array([images[sample] for sample in keys], dtype=np.int64)
    image_entries = entries.take(numbers)
    archives.check_images(image_entries)
    reader = archives.ArchiveSource(entries)
    fields: list[Mapping[str, Any]] = []
    texts: dict[str, list[str | None]] = {}
    for row, sample in enumerate(keys):
        parts = parts_of.get(sample, {})
        fields_of_sample = _fields(reader, parts, path)
        fields.append(fields_of_sample)
        labels = _label_parts(parts, fields_of_sample, request.choice)
        for ending in ("cls", "txt"):
            if ending in labels:
                column = texts.setdefault(ending, [None] * len(keys))
                column[row] = _text(reader, parts[ending], path).strip()
            elif ending in parts:
                unused[ending] += 1
    split = None
    if request.choice.split is None:
        split = split_in(relative)
    return _Shard(relative, split, image_entries, tuple(keys), fields, texts)


def _fields(reader: archives.ArchiveSource, parts: Mapping[str, int], path: Path) -> dict[str, Any]:
    """The fields of a sample's .json. Objects, and lists of several values, are emptied: no column can use them."""
    if "json" not in parts:
        return {}
    try:
        content = parse_json(_text(reader, parts["json"], path))
    except ValueError:
        name = reader.entries.names[parts["json"]]
        raise UsageError(
            f"{name} in {path} is not JSON.", "Write it again, or leave it out of the shard"
        ) from None
    if not isinstance(content, dict):
        content = {"json": content}
    found = {}
    for name, value in content.items():
        if isinstance(value, dict) or (isinstance(value, list) and len(value) > 1):
            value = type(value)()  # {} or []
        found[name] = value
    return found


def _label_parts(
    parts: Mapping[str, int], fields: Mapping[str, Any], choice: ColumnChoice
) -> list[str]:
    """Which of a sample's text parts are read: .cls; also .txt if the user names it, or if nothing else is a label."""
    if "txt" in (choice.groups or ()):
        reads_text = True
    elif choice.label is None:
        reads_text = not (choice.unlabelled or "cls" in parts or _is_labelled(fields))
    else:
        reads_text = choice.label == "txt"
    endings = ["cls"]
    if reads_text:
        endings.append("txt")
    return [ending for ending in endings if ending in parts]


def _is_labelled(names: Iterable[str]) -> bool:
    """Whether a field has a usual name of labels."""
    return any(last_level(name) in LABELS for name in names)


def _with_label(
    request: DatasetRequest, parts: Sequence[TableRows], shards: Sequence[_Shard]
) -> DatasetRequest:
    """The request, with .cls as the labels if samples have it, otherwise with .txt if no field is named like labels."""
    # The endings of the parts that were read. ``names`` does not show them: fields of .json may be called cls or txt.
    texts = {ending for shard in shards for ending in shard.texts}
    names = {name for part in parts for name in part.columns}
    choice = request.choice
    if choice.label is None and not choice.unlabelled:
        if "cls" in texts:
            choice = replace(choice, label="cls")
        elif "txt" in texts and not _is_labelled(names):
            all_texts = [text for shard in shards for text in shard.texts.get("txt", ())]
            # Captions are not classes; their column is listed as not used.
            if not differs_in_every_row(Group.of_words(Words.of(all_texts))):
                choice = replace(choice, label="txt")
    if choice.label in texts:
        for part in parts:
            _check_captions(part.columns.get(choice.label))
    return replace(request, choice=choice)


def _text(reader: archives.ArchiveSource, i: int, path: Path) -> str:
    """The text of entry ``i`` of a tar. Raises UsageError if it is too long, damaged or no UTF-8."""
    name = reader.entries.names[i]
    if int(reader.entries.size[i]) > MOST_TEXT:
        raise UsageError(
            f"{name} in {path} has more than {MOST_TEXT:,} bytes.", "Leave it out of the shard"
        )
    try:
        return reader.read(i).decode("utf-8")
    except (BadImage, UnicodeDecodeError):
        raise UsageError(f"{name} in {path} is not UTF-8 text.", "Write it again") from None


def _check_captions(labels: Any) -> None:
    """Raise UsageError for labels that are captions: most samples have different texts, some of several words."""
    if not isinstance(labels, Words):
        return
    known = int((labels.codes >= 0).sum())
    different = len(labels.words)
    mostly_different = known > FEW and 2 * different > known
    if mostly_different and any(" " in word for word in labels.words):
        example = labels.words[0][:60]
        raise UsageError(
            f"The {known:,} samples with a text have {different:,} different texts, such as {example!r}. So these "
            "texts are captions, not classes.",
            "--label-key FIELD   selects a field of the .json files; --label-key cls selects the .cls files",
        )


def _by_folder(shards: Sequence[_Shard]) -> list[_Shard]:
    """The shards, divided by split, if every sample is in a folder that is named like a split; else the same shards."""
    codes = splits_of_folders([sample for shard in shards for sample in shard.keys])
    if codes is None:
        return [*shards]
    found = []
    start = 0
    for shard in shards:
        end = start + len(shard.keys)
        codes_of_shard = codes[start:end]
        start = end
        for split in np.unique(codes_of_shard).tolist():
            rows = np.flatnonzero(codes_of_shard == split)
            entries = shard.entries.take(rows)
            keys = tuple(shard.keys[row] for row in rows)
            fields = [shard.fields[row] for row in rows]
            texts = {}
            for ending, values in shard.texts.items():
                texts[ending] = [values[row] for row in rows]
            found.append(_Shard(shard.name, split, entries, keys, fields, texts))
    return found


def _rows(shards: Sequence[_Shard]) -> TableRows:
    """The rows of the shards of a split."""
    fields = []
    names = []
    sources = []
    lengths = []
    for shard in shards:
        folder = shard.name.removesuffix(".tar")
        fields += shard.fields
        names += [tree.name_of(f"{folder}/{sample}") for sample in shard.keys]
        sources.append(archives.ArchiveSource(shard.entries))
        lengths.append(len(shard.keys))
    found = columns.columns_of_records(fields)
    left_out = {}
    for ending in dict.fromkeys(ending for shard in shards for ending in shard.texts):
        texts = []
        for shard in shards:
            texts += shard.texts.get(ending, [None] * len(shard.keys))
        if ending in found:
            why = f"the part .{ending} has this name"
            left_out[f"{ending} of .json"] = Unread((len(fields),), "", why)
        found[ending] = Words.of(texts).typed()
    return TableRows(names, Shards(sources, lengths), found, shards[0].split, left_out)
