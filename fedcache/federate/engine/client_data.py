"""The data that clients of a run read: rows of one feature matrix without copies, and interfaces of frozen encoders.

The encoders are the two towers of a CLIP model. Gradients pass through them to their inputs; their weights do not
change. ``federate`` never loads a model: the caller of ``engine.run`` passes the encoders.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcache.errors import FederatedRunError, InternalError, StoreError, unknown
from fedcache.store.files import explain_disk_errors, make_private, memory_limit
from fedcache.store.reader import Reader, map_rows, mapped_bytes

# Preparation of stored features for a method: backbones are concatenated, and normalised or scaled.
#
# ``center`` and ``standardize`` keep their statistics as ``Scaling``, so that a trained head transforms new rows like
# its training rows.


FEAT_POSTS = ("none", "l2", "l2_concat", "sign", "center", "standardize")

SHARED_SUMS = {"center": 1, "standardize": 2}
"""``feat_post`` -> number of sums over its rows that each client sends before round 1; it receives as many means."""


def longest_row(feat_post: str, widths: Sequence[int]) -> float | None:
    """Upper bound of the norm of a row after ``feat_post``, for backbones of these widths; None without a bound."""
    bounds = {
        "l2": math.sqrt(len(widths)),
        "center": math.sqrt(len(widths)),
        "l2_concat": 1.0,
        "sign": math.sqrt(sum(widths)),
    }
    return bounds.get(feat_post)


STEP = 4096
"""Number of rows that are processed at once, so that temporary arrays stay small."""


def in_steps(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Consecutive parts of at most ``STEP`` rows, without copies."""
    for first in range(0, len(rows), STEP):
        yield rows[first : first + STEP]


@dataclass(frozen=True)
class Scaling:
    """Statistics of all clients' rows, by which a feature becomes (feature - ``mean``) / ``scale``."""

    mean: NDArray[np.float64]  # [D]
    scale: NDArray[np.float64]  # [D]; 1 for a feature that is constant, and for ``center``

    @staticmethod
    def of(features: NDArray[np.float32], train: NDArray[np.int64]) -> Scaling:
        """Mean and standard deviation of view 0 of the ``train`` rows of features [N, V, D].

        The number of features that are processed at once depends on the memory budget, and does not change a result.
        """
        # As many columns at a time as fit into the memory budget. 16 bytes are an upper bound for each value: a copy in
        # float32, and the deviation from the mean in float64.
        D = features.shape[2]
        together = max(1, min(D, memory_limit() // (16 * len(train))))
        mean = np.empty(D)
        scale = np.empty(D)
        for start in range(0, D, together):
            columns = features[train, 0, start : start + together]
            mean[start : start + together] = columns.mean(0, dtype=np.float64)
            scale[start : start + together] = columns.std(0, dtype=np.float64)
        scale[scale == 0.0] = 1.0  # a constant feature stays constant
        return Scaling(mean, scale)

    def apply(self, features: NDArray[np.float32]) -> None:
        """Subtract the mean and divide by the scale, in place."""
        # In float64 and block by block, because a copy of all features might not fit into memory.
        for rows in in_steps(features):
            rows[...] = (rows - self.mean) / self.scale


def prepare_features(
    features: Sequence[np.ndarray | Reader],
    feat_post: str,
    train: np.ndarray | None = None,
    *,
    scaling: Scaling | None = None,
    views: int | None = None,
    scratch: Path | None = None,
) -> tuple[Tensor, Scaling | None]:
    """Concatenate backbones and apply the ``feat_post`` of a run.

    Raises FedcacheError: exit 2 for an unknown ``feat_post``, exit 4 if the arrays differ in rows or views, exit 6 for
    a full disk.

    Args:
        features: one [N, V, d_k] array per backbone, any float dtype; rows may be NaN where an image is missing.
        feat_post: none; l2 (each backbone to unit length); l2_concat (the concatenation to unit length); sign (1
            where x > 0, else 0: the released FedPCL's ResNet features, D-01); center (each backbone to unit length,
            minus the mean over view 0 of the ``train`` rows, to unit length again); standardize (zero mean and unit
            variance of every feature over view 0 of the ``train`` rows).
        train: int64 rows of the clients' training sets, needed by ``center`` and ``standardize``. Mean and variance
            are statistics of all clients together, which no single client of a real federation could know.
        scaling: statistics from other rows, instead of ``train``.
        views: number of views of each row to take; None takes all, and all backbones need the same number.
        scratch: folder for a result beyond the memory limit, which is mapped from a temporary file; None keeps every
            result in memory.

    Returns:
        [N, V, D] float32, and the statistics of ``center`` or ``standardize``; None for other ``feat_post``.
    """
    if feat_post not in FEAT_POSTS:
        raise unknown("feat_post", feat_post, FEAT_POSTS)
    shapes = set()
    for f in features:
        V = f.shape[1]
        if views:
            V = min(V, views)
        shapes.add((f.shape[0], V))
    if len(shapes) != 1:
        found = sorted(f.shape for f in features)
        raise StoreError(
            f"The backbones have different rows or views: {found}.",
            "Extract all backbones into one store with the same number of views. To see the views: fedcache inspect",
        )
    N, V = shapes.pop()
    widths = [f.shape[2] for f in features]
    out = _allocate((N, V, sum(widths)), scratch)
    starts = np.cumsum([0, *widths[:-1]])
    # Each backbone's columns are filled block by block, so a stored array is never in memory twice.
    for start, width, part in zip(starts, widths, features, strict=True):
        for first, rows in _blocks_of(part):
            target = out[first : first + len(rows), :, start : start + width]
            target[...] = rows[:, :V]
            if feat_post in ("l2", "center"):
                _unit(target)
    if feat_post == "l2_concat":
        _unit(out)
    elif feat_post == "sign":
        _sign(out)
    elif feat_post in SHARED_SUMS:
        if scaling is None:
            if train is None or not len(train):
                raise FederatedRunError(
                    f"feat_post={feat_post} needs training rows, but there are none.",
                    "Give the clients training rows, or choose --set feat_post=l2.",
                )
            scaling = Scaling.of(out, np.unique(train))
            if feat_post == "center":
                scaling = replace(scaling, scale=np.ones(len(scaling.scale)))
        scaling.apply(out)
        if feat_post == "center":
            for start, width in zip(starts, widths, strict=True):
                _unit(out[..., start : start + width])
    if feat_post not in SHARED_SUMS:
        scaling = None
    return torch.from_numpy(out), scaling


def _blocks_of(part: np.ndarray | Reader) -> Iterator[tuple[int, np.ndarray]]:
    if isinstance(part, np.ndarray):
        return iter([(0, part)])
    return part.blocks()


def _allocate(shape: tuple[int, ...], scratch: Path | None) -> np.ndarray:
    """An array for float32 features: in memory, or in a temporary file in ``scratch`` if it exceeds the budget."""
    size = 4 * math.prod(shape)
    if scratch is None or size <= memory_limit():
        return np.empty(shape, np.float32)
    make_private(scratch)
    # The file has no name, so the system deletes it when its last memory map is closed.
    with explain_disk_errors(scratch, size), tempfile.TemporaryFile(dir=scratch) as file:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):
            # Without this, a full disk would kill the process later, at a write to the map.
            os.posix_fallocate(file.fileno(), 0, size)
        return np.asarray(np.memmap(file, np.float32, "r+", shape=shape))


def _unit(rows: np.ndarray) -> None:
    """Bring vectors [..., D] to unit length, in place."""
    for part in in_steps(rows):
        norms = np.linalg.norm(part, axis=-1, keepdims=True)
        part /= np.maximum(norms, 1e-12)


def _sign(rows: np.ndarray) -> None:
    """Replace values above 0 by 1 and others by 0, in place; NaN stays."""
    for part in in_steps(rows):
        np.copyto(part, part > 0, where=~np.isnan(part))


ROW_POSTS = {"none": None, "l2": _unit, "l2_concat": _unit, "sign": _sign}
"""``feat_post`` -> its in-place function on float32 rows [.., D] of one backbone; None if it changes nothing here."""


# Features that stay in their files, in the stored dtype; rows are cast when they are gathered.
#
# The cast of a row does not depend on other rows. So a run reads the same numbers as from a float32
# copy of all features, but needs no memory for the copy.


RESIDENT = 768 << 20
"""Bytes of mapped pages above which all pages are released. If they are needed again, the page cache has them."""

IN_MEMORY = 256 << 20
"""Bytes of float32 features up to which they are read into memory. Otherwise each gather converts them, more slowly."""

AROUND = 2 << 20
"""Limit in bytes of what the system maps around a byte that is read: 64 KB on most systems, at most a huge page."""


@dataclass
class _Touched:
    """Bytes of mapped pages; separate from ``StoredRows``, which is frozen."""

    nbytes: int = 0


@dataclass(frozen=True, eq=False)
class StoredRows:
    """[N, V, D] features in their files, with the part of the tensor interface that the engine uses.

    Indexing by rows, views and columns gives a new tensor in ``dtype``: ``rows[index, 0]``.
    """

    stored: Tensor  # [N, V, D] in the stored dtype, never written
    dtype: torch.dtype = torch.float32  # of the rows that are read
    # In-place transformation of float32 rows [.., D], each row alone; None for no transformation.
    post: Callable[[NDArray[np.float32]], Any] | None = None
    release: Callable[[], None] | None = None  # releases the mapped pages of a file
    _touched: _Touched = field(default_factory=_Touched)

    @property
    def shape(self) -> torch.Size:
        """(N, V, D)."""
        return self.stored.shape

    @property
    def device(self) -> torch.device:
        """Where rows are gathered."""
        return self.stored.device

    @property
    def nbytes(self) -> int:
        """Bytes of memory: 0 for mapped rows."""
        if self.release is not None:
            return 0
        return self.stored.nbytes

    def __len__(self) -> int:
        return len(self.stored)

    def is_floating_point(self) -> bool:
        """True, as for a tensor of ``dtype``."""
        return True

    def element_size(self) -> int:
        """Bytes of a number that is read."""
        return self.dtype.itemsize

    def to(self, target: torch.dtype | torch.device | str) -> StoredRows:
        """The same rows read as another dtype, or copied to another device."""
        if isinstance(target, torch.dtype):
            return replace(self, dtype=target)
        return replace(self, stored=self.stored.to(target), release=None)

    def new_empty(self, *size: int) -> Tensor:
        """An uninitialised tensor in the dtype of the rows that are read."""
        return torch.empty(*size, dtype=self.dtype, device=self.device)

    def __getitem__(self, key: Any) -> Tensor:
        if not isinstance(key, tuple):
            key = (key,)
        rows, *view_and_columns = key
        # Each is a list of one index, or empty.
        view = view_and_columns[:1]
        columns = view_and_columns[1:]
        # Rows and view first, then ``post`` on whole rows, then columns.
        if isinstance(rows, Tensor):
            stored = self._gather(self.stored[(slice(None), *view)], rows)
        else:
            stored = self.stored[(rows, *view)]
        return self._read(stored)[(..., *columns)]

    def take(self, index: Tensor) -> Tensor:
        """Rows ``index`` [K] of the matrix [N V, D]; row n V + v of the matrix is view v of row n. Returns [K, D]."""
        V, D = self.shape[1:]
        matrix = self.stored.reshape(-1, D)
        return self._read(self._gather(matrix, index, V))

    def _read(self, rows: Tensor) -> Tensor:
        # ``post`` works in place, so it needs a copy of mapped rows.
        read = rows.to(torch.float32, copy=self.post is not None)
        if self.post is not None:
            made = read.cpu()
            self.post(made.numpy())
            read = made.to(self.device)
        return read.to(self.dtype)

    def _gather(self, source: Tensor, index: Tensor, views: int = 1) -> Tensor:
        """source[index] for the rows or the matrix of all views; mapped rows are read in parts of limited size."""
        if self.release is None or not len(index) or self.stored.nbytes <= RESIDENT:
            return source[index]
        max_bytes = self._max_mapped(index, views)
        if max_bytes <= RESIDENT:
            self._touch(max_bytes)
            return source[index]
        # Rows are read in the order of the file, in parts that each map at most ``RESIDENT`` bytes.
        flat = index.flatten()
        out = source.new_empty((len(flat), *source.shape[1:]))
        for part in flat.argsort().tensor_split(-(-max_bytes // RESIDENT)):
            rows = flat[part]
            self._touch(self._max_mapped(rows, views))
            out[part] = source[rows]
        return out.reshape(*index.shape, *source.shape[1:])

    def _max_mapped(self, index: Tensor, views: int) -> int:
        """Upper bound of the bytes that a gather maps."""
        # Both numbers are upper bounds: the pages around each row, and all pages from the first to the last row.
        size = self.stored[0].nbytes
        span = (int(index.max()) - int(index.min())) // views + 1
        around_rows = index.numel() * (size + AROUND)
        return min(around_rows, span * size + AROUND)

    def _touch(self, max_bytes: int) -> None:
        """Count the bytes that a gather will map, and release all mapped pages above the limit."""
        # The sum of upper bounds is cheap to compute. Only if it exceeds the limit, the true number is read from the
        # system, because that is faster than releasing pages and mapping them again.
        self._touched.nbytes += max_bytes
        if self._touched.nbytes > RESIDENT:
            self._touched.nbytes = mapped_bytes(self._touched.nbytes)
        if self._touched.nbytes > RESIDENT:
            self._touched.nbytes = max_bytes
            if self.release is not None:
                self.release()


def stored_rows(readers: Sequence[Reader], feat_post: str) -> StoredRows | None:
    """The features of an array, read from its file when they are needed; None if they must or should be in memory.

    Args:
        readers: one per backbone; several are concatenated, and that matrix is in no file.
        feat_post: transformation of the features; ``center`` and ``standardize`` must read all rows before they can
            transform one.

    Raises CorruptionError for a damaged chunk.
    """
    # ``feat_post`` must be a function of one row, because it is applied at every gather.
    if len(readers) != 1 or feat_post not in ROW_POSTS:
        return None
    reader = readers[0]
    size = 4 * math.prod(reader.shape)
    if len(reader.shape) != 3 or size <= min(IN_MEMORY, memory_limit()):
        return None
    mapped = map_rows(reader)
    if mapped is None:
        return None
    values = torch.from_numpy(mapped.values)
    return StoredRows(values, post=ROW_POSTS[feat_post], release=mapped.release)


Features = Tensor | StoredRows
"""[N, V, D] features of a run."""


def take_rows(x: Features, index: Tensor) -> Tensor:
    """Rows ``index`` [K] of the matrix [N V, D] of features [N, V, D], as ``StoredRows.take``."""
    if isinstance(x, StoredRows):
        return x.take(index)
    return x.reshape(-1, x.shape[-1]).index_select(0, index)


ALIGNED = 64
"""Alignment of each client's rows in bytes. With it, kernels give the same bits if a client's rows are copied alone."""


class TextTower(Protocol):
    """Text encoder; its inputs are token embeddings, which may be trained."""

    @property
    def width(self) -> int:
        """E, the width of a token embedding."""

    @property
    def context(self) -> int:
        """L, the number of tokens of a prompt, start and end included."""

    def embed(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Prompts as embeddings [B, L, E], and int64 [B]: the position of each end token; padding follows it."""

    def encode(self, embeddings: Tensor, end: Tensor) -> Tensor:
        """Unit text features [B, D] of embeddings [B, L, E] that end at positions [B]; differentiable."""


class ImageTower(Protocol):
    """Image encoder of normalised images, to which a trained prompt can be added."""

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] -> normalised float [B, 3, H, W]."""

    def encode(self, x: Tensor) -> Tensor:
        """Unit image features [B, D] of normalised images [B, 3, H, W]; differentiable."""


class FrozenEncoders(Protocol):
    """Both towers of one backbone."""

    @property
    def name(self) -> str:
        """Name of the backbone."""

    @property
    def template(self) -> str:
        """Prompt template with ``{}`` for the class name."""

    @property
    def scale(self) -> float:
        """The factor of cosines in its logits (100 for CLIP)."""

    @property
    def text(self) -> TextTower:
        """The text tower."""

    @property
    def image(self) -> ImageTower:
        """The image tower."""

    def to(self, device: str) -> FrozenEncoders:
        """The same towers on another device."""


@dataclass(frozen=True)
class Data:
    """Features and labels of all clients."""

    x: Features  # [N, V, D] float32 features, all backbones concatenated; rows without a client are never read
    y: Tensor  # int64 [N] class indices
    classes: int  # C
    text: Tensor | None = None  # [C, D] unit class text features, or None
    widths: tuple[int, ...] = ()  # features of each backbone, in the order they were concatenated
    domain: Tensor | None = None  # int64 [N] domain of each row, or None
    backbones: tuple[str, ...] = ()  # of the features, in the same order; () if unknown
    names: tuple[str, ...] = ()  # C class names, for methods with a text tower
    image: tuple[int, int] | None = None  # (H, W) if ``x`` holds images, uint8 [N, 1, H * W * 3]
    towers: FrozenEncoders | None = None  # live frozen encoders, or None
    longest_row: float | None = None  # upper bound of the norm of a row of ``x``; None if unknown

    def __post_init__(self) -> None:
        N, _, D = self.x.shape
        if self.text is not None and self.image is not None:
            D = self.text.shape[-1]  # the towers' width, not that of an image
        shapes = {"y": (N,), "text": (self.classes, D), "domain": (N,)}
        for name, expected in shapes.items():
            t = getattr(self, name)
            if t is None:
                continue
            found = tuple(t.shape)
            if found != expected:
                features = tuple(self.x.shape)
                raise StoreError(
                    f"{name} has shape {found}, expected {expected}: the features have shape {features}, and there are "
                    f"{self.classes} classes.",
                    "Text features and image features must come from the same backbone. To see them: fedcache inspect",
                )

    def to(self, device: str) -> Data:
        """A copy with features, labels and encoders on another device."""
        moved = {}
        for name in ("x", "y", "text", "domain", "towers"):
            part = getattr(self, name)
            if part is not None:
                moved[name] = part.to(device)
        return replace(self, **moved)


@dataclass(frozen=True)
class ClientData:
    """The training rows of some clients, the input of a method's ``fit`` and ``enter``."""

    x: Features  # [N, V, D] features of the whole store
    y: Tensor | None  # int64 [N], or None for a method that must not read labels
    # int64 [*lead, R] rows of the store. A client with fewer rows is padded with its own first row, so that it never
    # reads a row of another client.
    rows: Tensor
    n: tuple[int, ...]  # number of rows of each client
    cut: bool = False  # whether ``x`` holds only the rows of one client, in their order

    def take(self, i: Tensor, view: int | Tensor = 0) -> Tensor:
        """Features [*lead, B, D] at positions ``i`` [*lead, B] of each client.

        ``view`` is the view of all rows, or of each row.
        """
        # Row n V + v of the matrix [N V, D] is view v of stored row n, so one gather serves all clients.
        rows = self.rows.gather(-1, i)
        V, D = self.x.shape[1:]
        index = (rows * V + view).flatten()
        return take_rows(self.x, index).view(*i.shape, D)

    def labels(self, i: Tensor | None = None) -> Tensor:
        """Class indices [*lead, B] at positions ``i``; if ``i`` is None, those of the rows of ``full``, [*lead, R]."""
        if i is None:
            i = self.positions()
        if self.y is None:
            raise InternalError(
                "A method that declares that it reads no labels has read a label.",
                "Please report this with the method's name.",
            )
        return self.y[self.rows.gather(-1, i)]

    def fits(self, rows: int, budget: int) -> bool:
        """Whether the features of this number of rows fit into ``budget`` bytes."""
        return rows * self.x.shape[-1] * self.x.element_size() <= budget

    def blocks(self, size: int) -> Iterator[ClientData]:
        """The same clients with at most ``size`` of the rows of each at a time, in order."""
        R = self.rows.shape[-1]
        if size >= R:
            yield self
            return
        for start in range(0, R, size):
            part = slice(start, min(start + size, R))
            n = tuple(max(0, min(count - start, size)) for count in self.n)
            if not self.cut:
                yield replace(self, rows=self.rows[..., part], n=n)
                continue
            # Cut rows belong to one client. A block of them is cut again, so its rows have the numbers from 0 on.
            y = self.y
            if y is not None:
                y = y[part]
            rows = self.rows[: part.stop - start]
            yield replace(self, x=self.x[part], y=y, rows=rows, n=n)

    def narrow(self, count: int) -> ClientData:
        """The first ``count`` clients."""
        if self.rows.dim() == 1 or count == len(self.n):
            return self
        return replace(self, rows=self.rows.narrow(-2, 0, count), n=self.n[:count])

    def mask(self) -> Tensor:
        """[*lead, R]: 1.0 on a client's rows, 0.0 on padding, in the dtype of the features (float32 for images)."""
        dtype = torch.float32
        if self.x.is_floating_point():
            dtype = self.x.dtype
        position, n = self._counted()
        return (position < n).to(dtype)

    def positions(self) -> Tensor:
        """[*lead, R]: every position of each client; positions of padding point at the client's first row."""
        position, n = self._counted()
        return torch.where(position < n, position, 0)

    def per_client(self, numbers: Sequence[int]) -> Tensor:
        """One number of each client, float64 [*lead], with an axis of 1 for the points of a grid."""
        made = torch.tensor(numbers, dtype=torch.float64, device=self.rows.device)
        return made.reshape(self.rows.shape[:-1])

    def _counted(self) -> tuple[Tensor, Tensor]:
        """Positions [R], and the number of rows of each client [*lead, 1] to compare them with."""
        position = torch.arange(self.rows.shape[-1], device=self.rows.device)
        n = torch.tensor(self.n, device=self.rows.device)
        return position, n.reshape(*self.rows.shape[:-1], 1)

    def full(self, view: int = 0) -> tuple[Tensor, Tensor]:
        """All rows of every client in one view: features [*lead, R, D] and ``mask``."""
        if self.cut:
            return self.x[:, view], self.mask()
        return self.take(self.positions(), view), self.mask()


class FeatureColumns:
    """A feature matrix cut to the columns of single clients; each cut is made once and shared."""

    def __init__(self, x: Features) -> None:
        self._x = x
        # No ranges stand for all columns.
        self._cuts: dict[tuple[tuple[int, int], ...], Features] = {(): x}

    def cut(self, ranges: tuple[tuple[int, int], ...]) -> Features:
        """[N, V, D] -> [N, V, d] with the columns of ``ranges``, contiguous."""
        if ranges not in self._cuts:
            # Contiguous, so that a gather reads each row in one piece. ``[:]`` makes a tensor of ``StoredRows``.
            parts = [self._x[:][..., first:end] for first, end in ranges]
            self._cuts[ranges] = torch.cat(parts, -1)
        return self._cuts[ranges]


def stack_clients(
    x: Features, y: Tensor | None, trains: Sequence[np.ndarray], axes: int
) -> ClientData:
    """The data of some clients with ``axes`` leading axes (0 for exactly one client)."""
    # [M, R] row numbers, padded with the client's own first row, which has the weight 0.
    longest = max((len(t) for t in trains), default=0)
    rows = np.zeros((len(trains), longest), np.int64)
    for out, train in zip(rows, trains, strict=True):
        out[: len(train)] = train
        if len(train):
            out[len(train) :] = train[0]
    on_device = with_axes(torch.from_numpy(rows).to(x.device), axes)
    n = tuple(len(t) for t in trains)
    return ClientData(x, y, on_device, n)


def with_axes(t: Tensor, axes: int) -> Tensor:
    """A tensor with a client axis, with ``axes`` leading axes instead: none, (M,) or (1, M)."""
    if axes == 0:
        return t[0]
    if axes == 2:
        return t[None]
    return t


def cut_out(x: Features, y: Tensor | None, trains: Sequence[np.ndarray]) -> list[ClientData]:
    """The data of some clients, each alone without leading axes, as copies in one block of memory.

    Separate blocks, made on first access, would fragment the memory.
    """
    # Sizes in numbers: each client's part is rounded up to a multiple of ``ALIGNED`` bytes.
    step = ALIGNED // x.element_size()
    row_size = math.prod(x.shape[1:])
    sizes = [-(-len(t) * row_size // step) * step for t in trains]
    block = x.new_empty(sum(sizes))
    made = []
    start = 0
    for train, size in zip(trains, sizes, strict=True):
        rows = torch.from_numpy(np.asarray(train, np.int64)).to(x.device)
        # Each client begins at a multiple of ``ALIGNED`` bytes within the block.
        flat = block[start : start + len(rows) * row_size]
        client_x = flat.view(len(rows), *x.shape[1:])
        if isinstance(x, StoredRows):
            client_x.copy_(x[rows])
        else:
            torch.index_select(x, 0, rows, out=client_x)
        positions = torch.arange(len(rows), device=x.device)
        labels = y
        if labels is not None:
            labels = labels[rows]
        made.append(ClientData(client_x, labels, positions, (len(rows),), cut=True))
        start += size
    return made
