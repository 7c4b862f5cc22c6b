"""Which device is taken, and why."""

from __future__ import annotations

import torch
from refusal import refused

from fedcache.errors import Exit
from fedcache.extract.device import resolve_device


def test_without_a_gpu_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for built, smi, reason in (
        (None, None, torch.__version__),
        ("12.4", None, "driver"),
        ("12.4", "/usr/bin/nvidia-smi", "fedcache doctor"),
    ):
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr("shutil.which", lambda name, smi=smi: smi)
        found = resolve_device("auto")
        assert found.kind == "cpu"
        assert reason in found.why
        refused(lambda: resolve_device("cuda"), "--device cuda", code=Exit.ENVIRONMENT)
