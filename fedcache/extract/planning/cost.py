"""Expected time of an extraction: a few batches are timed, and the time of the whole pipeline is calculated."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fedcache.extract.batches import ComputeSettings, FeatureJob
from fedcache.extract.datasets import Dataset
from fedcache.extract.device import cores
from fedcache.extract.workers.batch_workers import InProcess, worker_count

MOST_TIMED = 3
"""Maximum number of batches that are timed to estimate the speed; the median of their times is used."""


@dataclass(frozen=True)
class BatchCost:
    """Seconds that one batch takes in one process."""

    decode: float  # reading, decoding, resizing
    forward: float  # all models, one after another
    processor: float  # processor time of both, without waiting for a disk or a GPU


def measure_batch(
    jobs: Sequence[FeatureJob], data: Dataset, settings: ComputeSettings
) -> BatchCost:
    """Decode and run up to ``MOST_TIMED`` batches in this process, after the models are warm."""
    workers = InProcess(jobs, data, settings)
    keys = [job.key for job in jobs]
    decode = []
    forward = []
    processor = []
    batches = math.ceil(len(data.names) / settings.batch)
    try:
        workers.warm()
        for batch in range(min(MOST_TIMED, batches)):
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
    """Seconds from the first batch to the last, with ``workers`` processes that never wait for a chunk.

    0 workers stand for this process. On a CPU each process decodes and runs the models in turn. On GPUs the processes
    decode, and each device takes one batch after another. In either case, no more processes compute at once than there
    are cores.
    """
    rounds = math.ceil(batches / max(1, workers))
    if device == "cuda" and workers:
        decoding = max(rounds * cost.decode, batches * cost.decode / cores)
        # Devices wait until the first batch is decoded, and must still compute the last one when all are decoded.
        forward = math.ceil(batches / gpus) * cost.forward
        return max(decoding + cost.forward, cost.decode + forward)
    return max(rounds * (cost.decode + cost.forward), batches * cost.processor / cores)


def expected_seconds(
    data: Dataset,
    jobs: Sequence[FeatureJob],
    settings: ComputeSettings,
    workers: int | None,
    rows: int,
) -> float:
    """Expected seconds for ``rows`` rows of every array, without the time to start workers."""
    cost = measure_batch(jobs, data, settings)
    batches = math.ceil(rows / settings.batch)
    count = worker_count(jobs, settings, workers=workers, tasks=batches, cores=cores())
    return pipeline_seconds(
        cost,
        batches,
        device=settings.device,
        workers=count,
        cores=cores(),
        gpus=max(1, len(settings.gpus)),
    )
