"""The small files of a store beside its arrays: unreadable images, saved partitions, and the history.

``quarantine.jsonl`` lists the rows whose image could not be read, one line each, sorted by row; ``samples/ok`` is its
complement. Both are replaced just before the manifest that lists them; in between, the journal of the array that
brought the new rows vouches for them. ``history.jsonl`` is what was measured, with times; the one file of a store that
no identity promise covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError
from fedcache.parsing import parse_json
from fedcache.store import chunks as files
from fedcache.store.files import (
    append_line,
    canonical_json,
    parse_signed,
    read_whole,
    sha256_hex,
    to_signed,
    write_atomic,
)
from fedcache.store.journal import journal_path, journals
from fedcache.store.machine import explain_disk_errors
from fedcache.store.manifest import Manifest

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
    if found != expected and not any(c["quarantine"] == found for j in journals(store) for c in j.commits):
        raise _damaged(path, "does not have the sha256 of the manifest")
    try:
        entries = [parse_json(line) for line in raw.splitlines()]
        return {int(e["row"]): (str(e["name"]), str(e["reason"])) for e in entries if 0 <= e["row"] < manifest.rows}
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
    events, damaged = [], []
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
    there = {p.name for p in folder.iterdir() if p.is_dir()} - manifest.arrays.keys() if folder.is_dir() else set()
    there = {key for key in there if not journal_path(store, key).exists()}
    if not there:
        return []
    events, _ = read_history(store)
    return sorted(there & {str(key) for event in events for key in event.get("keys", ())})


def read_partition(store: Path, manifest: Manifest, name: str) -> dict[str, Any]:
    """The payload of a partition that the manifest lists. Raises CorruptionError."""
    relative = f"partitions/{name}.json"
    path = store / relative
    try:
        raw = read_whole(path)
    except OSError as error:
        raise files.damaged(f"partition {name}", path, "is missing or unreadable") from error
    if sha256_hex(raw) != manifest.files[relative]:
        raise files.damaged(f"partition {name}", path, "does not have the sha256 of the manifest")
    try:
        found = parse_json(raw)
    except (ValueError, RecursionError) as error:
        raise files.damaged(f"partition {name}", path, "is not JSON") from error
    if not isinstance(found, dict):
        raise files.damaged(f"partition {name}", path, "is not a partition")
    return found
