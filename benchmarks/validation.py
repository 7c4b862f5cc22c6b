"""What update validation costs: its share of the time of a round, under every execution, in one process.

The clock runs inside the functions that validate (declared names, shapes and counts, and the search for numbers that
are not finite), so the share is that of one and the same run. All rounds do the same work, and another job on the
machine only ever adds time: the quickest validation of a run over its quickest round is the share without that job, and
the row has the median of several runs. (Reading the processor's time would cost more than validating an upload does.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks import clean
from benchmarks.measure import Row, make_row
from fedcache.federate.engine import run_state
from fedcache.federate.engine.run import RunCallbacks, TrainingRun, run
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.execution.grid_batch import GridBatch
from fedcache.federate.methods import METHODS
from fedcache.federate.trust.pipeline import UploadPipeline
from fedcache.federate.trust.update_validation import UpdateValidation

BAR = 2.0
"""Per cent of a round."""
ROUNDS = 22
RUNS = 5
FIRST = 2
"""Rounds that are not counted: what is made once is made in them."""
TIMED: tuple[tuple[Any, str], ...] = (
    (UpdateValidation, "__init__"),
    (UpdateValidation, "is_sound"),
    (UploadPipeline, "accepts_batch"),
    (RunState, "expected_uploads"),
    (run_state, "all_bounded"),
    (RunState, "check_finite"),
    (GridBatch, "check_finite"),
)
SETTINGS = {"opt": "sgd", "lr": 0.05, "head": "linear"}
EXECUTIONS = ("sequential", "batched", "gram")


class Clock:
    """Seconds inside the timed functions, each counted once however they call one another."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, on the clock."""

        @wraps(call)
        def run(*args: Any, **how: Any) -> Any:
            if self._inside:
                return call(*args, **how)
            self._inside = True
            begin = time.perf_counter()
            try:
                return call(*args, **how)
            finally:
                self.seconds += time.perf_counter() - begin
                self._inside = False

        return run


@contextmanager
def on_the_clock(timed: Iterable[tuple[Any, str]]) -> Iterator[Clock]:
    """Time spent in functions, each given by its owner and its name, while this is entered."""
    clock = Clock()
    with ExitStack() as stack:
        for owner, name in timed:
            stack.enter_context(patch.object(owner, name, clock.timed(getattr(owner, name))))
        yield clock


def share(made: clean.Federation, execution: str) -> float:
    """The share of a round's time that validation takes, of the quickest of a run."""
    method = METHODS["fedavg"]
    spec = TrainingRun(method, made.data, made.clients, ROUNDS, execution=execution)
    marks = [0.0]
    with on_the_clock(TIMED) as clock:
        after = RunCallbacks(after_round=lambda _number: marks.append(clock.seconds))
        out = run(spec, method.resolve("paper", SETTINGS), callbacks=after)
    validation = min(end - begin for begin, end in list(pairwise(marks))[FIRST:])
    return validation / min(r.seconds for r in out.records[FIRST:])


def rows() -> list[Row]:
    torch.set_num_threads(1)
    made = clean.federation(100, 50, 10, 1024)
    found = {name: [share(made, name) for _ in range(RUNS)] for name in EXECUTIONS}
    spreads = {
        name: [100.0 * float(q) for q in np.quantile(taken, [0.25, 0.5, 0.75])]
        for name, taken in found.items()
    }
    worst = max(spreads.values(), key=lambda spread: spread[1])
    each = "; ".join(
        f"{name} {spread[1]:.2f} [{spread[0]:.2f} {spread[2]:.2f}]"
        for name, spread in spreads.items()
    )
    return [
        make_row(
            "update validation, fedavg, 100 clients",
            "< 2 % of a round, median of 5 runs; the dearest execution",
            worst[1],
            [round(q, 3) for q in worst],
            worst[1] < BAR,
            detail=f"linear head, C=10, D=1024, 50 rows a client, 1 thread; % of a round: {each}",
        )
    ]
