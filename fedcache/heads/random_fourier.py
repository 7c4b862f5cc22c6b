"""Random Fourier features of a Gaussian kernel (Rahimi & Recht, NeurIPS 2007)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def drawn_fourier(g: np.random.Generator, width: int, dim: int, sigma: float) -> tuple[Tensor, Tensor]:
    """Frequencies Om [width, dim] ~ N(0, 1 / sigma^2) and phases u [dim] ~ U[0, 2 pi), in float64."""
    return torch.from_numpy(g.standard_normal((width, dim)) / sigma), torch.from_numpy(g.uniform(0, 2 * np.pi, dim))


def fourier_features(z: Tensor, om: Tensor, u: Tensor) -> Tensor:
    """sqrt(2 / dim) cos(z Om + u) [.., dim] of z [.., width]: inner products are about exp(-|z - z'|^2 / 2 sigma^2)."""
    return torch.cos(z @ om.to(z.device) + u.to(z.device)) * math.sqrt(2.0 / len(u))
