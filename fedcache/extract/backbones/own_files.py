"""Image encoders as one file that another library computes: shared code of ONNX and TFLite files.

The file declares the size, layout and type of its input and its batch size; images are computed in blocks of this size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError, shell_word
from fedcache.extract.backbones.backbone import (
    Backbone,
    FrozenEncoder,
    Weights,
    no_text,
    one_row_each,
)
from fedcache.extract.backbones.own import (
    Choice,
    checked_encoder,
    facts_of,
    find_place,
    output_of,
    pooling_of,
    shape_of,
)
from fedcache.extract.recipe import NORMS, UNIT, Recipe
from fedcache.optional import reason
from fedcache.plugins import bare_name

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 224
"""Default side of the input in pixels, for a file that takes images of any size."""


@dataclass(frozen=True)
class ImageInput:
    """The input of images that a file declares."""

    name: str
    shape: tuple[int | None, ...]  # [N, 3, H, W] or [N, H, W, 3]; None for an axis of any length
    dtype: np.dtype[Any]

    @property
    def channels_last(self) -> bool:
        """Whether the axes are [N, H, W, 3]."""
        return self.shape[1] != 3

    @property
    def raw(self) -> bool:
        """Whether it takes pixels that are not normalised."""
        return self.dtype.kind in "iu"

    def fixed_side(self, name: str) -> int | None:
        """Pixels of the side; None for a file that takes any size. UsageError for images that are not square."""
        if self.channels_last:
            height, width = self.shape[1:3]
        else:
            height, width = self.shape[2:4]
        if height is None or width is None:
            return None
        if height != width:
            raise UsageError(
                f"{name} takes images of {height} x {width} pixels, but a recipe has only one side length.",
                "Export the model for square images.",
            )
        return height


@dataclass(eq=False)
class FileEncoder:
    """A ``FrozenEncoder`` over a file.

    Args:
        name: of the backbone, for messages.
        given: the input of images.
        outputs: names of the outputs, for messages.
        output: the output that is the feature.
        recipe: its mean and std normalise inputs of floats. Inputs of integers are the pixels, less 128 if signed.
        compute: the output for a block of images in the input's type and layout, by the library of the file.
    """

    name: str
    given: ImageInput
    outputs: Sequence[str]
    output: str
    recipe: Recipe
    compute: Callable[[NDArray[Any]], NDArray[Any]]

    def __post_init__(self) -> None:
        self.rank = 2  # number of axes of the output, known after the first call
        # As in ModuleEncoder: (x / 255 - mean) / std as one multiplication and one addition, in float32.
        mean = np.array(self.recipe.mean)
        std = np.array(self.recipe.std)
        self._scale = (1 / (255 * std)).astype(np.float32)
        self._shift = (-mean / std).astype(np.float32)

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
        """See ``FrozenEncoder.text``. An image encoder has no text features: always UsageError."""
        raise no_text(self.name)

    def _prepared(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        """uint8 [B, H, W, 3] in the type and layout of the input."""
        converted = images
        if self.given.dtype == np.int8:
            # The zero point of a signed quantised input is 128 lower.
            converted = (images.astype(np.int16) - 128).astype(np.int8)
        elif not self.given.raw:
            converted = (images * self._scale + self._shift).astype(self.given.dtype)
        if self.given.channels_last:
            return converted
        return converted.transpose(0, 3, 1, 2)

    def _block(self, images: NDArray[Any], step: int) -> NDArray[Any]:
        """The output for up to ``step`` images; for a file with a fixed batch, copies of the last image fill it."""
        padded = images
        if len(images) < step:
            copies = np.repeat(images[-1:], step - len(images), axis=0)
            padded = np.concatenate([images, copies])
        try:
            found = np.asarray(self.compute(np.ascontiguousarray(padded)))
        except Exception as error:
            # The libraries raise their own subclasses of Exception.
            raise UsageError(
                f"{self.name} fails on images of {images.shape[2]} px: {reason(error)}",
                f"Give the size that the model was exported for:  --recipe {shell_word(self.name)}:size=N",
            ) from error
        if found.dtype.kind not in "biuf":
            raise self._unfit(f"an array of {found.dtype}, but features must be real numbers")
        if found.ndim == 0 or len(found) != len(padded):
            raise self._misshapen(found.shape, len(padded), "one row for each image")
        return found[: len(images)]

    def _misshapen(self, shape: Sequence[int], images: int, expected: str) -> UsageError:
        return self._unfit(
            f"an array of shape {list(shape)} for {images} images, expected {expected}"
        )

    def _unfit(self, found: str) -> UsageError:
        outputs = ", ".join(self.outputs[:20])
        return UsageError(
            f"The output {self.output} of {self.name} is {found}.",
            f"Choose another output:  --recipe {shell_word(self.name)}:output=NAME   Outputs: {outputs}.",
        )


Opened = Callable[[str, Path, str, str | None, Recipe, int], FileEncoder]
"""(name, path, sha256 or "", output, recipe, threads) -> encoder of the file. Output None: the file has only one."""


def derive_file(
    name: str,
    prefix: str,
    choice: Choice,
    *,
    provider: str,
    norm: str,
    opened: Opened,
) -> Backbone:
    """The row of ``PREFIX:FILE``; its width is that of the features of two images.

    Args:
        name: as the user wrote it.
        prefix: of the name.
        choice: needs an output for a file with several; a file that takes any size is tried with ``choice.size``.
        provider: the module that loads it.
        norm: of float inputs, unless a recipe has another.
        opened: opens the file.

    Raises:
        UsageError, for a file that is not an image encoder; MachineError, for a missing or damaged file.
    """
    path = find_place(name, prefix, choice)
    bare = bare_name(name)

    def read() -> dict[str, Any]:
        size = choice.size or SIZE
        encoder = opened(bare, path, "", choice.output, Recipe(bare, "", size=size), 1)
        images = encoder.given
        fixed_side = images.fixed_side(bare)
        if fixed_side is not None:
            size = fixed_side
        _, width = shape_of(encoder, bare, size)
        layout = "NCHW"
        if images.channels_last:
            layout = "NHWC"
        return {
            "size": size,
            "fixed": fixed_side is not None,
            "raw": images.raw,
            "layout": layout,
            "output": encoder.output,
            "rank": encoder.rank,
            "width": width,
        }

    words = (provider, choice.output, str(choice.size))
    facts: Mapping[str, Any] = facts_of(path, words, choice, read)
    mean, std = NORMS[norm]
    if facts["raw"]:
        mean, std = UNIT
    pooling = pooling_of(facts["output"], facts["rank"])
    return Backbone(
        name=bare,
        provider=provider,
        width=facts["width"],
        recipe=Recipe(bare, "", size=facts["size"], mean=mean, std=std, pooling=pooling),
        source=f"yours: {path}",
        files=(path.name,),
        architecture=facts["layout"],  # a file does not name its architecture
        fixed=facts["fixed"],
        own=True,
        place=str(path),
        cpu_only=True,
        raw=facts["raw"],
    )


def load_file(
    opened: Opened, backbone: Backbone, weights: Weights, recipe: Recipe, device: str, dtype: str
) -> FrozenEncoder:
    """The encoder of the file whose sha256 is that of ``weights``, with as many threads as torch has.

    Raises UsageError for another device than the CPU or another dtype than float32.
    """
    import torch

    name = backbone.name
    if (device, dtype) != ("cpu", "float32"):
        raise UsageError(
            f"{name} is computed on the CPU in float32, but {device} and {dtype} were requested.",
            "--device cpu --dtype float32",
        )
    path = weights.file(name)
    threads = torch.get_num_threads()
    encoder = opened(name, path, weights.sha256, output_of(recipe), recipe, threads)
    return checked_encoder(encoder, backbone, recipe)
