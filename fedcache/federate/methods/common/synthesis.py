"""Synthetic rows around class text features, which balance the classes of soft labels (FST-CBDG eqs 5 and 7)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedcache.federate.engine.local_training import batch_sizes
from fedcache.federate.methods.common import Batch, Batches, ClientData, Ctx, HParam, over
from fedcache.heads.class_balance import deficits, votes

SYNTHESIS = (
    HParam(
        "gamma",
        0.0,
        "float",
        "synthetic rows beyond the size of the largest class, as a share of that size (eq 7, D-55)",
        low=0.0,
    ),
    HParam(
        "sigma",
        None,
        "float",
        "standard deviation of the noise around text features (eq 5, D-52)",
        low=0.0,
        auto="1/sqrt(D)",
    ),
    HParam(
        "tsamp_reduce",
        "sum",
        "choice",
        "how eq 6 combines synthetic rows; mean: their mean; sum: their sum, as printed; joint: "
        "one mean over real and synthetic rows (D-51, D-84)",
        choices=("mean", "sum", "joint"),
        usual="joint",
    ),
    HParam("renorm_synth", False, "bool", "scale synthetic rows to unit length"),
    HParam(
        "synth",
        "exact",
        "choice",
        "exact: n_k synthetic rows of class k (eq 5); strata: the same number of rows for each "
        "class, with weight n_k (an approximation)",
        choices=("exact", "strata"),
    ),
    HParam("strata", 1, "int", "synthetic rows of each class in a step, with synth=strata", low=1),
    HParam(
        "sampling",
        "balanced",
        "choice",
        "number n_k of synthetic rows; balanced: by eq 7; equal: the same for all classes (table "
        "4)",
        choices=("balanced", "equal"),
    ),
)


def synthetic(label: list[np.ndarray], ctx: Ctx, epoch: int, t: int) -> Batch:
    """Rows z_ki ~ N(T_k, sigma^2 I) for step ``t`` of an epoch.

    Args:
        label: the class k of each row, one array for each client (of each grid point).
        ctx: reads ``sigma``, ``tsamp_reduce`` and ``renorm_synth``.
        epoch: of the round.
        t: number of the step in the epoch.

    Returns:
        rows ``z`` [.., R, D], classes ``k`` [.., R] and weights ``kw`` [.., R]; padding weighs 0.
    """
    counts = [len(k) for k in label]
    points = 1
    if len(ctx.lead) == 2:
        points = ctx.lead[0]
    longest = max(counts)
    # Clients need different numbers of rows, so all are padded to the largest number, with weight 0.
    k = np.zeros((len(counts), longest), np.int64)
    w = np.zeros((len(counts), longest))
    for i, labels in enumerate(label):
        weight_of_row = 1.0
        if ctx.hp["tsamp_reduce"] == "mean" and len(labels):
            weight_of_row = 1.0 / len(labels)
        k[i, : len(labels)] = labels
        w[i, : len(labels)] = weight_of_row
    shape = (*ctx.lead, longest)
    classes = torch.from_numpy(k).to(ctx.env.device).reshape(shape)
    # Grid points share draws: each takes as many of the longest draw as it needs, from the beginning.
    per_client = np.asarray(counts).reshape(points, -1).max(0)
    noise = ctx.rng.normal("synth", per_client.tolist(), ctx.env.width, epoch, t)
    if ctx.hp["sigma"] is None:
        sigma = ctx.env.width**-0.5
    else:
        sigma = ctx.number("sigma")
    # ``index_select`` takes a third of the time of ``text[classes]``.
    texts = ctx.text.index_select(0, classes.flatten()).view(*shape, ctx.env.width)
    scale = over(sigma, noise)
    if isinstance(scale, float):
        z = texts.add_(noise, alpha=scale)
    else:
        z = texts + scale * noise
    if ctx.hp["renorm_synth"]:
        z = normalize(z, dim=-1)
    weight = torch.from_numpy(w).to(ctx.env.device, ctx.env.dtype).reshape(shape)
    return {"z": z, "k": classes, "kw": weight}


def shares(batch: Batch, ctx: Ctx) -> tuple[float | Tensor, float | Tensor]:
    """The factors a and b of L = a L_iST + b L_tSamp (1 and lambda in eq 8), each a number or one value per client.

    Under ``tsamp_reduce=joint`` L is one mean over the B real and R synthetic rows of a step, in which a synthetic row
    weighs lambda: (sum over real rows + lambda sum over synthetic ones) / (B + lambda R).

    Args:
        batch: weights ``w`` [.., B] of the real rows, 1/B (0 is padding), and ``kw`` [.., R] of the synthetic ones.
        ctx: reads ``lambda`` and ``tsamp_reduce``.
    """
    lam = ctx.number("lambda")
    if ctx.hp["tsamp_reduce"] != "joint":
        return 1.0, lam
    rows = (batch["w"] > 0).to(batch["kw"].dtype).sum(-1)
    whole = rows + lam * batch["kw"].sum(-1)
    return rows / whole, lam / whole


def at_once(label: list[np.ndarray], ctx: Ctx, epoch: int, t: int) -> Batch:
    """All synthetic rows in one step, exact or stratified as ``synth`` says."""
    if ctx.hp["synth"] == "strata":
        return stratified(label, [1] * len(label), ctx, epoch, t)
    return synthetic(label, ctx, epoch, t)


def stratified(label: list[np.ndarray], steps: list[int], ctx: Ctx, epoch: int, t: int) -> Batch:
    """``strata`` rows of every class, instead of a step's part of the client's synthetic rows (not in the paper).

    ``label`` has the class of each synthetic row of the epoch, one array for each client, and ``steps`` has the number
    of steps of each client. If n_k of the client's rows are of class k, a drawn row of class k weighs
    n_k / (steps strata), or n_k / (strata sum_k n_k) for ``tsamp_reduce=mean``. So the expected gradient of a step is
    the same as with rows that are shuffled and assigned to steps. Its variance is smaller because no class is missing,
    and far fewer rows are drawn.

    Returns:
        as ``synthetic``.
    """
    C = ctx.env.classes
    R = ctx.count("strata")
    n = np.stack([np.bincount(labels, minlength=C) for labels in label]).astype(np.float64)
    if ctx.hp["tsamp_reduce"] == "mean":
        whole = n.sum(1)
    else:
        whole = np.asarray(steps, np.float64)
    # A class counts as much as its n_k rows would, for any number R of drawn rows.
    weight = np.repeat(n / np.maximum(whole, 1.0)[:, None] / R, R, 1)
    rows = np.repeat(np.arange(C), R)
    batch = synthetic([rows] * len(label), ctx, epoch, t)
    kw = torch.from_numpy(weight).to(batch["kw"])
    return {**batch, "kw": kw.reshape(batch["kw"].shape)}


def balancing_classes(q: Tensor, weight: Tensor, ctx: Ctx) -> list[np.ndarray]:
    """Classes of the synthetic rows that balance soft labels q [.., R, C]: each client's array has k n_k times."""
    # A class gets as many rows as it lacks votes compared with the largest class.
    n = deficits(votes(q, weight), ctx.number("gamma"), equal=ctx.hp["sampling"] == "equal")
    flat = n.reshape(-1, n.shape[-1]).cpu().numpy()
    return [np.repeat(np.arange(flat.shape[-1]), counts) for counts in flat]


def with_rows(
    batches: Batches,
    classes: list[np.ndarray],
    data: ClientData,
    ctx: Ctx,
    epoch: int,
) -> Batches:
    """Batches of an epoch, each with its part of the synthetic rows.

    ``classes`` has the classes of each client's synthetic rows, which are shuffled in place and divided among the steps
    of the client.
    """
    M = len(data.n)
    steps = [len(batch_sizes(n, ctx.hp)) for n in data.n]
    strata = ctx.hp["synth"] == "strata"
    if not strata:
        for i, labels in enumerate(classes):
            ctx.rng.generator("deal", i % M, epoch).shuffle(labels)
    for t, (k, batch) in enumerate(batches):
        now = ctx.narrow(k)
        # There is an array for each client of each grid point. The first k clients of a point still step.
        alive = [i for i in range(len(classes)) if i % M < max(k, 1)]
        if strata:
            steps_of_alive = [steps[i % M] for i in alive]
            rows = stratified([classes[i] for i in alive], steps_of_alive, now, epoch, t)
        else:
            parts = []
            for i in alive:
                # The part of step t; the parts of a client differ by one row at most.
                n = len(classes[i])
                count = steps[i % M]
                parts.append(classes[i][t * n // count : (t + 1) * n // count])
            rows = synthetic(parts, now, epoch, t)
        yield k, {**batch, **rows}
