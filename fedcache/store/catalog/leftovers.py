"""What lies in and among the stores of a home that nothing will read again: for ``gc``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from fedcache.config import Home
from fedcache.errors import FedcacheError
from fedcache.store.lock import is_alive, is_held
from fedcache.store.store import Store
from fedcache.store.verify import leftover_files

DAY = 86_400.0


def leftovers_of_stores(home: Home) -> Iterator[tuple[Path, str]]:
    """(file, why) of what killed processes left inside stores; a store that is being written is left alone."""
    for place in folders_in(home.stores):
        if not place.name.endswith(".zarr") or _is_locked(place):
            continue
        try:
            store = Store.open(place)
        except FedcacheError:
            continue  # what a damaged store holds is for verify and repair
        for path in leftover_files(store):
            if not is_being_written(path):
                yield path, "neither the manifest nor a journal knows it"


def old_stores(home: Home) -> Iterator[tuple[Path, str]]:
    """(store, why) of those whose dataset was extracted again with other content, unless they are being written."""
    by_name: dict[str, list[tuple[float, Path]]] = {}
    for place in folders_in(home.stores):
        try:
            store = Store.open(place)
        except FedcacheError:
            continue
        changed = (place / "manifest.json").stat().st_mtime
        by_name.setdefault(str(store.dataset["slug"]), []).append((changed, place))
    for slug, places in by_name.items():
        for _, place in sorted(places)[:-1]:
            if not _is_locked(place):
                yield place, f"{slug} has been extracted again with other content, into {max(places)[1].name}"


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
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")) if root.is_dir() else []


def is_being_written(path: Path) -> bool:
    """Whether the process that a temporary name tells of still runs; another host's may, so its files wait a day."""
    pid = path.name.removesuffix(".partial").rpartition(".")[2].partition("-")[0]
    if path.name.endswith(".partial") and pid.isdigit():
        return is_alive(int(pid))
    try:
        return path.name.endswith(".partial") and time.time() - path.lstat().st_mtime < DAY
    except OSError:
        return True
