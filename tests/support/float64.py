"""Numbers in float64, for references: drawn, given and compared."""

import numpy as np
import torch


def normal(*shape, seed=0):
    """Standard normal numbers, which ``seed`` alone decides."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def zeros(*shape):
    """A tensor of zeros."""
    return torch.zeros(shape, dtype=torch.float64)


def ones(*shape):
    """A tensor of ones."""
    return torch.ones(shape, dtype=torch.float64)


def eye(size):
    """The identity matrix."""
    return torch.eye(size, dtype=torch.float64)


def even(count):
    """Equal weights, whose sum is one."""
    return torch.full((count,), 1 / count, dtype=torch.float64)


def doubles(values):
    """The tensor of nested lists of numbers."""
    return torch.tensor(values, dtype=torch.float64)


def far(tensor, array):
    """The largest difference of a tensor and an array of numpy."""
    return float(np.abs(tensor.numpy() - array).max())
