"""Modules of the user that read texts or rows of numbers, with the attribute ``reads = "texts"`` or ``reads = "rows"``.

A module of texts is called with a list of B strings. A module of rows is called with a tensor [B, ...]; its attribute
``example`` is one row, with the type and shape of the dataset's rows. Both give [B, D], or tokens [B, T, D], which are
averaged.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, UsageError
from fedcache.extract.backbones.backbone import (
    autocast,
    deterministic,
    no_images,
    no_text,
    one_row_each,
)
from fedcache.extract.backbones.own import check_features
from fedcache.extract.inputs import Items, described_row
from fedcache.extract.recipe import IMAGES, ROWS, TEXTS
from fedcache.optional import reason

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

OF_MODULES = (IMAGES, TEXTS, ROWS)
"""Kinds of items that a user's module may read."""

TEMPLATE = "a text about {}."
"""Default prompt template of a class."""

TRIAL_TEXTS = ["a text about a cat.", "another text, which is longer than the first."]


class OwnItemEncoder:
    """A ``FrozenEncoder`` of texts or rows over a copy of a module.

    Args:
        name: of the backbone, for messages.
        module: of the user's.
        device: where to run.
        dtype: ``float32`` | ``bfloat16`` | ``float16``; the last two run under autocast.

    Attributes:
        rank: number of axes of its output, known after the first call.
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
        self.module = copied(name, module).to(self.device)

    def items(self, items: Items) -> tuple[Tensor, NDArray[np.bool_]]:
        """See ``ItemEncoder.items``; texts that the module cuts are not marked. Raises UsageError if it fails."""
        import torch

        count = len(items)
        given: Any = items
        if not isinstance(items, list):
            given = self._rows(items)
        try:
            with torch.inference_mode(), deterministic(), autocast(self.device, self.compute):
                out = self.module(given)
        except FedcacheError:
            raise
        # The user's code may raise any error, which becomes a message.
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"{self.name} fails on {count} {self.kind}: {reason(error)}",
                "Fix its forward method.",
            ) from error
        features = checked_output(self.name, out, count, self.kind)
        self.rank = features.ndim
        return one_row_each(features).float(), np.zeros(count, bool)

    def _rows(self, rows: NDArray[Any]) -> Tensor:
        import torch

        assert self.example is not None
        found = described_row(rows[0])
        wanted = described_row(self.example)
        if found != wanted:
            raise UsageError(
                f"{self.name} reads rows of {wanted}, but the rows of the dataset are {found}.",
                f"example = torch.zeros({rows.shape[1:]}, dtype=torch.{rows.dtype})   in the module "
                "declares these rows as its input.",
            )
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)

    def image(self, x: Tensor) -> Tensor:
        """See ``FrozenEncoder.image``. The module reads no images: always UsageError."""
        raise no_images(self.name, self.kind)

    def text(self, prompts: Sequence[str]) -> Tensor:
        """See ``FrozenEncoder.text``: the features of prompts as texts, at unit length; UsageError for rows."""
        import torch

        if self.kind != TEXTS:
            raise no_text(self.name)
        features, _ = self.items(list(prompts))
        return torch.nn.functional.normalize(features, dim=-1)

    def trial_width(self) -> int:
        """The width of the features of two items. Raises UsageError if the module fails or gives unusable features."""
        import torch

        two: Items = TRIAL_TEXTS
        if self.example is not None:
            two = torch.stack([self.example, self.example]).numpy()
        features, _ = self.items(two)
        again, _ = self.items(two)
        alone, _ = self.items(two[:1])
        items = f"two {self.kind}"
        check_features(self.name, items, features, again, [alone], "Fix its forward method.")
        return int(features.shape[1])


def copied(name: str, module: nn.Module) -> nn.Module:
    """A copy of a module in evaluation mode. Raises UsageError for a module that cannot be copied."""
    try:
        return copy.deepcopy(module).eval().requires_grad_(False)
    # Tensors that are results of computations cannot be copied, and the user's code may raise any error.
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{name} cannot be copied: {reason(error)}",
            "Give a module whose tensors are parameters and buffers.",
        ) from error


def checked_output(name: str, out: Any, count: int, kind: str) -> Tensor:
    """The output of a module for ``count`` items of a kind. Raises UsageError for one that holds no features."""
    axes: tuple[int, ...] = (2, 3)
    expected = "[B, D] or [B, T, D]"
    if kind == IMAGES:
        axes = (2, 3, 4)
        expected = "[B, D], [B, T, D] or [B, D, H, W]"
    shape: Any = getattr(out, "shape", None)
    is_tensor = shape is not None and hasattr(out, "isfinite")
    if not is_tensor or len(shape) not in axes or shape[0] != count:
        found = type(out).__name__
        if shape is not None:
            found = str(list(shape))
        raise UsageError(
            f"{name} gives {found} for {count} {kind}, expected a tensor {expected}.",
            "Return the features from forward as one tensor.",
        )
    features: Tensor = out
    # A store would keep only the real part.
    if features.is_complex():
        raise UsageError(
            f"{name} gives complex numbers, but features must be real.",
            "Return the absolute value or both parts: out.abs(), or torch.view_as_real(out).flatten(1)",
        )
    return features


def kind_of(name: str, module: nn.Module) -> str:
    """The kind of items that a module reads; images by default. Raises UsageError for an unknown word."""
    found = getattr(module, "reads", IMAGES)
    if found not in OF_MODULES:
        raise UsageError(
            f"{name} reads {found!r}, expected {', '.join(OF_MODULES)}.", 'reads = "texts"'
        )
    return str(found)


def example_of(name: str, module: nn.Module) -> Tensor | None:
    """The example row of a module of rows; None for texts. Raises UsageError for a module of rows without one."""
    import torch

    if kind_of(name, module) == TEXTS:
        return None
    found = getattr(module, "example", None)
    if not isinstance(found, torch.Tensor) or not found.ndim or not found.numel():
        raise UsageError(
            f"{name} reads rows, but does not declare their shape and type.",
            "Add the attribute `example` to the module: a tensor with the shape and type of one row of the dataset. "
            "For example:  example = torch.zeros(16000)",
        )
    return found.detach().cpu()
