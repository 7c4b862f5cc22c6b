"""Asynchronous rounds and simulated time from the command line and from Python: identity, results, grids, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import fedcache, ok

import fedcache as fc
from fedcache.errors import Exit, FedcacheError

M = 12
WORDS = ("--scheme", "iid", "--clients", M, "--rounds", 4, "--participation", 6, "--set", "head=linear")


def ingested(place: Path) -> Path:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 240)
    x = (np.eye(3, 6)[y] + 0.6 * rng.standard_normal((240, 6))).astype(np.float32)
    np.savez(place / "rows.npz", embeddings=x, labels=y, split=(np.arange(240) >= 180).astype(np.int8))
    ok("ingest", place / "rows.npz", "--name", "few")
    return place


@pytest.fixture
def store(once: Callable[[Callable[[Path], Path]], Path]) -> Path:
    return once(ingested)


def result_of(path: str | Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((Path(path) / "result.json").read_text())
    return result


def test_an_asynchronous_run_is_another_run_and_says_what_was_simulated(store: Path) -> None:
    plain = ok("train", "--method", "fedavg", *WORDS)
    assert "timing" not in result_of(plain.data["path"])
    done = ok("train", "--method", "fedavg", "--asynchronous", 3, "--eval-every", 2, "--seeds", "0,1", *WORDS)
    assert done.data["path"] != plain.data["path"]
    result = result_of(done.data["path"])
    timing = result["timing"]
    said = {"asynchronous": 3, "server_step": 1.0, "staleness_power": 0.5, "client_durations": "half-normal"}
    assert said.items() <= timing.items()
    rounds = [json.loads(line) for line in (Path(done.data["path"]) / "rounds.jsonl").read_text().splitlines()]
    assert all(len(r["clients"]) == 3 for r in rounds)
    last = [r["diagnostics"]["simulated_time"] for r in rounds if r["round"] == 4]
    assert timing["simulated_time"] == pytest.approx(np.mean(last))
    assert timing["updates"] == 2 * 4 * 3
    stale = [r["diagnostics"]["staleness_mean"] for r in rounds]
    assert timing["staleness_mean"] == pytest.approx(np.mean(stale))
    assert timing["staleness_max"] == max(r["diagnostics"]["staleness_max"] for r in rounds) > 0
    curve = result["accuracy"]["per_round"]
    assert [p["round"] for p in curve] == [2, 4]
    assert curve[1]["simulated_time"] == timing["simulated_time"] > curve[0]["simulated_time"]
    shown = fedcache("train", "--method", "fedavg", "--asynchronous", 3, "--eval-every", 2, "--seeds", "0,1", *WORDS)
    assert "6 at a time, 4 steps of 3 updates" in shown.out


@pytest.mark.slow
def test_the_configuration_of_an_asynchronous_run_runs_it_again(store: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow.csv"
    slow.write_text("client,duration\n" + "".join(f"client-{i:02},{1 + i % 3}\n" for i in range(M)))
    words = ("--asynchronous", 2, "--client-durations", slow, "--server-step", 0.5, "--staleness-power", 1)
    done = ok("train", "--method", "fedprox", *words, *WORDS)
    again = ok("train", "--config", Path(done.data["path"]) / "config.toml")
    assert again.data["reused"]
    moved = tmp_path / "moved.csv"
    moved.write_bytes(slow.read_bytes())
    same = ("--asynchronous", 2, "--client-durations", moved, "--server-step", 0.5, "--staleness-power", 1)
    assert ok("train", "--method", "fedprox", *same, *WORDS).data["reused"]
    moved.write_text(slow.read_text().replace("client-00,1", "client-00,9"))
    assert ok("train", "--method", "fedprox", *same, *WORDS).data["path"] != done.data["path"]
    for other in (("--server-step", 1), ("--staleness-power", 0)):
        assert ok("train", "--method", "fedprox", *words, *other, *WORDS).data["path"] != done.data["path"]


@pytest.mark.slow
def test_points_and_jobs_of_a_grid_are_the_runs_alone(store: Path) -> None:
    sweep = ("--sweep", "asynchronous=2,3", "--sweep", "lr=0.05,0.2", "--sweep", "staleness-power=0,0.5")
    how = ("--set", "opt=sgd", *WORDS)
    one = ok("grid", "--method", "fedavg", *sweep, "--exact", *how)
    points = {tuple(sorted(p["sweep"].items())): result_of(p["path"]) for p in one.data["points"]}
    assert len(points) == 8
    assert len({json.dumps(p["accuracy"]) + json.dumps(p["timing"]) for p in points.values()}) > 2
    for values in points:
        swept = dict(values)
        words = ("--asynchronous", swept["asynchronous"], "--staleness-power", swept["staleness-power"])
        alone = ok("train", "--method", "fedavg", *words, "--set", f"lr={swept['lr']}", *how)
        assert alone.data["reused"]
    together = ok("grid", "--method", "fedavg", *sweep, "--fresh", "--jobs", 2, *how)
    for p in together.data["points"]:
        known, found = points[tuple(sorted(p["sweep"].items()))], result_of(p["path"])
        assert found["timing"] == known["timing"]
        assert found["traffic"] == known["traffic"]
        assert found["accuracy"]["mean"] == pytest.approx(known["accuracy"]["mean"], abs=0.02)


def test_python_takes_the_same_words_and_tells_time_round_by_round(store: Path) -> None:
    parts, told = fc.partition("few", "iid", clients=M), []
    run = fc.train(
        "fedrep", "few", parts, rounds=3, participation=4, asynchronous=2, client_durations="rows", on_round=told.append
    )
    assert [set(r.diagnostics) >= {"simulated_time", "staleness_mean"} for r in told] == [True] * 3
    assert run.result["timing"]["client_durations"] == "rows"
    assert {"simulated_time", "staleness_max"} <= set(run.frame().columns)
    waiting = fc.train("fedrep", "few", parts, rounds=3, participation=4, client_durations="rows")
    plain = fc.train("fedrep", "few", parts, rounds=3, participation=4)
    assert waiting.accuracy.mean == plain.accuracy.mean
    assert set(waiting.result["timing"]) == {"client_durations", "simulated_time"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--asynchronous", "0"), "--asynchronous"),
        (("--asynchronous", "13"), f"--asynchronous 13, but there are {M} clients"),
        (("--asynchronous", "2", "--server-step", "0"), "--server-step 0: expected a number above 0."),
        (("--asynchronous", "2", "--server-step", "nan"), "--server-step nan: expected a number above 0."),
        (("--asynchronous", "2", "--staleness-power", "-1"), "--staleness-power -1: expected 0 or more."),
        (("--server-step", "0.5"), "--server-step is of an asynchronous server."),
        (("--staleness-power", "0"), "--staleness-power is of an asynchronous server."),
        (("--client-durations", "gamma"), "--client-durations gamma: there is no such file."),
        (("--asynchronous", "2", "--aggregate", "median"), "the plain mean of uploads, and --aggregate is given."),
        (
            ("--asynchronous", "2", "--dp-clip", "1", "--dp-noise", "1"),
            "the plain mean of uploads, and --dp-clip is given.",
        ),
        (("--asynchronous", "2", "--max-share", "0.5"), "the plain mean of uploads, and --max-share is given."),
        (("--asynchronous", "2", "--attack", "nan:0.2"), "the plain mean of uploads, and --attack is given."),
        (
            ("--client-durations", "rows", "--dp-clip", "1", "--dp-noise", "1"),
            "--client-durations would tell of a private run who took",
        ),
        (("--asynchronous", "2", "--client-sampling", "poisson"), "--client-sampling poisson has no such number."),
    ],
)
def test_what_does_not_go_with_asynchronous_rounds_is_answered(store: Path, words: tuple[str, ...], why: str) -> None:
    refused = fedcache("train", "--method", "fedavg", *words, *WORDS)
    assert refused.code == Exit.USAGE
    assert why in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("scaffold", "its server does more with uploads than take their mean"),
        ("fedproto", "its server does more with uploads than take their mean"),
        ("fed3r", "it takes one round"),
        ("solo", "its clients send nothing"),
        ("central", "trains on one set"),
    ],
)
def test_methods_whose_uploads_cannot_wait_are_refused_by_name(store: Path, method: str, why: str) -> None:
    refused = fedcache("train", "--method", method, "--asynchronous", 2, "--scheme", "iid", "--clients", M)
    assert refused.code == Exit.USAGE
    assert why in refused.err
    told = ok("methods", "info", method).data
    assert told["asynchronous"] is False
    with pytest.raises(FedcacheError, match=why):
        fc.grid(method, "few", fc.partition("few", "iid", clients=M), asynchronous=[2, 3])
    assert ok("methods", "info", "fedrep").data["asynchronous"] is True


def test_one_set_has_no_clients_that_take_time(store: Path) -> None:
    refused = fedcache("train", "--method", "central", "--client-durations", "equal", "--scheme", "iid", "--clients", M)
    assert refused.code == Exit.USAGE
    assert "central trains on one set, and has no clients that take time." in refused.err
