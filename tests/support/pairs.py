"""The (method, execution) pairs that can be: tests of others are not collected, and laws say which pairs must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from federation import ids

from fedcache.federate.execution.gram import serves
from fedcache.federate.methods import METHODS

Case = tuple[str, dict[str, Any]]


def gram_serves(name: str, settings: dict[str, Any]) -> bool:
    """Whether the method with these settings can run on the Gram matrix of its rows."""
    method = METHODS[name]
    return "dual" in method.lifts and not serves(method, method.resolve("paper", settings), 1)


def fitting(case: Case, lift: str) -> Case | None:
    """The case as an execution can serve it (``dual`` takes SGD), or None."""
    name, settings = case
    declared = {h.name for h in METHODS[name].hparams}
    if lift == "dual" and "opt" in declared and "opt" not in settings:
        settings = {**settings, "opt": "sgd", "lr": 0.05}
    if lift not in METHODS[name].lifts or (lift == "dual" and not gram_serves(name, settings)):
        return None
    return name, settings


def served(
    cases: Sequence[Case], lifts: Iterable[str], only: Callable[[str], bool] = lambda _name: True
) -> pytest.MarkDecorator:
    """Parametrise ``case`` and ``lift`` over the pairs that can be, of the methods for which ``only`` holds."""
    pairs = [
        pytest.param(fitted, lift, id=f"{lift}-{ids(case)}")
        for lift in lifts
        for case in cases
        if only(case[0]) and (fitted := fitting(case, lift)) is not None
    ]
    return pytest.mark.parametrize(("case", "lift"), pairs)
