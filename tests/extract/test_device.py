"""Which device is taken, and why."""

from __future__ import annotations

import pytest
import torch

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.device import resolve_device


@pytest.mark.parametrize(
    ("built", "smi", "reason"),
    [
        (None, None, f"torch {torch.__version__} was built without CUDA"),
        ("12.4", None, "torch finds no NVIDIA driver or GPU"),
        ("12.4", "/usr/bin/nvidia-smi",
         "torch finds no NVIDIA driver or GPU, although nvidia-smi is installed: run `fedcache doctor`"),
    ],
    ids=["no CUDA", "no GPU", "a driver that torch does not see"],
)  # fmt: skip
def test_without_a_gpu_the_reason_is_said(built, smi, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr("shutil.which", lambda name: smi)
    found = resolve_device("auto")
    assert (found.kind, found.why) == ("cpu", reason)
    with pytest.raises(FedcacheError) as caught:
        resolve_device("cuda")
    assert caught.value.code is Exit.ENVIRONMENT
    assert caught.value.message == f"--device cuda, but {reason.partition(',')[0]}."
