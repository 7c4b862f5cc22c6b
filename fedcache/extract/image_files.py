"""Which files are taken for images and how large they may be; the error of an image that cannot be used.

Apart from ``images``, which decodes them with Pillow: a dataset is found and numbered without it.
"""

from __future__ import annotations

MAX_BYTES = 64 << 20
"""Largest encoded image that is read, in bytes."""

EXTENSIONS = frozenset(
    [".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"]
)  # fmt: skip
"""File names that are taken for images (lower case)."""


class BadImage(Exception):  # noqa: N818 - the word of the design: a bad image is quarantined, not an error of the run
    """An image that cannot be used; the message is the reason, in words that are the same on every machine."""
