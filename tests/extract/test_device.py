"""Which device is taken, and why."""

import torch
from refusal import machine_error, refused

from fedcache.extract.device import named_gpus, resolve_device


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
        machine_error(lambda: resolve_device("cuda"), "--device cuda")


def test_all_gpus_of_one_kind_are_taken_or_those_that_are_named(monkeypatch):
    # Three GPUs of one kind and one of another.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda n=0: "B100" if n == 1 else "A100")
    for asked in ("auto", "cuda"):
        found = resolve_device(asked)
        assert found.kind == "cuda"
        assert found.name == "A100"
        assert found.gpus == (0, 2, 3)
        assert "3 GPUs of this kind" in found.why
    one = resolve_device("cuda:1")
    assert one.name == "B100"
    assert one.gpus == (1,)
    assert one.why == "requested"
    assert resolve_device("cuda:3,cuda:0").gpus == (3, 0)
    refused(lambda: resolve_device("cuda:0,cuda:1"), "A100", "B100", "cuda:1")
    machine_error(lambda: resolve_device("cuda:4"), "cuda:4", "sees: 4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda").gpus == ()
    assert resolve_device("auto").why == "torch sees a GPU"


def test_a_list_of_gpus_names_each_once():
    assert named_gpus("cuda:0,cuda:12") == (0, 12)
    assert named_gpus("cuda") == named_gpus("cpu") == ()
    for wrong in ("cuda:", "cuda:x", "cuda:0,1", "cuda:0,cpu", "cuda:1,cuda:1", "cuda:-1"):
        refused(lambda wrong=wrong: named_gpus(wrong), wrong)
