"""The comparison of all methods on frozen features: ``fedcache reproduce frozen-bench``."""
