"""The feature store: a Zarr v3 group with promises (FORMAT.md)."""
