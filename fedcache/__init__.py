"""fedcache: run every frozen backbone once, then federate on the cached features in seconds."""

__version__ = "0.1.0.dev0"
