"""The rows of a store: who they are, and a new store on disk that holds nothing else."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import Exit, FedcacheError
from fedcache.store import chunks as files
from fedcache.store.files import sha256_hex, write_atomic
from fedcache.store.manifest import COLUMNS, FORMAT, Manifest
from fedcache.store.quarantine import replace_sidecars


@dataclass(frozen=True)
class Samples:
    """One entry per row of the store.

    Attributes:
        uid: uint8 [N, 16], identity of the image.
        name: N names inside the dataset, sorted; of a store that grew, those it had and then the new ones.
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


INGESTED = "ingested"
"""``source`` in the description of a dataset that came as embeddings: no image is known of it."""

HELD_OUT = "of each class the fifth with the smallest uids"
"""What ``held_out`` chooses, for a person."""


def held_out(
    label: NDArray[np.int32], domain: NDArray[np.int16], uid: NDArray[np.uint8], among: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """The test set of a dataset that has none: of each (domain, class), the fifth with the smallest uids.

    A function of the content alone: adding or renaming files never moves another image across, up to the one at the
    border, and copies of an image stay on one side. A group of two to four rows gives one, a single row none.

    Args:
        label: [N].
        domain: [N].
        uid: [N, 16].
        among: [N] rows to choose from.

    Returns:
        bool [N].
    """
    chosen = np.zeros(len(label), dtype=bool)
    rows = np.flatnonzero(among)
    # lexsort's last key is the first criterion: domain, label, then the bytes of the uid, then the row.
    keys = (rows, *(uid[rows, i] for i in range(15, -1, -1)), label[rows], domain[rows])
    rows = rows[np.lexsort(keys)]
    group = np.stack([domain[rows], label[rows]], axis=1).astype(np.int64)
    borders = np.flatnonzero(np.any(group[1:] != group[:-1], axis=1)) + 1
    for start, stop in pairwise([0, *borders.tolist(), len(rows)]):
        count = stop - start
        chosen[rows[start : start + (max(1, count // 5) if count > 1 else 0)]] = True
    return chosen


def write_samples(path: Path, samples: Samples, dataset: dict[str, Any], reasons: Mapping[int, str]) -> None:
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
    codes = {"label": {"classes": list(manifest.classes)}, "domain": {"domains": list(manifest.domains)}}
    found = {
        "zarr.json": files.group_metadata({"fedcache": FORMAT, "dataset": manifest.dataset["slug"]}),
        "samples/zarr.json": files.group_metadata({"splits": ["train", "test", "validation"]}),
        "features/zarr.json": files.group_metadata({}),
        "text/zarr.json": files.group_metadata({}),
    }
    rows = manifest.rows
    for key, dtype in {**COLUMNS, "name": "string"}.items():
        shape = (rows, 16) if key == "uid" else (rows,)
        found[f"samples/{key}/zarr.json"] = files.array_metadata(shape, dtype, max(1, rows), codes.get(key, {}))
    return found


def workshop(path: Path) -> Path:
    """A new private directory beside ``path`` in which to build it; what killed builders left there is removed."""
    for left in path.parent.glob(f".{path.name}.*.partial"):
        pid = left.name.removesuffix(".partial").rpartition(".")[2].partition("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process is in the name for the sweep, the rest keeps its threads apart.
    return Path(tempfile.mkdtemp(prefix=f".{path.name}.{os.getpid()}-", suffix=".partial", dir=path.parent))


def sweep_inside(path: Path) -> None:
    """Remove temporary files of killed processes whose final names only the holder of the manifest's lock writes."""
    for folder in (path, path / "samples" / "ok" / "c", path / "partitions"):
        for left in folder.glob(".*.partial"):
            if not left.name.startswith((".journal-", ".history")):
                left.unlink(missing_ok=True)
    for left in (path / "text").rglob(".*.partial"):
        left.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
