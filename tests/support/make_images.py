"""Small images and trees of them, for the tests of datasets."""

import io
import tarfile
import zipfile

import numpy as np
from PIL import Image


def random_bytes(seed, *shape):
    """Random uint8 of this shape, which ``seed`` alone decides."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def pixels(seed, height=6, width=8):
    """uint8 [height, width, 3], different for each seed."""
    return random_bytes(seed, height, width, 3)


def encoded(image, kind="PNG", **options):
    """The bytes of an image file."""
    buffer = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(
        buffer, kind, **options
    )
    return buffer.getvalue()


def png(seed):
    """A small PNG, different for each seed."""
    return encoded(pixels(seed))


SPLIT = [f"{s}/{c}/{i}.png" for s in ("train", "test") for c in ("cat", "dog") for i in range(3)]
"""Images of two splits and two classes."""


def tree(names):
    """A different PNG under each name."""
    return {name: png(i) for i, name in enumerate(sorted(names))}


def write_directory(root, files):
    for name, raw in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    return root


def write_zip(path, files, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, raw in files.items():
            archive.writestr(name, raw)
    return path


def write_tar(path, files, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, raw in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    return path
