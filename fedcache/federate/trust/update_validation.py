"""Update validation: what an upload must be before ``aggregate`` sees it, whichever engine brought it.

The server knows what a method's upload looks like (names, shapes, dtypes), how many rows each client holds and which
round it is. An upload that differs, or holds a number that is not finite, is refused with the client and the round
named; what is done then is the run's choice (``--on-bad-update``). A sound upload may still lie: against that stand
``federate.trust.robust_rules`` and a bound on its norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcache.errors import Exit, FedcacheError
from fedcache.heads.linear import Tree

SLACK = 1e-4
"""Relative rounding of counts that were added in float32."""


def is_count(name: str) -> bool:
    """Whether a tensor of an upload holds numbers of rows per class."""
    return name.rsplit("/", 1)[-1] in ("count", "counts")


@dataclass(frozen=True)
class UpdateValidation:
    """What uploads of one round must be.

    Attributes:
        like: name -> (shape, dtype) of a sound upload.
        round: 1-based, the one that is being collected.
    """

    like: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    round: int

    @staticmethod
    def shape_of(up: Tree) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The ``like`` of an upload that is known to be sound."""
        return {name: (tuple(t.shape), t.dtype) for name, t in up.items()}

    def problem(self, up: object, rows: float, sent_in: int | None = None) -> str | None:
        """The first thing wrong with an upload, in words; None for a sound one.

        Args:
            up: what came, of which nothing is known.
            rows: n_i, training rows of the client.
            sent_in: the round the client says it answers, None where the engine cannot be answered late.
        """
        if sent_in is not None and sent_in != self.round:
            return f"it answers round {sent_in}, and this is round {self.round}"
        if not isinstance(up, dict) or not all(isinstance(t, Tensor) for t in up.values()):
            return "it is no dictionary of tensors"
        if missing := sorted(self.like.keys() - up.keys()):
            return f"it lacks {', '.join(missing)}"
        if extra := sorted(map(str, up.keys() - self.like.keys())):
            return f"it holds {', '.join(extra)}, which nobody asked for"
        for name, (shape, dtype) in self.like.items():
            t = up[name]
            if tuple(t.shape) != shape:
                return f"{name} has shape {tuple(t.shape)}, expected {shape}"
            if t.dtype != dtype:
                return f"{name} is {_short(t.dtype)}, expected {_short(dtype)}"
            if is_count(name) and (wrong := _wrong_count(name, t, rows)):
                return wrong
            if not t.is_floating_point():
                continue
            norm = float(torch.linalg.vector_norm(t, dtype=torch.float64)) if t.numel() else 0.0
            if norm != norm or norm == float("inf"):
                bad = t[~torch.isfinite(t)]
                word = "nan" if not len(bad) or torch.isnan(bad).any() else "inf"
                return f"{name} is {word}"
        return None

    def refusal(self, client: int, name: str, why: str) -> FedcacheError:
        """The error of ``--on-bad-update fail``."""
        return FedcacheError(
            Exit.FEDERATED,
            f"Round {self.round}: the upload of client {client} ({name!r}) is refused: {why}.",
            "Leave such uploads out with --on-bad-update reject, or look at that client.",
        )


def _wrong_count(name: str, t: Tensor, rows: float) -> str | None:
    values = t.double()
    if not torch.isfinite(values).all():
        return f"{name} is not finite"
    if (values < 0).any():
        return f"{name} holds a negative number of rows ({float(values.min()):g})"
    if float(values.sum()) > rows * (1.0 + SLACK) + SLACK:
        return f"{name} counts {float(values.sum()):g} rows, and the client holds {rows:g}"
    return None


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
