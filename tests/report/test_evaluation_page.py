"""What is written of an evaluation, cell by cell and bar by bar, from figures of a few rows."""

import csv
import json
from dataclasses import replace

import pytest

from fedcache.models.evaluate import (
    BINS,
    ClassMeasures,
    ClientSpread,
    LeftOutRows,
    Measures,
    RightRows,
    RunEvaluation,
    Temperature,
)
from fedcache.report import evaluation

NO_ROWS = (0, 0.0, 0.0)
FIGURES = Measures(
    all=RightRows(8, 5, (0.3057, 0.8632)),
    macro_f1=0.6190,
    ece=0.1234,
    nll=1.23456,
    by_class=(ClassMeasures("a", 4, 5, 3), ClassMeasures("b", 4, 2, 2)),
    by_domain={"ink": RightRows(5, 4, (0.4, 0.9)), "chalk": RightRows(3, 1, (0.1, 0.8))},
    confusion=(("a", "z", 1), ("a", "a", 3), ("b", "a", 2), ("b", "b", 2)),
    bins=(*[NO_ROWS] * 12, (5, 0.85, 0.6), NO_ROWS, (3, 0.97, 2 / 3)),
    temperature=Temperature(2.51239, 0.98765, 8, at_limit=False),
)


def evaluated(run="r", **measures):
    """One model for all, on eight rows; it is right on five."""
    return RunEvaluation(
        run=run,
        digest="d" * 64,
        method="fedavg",
        model="the global model",
        trained_on="=shapes",
        backbones=("b",),
        seeds=(0,),
        softmax_temperature=1.0,
        rows="shapes, split test",
        left_out=LeftOutRows(),
        measures=replace(FIGURES, **measures),
    )


OF_CLIENTS = replace(
    evaluated("s", all=RightRows(16, 10), temperature=None),
    clients=ClientSpread({"north": 0.5, "south": 0.75}),
)


def test_a_table_has_a_line_for_all_rows_and_for_each_domain_class_and_client(tmp_path):
    evaluation.write_evaluations(tmp_path / "e.CSV", [evaluated(), OF_CLIENTS])
    with (tmp_path / "e.CSV").open(newline="") as file:
        lines = [{k: v for k, v in line.items() if v} for line in csv.DictReader(file)]
    one, other = ([line for line in lines if line["run"] == run] for run in "rs")
    whose = {
        "run": "r",
        "method": "fedavg",
        "model": "the global model",
        "rows_of": "shapes, split test",
    }
    assert one[0] == {
        **whose,
        "scope": "all",
        "rows": "8",
        "right": "5",
        "accuracy": "0.625",
        "low": "0.3057",
        "high": "0.8632",
        "f1": "0.619",
        "ece": "0.1234",
        "nll": "1.23456",
        "best_temperature": "2.51239",
    }
    assert [line["scope"] for line in one] == ["all", "domain", "domain", "class", "class"]
    assert one[2] == {
        **whose,
        "scope": "domain",
        "name": "chalk",
        "rows": "3",
        "right": "1",
        "accuracy": str(1 / 3),
        "low": "0.1",
        "high": "0.8",
    }
    assert one[3] == {
        **whose,
        "scope": "class",
        "name": "a",
        "rows": "4",
        "right": "3",
        "accuracy": "0.75",
        "precision": "0.6",
        "f1": str(6 / 9),
    }
    clients = {line["name"]: line["accuracy"] for line in other if line["scope"] == "client"}
    assert clients == {"north": "0.5", "south": "0.75"}


def test_a_table_and_json_have_no_infinity(tmp_path):
    evaluation.write_evaluations(
        tmp_path / "e.json", [evaluated(nll=float("inf"), ece=float("nan"))]
    )
    (told,) = json.loads((tmp_path / "e.json").read_text(), parse_constant=pytest.fail)
    assert told["measures"]["nll"] is None
    assert told["measures"]["ece"] is None
    assert told["measures"]["macro_f1"] == 0.619
    assert len(told["measures"]["reliability"]) == BINS
