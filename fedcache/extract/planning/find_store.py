"""Finds the store that a command means, lists its unfinished arrays, and makes the command lines of hints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.config import (
    FILE_NAME,
    ExtractConfig,
    Home,
    is_store_address,
    option_words,
    read_file,
    resolve,
)
from fedcache.errors import (
    CorruptionError,
    FedcacheError,
    MachineError,
    StoreError,
    UsageError,
    closest,
    shell_word,
    unknown,
)
from fedcache.extract import datasets
from fedcache.extract.datasets import (
    Context,
    Dataset,
    facts_of,
    holds_of,
    known_names,
    open_dataset,
)
from fedcache.extract.planning.plan import memory_of
from fedcache.extract.recipe import slug
from fedcache.parsing import slug_of
from fedcache.plugins import bare_name
from fedcache.progress import Detail, Observer, Silent, progress_of
from fedcache.store.catalog import (
    extracted_later,
    folders_in,
    ingest_command,
    ingested_stores,
    is_ingested,
    last_store,
    place_of_content,
)
from fedcache.store.journal import journals
from fedcache.store.manifest import is_published, join_command, part_of, was_store
from fedcache.store.mirror import mirrored
from fedcache.store.samples import INGESTED, group_digests
from fedcache.store.store import Store, finished_arrays, replace_groups, store_by_name
from fedcache.tables.groups import Group


def resolve_path(home: Home, path: Path, *, to_read: bool = False) -> Path:
    """The path of a store that the user named by a path, or as ``fedcache ls`` does, with or without ``.zarr``.

    The working directory comes first, then the stores of the home, then the names of datasets; if none has the name,
    the path itself is returned. Unless ``to_read``, a store may be created at the path. So an existing file or folder
    at the path is returned even if it is no store, and the names of datasets are not searched.
    """
    places = [path]
    if path.name:
        places.append(path.with_name(f"{path.name}.zarr"))
    is_name = len(path.parts) == 1
    if is_name:
        places += [home.stores / place for place in places]
    for place in places:
        if was_store(place) or (place / "manifest.json").exists():
            return place
    if is_name and (to_read or not path.exists()):
        name = path.name.removeprefix(f"{INGESTED}:")
        ingested = ingested_stores(home).get(slug_of(name))
        if ingested is not None:
            return ingested
    if is_name and to_read:
        return Path(store_by_name(str(path), home))
    return path


def locate_store(
    home: Home,
    *,
    path: Path | str | None = None,
    dataset: str | None,
    observer: Observer | None = None,
) -> Path | None:
    """The store of ``--store``, else of ``--dataset``, else of fedcache.toml, else the last one; None without a store.

    For a published store, the path is the folder in the home that keeps what was read of the store. A damaged store is
    found too. A dataset's store is found by its remembered digest, so no image is read; an ingested one by its name,
    with or without ``ingested:``. If another dataset of the same content has put its groups into the store, the groups
    of this dataset replace them.

    Raises StoreError for a path that does not exist, and if the home has stores of several datasets and none is named;
    UsageError for an unknown dataset, or for a path together with a dataset.
    """
    if path is not None and dataset is not None:
        raise UsageError(
            "A store and --dataset are both given, but a store belongs to one dataset.",
            "Leave one of them out.",
        )
    if is_store_address(path):
        return mirrored(path)
    if path is not None:
        return _store_at(home, Path(path))
    if dataset is not None:
        named = store_of_dataset(home, dataset)
        if named is not None:
            return named
        ingested = ingested_path(home, dataset)
        if ingested is not None:
            if ingested.exists():
                return ingested
            return None
        for place, context in _places_of(home, dataset):
            bring_groups(place, dataset, context, observer or Silent())
            return place
        return None
    pinned = pinned_store()
    if pinned is not None:
        if observer is not None:
            (name,) = pinned.values()
            observer.note(Detail(f"Using dataset {name}, set by {FILE_NAME} of this folder."))
        return locate_store(
            home, path=pinned.get("store"), dataset=pinned.get("dataset"), observer=observer
        )
    last = last_store(home)
    if last is None:
        return None
    chosen, spec = last
    refuse_several_datasets(home, slug_in(chosen))
    if observer is not None:
        observer.note(
            Detail(
                f"Store: {chosen.name} ({spec}, the dataset extracted last; change with --dataset)."
            )
        )
        later = extracted_later(chosen)
        if later is not None:
            name = later.name
            observer.warn(
                f"The store {name} is newer than the store in use. To use the newer one: --store {shell_word(name)}"
            )
    # Errors are ignored, because the files of the dataset may be gone, and the store can be used without them.
    with suppress(UsageError, MachineError):
        for place, context in _places_of(home, spec):
            if place.resolve() == chosen.resolve():
                bring_groups(chosen, spec, context, observer or Silent())
                break
    return chosen


def _store_at(home: Home, path: Path) -> Path:
    """The folder of the store that a path or a name means. Raises StoreError if there is none."""
    place = resolve_path(home, path, to_read=True)
    if not place.exists():
        message = (
            f"There is no store {path}, neither in the working directory nor in {home.stores}."
        )
        near = closest(path.name, [store.name for store in home.stores.glob("*.zarr")])
        if near:
            message += f" Did you mean {near!r}?"
        raise StoreError(
            message,
            "fedcache ls   lists stores. To make a store:  fedcache extract --dataset digits --backbones "
            "efficientnet-lite0",
        )
    if is_published(place):
        return mirrored(place)
    return place


def _places_of(home: Home, dataset: str) -> Iterator[tuple[Path, Context]]:
    """The stores of a dataset that was opened before, each with the context in which it was opened."""
    for follow_links in (False, True):
        context = Context(memory_of(home), data=home.data, follow_links=follow_links)
        known = datasets.peek(dataset, context)
        if known is None:
            continue
        place = place_of_content(home, *known)
        # Without a whole store, the first part of one, whose error names the command that joins the parts.
        for found in [place, *sorted(place.parent.glob(f"{place.stem}.part-*.zarr"))]:
            if found.exists():
                yield found, context
                break


def need_path(
    home: Home,
    *,
    path: Path | str | None = None,
    dataset: str | None,
    observer: Observer | None = None,
) -> Path:
    """As ``locate_store``, but raises StoreError, with the command that makes a store, if there is none."""
    found = locate_store(home, path=path, dataset=dataset, observer=observer)
    if found is not None:
        return found
    of_dataset = ""
    if dataset:
        of_dataset = f"of {dataset} "
    else:
        unfinished = no_store_remembered(home)
        if unfinished is not None:
            raise unfinished
    spec = shell_word(dataset or "digits")
    raise StoreError(
        f"There is no store {of_dataset}under {home.stores} yet.",
        f"fedcache extract --dataset {spec} --backbones efficientnet-lite0",
    )


def store_of_dataset(home: Home, name: str) -> Path | None:
    """The store whose dataset has a name: ``photos`` of ``folder:photos``, or ``digits-300``; None for no such store.

    Raises UsageError if stores with different contents have the name.
    """
    # ``digits`` is the spec of a dataset, not only the name of one.
    if name == "digits" or not re.fullmatch(r"[\w.+-]+", name):
        return None
    found = [path for path in home.stores_of(name) if (path / "manifest.json").exists()]
    if len(found) > 1:
        names = [path.name for path in found]
        listed = ", ".join(names)
        raise UsageError(
            f"{name} matches {len(names)} stores: {listed}.",
            f"--store {shell_word(names[-1])}",
        )
    if found:
        return found[0]
    return None


def slug_in(path: Path) -> str:
    """The dataset in the name of a store, such as ``photos`` of ``photos-1a2b3c4d.zarr``; "" for other file names."""
    found = re.fullmatch(r"(.+)-[0-9a-f]{8}\.zarr", path.name)
    if found is None:
        return ""
    return found[1]


def pinned_store() -> dict[str, str] | None:
    """``store`` or ``dataset`` of ``[train]`` in the fedcache.toml of this folder; None if the file names neither."""
    section = read_file(None).get("train", {})
    for key in ("store", "dataset"):
        if section.get(key):
            return {key: str(section[key])}
    return None


def refuse_several_datasets(home: Home, latest: str = "") -> None:
    """Raise StoreError if the home has stores of several datasets, so that a command must name one.

    The hint names the dataset ``latest`` if the home has a store of it, else the first one. A store counts too if its
    manifest is damaged or that of another store, because it may be the one that is meant.
    """
    slugs = set()
    folders = set()
    for place in folders_in(home.stores):
        try:
            store = Store.open(place, part=True)
        except FedcacheError as error:
            if isinstance(error, CorruptionError) or was_store(place):
                folders.add(slug_in(place))
            continue
        if finished_arrays(store) and part_of(store.dataset) is None:
            slugs.add(str(store.dataset["slug"]))
            folders.add(slug_in(place))
    names = sorted(slugs)
    unclear = sorted(folders - slugs - {""})
    shown = names + [f"{name} (its manifest is damaged or of another dataset)" for name in unclear]
    if not names or len(shown) < 2:
        return
    listed = ", ".join(shown)
    count = len(shown)
    example = shell_word(names[0])
    if latest in slugs:
        example = shell_word(latest)
    raise StoreError(
        f"No dataset was given, and {home.stores} has stores of {count} datasets: {listed}.",
        f"Add --dataset {example}, or choose a dataset for this folder:  fedcache use {example}",
    )


def no_store_remembered(home: Home) -> FedcacheError | None:
    """The error for a command without a store if stores exist but none is finished, as after a stopped extraction.

    A StoreError with the names and the commands that continue; None when the home has no store.
    """
    paths = sorted(home.stores.glob("*.zarr"))
    if not paths:
        return None
    shown = []
    example = shell_word(paths[0].name)
    hints = [
        f"Choose a store, for example:  fedcache inspect {example}   (other commands take --store NAME)",
    ]
    for path in paths:
        try:
            store = Store.open(path, part=True)
            part = part_of(store.dataset)
            begun = unfinished_arrays_of(store, home)
        except FedcacheError:
            shown.append(f"{path.name} (damaged)")
            continue
        if part is not None:
            shown.append(f"{path.name} ({part})")
            hints.append(f"When all parts are finished:  {join_command(path)}")
            continue
        state = ""
        if begun:
            state = " (unfinished)"
        elif not store.arrays:
            state = " (empty)"
        shown.append(path.name + state)
        hints += [f"To resume:  {array.command(store, home)}" for array in begun]
    stores = ", ".join(shown)
    return StoreError(
        f"There is no finished extraction. Stores in {home.stores}: {stores}.",
        "\n".join(dict.fromkeys(hints)),
    )


def need_store(
    home: Home,
    *,
    path: Path | str | None,
    dataset: str | None = None,
    observer: Observer | None = None,
    part: bool = False,
) -> Store:
    """The store at ``need_path``; with ``part`` it may be a part of one. CorruptionError for a damaged store."""
    found = need_path(home, path=path, dataset=dataset, observer=observer)
    return Store.open(found, part=part)


def ingested_path(home: Home, spec: str) -> Path | None:
    """The store of ``ingested:NAME``, or of NAME unless that is a dataset of its own; None for anything else.

    Raises UsageError, with "did you mean", for a name that is similar to an ingested one.
    """
    kind, colon, rest = spec.partition(":")
    explicit = bool(colon) and kind == INGESTED
    if not explicit and (colon or "=" in spec or spec == "digits"):
        return None
    found = ingested_stores(home)
    name = spec
    if explicit:
        name = rest
    known = slug_of(name)
    if known in found:
        return found[known]
    datasets_by_spec = []
    if not explicit:
        datasets_by_spec = known_names()
    if explicit or closest(name, [*datasets_by_spec, *found]) in found:
        ingested = ", ".join(found) or "nothing yet"
        example = shell_word(name or "NAME")
        hint = f"Ingested datasets: {ingested}. To ingest another file:  fedcache ingest FILE --name {example}"
        raise unknown("dataset", name, [*found, *datasets_by_spec], hint=hint)
    return None


def more_features(
    store: Store, backbone: str, key: str = "features/NAME", recipe: Mapping[str, str] | None = None
) -> str:
    """The command that adds missing features to a store: an extraction, or an ingest for a store of embeddings."""
    if is_ingested(store):
        return f"Add {key} to the file, then:  {ingest_command(store)}"
    if store.address is not None:
        return "Extract them into the store that was published, and publish it again."
    return extract_command(store, [backbone], recipe)


def extract_command(
    store: Store,
    backbones: Sequence[str],
    recipe: Mapping[str, str] | None = None,
    home: Home | None = None,
) -> str:
    """The command that adds arrays to a store; it names the store only if its dataset does not lead to it.

    A store contains no paths, so the options for its dataset are those that this home remembers. If the home remembers
    none, as for a store from another machine, a clause behind the command says what to add.
    """
    home = home or Home.from_environment()
    known = dataset_of_store(store, home)
    order = replace(known or ExtractConfig(), backbones=tuple(backbones), recipe=dict(recipe or {}))
    if known is None:
        words = ["fedcache", "extract", "--store", str(store.path), *option_words(order)]
        return f"{shlex.join(words)}, with --dataset and the other options of the first extraction"
    return _command_of(order, store, home)


def _command_of(order: ExtractConfig, store: Store, home: Home) -> str:
    """The command of an extraction into a store, with --store if its dataset does not lead to it."""
    words = ["fedcache", "extract", *option_words(order)]
    usual = place_of_content(home, store.dataset["slug"], store.content)
    if store.path.resolve() != usual.resolve():
        words += ["--store", str(store.path)]
    return shlex.join(words)


READ_WITH = ("dataset", "limit", "layout", "follow_links", "data", "name")
"""Options of an extraction that say how its dataset is read."""


def dataset_of_store(store: Store, home: Home) -> ExtractConfig | None:
    """The options that name a store's dataset; None when they are unknown.

    They are remembered from the extraction of one of its arrays; the dataset ``digits`` is recognised by its content.
    """
    for array in store.arrays.values():
        _, order = _remembered_order(store, array.digest, home)
        if order is not None:
            options = {key: getattr(order, key) for key in READ_WITH}
            return ExtractConfig(**options, max_bad=order.max_bad)
    # ``digits-300`` is the slug of digits with --limit 300.
    name, _, size = str(store.dataset["slug"]).partition("-")
    limit = None
    if size.isdecimal():
        limit = int(size)
    # (slug, content digest), or None.
    known = datasets.peek("digits", Context(memory_of(home), limit=limit))
    if name == "digits" and known is not None and known[1] == store.content:
        return ExtractConfig(dataset="digits", limit=limit)
    return None


def _remembered_order(
    store: Store, recipe_digest: str, home: Home
) -> tuple[str | None, ExtractConfig | None]:
    """The label of the array with this recipe digest, and the options of the extraction that began the array.

    Both are None if this home did not extract the array. Only the options are None if another version of fedcache wrote
    an option that this version does not know.
    """
    label = None
    order = None
    fact = memory_of(home).recall(["order", store.dataset["digest"], recipe_digest])
    with suppress(FedcacheError):
        if isinstance(fact, list):
            label = str(fact[0])
            order = resolve(ExtractConfig, fact[1], {})
    return label, order


@dataclass(frozen=True)
class UnfinishedArray:
    """An unfinished feature array: begun by an extraction, or opened again by ``repair``."""

    key: str  # of the array
    missing: int  # chunks still to be computed
    chunks: int  # in all
    label: str | None  # ``backbone@size``; None when this home did not extract it
    order: ExtractConfig | None  # the extraction that completes it; None as for ``label``

    @property
    def backbone(self) -> str:
        """The name of its backbone, or the slug of the name if the order is unknown."""
        if self.order:
            return self.order.backbones[0]
        return self.key.rpartition("-")[0]

    def means(self, name: str) -> bool:
        """Whether a word of ``--backbones`` may mean this array: its key, ``BACKBONE`` or ``BACKBONE@SIZE``."""
        if name == self.key:
            return True
        bare = bare_name(name)
        backbone, at, _ = bare.partition("@")
        if slug(backbone) != slug(self.backbone):
            return False
        return not at or self.label in (None, bare)

    def state(self, store: Store) -> str:
        """A clause for messages."""
        return f"{self.key} in {store.path} is unfinished: {self.missing} of {self.chunks} chunks are missing"

    def command(self, store: Store, home: Home) -> str:
        """The extract command that computes what is missing, and only that."""
        if self.order is None:
            if is_ingested(store):
                return ingest_command(store)
            return extract_command(store, [self.backbone], home=home)
        return _command_of(self.order, store, home)


def unfinished_arrays_of(store: Store, home: Home) -> list[UnfinishedArray]:
    """The unfinished feature arrays of a store; images (``pixels``) are left out."""
    found = []
    for journal in journals(store.path):
        header = journal.header
        if header is None or header["dtype"] == "uint8" or journal.key in store.arrays:
            continue
        label, order = _remembered_order(store, header["recipe"], home)
        missing = journal.count - len(journal.chunks)
        found.append(UnfinishedArray(journal.key, missing, journal.count, label, order))
    return found


# Groups are no part of a dataset's content, so two datasets that differ in nothing else share one store. A command that
# names one of them replaces the groups of the other, and notes the change.


def bring_groups(
    path: Path, spec: str, context: Context, observer: Observer, data: Dataset | None = None
) -> None:
    """Give the store at ``path`` the groups of a dataset with the same content.

    ``data`` is the dataset if it is in the memory of a program; None to open it, which happens only if the store has
    other groups. A damaged store stays as it is. Raises as ``open_dataset``, and StoreError for a store that cannot be
    written.
    """
    try:
        store = Store.open(path)
    except FedcacheError:
        return  # the command that opens it next reports the damage
    if data is None:
        if context.memory.recall(_group_key(store, spec, context)) == group_digests(store.manifest):
            return
        data = open_with_progress(spec, context, observer)
    keep_groups(store, groups_in_order(store, data), spec, observer)
    remember_groups(store, spec, context)


def open_with_progress(spec: str, context: Context, observer: Observer) -> Dataset:
    """``open_dataset``, with a progress bar for the rows that are read."""
    with progress_of(observer, "reading", holds_of(spec)) as progress:
        return open_dataset(spec, replace(context, progress=progress))


def remember_groups(store: Store, spec: str, context: Context) -> None:
    """Remember that the groups of a store are those of a dataset.

    Nothing is remembered for images that a program holds, nor in a home that cannot be written. Their groups are
    compared again the next time.
    """
    with suppress(FedcacheError, OSError):
        context.memory.remember(_group_key(store, spec, context), group_digests(store.manifest))


def groups_in_order(store: Store, data: Dataset) -> dict[str, Group]:
    """The groups of a dataset in the order of a store's rows, which differs from the dataset's if the store grew."""
    if store.dataset["digest"] == data.digest:
        return dict(data.groups)
    row_of = {
        (name, uid.tobytes()): row
        for row, (name, uid) in enumerate(zip(data.names, data.uid, strict=True))
    }
    samples = store.samples
    rows = [
        row_of.get((name, uid.tobytes()), -1)
        for name, uid in zip(samples.name, samples.uid, strict=True)
    ]
    order = np.array(rows, np.int64)
    return {name: group.take(order) for name, group in data.groups.items()}


def keep_groups(store: Store, groups: Mapping[str, Group], spec: str, observer: Observer) -> None:
    """Replace the groups of a store by ``groups``, and report the changes."""
    before = set(store.groups)
    has_arrays = bool(store.arrays)
    changed, gone = replace_groups(store, groups)
    name = store.path.name
    if has_arrays and changed:
        columns = ", ".join(changed)
        # New groups are a note. Groups whose values were replaced are a warning.
        report = observer.note
        if before & set(changed):
            report = observer.warn
        report(
            f"Columns updated in {name} to the values of {spec}: {columns}. Existing partitions do not change."
        )
    if gone:
        columns = ", ".join(gone)
        observer.warn(
            f"Columns removed from {name}, because {spec} does not have them: {columns}. To add removed columns again, "
            "extract a dataset that has them."
        )


def _group_key(store: Store, spec: str, context: Context) -> list[Any]:
    """The key under which ``remember_groups`` stores a fact."""
    return ["groups", *facts_of(spec, context), store.dataset["digest"]]
