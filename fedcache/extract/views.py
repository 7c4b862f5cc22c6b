"""Views: seeded augmentations of an image, for methods that contrast two looks at it.

View 0 is ``resize``, the deterministic one. View v >= 1 applies, in this order,

1. a random resized crop: area share U[0.5, 1], aspect ratio log-uniform in [3/4, 4/3], resized with the recipe's
   filter to the size of the recipe (size 0: to the size of the image);
2. a horizontal flip with probability 1/2, unless a mirrored image would be another class (digits, letters);
3. with probability 0.8, colour jitter: brightness, contrast and saturation, each multiplied by U[0.6, 1.4].

The draws come from a generator keyed by sha256 of (view seed, uid of the image, v), so a view depends neither on the
order of the rows nor on the process or batch that makes it, and two runs with the same recipe store the same bytes.
Every draw is made whether or not it is used; a change of the operations, their order or their ranges changes
features: raise ``fedcache.extract.recipe.VERSION`` with it.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from fedcache.extract.images import pillow_filter, resize
from fedcache.extract.recipe import Recipe

AREA = (0.5, 1.0)
ASPECT = (3 / 4, 4 / 3)
FLIP = 0.5
JITTER = 0.8
STRENGTH = (0.6, 1.4)


def view(image: Image.Image, recipe: Recipe, uid: bytes, v: int, *, mirror: bool = True) -> NDArray[np.uint8]:
    """View ``v`` of an image.

    Args:
        image: RGB image from ``decode``.
        recipe: its preprocessing and ``view_seed``.
        uid: the 16 bytes of ``Dataset.uid`` of the row.
        v: number of the view; 0 is the deterministic one.
        mirror: a mirrored image keeps its class (``Dataset.mirror``).

    Returns:
        uint8 [S, S, 3] with S the recipe's size, or the image's own [H, W, 3] for size 0.

    Raises:
        BadImage: as ``resize``, for view 0.
    """
    if v == 0:
        return resize(image, recipe)
    draw = _generator(recipe.view_seed, uid, v)
    box = _crop_box(image.size, draw)
    size = image.size if recipe.size == 0 else (recipe.size, recipe.size)
    image = image.resize(size, pillow_filter(recipe), box=box)
    flip, jitter = draw.random(2)
    strengths = draw.uniform(*STRENGTH, size=3)
    if mirror and flip < FLIP:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if jitter < JITTER:
        for enhance, strength in zip(
            (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), strengths, strict=True
        ):
            image = enhance(image).enhance(float(strength))
    return np.array(image)


def _generator(seed: int, uid: bytes, v: int) -> np.random.Generator:
    digest = hashlib.sha256(b"fedcache view\0" + f"{seed}\0{v}\0".encode() + uid).digest()
    # PCG64 by name: numpy may change what default_rng is.
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def _crop_box(size: tuple[int, int], draw: np.random.Generator) -> tuple[int, int, int, int]:
    """(left, upper, right, lower) of a random crop; the side that does not fit is cut to the image."""
    width, height = size
    area = draw.uniform(*AREA) * width * height
    aspect = math.exp(draw.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
    # In a long image no crop has both the area and the aspect drawn: the area gives way, never the image's border.
    w = min(width, max(1, round(math.sqrt(area * aspect))))
    h = min(height, max(1, round(math.sqrt(area / aspect))))
    left, top = int(draw.random() * (width - w + 1)), int(draw.random() * (height - h + 1))
    return left, top, left + w, top + h
