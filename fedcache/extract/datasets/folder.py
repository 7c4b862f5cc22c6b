"""``folder:PATH``: a directory, a .zip or a .tar of images read in place, or a CSV that lists them.

The same tree as a directory, zip and tar has the same names, uids and digest. Hidden files, ``__MACOSX`` and files
that are no images by their extension are left out and counted; a file that cannot be read keeps its row and is
quarantined when it is extracted.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import UsageError
from fedcache.extract.datasets import archives, columns, dataset, tree
from fedcache.extract.datasets.columns import complete_split
from fedcache.extract.datasets.dataset import Context, Dataset, Source
from fedcache.extract.datasets.folder_labels import Labels, enter_top_folder, infer, parse_layout, read_csv
from fedcache.extract.digests import stat_key
from fedcache.extract.image_files import EXTENSIONS
from fedcache.extract.recipe import slug as safe
from fedcache.store.files import digest_of
from fedcache.tables.groups import Group
from fedcache.tables.roles import ColumnChoice, read_roles
from fedcache.tables.words import Words

_SUFFIXES = (".zip", ".tar", ".csv")


_Rows = tuple[list[str], Labels, Source, str, Counter[str]]
"""Names in their order, labels, source, how they were read, and what was ignored: before uids and splits are known."""


def key(rest: str, context: Context) -> list[Any]:
    """What the answer depends on, without reading an image: the stat of the archive or of every file."""
    asked = _asked(rest)
    path = _locate(asked.place)
    head = [_kind(path), str(path.resolve()), _slug(path), context.layout, *asked.facts]
    if path.is_dir():
        return [*head, tree.listing_digest(path, context.within(path))]
    if _kind(path) == ".csv":
        listed, _ = read_csv(path)
        stats = [tree.stat_numbers(path.parent / p) for p in _inside(path, listed, context)]
        return [*head, stat_key(path), digest_of(stats)]
    return [*head, stat_key(path)]


def load(rest: str, context: Context) -> Dataset:
    """The dataset of ``folder:PATH``.

    Raises UsageError for a missing path or folders without a clear meaning, CorruptionError for a bad archive.
    """
    asked = _asked(rest)
    path = _locate(asked.place)
    facts = key(rest, context)  # before the images are read: a change in between must not go unnoticed
    if _kind(path) == ".csv":
        return _from_csv(rest, path, asked.choice, facts, context)
    names, labels, source, how, ignored = _from_tree(path, context)
    uid, unreadable = dataset.read_uids(source, names, facts, context)
    classes, index = dataset.index_of(labels.classes)
    label = index.astype(np.int32)
    domains, domain_index = dataset.index_of(labels.domains)
    domain = dataset.domain_column(domain_index, domains)
    given = None if labels.splits is None else np.array(labels.splits, dtype=np.uint8)
    split, note = complete_split(given, label, domain, uid, path)
    reading = f"{path.name or path}: {how}; {dataset.counts(split, classes, domains)}"
    if note:
        reading += f"; {note}"
    groups = {name: Group.of(words) for name, words in labels.groups.items()}
    if groups:
        reading += "; " + ", ".join(f"{name}: {len(group.words):,} values" for name, group in groups.items())
    if unreadable:
        reading += f"; {unreadable:,} cannot be read and will be quarantined"
    return Dataset(
        spec=f"folder:{rest}",
        slug=_slug(path),
        classes=classes,
        domains=domains,
        names=tuple(names),
        label=label,
        domain=domain,
        split=split,
        uid=uid,
        template=None,
        reading=reading + tree.ignored_text(ignored),
        source=source,
        groups=groups,
        links_left_out=ignored[tree.LINK_OUT],
    )


def _locate(rest: str) -> Path:
    path = Path(rest).expanduser()
    if not rest or not path.exists():
        raise UsageError(
            f"There is no {str(path) if rest else 'path'!r} (seen from {Path.cwd()}); "
            f"expected a directory or a {', '.join(_SUFFIXES)} file.",
            "Give the path of the images: --dataset folder:PATH",
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
    return "directory" if path.is_dir() else path.suffix.lower()


def _slug(path: Path) -> str:
    full = Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute keeps "..", Path.resolve follows links
    return safe(full.name if path.is_dir() else full.stem)[:64].lstrip(".") or "folder"


def _from_tree(path: Path, context: Context) -> _Rows:
    within = context.within(path)
    found = tree.scan(path, within)
    if not found.paths:
        raise UsageError(
            f"{path} holds no images{tree.ignored_text(found.ignored)}; "
            f"expected files ending in {', '.join(sorted(EXTENSIONS))}.",
            "Give the directory or archive that contains the images, one folder per class",
        )
    spelled = [tree.name_of(p) for p in found.paths]
    keep = 1 if context.layout is None else len(parse_layout(context.layout))
    cut = enter_top_folder(spelled, keep)
    order = np.array(sorted(range(len(spelled)), key=spelled.__getitem__), dtype=np.int64)
    names = [spelled[i][cut:] for i in order]
    for a, b in pairwise(names):
        if a == b:
            raise UsageError(f"{path} has two files named {a!r}; names must differ.", "Rename or remove one of them")
    labels = infer(names, context.layout, where=str(path))
    source: Source
    if found.entries is None:
        source = tree.FilesSource(path.absolute(), [found.paths[i] for i in order], within)
    else:
        source = archives.ArchiveSource(found.entries.take(order))
    inside = f" inside {spelled[0][: cut - 1]}" if cut else ""
    return names, labels, source, f"read as {labels.layout}{inside}", found.ignored


def _asked(rest: str) -> columns.Asked:
    """The path of a spec, and the columns that it names. Raises UsageError for columns of what is no CSV."""
    asked = columns.parse_rest(rest, "folder")
    if asked.said and _kind(Path(asked.place)) != ".csv":
        raise UsageError(
            f"{asked.place} is not a CSV, and only a CSV has columns to name.", "--layout names the levels of folders"
        )
    return asked


def _from_csv(rest: str, path: Path, choice: ColumnChoice, facts: list[Any], context: Context) -> Dataset:
    """The dataset of a CSV that lists images, whose columns mean what they do in every table."""
    if context.layout is not None:
        raise UsageError(
            f"--layout {context.layout} was given, but {path} itself says what label, domain and split are.",
            "Leave --layout out",
        )
    listed, words = read_csv(path)
    paths = _inside(path, listed, context)
    if not paths:
        raise UsageError(
            f"All {len(listed):,} images of {path} are links that lead out of its folder.", "--follow-links reads them"
        )
    kept = set(paths)
    rows = [row for row, listed_path in enumerate(listed) if listed_path in kept]
    table = {name: Words.of([column[row] for row in rows]).typed() for name, column in words.items()}
    names = [tree.name_of(p) for p in paths]
    roles = read_roles(path, table, len(paths), choice, names=names)
    source = tree.FilesSource(path.parent.absolute(), paths, context.within(path.parent))
    made = columns.dataset_of_rows(
        f"folder:{rest}", path, source, roles, {}, how="images from path", facts=facts, context=context
    )
    left_out = len(listed) - len(paths)
    ignored = Counter({tree.LINK_OUT: left_out} if left_out else {})
    return replace(made, reading=made.reading + tree.ignored_text(ignored), links_left_out=left_out)


def _inside(path: Path, listed: list[str], context: Context) -> list[str]:
    """Of the images that a CSV lists, those that do not lead out of its folder."""
    within = context.within(path.parent)
    if within is None:
        return listed
    real = os.path.realpath(within)
    return [p for p in listed if not tree.leads_out(str(path.parent / p), real)]
