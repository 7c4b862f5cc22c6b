"""The stores of a home: found by the name a user writes, what they hold, and what in and among them can go."""

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
"""What ``last.json`` is, for its seal."""


def is_ingested(store: Store) -> bool:
    """Whether a store was made from a file of embeddings: no image is known of it."""
    return store.dataset.get("source") == INGESTED


def place_of_content(home: Home, slug: str, digest: str) -> Path:
    """Where the store of a dataset's content is in a home: under its name, else under another one that it had before.

    A folder that was renamed has the same content, so its store is used as it is; where none is there, the place is the
    one that a new store takes.
    """
    usual = home.store(slug, digest)
    if usual.exists():
        return usual
    for other in sorted(home.stores.glob(f"*-{digest[:8]}.zarr")):
        with suppress(FedcacheError):
            store = Store.open(other)
            if store.content == digest and not is_ingested(store) and "shard" not in store.dataset:
                return other
    return usual


def remember_last(home: Home, path: Path, spec: str) -> None:
    """Note the store that commands without ``--dataset`` use, and what was requested."""
    make_private(home.root)
    write_sealed(home.last, LAST, {"store": str(path.resolve()), "spec": spec})


def recall_last(home: Home) -> tuple[Path, str] | None:
    """What ``remember_last`` noted; None when there is nothing.

    Raises CorruptionError for a damaged note: another dataset must not be taken instead of the one that is meant.
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
    """As ``recall_last``; None also when the store is gone."""
    last = recall_last(home)
    if last is not None and last[0].exists():
        return last
    return None


def extracted_later(path: Path) -> Path | None:
    """The store next to this one, of a dataset of the same name, that was extracted last; None when this one was.

    A whole older file instead of ``last.json`` has a seal of its own, but the histories of stores continue.
    """
    for store in _opened([path]):
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
    times = [float(e["time"]) for e in events if e.get("event") in ("extract", "join")]
    return max(times, default=0.0)


def finished_stores(home: Home) -> list[Store]:
    """The stores of a home, and parts of stores, that hold a finished array; damaged ones are left out."""
    found = []
    for place in folders_in(home.stores):
        with suppress(FedcacheError):
            store = Store.open(place, part=True)
            if finished_arrays(store):
                found.append(store)
    return found


def ingested_stores(home: Home) -> dict[str, Path]:
    """The stores of a home that were made from embeddings, by the name of their dataset; damaged ones are left out."""
    found = filter(is_ingested, _opened(sorted(home.stores.glob("*.zarr"))))
    return {str(store.dataset["slug"]): store.path for store in found}


def _opened(places: Iterable[Path]) -> Iterator[Store]:
    """Those that are stores; what a damaged one holds is for verify and repair."""
    for place in places:
        with suppress(FedcacheError):
            yield Store.open(place)


def ingest_command(store: Store) -> str:
    """The command that replaces an ingested dataset by a file that holds more."""
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
    """(file, why) of what killed processes left inside stores; a store that is being written is left alone."""
    for store in _not_locked(home):
        for path in leftover_files(store):
            if not is_being_written(path):
                yield path, "listed neither in the manifest nor in a journal"
        for key in store.arrays:
            journal = journal_path(store.path, key)
            if journal.exists():
                yield (
                    journal,
                    f"{key} is complete; a killed process left its journal",
                )
        for note in sorted(store.path.glob("locks/*.json")):
            yield note, "lock of a killed process"


def given_up_arrays(home: Home, idle_days: float) -> Iterator[tuple[Path, str]]:
    """(journal or folder, why) of unfinished arrays that nothing has written for ``idle_days``.

    A store that is being written is left alone, and so is an array that was killed while it was completed: its journal
    vouches for files of the store.
    """
    for store in _not_locked(home):
        for journal in journals(store.path):
            if journal.header is None or journal.key in store.arrays or journal.commits:
                continue
            folder = store.path / "features" / journal.key
            touched = (f.stat().st_mtime for f in (journal.path, *folder.rglob("*")))
            days = (time.time() - max(touched)) / DAY
            if days >= idle_days:
                kept = (
                    f"{len(journal.chunks)} of {journal.count} chunks of an unfinished extraction; last "
                    f"change {days:,.0f} days ago"
                )
                yield journal.path, f"the journal of {kept}"
                if folder.exists():
                    yield folder, kept


def old_stores(home: Home) -> Iterator[tuple[Path, str]]:
    """(store, why) of those whose dataset was extracted again with other content, unless they are being written."""
    by_name: dict[str, list[tuple[float, Path]]] = {}
    for store in _opened(folders_in(home.stores)):
        changed = (store.path / "manifest.json").stat().st_mtime
        by_name.setdefault(str(store.dataset["slug"]), []).append((changed, store.path))
    for slug, places in by_name.items():
        for _, place in sorted(places)[:-1]:
            if not _is_locked(place):
                yield (
                    place,
                    f"{slug} was extracted again with other content, into {max(places)[1].name}",
                )


def _not_locked(home: Home) -> Iterator[Store]:
    """The stores of a home that no process writes."""
    places = (place for place in folders_in(home.stores) if place.suffix == ".zarr")
    return _opened(place for place in places if not _is_locked(place))


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
    """Folders directly below ``root`` whose names do not begin with a dot, sorted; none where it is not there."""
    if root.is_dir():
        return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    return []


def is_being_written(path: Path) -> bool:
    """Whether the process that a temporary name tells of still runs; another host's may, so its files wait a day."""
    pid = writer_of(path)
    if pid:
        return is_alive(pid)
    try:
        return path.name.endswith(".partial") and time.time() - path.lstat().st_mtime < DAY
    except OSError:
        return True


def clean_up(store: Store) -> None:
    """Remove the notes of killed writers, and the journals of finished arrays; those of who still writes stay.

    Raises CorruptionError or StoreError for a manifest that can no longer be read.
    """
    locks = store.path / "locks"
    for note in locks.glob("*.json"):
        with (
            try_lock(note.with_suffix(".lock")) as free,
            suppress(OSError),
        ):  # what may only be read keeps it
            if free:
                note.unlink(missing_ok=True)
    for key in store.arrays:
        journal = journal_path(store.path, key)
        if not journal.exists():
            continue
        with try_lock(locks / f"{key}.lock") as free, suppress(OSError):
            # not begun again since the store was opened
            if free and key in read_manifest(store.path).arrays:
                journal.unlink(missing_ok=True)


def holds_content(store: Store, content: Content) -> bool:
    """Whether a store holds all of some content, under whatever name its file was."""
    same = bool(store.dataset["digest"] == content.dataset["digest"])
    return (
        same
        and content.values <= _held(store)
        and all(store.has_text(name) for name in content.texts)
    )


def holds_part_of(store: Store, content: Content) -> bool:
    """Whether a store holds nothing but some content, of which an interrupted ingest left out a part."""
    return (
        bool(store.dataset["digest"] == content.dataset["digest"])
        and _held(store) <= content.values
    )


def _held(store: Store) -> set[tuple[str, int]]:
    return {value_id(info.recipe) for info in store.arrays.values()}
