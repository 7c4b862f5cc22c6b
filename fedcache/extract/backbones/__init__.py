"""Frozen backbones, one file per provider."""
