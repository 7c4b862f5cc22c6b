"""The feature store: one dataset, any number of backbones, read without torch and without zarr.

FORMAT.md in this folder is the specification. Opening a store reads ``manifest.json`` only; every other byte is
verified when it is first used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import Exit, FedcacheError
from fedcache.notebooks import data_frame, html_table
from fedcache.store import chunks as files
from fedcache.store.disk_errors import writing
from fedcache.store.files import canonical_json, digest_of, fsync_directory, read_whole, sha256_hex, write_atomic
from fedcache.store.history import append_event
from fedcache.store.journal import journals
from fedcache.store.lock import held
from fedcache.store.manifest import COLUMNS, ArrayInfo, Manifest, read_manifest, was_store
from fedcache.store.quarantine import read_quarantine
from fedcache.store.reader import Reader
from fedcache.store.samples import Samples, sweep_inside, workshop, write_samples
from fedcache.store.text_features import check_name, find, read, slug_of, without
from fedcache.store.writer import ArrayWriter

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset

__all__ = ["ArrayInfo", "ArrayWriter", "Reader", "Samples", "Store", "slug_of"]

T = TypeVar("T")


class Store:
    """A store on disk. Make one with ``create`` or ``open``."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self._manifest = manifest
        self._readers: dict[str, Reader] = {}

    def __repr__(self) -> str:
        arrays = ", ".join(sorted(self.arrays)) or "no features yet"
        return f"Store({self.dataset['slug']}: {self.rows_ok:,} of {self.rows:,} images, {arrays}, {self.path})"

    @classmethod
    def open(cls, path: Path | str) -> Store:
        """Open a store.

        Raises:
            FedcacheError: STORE when there is none; CORRUPT when its manifest is damaged.
        """
        place = Path(path)
        return cls(place, read_manifest(place))

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
        name: str | None = None,
        path: str | Path | None = None,
    ) -> Store:
        """Embeddings that are in memory already, as a store: ``Store.from_arrays({"mine": X}, labels=y)``.

        The same arrays again give the same store. Rows are kept sorted by name, so without names in their order.

        Args:
            features: floats [N, D] or [N, V, D] (V views) per backbone; float16 stays, others become float32.
            labels: N integers (-1 unknown) or words; None when they are not known.
            domains: N integers or words.
            names: N different words.
            splits: N of train, test and validation, or of 0, 1 and 2; None holds out a fifth of each class.
            classes: names of the integers in ``labels``, or the order of its words.
            text: floats [C, D] per backbone, features of the class names.
            name: of the dataset, for ``--dataset``; the backbones' names when None.
            path: of the store; under FEDCACHE_HOME when None.

        Raises:
            FedcacheError: USAGE, for shapes or values that do not fit; CORRUPT, for values that are not finite; STORE,
                when another dataset lies at ``path``.
        """
        from fedcache.store.from_arrays import from_arrays  # which makes stores itself

        columns = {
            "labels": labels, "domain": domains, "name": names, "split": splits,
            "classes": None if classes is None else list(classes),
        }  # fmt: skip
        return from_arrays(features, text or {}, columns, name, path)

    @classmethod
    def create(
        cls, path: Path, samples: Samples, *, dataset: Mapping[str, Any], reasons: Mapping[int, str] | None = None
    ) -> Store:
        """A store of ``samples`` without features; a store of the same dataset is opened instead.

        It is built beside its place and renamed, so that it exists whole or not at all. ``reasons`` says why, per row
        that is not ok.

        Raises:
            FedcacheError: STORE, when another dataset lies at ``path``; CORRUPT for a store that is damaged.
        """
        occupied = path.exists() and (not path.is_dir() or any(path.iterdir()))
        # Looked for last: a store may appear here, whole, at any moment. One that lost its manifest is refused as such.
        if (path / "manifest.json").exists() or was_store(path):
            return cls._same(path, dataset)
        if occupied:
            raise FedcacheError(
                Exit.STORE, f"{path} exists and is not a fedcache store.", "Choose another place with --store."
            )
        samples = samples.checked()
        with writing(path, 64 * len(samples.name)):
            temporary = workshop(path)
            try:
                write_samples(temporary, samples, dict(dataset), reasons or {})
                temporary.rename(path)  # over an empty directory at most
            except OSError:
                if (path / "manifest.json").exists():  # somebody was faster
                    return cls._same(path, dataset)
                raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            fsync_directory(path.parent)
        return cls.open(path)

    @classmethod
    def _same(cls, path: Path, dataset: Mapping[str, Any]) -> Store:
        store = cls.open(path)
        if store.dataset["digest"] != dataset["digest"]:
            raise FedcacheError(
                Exit.STORE,
                f"{path} holds {store.dataset['slug']} with digest {store.dataset['digest'][:12]}, "
                f"not {dataset['slug']} with digest {str(dataset['digest'])[:12]}.",
                "Leave --store out, or choose another place.",
            )
        return store

    def refresh(self) -> None:
        """Read the manifest again."""
        self._manifest = read_manifest(self.path)
        self.__dict__.pop("samples", None)

    @property
    def dataset(self) -> dict[str, Any]:
        """slug, digest, template, ..."""
        return self._manifest.dataset

    @property
    def content(self) -> str:
        """Digest of the dataset's content, by which a store is found; ``dataset["digest"]`` also covers the order of
        the rows, which is another where a store grew from an earlier one."""
        return str(self.dataset.get("content", self.dataset["digest"]))

    @property
    def rows(self) -> int:
        """N."""
        return self._manifest.rows

    @property
    def rows_ok(self) -> int:
        """Rows whose image could be read."""
        return self._manifest.rows_ok

    @property
    def arrays(self) -> dict[str, ArrayInfo]:
        """Complete feature arrays by key, sorted."""
        return dict(sorted(self._manifest.arrays.items()))

    @property
    def manifest(self) -> Manifest:
        """Everything the manifest says."""
        return self._manifest

    @cached_property
    def samples(self) -> Samples:
        """The columns, verified; like the manifest as they were when this object was made or last refreshed.

        Raises:
            FedcacheError: CORRUPT.
        """
        return self._settled(self._samples)

    def readable(self) -> NDArray[np.uint8]:
        """``ok`` of every row, uint8 [N], as it is now.

        Raises:
            FedcacheError: CORRUPT.
        """
        return self._settled(lambda: self._numbers("ok", "uint8"))

    def _samples(self) -> Samples:
        columns: dict[str, Any] = {key: self._numbers(key, dtype) for key, dtype in COLUMNS.items()}
        try:
            name = files.decode_strings(self._column("name", 1, None))
        except ValueError as error:
            raise files.damaged("samples/name", self._column_file("name", 1), f"holds no names ({error})") from error
        if len(name) != max(1, self.rows):
            why = f"holds {len(name)} names for {self.rows} rows"
            raise files.damaged("samples/name", self._column_file("name", 1), why)
        m = self._manifest
        return Samples(name=name[: m.rows], classes=m.classes, domains=m.domains, **columns)

    def _numbers(self, key: str, dtype: str) -> NDArray[Any]:
        shape = (max(1, self.rows), 16) if key == "uid" else (max(1, self.rows),)
        raw = self._column(key, len(shape), files.array_bytes(shape, dtype))
        return np.frombuffer(raw, np.dtype(dtype).newbyteorder("<")).reshape(shape)[: self.rows]

    def _column_file(self, key: str, axes: int) -> Path:
        return files.chunk_path(self.path / "samples" / key, 0, axes)

    def _column(self, key: str, axes: int, size: int | None) -> bytes:
        place = self._column_file(key, axes)
        listed = [self._manifest.samples[key]]
        if key == "ok":
            # Between the replacement of this column and that of the manifest, a journal vouches for the new one.
            listed += [commit["ok"] for journal in journals(self.path) for commit in journal.commits]
        raw = files.read_checked(place, None, f"samples/{key}", size=size)
        if files.checksum(raw) not in listed:
            raise files.damaged(f"samples/{key}", place, "is whole but not the column the manifest lists")
        return raw

    def _settled(self, read: Callable[[], T]) -> T:
        """``read`` what a writer replaces, again while the manifest moves on: readers take no lock."""
        while True:
            try:
                return read()
            except FedcacheError:
                now = read_manifest(self.path)
                if now == self._manifest:
                    raise
                self._manifest = now
                self.__dict__.pop("samples", None)

    def unfinished(self) -> list[dict[str, Any]]:
        """Arrays in flight: name, chunks kept, chunks in all."""
        return [
            {"name": j.key, "kept": len(j.chunks), "chunks": j.count}
            for j in journals(self.path)
            if j.header is not None and j.key not in self._manifest.arrays
        ]

    def quarantined(self) -> list[dict[str, Any]]:
        """Rows whose image could not be read: row, name, reason.

        Raises:
            FedcacheError: CORRUPT.
        """
        rows = self._settled(lambda: read_quarantine(self.path, self._manifest))
        return [{"row": row, "name": name, "reason": reason} for row, (name, reason) in sorted(rows.items())]

    def reader(self, key: str) -> Reader:
        """A complete feature array.

        Raises:
            FedcacheError: STORE, for an array that is unfinished or not there.
        """
        info = self._manifest.arrays.get(key)
        if info is None:
            begun = next((u for u in self.unfinished() if u["name"] == key), None)
            what = f"unfinished ({begun['kept']} of {begun['chunks']} chunks)" if begun else "not there"
            have = ", ".join(self.arrays) or "none"
            raise FedcacheError(
                Exit.STORE,
                f"{key} in {self.path} is {what}; complete arrays: {have}.",
                "Run the fedcache extract command that makes it; it goes on where it stopped.",
            )
        if key not in self._readers:
            self._readers[key] = Reader(self.path / "features" / key, key, info)
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
        return ArrayWriter(
            self, key, shape=shape, dtype=dtype, chunk_rows=chunk_rows, recipe=recipe, how=how, wait=wait, fresh=fresh
        )

    @property
    def texts(self) -> dict[str, list[dict[str, Any]]]:
        """Text features per backbone slug; the last are the current ones."""
        return self._manifest.texts

    def has_text(self, backbone: str, templates: Sequence[str] | None = None, *, weights: str | None = None) -> bool:
        """Whether there are text features of a backbone, for these templates and weights if given."""
        return find(self._manifest, backbone, templates, weights) is not None

    def templates(self, backbone: str) -> list[str] | None:
        """The templates of a backbone's current text features; None when it has none, [] when they are not known."""
        entry = find(self._manifest, backbone, None, None)
        return None if entry is None else list(entry["templates"])

    def use_text(self, backbone: str, templates: Sequence[str], *, weights: str | None = None) -> bool:
        """Make stored text features the current ones of their backbone, as if they had been written last.

        Returns:
            whether others were current; when not, nothing is written.

        Raises:
            FedcacheError: STORE, when there are none of these templates and weights.
        """
        entry = find(self._manifest, backbone, templates, weights)
        if entry is None:
            raise without(self.path, backbone)
        slug = slug_of(backbone)
        if self._manifest.texts[slug][-1]["id"] == entry["id"]:
            return False
        with self._edit() as manifest:
            now = manifest.texts.get(slug, [])
            manifest.texts[slug] = sorted(now, key=lambda e: e["id"] == entry["id"])  # stable: only this one moves
        return True

    def text(self, backbone: str, templates: Sequence[str] | None = None) -> NDArray[np.float32]:
        """Text features [C, D], unit rows; the current ones unless templates are named.

        Raises:
            FedcacheError: STORE, with the command that makes them; CORRUPT.
        """
        entry = find(self._manifest, backbone, templates, None)
        if entry is None:
            raise without(self.path, backbone)
        return read(self.path, backbone, entry)

    def put_text(
        self, backbone: str, templates: Sequence[str], matrix: NDArray[np.float32], meta: Mapping[str, Any]
    ) -> None:
        """Write text features [C, D] of a backbone; they become the current ones.

        The same templates and meta again replace what they made before.

        Raises:
            FedcacheError: CORRUPT, for values that are not finite; BUG, for another shape.
        """
        values = np.asarray(matrix)
        if values.ndim != 2 or not values.shape[1]:
            raise FedcacheError(
                Exit.BUG, f"Text features of {backbone} have shape {values.shape}.", "Expected [classes, D]."
            )
        values = files.stored(values, "float32", (), 0, f"text features of {backbone}")
        slug = slug_of(backbone)
        check_name("backbone", slug)
        entry = {"templates": list(templates), "meta": dict(meta)}
        name = digest_of(entry)[:8]
        place = self.path / "text" / slug / name
        with self._edit() as manifest:
            parts = {
                f"text/{slug}/zarr.json": files.group_metadata({"backbone": backbone}),
                f"text/{slug}/{name}/zarr.json": files.array_metadata(
                    values.shape, "float32", max(1, len(values)), {"templates": list(templates)}
                ),
            }
            crc = files.write_chunk_file(files.chunk_path(place, 0, 2), values, max(1, len(values)), "float32")
            for relative, raw in parts.items():
                write_atomic(self.path / relative, raw)
                manifest.files[relative] = sha256_hex(raw)
            kept = [e for e in manifest.texts.get(slug, []) if e["id"] != name]
            manifest.texts[slug] = [*kept, {**entry, "id": name, "shape": list(values.shape), "crc": crc}]

    @contextmanager
    def _edit(self) -> Iterator[Manifest]:
        """The manifest as it is now, to change under its lock; written when the block ends well."""
        lock = self.path / "locks" / "manifest.lock"
        with held(lock, f"the manifest of {self.path}", wait=True), writing(self.path, 0):
            manifest = read_manifest(self.path)
            sweep_inside(self.path)
            yield manifest
            manifest.write(self.path)
            self.refresh()

    @property
    def partitions(self) -> list[str]:
        """Names of the saved partitions."""
        places = (name for name in self._manifest.files if name.startswith("partitions/"))
        return sorted(Path(name).stem if name.endswith(".json") else name for name in places)

    def partition(self, name: str) -> dict[str, Any]:
        """The payload of a saved partition; it carries its own digest, which its reader checks.

        Raises:
            FedcacheError: STORE when there is none of that name; CORRUPT.
        """
        if name not in self.partitions:
            raise FedcacheError(
                Exit.STORE, f"{self.path.name} has no partition {name!r}.", "Make one: fedcache partition --help"
            )
        return self._settled(lambda: self._partition(name))

    def _partition(self, name: str) -> dict[str, Any]:
        path = self.path / "partitions" / f"{name}.json"
        try:
            raw = read_whole(path)
        except OSError as error:
            raise files.damaged(f"partition {name}", path, "is missing or unreadable") from error
        if sha256_hex(raw) != self._manifest.files[f"partitions/{name}.json"]:
            raise files.damaged(f"partition {name}", path, "does not have the sha256 of the manifest")
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise files.damaged(f"partition {name}", path, "is not JSON") from error
        if not isinstance(found, dict):
            raise files.damaged(f"partition {name}", path, "is not a partition")
        return found

    def put_partition(self, name: str, payload: Mapping[str, Any]) -> None:
        """Save a partition under a name, replacing one of that name; the same content again writes nothing."""
        check_name("partition", name)
        raw = canonical_json(dict(payload))
        relative = f"partitions/{name}.json"
        path = self.path / relative
        if self._manifest.files.get(relative) == sha256_hex(raw) and path.is_file() and path.read_bytes() == raw:
            return
        with self._edit() as manifest:
            files.make_directories(path.parent)
            write_atomic(path, raw)
            manifest.files[relative] = sha256_hex(raw)

    def Xy(  # noqa: N802  (what scikit-learn calls them)
        self, backbones: str | Sequence[str] | None = None, split: str | None = "train"
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """(X float32 [N, D], y int64 [N]) of the readable rows, for scikit-learn; first views, backbones side by side.

        Args:
            backbones: names; None for every array of features.
            split: train, test, validation, or None for all rows. y is -1 where a label is not known.

        Raises:
            FedcacheError: USAGE for an unknown split; STORE for features that are not there; CORRUPT.
        """
        from fedcache.store.selection import keys_of, rows_of

        keys, rows = keys_of(self, backbones), rows_of(self, split)
        parts = [self.reader(key).rows(rows)[:, 0].astype(np.float32) for key in keys]
        return np.concatenate(parts, axis=1), self.samples.label[rows].astype(np.int64)

    def torch_dataset(
        self, backbones: str | Sequence[str] | None = None, split: str | None = "train"
    ) -> Dataset[tuple[Tensor, int]]:
        """The rows of ``Xy`` as a ``torch.utils.data.Dataset`` that reads each row when it is asked for.

        It can be handed to the workers of a ``DataLoader``, also spawned ones. Arguments and errors as of ``Xy``.
        """
        from fedcache.store.selection import keys_of, rows_of
        from fedcache.store.torch_view import FeatureRows

        rows = rows_of(self, split)
        return FeatureRows(
            self.path.resolve(), keys_of(self, backbones), rows, self.samples.label[rows].astype("int64")
        )

    def frame(self) -> Any:
        """pandas columns of the rows: uid, name, label, class, domain, split, ok; features are ``Xy``'s.

        Raises:
            FedcacheError: ENVIRONMENT without pandas; CORRUPT.
        """
        from fedcache.store.selection import SPLITS

        s = self.samples
        return data_frame(
            {
                "uid": [row.tobytes().hex() for row in s.uid],
                "name": list(s.name),
                "label": s.label,
                "class": [s.classes[i] if i >= 0 else None for i in s.label],
                "domain": [s.domains[i] for i in s.domain],
                "split": [SPLITS[i] for i in s.split],
                "ok": s.ok == 1,
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """What the manifest says, plain JSON values; rows and features are not among them."""
        m = self._manifest
        return {
            "path": str(self.path),
            "dataset": dict(self.dataset),
            "rows": self.rows,
            "ok": self.rows_ok,
            "classes": list(m.classes),
            "domains": list(m.domains),
            "arrays": [{"key": k, **_described(a)} for k, a in self.arrays.items()],
            "texts": {k: [list(e["templates"]) for e in v] for k, v in self.texts.items()},
            "partitions": self.partitions,
        }

    def _repr_html_(self) -> str:
        m = self._manifest
        some = ", ".join(m.classes[:10]) + (f", .. ({len(m.classes):,})" if len(m.classes) > 10 else "")
        title = f"{self.dataset['slug']}: {self.rows_ok:,} of {self.rows:,} images; classes {some}; {self.path}"
        rows = [(k, *_described(a).values()) for k, a in self.arrays.items()]
        return html_table(title, ("array", "backbone", "shape", "dtype"), rows)

    def append_history(self, event: Mapping[str, Any]) -> None:
        """Note what was measured; the one file of a store with times in it."""
        with held(self.path / "locks" / "history.lock", f"the history of {self.path}", wait=True):
            append_event(self.path, event)


def _described(info: ArrayInfo) -> dict[str, Any]:
    return {"backbone": str(info.recipe.get("backbone", "")), "shape": list(info.shape), "dtype": info.dtype}
