"""The figures of a report: each takes entries and returns a ``Plot``, or None where there is nothing to draw."""
