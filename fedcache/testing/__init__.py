"""The laws of fedcache as tests, for your own methods, partition schemes, backbones, datasets, rules and executors.

In a test of your package:

    import pytest
    from fedcache.testing import method_laws
    from my_package import METHOD

    @pytest.mark.parametrize("law", method_laws(METHOD), ids=str)
    def test_a_law(law):
        law()

``check_method(METHOD)`` tries all of them at once. fedcache's own methods are tested with the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fedcache.config import Home
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import TrainingOutput
from fedcache.federate.engine.run import registered
from fedcache.federate.execution.executor import Executor
from fedcache.federate.methods import METHODS
from fedcache.federate.partition.partition import SCHEMES
from fedcache.federate.partition.scheme import Scheme
from fedcache.plugins import note_named
from fedcache.testing.aggregator_laws import AGGREGATOR_LAWS, Vote
from fedcache.testing.backbone_laws import BACKBONE_LAWS, BackboneTrial
from fedcache.testing.dataset_laws import DATASET_LAWS, open_dataset
from fedcache.testing.law import Check, LawBroken, check_all, less_exceptions, statement_of
from fedcache.testing.method_laws import (
    METHOD_LAWS,
    MethodLaw,
    TinyClient,
    Trial,
    difference,
    gap,
    make_federation,
    small_settings,
    trial_of,
)
from fedcache.testing.partition_laws import PARTITION_LAWS, SchemeTrial, small_columns

__all__ = [
    "AGGREGATOR_LAWS",
    "BACKBONE_LAWS",
    "DATASET_LAWS",
    "METHOD_LAWS",
    "PARTITION_LAWS",
    "Check",
    "LawBroken",
    "TinyClient",
    "aggregator_laws",
    "backbone_laws",
    "check_aggregator",
    "check_backbone",
    "check_dataset",
    "check_executor",
    "check_method",
    "check_partition",
    "dataset_laws",
    "difference",
    "executor_laws",
    "gap",
    "make_federation",
    "method_laws",
    "open_dataset",
    "partition_laws",
    "run_method",
    "statement_of",
]

T = TypeVar("T")

Exceptions = Mapping[str, str]
"""Name of a law -> the reason why it need not hold."""


def method_laws(
    method: Method | str,
    settings: Mapping[str, Value] | None = None,
    *,
    exceptions: Exceptions | None = None,
) -> list[Check]:
    """The laws that apply to this method, under every execution that serves it.

    Args:
        method: the method, or the name of an installed one.
        settings: hyperparameters that are not at their defaults; sizes such as ``batch`` and ``epochs`` are small
            unless they are given here.
        exceptions: laws that need not hold, each with the reason.

    Raises:
        UsageError for a method, a setting or a law that does not exist.
    """
    tried = _find(METHODS, method)
    tried.resolve(settings=settings or {})  # raises for an illegal setting
    checks = []
    for law in METHOD_LAWS.values():
        for execution in law.executions:
            trial = trial_of(tried, execution, settings)
            if trial is not None and law.applies(trial):
                subject = f"The method {tried.name} under {execution} execution"
                attempt = partial(law.holds, trial)
                checks.append(Check(subject, f"{law.name}[{execution}]", law.statement, attempt))
    return less_exceptions(checks, exceptions, METHOD_LAWS)


def run_method(
    method: Method | str,
    settings: Mapping[str, Value] | None = None,
    federation: tuple[Data, Sequence[TinyClient]] | None = None,
    *,
    rounds: int = 2,
    participation: int | float | None = None,
    execution: str = "sequential",
    **how: Any,
) -> TrainingOutput:
    """Train a method on a small federation in float64, as the laws do; for your own tests.

    Args:
        method: the method, or the name of an installed one.
        settings: hyperparameters that are not at their defaults.
        federation: a result of ``make_federation``; None for its default.
        rounds: number of rounds of training; a one-shot method takes one.
        participation: clients per round: None for all, a number, or a share.
        execution: execution mode, such as ``sequential`` or ``batched``.
        how: other fields of ``fedcache.federate.engine.run.TrainingRun``.
    """
    trial = Trial(_find(METHODS, method), execution, dict(settings or {}))
    pair = federation or make_federation()
    return trial.run(pair, rounds=rounds, participation=participation, **how)


def _find(known: Mapping[str, T], thing: T | str) -> T:
    """The object itself if ``thing`` is one, or the installed object with this name."""
    if isinstance(thing, str):
        return known[thing]
    return thing


def partition_laws(
    scheme: Scheme | str, *, exceptions: Exceptions | None = None, **args: Any
) -> list[Check]:
    """The laws of a partition scheme, on 480 rows of 4 classes, 2 domains and a column ``site`` of 6 values.

    Args:
        scheme: the scheme, or the name of an installed one.
        exceptions: laws that need not hold, each with the reason.
        args: arguments of the scheme that are not at their defaults.
    """
    trial = SchemeTrial(_find(SCHEMES, scheme), args, small_columns())
    return _checks(f"The scheme {trial.scheme.name}", PARTITION_LAWS, trial, exceptions)


def backbone_laws(
    name: str,
    *,
    weights: Mapping[str, Path] | None = None,
    home: Path | None = None,
    exceptions: Exceptions | None = None,
) -> list[Check]:
    """The laws of a backbone, on six random images, texts or rows, depending on what the backbone reads.

    Args:
        name: a backbone of the table or of an entry point, or ``module:my_package.net:build`` or ``onnx:FILE``.
        weights: files by name, as in ``--weights``.
        home: folder of settings and weights; None for ``$FEDCACHE_HOME``.
        exceptions: laws that need not hold, each with the reason.
    """
    note_named(name)
    if home is None:
        used = Home.from_environment()
    else:
        used = Home(home)
    trial = BackboneTrial(name, dict(weights or {}), used)
    return _checks(f"The backbone {name}", BACKBONE_LAWS, trial, exceptions)


def dataset_laws(spec: str, *, exceptions: Exceptions | None = None) -> list[Check]:
    """The laws of a reader of datasets, on a dataset that it reads.

    Args:
        spec: the dataset, as after ``--dataset``; a small one, because every law reads it again.
        exceptions: laws that need not hold, each with the reason.
    """
    return _checks(f"The dataset {spec}", DATASET_LAWS, spec, exceptions)


def aggregator_laws(
    rule: str | Callable[..., Tensor], *, exceptions: Exceptions | None = None
) -> list[Check]:
    """The laws of an aggregation rule, which is a text of ``--aggregate`` or a function V [m, d] -> [d]."""
    if isinstance(rule, str):
        name = rule
    else:
        name = getattr(rule, "__name__", "given")
    return _checks(f"The rule {name}", AGGREGATOR_LAWS, Vote(rule), exceptions)


def executor_laws(
    executor: type[Executor], methods: Sequence[str] = ("fedavg", "fed3r", "fedpcl")
) -> list[Check]:
    """The laws of methods, which must also hold under your own executor."""
    checks = []
    for name in methods:
        tried = METHODS[name]
        trial = Trial(tried, executor.name, small_settings(tried))
        subject = f"The executor {executor.name} with the method {name}"
        for law in METHOD_LAWS.values():
            if law.applies(trial):
                attempt = partial(_with_executor, executor, law, trial)
                checks.append(Check(subject, f"{law.name}[{name}]", law.statement, attempt))
    return checks


def _with_executor(executor: type[Executor], law: MethodLaw, trial: Trial) -> None:
    with registered(executor):
        law.holds(trial)


def _checks(
    subject: str,
    laws: Mapping[str, Callable[[Any], None]],
    trial: object,
    exceptions: Exceptions | None,
) -> list[Check]:
    """The checks of these laws on one object, without the exceptions."""
    checks = []
    for name, law in laws.items():
        checks.append(Check(subject, name, statement_of(law), partial(law, trial)))
    return less_exceptions(checks, exceptions, laws)


def check_method(
    method: Method | str,
    settings: Mapping[str, Value] | None = None,
    *,
    exceptions: Exceptions | None = None,
) -> list[str]:
    """Try ``method_laws``. Returns the names of the laws that hold; raises LawBroken, with all that do not."""
    return check_all(method_laws(method, settings, exceptions=exceptions))


def check_partition(
    scheme: Scheme | str, *, exceptions: Exceptions | None = None, **args: Any
) -> list[str]:
    """Try ``partition_laws``. Returns the names of the laws that hold; raises LawBroken, with all that do not."""
    return check_all(partition_laws(scheme, exceptions=exceptions, **args))


def check_backbone(
    name: str,
    *,
    weights: Mapping[str, Path] | None = None,
    home: Path | None = None,
    exceptions: Exceptions | None = None,
) -> list[str]:
    """Try ``backbone_laws``. Returns the names of the laws that hold; raises LawBroken, with all that do not."""
    return check_all(backbone_laws(name, weights=weights, home=home, exceptions=exceptions))


def check_dataset(spec: str, *, exceptions: Exceptions | None = None) -> list[str]:
    """Try ``dataset_laws``. Returns the names of the laws that hold; raises LawBroken, with all that do not."""
    return check_all(dataset_laws(spec, exceptions=exceptions))


def check_aggregator(
    rule: str | Callable[..., Tensor], *, exceptions: Exceptions | None = None
) -> list[str]:
    """Try ``aggregator_laws``. Returns the names of the laws that hold; raises LawBroken, with all that do not."""
    return check_all(aggregator_laws(rule, exceptions=exceptions))


def check_executor(
    executor: type[Executor], methods: Sequence[str] = ("fedavg", "fed3r", "fedpcl")
) -> list[str]:
    """Try ``executor_laws``. Returns the names of the laws that hold; raises LawBroken, with all that do not."""
    return check_all(executor_laws(executor, methods))
