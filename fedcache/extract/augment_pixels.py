"""The steps of an augmentation policy (``fedcache.extract.augment``) as they are done to the pixels of an image."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter

from fedcache.extract.augment import Step

ASPECT = (3 / 4, 4 / 3)

Box = tuple[int, int, int, int]


def crop_box(size: tuple[int, int], area: tuple[float, float], draw: np.random.Generator) -> Box:
    """(left, upper, right, lower) of a random crop; the side that does not fit is cut to the image.

    Args:
        size: width and height of the image.
        area: range of the share of the image that is drawn from.
        draw: of this view.
    """
    width, height = size
    wanted = draw.uniform(*area) * width * height
    aspect = math.exp(draw.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
    # In a long image no crop has both the area and the aspect drawn: the area gives way, never the image's border.
    w = min(width, max(1, round(math.sqrt(wanted * aspect))))
    h = min(height, max(1, round(math.sqrt(wanted / aspect))))
    left = int(draw.random() * (width - w + 1))
    top = int(draw.random() * (height - h + 1))
    return left, top, left + w, top + h


def apply_step(
    image: Image.Image, step: Step, draw: np.random.Generator, *, mirror: bool
) -> Image.Image:
    """An RGB image after one step other than ``crop``, of the same size.

    Every draw of a step is made whether or not it is used, so that what follows does not depend on chance before it.

    Args:
        image: RGB.
        step: of the policy.
        draw: of this view.
        mirror: a mirrored image keeps its class.
    """
    if step.name == "flip":
        chosen = draw.random() < step.values[0]
        if chosen and mirror:
            return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image
    return _STEPS[step.name](image, step.values, draw)


def _rotate(
    image: Image.Image, values: tuple[float, ...], draw: np.random.Generator
) -> Image.Image:
    return image.rotate(draw.uniform(-values[0], values[0]), Image.Resampling.NEAREST)


def _jitter(
    image: Image.Image, values: tuple[float, ...], draw: np.random.Generator
) -> Image.Image:
    chance, *strengths, hue = values
    chosen = draw.random() < chance
    factors = [draw.uniform(1 - s, 1 + s) for s in strengths]
    turn = 0.0
    if hue:
        turn = draw.uniform(-hue, hue)
    if not chosen:
        return image
    for enhance, factor in zip(
        (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), factors, strict=True
    ):
        image = enhance(image).enhance(float(factor))
    if hue:
        return _turned(image, turn)
    return image


def _turned(image: Image.Image, turn: float) -> Image.Image:
    """The hue turned by a share of the circle, in Pillow's HSV whose circle has 255 steps."""
    h, s, v = image.convert("HSV").split()
    moved = (np.asarray(h).astype(np.int64) + round(turn * 255)) % 256
    return Image.merge("HSV", (Image.fromarray(moved.astype(np.uint8)), s, v)).convert("RGB")


def _grey(image: Image.Image, values: tuple[float, ...], draw: np.random.Generator) -> Image.Image:
    if draw.random() < values[0]:
        return image.convert("L").convert("RGB")
    return image


def _blur(image: Image.Image, values: tuple[float, ...], draw: np.random.Generator) -> Image.Image:
    chosen = draw.random() < values[0]
    sigma = draw.uniform(values[1], values[2])
    if chosen:
        return image.filter(ImageFilter.GaussianBlur(float(sigma)))
    return image


def _gaussian_noise(
    image: Image.Image, values: tuple[float, ...], draw: np.random.Generator
) -> Image.Image:
    return _noisy(image, values, draw.standard_normal)


def _laplace_noise(
    image: Image.Image, values: tuple[float, ...], draw: np.random.Generator
) -> Image.Image:
    return _noisy(image, values, lambda shape: draw.laplace(size=shape))


def _noisy(
    image: Image.Image,
    values: tuple[float, ...],
    unit: Callable[[tuple[int, ...]], NDArray[np.float64]],
) -> Image.Image:
    scale, share = values
    x = np.asarray(image)
    moved = (1.0 - share) * x + scale * unit(x.shape)
    return Image.fromarray(np.clip(np.rint(moved), 0, 255).astype(np.uint8))


_STEPS: dict[str, Callable[[Image.Image, tuple[float, ...], np.random.Generator], Image.Image]] = {
    "rotate": _rotate,
    "jitter": _jitter,
    "grey": _grey,
    "blur": _blur,
    "gaussian-noise": _gaussian_noise,
    "laplace-noise": _laplace_noise,
}
