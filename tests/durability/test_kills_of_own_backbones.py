"""kill -9 of extractions with a user's own models: what is left is whole, and the end is the same."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from command import apart, start
from pictures import folder
from test_kills import done, kill
from tiny_onnx import encoder
from toy_store import content

CODE = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""


@pytest.mark.parametrize("kind", ["onnx", "module"])
def test_killed_extractions_of_own_models_resume_to_the_same_bytes(tmp_path, monkeypatch, cases, kind):
    (tmp_path / "own_net.py").write_text(CODE)
    encoder(tmp_path / "tiny.onnx", size=16)
    monkeypatch.chdir(tmp_path)
    name = {"onnx": "onnx:tiny.onnx", "module": "module:own_net:build"}[kind]
    images, home = folder(tmp_path / "many", train=96, test=32), os.environ["FEDCACHE_HOME"]
    words = ("extract", "--dataset", f"folder:{images}", "--backbones", name, "--size", 16, "--batch", 4,
             "--chunk-rows", 8, "--workers", 1, "--json")  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())])))
    whole = tmp_path / "whole.zarr"
    began = time.monotonic()
    assert apart(*words, "--store", whole, home=home).code == 0
    seconds, draw, killed = time.monotonic() - began, random.Random(0), 0
    for number in range(cases(1, 20)):
        part = tmp_path / f"part-{number}.zarr"
        for _ in range(3):
            run = start(*words, "--store", part, home=home)
            # Half of the chunks, or as long as it may take.
            until = time.monotonic() + seconds
            while run.poll() is None and time.monotonic() < until and done(part) < draw.randint(4, 30):
                time.sleep(0.01)
            if run.poll() is not None:
                break
            kill(run)
            killed += 1
        assert apart(*words, "--store", part, home=home).code == 0
        assert content(part) == content(whole)
    assert killed
