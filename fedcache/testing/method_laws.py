"""The laws that every federated method must keep; each is checked on the tiny federation.

A law is a function of a ``Trial``: a method with settings under one execution. It returns if it holds, and raises
``LawBroken`` if it does not. ``applies`` selects the trials to which a law applies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from fedcache.errors import FedcacheError
from fedcache.federate.engine import run as engine
from fedcache.federate.engine.client_data import SHARED_SUMS, Data
from fedcache.federate.engine.hyperparameters import Value, has_batchnorm
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import Snapshot, TrainingOutput
from fedcache.federate.engine.run import RunCallbacks, TrainingRun, executors
from fedcache.federate.execution.memory_estimate import Load
from fedcache.federate.partition.client_table import Client
from fedcache.testing.law import LawBroken, require, statement_of
from fedcache.testing.towers import SIDES, TinyTowers, as_images

# The tiny federation on which the laws run, and a comparison of two runs that treats NaN as unequal.
#
# It has four clients of 6, 11, 1 and 7 rows, 3 classes and 5 features. It is small, so a law takes milliseconds, and
# uneven, so a method that ignores the numbers of rows breaks a law. The first client may be a public set.

TINY = (6, 11, 1, 7)
"""Number of training rows of each client."""


TinyClient = Client
"""A client: its name and the numbers of its rows in the features."""


def make_federation(
    seed: int = 0,
    *,
    sizes: Sequence[int] = TINY,
    classes: int = 3,
    width: int = 5,
    views: int = 1,
    dtype: torch.dtype = torch.float64,
    per_client: int = 2,
    tests: int = 2,
) -> tuple[Data, list[TinyClient]]:
    """Clients of ``sizes`` training rows and ``tests`` test rows, with ``per_client`` classes each.

    Features are noisy class centres of norm 1, [N, views, width]; class text features [C, width] lie near the centres;
    rows alternate between two domains.
    """
    g = np.random.default_rng(seed)
    centres = _unit(g.standard_normal((classes, width)))
    labels = []
    clients = []
    start = 0
    for i, n in enumerate(sizes):
        client_classes = g.choice(classes, per_client, replace=False)
        labels.append(g.choice(client_classes, n + tests))
        rows = np.arange(start, start + n + tests)
        clients.append(TinyClient(f"client-{i}", rows[:n], rows[n:]))
        start += n + tests
    # The noise is small compared with the distance between two centres, so a method can learn the classes.
    y = np.concatenate(labels)
    noise = 0.4 * g.standard_normal((len(y), views, width))
    x = _unit(centres[y][:, None] + noise)
    text = _unit(centres + 0.3 * g.standard_normal(centres.shape))
    domain = np.arange(len(y)) % 2
    data = Data(
        torch.from_numpy(x).to(dtype),
        torch.from_numpy(y),
        classes,
        torch.from_numpy(text).to(dtype),
        (width,),
        torch.from_numpy(domain),
    )
    return data, clients


def wide(seed: int = 0, **kwargs: Any) -> tuple[Data, list[TinyClient]]:
    """The tiny federation with 40 features, more than twice the rows of a client, so ``gram`` serves every client."""
    return make_federation(seed, **{"width": 40, **kwargs})


def fitted(method: Method, data: Data) -> Data:
    """The federation with all inputs that a method needs: live encoders, or images instead of features."""
    if {"text tower", "image tower"} & method.needs and data.towers is None:
        # Class names of one letter each.
        names = tuple("abcdefghijklmnopqrstuvwxyz"[: data.classes])
        towers = TinyTowers(data.x.shape[-1], data.x.dtype)
        data = replace(data, names=names, towers=towers)
    if "pixels" in method.needs and data.image is None:
        data = replace(data, x=as_images(features_of(data)), image=SIDES)
    return data


def gap(a: Tensor | Mapping[Any, Any], b: Tensor | Mapping[Any, Any]) -> float:
    """Largest difference of two tensors or trees; inf if names or shapes differ or a number is NaN."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            return math.inf
        return max((gap(a[k], b[k]) for k in a), default=0.0)
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        return math.inf
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    worst = float((a.double() - b.double()).abs().max())
    # Every comparison with NaN is false, so a NaN could pass a bound.
    if math.isnan(worst):
        return math.inf
    return worst


def difference(a: TrainingOutput, b: TrainingOutput) -> float:
    """Largest difference of two runs in the server and every client's state; inf if accuracies differ."""
    if not np.array_equal(a.client_accuracy, b.client_accuracy, equal_nan=True):
        return math.inf
    return max(gap(a.server, b.server), gap(a.states, b.states))


def features_of(data: Data) -> Tensor:
    """The features of a small federation, which are in memory."""
    assert isinstance(data.x, Tensor)
    return data.x


def _unit(x: np.ndarray) -> np.ndarray:
    unit: np.ndarray = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return unit


# Trial: runs a method with quick settings under one execution on the tiny federation, for the laws.

SMALL: Mapping[str, Value] = {
    "batch": 4,
    "epochs": 2,
    "dim": 7,
    "hidden": 7,
    "proj": 4,
    "channels": 1,
    "esd_epochs": 2,
    "esd_batch": 2,
    "probe_epochs": 6,
    "probe_batch": 16,
    "n_ctx": 2,
}
"""Hyperparameter -> the value that the laws use, if the method has the hyperparameter and allows the value."""


@dataclass(frozen=True)
class Trial:
    """A method with settings, computed by one execution in float64 on the tiny federation."""

    method: Method
    execution: str = "sequential"  # one of ``method.executions``
    # Hyperparameters that are not at their defaults.
    settings: Mapping[str, Value] = field(default_factory=dict)

    @property
    def hp(self) -> dict[str, Value]:
        """All hyperparameters of the method, with their values in this trial."""
        return self.method.resolve(settings=self.settings)

    @property
    def closeness(self) -> float:
        """Largest difference, in float64, that sums in another order may cause."""
        # Methods without ``batched`` train networks, for example on images. There, BatchNorm over a few pixels and Adam
        # on dead units amplify the last bits of a sum.
        if "batched" not in self.method.executions:
            return 1e-4
        if has_batchnorm(self.hp):  # BatchNorm divides by the standard deviation of a few rows
            return 1e-8
        return 1e-10

    @property
    def closeness_of_chunks(self) -> float:
        """Largest difference between runs of one execution with more or fewer clients at once."""
        if has_batchnorm(self.hp):
            return 1e-10
        return 1e-12

    def federation(self, **kwargs: Any) -> tuple[Data, list[TinyClient]]:
        """The tiny federation, with enough features for ``gram`` if that is the execution."""
        if self.execution == "gram":
            return wide(**kwargs)
        return make_federation(**kwargs)

    def with_views(self) -> tuple[Data, list[TinyClient]]:
        """The tiny federation with four stored views of a row, or one view for ``gram``, which serves only one."""
        views = 4
        if self.execution == "gram":
            views = 1
        return self.federation(views=views)

    def run(
        self,
        pair: tuple[Data, Sequence[TinyClient]],
        *,
        method: Method | None = None,
        execution: str = "",
        state: Snapshot | None = None,
        on_round: Callable[..., None] | None = None,
        **how: Any,
    ) -> TrainingOutput:
        """Two rounds of three clients, unless ``how`` (fields of ``TrainingRun``) says otherwise."""
        method = method or self.method
        how = {"rounds": 2, "participation": 3, "dtype": torch.float64, **how}
        data = fitted(method, pair[0])
        spec = TrainingRun(method, data, pair[1], execution=execution or self.execution, **how)
        # A trial has one configuration (point), so ``on_round`` does not receive the number of the point.
        callbacks = RunCallbacks()
        if on_round is not None:
            callbacks = RunCallbacks(on_round=lambda _point, *rest: on_round(*rest))
        return engine.run(spec, self.hp, state=state, callbacks=callbacks)


def small_settings(method: Method) -> dict[str, Value]:
    """The values of ``SMALL`` that this method can take."""
    found: dict[str, Value] = {}
    for h in method.hparams:
        if h.name in SMALL:
            try:
                found[h.name] = h.parse(SMALL[h.name])
            except FedcacheError:
                # A hyperparameter with this name has another meaning in this method.
                continue
    # Every step runs an encoder, which takes time.
    if "image tower" in method.needs and "epochs" in found:
        found["epochs"] = 1
    return found


def has_sgd(method: Method) -> bool:
    """Whether a method has a hyperparameter ``opt`` that can be ``sgd``."""
    return any(h.name == "opt" and "sgd" in h.choices for h in method.hparams)


def trial_of(method: Method, execution: str, settings: Mapping[str, Value] | None) -> Trial | None:
    """The method under that execution, with SGD if ``gram`` needs it; None if the execution cannot serve it."""
    if execution not in method.executions:
        return None
    given = dict(settings or {})
    quick = small_settings(method)
    # ``gram`` serves only SGD, which needs larger learning rates than Adam.
    if execution == "gram" and has_sgd(method) and "opt" not in given:
        quick["opt"] = "sgd"
        if any(h.name == "lr" for h in method.hparams):
            quick["lr"] = 0.05
    trial = Trial(method, execution, {**quick, **given})
    # ``serves`` returns the reason why an execution cannot serve the method; "" if it can.
    reason = executors()[execution].serves(method, trial.hp, Load(head_bytes=0, clients=2))
    if reason:
        return None
    return trial


def spread(method: Method, hp: Mapping[str, Value], factor: float) -> dict[str, Value]:
    """The same hyperparameters, but every float except 0 is multiplied by ``factor`` if the product is legal."""
    out = dict(hp)
    for h in method.hparams:
        value = out[h.name]
        if h.kind != "float" or not isinstance(value, (int, float)) or value == 0.0:
            continue
        scaled = value * factor
        below = h.low is not None and scaled < h.low
        above = h.high is not None and scaled > h.high
        if not below and not above:
            out[h.name] = scaled
    return out


ALL = ("sequential", "batched", "gram")
STACKED = ("batched", "gram")
LIVE = frozenset({"pixels", "text tower", "image tower"})
"""Inputs that a method may read instead of stored features."""

PRIME_ROWS = (97, 89)
"""Numbers of training rows of a client. They differ from every other size in the tiny federation."""


@dataclass(frozen=True)
class MethodLaw:
    """One law over all methods."""

    name: str
    statement: str  # one sentence
    executions: tuple[str, ...]  # executions under which it is tried, if they serve the method
    holds: Callable[[Trial], None]  # raises LawBroken
    applies: Callable[[Trial], bool]


METHOD_LAWS: dict[str, MethodLaw] = {}
"""All laws of methods by name."""


def law(
    *executions: str, applies: Callable[[Trial], bool] = lambda _trial: True
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Decorator that adds a function to ``METHOD_LAWS``; its docstring is the statement."""

    def enter(holds: Callable[[Trial], None]) -> Callable[[Trial], None]:
        name = holds.__name__
        METHOD_LAWS[name] = MethodLaw(name, statement_of(holds), executions, holds, applies)
        return holds

    return enter


@law(*STACKED)
def executions_agree(trial: Trial) -> None:
    """Every execution gives the same result as ``sequential``, and counts the same traffic."""
    pair = trial.with_views()
    sequential = trial.run(pair, execution="sequential")
    other = trial.run(pair, chunk=2)
    require(other.execution == trial.execution, f"the run used {other.execution} execution")
    _same_run(sequential, other, trial.closeness)


@law(*STACKED)
def chunks_change_nothing(trial: Trial) -> None:
    """The number of clients that are computed at once changes no result."""
    pair = trial.with_views()
    # Three clients take part in a round, so in chunks of two the third one is computed alone.
    two, three = (trial.run(pair, chunk=k) for k in (2, 3))
    _close(two, three, trial.closeness_of_chunks)


@law(*STACKED)
def a_grid_point_is_the_run_alone(trial: Trial) -> None:
    """A point of a grid gives the same result as a separate run."""
    pair = trial.with_views()
    points = [spread(trial.method, trial.hp, factor) for factor in (1.0, 0.8, 1.1)]
    spec = TrainingRun(
        trial.method,
        fitted(trial.method, pair[0]),
        pair[1],
        rounds=2,
        participation=3,
        dtype=torch.float64,
        execution=trial.execution,
        chunk=2,
    )
    together = engine.run_points(spec, points)
    for settings, point in zip(points, together, strict=True):
        alone = replace(trial, settings=settings).run(pair, execution="sequential")
        if isinstance(point, FedcacheError):
            raise LawBroken(f"a configuration of the grid failed: {point.message}")
        _same_run(alone, point, trial.closeness)


@law(*ALL)
def the_same_seed_gives_the_same_bits(trial: Trial) -> None:
    """Two runs with one seed give the same bits, in float32 too: all draws come from ``ctx.rng``."""
    pair = trial.federation(dtype=torch.float32)
    a, b = (trial.run(pair, dtype=torch.float32) for _ in range(2))
    _close(a, b, 0.0)
    same = np.array_equal(a.evaluation.predictions, b.evaluation.predictions)
    require(same, "the predictions differ")


@law("sequential", "batched")
def the_callers_torch_state_changes_nothing(trial: Trial) -> None:
    """The caller's inference mode, no_grad, autocast, default device or default dtype change no bit of a run."""
    data, clients = trial.federation(dtype=torch.float32)  # autocast leaves float64 alone
    data = fitted(trial.method, data)  # encoders are made before the state changes
    pair = (data, clients)
    usual = trial.run(pair, dtype=torch.float32)
    x = features_of(data)
    # Each entry is a state of torch in which a caller may start a run.
    ambient: tuple[tuple[AbstractContextManager[Any], ...], ...] = (
        (torch.inference_mode(), torch.device("meta")),
        (torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16)),
        (_other_numbers(),),
    )
    for contexts in ambient:
        # Only the run itself happens in this state; the comparison with the usual run happens outside.
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            try:
                other = trial.run(pair, dtype=torch.float32)
                if usual.protocol == "global":
                    predicted = other.predict(x)
            except RuntimeError as error:
                raise LawBroken(f"the run fails: {error}") from error
        _close(usual, other, 0.0)
        if usual.protocol == "global":
            require(torch.equal(usual.predict(x), predicted), "the predictions differ")


@contextmanager
def _other_numbers() -> Iterator[None]:
    """Another default dtype, and matrix products that round to fewer bits if the processor supports it."""
    dtype = torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)


@law(*ALL)
def a_resumed_run_has_the_same_bits(trial: Trial) -> None:
    """A run that is stopped after any round and continues from its files ends with the same bits and traffic."""
    saved: dict[int, Snapshot] = {}
    pair = trial.with_views()
    whole = trial.run(pair, on_round=lambda r, _m, _t, snap: saved.update({r: snap()}))
    expected = [replace(record, seconds=0.0) for record in whole.records]
    for round_number, kept in saved.items():
        # The snapshot passes through the formats of its files, safetensors and JSON.
        snap = Snapshot(load(save(kept.tensors)), json.loads(json.dumps(kept.meta)))
        resumed = trial.run(pair, state=snap)
        _same_run(whole, resumed, 0.0, f"resumed after round {round_number}, ")
        found = [replace(record, seconds=0.0) for record in resumed.records]
        require(found == expected, f"resumed after round {round_number}, the records differ")


@law(*STACKED)
def executions_may_change_between_rounds(trial: Trial) -> None:
    """A run that is continued by another execution gives the same result."""
    pair = trial.federation()
    whole = trial.run(pair)
    changes = [("sequential", trial.execution), (trial.execution, "sequential")]
    if trial.execution == "gram":
        changes.append(("batched", "gram"))
    for first, second in changes:
        saved: list[Snapshot] = []

        # The default value binds the list of this pass of the loop.
        def keep(_round: int, _metrics: Any, _traffic: Any, snap: Any, to: Any = saved) -> None:
            to.append(snap())

        trial.run(pair, execution=first, rounds=1, on_round=keep)
        resumed = trial.run(pair, execution=second, state=saved[0])
        _close(resumed, whole, trial.closeness, f"from {first} to {second}, ")


@law("sequential", "batched")
def the_order_of_clients_does_not_matter(trial: Trial) -> None:
    """The order of the clients changes no client's model or accuracy: names identify clients, positions do not."""
    data, clients = trial.federation()
    order = [0, 2, 3, 1]  # the first client keeps its place, because it may be a public set
    a = trial.run((data, clients))
    b = trial.run((data, [clients[i] for i in order]))
    expected = a.client_accuracy[order]
    same = np.array_equal(expected, b.client_accuracy, equal_nan=True)
    require(same, f"the accuracies are {expected} and {b.client_accuracy}")
    if "sets" not in a.server:  # a server that keeps one row per client keeps it in their order
        apart = gap(a.server, b.server)
        require(apart < trial.closeness, f"the server differs by {apart:.1e}")
    for new, old in enumerate(order):
        apart = gap(a.states.get(old, {}), b.states.get(new, {}))
        require(apart < trial.closeness, f"the state of {clients[old].name} differs by {apart:.1e}")


@law(*ALL, applies=lambda trial: not trial.method.central)
def who_is_not_sampled_sends_nothing_and_keeps_its_state(trial: Trial) -> None:
    """A client that takes no part in a round sends and receives nothing in it, and its state does not change."""
    after_round: list[dict[str, Tensor]] = []
    # Two of six clients take part in each of two rounds, so at least two clients never do.
    data, clients = trial.federation(sizes=(*TINY, 9, 5))
    out = trial.run(
        (data, clients),
        participation=2,
        on_round=lambda _r, _m, _t, snap: after_round.append(snap().tensors),
    )
    for record, old, new in zip(out.records[1:], after_round[:-1], after_round[1:], strict=True):
        # Tensors of a client's state are called client/NUMBER/NAME.
        for key in old:
            folder, _, rest = key.partition("/")
            if folder == "client" and int(rest.partition("/")[0]) not in record.clients:
                same = torch.equal(old[key], new[key])
                require(same, f"{key} changed in a round of the clients {record.clients}")
    absent = set(range(len(clients))).difference(*(record.clients for record in out.records))
    require(bool(absent), "every client was sampled, so this law cannot be tried")
    # With ``feat_post=center``, for example, every client sends sums of its rows, and their number, before the first
    # round, and receives as many means.
    sums = SHARED_SUMS.get(str(trial.hp.get("feat_post")), 0) * data.x.shape[-1]
    before_rounds = (sums + bool(sums), sums)
    for c in absent:
        counted = (out.traffic.up[c], out.traffic.down[c])
        absence = f"{clients[c].name} was never sampled"
        require(counted == before_rounds, f"{absence}; its traffic is {counted}")
        require(c not in set(out.states), f"{absence} and has a state")


@law(*ALL)
def no_test_row_is_trained_on(trial: Trial) -> None:
    """Test rows that are NaN change no tensor of the server or of a client."""
    data, clients = trial.federation()
    # All results that are computed from a NaN are NaN, so a test row that was read is visible in the models.
    with_nan = features_of(data).clone()
    with_nan[np.concatenate([c.test for c in clients])] = torch.nan
    a = trial.run((data, clients))
    b = trial.run((replace(data, x=with_nan), clients))
    _same_models(a, b, "read test rows")
    if a.protocol == "global":  # a probe that evaluation trains must not read them either
        x = features_of(fitted(trial.method, data))
        same = torch.equal(a.predict(x), b.predict(x))
        require(same, "the model that is evaluated reads test rows")


@law(*ALL, applies=lambda trial: "labels" not in trial.method.reads(trial.hp))
def other_labels_change_nothing(trial: Trial) -> None:
    """A method that does not declare labels as an input trains the same model with any labels."""
    data, clients = trial.federation()
    g = torch.Generator().manual_seed(0)
    plain = trial.run((data, clients))
    missing = torch.full_like(data.y, -1)
    shuffled = data.y[torch.randperm(len(data.y), generator=g)]
    for y in (missing, shuffled):
        other = trial.run((replace(data, y=y), clients))
        _same_models(plain, other, "depend on labels")


@law(*ALL)
def a_missing_row_is_never_read(trial: Trial) -> None:
    """A row that belongs to no client and is NaN is not read, not even as padding."""
    data, clients = trial.federation()
    # Row 0 becomes the missing row, which wrong padding would read. All rows of clients move up by one.
    x = features_of(data)
    missing = torch.full_like(x[:1], torch.nan)
    y = torch.cat([data.y[:1], data.y])
    shifted = replace(data, x=torch.cat([missing, x]), y=y, domain=None)
    moved = [TinyClient(c.name, c.train + 1, c.test + 1) for c in clients]

    def watched(down: Any, state: Any, data: Any, ctx: Any) -> Any:
        # Row 0 must not be padding either, even with weight 0, because 0 times NaN is NaN.
        require(data.cut or bool((data.rows > 0).all()), "padding reads the missing row")
        finite = torch.isfinite(data.x[data.rows]).all()
        require(bool(finite), "the method received rows that are NaN")
        return trial.method.fit(down, state, data, ctx)

    plain = trial.run((data, clients))
    spied = trial.run((shifted, moved), method=replace(trial.method, fit=watched))
    _close(plain, spied, 0.0)


@law("sequential")
def no_row_leaves_a_client(trial: Trial) -> None:
    """Shapes of uploads do not depend on the number of a client's rows, and no upload holds one of its rows."""
    shapes = {}
    # All private clients have the same number of rows, so one comparison finds a shape that has it.
    for rows in PRIME_ROWS:
        first = rows
        if "public" in trial.method.needs:
            first = 5  # the first client is the public set; uploads may have an entry for each of its rows
        data, clients = make_federation(sizes=(first, rows, rows))
        sent = _uploads(trial, (data, clients))
        shapes[rows] = [tuple(t.shape) for _, t in sent]
        for name, t in sent:
            fault = f"the tensor {name!r} of the upload has one entry for each of {rows} rows"
            require(rows not in t.shape, fault)
        x = features_of(fitted(trial.method, data))
        # The first client may be a public set with rows that all clients may read.
        private = np.concatenate([c.train for c in clients[1:]])
        private_rows = x[private].flatten(0, 1).double()
        for name, t in sent:
            # An upload with the width of a row may hold rows.
            if t.dim() and t.shape[-1] == private_rows.shape[-1]:
                candidates = t.reshape(-1, t.shape[-1]).double()
                nearest = float(torch.cdist(candidates, private_rows).min())
                fault = f"the tensor {name!r} of the upload holds a client's row, which no method may send"
                require(nearest > 1e-3, fault)
    same = shapes[PRIME_ROWS[0]] == shapes[PRIME_ROWS[1]]
    require(same, "shapes of uploads depend on the number of rows")


@law(*ALL)
def traffic_adds_up(trial: Trial) -> None:
    """The traffic of a run is the sum over its clients and the sum over its rounds, for uploads and downloads."""
    out = trial.run(trial.federation(), rounds=3)
    totals = out.traffic.totals()
    for way in ("up", "down"):
        total = totals[way]
        of_clients = sum(getattr(out.traffic, way))
        of_rounds = sum(getattr(r, way) for r in out.traffic.rounds)
        parts = (of_clients, of_rounds)
        same = parts == (total, total)
        require(same, f"{total} scalars {way}; clients and rounds sum to {parts}")
    rounds = 3
    if trial.method.one_shot:
        rounds = 1
    recorded = len(out.records)
    require(recorded == rounds, f"{recorded} rounds were recorded")


@law("sequential", applies=lambda trial: trial.method.additive(trial.hp))
def additive_uploads_add_up(trial: Trial) -> None:
    """A method declared additive learns the same from many clients as from one client with all their rows."""
    _close_servers(trial, trial.with_views())


@law("sequential")
def a_prediction_does_not_see_other_test_rows(trial: Trial) -> None:
    """A test row has the same scores alone and together with other rows."""
    data, clients = trial.federation(views=4)
    out = trial.run((data, clients))
    x = features_of(fitted(trial.method, data))
    tests = torch.from_numpy(np.concatenate([c.test for c in clients]))
    rows = x[tests, 0]
    for client in (None, *sorted(out.states)):
        model = out.deployed(client)
        if model is None:
            continue
        together = model.scores(rows)
        alone = torch.cat([model.scores(rows[i : i + 1]) for i in range(len(rows))])
        apart = gap(together, alone)
        require(apart < 1e-9, f"scores of rows alone and together differ by {apart:.1e}")


@law("sequential")
def training_changes_what_is_kept(trial: Trial) -> None:
    """The second round changes a tensor of the server or of a client, unless the method has only one round."""
    if trial.method.one_shot:
        return
    pair = trial.federation()
    one, two = (trial.run(pair, rounds=r, participation=None) for r in (1, 2))
    same = gap(one.server, two.server) == 0.0 and gap(one.states, two.states) == 0.0
    require(not same, "the second round changed no tensor")


def _reads_labels_and_features(trial: Trial) -> bool:
    reads = trial.method.reads(trial.hp)
    return "labels" in reads and not reads & LIVE


@law("sequential", applies=_reads_labels_and_features)
def classes_that_lie_apart_are_learnt(trial: Trial) -> None:
    """After ten rounds of plain steps, more than half of the test rows of three separate classes are predicted right.

    If a method needs other steps or more rounds, choose its settings accordingly, or declare this law as an exception.
    """
    pair = make_federation(3, sizes=(24, 24, 24, 24), per_client=3, tests=12)
    settings: dict[str, Value] = dict(trial.settings)
    if has_sgd(trial.method) and not {"opt", "lr"} & set(settings):
        settings |= {"opt": "sgd", "lr": 0.1}
    out = replace(trial, settings=settings).run(pair, rounds=10, participation=None)
    require(out.accuracy > 0.5, f"the accuracy is {out.accuracy:.2f}, by chance it is 0.33")


def _takes_plain_steps(trial: Trial) -> bool:
    """Whether clients train one model, one step of SGD on all rows is possible, and all rows should count the same."""
    method = trial.method
    declared = {h.name for h in method.hparams}
    if not has_sgd(method) or not {"lr", "batch", "epochs"} <= declared:
        return False
    if method.uneven_rows or method.central or "public" in method.needs:
        return False
    return method.gradient and method.protocol(trial.hp) == "global"


@law("sequential", applies=_takes_plain_steps)
def all_rows_count_the_same(trial: Trial) -> None:
    """The average of one SGD step by every client on all its rows is one SGD step on the rows of all clients.

    So a client with twice the rows has twice the weight. A method with equal weights of clients, or with a loss that
    is not a mean over rows, declares this in its field ``uneven_rows``.
    """
    # One step on all rows at once; the step must depend only on the gradient.
    step_settings: dict[str, Value] = {
        "opt": "sgd",
        "lr": 0.05,
        "wd": 0.0,
        "epochs": 1,
        "batch": 1000,
        "momentum": 0.0,
        "drop_last": False,
        "bn": False,  # with BatchNorm a row's loss depends on the rows of its batch
    }
    declared = {h.name for h in trial.method.hparams}
    plain = {name: value for name, value in step_settings.items() if name in declared}
    one_step = replace(trial, settings={**trial.settings, **plain})
    _close_servers(one_step, one_step.federation())


def _close_servers(trial: Trial, pair: tuple[Data, list[TinyClient]]) -> None:
    """Require that a round of all clients, and a round of one client with all their rows, give the same server."""
    data, clients = pair
    train = np.concatenate([c.train for c in clients])
    test = np.concatenate([c.test for c in clients])
    together = TinyClient("everybody", train, test)
    many = trial.run(pair, rounds=1, participation=None)
    one = trial.run((data, [together]), rounds=1, participation=None)
    apart = gap(many.server, one.server)
    require(
        apart < 1e-10,
        f"the server of four clients and that of one with all their rows differ by {apart:.1e}",
    )


def _uploads(trial: Trial, pair: tuple[Data, list[TinyClient]]) -> list[tuple[str, Tensor]]:
    """Names and values of all tensors that clients send in the first round."""
    sent: list[tuple[str, Tensor]] = []

    def watched(*args: Any) -> Any:
        state, up = trial.method.fit(*args)
        sent.extend(up.items())
        return state, up

    trial.run(pair, method=replace(trial.method, fit=watched), rounds=1, participation=None)
    return sent


def _same_models(a: TrainingOutput, b: TrainingOutput, fault: str) -> None:
    """Require that two runs end with the same bits at the server and at the clients."""
    require(gap(a.server, b.server) == 0.0, f"tensors of the server {fault}")
    require(gap(a.states, b.states) == 0.0, f"tensors of clients {fault}")


def _same_run(a: TrainingOutput, b: TrainingOutput, at_most: float, when: str = "") -> None:
    """Require that two runs are close and count the same traffic."""
    _close(a, b, at_most, when)
    require(a.traffic == b.traffic, f"{when}the traffic differs")


def _close(a: TrainingOutput, b: TrainingOutput, at_most: float, when: str = "") -> None:
    """Require that two runs differ by ``at_most`` this much; ``when`` begins the sentence of the error."""
    apart = difference(a, b)
    if apart > at_most:
        raise LawBroken(f"{when}the two runs differ by {apart:.1e}, more than {at_most:g}")
