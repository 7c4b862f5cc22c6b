"""Characters drawn from fonts, and the seeded distortions that make them look written, printed or painted.

Used by ``train_glyph_clip.py``. Glyphs are rendered once into a uint8 array; every training image is then made from it
with a few torch operations on the whole batch, so drawing costs less than the training step it feeds.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
# A glyph's box is INK wide or high on a CANVAS; the network sees SIDE pixels.
CANVAS = 48
INK = 40
SIDE = 32

# matplotlib bundles DejaVu, STIX and Knuth's Computer Modern (cmr10, cmtt10, ...), so a test domain is drawn with them.
# DejaVu was drawn from Vera; CMU and Latin Modern are Computer Modern in another format.
FORBIDDEN = re.compile(
    r"dejavu|vera|stix|computer modern|cm[a-z]{1,3}\d|cmu|latin modern|lm(roman|sans|mono|math)",
    re.I,
)
SKIPPED = {
    "D050000L": "dingbats in the place of letters",
    "Standard Symbols PS": "Greek in the place of letters",
    # Different drawings of Times, but their digits differ from STIX's by as little as two weights of one family do.
    "Nimbus Roman": "its digits are STIX's",
    "TeX Gyre Termes": "its digits are STIX's",
    "Tinos": "its digits are STIX's",
}


class ForbiddenFontError(Exception):
    """A font of a family that a test domain is drawn with."""


@dataclass(frozen=True)
class Glyphs:
    """Every character of every font, rendered.

    Attributes:
        ink: uint8 [F, 62, 48, 48], as the font draws it.
        bones: uint8 [F, 62, 48, 48], its centre line, one pixel wide.
        present: bool [F, 62], whether the font has the character.
        family: int64 [F].
        names: file names of the fonts.
    """

    ink: Tensor
    bones: Tensor
    present: Tensor
    family: Tensor
    names: tuple[str, ...]

    def take(self, fonts: Tensor) -> Glyphs:
        """The fonts where the mask [F] is true."""
        names = tuple(name for name, kept in zip(self.names, fonts.tolist(), strict=True) if kept)
        return Glyphs(
            self.ink[fonts], self.bones[fonts], self.present[fonts], self.family[fonts], names
        )


def check_family(family: str, name: str) -> None:
    """Refuse a font of a forbidden family.

    Raises:
        ForbiddenFontError: its family or file name matches ``FORBIDDEN``.
    """
    if FORBIDDEN.search(family) or FORBIDDEN.search(name):
        raise ForbiddenFontError(
            f"{name} is of the family {family!r}. The model must never see DejaVu, STIX or Computer Modern: "
            "the test domain `synth` is drawn with them. Leave that font out."
        )


def render(paths: Sequence[Path]) -> Glyphs:
    """Draw the 62 characters of each font, scaled to one box and centred; fonts that lack a digit are left out."""
    ink = []
    present = []
    families = []
    names = []
    for path in sorted(paths, key=lambda p: (p.name, str(p))):
        font = ImageFont.truetype(str(path), 96, layout_engine=ImageFont.Layout.BASIC)
        family = str(font.getname()[0])
        check_family(family, path.name)
        if family in SKIPPED:
            continue
        missing = _stamp(font, "\uffff")
        drawn = [_stamp(font, c) for c in CHARACTERS]
        has = [glyph is not None and not _same(glyph, missing) for glyph in drawn]
        if not all(has[:10]):
            continue
        blank = np.zeros((CANVAS, CANVAS), np.uint8)
        ink.append(np.stack([blank if glyph is None else glyph for glyph in drawn]))
        present.append(has)
        families.append(family)
        names.append(path.name)
    known = sorted(set(families))
    pixels = torch.from_numpy(np.stack(ink))
    return Glyphs(
        pixels,
        thin(pixels.flatten(0, 1) > 127).view_as(pixels),
        torch.tensor(present),
        torch.tensor([known.index(f) for f in families]),
        tuple(names),
    )


def _stamp(font: ImageFont.FreeTypeFont, text: str) -> NDArray[np.uint8] | None:
    sheet = Image.new("L", (288, 288))
    ImageDraw.Draw(sheet).text((96, 96), text, fill=255, font=font)
    box = sheet.getbbox()
    if box is None:
        return None
    cut = sheet.crop(box)
    scale = INK / max(cut.size)
    small = cut.resize(
        (max(1, round(cut.width * scale)), max(1, round(cut.height * scale))), Image.Resampling.BOX
    )
    canvas = Image.new("L", (CANVAS, CANVAS))
    canvas.paste(small, ((CANVAS - small.width) // 2, (CANVAS - small.height) // 2))
    return np.asarray(canvas)


def _same(glyph: NDArray[np.uint8], other: NDArray[np.uint8] | None) -> bool:
    return other is not None and np.array_equal(glyph, other)


def thin(shape: Tensor) -> Tensor:
    """Centre lines of shapes (Zhang and Suen, 1984): uint8 [N, H, W], 255 on the line, from bool [N, H, W].

    A written stroke has one width everywhere; a printed one does not. Centre lines redrawn with a pen are what lets a
    model that only saw fonts read handwriting.
    """
    # Small groups stay in the processor's cache and stop as soon as their own glyphs are done.
    return torch.cat([_thin(part) for part in shape.split(256)]).to(torch.uint8) * 255


def _thin(now: Tensor) -> Tensor:
    height, width = now.shape[1:]
    while True:
        before = now
        for first in (True, False):
            p = F.pad(now.to(torch.uint8), (1, 1, 1, 1))
            # The eight neighbours, clockwise from north.
            ring = [
                p[:, 1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width]
                for dy, dx in ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))
            ]
            count = torch.zeros_like(ring[0])
            turns = torch.zeros_like(ring[0])
            for one, following in zip(ring, ring[1:] + ring[:1], strict=True):
                count += one
                turns += (1 - one) * following
            n, e, s, w = ring[::2]
            kept = (n * e * s + e * s * w) if first else (n * e * w + n * s * w)
            now = now & ~((count >= 2) & (count <= 6) & (turns == 1) & (kept == 0))
        if torch.equal(now, before):
            return now


class Artist:
    """Draws batches of distorted characters from one seeded stream.

    Args:
        glyphs: what to draw.
        generator: the only source of randomness.
    """

    def __init__(self, glyphs: Glyphs, generator: torch.Generator) -> None:
        self.glyphs = glyphs
        self.generator = generator
        # Families are drawn equally often: eighteen weights of Lato must not outvote one person's handwriting.
        self._fonts = 1.0 / torch.bincount(glyphs.family)[glyphs.family].float()

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(shape).uniform_(low, high, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def batch(self, size: int, colour: float = 1.0) -> tuple[Tensor, Tensor]:
        """[size, 3, 32, 32] images on [0, 1] and [size] indices into ``CHARACTERS``; half of them are digits.

        Args:
            size: number of images.
            colour: 0 for gray on gray only, 1 for the full share of colours and clutter.
        """
        fonts = torch.multinomial(self._fonts, size, replacement=True, generator=self.generator)
        odds = self.glyphs.present[fonts].float()
        odds[:, :10] *= 5.2  # 62 characters, 52 of them letters
        label = torch.multinomial(odds, 1, generator=self.generator)[:, 0]
        mask = self._stroke(fonts, label)
        mask, label = self._shuffle(mask, label)
        mask = self._warp(mask)
        mask = self._coarsen(mask)
        return self._paint(mask, colour), label

    def _shuffle(self, mask: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        # The steps treat slices of the batch differently; a new order makes their choices independent.
        order = torch.randperm(len(label), generator=self.generator)
        return mask[order], label[order]

    def _stroke(self, fonts: Tensor, label: Tensor) -> Tensor:
        """Half as printed, thinner or bolder; half redrawn along the centre line with a pen of one width."""
        half = len(fonts) // 2
        printed = self.glyphs.ink[fonts[:half], label[:half]].float()[:, None] / 255
        bold = F.max_pool2d(printed, 3, 1, 1)
        light = -F.max_pool2d(-printed, 3, 1, 1)
        much = self.uniform(-1, 1.5, half, 1, 1, 1)
        printed = torch.where(
            much > 0,
            printed + much.clamp(max=1) * (bold - printed),
            printed - much * (light - printed),
        )
        bones = self.glyphs.bones[fonts[half:], label[half:]].float()[:, None] / 255
        pens = [bones]
        for _ in range(3):
            # A cross then a square grows an octagon, close enough to a round tip.
            grown = F.max_pool2d(pens[-1], 3, 1, 1)
            cross = torch.maximum(
                F.max_pool2d(pens[-1], (3, 1), 1, (1, 0)), F.max_pool2d(pens[-1], (1, 3), 1, (0, 1))
            )
            pens.append(cross if len(pens) % 2 else grown)
        stack = torch.cat(pens, 1)
        width = self.uniform(0.7, 3, len(bones))
        low = width.long().clamp(max=2)
        rows = torch.arange(len(bones))
        part = (width - low)[:, None, None]
        written = stack[rows, low] * (1 - part) + stack[rows, low + 1] * part
        return torch.cat([printed, written[:, None]])

    def _warp(self, mask: Tensor) -> Tensor:
        """Scale, aspect, shear, turn, shift and bend; [B, 1, 48, 48] to [B, 1, 32, 32]."""
        size = len(mask)
        extent = self.uniform(0.5, 1.05, size)  # of the ink in the frame
        zoom = (INK / CANVAS) / extent
        aspect = torch.exp(0.18 * self.normal(size))
        angle = self.normal(size) * 0.2
        slant = self.normal(size) * 0.25
        cos = torch.cos(angle)
        sin = torch.sin(angle)
        xx = zoom * aspect * cos
        xy = zoom * aspect * (-sin + slant * cos)
        yx = zoom * sin
        yy = zoom * (cos + slant * sin)
        dx, dy = (self.normal(size) * 0.1 for _ in range(2))
        theta = torch.stack([torch.stack([xx, xy, dx], 1), torch.stack([yx, yy, dy], 1)], 1)
        grid = F.affine_grid(theta, [size, 1, SIDE, SIDE], align_corners=False)
        bend = self._bend(size, 4, 0.12) + self._bend(size, 8, 0.05)
        grid = grid + bend.permute(0, 2, 3, 1)
        return F.grid_sample(mask, grid, mode="bilinear", align_corners=False)

    def _bend(self, size: int, cells: int, most: float) -> Tensor:
        """Smooth random shifts [B, 2, 32, 32] from ``cells`` x ``cells`` draws, whose deviation is up to ``most``."""
        shift = self.normal(size, 2, cells, cells) * self.uniform(0, most, size, 1, 1, 1)
        return F.interpolate(shift, SIDE, mode="bicubic", align_corners=True)

    def _coarsen(self, mask: Tensor) -> Tensor:
        """Some images come from few pixels: 8 x 8 scans, 16 x 16 and 28 x 28 thumbnails, enlarged."""
        order = torch.randperm(len(mask), generator=self.generator)
        share = len(mask) // 16
        done = 0
        for side, shares in ((8, 3), (10, 1), (14, 1), (20, 2), (28, 3)):
            rows = order[done : done + share * shares]
            done += share * shares
            small = F.interpolate(mask[rows], side, mode="bilinear", antialias=True)
            mask[rows] = F.interpolate(small, SIDE, mode="bicubic", align_corners=False)
        gain = self.uniform(0.8, 1.6, len(mask), 1, 1, 1)
        return (mask * gain).clamp(0, 1)

    def _paint(self, mask: Tensor, colour: float) -> Tensor:
        """Gray or coloured ink on plain or cluttered grounds, either polarity, or the difference to a photograph-like
        texture.
        """
        size = len(mask)
        kind = self.uniform(0, 0.4 + 0.6 * colour, size, 1, 1, 1)
        plain = kind < 0.4
        coloured = kind < 0.6
        mixed = kind > 0.8
        dark = self.uniform(0, 0.15, size, 1, 1, 1)
        bright = self.uniform(0.6, 1, size, 1, 1, 1)
        swap = self.uniform(0, 1, size, 1, 1, 1) < 0.35
        ground = torch.where(swap, bright, dark).expand(-1, 3, -1, -1)
        ink = torch.where(swap, dark, bright).expand(-1, 3, -1, -1)
        one = self.uniform(0, 1, size, 3, 1, 1)
        two = self.uniform(0, 1, size, 3, 1, 1)
        luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
        near = (luma * (one - two)).sum(1, keepdim=True).abs() < 0.25
        two = torch.where(
            near,
            torch.where((luma * one).sum(1, keepdim=True) > 0.5, two * 0.2, 1 - two * 0.2),
            two,
        )
        texture = self._texture(size)
        beside = self._beside(mask)
        back = two + 0.35 * texture
        back = back + beside * (one - back)
        scene = back + mask * (one - back)
        flat = torch.where(plain, ground + mask * (ink - ground), two + mask * (one - two))
        photo = (0.45 + 0.15 * self.normal(size, 3, 1, 1) + texture).clamp(0, 1)
        image = torch.where(coloured, flat, torch.where(mixed, (photo - mask).abs(), scene))
        noise = self.normal(*image.shape) * self.uniform(-0.05, 0.1, size, 1, 1, 1).clamp(min=0)
        return (image + noise).clamp(0, 1)

    def _texture(self, size: int) -> Tensor:
        total = torch.zeros(size, 3, SIDE, SIDE)
        for cells, strength in ((3, 0.35), (7, 0.25), (16, 0.15)):
            noise = self.normal(size, 1, cells, cells) + 0.5 * self.normal(size, 3, cells, cells)
            noise = noise * self.uniform(0, strength, size, 1, 1, 1)
            total = total + F.interpolate(noise, SIDE, mode="bicubic", align_corners=False)
        return total

    def _beside(self, mask: Tensor) -> Tensor:
        """The cut neighbours of half of the characters."""
        other = mask.roll(1, 0)
        quarter = len(mask) // 4
        order = torch.randperm(len(mask), generator=self.generator)
        side = torch.zeros_like(mask)
        right, left = order[:quarter], order[quarter : 2 * quarter]
        side[right] = F.pad(other[right], (19, 0))[..., :SIDE]
        side[left] = F.pad(other[left], (0, 19))[..., -SIDE:]
        return side
