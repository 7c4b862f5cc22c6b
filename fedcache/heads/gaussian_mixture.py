"""Gaussian mixtures of features: fitted where the rows are, merged and drawn from where they are not.

``scale`` is a standard deviation (``spherical`` [.., 1], ``diag`` [.., D]), or the lower Cholesky factor of the
covariance packed row by row (``full`` [.., D(D+1)/2]).
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import torch

from fedcache.heads.ridge import factored


def scale_size(cov: str, width: int) -> int:
    """Numbers in one ``scale``."""
    return {"spherical": 1, "diag": width, "full": width * (width + 1) // 2}[cov]


def factor_of(scale: np.ndarray, width: int) -> np.ndarray:
    """The lower triangular [D, D] of a packed Cholesky factor."""
    L = np.zeros((width, width))
    L[np.tril_indices(width)] = scale
    return L


def pack(cov: np.ndarray) -> np.ndarray:
    """The packed Cholesky factor of a covariance [D, D]; ``numpy.linalg.LinAlgError`` when it is singular."""
    factor, regular = factored(torch.from_numpy(cov))
    if not regular:
        raise np.linalg.LinAlgError("The covariance is singular.")
    packed: np.ndarray = factor.numpy()[np.tril_indices(len(cov))]
    return packed


class Gaussians(NamedTuple):
    """Some Gaussians: ``mean`` [K, D], ``scale`` [K, S], ``weight`` [K]."""

    mean: np.ndarray
    scale: np.ndarray
    weight: np.ndarray

    def rows(self, noise: np.ndarray, g: np.random.Generator, cov: str) -> np.ndarray:
        """One draw [n, D] for each standard normal row of ``noise``; the components are drawn by weight."""
        times = g.multinomial(len(noise), self.weight / self.weight.sum())
        out = np.repeat(self.mean, times, axis=0)
        for k, (start, n) in enumerate(zip(np.cumsum(times) - times, times, strict=True)):
            e = noise[start : start + n]
            # x = mean + L e has the covariance L L'; other forms scale each coordinate by itself.
            if cov == "full":
                out[start : start + n] += e @ factor_of(self.scale[k], e.shape[1]).T
            else:
                out[start : start + n] += self.scale[k] * e
        return out


def fit_mixture(
    z: np.ndarray, k: int, cov: str, *, reg: float, tol: float, steps: int, seed: int
) -> Gaussians:
    """A mixture of ``k`` Gaussians of the rows z [n, D] in float64; ``reg`` is added to the diagonal of covariances.

    One Gaussian needs no EM: its fixed point is the mean and the (biased) variance of the sample.

    Raises:
        ValueError, numpy.linalg.LinAlgError: a covariance is singular.
    """
    if k == 1:
        mean = z.mean(0)
        D = z.shape[1]
        apart = z - mean
        if cov == "full":
            scale = pack(apart.T @ apart / len(z) + reg * np.eye(D))
        elif cov == "diag":
            scale = np.sqrt((apart**2).mean(0) + reg)
        else:
            scale = np.sqrt((apart**2).mean(keepdims=True).ravel() + reg)
        return Gaussians(mean[None], scale[None], np.ones(1))
    from sklearn.mixture import GaussianMixture  # a second to import, needed by mixtures alone

    em = GaussianMixture(
        k, covariance_type=cov, tol=tol, reg_covar=reg, max_iter=steps, random_state=seed
    )
    with warnings.catch_warnings():
        # EM at its last step, or fewer distinct rows than Gaussians: still a mixture
        warnings.simplefilter("ignore")
        em = em.fit(z)
    if cov == "full":
        scale = np.stack([pack(c) for c in em.covariances_])
    else:
        scale = np.sqrt(em.covariances_).reshape(k, -1)
    return Gaussians(em.means_, scale, em.weights_)


def of_class(
    mean: np.ndarray, scale: np.ndarray, weight: np.ndarray, count: np.ndarray, c: int
) -> Gaussians:
    """The Gaussians of class ``c`` of all M clients, weighted by the rows behind each, in float64.

    Args:
        mean: [M, C, K, D].
        scale: [M, C, K, S].
        weight: [M, C, K] of each client's mixtures; 0 where there is no Gaussian.
        count: [M, C] rows behind each mixture.
        c: the class.
    """
    rows = (count[:, c, None] * weight[:, c].astype(np.float64)).ravel()
    # [M K, ..]: all clients' components of this class, without those that stand for no row.
    some = rows > 0
    means = mean[:, c].reshape(-1, mean.shape[-1])[some].astype(np.float64)
    scales = scale[:, c].reshape(-1, scale.shape[-1])[some].astype(np.float64)
    return Gaussians(means, scales, rows[some])


def pooled(parts: Gaussians, cov: str) -> tuple[np.ndarray, np.ndarray]:
    """Moments of the union of samples from their moments: mean [D] and ``scale`` [S].

    mean = sum_k n_k mu_k / n;  covariance = sum_k n_k (Sigma_k + (mu_k - mean)(mu_k - mean)') / n, of which ``diag``
    keeps the diagonal and ``spherical`` the mean of the diagonal.

    Args:
        parts: moments with biased covariances, and as weights the rows n_k behind them, not all 0.
        cov: form of the scales.
    """
    share = parts.weight / parts.weight.sum()
    mean = share @ parts.mean
    D = parts.mean.shape[1]
    apart = parts.mean - mean
    if cov == "full":
        # Between the means first, then within each part: sum_k n_k (L_k L_k') / n.
        total = (share[:, None] * apart).T @ apart
        for w, scale in zip(share, parts.scale, strict=True):
            if w > 0:
                L = factor_of(scale, D)
                total += w * (L @ L.T)
        # Rounding may leave a merged covariance of few rows a hair below zero; triangular by QR of a square root.
        value, vector = np.linalg.eigh(total)
        upper: np.ndarray = np.linalg.qr((vector * np.sqrt(value.clip(min=0.0))).T)[1]
        return mean, upper.T[np.tril_indices(D)]
    spread = apart**2
    if cov == "spherical":
        spread = spread.mean(1, keepdims=True)
    return mean, np.sqrt(share @ (parts.scale**2 + spread))
