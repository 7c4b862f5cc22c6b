"""Update validation: what an upload must be before ``aggregate`` sees it, whichever engine brought it.

The method declares what its clients send (``Method.uploads``), or it is what its ``fit`` makes of a few rows of noise;
the server knows how many rows each client holds and which round it is. An upload that differs, or holds a number that
is not finite, is refused with the client and the round named; what is done then is the run's choice
(``--on-bad-update``). Statistics of rows are also checked for what their kind allows (``statistic_checks``). A sound
upload may still lie: against that stand ``federate.trust.robust_rules`` and bounds on norms.
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
"""The name under which noise is trained on; no client may have it, because names hold no slash."""

SLACK = 1e-4
"""Relative rounding of counts that were added in float32."""


def probe_uploads(method: Method, data: Data, ctx: Ctx, *, labelled: bool) -> Uploads:
    """Names, shapes and types of the upload of one client of noise; no upload has an axis as long as its rows.

    Raises UsageError, when the method cannot fit noise, so that it must declare its uploads.

    Args:
        method: which declares none.
        data: of the run, of which the shape of a row and the number of classes are read.
        ctx: the server's, without leading axes.
        labelled: whether clients read labels.
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
    rows = stack_clients(
        x.to(ctx.env.device), y.to(ctx.env.device) if labelled else None, [np.arange(n)], 0
    )
    alone = replace(ctx, rng=replace(ctx.rng, clients=(PROBE,)), ids=(0,))
    try:
        down = method.broadcast(method.init(ctx), ctx)
        _, up = method.fit(down, method.enter(down, rows, alone), rows, alone)
        return {
            name: replace(UploadTensor.like(t), counts_rows=counts_rows(name))
            for name, t in up.items()
        }
    except Exception as error:
        raise UsageError(
            f"{method.name} does not say what its clients send, and it cannot be derived: its fit of {n} rows of noise "
            f"ends with {type(error).__name__}: {error}",
            "Declare it: Method(uploads=lambda server, ctx: {name: UploadTensor(shape, dtype)}).",
        ) from error


def counts_rows(name: str) -> bool:
    """Whether a tensor that nobody declared is taken for numbers of rows per class, by its name."""
    return name.rsplit("/", 1)[-1] in ("count", "counts")


class UpdateValidation:
    """What the uploads of one round must be.

    Args:
        expected: what the method declares.
        number: of the round that is being collected, from 1.
        longest: length that no training row exceeds; None where nobody knows.
    """

    def __init__(self, expected: Uploads, number: int, longest: float | None = None) -> None:
        self.expected = expected
        self.number = number
        self.longest = longest
        # Laid out once for the round, so that comparing an upload costs a few microseconds.
        self._layout = tuple((name, torch.Size(t.shape), t.dtype) for name, t in expected.items())
        self._counts = tuple(name for name, t in expected.items() if t.counts_rows)

    def problem(
        self, up: object, rows: float, *, sent_in: int | None = None, statistics: bool = True
    ) -> str | None:
        """The first thing wrong with one client's upload, in words; None for a sound one.

        Args:
            up: what came, of which nothing is known.
            rows: n_i, training rows of the client.
            sent_in: the round the client says it answers, None where the engine cannot be answered late.
            statistics: whether statistics of rows are checked for what their kind allows.
        """
        why = self.malformed(up, rows, sent_in=sent_in)
        if why is not None:
            return why
        assert isinstance(up, dict)
        why = self.finite_problem(up)
        if why is None and statistics:
            why = statistic_problem(self.expected, up, rows, self.longest)
        return why

    def malformed(self, up: object, rows: float, *, sent_in: int | None = None) -> str | None:
        """What is wrong with the round, names, shapes, types or counts of one upload; its other floats are not read."""
        if sent_in is not None and sent_in != self.number:
            return f"it answers round {sent_in}, and this is round {self.number}"
        why = self.structure_problem(up)
        if why is not None:
            return why
        assert isinstance(up, dict)
        return self._count_problem(up, rows)

    def is_sound(self, up: object, rows: float) -> bool:
        """Whether nothing is wrong with one client's upload, in one pass: what is asked of every client.

        Returns:
            False also for sound numbers whose sum of squares overflows; ``problem`` says what is wrong, if anything.
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
        """The first thing wrong with the counts of one client's upload, in words."""
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
        """What is wrong with the names, shapes and types of an upload; None when nothing is.

        Args:
            up: what came.
            lead: leading axes (M,) or (G, M) of a batch of clients; each may be 1 for what all have in common.
            coordinates: name -> shape that takes the place of the declared one.
        """
        if not isinstance(up, dict) or not all(isinstance(t, Tensor) for t in up.values()):
            return "it is no dictionary of tensors"
        if up.keys() != self.expected.keys():
            missing = sorted(self.expected.keys() - up.keys())
            if missing:
                return f"it lacks {', '.join(missing)}"
            extra = ", ".join(sorted(map(str, up.keys() - self.expected.keys())))
            return f"it holds {extra}, which nobody asked for"
        axes = len(lead)
        for name, declared, dtype in self._layout:
            t = up[name]
            shape = declared
            if coordinates and name in coordinates:
                shape = torch.Size(coordinates[name])
            if t.shape[axes:] != shape or (axes and not _leads(t.shape[:axes], lead)):
                found = tuple(t.shape[axes:] or t.shape)
                return f"{name} has shape {found}, expected {tuple(shape)}"
            if t.dtype != dtype:
                return f"{name} is {_short(t.dtype)}, expected {_short(dtype)}"
        return None

    def count_problems(self, up: Mapping[str, Tensor], rows: Sequence[float]) -> dict[int, str]:
        """Place in a batch -> what is wrong with that client's counts of rows, for the clients with wrong ones.

        Args:
            up: of a batch, with leading axes (M,) or (G, M) and names and shapes as declared.
            rows: n_i of each of its M clients.
        """
        found: dict[int, str] = {}
        for name in self._counts:
            core = len(self.expected[name].shape)
            t = up[name]
            t = t.reshape(-1, *t.shape[t.dim() - core - 1 :])  # points, clients, classes
            for of_point in t.expand(t.shape[0], len(rows), *t.shape[2:]):
                for place, why in enumerate(_wrong_counts(name, of_point, rows)):
                    if why:
                        found.setdefault(place, why)
        return found

    def finite_problem(self, up: Mapping[str, Tensor]) -> str | None:
        """The first tensor of an upload that holds NaN, infinity or a number too large, in words; None without."""
        for name, t in up.items():
            if t.is_floating_point() and not is_bounded(t):
                return f"{name} {_unbounded(t)}"
        return None

    def refusal(self, client: int, name: str, why: str) -> FedcacheError:
        """The error of ``--on-bad-update fail``."""
        return FederatedRunError(
            f"Round {self.number}: the upload of client {client} ({name!r}) is refused: {why}.",
            "Leave such uploads out with --on-bad-update reject, or look at that client.",
        )


def largest(dtype: torch.dtype) -> float:
    """The largest number that an upload may hold: the square root of what float32 or float64 can (1.8e19, 1.3e154).

    Of a 16-bit type, which is added in a wider one, it is all that the type can.

    Its square is finite, and so is the sum of 10^19 such uploads, so no upload can make an aggregate overflow, nor the
    first step that an honest client takes from it.
    """
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).max
    return min(math.sqrt(wide), torch.finfo(dtype).max)


def largest_to_train_from(dtype: torch.dtype) -> float:
    """The largest number of a model from which clients train safely: the fourth root of ``largest``.

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
    """Whether all numbers of a tensor are finite and at most ``largest``; a finite norm proves it, and is cheap."""
    if math.isfinite(torch.linalg.vector_norm(t).item()):
        return True
    return bool((t.abs() <= largest(t.dtype)).all())  # NaN is not


def _unbounded(t: Tensor) -> str:
    """What is wrong with a tensor that is not bounded, as a predicate."""
    if torch.isnan(t).any():
        return "is nan"
    if torch.isinf(t).any():
        return "is inf"
    found = largest_number(t)
    most = largest(t.dtype)
    return f"holds {found:.2g}, and {most:.2g} is the largest that is safe to add up"


def all_bounded(tree: object) -> bool:
    """Whether a tree surely holds bounded numbers alone: one kernel a tensor, for what is asked of every client.

    Returns:
        False also for what is no tree of tensors, and for bounded numbers whose sum of squares overflows.
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
    """The error of a result that is not finite, or too large.

    ``t`` are the numbers of a client, ``client`` its number and name, or of the server's model (None): then no single
    client is to blame, as each upload was sound. Rounds count from 1. Learning rates are named.
    """
    rates = [
        f"{h.name} is {hp[h.name]}" for h in method.hparams if h.help.startswith("learning rate")
    ]
    known = ""
    if rates:
        known = f" ({', '.join(rates)})"
    whose = "in the server's model"
    if client is not None:
        i, client_name = client
        whose = f"for client {i} ({client_name!r})"
    return FederatedRunError(
        f"{name} {_unbounded(t)} in round {number} {whose}.",
        f"Lower the learning rate{known}, or look for bad features with: fedcache verify",
    )


def _leads(found: Sequence[int], lead: Sequence[int]) -> bool:
    """Whether leading axes are full or 1."""
    return len(found) == len(lead) and all(
        n in (1, full) for n, full in zip(found, lead, strict=True)
    )


def _wrong_counts(name: str, counts: Tensor, rows: Sequence[float]) -> list[str]:
    """For each of M clients what is wrong with its numbers of rows [M, ..], "" where nothing is."""
    flat = counts.double().flatten(1)
    n = torch.tensor(rows, dtype=torch.float64, device=flat.device)
    total = flat.sum(1)
    whole = (flat - flat.round()).abs() <= SLACK * flat.clamp(min=1.0)
    sound = (
        torch.isfinite(flat).all(1)
        & (flat >= 0).all(1)
        & whole.all(1)
        & (total <= n * (1.0 + SLACK) + SLACK)
    )
    if sound.all():
        return [""] * len(rows)
    return [
        "" if good else _count_problem(name, row, n_i)
        for good, row, n_i in zip(sound, flat, rows, strict=True)
    ]


def _count_problem(name: str, counts: Tensor, rows: float) -> str:
    """What is wrong with one client's numbers of rows, of which something is."""
    if not torch.isfinite(counts).all():
        return f"{name} is not finite"
    smallest = float(counts.min())
    if smallest < 0:
        return f"{name} holds a negative number of rows ({smallest:g})"
    total = float(counts.sum())
    if total > rows * (1.0 + SLACK) + SLACK:
        return f"{name} counts {total:g} rows, and the client holds {rows:g}"
    broken = counts[(counts - counts.round()).abs() > SLACK * counts.clamp(min=1.0)]
    first = float(broken[0])
    return f"{name} holds {first:g} rows, which is no whole number"


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
