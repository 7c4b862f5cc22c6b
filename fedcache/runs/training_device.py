"""On which device a run trains, and its inputs there."""

from __future__ import annotations

import torch

from fedcache.errors import MachineError
from fedcache.extract.device import resolve_device
from fedcache.federate.engine.client_data import StoredRows
from fedcache.federate.execution.memory_estimate import free_memory
from fedcache.progress import Observer
from fedcache.runs.features import RunInputs


def training_device(requested: str, observer: Observer, *, live: bool = False) -> str:
    """``auto`` is the CPU, where the docs were measured, so that runs have the same bits with and without a GPU.

    ``cuda`` never falls back. With ``live`` encoders ``auto`` takes a GPU when torch can use one. Raises UsageError for
    an unknown device, MachineError for ``cuda`` without a usable GPU.
    """
    if requested == "auto" and not live:
        if torch.cuda.is_available():
            observer.note(
                "Training on the CPU, although there is a GPU: --device cuda trains there, faster for many clients."
            )
        return "cpu"
    return resolve_device(requested).kind


def on_device(inputs: RunInputs, device: str) -> RunInputs:
    """Inputs with their tensors where they are computed on. Raises MachineError for a GPU that they do not fit into."""
    if device == "cpu":
        return inputs
    x = inputs.data.x
    needed = x.stored.nbytes if isinstance(x, StoredRows) else x.nbytes
    free = free_memory(device)
    if needed > free:
        raise MachineError(
            f"The features take {needed / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB of the GPU are free.",
            "Train where there is more memory (--device cpu reads them from the store), or on fewer backbones.",
        )
    return inputs.with_data(inputs.data.to(device))
