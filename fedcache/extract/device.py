"""Device of the model: it is chosen once and reported, and never replaced without a message."""

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
    # numbers of the GPUs, all of that name; empty for the GPU that torch uses by default
    gpus: tuple[int, ...] = ()


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def known_device(requested: str) -> str:
    """``requested`` itself. Raises UsageError unless it is one of ``DEVICES``; the device need not be available."""
    if requested in DEVICES:
        return requested
    if requested.lower() in ("gpu", "nvidia") or requested.startswith("cuda:"):
        hint = "--device cuda"
        if ":" in requested:
            hint += " (choose the GPU with CUDA_VISIBLE_DEVICES)"
        raise UsageError(f"Unknown device {requested!r}. For a GPU use 'cuda'.", hint)
    raise unknown("device", requested, DEVICES)


def named_gpus(requested: str) -> tuple[int, ...]:
    """(0, 2) for ``cuda:0,cuda:2``; empty for a text without ``cuda:``. Raises UsageError for a malformed list."""
    if not requested.startswith("cuda:"):
        return ()
    numbers = []
    for word in requested.split(","):
        number = word.removeprefix("cuda:")
        # ``word`` equals ``number`` if the prefix is missing.
        if word == number or not number.isdecimal() or int(number) in numbers:
            raise UsageError(
                f"--device {requested} is not a list of different GPUs.",
                "For example --device cuda:0,cuda:2",
            )
        numbers.append(int(number))
    return tuple(numbers)


def known_dtype(requested: str) -> str:
    """``requested`` itself. Raises UsageError unless it is a compute dtype."""
    if requested not in ("auto", *DTYPES):
        raise unknown("dtype", requested, ("auto", *DTYPES))
    return requested


def resolve_device(requested: str) -> Device:
    """The device of a request.

    ``auto`` takes all GPUs of one kind if torch can use them, else the CPU with the reason in ``why``. ``cuda`` never
    falls back to the CPU. ``cuda:0,cuda:2`` takes these GPUs. Raises UsageError for an unknown device and for GPUs of
    several kinds, MachineError for ``cuda`` without a usable GPU.
    """
    named = named_gpus(requested)
    kind = requested
    if named:
        kind = "cuda"
    if known_device(kind) == "cpu":
        return Device("cpu", f"{cores()} cores", "as chosen")
    import torch

    if torch.cuda.is_available():
        why = "torch sees a GPU"
        if kind == "cuda":
            why = "requested"
        gpus = _gpus(named)
        # If ``gpus`` is empty, this is the name of torch's default GPU.
        name = torch.cuda.get_device_name(*gpus[:1])
        if len(gpus) > 1:
            why += f", and {len(gpus)} GPUs of this kind share the batches"
        return Device("cuda", name, why, gpus)
    built = torch.version.cuda
    reason = "torch finds no NVIDIA driver or GPU"
    if built is None:
        reason = f"torch {torch.__version__} was built without CUDA"
    if kind == "cuda":
        raise MachineError(
            f"--device {requested} was given, but {reason}.",
            "Run `fedcache doctor`, or use --device cpu.",
        )
    if shutil.which("nvidia-smi"):
        reason += ", although nvidia-smi is installed: run `fedcache doctor`"
    return Device("cpu", f"{cores()} cores", reason)


def _gpus(named: tuple[int, ...]) -> tuple[int, ...]:
    """The GPUs that were named, else all with the name of the first one; empty if only the first one has it."""
    import torch

    count = torch.cuda.device_count()
    for number in named:
        if number >= count:
            raise MachineError(
                f"There is no GPU cuda:{number}. Number of GPUs that torch sees: {count}.",
                "Run `fedcache doctor`, or use --device cuda.",
            )
    names = [torch.cuda.get_device_name(number) for number in range(count)]
    if not named:
        alike = [number for number in range(count) if names[number] == names[0]]
        if len(alike) < 2:
            return ()
        return tuple(alike)
    first = named[0]
    for number in named:
        if names[number] != names[first]:
            raise UsageError(
                f"cuda:{first} is {names[first]} and cuda:{number} is {names[number]}. Features of "
                "two kinds of GPU differ in the last bits.",
                f"Use GPUs of one kind, for example --device cuda:{first}",
            )
    return named


def resolve_dtype(requested: str, device: str) -> str:
    """Compute dtype: ``auto`` is float32 on a CPU and bfloat16 (float16 on older GPUs) on CUDA."""
    if known_dtype(requested) != "auto":
        return requested
    if device == "cpu":
        return "float32"
    import torch

    if torch.cuda.is_bf16_supported():
        return "bfloat16"
    return "float16"
