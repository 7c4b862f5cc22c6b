"""Words that a user gives to runs: ``tags.json`` beside a result, which no digest covers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from fedcache.errors import CorruptionError, UsageError, shell_word
from fedcache.parsing import parse_json
from fedcache.runs.directory import name_of_run
from fedcache.store.files import read_whole
from fedcache.store.sealed import read_sealed, write_sealed

TAGS = "tags.json"
TAG = r"\w[\w.+-]{0,63}"
OF_TAG = "tag:"
"""Begins what names all runs with a tag where a run is named: ``tag:baseline``."""


def check_tag(tag: str) -> str:
    """A tag that may be given. Raises UsageError for one that is no plain word."""
    if not re.fullmatch(TAG, tag):
        raise UsageError(
            f"{tag!r} is no tag: one word of at most 64 letters, digits and . _ + -.",
            "fedcache runs tag baseline RUN",
        )
    return tag


def tags_of(run: Path) -> tuple[str, ...]:
    """The tags of the run in a directory, sorted. Raises CorruptionError for a file that is not what was written."""
    path = run / TAGS
    try:
        found = read_sealed(path, _what(run))
    except CorruptionError as error:
        plain = _plain_words(path)
        if plain:
            raise CorruptionError(
                f"{path} has no seal: an earlier release of fedcache wrote it, or an editor.",
                " && ".join(
                    [
                        f"rm {shell_word(path)}",
                        *(
                            f"fedcache runs tag {shell_word(tag)} {shell_word(run.name)}"
                            for tag in plain
                        ),
                    ]
                ),
            ) from error
        raise CorruptionError(
            error.message,
            f"Its tags are lost. Remove it and give them again:  rm {shell_word(path)}",
        ) from error
    if found is None:
        return ()
    return tuple(sorted(set(found.content)))


def write_tags(run: Path, tags: Iterable[str]) -> None:
    """Give the run in a directory these tags, and no others."""
    kept = sorted(set(tags))
    if kept:
        write_sealed(run / TAGS, _what(run), kept)
    else:
        (run / TAGS).unlink(missing_ok=True)


def _what(run: Path) -> dict[str, str]:
    return {"kind": "tags of a run", "run": name_of_run(run)}


def _plain_words(path: Path) -> list[str]:
    """The words of a plain JSON list of tags; [] for any other file."""
    try:
        found = parse_json(read_whole(path))
    except (OSError, ValueError):
        return []
    known = isinstance(found, list) and all(
        isinstance(tag, str) and re.fullmatch(TAG, tag) for tag in found
    )
    if known:
        return list(found)
    return []
