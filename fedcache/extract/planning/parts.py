"""Parts of a dataset that are extracted separately: how a job names its part, and how all parts are joined."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from fedcache.config import Home
from fedcache.errors import UsageError
from fedcache.extract.planning.find_store import dataset_of_store, resolve_path
from fedcache.extract.planning.plan import parse_max_bad
from fedcache.progress import Observer
from fedcache.store.catalog import place_of_content, remember_last
from fedcache.store.files import make_private
from fedcache.store.join import join_parts, open_parts
from fedcache.store.manifest import PLACE, StorePart
from fedcache.store.store import Store

SLURM = "SLURM_ARRAY_TASK_ID"
"""Variable with the number of this task in a Slurm array. Variables with MIN, MAX, STEP and COUNT instead of ID
describe the numbers of all tasks."""

EXAMPLE = "fedcache extract --part 1/4"


def parse_part(text: str, observer: Observer) -> StorePart:
    """The part that ``1/4`` or ``auto`` names; for ``auto`` the observer reports the variables that were read.

    Raises UsageError for other texts, and for ``auto`` unless exactly one kind of variables gives the part.
    """
    if text != "auto":
        pair = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
        if pair is None or not 1 <= int(pair[1]) <= int(pair[2]):
            raise UsageError(
                f"--part {text} is not valid: expected i/n with i from 1 to n, or auto.", EXAMPLE
            )
        return StorePart(int(pair[1]), int(pair[2]))
    named = _parts_of_variables()
    if len(named) != 1:
        found = " and ".join(named) or "none of these"
        raise UsageError(
            "--part auto reads either SLURM_ARRAY_TASK_ID or RANK with WORLD_SIZE, variables of a cluster job, but "
            f"found {found}.",
            f"Give the part:  {EXAMPLE}",
        )
    ((variables, part),) = named.items()
    observer.note(f"This is {part}, from {variables}.")
    return part


def _parts_of_variables() -> dict[str, StorePart]:
    """Phrase that names environment variables of a job -> the part they give. Raises UsageError for wrong values."""
    named = {}
    if SLURM in os.environ:
        task = _number(SLURM)
        low = _number("SLURM_ARRAY_TASK_MIN")
        high = _number("SLURM_ARRAY_TASK_MAX")
        count = _number("SLURM_ARRAY_TASK_COUNT")
        step = 1
        if "SLURM_ARRAY_TASK_STEP" in os.environ:
            step = max(1, _number("SLURM_ARRAY_TASK_STEP"))
        # If the user listed some tasks one by one, e.g. to submit them again, their numbers do not give the part.
        is_range = (high - low) // step + 1 == count
        index, remainder = divmod(task - low, step)
        if not is_range or remainder or not 0 <= index < count or count < 2:
            raise UsageError(
                f"--part auto cannot find the part of Slurm task {task}. Expected at least 2 tasks with evenly spaced "
                f"numbers, but the array has {count}, with numbers from {low} to {high}.",
                f"Give the part:  {EXAMPLE}",
            )
        named[f"{SLURM} {task} and SLURM_ARRAY_TASK_COUNT {count}"] = StorePart(index + 1, count)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank = _number("RANK")
        size = _number("WORLD_SIZE")
        if not 0 <= rank < size:
            raise UsageError(
                f"--part auto reads RANK {rank} and WORLD_SIZE {size}, which do not give a part.",
                f"Give the part:  {EXAMPLE}",
            )
        named[f"RANK {rank} and WORLD_SIZE {size}"] = StorePart(rank + 1, size)
    return named


def _number(name: str) -> int:
    """The number in a variable of the job."""
    value = os.environ.get(name, "")
    if not re.fullmatch(r"\d{1,9}", value):
        state = f"{value!r}, not a number"
        if name not in os.environ:
            state = "not set"
        raise UsageError(
            f"--part auto reads {name}, which is {state}.",
            f"Give the part:  {EXAMPLE}",
        )
    return int(value)


def place_of_part(part: StorePart, whole: Path) -> Path:
    """The folder of a part of the store ``whole``. Raises UsageError if ``whole`` itself has the name of a part."""
    if PLACE.fullmatch(whole.name):
        raise UsageError(
            f"{whole} is the name of a part. With --part, --store takes the name of the whole store.",
            EXAMPLE,
        )
    return part.place(whole)


def join(
    parts: Sequence[str | Path],
    place: str | Path | None,
    home: Home,
    max_bad: str,
    observer: Observer,
) -> Store:
    """Join parts, which are given by paths or by their names in ``fedcache ls``, into a store.

    Args:
        parts: all of them, in any order.
        place: of the store; None for where an extraction of the dataset would put it.
        home: where names are looked up.
        max_bad: how many rows of all parts together may be unreadable, written as for ``--max-bad``.
        observer: receives progress messages.

    Raises:
        UsageError without parts; the errors of ``open_parts`` and ``join_parts``.
    """
    if not parts:
        raise UsageError("No part was given.", "fedcache join PART PART .. -o STORE")
    paths = [resolve_path(home, Path(path), to_read=True) for path in parts]
    opened = open_parts(paths)
    first = opened[0].store
    if place is None:
        make_private(home.stores)
        target = place_of_content(home, first.dataset["slug"], first.content)
    else:
        target = Path(place).expanduser()
    most_bad = parse_max_bad(max_bad, first.rows)
    store = join_parts(opened, target, max_bad=most_bad, observer=observer)
    # A home that extracted a part of the dataset remembers its spec.
    known = dataset_of_store(store, home)
    if known is not None and known.dataset is not None:
        remember_last(home, target, known.dataset)
    return store
