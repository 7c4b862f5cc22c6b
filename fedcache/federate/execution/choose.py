"""Choice of the executor that is cheapest for a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fedcache.errors import UsageError, unknown
from fedcache.federate.engine.hyperparameters import Hp
from fedcache.federate.engine.method import Method
from fedcache.federate.execution.batched import Batched
from fedcache.federate.execution.executor import Executor, Sequential
from fedcache.federate.execution.gram import Gram
from fedcache.federate.execution.memory_estimate import ExecutionPlan, Load
from fedcache.plugins import find, offer, plugins

BUILT_IN: tuple[type[Executor], ...] = (Sequential, Batched, Gram)

offer("executors", ["auto", *(executor.name for executor in BUILT_IN)])

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
    """Every executor that may be chosen, by its name: those of the package, then those of a ``with registered``."""
    return {executor.name: executor for executor in (*BUILT_IN, *_registered.get())}


def find_executor(name: str) -> type[Executor]:
    """The executor of that name; a plug-in serves those alone who ask for it.

    Raises UsageError, with "did you mean", for a name that nobody has.
    """
    known = executors()
    if name in known:
        return known[name]
    plugin = find("executors", name)
    if plugin is None:
        raise unknown("execution", name, ("auto", *known, *plugins("executors")))
    made: type[Executor] = plugin.loaded(Executor)
    return made


def choose(
    method: Method, hp: Hp, load: Load, name: str = "auto", chunk: int | None = None
) -> ExecutionPlan:
    """How a run, or the points of a grid, will be computed.

    Raises UsageError for an unknown executor, one that cannot serve the method, or a chunk below 1.

    Args:
        method: what is trained.
        hp: its hyperparameters.
        load: sizes.
        name: ``auto``, or the executor to force.
        chunk: clients at once, where the executor takes several; None for the number that the cache suggests.
    """
    known = executors()
    if name != "auto":
        known[name] = find_executor(name)
    refusals = {k: executor.serves(method, hp, load) for k, executor in known.items()}
    able = [k for k, why in refusals.items() if not why]
    if name != "auto" and name not in able:
        why = refusals[name]
        others = " | ".join(able)
        raise UsageError(
            f"The execution {name!r} cannot serve {method.name}: {why}.",
            f"Use one that can: --execution {others}",
        )
    if chunk is not None and chunk < 1:
        raise UsageError(
            f"chunk is {chunk}, expected at least 1.", "Leave it out to let the engine pick."
        )
    if name == "auto":
        # ties go to the first: built-in before registered ones
        name = min(able, key=lambda k: known[k].cost(method, hp, load))
    return known[name].plan(method, load, chunk)
