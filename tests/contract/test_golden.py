"""The golden figures: what every method computes on a tiny store is what it computed before, to 1e-6.

A figure that changes on purpose is written by ``pytest tests/contract/test_golden.py --update-golden -k NAME``, with
the reason in the commit. The bits are compared by ``python tools/golden.py compare``, on one machine.
"""

import json

import pytest
from draws import FULL
from loaded_files import tool
from methods_tried import tried

from fedcache.federate.methods import METHODS

golden = tool("golden")


@pytest.fixture(scope="session")
def stage():
    with golden.stage() as made:
        yield made


@pytest.fixture(scope="session")
def table():
    return json.loads(golden.TABLE.read_text())


@pytest.mark.parametrize("name", METHODS)
def test_a_method_computes_what_it_computed(name, stage, table, request):
    if request.config.getoption("--update-golden"):
        golden.write_in_table(name, golden.table_of(name, stage))
        return
    # Laws hold the other executions to the sequential one, at 1e-10, and all methods share the optimisers; the full
    # draw computes all of them.
    ending = "/sequential" if tried([name]) else "/paper/sequential"
    ending = "" if FULL else ending
    want = {
        case: figures
        for case, figures in table.items()
        if case.startswith(f"{name}/") and case.endswith(ending)
    }
    got = golden.table_of(name, stage, ending)
    assert set(got) == set(want)
    assert any("tensors" in figures for figures in want.values()), "nothing of it was ever computed"
    loose = golden.live(METHODS[name])
    wrong = [line for case in want for line in golden.off(case, want[case], got[case], loose=loose)]
    assert not wrong, "\n".join(wrong)


def test_the_table_is_of_these_methods(table):
    assert {case.partition("/")[0] for case in table} == set(METHODS)


def test_every_difference_is_found():
    a = {
        "m/paper/sequential": {"accuracy.mean": 0.5, "upload.W.sha256": "aa"},
        "m/paper/gram": {"refused": 2, "_why": ""},
    }
    nearly = {
        "m/paper/sequential": {
            "accuracy.mean": 0.5000000000000001,
            "upload.W.sha256": "aa",
            "new": None,
        }
    }
    assert golden.differences(a, a) == []
    assert golden.differences(
        a, nearly | {"m/paper/gram": {"refused": 2, "_why": "in other words"}}
    ) == [
        ("m/paper/sequential", "accuracy.mean", 0.5, 0.5000000000000001),
        ("m/paper/sequential", "new", "(absent)", None),
    ]
    assert golden.differences(a, nearly, ["new", "accuracy.*"]) == [
        ("m/paper/gram", "the case", "recorded", "(absent)")
    ]
    assert len(golden.differences({"c": {"x": 0.0}}, {"c": {"x": -0.0}})) == 1


def test_a_figure_of_the_table_may_move_by_rounding_alone():
    want = {
        "accuracy": 0.5,
        "per_client": [0.5, None],
        "bytes": [8, 8],
        "tensors": {"upload.W": [0.0, 3.0]},
    }
    assert (
        golden.off("c", want, {**want, "tensors": {"upload.W": [2e-6, 3.000001]}}, loose=False)
        == []
    )
    for changed in (
        {"accuracy": 0.51},
        {"per_client": [0.5, 0.5]},
        {"bytes": [8, 12]},
        {"tensors": {"upload.W": [0.0, 3.0001]}},
        {"tensors": {"upload.W": [1e-4, 3.0]}},
        {"tensors": {"upload.V": [0.0, 3.0]}},
    ):
        assert golden.off("c", want, want | changed, loose=False), changed
    assert golden.off("c", want, {"refused": 2}, loose=False)
