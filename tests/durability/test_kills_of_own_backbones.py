"""kill -9 of extractions with a user's own models: what is left is whole, and the end is the same."""

import os
from pathlib import Path

import pytest
from pictures import folder
from test_kills import extraction, kill_and_resume
from tiny_onnx import encoder

CODE = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""


@pytest.mark.parametrize("kind", ["onnx", "module"])
def test_killed_extractions_of_own_models_resume_to_the_same_bytes(
    tmp_path, monkeypatch, cases, kind
):
    (tmp_path / "own_net.py").write_text(CODE)
    encoder(tmp_path / "tiny.onnx", size=16)
    monkeypatch.chdir(tmp_path)
    name = {"onnx": "onnx:tiny.onnx", "module": "module:own_net:build"}[kind]
    images = folder(tmp_path / "many", train=96, test=32)
    words = extraction(f"folder:{images}", name, "--size 16 --workers 1")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())]))
    )
    kill_and_resume(words, os.environ["FEDCACHE_HOME"], tmp_path, cases(1, 20))
