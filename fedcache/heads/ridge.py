"""Linear systems of summed statistics: the packed Gram matrix, and solvers that refuse singular systems.

A system with one ridge is solved by Cholesky. For many ridges, the eigenvalues of the system are computed once
(``spectrum``), and each ridge then costs one product. With random Fourier features, ridge regression approximates
kernel ridge regression with a Gaussian kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor
from torch.nn.functional import pad

from fedcache.errors import FedcacheError, FederatedRunError
from fedcache.heads.linear import Tree, onednn_works, times_transposed

BLOCKS = 8
NARROWEST = 64
"""Maximum number of column blocks of Z'Z, and minimum width of a block. Blocks below the diagonal are not computed."""

SINGLE_ROWS = 1024
"""Number of rows that one product in float32 sums."""

SINGLE_ROUNDING = 6.2e-5
"""Error of products in float32, relative to the products of the lengths of their columns (``gram_single``)."""

LONGEST_FOURIER = math.sqrt(2.0)
"""Maximum length of a row of ``fourier_features``."""

SIDE_BY_SIDE = 256 << 20
"""Limit in bytes for the products that a GPU computes in one launch."""

HALVED = 128
"""Number of columns from which only one triangle of Z'Z is computed, client by client.

With fewer columns, separate calls for all clients cost more time than the other triangle."""


@lru_cache(maxsize=2)
def _triangle(width: int, device: torch.device) -> Tensor:
    """Places of the upper triangle in a flat [width * width], row by row."""
    i, j = torch.triu_indices(width, width, device=device)
    packed: Tensor = i * width + j
    return packed


def _edges(width: int) -> list[int]:
    """The first column of each block of columns, and the end of the last block."""
    count = max(1, min(BLOCKS, width // NARROWEST))
    return [width * k // count for k in range(count + 1)]


def gram(z: Tensor) -> Tensor:
    """Upper triangle of Z'Z, [.., D(D+1)/2] row by row; Z [.., n, D]. Blocks below the diagonal are not computed."""
    D = z.shape[-1]
    full = z.new_empty(*z.shape[:-2], D, D)
    for a, b in pairwise(_edges(D)):
        # Rows a to b of Z'Z, from the diagonal on; numbers to the left of it are never read.
        torch.matmul(z[..., a:b].mT, z[..., a:], out=full[..., a:b, a:])
    return pack(full)


def gram_single(z: Tensor) -> Tensor:
    """``gram`` of rows [.., n, D] in float32: products of ``SINGLE_ROWS`` rows at a time, which are added in float64.

    With u = 2^-24 and b = ``SINGLE_ROWS`` rows in a product, every entry (j, k) is off by at most
    b u / (1 - b u) sum_i |z_ij z_ik| <= 6.2e-5 sqrt(a_jj a_kk), for any order of the sum (Higham, Accuracy and
    Stability, 3.5). For rows in float64, the conversion to float32 adds a rounding error; float16 and float32 rows are
    converted exactly.
    """
    single = z.float()
    if single.device.type == "cpu" and single.shape[-1] >= HALVED and single.shape[-2]:
        n, D = single.shape[-2:]
        made = single.new_empty((*single.shape[:-2], D * (D + 1) // 2), dtype=torch.float64)
        totals = _by_columns
        if torch.get_num_threads() == 1 and not onednn_works():
            totals = _by_halves
        # One client's full matrix at a time: for all clients, only the packed triangles are in memory.
        packed = made.view(-1, made.shape[-1])
        for out, total in zip(packed, totals(single.reshape(-1, n, D)), strict=True):
            out.copy_(pack(total))
        return made
    if single.device.type != "cpu" and single.dim() == 2 and len(single) > SINGLE_ROWS:
        return _gram_of_many_blocks(single)
    # Each product has few rows, so its float32 error stays within the bound. The products are added in float64.
    total = gram(single[..., :SINGLE_ROWS, :]).double()
    for start in range(SINGLE_ROWS, z.shape[-2], SINGLE_ROWS):
        total += gram(single[..., start : start + SINGLE_ROWS, :])
    return total


def _gram_of_many_blocks(single: Tensor) -> Tensor:
    """``gram_single`` of float32 rows [n, D] on a GPU, which multiplies blocks of ``SINGLE_ROWS`` side by side."""
    D = single.shape[1]
    total = single.new_zeros(D, D, dtype=torch.float64)
    most = max(1, SIDE_BY_SIDE // (4 * D * D)) * SINGLE_ROWS
    for start in range(0, len(single), most):
        part = single[start : start + most]
        whole = len(part) // SINGLE_ROWS * SINGLE_ROWS
        if whole:
            # [k, SINGLE_ROWS, D]: k products in one launch, summed in float64.
            blocks = part[:whole].view(-1, SINGLE_ROWS, D)
            total += torch.bmm(blocks.mT, blocks).sum(0, dtype=torch.float64)
        if whole < len(part):
            total += part[whole:].mT @ part[whole:]
    return pack(total)


def _by_columns(each: Tensor) -> Iterator[Tensor]:
    """Upper triangle of Z'Z [D, D] of every client's float32 rows [M, n, D], by products of column blocks.

    oneDNN computes the products where it works. They take 0.7 to 0.85 of the time of ssyrk if the process keeps freed
    memory, as commands do. oneDNN compiles a kernel for every number of rows, so a short last block is filled up with
    rows of zeros, which change nothing.
    """
    D = each.shape[2]
    for rows in each:
        total = rows.new_zeros(D, D, dtype=torch.float64)
        for block in rows.split(SINGLE_ROWS):
            if onednn_works():
                # The number of rows becomes a multiple of ``HALVED``, so that few different numbers occur.
                missing = -len(block) % HALVED
                if missing:
                    block = pad(block, (0, 0, 0, missing))
                # Stored by columns, so that a block of columns is contiguous.
                block = block.mT.contiguous().mT
            columns = block.mT
            # Column blocks a to b against all columns from a on: about half of the square is skipped.
            for a, b in pairwise(_edges(D)):
                total[a:b, a:] += times_transposed(columns[a:b], columns[a:])
        yield total


def _by_halves(each: Tensor) -> Iterator[Tensor]:
    """As ``_by_columns``, by the BLAS routine that computes one triangle (ssyrk of scipy), on one thread.

    It takes 0.9 of the time of products of columns. The BLAS libraries of scipy and torch have threads of their own,
    which slow each other down: Fed3R of 10^7 x 256 took 44 s on two threads and 26 s on one.
    """
    from scipy.linalg.blas import ssyrk  # a tenth of a second to import

    n, D = each.shape[1:]
    part = np.zeros((D, D), np.float32, order="F")
    upper = torch.from_numpy(part.T)  # the lower triangle by columns is the upper one by rows
    with _blas().limit(limits=1, user_api="blas"):  # scipy's BLAS ignores torch's thread limit
        for rows in each:
            # With a single block there is no sum in float64: the product in ``part``, seen as ``upper``, is the result.
            total = upper
            if n > SINGLE_ROWS:
                total = torch.zeros(D, D, dtype=torch.float64)
            for block in rows.split(SINGLE_ROWS):
                ssyrk(1.0, block.numpy().T, c=part, overwrite_c=1, lower=1)
                if total is not upper:
                    for a, b in pairwise(_edges(D)):
                        total[a:b, a:] += upper[a:b, a:]
            yield total


@cache
def _blas() -> ThreadpoolController:
    """The BLAS libraries of this process."""
    return ThreadpoolController()


def pack(full: Tensor) -> Tensor:
    """The upper triangles of matrices [.., D, D], row by row, [.., D(D+1)/2]."""
    return full.flatten(-2).index_select(-1, _triangle(full.shape[-1], full.device))


def unpack_triangle(packed: Tensor, width: int) -> Tensor:
    """The upper triangular matrices [.., D, D] of packed triangles [.., D(D+1)/2]."""
    full = packed.new_zeros(*packed.shape[:-1], width * width)
    full[..., _triangle(width, packed.device)] = packed
    return full.view(*packed.shape[:-1], width, width)


def unpack(packed: Tensor, width: int) -> Tensor:
    """The symmetric matrices [.., D, D] of packed upper triangles [.., D(D+1)/2]."""
    upper = unpack_triangle(packed, width)
    return upper + upper.triu(1).mT


def nearest_gram(packed: Tensor) -> Tensor:
    """The Gram matrix closest to a packed symmetric matrix [D(D+1)/2]: its negative eigenvalues become zero."""
    width = (math.isqrt(8 * packed.shape[-1] + 1) - 1) // 2
    values, vectors = torch.linalg.eigh(unpack(packed, width))
    scaled = vectors * values.clamp(min=0.0).unsqueeze(-2)
    return pack(scaled @ vectors.mT)


def factored(system: Tensor, size: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Lower Cholesky factors [.., D, D], and whether each system is regular, [..].

    Neither the pivots nor the success of a Cholesky factorisation reveal the rank, because both depend on how the BLAS
    rounds. A system is regular when its smallest eigenvalue is larger than the rounding errors, after features are
    scaled to one size.

    Args:
        system: [.., D, D] symmetric.
        size: [.., D] diagonal of A, if the system was computed as a difference A - B and so has rounding errors of
            the size of A. None where nothing was subtracted.
    """
    factor, failed = torch.linalg.cholesky_ex(system)
    diagonal = system.diagonal(dim1=-2, dim2=-1)
    if size is None:
        size = diagonal
    size = torch.maximum(size, diagonal)
    smallest = _smallest_eigenvalue(factor, size)
    # A comparison with NaN is false, so a system with NaN is not regular.
    return factor, (failed == 0) & (smallest > rounding(factor))


def rounding(matrix: Tensor) -> float:
    """Bound for the smallest eigenvalue that a singular matrix [.., D, D] can get by rounding; its diagonal is about 1.

    In all 3,000 singular systems that were tried, it was below 0.6 D eps: D from 3 to 1000, fewer rows than features or
    one feature that is a sum of others, means up to 10,000 standard deviations.
    """
    return 4.0 * matrix.shape[-1] * torch.finfo(matrix.dtype).eps


def varying(size: Tensor, mean: Tensor, rows: Tensor) -> Tensor:
    """1.0 for each feature that varies, else 0.0, [.., D]; 1.0 for all features if none varies.

    A feature counts as constant if its variance is no larger than the rounding errors of the sums it is computed from.
    The variance of a constant was found up to 0.12 n eps of its mean square, in sums of n = 100 to 2,000,000 rows.

    Args:
        size: [.., D] mean squares.
        mean: [.., D] means.
        rows: [..] n, the number of rows behind the means.
    """
    # The rounding of a sum over n rows, and of the products of D features, at this mean square.
    eps = torch.finfo(size.dtype).eps
    lost = 2.0 * (rows.unsqueeze(-1) + size.shape[-1]) * eps * size
    varies = size - mean**2 > lost
    return (varies | ~varies.any(-1, keepdim=True)).to(size.dtype)


def without_constants(covariance: Tensor, varies: Tensor) -> Tensor:
    """A covariance [.., D, D] in which constant features have covariance 0 with others, and the others' mean variance.

    So the mean of its diagonal is the mean variance of the features that vary. In a system with this matrix, a constant
    feature whose right-hand side is 0 has the solution 0.

    Args:
        covariance: [.., D, D].
        varies: from ``varying``.
    """
    # Rows and columns of constant features become zero; their diagonal gets the mean of the other variances.
    made = covariance * varies.unsqueeze(-1) * varies.unsqueeze(-2)
    total = made.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    mean = total / varies.sum(-1, keepdim=True)
    return made + torch.diag_embed((1.0 - varies) * mean)


PROBES = 4
STEPS = 3
"""Number of start vectors, and number of steps, of the inverse iteration."""


def _smallest_eigenvalue(factor: Tensor, size: Tensor) -> Tensor:
    """Smallest eigenvalue [..] of LL' with features scaled by 1 / sqrt(size), by inverse iteration.

    A step costs two triangular solves. An eigenvalue that is tiny compared with the others is found in the first step.
    """
    scale = size.sqrt().unsqueeze(-1)
    start = torch.from_numpy(_start(factor.shape[-1])).to(factor)
    vectors = start.expand(*factor.shape[:-1], PROBES)
    grown = factor.new_ones(())
    for _ in range(STEPS):
        # One step of v <- S^-1 v with S = diag(1/scale) LL' diag(1/scale): v grows by 1 / smallest eigenvalue.
        vectors = scale * torch.cholesky_solve(scale * vectors, factor)
        grown = vectors.norm(dim=-2, keepdim=True)
        vectors = vectors / grown
    return 1.0 / grown.amax(-1).squeeze(-1)


@lru_cache(maxsize=2)
def _start(width: int) -> np.ndarray:
    """Random unit vectors [D, PROBES]. A vector of ones would be orthogonal to x_1 - x_2, the direction of two equal
    features."""
    drawn = np.random.default_rng(0).standard_normal((width, PROBES))
    unit: np.ndarray = drawn / np.linalg.norm(drawn, axis=0)
    return unit


def solve(
    A: Tensor,
    B: Tensor,
    ridge: float,
    *,
    size: Tensor | None = None,
    switch: str = "lam",
    unit: float = 1.0,
) -> Tensor:
    """(A + ridge I)^-1 B by Cholesky, in float64.

    Args:
        A: [.., D, D] symmetric.
        B: [.., D, C].
        ridge: added to the diagonal.
        size: as in ``factored``.
        switch: name of the hyperparameter from which ``ridge`` was computed, for the message.
        unit: ridge = unit * value of this hyperparameter.

    Raises:
        FedcacheError: exit 7 when the system is singular; the hint has a value of ``switch`` that works, if one does.
    """
    extra = A.new_full((A.shape[-1],), ridge)
    factor, regular = factored(A + torch.diag(extra), size)
    if not regular.all():
        variances = A.diagonal(dim1=-2, dim2=-1)
        if size is None:
            size = variances
        raise _singular(variances, size, ridge, switch, unit)
    return torch.cholesky_solve(B, factor)


def spectrum(A: Tensor, B: Tensor, size: Tensor | None = None) -> Tree:
    """A = V diag(values) V' and V'B, from which ``solve_spectrum`` solves for every ridge.

    Args:
        A: [D, D] symmetric.
        B: [D, C].
        size: [D], as in ``factored``.
    """
    values, vectors = torch.linalg.eigh(A)
    largest = values.max()
    if size is not None:
        largest = torch.maximum(largest, size.max())
    return {
        "values": values,
        "vectors": vectors,
        "target": vectors.mT @ B,
        "largest": largest,
        "variances": A.diagonal().clone(),
    }


SPECTRUM = ("values", "vectors", "target", "largest", "variances")
"""Names of the tensors that ``spectrum`` returns."""


def solve_spectrum(known: Tree, ridge: float, *, switch: str = "lam") -> Tensor:
    """(A + ridge I)^-1 B in float64, equal to ``solve`` up to rounding.

    Args:
        known: from ``spectrum``.
        ridge: added to the diagonal.
        switch: as in ``solve``.

    Raises:
        FedcacheError: as ``solve``.
    """
    regular = known["values"] + ridge
    least = rounding(known["vectors"]) * (known["largest"] + ridge)
    if not (regular > least).all():
        raise _singular(known["variances"], known["largest"], ridge, switch, 1.0)
    # (A + ridge I)^-1 B = V (values + ridge)^-1 V'B: one division and one product for each ridge.
    return known["vectors"] @ (known["target"] / regular.unsqueeze(-1))


MOST_FREE = 0.5
"""Maximum degrees of freedom per row for a ridge that ``best_ridge`` may choose.

With more, rows that are almost copies of each other mislead cross-validation. The difference of two copies is a
direction with a tiny eigenvalue. A small ridge fits this direction exactly, which looks like a perfect prediction. With
2 % of copies among the rows, a limit of 0.9 failed in this way in a trial, and a limit of 0.8 in none."""

RIDGES = 10.0 ** (np.arange(-48, 33) / 8.0)
"""Ridges that are tried, from 1e-6 to 1e4, eight per factor of ten, as multiples of the mean eigenvalue.

This mean omits the largest eigenvalue, which belongs to the mean of the rows."""


@dataclass(frozen=True)
class RidgeChoice:
    """A ridge that was chosen from summed statistics."""

    ridge: float
    mean: float  # of the eigenvalues of A without the largest
    limited: bool  # whether it is the lowest that ``MOST_FREE`` allows

    def numbers(self, switch: str, like: Tensor, unit: float = 1.0) -> Tree:
        """The numbers of the choice that a server keeps, as tensors of the dtype and on the device of ``like``.

        Args:
            switch: name of the hyperparameter that sets the ridge.
            like: any tensor.
            unit: ridge = unit * the hyperparameter, as in ``solve``.
        """
        numbers = {
            switch: self.ridge / unit,
            f"{switch}_at_its_lowest": float(self.limited),
            "mean_eigenvalue": self.mean / unit,
        }
        return {name: like.new_tensor(number) for name, number in numbers.items()}


def chosen_numbers(server: Tree, switch: str) -> dict[str, float]:
    """``RidgeChoice.numbers`` among the tensors of a server, for its log; empty if the user set the ridge."""
    if "mean_eigenvalue" not in server:
        return {}
    names = (switch, f"{switch}_at_its_lowest", "mean_eigenvalue")
    return {name: float(server[name]) for name in names}


def mean_eigenvalue(values: Tensor) -> float:
    """The sum of all eigenvalues [D] but the largest, divided by D; a tiny number above 0 if the sum is 0."""
    values = values.clamp(min=0.0)
    mean = float(values.sum() - values.max()) / len(values)
    return max(mean, torch.finfo(values.dtype).tiny)


def ridges_of(values: Tensor) -> Tensor:
    """The ridges that are compared for a matrix with these eigenvalues [D]."""
    return mean_eigenvalue(values) * torch.from_numpy(RIDGES).to(values)


def best_ridge(known: Tree, squares: float, rows: float) -> RidgeChoice:
    """The ridge with the lowest generalised cross-validation n RSS / (n - df)^2 (Golub, Heath and Wahba, 1979).

    With the eigenvalues e of A and t = V'B: RSS(l) = squares - 2 sum t^2 / (e + l) + sum e t^2 / (e + l)^2, and
    df(l) = sum e / (e + l), which is at most ``MOST_FREE`` n. Where no ridge has so few degrees of freedom, the largest
    ridge is taken.

    Args:
        known: from ``spectrum``; A and B are sums over rows.
        squares: sum of the squared targets: the number of rows, where a target is 1 for the class of a row, else 0.
        rows: n, or n - 1 where the mean was subtracted from the targets.
    """
    values = known["values"].clamp(min=0.0)
    tiny = torch.finfo(values.dtype).tiny
    mean = mean_eigenvalue(values)
    ridges = ridges_of(values)
    shifted = values + ridges.unsqueeze(-1)  # [ridges, D]
    explained = known["target"].square().sum(-1)
    residual = squares - (explained * (2.0 * shifted - values) / shifted**2).sum(-1)
    free = (values / shifted).sum(-1)
    error = residual.clamp(min=0.0) / (rows - free).clamp(min=tiny) ** 2
    # df falls as the ridge grows, so the allowed ridges are the last ones.
    forbidden = int((free > MOST_FREE * rows).sum())
    first = min(forbidden, len(ridges) - 1)
    best = first + int(error[first:].argmin())
    limited = best == first and first > 0
    return RidgeChoice(float(ridges[best]), mean, limited)


POWERS = 20
"""Number of steps of the power iteration for the largest eigenvalue."""


def usual_eigenvalue(A: Tensor) -> float:
    """Mean of all eigenvalues of A [D, D] but the largest. Each is weighted by itself, so zeros do not count."""
    tiny = torch.finfo(A.dtype).tiny
    vector = A.sum(-1)
    for _ in range(POWERS):
        unit = vector / vector.norm().clamp(min=tiny)
        vector = A @ unit
    largest = float(vector.norm())
    # The sum of squared eigenvalues over their sum, both without the largest.
    squares = float((A**2).sum()) - largest**2
    total = float(A.trace()) - largest
    if total > 0.0:
        return max(squares, 0.0) / total
    return 0.0


DESTROYS = 0.1
"""Share of the median feature variance above which a ridge determines the model more than the rows do."""


def _singular(
    variances: Tensor, size: Tensor, ridge: float, switch: str, unit: float
) -> FedcacheError:
    """The error of a singular system. It names a ridge that works, if one is small compared with the features'
    variances.

    Args:
        variances: [.., D] diagonal of the system without its ridge.
        size: as in ``factored``, or its largest entry.
        ridge: as in ``solve``.
        switch: as in ``solve``.
        unit: as in ``solve``.
    """
    positive = variances[variances > 0]
    most = 0.0
    if len(positive):
        most = DESTROYS * float(positive.median())
    least = 2.0 * rounding(variances) * float(size.max())
    # Ten times the smallest ridge that makes the system regular, but not above ``most``. The diagonal itself does not
    # give this ridge, because it may contain the square of a mean.
    works = min(10.0 * max(least, ridge), most)
    if max(least, ridge) < most:
        hint = f"Regularise more, for example --set {switch}={works / unit:.1g}"
    else:
        hint = (
            f"No value of {switch} helps, because the features differ too much in scale. Standardise them "
            "with --set feat_post=standardize, or remove constant features."
        )
    return FederatedRunError(
        f"The linear system with {switch}={ridge / unit:g} is not positive definite: some of its "
        f"{variances.shape[-1]} features are constant or linearly dependent, there are more features than "
        "rows, or an upload is wrong.",
        hint,
    )


def drawn_fourier(
    g: np.random.Generator, width: int, dim: int, sigma: float
) -> tuple[Tensor, Tensor]:
    """Frequencies Om [width, dim] ~ N(0, 1 / sigma^2) and phases u [dim] ~ U[0, 2 pi), in float64."""
    frequencies = g.standard_normal((width, dim)) / sigma
    phases = g.uniform(0, 2 * np.pi, dim)
    return torch.from_numpy(frequencies), torch.from_numpy(phases)


def fourier_features(z: Tensor, om: Tensor, u: Tensor) -> Tensor:
    """sqrt(2 / dim) cos(z Om + u) [.., dim] of z [.., width]: inner products are about exp(-|z - z'|^2 / 2 sigma^2)."""
    angles = z @ om.to(z.device) + u.to(z.device)
    return torch.cos(angles) * math.sqrt(2.0 / len(u))
