"""``fedcache flower``: apps, sites, servers, keys and loopback federations around Flower (extra ``flower``).

Importing it switches off Flower's telemetry, update check and installer, so no module here can import Flower before.
"""

from __future__ import annotations

from fedcache.federate.engines.flower import QUIET

__all__ = ["QUIET"]
