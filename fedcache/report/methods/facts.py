"""Facts of a method for lists and pages: its objective, its switches for paper and official code, and its messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from fedcache.config import Home
from fedcache.extract import backbones
from fedcache.extract.backbones.clip_towers import load_towers
from fedcache.extract.planning.plan import memory_of
from fedcache.federate.engine.client_data import ClientData, Data, FrozenEncoders
from fedcache.federate.engine.context import Ctx
from fedcache.federate.engine.hyperparameters import with_schedule_rounds
from fedcache.federate.engine.method import Method, UploadTensor
from fedcache.federate.engine.run import TrainingRun, run
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.engine.simulated_time import why_not_asynchronous
from fedcache.federate.execution.executor import Sequential
from fedcache.federate.execution.grid_batch import GridBatch
from fedcache.federate.execution.memory_estimate import ExecutionPlan
from fedcache.federate.methods import METHODS, NAMES, module_of, wants_encoders
from fedcache.federate.partition.partition import Client
from fedcache.federate.trust.pipeline import without_noise
from fedcache.federate.trust.update_validation import counts_rows
from fedcache.heads.linear import Tree
from fedcache.parsing import Facts, Record
from fedcache.report.methods import Sizes

CLIENTS = 3
"""Number of clients in a trial, if the counts do not depend on it."""
MOST_CLIENTS = 10
"""Maximum number of clients in a trial, if the counts depend on it."""
PER_CLASS = 2
"""Rows of each class for each client of a trial."""
IDLE = ("epochs", "personal_epochs", "esd_epochs", "e_h", "e_b", "K", "probe_epochs")
"""Hyperparameters for the number of passes over rows. They do not affect traffic."""


def traffic_of(method: Method, sizes: Sizes) -> Facts:
    """Traffic of one client that owns every class, counted in rounds without training.

    Returns:
        ``up``, ``down`` (scalars), ``up_bytes``, ``down_bytes``, ``paper_up``, ``paper_down`` of a round after the
        first. ``first_down`` is of the first round, in which clients receive text features but no uploads.
        ``clients`` is the number of clients if the counts depend on it, else 0.
    """
    return dict(_trial(method, sizes)[0])


# The cache is for a page, which needs the counts first and then the tensors.
@lru_cache(maxsize=1)
def _trial(method: Method, sizes: Sizes) -> tuple[Facts, Tree]:
    """The counts of ``traffic_of``, and the tensors that a client sent in the last round."""
    sent: Tree = {}

    def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
        nonlocal sent
        state, sent = method.fit(down, state, data, ctx)
        return state, sent

    hp = method.resolve()
    # If the server sends the uploads of all clients to each client, the counts depend on the number of clients.
    stacked = not method.one_shot and "stack" in method.pool(hp).values()
    count = CLIENTS
    if stacked:
        count = min(method.defaults.clients, MOST_CLIENTS)
    data = _rows(method, sizes, count)
    per_client = PER_CLASS * sizes.classes
    rows = np.arange(count * per_client)
    clients = [
        Client(f"c{i}", rows[i * per_client : (i + 1) * per_client], rows[:0]) for i in range(count)
    ]
    settings: Facts = {**hp, **_fewest_passes(method)}
    # The few rows of a trial cannot fill a queue of anchors (FLESD).
    if "anchors" in hp:
        settings["anchors"] = "all"
    # The second round is counted, because clients receive text features only in the first.
    rounds = 2
    if method.one_shot:
        rounds = 1
    # ``fit`` records the uploads. A central method has none.
    watched = method
    if not method.central:
        watched = replace(method, fit=fit)
    settings = with_schedule_rounds(settings, rounds)
    job = RunState(watched, settings, data, clients, 0, torch.float32)
    job.start()
    executor = Sequential(GridBatch([job], ExecutionPlan(Sequential.name, 1)))
    for _ in range(rounds):
        executor.train_round()
        if executor.batch.failed:
            raise executor.batch.failed[0]
    first = job.traffic.rounds[0]
    last = job.traffic.rounds[-1]
    # The traffic of all clients is divided by their number.
    served = max(1, last.clients)
    keys = ("up", "down", "up_bytes", "down_bytes", "paper_up", "paper_down")
    sends = {key: getattr(last, key) // served for key in keys}
    sends["first_down"] = first.down // served
    sends["clients"] = 0
    if stacked:
        sends["clients"] = count
    return sends, sent


def _fewest_passes(method: Method) -> dict[str, int]:
    """The hyperparameters of ``IDLE`` that a method has, at their lowest values."""
    return {h.name: max(0, int(h.low or 0)) for h in method.hparams if h.name in IDLE}


def _rows(method: Method, sizes: Sizes, clients: int) -> Data:
    """Rows of every class for every client: random numbers, because traffic does not depend on the values."""
    need = method.reads(method.resolve())
    frozen: FrozenEncoders | None = None
    width = sizes.width
    if wants_encoders(method):
        frozen, width = _towers()
    elif "text" in need:
        width = sizes.text_width
    count = clients * PER_CLASS * sizes.classes
    y = torch.arange(sizes.classes).repeat(clients * PER_CLASS)
    generator = torch.Generator().manual_seed(0)
    # Traffic does not depend on the size of images, but the towers need 32 pixels.
    side = 32
    if frozen is None:
        side = 8
    image = None
    if "pixels" in need:
        image = (side, side)
        shape = (count, 1, side * side * 3)
        x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    else:
        x = torch.randn(count, 1, width, generator=generator)
        x = torch.nn.functional.normalize(x, dim=-1)
    text = None
    if "text" in need:
        text = torch.randn(sizes.classes, width, generator=generator)
        text = torch.nn.functional.normalize(text, dim=-1)
    return Data(
        x,
        y,
        sizes.classes,
        text,
        (width,),
        names=tuple(f"class {i}" for i in range(sizes.classes)),
        image=image,
        towers=frozen,
    )


def _towers() -> tuple[FrozenEncoders, int]:
    """The towers of glyph-clip, which are part of the package, and their width."""
    row = backbones.lookup("glyph-clip")
    home = Home.from_environment()
    weights = backbones.locate(row, given={}, home=home.root, memory=memory_of(home), offline=True)
    return load_towers(row, weights, row.recipe, row.template or "{}"), row.width


def why_it_waits(method: Method) -> str | None:
    """The reason why a method does not take ``--asynchronous``; None if it does."""
    return why_not_asynchronous(method, method.resolve())


def facts_in_list(method: Method) -> Facts:
    """Facts of a method for a list, without its traffic."""
    return {
        "name": method.name,
        "summary": method.summary,
        "paper": method.paper,
        "needs": sorted(method.needs),
        "fidelity": fidelities(method),
        "one_shot": method.one_shot,
    }


def every_method(sizes: Sizes) -> list[tuple[Facts, Facts]]:
    """(facts, traffic) of every method, counted now, which takes seconds. The catalogue has the same numbers."""
    return [(facts_in_list(m), traffic_of(m, sizes)) for m in METHODS.values()]


def objective(name: str) -> str:
    """The equations of a method and the differences between paper and code: the docstring of its module."""
    module = METHODS[name].fit.__module__
    if name in NAMES:
        module = module_of(name)
    text = getattr(sys.modules.get(module), "__doc__", None) or ""
    return text.strip()


def disagreements(method: Method) -> list[dict[str, str]]:
    """Each switch that decides a numbered disagreement (D-nn) between paper and code, with its value for both."""
    found = []
    for h in method.hparams:
        numbers = re.findall(r"D-\d+", h.help)
        if numbers:
            switch = {"d": ", ".join(numbers), "switch": h.name, "paper": h.show()}
            switch["official"] = h.show_preset("official")
            found.append(switch)
    return found


def fidelities(method: Method) -> str:
    """Fidelities that a result may have: with one stored view, and with four views if these give another fidelity."""
    hp = method.resolve()
    one = method.faithful(hp, 1)
    four = method.faithful(hp, 4)
    if one == four:
        return one
    return f"{one}; {four} with views"


SHOWN = 4
"""Maximum number of tensors of one kind whose names are listed. For more tensors, their number is shown."""

_ROW = "the row itself, if a class has only one"
_WEIGHTS = (
    "trained weights",
    "after one local step on one row, the change of a linear layer is a multiple of that row; an attacker can guess "
    "which rows were used for training",
)
_KINDS: dict[str, tuple[str, str]] = {
    "count": ("rows of each class", "which classes the client has, and how many rows of each"),
    "target_sum": ("rows of each class", "which classes the client has, and how many rows of each"),
    "has": ("which classes have rows", "which classes the client has"),
    "proto": ("mean projected feature of each class", "the projected row, if a class has only one"),
    "sum": ("sum of the features of each class", _ROW),
    "class_sum": ("sum of the features of each class", _ROW),
    "head": (
        "ridge solution of its own rows",
        "together with the sum of z z': the sum of the features of each class",
    ),
    "gram": (
        "sum of z z' over its rows, upper triangle",
        "the span of its rows, if there are fewer rows than features",
    ),
    "square": ("sum of the squared features of all rows", "the spread of its rows"),
    "class_square": (
        "sum of the squared features of each class",
        "the squared row, if a class has only one",
    ),
    "class_gram": (
        "sum of z z' over the rows of each class, upper triangle",
        _ROW,
    ),
    "mean": ("means of each class's Gaussians", _ROW),
    "scale": ("spread of each class's Gaussians", "0 if a class has one row"),
    "weight": ("weights of each class's Gaussians", "the clusters of its rows"),
    "ctx": ("trained prompt vectors", "an attacker can guess which rows were used for training"),
    "v": ("trained visual prompt", "an attacker can guess which rows were used for training"),
    "n": ("number of its training rows", "how much data it has"),
}
_BATCHNORM = ("statistics of BatchNorm", "means and variances of its rows in a layer of the model")
_LAYER = {
    "W": _WEIGHTS,
    "b": _WEIGHTS,
    "gain": _WEIGHTS,
    "shift": _WEIGHTS,
    "mean": _BATCHNORM,
    "var": _BATCHNORM,
}
_CONTROL = ("control variate", "the mean gradient of its local steps")
_ALL = ("all its rows", "everything: this is the centralised reference")
_ROWS = ("number of its training rows", "how much data it has")


def rows_in_models(method: Method, settings: Record | None = None) -> tuple[str, ...]:
    """Names of the tensors of a client's saved model that contain data of single training rows; () for most methods.

    Such a tensor grows with the rows, as a cache of their features does. To find it, the method trains clients with
    two, three and four rows of every class, and the shapes of their tensors are compared.

    Args:
        method: the method.
        settings: hyperparameters that replace its defaults.
    """
    sizes = Sizes(8, 8, 3)
    hp = {**method.resolve(), **(settings or {}), **_fewest_passes(method)}
    # The clients need 2 + 3 + 4 = 9 rows of every class; the data of CLIENTS + 2 clients have 10.
    data = _rows(method, sizes, CLIENTS + 2)
    # Some settings read several views of each row.
    data = replace(data, x=data.x[:].expand(-1, 4, -1))
    row_counts = [sizes.classes * each for each in range(PER_CLASS, PER_CLASS + CLIENTS)]
    edges = np.cumsum([0, *row_counts])
    rows = np.arange(edges[-1])
    clients = [Client(f"c{i}", rows[a:b], rows[:0]) for i, (a, b) in enumerate(pairwise(edges))]
    job = TrainingRun(method, data, clients)
    out = run(job, with_schedule_rounds(hp, 1))
    if out.protocol == "global":
        return ()
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for i in range(CLIENTS):
        model = out.deployed(i)
        if model is None:
            continue
        for name, tensor in model.personal.items():
            shapes.setdefault(name, set()).add(tensor.shape)
    return tuple(sorted(name for name, seen in shapes.items() if len(seen) > 1))


@dataclass(frozen=True)
class Part:
    """Tensors of one kind in an upload.

    Attributes:
        names: of the tensors.
        shapes: of the tensors, in the same order.
        dtype: of all of them.
        what: the statistic or weights that they hold.
        reveals: information on the client's rows for the server, or for anyone who reads the messages.
        private: whether the epsilon of ``--dp-noise`` covers the tensors, in words.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    what: str
    reveals: str
    private: str

    @property
    def label(self) -> str:
        """The names and shapes; of more than ``SHOWN`` tensors their number, and the first and last name."""
        if len(self.names) > SHOWN:
            count = len(self.names)
            first = self.names[0]
            return f"{count} tensors, {first} to {self.names[-1]}"
        labels = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = "x".join(map(str, shape)) or "1"
            labels.append(f"{name} {size}")
        return ", ".join(labels)


UNKNOWN = ("a tensor without a description", "unknown; it depends on the method")
"""Facts of a tensor that a user's own method does not describe."""


def kind_of(method: Method, name: str) -> tuple[str, str]:
    """(content of an uploaded tensor, information that it reveals); ``UNKNOWN`` for a name without a description."""
    if name in method.upload_descriptions:
        return method.upload_descriptions[name]
    if name.startswith("c/"):
        return _CONTROL
    if counts_rows(name):
        return _KINDS["count"]
    if name in _KINDS:
        return _KINDS[name]
    return _LAYER.get(name.rsplit(".", 1)[-1], UNKNOWN)


def leaving(method: Method, sizes: Sizes | None = None) -> list[Part]:
    """The tensors that one client sends in a round, at some widths (None: 512 features, 10 classes); [] for none."""
    if method.central:
        return [Part((), (), "", *_ALL, "refused")]
    sent = _trial(method, sizes or Sizes())[1]
    declared = {}
    for name, tensor in sent.items():
        declared[name] = UploadTensor(tuple(tensor.shape), tensor.dtype, counts_rows(name))
    noisy = method_takes_noise(method) and not without_noise(method, declared)
    has_batchnorm_switch = any(h.name == "bn" for h in method.hparams)
    # Tensors of one kind and dtype share a row of the table.
    parts: dict[tuple[str, str, str, str], list[tuple[str, tuple[int, ...]]]] = {}
    for name, tensor in sent.items():
        private = "refused"
        if noisy:
            private = covered_by_noise(method, numbers=not declared[name].without_noise)
        kind = kind_of(method, name)
        if has_batchnorm_switch and kind is _BATCHNORM and private == "covered":
            private = "not sent: a private run trains without BatchNorm"
        row = (*kind, str(tensor.dtype).removeprefix("torch."), private)
        parts.setdefault(row, []).append((name, tuple(tensor.shape)))
    made = []
    for (what, reveals, dtype, private), tensors in parts.items():
        names = tuple(name for name, _ in tensors)
        shapes = tuple(shape for _, shape in tensors)
        made.append(Part(names, shapes, dtype, what, reveals, private))
    # An average weighted by rows also needs the number of rows of each client.
    if made and "mean" in method.pool(method.resolve()).values():
        private = "refused"
        if noisy:
            private = "not sent: every client weighs the same"
        made.append(Part(("n",), ((),), "int64", *_ROWS, private))
    return made


def method_takes_noise(method: Method) -> bool:
    """Whether noise for privacy can be added to the uploads: the server only sums them, or merges them by class."""
    if method.central:
        return False
    if method.merges == "classes":
        return True
    return "stack" not in method.pool(method.resolve()).values()


def covered_by_noise(method: Method, *, numbers: bool) -> str:
    """How the epsilon of ``--dp-noise`` covers a tensor of a method that takes noise.

    Args:
        method: the method.
        numbers: whether the tensor holds values, as opposed to counts of rows or marks of classes that have rows.
    """
    if method.merges == "classes":
        if numbers:
            return "covered"
        return "covered; only the set of the client's classes is sent"
    if "sum" in method.pool(method.resolve()).values():
        return "covered, per row; the total number of rows is not (--dp-allow rows)"
    return "covered"


def cells(parts: Iterable[Part]) -> list[tuple[str, str, str, str, str]]:
    """(tensors, dtype, content, revealed information, whether epsilon covers them) for a table."""
    return [(p.label, p.dtype, p.what, p.reveals, p.private) for p in parts]
