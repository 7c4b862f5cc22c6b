"""Datasets: where images, labels, domains and splits come from."""
