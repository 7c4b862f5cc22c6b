"""Search for the store that a command means, its unfinished parts, and the command lines for hints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.config import (
    FILE_NAME,
    ExtractConfig,
    Home,
    is_store_address,
    option_name,
    read_file,
    resolve,
)
from fedcache.errors import (
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
    finished_stores,
    ingest_command,
    ingested_stores,
    is_ingested,
    last_store,
    place_of_content,
)
from fedcache.store.journal import journals
from fedcache.store.manifest import is_published, part_of, was_store
from fedcache.store.mirror import mirrored
from fedcache.store.samples import INGESTED, group_digests
from fedcache.store.store import Store, replace_groups, store_by_name
from fedcache.tables.groups import Group


def resolve_path(home: Home, path: Path, *, to_read: bool = False) -> Path:
    """A store as the user wrote it: a path, or a name of ``fedcache ls`` with or without ``.zarr``.

    The working directory comes first, then the stores of the home, then the names of datasets; where none has
    the name, the path itself is returned. What is here and no store is meant all the same, unless ``to_read`` says
    that nothing is to be made there.
    """
    bare = len(path.parts) == 1
    if path.name:
        places = [path, path.with_name(f"{path.name}.zarr")]
    else:
        places = [path]
    if bare:
        places += [home.stores / place for place in places]
    found = next((p for p in places if was_store(p) or (p / "manifest.json").exists()), None)
    if found is None and bare and (to_read or not path.exists()):
        found = ingested_stores(home).get(slug_of(path.name.removeprefix(f"{INGESTED}:")))
    if found is None and bare and to_read:
        found = Path(store_by_name(str(path), home))
    if found is None:
        return path
    return found


def locate_store(
    home: Home,
    *,
    path: Path | str | None = None,
    dataset: str | None = None,
    observer: Observer | None = None,
) -> Path | None:
    """``--store``, else the store of ``--dataset``, else that of fedcache.toml, else the only one; None for none yet.

    Of a published store it is the folder of the home that holds what was read. A damaged store can be named too.
    A dataset's store is found from its remembered digest, so no image is read; an
    ingested one by its name, with or without ``ingested:``. Where another dataset of the same content has put its
    groups there, those of the one that is meant are put in their place.

    Raises StoreError for a path where nothing is, and for several datasets of which none is named; UsageError for a
    dataset that is not known, or one next to a path.
    """
    if path is not None and dataset is not None:
        raise UsageError(
            "A store and --dataset are both given, but a store belongs to one dataset.",
            "Leave one of them out.",
        )
    if is_store_address(path):
        return mirrored(path)
    if path is not None:
        path = Path(path)
        place = resolve_path(home, path, to_read=True)
        if not place.exists():
            message = (
                f"There is no store {path}, neither in the working directory nor in {home.stores}."
            )
            near = closest(path.name, [p.name for p in home.stores.glob("*.zarr")])
            if near:
                message += f" Did you mean {near!r}?"
            raise StoreError(
                message,
                "fedcache ls   lists stores. To make one:  fedcache extract --dataset digits --backbones "
                "efficientnet-lite0",
            )
        if is_published(place):
            return mirrored(place)
        return place
    if dataset is not None:
        if (named := store_of_dataset(home, dataset)) is not None:
            return named
        found = ingested_path(home, dataset)
        if found is not None:
            if found.exists():
                return found
            return None
        for found, where in _places_of(home, dataset):
            bring_groups(found, dataset, where, observer or Silent())
            return found
        return None
    if (pinned := pinned_store()) is not None:
        if observer is not None:
            (chosen_name,) = pinned.values()
            observer.note(
                Detail(f"Dataset {chosen_name}: the one that {FILE_NAME} of this folder names.")
            )
        return locate_store(
            home, path=pinned.get("store"), dataset=pinned.get("dataset"), observer=observer
        )
    last = last_store(home)
    if last is None:
        return None
    if (unclear := several_datasets(home)) is not None:
        raise unclear
    chosen, spec = last
    if observer is not None:
        observer.note(
            Detail(
                f"Store: {chosen.name} ({spec}, the dataset extracted last; change with --dataset)."
            )
        )
        if (later := extracted_later(chosen)) is not None:
            name = later.name
            observer.warn(
                f"{name} was extracted later than the store in use. To use it: --store {shell_word(name)}"
            )
    # the files of a dataset may be gone: the store is what is meant
    with suppress(UsageError, MachineError):
        for found, where in _places_of(home, spec):
            if found.resolve() == chosen.resolve():
                bring_groups(chosen, spec, where, observer or Silent())
                return chosen
    return chosen


def _places_of(home: Home, dataset: str) -> Iterator[tuple[Path, Context]]:
    """The stores of a dataset that was opened before, and what it was opened with."""
    for follow_links in (False, True):
        where = Context(memory_of(home), data=home.data, follow_links=follow_links)
        known = datasets.peek(dataset, where)
        if known is None:
            continue
        found = place_of_content(home, *known)
        if found.exists():
            yield found, where


def need_path(
    home: Home,
    *,
    path: Path | str | None = None,
    dataset: str | None = None,
    observer: Observer | None = None,
) -> Path:
    """``locate_store``, or exit 4 with the command that makes one."""
    found = locate_store(home, path=path, dataset=dataset, observer=observer)
    if found is not None:
        return found
    what = ""
    if dataset:
        what = f"of {dataset} "
    elif (known := no_store_remembered(home)) is not None:
        raise known
    raise StoreError(
        f"There is no store {what}under {home.stores} yet.",
        f"fedcache extract --dataset {shell_word(dataset or 'digits')} --backbones efficientnet-lite0",
    )


def store_of_dataset(home: Home, name: str) -> Path | None:
    """The store whose dataset has a name: ``photos`` of ``folder:photos``, or ``digits-300``; None for no such store.

    Raises UsageError where stores of several contents have the name.
    """
    if name == "digits" or not re.fullmatch(r"[\w.+-]+", name):
        return None
    found = [path for path in home.stores_of(name) if (path / "manifest.json").exists()]
    if len(found) > 1:
        raise UsageError(
            f"{name} matches {len(found)} stores: {', '.join(path.name for path in found)}.",
            f"--store {shell_word(found[-1].name)}",
        )
    if found:
        return found[0]
    return None


def slug_in(path: Path) -> str:
    """The name of a dataset in that of its store, ``photos`` of ``photos-1a2b3c4d.zarr``; "" for another file name."""
    found = re.fullmatch(r"(.+)-[0-9a-f]{8}\.zarr", path.name)
    if found is None:
        return ""
    return found[1]


def pinned_store() -> dict[str, str] | None:
    """``store`` or ``dataset`` of ``[train]`` in the fedcache.toml of this folder; None where it names neither."""
    section = read_file(None).get("train", {})
    for key in ("store", "dataset"):
        if section.get(key):
            return {key: str(section[key])}
    return None


def several_datasets(home: Home) -> FedcacheError | None:
    """The error of leaving out the store where stores of several datasets are there; None for one dataset."""
    slugs = {
        str(store.dataset["slug"])
        for store in finished_stores(home)
        if part_of(store.dataset) is None
    }
    if len(slugs) < 2:
        return None
    names = sorted(slugs)
    return StoreError(
        f"No dataset is named, and {home.stores} holds {len(names)}: {', '.join(names)}.",
        f"Add --dataset {shell_word(names[0])}, or choose one for this folder:  fedcache use {shell_word(names[0])}",
    )


def no_store_remembered(home: Home) -> FedcacheError | None:
    """The error of leaving out the store where none is remembered although some exist, as after a stopped extraction.

    A StoreError with the names and the commands that continue; None when the home has no store.
    """
    paths = sorted(home.stores.glob("*.zarr"))
    if not paths:
        return None
    shown = []
    ways = [
        f"Choose one, for example:  fedcache inspect {shell_word(paths[0].name)}   (others take --store "
        "NAME)"
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
            continue
        state = ""
        if begun:
            state = " (unfinished)"
        elif not store.arrays:
            state = " (empty)"
        shown.append(path.name + state)
        ways += [f"To resume:  {array.command(store, home)}" for array in begun]
    stores = ", ".join(shown)
    return StoreError(
        f"There is no finished extraction. Stores in {home.stores}: {stores}.",
        "\n".join(ways),
    )


def need_store(
    home: Home,
    *,
    path: Path | str | None = None,
    dataset: str | None = None,
    observer: Observer | None = None,
    part: bool = False,
) -> Store:
    """``need_path``, opened, with ``part`` also part i of n of a store; CorruptionError for a damaged store."""
    found = need_path(home, path=path, dataset=dataset, observer=observer)
    return Store.open(found, part=part)


def ingested_path(home: Home, spec: str) -> Path | None:
    """The store of ``ingested:NAME``, or of NAME unless that is a dataset of its own; None for anything else.

    A name that is near an ingested one is a UsageError with "did you mean".
    """
    kind, sign, rest = spec.partition(":")
    explicit = bool(sign) and kind == INGESTED
    if not explicit and (sign or "=" in spec or spec == "digits"):
        return None
    found = ingested_stores(home)
    name = spec
    others = []
    if explicit:
        name = rest
    if slug_of(name) in found:
        return found[slug_of(name)]
    if not explicit:
        others = known_names()
    if explicit or closest(name, [*others, *found]) in found:
        ingested = ", ".join(found) or "nothing yet"
        hint = (
            f"Ingested datasets: {ingested}. To ingest another one:  fedcache ingest FILE --name "
            f"{shell_word(name or 'NAME')}"
        )
        raise unknown("dataset", name, [*found, *others], hint=hint)
    return None


def more_features(
    store: Store, backbone: str, key: str = "features/NAME", recipe: Mapping[str, str] | None = None
) -> str:
    """The command that brings a store what it lacks: extraction, or another file where there are only embeddings."""
    if is_ingested(store):
        return f"Add {key} to the file, then:  {ingest_command(store)}"
    return extract_command(store, [backbone], recipe)


def extract_arguments(config: ExtractConfig) -> list[str]:
    """The options of ``fedcache extract`` that make ``config``."""
    arguments: list[str] = []
    for item in fields(config):
        value = getattr(config, item.name)
        option = option_name(item)
        if isinstance(value, Mapping):
            arguments += [word for key, one in value.items() for word in (option, f"{key}={one}")]
        elif item.name == "text":
            arguments += [word for one in value for word in (option, one)]
        elif isinstance(value, tuple):
            if value:
                arguments += [option, ",".join(value)]
        elif value is True:
            arguments.append(option)
        elif value != item.default:
            arguments += [option, str(value)]
    return arguments


def extract_command(
    store: Store,
    backbones: Sequence[str],
    recipe: Mapping[str, str] | None = None,
    home: Home | None = None,
) -> str:
    """The command that adds arrays to a store: with its dataset and limit, and --store only where no dataset finds it.

    A store says nothing of places, so its dataset is what this home remembers of its arrays. Where the home knows
    nothing, as for a store from elsewhere, the sentence says what to add.
    """
    home = home or Home.from_environment()
    known = dataset_of_store(store, home)
    order = replace(known or ExtractConfig(), backbones=tuple(backbones), recipe=dict(recipe or {}))
    if known is None:
        words = ["fedcache", "extract", "--store", str(store.path), *extract_arguments(order)]
        return f"{shlex.join(words)}, with --dataset and its other options"
    return shlex.join(
        ["fedcache", "extract", *extract_arguments(order), *store_option_of(store, home)]
    )


def store_option_of(store: Store, home: Home) -> list[str]:
    """``--store PATH`` where an extraction of its dataset would not find the store by itself; else nothing."""
    usual = place_of_content(home, store.dataset["slug"], store.content)
    if store.path.resolve() == usual.resolve():
        return []
    return ["--store", str(store.path)]


def dataset_of_store(store: Store, home: Home) -> ExtractConfig | None:
    """The options that name a store's dataset: those of an array's order, or of the bundle; None when not known."""
    memory = memory_of(home)
    for array in store.arrays.values():
        fact = memory.recall(["order", store.dataset["digest"], array.digest])
        # another version of fedcache may have ordered it, in other words
        with suppress(FedcacheError):
            if isinstance(fact, list):
                order = resolve(ExtractConfig, fact[1], {})
                return ExtractConfig(
                    dataset=order.dataset,
                    limit=order.limit,
                    layout=order.layout,
                    follow_links=order.follow_links,
                    max_bad=order.max_bad,
                    data=order.data,
                    name=order.name,
                )
    name, _, size = str(store.dataset["slug"]).partition("-")
    limit = None
    if size.isdecimal():
        limit = int(size)
    known = datasets.peek("digits", Context(memory, limit=limit))
    if name == "digits" and known is not None and known[1] == store.content:
        return ExtractConfig(dataset="digits", limit=limit)
    return None


@dataclass(frozen=True)
class UnfinishedArray:
    """A feature array in flight: begun by an extraction, or opened again by ``repair``."""

    key: str  # of the array
    missing: int  # chunks still to be computed
    chunks: int  # in all
    label: str | None  # ``backbone@size``; None when this home did not extract it
    order: ExtractConfig | None  # the extraction that continues with it; None likewise

    @property
    def backbone(self) -> str:
        """Its name, or the slug of it."""
        if self.order:
            return self.order.backbones[0]
        return self.key.rpartition("-")[0]

    def means(self, name: str) -> bool:
        """Whether a word of ``--backbones`` may mean this array."""
        named = bare_name(name)
        same = slug(named.partition("@")[0]) == slug(self.backbone)
        return name == self.key or (same and ("@" not in named or self.label in (None, named)))

    def state(self, store: Store) -> str:
        """A clause for messages."""
        return f"{self.key} in {store.path} is unfinished: {self.missing} of {self.chunks} chunks are missing"

    def command(self, store: Store, home: Home) -> str:
        """The extract command that computes what is missing, and only that."""
        if self.order is None:
            if is_ingested(store):
                return ingest_command(store)
            return extract_command(store, [self.backbone], home=home)
        return shlex.join(
            ["fedcache", "extract", *extract_arguments(self.order), *store_option_of(store, home)]
        )


def unfinished_arrays_of(store: Store, home: Home) -> list[UnfinishedArray]:
    """The feature arrays of a store that are in flight; images (``pixels``) are left out."""
    found = []
    for journal in journals(store.path):
        header = journal.header
        if header is None or header["dtype"] == "uint8" or journal.key in store.arrays:
            continue
        label = None
        order = None
        fact = memory_of(home).recall(["order", store.dataset["digest"], header["recipe"]])
        # another version of fedcache may have ordered it, in other words
        with suppress(FedcacheError):
            if isinstance(fact, list):
                label = str(fact[0])
                order = resolve(ExtractConfig, fact[1], {})
        found.append(
            UnfinishedArray(
                journal.key, journal.count - len(journal.chunks), journal.count, label, order
            )
        )
    return found


# Groups are no part of a dataset's content, so two datasets that differ in nothing else share one store. A command that
# names one of them replaces the groups of the other, and notes the change.


def bring_groups(
    path: Path, spec: str, where: Context, observer: Observer, held: Dataset | None = None
) -> None:
    """Give the store at ``path`` the groups of a dataset of its content, which is read where it has others.

    ``held`` is the dataset where a program holds it. A damaged store stays as it is. Raises as
    ``open_dataset``, and StoreError for a store that cannot be written.
    """
    try:
        store = Store.open(path)
    except FedcacheError:
        return  # whoever opens it says what is wrong
    if held is None:
        if where.memory.recall(_key(store, spec, where)) == group_digests(store.manifest):
            return
        with progress_of(observer, "reading", holds_of(spec)) as progress:
            held = open_dataset(spec, replace(where, progress=progress))
    keep_groups(store, groups_in_order(store, held), spec, observer)
    remember_groups(store, spec, where)


def remember_groups(store: Store, spec: str, where: Context) -> None:
    """Note that the groups of a store are those of a dataset.

    Nothing is noted of images that a program held, nor in a home that cannot be written: they are looked at again.
    """
    with suppress(FedcacheError, OSError):
        where.memory.remember(_key(store, spec, where), group_digests(store.manifest))


def groups_in_order(store: Store, data: Dataset) -> dict[str, Group]:
    """The groups of a dataset in the order of a store's rows, which is another one where the store grew."""
    if store.dataset["digest"] == data.digest:
        return dict(data.groups)
    place = {
        (name, uid.tobytes()): row
        for row, (name, uid) in enumerate(zip(data.names, data.uid, strict=True))
    }
    s = store.samples
    rows = np.array(
        [place.get((n, u.tobytes()), -1) for n, u in zip(s.name, s.uid, strict=True)], np.int64
    )
    return {name: group.take(rows) for name, group in data.groups.items()}


def keep_groups(store: Store, groups: Mapping[str, Group], spec: str, observer: Observer) -> None:
    """Keep these groups of a store and no others; reports the changes."""
    before = set(store.groups)
    begun = bool(store.arrays)
    changed, gone = replace_groups(store, groups)
    if begun and changed:
        tell = observer.note
        if before & set(changed):
            tell = observer.warn
        tell(
            f"{_columns(changed)} updated to {spec} in {store.path.name}; earlier partitions keep their "
            "rows."
        )
    if gone:
        observer.warn(
            f"{_columns(gone)} not part of {spec} and removed from {store.path.name}; extracting a "
            "dataset with these columns adds them again."
        )


def _columns(names: list[str]) -> str:
    if len(names) == 1:
        return f"The column {names[0]} is"
    return f"The columns {', '.join(names)} are"


def _key(store: Store, spec: str, where: Context) -> list[Any]:
    return ["groups", *facts_of(spec, where), store.dataset["digest"]]
