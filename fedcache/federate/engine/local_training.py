"""Parts of local training that all gradient methods share: batches, a fold over them, one optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fedcache.federate.engine.client_data import ClientData, with_axes
from fedcache.federate.engine.context import (
    Ctx,
    is_zero,
    narrow_clients,
    over,
    training_views,
    writable_copies,
)
from fedcache.federate.engine.hyperparameters import Hp, has_batchnorm
from fedcache.federate.engine.method import Fit
from fedcache.heads.linear import Tree

# The optimisers: SGD with momentum and Adam, as steps on flat dicts. Their state has names that
# begin with ``opt/``.
#
# The arithmetic is torch.optim's (L2 weight decay added to the gradient, bias-corrected Adam).
# With plain floats and at most one leading axis, torch's fused kernels run. Otherwise the steps of
# this module run, for example in a grid whose points differ in a float.

Tensors = Sequence[Tensor]
PerClient = float | Tensor
"""One number for all clients, or one number for each client."""


class AdamConstants(NamedTuple):
    """Adam's decay rates, and the number added to its denominator; the defaults are torch's."""

    beta1: PerClient = 0.9
    beta2: PerClient = 0.999
    eps: PerClient = 1e-8


def adam_constants(ctx: Ctx) -> AdamConstants:
    """The method's own constants if it declares them, else torch's."""
    if "adam_beta1" not in ctx.hp:
        return AdamConstants()
    return AdamConstants(ctx.number("adam_beta1"), ctx.number("adam_beta2"), ctx.number("adam_eps"))


def opt_names(names: Sequence[str], ctx: Ctx) -> tuple[str, ...]:
    """Names of the optimiser's state for the trained ``names``."""
    first = tuple(f"opt/m/{n}" for n in names)
    if ctx.hp["opt"] != "adam":
        return first
    second = tuple(f"opt/v/{n}" for n in names)
    return (*first, *second, "opt/t")


def opt_init(p: Tree, names: Sequence[str], ctx: Ctx) -> Tree:
    """Fresh optimiser state for ``names`` of ``p``: zeros, and one step count per client."""
    core = len(ctx.lead)
    state = {}
    for name in opt_names(names, ctx):
        if name == "opt/t":
            state[name] = torch.zeros(ctx.lead, dtype=torch.float32, device=ctx.env.device)
        else:
            _, _, trained = name.split("/", 2)
            t = p[trained]
            full = t.expand((*ctx.lead, *t.shape[core:]))
            state[name] = torch.zeros_like(full)  # in the memory order of the trained tensor
    return state


def step(p: Tree, names: Sequence[str], grads: Sequence[Tensor], ctx: Ctx) -> None:
    """One optimiser step on ``names`` of ``p``, in place.

    Args:
        p: parameters and ``opt/`` state with full leading axes, owned by the caller.
        names: of the trained tensors.
        grads: one per name.
        ctx: reads ``opt``, ``lr``, ``wd`` and ``momentum`` (used by SGD only), and declared constants of Adam.
    """
    if ctx.frozen:
        grads = [g for n, g in zip(names, grads, strict=True) if n not in ctx.frozen]
        names = [n for n in names if n not in ctx.frozen]
        if not names:
            return
    params = [p[n] for n in names]
    # First moments of the gradients: the momentum of SGD.
    first = [p[f"opt/m/{n}"] for n in names]
    lr = ctx.number("lr")
    wd = ctx.number("wd")
    momentum = ctx.number("momentum")
    # Fused kernels take only plain numbers; a number that is swept over a grid is a tensor. The kernels also need each
    # tensor in one block of memory. In a grid [G, M, ..], the first clients of a chunk are not one block.
    plain = [h for h in (lr, wd, momentum) if isinstance(h, float)]
    in_blocks = len(ctx.lead) < 2
    fused = in_blocks and len(plain) == 3 and fused_kernels_work()
    with torch.no_grad():
        if ctx.hp["opt"] == "adam":
            second = [p[f"opt/v/{n}"] for n in names]
            p["opt/t"] += 1.0
            constants = adam_constants(ctx)
            floats = [c for c in constants if isinstance(c, float)]
            if fused and len(floats) == 3:
                _fused_adam(params, grads, first, second, p["opt/t"], plain[0], plain[1], floats)
            else:
                _adam(params, grads, first, second, p["opt/t"], lr, wd, constants)
        elif fused:
            _fused_sgd(params, grads, first, plain[0], plain[1], plain[2])
        else:
            _sgd(params, grads, first, lr, wd, momentum)


@cache
def fused_kernels_work() -> bool:
    """Whether torch has its private fused kernels, and a step of each equals the step that is written in this module.

    The kernels are not part of torch's public interface, so another release may rename or change them. Then the steps
    of this module run.
    """

    def fresh() -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Tensor]:
        base = torch.arange(1.0, 4.0, dtype=torch.float64)
        p, g, m, v = ([base * scale] for scale in (1.0, -0.5, 0.25, 0.125))
        return p, g, m, v, torch.tensor(3.0)

    def close(some: Sequence[list[Tensor]], others: Sequence[list[Tensor]], rtol: float) -> bool:
        pairs = zip(some, others, strict=True)
        return all(torch.allclose(x[0], y[0], rtol=rtol) for x, y in pairs)

    a = fresh()
    b = fresh()
    try:
        _fused_sgd(*a[:3], 0.1, 0.01, 0.9)
        _sgd(*b[:3], 0.1, 0.01, 0.9)
        same = close(a[:3], b[:3], 1e-12)
        _fused_adam(*a, 0.1, 0.01, (0.9, 0.999, 1e-8))
        _adam(*b, 0.1, 0.01, AdamConstants())
        # One of the two computes Adam's bias correction in float32.
        return same and close(a[:4], b[:4], 1e-5)
    except (AttributeError, TypeError, RuntimeError):
        return False


def _fused_adam(
    params: list[Tensor],
    grads: Sequence[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    count: Tensor,
    lr: float,
    wd: float,
    constants: Sequence[float],
) -> None:
    beta1, beta2, eps = constants

    # The fused kernels read memory in order and ignore strides. Parameters are row-major, and gradients are made so.
    # Each client of the leading axis is a separate tensor for the kernels, because it has its own number of steps.
    def each(tensors: Sequence[Tensor]) -> list[Tensor]:
        if count.dim():
            return [row for t in tensors for row in t.unbind(0)]
        return list(tensors)

    torch._fused_adam_(
        each(params),
        each([g.contiguous() for g in grads]),
        each(first),
        each(second),
        [],  # maxima of ``second``, which only amsgrad keeps
        each([count] * len(params)),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=wd,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def _fused_sgd(
    params: list[Tensor],
    grads: Sequence[Tensor],
    first: list[Tensor],
    lr: float,
    wd: float,
    momentum: float,
) -> None:
    # Without momentum there is no state, and the kernel requires an empty list.
    if not momentum:
        first = []
    torch._fused_sgd_(
        params,
        [g.contiguous() for g in grads],
        first,
        lr=lr,
        weight_decay=wd,
        momentum=momentum,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,  # the momentum starts at zero, so the first step is like any other
    )


def _add_scaled(t: Tensor, other: Tensor, scale: PerClient) -> None:
    """t += scale * other, in one pass."""
    if isinstance(scale, Tensor):
        t.addcmul_(other, scale)
    else:
        t.add_(other, alpha=scale)


def _sgd(
    params: Tensors,
    grads: Tensors,
    first: Tensors,
    lr: PerClient,
    wd: PerClient,
    momentum: PerClient,
) -> None:
    for t, g, m in zip(params, grads, first, strict=True):
        if is_zero(momentum):
            m.copy_(g)
        else:
            m.mul_(over(momentum, t)).add_(g)
        # L2 weight decay is part of the gradient, so it enters the momentum too.
        if not is_zero(wd):
            _add_scaled(m, t, over(wd, t))
        _add_scaled(t, m, over(-lr, t))


def _towards(mean: Tensor, value: Tensor, decay: PerClient) -> None:
    """mean <- decay mean + (1 - decay) value, in place."""
    weight = over(1.0 - decay, mean)
    if isinstance(weight, Tensor):
        mean.add_(weight * (value - mean))
    else:
        mean.lerp_(value, weight)


def _towards_square(mean: Tensor, value: Tensor, decay: PerClient) -> None:
    """mean <- decay mean + (1 - decay) value^2, in place."""
    mean.mul_(over(decay, mean))
    weight = over(1.0 - decay, mean)
    if isinstance(weight, Tensor):
        mean.add_(weight * value * value)
    else:
        mean.addcmul_(value, value, value=weight)


def _adam(
    params: Tensors,
    grads: Tensors,
    first: Tensors,
    second: Tensors,
    count: Tensor,
    lr: PerClient,
    wd: PerClient,
    constants: AdamConstants,
) -> None:
    steps = count.double()
    for t, grad, m, v in zip(params, grads, first, second, strict=True):
        g = grad + over(wd, t) * t
        _towards(m, g, constants.beta1)
        _towards_square(v, g, constants.beta2)
        # The bias corrections of both moments, in float64 by each client's own number of steps.
        step_size = lr / (1.0 - constants.beta1**steps)
        correction = torch.sqrt(1.0 - constants.beta2**steps)
        scale = over(step_size.to(t.dtype), t)
        root = over(correction.to(t.dtype), t)
        denominator = v.sqrt() / root + over(constants.eps, t)
        t.sub_(scale * m / denominator)


GATHER_BYTES = 2 << 20
"""Bytes of an epoch's rows up to which one call gathers all rows. In larger epochs, each step gathers its rows."""


Batch = Tree
"""x [.., B, D], y [.., B] (absent without labels), i [.., B] positions, w [.., B] 1/b on real rows and 0 on padding."""

Batches = Iterator[tuple[int, Batch]]
"""Batches of an epoch, each with the number of clients that still have rows. These clients come first on their axis."""


@dataclass(frozen=True)
class ClosedForm:
    """A loss that is given by its gradients: (p, batch, down, ctx) -> one gradient for each trained name.

    Gradients in closed form cost less than autograd's graph. ``gradients`` updates buffers without a gradient in place.
    """

    gradients: Callable[[Tree, Batch, Tree, Ctx], list[Tensor]]


Loss = Callable[[Tree, Batch, Tree, Ctx], "Tensor | tuple[Tensor, Tree]"]
Step = Callable[[Tree, Batch, Ctx], Tree]


def batch_sizes(n: int, hp: Hp) -> list[int]:
    """Sizes of the batches of one epoch over ``n`` rows.

    ``drop_last`` leaves the short last batch out (D-09). With BatchNorm a last batch of one row, which has no
    variance, joins the one before it; a client of one row then has no batch.
    """
    size = cast(int, hp["batch"])
    normalised = has_batchnorm(hp)
    whole, remainder = divmod(n, size)
    sizes = [size] * whole
    if remainder and not hp.get("drop_last"):
        if remainder > 1 or not normalised:
            sizes.append(remainder)
        elif sizes:
            sizes[-1] += 1
    if sizes != [1] or not normalised:
        return sizes
    return []


def local_steps(data: ClientData, ctx: Ctx) -> Tensor:
    """Steps that each client takes in a round, float64 [*lead]."""
    epochs = ctx.count("epochs")
    return data.per_client([epochs * len(batch_sizes(n, ctx.hp)) for n in data.n])


def minibatches(
    data: ClientData,
    ctx: Ctx,
    epoch: int,
    purpose: str = "batch",
    views: Sequence[int | Tensor] | None = None,
) -> Batches:
    """Batches of one epoch, in an order drawn per (seed, purpose, round, client, epoch).

    Args:
        data: clients sorted by falling number of rows.
        ctx: reads ``batch``, ``drop_last``, and whether the model has BatchNorm.
        epoch: within the round.
        purpose: of the stream of permutations.
        views: stored views to read; the first is ``x`` of the batch, the second ``x2``. None for the view that
            ``train_view`` names.

    Yields:
        the number of clients that still have rows, always a prefix, and their batch.
    """
    if views is None:
        views = training_views(data, ctx, epoch, purpose)
    # Many clients have the same number of rows, so the sizes are computed once for each number.
    sizes = {n: batch_sizes(n, ctx.hp) for n in dict.fromkeys(data.n)}
    steps = len(sizes[data.n[0]])
    if not steps:
        return
    # [M, steps]: rows of each client's batches, 0 where it has no batch left. Clients are sorted by falling rows, so
    # those that still step are a prefix.
    padded = {n: batches + [0] * (steps - len(batches)) for n, batches in sizes.items()}
    table = np.array([padded[n] for n in data.n], np.int64)
    alive = (table > 0).sum(0)
    widths = table.max(0)
    order = ctx.rng.permutations(purpose, data.n, epoch)
    # [M, steps, B]: 1 / b on the b real rows of a batch and 0 on padding, so a weighted sum is the mean of the batch.
    # Where a client has no batch left, b is 0 and 1 / b is not used.
    batch_rows = table[..., None]
    with np.errstate(divide="ignore"):
        share = np.where(np.arange(widths.max()) < batch_rows, 1.0 / batch_rows, 0.0)
    on_device = torch.from_numpy(share).to(ctx.env.device, ctx.env.dtype)
    weight = with_axes(on_device, len(ctx.lead))
    at_once = data.fits(order.numel() * len(views), GATHER_BYTES)
    # Small epochs are gathered in one call, in the order of the batches; a step then takes consecutive rows.
    whole = []
    if at_once:
        whole = [data.take(order, _pick(v, order)) for v in views]
    labels = None
    if data.y is not None:
        labels = data.labels(order)
    start = 0
    for t in range(steps):
        # The first k clients still have a batch, of at most ``width`` rows.
        k = int(alive[t])
        width = int(widths[t])
        cut: Callable[..., Tensor] = partial(_cut, ctx, k, start, width)
        i = cut(order)
        if at_once:
            xs = [cut(x, 1) for x in whole]  # 1: the axis of features follows that of rows
        else:
            part = data.narrow(k)
            xs = []
            for v in views:
                # A number is the same view for all rows; a tensor has one view for each row.
                if isinstance(v, Tensor):
                    v = cut(_pick(v, order))
                xs.append(part.take(i, v))
        w = narrow_clients(weight, k, ctx)[..., t, :width]
        batch = {"x": xs[0], "i": i, "w": w}
        if labels is not None:
            batch["y"] = cut(labels)
        for extra, x in enumerate(xs[1:], 2):
            batch[f"x{extra}"] = x
        yield k, batch
        start += ctx.count("batch")


def _pick(view: int | Tensor, order: Tensor) -> int | Tensor:
    """The views of the rows in ``order``; a number is the view of all rows."""
    if isinstance(view, Tensor):
        return view.gather(-1, order)
    return view


def _cut(ctx: Ctx, count: int, start: int, width: int, t: Tensor, core: int = 0) -> Tensor:
    """``width`` rows from ``start`` of the first ``count`` clients; ``core`` axes follow the axis of rows."""
    return narrow_clients(t, count, ctx).narrow(-1 - core, start, width)


def fold_batches(carry: Tree, batches: Batches, step: Step, ctx: Ctx) -> Tree:
    """Fold ``step`` over batches. A client without further batches takes no more steps.

    Batches of zero weight would not be equivalent: momentum, weight decay and Adam would still move the weights.

    Args:
        carry: tensors with full leading axes that the caller owns (``context.writable_copies``); updated in place.
        batches: pairs (number of clients that still step, batch); the number never grows.
        step: (carry, batch, ctx) -> replaced tensors of the carry; it need not return tensors updated in place.
        ctx: of all clients.
    """
    # ``now`` and ``view`` are the context and the tensors of the clients that still step.
    full = carry
    now = ctx
    view = dict(carry)
    for k, batch in batches:
        ctx.env.watch()
        if now.lead and k != now.lead[-1]:
            # In-place updates reach the full carry; tensors a step replaced are written back before the cut.
            _write_back(full, view, now)
            now = ctx.narrow(k)
            view = {name: narrow_clients(t, k, ctx) for name, t in full.items()}
        view.update(step(view, batch, now))
    _write_back(full, view, now)
    return full


def _write_back(full: Tree, view: Tree, now: Ctx) -> None:
    if not now.lead:
        full.update(view)
        return
    axis = len(now.lead) - 1
    for name, t in view.items():
        # A tensor that was stepped in place is a view of the full one already.
        target = full[name].narrow(axis, 0, now.lead[-1])
        if t.data_ptr() != target.data_ptr():
            target.copy_(t)


def grads(
    loss: Loss, names: Sequence[str], p: Tree, batch: Batch, down: Tree, ctx: Ctx
) -> tuple[list[Tensor], Tree]:
    """Gradients of every client's loss, and the new values of tensors that no gradient moves.

    Clients share nothing, so the gradient of the summed loss is every client's gradient.
    """
    # New leaves, so that the graph ends here; the loss does not read the optimiser's state.
    q = {k: t.detach() for k, t in p.items() if not k.startswith("opt/")}
    leaves = [q[n].requires_grad_() for n in names]
    value = loss(q, batch, _alive(down, ctx), ctx)
    updates: Tree = {}
    if isinstance(value, tuple):
        value, updates = value
    gradients = torch.autograd.grad(value.sum(), leaves)
    return list(gradients), updates


def _alive(down: Tree, ctx: Ctx) -> Tree:
    """The broadcast, cut to the clients that still step, because under ``gram`` its maps differ between clients."""
    if not ctx.lead:
        return down
    axis = len(ctx.lead) - 1
    count = ctx.lead[-1]
    alive = {}
    for name, t in down.items():
        # A tensor that clients share has an axis of length 1 and stays as it is.
        length = min(count, t.shape[axis])
        alive[name] = t.narrow(axis, 0, length)
    return alive


def optimiser_step(loss: Loss | ClosedForm, names: Sequence[str], down: Tree) -> Step:
    """One optimiser step on ``names``; the optimiser's state is in the carry under ``opt/``."""

    def one(p: Tree, batch: Batch, ctx: Ctx) -> Tree:
        if isinstance(loss, ClosedForm):
            g = loss.gradients(p, batch, _alive(down, ctx), ctx)
            step(p, names, g, ctx)
            return {}
        g, updates = grads(loss, names, p, batch, down, ctx)
        step(p, names, g, ctx)
        return updates

    return one


def train(
    p: Tree,
    names: Sequence[str],
    epochs: int,
    loss: Loss | ClosedForm,
    down: Tree,
    data: ClientData,
    ctx: Ctx,
    *,
    purpose: str = "batch",
    batches: Callable[[Tree, int], Batches] | None = None,
) -> Tree:
    """``epochs`` epochs of ``loss`` on ``names``, from a fresh optimiser unless ``p`` has its state.

    Args:
        p: parameters, buffers and perhaps ``opt/`` state, leading axes full or 1.
        names: of the trained tensors.
        epochs: E.
        loss: (p, batch, down, ctx) -> value per client, or (value, updates); or a ``ClosedForm``.
        down: the broadcast.
        data: of the clients.
        ctx: clients' context.
        purpose: of the stream of permutations.
        batches: (p, epoch) -> batches, for a method that needs other batches than ``minibatches``.

    Returns:
        ``p`` after the last epoch, with the optimiser's state.
    """
    optimiser = opt_names(names, ctx)
    # Copies with full leading axes, which steps change in place.
    carry = writable_copies(p, ctx)
    if not all(n in p for n in optimiser):
        carry = opt_init(carry, names, ctx) | carry
    for epoch in range(epochs):
        if batches:
            stream = batches(carry, epoch)
        else:
            stream = minibatches(data, ctx, epoch, purpose)
        carry = fold_batches(carry, stream, optimiser_step(loss, names, down), ctx)
    return carry


def local(
    loss: Loss,
    model: Callable[[Hp], tuple[str, ...]],
    trained: Callable[[Hp], tuple[str, ...]],
    send: Callable[[Hp], tuple[str, ...]],
) -> Fit:
    """The ``fit`` of most methods: ``epochs`` of ``loss`` on the client's rows, then send some tensors.

    Args:
        loss: as in ``train``.
        model: names of the model's tensors; each comes from the client's state, else from the broadcast.
        trained: names of the tensors that a gradient moves.
        send: names of the tensors that are uploaded.
    """

    def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
        # The client's own tensors take precedence over the broadcast's.
        known = {**down, **state}
        optimiser = [n for n in state if n.startswith("opt/")]
        p = {k: known[k] for k in (*model(ctx.hp), *optimiser)}
        p = train(p, trained(ctx.hp), ctx.count("epochs"), loss, down, data, ctx)
        new_state = {k: p[k] for k in state}
        sent = {k: p[k] for k in send(ctx.hp)}
        return new_state, sent

    return fit


def keep_optimiser(p: Tree, names: Sequence[str], ctx: Ctx) -> Tree:
    """Optimiser state that ``enter`` adds for ``reset_opt=false``, so that it survives the round; else nothing."""
    if ctx.hp["reset_opt"]:
        return {}
    return opt_init(p, names, ctx)


def keep_whole_optimiser(down: Tree, _data: ClientData, ctx: Ctx) -> Tree:
    """``enter`` of methods that train every tensor of the broadcast and keep nothing but the optimiser's state."""
    return keep_optimiser(down, tuple(down), ctx)
