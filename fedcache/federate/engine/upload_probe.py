"""What clients send under a method that does not declare it: what its ``fit`` makes of a few rows of noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedcache.errors import UsageError
from fedcache.federate.engine.client_data import Data, stack_clients
from fedcache.federate.engine.context import Ctx
from fedcache.federate.engine.local_training import batch_sizes
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.uploads import Uploads, UploadTensor

PROBE = "/probe"
"""The name under which noise is trained on; no client may have it, because names hold no slash."""


def probe_uploads(method: Method, data: Data, ctx: Ctx, *, labelled: bool) -> Uploads:
    """Names, shapes and types of the upload of one client of noise; no upload has an axis as long as its rows.

    Args:
        method: which declares none.
        data: of the run, of which the shape of a row and the number of classes are read.
        ctx: the server's, without leading axes.
        labelled: whether clients read labels.

    Raises:
        UsageError, when the method cannot fit noise, so that it must declare its uploads.
    """
    n = max(8, data.classes)
    while method.gradient and "batch" in ctx.hp and not batch_sizes(n, ctx.hp):
        n *= 2
    draw = np.random.default_rng(0)
    shape = (n, *data.x.shape[1:])
    if data.x.dtype == torch.uint8:
        x = torch.from_numpy(draw.integers(0, 256, shape, np.uint8))
    else:
        x = torch.from_numpy(draw.standard_normal(shape, np.float32)).to(ctx.env.dtype)
    y = torch.arange(n) % data.classes
    rows = stack_clients(x.to(ctx.env.device), y.to(ctx.env.device) if labelled else None, [np.arange(n)], 0)
    alone = replace(ctx, rng=replace(ctx.rng, clients=(PROBE,)), ids=(0,))
    try:
        down = method.broadcast(method.init(ctx), ctx)
        _, up = method.fit(down, method.enter(down, rows, alone), rows, alone)
        return {name: replace(UploadTensor.like(t), counts_rows=counts_rows(name)) for name, t in up.items()}
    except Exception as error:
        raise UsageError(
            f"{method.name} does not say what its clients send, and it cannot be derived: its fit of {n} rows of noise "
            f"ends with {type(error).__name__}: {error}",
            "Declare it: Method(uploads=lambda server, ctx: {name: UploadTensor(shape, dtype)}).",
        ) from error


def counts_rows(name: str) -> bool:
    """Whether a tensor that nobody declared is taken for numbers of rows per class, by its name."""
    return name.rsplit("/", 1)[-1] in ("count", "counts")
