"""The words of an earlier release still name the executions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from federation import difference, go_tiny, wide

from fedcache.config import FORMER
from fedcache.federate.engine.method import execution_name
from fedcache.federate.methods import METHODS


@pytest.mark.parametrize(("former", "now"), FORMER.items())
def test_a_former_word_asks_for_the_same_execution(former, now):
    assert execution_name(former) == execution_name(now) == now
    a, b = (
        go_tiny("fedavg", {"opt": "sgd", "lr": 0.05}, *wide(), execution=word)
        for word in (former, now)
    )
    assert a.execution == b.execution == now
    assert difference(a, b) == 0.0


def test_a_method_may_name_its_executions_by_the_former_words():
    assert replace(METHODS["fedavg"], lifts=("loop", "stack")).executions == (
        "sequential",
        "batched",
    )
    assert replace(METHODS["fedavg"], name="mine").executions == METHODS["fedavg"].executions
    assert METHODS["fedavg"].to_dict()["lifts"] == METHODS["fedavg"].to_dict()["executions"]
