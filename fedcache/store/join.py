"""Assemble the parts of a store: check that they belong together, take over their chunks, and complete the arrays.

The manifest of each part names the part, so parts may come from any machine and be in any folder. The ordinary writer
makes the store: a join that was killed continues when it is run again, and an array is complete only at the end.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.errors import CorruptionError, FedcacheError, StoreError, shell_word
from fedcache.progress import Observer
from fedcache.store.chunks import read_checked
from fedcache.store.journal import (
    BadRows,
    differences_of,
    header_differences,
    journal_path,
    journals,
    read_journal,
)
from fedcache.store.manifest import PART, ArrayInfo, StorePart, entries_of, feature_file, part_of
from fedcache.store.samples import group_digests
from fedcache.store.store import ArrayWriter, Store, copy_texts, finished_arrays, put_groups
from fedcache.tables.words import some_names


@dataclass(frozen=True)
class OpenPart:
    """A part that was opened to be joined."""

    store: Store
    part: StorePart

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.store.path


def chunks_are_whole(store: Store, keys: Sequence[str]) -> bool:
    """Whether the chunk files of a part's finished arrays have the checksums in its journals."""
    found = finished_arrays(store)
    part = part_of(store.dataset)
    assert part is not None
    try:
        for key in keys:
            info = found[key]
            for chunk, crc in zip(part.chunks(info.count), info.chunks, strict=True):
                place = feature_file(store.path, key, chunk, info.shape)
                read_checked(place, crc, key, size=info.chunk_bytes)
    except CorruptionError:
        return False
    return True


def rows_of_part(store: Store) -> tuple[int, list[dict[str, Any]]]:
    """The number of rows that the finished arrays of a part cover, and the unreadable rows among them.

    Returns:
        the number of rows, and {row, name, reason} as ``Store.quarantined``.
    """
    part = part_of(store.dataset)
    assert part is not None
    # Arrays with another number of rows per chunk begin and end at other rows; together they cover one range.
    starts = [store.rows]
    stops = [0]
    bad: BadRows = {}
    for key, info in finished_arrays(store).items():
        chunks = part.chunks(info.count)
        if chunks:
            starts.append(chunks.start * info.chunk_rows)
            stops.append(min(chunks.stop * info.chunk_rows, store.rows))
        # A row keeps the reason of the first array that could not read it.
        bad = {**read_journal(journal_path(store.path, key)).bad, **bad}
    rows = max(0, max(stops) - min(starts))
    return rows, entries_of(bad)


def open_parts(paths: Sequence[Path]) -> list[OpenPart]:
    """All parts of one store, sorted by number, after a check that they are finished and computed in the same way.

    Raises:
        StoreError, for a part that is missing, given twice, unfinished, or of other data, recipes or weights than the
        first; CorruptionError for a part with a damaged manifest.
    """
    parts = [_open_part(path) for path in paths]
    first = parts[0]
    for other in parts[1:]:
        if other.part.of != first.part.of:
            raise StoreError(
                f"The parts have different totals: {other.path} is {other.part}, but {first.path} is {first.part}.",
                f"Compute all parts with the same total:  {first.part.command}   and so on",
            )
        if other.store.content != first.store.content:
            raise StoreError(
                f"{other.path} belongs to another dataset ({_data_of(other)}) than {first.path} ({_data_of(first)}).",
                f"fedcache inspect {shell_word(other.path)}   shows the content of a part.",
            )
    numbers = Counter(one.part.number for one in parts)
    count = first.part.of
    for number, times in numbers.items():
        if times > 1:
            places = [str(one.path) for one in parts if one.part.number == number]
            raise StoreError(
                f"Part {number} of {count} is given {times} times: {' and '.join(places)}.",
                "Give one folder for each part.",
            )
    missing = [number for number in range(1, count + 1) if number not in numbers]
    if missing:
        listed = some_names(map(str, missing), 10)
        first_missing = StorePart(missing[0], count)
        raise StoreError(
            f"{len(missing)} of {count} parts are missing: {listed}.",
            "Also give the folders of these parts, or compute them. Add --dataset and all options of the other parts "
            f"to this command:  {first_missing.command}",
        )
    parts.sort(key=lambda one: one.part.number)
    for other in parts:
        _check_arrays(other, parts[0])
    return parts


def _open_part(path: Path) -> OpenPart:
    """The part at ``path``. Raises StoreError for a missing folder, or a store that is not a part."""
    if not path.exists():
        raise StoreError(f"There is no part {path}.", "fedcache ls   lists stores and parts.")
    store = Store.open(path, part=True)
    part = part_of(store.dataset)
    if part is None:
        raise StoreError(
            f"{path} is a whole store, not a part.",
            "Leave it out. `fedcache extract --part 1/4` makes parts.",
        )
    return OpenPart(store, part)


def _data_of(one: OpenPart) -> str:
    dataset = one.store.dataset
    return f"{dataset['slug']}, {one.store.rows:,} rows, digest {dataset['digest']:.12}"


def _check_arrays(other: OpenPart, first: OpenPart) -> None:
    """Refuse a part whose arrays are unfinished, or are not those of the first. Raises StoreError."""
    finished = finished_arrays(other.store)
    command = other.part.command
    for journal in journals(other.path):
        key = journal.key
        if journal.header is not None and key not in finished:
            kept = len(journal.chunks)
            chunks = len(other.part.chunks(journal.count))
            raise StoreError(
                f"{other.path} is unfinished: it has {kept} of its {chunks} chunks of {key}.",
                f"Resume this part. Add all options of its first run to this command:  {command}",
            )
    expected = finished_arrays(first.store)
    if not finished:
        raise StoreError(
            f"{other.path} is unfinished: it has no features yet.",
            f"Compute this part. Add all options of its first run to this command:  {command}",
        )
    if finished.keys() != expected.keys():
        raise StoreError(
            f"{_other_arrays(other, finished, first, expected)}.",
            f"Compute every part with the same options:  {first.part.command}   and so on",
        )
    for key, info in finished.items():
        if info.header != expected[key].header:
            listed = header_differences(expected[key].header, info.header)
            raise StoreError(
                f"{other.path} computed {key} differently from {first.path}: {listed}.",
                f"Compute this part again. Add all options of the other parts to this command:  {command} --fresh",
            )


def _other_arrays(
    other: OpenPart,
    arrays: Mapping[str, ArrayInfo],
    first: OpenPart,
    expected: Mapping[str, ArrayInfo],
) -> str:
    """The first difference between the arrays of a part and those of the first part, as a sentence without a full stop.

    The two have different keys.
    """
    for key in sorted(arrays.keys() - expected.keys()):
        recipe = arrays[key].recipe
        for expected_info in expected.values():
            if expected_info.recipe.get("backbone") == recipe.get("backbone"):
                listed = differences_of(expected_info.recipe, recipe)
                return f"{other.path} has {key} with another recipe than {first.path}: {listed}"
        return f"{other.path} has {key}, but {first.path} does not"
    key = min(expected.keys() - arrays.keys())
    return f"{other.path} has no {key}, but {first.path} has it"


def join_parts(
    parts: Sequence[OpenPart], place: Path, *, max_bad: int, observer: Observer
) -> Store:
    """One store of all parts at ``place``, with the same files as if one process had written it, except the history.

    Chunks that a killed join has taken over are kept. Text features and columns are those of the first part.

    Args:
        parts: of ``open_parts``.
        place: of the store; an existing store of the same dataset gets the arrays that it lacks.
        max_bad: the largest number of unreadable rows of all parts together.
        observer: receives progress.

    Raises:
        StoreError, when another dataset is at ``place``, or the store is being written; CorruptionError for a damaged
        chunk and for more than ``max_bad`` unreadable rows; MachineError, when the disk refuses.
    """
    first = parts[0].store
    bad: dict[int, str] = {}
    for one in parts:
        _, entries = rows_of_part(one.store)
        bad |= {entry["row"]: entry["reason"] for entry in entries}
        if group_digests(one.store.manifest) != group_digests(first.manifest):
            observer.warn(
                f"{one.path} has other group columns than {first.path}. The columns of {first.path} are used."
            )
    if len(bad) > max_bad:
        row = max(bad)
        raise CorruptionError(
            f"{len(bad)} rows of all parts could not be read, more than --max-bad {max_bad} allows. The last is "
            f"{first.samples.name[row]}, row {row}: {bad[row]}.",
            "Join again with a larger --max-bad, as a number or a share such as 5%.",
        )
    dataset = {name: value for name, value in first.dataset.items() if name != PART}
    store = Store.create(place, first.samples, dataset=dataset)
    put_groups(store, {name: first.group(name) for name in first.groups})
    copy_texts(first, store)
    arrays = finished_arrays(first)
    for key, info in arrays.items():
        stored = store.arrays.get(key)
        if stored is not None and stored.header != info.header:
            listed = header_differences(stored.header, info.header)
            raise StoreError(
                f"{place} already has {key}, computed with other settings or versions than the parts: {listed}.",
                "Give another folder:  fedcache join PART PART .. -o STORE",
            )
    observer.start("joining", sum(info.count for info in arrays.values()), "chunks")
    try:
        for key, info in arrays.items():
            with store.writer(
                key,
                shape=info.shape,
                dtype=info.dtype,
                chunk_rows=info.chunk_rows,
                recipe=info.recipe,
                how=info.how,
            ) as writer:
                _take_chunks(writer, parts, observer)
                writer.complete()
    finally:
        observer.stop()
    store.append_history({"event": "join", "time": time.time(), "keys": list(arrays)})
    return Store.open(place)


def _take_chunks(writer: ArrayWriter, parts: Sequence[OpenPart], observer: Observer) -> None:
    """Give a writer the chunks that it lacks; each is verified first. Raises CorruptionError, naming part and file."""
    missing = set(writer.missing())
    observer.advance(writer.count - len(missing))
    for one in parts:
        journal = read_journal(journal_path(one.path, writer.key))
        for chunk in one.part.chunks(journal.count):
            line = journal.chunks[chunk]
            source = feature_file(one.path, writer.key, chunk, writer.shape)
            if chunk not in missing:
                # Someone may remove the parts now, so they are verified too.
                try:
                    read_checked(
                        source, line.crc, writer.key, size=writer.for_workers().chunk_bytes
                    )
                except CorruptionError as error:
                    raise _damaged(one, writer.key, chunk, error) from error
                continue
            reasons = {row: reason for row, (_, reason) in line.bad.items()}
            try:
                # A file copied from another machine may not be on the disk yet; then a hard link to it is not either.
                with source.open("rb") as file:
                    os.fsync(file.fileno())
                writer.adopt(chunk, source, line.crc, reasons)
            except (CorruptionError, FileNotFoundError) as error:
                raise _damaged(one, writer.key, chunk, error) from error
            observer.advance(1)


def _damaged(one: OpenPart, key: str, chunk: int, error: Exception) -> FedcacheError:
    why = "its file is missing."
    if isinstance(error, FedcacheError):
        why = error.message.removeprefix(f"{key}: ")
    return CorruptionError(
        f"{one.path} ({one.part}) is damaged: chunk {chunk} of {key}: {why}",
        f"Recompute the damaged chunk with its extract command:  {one.part.command}   with all "
        "options of the first run. Then join the parts again.",
    )
