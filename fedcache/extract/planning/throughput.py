"""How fast an extraction would be, from one batch timed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedcache.config import ExtractConfig
from fedcache.extract.planning.plan import Planned

if TYPE_CHECKING:
    from fedcache.extract.batches import How
    from fedcache.extract.datasets import Dataset
    from fedcache.extract.device import Device


def way_of(config: ExtractConfig, planned: Sequence[Planned]) -> tuple[Device, How, dict[str, dict[str, Any]]]:
    """The device, how features are computed there, and by key what a store notes of it.

    Raises:
        FedcacheError: USAGE or ENVIRONMENT, for a device or dtype that is not known or not here.
    """
    from fedcache.extract import device as where
    from fedcache.extract.batches import How

    device = where.resolve_device(config.device)
    dtype = where.resolve_dtype(config.dtype, device.kind)
    how = How(device.kind, dtype, config.batch or (256 if device.kind == "cuda" else 32), config.threads)
    records = {
        p.recipe.key: where.how_record(device, dtype, how.batch, how.threads, p.backbone.provider) for p in planned
    }
    return device, how, records


def measured_rate(data: Dataset, planned: Sequence[Planned], config: ExtractConfig) -> float:
    """Images per second to expect, from one batch decoded and run in this process."""
    from fedcache.extract import device as where
    from fedcache.extract.batches import How, Job
    from fedcache.extract.workers.local import Inline

    device = where.resolve_device(config.device)
    how = How(
        device.kind,
        where.resolve_dtype(config.dtype, device.kind),
        min(config.batch or (256 if device.kind == "cuda" else 32), len(data.names)),
        config.threads,
    )
    jobs = [Job(p.recipe.key, p.backbone.name, p.weights, p.recipe, data.mirror) for p in planned]
    compute = Inline(jobs, data, how)
    try:
        compute.warm()
        computed = compute.submit(0, [j.key for j in jobs]).result()
    finally:
        compute.close()
    forward = sum(computed.forward_seconds.values()) / computed.decoded
    decode = computed.decode_seconds / computed.decoded
    if device.kind == "cuda":
        return float(1 / max(forward, decode / max(1, where.cores() - 1)))
    return float((config.workers or where.cores()) / (forward + decode))
