"""Encoded bytes to RGB pixels, pixels to the square a backbone reads, and seeded views of it.

Every image that cannot be used raises ``BadImage`` with a reason in fixed words. The reason goes into
``quarantine.jsonl``, which is byte-identical however often and wherever the extraction runs. So a reason quotes no
path, and no text of Pillow, which may hold memory addresses and changes with the version.

How an image is decoded:

* of an animation or a multi-page file, the first frame is taken;
* it is turned upright by its EXIF orientation; a broken EXIF block is ignored and does not make the image bad;
* transparent pixels (alpha channel, transparent palette entry, colour key) are composited on white;
* 16 bits per channel are cut to the high byte, gray is repeated into three channels, Pillow converts CMYK and YCbCr;
* an embedded colour profile is not applied, as in the loaders with which the published weights were trained;
* JPEG is decoded at full size: the scaled "draft" decoding is faster and gives other values.

Views are seeded augmentations of an image, for methods that contrast two views of it or train on augmented rows. View
0 is deterministic (``resize``). View v >= 1 goes through the steps of the recipe's policy
(``fedcache.extract.augment``): by default a random resized crop, a horizontal flip and colour jitter. A crop is a part
of the decoded image, resized to the size of the recipe (for size 0, to the size of the image). A policy without a crop
begins with view 0.

The draws come from a generator keyed by sha256 of (view seed, uid of the image, v). So a view depends neither on the
order of the rows nor on the process or batch that makes it, and two runs with the same recipe store the same bytes.
Every draw is made whether or not it is used.

A change of any of this changes features, so it must raise ``fedcache.extract.recipe.VERSION``.
"""

from __future__ import annotations

import hashlib
import io
import math
import threading
import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter

from fedcache.extract.augment import Step, parse_policy
from fedcache.extract.image_files import BadImage, check_file_size
from fedcache.extract.recipe import Recipe

# This section applies the steps of an augmentation policy (``fedcache.extract.augment``) to the pixels of an image.

ASPECT = (3 / 4, 4 / 3)
"""Range of the ratio of width to height of a random crop."""

Box = tuple[int, int, int, int]


def crop_box(size: tuple[int, int], area: tuple[float, float], draw: np.random.Generator) -> Box:
    """(left, upper, right, lower) of a random crop; the side that does not fit is cut to the image.

    Args:
        size: width and height of the image.
        area: range from which the share of the image's area is drawn.
        draw: generator of this view.
    """
    width, height = size
    wanted_area = draw.uniform(*area) * width * height
    narrowest, widest = ASPECT
    aspect = math.exp(draw.uniform(math.log(narrowest), math.log(widest)))
    # In a long image a crop with the drawn area and aspect may not fit. It then gets a smaller area.
    wanted_width = round(math.sqrt(wanted_area * aspect))
    wanted_height = round(math.sqrt(wanted_area / aspect))
    w = min(width, max(1, wanted_width))
    h = min(height, max(1, wanted_height))
    left = int(draw.random() * (width - w + 1))
    top = int(draw.random() * (height - h + 1))
    return left, top, left + w, top + h


def apply_step(
    image: Image.Image, step: Step, draw: np.random.Generator, *, mirror: bool
) -> Image.Image:
    """An RGB image after one step other than ``crop``, of the same size.

    Every draw of a step is made whether or not it is used, so that later steps get the same draws in any case.

    Args:
        image: RGB.
        step: of the policy.
        draw: generator of this view.
        mirror: whether a mirrored image keeps its class.
    """
    values = step.values
    match step.name:
        case "rotate":
            return image.rotate(draw.uniform(-values[0], values[0]), Image.Resampling.NEAREST)
        case "gaussian-noise":
            return _noisy(image, values, draw.standard_normal)
        case "laplace-noise":
            return _noisy(image, values, lambda shape: draw.laplace(size=shape))
    # The other steps happen with the probability ``values[0]``.
    chosen = draw.random() < values[0]
    match step.name:
        case "jitter":
            return _jittered(image, values, draw, chosen=chosen)
        case "blur":
            sigma = draw.uniform(values[1], values[2])
            if chosen:
                return image.filter(ImageFilter.GaussianBlur(float(sigma)))
        case "grey":
            if chosen:
                return image.convert("L").convert("RGB")
        case "flip":
            if chosen and mirror:
                return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def _jittered(
    image: Image.Image, values: tuple[float, ...], draw: np.random.Generator, *, chosen: bool
) -> Image.Image:
    # Probability, brightness, contrast, saturation, hue.
    _, *strengths, hue = values
    factors = [draw.uniform(1 - s, 1 + s) for s in strengths]
    turn = 0.0
    if hue:
        turn = draw.uniform(-hue, hue)
    if not chosen:
        return image
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for enhancer, factor in zip(enhancers, factors, strict=True):
        image = enhancer(image).enhance(float(factor))
    if hue:
        return _turned(image, turn)
    return image


def _turned(image: Image.Image, turn: float) -> Image.Image:
    """The image with its hue turned by a share of the circle.

    Pillow's hue is a byte. A whole turn adds 255, and sums wrap at 256.
    """
    h, s, v = image.convert("HSV").split()
    hue = (np.asarray(h).astype(np.int64) + round(turn * 255)) % 256
    turned = Image.fromarray(hue.astype(np.uint8))
    return Image.merge("HSV", (turned, s, v)).convert("RGB")


def _noisy(
    image: Image.Image,
    values: tuple[float, ...],
    unit: Callable[[tuple[int, ...]], NDArray[np.float64]],
) -> Image.Image:
    """The image with noise: ``unit`` draws noise of scale 1 in a shape, ``values`` are S and P of the step."""
    scale, share = values
    x = np.asarray(image)
    noisy = (1.0 - share) * x + scale * unit(x.shape)
    levels = np.clip(np.rint(noisy), 0, 255)
    return Image.fromarray(levels.astype(np.uint8))


MAX_PIXELS = 64_000_000
"""Limit of an image in pixels (192 MB as RGB). It is checked in the header, before the image is decoded."""

MAX_ASPECT = 100
"""Maximum ratio of an image's sides. 1 x 20000 pixels, resized to a short side of 224, would be a billion pixels."""

# An explicit list: Pillow would also start Ghostscript for EPS and try thirty formats no image dataset uses.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
# EXIF orientation -> the operation that turns the image upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112
_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


class _Quiet:
    """Silences warnings while any thread decodes.

    Pillow warns about odd metadata of images that decode well. ``warnings.catch_warnings`` saves and restores a
    global list. If two threads use it on their own, they can restore the list in the wrong order, and warnings stay
    silenced. Here the first thread that enters saves the list, and the last one that leaves restores it.
    """

    _lock = threading.Lock()
    _inside = 0
    _saved = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._saved = warnings.catch_warnings()
                self._saved.__enter__()
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._saved.__exit__(None, None, None)


quiet = _Quiet()
"""``with quiet:`` silences warnings, also when threads overlap."""


def decode(raw: bytes | NDArray[np.uint8]) -> Image.Image:
    """The RGB image in ``raw``: a loaded Pillow image, upright, as the module docstring says.

    Args:
        raw: the bytes of an image file, or pixels as uint8 [H, W] (gray) or [H, W, 3].

    Raises:
        BadImage: empty, too large, truncated, corrupt, not an image, or of a kind that has no 8-bit RGB meaning.
    """
    if isinstance(raw, np.ndarray):
        return _from_array(raw)
    if not raw:
        raise BadImage("the file is empty")
    check_file_size(len(raw))
    with quiet:
        return _from_bytes(raw)


def _from_array(raw: NDArray[np.uint8]) -> Image.Image:
    is_gray = raw.ndim == 2
    is_rgb = raw.ndim == 3 and raw.shape[2] == 3
    if raw.dtype != np.uint8 or 0 in raw.shape or not (is_gray or is_rgb):
        raise BadImage(
            f"the array is {raw.dtype} {list(raw.shape)}; expected uint8 [H, W] or [H, W, 3]"
        )
    _check_size(raw.shape[1], raw.shape[0])
    return Image.fromarray(np.ascontiguousarray(raw)).convert("RGB")


def _from_bytes(raw: bytes) -> Image.Image:
    try:
        image: Image.Image = Image.open(io.BytesIO(raw), formats=_FORMATS)
    except Image.DecompressionBombError:
        # Pillow's own limit is above ``MAX_PIXELS``, so the image exceeds both. Its exact size is not known here.
        raise BadImage(f"the image has more than {MAX_PIXELS:,} pixels") from None
    except MemoryError:
        raise  # the machine's fault, not the image's
    except Exception:
        # The reason does not quote the file: it may contain anything, and the list of bad images may be shared.
        raise BadImage("it has no image format fedcache reads") from None
    _check_size(*image.size)
    kind = image.format or "image"  # lost by the conversions below
    try:
        image.load()
    except MemoryError:
        raise  # as above
    except Exception:
        # Pillow raises anything from OSError and SyntaxError to struct.error and IndexError on broken data.
        raise BadImage(f"the {kind} data is truncated or corrupt") from None
    image = _upright(image)
    try:
        return _to_rgb(image)
    except (ValueError, OSError):
        raise BadImage(f"a {kind} image of mode {image.mode} cannot be converted to RGB") from None


def from_pillow(image: Image.Image) -> Image.Image:
    """A Pillow image as ``decode`` makes it of its file: upright, RGB, transparency on white. Raises BadImage."""
    _check_size(*image.size)
    with quiet:
        try:
            return _to_rgb(_upright(image))
        except (ValueError, OSError):
            raise BadImage(f"an image of mode {image.mode} cannot be converted to RGB") from None


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise BadImage(f"the image is {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise BadImage(
            f"the image is {width} x {height} pixels; the limit is {MAX_PIXELS:,} pixels"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise BadImage(
            f"the image is {width} x {height} pixels; sides may differ by a factor of at most {MAX_ASPECT}"
        )


def _upright(image: Image.Image) -> Image.Image:
    try:
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:
        return image  # a broken EXIF block is ignored
    if turn is None:
        return image
    return image.transpose(turn)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise BadImage("a floating-point image has no defined 8-bit range")
    if image.mode.startswith("I"):
        # Pillow opens 16-bit gray in mode "I;16" from PNG and TIFF, but in mode "I" from PGM. An image of mode "I" may
        # also have 32 bits, which have no defined range.
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise BadImage("a 32-bit integer image has no defined 8-bit range")
        high_bytes = (values.astype(np.uint16) >> 8).astype(np.uint8)
        image = Image.fromarray(high_bytes)
    elif image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        over = image.convert("RGBA")
        white = Image.new("RGBA", over.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, over)
    return image.convert("RGB")


def resize(image: Image.Image, recipe: Recipe) -> NDArray[np.uint8]:
    """The square of pixels a backbone reads: uint8 [S, S, 3] of a recipe's size S, or [H, W, 3] for size 0.

    ``crop`` resizes the short side to ``round(size / crop_pct)``, keeping the aspect ratio (the long side is rounded
    down), and cuts out the centre; ``squash`` resizes both sides. Pillow's filters widen with the reduction, so there
    is no aliasing. Offsets round half to even, as torchvision's ``CenterCrop`` does.

    Raises:
        BadImage: the resized image would exceed ``MAX_PIXELS``.
    """
    size = recipe.size
    if size == 0:
        return np.array(image)
    kernel = _FILTERS[recipe.interpolation]
    if recipe.resize == "squash":
        return np.array(image.resize((size, size), kernel))
    short = max(size, round(size / recipe.crop_pct))
    width, height = image.size
    new_width = short
    new_height = short
    if width <= height:
        new_height = int(short * height / width)
    else:
        new_width = int(short * width / height)
    if new_width * new_height > MAX_PIXELS:
        raise BadImage(
            f"the image is {width} x {height} pixels and would be resized to {new_width} x {new_height}; "
            f"the limit is {MAX_PIXELS:,} pixels"
        )
    left = round((new_width - size) / 2)
    top = round((new_height - size) / 2)
    resized = image.resize((new_width, new_height), kernel)
    return np.array(resized.crop((left, top, left + size, top + size)))


def view(
    image: Image.Image, recipe: Recipe, uid: bytes, v: int, *, mirror: bool = True
) -> NDArray[np.uint8]:
    """View ``v`` of an image from ``decode``: uint8 [S, S, 3] of the recipe's size S, or [H, W, 3] for size 0.

    Args:
        image: RGB image.
        recipe: its preprocessing, ``augment`` and ``view_seed``.
        uid: the 16 bytes of ``Dataset.uid`` of the row.
        v: number of the view; 0 is the deterministic one, which raises as ``resize``.
        mirror: whether a mirrored image keeps its class (``Dataset.mirror``).
    """
    if v == 0:
        return resize(image, recipe)
    key = b"fedcache view\0" + f"{recipe.view_seed}\0{v}\0".encode() + uid
    digest = hashlib.sha256(key).digest()
    seed = int.from_bytes(digest[:16], "little")
    # PCG64 is named, because numpy may change the generator of default_rng.
    draw = np.random.Generator(np.random.PCG64(seed))
    steps = parse_policy(recipe.augment)
    if steps[0].name == "crop":
        low, high = steps[0].values
        box = crop_box(image.size, (low, high), draw)
        size = image.size
        if recipe.size != 0:
            size = (recipe.size, recipe.size)
        made = image.resize(size, _FILTERS[recipe.interpolation], box=box)
        steps = steps[1:]
    else:
        made = Image.fromarray(resize(image, recipe))
    for step in steps:
        made = apply_step(made, step, draw, mirror=mirror)
    return np.array(made)
