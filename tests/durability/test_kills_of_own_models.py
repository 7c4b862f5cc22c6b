"""kill -9 of extractions with a user's own models of images and texts: what is left is whole, the end is the same."""

import os
import random

import pytest
from pictures import folder
from test_kills import extraction, kill_and_resume
from tiny_onnx import encoder

IMAGES = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""
TEXTS = """
import time
import torch


class Letters(torch.nn.Module):
    reads = "texts"

    def forward(self, texts):
        time.sleep(0.02)
        return torch.tensor([[text.count(c) for c in "abcdefgh"] for text in texts], dtype=torch.float32)
"""


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    (tmp_path / "own_net.py").write_text(IMAGES)
    (tmp_path / "slow_letters.py").write_text(TEXTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.parametrize("name", ["onnx:tiny.onnx", "module:own_net:build"])
def test_killed_extractions_of_own_models_resume_to_the_same_bytes(tmp_path, home, cases, name):
    encoder(tmp_path / "tiny.onnx", size=16)
    images = folder(tmp_path / "many", train=96, test=32)
    words = extraction(f"folder:{images}", name, "--size 16 --workers 1")
    kill_and_resume(words, home, tmp_path, cases(1, 20))


def test_killed_extractions_of_texts_resume_to_the_same_bytes(tmp_path, home, cases):
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=30)) for _ in range(400)]
    texts[77] = ""
    rows = "\n".join(f"{text},{row % 3}" for row, text in enumerate(texts))
    (tmp_path / "t.csv").write_text(f"text,label\n{rows}\n")
    words = extraction("texts:t.csv", "module:slow_letters:Letters", "--workers 1")
    kill_and_resume(words, home, tmp_path, cases(1, 20), code=3)
