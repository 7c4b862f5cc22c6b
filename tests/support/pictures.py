"""Folders of small images for the tests, written by the tests."""

import numpy as np
from PIL import Image

CLASSES = ("zebra", "ant", "10", "9", "moth", "2b")
"""Class names, neither in alphabetical order nor in that of numbers: whoever sorts them twice mixes them up."""


def picture(seed, label, side=24):
    """A noisy square whose brightness and colour depend on its class, so that classes can be learnt."""
    rng = np.random.default_rng(seed)
    base = np.full((side, side, 3), 40 + 45 * label, np.float64)
    base[..., label % 3] += 60
    return Image.fromarray(np.clip(base + rng.normal(0, 25, base.shape), 0, 255).astype(np.uint8))


def folder(root, *, train=12, test=4, classes=3, domains=()):
    """``root/{split}/[domain/]{class}/NNN.png`` with so many images of each of the first ``classes`` names."""
    for d, domain in enumerate(domains or ("",)):
        for split, count in (("train", train), ("test", test)):
            for c, name in enumerate(CLASSES[:classes]):
                place = root / split / domain / name
                place.mkdir(parents=True)
                for i in range(count):
                    seed = (((d * 2 + (split == "test")) * 64) + c) * 1000 + i
                    picture(seed, c).save(place / f"{i:03}.png")
    return root


HOSTILE = "<img src=x onerror=alert(1)>"


def hostile_folder(root, **counts):
    """``folder`` whose first class has a name that is a tag of HTML."""
    folder(root, **counts)
    for split in ("train", "test"):
        sorted((root / split).iterdir())[0].rename(root / split / HOSTILE)
    return root
