"""Measurements of the package, side by side with other ways of doing the same: ``make bench``, docs/performance.md."""
