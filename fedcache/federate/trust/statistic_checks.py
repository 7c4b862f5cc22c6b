"""Checks of statistics: whether the numbers of one upload can be statistics of that many rows.

Sums over rows bound one another. Let z be the n rows of a client, S_c the sum of the n_c rows of class c and G the sum
of all z z'. For any rows of a client:

    G - sum_c S_c S_c' / n_c is positive semi-definite    (the scatter within the classes)
    trace(G) >= sum_c |S_c|^2 / n_c
    W_c = (G + ridge I)^-1 S_c fulfils sum_c W_c' (G + ridge I) W_c <= n
    variances and weights of a mixture are not negative, and the weights of a class sum to 1

and if no row is longer than r:  |S_c| <= n_c r, trace(G) <= n r^2, |mean| <= r.

An upload that violates one of these inequalities was not computed from rows. An upload that satisfies all of them can
still be wrong: it is then a statistic of other rows than the client's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcache.federate.engine.method import Statistic, StatisticKind, Uploads
from fedcache.heads.linear import Tree
from fedcache.heads.ridge import unpack

LENGTH_SLACK = 1e-2
"""Relative tolerance for the length of a row, because features may have been rounded to 16 bits."""

ROUNDINGS = 8.0
"""Tolerated number of rounding errors of a sum, for each of its rows and columns."""


@dataclass(frozen=True)
class _Checked:
    """One statistic of an upload, and the facts it is checked against."""

    name: str  # of the tensor
    values: Tensor  # float64
    declared: Statistic
    eps: float  # relative rounding error of the type in which the numbers were sent
    statistics: Mapping[StatisticKind, Tensor]  # all statistics of the upload, float64
    ridge: float  # on the diagonal of the gram matrix of the upload
    count: Tensor | None  # [C] rows of each class, if the upload has counts
    rows: float  # of the client
    longest: float  # upper bound of the norm of a row

    @property
    def counted(self) -> float:
        """Number of rows of the statistic: the counts of the upload, or all rows of the client."""
        if self.count is None:
            return self.rows
        return float(self.count.sum())

    @property
    def counts(self) -> list[float]:
        """Number of rows of each class; without counts in the upload, the client's number of rows for every class."""
        if self.count is None:
            return [self.rows] * len(self.values)
        counts: list[float] = self.count.tolist()
        return counts

    def tolerance(self, width: int) -> float:
        """Relative error of a sum over the rows and of a product with so many columns."""
        return ROUNDINGS * (self.eps * (self.rows + width) + self.declared.rounding)

    @property
    def max_norm(self) -> float:
        """``longest`` with a tolerance for the rounding of features."""
        return self.longest * (1.0 + LENGTH_SLACK)

    @property
    def packed_width(self) -> int:
        """D, for values that are packed matrices [D, D]."""
        return (math.isqrt(8 * self.values.shape[-1] + 1) - 1) // 2

    def too_long(self, what: str, length: float, rows: float) -> str:
        """In words, that a sum of ``rows`` rows is too long; ``what`` names the sum and the verb, for example "is"."""
        most = rows * self.longest
        bound = f"the sum of {rows:g} rows with norms of at most {self.longest:.3g} has a norm of at most {most:.3g}"
        return f"{what} too large in norm: {length:.3g}, but {bound}"

    def too_large(self, what: str, rows: float) -> str:
        """In words, that a sum of squares of ``rows`` rows is too large; ``what`` says how large it is."""
        most = rows * self.longest * self.longest
        return (
            f"is too large: {what}, but {rows:g} rows with norms of at most {self.longest:.3g} give at most "
            f"{most:.3g}"
        )


Check = Callable[[_Checked], "str | None"]


def statistic_problem(
    expected: Uploads, up: Tree, rows: float, longest: float | None
) -> str | None:
    """The first reason why an upload is no statistic of the client's rows, in words; None for a valid upload.

    Args:
        expected: declared form of an upload.
        up: finite, with the declared names, shapes and types.
        rows: training rows of the client.
        longest: upper bound of the norm of a row of features; None if unknown.
    """
    declared = {name: t.statistic for name, t in expected.items() if t.statistic is not None}
    if not declared:
        return None
    statistics = {statistic.kind: up[name].double() for name, statistic in declared.items()}
    # The ridge of the gram matrix, 0 without one.
    ridges = [statistic.ridge for statistic in declared.values() if statistic.kind == "gram"]
    ridge = max(ridges, default=0.0)
    counts = (up[name].double() for name, t in expected.items() if t.counts_rows)
    count = next(counts, None)
    for name, statistic in declared.items():
        # A declared bound of the statistic's own rows replaces that of the features.
        longest_row = math.inf
        if statistic.longest is not None:
            longest_row = statistic.longest
        elif longest is not None:
            longest_row = longest
        checked = _Checked(
            name,
            statistics[statistic.kind],
            statistic,
            torch.finfo(expected[name].dtype).eps,
            statistics,
            ridge,
            count,
            rows,
            longest_row,
        )
        why = CHECKS[statistic.kind](checked)
        if why is not None:
            return f"{name} {why}"
    return None


def _sum(checked: _Checked) -> str | None:
    """Sum of all rows, which equals the sum of the class sums."""
    length = float(checked.values.norm())
    if length > checked.counted * checked.max_norm:
        return checked.too_long("is", length, checked.counted)
    if "class sums" not in checked.statistics:
        return None
    of_classes = checked.statistics["class sums"]
    difference = checked.values - of_classes.sum(0)
    apart = float(difference.norm())
    scale = float(of_classes.norm(dim=1).sum())
    # Large rows can cancel in their sum, but their rounding errors do not.
    if "gram" in checked.statistics:
        full = unpack(checked.statistics["gram"], len(checked.values))
        squared = float(full.trace())
        scale += math.sqrt(max(0.0, checked.rows * squared))
    if apart > checked.tolerance(len(checked.values)) * scale:
        return f"differs from the sum of the class sums by {apart:.3g}"
    return None


def _class_sums(checked: _Checked) -> str | None:
    """Sums of the rows of each class."""
    lengths = checked.values.norm(dim=-1)
    if checked.count is None:
        together = float(lengths.sum())
        if together > checked.rows * checked.max_norm:
            return checked.too_long("has class sums that are together", together, checked.rows)
        return None
    absent = (checked.count == 0) & (lengths > 0)
    if absent.any():
        c = int(absent.nonzero()[0])
        return f"is not 0 for class {c}, for which the upload has no rows"
    if math.isinf(checked.max_norm):
        return None
    excess = lengths - checked.count * checked.max_norm
    c = int(excess.argmax())
    if float(excess[c]) > 0.0:
        what = f"has for class {c} a sum that is"
        return checked.too_long(what, float(lengths[c]), float(checked.count[c]))
    return None


def _class_means(checked: _Checked) -> str | None:
    """Means of the rows of each class."""
    length = float(checked.values.norm(dim=-1).max())
    if length > checked.max_norm:
        return f"has a mean with norm {length:.3g}, but the norms of rows are at most {checked.longest:.3g}"
    return None


def _moments(checked: _Checked, width: int) -> Tensor:
    """Rows M [k, D] with sum of z z' >= M'M, by the class sums of the upload; [0, D] without class sums."""
    if checked.count is not None:
        return _moments_of_classes(checked, width)
    sums = checked.statistics.get("class sums", checked.values.new_zeros(0, width))
    total = sums.sum(0, keepdim=True)[: len(sums)]  # [1, D], or [0, D] without class sums
    return total / math.sqrt(max(checked.rows, 1.0))


def _moments_of_classes(checked: _Checked, width: int) -> Tensor:
    """Rows m_c [C, D] with the sum of z z' of class c >= m_c m_c'; [0, D] without class sums."""
    sums = checked.statistics.get("class sums", checked.values.new_zeros(0, width))
    if checked.count is None:
        return sums / math.sqrt(max(checked.rows, 1.0))
    roots = checked.count[: len(sums)].clamp(min=1.0).sqrt()
    return sums / roots.unsqueeze(-1)


def _gram(checked: _Checked) -> str | None:
    """Sum of z z' over all rows."""
    width = checked.packed_width
    full = unpack(checked.values, width)
    full.diagonal().sub_(checked.ridge)
    why = _second_moments(checked, full, _moments(checked, width), checked.counted)
    # The lengths of class sums add up to at most the sum of all row lengths, whose square is at most n trace(G).
    if why is None and checked.count is None and "class sums" in checked.statistics:
        together = float(checked.statistics["class sums"].norm(dim=-1).sum())
        most = checked.rows * float(full.trace()) * (1.0 + checked.tolerance(width))
        if together * together > most:
            why = "is too small for the class sums in the same upload"
    return why


def _class_grams(checked: _Checked) -> str | None:
    """Sum of z z' over the rows of each class."""
    width = checked.packed_width
    moments = _moments_of_classes(checked, width)
    counts = checked.counts
    for c, packed in enumerate(checked.values):
        why = _second_moments(checked, unpack(packed, width), moments[c : c + 1], counts[c])
        if why is not None:
            return f"of class {c} {why}"
    return None


def _second_moments(checked: _Checked, full: Tensor, moments: Tensor, rows: float) -> str | None:
    """Why a matrix [D, D] cannot be the sum of z z' over ``rows`` rows; ``moments`` bound it from below."""
    width = full.shape[-1]
    trace = float(full.trace())
    if rows == 0.0:
        if not full.any():
            return None
        return "is not 0, but the upload has no rows"
    size = trace + checked.ridge * width  # of the matrix that was rounded
    tolerance = checked.tolerance(width) * max(size, 0.0)
    smallest = float(full.diagonal().min())
    if smallest < -tolerance:
        return f"contains {smallest:.3g} where a sum of squares is expected"
    if trace > rows * checked.max_norm * checked.max_norm:
        return checked.too_large(f"its trace is {trace:.3g}", rows)
    least = float((moments**2).sum())
    if trace + tolerance < least:
        return f"is too small: its trace is {trace:.3g}, but the sums in the same upload need a trace of {least:.3g}"
    scatter = full
    if len(moments):
        scatter = full - moments.mT @ moments
    # A Cholesky factor proves that there is no negative eigenvalue, and is faster than the eigenvalues. The second
    # result is 0 if there is a factor.
    shift = torch.eye(width, dtype=full.dtype, device=full.device) * tolerance
    if not torch.linalg.cholesky_ex(scatter + shift)[1]:
        return None
    lowest = float(torch.linalg.eigvalsh(scatter)[0])
    if lowest < -tolerance:
        what = "it"
        if len(moments):
            what = "the rest after subtracting the sums in the same upload"
        return f"is not a sum of z z' over rows: {what} has the eigenvalue {lowest:.3g}"
    return None


def _squares(checked: _Checked) -> str | None:
    """Sum of the squared rows."""
    moments = _moments(checked, checked.values.shape[-1])
    least = (moments**2).sum(0, keepdim=True)
    return _squared(checked, checked.values.unsqueeze(0), least, [checked.counted])


def _class_squares(checked: _Checked) -> str | None:
    """Sum of the squared rows of each class."""
    moments = _moments_of_classes(checked, checked.values.shape[-1])
    return _squared(checked, checked.values, moments**2, checked.counts)


def _squared(checked: _Checked, squares: Tensor, least: Tensor, counts: list[float]) -> str | None:
    """Why [k, D] cannot be sums of squares over ``counts`` rows each; ``least`` bounds them from below."""
    smallest = float(squares.min())
    if smallest < 0.0:
        return f"contains {smallest:.3g} where a sum of squares is expected"
    for total, rows in zip(squares.sum(-1).tolist(), counts, strict=True):
        if rows == 0.0 and total > 0.0:
            return "is not 0 for classes without rows"
        if rows > 0.0 and total > rows * checked.max_norm * checked.max_norm:
            return checked.too_large(f"its sum is {total:.3g}", rows)
    rounding = 1.0 + checked.tolerance(squares.shape[-1])
    if len(least) and bool((squares * rounding < least).any()):
        return "is too small for the squares of the sums in the same upload"
    return None


def _ridge_solutions(checked: _Checked) -> str | None:
    """W_c = C^-1 S_c of the client's own rows, with C from the same upload."""
    packed = checked.statistics["gram"]
    width = checked.values.shape[-1]
    system = unpack(packed, width)
    sums = checked.values @ system  # [C, D]
    energy = float((sums * checked.values).sum())
    # The rounding error of a solution grows with the largest entries of its system.
    rounding = checked.tolerance(width) * float(system.diagonal().abs().sum())
    error = rounding * float((checked.values**2).sum())
    most = checked.rows * (1.0 + checked.tolerance(width)) + error
    # Written so that numbers that overflow here are refused too.
    if not energy <= most or not math.isfinite(most):
        return f"fits its rows with {energy:.3g}, but {checked.rows:g} rows give at most {checked.rows:g}"
    together = float(sums.norm(dim=-1).sum())
    error = rounding * float(checked.values.norm(dim=-1).sum())
    if together > checked.rows * checked.max_norm + error:
        return checked.too_long("belongs to class sums that are together", together, checked.rows)
    return None


def _mixture_deviations(checked: _Checked) -> str | None:
    """Standard deviations of Gaussians."""
    negative = _negative(checked.values, "standard deviation")
    if negative is not None:
        return negative
    width = checked.statistics["mixture means"].shape[-1]
    # A single deviation stands for every feature.
    repeats = width / checked.values.shape[-1]
    total = (checked.values**2).sum(-1) * repeats
    return _spread(checked, total, width)


def _mixture_factors(checked: _Checked) -> str | None:
    """Cholesky factors of covariances, packed row by row."""
    width = checked.statistics["mixture means"].shape[-1]
    rows = torch.arange(1, width + 1, device=checked.values.device)
    places = rows * (rows + 1) // 2 - 1
    diagonal = checked.values[..., places]
    negative = _negative(diagonal, "number on the diagonal of a Cholesky factor")
    return negative or _spread(checked, (checked.values**2).sum(-1), width)


def _negative(t: Tensor, what: str) -> str | None:
    """In words, that a number is below 0; None if there is none."""
    smallest = float(t.min())
    if smallest < 0.0:
        return f"contains a negative {what} ({smallest:.3g})"
    return None


def _spread(checked: _Checked, total: Tensor, width: int) -> str | None:
    """In words, that the summed variances of a Gaussian are too large; None if they are not."""
    found = float(total.max())
    most = checked.max_norm * checked.max_norm + width * checked.declared.ridge * (
        1.0 + LENGTH_SLACK
    )
    if found > most:
        return (
            f"has a total variance of {found:.3g} over all features, too large for rows with norms of at most "
            f"{checked.longest:.3g}"
        )
    return None


def _mixture_weights(checked: _Checked) -> str | None:
    """Weights of the Gaussians of each class, which sum to 1 if the client has rows of the class."""
    negative = _negative(checked.values, "weight")
    if negative is not None:
        return negative
    total = checked.values.sum(-1)
    expected = torch.ones_like(total)
    if checked.count is not None:
        expected = (checked.count > 0).double()
    apart = (total - expected).abs()
    c = int(apart.argmax())
    found = float(total[c])
    weight = float(expected[c])
    if float(apart[c]) > checked.eps * (checked.values.shape[-1] + 1):
        return f"sums to {found:.3g} for class {c}, expected {weight:g}"
    return None


CHECKS: Mapping[StatisticKind, Check] = {
    "sum": _sum,
    "class sums": _class_sums,
    "class means": _class_means,
    "gram": _gram,
    "class grams": _class_grams,
    "squares": _squares,
    "class squares": _class_squares,
    "ridge solutions": _ridge_solutions,
    "mixture means": _class_means,  # each is a weighted mean of rows
    "mixture deviations": _mixture_deviations,
    "mixture factors": _mixture_factors,
    "mixture weights": _mixture_weights,
}
"""Kind of statistic -> function that checks it."""
