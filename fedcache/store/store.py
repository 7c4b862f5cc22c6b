"""The feature store: one dataset, any number of backbones, read without torch and without zarr.

FORMAT.md in this folder is the specification. Opening a store reads ``manifest.json`` only; every other byte is
verified when it is first used.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import Exit, FedcacheError
from fedcache.store import chunks as files
from fedcache.store.files import (
    append_line,
    canonical_json,
    digest_of,
    fsync_directory,
    make_private,
    read_lines,
    sha256_hex,
    write_atomic,
)
from fedcache.store.journal import read_journal
from fedcache.store.lock import held
from fedcache.store.manifest import SAFE, ArrayInfo, Manifest, read_manifest
from fedcache.store.reader import Reader
from fedcache.store.writer import ArrayWriter

__all__ = ["ArrayInfo", "ArrayWriter", "Reader", "Samples", "Store"]

COLUMNS = {"uid": "uint8", "label": "int32", "domain": "int16", "split": "uint8", "ok": "uint8"}


@dataclass(frozen=True)
class Samples:
    """One entry per row of the store.

    Attributes:
        uid: uint8 [N, 16], identity of the image.
        name: N names inside the dataset, sorted.
        label: int32 [N], -1 unknown.
        domain: int16 [N].
        split: uint8 [N], 0 train, 1 test, 2 validation.
        ok: uint8 [N], 0 where the image could not be read.
        classes: names in label order.
        domains: names in domain order.
    """

    uid: NDArray[np.uint8]
    name: tuple[str, ...]
    label: NDArray[np.int32]
    domain: NDArray[np.int16]
    split: NDArray[np.uint8]
    ok: NDArray[np.uint8]
    classes: tuple[str, ...]
    domains: tuple[str, ...]

    def checked(self) -> Samples:
        """Itself with every column in its stored dtype.

        Raises:
            FedcacheError: USAGE, when lengths or codes do not fit each other.
        """
        rows = len(self.name)
        out = {key: np.ascontiguousarray(getattr(self, key), dtype) for key, dtype in COLUMNS.items()}
        shapes = {key: value.shape for key, value in out.items()}
        wanted = {key: (rows, 16) if key == "uid" else (rows,) for key in COLUMNS}
        if shapes != wanted:
            raise FedcacheError(Exit.USAGE, f"Columns of {rows} rows have shapes {shapes}.", f"Expected {wanted}.")
        for key, names, low in (("label", self.classes, -1), ("domain", self.domains, 0)):
            if rows and not (low <= int(out[key].min()) and int(out[key].max()) < len(names)):
                raise FedcacheError(
                    Exit.USAGE,
                    f"{key} holds {out[key].min()}..{out[key].max()}, but there are {len(names)} names.",
                    f"Give one name per {key}.",
                )
        return Samples(name=tuple(self.name), classes=tuple(self.classes), domains=tuple(self.domains), **out)


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
    def create(cls, path: Path, samples: Samples, *, dataset: Mapping[str, Any]) -> Store:
        """A store of ``samples`` without features; a store of the same dataset is opened instead.

        It is built beside its place and renamed, so that it exists whole or not at all.

        Raises:
            FedcacheError: STORE, when another dataset lies at ``path``.
        """
        if (path / "manifest.json").exists():
            return cls._same(path, dataset)
        if path.exists() and any(path.iterdir()):
            raise FedcacheError(
                Exit.STORE, f"{path} exists and is not a fedcache store.", "Choose another place with --store."
            )
        samples = samples.checked()
        temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        shutil.rmtree(temporary, ignore_errors=True)
        make_private(temporary)
        try:
            _write_samples(temporary, samples, dict(dataset))
            if path.exists():
                path.rmdir()
            temporary.rename(path)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            if (path / "manifest.json").exists():  # somebody was faster
                return cls._same(path, dataset)
            raise
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
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
        """The columns, verified.

        Raises:
            FedcacheError: CORRUPT.
        """
        m = self._manifest
        columns: dict[str, Any] = {}
        for key, dtype in COLUMNS.items():
            shape = (m.rows, 16) if key == "uid" else (m.rows,)
            columns[key] = np.frombuffer(self._column(key, len(shape)), np.dtype(dtype).newbyteorder("<"))[
                : int(np.prod(shape))
            ].reshape(shape)
        name = files.decode_strings(self._column("name", 1))[: m.rows]
        return Samples(name=name, classes=m.classes, domains=m.domains, **columns)

    def _column(self, key: str, axes: int) -> bytes:
        place = files.chunk_path(self.path / "samples" / key, 0, axes)
        crc = self._manifest.samples.get(key)
        try:
            return files.read_checked(place, crc, f"samples/{key}")
        except FedcacheError:
            # Between the replacement of this column and that of the manifest, a journal vouches for the new one.
            announced = [j.commit["ok"] for j in self._journals() if j.commit and "ok" in j.commit]
            if key != "ok" or not announced:
                raise
            for candidate in announced:
                try:
                    return files.read_checked(place, candidate, f"samples/{key}")
                except FedcacheError:
                    continue
            raise

    def _journals(self) -> list[Any]:
        return [read_journal(path) for path in sorted(self.path.glob("journal-*.jsonl"))]

    def unfinished(self) -> list[dict[str, Any]]:
        """Arrays in flight: name, chunks kept, chunks in all."""
        out = []
        for journal in self._journals():
            if journal.header is None:
                continue
            shape, rows = journal.header["shape"], journal.header["chunk_rows"]
            name = journal.path.name.removeprefix("journal-").removesuffix(".jsonl")
            out.append({"name": name, "kept": len(journal.chunks), "chunks": -(-shape[0] // rows)})
        return out

    def quarantined(self) -> list[dict[str, Any]]:
        """Rows whose image could not be read: row, name, reason."""
        return list(read_lines(self.path / "quarantine.jsonl"))

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
        _safe("array", key)
        return ArrayWriter(
            self, key, shape=shape, dtype=dtype, chunk_rows=chunk_rows, recipe=recipe, how=how, wait=wait, fresh=fresh
        )

    @property
    def texts(self) -> dict[str, list[dict[str, Any]]]:
        """Text features per backbone, oldest first."""
        return self._manifest.texts

    def _text_entry(self, backbone: str, templates: Sequence[str] | None, weights: str | None) -> dict[str, Any] | None:
        entries: list[dict[str, Any]] = self._manifest.texts.get(_slug(backbone), [])
        for entry in reversed(entries):
            if templates is not None and entry["templates"] != list(templates):
                continue
            if weights is not None and entry["meta"].get("weights") != weights:
                continue
            found: dict[str, Any] = entry
            return found
        return None

    def has_text(self, backbone: str, templates: Sequence[str] | None = None, *, weights: str | None = None) -> bool:
        """Whether there are text features of a backbone, for these templates and weights if given."""
        return self._text_entry(backbone, templates, weights) is not None

    def text(self, backbone: str, templates: Sequence[str] | None = None) -> NDArray[np.float32]:
        """Text features [C, D], unit rows; those written last unless templates are named.

        Raises:
            FedcacheError: STORE, with the command that makes them; CORRUPT.
        """
        entry = self._text_entry(backbone, templates, None)
        if entry is None:
            raise FedcacheError(
                Exit.STORE,
                f"{self.path.name} has no text features of {backbone}.",
                f"fedcache extract --store {self.path} --backbones {backbone}",
            )
        place = files.chunk_path(self.path / "text" / _slug(backbone) / entry["id"], 0, 2)
        raw = files.read_checked(place, entry["crc"], f"text features of {backbone}")
        return np.frombuffer(raw, "<f4").reshape(entry["shape"])

    def put_text(
        self, backbone: str, templates: Sequence[str], matrix: NDArray[np.float32], meta: Mapping[str, Any]
    ) -> None:
        """Write text features [C, D] of a backbone."""
        if not np.isfinite(matrix).all():
            raise FedcacheError(
                Exit.CORRUPT,
                f"Text features of {backbone} are not finite.",
                "Check its weights: fedcache backbones verify",
            )
        slug = _slug(backbone)
        _safe("backbone", slug)
        entry = {"templates": list(templates), "meta": dict(meta)}
        name = digest_of(entry)[:8]
        place = self.path / "text" / slug / name
        with held(self.path / "locks" / "manifest.lock", f"the manifest of {self.path}", wait=True):
            manifest = read_manifest(self.path)
            place.mkdir(parents=True, exist_ok=True)
            parts = {
                f"text/{slug}/zarr.json": files.group_metadata({"backbone": backbone}),
                f"text/{slug}/{name}/zarr.json": files.array_metadata(
                    matrix.shape, "float32", max(1, len(matrix)), {"templates": list(templates)}
                ),
            }
            for relative, raw in parts.items():
                write_atomic(self.path / relative, raw)
                manifest.files[relative] = sha256_hex(raw)
            chunk = files.chunk_path(place, 0, 2)
            crc = files.write_chunk_file(chunk, matrix.astype("<f4"), max(1, len(matrix)), "float32")
            kept = [e for e in manifest.texts.get(slug, []) if e["id"] != name]
            manifest.texts[slug] = [*kept, {**entry, "id": name, "shape": list(matrix.shape), "crc": crc}]
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
        import json

        if name not in self.partitions:
            raise FedcacheError(
                Exit.STORE, f"{self.path.name} has no partition {name!r}.", "Make one: fedcache partition --help"
            )
        path = self.path / "partitions" / f"{name}.json"
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise files.damaged(f"partition {name}", path, "is missing or not JSON") from error
        if not isinstance(found, dict):
            raise files.damaged(f"partition {name}", path, "is not a partition")
        return found

    def put_partition(self, name: str, payload: Mapping[str, Any]) -> None:
        """Save a partition under a name; the same content again writes nothing."""
        _safe("partition", name)
        raw = canonical_json(dict(payload))
        relative = f"partitions/{name}.json"
        if self._manifest.files.get(relative) == sha256_hex(raw) and (self.path / relative).exists():
            return
        with held(self.path / "locks" / "manifest.lock", f"the manifest of {self.path}", wait=True):
            manifest = read_manifest(self.path)
            (self.path / "partitions").mkdir(exist_ok=True)
            write_atomic(self.path / relative, raw)
            manifest.files[relative] = sha256_hex(raw)
            manifest.write(self.path)
            self.refresh()

    def append_history(self, event: Mapping[str, Any]) -> None:
        """Note what was measured; the one file of a store with times in it."""
        append_line(self.path / "history.jsonl", canonical_json(dict(event)))


def _slug(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)


def _safe(what: str, name: str) -> None:
    if not SAFE.fullmatch(name):
        raise FedcacheError(
            Exit.USAGE,
            f"{what} name {name!r} is not usable as a file name.",
            "Use letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 128.",
        )


def _write_samples(path: Path, samples: Samples, dataset: dict[str, Any]) -> None:
    """Everything of a store without features, into an empty directory."""
    rows = len(samples.name)
    chunk_rows = max(1, rows)
    (path / "locks").mkdir(mode=0o700)
    sidecars = {
        "zarr.json": files.group_metadata({"fedcache": 1, "dataset": dataset["slug"]}),
        "samples/zarr.json": files.group_metadata({"splits": ["train", "test", "validation"]}),
        "features/zarr.json": files.group_metadata({}),
        "text/zarr.json": files.group_metadata({}),
    }
    codes = {"label": {"classes": list(samples.classes)}, "domain": {"domains": list(samples.domains)}}
    crcs = {}
    for key, dtype in COLUMNS.items():
        values = getattr(samples, key)
        sidecars[f"samples/{key}/zarr.json"] = files.array_metadata(values.shape, dtype, chunk_rows, codes.get(key, {}))
        crcs[key] = files.write_chunk_file(
            files.chunk_path(path / "samples" / key, 0, values.ndim), values, chunk_rows, dtype
        )
    sidecars["samples/name/zarr.json"] = files.array_metadata((rows,), "string", chunk_rows, {})
    crcs["name"] = _write_names(files.chunk_path(path / "samples" / "name", 0, 1), samples.name)
    for relative, raw in sidecars.items():
        place = path / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, raw)
    Manifest(
        dataset=dataset,
        rows=rows,
        rows_ok=int(samples.ok.sum()),
        classes=samples.classes,
        domains=samples.domains,
        samples=crcs,
        files={relative: sha256_hex(raw) for relative, raw in sidecars.items()},
    ).write(path)


def _write_names(path: Path, names: Sequence[str]) -> int:
    import struct

    raw = files.encode_strings(names or [""])
    crc = files.checksum(raw)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, raw, struct.pack("<I", crc))
    return crc
