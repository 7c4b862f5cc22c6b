"""Modules of the user's that read texts or rows of numbers: ``reads = "texts"`` or ``reads = "rows"`` says so.

A module of texts is called with a list of B strings, one of rows with a tensor [B, ...] of the type and shape of its
``example``, one row as its dataset holds them. Either gives [B, D], or tokens [B, T, D] that are averaged.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, UsageError
from fedcache.extract.backbones.backbone import deterministic, no_images, no_text, one_row_each
from fedcache.extract.backbones.own import no_width, refuse_chance, refuse_company, refuse_complex
from fedcache.extract.inputs import Items, described_row
from fedcache.extract.recipe import IMAGES, ROWS, TEXTS
from fedcache.optional import reason

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

OF_MODULES = (IMAGES, TEXTS, ROWS)
"""Kinds of items that a user's module may read."""

TEMPLATE = "a text about {}."
"""Prompt of a class where nothing else is said."""

TRIED = ["a text about a cat.", "another text, which is longer than the first."]


class OwnItemEncoder:
    """A ``FrozenEncoder`` of texts or rows over a copy of a module.

    Args:
        name: of the backbone, for messages.
        module: of the user's.
        device: where to run.
        dtype: ``float32`` | ``bfloat16`` | ``float16``; the last two run under autocast.

    Attributes:
        rank: axes of its output, once there was one.
    """

    def __init__(
        self, name: str, module: nn.Module, *, device: str | torch.device, dtype: str
    ) -> None:
        import torch

        self.name = name
        self.device = torch.device(device)
        self.compute: torch.dtype = getattr(torch, dtype)
        self.kind = kind_of(name, module)
        self.example = example_of(name, module)
        self.rank = 2
        try:
            self.module = copy.deepcopy(module).eval().requires_grad_(False).to(self.device)
        except Exception as error:  # tensors that are results of computations cannot be copied
            raise UsageError(
                f"{name} cannot be copied: {reason(error)}",
                "Give a module whose tensors are parameters and buffers.",
            ) from error

    def items(self, items: Items) -> tuple[Tensor, NDArray[np.bool_]]:
        """See ``ItemEncoder.items``; what the module cuts is not known. Raises UsageError where it fails."""
        import torch

        count = len(items)
        given: Any
        if isinstance(items, list):
            given = items
        else:
            given = self._rows(items)
        try:
            with (
                torch.inference_mode(),
                deterministic(),
                nullcontext()
                if self.compute is torch.float32
                else torch.autocast(self.device.type, self.compute),
            ):
                out = self.module(given)
        except FedcacheError:
            raise
        except (
            Exception,
            SystemExit,
        ) as error:  # the user's code may raise anything: its error becomes a message
            raise UsageError(
                f"{self.name} fails on {count} {self.kind}: {reason(error)}",
                "Fix its forward method.",
            ) from error
        shape = tuple(getattr(out, "shape", ()))
        if not hasattr(out, "isfinite") or len(shape) not in (2, 3) or shape[0] != count:
            found = type(out).__name__
            if hasattr(out, "shape"):
                found = str(list(shape))
            what = f"{count} {self.kind}"
            raise UsageError(
                f"{self.name} gives {found} for {what}, expected a tensor [B, D] or [B, T, D].",
                "Return one tensor from forward, the features.",
            )
        refuse_complex(self.name, out)
        self.rank = len(shape)
        return one_row_each(out).float(), np.zeros(count, bool)

    def _rows(self, rows: NDArray[Any]) -> Tensor:
        import torch

        assert self.example is not None
        found = described_row(rows[0])
        wanted = described_row(self.example)
        if found != wanted:
            raise UsageError(
                f"{self.name} reads rows {wanted}, but the rows of the dataset are {found}.",
                f"example = torch.zeros({rows.shape[1:]}, dtype=torch.{rows.dtype})   in the module makes "
                "it read these rows.",
            )
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)

    def image(self, x: Tensor) -> Tensor:
        """It reads no images."""
        raise no_images(self.name, self.kind)

    def text(self, prompts: Sequence[str]) -> Tensor:
        """See ``FrozenEncoder.text``: of texts their own features, made unit; UsageError of rows."""
        import torch

        if self.kind != TEXTS:
            raise no_text(self.name)
        return torch.nn.functional.normalize(self.items(list(prompts))[0], dim=-1)

    def tried(self) -> int:
        """The width of what it gives for two items; UsageError where it fails or is not finite."""
        import torch

        two: Items
        if self.example is None:
            two = TRIED
        else:
            two = torch.stack([self.example, self.example]).numpy()
        features, again, alone = (self.items(items)[0] for items in (two, two, two[:1]))
        if features.shape[1] == 0:
            raise no_width(self.name)
        if not bool(features.isfinite().all()):
            raise UsageError(
                f"{self.name} gives NaN or infinite numbers for two {self.kind}.",
                "Fix its forward method.",
            )
        refuse_chance(self.name, features, again)
        refuse_company(self.name, features[:1], alone)
        return int(features.shape[1])


def kind_of(name: str, module: nn.Module) -> str:
    """The kind of items that a module reads; images by default. Raises UsageError for an unknown word."""
    found = getattr(module, "reads", IMAGES)
    if found not in OF_MODULES:
        raise UsageError(
            f"{name} reads {found!r}, expected {', '.join(OF_MODULES)}.", 'reads = "texts"'
        )
    return str(found)


def example_of(name: str, module: nn.Module) -> Tensor | None:
    """One row as a module of rows reads it; None of texts. Raises UsageError for a module of rows without one."""
    import torch

    if kind_of(name, module) == TEXTS:
        return None
    found = getattr(module, "example", None)
    if not isinstance(found, torch.Tensor) or not found.ndim or not found.numel():
        raise UsageError(
            f"{name} reads rows, but does not declare their shape and type.",
            "example = torch.zeros(16000)   as an attribute: an example of one row of the dataset.",
        )
    return found.detach().cpu()
