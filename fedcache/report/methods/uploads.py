"""What leaves a client under each method: the tensors of one upload, what they are made of, and what they tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fedcache.federate.engine.client_data import ClientData
from fedcache.federate.engine.context import Ctx
from fedcache.federate.engine.method import Method
from fedcache.federate.trust.update_validation import counts_rows
from fedcache.heads.linear import Tree
from fedcache.report.methods.facts import traffic_of
from fedcache.report.methods.sizes import Sizes

SHOWN = 4
"""Names of one kind that are written out; of more, the number is said."""

_ROW = "of a class with one row, that row"
_WEIGHTS = (
    "trained weights",
    "after one step on one row, a linear layer differs from what was sent by that row times a number; which rows were "
    "trained on can be guessed",
)
_KINDS: dict[str, tuple[str, str]] = {
    "count": ("rows of each class", "which classes the client has, and how many rows of each"),
    "has": ("which classes have rows", "which classes the client has"),
    "proto": ("mean projected feature of each class", f"{_ROW}, projected"),
    "key": ("mean feature of each class", _ROW),
    "sum": ("sum of the features of each class", _ROW),
    "class_sum": ("sum of the features of each class", _ROW),
    "gram": ("sum of z z' over its rows, upper triangle", "the span of its rows while they are fewer than features"),
    "mean": ("means of each class's Gaussians", _ROW),
    "scale": ("spread of each class's Gaussians", "0 where a class has one row"),
    "weight": ("weights of each class's Gaussians", "how its rows cluster"),
    "R": ("representations of the public rows", "of public rows only, by a model made from its own"),
    "ctx": ("trained prompt vectors", "which rows were trained on can be guessed"),
    "v": ("trained visual prompt", "which rows were trained on can be guessed"),
    "u": ("trained shift of image features", "after one step on one row, that row's gradient"),
    "rho": ("trained shift of text features", "after one step on one row, that row's gradient"),
}
_BATCHNORM = ("statistics of BatchNorm", "means and variances of its rows inside the model")
_LAYER = {"W": _WEIGHTS, "b": _WEIGHTS, "gain": _WEIGHTS, "shift": _WEIGHTS, "mean": _BATCHNORM, "var": _BATCHNORM}
_CONTROL = ("control variate", "the mean gradient of its local steps")
_ALL = ("all its rows", "everything: this is the centralised reference")
_ROWS = ("number of its training rows", "how much data it has")


@dataclass(frozen=True)
class Part:
    """Tensors of one kind in an upload.

    Attributes:
        names: of the tensors.
        shapes: theirs, in the same order.
        dtype: theirs.
        what: what they are made of.
        tells: what the server, or whoever reads the wire, learns of the client's rows.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    what: str
    tells: str

    @property
    def label(self) -> str:
        """The names and shapes, shortened where there are many."""
        if len(self.names) > SHOWN:
            return f"{len(self.names)} tensors, {self.names[0]} to {self.names[-1]}"
        return ", ".join(f"{n} {'x'.join(map(str, s)) or '1'}" for n, s in zip(self.names, self.shapes, strict=True))


def kind_of(name: str) -> tuple[str, str]:
    """(what a tensor of this name is, what it tells); KeyError for a name that nobody described."""
    if name.startswith("c/"):
        return _CONTROL
    if counts_rows(name):
        return _KINDS["count"]
    if name in _KINDS:
        return _KINDS[name]
    return _LAYER[name.rsplit(".", 1)[-1]]


def leaving(method: Method, sizes: Sizes | None = None) -> list[Part]:
    """What one client sends in a round, at some widths (512 features and 10 classes when None): [] when nothing."""
    seen: list[Tree] = []

    def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
        state, up = method.fit(down, state, data, ctx)
        seen.append(up)
        return state, up

    if method.central:
        return [Part((), (), "", *_ALL)]
    traffic_of(replace(method, fit=fit), sizes or Sizes())
    parts: dict[tuple[str, str, str], list[tuple[str, tuple[int, ...]]]] = {}
    for name, t in seen[-1].items():
        what, tells = kind_of(name)
        parts.setdefault((what, tells, str(t.dtype).removeprefix("torch.")), []).append((name, tuple(t.shape)))
    made = [
        Part(tuple(n for n, _ in tensors), tuple(s for _, s in tensors), dtype, what, tells)
        for (what, tells, dtype), tensors in parts.items()
    ]
    if made and "mean" in method.pool(method.resolve()).values():
        made.append(Part(("n",), ((),), "int64", *_ROWS))
    return made


def cells(parts: Iterable[Part]) -> list[tuple[str, str, str, str]]:
    """(tensors, dtype, what they are, what they tell) for a table."""
    return [(p.label, p.dtype, p.what, p.tells) for p in parts]


def leaves(method: Method) -> list[str]:
    """The section of a method's documentation, in Markdown."""
    rows = cells(leaving(method))
    if not rows:
        return ["Nothing."]
    return [
        "In every round, at 512 features and 10 classes, to the server and to whoever reads the wire:",
        "",
        "| tensors | dtype | what they are | what they tell |",
        "|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def by_kind(methods: Iterable[Method]) -> list[tuple[str, str, list[str]]]:
    """(what leaves, what it tells, names of the methods) over all methods, what few send last; nothing first."""
    found: dict[tuple[str, str], list[str]] = {("nothing", "-"): []}
    for method in methods:
        parts = leaving(method)
        for kind in dict.fromkeys((p.what, p.tells) for p in parts) or [("nothing", "-")]:
            found.setdefault(kind, []).append(method.name)
    first, *others = found.items()
    ordered = [first, *sorted(others, key=lambda item: -len(item[1]))]
    return [(what, tells, names) for (what, tells), names in ordered]
