"""Choice of the engine (``--engine``): this machine, or a Ray cluster whose nodes share the store's path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcache.errors import UsageError, unknown
from fedcache.federate.engines.ray import cluster

if TYPE_CHECKING:
    from fedcache.federate.engines.ray.engine import RayEngine

ENGINES = ("local", "ray")


def engine_of(name: str, address: str | None) -> RayEngine | None:
    """The engine of ``--engine`` and ``--ray-address``; None for this machine without Ray.

    Raises UsageError for an unknown engine, a wrong address, or an address without Ray; MachineError when Ray is not
    installed or the address does not answer.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if name == "local":
        if address is not None:
            raise UsageError(
                f"--ray-address {address} is for --engine ray.",
                f"--engine ray --ray-address {address}",
            )
        return None
    cluster.need_ray()
    if address is not None:
        cluster.check_address(address)
    from fedcache.federate.engines.ray.engine import RayEngine  # imports torch

    return RayEngine(address)
