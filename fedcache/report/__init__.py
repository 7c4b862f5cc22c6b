"""Reports: what a result or a partition looks like, and how runs compare."""
