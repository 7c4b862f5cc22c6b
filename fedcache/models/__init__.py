"""Trained heads: saved with a run, loaded, and used on rows and images that no training has seen."""
