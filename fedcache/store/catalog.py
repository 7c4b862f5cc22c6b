"""The stores of a home: find them by name, describe their content, and list files that can be removed."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from fedcache.config import Home
from fedcache.errors import CorruptionError, FedcacheError
from fedcache.store.content import Content, value_id
from fedcache.store.files import make_private, read_sealed, write_sealed
from fedcache.store.journal import journal_path, journals
from fedcache.store.lock import is_alive, is_held, try_lock, writer_of
from fedcache.store.manifest import read_history, read_manifest
from fedcache.store.samples import INGESTED
from fedcache.store.store import Store, finished_arrays
from fedcache.store.verify import leftover_files

DAY = 86_400.0
LAST = {"kind": "last store"}
"""Seal of ``last.json``: its kind."""


def is_ingested(store: Store) -> bool:
    """Whether a store was made from a file of embeddings, without images."""
    return store.dataset.get("source") == INGESTED


def place_of_content(home: Home, slug: str, digest: str) -> Path:
    """The path of the store with a dataset's content in a home: under its name, or under an earlier name.

    A folder of images that was renamed has the same content, so its store is used under the earlier name. If there is
    no such store, this is the path of a new one.
    """
    usual = home.store(slug, digest)
    if usual.exists():
        return usual
    for other in sorted(home.stores.glob(f"*-{digest[:8]}.zarr")):
        with suppress(FedcacheError):
            store = Store.open(other)
            is_of_images = not is_ingested(store) and "shard" not in store.dataset
            if is_of_images and store.content == digest:
                return other
    return usual


def remember_last(home: Home, path: Path, spec: str) -> None:
    """Note the store that commands without ``--dataset`` use, and the spec of its dataset."""
    make_private(home.root)
    write_sealed(home.last, LAST, {"store": str(path.resolve()), "spec": spec})


def recall_last(home: Home) -> tuple[Path, str] | None:
    """The store and the spec that ``remember_last`` noted; None without a note.

    Raises CorruptionError for a damaged note, so that no other dataset is used by mistake.
    """
    try:
        found = read_sealed(home.last, LAST)
    except CorruptionError as error:
        raise CorruptionError(
            f"{error.message} So fedcache does not know which dataset was extracted last.",
            "Choose one with --dataset NAME or --store NAME; `fedcache ls` lists stores. The next "
            "extraction records the dataset again.",
        ) from error
    if found is None:
        return None
    return (Path(found.content["store"]), str(found.content["spec"]))


def last_store(home: Home) -> tuple[Path, str] | None:
    """As ``recall_last``; None also if the store no longer exists."""
    last = recall_last(home)
    if last is not None and last[0].exists():
        return last
    return None


def extracted_later(path: Path) -> Path | None:
    """The last extracted of the stores next to ``path`` with the same dataset name; None if it is the one at ``path``.

    The seal of ``last.json`` is also valid if an older copy of the file was put back. So the times are those in the
    histories of the stores.
    """
    for store in _opened([path]):  # one store, or none if it is damaged
        slug = store.dataset["slug"]
        times = {path: _last_extraction(store)}
        for other in _opened(sorted(path.parent.glob(f"{slug}-*.zarr"))):
            if other.dataset["slug"] == slug and other.arrays:
                times[other.path] = _last_extraction(other)
        latest = max(times, key=times.__getitem__)
        if times[latest] > times[path]:
            return latest
    return None


def _last_extraction(store: Store) -> float:
    events, _ = read_history(store.path)
    times = [float(event["time"]) for event in events if event.get("event") in ("extract", "join")]
    return max(times, default=0.0)


def finished_stores(home: Home) -> list[Store]:
    """The stores of a home, and parts of stores, that hold a finished array; damaged ones are left out."""
    opened = _opened(folders_in(home.stores), part=True)
    return [store for store in opened if finished_arrays(store)]


def ingested_stores(home: Home) -> dict[str, Path]:
    """The stores of a home that were made from embeddings, by the name of their dataset; damaged ones are left out."""
    found = filter(is_ingested, _opened(sorted(home.stores.glob("*.zarr"))))
    return {str(store.dataset["slug"]): store.path for store in found}


def _opened(places: Iterable[Path], *, part: bool = False) -> Iterator[Store]:
    """The stores at some places, and parts of stores if ``part``; damaged ones and other folders are left out."""
    for place in places:
        with suppress(FedcacheError):
            yield Store.open(place, part=part)


def ingest_command(store: Store) -> str:
    """The command that replaces an ingested dataset by the content of another file."""
    name = str(store.dataset["slug"])
    return shlex.join(
        ["fedcache", "ingest", "FILE", "--name", name, "--replace", *store_option(store)]
    )


def store_option(store: Store) -> list[str]:
    """``--store PATH`` for a store outside the home, which no name finds; else nothing."""
    inside = store.path.resolve().parent == Home.from_environment().stores.resolve()
    if inside:
        return []
    return ["--store", str(store.path)]


def leftovers_of_stores(home: Home) -> Iterator[tuple[Path, str]]:
    """(file, reason) of files that killed processes left in stores; stores that are being written are left out."""
    for store in _not_locked(home):
        for path in leftover_files(store):
            if not is_being_written(path):
                yield path, "not listed in the manifest or in a journal"
        for key in store.arrays:
            journal = journal_path(store.path, key)
            if journal.exists():
                yield journal, f"{key} is complete; a killed process left its journal"
        for note in sorted(store.path.glob("locks/*.json")):
            yield note, "lock of a killed process"


def given_up_arrays(home: Home, idle_days: float) -> Iterator[tuple[Path, str]]:
    """(journal or folder, reason) of unfinished arrays that no process has written for ``idle_days``.

    Left out are stores that are being written, and arrays whose writer was killed while it completed them, because
    their journals vouch for files of the store.
    """
    for store in _not_locked(home):
        for journal in journals(store.path):
            if journal.header is None or journal.key in store.arrays or journal.commits:
                continue
            folder = store.path / "features" / journal.key
            changed = max(file.stat().st_mtime for file in (journal.path, *folder.rglob("*")))
            days = (time.time() - changed) / DAY
            if days >= idle_days:
                reason = (
                    f"{len(journal.chunks)} of {journal.count} chunks of an unfinished extraction; last "
                    f"change {days:,.0f} days ago"
                )
                yield journal.path, f"the journal of {reason}"
                if folder.exists():
                    yield folder, reason


def old_stores(home: Home) -> Iterator[tuple[Path, str]]:
    """(store, reason) of stores whose dataset was extracted again with other content, unless they are being written."""
    by_name: dict[str, list[tuple[float, Path]]] = {}
    for store in _opened(folders_in(home.stores)):
        changed = (store.path / "manifest.json").stat().st_mtime
        places = by_name.setdefault(str(store.dataset["slug"]), [])
        places.append((changed, store.path))
    for slug, places in by_name.items():
        *older, (_, latest) = sorted(places)
        for _, place in older:
            if not _is_locked(place):
                yield place, f"{slug} was extracted again with other content: {latest.name}"


def _not_locked(home: Home) -> Iterator[Store]:
    """The stores of a home that no process is writing."""
    for place in folders_in(home.stores):
        if place.suffix == ".zarr" and not _is_locked(place):
            yield from _opened([place])


def _is_locked(store: Path) -> bool:
    return any(is_held(lock) for lock in store.glob("locks/*.lock"))


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    try:
        if path.is_file() or path.is_symlink():
            return path.lstat().st_size
        return sum(f.lstat().st_size for f in path.rglob("*") if f.is_file())
    except OSError:
        return 0


def folders_in(root: Path) -> list[Path]:
    """Folders directly below ``root`` whose names do not begin with a dot, sorted; none without such a ``root``."""
    if root.is_dir():
        return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    return []


def is_being_written(path: Path) -> bool:
    """Whether the process named in a temporary name still runs.

    A ``.partial`` file that names no process counts as being written for a day after its last change.
    """
    pid = writer_of(path)
    if pid:
        return is_alive(pid)
    try:
        return path.name.endswith(".partial") and time.time() - path.lstat().st_mtime < DAY
    except OSError:
        return True


def clean_up(store: Store) -> None:
    """Remove the notes of killed writers and the journals of finished arrays, unless their writer still runs.

    Raises CorruptionError or StoreError for a manifest that can no longer be read.
    """
    locks = store.path / "locks"
    for note in locks.glob("*.json"):
        # A store without write permission keeps its notes.
        with try_lock(note.with_suffix(".lock")) as free, suppress(OSError):
            if free:
                note.unlink(missing_ok=True)
    for key in store.arrays:
        journal = journal_path(store.path, key)
        if not journal.exists():
            continue
        with try_lock(locks / f"{key}.lock") as free, suppress(OSError):
            # The array may have been started again since the store was opened.
            if free and key in read_manifest(store.path).arrays:
                journal.unlink(missing_ok=True)


def holds_content(store: Store, content: Content) -> bool:
    """Whether a store holds all of some content, under any name."""
    if store.dataset["digest"] != content.dataset["digest"]:
        return False
    if not content.values <= _values_of(store):
        return False
    return all(store.has_text(name) for name in content.texts)


def holds_part_of(store: Store, content: Content) -> bool:
    """Whether all arrays of a store belong to ``content``; after an interrupted ingest, the store lacks some arrays."""
    if store.dataset["digest"] != content.dataset["digest"]:
        return False
    return _values_of(store) <= content.values


def _values_of(store: Store) -> set[tuple[str, int]]:
    """``Content.values`` of a store."""
    return {value_id(info.recipe) for info in store.arrays.values()}
