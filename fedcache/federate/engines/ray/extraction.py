"""``extract --engine ray``: helpers on a Ray cluster compute ranges of chunks, this process commits them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engines.choose import Engine

if TYPE_CHECKING:
    from fedcache.extract.batches import How
    from fedcache.extract.run import Elsewhere
    from fedcache.extract.workers.chunk_tasks import Order
    from fedcache.federate.engines.ray.workers import Crew
    from fedcache.progress import Observer


def check_workers(workers: int | None) -> None:
    """Refuse ``--workers 0``, which keeps everything in this process.

    Raises:
        FedcacheError: USAGE.
    """
    if workers == 0:
        raise FedcacheError(
            Exit.USAGE,
            "--workers 0 keeps everything in this process, and --engine ray takes others.",
            "Leave one of them out.",
        )


def helpers(engine: Engine, how: How, workers: int | None, observer: Observer) -> Elsewhere:
    """What opens the helpers of an extraction.

    Args:
        engine: which cluster.
        how: device and threads of a helper: the same as in a process of this machine, so that bits are the same.
        workers: helpers at once; None is as many as the CPUs (or GPUs) allow.
        observer: told where they are.
    """
    from fedcache.extract.device import cores
    from fedcache.extract.workers.chunk_tasks import compute, enter
    from fedcache.federate.engines.ray.cluster import opened
    from fedcache.federate.engines.ray.workers import Crew

    @contextmanager
    def open_(order: Order) -> Iterator[Crew]:
        on_gpus = needs_gpus(how)
        gpus = _gpus() if on_gpus else 0
        many = (workers or max(1, cores() // how.threads)) * how.threads
        with opened(engine.address, cpus=many if not gpus else cores(), gpus=gpus) as cluster:
            share = [int(n.get("CPU", 0) // n["GPU"]) for n in cluster.nodes() if n.get("GPU")]
            if on_gpus:
                order = replace(order, decoders=max(1, min(share, default=1)))
            crew = Crew(cluster, enter, compute, order, cpus=how.threads, gpus=int(on_gpus), most=workers)
            nodes = len(cluster.nodes())
            observer.note(f"Ray: {crew.slots} at once on {nodes} node{'s' * (nodes != 1)} of {cluster.words}.")
            yield crew

    return open_


def needs_gpus(how: How) -> bool:
    """Whether each helper holds a GPU."""
    return how.device == "cuda"


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
