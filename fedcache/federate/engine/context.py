"""Context of a method: the clients and grid points computed at once, and their random draws.

M clients of G grid points are one batch. ``ctx.lead`` is ``()``, ``(M,)`` or ``(G, M)``, and every per-client tensor
carries exactly those leading axes, each of full length or of length 1. Methods never see a random generator: draws are
keyed by (seed, purpose, round, client, ...) and stacked here, so no execution, chunk, padding or order changes a draw.

A key is hashed to 128 bits, so two keys never share a stream in practice. A round makes one stream for every client and
purpose; ``generators`` seeds many at once, since numpy's ``SeedSequence`` spends 30 us on each. The states are those of
``PCG64(SeedSequence(hash))``, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import permutations
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor

from fedcache.errors import StoreError
from fedcache.federate.engine.client_data import ClientData, FrozenEncoders, with_axes
from fedcache.federate.engine.hyperparameters import Hp, Value
from fedcache.heads.linear import Tree

T = TypeVar("T")

MEMO_BYTES = 64 << 20
"""Default size of an ``LruCache`` in bytes; the least recently used values are removed first."""

POOLED = 4
"""Number of pooled uploads that a grid keeps, the last used ones. A Gram matrix of 4,096 features takes 64 MB."""


class SameObject:
    """Cache key that equals only a key of the same object. It holds the object, so that its id is not used again."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and other.value is self.value


class LruCache:
    """Cache of values by key, limited to a number of bytes. Runs share a value, so do not change it in place."""

    def __init__(self, budget: int = MEMO_BYTES) -> None:
        self.budget = budget
        self.nbytes = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """The value of ``key``, made if it is missing; ``size`` returns its bytes. Too large values are not kept."""
        if key in self._kept:
            self._kept.move_to_end(key)
            value: T = self._kept[key][0]
            return value
        made = make()
        made_bytes = size(made)
        if made_bytes <= self.budget:
            self._kept[key] = (made, made_bytes)
            self.nbytes += made_bytes
        # The least recently used values are removed first.
        while self.nbytes > self.budget:
            _, (_, removed_bytes) = self._kept.popitem(last=False)
            self.nbytes -= removed_bytes
        return made


Words = npt.NDArray[np.uint32]

WORDS = 4
"""Number of 32-bit words in the hash of a key, and in numpy's entropy pool."""

MANY = 8
"""Minimum number of keys for which it is faster to seed all generators together."""

_MASK = 0xFFFFFFFF

SERVER = "/server"
"""Name from which the server's random draws are derived. No client can have it, because names contain no slash."""


def _powers(first: int, factor: int, count: int) -> list[tuple[np.uint32, np.uint32]]:
    """(xor, multiplier) of each step of numpy's hash: a constant before and after it is multiplied by ``factor``."""
    out = []
    for _ in range(count):
        product = first * factor & _MASK
        out.append((np.uint32(first), np.uint32(product)))
        first = product
    return out


# The constants of numpy's SeedSequence, whose streams numpy never changes. The pool takes a step for each word, and one
# for each ordered pair of words.
_FILL = _powers(0x43B0D7E5, 0x931E8875, WORDS + WORDS * (WORDS - 1))
_DRAW = _powers(0x8B51F9DD, 0x58F38DED, 2 * WORDS)
_LEFT = np.uint32(0xCA01F9DD)
_RIGHT = np.uint32(0x4973F715)
_SHIFT = np.uint32(16)


class _Seeded(ISeedSequence):
    """A seed sequence that returns a state which was computed before."""

    def __init__(self, state: np.ndarray) -> None:
        self.state = state

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        """The state; ``PCG64`` asks for four uint64."""
        return self.state


def key_hash(*key: int | str) -> int:
    """128 bits of a key."""
    return int.from_bytes(_digest(*key), "little")


def _digest(*key: int | str) -> bytes:
    text = "\0".join(map(str, key))
    return hashlib.blake2b(text.encode(), digest_size=4 * WORDS).digest()


def generator(seed: int, purpose: str, *key: int | str) -> np.random.Generator:
    """The generator of one stream."""
    return np.random.Generator(np.random.PCG64(key_hash(seed, purpose, *key)))


def generators(keys: Sequence[tuple[int | str, ...]]) -> list[np.random.Generator]:
    """``generator(*key)`` of every key."""
    if len(keys) < MANY:
        return [np.random.Generator(np.random.PCG64(key_hash(*key))) for key in keys]
    digests = b"".join(_digest(*key) for key in keys)
    # [4, n]: the words of each hash, from the lowest.
    hashes = np.frombuffer(digests, "<u4").reshape(-1, WORDS).T
    made = []
    for state in seed_states(hashes):
        bits = np.random.PCG64(cast(Any, _Seeded(state)))
        made.append(np.random.Generator(bits))
    return made


def seed_states(entropy: np.ndarray) -> np.ndarray:
    """``SeedSequence(entropy).generate_state(4, uint64)`` of many entropies.

    Args:
        entropy: uint32 [4, n], the words of each entropy, from the lowest.

    Returns:
        uint64 [n, 4].
    """
    steps = iter(_FILL)

    def mixed(value: Words, step: tuple[np.uint32, np.uint32]) -> Words:
        value = (value ^ step[0]) * step[1]
        return value ^ value >> _SHIFT

    # numpy's algorithm on arrays: fill the pool, mix every word into every other, then draw 32-bit words from the pool.
    pool = [mixed(word, next(steps)) for word in entropy.astype(np.uint32)]
    for source, target in permutations(range(WORDS), 2):
        both = pool[target] * _LEFT - mixed(pool[source], next(steps)) * _RIGHT
        pool[target] = both ^ both >> _SHIFT
    words = [mixed(pool[i % WORDS], step) for i, step in enumerate(_DRAW)]
    return np.stack(words, 1).astype("<u4").view("<u8").astype(np.uint64)


@dataclass(frozen=True)
class ClientRng:
    """The random draws of one round for some clients."""

    seed: int  # of the run
    round: int  # 0-based
    clients: tuple[str, ...]  # one name per position of the client axis
    axes: int  # number of leading axes (0, 1, 2); grid points share draws, so the grid axis has length 1
    dtype: torch.dtype  # of floating-point draws that are returned
    # Of the draws that are returned. They are made on the CPU, so the device never changes a number.
    device: torch.device
    memo: LruCache | None = None  # of a grid, where points reuse the draws of other points

    def generator(self, purpose: str, client: int, *key: int) -> np.random.Generator:
        """This round's stream of one client."""
        return generator(self.seed, purpose, self.round, self.clients[client], *key)

    def each(
        self,
        purpose: str,
        draw: Callable[[np.random.Generator, int], np.ndarray],
        *key: int,
        every_round: bool = True,
    ) -> Tensor:
        """``draw(generator, client)`` of every client, padded with 0 on the first axis and stacked.

        Args:
            purpose: name of the stream.
            draw: returns an array whose first axis may differ between clients.
            key: epoch, step.
            every_round: False for a draw made once in a client's life (its initial weights).

        Returns:
            [*lead, n, ..]; integers as int64, floats in the run's dtype.
        """
        when = -1  # no round
        if every_round:
            when = self.round
        streams = generators([(self.seed, purpose, when, c, *key) for c in self.clients])
        return self.stack([draw(g, i) for i, g in enumerate(streams)])

    def permutations(self, purpose: str, sizes: Sequence[int], *key: int) -> Tensor:
        """A permutation of each client's rows [*lead, max(sizes)], in this round."""
        # Points of a grid that are computed one by one reuse the permutations of single clients.
        if self.memo is None or len(sizes) > 1:
            return self.each(purpose, lambda g, i: g.permutation(sizes[i]), *key)
        same = ("order", self.seed, purpose, self.round, self.clients[0], sizes[0], self.axes, *key)
        make = partial(self.each, purpose, lambda g, _: g.permutation(sizes[0]), *key)
        return self.memo.get(same, make, lambda t: t.nbytes)

    def stack(self, parts: Sequence[np.ndarray]) -> Tensor:
        """One array per client -> one tensor with the leading axes of this context, padded with 0."""
        # Arrays of equal length need no padding, and are copied only once.
        longest = max(p.shape[0] for p in parts)
        if all(p.shape[0] == longest for p in parts):
            out = np.concatenate(parts).reshape(len(parts), *parts[0].shape)
        else:
            out = np.zeros((len(parts), longest, *parts[0].shape[1:]), parts[0].dtype)
            for row, part in zip(out, parts, strict=True):
                row[: part.shape[0]] = part
        return with_axes(self._placed(torch.from_numpy(out)), self.axes)

    def _placed(self, t: Tensor) -> Tensor:
        """A draw on the run's device; floats in its dtype."""
        if t.is_floating_point():
            return t.to(self.device, self.dtype)
        return t.to(self.device)

    def uniform(
        self, purpose: str, *, independent: bool = False
    ) -> Callable[[tuple[int, ...]], Tensor]:
        """Draws of U[-1, 1) for initial weights: the same for all clients, or other draws for each client (D-11).

        Points of a grid that are computed one by one start from the same weights, which are drawn once and cached.
        """
        if self.memo is not None and len(self.clients) == 1:
            return self._remembered(purpose, independent)
        # "": one stream that all clients share. -1: no round, because the draws are equal in every round.
        clients = [""] * len(self.clients)
        if independent:
            clients = list(self.clients)
        made = [generator(self.seed, purpose, -1, client) for client in clients]

        def draw(shape: tuple[int, ...]) -> Tensor:
            if independent:
                return self.stack([g.uniform(-1.0, 1.0, shape) for g in made])
            drawn = made[0].uniform(-1.0, 1.0, shape)
            t = torch.from_numpy(drawn).to(self.device, self.dtype)
            return t.reshape((1,) * self.axes + tuple(shape))

        return draw

    def _remembered(self, purpose: str, independent: bool) -> Callable[[tuple[int, ...]], Tensor]:
        """The draws of ``uniform`` for one client, from the cache if another point has made them already."""
        memo = cast(LruCache, self.memo)
        client = ""
        if independent:
            client = self.clients[0]
        key = ("init", self.seed, purpose, client, self.axes, self.dtype, self.device)
        fresh = replace(self, memo=None).uniform(purpose, independent=independent)
        shapes = []
        pending = []

        def draw(shape: tuple[int, ...]) -> Tensor:
            # Shapes drawn so far are part of the key. A draw from the cache does not advance the stream, so ``make``
            # first makes the draws that were skipped.
            shapes.append(shape)
            pending.append(shape)

            def make() -> Tensor:
                made = [fresh(skipped) for skipped in pending]
                pending.clear()
                return made[-1]

            return memo.get((*key, *shapes), make, lambda t: t.nbytes)

        return draw

    def normal(self, purpose: str, counts: Sequence[int], width: int, *key: int) -> Tensor:
        """Standard normal rows [*lead, max(counts), width]; client i has ``counts[i]`` rows, then zeros.

        A shorter draw is a prefix of a longer one. torch draws normals in groups of 16 and redoes a last group that
        is not full, so whole groups are drawn. Its CPU generator keeps 32 bits of a seed: two of n streams coincide
        with probability n^2 / 2^33. This is harmless for noise; permutations come from ``generator`` instead.
        """
        longest = max(counts, default=0)
        out = torch.empty(len(self.clients), longest, width)
        if min(counts, default=0) < longest:
            out.zero_()
        source = torch.Generator()
        flat = out.view(-1)
        for i, (client, count) in enumerate(zip(self.clients, counts, strict=True)):
            seed = key_hash(self.seed, purpose, self.round, client, *key)
            source.manual_seed(seed & _MASK)
            # This client's part of the result; whole groups of 16 can be drawn in place.
            numbers = count * width
            part = flat.narrow(0, i * longest * width, numbers)
            if numbers % 16 == 0:
                part.normal_(generator=source)
            else:
                drawn = torch.randn(-(-numbers // 16) * 16, generator=source)
                part.copy_(drawn[:numbers])
        return with_axes(out.to(self.device, self.dtype), self.axes)

    def shared(self, purpose: str, draw: Callable[[np.random.Generator], np.ndarray]) -> Tensor:
        """One draw for the whole run, without leading axes, which server and clients make from a common seed."""
        drawn = draw(generator(self.seed, purpose, -1, ""))
        return self._placed(torch.from_numpy(drawn))

    def narrow(self, count: int) -> ClientRng:
        """The draws of the first ``count`` clients."""
        return replace(self, clients=self.clients[:count])


def _nothing() -> None:
    """The default ``watch`` of a run."""


@dataclass(frozen=True)
class RunConstants:
    """Constants of a run; none has leading axes."""

    classes: int  # C
    width: int  # D, all backbones together
    views: int  # V stored views per row
    clients: int  # M, all clients of the partition
    text: Tensor | None  # [C, D] class text features, or None
    dtype: torch.dtype  # of every computation
    device: torch.device  # of every tensor
    names: tuple[str, ...] = ()  # C class names
    backbones: tuple[str, ...] = ()  # names of the backbones of the features; () if unknown
    # Mean length of all clients' training rows, for methods that need it.
    row_norm: float | None = None
    # Mean number of training rows of a client, for methods that need it.
    mean_rows: float | None = None
    public: Tensor | None = None  # [Np, V, D] rows of the public set, for methods that have one
    image: tuple[int, int] | None = None  # (H, W) if the rows are images, uint8 [H * W * 3] each
    towers: FrozenEncoders | None = None  # live frozen encoders, for methods that need them
    # Called before every step; an exception that it raises ends the run inside a round.
    watch: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Ctx:
    """Context of a method's functions: everything that they get besides tensors."""

    lead: tuple[int, ...]  # the leading axes
    hp: Hp  # hyperparameters; a float swept over a grid is a tensor [G, 1]
    env: RunConstants  # constants of the run
    rng: ClientRng  # draws
    ids: tuple[int, ...]  # numbers of the clients, or of the round's uploads in ``aggregate``
    round: int  # 0-based
    frozen: frozenset[str] = frozenset()  # names of tensors that no optimiser step changes

    @cached_property
    def text(self) -> Tensor:
        """The class text features [C, D] of a run that has been checked to have them."""
        return cast(Tensor, self.env.text)

    @cached_property
    def public(self) -> Tensor:
        """The public rows [Np, V, D] of a run that has been checked to have them."""
        return cast(Tensor, self.env.public)

    @cached_property
    def towers(self) -> FrozenEncoders:
        """The live encoders of a run that has been checked to have them."""
        return cast(FrozenEncoders, self.env.towers)

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of the images of a run that has been checked to have them."""
        return cast(tuple[int, int], self.env.image)

    def number(self, name: str) -> float | Tensor:
        """A float hyperparameter; a tensor [G, 1] if it is swept over a grid."""
        value = self.hp[name]
        if isinstance(value, Tensor):
            return value
        return float(cast(float, value))

    def scalar(self, name: str) -> float:
        """A float hyperparameter where only one grid point is computed, as at the server."""
        return float(self.number(name))

    def count(self, name: str) -> int:
        """An int hyperparameter."""
        return int(cast(int, self.hp[name]))

    def with_hp(self, **changed: Value | Tensor) -> Ctx:
        """The context with other values of some hyperparameters."""
        return replace(self, hp={**self.hp, **changed})

    def zeros(self, *shape: int) -> Tensor:
        """Zeros in the dtype and on the device of the run."""
        return torch.zeros(shape, dtype=self.env.dtype, device=self.env.device)

    def narrow(self, count: int) -> Ctx:
        """The context of the first ``count`` clients."""
        if not self.lead or count == self.lead[-1]:
            return self
        lead = (*self.lead[:-1], count)
        return replace(self, lead=lead, rng=self.rng.narrow(count), ids=self.ids[:count])


def over(h: float | Tensor, t: Tensor) -> float | Tensor:
    """A per-client number, shaped to scale ``t``: a tensor gets trailing axes, a float stays as it is."""
    if isinstance(h, Tensor):
        return h.reshape(h.shape + (1,) * (t.dim() - h.dim()))
    return h


def is_zero(h: float | Tensor | Value) -> bool:
    """Whether a term with this factor can be left out: 0 at every grid point."""
    if isinstance(h, Tensor):
        return bool((h == 0).all())
    return h == 0


def dot(a: Tensor, b: Tensor, ctx: Ctx) -> Tensor:
    """Sum of a * b over all core axes: one value per client."""
    product = a * b
    if product.dim() > len(ctx.lead):
        return product.flatten(len(ctx.lead)).sum(-1)
    return product


def squared_distance(p: Tree, q: Tree, names: Sequence[str], ctx: Ctx) -> Tensor:
    """|p - q|^2 over the named tensors, one value per client."""
    parts = [dot(p[n] - q[n], p[n] - q[n], ctx) for n in names]
    return sum(parts[1:], parts[0])


def narrow_clients(t: Tensor, count: int, ctx: Ctx) -> Tensor:
    """The first ``count`` clients of the client axis; shared tensors stay shared."""
    # A tensor that clients share has length 1 on their axis.
    axis = len(ctx.lead) - 1
    if axis < 0 or t.shape[axis] == 1 < ctx.lead[axis]:
        return t
    return t.narrow(axis, 0, count)


def writable_copies(tree: Tree, ctx: Ctx) -> Tree:
    """Copies of all tensors with full leading axes, which may be updated in place.

    They become row-major, except those of a grid, which may have another memory order (``heads.gram``).
    """
    core = len(ctx.lead)
    order = torch.contiguous_format
    if core == 2:
        order = torch.preserve_format
    copies = {}
    for name, t in tree.items():
        full = t.expand((*ctx.lead, *t.shape[core:]))
        copies[name] = full.clone(memory_format=order)
    return copies


# Stored views of a row: the plain image, or augmentations drawn in every epoch.
#
# View 0 is the plain image; tests, scores and predictions read only this view. Views 1 .. V-1 are
# augmentations that were stored when features were extracted; a method reads them if its
# hyperparameters say so.


def training_views(
    data: ClientData, ctx: Ctx, epoch: int, purpose: str = "batch"
) -> tuple[int | Tensor, ...]:
    """The view of each row by ``train_view``: the plain image, or an augmentation drawn for this epoch."""
    if ctx.hp.get("train_view", "center") == "center":
        return (0,)
    stream = "views"
    if purpose != "batch":
        stream = f"views {purpose}"
    return drawn_views(data, ctx, epoch, 1, stream)


def check_views(hp: Hp, views: int) -> None:
    """Refuse hyperparameters that read augmentations if only one view is stored. Raises StoreError."""
    for name in ("train_view", "proto_view"):
        if hp.get(name) == "aug" and views == 1:
            raise StoreError(
                f"{name}=aug trains on stored augmented views, but the features have only view 0, the image without "
                "augmentation.",
                f"Extract more views, for example fedcache extract --views 4, or use --set {name}=center.",
            )


def drawn_views(
    data: ClientData, ctx: Ctx, epoch: int, count: int, purpose: str = "views"
) -> tuple[int | Tensor, ...]:
    """Number of the stored augmentation (views 1 .. V-1; view 0 is the plain image) of each row in this epoch.

    ``count`` is 1, or 2 for a pair. With three or more stored views, each is [*lead, R], drawn per row, and the two of
    a pair differ. With fewer, each is one number for all rows. ``purpose`` names the stream of draws.
    """
    V = data.x.shape[1]
    if V == 1:
        return (0,) * count
    if V == 2:
        # The only augmentation, and for a pair also the plain image.
        return (1, 0)[:count]
    first = ctx.rng.each(purpose, lambda g, i: g.integers(1, V, data.n[i]), epoch)
    if count == 1:
        return (first,)
    # The second view is 1 to V - 2 augmentations after the first, cyclically, so the two always differ.
    skip = ctx.rng.each(f"{purpose}2", lambda g, i: g.integers(1, V - 1, data.n[i]), epoch)
    second = 1 + (first - 1 + skip) % (V - 1)
    return first, second
