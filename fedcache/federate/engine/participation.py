"""How many clients take part in a round."""

from __future__ import annotations

from fedcache.errors import FedcacheError, UsageError


def clients_per_round(participation: int | float | None, clients: int) -> int:
    """Clients a round: all for None, a number for an int, a share (at least one client) for a float.

    Raises:
        FedcacheError: exit 2 for a number below 1 or a share outside (0, 1].
    """
    if participation is None:
        return clients
    if isinstance(participation, int):
        if participation < 1:
            raise _bad_participation(participation)
        return min(participation, clients)
    if not 0.0 < participation <= 1.0:
        raise _bad_participation(participation)
    return max(1, round(participation * clients))


def _bad_participation(found: float) -> FedcacheError:
    return UsageError(
        f"participation is {found}, expected a number of clients (at least 1) or a share in (0, 1].",
        "For example --participation 10, --participation 0.1 or --participation 100%.",
    )
