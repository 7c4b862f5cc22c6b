"""``--engine``: on this machine as always, or on a Ray cluster whose nodes share the store's path."""

from __future__ import annotations

from dataclasses import dataclass

from fedcache.errors import Exit, FedcacheError, unknown

ENGINES = ("local", "ray")


@dataclass(frozen=True)
class Engine:
    """A Ray cluster to work on.

    Attributes:
        address: HOST:PORT of the cluster to join; None starts one on this machine.
    """

    address: str | None = None


def engine_of(name: str, address: str | None) -> Engine | None:
    """What ``--engine`` and ``--ray-address`` ask for; None is this machine without Ray.

    Raises:
        FedcacheError: USAGE for an unknown engine, a wrong address, or an address without Ray; ENVIRONMENT when Ray is
            not installed or the address does not answer.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if name == "local":
        if address is not None:
            raise FedcacheError(
                Exit.USAGE, f"--ray-address {address} is for --engine ray.", f"--engine ray --ray-address {address}"
            )
        return None
    from fedcache.federate.engines.ray.cluster import check_address, need_ray

    need_ray()
    if address is not None:
        check_address(address)
    return Engine(address)
