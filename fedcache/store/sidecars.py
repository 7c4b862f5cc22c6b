"""The small files of a store beside its arrays: unreadable images, saved partitions, and the history.

``quarantine.jsonl`` lists the rows whose image could not be read, one line each, sorted by row; ``samples/ok`` is its
complement. Both are replaced just before the manifest that lists them; in between, the journal of the array that
brought the new rows vouches for them. ``history.jsonl`` is what was measured, with times; the one file of a store that
no identity promise covers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, StoreError
from fedcache.parsing import parse_json
from fedcache.store import chunks as files
from fedcache.store.array_file import is_array_file, mapped, read_content
from fedcache.store.files import (
    Buffer,
    append_line,
    canonical_json,
    file_sha256,
    parse_signed,
    read_whole,
    sha256_hex,
    to_signed,
    write_atomic,
)
from fedcache.store.journal import journal_path, journals
from fedcache.store.machine import explain_disk_errors
from fedcache.store.manifest import PARTITION_SUFFIXES, Manifest

QUARANTINE = "quarantine.jsonl"

VANISHED = "is no longer in the dataset"
"""The reason of a row that a store has from an earlier one and whose image has gone: no defect, nor counted so."""

HISTORY = "history.jsonl"


def lines_of(rows: Mapping[int, tuple[str, str]]) -> bytes:
    """The file: {name, reason, row} per row."""
    return b"".join(
        canonical_json({"row": row, "name": name, "reason": reason}) + b"\n"
        for row, (name, reason) in sorted(rows.items())
    )


def commit_of(manifest: Manifest, rows: Mapping[int, tuple[str, str]]) -> dict[str, Any]:
    """The checksums ``samples/ok`` and the list will have once ``rows`` are quarantined; a journal's commit line."""
    raw = files.encode(_ok(manifest, rows), max(1, manifest.rows), "uint8")
    return {"ok": files.checksum(raw), "quarantine": sha256_hex(lines_of(rows))}


def replace_sidecars(store: Path, manifest: Manifest, rows: Mapping[int, tuple[str, str]]) -> None:
    """Write ``samples/ok`` and the list, and enter them in ``manifest``, which the caller writes."""
    ok = _ok(manifest, rows)
    place = files.chunk_path(store / "samples" / "ok", 0, 1)
    manifest.samples["ok"] = files.write_chunk_file(place, ok, max(1, manifest.rows), "uint8")
    manifest.rows_ok = int(ok.sum())
    if rows or QUARANTINE in manifest.files:
        lines = lines_of(rows)
        write_atomic(store / QUARANTINE, lines)
        manifest.files[QUARANTINE] = sha256_hex(lines)


def _ok(manifest: Manifest, rows: Mapping[int, tuple[str, str]]) -> NDArray[np.uint8]:
    ok = np.ones(manifest.rows, np.uint8)
    ok[sorted(rows)] = 0
    return ok


def read_quarantine(store: Path, manifest: Manifest) -> dict[int, tuple[str, str]]:
    """(name, reason) per bad row. Raises CorruptionError, when neither manifest nor journal vouches for the file."""
    path = store / QUARANTINE
    expected = manifest.files.get(QUARANTINE)
    try:
        raw = read_whole(path)
    except FileNotFoundError:
        if expected is None:
            return {}
        raise _damaged(path, "is missing") from None
    except OSError as error:
        raise _damaged(path, "is unreadable") from error
    found = sha256_hex(raw)
    if found != expected and not any(
        c["quarantine"] == found for j in journals(store) for c in j.commits
    ):
        raise _damaged(path, "does not have the sha256 of the manifest")
    try:
        entries = [parse_json(line) for line in raw.splitlines()]
        return {
            int(e["row"]): (str(e["name"]), str(e["reason"]))
            for e in entries
            if 0 <= e["row"] < manifest.rows
        }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, "is not what fedcache writes") from error


def _damaged(path: Path, why: str) -> FedcacheError:
    return files.damaged("the list of unreadable images", path, why)


def append_event(store: Path, event: Mapping[str, Any]) -> None:
    """Append one event; a last line that a power cut tore is cut off first. The caller holds the history's lock."""
    path = store / HISTORY
    with explain_disk_errors(path, 0):
        if path.exists():
            raw = read_whole(path)
            if raw and not raw.endswith(b"\n"):
                with path.open("r+b") as file:
                    file.truncate(raw.rfind(b"\n") + 1)
        append_line(path, to_signed(event))


def read_history(store: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The events, and the numbers (from 1) of lines that are damaged."""
    try:
        raw = read_whole(store / HISTORY)
    except OSError:
        return [], []
    events = []
    damaged = []
    for number, line in enumerate(raw.splitlines(keepends=True), 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("is torn")
            events.append(parse_signed(line[:-1]))
        except ValueError:
            damaged.append(number)
    return events, damaged


def forgotten_arrays(store: Path, manifest: Manifest) -> list[str]:
    """Keys of arrays that lie in a store and are finished by its history, and that neither manifest nor journal knows.

    There are some only where an older manifest was put back; the history is read only where a folder is not listed.
    """
    folder = store / "features"
    there = (
        {p.name for p in folder.iterdir() if p.is_dir()} - manifest.arrays.keys()
        if folder.is_dir()
        else set()
    )
    there = {key for key in there if not journal_path(store, key).exists()}
    if not there:
        return []
    events, _ = read_history(store)
    return sorted(there & {str(key) for event in events for key in event.get("keys", ())})


def partition_file(store: Path, manifest: Manifest, name: str) -> str:
    """The place in the store of a partition: arrays, or JSON of an earlier release. Raises StoreError without one."""
    for suffix in PARTITION_SUFFIXES:
        if (relative := f"partitions/{name}{suffix}") in manifest.files:
            return relative
    raise StoreError(
        f"{store.name} has no partition {name!r}.", "Make one: fedcache partition --help"
    )


def read_partition(store: Path, manifest: Manifest, name: str) -> memoryview:
    """The file of a partition that the manifest lists, mapped. Raises CorruptionError, unless it is the file listed."""
    relative = partition_file(store, manifest, name)
    path = store / relative
    try:
        raw = mapped(path)
    except OSError as error:
        raise files.damaged(f"partition {name}", path, "is missing or unreadable") from error
    if sha256_hex(raw) != manifest.files[relative]:
        raise files.damaged(f"partition {name}", path, "does not have the sha256 of the manifest")
    return raw


def partition_words(store: Path, manifest: Manifest, name: str) -> dict[str, Any]:
    """What a partition says of itself. Raises CorruptionError, also for what is no partition."""
    raw = read_partition(store, manifest, name)
    path = store / partition_file(store, manifest, name)
    try:
        found = read_content(raw) if is_array_file(raw) else parse_json(bytes(raw))
    except ValueError as error:
        raise files.damaged(f"partition {name}", path, "is not JSON") from error
    if not isinstance(found, dict):
        raise files.damaged(f"partition {name}", path, "is not a partition")
    return found


def partition_parts(
    name: str, content: Mapping[str, Any] | Sequence[Buffer]
) -> tuple[str, list[Buffer]]:
    """Where a partition's file lies in the store, and its parts; JSON for what is no list of parts."""
    if isinstance(content, Mapping):
        return f"partitions/{name}.json", [canonical_json(dict(content))]
    return f"partitions/{name}.partition", list(content)


def is_written(store: Path, manifest: Manifest, relative: str, parts: Sequence[Buffer]) -> bool:
    """Whether a sidecar is there already, with this content."""
    path = store / relative
    digest = sha256_hex(*parts)
    return manifest.files.get(relative) == digest and path.is_file() and file_sha256(path) == digest


def write_partition(
    store: Path, manifest: Manifest, name: str, relative: str, parts: Sequence[Buffer]
) -> list[Path]:
    """Write the file of a partition and enter it in ``manifest``, which the caller writes.

    Returns:
        files of the same name in another form, which go once the manifest does not list them.
    """
    path = store / relative
    files.make_directories(path.parent)
    write_atomic(path, *parts)
    others = [
        p
        for s in PARTITION_SUFFIXES
        if (p := f"partitions/{name}{s}") in manifest.files and p != relative
    ]
    for other in others:
        del manifest.files[other]
    manifest.files[relative] = sha256_hex(*parts)
    return [store / other for other in others]
