"""Sample images for the README: python examples/sample_photos.py [FOLDER].

Writes 1,000 handwritten digits of scikit-learn as PNG files into FOLDER (photos), one folder per class, and another
digit, which is in none of the folders, as my-photo.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

IMAGES = 1000
SIDE = 32


def main(root: Path) -> None:
    """Write the images."""
    digits = load_digits()
    for number in range(IMAGES):
        place = root / str(digits.target[number])
        place.mkdir(parents=True, exist_ok=True)
        picture(digits.images[number]).save(place / f"{number:04}.png")
    picture(digits.images[IMAGES]).save("my-photo.png")
    print(f"{IMAGES} images in {root}, and a {digits.target[IMAGES]} in my-photo.png")


def picture(values: object) -> Image.Image:
    """An 8 x 8 digit with values 0 to 16 as an image."""
    return Image.fromarray((values * 15.9).astype("uint8")).resize((SIDE, SIDE))  # type: ignore[operator]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "photos"))
