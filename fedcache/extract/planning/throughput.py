"""How features will be computed here, and how fast: settings of the machine, and one batch that is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedcache.config import ExtractConfig
from fedcache.extract.batches import ComputeSettings, FeatureJob
from fedcache.extract.datasets import Dataset
from fedcache.extract.device import Device, cores, resolve_device, resolve_dtype
from fedcache.extract.how import how_record
from fedcache.extract.planning.plan import PlannedArray
from fedcache.extract.workers.local import InProcess


def resolve_compute(config: ExtractConfig) -> tuple[Device, ComputeSettings]:
    """The device, and how features are computed there.

    Raises:
        UsageError or MachineError, for a device or dtype that is not known or not here.
    """
    device = resolve_device(config.device)
    batch = config.batch or (256 if device.kind == "cuda" else 32)
    return device, ComputeSettings(device.kind, resolve_dtype(config.dtype, device.kind), batch, config.threads)


def jobs_of(
    planned: Sequence[PlannedArray], data: Dataset, device: Device, settings: ComputeSettings
) -> list[FeatureJob]:
    """The arrays of an extraction as they are handed to workers."""
    s = settings
    return [
        FeatureJob(
            p.recipe.key,
            p.backbone.name,
            p.weights,
            p.recipe,
            data.mirror,
            how_record(device, s.dtype, s.batch, s.threads, p.backbone.provider),
        )
        for p in planned
    ]


def measured_rate(data: Dataset, planned: Sequence[PlannedArray], config: ExtractConfig) -> float:
    """Images per second to expect, from one batch decoded and run in this process."""
    device, settings = resolve_compute(config)
    settings = replace(settings, batch=min(settings.batch, len(data.names)))
    jobs = jobs_of(planned, data, device, settings)
    workers = InProcess(jobs, data, settings)
    try:
        workers.warm()
        computed = workers.submit(0, [j.key for j in jobs]).result()
    finally:
        workers.close()
    forward = sum(computed.forward_seconds.values()) / computed.decoded
    decode = computed.decode_seconds / computed.decoded
    if device.kind == "cuda":  # one core feeds the GPU, the others decode
        return float(1 / max(forward, decode / max(1, cores() - 1)))
    return float((config.workers or cores()) / (forward + decode))
