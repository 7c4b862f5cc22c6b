"""Classify images with the model in this folder: python predict.py IMAGE..."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

if __name__ == "__main__" and len(sys.argv) < 2:
    print("usage: python predict.py IMAGE...", file=sys.stderr)
    sys.exit(2)
BATCH = 32  # images at a time
HERE = Path(__file__).parent
facts = json.loads((HERE / "model.json").read_text(encoding="utf-8"))
model = torch.export.load(HERE / "model.pt2").module()


def pixels(path: str, how: dict[str, Any]) -> torch.Tensor:
    """The image in the form of an input of the model: uint8 [1, 3, height, width]."""
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode.startswith("I"):  # 16 bits of grey
        grey = np.array(image).astype(np.uint16) >> 8
        image = Image.fromarray(grey.astype(np.uint8))
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    image = Image.alpha_composite(white, image).convert("RGB")
    side = how["height"]
    kernel = Image.Resampling[how["interpolation"].upper()]
    if how["resize"] == "squash":
        image = image.resize((how["width"], side), kernel)
    elif how["resize"] == "crop":
        short = max(side, round(side / how["crop_pct"]))
        w, h = image.size
        if w <= h:
            size = (short, int(short * h / w))
        else:
            size = (int(short * w / h), short)
        image = image.resize(size, kernel)
        left, top = (round((length - side) / 2) for length in image.size)
        image = image.crop((left, top, left + side, top + side))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]


lost = 0  # images that could not be read
for start in range(1, len(sys.argv), BATCH):
    read = []
    for path in sys.argv[start : start + BATCH]:
        try:
            read.append((path, [pixels(path, how) for how in facts["inputs"]]))
        except Exception as error:  # decoders of damaged or huge images raise errors of many kinds
            lost += 1
            print(f"{path}\t-\t{error}", file=sys.stderr)
    if not read:
        continue
    of_inputs = zip(*(x for _, x in read), strict=True)
    with torch.no_grad():
        _scores, probability = model(*(torch.cat(parts) for parts in of_inputs))
    for (path, _), row in zip(read, probability, strict=True):
        best = int(row.argmax())
        print(f"{path}\t{facts['classes'][best]}\t{float(row[best]):.6f}")
if lost:
    sys.exit(1)
