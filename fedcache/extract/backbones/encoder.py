"""The encoder every provider builds: normalise on the device, run the module, hand back float32.

Normalisation lives here and not in the decoding workers, so bytes cross to the device and recipes that differ in
mean and std alone share their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.recipe import Recipe

Tokenize = Callable[[list[str]], Tensor]


@contextmanager
def deterministic() -> Iterator[None]:
    """No autotuning, no TF32, deterministic convolutions; the caller's settings come back afterwards."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class ModuleEncoder:
    """An ``Encoder`` over one torch module.

    Args:
        name: of the backbone, for messages.
        module: maps normalised [B, 3, H, W] to [B, D].
        recipe: its mean and std normalise the input.
        device: where to run.
        dtype: ``float32`` | ``bfloat16`` | ``float16``; the last two run under autocast, weights stay float32.
        text: maps tokens [C, L] to [C, D], if there is a text tower.
        tokenize: prompts to tokens, with ``text``.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        recipe: Recipe,
        *,
        device: str | torch.device,
        dtype: str,
        text: Callable[[Tensor], Tensor] | None = None,
        tokenize: Tokenize | None = None,
    ) -> None:
        self.name = name
        self.device = torch.device(device)
        self.compute: torch.dtype = getattr(torch, dtype)
        # Decoded images are channels last already, and convolutions are up to 1.45 times faster on them on a CPU core.
        # 4-d weights follow the input's layout; 2-d ones are untouched.
        self.module = module.eval().requires_grad_(False).to(self.device).to(memory_format=torch.channels_last)
        self._scale, self._shift = _affine(recipe, self.device)
        self._text, self.tokenize = text, tokenize

    def to(self, device: str | torch.device) -> ModuleEncoder:
        """Move module and constants to another device, in place."""
        self.device = torch.device(device)
        self.module.to(self.device)
        self._scale, self._shift = self._scale.to(self.device), self._shift.to(self.device)
        return self

    def normalise(self, x: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] -> [B, 3, H, W]: (x / 255 - mean) / std, as one multiplication and one addition."""
        x = x.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        return torch.addcmul(self._shift, x.float(), self._scale).contiguous(memory_format=torch.channels_last)

    def features(self, x: Tensor) -> Tensor:
        """[B, D] float32 of normalised images [B, 3, H, W]; differentiable."""
        with deterministic(), self._autocast():
            features: Tensor = self.module(x)
        return features.float()

    @torch.inference_mode()
    def image(self, x: Tensor) -> Tensor:
        """See ``Encoder.image``."""
        return self.features(self.normalise(x))

    @torch.inference_mode()
    def text(self, prompts: Sequence[str]) -> Tensor:
        """See ``Encoder.text``; in float32 whatever the compute dtype, as it is a handful of rows."""
        if self._text is None or self.tokenize is None:
            raise no_text(self.name)
        with deterministic():
            features = self._text(self.tokenize(list(prompts)).to(self.device)).float()
        return nn.functional.normalize(features, dim=-1)

    def _autocast(self) -> Any:
        if self.compute is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute)


class ClipImages(nn.Module):
    """The image half of an open_clip model as a module of its own; ``clip`` is the whole model."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, x: Tensor) -> Tensor:
        """Projected image embeddings [B, D] before normalisation."""
        features: Tensor = self.clip.encode_image(x)
        return features


def clip_encoder(
    name: str, clip: Any, tokenize: Tokenize, recipe: Recipe, *, device: str | torch.device, dtype: str
) -> ModuleEncoder:
    """The encoder over both towers of an open_clip model."""
    return ModuleEncoder(
        name, ClipImages(clip), recipe, device=device, dtype=dtype, text=clip.encode_text, tokenize=tokenize
    )


def no_text(name: str) -> FedcacheError:
    """The error of asking a backbone without a text tower for text features."""
    return FedcacheError(
        Exit.USAGE,
        f"{name} has no text tower, so it has no text features.",
        "Use a backbone with one: clip-rn50, clip-vit-b-16, clip-vit-b-32 or glyph-clip.",
    )


def _affine(recipe: Recipe, device: torch.device) -> tuple[Tensor, Tensor]:
    mean = torch.tensor(recipe.mean, dtype=torch.float64).view(1, 3, 1, 1)
    std = torch.tensor(recipe.std, dtype=torch.float64).view(1, 3, 1, 1)
    return (1 / (255 * std)).float().to(device), (-mean / std).float().to(device)
