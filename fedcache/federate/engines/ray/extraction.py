"""``extract --engine ray``: workers on a Ray cluster compute chunk tasks, this process commits their chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from fedcache.errors import UsageError
from fedcache.extract.batches import ComputeSettings
from fedcache.extract.device import cores
from fedcache.extract.workers.chunk_tasks import ChunkWorker, TaskSpec, compute
from fedcache.federate.engines.ray.cluster import open_cluster
from fedcache.federate.engines.ray.workers import RayWorkerPool
from fedcache.progress import Observer


def check_workers(workers: int | None) -> None:
    """Refuse ``--workers 0``, which keeps everything in this process.

    Raises:
        UsageError.
    """
    if workers == 0:
        raise UsageError(
            "--workers 0 keeps everything in this process, and --engine ray takes others.", "Leave one of them out."
        )


@contextmanager
def open_pool(address: str | None, spec: TaskSpec, workers: int | None, observer: Observer) -> Iterator[RayWorkerPool]:
    """Workers that compute chunk tasks, until the block ends.

    Args:
        address: of the cluster to join; None starts one on this machine.
        spec: of the tasks. Device and threads are those of a process of this machine, so that bits are the same.
        workers: at once; None is as many as the CPUs (or GPUs) allow.
        observer: told where they are.
    """
    threads, on_gpus = spec.settings.threads, needs_gpus(spec.settings)
    gpus = _gpus() if on_gpus else 0
    cpus = cores() if gpus else (workers or max(1, cores() // threads)) * threads
    with open_cluster(address, cpus=cpus, gpus=gpus) as cluster:
        nodes = cluster.nodes()
        if on_gpus:  # each worker holds a GPU and decodes with its share of the node's CPUs
            shares = [int(n.get("CPU", 0) // n["GPU"]) for n in nodes if n.get("GPU")]
            spec = replace(spec, decoders=max(1, min(shares, default=1)))
        pool = RayWorkerPool(cluster, ChunkWorker, compute, spec, cpus=threads, gpus=int(on_gpus), most=workers)
        count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
        observer.note(f"Ray: {pool.slots} at once on {count} of {cluster.words}.")
        yield pool


def needs_gpus(settings: ComputeSettings) -> bool:
    """Whether each worker holds a GPU."""
    return settings.device == "cuda"


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
