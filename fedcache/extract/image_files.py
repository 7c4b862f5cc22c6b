"""Image files: recognised suffixes, the largest size, and the error for an image that cannot be used.

``images`` decodes the files. This module is separate, because a dataset is found and numbered without Pillow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedcache.errors import shell_word
from fedcache.tables.foreign_files import conversion

MAX_BYTES = 64 << 20
"""Limit in bytes for an encoded image."""

EXTENSIONS = frozenset(
    [
        ".bmp",
        ".gif",
        ".jfif",
        ".jpe",
        ".jpeg",
        ".jpg",
        ".pbm",
        ".pgm",
        ".png",
        ".pnm",
        ".ppm",
        ".tif",
        ".tiff",
        ".webp",
    ]
)
"""Endings (lower case) of files that are read as images."""


SOUND_ENDINGS = frozenset([".flac", ".wav"])
"""Endings (lower case) of files that are read as sounds."""

OTHER_FORMATS = {
    **dict.fromkeys((".heic", ".heif", ".hif"), "HEIC"),
    ".avif": "AVIF",
    **dict.fromkeys((".jp2", ".j2k", ".jpx", ".jpf", ".j2c"), "JPEG 2000"),
    ".tga": "TGA",
    ".jxl": "JPEG XL",
    **dict.fromkeys((".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"), "camera raw"),
    **dict.fromkeys((".dcm", ".dicom"), "DICOM"),
    **dict.fromkeys((".nii", ".svs", ".ndpi", ".mrxs"), "medical image"),
    ".svg": "SVG",
    ".psd": "PSD",
    "": "file without an ending",
}
"""Ending (lower case) of files that are not read -> the name of their format."""

TABLES = frozenset([".csv", ".tsv", ".jsonl", ".json", ".parquet", ".xlsx"])
"""Endings of tables, which may contain the labels of images."""

PLUGINS = {
    "HEIC": ("pillow_heif", "pillow_heif.register_heif_opener()  # pip install pillow-heif"),
    "JPEG XL": ("pillow_jxl", "# pip install pillow-jxl-plugin"),
}
"""Format -> module with which Pillow can open it, and the line of Python that registers this module."""

# Formats that Pillow can convert, some of them with a module of ``PLUGINS``.
_BY_PILLOW = ("AVIF", "HEIC", "JPEG 2000", "JPEG XL", "PSD", "TGA")
# Formats that Pillow cannot convert -> advice.
_OTHER_TOOLS = {
    "camera raw": "export as JPEG or PNG",
    "DICOM": "convert to PNG with pydicom, which also scales the values",
    "medical image": "cut into PNG tiles or slices",
    "SVG": "draw as PNG",
}


def to_convert(kind: str) -> str:
    """Advice on files of a format that is not read, in brackets; "" for other files."""
    if kind in _BY_PILLOW:
        return " (convert to PNG)"
    if kind == OTHER_FORMATS[""]:
        return " (images need an ending such as .png or .jpg)"
    if kind in _OTHER_TOOLS:
        return f" ({_OTHER_TOOLS[kind]})"
    return ""


def how_to_convert(path: Path, ignored: Mapping[str, int]) -> str:
    """The hint for a folder without images that are read: lines that convert its files; "" where none would help."""
    kinds = [kind for kind in _BY_PILLOW if ignored.get(kind)]
    without_ending = OTHER_FORMATS[""]
    following = f"fedcache datasets info folder:{shell_word(path)}"
    if kinds and not path.is_dir():
        return f"Unpack {path}, convert its files to PNG, and give the folder."
    if kinds:
        endings = sorted(ending for ending, kind in OTHER_FORMATS.items() if kind in kinds)
        plugins = [PLUGINS[kind] for kind in kinds if kind in PLUGINS]
        lines = [
            "import pathlib",
            "from PIL import Image, ImageOps",
            *(f"import {module}; {line}" for module, line in plugins),
            f"for file in [f for f in pathlib.Path({str(path)!r}).rglob('*') if f.suffix.lower() in {endings}]:",
            "    image = ImageOps.exif_transpose(Image.open(file)).convert('RGB')",
            "    image.save(file.with_suffix('.png'))",
        ]
        return conversion(lines, following)
    if ignored.get(without_ending) and path.is_dir():
        lines = [
            "import pathlib",
            "from PIL import Image, UnidentifiedImageError",
            f"for file in [f for f in pathlib.Path({str(path)!r}).rglob('*') if f.is_file() and not f.suffix]:",
            "    try: file.rename(file.with_suffix('.' + Image.open(file).format.lower()))",
            "    except UnidentifiedImageError: pass  # no image",
        ]
        return conversion(lines, following)
    return ""


def check_file_size(size: int) -> None:
    """Raise ``BadImage`` for an encoded image of more than ``MAX_BYTES`` bytes."""
    if size > MAX_BYTES:
        raise BadImage(f"the file has {size:,} bytes; the limit is {MAX_BYTES:,}")


class BadImage(Exception):  # noqa: N818 - the word of the design: a bad image is quarantined, not an error of the run
    """An image that cannot be used. The message is the reason; its words are the same on every machine."""
