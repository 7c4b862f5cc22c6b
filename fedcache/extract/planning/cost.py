"""Time that an extraction is expected to take: a few batches are timed here, and the pipeline is counted out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fedcache.config import ExtractConfig
from fedcache.extract.batches import ComputeSettings, FeatureJob
from fedcache.extract.datasets import Dataset
from fedcache.extract.device import cores
from fedcache.extract.how import jobs_of, resolve_compute
from fedcache.extract.planning.plan import PlannedArray
from fedcache.extract.workers.batch_workers import InProcess, worker_count

TRIED = 3
"""Batches that are timed at most; the median of each of their times counts."""


@dataclass(frozen=True)
class BatchCost:
    """Seconds that one batch takes in one process."""

    decode: float  # reading, decoding, resizing
    forward: float  # all models, one after another
    processor: float  # of both, what the processor works: waiting for a disk or a GPU takes none


def measure_batch(
    jobs: Sequence[FeatureJob], data: Dataset, settings: ComputeSettings
) -> BatchCost:
    """Decode and run up to ``TRIED`` batches in this process, after the models are warm."""
    workers = InProcess(jobs, data, settings)
    keys = [job.key for job in jobs]
    decode = []
    forward = []
    processor = []
    try:
        workers.warm()
        for batch in range(min(TRIED, math.ceil(len(data.names) / settings.batch))):
            before = time.process_time()
            computed = workers.submit(batch, keys).result()
            processor.append(time.process_time() - before)
            decode.append(computed.decode_seconds)
            forward.append(sum(computed.forward_seconds.values()))
    finally:
        workers.close()
    return BatchCost(median(decode), median(forward), median(processor))


def pipeline_seconds(
    cost: BatchCost, batches: int, *, device: str, workers: int, cores: int, gpus: int = 1
) -> float:
    """Seconds from the first batch to the last, with ``workers`` processes (0: this one) that never wait for a chunk.

    On a CPU each process decodes and runs the models in turn. On GPUs the processes decode, and each device takes one
    batch after another. In either case no more is computed at once than there are cores.
    """
    side_by_side = max(1, workers)
    rounds = math.ceil(batches / side_by_side)
    if device == "cuda" and workers:
        decoding = max(rounds * cost.decode, batches * cost.decode / cores)
        # Devices wait for the first batch, and have the last one to do when all are decoded.
        forward = math.ceil(batches / gpus) * cost.forward
        return max(decoding + cost.forward, cost.decode + forward)
    return max(rounds * (cost.decode + cost.forward), batches * cost.processor / cores)


def expected_seconds(
    data: Dataset, planned: Sequence[PlannedArray], config: ExtractConfig, rows: int
) -> float:
    """Seconds to expect for ``rows`` rows through every array of ``planned``; starting workers comes on top."""
    device, settings = resolve_compute(config, [p.backbone for p in planned])
    jobs = jobs_of(planned, data, device, settings)
    cost = measure_batch(jobs, data, settings)
    batches = math.ceil(rows / settings.batch)
    count = worker_count(jobs, settings, workers=config.workers, tasks=batches, cores=cores())
    return pipeline_seconds(
        cost,
        batches,
        device=device.kind,
        workers=count,
        cores=cores(),
        gpus=max(1, len(settings.gpus)),
    )
