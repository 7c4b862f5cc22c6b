"""How closely two computations of the same products agree when processors add up in different orders."""

import numpy as np
import torch

SUMS = 1024
"""Terms of the sums of a small network, over all its layers."""


def close(got, want, width):
    """Whether two arrays of one shape, computed in float32, agree to the rounding of sums of ``width`` terms.

    The error of a sum of n terms of size one is at most n eps for every order of the sum (Higham, Accuracy and
    Stability, 3.1). The largest value of ``want`` stands for the size of the terms.

    Args:
        got: array or tensor.
        want: array or tensor.
        width: terms that are added up into one value, over all layers of a network.
    """
    one = _array(got)
    other = _array(want)
    assert one.shape == other.shape, (one.shape, other.shape)
    bound = width * torch.finfo(torch.float32).eps * np.abs(other).max()
    return bool(np.abs(one - other).max() <= bound)


def _array(values):
    return np.asarray(values.detach() if isinstance(values, torch.Tensor) else values, np.float64)
