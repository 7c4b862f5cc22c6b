"""Clients' data as a run sees them: rows of one feature matrix, never copies; and the frozen encoders of a run.

Encoders are two towers of one CLIP whose inputs take a gradient, whose weights do not. ``federate`` never loads a
model; what satisfies these protocols arrives as an argument of ``engine.run``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import InternalError, StoreError
from fedcache.federate.engine.stored_rows import Features, StoredRows, take_rows
from fedcache.federate.partition.client_table import ClientRows, all_train_rows

ALIGNED = 64
"""Bytes at which memory of its own starts, so that kernels give the same bits for rows cut out alone or together."""


class TextTower(Protocol):
    """A text encoder that reads token embeddings, so that some of them can be trained."""

    @property
    def width(self) -> int:
        """E, the width of a token embedding."""

    @property
    def context(self) -> int:
        """L, the tokens of a prompt, start and end included."""

    def embed(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Prompts as embeddings [B, L, E], and int64 [B]: the position of each end token; padding follows it."""

    def encode(self, embeddings: Tensor, end: Tensor) -> Tensor:
        """Unit text features [B, D] of embeddings [B, L, E] that end at positions [B]; differentiable."""


class ImageTower(Protocol):
    """An image encoder that reads normalised images, so that something can be added to them."""

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
    """What was extracted, for all clients."""

    x: Features  # [N, V, D] float32 features, all backbones concatenated; rows no client names are never read
    y: Tensor  # int64 [N] class indices
    classes: int  # C
    text: Tensor | None = None  # [C, D] unit class text features, or None
    widths: tuple[int, ...] = ()  # features of each backbone, in the order they were concatenated
    domain: Tensor | None = None  # int64 [N] domain of each row, or None
    backbones: tuple[
        str, ...
    ] = ()  # names of those that made the features, in the same order; () where nobody knows
    names: tuple[str, ...] = ()  # C class names, for methods with a text tower
    image: tuple[int, int] | None = None  # (H, W) when ``x`` holds images, uint8 [N, 1, H * W * 3]
    towers: FrozenEncoders | None = None  # live frozen encoders, or None
    longest_row: float | None = (
        None  # length that no row of ``x`` exceeds as it was made; None where nobody knows
    )

    def __post_init__(self) -> None:
        N, _, D = self.x.shape
        if self.text is not None and self.image is not None:
            D = self.text.shape[-1]  # the towers' width, not that of an image
        wrong = [
            f"{name} has shape {tuple(t.shape)}, expected {want}"
            for name, t, want in (
                ("y", self.y, (N,)),
                ("text", self.text, (self.classes, D)),
                ("domain", self.domain, (N,)),
            )
            if t is not None and tuple(t.shape) != want
        ]
        if wrong:
            raise StoreError(
                f"The features are {tuple(self.x.shape)} for {self.classes} classes, but {'; '.join(wrong)}.",
                "Text features and image features must come from the same backbone: see fedcache inspect.",
            )

    def to(self, device: str) -> Data:
        """The same on another device, features, labels and encoders."""
        return replace(
            self,
            x=self.x.to(device),
            y=self.y.to(device),
            text=None if self.text is None else self.text.to(device),
            domain=None if self.domain is None else self.domain.to(device),
            towers=None if self.towers is None else self.towers.to(device),
        )


@dataclass(frozen=True)
class ClientData:
    """The training rows of some clients; what a method's ``fit`` and ``enter`` receive."""

    x: Features  # [N, V, D] features of the whole store
    y: Tensor | None  # int64 [N], or None for a method that must not read labels
    # int64 [*lead, R] rows of the store; a client with fewer repeats its own first row, so padding never reads a row
    # that it does not hold
    rows: Tensor
    n: tuple[int, ...]  # number of rows of each client
    cut: bool = False  # whether ``x`` is that one client's rows and no others, in their order

    def take(self, i: Tensor, view: int | Tensor = 0) -> Tensor:
        """Features [*lead, B, D] at positions ``i`` [*lead, B] of each client; ``view`` one for all, or one per row."""
        rows = self.rows.gather(-1, i)
        V, D = self.x.shape[1:]
        return take_rows(self.x, (rows * V + view).flatten()).view(*i.shape, D)

    def labels(self, i: Tensor) -> Tensor:
        """Class indices [*lead, B] at positions ``i``."""
        if self.y is None:
            raise InternalError(
                "A method without labels read a label.",
                "Please report this with the method's name.",
            )
        return self.y[self.rows.gather(-1, i)]

    def fits(self, rows: int, budget: int) -> bool:
        """Whether the features of that many rows may be gathered at once."""
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
            if self.cut:
                y = None if self.y is None else self.y[part]
                yield replace(self, x=self.x[part], y=y, rows=self.rows[: part.stop - start], n=n)
            else:
                yield replace(self, rows=self.rows[..., part], n=n)

    def narrow(self, count: int) -> ClientData:
        """The first ``count`` clients."""
        if self.rows.dim() == 1 or count == len(self.n):
            return self
        return replace(self, rows=self.rows.narrow(-2, 0, count), n=self.n[:count])

    def mask(self) -> Tensor:
        """[*lead, R] 1.0 on a client's rows, 0.0 on padding, in the dtype of the features (float32 for images)."""
        position = torch.arange(self.rows.shape[-1], device=self.rows.device)
        n = torch.tensor(self.n, device=self.rows.device).reshape(self.rows.shape[:-1])
        return (position < n.unsqueeze(-1)).to(
            self.x.dtype if self.x.is_floating_point() else torch.float32
        )

    def positions(self) -> Tensor:
        """[*lead, R] every position of each client; those past a client's rows point at its first row."""
        position = torch.arange(self.rows.shape[-1], device=self.rows.device)
        n = torch.tensor(self.n, device=self.rows.device).reshape(self.rows.shape[:-1])
        return torch.where(position < n.unsqueeze(-1), position, 0)

    def full(self, view: int = 0) -> tuple[Tensor, Tensor]:
        """All rows of every client in one view: features [*lead, R, D] and ``mask``."""
        return self.x[:, view] if self.cut else self.take(self.positions(), view), self.mask()


class FeatureColumns:
    """A feature matrix cut to the columns some clients have; each cut is made once, since clients gather from it."""

    def __init__(self, x: Features) -> None:
        self._x = x
        self._cuts: dict[tuple[tuple[int, int], ...], Features] = {(): x}

    def cut(self, ranges: tuple[tuple[int, int], ...]) -> Features:
        """[N, V, D] -> [N, V, d] with the columns of ``ranges``, contiguous."""
        if ranges not in self._cuts:
            self._cuts[ranges] = torch.cat([self._x[:][..., a:b] for a, b in ranges], -1)
        return self._cuts[ranges]


class AllClients:
    """Every client's training rows as one client, for methods that are not federated."""

    name = "all"

    def __init__(self, clients: Sequence[ClientRows]) -> None:
        # Sorted, so that neither the partition nor the order of its clients changes a centralised run.
        self.train = np.sort(all_train_rows(clients))
        self.test = np.empty(0, np.int64)


def stack_clients(
    x: Features, y: Tensor | None, trains: Sequence[np.ndarray], axes: int
) -> ClientData:
    """The data of some clients with ``axes`` leading axes (0 for exactly one client)."""
    longest = max((len(t) for t in trains), default=0)
    rows = np.empty((len(trains), longest), np.int64)
    for out, train in zip(rows, trains, strict=True):
        out[: len(train)] = train
        out[len(train) :] = train[0] if len(train) else 0
    r = torch.from_numpy(rows).to(x.device)
    return ClientData(
        x, y, r[0] if axes == 0 else r[None] if axes == 2 else r, tuple(len(t) for t in trains)
    )


def cut_out(x: Features, y: Tensor | None, trains: Sequence[np.ndarray]) -> list[ClientData]:
    """The data of some clients, each alone without leading axes, in a copy that lies together in memory.

    One block holds all of them: many, made when each is first asked for, would leave holes between temporaries.
    """
    step, numbers = ALIGNED // x.element_size(), math.prod(x.shape[1:])
    sizes = [-(-len(t) * numbers // step) * step for t in trains]
    block, made, start = x.new_empty(sum(sizes)), [], 0
    for train, size in zip(trains, sizes, strict=True):
        rows = torch.from_numpy(np.asarray(train, np.int64)).to(x.device)
        own = block[start : start + len(rows) * numbers].view(len(rows), *x.shape[1:])
        if isinstance(x, StoredRows):
            own.copy_(x[rows])
        else:
            torch.index_select(x, 0, rows, out=own)
        at = torch.arange(len(rows), device=x.device)
        made.append(ClientData(own, None if y is None else y[rows], at, (len(rows),), cut=True))
        start += size
    return made
