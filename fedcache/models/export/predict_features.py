"""Classify rows of features [N, D] with the model in this folder: python predict.py FEATURES.npy..."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
facts = json.loads((HERE / "model.json").read_text(encoding="utf-8"))
model = torch.export.load(HERE / "model.pt2").module()

for path in sys.argv[1:]:
    _scores, probability = model(torch.from_numpy(np.load(path, allow_pickle=False)).float())
    for row, best in enumerate(probability.argmax(-1).tolist()):
        print(f"{path}[{row}]\t{facts['classes'][best]}\t{float(probability[row, best]):.6f}")
