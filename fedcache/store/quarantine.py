"""``quarantine.jsonl``: the rows whose image could not be read, one line each, sorted by row.

``samples/ok`` is its complement. Both are replaced just before the manifest that lists them; in between, the journal of
the array that brought the new rows vouches for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError
from fedcache.store import chunks as files
from fedcache.store.files import canonical_json, read_whole, sha256_hex, write_atomic
from fedcache.store.journal import journals
from fedcache.store.manifest import Manifest

NAME = "quarantine.jsonl"

VANISHED = "is no longer in the dataset"
"""The reason of a row that a store has from an earlier one and whose image has gone: no defect, nor counted so."""


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
    if rows or NAME in manifest.files:
        lines = lines_of(rows)
        write_atomic(store / NAME, lines)
        manifest.files[NAME] = sha256_hex(lines)


def _ok(manifest: Manifest, rows: Mapping[int, tuple[str, str]]) -> NDArray[np.uint8]:
    ok = np.ones(manifest.rows, np.uint8)
    ok[sorted(rows)] = 0
    return ok


def read_quarantine(store: Path, manifest: Manifest) -> dict[int, tuple[str, str]]:
    """(name, reason) per bad row, as the manifest or a journal's commit has it.

    Raises:
        CorruptionError, when neither vouches for the file.
    """
    path = store / NAME
    expected = manifest.files.get(NAME)
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
        entries = [json.loads(line) for line in raw.splitlines()]
        return {int(e["row"]): (str(e["name"]), str(e["reason"])) for e in entries if 0 <= e["row"] < manifest.rows}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, "is not what fedcache writes") from error


def _damaged(path: Path, why: str) -> FedcacheError:
    return files.damaged("the list of unreadable images", path, why)
