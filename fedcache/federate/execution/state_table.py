"""State table: a file with one row for each client that took part; rows are read and written one by one.

It is used for runs with client states that are too large for memory. Rows to which the last checkpoint refers are not
overwritten. So a checkpoint is only an index of positions and digests, and a killed run ends with the same bits when it
is resumed. Rows to which no checkpoint refers any more are reused, so the file is at most twice as long as the states
of the clients.

The file is read and written by position and not mapped into memory. A full disk is then an error with a message, while
a write into a memory map would end the process. Tensors that are read do not share memory with each other.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, MutableMapping
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from filelock import FileLock, Timeout

from fedcache.errors import CorruptionError, StoreError
from fedcache.federate.engine.outcome import Snapshot
from fedcache.heads.linear import Tree
from fedcache.store.files import explain_disk_errors
from fedcache.store.lock import try_lock

Kind = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Names, dtypes and shapes of a client's tensors."""

ROW = np.dtype([("at", "<i8"), ("kind", "<i4"), ("digest", "u1", (16,))])
"""Entry of a client: its first byte in the file, the number of its kind from 1 (0: no entry), and its digest."""


class StateTable(MutableMapping[int, Tree]):
    """Client number -> its tensors, in a file that one process uses at a time.

    Raises StoreError while another process uses the file; MachineError if it cannot be written.

    Args:
        path: of the file; existing rows are overwritten unless ``saved`` refers to them.
        clients: number of clients in the run.
        device: of the tensors that are read.
        saved: a snapshot with the index that ``mark`` returned, to continue from.
        expected: expected size of the file in bytes, for the message of a full disk.
    """

    def __init__(
        self,
        path: Path,
        clients: int,
        device: torch.device,
        saved: Snapshot | None = None,
        expected: int = 0,
    ) -> None:
        self.path = path
        self._device = device
        self._expected = expected
        self._lock = FileLock(_lock_of(path), timeout=0)
        with explain_disk_errors(path, expected):
            try:
                self._lock.acquire()
            except Timeout:
                raise _in_use(path) from None
            path.touch(0o600)
            self._file = path.open("r+b", buffering=0)
        self._rows = np.zeros(clients, ROW)
        self._kinds: list[Kind] = []
        self._numbers: dict[Kind, int] = {}  # from 1, as in ``ROW``
        # Clients with rows to which no checkpoint refers.
        self._new: set[int] = set()
        # (position, bytes) of old rows to which only the last checkpoint refers.
        self._left: list[tuple[int, int]] = []
        self._free: dict[int, list[int]] = {}  # bytes -> free positions
        self._end = 0
        if saved is not None:
            self._resume(saved)
        self._file.truncate(self._end)

    def _resume(self, saved: Snapshot) -> None:
        for kind in _kinds(saved):
            self._number(kind)
        ids, rows = _index(saved)
        self._rows[ids] = rows
        # Gaps between the rows in the file were written after the checkpoint, so they are free.
        for row in rows[np.argsort(rows["at"])]:
            size = _size(self._kinds[row["kind"] - 1])
            at = int(row["at"])
            if size:  # a gap is reused for rows of the same size as the row after it
                free = self._free.setdefault(size, [])
                free += range(self._end, at - size + 1, size)
            self._end = at + size

    def _number(self, kind: Kind) -> int:
        if kind not in self._numbers:
            self._kinds.append(kind)
            self._numbers[kind] = len(self._kinds)
        return self._numbers[kind]

    def __getitem__(self, client: int) -> Tree:
        if client not in self:
            raise KeyError(client)
        kind = self._kinds[self._rows["kind"][client] - 1]
        tree = Tree()
        start = 0
        self._file.seek(int(self._rows["at"][client]))
        raw = bytearray(_size(kind))
        if self._file.readinto(raw) != len(raw):
            raise _damaged(self.path)
        # Tensors follow one another in the row. Each is copied into new memory, which is aligned for every dtype.
        for name, dtype, shape in kind:
            t = torch.empty(shape, dtype=getattr(torch, dtype))
            if t.numel():
                part = torch.frombuffer(raw, dtype=torch.uint8, count=t.nbytes, offset=start)
                t.view(-1).view(torch.uint8).copy_(part)
            tree[name] = t.to(self._device)
            start += t.nbytes
        return tree

    def __setitem__(self, client: int, tree: Tree) -> None:
        plain = {name: t.detach().cpu().contiguous() for name, t in tree.items()}
        described = []
        for name, t in plain.items():
            dtype = str(t.dtype).removeprefix("torch.")
            described.append((name, dtype, tuple(t.shape)))
        kind = tuple(described)
        # A tensor of one number may have any stride; only as_strided sets it to 1.
        flat = (t.as_strided((t.numel(),), (1,)) for t in plain.values() if t.numel())
        raw = b"".join(t.view(torch.uint8).numpy().data for t in flat)
        number = self._number(kind)
        # A row to which no checkpoint refers is overwritten; otherwise the client gets another position.
        if client in self._new and self._rows["kind"][client] == number:
            at = int(self._rows["at"][client])
        else:
            self._leave(client)
            at = self._end
            free = self._free.get(len(raw))
            if free:
                at = free.pop()
        with explain_disk_errors(self.path, max(len(raw), self._expected - self._end)):
            self._file.seek(at)
            # An unbuffered write may write only a part.
            rest = memoryview(raw)
            while rest:
                written = self._file.write(rest)
                rest = rest[written:]
        self._end = max(self._end, at + len(raw))
        digest = np.frombuffer(_digest(raw), np.uint8)
        self._rows[client] = (at, number, digest)
        self._new.add(client)

    def __delitem__(self, client: int) -> None:
        if client not in self:
            raise KeyError(client)
        self._leave(client)

    def _leave(self, client: int) -> None:
        """Free a client's row: at once, or after the next checkpoint if the last one refers to it."""
        at, number, _ = self._rows[client]
        if number:
            size = _size(self._kinds[number - 1])
            if client in self._new:
                self._free.setdefault(size, []).append(int(at))
            else:
                self._left.append((int(at), size))
        self._rows["kind"][client] = 0
        self._new.discard(client)

    def __contains__(self, client: object) -> bool:
        number = -1
        if isinstance(client, SupportsIndex):
            number = index(client)
        return 0 <= number < len(self._rows) and bool(self._rows["kind"][number])

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._rows["kind"]).tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self._rows["kind"]))

    def mark(self) -> tuple[Tree, list[Any]]:
        """Write all rows to the disk and return their index: tensors and JSON of a snapshot."""
        with explain_disk_errors(self.path, 0):
            os.fsync(self._file.fileno())
        ids = np.flatnonzero(self._rows["kind"])
        rows = self._rows[ids].view(np.uint8).reshape(len(ids), ROW.itemsize)
        tensors = {"table/client": torch.from_numpy(ids), "table/row": torch.from_numpy(rows)}
        return tensors, list(self._kinds)

    def kept(self) -> None:
        """Free rows to which only older indexes refer; to be called when the last index of ``mark`` is on the disk."""
        for at, size in self._left:
            self._free.setdefault(size, []).append(at)
        self._left.clear()
        self._new.clear()

    def close(self) -> None:
        """Let other processes use the file."""
        self._file.close()
        self._lock.release()


def check_table(path: Path, saved: Snapshot) -> None:
    """Read and check every row to which a snapshot refers.

    Raises CorruptionError for a missing or changed row; StoreError while another process uses the file.
    """
    with try_lock(_lock_of(path)) as free:
        if not free:
            raise _in_use(path)
        sizes = [_size(kind) for kind in _kinds(saved)]
        _ids, rows = _index(saved)
        try:
            with path.open("rb") as file:
                for row in rows[np.argsort(rows["at"])]:
                    file.seek(int(row["at"]))
                    raw = file.read(sizes[row["kind"] - 1])
                    if _digest(raw) != row["digest"].tobytes():
                        raise _damaged(path)
        except OSError as error:
            raise _damaged(path) from error


def _kinds(saved: Snapshot) -> list[Kind]:
    kinds = []
    for kind in saved.meta["table"]:
        kinds.append(tuple((name, dtype, tuple(shape)) for name, dtype, shape in kind))
    return kinds


def _index(saved: Snapshot) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n] clients with a row, and their rows [n]."""
    clients = saved.tensors["table/client"].numpy()
    rows = np.ascontiguousarray(saved.tensors["table/row"].numpy())
    return clients, rows.reshape(-1).view(ROW)


def _digest(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()[:16]


def _size(kind: Kind) -> int:
    """Bytes of a row."""
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in kind)


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def _damaged(path: Path) -> CorruptionError:
    return CorruptionError(
        f"{path} is missing or was changed.", "Remove the file. fedcache makes its content again."
    )


def _in_use(path: Path) -> StoreError:
    return StoreError(
        f"{path} is in use by another process that trains the same run.",
        "Wait for the result of that process, or stop it.",
    )
