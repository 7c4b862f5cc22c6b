"""Words that a user gives to runs: ``tags.json`` beside a result, which no digest covers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from fedcache.errors import CorruptionError, UsageError
from fedcache.parsing import parse_json
from fedcache.store.files import write_atomic

TAGS = "tags.json"
OF_TAG = "tag:"
"""Begins what names all runs with a tag where a run is named: ``tag:baseline``."""


def check_tag(tag: str) -> str:
    """A tag that may be given. Raises UsageError for one that is no plain word."""
    if not re.fullmatch(r"\w[\w.+-]{0,63}", tag):
        raise UsageError(
            f"{tag!r} is no tag: one word of at most 64 letters, digits and . _ + -.", "fedcache runs tag baseline RUN"
        )
    return tag


def tags_of(run: Path) -> tuple[str, ...]:
    """The tags of the run in a directory, sorted. Raises CorruptionError for a file that is no list of words."""
    try:
        found = parse_json((run / TAGS).read_bytes())
        if not isinstance(found, list) or not all(isinstance(tag, str) for tag in found):
            raise ValueError("no list of words")
    except FileNotFoundError:
        return ()
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{run / TAGS} is no list of tags.", f"Mend or remove it:  rm {run / TAGS}") from error
    return tuple(sorted(set(found)))


def write_tags(run: Path, tags: Iterable[str]) -> None:
    """Give the run in a directory these tags, and no others."""
    kept = sorted(set(tags))
    if kept:
        write_atomic(run / TAGS, json.dumps(kept, ensure_ascii=False).encode() + b"\n")
    else:
        (run / TAGS).unlink(missing_ok=True)
