"""Live augmentation of images: crop, flip, colour jitter, grey and blur, drawn as torchvision's transforms draw them.

A view is a function of (image, draws, policy) alone: the same draws give the same view on every execution and machine.
Each step is torchvision's on tensors: windows of whole pixels, bilinear resizing inside the window, the four colour
steps in a drawn order for each image, with values clipped after each step, and hue as an angle of HSV. The blur is a
Gaussian of its nominal width, which Pillow's three box filters approximate. The released FLESD code flips last, which
gives the same view, because a flip commutes with the other steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

Crop = Literal["none", "resized", "padded"]
Step = Callable[[Tensor, Tensor], Tensor]

TRIES = 10
"""Number of windows that a resized crop tries before it takes the largest centred one."""

ASPECT = (3 / 4, 4 / 3)
"""Smallest and largest ratio of width to height of a resized crop's window."""
JITTERED = 0.8
"""Share of the views whose colours are jittered."""

MARGIN = 4
"""Width of the black border from which a padded crop may take pixels."""

GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a grey value."""
SIGMA = (0.1, 2.0)
"""Smallest and largest standard deviation of a blur, in pixels."""
RADIUS = 6
"""Pixels that a blur reads on each side: three times its largest sigma."""

# Places of the draws of one view. The draw at ``_GATE`` decides whether the colours are jittered.
_AREA = slice(0, TRIES)
_SHAPE = slice(TRIES, 2 * TRIES)
_X, _Y, _FLIP, _GATE = range(2 * TRIES, 2 * TRIES + 4)
_FACTOR = slice(_GATE + 1, _GATE + 5)
_ORDER = slice(_GATE + 5, _GATE + 9)
_GREYED, _BLURRED, _WIDTH = range(_GATE + 9, _GATE + 12)

DRAWS = _WIDTH + 1
"""Number of uniform draws for one view of one image. Every policy uses this number, so policies share their draws."""


@dataclass(frozen=True)
class Policy:
    """How views are drawn.

    Attributes:
        crop: none; resized: a window of a drawn area and shape, enlarged to the image's size; padded: a window of the
            image's size, moved by up to ``MARGIN`` pixels over a black margin.
        area: smallest share of the image that a resized crop shows.
        flip: whether half of the views are mirrored; letters and digits must not be mirrored.
        jitter: strength of brightness, contrast and saturation: factors from max(0, 1 - s) to 1 + s.
        hue: largest turn of the hue either way, in circles.
        grey: share of views without colour.
        blur: share of views blurred by a Gaussian of 0.1 to 2 pixels.
    """

    crop: Crop = "none"
    area: float = 0.2
    flip: bool = True
    jitter: float = 0.0
    hue: float = 0.0
    grey: float = 0.0
    blur: float = 0.0


def augment(images: Tensor, u: Tensor, policy: Policy) -> Tensor:
    """One view of each image.

    Args:
        images: [B, 3, H, W] in [0, 1].
        u: [B, DRAWS] uniform in [0, 1].
        policy: how views are drawn.

    Returns:
        [B, 3, H, W] in [0, 1].
    """
    x = images
    if policy.crop == "resized":
        windows = _windows(u, policy.area, x.shape[-2], x.shape[-1])
        x = _resized(x, *windows)
    elif policy.crop == "padded":
        x = _padded(x, u)
    if policy.flip:
        mirrored = _each(u[:, _FLIP]) < 0.5
        x = torch.where(mirrored, x.flip(-1), x)
    if policy.jitter or policy.hue:
        x = _jittered(x, u, policy)
    if policy.grey:
        greyed = _each(u[:, _GREYED]) < policy.grey
        x = torch.where(greyed, _grey(x).expand_as(x), x)
    if policy.blur:
        blurred = u[:, _BLURRED] < policy.blur
        x = _on_some(blurred, x, lambda y, rows: _blurred(y, u[rows, _WIDTH]))
    return x


def _each(values: Tensor) -> Tensor:
    """One number of each image [B], shaped to scale images [B, 3, H, W]."""
    return values.view(-1, 1, 1, 1)


def _on_some(chosen: Tensor, x: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """All images: the chosen ones as ``change(images, rows)`` makes them, the others as they are."""
    rows = chosen.nonzero().squeeze(1)
    if len(rows):
        return x.index_copy(0, rows, change(x[rows], rows))
    return x


def _windows(
    u: Tensor, least: float, height: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, left, height and width [B] of each image's window, in whole pixels: the first of ``TRIES`` that fits."""
    u = u.double()
    # Areas and aspect ratios of ``TRIES`` windows [B, TRIES]; aspects are uniform in the logarithm.
    area = height * width * (least + (1.0 - least) * u[:, _AREA])
    low, high = (math.log(a) for a in ASPECT)
    aspect = torch.exp(low + (high - low) * u[:, _SHAPE])
    w = torch.sqrt(area * aspect).round()
    h = torch.sqrt(area / aspect).round()
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    # The first window that fits; where none does, the largest centred window within the limits of the aspect ratio.
    first = fits.int().argmax(-1, keepdim=True)
    none_fits = ~fits.any(-1)
    widest = float(min(width, round(height * ASPECT[1])))
    tallest = float(min(height, round(width / ASPECT[0])))
    w = torch.where(none_fits, widest, w.gather(-1, first).squeeze(-1))
    h = torch.where(none_fits, tallest, h.gather(-1, first).squeeze(-1))

    def start(at: Tensor, size: Tensor, whole: int) -> Tensor:
        room = whole - size
        drawn = (at * (room + 1)).floor().clamp(max=room)
        return torch.where(none_fits, (room / 2).round(), drawn).long()

    top = start(u[:, _Y], h, height)
    left = start(u[:, _X], w, width)
    return top, left, h.long(), w.long()


def _resized(x: Tensor, top: Tensor, left: Tensor, h: Tensor, w: Tensor) -> Tensor:
    """The windows, enlarged bilinearly to the size of the images; pixels next to a window are not read."""
    for axis, start, size in ((2, top, h), (3, left, w)):
        out = x.shape[axis]
        # Where the middle of each pixel of the view is in the window, [B, out].
        scale = (size.double() / out).unsqueeze(1)
        middle = torch.arange(out, device=x.device) + 0.5
        at = (middle * scale - 0.5).clamp(min=0.0)
        last = (size - 1).unsqueeze(1)
        low = at.long().minimum(last)
        high = (low + 1).minimum(last)
        share = (at - low).to(x.dtype)
        # Linear interpolation between the pixels on both sides, along this axis alone.
        start = start.unsqueeze(1)
        near = _take(x, axis, start + low)
        far = _take(x, axis, start + high)
        x = torch.lerp(near, far, _along(x, axis, share))
    return x


def _along(x: Tensor, axis: int, values: Tensor) -> Tensor:
    """Numbers [B, n], one for each image and place along an axis, reshaped to the axes of images x."""
    shape = [len(x), 1, 1, 1]
    shape[axis] = values.shape[1]
    return values.reshape(shape)


def _take(x: Tensor, axis: int, places: Tensor) -> Tensor:
    """The pixels at each image's own places [B, n] along an axis."""
    shape = list(x.shape)
    shape[axis] = places.shape[1]
    return x.gather(axis, _along(x, axis, places).expand(shape))


def _padded(x: Tensor, u: Tensor) -> Tensor:
    """A window of each image with a black margin, as large as the image."""
    for axis, draw in ((2, u[:, _Y]), (3, u[:, _X])):
        wide = _with_border(x, axis, MARGIN, "constant")
        # One of 2 MARGIN + 1 windows of the old size along this axis.
        start = (draw * (2 * MARGIN + 1)).long().clamp(max=2 * MARGIN)
        offsets = torch.arange(x.shape[axis], device=x.device)
        x = _take(wide, axis, start.unsqueeze(1) + offsets)
    return x


def _with_border(x: Tensor, axis: int, width: int, mode: str) -> Tensor:
    """Images with ``width`` more pixels at both ends of an axis."""
    amounts = (width, width, 0, 0)  # pad counts axes from the last
    if axis == 2:
        amounts = (0, 0, width, width)
    return pad(x, amounts, mode=mode)


def _grey(x: Tensor) -> Tensor:
    weight = x.new_tensor(GREY).view(1, 3, 1, 1)
    return (x * weight).sum(1, keepdim=True)


def _brightened(x: Tensor, factor: Tensor) -> Tensor:
    return (x * factor).clamp(0.0, 1.0)


def _contrasted(x: Tensor, factor: Tensor) -> Tensor:
    mean = _grey(x).mean((-2, -1), keepdim=True)
    return torch.lerp(mean, x, factor).clamp(0.0, 1.0)


def _saturated(x: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(_grey(x), x, factor).clamp(0.0, 1.0)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """The hue of HSV moved by ``turn`` circles. The brightest value of each pixel and its spread do not change."""
    # Hue in sixths of a circle, by which channel is brightest; ``safe`` spares grey pixels a division by 0.
    high = x.amax(1, keepdim=True)
    spread = high - x.amin(1, keepdim=True)
    safe = torch.where(spread > 0, spread, 1.0)
    r, g, b = x.tensor_split(3, 1)
    not_red = torch.where(high == g, 2.0 + (b - r) / safe, 4.0 + (r - g) / safe)
    hue = torch.where(high == r, (g - b) / safe, not_red)
    # Back to RGB: each channel falls from ``high`` by a trapezoid of its distance to the turned hue.
    offset = x.new_tensor([5.0, 3.0, 1.0]).view(1, 3, 1, 1)
    k = (hue + 6.0 * turn + offset) % 6.0
    fall = torch.minimum(k, 4.0 - k).clamp(0.0, 1.0)
    return high - spread * fall


def _jittered(x: Tensor, u: Tensor, policy: Policy) -> Tensor:
    """Brightness, contrast, saturation and hue, in the order of each image's own draws."""
    least = max(0.0, 1.0 - policy.jitter)
    most = 1.0 + policy.jitter
    steps: tuple[Step, ...] = (_brightened, _contrasted, _saturated, _turned)
    active = []
    if policy.jitter:
        active = [0, 1, 2]
    if policy.hue:
        active.append(3)

    def all_steps(y: Tensor, rows: Tensor) -> Tensor:
        drawn = u[rows, _FACTOR]
        order = u[rows, _ORDER].argsort(-1)
        strength = least + (most - least) * drawn[:, :3]
        turned = policy.hue * (2.0 * drawn[:, 3:] - 1.0)
        factor = torch.cat([strength, turned], 1)
        # Each image has its own order of the four steps. At each place of the order, images of equal step are grouped.
        for place in range(4):
            for k in active:
                some = (order[:, place] == k).nonzero().squeeze(1)
                if len(some):
                    amount = _each(factor[some, k]).to(y.dtype)
                    y = y.index_copy(0, some, steps[k](y[some], amount))
        return y

    return _on_some(u[:, _GATE] < JITTERED, x, all_steps)


def _blurred(x: Tensor, u: Tensor) -> Tensor:
    """Images under a Gaussian blur, each with its own width; pixels beyond the border repeat the border."""
    sigma = (SIGMA[0] + (SIGMA[1] - SIGMA[0]) * u).unsqueeze(1)
    distance = torch.arange(-RADIUS, RADIUS + 1, device=x.device, dtype=u.dtype)
    weight = torch.exp(-0.5 * (distance / sigma) ** 2)
    weight = (weight / weight.sum(1, keepdim=True)).to(x.dtype)
    for axis in (2, 3):
        wide = _with_border(x, axis, RADIUS, "replicate")
        # A Gaussian is separable: one sum of shifted copies along each axis.
        size = x.shape[axis]
        total = torch.zeros_like(x)
        for k in range(2 * RADIUS + 1):
            total.addcmul_(wide.narrow(axis, k, size), _each(weight[:, k]))
        x = total.clamp(0.0, 1.0)
    return x
