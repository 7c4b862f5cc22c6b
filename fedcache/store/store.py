"""The feature store: one dataset, any number of backbones, read without torch and without zarr.

FORMAT.md in this folder is the specification. Opening a store reads ``manifest.json`` only; every other byte is
verified when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcache.config import Home, refuse_remote
from fedcache.errors import CorruptionError, FedcacheError, UsageError
from fedcache.notebooks import html_table
from fedcache.parsing import slug_of
from fedcache.progress import Observer, Silent
from fedcache.store.content import Content, arrange_arrays
from fedcache.store.files import Buffer, digest_of
from fedcache.store.journal import journal_path, read_journal, unfinished_arrays
from fedcache.store.lock import hold_lock, lock_manifest
from fedcache.store.manifest import (
    PART,
    VANISHED,
    ArrayInfo,
    Manifest,
    append_event,
    backbone_of,
    check_name,
    entries_of,
    find_text,
    forgotten_arrays,
    is_published,
    is_written,
    no_store,
    no_text_features,
    nothing_is_added,
    origin_of,
    part_of,
    partition_parts,
    partition_words,
    read_manifest,
    read_partition,
    read_quarantine,
    read_text,
    select_arrays,
    write_partition,
    write_sidecar,
    write_text,
)
from fedcache.store.mirror import mirrored
from fedcache.store.reader import Reader, open_reader
from fedcache.store.samples import (
    INGESTED,
    Samples,
    group_names,
    parts_of,
    place_of,
    read_column,
    read_group,
    read_samples,
    samples_frame,
    select_rows,
)
from fedcache.store.writer import ArrayWriter, create_store
from fedcache.tables.groups import Group, usable_group_name

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset

__all__ = ["ArrayInfo", "ArrayWriter", "Reader", "Samples", "Store"]

T = TypeVar("T")


def store_by_name(path: Path | str, home: Home | None = None) -> Path | str:
    """The store that a path or a name means: ``"photos"`` is a store of the home, if no such path exists here.

    A name is the name of a dataset or, with or without ``.zarr``, of a store. A name that fits no store or several
    stores is returned unchanged.
    """
    if not isinstance(path, str):
        return path
    is_name = len(Path(path).parts) == 1
    if not is_name or Path(path).exists():
        return path
    home = home or Home.from_environment()
    places = [home.stores / path, home.stores / f"{path}.zarr", *home.stores_of(slug_of(path))]
    found = [place for place in places if place.exists()]
    if len(found) == 1:
        return found[0]
    return path


class Store:
    """A store on disk. Make one with ``create`` or ``open``."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._readers: dict[str, Reader] = {}

    def __repr__(self) -> str:
        arrays = ", ".join(sorted(self.arrays)) or "no features yet"
        return f"Store({self.dataset['slug']}: {self.rows_ok:,} of {self.rows:,} images, {arrays}, {self.place})"

    @classmethod
    def open(cls, path: Path | str, *, part: bool = False) -> Store:
        """Open a store by its folder or name, or a published one by its address, such as ``https://host/digits``.

        Part i of n of a store is opened only if ``part`` is True. A published store cannot be changed; ``path`` of the
        store is then a folder in the fedcache home that keeps everything that was read.

        Raises StoreError when there is no store; CorruptionError when its manifest is damaged, or older than the store;
        UsageError for another address; MachineError without the extra ``remote``, or without network.
        """
        refuse_remote(path, "path", remote=True)
        path = store_by_name(path)
        place = Path(path)
        if is_published(path):
            place = mirrored(path)
        manifest = read_manifest(place)
        if PART in manifest.dataset and not part:
            raise no_store(place, manifest.dataset)
        if forgotten_arrays(place, manifest):
            # Another process may have finished an array after the manifest was read.
            manifest = read_manifest(place)
            keys = forgotten_arrays(place, manifest)
            if keys:
                arrays = ", ".join(keys)
                raise CorruptionError(
                    f"{place / 'manifest.json'} is older than the store: according to the history, {arrays} are "
                    "finished, but the manifest does not list them.",
                    f"Restore the newer manifest.json. Or remove {place / 'features' / keys[0]}, then extract again.",
                )
        return cls(place, manifest)

    @classmethod
    def from_arrays(
        cls,
        features: Mapping[str, Any],
        *,
        labels: Any = None,
        domains: Any = None,
        names: Any = None,
        splits: Any = None,
        classes: Sequence[str] | None = None,
        text: Mapping[str, Any] | None = None,
        groups: Mapping[str, Any] | None = None,
        drop_nan: bool = False,
        name: str | None = None,
        path: str | Path | None = None,
    ) -> Store:
        """Embeddings that are in memory already, as a store: ``Store.from_arrays({"mine": X}, labels=y)``.

        The same arrays again give the same store. Rows are sorted by name; without names, they keep their order.

        Args:
            features: floats [N, D] or [N, V, D] (V views) per backbone; float16 stays, others become float32.
            labels: N integers or words; None if no label is known. A row with -1, NaN, None or "" has an unknown label.
                Exception: if the labels are exactly -1 and 1, both are classes.
            domains: N integers or words.
            names: N different words; the rows of the store are sorted by name, not in the order given.
            splits: N of train, test and validation, or of 0, 1 and 2; None holds out a fifth of each class.
            classes: names of the integers in ``labels``, or the order of its words.
            text: floats [C, D] per backbone, features of the class names.
            groups: by name N words or whole numbers that group the rows, ``{"hospital": [...]}``. If a store with this
                content and name exists already, these groups replace its groups of the same names, also for ``Store``
                objects that have it open.
            drop_nan: store rows with NaN or infinite features as rows that cannot be read, instead of raising an error.
            name: of the dataset, for ``--dataset``; the backbones' names when None.
            path: of the store; under FEDCACHE_HOME when None.

        Raises:
            UsageError, for shapes or values that do not fit; CorruptionError, for values that are not finite;
            StoreError, when another dataset is at ``path``.
        """
        if classes is not None:
            classes = list(classes)
        columns = {
            "labels": labels,
            "domain": domains,
            "name": names,
            "split": splits,
            "classes": classes,
            "groups": groups,
        }
        content, place = arrange_arrays(features, text or {}, columns, name, path, drop_nan)
        return cls.from_content(content, place)

    @classmethod
    def from_content(cls, content: Content, path: Path, observer: Observer | None = None) -> Store:
        """Arranged embeddings as a store at ``path``; a store that an interrupted call left there is completed.

        Groups replace groups of the same names. ``observer`` receives progress. Raises FedcacheError, as ``create``;
        CorruptionError, for values that are not finite.
        """
        observer = observer or Silent()
        refuse_remote(path, "path")
        path.parent.mkdir(parents=True, exist_ok=True)
        store = cls.create(path, content.samples, dataset=content.dataset, reasons=content.reasons)
        put_groups(store, content.groups)
        for name, matrix in content.texts.items():
            if not store.has_text(name):
                store.put_text(name, [], matrix, {"backbone": name, "source": INGESTED})
        for key, array in content.arrays.items():
            # Another version of fedcache may have begun the array with another number of rows per chunk.
            begun = read_journal(journal_path(path, key)).header
            fresh = begun is not None and begun["chunk_rows"] != array.chunk_rows
            # Wait for another writer of the same content, because it writes the same chunks.
            with store.writer(
                key,
                shape=array.shape,
                dtype=array.dtype,
                chunk_rows=array.chunk_rows,
                recipe=array.recipe,
                how={"source": INGESTED},
                fresh=fresh,
                wait=True,
            ) as writer:
                array.write_missing(writer, observer)
                writer.complete()
        return cls.open(path)

    @classmethod
    def create(
        cls,
        path: Path,
        samples: Samples,
        *,
        dataset: Mapping[str, Any],
        reasons: Mapping[int, str] | None = None,
    ) -> Store:
        """A store of ``samples`` without features; a store of the same dataset is opened instead.

        It is built next to its place and renamed, so that it exists whole or not at all. ``reasons`` are the reasons of
        rows that are not ok, by row. Raises StoreError, when another dataset is at ``path``; CorruptionError for a
        store that is damaged.
        """
        return cls(path, create_store(path, samples, dict(dataset), reasons or {}))

    @cached_property
    def address(self) -> str | None:
        """Where a published store is: its address or folder; None for any other store."""
        return origin_of(self.path)

    @property
    def place(self) -> str:
        """The address or path by which ``open`` finds the store again."""
        return self.address or str(self.path)

    def need_writable(self) -> None:
        """Refuse to change a published store. Raises StoreError."""
        if self.address is not None:
            raise nothing_is_added(self.address)

    def refresh(self) -> None:
        """Read the manifest again, and the columns when they are needed next."""
        self.manifest = read_manifest(self.path)
        self.__dict__.pop("samples", None)

    @property
    def dataset(self) -> dict[str, Any]:
        """slug, digest, template, ..."""
        return self.manifest.dataset

    @property
    def content(self) -> str:
        """Digest of the dataset's content, by which a store is found.

        ``dataset["digest"]`` also covers the order of the rows, which differs if a store grew from an earlier one.
        """
        return str(self.dataset.get("content", self.dataset["digest"]))

    @property
    def rows(self) -> int:
        """N."""
        return self.manifest.rows

    @property
    def rows_ok(self) -> int:
        """Rows whose image could be read."""
        return self.manifest.rows_ok

    @property
    def arrays(self) -> dict[str, ArrayInfo]:
        """Complete feature arrays by key, sorted."""
        return dict(sorted(self.manifest.arrays.items()))

    @cached_property
    def samples(self) -> Samples:
        """The columns, as old as this object's manifest. Raises CorruptionError."""
        return self._read(read_samples)

    def readable(self) -> NDArray[np.uint8]:
        """``ok`` of every row, uint8 [N], as it is now. Raises CorruptionError."""
        return self._read(read_column, "ok")

    def column(self, key: str) -> NDArray[Any]:
        """A column of numbers: uid [N, 16], label, domain, split or ok [N]. Raises CorruptionError.

        It is taken from ``samples`` if they were read already. Otherwise only this column is read, because names take
        most of the memory of ``samples``.
        """
        samples = self.__dict__.get("samples")
        if samples is not None:
            return np.asarray(getattr(samples, key))
        return self._read(read_column, key)

    def _read(self, read: Callable[..., T], *which: str) -> T:
        """``read(path, manifest, *which)``, which reads a file that a writer may be replacing at this moment.

        Readers take no lock, and the manifest is replaced after the files it lists. If ``read`` fails and the manifest
        on disk is a newer one, ``read`` is tried again with that manifest. Otherwise the file is damaged.
        """
        while True:
            try:
                return read(self.path, self.manifest, *which)
            except FedcacheError:
                now = read_manifest(self.path)
                if now == self.manifest:
                    raise
                self.manifest = now
                self.__dict__.pop("samples", None)

    def unfinished(self) -> list[dict[str, Any]]:
        """Unfinished arrays: name, chunks kept, chunks in all. Every array of a part is listed, finished or not."""
        found = unfinished_arrays(self.path, self.manifest.arrays)
        part = part_of(self.dataset)
        if part is not None:
            for array in found:
                array["chunks"] = len(part.chunks(array["chunks"]))
        return found

    def quarantined(self) -> list[dict[str, Any]]:
        """Rows whose image could not be read: row, name, reason. Raises CorruptionError."""
        rows = self._read(read_quarantine)
        return entries_of(rows)

    def vanished(self) -> NDArray[np.bool_]:
        """[N], rows whose image was no longer in the dataset when the store was made. Raises CorruptionError."""
        vanished = np.zeros(self.rows, bool)
        for entry in self.quarantined():
            if entry["reason"] == VANISHED:
                vanished[entry["row"]] = True
        return vanished

    def reader(self, key: str) -> Reader:
        """A complete feature array. Raises StoreError, for an array that is unfinished or not there."""
        if key not in self._readers:
            self._readers[key] = open_reader(self.path, self.manifest, key)
        return self._readers[key]

    def writer(
        self,
        key: str,
        *,
        shape: tuple[int, ...],
        dtype: str,
        chunk_rows: int,
        recipe: dict[str, Any],
        how: dict[str, Any],
        wait: bool = False,
        fresh: bool = False,
    ) -> ArrayWriter:
        """The one writer of an array; see ``ArrayWriter``. Use it in a ``with`` block."""
        check_name("array", key)
        self.need_writable()
        return ArrayWriter(
            store=self,
            key=key,
            shape=shape,
            dtype=dtype,
            chunk_rows=chunk_rows,
            recipe=recipe,
            how=how,
            wait=wait,
            fresh=fresh,
        )

    @property
    def texts(self) -> dict[str, list[dict[str, Any]]]:
        """Text features per backbone slug; the last entry of each is the current one."""
        return self.manifest.texts

    def has_text(
        self, backbone: str, templates: Sequence[str] | None = None, *, weights: str | None = None
    ) -> bool:
        """Whether there are text features of a backbone, for these templates and weights if given."""
        return find_text(self.manifest, backbone, templates, weights) is not None

    def templates(self, backbone: str) -> list[str] | None:
        """The templates of a backbone's current text features; None when it has none, [] when they are not known."""
        entry = find_text(self.manifest, backbone)
        if entry is None:
            return None
        return list(entry["templates"])

    def use_text(
        self, backbone: str, templates: Sequence[str], *, weights: str | None = None
    ) -> bool:
        """Make stored text features the current ones of their backbone, as if they had been written last.

        Returns whether other text features were current before; if not, nothing is written. Raises StoreError, when the
        store has no text features of these templates and weights.
        """
        entry = find_text(self.manifest, backbone, templates, weights)
        if entry is None:
            raise no_text_features(self.path, backbone)
        slug = slug_of(backbone)
        if self.manifest.texts[slug][-1]["id"] == entry["id"]:
            return False
        with self.edit() as manifest:
            entries = manifest.texts.get(slug, [])
            # The sort is stable, so only this entry moves.
            manifest.texts[slug] = sorted(entries, key=lambda other: other["id"] == entry["id"])
        return True

    def text(self, backbone: str, templates: Sequence[str] | None = None) -> NDArray[np.float32]:
        """Text features [C, D] of a backbone or its array, unit rows; the current ones unless templates are named.

        Raises StoreError.
        """
        entry = find_text(self.manifest, backbone, templates)
        name = backbone_of(self.manifest, backbone)
        if entry is None:
            raise no_text_features(self.path, name)
        return read_text(self.path, name, entry)

    def put_text(
        self,
        backbone: str,
        templates: Sequence[str],
        matrix: NDArray[np.float32],
        meta: Mapping[str, Any],
    ) -> None:
        """Write text features [C, D] of a backbone; they become the current ones.

        They replace earlier text features of the same templates and meta. Raises CorruptionError, for values that are
        not finite; InternalError, for another shape.
        """
        with self.edit() as manifest:
            write_text(self.path, manifest, backbone, templates, matrix, meta)

    @contextmanager
    def edit(self) -> Iterator[Manifest]:
        """The manifest as it is now, to be changed under its lock; written unless the block raises an error.

        Raises StoreError for a published store.
        """
        self.need_writable()
        with lock_manifest(self.path):
            manifest = read_manifest(self.path)
            yield manifest
            manifest.write(self.path)
            self.refresh()

    @property
    def partitions(self) -> list[str]:
        """Names of the saved partitions."""
        return self.manifest.partitions

    def partition(self, name: str) -> dict[str, Any]:
        """Description of a saved partition: scheme, args, seed, digest, ...; ``fc.Partition`` reads its rows.

        One that an earlier release saved as JSON comes with its rows. Raises as ``partition_bytes``.
        """
        return self._read(partition_words, name)

    def partition_bytes(self, name: str) -> memoryview:
        """The file of a saved partition, mapped. Raises StoreError when there is none; CorruptionError."""
        return self._read(read_partition, name)

    def put_partition(self, name: str, content: Mapping[str, Any] | Sequence[Buffer]) -> None:
        """Save a partition under a name, replacing one of that name; the same content again writes nothing.

        Args:
            name: usable as the name of a file.
            content: the parts of its file, as ``Partition.to_file`` makes them, or JSON.
        """
        check_name("partition", name)
        relative, parts = partition_parts(name, content)
        if is_written(self.path, self.manifest, relative, parts):
            return
        with self.edit() as manifest:
            replaced = write_partition(self.path, manifest, name, relative, parts)
        for file in replaced:
            file.unlink(missing_ok=True)

    @property
    def groups(self) -> list[str]:
        """Names of the columns that came with the data and group its rows: hospital, writer, ..."""
        return group_names(self.manifest)

    def group(self, name: str) -> Group:
        """The value of every row, as the store has it now. Raises UsageError for an unknown name; CorruptionError."""
        return self._read(read_group, name)

    def Xy(  # noqa: N802  (what scikit-learn calls them)
        self, backbones: str | Sequence[str] | None = None, split: str | None = "train"
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """(X float32 [N, D], y int64 [N]) of the readable rows, for scikit-learn; first views, backbones side by side.

        Args:
            backbones: names; None for every array of features.
            split: train, test, validation, or None for all rows. y is -1 where a label is not known.

        Raises:
            UsageError for an unknown split; StoreError for features that are not there; CorruptionError.
        """
        keys = select_arrays(self.arrays, backbones, self.path.name)
        rows = select_rows(self.samples, split)
        # The first view of each row.
        parts = [self.reader(key).rows(rows)[:, 0].astype(np.float32) for key in keys]
        features = np.concatenate(parts, axis=1)
        labels = self.samples.label[rows].astype(np.int64)
        return features, labels

    def torch_dataset(
        self, backbones: str | Sequence[str] | None = None, split: str | None = "train"
    ) -> Dataset[tuple[Tensor, int]]:
        """The rows of ``Xy`` as a ``torch.utils.data.Dataset`` that reads each row when it is requested.

        It can be handed to the workers of a ``DataLoader``, also spawned ones. Features of a published store are
        fetched now, because a forked worker cannot fetch any. If ``FEDCACHE_REMOTE_CACHE`` is too small for all of
        them, nothing is fetched now, and workers must be spawned. Arguments and errors as of ``Xy``.
        """
        from fedcache.store.torch_dataset import FeatureRows  # a class of torch's: imports torch

        keys = select_arrays(self.arrays, backbones, self.path.name)
        rows = select_rows(self.samples, split)
        for key in keys:
            mirror = self.reader(key).mirror
            if mirror is not None:
                mirror.bring_all(key)
        labels = self.samples.label[rows].astype(np.int64)
        return FeatureRows(self.path.resolve(), keys, rows, labels)

    def frame(self) -> Any:
        """pandas columns: uid, name, label, class, domain, split, ok, groups. Raises MachineError without pandas."""
        samples = self.samples
        groups = {name: self.group(name) for name in self.groups}
        return samples_frame(samples, groups)

    def to_dict(self) -> dict[str, Any]:
        """Content of the manifest as plain JSON values, without rows and features."""
        m = self.manifest
        arrays = [{"key": key, **_described(info)} for key, info in self.arrays.items()]
        templates = {}
        for slug, entries in m.texts.items():
            templates[slug] = [list(entry["templates"]) for entry in entries]
        return {
            "path": self.place,
            "dataset": dict(m.dataset),
            "rows": m.rows,
            "ok": m.rows_ok,
            "classes": list(m.classes),
            "domains": list(m.domains),
            "arrays": arrays,
            "texts": templates,
            "partitions": m.partitions,
        }

    def _repr_html_(self) -> str:
        m = self.manifest
        classes = ", ".join(m.classes[:10])
        if len(m.classes) > 10:
            classes += f", .. ({len(m.classes):,})"
        title = f"{m.dataset['slug']}: {m.rows_ok:,} of {m.rows:,} images; classes {classes}; {self.path}"
        rows = [(key, *_described(info).values()) for key, info in self.arrays.items()]
        return html_table(title, ("array", "backbone", "shape", "dtype"), rows)

    def append_history(self, event: Mapping[str, Any]) -> None:
        """Append an event to the history, the only file of a store with times. Raises StoreError if it is published."""
        self.need_writable()
        lock = self.path / "locks" / "history.lock"
        with hold_lock(lock, f"the history of {self.path}", wait=True):
            append_event(self.path, event)


def _described(info: ArrayInfo) -> dict[str, Any]:
    backbone = str(info.recipe.get("backbone", ""))
    return {"backbone": backbone, "shape": list(info.shape), "dtype": info.dtype}


def copy_texts(source: Store, target: Store) -> None:
    """Copy the text features of a store in their order; its current ones become the current ones of ``target``."""
    for entries in source.texts.values():
        for entry in entries:
            backbone = str(entry["meta"].get("backbone"))
            templates = entry["templates"]
            weights = entry["meta"].get("weights")
            if not target.has_text(backbone, templates, weights=weights):
                matrix = read_text(source.path, backbone, entry)
                target.put_text(backbone, templates, matrix, entry["meta"])
            # The last entry is current in the source. In a target that an earlier call began, another may be current.
            target.use_text(backbone, templates, weights=weights)


# Groups of a store.


def put_groups(store: Store, groups: Mapping[str, Group]) -> list[str]:
    """Write groups of the rows of a store, each in place of one of that name; equal ones are not written.

    Returns:
        the names of the groups that replaced other values.

    Raises:
        UsageError for a group of another number of rows, or a name that a group cannot have.
    """
    packed = {}
    for name, group in groups.items():
        if len(group.codes) != store.rows:
            raise UsageError(
                f"The group {name!r} has {len(group.codes):,} values for {store.rows:,} rows.",
                "Give one value per row.",
            )
        packed[usable_group_name(name)] = parts_of(name, group)
    new = {}
    for name, parts in packed.items():
        if not is_written(store.path, store.manifest, place_of(name), parts):
            new[name] = parts
    if not new:
        return []
    changed = []
    with store.edit() as manifest:
        for name, parts in new.items():
            place = place_of(name)
            before = manifest.files.get(place)
            write_sidecar(store.path, manifest, place, *parts)
            if before not in (None, manifest.files[place]):
                changed.append(name)
    return changed


def replace_groups(store: Store, groups: Mapping[str, Group]) -> tuple[list[str], list[str]]:
    """As ``put_groups``, and remove all other groups of the store.

    Returns:
        the names of groups that are new or have other values, and the names of the removed groups.
    """
    before = set(store.groups)
    changed = put_groups(store, groups)
    names = {usable_group_name(name) for name in groups}
    removed = sorted(before - names)
    if removed:
        with store.edit() as manifest:
            for name in removed:
                manifest.files.pop(place_of(name), None)
        for name in removed:  # once the manifest no longer lists them
            (store.path / place_of(name)).unlink(missing_ok=True)
    new_or_changed = sorted({*changed, *(names - before)})
    return new_or_changed, removed


def column_of(store: Store, name: str) -> Group:
    """A group of a store, or its column ``domain`` or ``class`` as a group. Errors as of ``Store.group``."""
    if name == "domain":
        return Group(store.column("domain").astype(np.int32), store.manifest.domains)
    if name == "class":
        return Group(store.column("label").astype(np.int32), store.manifest.classes)
    return store.group(name)


def finished_arrays(store: Store) -> dict[str, ArrayInfo]:
    """The complete arrays of a store by key.

    An array of a part is complete when the part's own chunks exist; ``chunks`` of its ``ArrayInfo`` are only these.
    """
    part = part_of(store.dataset)
    if part is None:
        return store.arrays
    found = {}
    for key, recipe in sorted(store.dataset[PART]["recipes"].items()):
        journal = read_journal(journal_path(store.path, key))
        header = journal.header
        chunks_of_part = part.chunks(journal.count)
        if header is None or header["recipe"] != digest_of(recipe):
            continue
        if not journal.chunks.keys() >= set(chunks_of_part):
            continue
        shape = tuple(header["shape"])
        checksums = tuple(journal.chunks[chunk].crc for chunk in chunks_of_part)
        found[key] = ArrayInfo(
            recipe, header["how"], shape, header["dtype"], header["chunk_rows"], checksums
        )
    return found
