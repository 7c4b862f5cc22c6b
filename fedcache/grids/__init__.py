"""Grids: points, sweeps, ready-made grids of the papers, and the training of all points."""
