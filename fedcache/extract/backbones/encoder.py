"""The encoder every provider builds, which normalises on the device, runs the module and hands back float32.

Normalisation lives here and not in the decoding workers, so bytes cross to the device and recipes that differ in
mean and std alone share their inputs. Text features are a unit row per class, from one prompt template or an ensemble;
that is CLIP's (Radford et al., arXiv:2103.00020, section 3.1.4): the mean of the templates' unit features, made unit
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, UsageError
from fedcache.extract.backbones.backbone import FrozenEncoder
from fedcache.extract.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Tokenize = Callable[[list[str]], Tensor]


@contextmanager
def deterministic() -> Iterator[None]:
    """No autotuning, no TF32, deterministic convolutions; the caller's settings come back afterwards."""
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=False
        ):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class ModuleEncoder:
    """A ``FrozenEncoder`` over one torch module.

    Args:
        name: of the backbone, for messages.
        module: maps normalised [B, 3, H, W] to [B, D], unless ``image``, a part of it, does.
        recipe: its mean and std normalise the input.
        device: where to run.
        dtype: ``float32`` | ``bfloat16`` | ``float16``; the last two run under autocast, with the weights of layers
            that it would cast in every call held in this type. Other weights stay float32.
        text: maps tokens [C, L], which ``tokenize`` makes of prompts, to [C, D], if there is a text tower.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        recipe: Recipe,
        *,
        device: str | torch.device,
        dtype: str,
        image: Callable[[Tensor], Tensor] | None = None,
        text: Callable[[Tensor], Tensor] | None = None,
        tokenize: Tokenize | None = None,
    ) -> None:
        import torch

        self.name = name
        self.device = torch.device(device)
        self.compute: torch.dtype = getattr(torch, dtype)
        # Decoded images are channels last already, and convolutions are up to 1.45 times faster on them on a CPU core.
        # 4-d weights follow the input's layout; 2-d ones are untouched.
        self.module = (
            module.eval()
            .requires_grad_(False)
            .to(self.device)
            .to(memory_format=torch.channels_last)
        )
        if self.compute is not torch.float32:
            hold_weights(_image_tower(module, text is not None), self.compute)
        mean = torch.tensor(recipe.mean, dtype=torch.float64).view(1, 3, 1, 1)
        std = torch.tensor(recipe.std, dtype=torch.float64).view(1, 3, 1, 1)
        # (x / 255 - mean) / std = x * scale + shift.
        self._scale = (1 / (255 * std)).float().to(self.device)
        self._shift = (-mean / std).float().to(self.device)
        self._image = image or self.module
        self._text = text
        self.tokenize = tokenize

    def to(self, device: str | torch.device) -> ModuleEncoder:
        """Move module and constants to another device, in place."""
        import torch

        self.device = torch.device(device)
        self.module.to(self.device)
        self._scale, self._shift = self._scale.to(self.device), self._shift.to(self.device)
        return self

    def normalise(self, x: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] -> [B, 3, H, W]: (x / 255 - mean) / std, as one multiplication and one addition."""
        import torch

        x = x.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        return torch.addcmul(self._shift, x.float(), self._scale).contiguous(
            memory_format=torch.channels_last
        )

    def features(self, x: Tensor) -> Tensor:
        """[B, D] float32 of normalised images [B, 3, H, W]; differentiable."""
        import torch

        whole = self.compute is torch.float32
        with (
            deterministic(),
            nullcontext() if whole else torch.autocast(self.device.type, dtype=self.compute),
        ):
            features: Tensor = self._image(x)
        return features.float()

    def image(self, x: Tensor) -> Tensor:
        """See ``FrozenEncoder.image``."""
        import torch

        with torch.inference_mode():
            return self.features(self.normalise(x))

    def text(self, prompts: Sequence[str]) -> Tensor:
        """See ``FrozenEncoder.text``; in float32 whatever the compute dtype, as it is a handful of rows."""
        import torch

        if self._text is None or self.tokenize is None:
            raise no_text(self.name)
        with torch.inference_mode(), deterministic():
            features = self._text(self.tokenize(list(prompts)).to(self.device)).float()
            return torch.nn.functional.normalize(features, dim=-1)


def _image_tower(module: nn.Module, has_text: bool) -> nn.Module:
    """The part of a module that images alone go through; an empty one where that is not known.

    Text features are computed in float32, so the tower that makes them keeps its weights.
    """
    from torch import nn

    if not has_text:
        return module
    for name in ("visual", "vision_model"):  # of open_clip, and of transformers
        tower = getattr(module, name, None)
        if isinstance(tower, nn.Module):
            return tower
    return nn.Module()


def hold_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Hold the weights that autocast would cast in every call in ``dtype``, in place; features keep their bits.

    Of layers that are exactly these: a subclass may compute with its weights before autocast would cast them.
    """
    from torch import nn

    for part in module.modules():
        if type(part) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d):
            part.weight.data = part.weight.data.to(dtype)


def clip_encoder(
    name: str,
    clip: Any,
    tokenize: Tokenize,
    recipe: Recipe,
    *,
    device: str | torch.device,
    dtype: str,
) -> ModuleEncoder:
    """The encoder over both towers of an open_clip model; images give projected embeddings before normalisation."""
    return ModuleEncoder(
        name,
        clip,
        recipe,
        device=device,
        dtype=dtype,
        image=clip.encode_image,
        text=clip.encode_text,
        tokenize=tokenize,
    )


def one_row_each(features: Tensor, *, channels_last: bool = False) -> Tensor:
    """Features [B, D] of an output: [B, D] itself, the mean over tokens of [B, T, D], or over places of [B, D, H, W].

    With ``channels_last`` the four axes are [B, H, W, D]. The output must have from two to four axes.
    """
    if features.ndim == 3:
        return features.mean(1)
    if features.ndim == 4:
        return features.mean((1, 2) if channels_last else (2, 3))
    return features


def no_images(name: str, reads: str) -> FedcacheError:
    """The error of giving images to a backbone that reads texts or rows."""
    return UsageError(
        f"{name} reads {reads}, and these are images.",
        f"Give it {reads}, or name a backbone of images.",
    )


def no_text(name: str) -> FedcacheError:
    """The error of asking a backbone without a text tower for text features."""
    return UsageError(
        f"{name} has no text tower, so it has no text features.",
        "Use a backbone with one: clip-rn50, clip-vit-b-16, clip-vit-b-32 or glyph-clip.",
    )


def prompts(classes: Sequence[str], template: str) -> list[str]:
    """The template filled in for every class, underscores read as spaces; UsageError for one without ``{}``."""
    if "{}" not in template:
        raise UsageError(
            f"The template {template!r} has no {{}} for the class name.",
            'For example --text "a photo of a {}."',
        )
    # Not str.format: a class name or template may hold other braces.
    return [template.replace("{}", name.replace("_", " ").strip()) for name in classes]


def text_features(
    encoder: FrozenEncoder, classes: Sequence[str], templates: Sequence[str]
) -> NDArray[np.float32]:
    """Text features [C, D] float32 of the classes, unit rows, by the text tower of ``encoder``.

    Raises UsageError without templates, classes or a text tower, for a template without ``{}``, or when the templates'
    features cancel out.
    """
    if not templates or not classes:
        raise UsageError(
            f"Text features need templates and classes; got {len(templates)} and {len(classes)}.",
            'For example --text "a photo of a {}."',
        )
    filled = [prompts(classes, template) for template in templates]
    rows = [encoder.text(lines).to("cpu").numpy().astype(np.float64) for lines in filled]
    total = np.sum([_unit(r) for r in rows], axis=0)
    return _unit(total).astype(np.float32)


def _unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    norm = np.linalg.norm(rows, axis=-1, keepdims=True)
    if not np.all(norm > 1e-12):  # also true of NaN
        raise UsageError(
            f"{int((~(norm > 1e-12)).sum())} text features have no direction (their norm is 0 or not finite).",
            "Check the weights of the text tower with `fedcache backbones verify`, or use other templates.",
        )
    unit: NDArray[np.float64] = rows / norm
    return unit
