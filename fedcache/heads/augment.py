"""SimCLR's augmentation of images in a batch, from numbers that are drawn elsewhere.

Resized crop, horizontal flip, colour jitter, grey: the recipe of Chen et al. (ICML 2020) without blur, which they leave
out for 32 px images. A function of (image, draws) alone: the same draws give the same view on every lift and machine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

DRAWS = 11
"""Uniform numbers one view of one image takes."""

AREA = (0.2, 1.0)
ASPECT = (3 / 4, 4 / 3)
JITTER = 0.4
HUE = 0.1
GREY = (0.299, 0.587, 0.114)

# RGB to YIQ: hue is an angle in the IQ plane.
_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


def augment(images: Tensor, u: Tensor, *, flip: bool) -> Tensor:
    """One view of each image.

    Args:
        images: [B, 3, H, W] in [0, 1].
        u: [B, DRAWS] uniform in [0, 1).
        flip: whether half of the views are mirrored; letters and digits must not be.

    Returns:
        [B, 3, H, W] in [0, 1].
    """
    return _colour(_crop(images, u[:, :5], flip=flip), u[:, 5:])


def _crop(x: Tensor, u: Tensor, *, flip: bool) -> Tensor:
    area = AREA[0] + (AREA[1] - AREA[0]) * u[:, 0]
    aspect = torch.exp(math.log(ASPECT[0]) + (math.log(ASPECT[1]) - math.log(ASPECT[0])) * u[:, 1])
    w = torch.sqrt(area * aspect).clamp(max=1.0)
    h = torch.sqrt(area / aspect).clamp(max=1.0)
    # In grid coordinates the image is [-1, 1]: a window of share w has its centre in [-(1 - w), 1 - w].
    cx, cy = (1.0 - w) * (2.0 * u[:, 2] - 1.0), (1.0 - h) * (2.0 * u[:, 3] - 1.0)
    sign = torch.where((u[:, 4] < 0.5) & flip, -1.0, 1.0).to(x.dtype)
    zero = torch.zeros_like(w)
    theta = torch.stack([torch.stack([sign * w, zero, cx], -1), torch.stack([zero, h, cy], -1)], -2).to(x.dtype)
    grid = affine_grid(theta, list(x.shape), align_corners=False)
    return grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False).clamp(0.0, 1.0)


def _colour(x: Tensor, u: Tensor) -> Tensor:
    grey = x.new_tensor(GREY).view(1, 3, 1, 1)
    strength = 1.0 + JITTER * (2.0 * u[:, 1:4] - 1.0)

    def each(values: Tensor) -> Tensor:
        return values.view(-1, 1, 1, 1)

    y = x * each(strength[:, 0])
    mean = (y * grey).sum(1, keepdim=True).mean((-2, -1), keepdim=True)
    y = mean + each(strength[:, 1]) * (y - mean)
    luma = (y * grey).sum(1, keepdim=True)
    y = luma + each(strength[:, 2]) * (y - luma)
    y = torch.einsum("bij,bjhw->bihw", _hue_rotation(u[:, 4], x), y)
    y = torch.where(each(u[:, 0]) < 0.8, y, x).clamp(0.0, 1.0)
    return torch.where(each(u[:, 5]) < 0.2, (y * grey).sum(1, keepdim=True).expand_as(y), y)


def _hue_rotation(u: Tensor, like: Tensor) -> Tensor:
    """[B, 3, 3] matrices that turn the hue by up to HUE of a full circle, either way."""
    angle = 2.0 * math.pi * HUE * (2.0 * u - 1.0)
    c, s, zero, one = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle), torch.ones_like(angle)
    turn = torch.stack(
        [torch.stack([one, zero, zero], -1), torch.stack([zero, c, -s], -1), torch.stack([zero, s, c], -1)], -2
    )
    to = torch.tensor(_YIQ, dtype=torch.float64)
    back, to = torch.linalg.inv(to).to(like), to.to(like)
    matrix: Tensor = back @ turn.to(like.dtype) @ to
    return matrix
