"""Robust rules: aggregation of m uploads, up to f of them manipulated.

A rule takes V [m, d], one row per client, in float64. Rows are updates (an upload minus the broadcast), statistics per
row of data, or prototypes of one class; see ``pipeline.py``. Every rule except ``mean`` gives each client one vote,
because the number of rows that a client reports can be manipulated too.

Sources: coordinate-wise median and trimmed mean, Yin et al., ICML 2018; geometric median, Pillutla et al., IEEE TSP
2022, by Weiszfeld's iteration, in the form of Vardi and Zhang, PNAS 2000, which also continues from a point that equals
a row; Krum and multi-Krum, Blanchard et al., NeurIPS 2017; nearest-neighbour mixing, Allouah et al., AISTATS 2023.
test_robust_rules.py tests the rules against the (f, kappa) bounds of that last paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor

from fedcache.errors import UsageError, unknown
from fedcache.plugins import KINDS, Plugin, find, offer, plugins

STEPS = 200
"""Maximum number of Weiszfeld's iterations; they stop when the point moves by less than 1e-10 of the spread."""

RULES: tuple[str, ...] = ("mean", "median", "trimmed", "geomedian", "krum", "multikrum")
BEFORE = ("nnm", "clip")
"""Steps that change the rows before a rule combines them."""
offer("aggregators", [*RULES, *BEFORE])
EXAMPLE = "mean, median, trimmed:0.1, geomedian, krum, multikrum:5, nnm+median or clip:1.0"


def median(V: Tensor) -> Tensor:
    """The middle of each coordinate; the mean of the two middle ones for even m."""
    m = len(V)
    ordered = V.sort(0).values
    return (ordered[(m - 1) // 2] + ordered[m // 2]) / 2


def trimmed(V: Tensor, count: int) -> Tensor:
    """The mean of each coordinate without its ``count`` smallest and largest values."""
    return V.sort(0).values[count : len(V) - count].mean(0)


def geomedian(V: Tensor) -> Tensor:
    """The point with the least sum of distances, by Weiszfeld's iteration from the coordinate-wise median."""
    point = median(V)
    spread = float((V - point).norm(dim=1).median())
    # Half of the rows are at this point, so it is the solution.
    if spread == 0.0:
        return point
    for _ in range(STEPS):
        far = (V - point).norm(dim=1)
        met = far <= 1e-9 * spread
        weight = (~met) / torch.where(met, spread, far)
        moved = (weight / weight.sum()) @ V
        # Each row at the point holds the point with a force of 1. The point moves only if the other rows pull harder.
        held = int(met.sum())
        if held:
            pull = float((weight @ (V - point)).norm())
            if pull <= held:
                break
            moved = point + (1.0 - held / pull) * (moved - point)
        step = float((moved - point).norm())
        point = moved
        if step <= 1e-10 * spread:
            break
    return point


def squared_distances(V: Tensor) -> Tensor:
    """Squared distances [m, m], from differences: the expanded square loses all digits if one row is huge."""
    return torch.stack([((V - row) ** 2).sum(1) for row in V])


def krum_order(V: Tensor, f: int) -> Tensor:
    """Clients by the sum of squared distances to their m - f - 2 nearest neighbours, the most central first."""
    neighbours = max(1, len(V) - f - 2)
    # No client is its own neighbour.
    d = squared_distances(V).fill_diagonal_(math.inf)
    nearest = d.sort(1).values[:, :neighbours]
    return nearest.sum(1).argsort(stable=True, dim=0)


def nnm(V: Tensor, f: int) -> Tensor:
    """Every row becomes the mean of its m - f nearest rows, itself among them."""
    near = squared_distances(V).argsort(stable=True, dim=1)[:, : len(V) - f]
    return torch.stack([V[rows].mean(0) for rows in near])


def mean_of_nearest(V: Tensor, point: Tensor, count: int) -> Tensor:
    """The mean of the ``count`` rows nearest to a point."""
    far = ((V - point) ** 2).sum(1)
    nearest = far.argsort(stable=True, dim=0)[:count]
    return V[nearest].mean(0)


def clip(V: Tensor, bound: float) -> Tensor:
    """Rows longer than ``bound`` are shortened to it."""
    length: Tensor = torch.linalg.vector_norm(V, dim=1, keepdim=True)
    return V * (bound / length.clamp(min=bound))


@dataclass(frozen=True)
class RobustRule:
    """A parsed ``--aggregate``: steps that change rows, then one that combines them."""

    text: str  # as written
    before: tuple[tuple[str, float | None], ...]  # (name, number) of each step
    last: str  # of ``RULES``
    # the share that ``trimmed`` leaves out on each side, or the k of ``multikrum``
    number: float | None = None

    def check(self, m: int, f: int) -> None:
        """Refuse a rule that needs more than m clients against f attackers. Raises UsageError, with the number."""
        least = {
            "median": 2 * f + 1,
            "geomedian": 2 * f + 1,
            "krum": 2 * f + 3,
            "multikrum": 2 * f + 3,
            "trimmed": 2 * self.left_out(m) + 1,
        }
        needed = least.get(self.last, 0)
        honest = m - f
        if self.last == "multikrum" and self.number is not None and self.number > honest:
            raise UsageError(
                f"--aggregate {self.text} selects more clients than are assumed to be honest ({honest} of {m}).",
                f"Use at most multikrum:{honest}.",
            )
        if any(name == "nnm" for name, _ in self.before):
            needed = max(needed, 2 * f + 1)
        if m < needed:
            raise UsageError(
                f"With {f} malicious clients, --aggregate {self.text} needs at least {needed} clients per round, but "
                f"there are only {m}.",
                "Use more clients per round (--participation), or a smaller share of malicious clients (--byzantine).",
            )

    def left_out(self, m: int) -> int:
        """Values that ``trimmed`` leaves out on each side of m values."""
        if self.last != "trimmed":
            return 0
        # In float64 a product may be slightly below a whole number: 0.29 x 100, for example.
        return int(float(self.number or 0.0) * m + 1e-9)

    def by_coordinate(self, m: int) -> bool:
        """Whether numbers of the result can come from different rows, so that it is no weighted mean of rows."""
        if self.last == "trimmed":
            return self.left_out(m) > 0
        return self.last == "median" or find("aggregators", self.last) is not None

    def of_moments(self, V: Tensor, f: int) -> Tensor:
        """``__call__`` for rows that hold first and second moments; it keeps the moments consistent with one another.

        A mean of rows does so. A rule by coordinates does not, because a median of variances does not fit a median of
        means. So such a rule is replaced by the mean of the rows nearest to its result.
        """
        made = self(V, f)
        m = len(V)
        if self.by_coordinate(m):
            return mean_of_nearest(V, made, m - max(f, self.left_out(m)))
        return made

    def __call__(self, V: Tensor, f: int) -> Tensor:
        """The aggregate [d] of the rows, each with one vote.

        Args:
            V: [m, d] float64, finite.
            f: number of clients that may be attackers.
        """
        m = len(V)
        for name, number in self.before:
            if name == "nnm":
                V = nnm(V, f)
            else:
                V = clip(V, float(number or 0.0))
        if self.last == "median":
            return median(V)
        if self.last == "trimmed":
            return trimmed(V, self.left_out(m))
        if self.last == "geomedian":
            return geomedian(V)
        plugin = find("aggregators", self.last)
        if plugin is not None:
            return _of_plugin(plugin, V, f, self.number)
        if self.last in ("krum", "multikrum"):
            k = 1
            if self.last != "krum":
                k = min(int(self.number or m - f), m)
            most_central = krum_order(V, f)[:k]
            return V[most_central].mean(0)
        return V.mean(0)


def _of_plugin(plugin: Plugin, V: Tensor, f: int, number: float | None) -> Tensor:
    """The aggregate by a plug-in: a function of V that may take ``f`` and the ``number`` after its name by keyword.

    Raises UsageError for one that cannot be loaded, or does not return d finite numbers.
    """
    rule = plugin.load()
    named = f"The aggregator {plugin.name!r} of {plugin.origin}"
    if not callable(rule):
        kind = type(rule).__name__
        raise UsageError(f"{named} is a {kind}.", KINDS["aggregators"])
    known = signature(rule).parameters
    offered = {"f": f, "number": number}
    keywords = {key: value for key, value in offered.items() if key in known}
    made = rule(V.clone(), **keywords)
    if (
        not isinstance(made, Tensor)
        or made.shape != V.shape[1:]
        or not bool(torch.isfinite(made).all())
    ):
        found = f"a {type(made).__name__}"
        if isinstance(made, Tensor):
            found = f"{tuple(made.shape)} numbers"
        raise UsageError(
            f"{named} returned {found} for rows of shape {tuple(V.shape)}.",
            f"It must take V [m, d] and return [{V.shape[1]}] finite numbers.",
        )
    return made.to(V)


MEAN = RobustRule("mean", (), "mean")
"""The rule that uses the method's own pooling."""


def parse_rule(text: str) -> RobustRule:
    """``nnm+trimmed:0.1`` and the like. Raises UsageError for an unknown name or a number out of range."""
    before = [_step(text, word) for word in text.split("+")]
    last: tuple[str, float | None] = ("mean", None)
    if before[-1][0] not in BEFORE:
        last = before.pop()
    for name, _ in before:
        if name not in BEFORE:
            raise UsageError(
                f"--aggregate {text}: no other rule can follow {name}, because {name} already gives a single result.",
                f"For example {EXAMPLE}.",
            )
    return RobustRule(text, tuple(before), *last)


def _step(text: str, word: str) -> tuple[str, float | None]:
    name, _, number = word.partition(":")
    plugin = find("aggregators", name)
    if name not in (*RULES, *BEFORE) and plugin is None:
        known = (*RULES, *BEFORE, *plugins("aggregators"))
        raise unknown("rule of --aggregate", name, known, hint=f"For example {EXAMPLE}.")
    # Name -> check of its number, and a description of valid numbers.
    numbers: dict[str, tuple[Callable[[float], bool], str]] = {
        "trimmed": (lambda x: 0.0 <= x < 0.5, "a share below 0.5"),
        "multikrum": (lambda x: x >= 1 and x == int(x), "a number of clients"),
        "clip": (lambda x: x > 0.0, "a norm above 0"),
    }
    if plugin is not None:
        numbers[name] = (math.isfinite, "a number")
    if name not in numbers and number:
        raise UsageError(
            f"--aggregate {text}: {name} does not take a number.", f"For example {EXAMPLE}."
        )
    # Plug-ins and multikrum (all honest clients) do not need their number.
    optional = name not in numbers or plugin is not None or name == "multikrum"
    if optional and not number:
        return name, None
    legal, valid = numbers[name]
    try:
        value = float(number)
        good = math.isfinite(value) and legal(value)
    except ValueError:
        good = False
    if not good:
        example = "1"
        if name == "trimmed":
            example = "0.1"
        raise UsageError(
            f"--aggregate {text}: {name} needs {valid}, as in {name}:{example}.",
            f"For example {EXAMPLE}.",
        )
    return name, value
