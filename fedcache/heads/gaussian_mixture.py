"""Gaussian mixtures of features: clients fit them to their rows, and the server merges them and draws from them.

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
    """Length of one ``scale``."""
    sizes = {"spherical": 1, "diag": width, "full": width * (width + 1) // 2}
    return sizes[cov]


def factor_of(scale: np.ndarray, width: int) -> np.ndarray:
    """The lower triangular matrix [D, D] of a packed Cholesky factor."""
    L = np.zeros((width, width))
    L[np.tril_indices(width)] = scale
    return L


def pack(cov: np.ndarray) -> np.ndarray:
    """The packed Cholesky factor of a covariance [D, D]; ``numpy.linalg.LinAlgError`` when it is singular."""
    factor, regular = factored(torch.from_numpy(cov))
    if not regular:
        raise np.linalg.LinAlgError("The covariance is singular.")
    return factor.numpy()[np.tril_indices(len(cov))]


class Gaussians(NamedTuple):
    """Some Gaussians: ``mean`` [K, D], ``scale`` [K, S], ``weight`` [K]."""

    mean: np.ndarray
    scale: np.ndarray
    weight: np.ndarray

    def rows(self, noise: np.ndarray, g: np.random.Generator, cov: str) -> np.ndarray:
        """Drawn rows [n, D], one for each standard normal row of ``noise``; the components are drawn by weight."""
        times = g.multinomial(len(noise), self.weight / self.weight.sum())
        out = np.repeat(self.mean, times, axis=0)
        start = 0
        for k, n in enumerate(times):
            drawn = slice(start, start + n)
            e = noise[drawn]
            # x = mean + L e has the covariance L L'; other forms scale each coordinate by itself.
            if cov == "full":
                out[drawn] += e @ factor_of(self.scale[k], e.shape[1]).T
            else:
                out[drawn] += self.scale[k] * e
            start += n
        return out


def fit_mixture(
    z: np.ndarray, k: int, cov: str, *, reg: float, tol: float, steps: int, seed: int
) -> Gaussians:
    """A mixture of ``k`` Gaussians fitted to rows z [n, D] in float64; ``reg`` is added to the diagonal of covariances.

    One Gaussian needs no EM: the fit is the mean and the (biased) variance of the rows.

    Raises:
        ValueError, numpy.linalg.LinAlgError: a covariance is singular.
    """
    if k == 1:
        mean = z.mean(0)
        D = z.shape[1]
        deviation = z - mean
        if cov == "full":
            covariance = deviation.T @ deviation / len(z)
            scale = pack(covariance + reg * np.eye(D))
        elif cov == "diag":
            scale = np.sqrt((deviation**2).mean(0) + reg)
        else:
            scale = np.sqrt((deviation**2).mean(keepdims=True).ravel() + reg)
        return Gaussians(mean[None], scale[None], np.ones(1))
    from sklearn.mixture import GaussianMixture  # takes a second to import; only mixtures need it

    em = GaussianMixture(
        k, covariance_type=cov, tol=tol, reg_covar=reg, max_iter=steps, random_state=seed
    )
    with warnings.catch_warnings():
        # scikit-learn warns if EM reached its last step, or if there are fewer distinct rows than Gaussians. In both
        # cases the result is a mixture.
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
    """The Gaussians of class ``c`` of all M clients in float64; each weight is the number of rows behind the Gaussian.

    Args:
        mean: [M, C, K, D].
        scale: [M, C, K, S].
        weight: [M, C, K] weights in each client's mixtures; 0 where there is no Gaussian.
        count: [M, C] rows behind each mixture.
        c: the class.
    """
    rows = (count[:, c, None] * weight[:, c].astype(np.float64)).ravel()
    # [M K, ..]: the Gaussians of this class of all clients, without those that stand for no row.
    real = rows > 0
    means = mean[:, c].reshape(-1, mean.shape[-1])[real]
    scales = scale[:, c].reshape(-1, scale.shape[-1])[real]
    return Gaussians(means.astype(np.float64), scales.astype(np.float64), rows[real])


def pooled(parts: Gaussians, cov: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean [D] and ``scale`` [S] of the union of several samples, computed from the moments of each sample.

    mean = sum_k n_k mu_k / n;  covariance = sum_k n_k (Sigma_k + (mu_k - mean)(mu_k - mean)') / n. For ``diag`` only
    the diagonal of the covariance is kept, for ``spherical`` only the mean of its diagonal.

    Args:
        parts: mean and biased covariance of each sample; its weight is its number of rows n_k (not all are 0).
        cov: form of the scales.
    """
    share = parts.weight / parts.weight.sum()
    mean = share @ parts.mean
    D = parts.mean.shape[1]
    deviation = parts.mean - mean
    if cov == "full":
        # Between the means first, then within each part: sum_k n_k (L_k L_k') / n.
        total = (share[:, None] * deviation).T @ deviation
        for w, scale in zip(share, parts.scale, strict=True):
            if w > 0:
                L = factor_of(scale, D)
                total += w * (L @ L.T)
        # Rounding may leave eigenvalues just below zero when rows are few, so Cholesky could fail. QR of a square root
        # gives a triangular factor in any case.
        value, vector = np.linalg.eigh(total)
        root = vector * np.sqrt(value.clip(min=0.0))
        upper = np.linalg.qr(root.T)[1]
        return mean, upper.T[np.tril_indices(D)]
    spread = deviation**2
    if cov == "spherical":
        spread = spread.mean(1, keepdims=True)
    return mean, np.sqrt(share @ (parts.scale**2 + spread))
