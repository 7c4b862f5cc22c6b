"""Stored views of a row: the plain image, or augmentations drawn in every epoch.

View 0 is the plain image; tests, scores and predictions read only this view. Views 1 .. V-1 are augmentations that were
stored when features were extracted; a method reads them if its hyperparameters say so.
"""

from __future__ import annotations

from torch import Tensor

from fedcache.errors import StoreError
from fedcache.federate.engine.client_data import ClientData
from fedcache.federate.engine.context import Ctx
from fedcache.federate.engine.hyperparameters import Hp


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
                f"{name}=aug trains on stored augmentations, but the features hold 1 view.",
                f"Extract some, for example fedcache extract --views 4, or --set {name}=center.",
            )


def drawn_views(
    data: ClientData, ctx: Ctx, epoch: int, count: int, purpose: str = "views"
) -> tuple[int | Tensor, ...]:
    """Which stored augmentation (views 1 .. V-1; view 0 is the plain image) each row shows this epoch.

    ``count`` is 1, or 2 for a pair of different views where three or more are stored; each is [*lead, R] drawn per row,
    or 0 where nothing but the plain image is stored. ``purpose`` names the stream of draws.
    """
    V = data.x.shape[1]
    if V <= 2:
        if V == 2:
            return tuple(range(V - 1, V - 1 - count, -1))
        return (0,) * count
    first = ctx.rng.each(purpose, lambda g, i: g.integers(1, V, data.n[i]), epoch)
    if count == 1:
        return (first,)
    # 1 to V - 2 views further, going round among the V - 1 augmentations: never the same view twice.
    skip = ctx.rng.each(f"{purpose}2", lambda g, i: g.integers(1, max(V - 1, 2), data.n[i]), epoch)
    return first, 1 + (first - 1 + skip) % (V - 1)
