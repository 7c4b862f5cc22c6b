"""The part of a dataset that an extraction computes, by its option or the job's variables, and the join of all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
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
"""The variable of a task of a Slurm array. MIN, MAX, STEP and COUNT instead of ID say which tasks there are."""

EXAMPLE = "fedcache extract --part 1/4"


def parse_part(text: str, observer: Observer) -> StorePart:
    """The part that ``1/4`` or ``auto`` names; for ``auto`` the observer names the variables that were read.

    Raises UsageError for anything else, and for ``auto`` where no variable or more than one kind says it.
    """
    if text != "auto":
        pair = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
        if pair is None or not 1 <= int(pair[1]) <= int(pair[2]):
            raise UsageError(
                f"--part {text} is not valid: expected i/n with i from 1 to n, or auto.", EXAMPLE
            )
        return StorePart(int(pair[1]), int(pair[2]))
    named = _parts_of_variables(os.environ)
    if len(named) != 1:
        why = "neither SLURM_ARRAY_TASK_ID nor RANK and WORLD_SIZE are set"
        if named:
            why = "both SLURM_ARRAY_TASK_ID and RANK with WORLD_SIZE are set"
        raise UsageError(
            f"--part auto reads the variables of the job, but {why}.", f"Give the part:  {EXAMPLE}"
        )
    ((words, part),) = named.items()
    observer.note(f"This is {part}, from {words}.")
    return part


def _parts_of_variables(environment: Mapping[str, str]) -> dict[str, StorePart]:
    """The part that each kind of variables says, by the variables in words. Raises UsageError for nonsense."""
    named = {}
    if SLURM in environment:
        numbers = {
            name: _number(environment, f"SLURM_ARRAY_TASK_{name}")
            for name in ("ID", "MIN", "MAX", "COUNT")
        }
        step = 1
        if "SLURM_ARRAY_TASK_STEP" in environment:
            step = max(1, _number(environment, "SLURM_ARRAY_TASK_STEP"))
        # Tasks that were named one by one, as of a second submission of some, say nothing of the whole.
        even = (numbers["MAX"] - numbers["MIN"]) // step + 1 == numbers["COUNT"]
        place, rest = divmod(numbers["ID"] - numbers["MIN"], step)
        if not even or rest or not 0 <= place < numbers["COUNT"] or numbers["COUNT"] < 2:
            raise UsageError(
                f"--part auto cannot find the part of task {numbers['ID']} of a Slurm array of "
                f"{numbers['COUNT']} from {numbers['MIN']} to {numbers['MAX']}.",
                f"Give the part:  {EXAMPLE}",
            )
        words = f"{SLURM} {numbers['ID']} and SLURM_ARRAY_TASK_COUNT {numbers['COUNT']}"
        named[words] = StorePart(place + 1, numbers["COUNT"])
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank = _number(environment, "RANK")
        size = _number(environment, "WORLD_SIZE")
        if not 0 <= rank < size:
            raise UsageError(
                f"--part auto reads RANK {rank} and WORLD_SIZE {size}, which do not give a part.",
                f"Give the part:  {EXAMPLE}",
            )
        named[f"RANK {rank} and WORLD_SIZE {size}"] = StorePart(rank + 1, size)
    return named


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not re.fullmatch(r"\d{1,9}", value):
        state = f"{value!r}, not a number"
        if name not in environment:
            state = "not set"
        raise UsageError(
            f"--part auto reads {name}, which is {state}.",
            f"Give the part:  {EXAMPLE}",
        )
    return int(value)


def place_of_part(part: StorePart, whole: Path) -> Path:
    """The folder of a part of the store ``whole``. Raises UsageError where that is the name of a part itself."""
    if PLACE.fullmatch(whole.name):
        raise UsageError(
            f"--store {whole} is the name of a part, but with --part it must be the name of the whole "
            "store.",
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
    """Join parts, named by paths or as ``fedcache ls`` names them, into a store.

    Args:
        parts: all of them, in any order.
        place: of the store; None for where an extraction of the dataset would put it.
        home: whose stores are meant by names.
        max_bad: rows of all parts that may be unreadable, as of ``--max-bad``.
        observer: receives progress messages.

    Raises:
        UsageError without parts; others as ``open_parts`` and ``join_parts``.
    """
    if not parts:
        raise UsageError("No part was given.", "fedcache join PART PART .. -o STORE")
    opened = open_parts([resolve_path(home, Path(path), to_read=True) for path in parts])
    first = opened[0].store
    if place is None:
        make_private(home.stores)
        target = place_of_content(home, first.dataset["slug"], first.content)
    else:
        target = Path(place).expanduser()
    store = join_parts(
        opened, target, max_bad=parse_max_bad(max_bad, first.rows), observer=observer
    )
    # A home that extracted a part of the dataset knows what it is called.
    known = dataset_of_store(store, home)
    if known is not None and known.dataset is not None:
        remember_last(home, target, known.dataset)
    return store
