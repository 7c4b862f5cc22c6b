"""On which device a run trains, and its inputs there."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedcache.extract.device import resolve_device
from fedcache.progress import Observer
from fedcache.runs.features import RunInputs


def training_device(requested: str, observer: Observer, *, live: bool = False) -> str:
    """``auto`` is the CPU, where light heads are fast and the docs were measured; ``cuda`` never falls back.

    With ``live`` encoders ``auto`` takes a GPU when torch can use one. Raises UsageError for an unknown device,
    MachineError for ``cuda`` without a usable GPU.
    """
    if requested == "auto" and not live:
        if torch.cuda.is_available():
            observer.note(
                "Training on the CPU, although there is a GPU: heads are light (--device cuda moves it there)."
            )
        return "cpu"
    return resolve_device(requested).kind


def on_device(inputs: RunInputs, device: str) -> RunInputs:
    """Inputs with their tensors where they are computed on."""
    if device == "cpu":
        return inputs
    d = inputs.data
    return inputs.with_data(
        replace(
            d,
            x=d.x.to(device),
            y=d.y.to(device),
            text=None if d.text is None else d.text.to(device),
            domain=None if d.domain is None else d.domain.to(device),
            towers=None if d.towers is None else d.towers.to(device),
        )
    )
