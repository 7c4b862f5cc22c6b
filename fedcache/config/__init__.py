"""Configuration: where things live, what can be set, and ``fedcache.toml`` under the flags."""

from __future__ import annotations

from fedcache.config.home import Home
from fedcache.config.sections import SECTIONS, ExtractConfig, PartitionConfig, TrainConfig
from fedcache.config.toml_file import FILE_NAME, read_file, resolve, to_table, to_toml

__all__ = [
    "FILE_NAME",
    "SECTIONS",
    "ExtractConfig",
    "Home",
    "PartitionConfig",
    "TrainConfig",
    "read_file",
    "resolve",
    "to_table",
    "to_toml",
]
