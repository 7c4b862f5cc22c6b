"""kill -9 of extractions of texts: what is left is whole, and the end is the same bytes."""

import os
import random
from pathlib import Path

from test_kills import extraction, kill_and_resume

CODE = """
import time
import torch


class Letters(torch.nn.Module):
    reads = "texts"

    def forward(self, texts):
        time.sleep(0.02)
        return torch.tensor([[text.count(c) for c in "abcdefgh"] for text in texts], dtype=torch.float32)
"""


def test_killed_extractions_of_texts_resume_to_the_same_bytes(tmp_path, monkeypatch, cases):
    (tmp_path / "slow_letters.py").write_text(CODE)
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=30)) for _ in range(400)]
    texts[77] = ""
    rows = "\n".join(f"{text},{row % 3}" for row, text in enumerate(texts))
    (tmp_path / "t.csv").write_text(f"text,label\n{rows}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())]))
    )
    words = extraction("texts:t.csv", "module:slow_letters:Letters", "--workers 1")
    kill_and_resume(words, os.environ["FEDCACHE_HOME"], tmp_path, cases(1, 20), code=3)
