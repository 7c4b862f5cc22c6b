"""What a comparison says of runs that are not scored alike."""

from __future__ import annotations

from pathlib import Path

from arrays import ingested
from command import ok

from fedcache.report.comparison import _drawn_apart


def test_runs_that_are_scored_over_different_numbers_of_clients_are_named() -> None:
    few = {"eval_clients": [{"scored": 1500, "standard_error": 0.01}]}
    assert (
        _drawn_apart({"fedavg": {}, "fedrep": {}})
        == _drawn_apart({"fedavg": few, "fedrep": few})
        == []
    )
    (said,) = _drawn_apart({"fedavg": {}, "fedrep": few, "fedprox": {}})
    assert (
        said
        == "Scored over different numbers of clients. fedavg, fedprox: all; fedrep: 1,500 drawn."
    )


def test_a_comparison_of_a_run_with_drawn_clients_says_so(own_home: Path, tmp_path: Path) -> None:
    ingested(tmp_path)
    paths = [
        ok("train --scheme iid --clients 4 --rounds 1 --method fedrep", *more).data["path"]
        for more in ((), ("--eval-clients", 2))
    ]
    assert (
        "Scored over different numbers of clients." in ok("compare", *paths, "--over", "seeds").out
    )
