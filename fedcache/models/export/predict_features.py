"""Classify rows of features [N, D] with the model in this folder: python predict.py FEATURES.npy..."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

if __name__ == "__main__" and len(sys.argv) < 2:
    print("usage: python predict.py FEATURES.npy...", file=sys.stderr)
    sys.exit(2)
HERE = Path(__file__).parent
facts = json.loads((HERE / "model.json").read_text(encoding="utf-8"))
model = torch.export.load(HERE / "model.pt2").module()

lost = 0  # files that could not be read
for path in sys.argv[1:]:
    try:
        _scores, probability = model(torch.from_numpy(np.load(path, allow_pickle=False)).float())
    except Exception as error:
        # No array, or an array of another shape: numpy and torch raise errors of many kinds.
        lost += 1
        print(f"{path}\t-\t{error}", file=sys.stderr)
        continue
    for row, best in enumerate(probability.argmax(-1).tolist()):
        print(f"{path}[{row}]\t{facts['classes'][best]}\t{float(probability[row, best]):.6f}")
if lost:
    sys.exit(1)
