"""How a method declares what its clients send: the name, shape and type of every tensor, and which ones count rows.

Every upload of a run is compared with this declaration before it is aggregated (``federate.trust.update_validation``).
It is what one client sends, without leading axes, and the same for all clients of a round, whatever rows they have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcache.federate.engine.context import Ctx
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.heads.linear import Tree


@dataclass(frozen=True)
class UploadTensor:
    """One tensor of an upload.

    Attributes:
        shape: without leading axes.
        dtype: of its numbers.
        counts_rows: whether it holds numbers of the client's training rows: whole, not negative, no more than it has.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    counts_rows: bool = False

    @staticmethod
    def like(t: Tensor) -> UploadTensor:
        """The declaration of a tensor that has this one's shape and type."""
        return UploadTensor(tuple(t.shape), t.dtype)


Uploads = Mapping[str, UploadTensor]
"""Name -> tensor, for everything that leaves a client in one round."""


def whole_server(server: Tree, _ctx: Ctx) -> Uploads:
    """Clients send every tensor that the server holds."""
    return {name: UploadTensor.like(t) for name, t in server.items()}


def server_tensors(names: Callable[[Hp], Sequence[str]]) -> Callable[[Tree, Ctx], Uploads]:
    """Clients send these tensors of the server.

    Args:
        names: (hp) -> their names.
    """

    def uploads(server: Tree, ctx: Ctx) -> Uploads:
        return {name: UploadTensor.like(server[name]) for name in names(ctx.hp)}

    return uploads


def sends_nothing(_server: Tree, _ctx: Ctx) -> Uploads:
    """Clients send no tensor."""
    return {}
