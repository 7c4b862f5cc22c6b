"""Image encoders as one file that another library computes: what ONNX and TFLite files have in common.

The file says its size, layout and type of input; images are handed over in blocks of the batch that it takes. Nothing
here knows a library: a subclass computes one block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError, shell_word
from fedcache.extract.backbones.backbone import Backbone, no_text, one_row_each
from fedcache.extract.backbones.own import Choice, facts_of, find_place, pooling_of, shape_of
from fedcache.extract.recipe import NORMS, UNIT, Recipe
from fedcache.optional import reason
from fedcache.plugins import bare_name

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 224
"""Pixels of the side where a file takes any."""


@dataclass(frozen=True)
class ImageInput:
    """The input of images that a file declares."""

    name: str
    shape: tuple[int | None, ...]  # [N, 3, H, W] or [N, H, W, 3]; None where any number will do
    dtype: np.dtype[Any]

    @property
    def channels_last(self) -> bool:
        """Whether the axes are [N, H, W, 3]."""
        return self.shape[1] != 3

    @property
    def raw(self) -> bool:
        """Whether it takes the pixels as they are."""
        return self.dtype.kind in "iu"

    def side(self, name: str, choice: Choice) -> tuple[int, bool]:
        """Pixels of the side, and whether they are fixed; UsageError for images that are not square."""
        first, second = self.shape[1:3] if self.channels_last else self.shape[2:4]
        if first is None or second is None:
            return choice.size or SIZE, False
        if first != second:
            raise UsageError(
                f"{name} takes images of {first} x {second} pixels, but a recipe has only one side length.",
                "Export the model for square images.",
            )
        return first, True


class FileEncoder(ABC):
    """A ``FrozenEncoder`` over a file.

    Args:
        name: of the backbone, for messages.
        given: the input of images.
        outputs: names of the outputs, for messages.
        output: that of the feature.
        recipe: its mean and std normalise inputs of floats; whole numbers are the pixels, signed ones less 128.
    """

    def __init__(
        self, name: str, given: ImageInput, outputs: Sequence[str], output: str, recipe: Recipe
    ) -> None:
        self.name = name
        self.given = given
        self.outputs = outputs
        self.output = output
        self.rank = 2  # axes of the output, once it was computed
        # As ModuleEncoder: (x / 255 - mean) / std as one multiplication and one addition, in float32.
        mean = np.array(recipe.mean)
        std = np.array(recipe.std)
        self._scale = (1 / (255 * std)).astype(np.float32)
        self._shift = (-mean / std).astype(np.float32)

    @abstractmethod
    def compute(self, images: NDArray[Any]) -> NDArray[Any]:
        """The output for a block of images in the input's type and layout."""

    def image(self, x: Tensor) -> Tensor:
        """See ``FrozenEncoder.image``."""
        import torch

        images = self._prepared(x.cpu().numpy())
        step = self.given.shape[0] or len(images)
        parts = [
            self._block(images[start : start + step], step) for start in range(0, len(images), step)
        ]
        out = torch.from_numpy(np.concatenate(parts).astype(np.float32, copy=False))
        self.rank = out.ndim
        if out.ndim not in (2, 3, 4):
            raise self._misshapen(
                out.shape, len(images), "[B, D], tokens [B, T, D] or a map of features"
            )
        return one_row_each(out, channels_last=self.given.channels_last)

    def text(self, prompts: Sequence[str]) -> Tensor:
        """A file of an image encoder has none."""
        raise no_text(self.name)

    def _prepared(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        """uint8 [B, H, W, 3] as the input wants it."""
        made: NDArray[Any] = images
        if self.given.dtype == np.int8:
            # The signed form of a quantised input has its zero point 128 lower.
            made = (images.astype(np.int16) - 128).astype(np.int8)
        elif not self.given.raw:
            made = (images * self._scale + self._shift).astype(self.given.dtype)
        if self.given.channels_last:
            return made
        return made.transpose(0, 3, 1, 2)

    def _block(self, images: NDArray[Any], step: int) -> NDArray[Any]:
        """The output for up to ``step`` images; a file that takes so many at a time is given copies of the last."""
        short = 0
        if self.given.shape[0] is not None:
            short = step - len(images)
        padded = images
        if short:
            padded = np.concatenate([images, np.repeat(images[-1:], short, axis=0)])
        try:
            found = np.asarray(self.compute(np.ascontiguousarray(padded)))
        except Exception as error:
            # the libraries raise classes of their own, below Exception alone
            raise UsageError(
                f"{self.name} fails on images of {images.shape[2]} px: {reason(error)}",
                f"Give the size it was exported for:  --recipe {shell_word(self.name)}:size=N",
            ) from error
        if found.dtype.kind not in "biuf":
            raise self._unfit(f"of {found.dtype}, but features must be real numbers")
        if found.ndim == 0 or len(found) != len(padded):
            raise self._misshapen(found.shape, len(padded), "a row for each")
        return found[: len(images)]

    def _misshapen(self, shape: Sequence[int], images: int, expected: str) -> UsageError:
        return self._unfit(f"{list(shape)} for {images} images, expected {expected}")

    def _unfit(self, found: str) -> UsageError:
        outputs = ", ".join(self.outputs[:20])
        return UsageError(
            f"The output {self.output} of {self.name} is {found}.",
            f"Outputs: {outputs}; --recipe {shell_word(self.name)}:output=NAME",
        )


Opened = Callable[[Path, str, str | None, int], FileEncoder]
"""The encoder of a file for a name, an output (None for its only one) and a size, with any norm; one thread."""


def derived(
    name: str,
    prefix: str,
    choice: Choice,
    *,
    provider: str,
    norm: str,
    given: Callable[[Path, str], ImageInput],
    opened: Opened,
) -> Backbone:
    """The row of ``PREFIX:FILE``, with the width that two images gave.

    Args:
        name: as the user wrote it; prefix: its own.
        choice: a file with several outputs needs an output, one that takes any size is tried with ``choice.size``.
        provider: the module that loads it.
        norm: of float inputs, unless a recipe says otherwise.
        given: reads the input of a file.
        opened: opens it.

    Raises:
        UsageError, for a file that is no image encoder; MachineError, for one that is missing or damaged.
    """
    path = find_place(name, prefix, choice)
    bare = bare_name(name)

    def read() -> dict[str, Any]:
        images = given(path, bare)
        size, fixed = images.side(bare, choice)
        encoder = opened(path, bare, choice.output, size)
        width = shape_of(encoder, bare, size)[1]
        layout = "NCHW"
        if images.channels_last:
            layout = "NHWC"
        return {
            "size": size,
            "fixed": fixed,
            "raw": images.raw,
            "layout": layout,
            "output": encoder.output,
            "rank": encoder.rank,
            "width": width,
        }

    facts: Mapping[str, Any] = facts_of(
        path, (provider, choice.output, str(choice.size)), choice, read
    )
    mean, std = UNIT if facts["raw"] else NORMS[norm]
    pooling = pooling_of(facts["output"], facts["rank"])
    return Backbone(
        name=bare,
        provider=provider,
        width=facts["width"],
        recipe=Recipe(bare, "", size=facts["size"], mean=mean, std=std, pooling=pooling),
        source=f"yours: {path}",
        files=(path.name,),
        architecture=facts["layout"],
        fixed=facts["fixed"],
        own=True,
        place=str(path),
        cpu_only=True,
        raw=facts["raw"],
    )


def chosen_output(name: str, outputs: Sequence[str], requested: str | None) -> str:
    """The output requested, or the only one; UsageError for several."""
    if requested is None and len(outputs) != 1:
        first = "NAME"
        if outputs:
            first = outputs[0]
        raise UsageError(
            f"{name} has {len(outputs)} outputs ({', '.join(outputs[:20])}), but none was chosen.",
            f"--recipe {shell_word(f'{name}:output={first}')}",
        )
    if requested is None:
        return outputs[0]
    return requested


def on_the_cpu(name: str, device: str, dtype: str) -> None:
    """Refuse another device or dtype than a library of files has; UsageError."""
    if (device, dtype) != ("cpu", "float32"):
        raise UsageError(
            f"{name} is computed on the CPU in float32, but {device} and {dtype} were requested.",
            "--device cpu --dtype float32",
        )
