"""Writing one array: chunk files, one journal line each, the manifest last."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import Exit, FedcacheError
from fedcache.store import chunks as files
from fedcache.store.files import canonical_json, digest_of, sha256_hex, write_atomic
from fedcache.store.journal import Journal, read_journal
from fedcache.store.lock import held
from fedcache.store.manifest import ArrayInfo, read_manifest

if TYPE_CHECKING:
    from fedcache.store.store import Store


class ArrayWriter:
    """The one writer of an array, holding its lock from ``with`` to the end of the block.

    Args:
        store: that the array belongs to.
        key: name of the array.
        shape: (N, V, D).
        dtype: stored dtype.
        chunk_rows: rows per chunk file.
        recipe: what determines the values.
        how: how they are computed; must not change while the array is unfinished.
        wait: wait for another writer.
        fresh: discard what is unfinished.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        shape: tuple[int, ...],
        dtype: str,
        chunk_rows: int,
        recipe: dict[str, Any],
        how: dict[str, Any],
        wait: bool = False,
        fresh: bool = False,
    ) -> None:
        self.store, self.key, self.shape, self.dtype = store, key, shape, dtype
        self.chunk_rows, self.recipe, self.how = chunk_rows, recipe, how
        self._wait, self._fresh = wait, fresh
        self.path = store.path / "features" / key
        self.journal = Journal(store.path / f"journal-{key}.jsonl")
        self.finished = False
        self._stack = ExitStack()

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.shape[0] // self.chunk_rows)

    @property
    def kept(self) -> list[int]:
        """Chunks the journal vouches for and whose files confirm it."""
        return sorted(self.journal.chunks)

    @property
    def bad(self) -> dict[int, str]:
        """Reason per bad row, of the chunks kept and written."""
        return {row: reason for row, (_, reason) in self.journal.bad.items()}

    def missing(self) -> list[int]:
        """Chunks still to be written; none when the array was complete already."""
        return [] if self.finished else [k for k in range(self.count) if k not in self.journal.chunks]

    def __enter__(self) -> ArrayWriter:
        lock = self.store.path / "locks" / f"{self.key}.lock"
        self._stack.enter_context(held(lock, f"{self.key} in {self.store.path}", wait=self._wait))
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _open(self) -> None:
        known = read_manifest(self.store.path).arrays.get(self.key)
        if known is not None:
            # Finished, by us or by the writer we waited for. Its chunk size may differ from what we would choose.
            self.finished = True
            self.chunk_rows = known.chunk_rows
            self.journal.chunks = dict(enumerate(known.chunks))
            self.journal.path.unlink(missing_ok=True)
            return
        if self._fresh:
            self.journal.path.unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)
        header = {
            "format": 1,
            "recipe": digest_of(self.recipe),
            "how": self.how,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "chunk_rows": self.chunk_rows,
        }
        self.journal = read_journal(self.journal.path)
        self.journal.cut()
        if self.journal.header is not None and self.journal.header != header:
            raise self._differs(header)
        if self.journal.header is None:
            self.journal.path.unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)
            write_atomic(self.path / "zarr.json", self._metadata())
            self.journal = Journal(self.journal.path)
            self.journal.begin(header)
        for left in self.path.rglob("*.partial"):
            left.unlink(missing_ok=True)
        self._confirm()

    def _metadata(self) -> bytes:
        attributes = {"name": self.recipe.get("backbone", self.key), "recipe": digest_of(self.recipe)}
        return files.array_metadata(self.shape, self.dtype, self.chunk_rows, attributes)

    def _differs(self, header: dict[str, Any]) -> FedcacheError:
        before = self.journal.header or {}
        flat = {**before.get("how", {}), **{k: v for k, v in before.items() if k != "how"}}
        now = {**header["how"], **{k: v for k, v in header.items() if k != "how"}}
        changed = [
            f"{k} was {flat.get(k)!r}, now {now.get(k)!r}" for k in sorted({*flat, *now}) if flat.get(k) != now.get(k)
        ]
        return FedcacheError(
            Exit.STORE,
            f"{self.key} was begun in another way: {'; '.join(changed)}. Mixed rows would not be comparable.",
            "Go on with the settings it was begun with, or discard the unfinished part with --fresh.",
        )

    def _confirm(self) -> None:
        """Keep only chunks whose file has the checksum the journal vouches for."""
        for chunk, crc in list(self.journal.chunks.items()):
            file = files.chunk_path(self.path, chunk, len(self.shape))
            try:
                files.map_chunk(file, (self.chunk_rows, *self.shape[1:]), self.dtype, crc, self.key)
            except FedcacheError:
                del self.journal.chunks[chunk]

    def write(self, chunk: int, rows: NDArray[Any], bad: Mapping[int, str] | None = None) -> None:
        """Write one chunk and vouch for it.

        Args:
            chunk: its number.
            rows: [n, V, D] of any float dtype (or uint8); rows of bad images are NaN (0 for uint8).
            bad: reason per row number of the dataset whose image could not be read.

        Raises:
            FedcacheError: CORRUPT, for non-finite values in any other row, before or after the cast.
        """
        start = chunk * self.chunk_rows
        expected = min(self.chunk_rows, self.shape[0] - start)
        if rows.shape != (expected, *self.shape[1:]):
            raise ValueError(f"chunk {chunk} has shape {rows.shape}, expected {(expected, *self.shape[1:])}")
        reasons = {row: reason for row, reason in (bad or {}).items() if start <= row < start + expected}
        self._check_finite(rows, start, reasons)
        crc = files.write_chunk_file(
            files.chunk_path(self.path, chunk, len(self.shape)), rows, self.chunk_rows, self.dtype
        )
        names = self.store.samples.name if reasons else ()
        self.journal.add(chunk, crc, expected, {row: (names[row], why) for row, why in reasons.items()})

    def _check_finite(self, rows: NDArray[Any], start: int, bad: Mapping[int, str]) -> None:
        if not self.dtype.startswith("float"):
            return
        good = np.ones(len(rows), bool)
        good[[row - start for row in bad]] = False
        with np.errstate(over="ignore"):
            stored = rows.astype(self.dtype, copy=False)
        for values, why, hint in (
            (rows, "is not finite", "The backbone's weights or its compute dtype overflow: try --dtype float32."),
            (stored, f"does not fit {self.dtype}", "Store these features with --recipe dtype=float32."),
        ):
            wrong = np.flatnonzero(good & ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)) + start
            if len(wrong):
                shown = ", ".join(map(str, wrong[:10])) + (" ..." if len(wrong) > 10 else "")
                raise FedcacheError(
                    Exit.CORRUPT, f"{self.key}: the feature of {len(wrong)} readable images {why}: row {shown}.", hint
                )

    def complete(self) -> None:
        """Make the array part of the store: sidecars, then the manifest, then the journal goes.

        A crash between any two steps leaves a store that reads correctly and a journal from which this runs again.
        """
        if self.finished:
            return
        if self.missing():
            raise ValueError(f"{self.key} lacks chunks {self.missing()[:5]}")
        with held(self.store.path / "locks" / "manifest.lock", f"the manifest of {self.store.path}", wait=True):
            manifest = read_manifest(self.store.path)
            self._quarantine(manifest)
            manifest.files[f"features/{self.key}/zarr.json"] = sha256_hex(self._metadata())
            manifest.arrays[self.key] = ArrayInfo(
                self.recipe,
                self.how,
                self.shape,
                self.dtype,
                self.chunk_rows,
                tuple(self.journal.chunks[k] for k in range(self.count)),
            )
            manifest.write(self.store.path)
            self.store.refresh()
        self.journal.path.unlink()
        self.finished = True

    def _quarantine(self, manifest: Any) -> None:
        """Mark bad rows in ``samples/ok`` and list them in ``quarantine.jsonl``, announced in the journal first."""
        path = self.store.path / "quarantine.jsonl"
        known = {e["row"]: (e["name"], e["reason"]) for e in self.store.quarantined()}
        union = {**self.journal.bad, **known}
        if not union:
            return
        lines = [canonical_json({"row": r, "name": n, "reason": why}) + b"\n" for r, (n, why) in sorted(union.items())]
        ok = np.ones(manifest.rows, np.uint8)
        ok[sorted(union)] = 0
        crc = files.checksum(files.encode(ok, max(1, manifest.rows), "uint8"))
        digest = sha256_hex(*lines)
        self.journal.announce({"ok": crc, "quarantine": digest})
        place: Path = files.chunk_path(self.store.path / "samples" / "ok", 0, 1)
        files.write_chunk_file(place, ok, max(1, manifest.rows), "uint8")
        write_atomic(path, *lines)
        manifest.samples["ok"] = crc
        manifest.files["quarantine.jsonl"] = digest
        manifest.rows_ok = int(ok.sum())
