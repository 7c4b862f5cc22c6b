"""Device of the model: resolved once, printed, and never replaced silently."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from fedcache.errors import MachineError, UsageError, unknown

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Device:
    """A resolved device."""

    kind: str  # ``cpu`` | ``cuda``
    name: str  # the GPU's name, or ``N cores``
    why: str  # one clause for the first line printed


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def known_device(requested: str) -> str:
    """``requested``, when it is a word for a device (which need not be here); else UsageError."""
    if requested not in DEVICES:
        if requested.lower() in ("gpu", "nvidia") or requested.startswith("cuda:"):
            one = ""
            if ":" in requested:
                one = " (CUDA_VISIBLE_DEVICES chooses one of several)"
            raise UsageError(
                f"Unknown device {requested!r}. A GPU is called 'cuda'.", f"--device cuda{one}"
            )
        raise unknown("device", requested, DEVICES)
    return requested


def known_dtype(requested: str) -> str:
    """``requested``, when it is a compute dtype; else UsageError."""
    if requested not in ("auto", *DTYPES):
        raise unknown("dtype", requested, ("auto", *DTYPES))
    return requested


def resolve_device(requested: str) -> Device:
    """``auto`` takes a GPU when torch can use one and says why not otherwise; ``cuda`` never falls back.

    Raises UsageError for an unknown device, MachineError for ``cuda`` without a usable GPU.
    """
    if known_device(requested) == "cpu":
        return Device("cpu", f"{cores()} cores", "as chosen")
    import torch

    if torch.cuda.is_available():
        why = "torch sees a GPU"
        if requested == "cuda":
            why = "asked for"
        return Device("cuda", torch.cuda.get_device_name(), why)
    built = torch.version.cuda
    reason = "torch finds no NVIDIA driver or GPU"
    if built is None:
        reason = f"torch {torch.__version__} was built without CUDA"
    if requested == "cuda":
        raise MachineError(
            f"--device cuda, but {reason}.", "Run `fedcache doctor`, or use --device cpu."
        )
    if shutil.which("nvidia-smi"):
        reason += ", although nvidia-smi is installed: run `fedcache doctor`"
    return Device("cpu", f"{cores()} cores", reason)


def resolve_dtype(requested: str, device: str) -> str:
    """Compute dtype: ``auto`` is float32 on a CPU and bfloat16 (float16 on older GPUs) on CUDA."""
    if known_dtype(requested) == "auto":
        if device == "cpu":
            return "float32"
        import torch

        if torch.cuda.is_bf16_supported():
            return "bfloat16"
        return "float16"
    return requested
