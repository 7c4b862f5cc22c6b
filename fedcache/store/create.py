"""A new store on disk: the rows and nothing else."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.errors import StoreError
from fedcache.store import chunks as files
from fedcache.store.files import fsync_directory, sha256_hex, write_atomic
from fedcache.store.lock import is_alive
from fedcache.store.machine import explain_disk_errors
from fedcache.store.manifest import COLUMNS, FORMAT, Manifest, read_manifest, was_store
from fedcache.store.samples import Samples
from fedcache.store.sidecars import replace_sidecars


def create_store(
    path: Path, samples: Samples, dataset: dict[str, Any], reasons: Mapping[int, str]
) -> Manifest:
    """A store without features at ``path``, or the one of the same dataset that is there.

    It is built beside its place and renamed, so that it exists whole or not at all. ``dataset`` is what the manifest
    says of the dataset, ``reasons`` why a row is not ok. Raises StoreError, when another dataset lies at ``path``;
    CorruptionError for a store that is damaged; MachineError, when the disk refuses.
    """
    occupied = path.exists() and (not path.is_dir() or any(path.iterdir()))
    # Looked for last: a store may appear here, whole, at any moment. One that lost its manifest is refused as such.
    if (path / "manifest.json").exists() or was_store(path):
        return _same(path, dataset)
    if occupied:
        raise StoreError(
            f"{path} exists and is not a fedcache store.", "Choose another place with --store."
        )
    samples = samples.checked()
    with explain_disk_errors(path, 64 * len(samples.name)):
        temporary = _building_place(path)
        try:
            _write_samples(temporary, samples, dataset, reasons)
            temporary.rename(path)  # over an empty directory at most
        except OSError:
            if (path / "manifest.json").exists():  # somebody was faster
                return _same(path, dataset)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        fsync_directory(path.parent)
    return read_manifest(path)


def _same(path: Path, dataset: Mapping[str, Any]) -> Manifest:
    """The manifest of a store that is there, when it is of this dataset."""
    found = read_manifest(path)
    if found.dataset["digest"] != dataset["digest"]:
        raise StoreError(
            f"{path} holds {found.dataset['slug']} with digest {found.dataset['digest'][:12]}, "
            f"not {dataset['slug']} with digest {str(dataset['digest'])[:12]}.",
            "Choose another place, or remove what is there.",
        )
    return found


def _write_samples(
    path: Path, samples: Samples, dataset: dict[str, Any], reasons: Mapping[int, str]
) -> None:
    """Everything of a store without features, into an empty directory; ``reasons`` of rows that are not ok."""
    rows = len(samples.name)
    (path / "locks").mkdir(mode=0o700)
    crcs = {}
    for key, dtype in COLUMNS.items():
        values = getattr(samples, key)
        place = files.chunk_path(path / "samples" / key, 0, values.ndim)
        crcs[key] = files.write_chunk_file(place, values, max(1, rows), dtype)
    names = files.encode_strings(samples.name or [""])
    crcs["name"] = files.write_payload(files.chunk_path(path / "samples" / "name", 0, 1), names)
    manifest = Manifest(dataset, rows, rows, samples.classes, samples.domains, crcs)
    for relative, raw in sidecars_of(manifest).items():
        files.make_directories((path / relative).parent)
        write_atomic(path / relative, raw)
        manifest.files[relative] = sha256_hex(raw)
    lost = np.flatnonzero(samples.ok == 0).tolist()
    unread = {row: (samples.name[row], reasons.get(row, "given as unreadable")) for row in lost}
    if unread:
        replace_sidecars(path, manifest, unread)
    manifest.write(path)


def sidecars_of(manifest: Manifest) -> dict[str, bytes]:
    """``zarr.json`` of the groups and of the columns, by path."""
    codes = {
        "label": {"classes": list(manifest.classes)},
        "domain": {"domains": list(manifest.domains)},
    }
    found = {
        "zarr.json": files.group_metadata(
            {"fedcache": FORMAT, "dataset": manifest.dataset["slug"]}
        ),
        "samples/zarr.json": files.group_metadata({"splits": ["train", "test", "validation"]}),
        "features/zarr.json": files.group_metadata({}),
        "text/zarr.json": files.group_metadata({}),
    }
    rows = manifest.rows
    for key, dtype in {**COLUMNS, "name": "string"}.items():
        shape: tuple[int, ...] = (rows,)
        dimensions: tuple[str, ...] = ("row",)
        if key == "uid":
            shape = (rows, 16)
            dimensions = ("row", "byte")
        found[f"samples/{key}/zarr.json"] = files.array_metadata(
            shape, dtype, max(1, rows), codes.get(key, {}), dimensions
        )
    return found


def _building_place(path: Path) -> Path:
    """A new private directory beside ``path`` in which to build it; what killed builders left there is removed."""
    for left in path.parent.glob(f".{path.name}.*.partial"):
        pid = left.name.removesuffix(".partial").rpartition(".")[2].partition("-")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process is in the name for this cleanup, the rest keeps its threads apart.
    return Path(
        tempfile.mkdtemp(prefix=f".{path.name}.{os.getpid()}-", suffix=".partial", dir=path.parent)
    )


def remove_partial_files(path: Path) -> None:
    """Remove temporary files of killed processes whose final names only the holder of the manifest's lock writes."""
    for folder in (path, path / "samples" / "ok" / "c", path / "partitions", path / "groups"):
        for left in folder.glob(".*.partial"):
            if not left.name.startswith((".journal-", ".history")):
                left.unlink(missing_ok=True)
    for left in (path / "text").rglob(".*.partial"):
        left.unlink(missing_ok=True)
