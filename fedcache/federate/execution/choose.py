"""Which execution computes a run, by its bytes and its optimiser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fedcache.errors import UsageError, unknown
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method
from fedcache.federate.execution.batched import Batched
from fedcache.federate.execution.executor import Executor
from fedcache.federate.execution.gram import Gram
from fedcache.federate.execution.load import ExecutionPlan, Load
from fedcache.federate.execution.names import execution_name
from fedcache.federate.execution.sequential import Sequential

BUILT_IN: tuple[type[Executor], ...] = (Sequential, Batched, Gram)

_registered: ContextVar[tuple[type[Executor], ...]] = ContextVar("registered", default=())


@contextmanager
def registered(*executors: type[Executor]) -> Iterator[None]:
    """Further executors that may be asked for by their names, inside a ``with`` statement."""
    token = _registered.set((*_registered.get(), *executors))
    try:
        yield
    finally:
        _registered.reset(token)


def executors() -> dict[str, type[Executor]]:
    """Every executor by its name: those of the package, then those that are registered."""
    return {executor.name: executor for executor in (*BUILT_IN, *_registered.get())}


def choose(method: Method, hp: Hp, load: Load, name: str = "auto", chunk: int | None = None) -> ExecutionPlan:
    """How a run, or the points of a grid, will be computed.

    Args:
        method: what is trained.
        hp: its hyperparameters.
        load: sizes.
        name: ``auto``, or the executor to force.
        chunk: clients at once, where the executor takes several; None for the number that the cache suggests.

    Raises:
        UsageError for an unknown executor, one that cannot serve the method, or a chunk below 1.
    """
    known, name = executors(), execution_name(name)
    if name != "auto" and name not in known:
        raise unknown("execution", name, ("auto", *known))
    refusals = {k: executor.serves(method, hp, load) for k, executor in known.items()}
    able = [k for k, why in refusals.items() if not why]
    if name != "auto" and name not in able:
        raise UsageError(
            f"The execution {name!r} cannot serve {method.name}: {refusals[name]}.",
            f"Use one that can: --execution {' | '.join(able)}",
        )
    if chunk is not None and chunk < 1:
        raise UsageError(f"chunk is {chunk}, expected at least 1.", "Leave it out to let the engine pick.")
    if name == "auto":
        name = min(able, key=lambda k: known[k].cost(method, hp, load))
    return known[name].plan(method, load, chunk)
