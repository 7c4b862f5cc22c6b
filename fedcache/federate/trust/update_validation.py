"""Update validation: the checks of every upload before ``aggregate``, in every engine.

The method declares the form of its uploads (``Method.uploads``), or fedcache derives the form from ``fit`` on a few
rows of noise. The server also knows the round and the number of rows of each client. An upload of another form, or with
a number that is not finite, is refused with an error that names client and round, or rejected (``--on-bad-update``).
Statistics of rows must also satisfy the inequalities of their kind (``statistic_checks``). A valid upload can still be
manipulated; ``federate.trust.robust_rules`` and bounds on norms limit its effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedcache.errors import FedcacheError, FederatedRunError, UsageError
from fedcache.federate.engine.client_data import Data, stack_clients
from fedcache.federate.engine.context import Ctx
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.local_training import batch_sizes
from fedcache.federate.engine.method import Method, Uploads, UploadTensor
from fedcache.federate.trust.statistic_checks import statistic_problem

PROBE = "/probe"
"""Name of the substitute client with rows of noise. No real client has it, because names contain no slash."""

SLACK = 1e-4
"""Relative tolerance for counts that were added in float32."""


def probe_uploads(method: Method, data: Data, ctx: Ctx, *, labelled: bool) -> Uploads:
    """Names, shapes and types of the upload of a client with rows of noise. They must not depend on the number of rows.

    Raises UsageError if the method cannot fit noise, so that it must declare its uploads.

    Args:
        method: one without a declaration.
        data: of the run; gives the shape of a row and the number of classes.
        ctx: the server's, without leading axes.
        labelled: whether clients read labels.
    """
    n = max(8, data.classes)
    # Training by gradients needs rows for at least one batch.
    while method.gradient and "batch" in ctx.hp and not batch_sizes(n, ctx.hp):
        n *= 2
    draw = np.random.default_rng(0)
    shape = (n, *data.x.shape[1:])
    if data.x.dtype == torch.uint8:
        x = torch.from_numpy(draw.integers(0, 256, shape, np.uint8))
    else:
        x = torch.from_numpy(draw.standard_normal(shape, np.float32)).to(ctx.env.dtype)
    y = None
    if labelled:
        y = (torch.arange(n) % data.classes).to(ctx.env.device)
    rows = stack_clients(x.to(ctx.env.device), y, [np.arange(n)], 0)
    rng = replace(ctx.rng, clients=(PROBE,))
    probe_ctx = replace(ctx, rng=rng, ids=(0,))
    try:
        down = method.broadcast(method.init(ctx), ctx)
        state = method.enter(down, rows, probe_ctx)
        _, up = method.fit(down, state, rows, probe_ctx)
        return {
            name: replace(UploadTensor.like(t), counts_rows=counts_rows(name))
            for name, t in up.items()
        }
    except Exception as error:
        kind = type(error).__name__
        raise UsageError(
            f"{method.name} does not declare its uploads. fedcache tried to derive them by a fit on {n} rows of "
            f"noise, but the fit failed with {kind}: {error}",
            "Declare the uploads: Method(uploads=lambda server, ctx: {name: UploadTensor(shape, dtype)}).",
        ) from error


def counts_rows(name: str) -> bool:
    """Whether an undeclared tensor holds numbers of rows per class, judged by its name."""
    return name.rsplit("/", 1)[-1] in ("count", "counts")


class UpdateValidation:
    """Checks of the uploads of one round.

    Args:
        expected: declared form of an upload.
        number: of the round, from 1.
        longest: upper bound of the norm of a training row; None if unknown.
    """

    def __init__(self, expected: Uploads, number: int, longest: float | None = None) -> None:
        self.expected = expected
        self.number = number
        self.longest = longest
        # Prepared once for the round, so that the check of an upload takes a few microseconds.
        self._layout = tuple((name, torch.Size(t.shape), t.dtype) for name, t in expected.items())
        self._counts = tuple(name for name, t in expected.items() if t.counts_rows)

    def problem(
        self, up: object, rows: float, *, sent_in: int | None = None, statistics: bool = True
    ) -> str | None:
        """The first fault of one client's upload, in words; None for a valid one.

        Args:
            up: any object.
            rows: n_i, training rows of the client.
            sent_in: the round that the client answers; None if answers cannot be late.
            statistics: whether to check statistics of rows.
        """
        why = self.malformed(up, rows, sent_in=sent_in)
        if why is not None:
            return why
        assert isinstance(up, dict)
        for name, t in up.items():
            if t.is_floating_point() and not is_bounded(t):
                return f"{name} {_describe_unbounded(t)}"
        if statistics:
            return statistic_problem(self.expected, up, rows, self.longest)
        return None

    def malformed(self, up: object, rows: float, *, sent_in: int | None = None) -> str | None:
        """The first fault of round, names, shapes, types or counts of one upload; other floats are not read."""
        if sent_in is not None and sent_in != self.number:
            return f"it answers round {sent_in}, but this is round {self.number}"
        why = self.structure_problem(up)
        if why is not None:
            return why
        assert isinstance(up, dict)
        return self._count_problem(up, rows)

    def is_sound(self, up: object, rows: float) -> bool:
        """Fast check in one pass: True for a valid upload.

        Returns:
            False for an invalid upload, and for a valid one whose sum of squares overflows; ``problem`` decides.
        """
        if type(up) is not dict or len(up) != len(self._layout):
            return False
        total = 0.0  # NaN and infinity stay in it
        for name, shape, dtype in self._layout:
            t = up.get(name)
            if type(t) is not Tensor or t.shape != shape or t.dtype is not dtype:
                return False
            if dtype.is_floating_point:
                total += torch.linalg.vector_norm(t).item()
        return math.isfinite(total) and self._count_problem(up, rows) is None

    def _count_problem(self, up: Mapping[str, Tensor], rows: float) -> str | None:
        """The first fault of the counts of one client's upload, in words."""
        for name in self._counts:
            why = _wrong_counts(name, up[name].unsqueeze(0), [rows])[0]
            if why:
                return why
        return None

    def structure_problem(
        self,
        up: object,
        lead: tuple[int, ...] = (),
        coordinates: Mapping[str, tuple[int, ...]] | None = None,
    ) -> str | None:
        """The first fault of names, shapes and types of an upload; None for a valid one.

        Args:
            up: any object.
            lead: leading axes (M,) or (G, M) of a batch of clients; each may be 1 in a tensor that all share.
            coordinates: name -> shape that replaces the declared one.
        """
        if not isinstance(up, dict) or not all(isinstance(t, Tensor) for t in up.values()):
            return "it is not a dictionary of tensors"
        missing = ", ".join(sorted(self.expected.keys() - up.keys()))
        if missing:
            return f"it lacks {missing}"
        unexpected = map(str, up.keys() - self.expected.keys())
        extra = ", ".join(sorted(unexpected))
        if extra:
            return f"it contains {extra}, which is not part of the schema"
        axes = len(lead)
        for name, declared, dtype in self._layout:
            t = up[name]
            shape = declared
            if coordinates and name in coordinates:
                shape = torch.Size(coordinates[name])
            fits = t.shape[axes:] == shape
            if axes:
                fits = fits and _has_lead(t.shape[:axes], lead)
            if not fits:
                found = tuple(t.shape[axes:] or t.shape)
                return f"{name} has shape {found}, expected {tuple(shape)}"
            if t.dtype != dtype:
                return f"{name} is {t.dtype}, expected {dtype}".replace("torch.", "")
        return None

    def count_problems(self, up: Mapping[str, Tensor], rows: Sequence[float]) -> dict[int, str]:
        """Place in a batch -> fault of that client's counts of rows, for the clients with invalid ones.

        Args:
            up: of a batch, with leading axes (M,) or (G, M) and names and shapes as declared.
            rows: n_i of each of its M clients.
        """
        found: dict[int, str] = {}
        for name in self._counts:
            core = len(self.expected[name].shape)
            t = up[name]
            t = t.reshape(-1, *t.shape[t.dim() - core - 1 :])  # points, clients, classes
            # A tensor that all clients share has one row, which stands for each of them.
            t = t.expand(t.shape[0], len(rows), *t.shape[2:])
            for of_point in t:
                for place, why in enumerate(_wrong_counts(name, of_point, rows)):
                    if why:
                        found.setdefault(place, why)
        return found

    def refusal(self, client: int, name: str, why: str) -> FedcacheError:
        """The error of ``--on-bad-update fail``."""
        return FederatedRunError(
            f"Round {self.number}: the upload of client {client} ({name!r}) is rejected: {why}.",
            "Leave out invalid uploads with --on-bad-update reject, or check that client.",
        )


def largest(dtype: torch.dtype) -> float:
    """The largest legal number in an upload: the square root of the largest float32 or float64 (1.8e19, 1.3e154).

    For a 16-bit type, which is summed in a wider one, it is the largest number of the type.

    The square of this number is finite, and so is the sum of 10^19 such uploads. So no upload can make an aggregate
    overflow, nor the first step that an honest client takes from the aggregate.
    """
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).max
    return min(math.sqrt(wide), torch.finfo(dtype).max)


def largest_to_train_from(dtype: torch.dtype) -> float:
    """The largest safe number of a model for the training of clients: the fourth root of ``largest``.

    Up to it (65,536 for weights and features of float32), the square of a product of a weight and a feature is at most
    ``largest``. Training computes such squares, for example as variances of BatchNorm.
    """
    return math.sqrt(math.sqrt(largest(torch.promote_types(dtype, torch.float32))))


def largest_number(t: Tensor) -> float:
    """The largest absolute value in a tensor, 0 for an empty one."""
    if t.numel():
        return float(t.abs().max())
    return 0.0


def is_bounded(t: Tensor) -> bool:
    """Whether all numbers of a tensor are finite and at most ``largest``."""
    # A finite norm proves it, and is fast to compute.
    if math.isfinite(torch.linalg.vector_norm(t).item()):
        return True
    return bool((t.abs() <= largest(t.dtype)).all())  # NaN is not


def _describe_unbounded(t: Tensor) -> str:
    """The fault of a tensor that is not bounded, as a predicate: "is nan"."""
    if torch.isnan(t).any():
        return "is nan"
    if torch.isinf(t).any():
        return "is inf"
    found = largest_number(t)
    most = largest(t.dtype)
    return (
        f"contains {found:.2g}; the largest value that can be summed without overflow is {most:.2g}"
    )


def all_bounded(tree: object) -> bool:
    """Fast check, one kernel for each tensor: True for a tree of bounded numbers.

    Returns:
        False also for an object that is no tree of tensors, and for bounded numbers whose sum of squares overflows.
    """
    if type(tree) is not dict:
        return False
    total = 0.0  # NaN and infinity stay in it
    for t in tree.values():
        if type(t) is not Tensor:
            return False
        if t.is_floating_point():
            total += torch.linalg.vector_norm(t).item()
    return math.isfinite(total)


def not_finite(
    name: str, t: Tensor, number: int, client: tuple[int, str] | None, method: Method, hp: Hp
) -> FedcacheError:
    """The error for a tensor ``t`` that is not finite, or too large; it names the learning rates.

    ``client`` is the number and name of its client, or None for the server's model. In that case each upload was valid,
    so no client is named. Rounds count from 1.
    """
    # Methods have differently named learning rates; the help of each begins with these words.
    keys = [h.name for h in method.hparams if h.help.startswith("learning rate")]
    rates = ", ".join(f"{key} is {hp[key]!s}" for key in keys)
    rate = "the learning rate"
    if rates:
        rate += f" ({rates})"
    whose = "in the server's model"
    if client is not None:
        i, client_name = client
        whose = f"for client {i} ({client_name!r})"
    return FederatedRunError(
        f"{name} {_describe_unbounded(t)} in round {number} {whose}.",
        f"Lower {rate}, or check the features with: fedcache verify",
    )


def _has_lead(axes: Sequence[int], lead: Sequence[int]) -> bool:
    """Whether each leading axis is as in ``lead`` or 1."""
    if len(axes) != len(lead):
        return False
    return all(n in (1, full) for n, full in zip(axes, lead, strict=True))


def _wrong_counts(name: str, counts: Tensor, rows: Sequence[float]) -> list[str]:
    """For each of M clients the fault of its numbers of rows [M, ..], "" for valid ones."""
    flat = counts.double().flatten(1)
    n = torch.tensor(rows, dtype=torch.float64, device=flat.device)
    total = flat.sum(1)
    is_whole = (flat - flat.round()).abs() <= SLACK * flat.clamp(min=1.0)
    sound = torch.isfinite(flat).all(1)
    sound &= (flat >= 0).all(1)
    sound &= is_whole.all(1)
    sound &= total <= n * (1.0 + SLACK) + SLACK
    faults = [""] * len(rows)
    for place in (~sound).nonzero().flatten().tolist():
        faults[place] = _describe_counts(name, flat[place], rows[place])
    return faults


def _describe_counts(name: str, counts: Tensor, rows: float) -> str:
    """The first fault of one client's invalid numbers of rows, in words."""
    if not torch.isfinite(counts).all():
        return f"{name} is not finite"
    smallest = float(counts.min())
    if smallest < 0:
        return f"{name} contains a negative number of rows ({smallest:g})"
    total = float(counts.sum())
    if total > rows * (1.0 + SLACK) + SLACK:
        return f"{name} counts {total:g} rows, but the client has {rows:g} rows"
    apart = (counts - counts.round()).abs()
    fractional = counts[apart > SLACK * counts.clamp(min=1.0)]
    first = float(fractional[0])
    return f"{name} contains the number of rows {first:g}, which is not a whole number"
