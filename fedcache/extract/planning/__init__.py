"""Plan of an extraction: the store, the missing features, the reused features, and the cost."""
