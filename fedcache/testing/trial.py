"""Trial: runs a method with quick settings under one execution on the tiny federation, for the laws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedcache.errors import FedcacheError
from fedcache.federate.engine import run as engine
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.hyperparameters import Value, has_batchnorm
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import Snapshot, TrainingOutput
from fedcache.federate.engine.run import RunCallbacks, TrainingRun, executors
from fedcache.federate.execution.memory_estimate import Load
from fedcache.testing.federation import TinyClient, fitted, make_federation, wide

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
