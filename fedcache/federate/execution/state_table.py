"""State table: a file with one row for each client that took part, read and written one by one.

For runs whose clients keep more than memory should hold. Rows that the last checkpoint refers to are not overwritten.
So a checkpoint is only an index of places and digests, and a killed run ends with the same bits when it is resumed.
Rows that no checkpoint refers to any more are reused: a file is at most twice as long as the states of the clients.

The file is read and written by position and not mapped into memory: a full disk is then an error with a message, while
a write into a map would end the process. Tensors that are read have memory of their own.
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
"""A client's row: its first byte in the file, the number of its kind from 1 on (0 for no row), and its digest."""


class StateTable(MutableMapping[int, Tree]):
    """Client number -> its tensors, in a file that one process uses at a time.

    Raises StoreError while another process uses the file; MachineError where it cannot be written.

    Args:
        path: of the file; rows that exist already are overwritten unless ``saved`` refers to them.
        clients: of the run: numbers are below it.
        device: where tensors are read to.
        saved: a snapshot that ``mark`` has written into, to continue from.
        expected: bytes that the file may come to, for the message of a full disk.
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
        self._numbers: dict[Kind, int] = {}
        self._new: set[int] = set()  # clients whose rows no checkpoint refers to
        self._left: list[
            tuple[int, int]
        ] = []  # (place, bytes) that the last checkpoint alone refers to
        self._free: dict[int, list[int]] = {}  # bytes -> places that nothing refers to
        self._end = 0
        if saved is not None:
            self._go_on(saved)
        self._file.truncate(self._end)

    def _go_on(self, saved: Snapshot) -> None:
        for kind in _kinds(saved):
            self._number(kind)
        ids, rows = _index(saved)
        self._rows[ids] = rows
        # Rows by place: the gaps between them were written after the checkpoint, and are free.
        for row in rows[np.argsort(rows["at"])]:
            size = _size(self._kinds[row["kind"] - 1])
            at = int(row["at"])
            if size:  # a gap is reused as rows of the size of the row behind it
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
        # Tensors lie one after another; each is copied into memory of its own, which is aligned for any dtype.
        for name, dtype, shape in kind:
            t = torch.empty(shape, dtype=getattr(torch, dtype))
            if t.numel():
                t.view(-1).view(torch.uint8).copy_(
                    torch.frombuffer(raw, dtype=torch.uint8, count=t.nbytes, offset=start)
                )
            tree[name] = t.to(self._device)
            start += t.nbytes
        return tree

    def __setitem__(self, client: int, tree: Tree) -> None:
        plain = {name: t.detach().cpu().contiguous() for name, t in tree.items()}
        kind = tuple(
            (name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in plain.items()
        )
        # A tensor of one number may have any stride, which only as_strided takes back to 1.
        flat = (t.as_strided((t.numel(),), (1,)) for t in plain.values() if t.numel())
        raw = b"".join(t.view(torch.uint8).numpy().data for t in flat)
        number = self._number(kind)
        # A row that no checkpoint refers to is overwritten; otherwise the client gets another place.
        if client in self._new and self._rows["kind"][client] == number:
            at = int(self._rows["at"][client])
        else:
            self._leave(client)
            at = self._end
            if free := self._free.get(len(raw)):
                at = free.pop()
        with explain_disk_errors(self.path, max(len(raw), self._expected - self._end)):
            self._file.seek(at)
            # An unbuffered write may take less than all.
            rest = memoryview(raw)
            while rest:
                rest = rest[self._file.write(rest) :]
        self._end = max(self._end, at + len(raw))
        self._rows[client] = at, number, np.frombuffer(hashlib.sha256(raw).digest()[:16], np.uint8)
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
        return {"table/client": torch.from_numpy(ids), "table/row": torch.from_numpy(rows)}, list(
            self._kinds
        )

    def kept(self) -> None:
        """To be called when the last index of ``mark`` is on the disk too: frees rows that only older ones refer to."""
        for at, size in self._left:
            self._free.setdefault(size, []).append(at)
        self._left.clear()
        self._new.clear()

    def close(self) -> None:
        """Let other processes use the file."""
        self._file.close()
        self._lock.release()


def check_table(path: Path, saved: Snapshot) -> None:
    """Read every row that a snapshot refers to.

    Raises CorruptionError for one that is missing or not what was written; StoreError while another process uses it.
    """
    with try_lock(_lock_of(path)) as free:
        if not free:
            raise _in_use(path)
        kinds = _kinds(saved)
        rows = _index(saved)[1]
        sizes = [_size(kind) for kind in kinds]
        try:
            with path.open("rb") as file:
                for row in rows[np.argsort(rows["at"])]:
                    file.seek(int(row["at"]))
                    raw = file.read(sizes[row["kind"] - 1])
                    if hashlib.sha256(raw).digest()[:16] != row["digest"].tobytes():
                        raise _damaged(path)
        except OSError as error:
            raise _damaged(path) from error


def _kinds(saved: Snapshot) -> list[Kind]:
    return [
        tuple((name, dtype, tuple(shape)) for name, dtype, shape in kind)
        for kind in saved.meta["table"]
    ]


def _index(saved: Snapshot) -> tuple[np.ndarray, np.ndarray]:
    rows = np.ascontiguousarray(saved.tensors["table/row"].numpy())
    return saved.tensors["table/client"].numpy(), rows.reshape(-1).view(ROW)


def _size(kind: Kind) -> int:
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in kind)


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def _damaged(path: Path) -> CorruptionError:
    return CorruptionError(
        f"{path} is missing or was changed.", "Remove it; its content will be made again."
    )


def _in_use(path: Path) -> StoreError:
    return StoreError(
        f"{path} is in use by another process that trains the same run.",
        "Wait for its result, or stop it.",
    )
