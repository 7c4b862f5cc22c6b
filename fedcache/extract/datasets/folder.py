"""``folder:PATH``: a directory, a .zip or a .tar of images read in place, or a list of images (.csv, .tsv, .jsonl).

A directory, a zip and a tar of the same files have the same names, uids and digest. fedcache skips hidden files,
``__MACOSX`` and files without the extension of an image, and counts them by format. An unreadable file keeps its row,
and the extraction quarantines it.

``metadata.csv`` or ``metadata.jsonl`` among the images (Hugging Face's ImageFolder) describes the images. Its column
``file_name`` names them, and its other columns label them. The folders train, test and validation are the splits.
Without a column of labels, the folders below the splits are the classes. ``--label-key`` and ``--images-key`` name
columns.

Without such a table, an empty folder at the level of the classes is a class without images.

A list has a column of paths (path, file_name, image, image_id, ..) relative to its folder, with slashes or backslashes.
fedcache completes a name without an ending. The separator may be a comma, a semicolon or a tab, the encoding UTF-8 or
UTF-16.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import UsageError, closest, shell_word, unknown
from fedcache.extract.datasets import ARCHIVES, archives, columns, dataset, image_lists, tree
from fedcache.extract.datasets.dataset import Context, Dataset, Source
from fedcache.extract.digests import stat_key
from fedcache.extract.image_files import EXTENSIONS, SOUND_ENDINGS, how_to_convert
from fedcache.extract.recipe import IMAGES, SOUNDS
from fedcache.extract.recipe import slug as safe
from fedcache.parsing import SAFE
from fedcache.store.files import digest_of
from fedcache.tables.groups import Group, usable_group_name
from fedcache.tables.roles import ONE_DOMAIN, Roles, read_roles
from fedcache.tables.splits import SPLIT_WORDS, TRAIN
from fedcache.tables.words import some_names

# The levels of an image's folders give its class, domain and split.
#
# A level whose names are all words for a split (train, test, val, dev, ..) is the split. Of the other
# levels, the last is the class, and the levels above it are the domain. Folders that are named like
# splits are never taken for classes. A single top folder is entered first, because archives usually
# have one and the directory from which they were made does not. A folder of a split or of the only
# class is not entered, because it has a meaning.
#
# A layout may give a level another name, such as client: the level is then a group of that name.


MISSPELT = 0.75
"""Minimum similarity at which a word in ``--layout`` counts as a misspelt role."""

_ROLES = ("split", "domain", "class", "*")


@dataclass(frozen=True)
class Labels:
    """Class, domain and split of each row, and the layout that says so."""

    layout: str  # role of each folder level, joined by ``/``, or the columns that are used
    classes: list[str]  # [N] class name of each row; "" if it is unknown
    domains: list[str]  # [N] domain name of each row
    splits: list[int] | None  # [N] split codes, or None when nothing says what they are
    # group name -> [N] value of each row; "" if it is unknown
    groups: dict[str, list[str]] = field(default_factory=dict)
    empty: tuple[str, ...] = ()  # names of the classes whose folders hold no images


def parse_layout(text: str) -> tuple[str, ...]:
    """``split/domain/class`` as roles, ``*`` for a level without meaning and any other word for a group of that name.

    Raises UsageError unless there is one class and at most one split, for a level that is named twice, and for an
    invalid name.
    """
    roles = tuple(text.strip("/").split("/"))
    for role in roles:
        if role in _ROLES:
            continue
        # A word that resembles the name of a level is refused as misspelt; any other word names a group.
        if near := closest(role, _ROLES, MISSPELT):
            raise UsageError(
                f"Unknown layout level {role!r}. Did you mean {near!r}?",
                "Levels are split, domain, class and *. Any other word, such as client, makes a group of that "
                "name, unless it is similar to one of these levels.",
            )
        if not SAFE.fullmatch(role):
            raise UsageError(
                f"The layout {text!r} has the level {role!r}. A level name may contain only letters, digits, "
                "'.', '_' and '-'.",
                "--layout client/class",
            )
        if roles.count(role) > 1:
            raise UsageError(
                f"The layout {text!r} has the level {role!r} twice.", "--layout client/class"
            )
        usable_group_name(role)
    classes = roles.count("class")
    splits = roles.count("split")
    if classes != 1 or splits > 1:
        raise UsageError(
            f"The layout {text!r} has {classes} class levels and {splits} split levels; expected exactly one class "
            "level and at most one split level.",
            "For example --layout domain/class",
        )
    return roles


def enter_top_folder(names: Sequence[str], keep: int = 1) -> int:
    """Number of characters of the single top folders that are entered, leaving ``keep`` folder levels."""
    if not names:
        return 0
    depth = min(name.count("/") for name in names)
    folders = names[0].split("/")
    length = 0
    for folder in folders[: max(0, depth - keep)]:
        if folder.lower() in SPLIT_WORDS:
            break
        prefix = f"{folder}/"
        if not all(name.startswith(prefix, length) for name in names):
            break
        length += len(prefix)
    return length


def infer(
    names: Sequence[str],
    layout: str | None,
    *,
    where: str,
    tables: Sequence[str] = (),
    empty: Sequence[str] = (),
) -> Labels:
    """Class, domain and split of every image of ``where``, from the folders below the entered top folder.

    ``tables`` are files that may list the images; hints show these files. ``empty`` are folders without files. Raises
    UsageError if images are at different depths, or directly at the top, or if there is only one class.
    """
    roles = None
    if layout is not None:
        roles = parse_layout(layout)
    # All images must be at one depth, the depth of the layout. ``depths`` has one image as an example for each depth.
    folders = [tuple(name.split("/")[:-1]) for name in names]
    depths = {len(above): name for name, above in zip(names, folders, strict=True)}
    expected = "the same number for every image, at least 1"
    fits_layout = True
    if roles is not None:
        expected = f"{len(roles)} (--layout {layout})"
        fits_layout = len(roles) in depths
    if len(depths) > 1 or 0 in depths or not fits_layout:
        examples = sorted(depths.items())[:3]
        found = "; ".join(f"{depth} for {name!r}" for depth, name in examples)
        raise UsageError(
            f"The images of {where} are not in one folder per class. Number of folders above an image: {found}; "
            f"expected {expected}.",
            _with_tables(
                tables,
                "Move the images at other levels away, give --layout (for example domain/class), or list the images "
                "in a CSV file with the columns path,label,domain,split and use folder:FILE.csv",
            ),
        )
    # The names of each level, from the top.
    levels = [set(level) for level in zip(*set(folders), strict=True)]
    if roles is None:
        roles = _guess(levels)
        _refuse_splits_as_classes(levels[roles.index("class")], where, tables)
    labels = replace(_labels(folders, roles, where), empty=_empty_classes(empty, roles))
    if len({*labels.classes, *labels.empty}) < 2:
        only = labels.classes[0]
        raise UsageError(
            f"{where} was read with the layout {labels.layout} and has only one class, {only!r}; expected at least "
            "two.",
            _with_tables(
                tables,
                "If the folders mean something else, use --layout. Images without classes can be listed "
                "in a CSV file with an empty label column",
            ),
        )
    return labels


def _empty_classes(empty: Sequence[str], roles: Sequence[str]) -> tuple[str, ...]:
    """The names of the class folders among folders without files. Folders that are named like splits are no classes."""
    level = list(roles).index("class")
    found = set()
    for folder in empty:
        names = folder.rstrip("/").split("/")
        as_splits = [role == "split" for role in roles[: level + 1]]
        if [name.lower() in SPLIT_WORDS for name in names] == as_splits:
            found.add(names[level])
    return tuple(sorted(found))


def _with_tables(tables: Sequence[str], hint: str) -> str:
    """A hint, after the commands that read the first ``tables`` as lists of images."""
    lines = []
    for table in sorted(tables)[:4]:
        word = shell_word(table)
        lines.append(f"If the file lists images:  fedcache datasets info folder:{word}")
    return "\n".join([*lines, hint])


def _refuse_splits_as_classes(names: set[str], where: str, tables: Sequence[str]) -> None:
    """Raise UsageError where the folders of the class level are named like splits.

    All names are words for splits, or one is a word for training and another one a word for another split.
    """
    # None stands for a name that is no word for a split. Folders with such names are classes, unless two splits are
    # among them.
    codes = {SPLIT_WORDS.get(name.lower()) for name in names}
    two_splits = TRAIN in codes and len(codes - {None}) > 1
    if None in codes and not two_splits:
        return
    listed = ", ".join(sorted(names)[:4])
    raise UsageError(
        f"{where} has only folders that are named like splits ({listed}), so there is no folder for a class.",
        _with_tables(
            tables,
            "Put each class into a folder of its own, such as train/cat; or write the class of each image into "
            "metadata.csv with the columns file_name and label. If these folders are classes: --layout class",
        ),
    )


def _guess(levels: Sequence[set[str]]) -> tuple[str, ...]:
    """The role of each level, by the names of its folders.

    The first level that has only names of splits is the split, and the last of the other levels is the class.
    """
    roles = ["domain"] * len(levels)
    if len(levels) > 1:
        for number, names in enumerate(levels):
            if all(name.lower() in SPLIT_WORDS for name in names):
                roles[number] = "split"
                break
    last = max(number for number, role in enumerate(roles) if role == "domain")
    roles[last] = "class"
    return tuple(roles)


def _labels(folders: Sequence[tuple[str, ...]], roles: tuple[str, ...], where: str) -> Labels:
    """The labels of images by their folders; ``roles`` has the role of each folder level."""
    layout = "/".join(roles)
    values_of = {}
    for level, role in enumerate(roles):
        if role not in ("domain", "*"):
            values_of[role] = [above[level] for above in folders]
    classes = values_of.pop("class")
    splits = None
    if "split" in values_of:
        hint = f"{where} was read with the layout {layout}. Give another layout with --layout."
        splits = _split_codes(values_of.pop("split"), hint)
    domains = [ONE_DOMAIN] * len(folders)
    domain_levels = [level for level, role in enumerate(roles) if role == "domain"]
    if domain_levels:
        domains = ["/".join(above[level] for level in domain_levels) for above in folders]
    # Any other role that a layout gives to a level is the name of a group.
    return Labels(layout, classes, domains, splits, values_of)


def _split_codes(words: Sequence[str], hint: str) -> list[int]:
    """The split code of each word. Raises UsageError for another word than those of splits."""
    codes = []
    for word in words:
        if word.lower() not in SPLIT_WORDS:
            raise unknown("split", word, SPLIT_WORDS, hint=hint)
        codes.append(SPLIT_WORDS[word.lower()])
    return codes


_SUFFIXES = (*ARCHIVES, *image_lists.ENDINGS)


def key(rest: str, context: Context) -> list[Any]:
    """Facts that determine the dataset, without reading an image: the stat of the archive or of every file."""
    request = columns.parse_rest(rest, "folder")
    path = _locate(request.place)
    kind = _kind(path)
    head = [kind, str(path.resolve()), _slug(path), context.layout, *request.facts]
    if kind in image_lists.ENDINGS:
        listed = image_lists.read_list(path, request.content)
        inside = _inside(path, listed.paths, context)
        stats = [tree.stat_numbers(path.parent / image) for image in inside]
        return [*head, stat_key(path), digest_of(stats)]
    return [*head, tree.state_of(path, context.within(path))]


def load(rest: str, context: Context) -> Dataset:
    """The dataset of ``folder:PATH``.

    Raises UsageError for a missing path or folders without a clear meaning, CorruptionError for a bad archive.
    """
    return load_files(rest, context, IMAGES)


def load_files(rest: str, context: Context, holds: str) -> Dataset:
    """The dataset of the images or the sounds at a path; errors as of ``load``."""
    endings = EXTENSIONS
    spec = f"folder:{rest}"
    if holds == SOUNDS:
        endings = SOUND_ENDINGS
        spec = f"sound:{rest}"
    request = columns.parse_rest(rest, "folder")
    path = _locate(request.place)
    # The facts come before the images are read, so that a change in between is noticed.
    facts = key(rest, context)
    if _kind(path) in image_lists.ENDINGS:
        read = _from_list(path, request, context)
    else:
        found = tree.scan(path, context.within(path), endings)
        if not found.paths:
            ignored = tree.ignored_text(found.ignored)
            expected = ", ".join(sorted(endings))
            hint = f"Give the directory or archive that contains the {holds}, one folder per class"
            conversion = how_to_convert(path, found.ignored)
            raise UsageError(
                f"{path} holds no {holds}{ignored}; expected files ending in {expected}.",
                conversion or hint,
            )
        tables = image_lists.tables_among(found.others)
        if tables and context.layout is None:
            read = _from_tables(path, found, tables, request, context)
        elif request.given:
            raise UsageError(
                f"{path} has no table with labels, so options that choose a column do not apply.",
                "Give the meaning of folder levels with --layout, or the label of each image in "
                "metadata.csv with the columns file_name and label",
            )
        else:
            read = _from_tree(path, found, context)
    made = columns.dataset_of_rows(
        spec,
        path,
        read.source,
        read.roles,
        how=read.how,
        facts=facts,
        context=context,
        holds=holds,
    )
    return replace(
        made,
        slug=_slug(path),
        reading=made.reading + tree.ignored_text(read.ignored),
        links_left_out=read.ignored[tree.LINK_OUT],
    )


@dataclass(frozen=True)
class _ImageRows:
    """The images of a folder, an archive or a list, with their columns."""

    source: Source
    roles: Roles
    how: str  # a clause on how they were read
    ignored: Counter[str]  # files and rows that were left out, by reason


def _locate(rest: str) -> Path:
    """The directory, archive or list that a spec names. Raises UsageError for a missing path and for other files."""
    path = Path(rest).expanduser()
    if not rest or not path.exists():
        raise tree.no_such_path(
            rest,
            f"a directory or a {', '.join(_SUFFIXES)} file",
            "Give the path of the files: --dataset folder:PATH or sound:PATH",
        )
    if not path.is_dir() and archives.is_compressed_tar(path):
        raise archives.refuse_compressed(path)
    if _kind(path) not in ("directory", *_SUFFIXES):
        raise UsageError(
            f"{path} is neither a directory nor a {', '.join(_SUFFIXES)} file.",
            "Pack the images in a zip, or give the directory that contains them",
        )
    return path


def _kind(path: Path) -> str:
    """``directory``, or the ending of a file in lower case."""
    if path.is_dir():
        return "directory"
    return path.suffix.lower()


def _slug(path: Path) -> str:
    """The name of the dataset at a path, usable as a file name."""
    full = Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute keeps "..", Path.resolve follows links
    name = full.stem
    if path.is_dir():
        name = full.name
    return safe(name)[:64].lstrip(".") or "folder"


def _from_tree(path: Path, found: tree.Tree, context: Context) -> _ImageRows:
    """The images of a directory or archive, whose folders give their classes, domains and splits."""
    # Some archives have one folder around everything: it is entered.
    spelled = [tree.name_of(p) for p in found.paths]
    keep = 1
    if context.layout is not None:
        keep = len(parse_layout(context.layout))
    cut = enter_top_folder(spelled, keep)
    order = dataset.order_of_names(spelled)
    names = [spelled[i][cut:] for i in order]
    tables = _other_tables(path, found)
    top = spelled[0][:cut]
    empty = [folder[cut:] for folder in map(tree.name_of, found.empty) if folder.startswith(top)]
    labels = infer(names, context.layout, where=str(path), tables=tables, empty=empty)
    how = f"read as {labels.layout}"
    if cut:
        inside = top.rstrip("/")
        how += f" inside {inside}"
    classes, label = dataset.index_of([*labels.classes, *labels.empty])
    unseen = sorted(set(classes) - set(labels.classes))
    if unseen:
        listed = some_names(unseen, 8)
        how += f", no files of {listed}"
    domains, domain = dataset.index_of(labels.domains)
    splits = None
    if labels.splits is not None:
        splits = np.array(labels.splits, dtype=np.uint8)
    groups = {name: Group.of(words) for name, words in labels.groups.items()}
    roles = Roles(
        labels=label[: len(names)].astype(np.int32),
        classes=classes,
        domains=domain.astype(np.int32),
        domain_names=domains,
        splits=splits,
        names=names,
        groups=groups,
        unused={},
        label_key=columns.LABEL,
        may_be_labels={},
        notes=[f"{name}: {len(group.words):,} values" for name, group in groups.items()],
    )
    source = found.source(path, order, context.within(path))
    return _ImageRows(source, roles, how, found.ignored)


def _other_tables(path: Path, found: tree.Tree) -> list[str]:
    """The files of a directory that may be lists of its images."""
    if not path.is_dir():
        return []
    return [str(path / name) for name in found.others if name.lower().endswith(image_lists.ENDINGS)]


def _from_tables(
    path: Path,
    found: tree.Tree,
    tables: Sequence[str],
    request: columns.DatasetRequest,
    context: Context,
) -> _ImageRows:
    """The images of a directory or archive that also contains ``tables`` of their labels."""
    spelled = [tree.name_of(p) for p in found.paths]
    table_names = [tree.name_of(table) for table in tables]
    raw = {
        name: found.read_other(path, table) for name, table in zip(table_names, tables, strict=True)
    }
    choice = request.choice
    listed = image_lists.listed_images(str(path), spelled, raw, choice, request.content)
    # A single folder above everything else is not part of the names, as for images without tables.
    cut = enter_top_folder([*spelled, *table_names], keep=0)
    names = [spelled[row][cut:] for row in listed.rows]
    if listed.label is not None:
        choice = replace(choice, label=listed.label)
    roles = read_roles(path, listed.columns, len(names), choice, names=names, splits=listed.splits)
    rows = np.array(listed.rows, dtype=np.int64)
    source = found.source(path, rows, context.within(path))
    how = f"images from {table_names[0]}"
    if len(tables) > 1:
        how = f"images from {len(tables)} tables such as {table_names[0]}"
    ignored = found.ignored + listed.ignored
    # The scan counted these tables as ignored files.
    ignored[tree.TABLE] -= len(tables)
    # A unary plus removes reasons with a count of 0.
    return _ImageRows(source, roles, how, +ignored)


def _from_list(path: Path, request: columns.DatasetRequest, context: Context) -> _ImageRows:
    """The images of a list, whose columns have the same meaning as in every table."""
    if context.layout is not None:
        raise UsageError(
            f"--layout {context.layout} was given, but {path} already has columns for label, domain and split.",
            "Leave --layout out",
        )
    listed = image_lists.read_list(path, request.content)
    # Links that lead out of the folder are left out unless the user follows them.
    paths = _inside(path, listed.paths, context)
    if not paths:
        raise UsageError(
            f"All {len(listed.paths):,} images of {path} are links to files outside its folder.",
            "To read them: --follow-links",
        )
    inside = set(paths)
    rows = [row for row, listed_path in enumerate(listed.paths) if listed_path in inside]
    table = listed.taken(rows)
    names = [tree.name_of(p) for p in paths]
    roles = read_roles(path, table, len(paths), request.choice, names=names)
    folder = path.parent
    source = tree.FilesSource(folder.absolute(), paths, context.within(folder))
    left_out = len(listed.paths) - len(paths)
    # A unary plus removes a count of 0.
    ignored = +Counter({tree.LINK_OUT: left_out})
    return _ImageRows(source, roles, f"images from {listed.column}", ignored)


def _inside(path: Path, listed: list[str], context: Context) -> list[str]:
    """The listed images, without links that lead out of the list's folder unless links are followed."""
    folder = path.parent
    real = tree.real_folder(context.within(folder))
    if real is None:
        return listed
    return [image for image in listed if not tree.leads_out(str(folder / image), real)]
