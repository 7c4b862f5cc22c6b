"""``ingest``: a file of embeddings becomes a store that is found by its name."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.config import Home
from fedcache.errors import FedcacheError, UsageError
from fedcache.extract.backbones.checkpoints import load_torch
from fedcache.extract.planning.find_store import ingested_path, resolve_path
from fedcache.parsing import counted
from fedcache.progress import Observer, Silent
from fedcache.store.catalog import (
    clean_up,
    holds_content,
    holds_part_of,
    ingest_command,
    ingested_stores,
    is_ingested,
    remember_last,
    store_option,
)
from fedcache.store.content import NOT_FINITE_HINT, Content, arrange, usable_name
from fedcache.store.files import digest_of, make_private, temporary_name
from fedcache.store.lock import hold_lock
from fedcache.store.manifest import was_store
from fedcache.store.samples import INGESTED
from fedcache.store.store import Store, put_groups
from fedcache.tables.embeddings import Embeddings, assemble, open_embeddings
from fedcache.tables.foreign_files import BEGIN, ONE_OBJECT, refused_file
from fedcache.tables.roles import ColumnChoice, need_labels
from fedcache.tables.words import Unread, as_column, ending_of, objects_of

# A torch file holds embeddings as a dict of tensors, lists and numbers by name, which ``torch.save`` has written.
# ``load_torch`` opens the file, because that function never runs code from a file.

ENDINGS = (".pt", ".pth")


def open_any(path: Path, choice: ColumnChoice) -> Embeddings:
    """Open a file of embeddings of any format, including torch's. Raises the errors of ``open_embeddings``."""
    if ending_of(path) not in ENDINGS or not path.is_file():
        return open_embeddings(path, choice)
    return assemble(path, read_torch(path), choice)


def read_torch(path: Path) -> dict[str, Any]:
    """Columns by name. Raises UsageError for a file with other content."""
    try:
        loaded = load_torch(path)
    except FedcacheError as error:
        raise refused_file(path, ".pt") from error
    columns = _columns(loaded, "")
    # A value that is no column has the shape ().
    if not any(column.shape for column in columns.values()):
        raise refused_file(path, ".pt")
    return columns


def _columns(loaded: Any, prefix: str) -> dict[str, Any]:
    """Columns of a tensor, of (features, labels), or of a dict, which may have one dict for each split.

    ``prefix`` is the path of the value in the file, with a slash at its end; "" for the whole file.
    """
    import torch

    name_of_value = prefix.removesuffix("/")
    if isinstance(loaded, torch.Tensor):
        values = loaded.detach().cpu()
        if values.dtype == torch.bfloat16:
            values = values.float()
        return {name_of_value or "features": as_column(values.numpy())}
    is_pair = isinstance(loaded, tuple | list) and len(loaded) == 2
    if is_pair and all(isinstance(part, torch.Tensor) for part in loaded):
        features, labels = loaded
        return _columns(features, f"{prefix}features/") | _columns(labels, f"{prefix}labels/")
    if isinstance(loaded, Mapping):
        columns: dict[str, Any] = {}
        for name, value in loaded.items():
            columns |= _columns(value, f"{prefix}{name}/")
        # Only columns have a shape. A nested dict without any column counts as one value.
        if any(column.shape for column in columns.values()) or not prefix:
            return columns
    if prefix and isinstance(loaded, Sequence) and not isinstance(loaded, str | bytes):
        return {name_of_value: _column_of_list(loaded)}
    # A value that is no column, such as the number of an epoch.
    why = "one value"
    if isinstance(loaded, Mapping):
        why = ONE_OBJECT
    return {name_of_value: Unread((), type(loaded).__name__, why)}


def _column_of_list(values: Sequence[Any]) -> Any:
    """A list of words or numbers, or of rows of the same length."""
    import torch

    if values and all(isinstance(value, torch.Tensor) for value in values):
        rows = [value.detach().cpu().float().numpy() for value in values]
        if len({row.shape for row in rows}) == 1:
            return as_column(np.stack(rows))
    return objects_of(values)


@dataclass(frozen=True)
class Ingested:
    """A store of a file of embeddings."""

    store: Store
    notes: list[str]  # sentences on the meaning of columns, and on groups that have changed
    left_out: dict[str, str]  # columns that are not used, and why


def ingest_file(
    home: Home,
    file: Path,
    name: str,
    path: Path | None,
    *,
    replace: bool,
    choice: ColumnChoice,
    drop_nan: bool,
    observer: Observer | None,
) -> Ingested:
    """Write a file of embeddings into a store, which becomes the default store of later commands.

    If the store of this name has the same content already, only its groups change: the groups of the file replace
    stored groups of the same names. The store is in the home unless ``path`` is given. With ``replace``, other content
    under this name is removed, with its partitions. ``choice`` assigns roles to columns. With ``drop_nan``, rows whose
    features are not finite are kept as unreadable.

    Raises UsageError for a name without a letter or digit, for a name with other content, and for a file that cannot be
    read; CorruptionError for non-finite features.
    """
    observer = observer or Silent()
    slug = usable_name(name)
    words = ["fedcache", "ingest", str(file), "--name", name]
    if path:
        words += ["--store", str(path)]
    same_command = shlex.join([*words, *choice.options()])
    try:
        embeddings = open_any(file, choice)
        if embeddings.may_be_labels:
            raise need_labels(file.name, embeddings.may_be_labels)
        for line in embeddings.notes:
            observer.note(line)
        content = arrange(embeddings, name, drop_nan=drop_nan, observer=observer)
    except FedcacheError as error:
        # A hint with another command, with lines of Python (``BEGIN``) or with an option says already how to continue.
        other_command = error.hint.startswith(("fedcache extract", BEGIN))
        other_option = "--" in error.message + error.hint
        hint = error.hint
        if error.hint == NOT_FINITE_HINT:
            hint = f"Fix these rows of the file, or leave them out:  {same_command} --drop-nan"
        elif file.is_file() and not other_command and not other_option:
            # Any other hint says how to change the file; then the same command works.
            hint = f"{error.hint}\nThen:  {same_command}"
        raise FedcacheError(error.code, error.message, hint) from error
    with _ingest_lock(home, slug, path, replace=replace):
        target, old = _place(home, path, slug, content)
        notes = list(embeddings.notes)
        if old is None or not is_ingested(old):
            # Raises an error if ``old`` is a store of images.
            made = Store.from_content(content, target, observer)
        elif holds_content(old, content):
            change = _changed_groups(old, content)
            if change:
                notes.append(change)
            observer.note(change or f"{name} exists already, with the same content. Nothing to do.")
            made = old
        elif holds_part_of(old, content):
            # An interrupted ingest left the store incomplete; the missing arrays are added.
            made = Store.from_content(content, old.path, observer)
        elif replace:
            observer.note(f"Replacing {old.path} ({old.rows:,} rows). Its partitions are deleted.")
            made = _replaced(old.path, content, target, observer)
        else:
            rows = len(content.samples.name)
            raise UsageError(
                f"{old.dataset['slug']} is already a dataset of {old.rows:,} rows ({old.path}), but "
                f"{file} has other content ({rows:,} rows).",
                f"Choose another --name, or replace the dataset and delete its partitions:  {same_command} --replace",
            )
    clean_up(made)  # removes the journal of an earlier call that was killed
    remember_last(home, made.path, f"{INGESTED}:{name}")
    return Ingested(made, notes, embeddings.unused)


@contextmanager
def _ingest_lock(home: Home, slug: str, path: Path | None, *, replace: bool) -> Iterator[None]:
    """A context in which no other ``ingest`` reads, writes or replaces the store of a name; others wait."""
    if path is not None and not replace:
        yield  # the writers of one store wait for each other anyway
        return
    make_private(home.root)
    lock_name = slug
    if path is not None:
        lock_name = digest_of(str(resolve_path(home, path)))[:16]
    with hold_lock(
        home.root / "locks" / f"ingest-{lock_name}.lock", f"the dataset {slug}", wait=True
    ):
        yield


def _place(home: Home, path: Path | None, slug: str, content: Content) -> tuple[Path, Store | None]:
    """The path for a store of this content, and the store that has its name or path already; None without one."""
    if path is None:
        make_private(home.root)
        make_private(home.stores)
        target = home.store(slug, content.dataset["digest"])
        found = ingested_stores(home).get(slug)
    else:
        target = found = resolve_path(home, path)
    if found is None or not was_store(found):
        return target, None
    return target, Store.open(found)


def _changed_groups(store: Store, content: Content) -> str:
    """Put the groups of a file into a store whose other columns are the same.

    Returns a sentence on what changed; "" for nothing.
    """
    before = store.groups
    changed = ", ".join(put_groups(store, content.groups))
    new = ", ".join(name for name in store.groups if name not in before)
    differences = []
    if new:
        differences.append(f"new groups {new}")
    if changed:
        differences.append(f"other values of the groups {changed}")
    if not differences:
        return ""
    listed = " and ".join(differences)
    return f"{store.path.name} has the same features and labels. fedcache stored {listed} in it."


def _replaced(old: Path, content: Content, target: Path, observer: Observer) -> Store:
    """Replace a store: the new one is complete before the old one is renamed and then removed."""
    new = target
    if target == old:
        new = temporary_name(target)
    Store.from_content(content, new, observer)
    discarded = temporary_name(old)
    old.rename(discarded)
    if new != target:
        new.rename(target)
    shutil.rmtree(discarded)
    return Store.open(target)


def describe_ingested(store: Store, home: Home, name: str) -> tuple[list[str], str]:
    """Sentences on the content of an ingested store, and the next command."""
    samples = store.samples
    counts = {
        word: int(((samples.split == code) & (samples.ok == 1)).sum())
        for code, word in enumerate(("train", "test", "validation"))
    }
    parts = ", ".join(f"{number:,} {word}" for word, number in counts.items() if number)
    rows = counted(store.rows, "row")
    classes = counted(len(samples.classes), "class")
    arrays = ", ".join(sorted(store.arrays))
    lines = [f"{rows} ({parts}), {classes}: {arrays}"]
    left_out = store.rows - store.rows_ok
    if left_out > 0:
        lines.append(f"{left_out:,} rows are left out; `fedcache inspect` lists them.")
    if "held_out" in store.dataset and counts["test"]:
        lines.append(f"No test set given: {store.dataset['held_out']} is the test set.")
    has_label = samples.label[(samples.split == 0) & (samples.ok == 1)] >= 0
    for word in ("train", "test"):
        if not counts[word]:
            lines.append(
                f"There are no {word} rows, so no method can be trained and scored. Add rows to classes that have "
                "only one row."
            )
            return lines, ingest_command(store)
    if not has_label.any() and not store.texts:
        lines.append(
            "This store has neither labels nor text features, and every method needs one of them."
        )
        return lines, ingest_command(store)
    method = "clip-zs"
    if has_label.any():
        method = "fedavg"
    # The prefix is needed if NAME alone is another dataset.
    spec = name
    if ingested_path(home, name) is None:
        spec = f"{INGESTED}:{name}"
    store_words = store_option(store) or ["--dataset", spec]
    some_labelled = has_label.any() and not has_label.all()
    column = column_of_clients(store)
    if column is not None:
        partition = ["--by", column]
        if some_labelled:
            partition += ["--option", "unlabelled=drop"]
    else:
        # iid would assign rows without a label too; dirichlet leaves them out.
        scheme = "iid"
        if some_labelled:
            scheme = "dirichlet"
        clients = max(1, min(5, counts["train"] // 2))
        partition = ["--scheme", scheme, "--clients", str(clients)]
    return lines, shlex.join(["fedcache", "train", "--method", method, *partition, *store_words])


_HOLDERS = (
    "client site hospital clinic center centre institution user writer speaker "
    "patient device sensor camera node owner store branch bank school farm"
)
HOLDERS = tuple(_HOLDERS.split())
"""Parts of column names that suggest clients, such as ``hospital``."""


def column_of_clients(store: Store) -> str | None:
    """The group that most likely says which client holds which rows; None if no group qualifies.

    It has at least two values, and a median of at least four rows per value. Groups whose names are usual for holders
    of data come first. Then groups of words come before groups of numbers, which are more often measurements. Then the
    order of the store counts.
    """
    likely = []
    for name in store.groups:
        group = store.group(name)
        rows = np.bincount(group.codes[group.codes >= 0], minlength=len(group.words))
        if len(rows) >= 2 and float(np.median(rows)) >= 4:
            usual_name = any(word in name.lower() for word in HOLDERS)
            are_numbers = all(
                word.lstrip("-").replace(".", "", 1).isdigit() for word in group.words
            )
            likely.append((not usual_name, are_numbers, name))
    if not likely:
        return None
    _, _, best = min(likely, key=lambda group: group[:2])
    return best
