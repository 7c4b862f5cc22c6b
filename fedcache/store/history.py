"""``history.jsonl``: what was measured, with times; the one file of a store that no identity promise covers.

Every line is signed JSON, so that ``verify`` can tell a damaged line from a true one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcache.store.disk_errors import explain_disk_errors
from fedcache.store.files import append_line, read_whole
from fedcache.store.signed_json import parse_signed, to_signed

NAME = "history.jsonl"


def append_event(store: Path, event: Mapping[str, Any]) -> None:
    """Append one event; a last line that a power cut tore is cut off first. The caller holds the history's lock."""
    path = store / NAME
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
        raw = read_whole(store / NAME)
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
